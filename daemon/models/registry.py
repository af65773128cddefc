"""All models: by their names, loaded and unloaded, and how their workers are wired up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import structlog

from ...backends.errors import Busy, Cancelled, ModelNotFound, ShuttingDown
from ...backends.params import nearest
from ...scheduler.kv.origin import scoped
from ...scheduler.recording.recorder import Activity
from ...sessions.turns.sentence_checks import Comparison, Similarity, no_judge
from ...sessions.worker_client import TaskReader
from ..components import Parts
from ..config.model_settings import ModelConfig
from ..config.settings import Config
from ..residency.budget import Room
from ..residency.estimates import Reckonings
from ..residency.gate import Turnstile
from ..residency.machine import MachineMemory
from ..residency.model_files import files_in_use, models_in, signature_of
from ..service.watchdog import overdue
from ..workers.cores import Cores
from ..workers.worker import Worker
from .failures import FailedLoads
from .kv_index import KvIndex, Place
from .model import Lease, Model, ModelState
from .model_adapters import without_adapters
from .persisted import KEPT_FILE, KeptModels
from .specs import conditions_of, limits_of, spec_of
from .worker_events import WorkerEvents

__all__ = ("Registry",)

log = structlog.get_logger()
ECHO = "echo"
KV_DIR = "kv"
"""Where KV states lie below the state directory."""


class Registry:
    """All models. Worker processes run in *group*; *on_frame* is called after their reports."""

    def __init__(
        self,
        config: Config,
        group: anyio.abc.TaskGroup,
        on_frame: Callable[[], None],
        seconds: Callable[[], float] = time.monotonic,
        machine: MachineMemory | None = None,
        parts: Parts | None = None,
    ):
        self._parts = parts = parts or Parts()
        self.config = config
        self.seconds = seconds
        self.closing = False
        self._group = group
        self._on_frame = on_frame
        self.on_load: Callable[[], None] = lambda: None
        """Hears that a load begins, or has ended."""
        self.kv_index = KvIndex(config.state_dir / KV_DIR, config.kv_disk_bytes)
        self.kv_index.on_evicted = self._tell_evicted
        self.kv_index.on_disk = partial(parts.note, "kv-store")
        self._models: dict[str, Model] = {}
        self._events: dict[Worker, WorkerEvents] = {}
        self._cores = Cores(config.cores, self._all_workers)
        self.room = Room(config.memory_bytes, self._models.values, machine, seconds)
        self.turnstile = Turnstile(
            self.room, self._models.values, config.model_stay_s, seconds, self.start_soon
        )
        self._reckonings = Reckonings()
        self._failures = FailedLoads(config.failed_load_s, seconds)
        self._changed = anyio.Event()
        self._kept = KeptModels(config.state_dir / KEPT_FILE, partial(parts.note, "models"))
        self._configured: dict[str, ModelConfig] = {}
        """What the last look at configuration and models directory has found."""
        self._last_files: dict[str, Path] = {}
        self._recovered = 0
        """In models that were removed."""
        self.on_loaded: Callable[[Model, float | None], None] = lambda *_: None
        """Hears of loads that have ended: the seconds, or None of one that failed."""
        self.on_left: Callable[[Model, Worker], None] = lambda *_: None
        """Hears of workers that are gone."""
        self.compare: Callable[[Model, Comparison, Callable[[Similarity], None]], None] = (
            lambda _, comparison, tell: no_judge(comparison, tell)
        )
        """Has a sentence of a model's compared."""
        self.scan()

    def scan(self) -> None:
        """Read the configuration's models and the models directory again."""
        found = {ECHO: ModelConfig(backend="echo")} | self._kept.taken(self.config.models_dir)
        found |= {n: ModelConfig(file=p) for n, p in self._files().items()}
        found |= self.config.models
        self._configured = found
        for name, config in found.items():
            if name not in self._models:
                model = self._models[name] = Model(self, name, config)
                model.take_up(self._kept.of(name, config))
            else:
                self._refresh(self._models[name])
        for name, model in list(self._models.items()):
            if name not in found and model.uid is None and not model.busy and not model.worker:
                del self._models[name]

    def _refresh(self, model: Model) -> None:
        """Let a model that is not loaded, nor to be for a turn of before, be what is configured."""
        configured = self._configured.get(model.name)
        if configured is None or configured == model.configured:
            return
        if model.worker is not None or model.computes:
            return
        model.configured = configured
        model.take_up(self._kept.of(model.name, configured))

    def reconfigure(self, config: Config) -> list[str]:
        """Go by another configuration; models that it changes, and nobody uses, are unloaded.
        Return those that go by the one before until their next load.
        """
        before, self.config = self.config, config
        self.scan()
        loaded = [m for m in self._models.values() if m.worker is not None and m.uid is None]
        outdated = [m for m in loaded if self._outdated(m, before)]
        for model in outdated:
            if not model.busy and model.worker is not None:
                model.worker.quit()
        self._changed.set()
        return sorted(m.name for m in outdated)

    def _outdated(self, model: Model, before: Config) -> bool:
        """Tell whether a loaded model is not what a load would make of it now."""
        if self._configured.get(model.name) != model.configured:
            return True
        limits = limits_of(self.config)
        return before.defaults != self.config.defaults or limits_of(before) != limits

    def _files(self) -> dict[str, Path]:
        """Return the models directory's, by name; as they were, while it cannot be read."""
        try:
            self._last_files = models_in(self.config.models_dir)
        except OSError as exc:
            self._parts.note("models-dir", f"{self.config.models_dir}: {exc.strerror or exc}")
        else:
            self._parts.note("models-dir", None)
        return self._last_files

    def models(self, uid: int) -> list[Model]:
        """Return the models that *uid* may see."""
        self.scan()
        visible = [m for m in self._models.values() if m.uid in (None, uid)]
        return sorted(visible, key=lambda model: model.name)

    @property
    def known(self) -> list[Model]:
        """All models, everybody's, as they were found last: no directory is read."""
        return list(self._models.values())

    def _all_workers(self) -> list[Worker]:
        return [m.worker for m in self._models.values() if m.worker is not None]

    @property
    def recovered(self) -> int:
        """How often a turn went on in another worker: its own had died, or was swapped."""
        return self._recovered + sum(m.recovery.recovered for m in self._models.values())

    def workers(self) -> list[Worker]:
        """Return the workers of the models that are ready."""
        ready = [m for m in self._models.values() if m.state is ModelState.READY]
        return [m.worker for m in ready if m.worker is not None]

    @property
    def loading(self) -> dict[str, float]:
        """The models that load, and how far each is."""
        found = [m for m in self._models.values() if m.state is ModelState.LOADING]
        return {m.name: m.worker.progress for m in found if m.worker is not None}

    @property
    def overdue(self) -> list[str]:
        """The models whose workers should have been replaced by now, and are not."""
        return overdue((m.name, m.worker) for m in self._models.values() if m.worker is not None)

    def get(self, name: str, uid: int) -> Model:
        """Return a model by its name.

        :raises ModelNotFound: with the nearest name there is.
        """
        if name not in self._models or name not in self._configured:
            self.scan()
        model = self._models.get(name)
        if model is None or model.uid not in (None, uid):
            names = [m.name for m in self.models(uid)]
            close = nearest(name, names)
            raise ModelNotFound(
                f"there is no model {name[:200]!r}",
                hint=f"{close + '; ' if close else ''}`inferd models` lists the names, `inferd"
                " pull` gets a model",
                data={"models": names[:100]},
            )
        return model

    def target(self, to: str, uid: int) -> ModelConfig:
        """Return what a swap is to load: another model's file and parameters, or a file of the
        models directory.

        :raises ModelNotFound: there is neither.
        """
        if to.endswith(".gguf"):
            found = {p.name: p for p in self._files().values()}
            if to in found:
                return ModelConfig(file=found[to])
        return self.get(to, uid).config

    def lease(self, name: str, uid: int) -> Lease:
        """Return a lease on the model *name*."""
        if self.closing:
            raise ShuttingDown("the daemon is shutting down: no model is loaded any more")
        return Lease(self.get(name, uid))

    def lease_descriptor(self, name: str, fd: int, uid: int) -> Lease:
        """Return a lease on the file behind *fd*; the model is *uid*'s alone, and the registry
        closes the descriptor when it has left.
        """
        model = Model(self, name, ModelConfig(), uid)
        model.fd = fd
        self._models[name] = model
        return Lease(model)

    # Workers.

    def start(self, model: Model, wanted: Mapping[str, Any]) -> Worker:
        """Start a worker for a cold model.

        :raises InferdError: its last load has failed just now, and would again.
        """
        if self.closing:
            raise ShuttingDown("the daemon is shutting down: no model is loaded any more")
        if self._models.get(model.name) is not model:
            raise ModelNotFound(f"the model {model.name!r} has left")
        self._refresh(model)
        spec = spec_of(model, wanted, self.config)
        self._failures.check(model.name, *conditions_of(model, spec))
        signature = signature_of(files_in_use(model.config.file))
        events = WorkerEvents(
            model,
            signature,
            room=self.room,
            turnstile=self.turnstile,
            reckonings=self._reckonings,
            kv_index=self.kv_index,
            on_frame=self._on_frame,
            on_work=self._cores.assign_cores,
            adopt=self.adopt,
        )
        worker = Worker(
            spec,
            events,
            limits=limits_of(self.config),
            kv_dir=str(self.config.state_dir / KV_DIR) if self.config.kv_disk_bytes else "",
            hang_s=self.config.worker_hang_s,
            known=self._reckonings.known(without_adapters(spec), signature),
        )
        self._events[worker] = events
        self._bind(model, worker)
        model.worker, model.error, model.fitted = worker, None, {}
        self._cores.assign_cores()
        self._group.start_soon(self._run, model, worker)
        self.on_load()
        if worker.known:
            events.decide_load(worker, worker.known[0])
        return worker

    def _bind(self, model: Model, worker: Worker) -> None:
        self._events[worker].model = model
        worker.bind_model(model.name, model.recovery.quarantine)

    def add(self, name: str, config: ModelConfig, uid: int) -> Model:
        """Return a new model that only *uid* may name."""
        model = self._models[name] = Model(self, name, config, uid)
        return model

    def remove(self, model: Model) -> None:
        """Forget a model that has left."""
        if self._models.pop(model.name, None) is model:
            self._recovered += model.recovery.recovered

    def keep(self, model: Model) -> None:
        """Write down what was said of a model, for the daemons to come; descriptors' are not."""
        if model.uid is None:
            self._kept.keep(model.name, model.kept)

    def exchange(self, one: Model, other: Model) -> Worker | None:
        """Exchange what two models are, of which *other* is loaded; return *one*'s worker before,
        if that was loaded. Names, leases and handles stay where they are.
        """
        before = one.worker if one.state is ModelState.READY else None
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

    def start_soon(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Do *work* in the daemon's task group; where it fails in a way nobody thought of, it ends
        alone.
        """
        self._group.start_soon(_guarded, work, *arguments)

    async def _run(self, model: Model, worker: Worker) -> None:
        started = self.seconds()
        log.info("model.loading", model=model.name, file=worker.spec.path, known=bool(worker.known))
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._tell_loaded, model, worker, started)
                await worker.run()
        except Exception:  # whatever it is, it ends this worker alone
            log.exception("worker.failed", model=model.name, pid=worker.pid)
        model = self._events.pop(worker).model
        if model.worker is worker:
            model.worker = None
        log.info("model.left", model=model.name, pid=worker.pid)
        self.on_left(model, worker)
        self.room.left(worker)
        self.turnstile.left(model)
        self._forget(model)
        self._changed.set()

    def adopt(self, model: Model, readers: Mapping[int, TaskReader], act: Activity) -> None:
        """Let the tasks of a worker that is gone go on in another one of *model*."""
        model.recovery.add_orphans(readers, act)
        self.start_soon(model.recovery.resume_tasks)

    def move(self, model: Model, readers: Mapping[int, TaskReader]) -> None:
        """Let the tasks of a worker that was swapped go on in *model*'s."""
        if readers:
            model.recovery.move_tasks(readers)
            self.start_soon(model.recovery.resume_tasks)

    async def _tell_loaded(self, model: Model, worker: Worker, started: float) -> None:
        await worker.loaded.wait()
        self.on_load()
        took = round(self.seconds() - started, 3)
        error = worker.error
        model.error = None if isinstance(error, Cancelled) else error
        if isinstance(error, Cancelled):
            log.info("model.load_cancelled", model=model.name, seconds=took)
            return
        if error is None:
            model.load_s = took
            model.stay.began = self.seconds()
            self.room.loaded(worker)
            self._failures.forget(model.name)
            log.info("model.loaded", model=model.name, pid=worker.pid, seconds=took)
            self.on_loaded(model, took)
            return
        if worker.pid:  # without a process the file is not to blame
            self._failures.note(model.name, *conditions_of(model, worker.spec), error)
        log.error("model.failed", model=model.name, cause=error.message, seconds=took)
        self.on_loaded(model, None)

    def _forget(self, model: Model) -> None:
        if model.fd >= 0 and not model.leases:
            os.close(model.fd)
            model.fd = -1
            self._models.pop(model.name, None)

    def _tell_evicted(self, place: Place) -> None:
        for worker in self.workers():
            if worker.info.fingerprint == place.fingerprint:
                worker.forget_kv_file(place.name)

    async def forget_files(self, owner: int, session: str) -> None:
        """Delete what lies on disk of a session that the workers have forgotten.

        :raises BackendError: a file cannot be deleted.
        """
        for model in list(self._models.values()):
            if model.worker is not None and model.worker.leaving:
                await model.worker.gone.wait()  # until then it may write
        shared = self.config.kv_share == "all"
        await self.kv_index.forget(*scoped(owner, session, shared=shared))

    def lease_ended(self, model: Model) -> None:
        """Look again at who is idle."""
        if model.worker is None:
            self._forget(model)
        self._changed.set()

    async def watch_cores(self) -> None:
        """Use fewer cores while other programs need them, for ever."""
        await self._cores.watch_external_load()

    async def unload_idle(self) -> None:
        """Let models go that were idle for their `keep_alive_s`, for ever; no polling."""
        while True:
            now = self.seconds()
            idle = [m for m in self._models.values() if m.worker is not None and not m.busy]
            ends = {m: m.used_at + m.keep_alive_s - now for m in idle if m.keep_alive_s >= 0}
            for model, left_s in ends.items():
                if left_s <= 0 and model.worker is not None and not model.worker.leaving:
                    model.worker.quit()
            self._changed = anyio.Event()
            coming = [left_s for left_s in ends.values() if left_s > 0]
            with anyio.move_on_after(min(coming, default=float("inf"))):
                await self._changed.wait()

    async def unload_by_name(self, name: str, uid: int, *, force: bool) -> None:
        """Unload a model whoever holds it, for an operator.

        :raises Busy: it has leases, and *force* is not given.
        """
        model = self.get(name, uid)
        if model.busy and not force:
            raise Busy(
                f"{name!r} is in use: {len(model.leases)} leases",
                hint="wait until its users are done, or give --force",
                data={"leases": len(model.leases), "retry_after_s": 5.0},
            )
        await model.unload()

    def pin(self, name: str, uid: int, *, pinned: bool) -> None:
        """Let a model stay whatever happens, or take that back; it is not loaded by it."""
        model = self.get(name, uid)
        model.pinned = pinned
        if not pinned:
            model.used_at = self.seconds()
        self.keep(model)
        self._changed.set()

    async def close(self) -> None:
        """Let all workers leave."""
        self.closing = True
        async with anyio.create_task_group() as group:
            for model in self._models.values():
                group.start_soon(model.unload)


async def _guarded(work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
    try:
        await work(*arguments)
    except Exception:  # the daemon goes on
        log.exception("background.failed", work=work.__qualname__)
