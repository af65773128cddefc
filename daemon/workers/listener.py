"""The Protocol by which a worker reports to the owner of its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ...scheduler import messages as m
from ...scheduler.recording.recorder import Activity
from ...sessions.worker_client import TaskReader


class WorkerListener(Protocol):
    """The owner of one worker's model. All methods are called on the daemon's event loop."""

    def reports_handled(self) -> None:
        """Write all output that a frame of reports has caused to the clients, at once."""

    def work_changed(self) -> None:
        """Assign the cores again: a task was added or has ended, or the model is loaded."""

    def load_progressed(self, fraction: float) -> None:
        """Report the *fraction* of the model that is loaded."""

    def memory_estimated(self, estimate: m.MemoryEstimate) -> None:
        """Decide on the load, now or later, with the worker's `estimate_memory`, `allow_load` or
        `refuse_load`.
        """

    async def reserve_embedding_memory(self) -> None:
        """Reserve memory for the embedding context, before the first embedding.

        :raises OutOfMemory: there is too little memory.
        """

    def embedding_context_created(self) -> None:
        """Note that the embedding context now uses its reserved memory."""

    def kv_file_changed(self, report: m.KvFileWritten | m.KvFileLost) -> None:
        """Record that a KV file was written or deleted, or could not be written."""

    def tasks_orphaned(self, readers: Mapping[int, TaskReader], act: Activity) -> None:
        """Resume the tasks of a process that died during *act*."""
