"""Admission of calls that need a model: their priority, timeouts and place in the queue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any

import msgspec

from ....ipc.server.request import Request
from ....scheduler.priority import Priority
from ....sessions import Session
from ....sessions.admission.bounds import Ticket
from ...core import Daemon
from ...models.model import Lease, ManagedModel
from ...residency.residency import ResidencyRequest
from ...traces.current_request import TOKEN_CALL, note_model_request
from ..arguments import TIMEOUT_S_MIN, priority_of, seconds_of

Call = Callable[[Daemon, Request], Awaitable[Any]]

MODEL_QUERIES = {"apply_template", "detokenize", "tokenize"}
INPUT = "set_input"
EMBED = "embed"
TURN_CALLS = {
    *("answers", "chat", "compute", TOKEN_CALL, EMBED, "prompt_compute", "resume"),
    *("run_inference", "stream"),
}
NEED_MODEL = TURN_CALLS | MODEL_QUERIES | {INPUT, "save_state"}
"""The calls that wait until their model is loaded and admits them."""


def admitted(name: str, call: Call) -> Call:
    """Return *call*, which first passes the residency gate of its model if it needs the model."""
    if name not in NEED_MODEL:
        return call

    @wraps(call)
    async def run_admitted(daemon: Daemon, request: Request) -> Any:
        found = _gate_request(daemon, request)
        if found is None:
            return await call(daemon, request)
        model, gate_request, ticket = found
        note_model_request(gate_request)
        try:
            with daemon.counters.counted_request(model if gate_request.is_turn else None):
                async with daemon.registry.gate.admit(model, gate_request):
                    if ticket is not None and gate_request.has_waited:
                        daemon.ledger.model_loaded(ticket)
                        shorten_timeouts(request, daemon.registry.seconds() - gate_request.since)
                    return await call(daemon, request)
        finally:
            if ticket is not None and gate_request.has_waited:
                daemon.ledger.remove_load_wait(ticket)

    return run_admitted


class _WaitingCall:
    """The gate's listener for a call. While the call waits, *ticket* counts as a waiting turn, and
    *session* does not become idle.
    """

    def __init__(self, daemon: Daemon, ticket: Ticket | None, session: Session | None):
        self._daemon, self._ticket, self._session = daemon, ticket, session

    def wait_begins(self) -> None:
        if self._ticket is not None:
            self._daemon.ledger.add_ticket(self._ticket)

    def wait_continues(self) -> None:
        if self._session is not None:
            self._session.used_at = self._daemon.registry.seconds()


def _gate_request(
    daemon: Daemon, request: Request
) -> tuple[ManagedModel, ResidencyRequest, Ticket | None] | None:
    """Return a call's model, its request to the gate, and its ticket if it counts as waiting.

    Return None if the call needs no admission, because it will fail by itself.
    """
    now, p = daemon.registry.seconds(), request.params
    if request.call in MODEL_QUERIES:
        gate_request = ResidencyRequest(Priority.NORMAL, now, user=request.owner.user)
        return daemon.graph(request).lease.model, gate_request, None
    session = None
    if request.call == EMBED:  # its texts have no session, and wait as one task
        lease, default = daemon.graph(request).lease, Priority.NORMAL
    else:
        session = daemon.session(request)
        can_begin = not session.active or request.call == TOKEN_CALL
        if daemon.draining or not can_begin or not isinstance(session.model, Lease):
            return None
        lease, default = session.model, session.settings.priority
        if lease.closed:
            return None
    priority = priority_of(getattr(p, "priority", ""))
    priority = default if priority is None else priority
    ticket = None
    if request.call != INPUT and not (session is not None and session.active):
        slots = lease.model.slots_configured
        ticket = Ticket(request.owner, lease.name, slots, priority, 0)
    gate_request = ResidencyRequest(
        priority,
        now,
        user=request.owner.user,
        subject=session,
        is_turn=ticket is not None and session is not None,
        queue_timeout_s=seconds_of(getattr(p, "queue_timeout_s", 0.0)),
        timeout_s=seconds_of(getattr(p, "timeout_s", 0.0)),
        is_absent=partial(_is_absent, session, daemon.config.reader_lag_ms / 1000),
        listener=_WaitingCall(daemon, ticket, session),
    )
    return lease.model, gate_request, ticket


def _is_absent(session: Session | None, wait_s: float) -> bool:
    """Return whether the reader of a session's turn has given no credit for *wait_s*, or the turn
    cannot use the model because its session has no place.
    """
    turn = None if session is None or not session.active else session.turn
    return turn is not None and (turn.has_no_place or turn.unread_for(wait_s))


def shorten_timeouts(request: Request, waited_s: float) -> None:
    """Subtract a wait from the turn's timeouts."""
    timeouts = {key: getattr(request.params, key, 0.0) for key in ("queue_timeout_s", "timeout_s")}
    rest = {key: max(TIMEOUT_S_MIN, s - waited_s) for key, s in timeouts.items() if s}
    request.params = msgspec.structs.replace(request.params, **rest)
