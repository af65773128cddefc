"""Calls that need a model pass the turnstile first: with their class, their timeouts, counted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial, wraps
from typing import Any

import msgspec

from ...ipc.server.server import Request
from ...scheduler.priority import Priority
from ...sessions import Session
from ...sessions.admission.forecast import Ticket
from ..core import Daemon
from ..models.model import Lease, Model
from ..residency.gate import Caller
from ..traces.requests import note_visit
from .arguments import TIMEOUT_S_LEAST, priority_of, seconds_of

__all__ = ("passing", "waiting_turns")

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
QUESTIONS = {"apply_template", "detokenize", "tokenize"}
EMBED = "embed"


def passing(name: str, call: Call) -> Call:
    """Return *call*, kept back until the model that it needs is in memory and it is its turn."""
    if name not in TURNS | INPUTS | QUESTIONS | {EMBED}:
        return call

    @wraps(call)
    async def passed(daemon: Daemon, request: Request) -> Any:
        found = _visit(daemon, request)
        if found is None:
            return await call(daemon, request)
        model, visit, ticket = found
        note_visit(visit)
        try:
            async with daemon.registry.turnstile.visit(model, visit):
                if ticket is not None and visit.waited:
                    daemon.ledger.model_loaded(ticket)
                    _take_off(request, daemon.registry.seconds() - visit.since)
                return await call(daemon, request)
        finally:
            if ticket is not None and visit.waited:
                daemon.ledger.release_place(ticket)

    return passed


def _visit(daemon: Daemon, request: Request) -> tuple[Model, Caller, Ticket | None] | None:
    """Return the visit that a call makes; None: the call refuses anyway, whatever is loaded."""
    now, p = daemon.registry.seconds(), request.params
    if request.call in QUESTIONS:
        return daemon.graph(request.connection, p.graph).lease.model, Caller(now), None
    if request.call == EMBED:
        return _embeds(daemon, request)
    session = daemon.session(request)
    lease = session.model
    rests = not session.active or request.call == PULLED
    if daemon.draining or not rests or not isinstance(lease, Lease) or lease.closed:
        return None
    priority = priority_of(getattr(p, "priority", ""))
    visit = Caller(
        now,
        session.settings.priority if priority is None else priority,
        about=session,
        turn=request.call in TURNS and not session.active,
        queue_timeout_s=seconds_of(getattr(p, "queue_timeout_s", 0.0)),
        timeout_s=seconds_of(getattr(p, "timeout_s", 0.0)),
        absent=partial(_absent, session, daemon.config.reader_wait_ms / 1000),
        on_look=partial(_touch, daemon, session),
    )
    ticket = None
    if visit.turn:
        slots = lease.model.slots_configured
        ticket = Ticket(session.owner, lease.name, slots, visit.priority, 0)
        visit.on_wait = partial(daemon.ledger.hold_place, ticket)
    return lease.model, visit, ticket


def _embeds(daemon: Daemon, request: Request) -> tuple[Model, Caller, Ticket]:
    """Return the visit of texts, which have no session yet; they wait as one task."""
    p = request.params
    lease = daemon.graph(request.connection, p.graph).lease
    priority = priority_of(p.priority)
    visit = Caller(
        daemon.registry.seconds(),
        Priority.NORMAL if priority is None else priority,
        queue_timeout_s=seconds_of(p.queue_timeout_s),
        timeout_s=seconds_of(p.timeout_s),
    )
    slots = lease.model.slots_configured
    ticket = Ticket(request.connection.peer.uid, lease.name, slots, visit.priority, 0)
    visit.on_wait = partial(daemon.ledger.hold_place, ticket)
    return lease.model, visit, ticket


def _absent(session: Session, wait_s: float) -> bool:
    turn = session.turn
    return session.active and turn is not None and turn.unread_for(wait_s)


def _touch(daemon: Daemon, session: Session) -> None:
    """Note that a session is not idle: it waits."""
    session.used_at = daemon.registry.seconds()


def _take_off(request: Request, waited_s: float) -> None:
    """Let the turn's timeouts be what is left of them."""
    given = {key: getattr(request.params, key, 0.0) for key in ("queue_timeout_s", "timeout_s")}
    left = {key: max(TIMEOUT_S_LEAST, s - waited_s) for key, s in given.items() if s}
    if left:
        request.params = msgspec.structs.replace(request.params, **left)


def waiting_turns(daemon: Daemon) -> list[tuple[Model, Caller, Session]]:
    """Return the turns that wait for a model, in their order."""
    return [
        (model, visit, visit.about)
        for model, visit in daemon.registry.turnstile.waiting
        if visit.turn
    ]
