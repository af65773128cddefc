"""Loads whose workers wait for a decision about memory, and their order."""

from __future__ import annotations

from ...backends import Shape
from ...scheduler import messages as m
from ..workers.worker import Worker
from .fit import smallest_shape
from .resident_model import ResidentModel


class PendingLoad:
    """A load whose worker waits for an answer."""

    def __init__(self, model: ResidentModel, worker: Worker, report: m.MemoryEstimate):
        self.model, self.worker = model, worker
        self.shape_asked = report.shape
        self.floor: Shape = smallest_shape(model, report.shape)
        self.report = report
        """The estimate for the shape that is being considered."""
        self.outdated = False
        """A worker has exited since the report: its devices may have more free memory."""


class PendingLoads:
    """The loads that are undecided; some of them wait for other models' memory. Loads come in the
    order of their models' requests.
    """

    def __init__(self) -> None:
        self._by_worker: dict[Worker, PendingLoad] = {}
        self._waiting: dict[Worker, PendingLoad] = {}

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
        self._by_worker.pop(worker, None)
        self._waiting.pop(worker, None)

    def mark_outdated(self) -> None:
        """Note that a worker has exited: reports on devices no longer hold."""
        for load in self._by_worker.values():
            load.outdated = bool(load.report.devices)

    def wait(self, load: PendingLoad) -> bool:
        """Let a load wait for memory; return whether it did not wait before."""
        if load.worker in self._waiting:
            return False
        self._waiting[load.worker] = load
        return True

    def stop_waiting(self, worker: Worker) -> None:
        """Note that a load waits for another report instead."""
        self._waiting.pop(worker, None)

    def is_waiting(self, load: PendingLoad) -> bool:
        """Return whether a load waits for memory."""
        return load.worker in self._waiting

    @property
    def has_waiting(self) -> bool:
        """Whether any load waits for memory."""
        return bool(self._waiting)

    def in_order(self, now: float) -> list[PendingLoad]:
        """Return the loads that wait, first served first."""
        return sorted(self._waiting.values(), key=lambda load: load.model.residency.rank(now))

    def ahead_of(self, load: PendingLoad, now: float) -> list[PendingLoad]:
        """Return the loads that wait and precede *load*."""
        waiting = self.in_order(now)
        if load in waiting:
            return waiting[: waiting.index(load)]
        rank = load.model.residency.rank(now)
        return [other for other in waiting if other.model.residency.rank(now) <= rank]
