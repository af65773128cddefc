"""Calls for copies of sessions at other daemons."""

from __future__ import annotations

import secrets

import msgspec

from ....backends.errors import InvalidArgument, NotFound
from ....ipc import messages as w
from ....ipc.names import check_label
from ....ipc.server.connection import Request
from ....scheduler.owner import Owner
from ....sessions import StoredSession, Transfer, check_id, decode_change, encode_change
from ...core import Daemon


async def read_copy(daemon: Daemon, request: Request) -> w.ReadCopyResult:
    """Return a whole session, to be stored as a copy at another daemon."""
    p: w.ReadCopyParams = request.params
    owner = await _owner(daemon, request, p.on_behalf_of, p.label)
    sessions = daemon.sessions
    holder, live = sessions.live.find_id(owner, p.session_id)
    session = live or sessions.dormant.find_session(owner, p.session_id)
    if session is None or not session.recording.is_stored:
        raise NotFound(f"there is no stored session {p.session_id!r}")
    copier = None if live is None else daemon.copies.copier_of(holder)
    if copier is not None:
        stream, data = copier.read_whole(session.recording)
        return w.ReadCopyResult(
            stream=stream.id, number=stream.number, data=data, model=session.model.name
        )
    data = encode_change(session.recording.take_copy(whole=True))
    return w.ReadCopyResult(
        stream=secrets.token_hex(16), number=1, data=data, model=session.model.name
    )


async def store_copy(daemon: Daemon, request: Request) -> w.Empty:
    """Apply a change to a copy; return when it is in the journal."""
    daemon.check_open()
    p: w.StoreCopyParams = request.params
    check_id(p.session_id)
    check_label(p.label)
    document = _document(daemon, p)
    if document is None:
        return w.Empty()
    change = decode_change(document)
    owner = await _owner(daemon, request, p.on_behalf_of, p.label)
    stream = Transfer(p.stream, p.peer, copy=True)
    if change.facts is not None:
        facts = msgspec.structs.replace(change.facts, on_behalf_of=p.on_behalf_of)
        change = msgspec.structs.replace(change, facts=facts)
        daemon.registry.catalog.get(facts.model, owner.user)  # raises an error if it is unknown
        model = daemon.dormant_lease(StoredSession(owner, p.session_id, 0.0, facts, b""))
    else:
        model = None
    await daemon.sessions.copies.write_change(owner, p.session_id, stream, p.number, change, model)
    return w.Empty()


def _document(daemon: Daemon, p: w.StoreCopyParams) -> bytes | None:
    """Return a change once all of its parts have arrived, and None before.

    :raises InvalidArgument: this is not the next part, or the change has another size than
        announced.
    """
    upload = daemon.copy_uploads.add_part(f"{p.stream}/{p.number}", p.offset, p.data)
    if upload.document is None:
        if upload.received >= p.size:
            raise InvalidArgument(f"the parts have {upload.received} bytes, but `size` is {p.size}")
        return None
    daemon.copy_uploads.remove(f"{p.stream}/{p.number}")
    return upload.document


async def _owner(daemon: Daemon, request: Request, on_behalf_of: str, label: str) -> Owner:
    """Return the owner of a session that the caller names.

    :raises InferdError: the caller may not act on behalf of the user.
    """
    user = request.owner.user
    if on_behalf_of:
        user = await daemon.connections.access.identify(request.connection, on_behalf_of)
    return Owner(user, label)
