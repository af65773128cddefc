"""The condition that a line is indented too little, as in llama-server (`server-context.cpp`)."""

from __future__ import annotations

from ....backends.incremental_regex import byte_size
from .condition import Stop
from .ending import StopReason


class IndentCondition:
    """Each line except the first must begin with this many spaces and tabs; an empty line has none.

    The line is cut off from its first other character on.
    """

    reason = StopReason("indent", cuts_text=True)
    undecided = None

    def __init__(self, n_indent: int):
        self._n_indent = n_indent
        self._spaces: int | None = None
        """Spaces of the present line so far; None: it has other characters, or is the first."""

    def check_text(self, text: str, at: int) -> Stop | None:
        """See `TextCondition.check_text`."""
        for character in text:
            end = at + byte_size(character)
            if self._spaces is not None and character in " \t":
                self._spaces += 1
            elif self._spaces is not None and self._spaces < self._n_indent:
                return Stop(end, at, self.reason, f"n-indent {self._n_indent}")
            else:
                self._spaces = 0 if character == "\n" else None
            at = end
        return None
