"""The division of a model's compute time among users, and of a user's part among labels.

Pure: times are passed in. A user with work is guaranteed a part of the time, by weight. A user's
*lag* is the compute time by which the guarantee exceeds the time used. The tasks of users who are
behind are computed without others until the lag is gone (`held_back`), so no kind of work, be it
answers, prompts, texts to embed or samplers, takes the part of another user.

The time used is that which a user's part of a step would have taken alone. So streams in one batch,
which is cheaper than steps of each, are rarely behind and stay together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ..owner import Owner, Priority

Part: TypeAlias = tuple[int | str, ...]
"""The tasks that share a guarantee: those of an account, `(account,)`; of one of its users,
`(account, user)`; of one of the user's labels, `(account, user, label)`. A gateway's own users
belong to the account of the gateway's user; any other user is an account.
"""

WEIGHTS = {
    Priority.LOW: 1.0,
    Priority.NORMAL: 3.0,
    Priority.HIGH: 9.0,
    Priority.URGENT: 27.0,
}
"""The weight of a user by the highest class of their tasks: 3 : 1 from one class to the next."""
WINDOW_S = 2.0
"""A user who has had no work for this long begins anew."""
BEHIND_S_MAX = WINDOW_S / 2
"""Bound on a lag. It bounds for how long a user who could not compute may then be computed alone.
"""
STARVED_S = 0.75
"""A user with this lag is served like one with urgent tasks, which precede those of others."""
SLOT_KEPT_S = 0.5
"""A starved user keeps its slots until its lag is less. Otherwise urgent tasks and its own would
park each other many times a second.
"""
ALIKE_S = 0.05
"""Users whose lags differ by less are computed together."""
AHEAD_S_MAX = 0.05
"""Bound on the time by which a user's lag may be negative. More than the guarantee costs nothing
later.
"""
NEWCOMER_S = 0.05
"""Lag with which a user begins anew, so that a short prompt is computed at once, and alone."""
PARTS_MAX = 4096
"""Maximum number of parts, and of accounts, that are remembered."""
HALF_LIFE_S = 1.3
"""Tokens on the nodes of a fleet count half after this time, so that about the last two seconds
count.
"""
WEIGHT_LEFT = 0.01
"""The least share of a part's weight that is left by tokens computed on other nodes."""


@dataclass(frozen=True, slots=True)
class Guarantees:
    """The parts of the owners with work, and their lags, as of one moment. Without parts, nobody
    shares the model.
    """

    parts: Mapping[Owner, tuple[Part, Part, Part]] = field(default_factory=dict)
    """The account, the user and the label of each owner with work."""
    lags: Mapping[Part, float] = field(default_factory=dict)
    """Seconds by which each part is behind its guarantee."""
    weights: Mapping[Part, float] = field(default_factory=dict)
    shares: Mapping[Part, float] = field(default_factory=dict)
    """The guaranteed share of the time."""
    urgent_users: frozenset[int] = frozenset()
    """The users with tasks of the class `urgent`."""

    def behind_s(self, part: Part) -> float:
        """Return the seconds by which a part is behind its guarantee; 0.0 if it is not."""
        return max(0.0, self.lags[part])

    def behind_of(self, owner: Owner) -> tuple[float, float, float]:
        """Return the seconds by which an owner's account, user and label are behind."""
        if owner not in self.parts:
            return 0.0, 0.0, 0.0
        account, user, label = self.parts[owner]
        return self.behind_s(account), self.behind_s(user), self.behind_s(label)

    def is_starved(self, owner: Owner) -> bool:
        """Return whether an owner's account is behind by `STARVED_S`."""
        return self.behind_of(owner)[0] >= STARVED_S

    def is_starved_in_account(self, owner: Owner) -> bool:
        """Return whether an owner's user is behind by `STARVED_S` within its account. This does not
        count beside other accounts: one account may have many such users.
        """
        return self.behind_of(owner)[1] >= STARVED_S

    def share_account(self, one: Owner, other: Owner) -> bool:
        """Return whether two owners with work divide the part of one account."""
        parts = self.parts
        return one in parts and other in parts and parts[one][0] == parts[other][0]

    def rivals(self, one: Owner, other: Owner) -> tuple[Part, Part] | None:
        """Return the parts by which two owners compete, the widest that differ; None if they do
        not compete, because they are the same or one has no work.
        """
        parts = self.parts
        if one not in parts or other not in parts:
            return None
        for own, others in zip(parts[one], parts[other], strict=True):
            if own != others:
                return own, others
        return None

    def keeps_slot(self, one: Owner, other: Owner) -> bool:
        """Return whether *one* keeps its slots beside urgent tasks of *other*."""
        rivals = self.rivals(one, other)
        return rivals is not None and self.lags[rivals[0]] >= SLOT_KEPT_S

    def lead_s(self, one: Owner, other: Owner) -> float:
        """Return by how many seconds *one* is further behind than *other*."""
        rivals = self.rivals(one, other)
        return 0.0 if rivals is None else self.lags[rivals[0]] - self.lags[rivals[1]]

    def precedes_by(self, one: Owner, other: Owner) -> float:
        """Return the seconds by which *one* is behind its guarantee, or 0.0 if *other* is behind
        its own by about as much, or more.
        """
        rivals = self.rivals(one, other)
        if rivals is None:
            return 0.0
        return _precedence_s(self.lags[rivals[0]], self.lags[rivals[1]])

    def preceded(self, owners: Collection[Owner]) -> list[Owner]:
        """Return those of *owners* that another one of them precedes (`precedes_by`)."""
        furthest: dict[Part, float] = {}
        for owner in owners:
            for part in self.parts.get(owner, ()):
                outer, lag = part[:-1], self.lags[part]
                furthest[outer] = max(lag, furthest.get(outer, lag))
        return [
            owner
            for owner in owners
            if any(
                _precedence_s(furthest[part[:-1]], self.lags[part])
                for part in self.parts.get(owner, ())
            )
        ]


def _precedence_s(own_s: float, other_s: float) -> float:
    """Return the lag *own_s*, or 0.0 if it is none, or not clearly above the lag *other_s*."""
    alike = other_s > 0 and own_s < other_s + ALIKE_S
    return 0.0 if alike else max(0.0, own_s)


NO_GUARANTEES = Guarantees()


class UserLags:
    """The lags of users and labels. Owned by the engine. With *strict*, only owners whose tasks
    have the highest class have a guarantee.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._accounts: dict[int, int] = {}
        """The accounts of gateways' own users."""
        self._strict = strict
        self._lags: dict[Part, float] = {}
        self._seen: dict[Part, float] = {}
        """The time at which each part last had work."""
        self._alone_at = math.inf
        """When a single owner was last found to have work, unless several had since."""
        self._tokens = NodeTokens()

    def __len__(self) -> int:
        return len(self._lags)

    def shares(self, classes: Mapping[Owner, int], now: float) -> Guarantees:
        """Return the shares of the owners with work, given with the highest class of their tasks.
        A part without work for `WINDOW_S` begins anew.
        """
        if len(classes) < 2:
            own = [part for owner in classes for part in self._parts(owner)]
            alone_s, self._alone_at = max(0.0, now - self._alone_at), now
            for part in own:  # alone, it catches up; another user may be back in the next step
                self._lags[part] = max(0.0, self._lags.get(part, 0.0) - alone_s)
                self._seen[part] = now
            self._forget_parts(own, now)
            return NO_GUARANTEES
        self._alone_at = math.inf
        parts = {owner: self._parts(owner) for owner in classes}
        weights = _weights({parts[owner]: n for owner, n in classes.items()}, strict=self._strict)
        self._tokens.weigh(weights, now)
        highest = max(classes.values())
        entitled = {
            p
            for owner, n in classes.items()
            if n == highest or not self._strict
            for p in parts[owner]
        }
        for part in weights:
            if now > self._seen.get(part, -math.inf) + WINDOW_S:
                self._lags[part] = NEWCOMER_S
            self._seen[part] = now
        self._forget_parts(weights, now)
        urgent = frozenset(o.user for o, level in classes.items() if level == Priority.URGENT)
        return Guarantees(parts, self._lags, weights, _shares(weights, entitled), urgent)

    def note_exchange(
        self, elsewhere: Mapping[int, int], totals: Mapping[int, int], now: float
    ) -> None:
        """Note the tokens that other nodes of a fleet have computed for users since the last
        exchange, and the *totals* computed here.
        """
        self._tokens.note_exchange(elsewhere, totals, now)

    def _forget_parts(self, kept: Collection[Part], now: float) -> None:
        """Forget all but the *kept* parts if there are too many."""
        if len(self._lags) > PARTS_MAX:
            self._lags = {part: self._lags[part] for part in kept}
            self._seen = dict.fromkeys(kept, now)

    def set_account(self, user: int, account: int) -> None:
        """Note the *account* of a gateway's own user; -1 stands for a user of the system."""
        if account >= 0 and self._accounts.get(user) != account:
            if len(self._accounts) >= PARTS_MAX:
                self._accounts.pop(next(iter(self._accounts)))
            self._accounts[user] = account

    def _parts(self, owner: Owner) -> tuple[Part, Part, Part]:
        user, label = owner
        account = self._accounts.get(user, user)
        return (account,), (account, user), (account, user, label)

    def count_work(self, shares: Guarantees, seconds: float, used: Mapping[Owner, float]) -> None:
        """Count work of *seconds*, of which each owner *used* the time that its own share of the
        work would have taken alone.
        """
        lags = self._lags
        for part, share in shares.shares.items():
            lags[part] += share * seconds
        for owner, used_s in used.items():
            for part in shares.parts.get(owner, ()):
                lags[part] -= used_s
        for part in shares.shares:
            lags[part] = min(BEHIND_S_MAX, max(-AHEAD_S_MAX, lags[part]))


class NodeTokens:
    """The recent tokens of users on this node and on the other nodes of a fleet. A user who is
    served elsewhere has a smaller weight here, so that all get the same of the whole fleet.
    """

    def __init__(self) -> None:
        self._here: dict[int, float] = {}
        self._elsewhere: dict[int, float] = {}
        self._totals: Mapping[int, int] = {}
        self._exchanged_at = -math.inf

    def note_exchange(
        self, elsewhere: Mapping[int, int], totals: Mapping[int, int], now: float
    ) -> None:
        """Note an exchange; see `UserLags.note_exchange`."""
        here = {user: total - self._totals.get(user, total) for user, total in totals.items()}
        kept = 0.5 ** ((now - self._exchanged_at) / HALF_LIFE_S)
        self._here = _faded(self._here, here, kept)
        self._elsewhere = _faded(self._elsewhere, {u: elsewhere.get(u, 0) for u in totals}, kept)
        self._totals, self._exchanged_at = dict(totals), now

    def weigh(self, weights: dict[Part, float], now: float) -> None:
        """Change the *weights* of accounts and users by the tokens computed elsewhere, unless the
        last exchange is more than `WINDOW_S` ago.
        """
        if now > self._exchanged_at + WINDOW_S or not any(self._elsewhere.values()):
            return
        here, elsewhere = defaultdict[Part, float](float), defaultdict[Part, float](float)
        for part in weights:
            if len(part) == 2:
                user = int(part[1])
                for outer in (part, part[:1]):
                    here[outer] += self._here.get(user, 0.0)
                    elsewhere[outer] += self._elsewhere.get(user, 0.0)
        groups: dict[Part, list[Part]] = {}
        for part in here:
            groups.setdefault(part[:-1], []).append(part)
        for parts in groups.values():
            own = {part: weights[part] for part in parts}
            tokens = sum(here[part] for part in parts)
            weights |= fleet_weights(own, elsewhere, tokens)


def _faded(before: Mapping[int, float], more: Mapping[int, float], kept: float) -> dict[int, float]:
    """Return the sums of tokens after *more*, of which the part *kept* of those *before* is left.
    Sums of less than a token are dropped.
    """
    sums = {u: kept * before.get(u, 0.0) + more.get(u, 0) for u in {*before, *more}}
    return {user: tokens for user, tokens in sums.items() if tokens >= 1}


def fleet_weights(
    weights: Mapping[Part, float], elsewhere: Mapping[Part, float], here: float
) -> dict[Part, float]:
    """Return the weights by which parts divide the tokens computed *here* so that, with those
    computed *elsewhere*, each has the same for its weight: (level · weight - elsewhere), or nearly
    nothing if it has more elsewhere. The level is that at which these sum up to *here*.
    """
    rising = sorted(weights, key=lambda part: elsewhere.get(part, 0.0) / weights[part])
    level, tokens, weight = 0.0, here, 0.0
    for part in rising:
        reached = elsewhere.get(part, 0.0) / weights[part]
        if weight and level <= reached:
            break
        tokens, weight = tokens + elsewhere.get(part, 0.0), weight + weights[part]
        level = tokens / weight
    if not here:
        return dict(weights)
    scale = sum(weights.values()) / here
    return {
        part: max(WEIGHT_LEFT * own, scale * (level * own - elsewhere.get(part, 0.0)))
        for part, own in weights.items()
    }


def _weights(classes: Mapping[tuple[Part, Part, Part], int], *, strict: bool) -> dict[Part, float]:
    """Return the weights of all parts: of accounts and users by the highest class of their tasks,
    unless *strict*; those of labels are equal.
    """
    weights: dict[Part, float] = {}
    for (account, user, label), level in classes.items():
        weight = 1.0 if strict else WEIGHTS[Priority(level)]
        for part in (account, user):
            weights[part] = max(weights.get(part, 0.0), weight)
        weights[label] = 1.0
    return weights


def _shares(weights: Mapping[Part, float], entitled: Collection[Part]) -> dict[Part, float]:
    """Return the shares of all parts. The *entitled* accounts divide the time by weight, the users
    of an account its part, and the labels of a user the user's part.
    """
    sums: dict[Part, float] = {}
    for part in entitled:
        sums[part[:-1]] = sums.get(part[:-1], 0.0) + weights[part]
    shares: dict[Part, float] = {(): 1.0}
    for part in sorted(weights, key=len):
        outer = part[:-1]
        share = shares[outer] * weights[part] / sums[outer] if part in entitled else 0.0
        shares[part] = share
    del shares[()]
    return shares
