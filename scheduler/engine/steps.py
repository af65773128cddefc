"""Steps: batches of tokens that the model computes, and the cost that is learned from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ...backends import InferdError, LanguageModel
from ...backends.errors import BackendError, KvFull
from ..embeddings import embeds_next
from ..policy.batch_plan import (
    ScheduledTokens,
    item_step_s,
    load_of,
    next_trial,
    plan_tokens,
    plan_trial,
    step_s_max,
)
from ..policy.cost import StepCost
from ..policy.order import Order
from ..policy.slot_plan import awaits_reader
from ..policy.batch_plan import AdapterQuantum, held_back, plan_adapters
from ..policy.tuning import StepMix
from ..record import ActivityKind, StepKind
from ..task import Task
from .answers import Answers
from .metrics_publisher import MetricsPublisher
from .slot_assignment import SlotAssignment
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
