"""The adapters of the next step, which all tokens of its batch share, and their quanta.

Tasks with different adapters alternate. The functions are pure, as in `batch_plan`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..settings import EngineSettings
from ..task import Task
from .held_back import ADAPTERS_LAG_S
from .order import Order

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
