"""Decisions about the places of open sessions: which waiting request gets one, and which idle
session yields its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from ...scheduler.owner import Owner
from ...scheduler.priority import Priority
from .label_shares import OwnerCounts, exceeds_share

S = TypeVar("S")
OVER_SHARE = 10
"""Divisor of the idle time for a user with more places than the one who waits. So calls every few
seconds do not keep them.
"""
IN_USE_S = 1.0
"""A session in use is checked again after this time at the earliest. The end of its call is
noticed at once where sessions yield sooner.
"""
_numbers = count()


@dataclass(eq=False)
class PlaceRequest:
    """A request for a place, of a session that is opened or has yielded its own."""

    owner: Owner
    priority: Priority = Priority.NORMAL
    since: float = 0.0
    number: int = field(default_factory=lambda: next(_numbers))


class Holder(NamedTuple, Generic[S]):
    """An open session with a place, which it may yield. `idle_since` is None while it is in use."""

    session: S
    owner: Owner
    idle_since: float | None


class Grant(NamedTuple, Generic[S]):
    """A request that gets a place; `yielding` gives up its own for it, unless one is free."""

    request: PlaceRequest
    yielding: S | None = None


@dataclass(frozen=True)
class PlaceState(Generic[S]):
    """The places as of now. `held` has their numbers by owner, with those that were granted and not
    taken yet; `limit_of` returns a user's own bound. `holders` are needed if no place is free.
    """

    places_max: int
    held: OwnerCounts
    holders: Callable[[], Collection[Holder[S]]]
    limit_of: Callable[[int], int]
    yield_after_s: float

    def candidates(self, owner: Owner, now: float) -> list[tuple[float, Holder[S]]]:
        """Return the sessions that may yield to *owner*, each with the time from which it may. At
        the user's own bound only the user's sessions may yield, at a label's share only the
        label's.
        """
        return [
            (self._yields_at(holder, owner, now), holder)
            for holder in self.holders()
            if self._may_yield_to(holder.owner, owner)
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

    def _yields_at(self, holder: Holder[S], owner: Owner, now: float) -> float:
        if holder.owner.user == owner.user:
            over_share = self.held.of(holder.owner) > self.held.of(owner) + 1
        else:
            over_share = self.held.of_user(holder.owner.user) > self.held.of_user(owner.user) + 1
        idle_s = self.yield_after_s / OVER_SHARE if over_share else self.yield_after_s
        if holder.idle_since is None:
            return now + max(idle_s, IN_USE_S)
        return holder.idle_since + idle_s

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

    def most_places(self, holder: Holder[S]) -> tuple[int, int]:
        """Return the sort key of a session among those that may yield: by its user's places, then
        by its label's.
        """
        return -self.held.of_user(holder.owner.user), -self.held.of(holder.owner)


def next_grant(
    requests: Collection[PlaceRequest], places: PlaceState[S], now: float
) -> Grant[S] | None:
    """Return the request that gets a place now, if any does: by class, then of the user with the
    fewest places, then of the label with the fewest, then by arrival. A request that nothing can
    yield to does not hold up others.

    The session that yields is the longest idle one of the user with the most places.
    """
    first: dict[Owner, PlaceRequest] = {}
    for request in sorted(requests, key=lambda r: (-r.priority, r.number)):
        first.setdefault(request.owner, request)
    for request in sorted(first.values(), key=lambda r: _order(r, places.held)):
        if places.may_take_free(request.owner):
            return Grant(request)
        if not places.may_take_yielded(request.owner):
            continue
        ripe = [
            (*places.most_places(holder), at, holder)
            for at, holder in places.candidates(request.owner, now)
            if at <= now
        ]
        if ripe:
            return Grant(request, min(ripe, key=lambda found: found[:3])[3].session)
    return None


def next_yield_in_s(requests: Collection[PlaceRequest], places: PlaceState[S], now: float) -> float:
    """Return the seconds until a session may yield to one of the requests at the earliest, or
    infinity. A session in use is idle now at the earliest.
    """
    owners = {r.owner for r in requests if places.may_take_yielded(r.owner)}
    times = (at - now for owner in owners for at, _ in places.candidates(owner, now))
    return max(0.0, min(times, default=float("inf")))


def _order(request: PlaceRequest, held: OwnerCounts) -> tuple[int, int, int, int]:
    owner = request.owner
    return -request.priority, held.of_user(owner.user), held.of(owner), request.number
