"""Deletion of ended sessions: their rows in the journal, their KV states in memory and on disk, and
their images and sounds; the notes on sessions that the daemon has deleted by itself, which their
owners can read.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import msgspec
import structlog

from ...backends.errors import BackendError, WorkerCrashed
from ...scheduler.owner import Owner
from ..conversation.session import Session
from ..entries import encode
from ..identity import name_of_id
from ..journal.journal import Journal

log = structlog.get_logger(logger_name="sessions")

Delete = Callable[[Owner, str], Awaitable[None]]


async def nothing(owner: Owner, name: str) -> None:
    """Delete nothing, because there is no journal or there are no KV files."""


class SessionDeletion:
    """Sessions that are being deleted. Owned by the manager, on the daemon's event loop.

    *delete_files* deletes a session's KV files, by owner and `Session.name`; *delete_rows* its rows
    in the journal, by owner and id. The id cannot be opened until the deletion has finished,
    because a new session with it would lose its states too.
    """

    def __init__(self, delete_files: Delete = nothing, delete_rows: Delete = nothing) -> None:
        self.delete_files, self._delete_rows = delete_files, delete_rows
        self.pending: dict[Session, None] = {}
        """Ended sessions that are not deleted yet, in order."""

    def under_way(self, owner: Owner, session_id: str) -> bool:
        """Return whether a session with this id is still being deleted."""
        return any(s.owner == owner and s.session_id == session_id for s in self.pending)

    def delete_later(self, session: Session) -> None:
        """Leave an ended session to the next `drain`."""
        self.pending[session] = None

    async def delete_now(self, session: Session) -> None:
        """Delete an ended session. If that fails or the caller is cancelled, the session stays
        pending, and the next `drain` tries once more.

        :raises BackendError: a row or a file cannot be deleted.
        """
        self.delete_later(session)
        await self.delete_states(session)
        session.release_contents()
        await session.ledger.media.delete_unused(session.owner.user)
        self.pending.pop(session, None)

    async def delete_states(self, session: Session) -> None:
        """Delete a session's rows in the journal, and its KV states in memory and on disk.

        :raises BackendError: a row or a file cannot be deleted.
        """
        if session.session_id is not None:
            await self._delete_rows(session.owner, session.session_id)
        await self.delete_kv_states(session)

    async def delete_kv_states(self, session: Session) -> None:
        """Delete a session's KV states in memory and on disk.

        :raises BackendError: a file cannot be deleted.
        """
        client = session.model.loaded
        if client is not None:
            with suppress(WorkerCrashed):  # its memory is freed already
                await client.delete_session_states(session.owner, session.name)
        await self.delete_files(session.owner, session.name)

    async def delete_stored_id(self, owner: Owner, session_id: str) -> None:
        """Delete rows and files under an id that no session has.

        :raises BackendError: a row or a file cannot be deleted.
        """
        await self._delete_rows(owner, session_id)
        await self.delete_files(owner, name_of_id(owner.label, session_id))

    async def drain(self) -> None:
        """Delete all pending sessions. A session whose deletion fails is logged and no longer
        pending: what is left of it stays on disk, and its id can be opened again.
        """
        for session in list(self.pending):
            try:
                await self.delete_now(session)
            except BackendError as error:
                log.warning("session.not_deleted", session=session.name, cause=str(error))
                session.release_contents()
                self.pending.pop(session, None)


DELETION_NOTES_MAX = 100
"""Notes of one owner; the oldest one is dropped for a further one."""
DELETION_OWNERS_MAX = 1000
"""Owners with notes; those of the owner whose last note is the oldest are dropped for another's."""


class DeletionNote(msgspec.Struct, frozen=True, kw_only=True):
    """A session that was deleted *at* a time in seconds since 1970, for a *reason*."""

    session_id: str
    title: str
    model: str
    at: float
    reason: str


_decode = msgspec.msgpack.Decoder(list[DeletionNote]).decode


class DeletionNotes:
    """The notes of all owners, the latest last. Owned by the manager; *journal* stores them."""

    def __init__(self, journal: Journal | None):
        self._journal = journal
        self._by_owner: OrderedDict[Owner, list[DeletionNote]] = OrderedDict()
        """The owner with the latest note is last."""

    def restore(self, stored: Mapping[Owner, bytes]) -> None:
        """Take over the notes that the journal has stored."""
        found = {}
        for owner, data in stored.items():
            with suppress(msgspec.MsgspecError):
                found[owner] = _decode(data)
        for owner in sorted((o for o in found if found[o]), key=lambda o: found[o][-1].at):
            self._by_owner[owner] = found[owner]

    def add(self, owner: Owner, session_id: str, *, title: str, model: str, reason: str) -> None:
        """Add a note on a session that is being deleted now."""
        at = time.time() if self._journal is None else self._journal.date()
        note = DeletionNote(session_id=session_id, title=title, model=model, at=at, reason=reason)
        self._by_owner[owner] = [*self._by_owner.pop(owner, []), note][-DELETION_NOTES_MAX:]
        self._store(owner)
        while len(self._by_owner) > DELETION_OWNERS_MAX:
            self._store(self._by_owner.popitem(last=False)[0])

    def of(self, owner: Owner) -> list[DeletionNote]:
        """Return the notes of an owner, or of all labels of a user, the latest first."""
        found = [note for o, notes in self._by_owner.items() if owner.includes(o) for note in notes]
        return sorted(found, key=lambda note: -note.at)[:DELETION_NOTES_MAX]

    async def clear(self, owner: Owner) -> None:
        """Delete the notes of an owner, or of all labels of a user without one. The journal has
        deleted them when this returns.
        """
        for found in [each for each in self._by_owner if owner.includes(each)]:
            del self._by_owner[found]
            self._store(found)
        if self._journal is not None:
            await self._journal.wait_deletions()

    def _store(self, owner: Owner) -> None:
        if self._journal is not None:
            self._journal.store_deletions(owner, lambda: self._packed(owner))

    def _packed(self, owner: Owner) -> bytes:
        notes = self._by_owner.get(owner)
        return encode(notes) if notes else b""
