"""Admission of calls that need a model: their priority, timeouts and place in the queue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any

import msgspec

from ...ipc.server.server_connection import Request
from ...scheduler.priority import Priority
from ...sessions import Session
from ...sessions.admission.forecast import Ticket
from ..core import Daemon
from ..models.lease import Lease
from ..models.model import ManagedModel
from ..residency.gate import GateRequest
from ..traces.current_request import note_model_request
from .arguments import TIMEOUT_S_MIN, priority_of, seconds_of

Call = Callable[[Daemon, Request], Awaitable[Any]]

PULLED = "compute_single"
TURNS = {
    "answers",
    "chat",
    "compute",
    PULLED,
    "prompt_compute",
    "resume",
    "run_inference",
    "stream",
}
INPUTS = {"set_input"}
MODEL_QUERIES = {"apply_template", "detokenize", "tokenize"}
EMBED = "embed"


def admitted(name: str, call: Call) -> Call:
    """Return *call* behind the residency gate: it runs once its model is loaded and admits it."""
    if name not in TURNS | INPUTS | MODEL_QUERIES | {EMBED}:
        return call

    @wraps(call)
    async def run_admitted(daemon: Daemon, request: Request) -> Any:
        found = _gate_request(daemon, request)
        if found is None:
            return await call(daemon, request)
        model, needed, ticket = found
        note_model_request(needed)
        try:
            async with daemon.registry.gate.admit(model, needed):
                if ticket is not None and needed.has_waited:
                    daemon.ledger.model_loaded(ticket)
                    _shorten_timeouts(request, daemon.registry.seconds() - needed.since)
                return await call(daemon, request)
        finally:
            if ticket is not None and needed.has_waited:
                daemon.ledger.release_place(ticket)

    return run_admitted


class _CallWait:
    """The listener of a waiting call: *ticket* holds its place, *session* does not become idle."""

    def __init__(self, daemon: Daemon, ticket: Ticket | None, session: Session | None):
        self._daemon, self._ticket, self._session = daemon, ticket, session

    def wait_begins(self) -> None:
        if self._ticket is not None:
            self._daemon.ledger.hold_place(self._ticket)

    def wait_continues(self) -> None:
        if self._session is not None:
            self._session.used_at = self._daemon.registry.seconds()


def _gate_request(
    daemon: Daemon, request: Request
) -> tuple[ManagedModel, GateRequest, Ticket | None] | None:
    """Return a call's request to the gate; None: the call fails in any case."""
    now, p = daemon.registry.seconds(), request.params
    if request.call in MODEL_QUERIES:
        return daemon.graph(request.connection, p.graph).lease.model, GateRequest(now), None
    if request.call == EMBED:
        return _embed_request(daemon, request)
    session = daemon.session(request)
    lease = session.model
    can_begin = not session.active or request.call == PULLED
    if daemon.draining or not can_begin or not isinstance(lease, Lease) or lease.closed:
        return None
    priority = priority_of(getattr(p, "priority", ""))
    priority = session.settings.priority if priority is None else priority
    ticket, is_turn = None, request.call in TURNS and not session.active
    if is_turn:
        ticket = Ticket(session.owner, lease.name, lease.model.slots_configured, priority, 0)
    needed = GateRequest(
        now,
        priority,
        subject=session,
        is_turn=is_turn,
        queue_timeout_s=seconds_of(getattr(p, "queue_timeout_s", 0.0)),
        timeout_s=seconds_of(getattr(p, "timeout_s", 0.0)),
        is_absent=partial(_is_absent, session, daemon.config.reader_lag_ms / 1000),
        listener=_CallWait(daemon, ticket, session),
    )
    return lease.model, needed, ticket


def _embed_request(daemon: Daemon, request: Request) -> tuple[ManagedModel, GateRequest, Ticket]:
    """Return the request of an `embed` call, whose texts have no session and wait as one task."""
    p = request.params
    lease = daemon.graph(request.connection, p.graph).lease
    priority = priority_of(p.priority)
    priority = Priority.NORMAL if priority is None else priority
    slots = lease.model.slots_configured
    ticket = Ticket(request.connection.peer.uid, lease.name, slots, priority, 0)
    needed = GateRequest(
        daemon.registry.seconds(),
        priority,
        queue_timeout_s=seconds_of(p.queue_timeout_s),
        timeout_s=seconds_of(p.timeout_s),
        listener=_CallWait(daemon, ticket, None),
    )
    return lease.model, needed, ticket


def _is_absent(session: Session, wait_s: float) -> bool:
    turn = session.turn
    return session.active and turn is not None and turn.unread_for(wait_s)


def _shorten_timeouts(request: Request, waited_s: float) -> None:
    """Subtract a wait from the turn's timeouts."""
    timeouts = {key: getattr(request.params, key, 0.0) for key in ("queue_timeout_s", "timeout_s")}
    rest = {key: max(TIMEOUT_S_MIN, s - waited_s) for key, s in timeouts.items() if s}
    if rest:
        request.params = msgspec.structs.replace(request.params, **rest)


def waiting_turns(daemon: Daemon) -> list[tuple[ManagedModel, GateRequest, Session]]:
    """Return the turns that wait for a model, in order."""
    return [
        (model, needed, needed.subject)
        for model, needed in daemon.registry.gate.waiting_requests
        if needed.is_turn
    ]
