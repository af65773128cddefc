"""Texts with further values: pieces of an answer, whole answers, rendered prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self, cast

import msgspec

from ...backends.errors import InferdError, error_from_wire
from ..messages import AnswersResult, ToolCallPart, TurnResult
from .caller import as_event
from .connection.core import no_metadata
from .results import Metadata


class ToolCall(NamedTuple):
    """A call of the function *name* in an answer. Its result is sent as a message with the role
    `tool` and the call's *id* as `tool_call_id`.
    """

    id: str
    name: str
    arguments: str
    """The JSON text of an object, or its beginning if a limit has cut the answer in the call."""

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name."""
        return msgspec.json.decode(self.arguments, type=dict[str, Any])


class ToolCalls:
    """The tool calls of an answer, put together from their parts."""

    def __init__(self, parts: Iterable[ToolCallPart] = ()) -> None:
        self._calls: dict[int, ToolCall] = {}
        self.add_parts(parts)

    def add_parts(self, parts: Iterable[ToolCallPart]) -> None:
        """Add the next parts."""
        for part in parts:
            call = self._calls.pop(part.index, ToolCall(part.id, part.name, ""))
            if not part.dropped:
                self._calls[part.index] = call._replace(arguments=call.arguments + part.arguments)

    def so_far(self) -> list[ToolCall]:
        """Return the calls; the arguments of the last one may be incomplete."""
        return list(self._calls.values())


class Piece(str):
    """A piece of an answer, with the new part of its `reasoning` and of its `tool_calls`.

    Only the parameters `reasoning-format` and `tools` make these non-empty; the text may then be
    empty.
    """

    __slots__ = ("reasoning", "tool_calls")
    reasoning: str
    tool_calls: Sequence[ToolCallPart]

    def __new__(
        cls, text: str, reasoning: str = "", tool_calls: Sequence[ToolCallPart] = ()
    ) -> Self:
        """Make a piece from *text*."""
        self = super().__new__(cls, text)
        self.reasoning, self.tool_calls = reasoning, tool_calls
        return self

    @property
    def empty(self) -> bool:
        """Whether it has neither text nor anything else."""
        return not (self or self.reasoning or self.tool_calls)


class Reply(str):
    """A turn's whole text, with its `metadata`, its `reasoning` and its `tool_calls`."""

    __slots__ = ("metadata", "reasoning", "tool_calls")
    metadata: Metadata
    reasoning: str
    tool_calls: list[ToolCall]

    def __new__(
        cls,
        text: str,
        metadata: Metadata | None = None,
        reasoning: str = "",
        tool_calls: Sequence[ToolCall] = (),
    ) -> Self:
        """Make a reply from *text*."""
        self = super().__new__(cls, text)
        self.metadata, self.reasoning = metadata or no_metadata(), reasoning
        self.tool_calls = list(tool_calls)
        return self


class Answer(Reply):
    """One of several answers: its text so far, its `metadata`, and its `error` if it failed."""

    error: InferdError | None = None


class Rendered(str):
    """The prompt that a chat template made, with its number of `tokens`."""

    __slots__ = ("tokens",)
    tokens: int

    def __new__(cls, text: str, tokens: int = 0) -> Self:
        """Make a prompt from *text*."""
        self = super().__new__(cls, text)
        self.tokens = tokens
        return self


def reply_of(result: TurnResult) -> Reply:
    """Return the reply in a whole turn's result."""
    metadata = cast("Metadata", result.metadata)
    calls = ToolCalls(result.tool_calls).so_far()
    return Reply(_decode(result.text), metadata, _decode(result.reasoning), calls)


def answers_of(result: AnswersResult) -> list[Answer]:
    """Return the answers in the result of `answers`."""
    return [_answer_of(fields) for fields in result.answers]


def _answer_of(fields: dict[str, Any]) -> Answer:
    text, reasoning = (_decode(fields.get(key, b"")) for key in ("text", "reasoning"))
    calls = ToolCalls(tool_call_parts(fields)).so_far()
    answer = Answer(text, fields.get("metadata"), reasoning, calls)
    error = fields.get("error")
    answer.error = error and error_from_wire(error)
    return answer


def tool_call_parts(fields: dict[str, Any]) -> list[ToolCallPart]:
    """Return the parts of tool calls in an event or a result.

    :raises ProtocolError: the parts have another form.
    """
    parts = fields.get("tool_calls")
    return [as_event(part, ToolCallPart) for part in parts] if parts else []


def _decode(data: bytes) -> str:
    return bytes(data).decode(errors="replace")
