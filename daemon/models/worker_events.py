"""The handling of a worker's events: estimates, progress, memory, KV files and its death."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from signal import SIGKILL
from typing import Protocol

import msgspec

from ...backends import ModelInfo, Shape
from ...backends.errors import InferdError, OutOfMemory
from ...ipc.server.request_bytes import RequestBytes, Reserve
from ...scheduler import messages as m
from ...sessions.worker_client import TaskReader
from ..residency.budget import MemoryBudget
from ..residency.fit import smaller_shape, smallest_shape, with_address_space, with_sizes
from ..residency.load_queue import LoadQueue
from ..residency.machine import OomKills, address_space_limit
from ..workers.cores import Cores
from ..workers.deaths import Death
from ..workers.process_client import WorkerListener
from ..workers.worker import Worker
from .kv_index import KvIndex
from .load_cache import EstimateCache
from .model import ManagedModel, ModelHost
from .model_files import Signature, files_in_use, signature_of, size_bytes
from .specs import with_adapters, without_adapters


class Launcher(Protocol):
    """The launcher of a worker, with the state of all workers that events change."""

    registry: ModelHost
    kv_index: KvIndex
    budget: MemoryBudget
    load_queue: LoadQueue
    cores: Cores
    estimates: EstimateCache
    oom_kills: OomKills
    on_frame: Callable[[], None]
    request_bytes: RequestBytes


class WorkerEvents(WorkerListener):
    """The handling of one worker's events. Lives on the daemon's event loop.

    A swap gives the worker to another *model*. *signature* identifies the model's files.
    """

    def __init__(self, launcher: Launcher, model: ManagedModel, signature: Signature):
        self.model = model
        self.worker: Worker
        """Set by the launcher before the worker runs."""
        self._launcher, self._signature = launcher, signature
        self._is_known_load_decided = False

    def quit_ordered(self) -> None:
        """End the wait of a load that has not begun."""
        self._launcher.load_queue.end_wait(self.worker)

    def reports_handled(self) -> None:
        """Write the output that a frame of reports has caused to the clients."""
        self._launcher.on_frame()

    def count_unsent(self, user: int, size: int) -> None:
        """Count the bytes of a user's commands among those of the user's requests in flight."""
        self._launcher.request_bytes.add(user, size)

    def check_unsent(self, user: int) -> None:
        """Check the bytes of the user's requests in flight."""
        self._launcher.request_bytes.check_growth(user, 0, Reserve.SMALL)

    def work_changed(self) -> None:
        """Assign the cores again, and start loads that waited for turns of other users."""
        self._launcher.cores.assign_cores()
        self._launcher.load_queue.grant_places()
        self._launcher.registry.tuner.note_change()

    def settings_measured(self, report: m.Measured) -> None:
        """Store the result of a measurement for the next load."""
        self._launcher.registry.tuner.note_result(self.worker, report)

    def load_progressed(self, fraction: float) -> None:
        """Report the progress to the callers that wait for the load."""
        self.model.report_progress(fraction)

    def memory_estimated(self, estimate: m.MemoryEstimate) -> None:
        """Store an estimate for the next load of these files, and decide on this one."""
        spec = without_adapters(self.worker.spec)
        self._launcher.estimates.store_estimate(spec, self._signature, estimate)
        self.decide_load(estimate)

    def decide_known_load(self) -> None:
        """Decide on a load by a stored estimate, once the load has a place and before its process
        runs, so that it reserves memory before later loads.
        """
        known, has_place = self.worker.known_estimates, self._launcher.load_queue.has_place
        if known and not self._is_known_load_decided and has_place(self.worker):
            self._is_known_load_decided = True
            self.decide_load(known[0])

    def decide_load(self, estimate: m.MemoryEstimate) -> None:
        """Decide on a load by an estimate."""
        if self.model.embeds:
            self.worker.client.embeds = True
            need = estimate.need.with_embedding()
            estimate = msgspec.structs.replace(estimate, need=need)
        estimate = with_adapters(estimate, self.worker.spec)
        self._launcher.budget.decide_load(self.model, self.worker, estimate)
        self._launcher.registry.gate.advance()

    async def reserve_embedding_memory(self) -> None:
        """Reserve memory for embeddings; idle models are evicted for it if needed. If that is not
        enough, the model is loaded again in a smaller shape, in which they fit.

        :raises OutOfMemory: too little is free.
        """
        worker = self.worker
        while not worker.client.embeds:
            if self.model.worker is not worker or worker.unloading:
                return
            try:
                unloading = self._launcher.budget.reserve_embedding(self.model, worker)
            except OutOfMemory:
                if not self._may_load_smaller():
                    raise
                self.model.embeds = True  # the load counts them
                await self.model.unload()
                if not (await self.model.load()).client.embeds:
                    raise
                return
            for leaving in unloading:
                await leaving.exited.wait()
            self.model.embeds = worker.client.embeds

    def _may_load_smaller(self) -> bool:
        """Return whether the model may be loaded in a smaller shape for embeddings: not while it
        computes for others, and not again if that has failed.
        """
        worker, model, info = self.worker, self.model, self.worker.info
        if model.has_tasks or model.pinned or worker.has_no_room_for_embeddings:
            return False
        shape = Shape(info.slots, info.ctx_size, info.batch_size, info.n_gpu_layers)
        return smaller_shape(shape, smallest_shape(model, shape)) is not None

    def embedding_context_created(self) -> None:
        """Note that the memory of the embedding context is in use."""
        self._launcher.budget.reservations.note_loaded(self.worker)

    def kv_file_changed(self, report: m.KvFileWritten | m.KvFileLost) -> None:
        """Record a KV file in the index of the disk tier."""
        index, fingerprint = self._launcher.kv_index, self.worker.info.fingerprint
        if isinstance(report, m.KvFileLost):
            index.remove_file(fingerprint, report.name, report.cause)
        else:
            index.add_file(fingerprint, *msgspec.structs.astuple(report))

    def add_evidence(self, death: Death) -> Death:
        """Add to *death* whether the kernel counted an OOM kill and whether the files changed."""
        return replace(
            death,
            was_oom_killed=death.code == -SIGKILL and self._launcher.oom_kills.claim_kill(),
            files_changed=signature_of(files_in_use(self.model.config.file)) != self._signature,
        )

    def worker_died(self, death: Death, *, needed: bool) -> None:
        """Note a death for the model's next start, which keeps the setting, because the states on
        disk fit only that.
        """
        self.model.kept_tuning = self.worker.spec.tuning if death.loaded else None
        self.model.recovery.note_death(death, needed=needed)

    def load_error(self, death: Death, status: str) -> InferdError:
        """Return the error of a load during which the worker has died with *status*."""
        return self.model.recovery.load_error(death, status)

    def failed_load(self, error: InferdError) -> InferdError:
        """Return the *error* of a load with the sizes that are known."""
        need, free = self._launcher.budget.reservations.sizes_of_load(self.worker)
        needed = size_bytes(self.model.config.file) if need is None else need.total
        error = with_address_space(error, needed, address_space_limit())
        if need is None:
            return error
        spec, fitted = self.worker.spec, self.model.fitted
        slots = fitted.get("slots", spec.slots)
        return with_sizes(error, need, slots, fitted.get("ctx-size", spec.ctx_size), free)

    def tasks_orphaned(self, readers: Mapping[int, TaskReader], death: Death) -> None:
        """Resume the tasks in another worker of the model."""
        self.model.recovery.add_orphans(readers, death)
        self._launcher.registry.start_soon(self.model.recovery.resume_tasks)

    def turn_set_aside(self, reader: TaskReader, info: ModelInfo) -> None:
        """Keep a turn like those that were not read when their model was evicted."""
        self.model.evicted_turns.add_turns({reader.spec.id: reader}, info)
