"""Requests that wait for the place of an open session."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import NamedTuple

import anyio

from ...backends.errors import Busy, InferdError, QuotaExceeded, Timeout
from ...scheduler.owner import Owner, Priority
from ..admission.bounds import WaitLimit, check_priority
from ..admission.ledger import Ledger
from ..conversation.session import Session
from ..turn.turn import Turn
from .place_grants import (
    IN_USE_S,
    OVER_SHARE,
    PLACE_S_MIN,
    Holder,
    PlaceRequest,
    PlaceState,
    PlaceUse,
    next_grant,
    next_yield_in_s,
)
from .sessions_in_memory import DormantSessions, LiveSessions

_WAIT_S_MIN = 0.001
"""A timeout of 0 would be no limit."""


class PlaceWait(NamedTuple):
    """The class of a request for a place, and its timeouts; 0 means no timeout."""

    priority: Priority = Priority.NORMAL
    queue_timeout_s: float = 0.0
    timeout_s: float = 0.0


class PlaceBounds(NamedTuple):
    """The bounds of waiting requests, and the times after which a session may yield: its idle
    time, or the time for which its turn is not read.
    """

    waiting_max: int = 256
    waiting_user_max: int = 128
    yield_after_s: float = 10.0
    reader_lag_s: float = 0.2
    priority_strict: bool = False
    """Whether classes come before the users' numbers of places."""


class _Waiting:
    """A request with its outcome, and the session whose place it is to restore, if any. The request
    of a turn that was set aside has no caller: `grant_places` restores the place.
    """

    def __init__(self, request: PlaceRequest, session: Session | None, turn: Turn | None = None):
        self.request, self.session, self.turn = request, session, turn
        self.ended = anyio.Event()
        self.granted = False
        """A place is reserved for it."""
        self.error: InferdError | None = None


class PlaceQueue:
    """The requests that wait for a place among the open sessions. Owned by the manager, on the
    daemon's event loop. *wake* makes the manager call `grant_places` when the next session may
    yield. *end* ends a session that cannot be kept without its place. *on_waited* gets the seconds
    of each wait that has ended with a place.

    A granted place stays reserved until its request has taken it. A session that yields its place
    keeps its handle; its memory then counts in the bounds of dormant sessions. Its turn, if it has
    one, is set aside, and requests a place once it is read.
    """

    def __init__(
        self,
        live: LiveSessions,
        dormant: DormantSessions,
        ledger: Ledger,
        wake: Callable[[], None],
        end: Callable[[Session, InferdError], None],
        on_waited: Callable[[float], None],
    ) -> None:
        self.bounds = PlaceBounds()
        self.yields = 0
        """Places that sessions have yielded to requests."""
        self._live, self._dormant, self._ledger = live, dormant, ledger
        self._wake, self._end, self._on_waited = wake, end, on_waited
        self._deferred = False
        self._waiting: dict[PlaceRequest, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._open_requests())

    def _open_requests(self) -> list[PlaceRequest]:
        for waiting in [w for w in self._waiting.values() if w.turn is not None]:
            if waiting.turn is not None and waiting.turn.ended.is_set():
                del self._waiting[waiting.request]
        return [request for request, w in self._waiting.items() if not w.ended.is_set()]

    @contextmanager
    def taken_places(self, owner: Owner, wanted: int = 1) -> Iterator[None]:
        """Reserve *wanted* places for sessions that the body adds without an await.

        :raises QuotaExceeded: the user's own bound is reached.
        :raises Busy: the bound of all sessions is reached.
        """
        taken: list[_Waiting] = []
        try:
            for _ in range(wanted):
                taken.append(self._add(PlaceRequest(owner, since=self._ledger.seconds())))
                self.grant_places()
                if not taken[-1].granted:
                    for waiting in taken:
                        self._remove(waiting)
                    raise self._refusal(taken[-1].request, wanted)
            yield
        finally:
            for waiting in taken:
                self._remove(waiting)
            self.grant_places()

    @asynccontextmanager
    async def waited_place(
        self, owner: Owner, wait: PlaceWait, session: Session | None = None
    ) -> AsyncIterator[None]:
        """Wait until a place is reserved. The body adds its session without an await. With
        *session*, the wait also ends once that session has its place again or has ended.

        :raises Busy: too many requests wait.
        :raises Timeout: a timeout has passed.
        :raises PermissionDenied: the user may not have this class.
        """
        check_priority(self._ledger.bounds.quota_of(owner.user), wait.priority)
        waiting = self._add(PlaceRequest(owner, wait.priority, self._ledger.seconds()), session)
        try:
            self.grant_places()
            if not waiting.ended.is_set():
                self._check_waiting(waiting.request)
                self._wake()
                await self._wait(waiting, wait)
            if waiting.error is not None:
                raise waiting.error
            yield
        finally:
            self._remove(waiting)
            self.grant_places()

    @asynccontextmanager
    async def waited_places(
        self, owner: Owner, wait: PlaceWait, wanted: int
    ) -> AsyncIterator[None]:
        """Wait for *wanted* places beside that of an open session, as `waited_place` does. They are
        granted one after the other, and reserved until all are there or the queue timeout has
        passed.

        :raises QuotaExceeded: the user's own bound is lower than that.
        :raises Busy: the bound of all sessions is lower than that.
        """
        if wanted >= self._live.bound_of(owner.user).limit:
            raise self._refusal(PlaceRequest(owner), wanted)
        until = self._ledger.seconds() + wait.queue_timeout_s
        async with AsyncExitStack() as places:
            for _ in range(wanted):
                left_s = max(_WAIT_S_MIN, until - self._ledger.seconds())
                one = self.waited_place(owner, wait._replace(queue_timeout_s=left_s))
                await places.enter_async_context(one)
            yield

    async def _wait(self, waiting: _Waiting, wait: PlaceWait) -> None:
        limit = WaitLimit.of(wait.timeout_s, wait.queue_timeout_s)
        with anyio.move_on_after(limit.seconds):
            await waiting.ended.wait()
        if not waiting.ended.is_set():
            waiting.error = limit.error(
                "no place for the session was free",
                hint="close sessions that are done, raise the timeout, or sessions-max",
            )
        elif waiting.granted:
            self._count_wait(waiting)

    def _count_wait(self, waiting: _Waiting) -> None:
        self._on_waited(self._ledger.seconds() - waiting.request.since)

    def _check_waiting(self, request: PlaceRequest) -> None:
        """Check that one more request may wait.

        :raises Busy: a bound is reached.
        """
        # Those of turns are bounded as dormant sessions are, and shut out no other request.
        waiting = (w for w in self._waiting.values() if w.turn is None)
        others = [w.request for w in waiting if not w.ended.is_set()]
        own = sum(other.owner.user == request.owner.user for other in others)
        for bound, count, limit in (
            ("sessions-waiting-user-max", own, self.bounds.waiting_user_max),
            ("sessions-waiting-max", len(others), self.bounds.waiting_max),
        ):
            if count > limit:  # it counts itself
                self._live.refused += 1
                raise Busy(
                    f"{limit} requests already wait for a session's place",
                    hint="close sessions that are done, and try again later",
                    data={
                        "bound": bound,
                        "queue_length": len(others) - 1,
                        "retry_after_s": self._next_place_in_s(request),
                    },
                )

    def _add(
        self, request: PlaceRequest, session: Session | None = None, turn: Turn | None = None
    ) -> _Waiting:
        waiting = self._waiting[request] = _Waiting(request, session, turn)
        return waiting

    def _remove(self, waiting: _Waiting) -> None:
        """Remove a request, and its reservation if it has one."""
        if self._waiting.pop(waiting.request, None) is not None and waiting.granted:
            self._live.places.add(waiting.request.owner, -1)

    # Granting.

    def grant_places(self) -> None:
        """Grant places to waiting requests, as long as one is free or a session yields its own."""
        if self._deferred:
            return
        self._deferred = True  # an ended session calls this again
        try:
            while requests := self._open_requests():
                grant = next_grant(requests, self._state(), self._ledger.seconds())
                if grant is None:
                    return
                self._give_place(self._waiting[grant.request])
                if grant.yielding is not None:
                    self._take_place(grant.yielding)
        finally:
            self._deferred = False

    def _give_place(self, waiting: _Waiting) -> None:
        if waiting.turn is None:
            waiting.granted = True
            self._live.places.add(waiting.request.owner, 1)
            waiting.ended.set()
            return
        del self._waiting[waiting.request]
        assert waiting.session is not None, "a turn is of a session"
        try:
            self._restore(waiting.session)
        except InferdError as exc:
            waiting.session.end_turn(exc)
            return
        self._count_wait(waiting)

    def _take_place(self, session: Session) -> None:
        """Let a session yield its place, or end it if it cannot be kept without one."""
        self.yields += 1
        if self._ends(session):
            self._end(session, self._place_needed(session))
            return
        request_place = session.request_place = partial(self._request_for_turn, session)
        self._live.yield_place(session)
        self._dormant.add_yielded(session)
        if session.active:
            session.set_aside(request_place)
        self._wake()  # a bound of the dormant sessions may be exceeded now

    def _request_for_turn(self, session: Session) -> None:
        """Request a place for a turn that was set aside and is read again."""
        turn = session.turn
        if any(w.turn is turn for w in self._waiting.values()):
            return
        assert turn is not None, "it was set aside"
        self._add(
            PlaceRequest(session.owner, turn.spec.priority, self._ledger.seconds()), session, turn
        )
        self._wake()  # grants places soon; at once it could be within a grant

    def _ends(self, session: Session) -> bool:
        """Return whether a session ends instead of yielding its place: it cannot be kept, or it has
        no id and nobody reads its stream.
        """
        turn = session.turn
        if not session.active or turn is None:
            return False
        is_unread = turn.unread_s is not None and not turn.spec.pull
        return not self._is_kept(session) or (is_unread and session.session_id is None)

    def _is_kept(self, session: Session) -> bool:
        return self._dormant.fits(self._ledger.kept_bytes.bytes_of(session))

    def _place_needed(self, session: Session) -> Busy:
        """Return the error of the turn of a session that ends for another user."""
        why = f"which nobody read for {self.bounds.reader_lag_s:g} s"
        hint = (
            "read the stream, or open the session with an id: then it keeps its text, and"
            " continues once it is read"
        )
        if not self._is_kept(session):
            why = "which is not kept without its place"
            hint = "use fewer sessions; the operator can raise the bounds of dormant sessions"
        return Busy(
            f"another user with fewer sessions needed the place of this one, {why}",
            hint=hint,
            data={
                "bound": "sessions-max",
                "sessions_max": self._live.sessions_max,
                "retry_after_s": PLACE_S_MIN,
            },
        )

    @contextmanager
    def one_grant(self) -> Iterator[None]:
        """Defer grants during the body, and grant all freed places at its end."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
            self.grant_places()

    def session_rested(self) -> None:
        """Grant places if a session that is no longer in use may yield soon; `next_yield_in_s`
        finds later yields.
        """
        if self._waiting and self.bounds.yield_after_s < OVER_SHARE * IN_USE_S:
            self.grant_places()
            self._wake()

    async def restore_place(self, session: Session, wait: PlaceWait) -> None:
        """Wait for the place of a session that has yielded it. Return at once if another call has
        restored it, or if it has ended.

        :raises QuotaExceeded: its owner's open sessions would become too large.
        :raises InferdError: as in `waited_place`.
        """
        async with self.waited_place(session.owner, wait, session):
            if self._live.has_yielded(session):
                self._restore(session)

    def _restore(self, session: Session) -> None:
        """Give a session its place again, in which its turn continues.

        :raises QuotaExceeded: its owner's open sessions would become too large.
        """
        session.check_growth(session.kept_bytes)
        self._dormant.remove_session(session)
        self._live.restore_place(session)
        session.request_place = None
        self.end_waits_of(session)
        if session.active and session.turn is not None:
            session.turn.continue_in_place()

    def end_waits_of(self, session: Session, error: InferdError | None = None) -> bool:
        """End the waits of calls on a session that has its place again or has ended, or refuse them
        with *error*. Return whether there were any.
        """
        found = [w for w in self._waiting.values() if w.session is session and not w.ended.is_set()]
        for waiting in found:
            self._end_wait(waiting, error)
        return bool(found)

    def _end_wait(self, waiting: _Waiting, error: InferdError | None) -> None:
        waiting.error = error
        waiting.ended.set()
        if waiting.turn is not None:
            self._waiting.pop(waiting.request, None)

    def refuse_requests(self, error: InferdError) -> None:
        """End all waits with an error, and fail the turns that wait."""
        for waiting in tuple(self._waiting.values()):
            if not waiting.ended.is_set():
                self._end_wait(waiting, error)
                if waiting.session is not None and waiting.turn is not None:
                    waiting.session.end_turn(error)

    def end_late_turns(self) -> None:
        """Fail the turns without a place whose timeout has passed."""
        for session, turn in self._turns_aside():
            in_s, name = turn.timeout_in_s()
            if in_s <= 0:
                session.end_turn(
                    Timeout(
                        f"the {name} timeout has passed: no place for the session was free",
                        data={"timeout": name},
                    )
                )

    def next_timeout_in_s(self) -> float:
        """Return the time until `end_late_turns` is to be called, or infinity."""
        times = (turn.timeout_in_s()[0] for _, turn in self._turns_aside())
        return max(0.0, min(times, default=math.inf))

    def _turns_aside(self) -> list[tuple[Session, Turn]]:
        aside = [s for s in self._live.without_place() if s.active]
        return [(s, s.turn) for s in aside if s.turn is not None]

    def next_yield_in_s(self) -> float:
        """Return the seconds until a session may yield to a waiting request, or infinity."""
        requests = self._open_requests()
        if not requests:
            return math.inf
        return next_yield_in_s(requests, self._state(), self._ledger.seconds())

    def _refusal(self, request: PlaceRequest, wanted: int) -> Busy | QuotaExceeded:
        """Count the refusal of *wanted* sessions of a user, and return its error."""
        return self._live.refusal(request.owner, wanted, self._next_place_in_s(request))

    def _next_place_in_s(self, request: PlaceRequest) -> float:
        """Return an estimate of the seconds until a place is free, for a retry."""
        yields_in_s = next_yield_in_s([request], self._state(), self._ledger.seconds())
        return round(max(0.1, min(yields_in_s, self._live.next_expiry_in_s(request.owner))), 3)

    def _state(self) -> PlaceState[Session]:
        live = self._live
        return PlaceState(
            live.sessions_max,
            live.places,
            self._holders,
            lambda user: live.bound_of(user).limit,
            self.bounds.yield_after_s,
            self.bounds.reader_lag_s,
            priority_strict=self.bounds.priority_strict,
        )

    def _holders(self) -> list[Holder[Session]]:
        """Return the sessions that may yield their place, now or later."""
        return [
            Holder(session, session.owner, None, self._use_of(session))
            if session.in_use
            else Holder(session, session.owner, session.used_at)
            for session in self._live.with_place()
            if session.active or self._is_kept(session)
        ]

    def _use_of(self, session: Session) -> PlaceUse | None:
        """Return the use of a session's place, if that can be interrupted."""
        since, turn, settings = session.place_since, session.turn, session.settings
        if not session.active or turn is None:  # the call's turn will wait for a place
            return PlaceUse(since, settings.priority)
        if not turn.can_be_set_aside:
            return None
        unread_s, now = turn.unread_s, self._ledger.seconds()
        unread_since = None if unread_s is None else now - unread_s
        return PlaceUse(since, turn.spec.priority, unread_since, self._ends(session))
