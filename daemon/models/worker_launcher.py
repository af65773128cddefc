"""Workers of models: their start, the handling of their events, and the cleanup after them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import anyio
import anyio.abc
import structlog
from msgspec.structs import asdict

from ...backends.errors import Cancelled, ModelNotFound
from ...backends.tuning_choice import ModelTuning
from ...ipc.server.request_bytes import RequestBytes
from ...scheduler import Priority
from ..residency.budget import MemoryBudget
from ..residency.load_queue import LoadQueue
from ..residency.machine import OomKills
from ..workers.cores import Cores
from ..workers.spawner import SpawnedProcess
from ..workers.worker import Worker
from .catalog import ModelCatalog
from .kv_index import KvIndex
from .load_cache import EstimateCache, FailedLoads
from .model import ManagedModel, ModelHost
from .model_files import files_in_use, signature_of
from .specs import conditions_of, engine_settings, spec_of, without_adapters
from .worker_events import WorkerEvents

log = structlog.get_logger()


class LoadListener:
    """The receiver of events about loads and workers; subclasses handle those that they need."""

    def loads_changed(self) -> None:
        """Note that a load has begun or ended."""

    def load_ended(self, model: ManagedModel, seconds: float | None) -> None:
        """Note that a load has ended; *seconds* is its duration, or None if it has failed."""

    def worker_exited(self, model: ManagedModel, worker: Worker) -> None:
        """Note that a worker has exited."""


def setting_fields(tuning: ModelTuning | None) -> dict[str, object]:
    """Return the fields of a log event about a load's setting."""
    if tuning is None:
        return {}
    chosen = tuning.chosen
    return asdict(chosen.setting) | {"setting_by": chosen.source, "reason": chosen.reason}


def uses_other_setting(
    tuning: ModelTuning, model: ManagedModel, entries: Iterable[ManagedModel]
) -> bool:
    """Return whether another of *entries* computes the file of *model* with the kind of attention
    that *tuning* has not chosen.
    """
    other = "off" if tuning.chosen.setting.flash_attn else "on"
    for entry in entries:
        if entry is model or entry.config.file is None or entry.config.file != model.config.file:
            continue
        loaded = entry.loaded
        if loaded is not None and loaded.info.fingerprint == tuning.other_fingerprint:
            return True
        if entry.options().get("flash-attn", "auto") == other:
            return True
    return False


class WorkerLauncher:
    """Starts the workers of a registry and follows them until they exit. Lives on the daemon's
    event loop. Workers run in *group*; *on_frame* is called after each frame of their reports.
    """

    def __init__(
        self,
        registry: ModelHost,
        catalog: ModelCatalog,
        kv_index: KvIndex,
        budget: MemoryBudget,
        load_queue: LoadQueue,
        group: anyio.abc.TaskGroup,
        kv_dir: str,
        on_frame: Callable[[], None],
        request_bytes: RequestBytes,
    ):
        self.registry, self.on_frame, self.request_bytes = registry, on_frame, request_bytes
        self.kv_index, self.budget, self.load_queue = kv_index, budget, load_queue
        self.listeners: list[LoadListener] = []
        config = registry.config
        self.cores = Cores(config.cores, catalog.all_workers, strict=config.priority_strict)
        self.estimates = EstimateCache()
        self.oom_kills = OomKills()
        self._catalog, self._group, self._seconds = catalog, group, registry.seconds
        self._kv_dir = kv_dir if config.kv_disk_bytes else ""
        self._events: dict[Worker, WorkerEvents] = {}
        self._failures = FailedLoads(config.load_retry_s, registry.seconds)

    def start_worker(self, model: ManagedModel) -> Worker:
        """Start a worker for a model that is not loaded.

        :raises InferdError: the daemon shuts down, or the last load failed recently and would fail
            again.
        """
        self._catalog.check_open()
        if not self._catalog.has_model(model):
            raise ModelNotFound(f"the model {model.name!r} has been removed")
        self._catalog.refresh_model(model)
        config = self._catalog.config
        spec = spec_of(model, config)
        self._failures.check_load(model.name, *conditions_of(model, spec))
        signature = signature_of(files_in_use(model.config.file))
        events = WorkerEvents(self, model, signature)
        worker = Worker(
            spec,
            events,
            settings=engine_settings(config) | {"careful_s": model.recovery.careful_s},
            kv_dir=self._kv_dir,
            hang_s=config.worker_hang_timeout_s,
            known_estimates=self.estimates.estimates_of(without_adapters(spec), signature),
        )
        events.worker, model.kept_tuning = worker, None
        self._events[worker] = events
        self._bind_worker(model, worker)
        model.worker, model.error, model.fitted = worker, None, {}
        self.oom_kills.note_kills()
        self.cores.assign_cores()
        request = model.residency.first_request(self._seconds())
        priority = Priority.NORMAL if request is None else request.priority
        self.load_queue.request_place(worker, priority, None if request is None else request.user)
        self._group.start_soon(self._run_worker, model, worker)
        self._notify_loads_changed()
        events.decide_known_load()
        return worker

    def exchange_models(self, one: ManagedModel, other: ManagedModel) -> Worker | None:
        """Exchange the workers and configurations of two models, of which *other* is loaded. Return
        the previous worker of *one* if that was loaded. Names, leases and handles stay.
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
                self._bind_worker(model, model.worker)
        return before

    def _bind_worker(self, model: ManagedModel, worker: Worker) -> None:
        self._events[worker].model = model
        worker.bind_model(model.name, model.recovery.quarantine)

    async def _run_worker(self, model: ManagedModel, worker: Worker) -> None:
        started = self._seconds()
        cached = bool(worker.known_estimates)
        log.info("model.loading", model=model.name, file=worker.spec.path, estimate_cached=cached)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._note_loaded, model, worker, started)
                await self.load_queue.wait_for_place(worker)
                self._events[worker].decide_known_load()
                await worker.run()
        except Exception:  # any failure ends this worker alone
            log.exception("worker.failed", model=model.name, pid=worker.pid)
        finally:
            if worker.remains is None:
                self.load_queue.leave(worker)
            else:
                self._group.start_soon(self._wait_for_remains, worker, worker.remains)
        model = self._events.pop(worker).model
        if model.worker is worker:
            model.worker = None
        log.info("model.unloaded", model=model.name, pid=worker.pid)
        for listener in self.listeners:
            listener.worker_exited(model, worker)
        self.budget.note_exited(worker)
        self.registry.tuner.note_exited(worker)
        self.registry.gate.note_worker_exited(model)
        self.registry.note_use_ended(model)

    def _delete_states_of_other_setting(self, model: ManagedModel, worker: Worker) -> None:
        """Delete the KV files that a model wrote with another setting than the measured one, unless
        another entry still uses it.
        """
        tuning = worker.tuning
        if tuning is None or tuning.chosen.source != "measured":
            return
        if uses_other_setting(tuning, model, self._catalog.known()):
            return
        files, size = self.kv_index.delete_fingerprint(tuning.other_fingerprint)
        if files:
            log.info("kv.other_setting_deleted", model=model.name, files=files, bytes=size)

    async def _wait_for_remains(self, worker: Worker, process: SpawnedProcess) -> None:
        """Wait for a process that could not be ended."""
        try:
            await process.wait_exited()
        except Exception:  # it must not end the daemon
            log.exception("worker.failed", model=worker.spec.name, pid=worker.pid)
        finally:
            self.load_queue.leave(worker)

    async def _note_loaded(self, model: ManagedModel, worker: Worker, started: float) -> None:
        if await worker.end_stalled_load(waits=lambda: self.budget.loads.is_waiting(worker)):
            self.load_queue.note_stuck(worker)
        else:
            self.load_queue.leave(worker)
        self._notify_loads_changed()
        took = round(self._seconds() - started, 3)
        error = worker.error
        model.error = None if isinstance(error, Cancelled) else error
        if isinstance(error, Cancelled):
            log.info("model.load_cancelled", model=model.name, seconds=took)
            return
        if error is None:
            model.load_s = took
            model.recovery.note_loaded()
            model.residency.loaded_at = self._seconds()
            self.budget.reservations.note_loaded(worker)
            self._failures.forget_load(model.name)
            facts = setting_fields(worker.tuning)
            log.info("model.loaded", model=model.name, pid=worker.pid, seconds=took, **facts)
            self._delete_states_of_other_setting(model, worker)
        else:
            # Without a process the file is not to blame. A descriptor's name is not loaded again.
            if worker.pid and worker.spec.fd < 0:
                self._failures.note_load(model.name, *conditions_of(model, worker.spec), error)
            log.error("model.failed", model=model.name, cause=error.message, seconds=took)
        for listener in self.listeners:
            listener.load_ended(model, took if error is None else None)

    def _notify_loads_changed(self) -> None:
        self.registry.tuner.note_change()
        for listener in self.listeners:
            listener.loads_changed()
