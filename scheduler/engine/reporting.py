"""The reports of an engine in their order, with its log events among them."""

from __future__ import annotations

from collections.abc import Iterable

from ...backends import InferdError, Model
from .. import messages as m
from ..output.stopping import Ending
from ..recording.engine_log import EngineLog
from ..task import Task


class Reporter:
    """Collects reports until the engine hands them over. Owned by the engine."""

    def __init__(self, model: Model):
        self._outbox: list[m.Report] = []
        self.log = EngineLog(model, self.send)

    def send(self, report: m.Report) -> None:
        """Add a report."""
        self._outbox.append(report)

    def send_all(self, reports: Iterable[m.Report]) -> None:
        """Add reports."""
        self._outbox.extend(reports)

    def take_reports(self) -> list[m.Report]:
        """Return the reports since the last call."""
        reports, self._outbox = self._outbox, []
        return reports

    def report_state(self, task: Task) -> None:
        """Report that a task has changed its state."""
        self._outbox.append(m.StateChanged(task.spec.id, task.state.value))

    def report_finished(self, task: Task, ending: Ending, now: float) -> m.TurnStats:
        """Report that a task has ended without error; return its statistics."""
        stats = task.stats(ending.reason, ending.detail, now)
        self.log.log_finished(task, stats)
        self._outbox.append(m.Finished(task.spec.id, task.text.flush(), ending.piece, stats))
        return stats

    def report_failed(self, spec: m.TaskSpec, error: InferdError) -> None:
        """Report that a task has failed."""
        self.log.log_failed(spec, error)
        self._outbox.append(m.Failed(spec.id, error.to_wire()))
