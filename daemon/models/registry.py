"""The registry of models: their leases, their workers, and the memory that they share."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import anyio
import anyio.abc
import structlog

from ...backends.errors import Busy, Cancelled, QuotaExceeded
from ...ipc.server.request_bytes import RequestBytes
from ...scheduler import Owner
from ...scheduler import messages as m
from ...scheduler.kv.origin import scoped
from ...sessions.admission.bounds import NO_QUOTA, Quota, check_descriptor_models
from ...sessions.turn.turn import compare_nothing
from ...sessions.worker_client import TaskReader
from ..components import Components
from ..config.model_settings import ModelConfig
from ..config.settings import Config
from ..residency.budget import MemoryBudget
from ..residency.gate import ResidencyGate
from ..residency.idle_unloader import IdleUnloader
from ..residency.load_queue import LoadQueue
from ..residency.machine import MachineMemory
from ..state_files import KV_DIR
from ..workers.recovery import fail_readers
from ..workers.worker import Worker
from .catalog import ModelCatalog
from .file_contents import FileFactsCache
from .kv_index import KvFilePlace, KvIndex
from .model import Lease, ManagedModel, PassedFile, SentenceComparer
from .tuner import Tuner, TuningPace
from .tuning_records import TuningRecords
from .worker_launcher import WorkerLauncher

log = structlog.get_logger()
"""The folder of KV files below the state directory."""


class Registry:
    """All models. Owned by the daemon's event loop.

    Workers run in *group*; *on_frame* is called after each frame of reports.
    """

    def __init__(
        self,
        config: Config,
        group: anyio.abc.TaskGroup,
        on_frame: Callable[[], None],
        seconds: Callable[[], float] = time.monotonic,
        machine: MachineMemory | None = None,
        components: Components | None = None,
        request_bytes: RequestBytes | None = None,
        tuning_pace: TuningPace | None = None,
    ):
        components = components or Components()
        self.seconds = seconds
        self.compare_sentence: SentenceComparer = lambda _, *request: compare_nothing(*request)
        self._group = group
        self.catalog = ModelCatalog(config, components, partial(ManagedModel, self))
        self.persist_settings: Callable[[ManagedModel], None] = self.catalog.persist_settings
        kv_dir = config.state_dir / KV_DIR
        self.kv_index = KvIndex(
            kv_dir,
            config.kv_disk_bytes,
            file_evicted=self._notify_kv_file_evicted,
            note_state=partial(components.note, "kv-store"),
        )
        self.load_queue = LoadQueue(self.catalog.serves_others, seconds)
        self.budget = MemoryBudget(
            config.memory_bytes, self.catalog.known, self.load_queue, machine, seconds
        )
        self.gate: ResidencyGate[ManagedModel] = ResidencyGate(
            self.budget, self.catalog.known, config.residency_s, seconds, self.start_soon
        )
        self.idle_unloader = IdleUnloader(self.catalog.known, seconds)
        self.tuner = Tuner(
            TuningRecords(config.state_dir),
            self.catalog.all_workers,
            self.budget,
            config.cores,
            is_on=lambda: self.config.tuning,
            pace=tuning_pace,
        )
        self.launcher = WorkerLauncher(
            self,
            self.catalog,
            self.kv_index,
            self.budget,
            self.load_queue,
            group,
            str(kv_dir),
            on_frame,
            request_bytes or RequestBytes(),
        )
        self.start_worker: Callable[[ManagedModel], Worker] = self.launcher.start_worker
        self.file_facts = FileFactsCache()
        self.catalog.scan()

    @property
    def config(self) -> Config:
        """The configuration in force."""
        return self.catalog.config

    def reconfigure(self, config: Config) -> list[str]:
        """Apply another configuration, and unload the changed models that are not in use. Return
        the names of all changed models; those in use keep the old one until their next load.
        """
        outdated = self.catalog.reconfigure(config)
        self.tuner.note_change()
        for model in outdated:
            if not model.busy and model.worker is not None:
                model.worker.quit()
        self.idle_unloader.note_change()
        return sorted(model.name for model in outdated)

    # Leases.

    def lease(self, name: str, uid: int) -> Lease:
        """Return a lease on the model *name*."""
        self.catalog.check_open()
        return Lease(self.catalog.get(name, uid))

    def lease_descriptor(
        self, name: str, file: PassedFile, uid: int, quota: Quota = NO_QUOTA
    ) -> Lease:
        """Return a lease on *file*, a model that only *uid* sees. The user's leases on one file
        share its model. The registry closes the file when the model is unloaded.

        :raises QuotaExceeded: the user has too many models from descriptors.
        """
        own = {
            m.passed_file.identity: m
            for m in self.catalog.known()
            if m.uid == uid and m.passed_file is not None and m.leases
        }
        model = own.get(file.identity)
        if model is not None:
            file.close()
            return Lease(model)
        try:
            check_descriptor_models(quota, len(own), self.config.descriptor_models_user_max)
        except QuotaExceeded:
            file.close()
            raise
        model = self.catalog.add_model(name, ModelConfig(), uid)
        model.passed_file = file
        return Lease(model)

    def note_use_ended(self, model: ManagedModel) -> None:
        """Note that a lease on a model has ended, or that its worker has exited."""
        if model.worker is None:
            self.catalog.close_descriptor(model)
        self.idle_unloader.note_change()

    # Workers.

    def start_soon(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        """Run *work* in the daemon's task group; an unexpected failure ends only that work."""
        self._group.start_soon(_guarded, work, *arguments)

    def move_tasks(self, model: ManagedModel, readers: Mapping[int, TaskReader]) -> None:
        """Continue the tasks of another worker in the worker of *model*."""
        if readers:
            model.recovery.move_tasks(readers)
            self.start_soon(model.recovery.resume_tasks)

    # KV files.

    def _notify_kv_file_evicted(self, place: KvFilePlace) -> None:
        for worker in self.catalog.ready_workers():
            if worker.info.fingerprint == place.fingerprint:
                worker.client.send_command(m.KvFileEvicted(place.name))

    async def delete_session_files(self, owner: Owner, session: str) -> None:
        """Delete the KV files of a session whose states the workers have deleted.

        :raises BackendError: a file cannot be deleted.
        """
        for worker in self.catalog.all_workers():
            if worker.unloading:
                await worker.exited.wait()  # it may write until then
        shared = self.config.kv_share == "all"
        await self.kv_index.delete_session_files(*scoped(owner.user, session, shared=shared))

    # Settings.

    async def unload_by_name(self, name: str, uid: int, *, force: bool) -> None:
        """Unload a model for an operator.

        :raises Busy: the model is in use, and *force* is not given.
        """
        model = self.catalog.get(name, uid)
        if model.busy and not force:
            raise Busy(
                f"{name!r} is in use; leases: {len(model.leases)}",
                hint="wait until its clients have finished, or unload it with force",
                data={"leases": len(model.leases), "retry_after_s": 5.0},
            )
        error = Cancelled(
            f"an operator unloaded {name!r}",
            hint="send the next turn to load the model again: the history is kept",
            data={"by": "operator"},
        )
        fail_readers(model.recovery.release_tasks(), error)
        if model.worker is not None:
            client = model.worker.client
            # This also fails turns that begin before the worker has exited.
            client.successor = partial(fail_readers, error=error)
            fail_readers(client.withdraw_tasks(), error)
        await model.unload()

    def pin_model(self, name: str, uid: int, *, pinned: bool) -> None:
        """Pin a model, so that it stays in memory once it is loaded, or unpin it."""
        model = self.catalog.get(name, uid)
        model.pinned = pinned
        if not pinned:
            model.used_at = self.seconds()
        self.persist_settings(model)
        self.idle_unloader.note_change()

    async def close(self) -> None:
        """Unload all models."""
        self.catalog.closing = True
        async with anyio.create_task_group() as group:
            for model in self.catalog.known():
                group.start_soon(model.unload)


async def _guarded(work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
    try:
        await work(*arguments)
    except Exception:  # the daemon continues
        log.exception("background.failed", work=work.__qualname__)
