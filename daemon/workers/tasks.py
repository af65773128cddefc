"""The tasks of one worker with their readers, and the interface by which a worker reports."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Protocol

import anyio

from ...backends import ModelInfo
from ...backends.errors import InferdError
from ...scheduler import messages as m
from ...sessions.worker_client import TaskReader
from .failures.deaths import Death

TaskReport = (
    m.Tokens
    | m.PromptLogprobs
    | m.SentenceEnded
    | m.ConstraintsDropped
    | m.StateChanged
    | m.Position
    | m.PromptProgress
    | m.Shifted
    | m.Embedded
    | m.Finished
    | m.Failed
)


class WorkerListener(Protocol):
    """The owner of one worker's model. All methods are called on the daemon's event loop."""

    def reports_handled(self) -> None:
        """Write all output that a frame of reports has caused to the clients, at once."""

    def count_unsent(self, user: int, size: int) -> None:
        """Count *size* bytes of a user's commands, which the socket does not accept yet. A negative
        number of bytes was accepted at last.
        """

    def check_unsent(self, user: int) -> None:
        """Check that a command with data of a user may be sent.

        :raises Busy: too much of the user's data has not been sent.
        """

    def quit_ordered(self) -> None:
        """Note that the process was ordered to quit, perhaps before it was started."""

    def work_changed(self) -> None:
        """Assign the cores again: a task was added or has ended, or the model is loaded."""

    def load_progressed(self, fraction: float) -> None:
        """Report the *fraction* of the model that is loaded."""

    def memory_estimated(self, estimate: m.MemoryEstimate) -> None:
        """Decide on the load, now or later: send `EstimateMemory` for another shape or `Proceed`,
        or call the worker's `refuse_load`.
        """

    async def reserve_embedding_memory(self) -> None:
        """Reserve memory for the embedding context, before the first embedding.

        :raises OutOfMemory: there is too little memory.
        """

    def embedding_context_created(self) -> None:
        """Note that the embedding context now uses its reserved memory."""

    def settings_measured(self, report: m.Measured) -> None:
        """Store the result of a measurement."""

    def kv_file_changed(self, report: m.KvFileWritten | m.KvFileLost) -> None:
        """Record that a KV file was written or deleted, or could not be written."""

    def add_evidence(self, death: Death) -> Death:
        """Return *death* with the evidence from outside the process."""

    def worker_died(self, death: Death, *, needed: bool) -> None:
        """Note the death of a process, which tasks or callers may have *needed*."""

    def load_error(self, death: Death, status: str) -> InferdError:
        """Return the error of the load during which a process has died with *status*."""

    def failed_load(self, error: InferdError) -> InferdError:
        """Return the *error* of a load with the sizes that are known."""

    def tasks_orphaned(self, readers: Mapping[int, TaskReader], death: Death) -> None:
        """Resume the tasks of a process that has died."""

    def turn_set_aside(self, reader: TaskReader, info: ModelInfo) -> None:
        """Keep a turn whose session has no place; *info* describes its model."""


class WorkerTasks:
    """The readers by the ids of their tasks. Lives on the daemon's event loop."""

    def __init__(self, listener: WorkerListener):
        self._listener = listener
        self._readers: dict[int, TaskReader] = {}
        self.made_progress = False
        """Whether a task has received a token or has ended."""
        self._changed = anyio.Event()

    def __len__(self) -> int:
        return len(self._readers)

    def __contains__(self, task_id: int) -> bool:
        return task_id in self._readers

    @property
    def priority_max(self) -> int | None:
        """The highest priority class among the tasks, or None if there are no tasks."""
        return max((reader.spec.priority for reader in self._readers.values()), default=None)

    @property
    def users(self) -> set[int]:
        """The users of the tasks."""
        return {reader.spec.owner.user for reader in self._readers.values()}

    def serves_others(self, user: int) -> bool:
        """Return whether any task belongs to another user."""
        return any(reader.spec.owner.user != user for reader in self._readers.values())

    def user_of(self, task_id: int, default: int) -> int:
        """Return the user of a task, or *default* if the worker no longer has it."""
        reader = self._readers.get(task_id)
        return default if reader is None else reader.spec.owner.user

    def requests(self, count_max: int) -> list[str]:
        """Return the ids of the requests of the tasks, *count_max* at most."""
        return [reader.spec.request for reader in islice(self._readers.values(), count_max)]

    def add_task(self, task_id: int, reader: TaskReader) -> None:
        """Add a task; the caller sends it to the worker."""
        self._readers[task_id] = reader

    def deliver_report(self, report: TaskReport) -> None:
        """Pass a report to the reader of its task, if the worker still has the task."""
        ends = isinstance(report, m.Finished | m.Failed)
        readers = self._readers
        reader = readers.pop(report.task_id, None) if ends else readers.get(report.task_id)
        if reader is None:
            return
        if ends or isinstance(report, m.Tokens):
            self.made_progress = True
        reader.report(report)
        if ends:
            self.notify_changed()

    def has_reader(self, task_id: int, reader: TaskReader) -> bool:
        """Return whether the worker has a task, and reports to this very reader."""
        return self._readers.get(task_id) is reader

    def remove_task(self, task_id: int) -> None:
        """Remove a task."""
        del self._readers[task_id]

    def remove_tasks(self, *, waiting: bool = False) -> dict[int, TaskReader]:
        """Remove and return all tasks, or only those that the worker has not started."""
        removed = {n: r for n, r in self._readers.items() if not (waiting and r.begun)}
        for number in removed:
            del self._readers[number]
        return removed

    def notify_changed(self) -> None:
        """Wake the callers of `changed`: a task or the process has ended."""
        self._listener.work_changed()
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def changed(self) -> None:
        """Wait until a task or the process has ended."""
        await self._changed.wait()
