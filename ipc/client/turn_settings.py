"""A turn's keyword arguments in one structure, and the messages made from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from ...backends.errors import ProtocolError
from .. import messages as w
from ..payloads import Priority, Prompt, turn_input
from ..traceparent import traceparent_of

QueueCallback = Callable[[w.QueueEvent], None]
M = TypeVar("M", w.StreamParams, w.ResumeParams, w.AnswersParams)


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnSettings:
    """How one turn is computed, scheduled, bounded and traced.

    Methods of clients and sessions make it from their keywords, with all defaults filled in.
    """

    timeout_s: float
    raw: bool = False
    options: dict[str, Any] | None = None
    priority: Priority | None = None
    queue_timeout_s: float | None = None
    on_queue: QueueCallback | None = None
    traceparent: str | None = None

    def stream_params(self, context: int, prompt: Prompt | None) -> w.StreamParams:
        """Return the params of `stream` or `chat` with *prompt*."""
        text, messages = turn_input(prompt)
        return self._add_scheduling(
            w.StreamParams(
                context=context,
                prompt=text,
                messages=messages,
                raw=self.raw,
                options=self.options or {},
                queue_events=self.on_queue is not None,
            )
        )

    def answers_params(self, context: int, prompt: Prompt | None, n: int) -> w.AnswersParams:
        """Return the params of `answers` for *n* answers to *prompt*."""
        text, messages = turn_input(prompt)
        return self._add_scheduling(
            w.AnswersParams(
                context=context,
                n=n,
                prompt=text,
                messages=messages,
                raw=self.raw,
                options=self.options or {},
            )
        )

    def resume_params(
        self, context: int, tokens: Sequence[int], text: str, reasoning: str
    ) -> w.ResumeParams:
        """Return the params of `resume` for the rest after *tokens*, *text* and *reasoning*."""
        return self._add_scheduling(
            w.ResumeParams(
                context=context,
                tokens=list(tokens),
                text=text.encode(),
                reasoning=reasoning.encode(),
                queue_events=self.on_queue is not None,
            )
        )

    def _add_scheduling(self, params: M) -> M:
        params.priority = self.priority or ""
        params.queue_timeout_s = self.queue_timeout_s or 0.0
        params.timeout_s = wire_seconds(self.timeout_s)
        params.traceparent = traceparent_of(self.traceparent)
        return params


def wire_seconds(timeout_s: float) -> float:
    """Return a timeout in the protocol's form, where 0 means none."""
    return 0.0 if math.isinf(timeout_s) else timeout_s


def stream_call(params: w.StreamParams | w.ResumeParams) -> str:
    """Return the call that streams a turn with *params*."""
    return "resume" if isinstance(params, w.ResumeParams) else "stream"


def queue_events(on_queue: QueueCallback | None) -> Callable[[dict[str, Any]], None] | None:
    """Return a function that passes a call's events to *on_queue*."""
    if on_queue is None:
        return None
    return lambda event: on_queue(queue_event(event))


def queue_event(event: dict[str, Any]) -> w.QueueEvent:
    """Return an event with a turn's place in the queue as its struct.

    :raises ProtocolError: the event does not fit the struct.
    """
    try:
        return msgspec.convert(event, w.QueueEvent)
    except msgspec.ValidationError as exc:
        raise ProtocolError(f"an event of the queue cannot be read: {exc}") from None
