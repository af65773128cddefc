"""Bounds of users: waiting turns and their prompt tokens, sessions and their memory, tokens.

These are decisions without a loop or a clock. Labels share a user's bound fairly among the user's
own programs; the bound holds for all of them together.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sized
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from ...backends.errors import PermissionDenied, QuotaExceeded, Timeout
from ...scheduler import PRIORITY_MAX
from ...scheduler.owner import Owner, Priority
from ..table import SessionState
from ..usage.limits import NO_LIMITS, UsageLimits


class OwnerCounts:
    """Amounts by owner, and their sums by user. Zeros are not stored."""

    def __init__(self) -> None:
        self._users: Counter[int] = Counter()
        self._owners: Counter[Owner] = Counter()

    def add(self, owner: Owner, amount: int) -> None:
        """Add *amount*, which may be negative."""
        self._users[owner.user] += amount
        self._owners[owner] += amount
        if not self._users[owner.user]:
            del self._users[owner.user]
        if not self._owners[owner]:
            del self._owners[owner]

    def of(self, owner: Owner) -> int:
        """Return the amount of one owner."""
        return self._owners[owner]

    def of_user(self, user: int) -> int:
        return self._users[user]

    def total(self) -> int:
        return self._users.total()

    def users(self) -> Counter[int]:
        return self._users

    def __len__(self) -> int:
        return len(self._owners)


def exceeds_share(counts: OwnerCounts, owner: Owner, more: int, limit: int) -> bool:
    """Return whether a label with *more* would have more than now is free of its user's *limit*
    (the dynamic thresholds of Choudhury and Hahne, 1998). So one label alone reaches half, and
    something is always left for another. A program without a label may use the whole.
    """
    if not owner.label:
        return False
    return counts.of(owner) + more > limit - counts.of_user(owner.user)


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
    usage: UsageLimits = NO_LIMITS
    reasoning_max: Mapping[str, int] = {}
    """The maximum number of tokens of a thought, by class."""
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


@dataclass(eq=False)
class Ticket:
    """A turn in the ledger, from its admission to its end."""

    owner: Owner
    model: str
    slots: int
    priority: Priority
    prompt_tokens: int
    n_predict: int = -1
    """The bound of its output; −1 means no bound."""
    reasoning_budget: int = -1
    """The bound of a thought in its output; −1 means no bound."""
    output: Sized = ()
    """The turn's output so far; only its length is used."""
    state: SessionState = SessionState.WAITING
    state_since: float = 0.0
    """The time at which it entered its present state."""
    quota_checked: bool = False
    """The token quota was checked already, for the first turn of the same call."""
    resumed_tokens: int = 0
    """The part of its output that was computed before the turn was interrupted."""
    charged: int = 0
    """Tokens that its user was charged at its end."""


class Refusal(NamedTuple):
    """The setting that refuses a turn, and the reason."""

    bound: str
    why: str


class Bound(NamedTuple):
    """A user's bound, and the setting that sets it."""

    name: str
    limit: int


@dataclass(slots=True)
class WaitingCounts:
    """Waiting turns and their prompt tokens, by user and label. Owned by the ledger."""

    tasks: OwnerCounts = field(default_factory=OwnerCounts)
    prompt_tokens: OwnerCounts = field(default_factory=OwnerCounts)

    def count_ticket(self, ticket: Ticket, sign: int) -> None:
        """Add a waiting turn (*sign* 1), or remove it (−1)."""
        self.tasks.add(ticket.owner, sign)
        self.prompt_tokens.add(ticket.owner, sign * ticket.prompt_tokens)


@dataclass(slots=True)
class AdmissionBounds:
    """The configured bounds; `quota_of` returns the bounds of one user, and `gateway_of` the user
    of the gateway that a user belongs to, or -1.
    """

    tasks_max: int = 0
    tasks_owner_max: int = 0
    prompt_tokens_max: int = 1 << 20
    prompt_tokens_owner_max: int = 1 << 19
    sessions_owner_max: int = 0
    """0 means no bound besides that of all users together."""
    session_bytes_owner_max: int = 128 << 20
    kept_sessions_owner_max: int = 100
    reasoning_max: Mapping[str, int] = field(default_factory=dict)
    """The maximum number of tokens of a thought for all users, by class."""
    quota_of: Callable[[int], Quota] = lambda _: NO_QUOTA
    gateway_of: Callable[[int], int] = lambda _: -1

    def sessions_bound(self, user: int) -> Bound | None:
        """Return the bound on the number of a user's open sessions, if it has one of its own."""
        quota = self.quota_of(user)
        if quota.sessions_max is not None:
            return Bound(quota.bound("sessions-max"), quota.sessions_max)
        if not self.sessions_owner_max:
            return None
        return Bound("sessions-user-max", self.sessions_owner_max)

    def session_bytes_bound(self, user: int) -> Bound:
        quota = self.quota_of(user)
        if quota.session_bytes_max is not None:
            return Bound(quota.bound("session-bytes-max"), quota.session_bytes_max)
        return Bound("session-bytes-user-max", self.session_bytes_owner_max)

    def kept_sessions_bound(self, user: int) -> Bound:
        quota = self.quota_of(user)
        if quota.kept_sessions_max is not None:
            return Bound(quota.bound("kept-sessions-max"), quota.kept_sessions_max)
        return Bound("kept-sessions-user-max", self.kept_sessions_owner_max)

    def reasoning_bound(self, user: int, priority: Priority) -> Bound | None:
        """Return the bound on the tokens of a thought in a user's turn of a class, if any."""
        quota, name = self.quota_of(user), "reasoning-max"
        bounds = [
            Bound(setting, ceilings[priority.label])
            for setting, ceilings in (
                (quota.bound(name), quota.reasoning_max),
                (name, self.reasoning_max),
            )
            if priority.label in ceilings
        ]
        return min(bounds, key=lambda bound: bound.limit, default=None)

    def refusal(self, ticket: Ticket, waiting: WaitingCounts) -> Refusal | None:
        """Return why a turn is refused while *waiting* turns wait, or None if it is admitted."""
        user, tasks, prompts = ticket.owner.user, waiting.tasks, waiting.prompt_tokens
        quota, count = self.quota_of(user), tasks.of_user(user)
        if quota.tasks_waiting_max is not None and count >= quota.tasks_waiting_max:
            why = f"{count} tasks wait (yours); the limit is {quota.tasks_waiting_max}"
            return Refusal(quota.bound("tasks-waiting-max"), why)
        own = (count, self.tasks_owner_max, prompts.of_user(user), self.prompt_tokens_owner_max)
        total = (tasks.total(), self.tasks_max, prompts.total(), self.prompt_tokens_max)
        for whose, setting, bounds in (
            ("yours", "waiting-user-max", own),
            ("in all", "waiting-max", total),
        ):
            waits, tasks_max, tokens, tokens_max = bounds
            if waits >= tasks_max:
                why = f"{waits} tasks wait ({whose}); the limit is {tasks_max}"
                return Refusal(f"tasks-{setting}", why)
            # A prompt is admitted if no other waits; otherwise a long one would always be refused.
            if waits and tokens + ticket.prompt_tokens > tokens_max:
                why = (
                    f"{tokens} prompt tokens wait ({whose}), this prompt has"
                    f" {ticket.prompt_tokens} more; the limit is {tokens_max}"
                )
                return Refusal(f"prompt-tokens-{setting}", why)
        return self._label_refusal(ticket, waiting) if ticket.owner.label else None

    def _label_refusal(self, ticket: Ticket, waiting: WaitingCounts) -> Refusal | None:
        """Return why a turn would leave too little for other labels of its user, if it would."""
        owner, tasks, prompts = ticket.owner, waiting.tasks, waiting.prompt_tokens
        quota, prompt_tokens = self.quota_of(owner.user), ticket.prompt_tokens
        shares = [("tasks-waiting-user-max", tasks, 1, self.tasks_owner_max)]
        if quota.tasks_waiting_max is not None:
            shares.insert(0, (quota.bound("tasks-waiting-max"), tasks, 1, quota.tasks_waiting_max))
        if tasks.of(owner):  # a long prompt is admitted if no other of the label waits
            bound = "prompt-tokens-waiting-user-max"
            shares.append((bound, prompts, prompt_tokens, self.prompt_tokens_owner_max))
        for bound, counts, more, limit in shares:
            if exceeds_share(counts, owner, more, limit):
                own, total = counts.of(owner), counts.of_user(owner.user)
                what = "tasks" if counts is tasks else "prompt tokens"
                why = f"{own} {what} wait ({owner.label!r}, of {total} of your user)"
                return Refusal(bound, f"{why}; the rest is for other labels")
        return None


class KeptBytes:
    """The bytes of open sessions and graphs, by user. Owned by the daemon's event loop.

    A *holder* is a session or a graph. Dormant sessions share the bound; `left_for_dormant` is the
    remainder.
    """

    def __init__(self, bounds: AdmissionBounds):
        self._bounds = bounds
        self._holders: dict[Hashable, tuple[Owner, int]] = {}
        """Owner and bytes."""
        self._open = OwnerCounts()
        self.growth_listeners: list[Callable[[], None]] = []
        """Called when a user's open sessions or graphs have become larger."""

    def open_bytes(self, user: int) -> int:
        return self._open.of_user(user)

    def bytes_of(self, holder: Hashable) -> int:
        return self._holders[holder][1] if holder in self._holders else 0

    def left_for_dormant(self, user: int) -> int:
        """Return the bytes that a user's dormant sessions may have."""
        return self._bounds.session_bytes_bound(user).limit - self.open_bytes(user)

    def check_growth(self, owner: Owner, more: int) -> None:
        """Check that a user's open sessions and graphs may become larger by *more* bytes.

        :raises QuotaExceeded: the bound, or the label's part of it, would be exceeded.
        """
        bound, kept = self._bounds.session_bytes_bound(owner.user), self.open_bytes(owner.user)
        is_over = more > 0 and kept + more > bound.limit
        if is_over or (more > 0 and exceeds_share(self._open, owner, more, bound.limit)):
            reserved = f", part of which is reserved for labels other than {owner.label!r}"
            raise QuotaExceeded(
                f"your open sessions and models in use take {kept} bytes; {more} more would exceed"
                f" the limit of {bound.limit}{'' if is_over else reserved}",
                hint="close sessions and unload models that are done, or use shorter inputs and"
                " options",
                data={"bound": bound.name, "bytes": kept, "more": more, "bytes_max": bound.limit},
            )

    def add_holder(self, holder: Hashable, owner: Owner, size: int) -> None:
        self._holders[holder] = owner, 0
        self.set_bytes(holder, size)

    def set_bytes(self, holder: Hashable, size: int) -> None:
        """Count the present size of a session or graph, unless it is not open."""
        if holder not in self._holders:
            return
        owner, before = self._holders[holder]
        self._holders[holder] = owner, size
        self._open.add(owner, size - before)
        if size > before:
            for note_growth in self.growth_listeners:
                note_growth()

    def remove_holder(self, holder: Hashable) -> None:
        owner, size = self._holders.pop(holder, (Owner(0), 0))
        self._open.add(owner, -size)


class WaitLimit(NamedTuple):
    """The earlier one of a call's timeouts, `total` or `queue`."""

    timeout: str
    seconds: float

    @classmethod
    def of(cls, timeout_s: float, queue_timeout_s: float) -> WaitLimit:
        """Return the limit by these timeouts; 0 means no timeout."""
        limits = (cls("total", timeout_s), cls("queue", queue_timeout_s))
        given = (limit for limit in limits if limit.seconds)
        return min(given, key=lambda limit: limit.seconds, default=cls("total", math.inf))

    def error(self, lacking: str, hint: str = "") -> Timeout:
        """Return the error of a call at this limit; *lacking* states why the wait has not ended."""
        name = "timeout" if self.timeout == "total" else f"{self.timeout} timeout"
        text = f"the {name} of {self.seconds:g} s has passed: {lacking}"
        return Timeout(text, hint=hint, data={"timeout": self.timeout})
