"""An answer that is split into its text, its reasoning and its tool calls as it arrives."""

from __future__ import annotations

import codecs

from ..tool_calls.parser import ParsedText, ToolCallParser
from .reasoning import AnswerParts, ReasoningSplitter

__all__ = ("AnswerSplitter",)

_BYTES = "surrogateescape"
"""Keeps bytes that are not UTF-8."""


class AnswerSplitter:
    """Splits one answer; the parts do not depend on how it is cut into pieces. Tool calls are found
    first, because `ToolCallParser` leaves reasoning alone.
    """

    def __init__(self, reasoning: ReasoningSplitter, parser: ToolCallParser | None = None):
        self._reasoning, self._parser = reasoning, parser
        self._decoder = codecs.getincrementaldecoder("utf-8")(_BYTES)

    @property
    def finds_calls(self) -> bool:
        """Whether the answer may have tool calls."""
        return self._parser is not None

    def split(self, data: bytes) -> AnswerParts:
        """Return the parts that can be sent now."""
        if self._parser is None:
            return self._reasoning.split(data)
        found = self._parser.parse(self._decoder.decode(data))
        return self._reasoning.split(_bytes(found))._replace(calls=tuple(found.parts))

    def split_last(self, data: bytes) -> AnswerParts:
        """Return the parts of the answer's last piece."""
        if self._parser is None:
            return self._reasoning.split_last(data)
        first = self._parser.parse(self._decoder.decode(data, final=True))
        rest = self._parser.finish()
        parts = self._reasoning.split_last(_bytes(first) + _bytes(rest))
        return parts._replace(calls=(*first.parts, *rest.parts))


def _bytes(found: ParsedText) -> bytes:
    return found.text.encode(errors=_BYTES)
