"""All sessions: handles, owners, the cap, idle expiry, and those that sleep under their id."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anyio

from ...backends.errors import (
    Busy,
    InvalidArgument,
    QuotaExceeded,
    SessionBusy,
    SessionExpired,
)
from ..admission.ledger import Ledger
from ..journal.entries import StoredSession
from ..journal.forgetting import Forget, Forgetting, nothing
from ..journal.journal import Journal
from ..journal.recording import NoRecording
from ..table import SessionCall, SessionState, step
from ..turns.turn_options import Parameters
from ..worker_client import ModelSource
from .core import SessionSettings
from .dormant import DormantLimits, DormantSessions
from .session import Session

EXPIRED_REMEMBERED_MAX = 10_000
SESSION_ID_CHARACTERS_MAX = 128
BRANCHES_MAX = 16
"""Branches that one call makes."""


class SessionManager:
    """Opens, finds, expires and closes sessions. Lives on the daemon's event loop.

    A session belongs to the connection (any hashable object) that opened it. One with an id
    outlives it: it becomes dormant, and the same uid attaches it again; *journal* keeps it, too.
    `forgetting` deletes what is left of those that have ended.
    """

    def __init__(
        self,
        ledger: Ledger,
        new_handle: Callable[[], int],
        *,
        sessions_max: int = 100,
        idle_timeout_s: float = 300.0,
        dormant_limits: DormantLimits | None = None,
        forget_files: Forget = nothing,
        journal: Journal | None = None,
    ):
        self.ledger = ledger
        self.sessions_max = sessions_max
        self.idle_timeout_s = idle_timeout_s
        self.dormant = DormantSessions(dormant_limits or DormantLimits())
        self.forgetting = Forgetting(
            forget_files, nothing if journal is None else journal.erase_session
        )
        self._journal = journal
        self.expired = self.refused = self.forked = 0
        """Sessions that were idle for too long, that found no room, and that are branches."""
        self._seconds = ledger.seconds
        self._new_handle = new_handle
        self._live: dict[int, tuple[object, Session]] = {}
        self._expired_handles: OrderedDict[int, object] = OrderedDict()
        self._changed = anyio.Event()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Session]:
        return iter([session for _, session in self._live.values()])

    def sessions_of(self, connection: object) -> list[Session]:
        """Return the sessions of a connection."""
        return [session for home, session in self._live.values() if home is connection]

    def open_session(
        self,
        connection: object,
        owner: int,
        model: ModelSource,
        defaults: dict[str, Any],
        session_id: str | None = None,
        *,
        persist: bool = True,
    ) -> tuple[Session, bool]:
        """Return a session of *connection*, and whether it was there before (by its id). A new one
        is written to disk only with *persist*.

        :raises Busy: the cap is reached.
        :raises SessionBusy: the id is in use on another connection.
        """
        if session_id is not None:
            found = self._find(connection, owner, session_id, model)
            if found is not None:
                return found, True
        self._check_cap(owner)
        settings = SessionSettings(Parameters(defaults), persist=persist)
        handle = self._new_handle()
        session = Session(handle, owner, model, self.ledger, settings, session_id)
        self._record(session)
        self._publish(connection, session)
        return session, False

    def _record(self, session: Session, *, found: bool = False) -> None:
        """Have a session with an id written down, unless it is not to be."""
        if (
            self._journal is not None
            and session.session_id is not None
            and session.settings.persist
        ):
            key = session.owner, session.session_id
            session.recording = self._journal.open_recording(session, key, found=found)

    async def stop_persisting(self, session: Session) -> None:
        """Write nothing of a session to disk from now on, and delete what is there."""
        session.settings.persist, session.recording = False, NoRecording()
        await self.forgetting.delete_states(session)

    def restore_sessions(
        self, found: Sequence[StoredSession], model: Callable[[StoredSession], ModelSource]
    ) -> None:
        """Let the sessions that the journal has found sleep under their ids: the longest untouched
        first, as they are given. *model* returns the model of one.
        """
        assert self._journal is not None, "what is found was in it"
        for stored in found:
            session = Session.from_stored(stored, model(stored), self.ledger)
            session.used_at = self._seconds() - self._journal.age_s(stored)
            self._record(session, found=True)
            self.dormant.add_session(session)
        self._forget_dormant()

    def _find(
        self, connection: object, owner: int, session_id: str, model: ModelSource
    ) -> Session | None:
        _check_id(session_id)
        if self.forgetting.under_way(owner, session_id):
            raise SessionBusy(f"session {session_id!r} is being forgotten", hint="try again soon")
        found = self._live_named(owner, session_id)
        if found is None:
            return self._activate(connection, owner, session_id, model)
        home, session = found
        if home is not connection:
            raise SessionBusy(
                f"session {session_id!r} is open on another connection",
                hint="close it there first; it is free once that connection ends",
            )
        return session

    def _live_named(self, owner: int, session_id: str) -> tuple[object, Session] | None:
        for home, session in self._live.values():
            if session.owner == owner and session.session_id == session_id:
                return home, session
        return None

    def _activate(
        self, connection: object, owner: int, session_id: str, model: ModelSource
    ) -> Session | None:
        session = self.dormant.find_session(owner, session_id)
        if session is not None:
            self._check_cap(owner)
            size = len(session.packed)
            session.attach(self._new_handle(), model)  # it may be refused
            self.dormant.remove_session(session, size)
            self._publish(connection, session)
        return session

    def _publish(self, connection: object, session: Session) -> None:
        session.used_at = self._seconds()
        self._live[session.handle] = (connection, session)
        self._changed.set()

    def _check_cap(self, owner: int, wanted: int = 1) -> None:
        """Refuse *wanted* more sessions of a user where a bound is reached.

        :raises QuotaExceeded: the user's own bound is reached.
        :raises Busy: the bound of all sessions is reached.
        """
        self._check_quota(owner, wanted)
        if len(self._live) + wanted <= self.sessions_max:
            return
        idle = sorted((s for s in self if not s.active), key=lambda s: s.used_at)
        self.refused += wanted
        raise Busy(
            f"{len(self._live)} sessions are open; the limit is {self.sessions_max}",
            hint="close sessions that are done, let idle ones expire, or raise sessions_max",
            data={
                "sessions": len(self._live),
                "sessions_max": self.sessions_max,
                "retry_after_s": self._next_expiry(idle),
            },
        )

    def _check_quota(self, owner: int, wanted: int) -> None:
        """Refuse a user more sessions than he may have open.

        :raises QuotaExceeded: with when the first of his idle ones expires.
        """
        quota = self.ledger.bounds.quota_of(owner)
        if quota.sessions_max is None:
            return
        his = [session for session in self if session.owner == owner]
        if len(his) + wanted <= quota.sessions_max:
            return
        self.refused += wanted
        idle = sorted((s for s in his if not s.active), key=lambda s: s.used_at)
        raise QuotaExceeded(
            f"you have {len(his)} sessions open; the limit is {quota.sessions_max}",
            hint="close sessions that are done, or let idle ones expire",
            data={
                "bound": quota.bound("sessions-max"),
                "sessions": len(his),
                "sessions_max": quota.sessions_max,
                "retry_after_s": self._next_expiry(idle),
            },
        )

    def _next_expiry(self, idle: list[Session]) -> float:
        if not idle:
            return self.ledger.turn_s
        return round(max(0.1, idle[0].used_at + self.idle_timeout_s - self._seconds()), 3)

    def get_session(self, connection: object, handle: int) -> Session:
        """Return the session behind a handle of *connection* and note that it is used.

        :raises SessionExpired: it was idle for too long.
        :raises InvalidArgument: there never was such a handle on this connection.
        """
        home, session = self._live.get(handle, (None, None))
        if session is not None and home is connection:
            session.used_at = self._seconds()
            return session
        if self._expired_handles.get(handle) is connection:
            raise SessionExpired(f"the session {handle} was idle for {self.idle_timeout_s:g} s")
        raise InvalidArgument(
            f"there is no execution context {handle} on this connection",
            hint="handles end with finalize_execution_context and with their connection",
        )

    def fork_session(
        self,
        connection: object,
        session: Session,
        count: int,
        session_ids: Sequence[str] = (),
    ) -> list[Session]:
        """Return *count* branches of a session's present state: all of them, or none.

        :raises SessionBusy: a turn is under way, or an id is in use.
        :raises Busy: the cap does not take so many.
        """
        if not 1 <= count <= BRANCHES_MAX:
            raise InvalidArgument(f"{count} branches; it is 1 … {BRANCHES_MAX}")
        self._check_ids(session.owner, count, session_ids)
        step(session.state, SessionCall.FORK)
        self._check_cap(session.owner, count)
        ids: Sequence[str | None] = session_ids or [None] * count
        self.forked += count
        branches = [session.branch(self._new_handle(), session_id) for session_id in ids]
        for branch in branches:
            self._record(branch)
            branch.recording.history_changed()
            self._publish(connection, branch)
        return branches

    def _check_ids(self, owner: int, count: int, session_ids: Sequence[str]) -> None:
        if session_ids and len(set(session_ids)) != count:
            raise InvalidArgument(
                f"{len(set(session_ids))} session ids for {count} branches",
                hint="give one for each, all different, or none",
            )
        for session_id in session_ids:
            _check_id(session_id)
            key = owner, session_id
            if (
                self.dormant.find_session(*key)
                or self.forgetting.under_way(*key)
                or self._live_named(*key)
            ):
                raise SessionBusy(
                    f"there is a session {session_id!r} already", hint="forget it, or take another"
                )

    async def close_session(self, session: Session) -> None:
        """End a session on purpose: nothing of it is kept, and one with an id is forgotten, in
        memory and on disk, before this returns.
        """
        self._drop(session, SessionCall.CLOSE, "the session was closed")
        if session.leaves_state:
            await self._forget_now(session)

    async def forget_session(self, session: Session) -> None:
        """End a session, and forget it before this returns, whether it has an id or not."""
        self._drop(session, SessionCall.CLOSE, "the session was forgotten")
        await self._forget_now(session)

    async def forget_id(self, owner: int, session_id: str) -> bool:
        """Forget a session by its id, wherever it is open or if it sleeps; tell whether there was
        one. What lies on disk under this id is deleted in any case.
        """
        _check_id(session_id)
        live = self._live_named(owner, session_id)
        if live is not None:
            await self.forget_session(live[1])
            return True
        session = self.dormant.find_session(owner, session_id)
        if session is None:
            await self.forgetting.forget_id(owner, session_id)
            return False
        self.dormant.remove_session(session, len(session.packed))
        session.end(SessionCall.CLOSE, "the session was forgotten")
        await self._forget_now(session)
        return True

    async def _forget_now(self, session: Session) -> None:
        try:
            await self.forgetting.forget_now(session)
        except BaseException:
            self._changed.set()  # what is left is done by `expire_idle`
            raise

    def discard_session(self, session: Session) -> None:
        """End a session of which nobody has heard yet."""
        if session.handle in self._live:
            self._drop(session, SessionCall.CLOSE, "the session was not wanted any more")
            self._forget_soon(session)

    def _drop(self, session: Session, call: SessionCall, why: str) -> None:
        session.end(call, why)
        del self._live[session.handle]

    def _forget_soon(self, session: Session) -> None:
        """Forget a session that has ended without a call that could wait for it."""
        if session.leaves_state:
            self.forgetting.forget_later(session)
            self._changed.set()

    def detach_session(self, session: Session) -> None:
        """Let a session with an id go dormant; one that cannot be woken again is closed."""
        if session.session_id is not None and session.state is not SessionState.UNLOADED:
            self._make_dormant(session)
            return
        self._drop(session, SessionCall.CLOSE, "the session was closed")
        self._forget_soon(session)

    def close_connection(self, connection: object) -> None:
        """End the sessions of a connection that is gone; those with an id go dormant."""
        for session in self.sessions_of(connection):
            self.detach_session(session)
        self._expired_handles = OrderedDict(
            (h, c) for h, c in self._expired_handles.items() if c is not connection
        )

    def unload_session(self, session: Session) -> None:
        """Part a session from its model: what it said can still be read."""
        session.end(SessionCall.UNLOAD, "the graph was unloaded")

    def _make_dormant(self, session: Session) -> None:
        session.detach()
        session.used_at = self._seconds()
        del self._live[session.handle]
        self.dormant.add_session(session)
        self._forget_dormant()
        self._changed.set()

    def detach_all(self) -> None:
        """Let all sessions with an id go dormant: the daemon ends."""
        for session in self:
            if session.session_id is not None and session.state is not SessionState.UNLOADED:
                self._make_dormant(session)

    def _forget_dormant(self) -> None:
        """Forget dormant sessions past the bounds, the longest dormant first."""
        while (oldest := self.dormant.take_excess(self._seconds())) is not None:
            oldest.end(SessionCall.EXPIRE, "the session was forgotten to make room")
            self._forget_soon(oldest)

    def _expire(self, session: Session) -> None:
        home, _ = self._live[session.handle]
        self.expired += 1
        self._expired_handles[session.handle] = home
        while len(self._expired_handles) > EXPIRED_REMEMBERED_MAX:
            self._expired_handles.popitem(last=False)
        if session.session_id is None or session.state is SessionState.UNLOADED:
            self._drop(session, SessionCall.EXPIRE, "the session expired")
            self._forget_soon(session)
        else:
            self._make_dormant(session)

    def set_limits(
        self, *, sessions_max: int, idle_timeout_s: float, dormant_limits: DormantLimits
    ) -> None:
        """Let other limits hold from now on; open sessions past a lower cap stay."""
        self.sessions_max, self.idle_timeout_s = sessions_max, idle_timeout_s
        self.dormant.limits = dormant_limits
        self._changed.set()

    async def expire_idle(self) -> None:
        """Expire sessions for ever, each when its time has come, and forget those that have left:
        no polling.
        """
        while True:
            self._forget_dormant()
            await self.forgetting.drain()
            now = self._seconds()
            resting = [s for s in self if not s.active]
            for session in resting:
                if session.used_at + self.idle_timeout_s <= now:
                    self._expire(session)
            # An active session rests at the earliest now: its time is a whole timeout away.
            ends = [s.used_at for s in self if not s.active] or ([now] if self._live else [])
            wait = min(ends) + self.idle_timeout_s - now if ends else float("inf")
            wait = min(wait, self.dormant.expires_in_s(now))
            self._changed = anyio.Event()
            with anyio.move_on_after(0 if self.forgetting.waiting else wait):
                await self._changed.wait()


def _check_id(session_id: str) -> None:
    if not 0 < len(session_id) <= SESSION_ID_CHARACTERS_MAX:
        raise InvalidArgument(
            f"a session id of {len(session_id)} characters",
            hint=f"use 1 to {SESSION_ID_CHARACTERS_MAX}",
        )
