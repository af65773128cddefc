"""The request that the current task handles."""

from __future__ import annotations

import time
from contextvars import ContextVar

from ...ipc.server.server_connection import Request
from ...sessions import Turn
from ..residency.gate import GateRequest
from .spans import CHAT, COMPLETION, EMBEDDINGS, RequestFacts, TurnFacts

PULLED_CALL = "compute_single"
OPERATIONS = {
    "answers": CHAT,
    "chat": CHAT,
    "compute": COMPLETION,
    PULLED_CALL: COMPLETION,
    "embed": EMBEDDINGS,
    "prompt_compute": COMPLETION,
    "resume": CHAT,
    "run_inference": CHAT,
    "stream": CHAT,
}
"""The calls that start turns, with the operation that holds until a turn has started."""


class TracedRequest:
    """A request that has not ended."""

    def __init__(self, request: Request, model: str):
        params = request.params
        self.parent: str = params.traceparent
        self.facts = RequestFacts(
            call=request.call,
            operation=_operation(request),
            began_at=time.monotonic(),
            ended_at=0.0,
            model=model,
            choices=getattr(params, "n", 1),
        )
        self.model_request: GateRequest | None = None
        self.turns: dict[Turn, int] = {}
        """The turns that have not ended, each with its index among all turns."""
        self.turns_started = 0
        self.answered = False
        self.ended: dict[int, TurnFacts] = {}


current_request: ContextVar[TracedRequest | None] = ContextVar("traced", default=None)
"""The request of the current task or of its parent."""


def note_model_request(model_request: GateRequest) -> None:
    """Note that the current request needs a model that may have to be loaded."""
    traced = current_request.get()
    if traced is not None:
        traced.model_request = model_request


def clear_current_request() -> None:
    """Detach this task, which inherited its context, from the request."""
    current_request.set(None)


def _operation(request: Request) -> str:
    raw = getattr(request.params, "raw", False) and request.params.messages is None
    return COMPLETION if raw else OPERATIONS[request.call]
