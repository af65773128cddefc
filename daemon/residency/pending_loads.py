"""Pending loads, whose workers wait for a decision about memory, and their order."""

from __future__ import annotations

from ...scheduler import messages as m
from ..workers.worker import Worker
from .fit import smallest_shape
from .residency import ResidentModel


class PendingLoad:
    """A load whose worker waits for an answer."""

    def __init__(self, model: ResidentModel, worker: Worker, report: m.MemoryEstimate):
        self.model, self.worker = model, worker
        self.first_shape = report.shape
        self.floor = smallest_shape(model, report.shape)
        self.report = report
        """The estimate for the shape that is being considered."""
        self.is_waiting = False
        """Whether the load waits for other models' memory."""
        self.outdated = False
        """Whether a worker has exited since the report: its devices may have more free memory."""


class PendingLoads:
    """The undecided loads, in the order of their models' requests."""

    def __init__(self) -> None:
        self._by_worker: dict[Worker, PendingLoad] = {}

    def note_report(
        self, model: ResidentModel, worker: Worker, report: m.MemoryEstimate
    ) -> PendingLoad:
        """Return the load of *worker*, to which *report* applies from now on."""
        load = self._by_worker.get(worker)
        if load is None:
            load = self._by_worker[worker] = PendingLoad(model, worker, report)
        load.report = report
        return load

    def remove(self, worker: Worker) -> None:
        """Remove a load that is decided or whose worker has exited."""
        load = self._by_worker.pop(worker, None)
        if load is not None:
            load.is_waiting = False

    def mark_outdated(self) -> None:
        """Note that a worker has exited: estimates on devices no longer hold."""
        for load in self._by_worker.values():
            load.outdated = bool(load.report.devices)

    @property
    def has_waiting(self) -> bool:
        """Whether any load waits for memory."""
        return any(load.is_waiting for load in self._by_worker.values())

    def in_order(self, now: float) -> list[PendingLoad]:
        """Return the waiting loads, first served first."""
        waiting = (load for load in self._by_worker.values() if load.is_waiting)
        return sorted(waiting, key=lambda load: load.model.residency.rank(now))

    def ahead_of(self, load: PendingLoad, now: float) -> list[PendingLoad]:
        """Return the waiting loads that precede *load*."""
        waiting = self.in_order(now)
        if load in waiting:
            return waiting[: waiting.index(load)]
        rank = load.model.residency.rank(now)
        return [other for other in waiting if other.model.residency.rank(now) <= rank]
