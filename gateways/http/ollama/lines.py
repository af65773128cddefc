"""Answers as Ollama's JSON objects: one for a whole answer, a line for each piece of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from ....backends.errors import InferdError
from ....ipc.client import Piece, QueueEvent, ToolCall
from ..openai.forms import chat_logprobs
from ..turns import Answer, FinishReason, TurnProgress, WholeCalls
from .fields import TurnFields

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}


def error_body(error: InferdError, status: int) -> dict[str, Any]:
    """Return the body of an error response, and of an error in a stream."""
    return {"error": error.text_for_people}


_NS_PER_MS = 1_000_000
TextForm = Callable[[str, str, Sequence[ToolCall]], dict[str, Any]]
"""A function of text, thinking and calls that returns the part of an object that has them."""


def chat_form(text: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Return the part of a chat's object that differs from a completion's."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return {"message": message}


def generate_form(text: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Return the part of a completion's object that differs from a chat's."""
    return {"response": text, "thinking": thinking} if thinking else {"response": text}


class Lines:
    """The objects of one request."""

    def __init__(self, form: TextForm, fields: TurnFields):
        self.fields, self._form, self._began = fields, form, time.monotonic()

    def part(
        self,
        text: str,
        thinking: str,
        calls: Sequence[ToolCall],
        probabilities: list[dict[str, Any]],
    ) -> dict[str, Any]:
        """Return the object of a part of an answer."""
        line = {
            "model": self.fields.model,
            "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
            **self._form(text, thinking, calls),
            "done": False,
        }
        if probabilities and self.fields.logprobs:
            line["logprobs"] = chat_logprobs(probabilities, self.fields.top_logprobs)["content"]
        return line

    def last(self, answer: Answer, calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
        """Return the object that ends an answer, with all of it that was not sent yet."""
        end = self.part(answer.text, answer.reasoning, calls, answer.probabilities)
        length = answer.finish_reason is FinishReason.LENGTH
        end.update(
            done=True,
            done_reason="length" if length else "stop",
            total_duration=_ns(1000 * (time.monotonic() - self._began)),
            load_duration=_ns(1000 * answer.load_s),
            prompt_eval_count=answer.input_tokens,
            prompt_eval_duration=_ns(answer.metadata.get("prompt_ms", 0.0)),
            eval_count=answer.output_tokens,
            eval_duration=_ns(answer.metadata.get("predicted_ms", 0.0)),
            **answer.adjusted,
        )
        return end

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the object of a whole answer."""
        return self.last(answer, answer.tool_calls)

    def empty(self, reason: str) -> dict[str, Any]:
        """Return the object for a request without a prompt."""
        return {**self.part("", "", (), []), "done": True, "done_reason": reason}


class LineStream:
    """An answer as lines of JSON."""

    content_type = b"application/x-ndjson"
    shows_waiting = False

    def __init__(self, lines: Lines):
        self._lines, self._calls = lines, WholeCalls()

    def begin(self) -> bytes:
        """Return nothing, because a stream begins with its first piece."""
        return b""

    def waiting(self, place: QueueEvent | None) -> bytes:
        """Return nothing, because Ollama's clients do not know places in a queue."""
        return b""

    def progress(self, answer: int, progress: TurnProgress) -> bytes:
        """Return nothing, because the API has no form for it."""
        return b""

    def piece(self, answer: int, piece: Piece, probabilities: list[dict[str, Any]]) -> bytes:
        """Return the line of a piece."""
        calls = self._calls.add_parts(piece.tool_calls)
        if not (piece or piece.reasoning or calls or probabilities):
            return b""
        return _line(self._lines.part(str(piece), piece.reasoning, calls, probabilities))

    def end(self, answer: int, end: Answer) -> bytes:
        """Return the last line, after a line with the last call if that was not sent yet."""
        calls = self._calls.finish()
        before = _line(self._lines.part("", "", calls, [])) if calls else b""
        return before + _line(self._lines.last(end))

    def error(self, error: InferdError, status: int) -> bytes:
        """Return the line of an error."""
        return _line(error_body(error, status))

    def finish(self) -> bytes:
        """Return nothing, because `end` has returned the last line."""
        return b""


def _line(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _ns(milliseconds: float) -> int:
    return int(milliseconds * _NS_PER_MS)


def _call(call: ToolCall) -> dict[str, Any]:
    """Return a call; its arguments are an object, or a text if the model wrote no JSON."""
    try:
        arguments = msgspec.json.decode(call.arguments)
    except msgspec.DecodeError:
        arguments = call.arguments
    return {"function": {"name": call.name, "arguments": arguments}}
