"""The sessions that have a request under way, by caller and id."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from ....backends.errors import SessionBusy
from ..callers.caller import Caller


class Reservation:
    """The place of the only request of a session. Its request owns it."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        """The scope of the request's turn, if it has one; cancelling the scope ends the turn."""
        self.released = anyio.Event()


class SessionReservations:
    """The reservations of all sessions. They belong to the event loop."""

    def __init__(self) -> None:
        self._by_session: dict[tuple[str, str, str], Reservation] = {}

    @contextmanager
    def reserve(self, caller: Caller, session_id: str) -> Iterator[Reservation]:
        """Reserve a session.

        :raises SessionBusy: the session has a request under way.
        """
        reservation = Reservation()
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
            reservation.released.set()

    def find(self, caller: Caller, session_id: str) -> Reservation | None:
        """Return the reservation of a session, or None if it has no request under way."""
        return self._by_session.get((*caller.user, session_id))
