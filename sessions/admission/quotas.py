"""What one user may have at a time: sessions, waiting tasks, tokens a minute, up to which class.

Decisions without a loop or a clock; `Ledger` and `SessionManager` ask them where they count.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import msgspec

from ...backends.errors import PermissionDenied, QuotaExceeded
from ...scheduler import Priority

RULES = "access."
"""How the names of bounds begin that are said by rules of access."""
MINUTE_S = 60.0
_USERS_MAX = 4096
"""Users whose spent tokens are remembered."""


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """One user's bounds, None where he has none of his own; *rule* is where they are said."""

    rule: str = ""
    sessions_max: int | None = None
    tasks_waiting_max: int | None = None
    tokens_per_minute: int | None = None
    priority_max: Priority = Priority.URGENT

    def bound(self, key: str) -> str:
        """Return what names one of the bounds: where it can be changed."""
        return f"{RULES}{self.rule}.{key}"


NO_QUOTA = Quota()


def no_quota(owner: int) -> Quota:
    """Return the bounds of a user who has none."""
    return NO_QUOTA


def check_priority(quota: Quota, priority: Priority) -> None:
    """Refuse a class above the highest that a user may have.

    :raises PermissionDenied: it is above.
    """
    if priority > quota.priority_max:
        highest = quota.priority_max.label
        raise PermissionDenied(
            f"you may not have turns of the class {priority.label}",
            hint=f"use {highest}, which is the highest for you, or a lower one",
            data={"priority_max": highest},
        )


class Spending:
    """What users have spent of their tokens a minute: a bucket each, which holds those of a minute
    and is filled evenly. Owned by the daemon's event loop.

    What is kept is what is missing in a bucket, which may be more than it holds: a turn that runs
    is never cut. Who misses nothing is forgotten.
    """

    def __init__(self) -> None:
        self._missing: OrderedDict[int, tuple[float, float, int]] = OrderedDict()
        """Tokens, since when, and the limit by which they come back."""

    def __len__(self) -> int:
        return len(self._missing)

    def check(self, owner: int, quota: Quota, under_way: int, now: float) -> None:
        """Refuse a turn to whom not one token is left, those that turns *under_way* take counted.

        :raises QuotaExceeded: with when there is one.
        """
        limit = quota.tokens_per_minute
        if limit is None:
            return
        spent = self._of(owner, limit, now) + under_way
        over = spent + 1 - limit
        if over <= 0:
            return
        retry_after_s = _upwards(over * MINUTE_S / limit)
        raise QuotaExceeded(
            f"you have used {math.ceil(spent)} tokens; the limit is {limit} a minute",
            hint=f"try again in {retry_after_s:g} s, when enough have come back",
            data={
                "bound": quota.bound("tokens-per-minute"),
                "tokens": math.ceil(spent),
                "tokens_per_minute": limit,
                "retry_after_s": retry_after_s,
            },
        )

    def add(self, owner: int, quota: Quota, tokens: float, now: float) -> None:
        """Count tokens that were computed for a user; negative ones were counted before."""
        limit = quota.tokens_per_minute
        if limit is None:
            return
        missing = self._of(owner, limit, now) + tokens
        self._missing.pop(owner, None)
        if missing > 0:
            self._missing[owner] = (missing, now, limit)
        if len(self._missing) > _USERS_MAX:
            self._forget(now)

    def _of(self, owner: int, limit: int, now: float) -> float:
        """Return what a user's bucket misses: since it was counted, tokens came back."""
        missing, since, _ = self._missing.get(owner, (0.0, now, limit))
        return max(0.0, missing - (now - since) * limit / MINUTE_S)

    def _forget(self, now: float) -> None:
        """Forget who misses nothing any more; if nobody does, who has spent nothing for longest."""
        for owner, (_, _, limit) in list(self._missing.items()):
            if not self._of(owner, limit, now):
                del self._missing[owner]
        while len(self._missing) > _USERS_MAX:
            self._missing.popitem(last=False)


def _upwards(seconds: float) -> float:
    """Return the next whole millisecond: who comes then is not too early."""
    return (math.floor(seconds * 1000) + 1) / 1000
