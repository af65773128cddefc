"""Groups of tasks that may share a batch, and their quanta: one group is computed at a time.

A step applies adapters to all its tokens, so a batch has tokens of one group only. The functions
are pure, as in `plan`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..settings import Limits
from ..task import BASE_GROUP, Group, Task
from .plan import Order

GROUPS_MAX = 256
"""Groups whose last quantum is remembered: there are no more slots."""


@dataclass(frozen=True, slots=True)
class GroupQuantum:
    """The present *group*, the *tokens* that it has had, and *previous* groups, the latest last."""

    group: Group = BASE_GROUP
    tokens: int = 0
    previous: tuple[Group, ...] = ()

    def with_tokens(self, tokens: int) -> GroupQuantum:
        """Return the quantum after a step of *tokens* more."""
        return GroupQuantum(self.group, self.tokens + tokens, self.previous)

    def pass_to(self, group: Group) -> GroupQuantum:
        """Return the quantum of *group* that follows this one."""
        if group == self.group:
            return self
        previous = (*(g for g in self.previous if g != self.group), self.group)
        return GroupQuantum(group, 0, previous[-GROUPS_MAX:])

    def order_of(self, group: Group) -> int:
        """Return the sort key of a group by its last quantum: -1 for none, the latest last."""
        return self.previous.index(group) if group in self.previous else -1


def plan_group(tasks: Iterable[Task], order: Order, limits: Limits, quantum: GroupQuantum) -> Group:
    """Return the group of the next step, of the *tasks* that have slots and work.

    The next group is that of the first task in the order of the queue; among equals the one whose
    quantum is longest ago, so that none waits for more than one of each. A higher class takes over
    at once; an equal one at the end of the present group's quantum.
    """
    able = [t for t in tasks if t.has_work]
    if all(t.group == quantum.group for t in able):
        return quantum.group
    first: dict[Group, Task] = {}
    for task in sorted(able, key=order.key):
        first.setdefault(task.group, task)
    mine = first.pop(quantum.group, None)
    following = min(
        first, key=lambda g: (*order.rank(first[g]), quantum.order_of(g), first[g].place)
    )
    if mine is None:
        return following
    outranked = order.effective(first[following]) > order.effective(mine)
    level = order.rank(first[following]) <= order.rank(mine)
    over = quantum.tokens >= limits.quantum_tokens
    return following if outranked or (over and level) else quantum.group
