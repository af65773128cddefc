"""Reactions of the registry to the reports of one worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from ...scheduler import messages as m
from ...scheduler.recording.recorder import Activity
from ...sessions.worker_client import TaskReader
from ..residency.budget import MemoryBudget
from ..residency.estimates import EstimateCache
from ..residency.gate import ResidencyGate
from ..residency.model_files import Signature
from ..workers.listener import WorkerListener
from ..workers.worker import Worker
from .adapter_specs import with_adapters, without_adapters
from .kv_index import KvIndex
from .model import ManagedModel


class WorkerEvents(WorkerListener):
    """The listener of one worker. Lives on the daemon's event loop.

    A swap gives the worker to another *model*. *signature* identifies the model's files,
    *on_frame* writes to the clients, *on_work* deals out the cores, and
    *start_soon* runs work in the daemon's task group.
    """

    def __init__(
        self,
        model: ManagedModel,
        signature: Signature,
        *,
        budget: MemoryBudget,
        gate: ResidencyGate[ManagedModel],
        estimates: EstimateCache,
        kv_index: KvIndex,
        on_frame: Callable[[], None],
        on_work: Callable[[], None],
        start_soon: Callable[..., None],
    ):
        self.model = model
        self.worker: Worker
        """Set by the launcher once it is made, before the worker runs."""
        self._signature = signature
        self._budget, self._gate, self._estimates = budget, gate, estimates
        self._kv_index, self._start_soon = kv_index, start_soon
        self._on_frame, self._on_work = on_frame, on_work

    def reports_handled(self) -> None:
        """Write to the clients what a frame of reports has caused."""
        self._on_frame()

    def work_changed(self) -> None:
        """Deal out the cores again."""
        self._on_work()

    def load_progressed(self, fraction: float) -> None:
        """Report the progress to the callers that wait for the load."""
        self.model.report_progress(fraction)

    def memory_estimated(self, estimate: m.MemoryEstimate) -> None:
        """Remember an estimate for the next load of these files, and decide on this one."""
        self._estimates.note_report(without_adapters(self.worker.spec), self._signature, estimate)
        self.decide_load(estimate)

    def decide_load(self, estimate: m.MemoryEstimate) -> None:
        """Decide on a load by an estimate. With one that is known already its process need not run
        yet, so that a caller keeps its place before those that come later.
        """
        if self.model.embeds:
            self.worker.client.embeds = True
            need = estimate.need.with_embedding()
            estimate = m.MemoryEstimate(estimate.shape, need, estimate.devices)
        worker = self.worker
        self._budget.decide_load(self.model, worker, with_adapters(estimate, worker.spec))
        self._gate.advance()

    async def reserve_embedding_memory(self) -> None:
        """Reserve memory for embeddings; idle models are unloaded for it, if need be.

        :raises OutOfMemory: there is too little of it.
        """
        worker = self.worker
        while not worker.client.embeds:
            if self.model.worker is not worker or worker.unloading:
                return
            for unloading in self._budget.reserve_embedding(self.model, worker):
                await unloading.exited.wait()
            self.model.embeds = worker.client.embeds

    def embedding_context_created(self) -> None:
        """Note that the memory of the embedding context is in use."""
        self._budget.reservations.note_loaded(self.worker)

    def kv_file_changed(self, report: m.KvFileWritten | m.KvFileLost) -> None:
        """Record a KV file in the index of the disk tier."""
        fingerprint = self.worker.info.fingerprint
        if isinstance(report, m.KvFileLost):
            self._kv_index.unstored(fingerprint, report.name, report.cause)
        else:
            self._kv_index.stored(fingerprint, *msgspec.structs.astuple(report))

    def tasks_orphaned(self, readers: Mapping[int, TaskReader], act: Activity) -> None:
        """Resume the tasks in another worker of the model."""
        self.model.recovery.add_orphans(readers, act)
        self._start_soon(self.model.recovery.resume_tasks)
