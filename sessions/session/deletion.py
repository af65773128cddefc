"""Deletion of ended sessions: their rows in the journal, their KV states in memory and on disk."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from ...backends.errors import BackendError, WorkerCrashed
from ...scheduler.owner import Owner
from .core import name_of_id
from .session import Session

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
                self.pending.pop(session, None)
