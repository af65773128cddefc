"""The assignment of slots to waiting tasks, and the parking of running tasks for them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from ...backends import LanguageModel
from ...backends.errors import KvFull
from ...backends.media import cut_point
from ..kv.store import message_borders, spaced, thinned
from ..kv.task_states import SAVE_TOKENS_MIN
from ..policy.batch_plan import ScheduledTokens
from ..policy.slot_plan import plan_slots, reader_lags
from ..task import Task, TaskState
from .answers import Answers
from .metrics_publisher import MetricsPublisher
from .task_table import TaskTable

END_TOKENS = 4
"""The tokens between the last checkpoint of a prompt and its end. llama.cpp computes a step of one
token with other operations than one of several; so the logits are those of an uncut prompt.
"""


class SlotAssignment:
    """Starts and parks tasks as `plan_slots` decides. Owned by the engine."""

    def __init__(
        self, model: LanguageModel, tasks: TaskTable, metrics: MetricsPublisher, answers: Answers
    ):
        self._model, self._tasks, self._answers = model, tasks, answers
        self._clock, self._reporter, self._slots = tasks.clock, tasks.reporter, tasks.slots
        self._kv = tasks.kv
        self._counts = metrics.counts
        self._is_control = cache(model.is_control)

    def eligible_tasks(self) -> list[Task]:
        """Return the tasks that may get a slot. Those parked by hand are among them only if the
        others leave idle slots.
        """
        able = self._ready_tasks()
        yielding = [t for t in able if t.yields(self._clock.tokens)]
        if not yielding:
            return able
        free = max(0, len(self._slots.idle) - len(self._pressing(able)))
        excluded = sorted(yielding, key=self._tasks.order().key)[free:]
        return [t for t in able if t not in excluded]

    def _pressing(self, able: list[Task]) -> list[Task]:
        """Return the tasks that need a slot and were not parked by hand."""
        clock = self._clock.tokens
        return [t for t in able if not t.yields(clock) and (t.has_work or t.wants_token)]

    def _ready_tasks(self) -> list[Task]:
        """Return the queued tasks that wait for no file, sampler, image, KV space or reader."""
        full, settings, now = bool(self._slots.tasks), self._tasks.settings, self._clock.now
        return [
            t
            for t in self._tasks.queue
            if not (t.fetching or t.preparing or t.awaits_media)
            and not (t.preempted_by_kv_pressure and full)
            and not reader_lags(t, settings, now)
        ]

    def assign_slots(self) -> None:
        """Park and start tasks, and mark those that wait for a prefix that others compute."""
        tasks = self._tasks
        for task in tasks:
            task.boost = 0
        waiting = self.eligible_tasks() if tasks.queue else []
        self._reserve_quantum(waiting)
        if tasks.queue:
            order, find = tasks.order(), tasks.leaders.find_leader
            plan = plan_slots(
                waiting, self._slots.slots, order, tasks.settings, self._clock.now, find
            )
            for task in tasks.queue:
                task.follows = False
            for task, _ in plan.follow:
                task.follows = True
            not_parked = 0
            # The last tasks start in the slots of parked ones, in this order.
            for task, following in zip(plan.park, plan.start[-len(plan.park) :], strict=False):
                with self.timed_for(following):
                    not_parked += not self._park_task(task)
            for task in plan.start[: len(plan.start) - not_parked]:
                with self.timed_for(task):
                    self._start_task(task)
        self._slots.close_gaps()

    @contextmanager
    def timed_for(self, task: Task) -> Iterator[None]:
        """Count the time of a copy of KV state, which can take as long as many steps, for the owner
        of *task*.
        """
        started = self._clock.read()
        yield
        self._tasks.count_time(task.spec.owner, self._clock.read() - started)

    def _reserve_quantum(self, waiting: Sequence[Task]) -> None:
        """Give the quantum that is due, if any, to a task or text of a lower class."""
        texts, clock, reserved = self._tasks.embeddings, self._clock, self._tasks.reserved
        if reserved.is_check_due(clock.tokens, clock.now):
            busy = [*(t for t in self._slots.tasks if t.has_work), *texts.running]
            # A follower computes nothing; a quantum for it would only raise its leader.
            leading = [t for t in waiting if not t.follows and (t.has_work or t.wants_token)]
            able = [*leading, *busy, *texts.waiting]
            order = self._tasks.order()
            reserved.give_quantum(able, busy, order, clock.tokens, clock.now)

    def _start_task(self, task: Task) -> None:
        now = self._clock.now
        self._tasks.queue.remove(task)
        task.age += self._clock.tokens - task.clock_waiting
        task.quantum = 0
        task.slot_since, task.first_logits_at = now, None
        task.preempted_by_kv_pressure = False
        task.yields_until = 0
        task.state = TaskState.RUNNING
        self._plan_checkpoints(task)
        self._kv.task_states.assign_slot(task)
        task.covered = 0  # now `computed` says what the slot has
        if task.started_at is None:
            task.started_at, task.cached = now, task.computed
            self._counts["prefix_queries"] += len(task.tokens)
            self._counts["cached"] += task.cached
        if task.sampler is None:
            task.sampler = self._answers.make_sampler(task, task.spec.sampling)
        self._reporter.report_started(task)
        self._reporter.report_prompt(task, now)

    def _plan_checkpoints(self, task: Task) -> None:
        """Plan where a prompt's state is saved, unless the model can cut it anywhere: where it
        diverges from another prompt, shortly before its end, and at regular distances; on
        recurrent models and hybrids also at the borders of messages.
        """
        info = self._model.info
        kind = info.kv_kind
        if kind == "plain" or task.parks:
            return
        if info.decoder_start_token is not None:  # no part of an encoder's prompt has a state
            return
        settings = self._tasks.settings
        size, every = task.prompt_size, settings.checkpoint_tokens
        shared = self._kv.search.shared_prefix(task.origin, array("i", task.tokens))
        if settings.shared_prefix_tokens_min <= shared < size:
            task.checkpoints.add(shared)
        points, last = [*range(every, size, every)], max(0, size - END_TOKENS)
        if kind != "window":
            borders = message_borders(task.tokens[:size], self._is_control)
            points = spaced(sorted({*borders, *points}), SAVE_TOKENS_MIN)
            points = thinned(points, self._kv.store.checkpoints_max)
        if kind != "hybrid" or not points or last - points[-1] >= SAVE_TOKENS_MIN:
            points.append(last)
        task.checkpoints.update(cut_point(task.tokens, point) for point in points)

    def _park_task(self, task: Task, *, preempted_by_kv_pressure: bool = False) -> bool:
        """Put a running task back into the queue; return False if memory cannot hold its state. A
        *preempted_by_kv_pressure* task is parked in any case, if necessary without its state.
        """
        if not self._kv.task_states.park_task(task, force=preempted_by_kv_pressure):
            return False
        task.state, task.clock_waiting = TaskState.PARKED, self._clock.tokens
        task.parks += 1
        if task.quantum >= self._tasks.settings.quantum_tokens:
            task.queue_number = self._tasks.next_queue_number()
        task.preempted_by_kv_pressure = preempted_by_kv_pressure
        self._counts["parks"] += 1
        self._tasks.queue.append(task)
        self._reporter.report_parked(task)
        return True

    def yield_slot(self, task: Task) -> bool:
        """Park a running task by hand, or put a queued one behind all waiting tasks. Return False
        if no other task waits for a slot, or the task could not be parked.
        """
        pressing = [t for t in self._pressing(self._ready_tasks()) if t is not task]
        if task.slot < 0:
            yields = bool(pressing)
        else:
            yields = len(pressing) > len(self._slots.idle) and self._park_task(task)
        if yields:
            task.yields_until = self._clock.tokens + self._tasks.settings.ageing_tokens
        return yields

    def make_kv_space(self, batch: Sequence[ScheduledTokens], error: KvFull) -> None:
        """Free KV cells for a step that found too few: those of idle slots first, then those of
        the last task in the order of the queue. Refuse a task that is alone and does not fit.
        """
        self._counts["kv_full"] += 1
        for part in batch:  # the backend does not report how far it came; the slot shows it
            part.task.computed = self._model.trim(part.task.slot, part.task.computed)
        if self._kv.idle.save_and_clear_all():
            return
        tasks = self._slots.tasks
        last = max(tasks, key=self._tasks.order().key)
        if len(tasks) > 1:
            self._park_task(last, preempted_by_kv_pressure=True)
        else:
            self._tasks.fail_task(last, error)
