"""Calls that move a session from one daemon to another."""

from __future__ import annotations

import time

import msgspec

from ...backends.errors import InvalidArgument, NotFound
from ...ipc import messages as w
from ...ipc.names import check_label
from ...ipc.server.request import Request
from ...scheduler.owner import Owner
from ...sessions import ExportedSession, Session, StoredSession, Transfer, check_id
from ..core import Daemon


async def export_session(daemon: Daemon, request: Request) -> w.ExportResult:
    """Return the next part of a dormant session; the first part begins its transfer."""
    p: w.ExportParams = request.params
    owner = Owner(request.owner.user if p.uid is None else p.uid, p.label)
    if not daemon.connections.access.may_control_turns_of(request.connection, owner):
        raise NotFound(f"there is no dormant session {p.session_id!r}")
    moving = daemon.sessions.moving
    if p.offset == 0:
        transfer = Transfer(p.transfer, p.peer)
        hold = moving.hold_session(owner, p.session_id, transfer, request.connection)
    else:
        hold = moving.get_hold(p.transfer, request.connection)
    size = len(hold.document)
    if p.offset > size:
        raise InvalidArgument(f"the exported session has {size} bytes")
    return w.ExportResult(
        data=hold.document[p.offset : p.offset + w.PART_BYTES],
        size=size,
        on_behalf_of=_name_of_user(daemon, request, hold.session),
    )


def _name_of_user(daemon: Daemon, request: Request, session: Session) -> str:
    """Return the name by which the caller imports a session of its user; empty: its own.

    :raises NotFound: the user's name is not known.
    """
    user = session.owner.user
    if user == request.owner.user:
        return ""
    known = daemon.connections.access.own_user_names.name_of(user)
    found = session.settings.on_behalf_of or known
    if not found:
        raise NotFound(
            f"the session belongs to user {user} of this system, and to no user of a gateway",
            hint="only sessions that a gateway has opened can be moved for their users",
        )
    return found


async def import_session(daemon: Daemon, request: Request) -> w.ImportResult:
    """Take the next part of a session; with the last one, the session has arrived."""
    daemon.check_open()
    p: w.ImportParams = request.params
    check_id(p.session_id)
    check_label(p.label)
    complete = daemon.uploads.add_part(p.transfer, p.offset, p.data, p.size)
    if complete is None:
        return w.ImportResult(size=p.size)
    exported, user = ExportedSession.decode(complete), request.owner.user
    if p.on_behalf_of:
        user = await daemon.connections.access.identify(request.connection, p.on_behalf_of)
    daemon.registry.catalog.get(exported.facts.model, user)  # it is known here
    facts = msgspec.structs.replace(
        exported.facts,
        on_behalf_of=p.on_behalf_of,
        transfer=Transfer(p.transfer, p.peer),
    )
    owner = Owner(user, p.label)
    stored = StoredSession(owner, p.session_id, time.time(), facts, exported.past)
    await daemon.sessions.moving.accept_session(
        stored, daemon.dormant_lease(stored), persist=exported.persist
    )
    return w.ImportResult(size=p.size)


async def end_transfer(daemon: Daemon, request: Request) -> w.Empty:
    """End a transfer; return when its outcome is on disk."""
    p: w.EndTransferParams = request.params
    await daemon.sessions.moving.end_transfer(p.transfer, p.outcome, request.connection)
    return w.Empty()


CALLS = (export_session, import_session, end_transfer)
