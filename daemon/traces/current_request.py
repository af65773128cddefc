"""The request that is under way in this task."""

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
"""The calls that begin turns; what each is for, as long as no turn tells it."""


class FollowedRequest:
    """A request under way."""

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
        """Those that have not ended, and their places among all."""
        self.begun = 0
        self.answered = False
        self.ended: dict[int, TurnFacts] = {}


current_request: ContextVar[FollowedRequest | None] = ContextVar("followed", default=None)
"""The request in whose task, or in a child of which, this is asked."""


def note_model_request(model_request: GateRequest) -> None:
    """Note that the request under way here needs a model that may have to be loaded."""
    followed = current_request.get()
    if followed is not None:
        followed.model_request = model_request


def follow_none() -> None:
    """Let the turns that begin in this task be of no request: it has the context of another one."""
    current_request.set(None)


def _operation(request: Request) -> str:
    raw = getattr(request.params, "raw", False) and request.params.messages is None
    return COMPLETION if raw else OPERATIONS[request.call]
