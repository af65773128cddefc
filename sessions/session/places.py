"""Requests that wait for the place of an open session."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import NamedTuple, Protocol

import anyio

from ...backends.errors import Busy, InferdError, QuotaExceeded
from ...scheduler.owner import Owner
from ...scheduler.priority import Priority
from ..admission.ledger import Ledger
from ..admission.place_grants import (
    IN_USE_S,
    OVER_SHARE,
    Holder,
    PlaceRequest,
    PlaceState,
    next_grant,
    next_yield_in_s,
)
from ..admission.quotas import check_priority
from ..admission.wait_limit import WaitLimit
from .dormant import DormantSessions
from .live import LiveSessions
from .session import Session

_WAIT_S_MIN = 0.001
"""A timeout of 0 would be no limit."""


class PlaceWait(NamedTuple):
    """The class of a request for a place, and its timeouts; 0 means no timeout."""

    priority: Priority = Priority.NORMAL
    queue_timeout_s: float = 0.0
    timeout_s: float = 0.0


class PlaceBounds(NamedTuple):
    """The bounds of waiting requests, and the idle time after which a session may yield."""

    waiting_max: int = 256
    waiting_user_max: int = 128
    yield_after_s: float = 10.0


class PlaceListener(Protocol):
    """A counter of waits."""

    def place_waited(self, seconds: float) -> None:
        """Count a request that got a place after a wait."""


class _Waiting:
    """A request with its outcome, and the session whose place it is to restore, if any."""

    def __init__(self, request: PlaceRequest, session: Session | None):
        self.request, self.session = request, session
        self.ended = anyio.Event()
        self.granted = False
        """A place is reserved for it."""
        self.error: InferdError | None = None


class PlaceQueue:
    """The requests that wait for a place among the open sessions. Owned by the manager, on the
    daemon's event loop. *wake* makes the manager call `grant_places` when the next session may
    yield.

    A granted place stays reserved until its request has taken it. A session that yields its place
    keeps its handle; its memory then counts in the bounds of dormant sessions.
    """

    def __init__(
        self,
        live: LiveSessions,
        dormant: DormantSessions,
        ledger: Ledger,
        wake: Callable[[], None],
    ) -> None:
        self.bounds = PlaceBounds()
        self.listener: PlaceListener | None = None
        self.yields = 0
        """Places that idle sessions have yielded."""
        self._live, self._dormant, self._ledger, self._wake = live, dormant, ledger, wake
        self._deferred = False
        self._waiting: dict[PlaceRequest, _Waiting] = {}

    def __len__(self) -> int:
        return sum(not waiting.ended.is_set() for waiting in self._waiting.values())

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
        elif waiting.granted and self.listener is not None:
            self.listener.place_waited(self._ledger.seconds() - waiting.request.since)

    def _check_waiting(self, request: PlaceRequest) -> None:
        """Check that one more request may wait.

        :raises Busy: a bound is reached.
        """
        others = [w.request for w in self._waiting.values() if not w.ended.is_set()]
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

    def _add(self, request: PlaceRequest, session: Session | None = None) -> _Waiting:
        waiting = self._waiting[request] = _Waiting(request, session)
        return waiting

    def _remove(self, waiting: _Waiting) -> None:
        """Remove a request, and its reservation if it has one."""
        if self._waiting.pop(waiting.request, None) is not None and waiting.granted:
            self._live.places.add(waiting.request.owner, -1)

    # Granting.

    def grant_places(self) -> None:
        """Grant places to waiting requests, as long as one is free or an idle session yields."""
        while not self._deferred:
            open_requests = [r for r, w in self._waiting.items() if not w.ended.is_set()]
            if not open_requests:
                return
            grant = next_grant(open_requests, self._state(), self._ledger.seconds())
            if grant is None:
                return
            waiting = self._waiting[grant.request]
            waiting.granted = True
            self._live.places.add(grant.request.owner, 1)
            waiting.ended.set()
            if grant.yielding is not None:
                self._yield_place(grant.yielding)

    def _yield_place(self, session: Session) -> None:
        self.yields += 1
        self._live.yield_place(session)
        self._dormant.add_yielded(session)
        self._wake()  # a bound of the dormant sessions may be exceeded now

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
                session.check_growth(session.kept_bytes)
                self._dormant.remove_session(session)
                self._live.restore_place(session)
                self.end_waits_of(session)

    def end_waits_of(self, session: Session, error: InferdError | None = None) -> bool:
        """End the waits of calls on a session that has its place again or has ended, or refuse them
        with *error*. Return whether there were any.
        """
        found = [w for w in self._waiting.values() if w.session is session and not w.ended.is_set()]
        for waiting in found:
            waiting.error = error
            waiting.ended.set()
        return bool(found)

    def refuse_requests(self, error: InferdError) -> None:
        """End all waits with an error."""
        for waiting in self._waiting.values():
            if not waiting.ended.is_set():
                waiting.error = error
                waiting.ended.set()

    def next_yield_in_s(self) -> float:
        """Return the seconds until a session may yield to a waiting request, or infinity."""
        requests = [r for r, w in self._waiting.items() if not w.ended.is_set()]
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
        )

    def _holders(self) -> list[Holder[Session]]:
        """Return the sessions that can be kept without their place."""
        bytes_of = self._ledger.kept_bytes.bytes_of
        return [
            Holder(session, session.owner, None if session.in_use else session.used_at)
            for session in self._live.with_place()
            if self._dormant.fits(bytes_of(session))
        ]
