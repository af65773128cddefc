"""Groups of tasks that may share a batch, and their quanta: one group is computed at a time.

A step does some things in one way for all its tokens, so a batch has tokens of one group only. Pure
functions, as in `plan`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..limits import Limits
from ..task import BASE_GROUP, Group, Task
from .plan import Order

GROUPS_MAX = 256
"""Groups whose last quantum is remembered: there are no more slots."""


@dataclass(frozen=True, slots=True)
class GroupQuantum:
    """The *group* that the steps compute now, the *tokens* that it has had, and the groups *before*
    it, the latest last.
    """

    group: Group = BASE_GROUP
    tokens: int = 0
    before: tuple[Group, ...] = ()

    def with_tokens(self, tokens: int) -> GroupQuantum:
        """Return the quantum after a step of *tokens* more."""
        return GroupQuantum(self.group, self.tokens + tokens, self.before)

    def pass_to(self, group: Group) -> GroupQuantum:
        """Return the quantum of *group* that follows this one."""
        if group == self.group:
            return self
        before = (*(g for g in self.before if g != self.group), self.group)
        return GroupQuantum(group, 0, before[-GROUPS_MAX:])

    def order_of(self, group: Group) -> int:
        """Return the sort key of a group by its last quantum: -1 for none, the latest last."""
        return self.before.index(group) if group in self.before else -1


def plan_group(tasks: Iterable[Task], order: Order, limits: Limits, quantum: GroupQuantum) -> Group:
    """Return the group of the next step, of the *tasks* that have slots and work.

    Of the others that one comes next whose first task does in the order of the queue; of equals
    the one whose quantum is longest ago, so that none waits for more than one of each. It comes at
    once where its class is higher than the present one's; at the end of a quantum of tokens where
    it does not come after that one in the order.
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
