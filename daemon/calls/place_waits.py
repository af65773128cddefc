"""Calls on contexts: a context is in use during a call, which may have to wait for its place."""

from __future__ import annotations

from functools import wraps
from typing import Any

from ...ipc.messages import CALLS
from ...ipc.server.request import Request
from ...sessions import PlaceWait, Session
from ..core import Daemon
from .arguments import priority_of, seconds_of
from .models.residency_requests import Call, shorten_timeouts

WITHOUT_PLACE = {
    *("fini_single", "parameters", "history", "cancel", "park"),
    *("finalize_execution_context", "close_execution_context", "delete_session"),
}
"""Calls that read a context or end it, and therefore need no place."""


def with_place(name: str, call: Call) -> Call:
    """Return *call*, during which its context is not idle. If the context has yielded its place,
    the call first waits for one.
    """
    if "context" not in CALLS[name].params.__struct_fields__ or name in WITHOUT_PLACE:
        return call

    @wraps(call)
    async def run_with_place(daemon: Daemon, request: Request) -> Any:
        session = daemon.session(request)
        session.calls_under_way += 1
        try:
            if daemon.sessions.live.has_yielded(session) and not daemon.draining:
                await _wait_for_place(daemon, request, session)
                daemon.session(request)  # raises an error if it has ended
            return await call(daemon, request)
        finally:
            session.calls_under_way -= 1
            session.used_at = daemon.ledger.seconds()
            daemon.sessions.places.session_rested()

    return run_with_place


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
