"""The assignment of slots to tasks, and steps: batches of tokens that the model computes, with
the cost that is learned from them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

from ...backends import InferdError, LanguageModel
from ...backends.errors import BackendError, KvFull
from ...backends.media import cut_point
from ..kv.store import message_borders, spaced, thinned
from ..kv.task_states import SAVE_TOKENS_MIN
from ..policy.batch_plan import (
    AdapterQuantum,
    ScheduledTokens,
    embeds_next,
    held_back,
    item_step_s,
    load_of,
    next_trial,
    plan_adapters,
    plan_tokens,
    plan_trial,
    step_s_max,
)
from ..policy.cost import StepCost
from ..policy.order import Order
from ..policy.slot_plan import awaits_reader, plan_slots, reader_lags
from ..policy.tuning import StepMix
from ..record import ActivityKind, StepKind
from ..task import Task, TaskState
from .answers import Answers
from .metrics_publisher import MetricsPublisher
from .speculation import Speculation
from .task_table import TaskTable


class _ComputedStep(NamedTuple):
    """A step of generations. *candidates* are the tasks with slots and the texts that it could
    have served.
    """

    batch: Sequence[ScheduledTokens]
    kind: StepKind
    seconds: float
    candidates: Sequence[Task]


def _kind_of(batch: Sequence[ScheduledTokens]) -> StepKind:
    """Return the kind of a step that is about to compute *batch*."""
    prompts = sum(part.task.prefilling for part in batch)
    if not prompts:
        return StepKind.DECODE
    return StepKind.PREFILL if prompts == len(batch) else StepKind.MIXED


class Steps:
    """Decides what the model computes next and runs it. Owned by the engine."""

    def __init__(
        self, model: LanguageModel, tasks: TaskTable, cost: StepCost, metrics: MetricsPublisher
    ):
        self.answers = Answers(model, tasks, metrics, cost)
        self.assignment = SlotAssignment(model, tasks, metrics, self.answers)
        self.speculation = Speculation(model, tasks, cost, metrics)
        self._model, self._tasks, self._cost, self._metrics = model, tasks, cost, metrics
        self._clock, self._slots, self._embeddings = tasks.clock, tasks.slots, tasks.embeddings
        self._recorder = metrics.recorder
        self._quantum = AdapterQuantum()
        self.skipping: frozenset[Task] = frozenset()
        """The tasks that skip the present step, because sampling for them is slow."""
        self._seconds_max = math.inf
        """Bound on the time of prompts and texts in the present step (`step_s_max`)."""
        self._excluded = 0
        """The number of tasks with work that the present step's adapters exclude."""
        self._embedded = False
        """The last step was one of embeddings."""
        self._tried = False
        """The last step of generations computed a task alone (`next_trial`)."""
        self.mix = StepMix()
        self._unlearned: _ComputedStep | None = None
        """The last step of generations, while its cost is not learned."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """The adapters that are set on the model."""
        return self._quantum.adapters

    def use_adapters(self, adapters: tuple[str, ...]) -> None:
        """Compute with these adapters from the next step on."""
        self._model.set_adapters(adapters)
        self._quantum = self._quantum.pass_to(adapters)

    def check_adapters(self, keys: tuple[str, ...]) -> None:
        """Raise `InferdError` if the model lacks one of these adapters."""
        if keys:
            self._model.set_adapters(keys)
            self._model.set_adapters(self.adapters)

    def use_threads(self, threads: int) -> None:
        """Compute with this many threads from the next step on."""
        self._model.set_threads(threads)
        self._cost.use_threads(threads)
        self.speculation.by_model.use_threads(threads)

    def compute_step(self) -> None:
        """Compute one batch, of generations or of embeddings, if there is work."""
        order, settings = self._tasks.order(), self._tasks.settings
        now, texts = self._clock.now, self._embeddings.running
        generating = [t for t in self._slots.tasks if t.has_work]
        untried = [t for t in generating if not t.trial_tokens]
        self.skipping = self.answers.slow.skipping(untried, order, now)
        if self.skipping:
            generating = [t for t in generating if t not in self.skipping]
        held = held_back([*generating, *texts], order, now, settings.step_s_target, self._cost)
        if held:
            generating = [t for t in generating if t not in held]
            texts = [t for t in texts if t not in held]
        absent = [t for t in self._slots.tasks if awaits_reader(t, settings, now)]
        self._seconds_max = step_s_max([t for t in absent if not t.has_work], order)
        embedded_last = self._embedded
        self._embedded = embeds_next(generating, texts, order, embedded=embedded_last)
        if self._embedded:
            self._embed(order, texts, generating, generating if embedded_last else [])
        else:
            self._generate(order, generating, [] if embedded_last else texts)

    def _embed(
        self,
        order: Order,
        texts: Sequence[Task],
        generating: Sequence[Task],
        passed_over: Sequence[Task],
    ) -> None:
        """Compute a step of embeddings."""
        decoding = [t for t in generating if not t.prefilling]
        batch = self._embeddings.plan_step(texts, order, decoding, self._cost, self._seconds_max)
        cost, load = self._embeddings.cost, load_of(batch)
        self._recorder.record_activity(ActivityKind.STEP, [p.task.spec.id for p in batch])
        started = self._clock.step_began = self._clock.read()
        try:
            done = self._embeddings.compute_step(batch)
        except InferdError as exc:
            self._fail_step(batch, exc)
            return
        seconds = self._end_step(started)
        self._tasks.count_step(batch, seconds, cost)
        cost.learn_step(load, seconds)
        for part in batch:
            self._clock.tokens += part.count
            self._metrics.counts["embedded"] += part.count
            self._tasks.owners.count_work(part.task.spec.owner, part.count)
            part.task.count_tokens(part.count, self._clock.now)
        self._age_others(batch, [*texts, *passed_over])
        for task, embedded in done:
            self._tasks.finish_embedding(task, embedded)

    def _generate(
        self, order: Order, generating: Sequence[Task], passed_over: Sequence[Task]
    ) -> None:
        """Decode a batch of tokens of *generating* tasks, and sample tokens from its logits."""
        batch = self._plan_tokens(order, generating)
        if not batch:
            return
        self._slots.hold_logits({p.task.slot for p in batch})
        chunks, kind = [p.chunk() for p in batch], _kind_of(batch)
        self._recorder.record_activity(ActivityKind.STEP, [p.task.spec.id for p in batch])
        started = self._clock.step_began = self._clock.read()
        try:
            self.speculation.keep_states(batch)
            started = self._clock.read()  # the time of a step is learned without that
            self._model.step(chunks)
            self.answers.report_prompts(batch)
        except KvFull as exc:
            if self.speculation.retract(batch):
                return
            self.assignment.make_kv_space(batch, exc)
            return
        except BackendError as exc:
            for part in batch:
                self._slots.clear_task(part.task)
            self._fail_step(batch, exc)
            return
        seconds = self._end_step(started)
        self._tasks.count_step(batch, seconds, self._cost)
        self._unlearned = _ComputedStep(batch, kind, seconds, [*generating, *passed_over])
        for task in self.skipping:
            task.quantum += 1
        self._count_tokens(batch)
        self.speculation.count_drafts(batch)
        now, with_logits = self._clock.now, [p.task for p in batch if p.task.has_logits]
        for task in with_logits:
            task.last_logits_at = now
            if task.first_logits_at is None:
                task.first_logits_at = now
        self.answers.sample_tokens(with_logits)
        self.speculation.count_gain(batch, seconds)

    def _end_step(self, started: float) -> float:
        """Record the end of the step that began at *started*; return how long it took."""
        self._recorder.record_activity(ActivityKind.OTHER)
        self._metrics.steps += 1
        self._clock.now = self._clock.busy_at = self._clock.read()
        return self._clock.now - started

    def learn_step(self) -> None:
        """Learn the cost of the last step, and age the tasks that had no token in it."""
        if self._unlearned is None:
            return
        step, self._unlearned = self._unlearned, None
        load = load_of(step.batch)
        self._cost.learn_step(load, step.seconds)
        self.mix.add_step(load)
        self._quantum = self._quantum.with_tokens(load.tokens)
        self._metrics.page.count_step(step.kind, load.tokens, len(step.batch), step.seconds)
        self._age_others(step.batch, step.candidates)

    def _plan_tokens(self, order: Order, generating: Sequence[Task]) -> Sequence[ScheduledTokens]:
        settings = self._tasks.settings
        full = [t for t in generating if len(t.tokens) >= t.ctx_size and t.pending == 1]
        for task in full:
            self.answers.shift_context(task)
        if full:  # a shift may end a task
            generating = [t for t in generating if t.slot >= 0 and t.has_work]
        trial = next_trial(generating, order, tried=self._tried)
        self._tried = trial is not None
        tasks = [t for t in generating if not t.computes_alone] if trial is None else [trial]
        adapters = plan_adapters(tasks, order, settings, self._quantum)
        self._excluded = sum(t.spec.adapters != adapters for t in tasks)
        if adapters != self.adapters:
            self.use_adapters(adapters)
        size, logits_max = self._model.info.batch_size, self._model.info.logits_max
        if trial is not None:
            seconds = None
            if trial.media and not trial.trial_tokens:
                others = [t for t in generating if t is not trial]
                seconds = item_step_s(trial, others, order, settings, self._cost)
                seconds = min(seconds, self._seconds_max)
            return plan_trial(trial, settings, size, self._cost, logits_max, seconds)
        batch = plan_tokens(
            tasks, order, settings, size, self._cost, adapters, logits_max, self._seconds_max
        )
        return self.speculation.add_drafts(batch, order)

    def _count_tokens(self, batch: Sequence[ScheduledTokens]) -> None:
        """Count the tokens of a step that was computed, and report the progress of prompts."""
        counts, now, count_work = (
            self._metrics.counts,
            self._clock.now,
            self._tasks.owners.count_work,
        )
        tokens = sum(part.size for part in batch)
        self._clock.tokens += tokens
        counts["batch_tokens"] += tokens
        for part in batch:
            task, work = part.task, part.size
            work += self._cost.seconds_as_tokens(self.speculation.by_model.take_seconds(task))
            prompt_left = task.prompt_size - task.computed - task.dropped
            if prompt_left > 0:
                counts["prompt"] += min(part.count, prompt_left)
            task.computed += part.count
            task.count_tokens(part.size, now, self._excluded)
            if part.logits > 1:
                work += self._cost.logits_as_tokens(part.logits_read)
            task.quantum += work
            task.shift_pending = False
            task.has_logits = task.pending == 0
            count_work(task.spec.owner, work)
            if task.computed in task.checkpoints:
                task.checkpoints.discard(task.computed)
                with self.assignment.timed_for(task):
                    self._tasks.kv.task_states.save_checkpoint(task)
            if task.spec.watch_prompt:
                self._tasks.reporter.report_prompt(task, now)

    def _age_others(self, batch: Sequence[ScheduledTokens], candidates: Sequence[Task]) -> None:
        """Age those of the *candidates* that had no token in this step, like tasks without a slot.
        The tasks of the *batch* are among them.
        """
        if len(candidates) == len(batch):
            return
        served = {id(p.task) for p in batch}
        computed = sum(p.size for p in batch)
        for task in candidates:
            if task.has_work and id(task) not in served:
                task.age += computed

    def _fail_step(self, batch: Sequence[ScheduledTokens], error: InferdError) -> None:
        self._tasks.reporter.log_step_failed([part.task for part in batch], error)
        for part in batch:
            self._tasks.fail_task(part.task, error)


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
