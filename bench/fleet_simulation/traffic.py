"""Synthetic traffic: sessions by hour of day with bursts, and losses of nodes.

The same seed gives the same sessions, whatever the policy.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .turns import Session, TurnPlan

HOURS = (
    *(0.45, 0.35, 0.3, 0.3, 0.35, 0.5, 0.7, 0.95, 1.2, 1.4, 1.5, 1.45),
    *(1.3, 1.4, 1.5, 1.5, 1.45, 1.35, 1.2, 1.1, 1.05, 0.95, 0.8, 0.65),
)
"""The rate of new sessions by hour of day; the mean is 1."""
BURST_EVERY_S, BURST_S, BURST_FACTOR = 2400.0, 180.0, 2.0
HOT_EVERY_S, HOT_SHARE = 4 * 3600.0, 0.35
"""For each such time, one model has this share of the sessions beside its usual one."""
CLASS_SHARES = (0.2, 0.65, 0.1, 0.05)
CONTEXT_TOKENS = 3600
"""A session ends before its history exceeds this."""
TURNS_PARETO, TURNS_MAX = 1.2, 60
NEW_MEDIAN, ANSWER_MEDIAN, THINK_MEDIAN_S = 40, 160, 25.0
NEW_MAX, ANSWER_MAX, THINK_S_MAX = 1000, 800, 1800.0
SIGMA = 0.8
"""The deviation of the logarithms of lengths and times of thinking."""
USERS_PER_NODE = 20


@dataclass(frozen=True)
class Traffic:
    """The parameters of a run."""

    nodes: int
    sessions_per_s: float
    """New sessions of each node at the mean hour."""
    models: Sequence[str]
    seed: int = 1
    begin_s: float = 0.0
    """The time of day at which the run begins."""
    losses_per_day: float = 0.5
    """Losses of each node."""
    loss_s: float = 600.0
    """The time for which a lost node is away."""

    def sessions(self, until_s: float) -> Iterator[tuple[float, Session]]:
        """Yield the sessions and when they arrive, from second 0 of the run to *until_s*."""
        rng = random.Random(f"{self.seed} sessions")
        highest = self.nodes * self.sessions_per_s * max(HOURS) * BURST_FACTOR
        users = self.nodes * USERS_PER_NODE
        user_weights = list(accumulate(1 / (rank + 10) for rank in range(users)))
        now, number = 0.0, 0
        while True:
            now += rng.expovariate(highest)
            if now >= until_s:
                return
            if rng.random() * highest >= self.nodes * self._rate(now):
                continue
            number += 1
            user = rng.choices(range(users), cum_weights=user_weights)[0]
            yield now, self._session(number, user, now, rng)

    def _rate(self, now: float) -> float:
        """Return the new sessions of a node in a second, by hour and burst."""
        day_s = self.begin_s + now
        hour = day_s / 3600
        share = hour - math.floor(hour)
        low, high = HOURS[int(hour) % 24], HOURS[(int(hour) + 1) % 24]
        burst = BURST_FACTOR if day_s % BURST_EVERY_S < BURST_S else 1.0
        return self.sessions_per_s * (low + share * (high - low)) * burst

    def _session(self, number: int, user: int, now: float, rng: random.Random) -> Session:
        model = self._model(now, rng)
        priority = rng.choices(range(4), CLASS_SHARES)[0]
        shared = 100 + 50 * (user * 7919 % 10)
        count = min(TURNS_MAX, math.ceil(rng.paretovariate(TURNS_PARETO)))
        plans: list[TurnPlan] = []
        history = shared
        for at in range(count):
            new = min(NEW_MAX, max(4, round(rng.lognormvariate(math.log(NEW_MEDIAN), SIGMA))))
            answer = min(ANSWER_MAX, round(rng.lognormvariate(math.log(ANSWER_MEDIAN), SIGMA)))
            answer = max(8, answer // 4 if priority == 3 else answer)
            think = rng.lognormvariate(math.log(THINK_MEDIAN_S), 1.2)
            history += new + answer
            if plans and history > CONTEXT_TOKENS:
                break
            plans.append(TurnPlan(new, answer, min(THINK_S_MAX, think) if at else 0.0))
        return Session(number, user, model, priority, shared, plans, history=shared)

    def _model(self, now: float, rng: random.Random) -> str:
        """Return a model by Zipf's law, or at `HOT_SHARE` the one that is popular at this time."""
        if rng.random() < HOT_SHARE:
            hot = int((self.begin_s + now) // HOT_EVERY_S)
            return self.models[(hot * 3 + 1) % len(self.models)]
        weights = [1 / (rank + 1) for rank in range(len(self.models))]
        return rng.choices(self.models, weights)[0]

    def losses(self, until_s: float) -> list[tuple[float, int]]:
        """Return the losses: the time, and the number of the node."""
        rng = random.Random(f"{self.seed} losses")
        rate = self.nodes * self.losses_per_day / 86400
        found, now = [], rng.expovariate(rate) if rate else math.inf
        while now < until_s:
            found.append((now, rng.randrange(self.nodes)))
            now += rng.expovariate(rate)
        return found
