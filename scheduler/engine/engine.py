"""The engine: one owner of queue, slots and KV state, driven by one thread, iteration by iteration.

An iteration handles commands, samples requested tokens, plans, parks and restores tasks. Then it
computes one step, samples from its logits, and does the work that no client waits for. While the
engine has no work, it measures the model's settings in short slices. It knows only the clock that
it is given; `scheduler.worker` drives it in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from ...backends import InferdError, LanguageModel
from ...backends.errors import UnsupportedOperation
from ...backends.library import LLAMA_COMMIT
from ...backends.tuning_choice import ModelTuning, ProbeRunner, Sample, Setting, TuningRecord
from .. import messages as m
from ..kv.disk import KvFiles
from ..kv.manager import KvManager
from ..policy.cost import StepCost
from ..policy.tuning import Measurement, Outcome
from ..record import ActivityKind
from ..settings import EngineSettings
from .commands import CommandHandler
from .metrics_publisher import MetricsPublisher
from .steps import Steps
from .task_table import EngineClock, TaskTable

SLICE_S = 0.05
"""The time after which a slice begins no further piece."""
WorkWatch = Callable[[Callable[[], None]], AbstractContextManager[Callable[[], bool]]]
"""A context in which another thread calls the function as soon as the engine gets work. It yields a
function that returns whether this has happened.
"""


class IdleMeasuring:
    """Owned by the engine's thread. *counts* are the model's steps by probe, which grow; numbers of
    threads are compared on *cores*.
    """

    def __init__(
        self,
        model: LanguageModel,
        counts: Mapping[str, float],
        cores: int = 1,
        seconds: Callable[[], float] = time.perf_counter,
    ):
        self.is_on = False
        """Whether slices are to run while the engine has no work."""
        self.slices = 0
        self._model, self._counts, self._cores, self._clock = model, counts, cores, seconds
        self._has_ended = False
        self._runner: ProbeRunner | None = None
        self._measurement: Measurement | None = None

    def switch(self, *, on: bool) -> None:
        """Begin or continue the measurement, or stop it; samples are kept."""
        self.is_on = on and not self._has_ended

    def free_memory(self) -> None:
        """Free the contexts of the probes if the measurement is stopped. A task is usually the
        reason for that, so call this after its first step.
        """
        if not self.is_on:
            self.close()

    def run_slice(self, watch: WorkWatch) -> list[m.Report]:
        """Run probes for about `SLICE_S`, or until *watch* notices work; return the reports."""
        tuning = self._model.tuning
        assert tuning is not None, "the daemon measures only models with another setting"
        self.slices += 1
        try:
            runner, measurement = self._prepare(tuning)
            with watch(runner.abort) as has_work:
                self._run_pieces(runner, measurement, has_work)
        except InferdError as exc:
            return self._end(m.Measured(self.slices, 0.0, cause=exc.message))
        if measurement.outcome is None:
            return []
        record = record_of(tuning, measurement.outcome)
        return self._end(m.Measured(self.slices, round(measurement.spent_s, 3), record))

    def _prepare(self, tuning: ModelTuning) -> tuple[ProbeRunner, Measurement]:
        if self._runner is None:
            self._runner = self._model.probe_runner()
            if not self._runner.probes:
                raise UnsupportedOperation("no probe can run beside this model")
        if self._measurement is None:
            default = Setting(tuning.chosen.setting.flash_attn)
            cores = 1 if tuning.keeps_threads else self._cores
            self._measurement = Measurement(default, self._runner.probes, cores)
        return self._runner, self._measurement

    def _run_pieces(
        self, runner: ProbeRunner, measurement: Measurement, has_work: Callable[[], bool]
    ) -> None:
        begin = now = self._clock()
        while now < begin + SLICE_S and measurement.outcome is None and not has_work():
            probe, setting = measurement.next_run()
            seconds = runner.advance(probe, setting)
            before, now = now, self._clock()
            measurement.add_time(now - before)
            if seconds is not None:
                measurement.add_sample(Sample(setting, probe.name, seconds), self._counts)

    def _end(self, report: m.Measured) -> list[m.Report]:
        self._has_ended = True
        self.switch(on=False)
        self.free_memory()
        return [report]

    def close(self) -> None:
        """Free the contexts of the probes; call this before the model is closed."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()


def record_of(tuning: ModelTuning, outcome: Outcome) -> TuningRecord:
    """Return the record of a measurement; the daemon adds the time."""
    return TuningRecord(
        shape=tuning.shape,
        cpu=tuning.cpu,
        build=LLAMA_COMMIT,
        chosen=outcome.chosen,
        reason=outcome.reason,
        ratios=outcome.ratios,
    )


IDLE_SAVE_S = 0.25
"""Idle KV is saved after this time without a step or a command, so that no follow-up turn waits."""


class Engine:
    """Runs tasks on one model. It shares nothing: commands come in, reports go out."""

    def __init__(
        self,
        model: LanguageModel,
        settings: EngineSettings | None = None,
        seconds: Callable[[], float] = time.monotonic,
        files: KvFiles | None = None,
        record: int = -1,
        cores: int = 1,
    ):
        settings = settings or EngineSettings()
        cost = StepCost(model.info.rows_block)
        self.clock = EngineClock(seconds)
        self.kv = KvManager(model, settings, cost.recompute_s, files)
        self.slots, self.store = self.kv.slots, self.kv.store
        self.tasks = TaskTable(model, settings, self.clock, self.kv)
        self.metrics = MetricsPublisher(self.tasks, record)
        self.reporter = self.tasks.reporter
        self._cost = cost
        self._steps = Steps(model, self.tasks, cost, self.metrics)
        self.speculation = self._steps.speculation
        self.assignment, self._answers = self._steps.assignment, self._steps.answers
        self._commands = CommandHandler(model, self.tasks, self._steps, self.metrics)
        self.tokenizing = self._commands.tokenizing
        self.measuring = IdleMeasuring(model, self._steps.mix.counts, cores)
        self.quit = False
        self._media_planned_at = self._media_state
        self._tasks_expected_at: float | None = None
        """The time at which an iteration first expected the task of a tokenized prompt, since the
        last step.
        """

    def begin_iteration(self, commands: Iterable[m.Command]) -> list[m.Report]:
        """Do everything that precedes the step; return the reports, which need not wait for it."""
        clock, reporter, tasks = self.clock, self.reporter, self.tasks
        clock.now = clock.read()
        self.metrics.recorder.record_activity(ActivityKind.OTHER)
        for command in commands:
            clock.busy_at = clock.now
            if isinstance(command, m.Quit):
                self.quit = True
            elif isinstance(command, m.SetMeasuring):
                self.measuring.switch(on=command.on)
            elif isinstance(command, m.Stats):
                reporter.send(m.CommandResult(command.id, self.statistics()))
            else:
                self._commands.handle_command(command)
        reporter.send(*self.tokenizing.answer_requests())
        if self.tokenizing.tasks_expected and self._tasks_expected_at is None:
            self._tasks_expected_at = clock.now
        reporter.send(*self.kv.poll(tasks.queue, clock.now))
        tasks.expire_tasks()
        tasks.plan_media()
        self._media_planned_at = self._media_state
        self._answers.sample_tokens([t for t in self.slots.tasks if t.has_logits])
        self._answers.add_forced_tokens([t for t in self.slots.tasks if not t.has_logits])
        tasks.update_guarantees(self._steps.skipping)
        self.assignment.assign_slots()
        if tasks.embeddings.waiting:
            started = tasks.embeddings.assign_slots(tasks.order(), clock.tokens, clock.now)
            reporter.send(*started)
        tasks.report_positions()
        return reporter.take_reports()

    def compute_step(self) -> list[m.Report]:
        """Compute one step if there is work, and sample from its logits."""
        if not self._waits_for_batch(self.clock.now):
            self.tokenizing.tasks_expected, self._tasks_expected_at = 0, None
            self.tokenizing.expects_urgent = False
            self._steps.compute_step()
        return self.reporter.take_reports()

    def end_iteration(self) -> None:
        """Do the work that no client waits for, while the reports are being sent."""
        self._steps.learn_step()
        self.speculation.forget_ended()
        self.tasks.free_media()
        busy = self.tokenizing or self._waits_for_batch(self.clock.now)
        if self.clock.now >= self.clock.busy_at + IDLE_SAVE_S and not (busy or self._can_compute()):
            self.kv.idle.save_ahead()
        self.kv.spill()
        self.measuring.free_memory()
        self.metrics.recorder.record_activity(ActivityKind.IDLE)

    @property
    def may_measure(self) -> bool:
        """Whether a slice of the measurement may run now: no task waits, runs or is parked, and
        nothing is due before the slice ends.
        """
        if not self.measuring.is_on or self.tokenizing or any(True for _ in self.tasks):
            return False
        wait_s = self.wait_s_max()
        return wait_s is None or wait_s >= SLICE_S

    def measure(self, watch: WorkWatch) -> list[m.Report]:
        """Run a slice of the measurement, which `may_measure` allows; see `IdleMeasuring`."""
        self.metrics.counts["tuning_slices"] += 1
        return self.measuring.run_slice(watch)

    def wait_s_max(self) -> float | None:
        """Return how many seconds the next iteration may wait for commands; None: no limit."""
        settings = self.tasks.settings
        if self._waits_for_batch(now := self.clock.read()):
            return min(settings.pull_batch_wait_s, settings.task_batch_wait_s)
        if self.tokenizing or self._can_compute() or self._may_request_media():
            return 0
        ends = self.tasks.deadlines()
        if self.kv.idle.unsaved is not None:
            ends.append(self.clock.busy_at + IDLE_SAVE_S)
        return max(0.0, min(ends) - now) if ends else None

    def _can_compute(self) -> bool:
        """Return whether an iteration without commands would compute something."""
        if (
            self.tasks.embeddings.waiting
            or self.tasks.embeddings.running
            or any(t.has_work or (t.has_logits and t.wants_token) for t in self.slots.tasks)
        ):
            return True
        if not self.tasks.queue or not self.slots.idle:
            return False
        return any(t.has_work or t.wants_token for t in self.assignment.eligible_tasks())

    @property
    def _media_state(self) -> tuple[int, int]:
        """Numbers that change with the slots of tasks and what these have computed."""
        return self.metrics.steps, self.kv.search.changes

    def _may_request_media(self) -> bool:
        """Return whether a task waits for embeddings, and others may be requested than were."""
        changed = self._media_planned_at != self._media_state
        return changed and any(task.awaits_media for task in self.tasks)

    def _waits_for_batch(self, now: float) -> bool:
        """Return whether a step waits, to fill its batch, for expected tasks or pull readers."""
        at, settings, texts = self._tasks_expected_at, self.tasks.settings, self.tokenizing
        wait_s = settings.task_batch_wait_s
        if texts.expects_urgent:
            wait_s = settings.urgent_batch_wait_s
        if texts.tasks_expected and at is not None and now < at + wait_s:
            return True
        since = now - settings.pull_batch_wait_s
        tasks = self.slots.tasks
        late = any(t.has_logits and not t.wants_token and t.last_logits_at > since for t in tasks)
        return late and any(t.has_work for t in tasks)

    def statistics(self) -> dict[str, Any]:
        """Return the counters since the start, the present gauges and the learned step cost."""
        cost = self._cost.coefficients()
        return {
            **self.metrics.counts,
            **self.tasks.count_states(),
            "steps": self.metrics.steps,
            "slots": len(self.slots),
            **self.kv.statistics(),
            "step_cost": cost and cost._asdict(),
            **self.speculation.statistics(),
        }
