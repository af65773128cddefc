"""Workers of models: how they are started, connected, and cleaned up after."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import anyio
import anyio.abc
import structlog

from ...backends.errors import Cancelled, ModelNotFound
from ..residency.budget import MemoryBudget
from ..residency.estimates import EstimateCache
from ..residency.gate import ResidencyGate
from ..residency.model_files import files_in_use, signature_of
from ..workers.cores import Cores
from ..workers.worker import Worker
from .adapter_specs import without_adapters
from .catalog import ModelCatalog
from .failures import FailedLoads
from .kv_index import KvIndex
from .model import ManagedModel
from .specs import conditions_of, limits_of, spec_of
from .worker_events import WorkerEvents

log = structlog.get_logger()


class LoadListener:
    """The receiver of events about loads and workers; a subclass implements those it needs."""

    def loads_changed(self) -> None:
        """Note that a load begins, or has ended."""

    def load_ended(self, model: ManagedModel, seconds: float | None) -> None:
        """Note that a load has ended after *seconds*, or has failed: None."""

    def worker_exited(self, model: ManagedModel, worker: Worker) -> None:
        """Note that a worker has exited."""


class WorkerLauncher:
    """Starts workers and follows them until they exit. Lives on the daemon's event loop.

    Workers run in *group*, and other work by *start_soon*; *on_frame* is called after each frame of
    a worker's reports, *note_change* after a worker has exited.
    """

    def __init__(
        self,
        catalog: ModelCatalog,
        budget: MemoryBudget,
        gate: ResidencyGate[ManagedModel],
        kv_index: KvIndex,
        kv_dir: str,
        group: anyio.abc.TaskGroup,
        start_soon: Callable[..., None],
        on_frame: Callable[[], None],
        note_change: Callable[[], None],
        seconds: Callable[[], float],
    ):
        self.listeners: list[LoadListener] = []
        self.cores = Cores(catalog.config.cores, catalog.all_workers)
        self._catalog, self._budget, self._gate, self._kv_index = catalog, budget, gate, kv_index
        self._kv_dir = kv_dir if catalog.config.kv_disk_bytes else ""
        self._group, self._start_soon = group, start_soon
        self._on_frame, self._note_change = on_frame, note_change
        self._seconds = seconds
        self._events: dict[Worker, WorkerEvents] = {}
        self._estimates = EstimateCache()
        self._failures = FailedLoads(catalog.config.load_retry_s, seconds)

    def start_worker(self, model: ManagedModel, wanted: Mapping[str, Any]) -> Worker:
        """Start a worker for a model that is not loaded.

        :raises InferdError: its last load has failed a moment ago, and would fail again.
        """
        if not self._catalog.has_model(model):
            raise ModelNotFound(f"the model {model.name!r} has left")
        self._catalog.refresh_model(model)
        config = self._catalog.config
        spec = spec_of(model, wanted, config)
        self._failures.check_load(model.name, *conditions_of(model, spec))
        signature = signature_of(files_in_use(model.config.file))
        events = WorkerEvents(
            model,
            signature,
            budget=self._budget,
            gate=self._gate,
            estimates=self._estimates,
            kv_index=self._kv_index,
            on_frame=self._on_frame,
            on_work=self.cores.assign_cores,
            start_soon=self._start_soon,
        )
        worker = Worker(
            spec,
            events,
            limits=limits_of(config),
            kv_dir=self._kv_dir,
            hang_s=config.worker_hang_timeout_s,
            known_estimates=self._estimates.known_reports(without_adapters(spec), signature),
        )
        events.worker = worker
        self._events[worker] = events
        self._bind(model, worker)
        model.worker, model.error, model.fitted = worker, None, {}
        self.cores.assign_cores()
        self._group.start_soon(self._run, model, worker)
        self._notify_loads_changed()
        if worker.known_estimates:
            events.decide_load(worker.known_estimates[0])
        return worker

    def exchange_models(self, one: ManagedModel, other: ManagedModel) -> Worker | None:
        """Exchange the workers and configurations of two models, of which *other* is loaded. Return
        the previous worker of *one*, if that was loaded. Names, leases and handles stay.
        """
        before = one.loaded
        one.evicted_turns.fail_swapped(one.name)
        one.worker, other.worker = other.worker, one.worker
        one.config, other.config = other.config, one.config
        one.fitted, other.fitted = other.fitted, one.fitted
        one.load_s, other.load_s = other.load_s, one.load_s
        one.error, other.error = other.error, one.error
        for model in (one, other):
            if model.worker is not None:
                self._bind(model, model.worker)
        return before

    def _bind(self, model: ManagedModel, worker: Worker) -> None:
        self._events[worker].model = model
        worker.bind_model(model.name, model.recovery.quarantine)

    async def _run(self, model: ManagedModel, worker: Worker) -> None:
        started = self._seconds()
        log.info(
            "model.loading",
            model=model.name,
            file=worker.spec.path,
            known=bool(worker.known_estimates),
        )
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._note_loaded, model, worker, started)
                await worker.run()
        except Exception:  # whatever it is, it ends this worker alone
            log.exception("worker.failed", model=model.name, pid=worker.pid)
        model = self._events.pop(worker).model
        if model.worker is worker:
            model.worker = None
        log.info("model.unloaded", model=model.name, pid=worker.pid)
        for listener in self.listeners:
            listener.worker_exited(model, worker)
        self._budget.note_exited(worker)
        self._gate.note_worker_exited(model)
        self._catalog.close_descriptor(model)
        self._note_change()

    async def _note_loaded(self, model: ManagedModel, worker: Worker, started: float) -> None:
        await worker.loaded.wait()
        self._notify_loads_changed()
        took = round(self._seconds() - started, 3)
        error = worker.error
        model.error = None if isinstance(error, Cancelled) else error
        if isinstance(error, Cancelled):
            log.info("model.load_cancelled", model=model.name, seconds=took)
            return
        if error is None:
            model.load_s = took
            model.residency.loaded_at = self._seconds()
            self._budget.reservations.note_loaded(worker)
            self._failures.forget_load(model.name)
            log.info("model.loaded", model=model.name, pid=worker.pid, seconds=took)
        else:
            if worker.pid:  # without a process the file is not to blame
                self._failures.note_load(model.name, *conditions_of(model, worker.spec), error)
            log.error("model.failed", model=model.name, cause=error.message, seconds=took)
        for listener in self.listeners:
            listener.load_ended(model, took if error is None else None)

    def _notify_loads_changed(self) -> None:
        for listener in self.listeners:
            listener.loads_changed()
