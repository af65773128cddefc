"""The sessions that have a request under way, by caller and id."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from ....backends.errors import Cancelled, SessionBusy
from ..callers.caller import Caller
from .live import LiveTurn


class Reservation:
    """The place of the only request of a session. Its request owns it."""

    def __init__(self, live: LiveTurn | None = None) -> None:
        self.live = live
        """The request's turn, if others can read it."""
        self.scope = anyio.CancelScope()
        """The scope of the request's turn, if it has one; cancelling the scope ends the turn."""
        self.released = anyio.Event()

    def release(self) -> None:
        """Note that the request has ended, and so has its turn."""
        if self.live is not None:
            self.live.close(turn_cancelled() if self.scope.cancel_called else None)
        self.released.set()


class SessionReservations:
    """The reservations of all sessions. They belong to the event loop."""

    def __init__(self) -> None:
        self._by_session: dict[tuple[str, str, str], Reservation] = {}

    @contextmanager
    def reserve(
        self, caller: Caller, session_id: str, live: LiveTurn | None = None
    ) -> Iterator[Reservation]:
        """Reserve a session, perhaps for a turn that others can read.

        :raises SessionBusy: the session has a request under way.
        """
        reservation = Reservation(live)
        key = (*caller.user, session_id)
        if key in self._by_session:
            raise SessionBusy(
                f"the session {session_id!r} has a request under way",
                hint="wait for its end: a session has one turn at a time",
            )
        self._by_session[key] = reservation
        try:
            yield reservation
        finally:
            del self._by_session[key]
            reservation.release()

    def find(self, caller: Caller, session_id: str) -> Reservation | None:
        """Return the reservation of a session, or None if it has no request under way."""
        return self._by_session.get((*caller.user, session_id))


def turn_cancelled() -> Cancelled:
    """Return the error of a turn that another request of its caller has ended."""
    return Cancelled("the turn was cancelled by another request of its caller")
