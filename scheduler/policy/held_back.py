"""The tasks that are held back from a step, so that users get their guaranteed part of the time.

Pure, as in `batch_plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..owner import Owner
from ..task import Task
from .order import Order

ADAPTERS_LAG_S = 0.1
"""Lag from which tasks with other adapters are held back. A change of adapters takes 2 ms."""


@dataclass
class _OwnersWork:
    """The work of one owner: the highest class of its tasks, beside those of its own user and
    beside others, and their adapters. Texts to embed have None for adapters.
    """

    effective: int = 0
    level: int = 0
    adapters: set[tuple[str, ...] | None] = field(default_factory=set)


def held_back(tasks: Sequence[Task], order: Order, now: float, gap_s: float) -> frozenset[Task]:
    """Return those of *tasks*, which all could be in the next step, that are held back for an owner
    who is behind its guarantee (see `Guarantees`).

    A task is held back if its own owner is not behind, and its class is not above that of the other
    owner's tasks. A decoding task is held back for *gap_s* at most, so that no stream stands still
    for longer, and a task with a reserved quantum is not held back.
    """
    shares, works = order.guarantees, dict[Owner, _OwnersWork]()
    if not shares.parts:
        return frozenset()
    for task in tasks:
        work = works.setdefault(task.spec.owner, _OwnersWork())
        work.effective = max(work.effective, order.effective(task))
        work.level = max(work.level, order.level(task))
        work.adapters.add(_adapters(task))
    preceding = {
        owner: [(one, lag) for one in works if (lag := shares.precedes_by(one, owner)) > 0]
        for owner in works
    }
    if not any(preceding.values()):
        return frozenset()

    def is_held_back(task: Task) -> bool:
        owner, adapters = task.spec.owner, _adapters(task)
        decodes = task.spec.embed is None and not task.prefilling
        if task.reserved_tokens or (decodes and now >= task.computed_at + gap_s):
            return False
        for one, lag_s in preceding[owner]:
            work = works[one]
            if one.user == owner.user:
                above = order.effective(task) > work.effective
            else:
                above = order.level(task) > work.level
            apart = adapters is not None and work.adapters.isdisjoint({adapters, None})
            if not above and lag_s > (ADAPTERS_LAG_S if apart else 0.0):
                return True
        return False

    return frozenset(filter(is_held_back, tasks))


def _adapters(task: Task) -> tuple[str, ...] | None:
    return task.spec.adapters if task.spec.embed is None else None
