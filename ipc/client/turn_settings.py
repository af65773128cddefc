"""The keywords of a turn, their structure, and the messages made from it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, TypedDict, TypeVar

from .. import messages as w
from ..names import Priority
from ..payloads import Prompt, traceparent_of, turn_input
from .functions import Tool, definitions_of
from .parameters import Options, Parameters

QueueCallback = Callable[[w.QueueEvent], None]
PromptCallback = Callable[[dict[str, Any]], None]
"""It gets `total`, `cache`, `processed` and `time_ms` of the prompt's progress."""
StartCallback = Callable[[], None]
PARAMETERS = frozenset(Parameters.__annotations__) | {"tools"}
"""The keywords of turns that are parameters of the computation."""
F = TypeVar("F", bound=Callable[..., object])
M = TypeVar("M", bound=w.ScheduledParams)


class SchedulingKeywords(TypedDict, total=False):
    """Keywords of calls that compute a turn."""

    priority: Priority | None
    timeout: float | None
    queue_timeout: float | None
    traceparent: str | None


class TurnKeywords(SchedulingKeywords, Parameters, total=False):
    """Keywords of calls that compute a turn from a prompt. The parameters of the computation are
    keywords, or keys of `options`; a keyword precedes a key.
    """

    raw: bool | None
    supersede: str | None
    options: Options | dict[str, Any] | None
    tools: Sequence[Tool] | str


def takes(keywords: type) -> Callable[[F], F]:
    """Make `help` show each of *keywords* in place of a method's last parameter, `**keywords`; the
    parameters of the computation stay one, `**parameters`.
    """

    def show_keywords(method: F) -> F:
        signature = inspect.signature(method)
        parameters = list(signature.parameters.values())[:-1]
        kinds = keywords.__annotations__
        for name in (name for name in kinds if name not in PARAMETERS):
            shown = Parameter(name, Parameter.KEYWORD_ONLY, default=None)
            parameters.append(shown.replace(annotation=kinds[name].__forward_arg__))
        if kinds.keys() & PARAMETERS:
            shown = Parameter("parameters", Parameter.VAR_KEYWORD)
            parameters.append(shown.replace(annotation="Unpack[Parameters]"))
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
    supersede: str | None = None
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
        params = w.AnswersParams(context=context, n=n, **self._input_fields(prompt))
        return self.add_scheduling(params)

    def _input_fields(self, prompt: Prompt | None) -> dict[str, Any]:
        return {
            **turn_input(prompt),
            "raw": bool(self.raw),
            "options": self.options or {},
            "supersede": self.supersede or "",
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


def with_parameters(
    options: Options | Mapping[str, Any] | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return *options* with the parameters that were *given* as keywords.

    :raises TypeError: a keyword is not a parameter.
    """
    for name in given:
        if name not in PARAMETERS:
            raise TypeError(unknown_keyword(name))
    if not given:
        return dict(options or {})
    known = {name.replace("_", "-"): value for name, value in (options or {}).items()}
    return known | {name.replace("_", "-"): value for name, value in given.items()}


def unknown_keyword(name: str) -> str:
    """Return the message of the error for a keyword that no call takes."""
    import difflib  # as long to load as half of the client, and rarely needed

    nearest = difflib.get_close_matches(name, TurnKeywords.__annotations__, 1)
    meant = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return (
        f"unexpected keyword argument {name!r}{meant or '.'} Other spellings of parameters are keys"
        f" of *options*: options={{{name.replace('_', '-')!r}: …}}"
    )


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
    taken: type = TurnKeywords,
) -> TurnSettings:
    """Return the settings of a call with *keywords*, which are among those of *taken*.

    :raises TypeError: *keywords* has a name that the call does not take.
    """
    for name in keywords:
        if name not in taken.__annotations__:
            raise TypeError(unknown_keyword(name))
    given = {name: keywords[name] for name in keywords if name in PARAMETERS}
    if "tools" in given:
        given["tools"] = definitions_of(given["tools"])
    if given:
        keywords = {name: value for name, value in keywords.items() if name not in given}
        keywords["options"] = with_parameters(keywords.get("options"), given)
    return TurnSettings(
        default_timeout_s=default_timeout_s,
        on_queue=on_queue,
        on_prompt=on_prompt,
        on_start=on_start,
        **keywords,
    )
