"""All sessions: handles, owners, the cap, idle expiry, and those that sleep under their id."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import anyio

from ..backends.errors import (
    Busy,
    InvalidArgument,
    SessionBusy,
    SessionExpired,
)
from .ledger import Ledger
from .port import ModelSource
from .session import Session
from .table import Call, State

__all__ = ("SessionManager",)

EXPIRED_REMEMBERED_MAX = 10_000
SESSION_ID_CHARACTERS_MAX = 128


class SessionManager:
    """Opens, finds, expires and closes sessions. Lives on the daemon's event loop.

    A session belongs to the connection (any hashable object) that opened it. One with an id
    outlives it: it becomes dormant, and the same uid attaches it again.
    """

    def __init__(
        self,
        ledger: Ledger,
        new_handle: Callable[[], int],
        *,
        sessions_max: int = 100,
        idle_timeout_s: float = 300.0,
        dormant_max: int = 1000,
        evict: bool = False,
    ):
        self.ledger = ledger
        self.sessions_max = sessions_max
        self.idle_timeout_s = idle_timeout_s
        self.dormant_max = dormant_max
        self.evict = evict
        self.expired = 0
        self._seconds = ledger.seconds
        self._new_handle = new_handle
        self._live: dict[int, tuple[object, Session]] = {}
        self._dormant: OrderedDict[tuple[int, str], Session] = OrderedDict()
        self._gone: OrderedDict[int, object] = OrderedDict()
        self._changed = anyio.Event()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Session]:
        return iter([session for _, session in self._live.values()])

    def of(self, connection: object) -> list[Session]:
        """Return the sessions of a connection."""
        return [session for home, session in self._live.values() if home is connection]

    @property
    def dormant(self) -> int:
        """Sessions that sleep under their id."""
        return len(self._dormant)

    def open(
        self,
        connection: object,
        owner: int,
        model: ModelSource,
        defaults: dict[str, Any],
        session_id: str | None = None,
    ) -> tuple[Session, bool]:
        """Return a session of *connection*, and whether it was there before (by its id).

        :raises Busy: the cap is reached.
        :raises SessionBusy: the id is in use on another connection.
        """
        if session_id is not None:
            found = self._find(connection, owner, session_id, model)
            if found is not None:
                return found, True
        self._make_room()
        handle = self._new_handle()
        session = Session(handle, owner, model, self.ledger, defaults, session_id)
        self._publish(connection, session)
        return session, False

    def _find(
        self, connection: object, owner: int, session_id: str, model: ModelSource
    ) -> Session | None:
        if not 0 < len(session_id) <= SESSION_ID_CHARACTERS_MAX:
            raise InvalidArgument(
                f"a session id of {len(session_id)} characters",
                hint=f"use 1 to {SESSION_ID_CHARACTERS_MAX}",
            )
        for home, session in self._live.values():
            if session.owner == owner and session.session_id == session_id:
                if home is connection:
                    return session
                raise SessionBusy(
                    f"session {session_id!r} is open on another connection",
                    hint="close it there first; it is free once that connection ends",
                )
        return self._wake(connection, owner, session_id, model)

    def _wake(
        self, connection: object, owner: int, session_id: str, model: ModelSource
    ) -> Session | None:
        session = self._dormant.get((owner, session_id))
        if session is not None:
            self._make_room()
            session.adopt(self._new_handle(), model)
            del self._dormant[owner, session_id]
            self._publish(connection, session)
        return session

    def _publish(self, connection: object, session: Session) -> None:
        session.used_at = self._seconds()
        self._live[session.handle] = (connection, session)
        self._changed.set()

    def _make_room(self) -> None:
        if len(self._live) < self.sessions_max:
            return
        idle = sorted((s for s in self if not s.active), key=lambda s: s.used_at)
        if self.evict and idle:
            self._expire(idle[0])
            return
        raise Busy(
            f"{len(self._live)} sessions are open; the limit is {self.sessions_max}",
            hint="close sessions that are done, let idle ones expire, or raise sessions_max",
            data={
                "sessions": len(self._live),
                "sessions_max": self.sessions_max,
                "retry_after_s": self._next_expiry(idle),
            },
        )

    def _next_expiry(self, idle: list[Session]) -> float:
        if not idle:
            return self.ledger.turn_s
        return round(max(0.1, idle[0].used_at + self.idle_timeout_s - self._seconds()), 3)

    def get(self, connection: object, handle: int) -> Session:
        """Return the session behind a handle of *connection* and note that it is used.

        :raises SessionExpired: it was idle for too long.
        :raises InvalidArgument: there never was such a handle on this connection.
        """
        home, session = self._live.get(handle, (None, None))
        if session is not None and home is connection:
            session.used_at = self._seconds()
            return session
        if self._gone.get(handle) is connection:
            raise SessionExpired(f"the session {handle} was idle for {self.idle_timeout_s:g} s")
        raise InvalidArgument(
            f"there is no execution context {handle} on this connection",
            hint="handles end with finalize_execution_context and with their connection",
        )

    def close(self, session: Session) -> None:
        """End a session on purpose: nothing of it is kept."""
        session.stop(Call.CLOSE, "the session was closed")
        del self._live[session.handle]

    def detach(self, session: Session) -> None:
        """Let a session with an id go dormant; one that cannot be woken again is closed."""
        if session.session_id is None or session.state is State.UNLOADED:
            self.close(session)
        else:
            self._sleep(session)

    def leave(self, connection: object) -> None:
        """End the sessions of a connection that is gone; those with an id go dormant."""
        for session in self.of(connection):
            self.detach(session)
        self._gone = OrderedDict((h, c) for h, c in self._gone.items() if c is not connection)

    def unload(self, session: Session) -> None:
        """Part a session from its model: what it said can still be read."""
        session.stop(Call.UNLOAD, "the graph was unloaded")

    def _sleep(self, session: Session) -> None:
        session.sleep()
        del self._live[session.handle]
        assert session.session_id is not None
        self._dormant[session.owner, session.session_id] = session
        while len(self._dormant) > self.dormant_max:
            self._dormant.popitem(last=False)

    def _expire(self, session: Session) -> None:
        home, _ = self._live[session.handle]
        self.expired += 1
        self._gone[session.handle] = home
        while len(self._gone) > EXPIRED_REMEMBERED_MAX:
            self._gone.popitem(last=False)
        if session.session_id is None or session.state is State.UNLOADED:
            session.stop(Call.EXPIRE, "the session expired")
            del self._live[session.handle]
        else:
            self._sleep(session)

    async def expire_idle(self) -> None:
        """Expire sessions for ever, each when its time has come: no polling."""
        while True:
            now = self._seconds()
            resting = [s for s in self if not s.active]
            for session in resting:
                if session.used_at + self.idle_timeout_s <= now:
                    self._expire(session)
            # An active session rests at the earliest now: its time is a whole timeout away.
            ends = [s.used_at for s in self if not s.active] or ([now] if self._live else [])
            wait = min(ends) + self.idle_timeout_s - now if ends else float("inf")
            self._changed = anyio.Event()
            with anyio.move_on_after(wait):
                await self._changed.wait()
