"""The run of a call: the waits for its context's place and for its model, and then its function.

The call's row says which of them it needs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from ...backends.errors import Cancelled, EndOfSequence, InferdError, SessionBusy
from ...ipc.messages import Call, ContextUse, ModelUse, Starts, StreamParams
from ...ipc.server.connection import Request
from ...ipc.superseding import SUPERSEDED
from ...scheduler.owner import Priority
from ...sessions import PlaceWait, Session
from ...sessions.admission.bounds import Ticket
from ..core import Daemon
from ..models.model import ManagedModel
from ..models.registry import Lease
from ..residency.residency import ResidencyRequest
from ..traces.spans import note_model_request
from .arguments import TIMEOUT_S_MIN, priority_of, seconds_of

CallFunction = Callable[[Daemon, Request], Awaitable[Any]]
ERRORS_KEPT = (Starts.TURN, Starts.TOKEN)
"""Calls whose errors stay in the metadata of their context: a guest or host of wasi-nn gets only
the number of an error, and reads the rest at index 1.
"""
NO_FAILURES = (EndOfSequence, Cancelled, SessionBusy)
"""The regular end, the end by a client, and a call beside the turn that the metadata describes."""


def with_waits(row: Call, function: CallFunction) -> CallFunction:
    """Return *function*, which first waits for what the call's row says."""
    if row.context is ContextUse.WORK:
        return partial(_run_on_context, function)
    return function if row.model is ModelUse.NONE else partial(_run_with_model, function)


async def _run_on_context(function: CallFunction, daemon: Daemon, request: Request) -> Any:
    """Run a call, during which its context is not idle. If the context has yielded its place, the
    call first waits for one. A call with `supersede` first cancels the owner's previous one with
    this key.
    """
    key = getattr(request.params, "supersede", "")
    if not key:
        return await _run_with_place(function, daemon, request)
    cancel = partial(request.cancel, SUPERSEDED, by="supersede")
    async with daemon.newest.supersede((request.owner, key), cancel):
        return await _run_with_place(function, daemon, request)


async def _run_with_place(function: CallFunction, daemon: Daemon, request: Request) -> Any:
    try:
        session = daemon.session(request)
        session.calls_under_way += 1
        try:
            if daemon.sessions.live.has_yielded(session) and not daemon.draining:
                await _wait_for_place(daemon, request, session)
                daemon.session(request)  # raises an error if it has ended
            if request.row.model is ModelUse.NONE:
                return await function(daemon, request)
            return await _run_with_model(function, daemon, request)
        finally:
            session.calls_under_way -= 1
            session.used_at = daemon.ledger.seconds()
            daemon.sessions.places.session_rested()
    except InferdError as exc:
        keep_error(daemon, request, exc)
        raise


def keep_error(daemon: Daemon, request: Request, error: InferdError) -> None:
    """Keep the error of a turn in the metadata of its context, unless the turn has an input of its
    own: a gateway or library may make such a call in place of `compute`.
    """
    if request.row.starts not in ERRORS_KEPT or isinstance(error, NO_FAILURES):
        return
    p = request.params
    if isinstance(p, StreamParams) and any(
        given is not None for given in (p.prompt, p.prompt_tokens, p.messages, p.infill)
    ):
        return
    with suppress(InferdError):  # the call may have named no context, or a closed one
        daemon.session(request).note_failure(error)


async def _wait_for_place(daemon: Daemon, request: Request, session: Session) -> None:
    since, p = daemon.ledger.seconds(), request.params
    requested = priority_of(getattr(p, "priority", ""))
    quota = daemon.ledger.bounds.quota_of(session.owner.user)
    priority = session.settings.priority if requested is None else requested
    wait = PlaceWait(
        min(priority, quota.priority_max),
        seconds_of(getattr(p, "queue_timeout_s", 0.0)),
        seconds_of(getattr(p, "timeout_s", 0.0)),
    )
    await daemon.sessions.places.restore_place(session, wait)
    shorten_timeouts(request, daemon.ledger.seconds() - since)


def shorten_timeouts(request: Request, waited_s: float) -> None:
    """Subtract a wait from the turn's timeouts."""
    timeouts = {key: getattr(request.params, key, 0.0) for key in ("queue_timeout_s", "timeout_s")}
    rest = {key: max(TIMEOUT_S_MIN, s - waited_s) for key, s in timeouts.items() if s}
    request.params = msgspec.structs.replace(request.params, **rest)


async def _run_with_model(function: CallFunction, daemon: Daemon, request: Request) -> Any:
    """Run a call once the loader admits it to its model."""
    found = _gate_request(daemon, request)
    if found is None:
        return await function(daemon, request)
    model, gate_request, ticket = found
    note_model_request(gate_request)
    try:
        with daemon.counters.counted_request(model if gate_request.is_turn else None):
            async with daemon.registry.loader.admit(model, gate_request):
                if ticket is not None and gate_request.has_waited:
                    daemon.ledger.model_loaded(ticket)
                    shorten_timeouts(request, daemon.registry.seconds() - gate_request.since)
                return await function(daemon, request)
    finally:
        if ticket is not None and gate_request.has_waited:
            daemon.ledger.remove_load_wait(ticket)


class _WaitingCall:
    """A call that the loader may have to hold. While it waits, *ticket* counts as a waiting turn,
    and *session* does not become idle.
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
    """Return a call's model, its request to the loader, and its ticket if it counts as waiting.

    Return None if the call needs no admission, because it will fail by itself.
    """
    now, p, row = daemon.registry.seconds(), request.params, request.row
    session = None
    if row.context is None:  # texts without a session wait as one task
        lease, default = daemon.graph(request).lease, Priority.NORMAL
    else:
        session = daemon.session(request)
        can_begin = not session.active or row.starts is Starts.TOKEN
        if daemon.draining or not can_begin or not isinstance(session.model, Lease):
            return None
        lease, default = session.model, session.settings.priority
        if lease.closed:
            return None
    priority = priority_of(getattr(p, "priority", ""))
    priority = min(default if priority is None else priority, lease.ceilings.priority_max)
    ticket = None
    if row.model is ModelUse.QUEUED and not (session is not None and session.active):
        slots = lease.model.slots_configured
        ticket = Ticket(request.owner, lease.base, slots, priority, 0)
    waiting = _WaitingCall(daemon, ticket, session)
    gate_request = ResidencyRequest(
        priority,
        now,
        user=request.owner.user,
        subject=session,
        is_turn=ticket is not None and session is not None,
        queue_timeout_s=seconds_of(getattr(p, "queue_timeout_s", 0.0)),
        timeout_s=seconds_of(getattr(p, "timeout_s", 0.0)),
        is_absent=partial(_is_absent, session, daemon.config.reader_lag_ms / 1000),
        on_wait_begins=waiting.wait_begins,
        on_wait_continues=waiting.wait_continues,
    )
    return lease.model, gate_request, ticket


def _is_absent(session: Session | None, wait_s: float) -> bool:
    """Return whether the reader of a session's turn has given no credit for *wait_s*, or the turn
    cannot use the model because its session has no place.
    """
    turn = None if session is None or not session.active else session.turn
    return turn is not None and (turn.has_no_place or turn.unread_for(wait_s))
