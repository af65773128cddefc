"""The tasks that share the next step: those not held back for other users, with one set of
adapters.

Tasks are held back so that users get their guaranteed part of the time. All tokens of a batch share
their adapters, so tasks with different ones alternate. The functions are pure, as in `batch_plan`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..owner import Owner
from ..settings import EngineSettings
from ..task import Task
from .cost import StepCost
from .guarantees import Guarantees, Part
from .order import Order

ADAPTERS_LAG_S = 0.1
"""Lag from which tasks with other adapters are held back. A change of adapters takes 2 ms."""

CATCH_UP = 1.5
"""A lag of a second is gone after 2 s, divided by the guaranteed share, at most."""


@dataclass
class _OwnersWork:
    """The work of one owner: the highest class of its tasks beside those of its user, of other
    accounts and of its account, and their adapters. Texts to embed have None for adapters.
    """

    effective: int = 0
    level: int = 0
    level_in_account: int = 0
    decodes: bool = True
    """Whether all of its tasks decode."""
    adapters: set[tuple[str, ...] | None] = field(default_factory=set)


def held_back(
    tasks: Sequence[Task], order: Order, now: float, gap_s: float, cost: StepCost
) -> frozenset[Task]:
    """Return those of *tasks*, which all could be in the next step, that are held back for an owner
    who is behind its guarantee (see `Guarantees`).

    A task is held back if its own owner is not behind, and its class is not above that of the other
    owner's tasks. A decoding task is held back for *gap_s* at most, so that no stream stands still
    for longer, and a task with a reserved quantum is not held back.

    Decoding tasks are not held back for others that catch up beside them (`_catch_up`). So streams
    still share batches if more users than slots take turns.
    """
    shares, works = order.guarantees, dict[Owner, _OwnersWork]()
    if not shares.parts:
        return frozenset()
    for task in tasks:
        work = works.setdefault(task.spec.owner, _OwnersWork())
        work.effective = max(work.effective, order.effective(task))
        work.level = max(work.level, order.level(task))
        work.level_in_account = max(work.level_in_account, order.level_in_account(task))
        work.adapters.add(_adapters(task))
        work.decodes &= task.spec.embed is None and not task.prefilling
    preceded = frozenset(shares.preceded(works))
    if not preceded:
        return frozenset()
    catching_up = _catch_up(tasks, shares, cost)
    behind = [one for one in works if any(shares.behind_of(one))]

    def is_held_back(task: Task) -> bool:
        owner, adapters = task.spec.owner, _adapters(task)
        decodes = task.spec.embed is None and not task.prefilling
        if owner not in preceded or task.reserved_tokens:
            return False
        if decodes and now >= task.computed_at + gap_s:
            return False
        for one in behind:
            rivals, lag_s = shares.rivals(one, owner), shares.precedes_by(one, owner)
            if rivals is None or lag_s <= 0:
                continue
            work = works[one]
            if one.user == owner.user:
                above = order.effective(task) > work.effective
            elif shares.share_account(one, owner):
                above = order.level_in_account(task) > work.level_in_account
            else:
                above = order.level(task) > work.level
            apart = adapters is not None and work.adapters.isdisjoint({adapters, None})
            if decodes and work.decodes and not apart and rivals[0] in catching_up:
                continue
            if not above and lag_s > (ADAPTERS_LAG_S if apart else 0.0):
                return True
        return False

    return frozenset(filter(is_held_back, tasks))


def _catch_up(tasks: Sequence[Task], shares: Guarantees, cost: StepCost) -> frozenset[Part]:
    """Return the parts whose lag decreases fast enough in a step of all decoding tasks: alone,
    their tokens would take `CATCH_UP` times as long as they are guaranteed of this step.
    """
    decoding = [t.spec.owner for t in tasks if t.spec.embed is None and not t.prefilling]
    tokens = Counter(part for owner in decoding for part in shares.parts.get(owner, ()))
    step_s = cost.decode_s(len(decoding))
    if not step_s:
        return frozenset()
    return frozenset(
        part
        for part, count in tokens.items()
        if cost.decode_s(count) >= CATCH_UP * shares.shares[part] * step_s
    )


def _adapters(task: Task) -> tuple[str, ...] | None:
    return task.spec.adapters if task.spec.embed is None else None


ADAPTER_SETS_MAX = 256
"""Number of adapter sets whose last quantum is remembered: the most slots that a model has."""


class AdapterQuantum(NamedTuple):
    """The present *adapters*, the *tokens* computed with them, and the *previous* adapter sets, the
    latest last.
    """

    adapters: tuple[str, ...] = ()
    tokens: int = 0
    previous: tuple[tuple[str, ...], ...] = ()

    def with_tokens(self, tokens: int) -> AdapterQuantum:
        """Return the quantum after a step of *tokens* more."""
        return AdapterQuantum(self.adapters, self.tokens + tokens, self.previous)

    def pass_to(self, adapters: tuple[str, ...]) -> AdapterQuantum:
        """Return the quantum of *adapters* that follows this one."""
        if adapters == self.adapters:
            return self
        previous = (*(a for a in self.previous if a != self.adapters), self.adapters)
        return AdapterQuantum(adapters, 0, previous[-ADAPTER_SETS_MAX:])

    def order_of(self, adapters: tuple[str, ...]) -> int:
        """Return the sort key of *adapters*: the latest quantum comes last, and -1 means none."""
        return self.previous.index(adapters) if adapters in self.previous else -1


def plan_adapters(
    tasks: Iterable[Task], order: Order, settings: EngineSettings, quantum: AdapterQuantum
) -> tuple[str, ...]:
    """Return the adapters of the next step, from the *tasks* that have slots and work.

    The next adapters are those of the first task in the order of the queue. Among tasks of equal
    rank they are those whose last quantum is longest ago, so that no task waits for more than one
    quantum of each other set. A task of a higher class takes over at once, and one
    whose owner is further behind by `ADAPTERS_LAG_S`. Another one of the same class takes over at
    the end of the present quantum, unless its owner was served more.
    """
    present, tasks = quantum.adapters, [t for t in tasks if t.has_work]
    if all(t.spec.adapters == present for t in tasks):
        return present
    first: dict[tuple[str, ...], Task] = {}
    for task in sorted(tasks, key=order.key):
        first.setdefault(task.spec.adapters, task)
    own = first.pop(present, None)
    if not first:
        return present
    following, task = min(
        first.items(),
        key=lambda pair: (
            *order.rank(pair[1]),
            quantum.order_of(pair[0]),
            pair[1].queue_number,
        ),
    )
    if own is None or order.is_above(task, own):
        return following
    if order.guarantees.lead_s(task.spec.owner, own.spec.owner) >= ADAPTERS_LAG_S:
        return following
    over = quantum.tokens >= settings.quantum_tokens
    return following if over and order.rank(task) <= order.rank(own) else present
