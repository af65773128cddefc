"""A response as events: its items one after the other, each with its beginning, deltas and end."""

from __future__ import annotations

from typing import Any

import msgspec

from .....backends.errors import InferdError
from .....ipc.client import Piece, QueueEvent, ToolCall
from ...exchange.streaming import EVENT_STREAM
from ...turns import Answer, TurnProgress, WholeCalls
from ..chat import waiting_comment
from .fields import RESPONSES
from .frame import (
    ResponseFrame,
    message_item,
    new_item_id,
    reasoning_item,
    status_of_end,
    text_part,
)

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
