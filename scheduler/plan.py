"""Who runs next: pure functions of the engine's state, with neither model, clock nor thread.

`plan_slots` decides who gets, keeps and gives up a slot; once the engine has done that,
`plan_rows` decides the rows of the next batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .slots import Slot
from .task import Task

__all__ = (
    "Limits",
    "OwnerClock",
    "Rows",
    "SlotPlan",
    "plan_rows",
    "plan_slots",
)


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's settings; units in the names."""

    ageing_tokens: int = 20_000
    quantum_tokens: int = 256
    reader_wait_s: float = 0.2
    reader_timeout_s: float = 300.0
    pull_linger_s: float = 0.005
    """What a step waits for late pull readers. With 2 ms, 16 readers on two busy cores missed a
    quarter of the steps (152 to 165 steps for 128 tokens); with 5 ms it is 131.
    """
    credit_max: int = 1024
    park_bytes_max: int = 2 << 30
    prefill_rows_beside_decode: int = 128
    """Prompt rows in a step that decodes too: a long prompt must not stall the streams."""


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """First park, then admit."""

    park: tuple[Task, ...] = ()
    admit: tuple[Task, ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """The next *count* pending tokens of *task* go into the batch."""

    task: Task
    count: int


class OwnerClock:
    """Tokens computed for each owner: who has had least goes first.

    An owner who returns is lifted to the least of the active ones: idleness earns no credit
    (virtual token counter, Sheng et al., OSDI 2024). At most `OWNERS_MAX` are remembered.
    """

    OWNERS_MAX = 4096

    def __init__(self) -> None:
        self._served: dict[int, int] = {}

    def served(self, owner: int) -> int:
        """Return the tokens computed for *owner*."""
        return self._served.get(owner, 0)

    def arrive(self, owner: int, active: Iterable[int]) -> None:
        """Note a task of *owner*, while *active* owners have tasks."""
        owners = set(active)
        if owner in owners:
            return
        floor = min((self.served(o) for o in owners), default=0)
        self._served[owner] = max(self.served(owner), floor)
        self._forget(owners | {owner})

    def add(self, owner: int, tokens: int) -> None:
        """Count *tokens* computed for *owner*."""
        self._served[owner] = self.served(owner) + tokens

    def _forget(self, keep: set[int]) -> None:
        if len(self._served) > self.OWNERS_MAX:
            self._served = {o: n for o, n in self._served.items() if o in keep}


class _Order:
    """The one order of tasks: (effective class, the owner's served tokens, arrival)."""

    def __init__(self, clock: int, owners: OwnerClock, limits: Limits):
        self._clock, self._owners, self._limits = clock, owners, limits

    def effective(self, task: Task) -> int:
        return task.effective_class(self._clock, self._limits.ageing_tokens)

    def key(self, task: Task) -> tuple[int, int, int]:
        return (-self.effective(task), self._owners.served(task.spec.owner), task.arrival)


def plan_slots(
    queue: Sequence[Task],
    slots: Sequence[Slot],
    owners: OwnerClock,
    clock: int,
    limits: Limits,
    now: float,
) -> SlotPlan:
    """Decide who is parked and who is admitted, best first.

    Preemption: at once for a task whose own class is above a running one's effective class;
    between equals only at the end of a quantum, for one that comes first in the order; and
    whoever has not been read for `reader_wait_s` gives way to anybody.
    """
    order = _Order(clock, owners, limits)
    waiting = sorted((t for t in queue if t.has_work or t.wants_token), key=order.key)
    running = [s.task for s in slots if s.task is not None]
    free = len(slots) - len(running)
    park: list[Task] = []
    admit: list[Task] = []
    for task in waiting:
        if free:
            free -= 1
        else:
            victim = _victim(task, [r for r in running if r not in park], order, limits, now)
            if victim is None:
                break
            park.append(victim)
        admit.append(task)
    return SlotPlan(tuple(park), tuple(admit))


def _victim(
    task: Task, running: Sequence[Task], order: _Order, limits: Limits, now: float
) -> Task | None:
    absent = [t for t in running if _absent(t, limits, now)]
    if absent:
        return min(absent, key=lambda t: (order.effective(t), -t.arrival))
    lowest = min(running, key=lambda t: (order.effective(t), -t.arrival), default=None)
    if lowest is None:
        return None
    if task.spec.priority > order.effective(lowest):
        return lowest
    done = [
        t
        for t in running
        if t.quantum >= limits.quantum_tokens
        and order.effective(t) <= order.effective(task)
        and order.key(task) < order.key(t)
    ]
    return max(done, key=order.key, default=None)


def _absent(task: Task, limits: Limits, now: float) -> bool:
    return task.unread_since is not None and now >= task.unread_since + limits.reader_wait_s


def plan_rows(
    slots: Sequence[Slot],
    owners: OwnerClock,
    clock: int,
    limits: Limits,
    batch_size: int,
) -> list[Rows]:
    """Return the rows of the next batch, in ascending slots.

    Every task that decodes gets its row; prompts share what is left, by the order of the queue,
    and less of it where tasks of their own or a higher class decode beside them.
    """
    order = _Order(clock, owners, limits)
    tasks = [s.task for s in slots if s.task is not None and s.task.has_work]
    decoding = [t for t in tasks if not t.prefilling]
    prompts = sorted((t for t in tasks if t.prefilling), key=order.key)
    counts = {id(t): 1 for t in decoding}
    left = batch_size - len(decoding)
    highest = max((order.effective(t) for t in decoding), default=-1)
    if prompts and highest >= order.effective(prompts[0]):
        left = min(left, limits.prefill_rows_beside_decode)
    for task in prompts:
        if left <= 0:
            break
        counts[id(task)] = count = min(task.pending, left)
        left -= count
    return [Rows(t, counts[id(t)]) for t in tasks if id(t) in counts]
