"""Quotas of one user: sessions and their bytes, models, waiting tasks, tokens, highest priority.

These are decisions without a loop or a clock; `Ledger` and `LiveSessions` use them.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import msgspec

from ...backends.errors import PermissionDenied, QuotaExceeded
from ...scheduler import PRIORITY_MAX, Owner, Priority
from .label_shares import OwnerCounts

RULES = "access."
"""Prefix of the names of bounds that access rules set."""
MINUTE_S = 60.0
_OWNERS_MAX = 4096
"""Users and labels whose used tokens are remembered."""


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """One user's bounds, None if there is none; *rule* is the access rule that sets them."""

    rule: str = ""
    connections_max: int | None = None
    sessions_max: int | None = None
    session_bytes_max: int | None = None
    kept_sessions_max: int | None = None
    descriptor_models_max: int | None = None
    tasks_waiting_max: int | None = None
    tokens_per_minute: int | None = None
    priority_max: Priority = PRIORITY_MAX

    def bound(self, key: str) -> str:
        """Return the name of a bound's setting."""
        return f"{RULES}{self.rule}.{key}"


NO_QUOTA = Quota()


def check_connections(quota: Quota, connections: int) -> None:
    """Check that a user with *connections* may open another one.

    :raises QuotaExceeded: the bound is reached.
    """
    if quota.connections_max is not None and connections >= quota.connections_max:
        raise QuotaExceeded(
            f"you have {connections} connections open; the limit is {quota.connections_max}",
            hint="share connections, or close those that are not needed",
            data={
                "bound": quota.bound("connections-max"),
                "connections": connections,
                "connections_max": quota.connections_max,
                "retry_after_s": 1.0,
            },
        )


def check_priority(quota: Quota, priority: Priority) -> None:
    """Check that a priority is not above a user's highest one.

    :raises PermissionDenied: it is above that.
    """
    if priority > quota.priority_max:
        highest = quota.priority_max.label
        raise PermissionDenied(
            f"you may not have turns of the class {priority.label}",
            hint=f"use {highest}, which is the highest for you, or a lower one",
            data={"priority_max": highest},
        )


def check_descriptor_models(quota: Quota, count: int, limit: int) -> None:
    """Check that a user may load another model from a descriptor, besides *count* ones. *limit*
    holds if the access rules set none.

    :raises QuotaExceeded: the bound is reached.
    """
    bound = "descriptor-models-user-max"
    if quota.descriptor_models_max is not None:
        bound, limit = quota.bound("descriptor-models-max"), quota.descriptor_models_max
    if count >= limit:
        raise QuotaExceeded(
            f"you have loaded {count} files outside the models directory; the limit is {limit}",
            hint="unload one first, or load models of the models directory by their names",
            data={"bound": bound, "models": count, "models_max": limit},
        )


class Spending:
    """Token buckets, one per user: a bucket holds the tokens of a minute and is refilled evenly.
    A label may use at most as much as is left in the bucket. Owned by the daemon's event loop.

    The deficit of a bucket is stored. It may exceed the bucket's size, because a running turn is
    not cut short. Owners without a deficit are not stored.
    """

    def __init__(self) -> None:
        self._deficits: OrderedDict[Owner, tuple[float, float, int]] = OrderedDict()
        """Tokens, time of the last update, limit at that time. A user's bucket has no label."""

    def __len__(self) -> int:
        return len(self._deficits)

    def check(self, owner: Owner, quota: Quota, under_way: OwnerCounts, now: float) -> None:
        """Check that an owner has a token left, besides the tokens of turns *under_way*.

        :raises QuotaExceeded: it has none; the data has the time until a token is available.
        """
        limit = quota.tokens_per_minute
        if limit is None:
            return
        spent = self._deficit(Owner(owner.user), limit, now) + under_way.of_user(owner.user)
        of_label = self._deficit(owner, limit, now) + under_way.of(owner) if owner.label else 0.0
        over = spent + of_label + 1 - limit
        if over <= 0:
            return
        retry_after_s = _next_millisecond(over * MINUTE_S / limit)
        raise QuotaExceeded(
            f"you have used {math.ceil(spent)} tokens{_of_label(owner, of_label)}; the limit is"
            f" {limit} a minute",
            hint=f"try again in {retry_after_s:g} s, when the quota has tokens again",
            data={
                "bound": quota.bound("tokens-per-minute"),
                "tokens": math.ceil(spent),
                "tokens_per_minute": limit,
                "retry_after_s": retry_after_s,
            },
        )

    def add(self, owner: Owner, quota: Quota, tokens: float, now: float) -> None:
        """Charge computed tokens to an owner; a negative number corrects an earlier charge."""
        if quota.tokens_per_minute is not None:
            for charged in {owner, Owner(owner.user)}:
                self._charge(charged, quota.tokens_per_minute, tokens, now)

    def _charge(self, owner: Owner, limit: int, tokens: float, now: float) -> None:
        deficit = self._deficit(owner, limit, now) + tokens
        self._deficits.pop(owner, None)
        if deficit > 0:
            self._deficits[owner] = (deficit, now, limit)
        if len(self._deficits) > _OWNERS_MAX:
            self._drop_owners(now)

    def _deficit(self, owner: Owner, limit: int, now: float) -> float:
        """Return the deficit of an owner's bucket now, after the refill since the last update."""
        deficit, since, _ = self._deficits.get(owner, (0.0, now, limit))
        return max(0.0, deficit - (now - since) * limit / MINUTE_S)

    def _drop_owners(self, now: float) -> None:
        """Drop owners whose bucket is full again, or else the longest idle, labels first."""
        for owner, (_, _, limit) in list(self._deficits.items()):
            if not self._deficit(owner, limit, now):
                del self._deficits[owner]
        while len(self._deficits) > _OWNERS_MAX:
            labelled = (o for o in self._deficits if o.label)
            del self._deficits[next(labelled, next(iter(self._deficits)))]


def _of_label(owner: Owner, tokens: float) -> str:
    return f", {math.ceil(tokens)} of them as {owner.label!r}" if owner.label else ""


def _next_millisecond(seconds: float) -> float:
    """Return the next whole millisecond, so that a retry then is not too early."""
    return (math.floor(seconds * 1000) + 1) / 1000
