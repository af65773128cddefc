"""The reports of an engine, in their order, with its log events among them."""

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

    def moved(self, task: Task) -> None:
        """Report the state of a task, which is another than before."""
        self._outbox.append(m.Moved(task.spec.id, task.state.value))

    def finished(self, task: Task, ending: Ending, now: float) -> m.TurnStats:
        """Report that a task has ended well; return its statistics."""
        stats = task.stats(ending.reason, ending.detail, now)
        self.log.finished(task, stats)
        self._outbox.append(m.Finished(task.spec.id, task.text.flush(), ending.piece, stats))
        return stats

    def failed(self, spec: m.TaskSpec, error: InferdError) -> None:
        """Report that a task has failed."""
        self.log.failed(spec, error)
        self._outbox.append(m.Failed(spec.id, error.to_wire()))
