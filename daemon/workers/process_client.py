"""The client of one worker process: its tasks, and the queries that wait for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import msgspec

from ...backends import AdapterInfo, AdapterSpec, ModelInfo, ModelSpec, Rendering
from ...backends.base import PLAIN_RENDERING
from ...backends.errors import InferdError, WorkerCrashed
from ...scheduler import messages as m
from ...scheduler.priority import Requester
from ...scheduler.recording.recorder import Activity, ActivityKind, Recorder
from ...sessions.worker_client import TaskReader
from .recovery import Quarantine, fail_readers, quarantine_error
from .tasks import WorkerListener, WorkerTasks
from .worker_process import describe_exit

_NO_QUERY = 0
"""The query id of a command whose answer is not awaited."""


class PendingQueries:
    """The queries without an answer by number, from 1 on, each with the part that a client
    supplied. Lives on the daemon's event loop.
    """

    def __init__(self) -> None:
        self._pending: dict[int, tuple[bytes, asyncio.Future[Any]]] = {}
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._pending)

    def add_query(self, data: bytes) -> int:
        """Add a query and return its number."""
        self._last_number += 1
        self._pending[self._last_number] = data, asyncio.get_running_loop().create_future()
        return self._last_number

    async def wait_answer(self, number: int) -> Any:
        """Wait for the answer to a query.

        :raises InferdError: the query was refused.
        """
        try:
            answer = await self._pending[number][1]
        finally:
            del self._pending[number]
        if isinstance(answer, InferdError):
            raise answer
        return answer

    def answer_query(self, number: int, answer: Any) -> None:
        """Answer a query, or refuse it by an `InferdError`, unless its caller was cancelled."""
        _, future = self._pending.get(number, (b"", None))
        if future is not None and not future.done():
            future.set_result(answer)

    def refuse_all(self, error: Callable[[int, bytes], InferdError]) -> None:
        """Refuse all queries; *error* returns the error for a number and its data."""
        for number, (data, _) in list(self._pending.items()):
            self.answer_query(number, error(number, data))


class ProcessClient:
    """The `WorkerClient` of the worker of *spec*. Lives on the daemon's event loop.

    *send_command* sends a command, *recorder* reads the activity of the process, *exited* is set
    once it has exited.
    """

    def __init__(
        self,
        spec: ModelSpec,
        listener: WorkerListener,
        send_command: Callable[[m.Command], None],
        recorder: Recorder,
        exited: anyio.Event,
    ):
        self.spec = spec
        self.tasks = WorkerTasks(listener)
        self.queries = PendingQueries()
        self.quarantine = Quarantine()
        """Inputs that are refused because they have crashed a process."""
        self.adapters: dict[str, m.AdapterReport] = {}
        """By name, in loading order; an adapter with an error is not loaded."""
        self.model_info: ModelInfo | None = None
        """Set once the model is loaded."""
        self.successor: Callable[[Mapping[int, TaskReader]], None] | None = None
        """Receives the tasks of a process that was ordered to quit; without it they fail."""
        self.quitting = False
        """The process was ordered to quit."""
        self.embeds = False
        """Memory is reserved for the embedding context."""
        self._listener, self.send_command = listener, send_command
        self._recorder, self._exited = recorder, exited

    @property
    def info(self) -> ModelInfo:
        """Facts about the model; only once it is loaded."""
        assert self.model_info is not None, "the model is not loaded yet"
        return self.model_info

    # Tasks.

    def submit(self, spec: m.TaskSpec, reader: TaskReader) -> None:
        """Queue a task, which reports to *reader*."""
        if spec.tokens in self.quarantine:
            reader.report(m.Failed(spec.id, quarantine_error(self.spec.name).to_wire()))
            return
        self.tasks.add_task(spec.id, reader)
        self.send_command(m.Submit(spec))
        self._listener.work_changed()
        if self._exited.is_set():
            self.settle()

    async def park(self, task_id: int) -> bool:
        """Preempt a task in favor of waiting tasks; return whether it is parked."""
        return bool(await self.query(lambda i: m.Park(i, task_id)))

    def withdraw_tasks(self, *, waiting: bool = False) -> dict[int, TaskReader]:
        """Cancel the tasks, or only the waiting ones, in the process; return their readers."""
        readers = self.tasks.remove_tasks(waiting=waiting)
        for number in readers:
            self.send_command(m.Cancel(number))
        if readers:
            self.tasks.notify_changed()
        return readers

    def texts_of(self, requester: Requester) -> ProcessTexts:
        """Return the client for texts of a user."""
        return ProcessTexts(self, requester)

    # KV states and memory.

    async def count_cached_tokens(
        self, owner: int, session: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> int:
        """Return how many of *tokens* are cached for a session now."""
        packed = m.pack_tokens(tokens)
        return int(await self.query(lambda i: m.Lookup(i, owner, session, adapters, packed)))

    async def delete_session_states(self, owner: int, session: str) -> None:
        """Delete a session's KV states in memory and on disk, and wait until it is done."""
        await self.query(lambda i: m.DeleteSessionStates(i, owner, session))

    def save_session(
        self, owner: int, session: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> None:
        """Request that a session's KV state is written to disk soon, without waiting."""
        self.send_command(
            m.PersistState(_NO_QUERY, owner, session, adapters, m.pack_tokens(tokens))
        )

    async def reserve_embedding_memory(self) -> None:
        """Reserve memory for the embedding context, unless that is done.

        :raises OutOfMemory: there is too little memory.
        """
        if not self.embeds:
            await self._listener.reserve_embedding_memory()

    # The engine and its adapters.

    async def queue(self) -> list[m.QueueEntry]:
        """Return the running and the waiting tasks, in order."""
        return msgspec.convert(await self.query(m.Queue), list[m.QueueEntry])

    async def statistics(self) -> dict[str, Any]:
        """Return the engine's counters."""
        return dict(await self.query(m.Stats))

    async def add_adapter(self, spec: AdapterSpec) -> m.AdapterReport:
        """Load an adapter into the process."""
        answer = await self.query(lambda i: m.AddAdapter(i, spec))
        report = m.AdapterReport(spec=spec, info=msgspec.convert(answer, AdapterInfo))
        self.adapters[spec.name] = report
        return report

    async def remove_adapter(self, adapter_id: str, *, force: bool) -> None:
        """Unload an adapter; with *force* the tasks that use it fail."""
        await self.query(lambda i: m.RemoveAdapter(i, adapter_id, force))

    async def query(self, command: Callable[[int], m.Command], data: bytes = b"") -> Any:
        """Send the command that *command* returns for the query's id, and wait for its answer.
        *data* is the part that a client supplied: it is quarantined if it crashes the process.

        :raises InferdError: the query was refused, or the process has exited.
        """
        if data in self.quarantine:
            raise quarantine_error(self.spec.name)
        number = self.queries.add_query(data)
        self.send_command(command(number))
        if self._exited.is_set():
            self.settle()
        return await self.queries.wait_answer(number)

    # The exit of the process.

    def settle(self, code: int | None = None) -> None:
        """Pass the tasks on or fail them, and refuse the open queries. The process has exited,
        with the status *code* if that is known.
        """
        readers, act = self.tasks.remove_tasks(), self._recorder.read_activity()
        error = WorkerCrashed(
            f"the worker process of {self.spec.name!r} ended ({describe_exit(code)})",
            data={"model": self.spec.name},
        )
        if readers and self.quitting and self.successor is not None:
            self.successor(readers)
        elif readers and not self.quitting:
            self._listener.tasks_orphaned(readers, act)
        else:
            fail_readers(readers, error)
        self.queries.refuse_all(lambda number, data: self._refusal(act, number, data) or error)
        self._listener.reports_handled()

    def _refusal(self, act: Activity, number: int, data: bytes) -> InferdError | None:
        """Return the error of the query that crashed the process; None for another query."""
        if act.kind is not ActivityKind.PROMPT or number not in act.ids:
            return None
        self.quarantine.add_input(data)
        return quarantine_error(self.spec.name)


class ProcessTexts:
    """The `TextClient` of one user, on the worker of *client*."""

    def __init__(self, client: ProcessClient, requester: Requester):
        self._client, self._requester = client, requester

    @property
    def info(self) -> ModelInfo:
        """Facts about the model."""
        return self._client.info

    async def tokenize(
        self, text: bytes, *, special: bool, bos: bool, turn: bool = False
    ) -> list[int]:
        """Return the token ids of *text*; the next step waits briefly for the task of a *turn*."""
        packed = await self._client.query(
            lambda i: m.Tokenize(i, text, special, bos, turn, self._requester), text
        )
        return m.unpack_tokens(packed)

    async def detokenize(self, tokens: Sequence[int]) -> bytes:
        """Return the text of *tokens*."""
        packed = m.pack_tokens(tokens)
        return bytes(await self._client.query(lambda i: m.Detokenize(i, packed, self._requester)))

    async def chat_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        said: str = "",
        answer: str = "",
        rendering: Rendering = PLAIN_RENDERING,
        *,
        turn: bool = False,
    ) -> tuple[str, list[int], bool]:
        """Return the rendered text, its tokens, and whether they only append to *said*."""
        rendered = list(messages)
        text, packed, appended = await self._client.query(
            lambda i: m.ChatPrompt(i, rendered, said, answer, rendering, turn, self._requester),
            msgspec.msgpack.encode((rendered, rendering)),
        )
        return text, m.unpack_tokens(packed), appended
