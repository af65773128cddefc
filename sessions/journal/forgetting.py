"""Deleting what is left of sessions: in the journal, and KV states in memory and on disk."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from ...backends.errors import BackendError, WorkerCrashed
from ..session.session import Session

log = structlog.get_logger(room="sessions")

Forget = Callable[[int, str], Awaitable[None]]


async def nothing(owner: int, name: str) -> None:
    """Forget nothing: none is kept."""


class Forgetting:
    """Sessions that are being forgotten. Owned by the manager, on the daemon's event loop.

    *files* deletes the KV files of a session, by its owner and `Session.name`, *rows* what the
    journal has of it, by its id. Until all is deleted the session's id cannot be opened: a new
    session would lose its states, too.
    """

    def __init__(self, files: Forget = nothing, rows: Forget = nothing) -> None:
        self.files, self._rows = files, rows
        self._left: dict[Session, None] = {}

    def under_way(self, owner: int, session_id: str) -> bool:
        """Tell whether a session with this id is not yet forgotten."""
        return any(s.owner == owner and s.session_id == session_id for s in self._left)

    @property
    def waiting(self) -> bool:
        """Tell whether `drain` has something to do."""
        return bool(self._left)

    def forget_later(self, session: Session) -> None:
        """Leave a session that has ended to the next `drain`."""
        self._left[session] = None

    async def forget_now(self, session: Session) -> None:
        """Forget a session that has ended; if the caller is cancelled, the next `drain` does.

        :raises BackendError: a file of it cannot be deleted; the next `drain` tries again.
        """
        self.forget_later(session)
        await self.delete_states(session)
        self._left.pop(session, None)

    async def delete_states(self, session: Session) -> None:
        """Delete what is written of a session, and its KV states wherever they lie.

        :raises BackendError: something of it cannot be deleted.
        """
        if session.session_id is not None:
            await self._rows(session.owner, session.session_id)
        client = session.model.loaded
        if client is not None:
            with suppress(WorkerCrashed):  # what it held is gone with it
                await client.forget(session.owner, session.name)
        await self.files(session.owner, session.name)

    async def forget_id(self, owner: int, session_id: str) -> None:
        """Delete what lies on disk under an id that no session has.

        :raises BackendError: something of it cannot be deleted.
        """
        await self._rows(owner, session_id)
        await self.files(owner, f"id:{session_id}")

    async def drain(self) -> None:
        """Forget the sessions that were left; what cannot be deleted is logged."""
        for session in list(self._left):
            try:
                await self.forget_now(session)
            except BackendError as error:
                log.warning("session.not_forgotten", session=session.name, cause=str(error))
                self._left.pop(session, None)
