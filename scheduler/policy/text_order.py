"""The order of requests for texts: by class with ageing, then fair among owners, then by arrival.

Pure: no clock, no model. Waiting requests age by the work that is done for others meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from ..owner import PRIORITY_MAX, Owner, OwnerClock, Priority, Requester

T = TypeVar("T")

AGEING_S = 1.0
"""A request rises by one class each time that this much work was done since it arrived."""

URGENT_LEAD_S = 1.0
"""Urgent requests of a user precede those of others until the user had this much more of work."""


class _WaitingText(NamedTuple, Generic[T]):
    request: T
    arrival: int
    work_us: int
    """The work that was done before it arrived."""


class TextOrder(Generic[T]):
    """Requests in lines, one for each owner and class, so that lines are few.

    With *strict*, a class precedes the lower ones of all users. Otherwise it precedes those of its
    own user, and only `urgent` precedes others' requests, until its user had `URGENT_LEAD_S` more
    of work than another.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._lines: dict[Requester, deque[_WaitingText[T]]] = {}
        self._owners = OwnerClock()
        """Microseconds of work for each owner."""
        self._work_us = 0
        self._arrivals = 0

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def users(self) -> set[int]:
        """The users whose requests wait."""
        return {requester.owner.user for requester in self._lines}

    def add_request(self, requester: Requester, request: T) -> None:
        """Add a request behind the others of its owner and class."""
        self._owners.add_owner(requester.owner, (r.owner for r in self._lines))
        line = self._lines.setdefault(requester, deque())
        line.append(_WaitingText(request, self._arrivals, self._work_us))
        self._arrivals += 1

    def next_requester(self, may: Callable[[Requester], bool] = lambda _: True) -> Requester | None:
        """Return the requester whose request is next, among those that *may* be answered."""
        if len(self._lines) == 1:
            [only] = self._lines
            return only if may(only) else None
        able = list(filter(may, self._lines))
        least_us = min((self._owners.served(r.owner)[0] for r in able), default=0)
        return min(able, key=lambda requester: self._key(requester, least_us), default=None)

    def _key(self, requester: Requester, least_us: int) -> tuple[int, ...]:
        """Return the sort key of a line; *least_us* is the work for the user who had least."""
        first = self._lines[requester][0]
        aged = requester.priority + (self._work_us - first.work_us) // round(1e6 * AGEING_S)
        level, (user, label) = min(PRIORITY_MAX, aged), self._owners.served(requester.owner)
        if self._strict:
            return (-level, user, 0, label, first.arrival)
        may_lead = user - least_us < round(1e6 * URGENT_LEAD_S)
        urgent = requester.priority == Priority.URGENT and may_lead
        return (-urgent, user, -level, label, first.arrival)

    def first_request(self, requester: Requester) -> T:
        """Return the first request of a line, which stays there."""
        return self._lines[requester][0].request

    def remove_first(self, requester: Requester) -> T:
        """Remove and return the first request of a line."""
        line = self._lines[requester]
        first = line.popleft()
        if not line:
            del self._lines[requester]
        return first.request

    def remove_requests(self, is_removed: Callable[[T], bool]) -> None:
        """Remove the requests for which *is_removed* is true."""
        for requester, line in list(self._lines.items()):
            kept = deque(text for text in line if not is_removed(text.request))
            if not kept:
                del self._lines[requester]
            elif len(kept) < len(line):
                self._lines[requester] = kept

    def count_work(self, owner: Owner, seconds: float) -> None:
        """Count work that was done for *owner*."""
        worked_us = round(1e6 * seconds)
        self._work_us += worked_us
        self._owners.count_work(owner, worked_us)
