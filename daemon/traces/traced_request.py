"""The request of the current task, as it is traced."""

from __future__ import annotations

import time
from contextvars import ContextVar

from ...ipc.server.connection import Request
from ...sessions import Turn
from ..residency.residency import ResidencyRequest
from .spans import COMPLETION, RequestFacts, TurnFacts


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
