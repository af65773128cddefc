"""The Protocol by which a worker reports to the owner of its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from ...scheduler import messages as m
from ...scheduler.recording.recorder import Activity
from ...sessions.worker_client import TaskReader

if TYPE_CHECKING:
    from .process_client import ProcessClient
    from .worker import Worker


class WorkerListener(Protocol):
    """The owner of one worker's model. All methods are called on the daemon's event loop."""

    def reports_handled(self) -> None:
        """Write to the clients what a frame of reports has caused, at once and together."""

    def work_changed(self) -> None:
        """Deal out the cores again: a task has come or ended, or the model is loaded."""

    def load_progressed(self, fraction: float) -> None:
        """Report how much of the model is loaded."""

    def memory_estimated(self, worker: Worker, estimate: m.MemoryEstimate) -> None:
        """Decide on a load: answer with the worker's `reckon`, `proceed` or `refuse`, or later."""

    async def reserve_embedding_memory(self, client: ProcessClient) -> None:
        """Reserve memory for the embedding context, before the first embedding.

        :raises OutOfMemory: there is too little of it.
        """

    def embedding_context_created(self, worker: Worker) -> None:
        """Note that the reserved memory of the embedding context is in use now."""

    def kv_file_changed(self, worker: Worker, report: m.KvFileWritten | m.KvFileLost) -> None:
        """Record that a KV file was written, deleted, or could not be written."""

    def tasks_orphaned(self, readers: Mapping[int, TaskReader], act: Activity) -> None:
        """Resume the tasks of a process that died during *act*."""
