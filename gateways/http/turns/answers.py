"""Answers of turns, whole or in pieces."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from ....backends.errors import InferdError
from ....ipc.client import Metadata, Piece, QueueEvent, ToolCall


class FinishReason(StrEnum):
    """The end of an answer, in the terms of OpenAI."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


_LENGTH_REASONS = frozenset({"length", "context_full", "time"})


def finish_reason_of(metadata: Metadata, tool_calls: bool) -> FinishReason:
    """Return the end of an answer that did not fail."""
    if metadata.get("stop_reason") in _LENGTH_REASONS:
        return FinishReason.LENGTH
    return FinishReason.TOOL_CALLS if tool_calls else FinishReason.STOP


@dataclass(slots=True, kw_only=True)
class Answer:
    """An answer that has ended. If it was streamed, `text`, `reasoning` and `tool_calls` are empty,
    and `probabilities` has only those that were not streamed.
    """

    metadata: Metadata
    finish_reason: FinishReason
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    probabilities: list[dict[str, Any]] = field(default_factory=list)
    error: InferdError | None = None
    load_s: float = 0.0
    """The time until the model was loaded and the turn's session was open."""

    @property
    def adjusted(self) -> dict[str, dict[str, str]]:
        """The field of an API's object for the parameters that were not applied as requested, with
        the reasons; without any, no field.
        """
        reasons = self.metadata.get("adjusted")
        return {"adjusted": reasons} if reasons else {}

    @property
    def input_tokens(self) -> int:
        """Tokens of the prompt, including the history."""
        return self.metadata.get("input_tokens", 0)

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer."""
        return self.metadata.get("output_tokens", 0)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed again."""
        return self.metadata.get("cached_tokens", 0)


class TurnProgress:
    """The progress of a streamed answer, whose turn updates it: numbers of the prompt's tokens, the
    time for these, and the tokens of the answer so far.
    """

    def __init__(self) -> None:
        self.total = self.cached = self.processed = self.output_tokens = 0
        self.prompt_ms = self.predicted_ms = 0.0
        self._prompt_at = 0.0

    def note_prompt(self, progress: Mapping[str, Any]) -> None:
        """Note the progress of the prompt, as the daemon reports it."""
        self.total, self.cached = progress["total"], progress["cache"]
        self.processed, self.prompt_ms = progress["processed"], progress["time_ms"]
        self._prompt_at = time.monotonic()

    def note_tokens(self, count: int) -> None:
        """Note the number of the answer's tokens."""
        if count > self.output_tokens:
            self.output_tokens = count
            self.predicted_ms = 1000 * (time.monotonic() - self._prompt_at)


class TurnReader(Protocol):
    """The reader of streamed answers. The methods of several answers run side by side."""

    def note_opened(self) -> None:
        """Note that the session is open: the daemon now checks the turn."""

    def note_place(self, answer: int, place: QueueEvent) -> None:
        """Note an answer's place in the queue, before its first piece. Its turn was accepted."""

    def note_accepted(self, answer: int) -> None:
        """Note that the turn of an answer is checked, tokenized and queued, so that only the
        computation can still fail.
        """

    def add_progress(self, answer: int, progress: TurnProgress) -> None:
        """Add the progress of an answer's prompt, if the request has `progress`."""

    def add_piece(self, answer: int, piece: Piece, probabilities: list[dict[str, Any]]) -> None:
        """Add the next piece of an answer."""

    def write_now(self) -> bool:
        """Write the added pieces if that needs no waiting; return whether they are written."""

    async def write_added(self) -> None:
        """Write the added pieces. The turn continues only as fast as its text is read."""

    async def write_end(self, answer: int, end: Answer) -> None:
        """Write the end of an answer, which has an `error` if it failed."""
