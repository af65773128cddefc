"""Leases of slots: which waiting tasks get one, and which running tasks are parked for them."""

from __future__ import annotations

from array import array

from ...backends import Model
from ..output.sampling import sampler_for
from ..policy.plan import absent, plan_slots
from ..task import Task, TaskState
from .metrics import EngineMetrics
from .task_table import TaskTable


class SlotLeases:
    """Admits and parks tasks as `plan_slots` decides. Owned by the engine."""

    def __init__(self, model: Model, tasks: TaskTable, metrics: EngineMetrics):
        self._model, self._tasks = model, tasks
        self._clock, self._reporter, self._slots = tasks.clock, tasks.reporter, tasks.slots
        self._kv = tasks.kv
        self._counts = metrics.counts

    def admissible(self) -> list[Task]:
        """Return the waiting tasks that may get a slot: those that were parked by hand only where
        others leave one.
        """
        able = self._able()
        aside = [t for t in able if t.yields(self._clock.tokens)]
        if not aside:
            return able
        left = max(0, len(self._slots.idle) - len(self._pressing()))
        stay = sorted(aside, key=self._tasks.order().key)[left:]
        return [t for t in able if t not in stay]

    def _pressing(self) -> list[Task]:
        """Return the waiting tasks for which others that were parked by hand leave the slots."""
        able = [t for t in self._able() if not t.yields(self._clock.tokens)]
        return [t for t in able if t.has_work or t.wants_token]

    def _able(self) -> list[Task]:
        """Return the waiting tasks except those that wait for a file, for room in the KV cache, or
        for their reader to come back.
        """
        full, limits, now = bool(self._slots.tasks), self._tasks.limits, self._clock.now
        return [
            t
            for t in self._tasks.queue
            if not t.fetching
            and not (t.preempted_by_kv_pressure and full)
            and not absent(t, limits, now)
        ]

    def lease_slots(self) -> None:
        """Park and admit tasks, and let tasks wait for what others compute."""
        tasks = self._tasks
        for task in tasks:
            task.boost = 0
        if tasks.queue:
            order = tasks.order()
            plan = plan_slots(
                self.admissible(),
                self._slots.slots,
                order,
                tasks.limits,
                self._clock.now,
                tasks.leaders.find,
            )
            for task in tasks.queue:
                task.follows = False
            for task, leader in plan.follow:
                task.follows = True
                leader.boost = max(leader.boost, order.effective(task))
            stayed = sum(not self.park_task(task) for task in plan.park)
            for task in plan.admit[: len(plan.admit) - stayed]:
                self._admit_task(task)
        self._slots.close_gaps()

    def _admit_task(self, task: Task) -> None:
        now = self._clock.now
        self._tasks.queue.remove(task)
        task.age += self._clock.tokens - task.clock_waiting
        task.quantum = 0
        task.leased_at, task.begun_at = now, None
        task.preempted_by_kv_pressure = False
        task.yields_until = 0
        task.state = TaskState.RUNNING
        self._plan_stops(task)
        self._kv.task_states.lease_slot(task)
        if task.admitted_at is None:
            task.admitted_at, task.cached = now, task.computed
            self._counts["looked_up"] += len(task.tokens)
            self._counts["cached"] += task.cached
        if task.sampler is None:
            task.sampler = sampler_for(self._model, task, task.spec.sampling)
        self._reporter.moved(task)
        self._reporter.log.admitted(task)

    def _plan_stops(self, task: Task) -> None:
        """Note where the state of a prompt is to be saved that serves only as a whole: where it
        parts from another, one token before its end, and every so often.
        """
        if self._model.info.memory == "plain" or task.admitted_at is not None:
            return
        limits = self._tasks.limits
        size, every = task.prompt_size, limits.checkpoint_tokens
        parting = self._kv.search.shared_prefix(task.origin, array("i", task.tokens))
        if limits.shared_prefix_tokens_min <= parting < size:
            task.stops.add(parting)
        task.stops.update(range(every, size, every), {size - 1})

    def park_task(self, task: Task, *, preempted_by_kv_pressure: bool = False) -> bool:
        """Put a running task back into the queue; return False if its state finds no room.

        A *preempted_by_kv_pressure* one goes in any case, if need be without its state.
        """
        if not self._kv.task_states.park_task(task, anyhow=preempted_by_kv_pressure):
            return False
        task.state, task.clock_waiting = TaskState.PARKED, self._clock.tokens
        task.parks += 1
        if task.quantum >= self._tasks.limits.quantum_tokens:
            task.place = self._tasks.next_place()
        task.preempted_by_kv_pressure = preempted_by_kv_pressure
        self._counts["parks"] += 1
        self._tasks.queue.append(task)
        self._reporter.moved(task)
        self._reporter.log.parked(task)
        return True

    def yield_slot(self, task: Task) -> bool:
        """Park a task by hand, or put it behind those who wait; return False if it is alone."""
        pressing = [t for t in self._pressing() if t is not task]
        if task.slot < 0:
            yields = bool(pressing)
        else:
            yields = len(pressing) > len(self._slots.idle) and self.park_task(task)
        if yields:
            task.yields_until = self._clock.tokens + self._tasks.limits.ageing_tokens
        return yields
