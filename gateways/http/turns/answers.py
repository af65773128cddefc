"""Turns as callers request them, and their answers, whole or in pieces."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from ....backends.errors import InferdError
from ....ipc.client import Metadata, Piece, QueueEvent, ToolCall, ToolCallPart
from ....ipc.names import Priority
from ....ipc.payloads import Prompt, turn_input
from ..media import RequestMedia


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
    def reasoning_tokens(self) -> int:
        """The tokens of reasoning in the answer; 0 if they are not known."""
        return self.metadata.get("reasoning_tokens", 0)

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

    def note_opened(self, first: int) -> None:
        """Note that the session of the turn whose answers begin with *first* is open: the daemon
        now checks the turn.
        """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A model's answers to a prompt.

    *options* are parameters of docs/parameters.md. Without a *session_id* the turn has a session of
    its own, and the daemon reuses the KV state of an equal beginning. With one, *prompt* is added
    to the session's history. With *branch_of* too, the session begins as a branch of the session
    with that id. *note* returns the note that is stored with the session, from the end of the
    turn's only answer, before this is written.
    """

    model: str
    prompt: Prompt
    media: RequestMedia = field(default_factory=RequestMedia)
    """The images and sounds in *prompt*, which are decoded before the turn begins."""
    raw: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    answers: int = 1
    priority: Priority = "normal"
    keeps_priority: bool = False
    """Whether a session that exists has its own class instead of *priority*."""
    session_id: str | None = None
    branch_of: str | None = None
    note: Callable[[Answer], bytes] | None = None
    supersede: str = ""
    """A key: the request cancels the caller's previous one with this key that has not ended."""
    answer_id: str = ""
    """The id by which its caller can control its answers while they are generated."""
    progress: bool = False
    """Pass the progress of a streamed answer's prompt to its reader."""
    on_turn: Callable[[int], None] | None = None
    """Called with the number of the turn of a session with an id, once this is open. Further
    readers can then read the only answer of the streamed turn.
    """
    on_prompt: Callable[[int, list[dict[str, Any]]], None] | None = None
    """Called before the first piece of a streamed answer with its number and the logprobs of the
    prompt, if there are any.
    """

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of its prompt, as clients of the daemon have them."""
        messages: list[dict[str, Any]] = turn_input(self.prompt)["messages"]
        return messages

    def name_item(self, error: InferdError) -> InferdError:
        """Return an *error* of the turn, which then names the place of the image or sound that it
        is about.
        """
        return self.media.name_item(error, self.prompt)


def schema_options(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Return the parameters of an answer's schema. Constraints that no grammar keeps are left out,
    or refused if the schema is *strict*.
    """
    # Sent as text, so that its nesting does not count towards the frame's limit.
    text = msgspec.json.encode(schema).decode()
    return {"json-schema": text, "schema-lenient": not strict}


class WholeCalls:
    """The tool calls of an answer, put together from their parts.

    A part can report that its call is not a tool call after all, and APIs cannot take back a call
    that was sent. A call is certain when the next one begins, or the answer ends.
    """

    def __init__(self) -> None:
        self._open: tuple[int, ToolCall] | None = None
        self.calls = 0
        """The number of calls that were returned."""

    def add_parts(self, parts: Sequence[ToolCallPart]) -> list[ToolCall]:
        """Add the next parts, and return the calls that are certain now."""
        certain = []
        for part in parts:
            if self._open is None or self._open[0] != part.index:
                certain += self.finish()
                self._open = part.index, ToolCall(part.id, part.name, "")
            index, call = self._open
            self._open = index, call._replace(arguments=call.arguments + part.arguments)
            if part.dropped:
                self._open = None
        return certain

    def finish(self) -> list[ToolCall]:
        """End the answer: return the last call, if it was not returned or dropped."""
        certain = [] if self._open is None else [self._open[1]]
        self._open = None
        self.calls += len(certain)
        return certain
