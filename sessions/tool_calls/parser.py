"""The parser of one answer: its text, and its tool calls in parts, as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...backends.tool_formats import ToolFormat
from .calls import ANSWER_CALLS_MAX, ToolCallPart, merge_parts
from .formats import AnswerReader
from .reader import CallReader
from .source import AnswerEnded, AnswerSource, Reading

__all__ = ("ParsedText", "ToolCallParser")

_REASONING_BEGIN, _REASONING_END = "<think>", "</think>"


class ParsedText(NamedTuple):
    """Text that is not part of a call, and parts of calls."""

    text: str
    parts: list[ToolCallPart]


class ToolCallParser:
    """Parses one answer as it arrives; results do not depend on how it is cut into pieces.

    Text that does not continue as a call stays text. In a block of reasoning at the beginning,
    which the prompt may have opened (*opens_reasoning*), nothing is a call.
    """

    def __init__(
        self,
        form: ToolFormat,
        functions: Mapping[str, Mapping[str, Any]],
        new_id: Callable[[int], str],
        *,
        calls_max: int = ANSWER_CALLS_MAX,
        opened: bool = False,
        opens_reasoning: bool = False,
    ):
        self._source = AnswerSource()
        reader = CallReader(self._source, functions, new_id)
        answer = AnswerReader(reader, calls_max, opened=opened)
        self._reading = self._read(answer.read(form), opens_reasoning=opens_reasoning)
        next(self._reading)

    def parse(self, text: str) -> ParsedText:
        """Return the text and the parts of calls that *text*, the next piece, completes."""
        if not text:
            return ParsedText("", [])
        self._source.add_text(text)
        next(self._reading)
        return self._take()

    def finish(self) -> ParsedText:
        """Return the rest at the end of the answer."""
        self._source.end()
        next(self._reading)
        return self._take()

    def _take(self) -> ParsedText:
        return ParsedText(self._source.take_text(), merge_parts(self._source.take_parts()))

    def _read(self, answer: Reading, *, opens_reasoning: bool) -> Reading:
        source = self._source
        try:
            yield from self._reasoning(opened=opens_reasoning)
            yield from answer
        except AnswerEnded:
            source.pass_pending()
            source.pass_rest()
        yield

    def _reasoning(self, *, opened: bool) -> Reading:
        """Pass a block of reasoning at the beginning."""
        source = self._source
        if not opened:
            with source.possible_call():
                yield from source.space()
                yield from source.expect(_REASONING_BEGIN)
                opened = True
                source.pass_pending()
        if opened:
            yield from source.text_until(_REASONING_END)
            source.pass_pending()
