"""The engine: one owner of queue, slots and KV state, driven by one thread, iteration by iteration.

An iteration handles the commands, samples what readers ask for, plans, parks and restores; then it
computes one step and samples of it; then it does what nobody waits for. It knows no clock except
the one that it is given, and no process: `scheduler.process.worker` drives it in one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from ...backends import Model
from .. import messages as m
from ..kv.files import KvFiles
from ..kv.manager import KvManager
from ..limits import Limits
from ..policy.cost import StepCost
from ..recording.engine_counters import EngineCounters
from ..recording.recorder import Doing, Recorder
from .answers import Answers
from .commands import CommandHandler
from .leasing import SlotLeases
from .metrics import EngineMetrics
from .steps import Steps
from .task_table import EngineClock, TaskTable
from .tokenizing import TokenizeQueue

REST_S = 0.25
"""Without a step or a command for so long, idle KV is saved: who goes on at once waits for none."""


class Engine:
    """Runs tasks on one model. Nothing in here is shared: commands come in, reports go out."""

    def __init__(
        self,
        model: Model,
        limits: Limits | None = None,
        seconds: Callable[[], float] = time.monotonic,
        files: KvFiles | None = None,
        recorder: Recorder | None = None,
        counters: EngineCounters | None = None,
    ):
        limits = limits or Limits()
        self.recorder = recorder or Recorder()
        cost = StepCost()
        self.clock = EngineClock(seconds)
        self.kv = KvManager(model, limits, cost.again, files)
        self.slots, self.store = self.kv.slots, self.kv.store
        page = counters or EngineCounters()
        page.target_s = limits.step_target_s
        self.metrics = EngineMetrics(self.kv, self.clock, page)
        self.tasks = TaskTable(model, limits, self.clock, self.kv)
        self.reporter = self.tasks.reporter
        self.leases = SlotLeases(model, self.tasks, self.metrics)
        self._answers = Answers(model, self.tasks, self.metrics)
        self._steps = Steps(
            model, self.tasks, self.leases, self._answers, cost, self.metrics, self.recorder
        )
        self._tokenizing = TokenizeQueue(model, self.recorder)
        self._commands = CommandHandler(
            model, self.tasks, self.leases, self._answers, self._steps, cost, self.kv,
            self._tokenizing, self.recorder,
        )  # fmt: skip
        self.quit = False
        self._coming_at: float | None = None
        """When the first prompt after the last step was told whose task follows."""

    def __repr__(self) -> str:
        slots = f"slots: {len(self.slots.tasks)}/{len(self.slots)}"
        return f"<Engine [{slots} | queue: {len(self.tasks.queue)} | steps: {self.metrics.steps}]>"

    def iterate(self, commands: Iterable[m.Command]) -> list[m.Report]:
        """Do one iteration and return its reports."""
        reports = [*self.begin_iteration(commands), *self.compute_step()]
        self.end_iteration()
        return reports

    def begin_iteration(self, commands: Iterable[m.Command]) -> list[m.Report]:
        """Do all except the step; return the reports, which wait for no step."""
        clock, reporter, tasks = self.clock, self.reporter, self.tasks
        clock.tick()
        self.recorder.note(Doing.OTHER)
        for command in commands:
            clock.busy_at = clock.now
            self._handle(command)
        reporter.send_all(self._tokenizing.work())
        if self._tokenizing.coming and self._coming_at is None:
            self._coming_at = clock.now
        reporter.send_all(self.kv.poll(tasks.queue, clock.now))
        tasks.expire_tasks()
        self._answers.serve_readers()
        self.leases.lease_slots()
        reporter.send_all(tasks.texts.lease_slots(tasks.order(), clock.tokens, clock.now))
        tasks.report_positions()
        return reporter.take_reports()

    def compute_step(self) -> list[m.Report]:
        """Compute once, where there is something to compute, and sample."""
        if not self._lingering(self.clock.now):
            self._tokenizing.coming, self._coming_at = 0, None
            self._steps.compute_step()
        return self.reporter.take_reports()

    def end_iteration(self) -> None:
        """Do what nobody waits for, while the reports are on their way."""
        self._steps.learn()
        if self.clock.now >= self.clock.busy_at + REST_S and self._rests():
            self.kv.idle.save_ahead()
        self.kv.spill()
        self.recorder.note(Doing.REST)

    def _handle(self, command: m.Command) -> None:
        match command:
            case m.Stats(request):
                self.reporter.send(m.Answer(request, self.statistics()))
            case m.Quit():
                self.quit = True
            case _:
                self._commands.handle(command)

    def patience(self) -> float | None:
        """Return how long the next iteration may wait for commands: seconds, or None for ever."""
        limits = self.tasks.limits
        if self._lingering(now := self.clock.read()):
            return min(limits.pull_linger_s, limits.task_linger_s)
        if self._tokenizing.busy or self._runnable():
            return 0
        ends = list(self.tasks.deadlines())
        if self.kv.idle.unsaved is not None:
            ends.append(self.clock.busy_at + REST_S)
        return max(0.0, min(ends) - now) if ends else None

    def _rests(self) -> bool:
        """Return whether there is nothing to do that anybody waits for."""
        return not (self._tokenizing.busy or self._lingering(self.clock.now) or self._runnable())

    def _runnable(self) -> bool:
        """Return whether an iteration without any command would compute something."""
        if self.tasks.texts.has_work or any(
            t.has_work or (t.has_logits and t.wants_token) for t in self.slots.tasks
        ):
            return True
        return bool(self.slots.idle) and any(
            t.has_work or t.wants_token for t in self.leases.admissible()
        )

    def _lingering(self, now: float) -> bool:
        """Return whether the next step waits a moment: for tasks whose prompts were just sent, or
        for pull readers that were just sent a token, so that batches stay whole.
        """
        at, limits = self._coming_at, self.tasks.limits
        if self._tokenizing.coming and at is not None and now < at + limits.task_linger_s:
            return True
        since = now - limits.pull_linger_s
        tasks = self.slots.tasks
        late = any(t.has_logits and not t.wants_token and t.logits_at > since for t in tasks)
        return late and any(t.has_work for t in tasks)

    def close(self) -> list[m.Report]:
        """Put the KV states on disk that may be there, and end; return the last reports."""
        return self.kv.close()

    def statistics(self) -> dict[str, Any]:
        """Return the counters since the start and what is here now."""
        return {
            **self.metrics.counts,
            **self.tasks.count_states(),
            "steps": self.metrics.steps,
            "slots": len(self.slots),
            **self.kv.statistics(),
        }
