"""The conditions on a turn's text, which `turn_conditions` combines."""

from __future__ import annotations

import re
from collections.abc import Callable

from ....backends.texts.incremental_regex import Pattern, RegexMatcher, byte_size
from .ending import Stop, StopReason, TextCondition
from .sentences import SentenceEnds

COMPLETE_ANSWER = StopReason("complete", cuts_text=True)
WITHHELD_BYTES_MAX = 4096
"""At most this much text is withheld because a pattern may still match it."""
_CLOSING = {"{": "}", "[": "]"}
_BLANK = " \t\r\n"
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)", re.DOTALL)


class CharacterCondition:
    """A condition that is decided at each character, which is then cut off unless *keeps_last*."""

    reason = COMPLETE_ANSWER
    undecided = None
    detail: str
    keeps_last = False

    def check_text(self, text: str, at: int) -> Stop | None:
        """See `TextCondition.check_text`."""
        for character in text:
            end = at + byte_size(character)
            if self.add_character(character):
                return Stop(end, end if self.keeps_last else at, self.reason, self.detail)
            at = end
        return None

    def add_character(self, character: str) -> bool:
        """Add the next character; return whether the condition is met."""
        raise NotImplementedError


class JsonCondition(CharacterCondition):
    """The answer begins, behind white space, with a JSON object, array or string (RFC 8259) that is
    closed. Brackets within strings do not count. An answer that begins otherwise, or closes a
    bracket that is not open, never meets the condition.
    """

    detail = "json"
    keeps_last = True

    def __init__(self) -> None:
        self._open: list[str] | None = []
        """The expected closing brackets, the innermost last, or None if the answer is not JSON."""
        self._started = self._quoted = self._escaped = False

    def add_character(self, character: str) -> bool:
        """See `CharacterCondition.add_character`."""
        if self._open is None:
            return False
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._started = self._quoted = True
        elif character in _CLOSING:
            self._started = True
            self._open.append(_CLOSING[character])
        elif character in "]}" or (not self._started and character not in _BLANK):
            closes = bool(self._open) and self._open.pop() == character
            self._open = self._open if closes else None
        return self._started and not self._quoted and self._open == []


class FenceCondition(CharacterCondition):
    """A fenced block (CommonMark 0.31.2, section 4.5) is closed; its last line's end is cut off."""

    detail = "fence"

    def __init__(self) -> None:
        self._line: list[str] = []
        self._fence = ""
        """The fence that opened the block; empty outside of one."""

    def add_character(self, character: str) -> bool:
        """See `CharacterCondition.add_character`."""
        if character != "\n":
            self._line.append(character)
            return False
        found = _FENCE.fullmatch("".join(self._line))
        self._line.clear()
        if found is None:
            return False
        fence, rest = found.groups()
        if not self._fence:
            self._fence = "" if fence[0] == "`" and "`" in rest else fence
            return False
        return not rest.strip() and fence[0] == self._fence[0] and len(fence) >= len(self._fence)


class SentenceCondition(SentenceEnds, CharacterCondition):
    """A sentence has ended; the text behind it is cut off."""

    detail = "sentence"


class IndentCondition(CharacterCondition):
    """Each line except the first must begin with *n_indent* spaces and tabs, as in llama-server
    (`server-context.cpp`); so an empty line ends the answer, too. A line with fewer is cut off
    behind them.
    """

    reason = StopReason("indent", cuts_text=True)

    def __init__(self, n_indent: int):
        self.detail = f"n-indent {n_indent}"
        self._n_indent = n_indent
        self._spaces: int | None = None
        """Spaces of the present line so far, or None if it has other characters or is the first."""

    def add_character(self, character: str) -> bool:
        """See `CharacterCondition.add_character`."""
        if self._spaces is not None and character in " \t":
            self._spaces += 1
        elif self._spaces is not None and self._spaces < self._n_indent:
            return True
        else:
            self._spaces = 0 if character == "\n" else None
        return False


class PatternCondition:
    """A regular expression matches, and the match is cut off. Of a match that is longer than
    `WITHHELD_BYTES_MAX`, only the last part is cut off.
    """

    reason = StopReason("pattern", cuts_text=True)

    def __init__(self, pattern: str):
        self._name = pattern
        self._matcher = RegexMatcher(Pattern.cached(pattern))
        self._end = 0

    @property
    def undecided(self) -> int | None:
        """The beginning of the text that may become a match."""
        pending = self._matcher.pending
        return None if pending is None else max(pending, self._end - WITHHELD_BYTES_MAX)

    def check_text(self, text: str, at: int) -> Stop | None:
        """See `TextCondition.check_text`."""
        found = self._matcher.match_text(text, at)
        if found is None:
            self._end = at + byte_size(text)
            return None
        begin, end = found
        return Stop(end, max(begin, end - WITHHELD_BYTES_MAX), self.reason, self._name)


COMPLETE_CONDITIONS: dict[str, Callable[[], TextCondition]] = {
    "json": JsonCondition,
    "fence": FenceCondition,
    "sentence": SentenceCondition,
}
"""The conditions that `stop-complete` can name."""
