"""The object of a response, from its request and its answer, whole or as events: its items one
after the other, each with its beginning, deltas and end.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from .....backends.errors import InferdError
from .....ipc.client import Piece, QueueEvent, ToolCall
from ...exchange.streaming import EVENT_STREAM
from ...turns import Answer, FinishReason, TurnProgress, TurnRequest, WholeCalls
from ..chat import tier_of, waiting_comment
from ..forms import chat_logprobs, error_body
from .fields import LOGPROBS, RESPONSES, ResponseRequest
from .items import namespaces_of


class ResponseFrame:
    """The parts of a response that do not depend on its answer."""

    def __init__(self, request: ResponseRequest, response_id: str, turn: TurnRequest):
        self.request = request
        self._whole: dict[str, Any] | None = None
        self._namespaces = namespaces_of(request.tools)
        self.logprobs = LOGPROBS in request.include or request.top_logprobs > 0
        self._fields: dict[str, Any] = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": request.model,
            "instructions": request.instructions,
            "previous_response_id": request.previous_response_id,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata,
            "background": request.background,
            "parallel_tool_calls": request.parallel_tool_calls,
            "reasoning": {"effort": request.reasoning.effort, "summary": None},
            "service_tier": tier_of(turn.priority),
            "store": request.store,
            "temperature": turn.options.get("temperature"),
            "top_p": turn.options.get("top_p"),
            "text": {"format": _format(request)},
            "tool_choice": request.tool_choice,
            "tools": request.tools,
            "top_logprobs": request.top_logprobs,
            "truncation": request.truncation,
            "error": None,
            "incomplete_details": None,
        }

    def begun(self) -> dict[str, Any]:
        """Return the response before its answer."""
        return {**self._fields, "status": "in_progress", "output": [], "usage": None}

    def ended(self, answer: Answer, output: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the response with the items of its answer."""
        fields = {**self._fields, "status": status_of_end(answer), "output": output}
        if fields["status"] == "incomplete":
            fields["incomplete_details"] = {"reason": "max_output_tokens"}
        return {**fields, **answer.adjusted, "usage": _usage(answer)}

    def failed(self, error: InferdError, status: int) -> dict[str, Any]:
        """Return the response with the error by which it failed."""
        body = error_body(error, status)["error"]
        shown = {"code": body["code"] or "server_error", "message": body["message"]}
        return {**self._fields, "status": "failed", "output": [], "error": shown, "usage": None}

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the whole response, the same at each call."""
        self._whole = self._whole or self._with_items(answer)
        return self._whole

    def _with_items(self, answer: Answer) -> dict[str, Any]:
        calls = [self.call_item(call) for call in answer.tool_calls]
        output: list[dict[str, Any]] = []
        if answer.reasoning:
            output.append(reasoning_item(answer.reasoning))
        if answer.text or not (calls or output):
            logprobs = self.shown_logprobs(answer.probabilities)
            output.append(message_item(new_item_id("msg"), answer.text, logprobs))
        if not calls:
            output[-1]["status"] = status_of_end(answer)
        return self.ended(answer, output + calls)

    def call_item(self, call: ToolCall) -> dict[str, Any]:
        space = self._namespaces.get(call.name)
        return {
            "id": new_item_id("fc"),
            "type": "function_call",
            "status": "completed" if _is_whole(call) else "incomplete",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            **({} if space is None else {"namespace": space}),
        }

    def shown_logprobs(self, probabilities: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the logprobs of tokens, if they are wanted."""
        if not self.logprobs:
            return []
        found = chat_logprobs(probabilities, self.request.top_logprobs)["content"]
        assert isinstance(found, list), "chat_logprobs returns them as a list"
        return found


def status_of_end(answer: Answer) -> str:
    """Return the status of a response, and of the item with which its answer ends: a reasoning or a
    message.
    """
    return "incomplete" if answer.finish_reason is FinishReason.LENGTH else "completed"


def _is_whole(call: ToolCall) -> bool:
    """Return whether the arguments of a call are an object; those of one that was cut are not."""
    try:
        msgspec.json.decode(call.arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return False
    return True


def new_item_id(kind: str) -> str:
    """Return the id of an item."""
    return f"{kind}_{secrets.token_hex(12)}"


def message_item(
    item_id: str, text: str, logprobs: list[dict[str, Any]], status: str = "completed"
) -> dict[str, Any]:
    """Return the item of a text."""
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [text_part(text, logprobs)],
    }


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the part of a text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def reasoning_item(text: str, item_id: str = "", status: str = "completed") -> dict[str, Any]:
    """Return the item of a reasoning."""
    return {
        "id": item_id or new_item_id("rs"),
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "status": status,
    }


def _usage(answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens": answer.input_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        "output_tokens": answer.output_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": answer.input_tokens + answer.output_tokens,
    }


def _format(request: ResponseRequest) -> dict[str, Any]:
    form = request.text.format
    if form.type != "json_schema":
        return {"type": form.type}
    shown: dict[str, Any] = msgspec.to_builtins(form)
    return {name: value for name, value in shown.items() if value is not None}


_BEGINNING = 2
"""The number of events with which a stream begins."""


def _event(kind: str, number: int, **fields: Any) -> bytes:
    data = msgspec.json.encode({"type": kind, "sequence_number": number, **fields})
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


class ResponseStream:
    """The events of a response. The item under way is a reasoning or a message."""

    content_type = EVENT_STREAM
    shows_waiting = True

    def __init__(self, frame: ResponseFrame):
        self._frame = frame
        self._begun = False
        self._sequence = _BEGINNING
        self._ended: tuple[dict[str, Any], bytes] | None = None
        """The whole response, and the events of its end."""
        self._output: list[dict[str, Any]] = []
        self._kind = ""
        """The type of the item under way, or empty."""
        self._item_id = ""
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._calls = WholeCalls()
        self.failed = False

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return _event(kind, self._sequence - 1, **fields)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": self._item_id, "output_index": len(self._output), "content_index": 0}
        return self._event(kind, **place, **fields)

    def begin(self) -> bytes:
        """Return the events of the beginning."""
        self._begun = True
        begun = self._frame.begun()
        kinds = ("response.created", "response.in_progress")
        return b"".join(_event(kind, number, response=begun) for number, kind in enumerate(kinds))

    def waiting(self, place: QueueEvent | None) -> bytes:
        """Return a comment with the place in the queue."""
        return waiting_comment(place)

    def progress(self, answer: int, progress: TurnProgress) -> bytes:
        """Return nothing, because the API has no form for it."""
        return b""

    def piece(self, answer: int, piece: Piece, probabilities: list[dict[str, Any]]) -> bytes:
        """Return the events of a piece."""
        events = b""
        if piece.reasoning:
            events += self._open("reasoning")
            self._text.append(piece.reasoning)
            events += self._item_event("response.reasoning_text.delta", delta=piece.reasoning)
        if piece:
            events += self._open("message")
            self._text.append(str(piece))
            logprobs = self._frame.shown_logprobs(probabilities)
            self._logprobs += logprobs
            events += self._item_event(
                "response.output_text.delta", delta=str(piece), logprobs=logprobs
            )
        if piece.tool_calls:
            events += self._show_calls(self._calls.add_parts(piece.tool_calls))
        return events

    def _open(self, kind: str) -> bytes:
        """Begin an item, unless one of this kind is under way."""
        if self._kind == kind:
            return b""
        events = self._close()
        self._kind, self._text, self._logprobs = kind, [], []
        self._item_id = new_item_id("msg" if kind == "message" else "rs")
        if kind == "message":
            item = {**message_item(self._item_id, "", [], "in_progress"), "content": []}
            part = text_part("", [])
        else:
            item = {**reasoning_item("", self._item_id, "in_progress"), "content": []}
            part = {"type": "reasoning_text", "text": ""}
        events += self._event(
            "response.output_item.added", output_index=len(self._output), item=item
        )
        return events + self._item_event("response.content_part.added", part=part)

    def _close(self, status: str = "completed") -> bytes:
        """End the item under way."""
        if not self._kind:
            return b""
        text = "".join(self._text)
        if self._kind == "message":
            item = message_item(self._item_id, text, self._logprobs, status)
            done = self._item_event("response.output_text.done", text=text, logprobs=self._logprobs)
        else:
            item = reasoning_item(text, self._item_id, status)
            done = self._item_event("response.reasoning_text.done", text=text)
        done += self._item_event("response.content_part.done", part=item["content"][0])
        self._kind = ""
        return done + self._finish_item(item)

    def _finish_item(self, item: dict[str, Any]) -> bytes:
        event = self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return event

    def _show_calls(self, calls: list[ToolCall]) -> bytes:
        return b"".join(self._show_call(call) for call in calls)

    def _show_call(self, call: ToolCall) -> bytes:
        events = self._close()
        item = self._frame.call_item(call)
        begun = {**item, "arguments": "", "status": "in_progress"}
        place = {"item_id": item["id"], "output_index": len(self._output)}
        arguments = call.arguments
        events += self._event(
            "response.output_item.added", output_index=len(self._output), item=begun
        )
        events += self._event("response.function_call_arguments.delta", **place, delta=arguments)
        events += self._event(
            "response.function_call_arguments.done", **place, name=call.name, arguments=arguments
        )
        return events + self._finish_item(item)

    def end(self, answer: int, end: Answer) -> bytes:
        """Return the events of the end."""
        return self._end(end)[1]

    def whole(self, end: Answer) -> dict[str, Any]:
        """Return the whole response, whose end may not have been written yet."""
        return self._end(end)[0]

    def _end(self, end: Answer) -> tuple[dict[str, Any], bytes]:
        if self._ended is None:
            events = self._show_calls(self._calls.finish())
            if not self._output and not self._kind:
                events += self._open("message")
            events += self._close(status_of_end(end))
            response = self._frame.ended(end, self._output)
            events += self._event(f"response.{response['status']}", response=response)
            self._ended = response, events
        return self._ended

    def error(self, error: InferdError, status: int) -> bytes:
        """Return the event of a failure, after those of the beginning if no event was sent."""
        self.failed = True
        error = RESPONSES.name_field(error)
        begun = b"" if self._begun else self.begin()
        return begun + self._event("response.failed", response=self._frame.failed(error, status))

    def finish(self) -> bytes:
        """Return nothing, because `end` has returned the last event."""
        return b""
