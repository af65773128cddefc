"""The keywords of a turn, their structure, and the messages made from it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, TypedDict, TypeVar

from .. import messages as w
from ..payloads import Prompt, traceparent_of, turn_input
from ..priorities import Priority

QueueCallback = Callable[[w.QueueEvent], None]
PromptCallback = Callable[[dict[str, Any]], None]
"""It gets `total`, `cache`, `processed` and `time_ms` of the prompt's progress."""
StartCallback = Callable[[], None]
F = TypeVar("F", bound=Callable[..., object])
M = TypeVar("M", bound=w.ScheduledParams)


class SchedulingKeywords(TypedDict, total=False):
    """Keywords of calls that compute a turn."""

    priority: Priority | None
    timeout: float | None
    queue_timeout: float | None
    traceparent: str | None


class TurnKeywords(SchedulingKeywords, total=False):
    """Keywords of calls that compute a turn from a prompt."""

    raw: bool | None
    options: dict[str, Any] | None


def takes(keywords: type) -> Callable[[F], F]:
    """Make `help` show each of *keywords* in place of a method's last parameter, `**keywords`."""

    def show_keywords(method: F) -> F:
        signature = inspect.signature(method)
        parameters = list(signature.parameters.values())[:-1]
        for name, kind in keywords.__annotations__.items():
            shown = Parameter(name, Parameter.KEYWORD_ONLY, default=None)
            parameters.append(shown.replace(annotation=kind.__forward_arg__))
        method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return method

    return show_keywords


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnSettings:
    """The computation, scheduling, bounds and tracing of one turn: the keywords of its call.

    *default_timeout_s* is the client's timeout.
    """

    default_timeout_s: float
    raw: bool | None = None
    options: dict[str, Any] | None = None
    priority: Priority | None = None
    timeout: float | None = None
    queue_timeout: float | None = None
    on_queue: QueueCallback | None = None
    on_prompt: PromptCallback | None = None
    on_start: StartCallback | None = None
    traceparent: str | None = None

    @property
    def timeout_s(self) -> float:
        """The turn's timeout."""
        return self.default_timeout_s if self.timeout is None else self.timeout

    def stream_params(self, context: int, prompt: Prompt | None) -> w.StreamParams:
        """Return the params of `stream` or `chat` with *prompt*."""
        return self.add_scheduling(
            w.StreamParams(
                context=context,
                **self._input_fields(prompt),
                queue_events=self.on_queue is not None,
                prompt_progress=self.on_prompt is not None,
                start_event=self.on_start is not None,
            )
        )

    def answers_params(self, context: int, prompt: Prompt | None, n: int) -> w.AnswersParams:
        """Return the params of `answers` for *n* answers to *prompt*."""
        params = w.AnswersParams(context=context, n=n, **self._input_fields(prompt))
        return self.add_scheduling(params)

    def _input_fields(self, prompt: Prompt | None) -> dict[str, Any]:
        return {
            **turn_input(prompt),
            "raw": bool(self.raw),
            "options": self.options or {},
        }

    def resume_params(
        self, context: int, tokens: Sequence[int], text: str, reasoning: str, raw_text: str
    ) -> w.ResumeParams:
        """Return the params of `resume` for the rest of an answer, after the given part."""
        return self.add_scheduling(
            w.ResumeParams(
                context=context,
                tokens=list(tokens),
                text=text.encode(),
                reasoning=reasoning.encode(),
                raw_text=raw_text.encode(),
                queue_events=self.on_queue is not None,
                prompt_progress=self.on_prompt is not None,
                start_event=self.on_start is not None,
            )
        )

    def add_scheduling(self, params: M) -> M:
        """Set the scheduling fields of *params*, and return it."""
        params.priority = self.priority or ""
        params.queue_timeout_s = self.queue_timeout or 0.0
        params.timeout_s = wire_seconds(self.timeout_s)
        params.traceparent = traceparent_of(self.traceparent)
        return params


def wire_seconds(timeout_s: float) -> float:
    """Return a timeout in the protocol's form, where 0 means none."""
    return 0.0 if math.isinf(timeout_s) else timeout_s


def stream_call(params: w.StreamedParams) -> str:
    """Return the call that streams a turn with *params*."""
    return "resume" if isinstance(params, w.ResumeParams) else "stream"


def read_settings(
    default_timeout_s: float,
    keywords: Mapping[str, Any],
    on_queue: QueueCallback | None = None,
    on_prompt: PromptCallback | None = None,
    on_start: StartCallback | None = None,
) -> TurnSettings:
    """Return the settings of a call with *keywords*.

    :raises TypeError: *keywords* has a name that no call takes.
    """
    for name in keywords:
        if name not in TurnKeywords.__annotations__:
            raise TypeError(
                f"unexpected keyword argument {name!r}; a parameter of the computation is a key of"
                f" *options*: options={{{name.replace('_', '-')!r}: …}}"
            )
    return TurnSettings(
        default_timeout_s=default_timeout_s,
        on_queue=on_queue,
        on_prompt=on_prompt,
        on_start=on_start,
        **keywords,
    )
