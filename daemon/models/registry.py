"""The registry of models: leases on them, their workers, and the memory that they share."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Protocol

import anyio
import anyio.abc
import structlog

from ...backends import MemoryNeed
from ...backends.errors import Busy, ShuttingDown
from ...scheduler.kv.origin import scoped
from ...sessions.turns.sentence_checks import Comparison, Similarity, no_judge
from ...sessions.worker_client import TaskReader
from ..components import Components
from ..config.model_settings import ModelConfig
from ..config.settings import Config
from ..residency.budget import MemoryBudget
from ..residency.gate import ResidencyGate
from ..residency.machine import MachineMemory
from ..workers.worker import Worker
from .catalog import ModelCatalog
from .keep_alive import IdleUnloader
from .kv_index import KvFilePlace, KvIndex
from .lease import Lease
from .model import ManagedModel
from .worker_launcher import WorkerLauncher

log = structlog.get_logger()
KV_DIR = "kv"
"""The folder of KV states below the state directory."""


class SentenceComparer(Protocol):
    """The comparison of models' sentences with texts."""

    def compare(
        self, model: ManagedModel, comparison: Comparison, tell: Callable[[Similarity], None]
    ) -> None:
        """Compare a sentence of *model*'s output, and pass the result to *tell*."""


class NoComparer:
    """Compares nothing."""

    def compare(
        self, model: ManagedModel, comparison: Comparison, tell: Callable[[Similarity], None]
    ) -> None:
        """Report that no comparison is made."""
        no_judge(comparison, tell)


class Registry:
    """All models. Worker processes run in *group*; *on_frame* is called after their reports."""

    def __init__(
        self,
        config: Config,
        group: anyio.abc.TaskGroup,
        on_frame: Callable[[], None],
        seconds: Callable[[], float] = time.monotonic,
        machine: MachineMemory | None = None,
        components: Components | None = None,
    ):
        self._components = components or Components()
        self.seconds = seconds
        self.closing = False
        self.comparer: SentenceComparer = NoComparer()
        self._group = group
        self.catalog = ModelCatalog(config, self._components, partial(ManagedModel, self))
        kv_dir = config.state_dir / KV_DIR
        self.kv_index = KvIndex(kv_dir, config.kv_disk_bytes, listener=self)
        self.budget = MemoryBudget(config.memory_bytes, self.catalog.known, machine, seconds)
        self.gate = ResidencyGate(
            self.budget, self.catalog.known, config.residency_s, seconds, self.start_soon
        )
        self.idle_unloader = IdleUnloader(self.catalog.known, seconds)
        self.launcher = WorkerLauncher(
            self.catalog,
            self.budget,
            self.gate,
            self.kv_index,
            str(kv_dir),
            group,
            self.start_soon,
            on_frame,
            self.idle_unloader.note_change,
            seconds,
        )
        self.catalog.scan()

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.catalog.config

    def reconfigure(self, config: Config) -> list[str]:
        """Apply another configuration; models that it changes and that are not in use are unloaded.
        Return those that keep the old one until their next load.
        """
        outdated = self.catalog.reconfigure(config)
        for model in outdated:
            if not model.busy and model.worker is not None:
                model.worker.quit()
        self.idle_unloader.note_change()
        return sorted(model.name for model in outdated)

    # Leases.

    def lease(self, name: str, uid: int) -> Lease:
        """Return a lease on the model *name*."""
        self._check_open()
        return Lease(self.catalog.get(name, uid))

    def lease_descriptor(self, name: str, fd: int, uid: int) -> Lease:
        """Return a lease on the file behind *fd*; the model is *uid*'s alone, and the registry
        closes the descriptor when the model is unloaded.
        """
        model = self.catalog.add_model(name, ModelConfig(), uid)
        model.fd = fd
        return Lease(model)

    def note_lease_ended(self, model: ManagedModel) -> None:
        """Note that a client uses a model no more."""
        if model.worker is None:
            self.catalog.close_descriptor(model)
        self.idle_unloader.note_change()

    # Workers.

    def _check_open(self) -> None:
        if self.closing:
            raise ShuttingDown("the daemon is shutting down: no model is loaded any more")

    def start_worker(self, model: ManagedModel, wanted: Mapping[str, Any]) -> Worker:
        """Start a worker for a model that is not loaded.

        :raises InferdError: its last load has failed a moment ago, and would fail again.
        """
        self._check_open()
        return self.launcher.start_worker(model, wanted)

    def start_soon(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Run *work* in the daemon's task group; an unexpected failure ends that work alone."""
        self._group.start_soon(_guarded, work, *arguments)

    def move_tasks(self, model: ManagedModel, readers: Mapping[int, TaskReader]) -> None:
        """Let the tasks of a worker that was swapped go on in the worker of *model*."""
        if readers:
            model.recovery.move_tasks(readers)
            self.start_soon(model.recovery.resume_tasks)

    def reserved_for(self, worker: Worker | None) -> MemoryNeed | None:
        """Return the memory that is reserved for a worker."""
        return self.budget.reservations.of_worker(worker)

    def compare(
        self, model: ManagedModel, comparison: Comparison, tell: Callable[[Similarity], None]
    ) -> None:
        """Compare a sentence of a model's output, as is configured for the model."""
        self.comparer.compare(model, comparison, tell)

    # KV files.

    def kv_file_evicted(self, place: KvFilePlace) -> None:
        """Report to the workers of its model that a file is evicted."""
        for worker in self.catalog.ready_workers():
            if worker.info.fingerprint == place.fingerprint:
                worker.forget_kv_file(place.name)

    def kv_disk_checked(self, cause: str | None) -> None:
        """Note whether KV files can be written."""
        self._components.note("kv-store", cause)

    async def forget_session_files(self, owner: int, session: str) -> None:
        """Delete the files of a session that the workers have forgotten.

        :raises BackendError: a file cannot be deleted.
        """
        for worker in self.catalog.all_workers():
            if worker.unloading:
                await worker.exited.wait()  # until then it may write
        shared = self.config.kv_share == "all"
        await self.kv_index.forget_session(*scoped(owner, session, shared=shared))

    # Settings.

    def persist_settings(self, model: ManagedModel) -> None:
        """Store what was set for a model at run time, for the next daemons."""
        self.catalog.persist_settings(model)

    async def unload_by_name(self, name: str, uid: int, *, force: bool) -> None:
        """Unload a model for an operator.

        :raises Busy: it has leases, and *force* is not given.
        """
        model = self.catalog.get(name, uid)
        if model.busy and not force:
            raise Busy(
                f"{name!r} is in use: {len(model.leases)} leases",
                hint="wait until its users are done, or give --force",
                data={"leases": len(model.leases), "retry_after_s": 5.0},
            )
        await model.unload()

    def pin_model(self, name: str, uid: int, *, pinned: bool) -> None:
        """Keep a model in memory once it is loaded, or no longer do so; it is not loaded now."""
        model = self.catalog.get(name, uid)
        model.pinned = pinned
        if not pinned:
            model.used_at = self.seconds()
        self.persist_settings(model)
        self.idle_unloader.note_change()

    async def close(self) -> None:
        """Unload all models."""
        self.closing = True
        async with anyio.create_task_group() as group:
            for model in self.catalog.known():
                group.start_soon(model.unload)


async def _guarded(work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
    try:
        await work(*arguments)
    except Exception:  # the daemon goes on
        log.exception("background.failed", work=work.__qualname__)
