"""The request of the current task, as it is traced, and the conversion of a request's facts to
spans, by OpenTelemetry's conventions for GenAI.

The conversion is made of pure functions without OpenTelemetry; times are from the monotonic clock.
No span holds a text, a user or a session.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ...backends.params import SamplingParams
from ...ipc.messages import Operation
from ...ipc.server.connection import Request
from ...scheduler import Priority
from ...scheduler.messages import TurnStats
from ...sessions import Turn
from ..residency.residency import ResidencyRequest

CHAT, COMPLETION = Operation.CHAT.value, Operation.COMPLETION.value
EMBEDDINGS = Operation.EMBEDDINGS.value
PROVIDER = "inferd"
UNFINISHED = "error"
"""The finish reason of an answer that failed."""
Value = str | int | float | Sequence[str]
_NO_SAMPLING = SamplingParams()


@dataclass(frozen=True)
class TurnFacts:
    """A turn that has ended: its times by the monotonic clock, None for a phase that it did not
    reach, and its usage.
    """

    queued_at: float
    ended_at: float
    started_at: float | None = None
    first_token_at: float | None = None
    sampling: SamplingParams = _NO_SAMPLING
    n_predict: int = -1
    priority: Priority = Priority.NORMAL
    input_tokens: int = 0
    output_tokens: int = 0
    stats: TurnStats | None = None
    """None if the turn failed."""
    error: str | None = None
    embedding_size: int = 0
    fingerprint: str = ""


@dataclass
class RequestFacts:
    """A request that has ended: its parameters, its wait for the model, its turns."""

    call: str
    operation: str
    began_at: float
    ended_at: float
    model: str = ""
    choices: int = 1
    """The number of requested answers."""
    loaded: tuple[float, float] | None = None
    """The start and the end of the wait for the model to be in memory."""
    error: str | None = None
    turns: list[TurnFacts] = field(default_factory=list)


@dataclass(frozen=True)
class Span:
    """A span from *began_at* to *ended_at*; *error* is the type of its error."""

    name: str
    began_at: float
    ended_at: float
    attributes: Mapping[str, Value]
    error: str | None = None


def spans_of(request: RequestFacts) -> list[Span]:
    """Return the request's own span, followed by its child spans."""
    turns = request.turns
    failed = [turn.error for turn in turns if turn.stats is None]
    error = request.error or (failed[0] if failed and len(failed) == len(turns) else None)
    ended_at = max(request.ended_at, *(turn.ended_at for turn in turns), request.began_at)
    name = f"{request.operation} {request.model}".rstrip()
    attributes = _request_attributes(request) | _usage_attributes(request)
    if error is not None:
        attributes["error.type"] = error
    spans = [Span(name, request.began_at, ended_at, attributes, error)]
    if request.loaded is not None:
        spans.append(Span("load", *request.loaded, {}, None if turns else error))
    if request.operation == EMBEDDINGS and turns:
        turns = [_merge_texts(turns)]
    for number, turn in enumerate(turns):
        spans += _phases(turn, {"inferd.answer_index": number} if len(turns) > 1 else {})
    return spans


def _request_attributes(request: RequestFacts) -> dict[str, Value]:
    """Return the attributes of the request, with the parameters of its first answer."""
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": PROVIDER,
        "inferd.call": request.call,
    }
    if request.model:
        attributes["gen_ai.request.model"] = request.model
    if not request.turns:
        return attributes
    first = request.turns[0]
    attributes["inferd.priority"] = first.priority.label
    if request.operation == EMBEDDINGS:
        return attributes
    if request.choices > 1:
        attributes["gen_ai.request.choice.count"] = request.choices
    if first.n_predict >= 0:
        attributes["gen_ai.request.max_tokens"] = first.n_predict
    sampling = first.sampling
    return attributes | {
        "gen_ai.request.temperature": sampling.temp,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": float(sampling.top_k),
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.seed": sampling.seed,
    }


def _usage_attributes(request: RequestFacts) -> dict[str, Value]:
    """Return the attributes of the usage. The prompt of several answers counts once."""
    turns = request.turns
    if not turns:
        return {}
    prompts = turns if request.operation == EMBEDDINGS else turns[:1]
    attributes: dict[str, Value] = {
        "gen_ai.response.model": request.model,
        "gen_ai.usage.input_tokens": sum(turn.input_tokens for turn in prompts),
        "inferd.cached_tokens": sum(turn.stats.cached_tokens for turn in prompts if turn.stats),
        "inferd.parks": sum(turn.stats.parks for turn in turns if turn.stats),
    }
    if turns[0].fingerprint:
        attributes["inferd.fingerprint"] = turns[0].fingerprint
    if request.operation == EMBEDDINGS:
        size = turns[0].embedding_size
        return attributes | ({"gen_ai.embeddings.dimension.count": size} if size else {})
    reasons = [UNFINISHED if t.stats is None else t.stats.stop_reason for t in turns]
    return attributes | {
        "gen_ai.usage.output_tokens": sum(turn.output_tokens for turn in turns),
        "gen_ai.response.finish_reasons": reasons,
        "inferd.context_shifts": sum(turn.stats.shifts for turn in turns if turn.stats),
    }


def _merge_texts(turns: Sequence[TurnFacts]) -> TurnFacts:
    """Return the texts of an embedding request as one turn, as they are processed in parallel."""
    started = [turn.started_at for turn in turns if turn.started_at is not None]
    return TurnFacts(
        queued_at=min(turn.queued_at for turn in turns),
        started_at=min(started, default=None),
        ended_at=max(turn.ended_at for turn in turns),
        error=next((turn.error for turn in turns if turn.error), None),
    )


def _phases(turn: TurnFacts, attributes: Mapping[str, Any]) -> list[Span]:
    """Return the consecutive spans of a turn; the last one has the turn's error."""
    moments = {"queue": turn.queued_at, "prefill": turn.started_at, "decode": turn.first_token_at}
    began = [(name, at) for name, at in moments.items() if at is not None]
    ends = [at for _, at in began[1:]] + [turn.ended_at]
    errors = [None] * (len(began) - 1) + [turn.error]
    return [
        Span(name, at, end, attributes, error)
        for (name, at), end, error in zip(began, ends, errors, strict=True)
    ]


class TracedRequest:
    """A request that has not ended."""

    def __init__(self, request: Request, model: str):
        params = request.params
        is_ids = getattr(params, "prompt_tokens", None) is not None
        raw = (is_ids or getattr(params, "raw", False)) and params.messages is None
        self.parent: str = params.traceparent
        assumed = request.row.operation
        self.facts = RequestFacts(
            call=request.call,
            operation=COMPLETION if raw or assumed is None else assumed.value,
            began_at=time.monotonic(),
            ended_at=0.0,
            model=model,
            choices=getattr(params, "n", 1),
        )
        self.model_request: ResidencyRequest | None = None
        self.turns: dict[Turn, TurnFacts | None] = {}
        """The turns in the order of their starts; None for a turn that has not ended."""
        self.answered = False


current_request: ContextVar[TracedRequest | None] = ContextVar("current_request", default=None)
"""The request of the current task or of its parent."""


def note_model_request(model_request: ResidencyRequest) -> None:
    """Record that the current request needs a model that may have to be loaded."""
    traced = current_request.get()
    if traced is not None:
        traced.model_request = model_request


def clear_current_request() -> None:
    """Detach this task, which inherited its context, from the request."""
    current_request.set(None)
