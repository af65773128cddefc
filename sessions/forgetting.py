"""Deleting what is left of sessions: their KV states, in the worker's memory and on disk."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog

from ..backends.errors import BackendError, WorkerCrashed
from .session import Session

__all__ = ("ForgetFiles", "Forgetting", "no_files")

log = structlog.get_logger()

ForgetFiles = Callable[[int, str], Awaitable[None]]


async def no_files(owner: int, name: str) -> None:
    """Forget nothing: no file is kept."""


class Forgetting:
    """Sessions that are being forgotten. Owned by the manager, on the daemon's event loop.

    *files* deletes what lies on disk of a session, by its owner and `Session.name`. Until all is
    deleted the session's id cannot be opened: a new session would lose its states, too.
    """

    def __init__(self, files: ForgetFiles = no_files) -> None:
        self.files = files
        self._left: dict[Session, None] = {}

    def under_way(self, owner: int, session_id: str) -> bool:
        """Tell whether a session with this id is not yet forgotten."""
        return any(s.owner == owner and s.session_id == session_id for s in self._left)

    @property
    def waiting(self) -> bool:
        """Tell whether `drain` has something to do."""
        return bool(self._left)

    def soon(self, session: Session) -> None:
        """Leave a session that has ended to the next `drain`."""
        self._left[session] = None

    async def now(self, session: Session) -> None:
        """Forget a session that has ended; if the caller is cancelled, the next `drain` does.

        :raises BackendError: a file of it cannot be deleted; the next `drain` tries again.
        """
        self.soon(session)
        await self.states(session)
        self._left.pop(session, None)

    async def states(self, session: Session) -> None:
        """Delete the KV states of a session, wherever they lie.

        :raises BackendError: a file of it cannot be deleted.
        """
        port = session.model.loaded
        if port is not None:
            with suppress(WorkerCrashed):  # what it held is gone with it
                await port.forget(session.owner, session.name)
        await self.files(session.owner, session.name)

    async def drain(self) -> None:
        """Forget the sessions that were left; what cannot be deleted is logged."""
        for session in list(self._left):
            try:
                await self.now(session)
            except BackendError as error:
                log.warning("session.not_forgotten", session=session.name, cause=str(error))
                self._left.pop(session, None)
