"""The output of an answer as it arrives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..output import end_terminal_line, write, write_answer, write_dimmed


class AnswerOutput:
    """An answer that is written as the model wrote it, except for control characters."""

    def __init__(self) -> None:
        self._last = ""
        self._within_line = False

    def write_reasoning(self, text: str) -> None:
        """Write reasoning, which does not belong to the answer."""
        write_dimmed(text)
        self._note_end(text)

    def write_text(self, text: str) -> None:
        """Write a piece of the answer."""
        write_answer(text, end="")
        self._last = text or self._last
        self._note_end(text)

    def _note_end(self, text: str) -> None:
        if text:
            self._within_line = not text.endswith("\n")

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """End the present line before messages are printed."""
        if self._within_line:
            end_terminal_line()
        yield

    def end(self, tool_calls: Sequence[str]) -> None:
        """End the answer, and write its tool calls after it."""
        if not self._last.endswith("\n") and (self._last or not tool_calls):
            write("")
        for call in tool_calls:
            write_answer(call)
