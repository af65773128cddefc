"""Decisions about the places of open sessions: which waiting request gets one, and which session
yields its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from ...scheduler.owner import Owner, Priority
from ..admission.bounds import OwnerCounts, exceeds_share

S = TypeVar("S")
OVER_SHARE = 10
"""Divisor of the idle time for a user with more places than the one who waits. So calls every few
seconds do not keep them.
"""
IN_USE_S = 1.0
"""A session in use is checked again after this time at the earliest. The end of its call is
noticed at once where sessions yield sooner.
"""
RATIO_MIN = 2
"""A session in use yields only if its user has more than twice as many places as the user who
waits. Otherwise two users could interrupt each other's turns in turn.
"""
PLACES_FACTOR = 7
"""A user whose turns are read may have seven times as many places as another user who wants one, so
at most seven eighths of all.
"""
PLACE_S_MIN = 1.0
"""A session whose turn is read has its place for at least this time. So sessions that another user
opens and closes cannot interrupt turns more often than that.
"""
_numbers = count()


@dataclass(eq=False)
class PlaceRequest:
    """A request for a place, of a session that is opened or has yielded its own."""

    owner: Owner
    priority: Priority = Priority.NORMAL
    since: float = 0.0
    number: int = field(default_factory=lambda: next(_numbers))


class PlaceUse(NamedTuple):
    """The use of a place by a turn or call that can be interrupted. `unread_since` is None while it
    has a reader. If the session `ends`, it cannot continue without its place.
    """

    since: float
    """The time at which the session got its place."""
    priority: Priority = Priority.NORMAL
    unread_since: float | None = None
    ends: bool = False


class Holder(NamedTuple, Generic[S]):
    """An open session with a place, which it may yield. `idle_since` is None while it is in use,
    and `use` while it is idle or cannot be interrupted.
    """

    session: S
    owner: Owner
    idle_since: float | None
    use: PlaceUse | None = None


class Grant(NamedTuple, Generic[S]):
    """A request that gets a place; `yielding` gives up its own for it, unless one is free."""

    request: PlaceRequest
    yielding: S | None = None


@dataclass(frozen=True)
class PlaceState(Generic[S]):
    """The places as of now. `held` has their numbers by owner, with those that were granted and not
    taken yet; `limit_of` returns a user's own bound. `holders` are needed if no place is free. With
    `priority_strict`, the classes of all users come before their numbers of places.
    """

    places_max: int
    held: OwnerCounts
    holders: Callable[[], Collection[Holder[S]]]
    limit_of: Callable[[int], int]
    yield_after_s: float
    reader_lag_s: float = 0.2
    priority_strict: bool = False

    def candidates(self, request: PlaceRequest, now: float) -> list[tuple[float, Holder[S]]]:
        """Return the sessions that may yield to a request, each with the time from which it may. At
        the user's own bound only the user's sessions may yield, at a label's share only the
        label's.
        """
        return [
            (self._yields_at(holder, request, now), holder)
            for holder in self.holders()
            if self._may_yield_to(holder.owner, request.owner)
        ]

    def _may_yield_to(self, holder: Owner, owner: Owner) -> bool:
        if holder == owner:
            return True
        if holder.user == owner.user:  # the user has one place less then
            return not self._exceeds_share(owner, yielded=1)
        has_own = self.held.of_user(owner.user) < self.limit_of(owner.user)
        return has_own and not self._exceeds_share(owner)

    def _exceeds_share(self, owner: Owner, yielded: int = 0) -> bool:
        """Return whether one more place would be too many for a label, once other labels of its
        user have *yielded* some.
        """
        limit = min(self.limit_of(owner.user), self.places_max)
        return exceeds_share(self.held, owner, 1, limit + yielded)

    def _yields_at(self, holder: Holder[S], request: PlaceRequest, now: float) -> float:
        owner = request.owner
        if holder.owner.user == owner.user:
            over_share = self.held.of(holder.owner) > self.held.of(owner) + 1
        else:
            over_share = self.held.of_user(holder.owner.user) > self.held.of_user(owner.user) + 1
        idle_s = self.yield_after_s / OVER_SHARE if over_share else self.yield_after_s
        if holder.idle_since is not None:
            return holder.idle_since + idle_s
        return min(now + max(idle_s, IN_USE_S), self._interrupted_at(holder, request))

    def _interrupted_at(self, holder: Holder[S], request: PlaceRequest) -> float:
        """Return the time from which a session in use yields to another user, or infinity: once
        nobody reads its turn, or at any time if its user has too many places or, with strict
        classes, its class is lower.
        """
        use, more = holder.use, self.held.of_user(holder.owner.user)
        own = self.held.of_user(request.owner.user)
        if use is None or holder.owner.user == request.owner.user:
            return math.inf
        is_lower = self.priority_strict and use.priority < request.priority
        if more <= RATIO_MIN * own and not is_lower:
            return math.inf
        if use.unread_since is not None:
            return use.unread_since + self.reader_lag_s
        return use.since + PLACE_S_MIN if is_lower or more > self._places_beside(own) else math.inf

    def _places_beside(self, own: int) -> int:
        """Return the places that a user may keep for turns that are read, while another user with
        *own* places wants one.
        """
        parts = PLACES_FACTOR + 1
        return min(max(1, self.places_max * PLACES_FACTOR // parts), PLACES_FACTOR * (own + 1))

    def may_take_free(self, owner: Owner) -> bool:
        """Return whether a place is free for a user."""
        has_own = self.held.of_user(owner.user) < self.limit_of(owner.user)
        return has_own and not self._exceeds_share(owner) and self.held.total() < self.places_max

    def may_take_yielded(self, owner: Owner) -> bool:
        """Return whether one yielded place is enough. It is not if a lowered bound requires more
        sessions to end.
        """
        has_own = self.held.of_user(owner.user) <= self.limit_of(owner.user)
        return has_own and self.held.total() <= self.places_max

    def yield_order(self, holder: Holder[S]) -> tuple[float, ...]:
        """Return the sort key of a session among those that may yield now. Turns that are read come
        last. Of the others, the user with the most places yields first, then the label: the longest
        idle session, then turns that nobody reads, first those that end. Of a user's turns, the
        lowest class yields first, then the longest unread one, or the one that has its place last.
        """
        most = -self.held.of_user(holder.owner.user), -self.held.of(holder.owner)
        if holder.idle_since is not None or holder.use is None:
            return 0, *most, 0, 0, holder.idle_since or 0.0
        use = holder.use
        if use.unread_since is None:
            strict = use.priority if self.priority_strict else 0
            return 1, strict, *most, use.priority, -use.since
        return 0, *most, 1 if use.ends else 2, use.priority, use.unread_since


def next_grant(
    requests: Collection[PlaceRequest], places: PlaceState[S], now: float
) -> Grant[S] | None:
    """Return the request that gets a place now, if any does, and the session that yields it. A
    request that nothing can yield to does not hold up others.
    """
    for request in _ordered(requests, places):
        if places.may_take_free(request.owner):
            return Grant(request)
        if not places.may_take_yielded(request.owner):
            continue
        ripe = [holder for at, holder in places.candidates(request, now) if at <= now]
        if ripe:
            return Grant(request, min(ripe, key=places.yield_order).session)
    return None


def next_yield_in_s(requests: Collection[PlaceRequest], places: PlaceState[S], now: float) -> float:
    """Return the seconds until a session may yield to one of the requests at the earliest, or
    infinity. A session in use is idle now at the earliest.
    """
    first = [r for r in _ordered(requests, places) if places.may_take_yielded(r.owner)]
    times = (at - now for request in first for at, _ in places.candidates(request, now))
    return max(0.0, min(times, default=float("inf")))


def _ordered(requests: Collection[PlaceRequest], places: PlaceState[S]) -> list[PlaceRequest]:
    """Return the first request of each owner, in the order of grants: by the user's places, and of
    users with as many by the arrival of their first requests. Requests of one user are ordered by
    class, then by the label's places, then by arrival. So no class takes a place from another user,
    unless classes are strict.
    """
    held, first = places.held, dict[Owner, PlaceRequest]()
    for request in sorted(requests, key=lambda r: (-r.priority, r.number)):
        first.setdefault(request.owner, request)
    own = sorted(first.values(), key=lambda r: (-r.priority, held.of(r.owner), r.number))
    if places.priority_strict:
        return sorted(own, key=lambda r: (-r.priority, held.of_user(r.owner.user)))
    arrival: dict[int, int] = {}
    for request in own:
        arrival.setdefault(request.owner.user, request.number)
    return sorted(own, key=lambda r: (held.of_user(r.owner.user), arrival[r.owner.user]))
