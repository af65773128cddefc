"""The client of one worker process: its tasks, and the queries that wait for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from itertools import islice
from typing import Any

import anyio
import msgspec

from ...backends import ENGINES, AdapterInfo, AdapterSpec, ModelInfo, ModelSpec, Rendering
from ...backends.base import PLAIN_RENDERING
from ...backends.errors import InferdError, WorkerCrashed
from ...backends.media import MarkedMedia, MediaContent, MediaTokens
from ...backends.recent_dict import RecentDict
from ...backends.tensors import NamedTensor
from ...ipc.server.request_bytes import RequestBytes, Reserve
from ...scheduler import messages as m
from ...scheduler.channels import channel_of
from ...scheduler.owner import Owner, Requester
from ...scheduler.rank_text import RankTokens
from ...scheduler.reasoning import EndOutcome
from ...sessions.worker_client import ChatTokens, TaskReader
from ..media.encoder import (
    EncoderEvent,
    MediaEncoder,
    unsupported_kind,
)
from ..media.wanted_media import SendCommand, WantedMedia
from .cores import ENCODING
from .deaths import Death, DeathPhase, Quarantine, Verdict, quarantine_error, suspect_error
from .graph_claim import GraphClaim
from .process import describe_exit
from .recovery import fail_readers, out_of_memory

ClientText = tuple[int, object]
"""The part of a query that a client supplied, with the client's user."""
NO_USER = m.NOBODY.owner.user
_BOUNDED = m.InputRequest | m.Lookup
"""Commands with much data, of which a client may cause any number."""
ENDED_CHANNELS_MAX = 1024
"""The ended channels whose owners are remembered, in case the process dies of their inputs."""
_NO_QUERY = 0
"""The query id of a command whose answer is not awaited."""


class WorkerChange(Enum):
    """An event of a worker without further facts."""

    WORK = auto()
    """A task was added or has ended, or the model is loaded."""
    QUIT_ORDERED = auto()
    """The process was ordered to quit, perhaps before it was started."""
    EMBEDDING_CONTEXT_CREATED = auto()
    """The embedding context now uses its reserved memory."""


_INPUT_VERDICTS = Verdict.REFUSE_INPUT, Verdict.REFUSE_TASK_FOR_MEMORY


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """The process has exited, with the status *code* if that is known. The receiver sets the
    worker's `error` or the client's `death`.
    """

    code: int | None


@dataclass(frozen=True, slots=True)
class TasksOrphaned:
    """The tasks of a process that has died have no worker."""

    readers: Mapping[int, TaskReader]
    death: Death


@dataclass(frozen=True, slots=True)
class TurnSetAside:
    """A turn's session has no place, so no worker has it; *info* describes its model."""

    reader: TaskReader
    info: ModelInfo


WorkerEvent = (
    WorkerChange
    | ProcessExited
    | TasksOrphaned
    | TurnSetAside
    | m.MemoryEstimate
    | m.Progress
    | m.ModelNotLoaded
    | m.Measured
    | m.KvFileWritten
    | m.KvFileLost
    | EncoderEvent
)
"""The events of a worker for the owner of its model. The answer to `MemoryEstimate` is, now or
later, a command `EstimateMemory` for another shape, `Proceed`, or a call of `Worker.refuse_load`.
"""


@dataclass(slots=True)
class ProcessChannel:
    """A channel of a client to the process. *note_use* gets the reports on it."""

    owner: Owner
    note_use: Callable[[m.ChannelUse], None]
    under_way: int = 0
    """The computations that were under way or waited at the last report."""
    ended: anyio.Event = field(default_factory=anyio.Event)


class _Receiver:
    """Receives the answer to a query, as a future does, and passes it on at once."""

    def __init__(self, receive: Callable[[Any], None]):
        self._receive, self._is_done = receive, False

    def done(self) -> bool:
        """Return whether it has the answer."""
        return self._is_done

    def set_result(self, answer: Any) -> None:
        """Pass the answer on."""
        self._is_done = True
        self._receive(answer)


class PendingQueries:
    """The queries without an answer by number, from 1 on. Lives on the daemon's event loop."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[ClientText, asyncio.Future[Any] | _Receiver]] = {}
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._pending)

    def new_number(self) -> int:
        """Return an unused number."""
        self._last_number += 1
        return self._last_number

    def add_query(self, number: int, text: ClientText) -> None:
        self._pending[number] = text, asyncio.get_running_loop().create_future()

    def receive_query(self, number: int, text: ClientText, receive: Callable[[Any], None]) -> None:
        """Call *receive* with the answer to a query, or with its error, unless it is forgotten."""

        def pass_on(answer: Any) -> None:
            del self._pending[number]
            receive(answer)

        self._pending[number] = text, _Receiver(pass_on)

    def forget_query(self, number: int) -> None:
        """Wait no more for the answer to a query."""
        self._pending.pop(number, None)

    async def wait_answer(self, number: int) -> Any:
        """Wait for the answer to a query.

        :raises InferdError: the query was refused.
        """
        future = self._pending[number][1]
        assert isinstance(future, asyncio.Future)
        try:
            answer = await future
        finally:
            del self._pending[number]
        if isinstance(answer, InferdError):
            raise answer
        return answer

    def answer_query(self, number: int, answer: Any) -> None:
        """Answer a query, or refuse it by an `InferdError`, unless its caller was cancelled."""
        pending = self._pending.get(number)
        if pending is not None and not pending[1].done():
            pending[1].set_result(answer)

    def refuse_all(self, error: Callable[[int, ClientText], InferdError]) -> None:
        """Refuse all queries; *error* returns the error for a number and its text."""
        for number, (text, _) in list(self._pending.items()):
            self.answer_query(number, error(number, text))


class ProcessClient:
    """The `WorkerClient` of the worker of *spec*. Lives on the daemon's event loop.

    *send_command* sends a command, *exited* is set once the process has exited, and *emit* gets the
    events. *flush* writes all output for clients. *reserve_embedding_memory* raises `OutOfMemory`
    if there is too little for embeddings.
    """

    def __init__(
        self,
        spec: ModelSpec,
        send_command: SendCommand,
        exited: anyio.Event,
        emit: Callable[[WorkerEvent], None],
        *,
        flush: Callable[[], None],
        request_bytes: RequestBytes,
        reserve_embedding_memory: Callable[[], Awaitable[None]],
    ):
        self.spec = spec
        self.wanted_media = WantedMedia(send_command, partial(emit, WorkerChange.WORK))
        self.tasks = WorkerTasks(emit, self.wanted_media)
        self.queries = PendingQueries()
        self.computations = GraphClaim(partial(emit, WorkerChange.WORK))
        """The computations of a graph."""
        self.quarantine = Quarantine()
        """Inputs that are refused because they have crashed a process."""
        self.adapters: dict[str, m.AdapterReport] = {}
        """By name, in loading order; an adapter with an error is not loaded."""
        self.model_info: ModelInfo | None = None
        """Set once the model is loaded."""
        self.successor: Callable[[Mapping[int, TaskReader]], None] | None = None
        """Receives the tasks of a process that was ordered to quit; without it they fail."""
        self.channels: dict[int, ProcessChannel] = {}
        """The channels of clients to a graph, by number."""
        self._ended_channels = RecentDict[int, Owner](ENDED_CHANNELS_MAX)
        """The owners of those that have ended, whose computations may still be under way."""
        self._last_channel = 0
        self._mapped: set[int] = set()
        """The buffers that the process has mapped."""
        self.quitting = False
        """The process was ordered to quit."""
        self.death: Death | None = None
        """Set once the process has died without that order."""
        self.embeds = False
        """Memory is reserved for the embedding context."""
        self.send_command, self._exited, self._emit = send_command, exited, emit
        self._flush, self._request_bytes = flush, request_bytes
        self._reserve_embedding_memory = reserve_embedding_memory

    @property
    def info(self) -> ModelInfo:
        """Facts about the model; only once it is loaded."""
        assert self.model_info is not None, "the model is not loaded yet"
        return self.model_info

    @property
    def work(self) -> int:
        """The number of tasks, or of a graph's computations, that are under way or wait."""
        return len(self.tasks) + len(self.computations) + self.channel_work

    @property
    def channel_work(self) -> int:
        """The number of computations in channels, by their last reports."""
        return sum([channel.under_way for channel in self.channels.values()])

    @property
    def claim(self) -> int | None:
        """The claim on the cores; see `cores.CoreUser.claim`."""
        return self.tasks.claim if self.tasks else self.computations.claim

    @property
    def users(self) -> set[int]:
        """The users whose claim it is."""
        return self.tasks.users | self.computations.users

    @property
    def encoder(self) -> MediaEncoder | None:
        """The model's encoder, if it reads images or sounds."""
        return self.wanted_media.encoder

    @encoder.setter
    def encoder(self, encoder: MediaEncoder | None) -> None:
        self.wanted_media.encoder = encoder

    # Tasks.

    def submit(self, spec: m.TaskSpec, reader: TaskReader) -> None:
        """Queue a task, which reports to *reader*."""
        begun = spec.resume_point is not None and spec.resume_point.started_s is not None
        refusal = None if begun else self.quarantine.refusal_of_task(self.spec.name, spec)
        if refusal is not None:
            reader.report(m.Failed(spec.id, refusal.to_wire()))
            return
        self.tasks.add_task(spec.id, reader)
        self.send_command(m.Submit(spec))
        self._emit(WorkerChange.WORK)
        if self._exited.is_set():
            self.settle()

    async def park(self, task_id: int) -> bool:
        """Preempt a task in favor of waiting tasks; return whether it is parked."""
        return bool(await self.query(lambda i: m.Park(i, task_id)))

    async def end_reasoning(self, task_id: int) -> EndOutcome:
        """End the present thought of a task."""
        return EndOutcome(await self.query(lambda i: m.EndReasoning(i, task_id)))

    def withdraw_tasks(self, *, waiting: bool = False) -> dict[int, TaskReader]:
        """Cancel the tasks, or only the waiting ones, in the process; return their readers."""
        readers = self.tasks.remove_tasks(waiting=waiting)
        for number in readers:
            self.send_command(m.Cancel(number))
        if readers:
            self.tasks.notify_changed()
        return readers

    def has_task(self, task_id: int, reader: TaskReader) -> bool:
        """Return whether the process has a task; see `TaskClient.has_task`."""
        return self.tasks.has_reader(task_id, reader)

    def withdraw_task(self, task_id: int) -> None:
        """Cancel a task in the process, without a report."""
        self.tasks.remove_task(task_id)
        self.send_command(m.Cancel(task_id))
        self.tasks.notify_changed()

    def keep_turn(self, reader: TaskReader) -> None:
        """Keep a turn that no process has; see `TaskClient.keep_turn`."""
        self._emit(TurnSetAside(reader, self.info))

    def texts_of(self, requester: Requester) -> ProcessTexts:
        """Return the client for texts of a user."""
        return ProcessTexts(self, requester)

    async def read_media(
        self, requester: Requester, contents: Sequence[MediaContent]
    ) -> list[MediaTokens]:
        """Return the tokens of a user's images and sounds; see `TextClient.read_media`."""
        if not contents:
            return []
        if self.encoder is None:
            error = unsupported_kind(self.spec.name, contents[0].kind)
            error.data["item"] = 0
            raise error
        return await self.encoder.read(requester, contents)

    async def compute_tensors(
        self,
        requester: Requester,
        inputs: Sequence[NamedTensor],
        wait_s: float = 0.0,
        *,
        alone: bool = False,
        use: m.BufferUse = m.NO_BUFFERS,
    ) -> m.ComputedTensors:
        """Return the outputs that a tensor model computes of *inputs*; see `WorkerClient`."""
        sent, parts, places = list(inputs), [*use.parts], [*use.places]
        self._map_buffers(use)
        is_graph = ENGINES[self.spec.backend].graphs
        alone = alone or self.quarantine.is_suspect(requester.owner.user)
        with self.computations.computing(requester) if is_graph else nullcontext():
            computed = await self.query(
                lambda i: m.ComputeTensors(i, sent, requester, wait_s, alone, parts, places),
                _content_of(sent, use),
                requester.owner.user,
            )
        self.tasks.made_progress = True
        return msgspec.convert(computed, m.ComputedTensors)

    def begin_computation(
        self,
        requester: Requester,
        inputs: Sequence[NamedTensor],
        wait_s: float,
        use: m.BufferUse,
        receive: Callable[[m.ComputedTensors | InferdError], None],
    ) -> Callable[[], None]:
        """Begin a computation of a graph, and call *receive* with its result or error, later and
        once. Return a function that cancels it.

        :raises InferdError: the inputs are quarantined, or a buffer was freed.
        :raises Busy: too much data of the user has not been sent.
        """
        number, sent, user = self.queries.new_number(), list(inputs), requester.owner.user
        content = _content_of(sent, use)
        alone = self.quarantine.is_suspect(user)
        command = m.ComputeTensors(
            number, sent, requester, wait_s, alone, [*use.parts], [*use.places]
        )
        self._check_sent(command, content, user)
        self._map_buffers(use)

        def pass_on(answer: Any) -> None:
            self.computations.end(requester)
            if not isinstance(answer, InferdError):
                self.tasks.made_progress = True
                answer = msgspec.convert(answer, m.ComputedTensors)
            receive(answer)

        def cancel() -> None:
            self.computations.end(requester)
            self.queries.forget_query(number)
            self.send_command(m.DropInput(number))

        self.computations.begin(requester)
        self.queries.receive_query(number, (user, content), pass_on)
        self.send_command(command)
        return cancel

    def _map_buffers(self, use: m.BufferUse) -> None:
        """Let the process map the buffers that it has not mapped yet.

        :raises NotFound: a buffer was freed.
        """
        for buffer, (size, new_descriptor) in use.buffers.items():
            if buffer not in self._mapped:
                descriptor = new_descriptor()
                self._mapped.add(buffer)
                self.send_command(m.MapBuffer(buffer, size), descriptor)

    def unmap_buffer(self, buffer: int) -> None:
        """Let the process unmap a buffer that was freed."""
        if buffer in self._mapped:
            self._mapped.remove(buffer)
            self.send_command(m.UnmapBuffer(buffer))

    # Channels of clients to a graph.

    def open_channel(
        self, opened: m.OpenChannel, descriptor: int, note_use: Callable[[m.ChannelUse], None]
    ) -> int:
        """Let the process serve the socket *descriptor*, which is closed once it was sent. Return
        the channel's number; *note_use* gets its reports.
        """
        self._last_channel += 1
        opened.channel = self._last_channel
        self.channels[opened.channel] = ProcessChannel(opened.owner, note_use)
        self.send_command(opened, descriptor)
        return opened.channel

    def close_channel(self, number: int, *, at_once: bool = False) -> None:
        """Close a channel once its computations have ended, or drop these."""
        if number in self.channels:
            self.send_command(m.CloseChannel(number, at_once))

    def close_channels(self) -> None:
        """Close all channels once their computations have ended."""
        for number in self.channels:
            self.close_channel(number)

    def note_channels(self, uses: Sequence[m.ChannelUse], busy_s: float = 0.0) -> None:
        """Take the reports on channels, in which computations were under way for *busy_s*."""
        channels = self.channels
        self.computations.count_busy(
            [
                Requester(channels[use.channel].owner, use.priority)
                for use in uses
                if use.channel in channels and (use.computed or use.under_way)
            ],
            busy_s,
            reports_follow=any(use.under_way for use in uses),
        )
        for use in uses:
            channel = channels.get(use.channel)
            if channel is None:
                continue
            self.tasks.made_progress = self.tasks.made_progress or use.computed > 0
            channel.under_way = 0 if use.closed else use.under_way
            if use.closed:
                del channels[use.channel]
                self._ended_channels[use.channel] = channel.owner
            channel.note_use(use)
            if use.closed:
                channel.ended.set()

    def _end_channels(self) -> None:
        """End the channels of the process, which has exited, and suspect those that computed."""
        death = self.death
        if death is not None and death.verdict in _INPUT_VERDICTS:
            for number in {*map(channel_of, death.suspects)}:
                channel = self.channels.get(number)
                owner = self._ended_channels.get(number) if channel is None else channel.owner
                if owner is not None:
                    self.quarantine.add_suspect(owner.user)
        self.note_channels([m.ChannelUse(number, closed=True) for number in self.channels])

    # KV states and memory.

    async def count_cached_tokens(
        self, owner: Owner, session: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> int:
        """Return how many of *tokens* are cached for a session now."""
        packed = m.pack_tokens(tokens)
        return int(await self.query(lambda i: m.Lookup(i, owner.user, session, adapters, packed)))

    async def delete_session_states(self, owner: Owner, session: str) -> None:
        """Delete a session's KV states in memory and on disk, and wait until it is done."""
        await self.query(lambda i: m.DeleteSessionStates(i, owner.user, session))

    def save_session(
        self, owner: Owner, session: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> None:
        """Request that a session's KV state is written to disk soon, without waiting."""
        self.send_command(
            m.PersistState(_NO_QUERY, owner.user, session, adapters, m.pack_tokens(tokens))
        )

    async def export_state(
        self, owner: Owner, session: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> str:
        """Ensure that a dormant session's KV state is on disk; return its file's name, if any."""
        packed = m.pack_tokens(tokens)
        query = self.query(lambda i: m.ExportState(i, owner.user, session, adapters, packed))
        return str(await query)

    async def save_named_state(
        self, owner: Owner, name: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> int:
        """Ensure that the KV state of a named state is on disk, under the engine's *name*; return
        the number of its tokens there.
        """
        packed = m.pack_tokens(tokens)
        query = self.query(lambda i: m.SaveNamedState(i, owner.user, name, adapters, packed))
        return int(await query)

    def prepare_named_state(
        self, owner: Owner, name: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> None:
        """Request that a named state's KV state is in memory and on disk soon, without waiting."""
        packed = m.pack_tokens(tokens)
        self.send_command(m.SaveNamedState(_NO_QUERY, owner.user, name, adapters, packed))

    def share_named_state(
        self,
        owner: Owner,
        name: str,
        adapters: tuple[str, ...],
        tokens: Sequence[int],
        for_user: int,
    ) -> None:
        """Request that a named state's KV state is in memory for another user, without waiting."""
        self.send_command(m.ShareKv(owner.user, name, adapters, m.pack_tokens(tokens), for_user))

    async def reserve_embedding_memory(self) -> None:
        """Reserve memory for the embedding context, unless that is done.

        :raises OutOfMemory: there is too little memory.
        """
        if not self.embeds:
            await self._reserve_embedding_memory()

    # The engine and its adapters.

    async def queue(self) -> list[m.QueueEntry]:
        """Return the running and the waiting tasks, in order."""
        return msgspec.convert(await self.query(m.Queue), list[m.QueueEntry])

    async def exchange_served(self, elsewhere: Mapping[int, int]) -> dict[int, int]:
        """Count tokens that other nodes have computed for users; return those computed here."""
        return dict(await self.query(lambda i: m.ExchangeServed(i, dict(elsewhere))))

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

    async def query(
        self, command: Callable[[int], m.Command], text: object = b"", user: int = NO_USER
    ) -> Any:
        """Send the command that *command* returns for the query's id, and wait for its answer.
        *text* is the part that a client of *user* supplied; it is quarantined if it crashes the
        process.

        :raises InferdError: the query was refused, or the process has exited.
        :raises Busy: too much data of the user has not been sent.
        """
        number = self.queries.new_number()
        sent = command(number)
        self._check_sent(sent, text, user)
        self.queries.add_query(number, (user, text))
        self.send_command(sent)
        if self._exited.is_set():
            self.settle()
        try:
            return await self.queries.wait_answer(number)
        except anyio.get_cancelled_exc_class():
            if isinstance(sent, m.InputRequest):
                self.send_command(m.DropInput(number))  # or cancelled inputs pile up there
            raise

    def _check_sent(self, command: m.Command, text: object, user: int) -> None:
        """Check that a command may be sent; see `query`."""
        refusal = self.quarantine.refusal_of_text(self.spec.name, user, text)
        if refusal is not None:
            raise refusal
        if isinstance(command, _BOUNDED):
            self._request_bytes.check_growth(self.user_of(command), 0, Reserve.RESULT)

    def user_of(self, command: m.Command) -> int:
        """Return the user whose data a command has, or `NO_USER`."""
        if isinstance(command, m.InputRequest):
            return command.requester.owner.user
        match command:
            case m.Submit(task):
                return task.owner.user
            case m.TaskMessage(task_id):
                return self.tasks.user_of(task_id, NO_USER)
        return int(getattr(command, "user", NO_USER))

    # The exit of the process.

    def settle(self, code: int | None = None) -> None:
        """Pass the tasks on or fail them, and refuse the open queries. The process has exited,
        with the status *code* if that is known.
        """
        readers, death = self.tasks.remove_tasks(), self.death
        self._end_channels()
        error = WorkerCrashed(
            f"the worker process of {self.spec.name!r} ended ({describe_exit(code)})",
            data={"model": self.spec.name},
        )
        if readers and self.quitting and self.successor is not None:
            self.successor(readers)
        elif readers and death is not None:
            self._emit(TasksOrphaned(readers, death))
        else:
            fail_readers(readers, error)
        self.queries.refuse_all(lambda number, text: self._refusal(number, text) or error)
        self._flush()

    def _refusal(self, number: int, text: ClientText) -> InferdError | None:
        """Return the error of the query that crashed the process, or may have; None for another.
        A query is only guilty if no other one was under way.
        """
        death, name = self.death, self.spec.name
        if (
            death is None
            or death.phase is not DeathPhase.PROMPT
            or number not in (suspects := death.suspects)
        ):
            return None
        match death.verdict:
            case Verdict.REFUSE_INPUT | Verdict.REFUSE_TASK_FOR_MEMORY if len(suspects) > 1:
                return suspect_error(name)
            case Verdict.REFUSE_INPUT if not death.activity.beside_text:
                self.quarantine.add_text(*text)
                return quarantine_error(name)
            case Verdict.REFUSE_TASK_FOR_MEMORY:
                return out_of_memory(name, "this text")
        return None


def _content_of(inputs: Sequence[NamedTensor], use: m.BufferUse) -> object:
    """Return the part of a computation that is quarantined if it crashes the process. The bytes of
    inputs in buffers are not known here.
    """
    return (inputs, use.parts) if use.buffers else inputs


class ProcessTexts:
    """The `TextClient` of one user, on the worker of *client*."""

    def __init__(self, client: ProcessClient, requester: Requester):
        self._client, self._requester = client, requester

    @property
    def info(self) -> ModelInfo:
        """Facts about the model."""
        return self._client.info

    async def read_media(self, contents: Sequence[MediaContent]) -> list[MediaTokens]:
        """Return the tokens of images and sounds; see `TextClient.read_media`."""
        return await self._client.read_media(self._requester, contents)

    async def tokenize(
        self,
        text: bytes,
        *,
        special: bool,
        bos: bool,
        turn: bool = False,
        cut_behind: int = -1,
        media: Sequence[MarkedMedia] = (),
    ) -> list[int]:
        """Return the token ids of *text*; see `TextClient.tokenize`."""
        marked = list(media)
        packed = await self._client.query(
            lambda i: m.Tokenize(i, text, special, bos, turn, self._requester, cut_behind, marked),
            text,
            self._requester.owner.user,
        )
        return m.unpack_tokens(packed)

    async def tokenize_parts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of *texts*; see `TextClient.tokenize_parts`."""
        parts = list(texts)
        found = await self._client.query(
            lambda i: m.TokenizeParts(i, parts, self._requester),
            parts,
            self._requester.owner.user,
        )
        return list(map(m.unpack_tokens, found))

    async def detokenize(self, tokens: Sequence[int]) -> bytes:
        """Return the text of *tokens*; see `TextClient.detokenize`."""
        text: bytes = await self._detokenize(tokens, apart=False)
        return text

    async def pieces_of(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the text of each of *tokens*; see `TextClient.pieces_of`."""
        pieces: list[bytes] = await self._detokenize(tokens, apart=True)
        return pieces

    async def _detokenize(self, tokens: Sequence[int], *, apart: bool) -> Any:
        packed = m.pack_tokens(tokens)
        return await self._client.query(
            lambda i: m.Detokenize(i, packed, self._requester, apart),
            packed,
            self._requester.owner.user,
        )

    async def rank_prompt(self, query: bytes, document: bytes, tokens_max: int) -> RankTokens:
        """Return the tokens of a query with a document; see `TextClient.rank_prompt`."""
        packed, shared, truncated = await self._client.query(
            lambda i: m.RankPrompt(i, query, document, tokens_max, self._requester),
            query + document,
            self._requester.owner.user,
        )
        return RankTokens(m.unpack_tokens(packed), shared, truncated)

    async def chat_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        said: str = "",
        answer: str = "",
        rendering: Rendering = PLAIN_RENDERING,
        *,
        turn: bool = False,
        answer_at: int = -1,
        forms: Sequence[dict[str, Any]] = (),
        cut_behind: int = -1,
        media: Sequence[MarkedMedia] = (),
    ) -> ChatTokens:
        """Return the rendered text with its tokens; see `TextClient.chat_prompt`."""
        rendered, others, marked = list(messages), list(forms), list(media)
        text, packed, appended, form = await self._client.query(
            lambda i: m.ChatPrompt(
                *(i, rendered, said, answer, rendering, turn, self._requester, answer_at, others),
                *(cut_behind, marked),
            ),
            (rendered, rendering),
            self._requester.owner.user,
        )
        return ChatTokens(text, m.unpack_tokens(packed), appended, form)


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


class WorkerTasks:
    """The readers by the ids of their tasks. Lives on the daemon's event loop. *wanted_media* has
    the embeddings for which tasks wait.
    """

    def __init__(self, emit: Callable[[WorkerEvent], None], wanted_media: WantedMedia):
        self._emit, self._wanted_media = emit, wanted_media
        self._readers: dict[int, TaskReader] = {}
        self.made_progress = False
        """Whether a task has received a token or has ended."""
        self._changed = anyio.Event()

    def __len__(self) -> int:
        return len(self._readers)

    def __contains__(self, task_id: int) -> bool:
        return task_id in self._readers

    @property
    def claim(self) -> int | None:
        """The claim on the cores; see `cores.CoreUser.claim`."""
        if not self._readers:
            return None
        waits = self._wanted_media.is_awaited_by
        computed = (r.spec.priority for n, r in self._readers.items() if not waits(n))
        return max(computed, default=ENCODING)

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
        if ends:
            self._wanted_media.end_task(report.task_id)
        if ends or isinstance(report, m.Tokens):
            self.made_progress = True
        reader.report(report)
        if ends:
            self.notify_changed()

    def want_media(self, report: m.MediaWanted, model: str) -> None:
        """Send embeddings for a task as soon as they are there, if the worker still has it."""
        reader = self._readers.get(report.task_id)
        if reader is not None:
            self._wanted_media.want(reader, report.digests, model)

    def has_reader(self, task_id: int, reader: TaskReader) -> bool:
        """Return whether the worker has a task, and reports to this very reader."""
        return self._readers.get(task_id) is reader

    def remove_task(self, task_id: int) -> None:
        del self._readers[task_id]
        self._wanted_media.end_task(task_id)

    def remove_tasks(self, *, waiting: bool = False) -> dict[int, TaskReader]:
        """Remove and return all tasks, or only those that the worker has not started."""
        removed = {n: r for n, r in self._readers.items() if not (waiting and r.begun)}
        for number in removed:
            self.remove_task(number)
        return removed

    def notify_changed(self) -> None:
        """Wake the callers of `changed`: a task or the process has ended."""
        self._emit(WorkerChange.WORK)
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def changed(self) -> None:
        """Wait until a task or the process has ended."""
        await self._changed.wait()
