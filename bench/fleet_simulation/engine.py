"""The engine of one model on one node: slots, batches and steps, planned by the real functions.

`plan_slots` and `plan_tokens` are called once for each change of the tasks that have slots. While
these tasks only decode, every step has a token of each. So the plan stays the same until a turn
arrives, ends or may preempt another one. The steps of such a run are computed in closed form. The
real engine plans each step; `steps_max` = 1 does so here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from inferd.scheduler.kv.slots import Slot
from inferd.scheduler.owner import OwnerClock
from inferd.scheduler.policy.batch_plan import plan_tokens
from inferd.scheduler.policy.cost import StepCost, StepLoad
from inferd.scheduler.policy.order import Order, ReservedQuanta
from inferd.scheduler.policy.slot_plan import plan_slots
from inferd.scheduler.settings import EngineSettings
from inferd.scheduler.task import Task, TaskState

from .states import SessionStates
from .turns import SimulatedTask, Turn, task_of

BATCH_SIZE = 512
"""The default of the setting `batch-size`."""
QUEUED_STEPS_MAX = 64
"""The most steps until slots are planned again while turns wait."""


class Run(NamedTuple):
    """Steps with the same tasks. *counts* are the tokens of each task in a step."""

    began_at: float
    steps: int
    first_s: float
    """The duration of the first step."""
    growth_s: float
    """The time by which each step is longer than the previous one."""
    tasks: tuple[SimulatedTask, ...]
    counts: tuple[int, ...]

    def seconds(self, steps: int) -> float:
        """Return the duration of the first *steps*."""
        return steps * self.first_s + self.growth_s * steps * (steps - 1) / 2

    def steps_begun(self, elapsed_s: float) -> int:
        """Return how many steps have begun after *elapsed_s*."""
        if elapsed_s <= self.first_s or self.steps == 1:
            return 1
        half, begun = self.growth_s / 2, elapsed_s / self.first_s
        if half > 1e-12:
            linear = self.first_s - half
            begun = (math.sqrt(linear * linear + 4 * half * elapsed_s) - linear) / (2 * half)
        return max(1, min(self.steps, math.ceil(begun - 1e-9)))


class SimulatedEngine:
    """Runs the turns of one model. `due_at` is when `advance` is to be called next.

    Users' guarantees of time are not simulated; classes of priority are strict instead. *between_s*
    is the time between two steps. *slowness* returns the factor by which other engines
    of the node slow the steps down.
    """

    def __init__(
        self,
        slots: int,
        cost: StepCost,
        states: SessionStates,
        slowness: Callable[[], float] = lambda: 1.0,
        between_s: float = 0.0,
        steps_max: int = 1 << 30,
        settings: EngineSettings | None = None,
    ):
        self.settings = settings or EngineSettings(priority_strict=True)
        self.slots = [Slot(i) for i in range(slots)]
        self.queue: list[SimulatedTask] = []
        self.running: list[SimulatedTask] = []
        self.due_at = math.inf
        self.tokens = 0
        """The token clock."""
        self.plans = 0
        """Calls of `plan_tokens`."""
        self._cost, self._states, self._slowness = cost, states, slowness
        self._between_s, self._steps_max = between_s, steps_max
        self._owners, self._reserved = OwnerClock(), ReservedQuanta(self.settings)
        self._run: Run | None = None
        self._arrivals = 0
        self._ended: list[Turn] = []

    @property
    def has_work(self) -> bool:
        """Whether turns run or wait."""
        return bool(self.running or self.queue)

    def effective_class(self, task: SimulatedTask) -> int:
        """Return the class of a task, raised by its age."""
        return task.effective_class(self.tokens, self.settings.ageing_tokens)

    def add_turn(self, turn: Turn, now: float) -> None:
        """Queue a turn; the engine notices it at the end of its present step."""
        task = task_of(turn, self._arrivals, self._arrivals, self.tokens, now)
        task.ctx_size = 1 << 30
        self._arrivals += 1
        active = (t.spec.owner for t in (*self.running, *self.queue))
        self._owners.add_owner(task.spec.owner, active)
        self.queue.append(task)
        self.interrupt(now)

    def interrupt(self, now: float) -> None:
        """Plan again at the end of the present step."""
        run = self._run
        if run is None:
            self.due_at = now
            return
        steps = run.steps_begun(now - run.began_at)
        if steps < run.steps:
            self._run = run._replace(steps=steps)
            self.due_at = run.began_at + run.seconds(steps)

    def fail_all(self) -> list[Turn]:
        """End all turns, as the node is lost; return them."""
        turns = [task.turn for task in (*self.running, *self.queue)]
        self.queue, self.running, self._run, self.due_at = [], [], None, math.inf
        for slot in self.slots:
            slot.task = None
        return turns

    def advance(self, now: float) -> list[Turn]:
        """End the steps that are due *now* and begin the next ones; return the turns that ended."""
        self._ended = []
        if self._run is not None:
            run, self._run = self._run, None
            self._finish_run(run, now)
        if self.queue:
            for task in self.queue:
                if task.turn.noticed_at < 0:
                    task.turn.noticed_at = now
            self._assign_slots(now)
        self._begin_run(now)
        return self._ended

    def _finish_run(self, run: Run, now: float) -> None:
        steps, last_s = run.steps, run.first_s + run.growth_s * (run.steps - 1)
        total = 0
        for task, count in zip(run.tasks, run.counts, strict=True):
            computed = steps * count
            total += computed
            self._owners.count_work(task.spec.owner, computed)
            was_prompt = task.computed < task.prompt_size
            task.computed += computed
            task.quantum += computed
            task.count_tokens(computed, now)
            if task.computed < task.prompt_size:
                continue
            if task.first_logits_at is None:  # in this slot
                task.first_logits_at = now - (steps - 1) * last_s
            if was_prompt and task.prompt_done_at is None:
                task.prompt_done_at = now
                self._states.save_state(task.turn.session, task.computed)
            task.set_size(len(task.tokens) + steps)  # a sampled token after each step
            if task.generated >= task.answer_tokens:
                self._end(task, now)
        self.tokens += total
        if len(run.tasks) < len(self.running):
            served = {id(task) for task in run.tasks}
            for task in self.running:
                if id(task) not in served:
                    task.age += total

    def _end(self, task: SimulatedTask, now: float) -> None:
        self.slots[task.slot].task = None
        self.running.remove(task)
        turn = task.turn
        turn.ended_at = now
        turn.session.history = len(task.tokens)
        self._states.save_state(turn.session, task.computed)
        self._ended.append(turn)

    def _assign_slots(self, now: float) -> None:
        order = Order(self.tokens, self._owners, self.settings)
        for task in (*self.running, *self.queue):
            task.boost = 0
        if self._reserved.is_check_due(self.tokens, now):
            able = [*self.queue, *self.running]
            self._reserved.give_quantum(able, self.running, order, self.tokens, now)
        plan = plan_slots(self.queue, self.slots, order, self.settings, now)
        for parked in plan.park:
            self._park(cast(SimulatedTask, parked))
        for started in plan.start:
            self._start(cast(SimulatedTask, started), now)

    def _park(self, task: SimulatedTask) -> None:
        self.slots[task.slot].task = None
        self.running.remove(task)
        task.slot, task.state, task.clock_waiting = -1, TaskState.PARKED, self.tokens
        task.parks += 1
        if task.quantum >= self.settings.quantum_tokens:
            task.queue_number, self._arrivals = self._arrivals, self._arrivals + 1
        self.queue.append(task)

    def _start(self, task: SimulatedTask, now: float) -> None:
        self.queue.remove(task)
        task.age += self.tokens - task.clock_waiting
        task.quantum, task.slot_since, task.first_logits_at = 0, now, None
        task.state = TaskState.RUNNING
        slot = next(s for s in self.slots if s.task is None)
        slot.task, task.slot = task, slot.index
        self.running.append(task)
        if task.started_at is None:
            task.started_at = task.turn.started_at = now
            task.computed = self._states.covered_tokens(task.turn.session, task.prompt_size)
            task.turn.cached_tokens = task.computed

    def _begin_run(self, now: float) -> None:
        if not self.running:
            self.due_at = math.inf
            return
        self.plans += 1
        order = Order(self.tokens, self._owners, self.settings)
        ordered: list[Task] = sorted(self.running, key=_slot_of)
        batch = plan_tokens(ordered, order, self.settings, BATCH_SIZE, self._cost)
        tasks = tuple(cast(SimulatedTask, part.task) for part in batch)
        counts = tuple(part.count for part in batch)
        decodes = not any(task.prefilling for task in tasks)
        steps = self._steps(tasks) if decodes else 1
        slowness = self._slowness()
        first = self._step_s(tasks, counts, 0) * slowness + self._between_s
        growth = 0.0
        if steps > 1:
            last = self._step_s(tasks, counts, steps - 1) * slowness + self._between_s
            growth = (last - first) / (steps - 1)
        self._run = run = Run(now, steps, first, growth, tasks, counts)
        self.due_at = now + run.seconds(steps)

    def _steps(self, tasks: tuple[SimulatedTask, ...]) -> int:
        """Return the steps until a task ends, or until a waiting one may get its slot."""
        steps = min(self._steps_max, min(task.steps_left for task in tasks))
        reserved = [task.reserved_tokens for task in tasks if task.reserved_tokens]
        steps = min(steps, min(reserved, default=steps))
        if self.queue:
            steps = min(steps, QUEUED_STEPS_MAX)
            quantum = self.settings.quantum_tokens
            left = [quantum - task.quantum for task in tasks if task.quantum < quantum]
            steps = min(steps, min(left, default=steps))
        return steps

    def _step_s(
        self, tasks: tuple[SimulatedTask, ...], counts: tuple[int, ...], ahead: int
    ) -> float:
        chunks = [(t.computed + ahead, n) for t, n in zip(tasks, counts, strict=True)]
        return self._cost.predict(StepLoad.of_chunks(chunks))


def _slot_of(task: Any) -> int:
    slot: int = task.slot
    return slot
