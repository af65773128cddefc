"""Plans of slots: functions of the engine's state, without model or clock.

`plan_slots` decides which tasks get, keep and lose a slot; it changes only `Task.boost`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..kv.slots import Slot
from ..priority import PRIORITY_MAX
from ..settings import EngineSettings
from ..task import Task
from .order import Order


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """The tasks to *park* first, and those to *start* then. Each pair of *follow* is a task and the
    leader that it waits for.
    """

    park: tuple[Task, ...] = ()
    start: tuple[Task, ...] = ()
    follow: tuple[tuple[Task, Task], ...] = ()


def plan_slots(
    queue: Sequence[Task],
    slots: Sequence[Slot],
    order: Order,
    settings: EngineSettings,
    now: float,
    find_leader: Callable[[Task, Sequence[Task]], Task | None] = lambda task, running: None,
) -> SlotPlan:
    """Decide, in the order of the queue, which tasks are parked and which get a slot.

    A task preempts a running one at once if its own class is above the other's effective class, if
    it has a reserved quantum, or if the other was not read for `reader_lag_s`. Otherwise it
    preempts one whose quantum has ended, if its effective class is higher, or equal and its owner
    was not served more. *find_leader* returns the running task that computes a prefix of the given
    task, which then takes no slot until the prefix is computed.
    """
    waiting = sorted((t for t in queue if t.has_work or t.wants_token), key=order.key)
    staying = [s.task for s in slots if s.task is not None]
    free = len(slots) - len(staying)
    park: list[Task] = []
    start: list[Task] = []
    follow: list[tuple[Task, Task]] = []
    floor: int | None = None
    for task in waiting:
        if floor is not None and task.spec.priority <= floor:
            continue
        leader = find_leader(task, staying + start)
        if leader is not None:
            follow.append((task, leader))
            leader.boost = max(leader.boost, order.effective(task))
            continue
        if free:
            free -= 1
        else:
            victim = _victim(task, staying, order, settings, now)
            if victim is None:  # of those behind it, only one of a higher own class can preempt
                settled = [order.effective(t) for t in staying if not t.shift_pending]
                floor = min(settled, default=PRIORITY_MAX)
                continue
            staying.remove(victim)
            park.append(victim)
        start.append(task)
    return SlotPlan(tuple(park), tuple(start), tuple(follow))


def _victim(
    task: Task, running: Sequence[Task], order: Order, settings: EngineSettings, now: float
) -> Task | None:
    running = [t for t in running if not t.shift_pending]
    unread = [t for t in running if reader_lags(t, settings, now)]
    if unread:
        return min(unread, key=lambda t: (order.effective(t), -t.arrival))
    running = [t for t in running if not t.reserved_tokens]
    lowest = min(running, key=lambda t: (order.effective(t), -t.arrival), default=None)
    if lowest is None:
        return None
    if task.reserved_tokens or task.spec.priority > order.effective(lowest):
        return lowest
    done = [
        t
        for t in running
        if t.quantum >= settings.quantum_tokens and order.rank(task) <= order.rank(t)
    ]
    last = max(done, key=order.key, default=None)
    if last is not None and last.spec.priority > order.effective(lowest):
        return lowest  # otherwise `last`, once parked, would preempt it at once
    return last


def reader_lags(task: Task, settings: EngineSettings, now: float) -> bool:
    """Return whether *task* has reported nothing for so long that it gives way to any other."""
    return task.unread_since is not None and now >= task.unread_since + settings.reader_lag_s
