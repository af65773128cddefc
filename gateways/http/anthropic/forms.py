"""Answers as Anthropic's messages, whole and as events."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from ....backends.errors import InferdError
from ....ipc.client import Metadata, Piece, QueueEvent, ToolCall
from ..exchange.streaming import EVENT_STREAM
from ..turns import Answer, FinishReason, TurnProgress, WholeCalls

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def error_body(error: InferdError, status: int) -> dict[str, Any]:
    """Return the body of an error response, and of an error in a stream."""
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.text_for_people}}


_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}
_NO_USAGE = {"input_tokens": 0, "output_tokens": 0}


def whole_message(model: str, answer: Answer) -> dict[str, Any]:
    """Return a whole message."""
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.text or not answer.tool_calls:
        content.append({"type": "text", "text": answer.text})
    content += [{**_call(call), "input": _input_of(call)} for call in answer.tool_calls]
    return {**_message(model, content, _usage(answer)), **_end(answer), **answer.adjusted}


def _message(model: str, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _end(answer: Answer) -> dict[str, Any]:
    """Return the reason of an answer's end."""
    metadata: Metadata = answer.metadata
    match metadata.get("stop_reason"):
        case "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": metadata.get("stop_detail")}
        case "context_full":
            return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
    return {"stop_reason": _REASONS[answer.finish_reason], "stop_sequence": None}


def _usage(answer: Answer) -> dict[str, int]:
    """Return the usage; cached tokens do not count among the input tokens."""
    return {
        "input_tokens": answer.input_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.output_tokens,
    }


def _call(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def _input_of(call: ToolCall) -> Any:
    """Return the arguments of a call, or an empty dict if the model wrote no JSON object."""
    try:
        return msgspec.json.decode(call.arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


class MessageStream:
    """A message as events; at most one block of text, thinking or a call is open at a time."""

    content_type = EVENT_STREAM
    shows_waiting = True

    def __init__(self, model: str):
        self._model = model
        self._calls = WholeCalls()
        self._open = ""
        """The type of the open block."""
        self._blocks = 0

    def begin(self) -> bytes:
        """Return the start of the message; its usage is known only at its end."""
        return _event("message_start", message=_message(self._model, [], _NO_USAGE))

    def waiting(self, place: QueueEvent | None) -> bytes:
        """Return a ping, which clients ignore, with the place in the queue."""
        if place is None:
            return _event("ping")
        return _event("ping", position=place.position, waiting=place.waiting)

    def progress(self, answer: int, progress: TurnProgress) -> bytes:
        """Return nothing, because the API has no form for it."""
        return b""

    def piece(self, answer: int, piece: Piece, probabilities: list[dict[str, Any]]) -> bytes:
        """Return the events of a piece."""
        found = b""
        if piece.reasoning:
            found += self._in_block("thinking", {"thinking": "", "signature": ""})
            found += self._delta("thinking_delta", thinking=piece.reasoning)
        if piece:
            found += self._in_block("text", {"text": ""})
            found += self._delta("text_delta", text=str(piece))
        return found + self._whole_calls(self._calls.add_parts(piece.tool_calls))

    def _whole_calls(self, calls: list[ToolCall]) -> bytes:
        found = b""
        for call in calls:
            found += self._close() + self._start(_call(call))
            found += self._delta("input_json_delta", partial_json=call.arguments) + self._close()
        return found

    def _in_block(self, kind: str, empty: dict[str, str]) -> bytes:
        """Return the events after which a block of this type is open."""
        if self._open == kind:
            return b""
        return self._close() + self._start({"type": kind, **empty})

    def _start(self, block: dict[str, Any]) -> bytes:
        self._open = block["type"]
        return _event("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, kind: str, **fields: str) -> bytes:
        return _event("content_block_delta", index=self._blocks, delta={"type": kind, **fields})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open, index = "", self._blocks
        self._blocks += 1
        return _event("content_block_stop", index=index)

    def end(self, answer: int, end: Answer) -> bytes:
        """Return the events that end the message."""
        rest = self._whole_calls(self._calls.finish())
        if not self._blocks and not self._open:
            rest += self._in_block("text", {"text": ""})
        return (
            rest
            + self._close()
            + _event("message_delta", delta=_end(end), usage=_usage(end), **end.adjusted)
        )

    def error(self, error: InferdError, status: int) -> bytes:
        """Return an error, which Anthropic's clients raise."""
        return _event(**error_body(error, status))

    def finish(self) -> bytes:
        """Return the last event."""
        return _event("message_stop")


def _event(type: str, **fields: Any) -> bytes:
    data = msgspec.json.encode({"type": type, **fields})
    return b"event: " + type.encode() + b"\ndata: " + data + b"\n\n"
