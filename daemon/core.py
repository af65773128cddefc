"""The daemon's state on its event loop, and the dispatch of requests to calls."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread
import structlog
from structlog.contextvars import bind_contextvars

from .. import __version__
from ..backends.errors import BackendError, InferdError, ShuttingDown
from ..backends.library import LLAMA_BUILD_NUMBER, LLAMA_COMMIT
from ..ipc.messages import (
    CREDIT_DEFAULT,
    CREDIT_MAX,
    PROTOCOL_VERSION,
    REQUESTS_MAX,
    TENSOR_BYTES_MAX,
    Limits,
    Right,
    ServerHello,
    Starts,
)
from ..ipc.server.buffers import Buffers
from ..ipc.server.connection import Request, ServerConnection
from ..ipc.server.descriptors import descriptors_max
from ..ipc.server.holdings import HoldingLimits
from ..ipc.server.request_bytes import RequestBytes
from ..ipc.server.server import Finish, Server
from ..ipc.superseding import NewestRequests
from ..scheduler.kv.store import scoped
from ..scheduler.settings import EngineSettings
from ..sessions import (
    DAY_S,
    AdmissionBounds,
    DormantLimits,
    Journal,
    Ledger,
    ModelSource,
    NamedStates,
    PlaceBounds,
    Session,
    SessionManager,
    StateFacts,
    StateLimits,
    StoredSession,
    Turn,
    Uploads,
    Usage,
    UsageLimits,
)
from ..sessions.media_store import MediaLimits, MediaStore
from ..wire.frames import FRAME_BYTES_MAX, NESTING_MAX, REPLY_BYTES_MAX
from .access.connections import Connections
from .components import Components
from .config.settings import Config
from .copy_streams import CopyStreams
from .freed_memory import FreedMemory
from .graph_table import Graph, GraphTable
from .jobs.jobs import JobLimits, Jobs
from .jobs.runner import JobRunner
from .kept_tensors import KeptTensors
from .logs.setup import logs
from .metrics.daemon_counters import DaemonCounters, reason_of
from .models.catalog import NamedModel
from .models.draft_gains import DraftGain, DraftGains
from .models.registry import DormantLease, Registry
from .models.similarity import EmbeddingComparer
from .models.specs import engine_settings
from .models.swap import Swaps
from .models.transfers import ModelExports, ModelImports, remove_unfinished
from .models.tuner import TuningPace
from .residency.machine import MachineMemory
from .residency.pressure import MemoryWatch, Pace
from .state_clock import StateClock
from .state_files import DRAFTS_FILE, JOBS_DIR, JOURNAL_FILE, MEDIA_DIR, STATES_FILE

log = structlog.get_logger()
ipc_log = structlog.get_logger(logger_name="ipc")
CallTable = dict[str, Callable[["Daemon", Request], Awaitable[Any]]]
ImmediateCallTable = dict[str, Callable[["Daemon", Request], Any]]
"""Calls that never wait."""
BeginTable = dict[str, Callable[["Daemon", Request, Callable[[Finish], None]], bool]]
"""The beginnings of calls without a task; see `Handler.begin_call`."""
NEWER_JOURNAL = "start the newer version again, or move the file away"
_RECORDING_S_MAX = 5.0
"""Maximum wait of a drain for the journal; the connections are closed only after it."""


def _is_refused_call(turn: Turn) -> bool:
    """Return whether the error of a turn's call counts as a refusal."""
    return turn.error is not None and turn.refused and reason_of(turn.error) is not None


def key_of(request: Request) -> tuple[int, str, UsageLimits]:
    """Return the user of a call, the gateway's key, and the key's limits."""
    connection = request.connection
    limits = UsageLimits()
    if connection.key_limits:
        limits = UsageLimits(*map(connection.key_limits.get, UsageLimits._fields))
    return connection.owner.user, connection.key, limits


class Daemon:
    """The owner of all state on the event loop: registry, sessions, graphs, connections."""

    def __init__(
        self,
        config: Config,
        group: anyio.abc.TaskGroup,
        instance: int,
        components: Components | None = None,
        machine: MachineMemory | None = None,
        pace: Pace | None = None,
        tuning_pace: TuningPace | None = None,
    ):
        self.components = components or Components()
        self.instance = instance
        self.started = time.monotonic()
        self.draining_since: float | None = None
        """The time at which it began to drain; None while it accepts requests."""
        self.socket_activated = False
        """Whether systemd owns the socket, and keeps it when this daemon has stopped."""
        self.stopping = anyio.Event()
        """Set to stop the daemon after a drain."""
        self.exit_status = 0
        """The exit status of the process after it has stopped."""
        self.metrics_at: Callable[[], str | None] = lambda: None
        """Returns the address at which metrics are served, if they are."""
        self.metrics_text: Callable[[], Awaitable[bytes]]
        """Returns all metrics in Prometheus's text format; set before the first connection."""
        self.counters = DaemonCounters()
        self.connections = Connections(self.counters.call_refused)
        access = self.connections.access
        bounds = AdmissionBounds(
            quota_of=access.quota_of, gateway_of=access.delegated_users.gateway_of
        )
        self.media_store = MediaStore(
            config.state_dir / MEDIA_DIR, note_state=partial(self.components.note, "media")
        )
        self.ledger = Ledger(
            bounds, settings=EngineSettings(**engine_settings(config)), media=self.media_store
        )
        self.usage = Usage(
            self.counters.name_of_source, access.own_user_names.name_of, _is_refused_call
        )
        self.ledger.turn_listeners += [self.counters, self.usage]
        self.graphs = GraphTable(self.new_handle, self.ledger.kept_bytes)
        self.kept_tensors = KeptTensors(self.new_handle)
        self.buffers = Buffers(self.new_handle, self._unmap_buffer)
        self.request_bytes = RequestBytes()
        self.request_bytes.on_freed = FreedMemory().note_freed
        machine = machine or MachineMemory()
        self.one_turn_sessions: set[Session] = set()
        """Sessions of one turn each, known only to the calls that made them."""
        self.registry = Registry(
            *(config, group, self.flush),
            request_bytes=self.request_bytes,
            open_content=lambda user, sha256: self.media_store.open_content(user, sha256),
            machine=machine,
            components=self.components,
            tuning_pace=tuning_pace,
            load_listeners=[self.counters],
            compare_sentence=EmbeddingComparer(
                self.ledger, self.new_handle, self.one_turn_sessions
            ).compare,
        )
        self.memory = MemoryWatch(
            machine,
            self.registry.reservations,
            self.registry.catalog.ready_workers,
            self.registry.loader.evict_idle,
            partial(self.components.note, "memory"),
            pace or Pace(),
        )
        self.draft_gains = DraftGains(config.state_dir / DRAFTS_FILE, self._draft_totals)
        self.clock = StateClock(config.state_dir)
        self.journal = Journal(
            *(config.state_dir / JOURNAL_FILE, self.journal_changed, self.clock.dates()),
            usage=self.usage,
        )
        self.jobs = Jobs(
            config.state_dir / JOBS_DIR,
            partial(self.components.note, "jobs"),
            self.clock.dates().now,
        )
        self.socket_path = str(config.socket)
        """The path of the socket on which it listens."""
        self.job_runner = JobRunner(
            self.jobs,
            lambda: self.socket_path,
            lambda: not self.draining,
            access.note_job_process,
        )
        self.copies = CopyStreams()
        self.sessions = SessionManager(
            self.ledger,
            self.new_handle,
            delete_files=self.registry.delete_session_files,
            journal=self.journal,
            copier_of=self.copies.copier_of,
            on_place_waited=self.counters.place_waited,
        )
        self.state_journal = Journal(
            *(config.state_dir / STATES_FILE, self.state_journal_changed, self.clock.dates()),
            facts=StateFacts,
        )
        self.states = NamedStates(
            self.state_journal,
            self.ledger.kept_bytes,
            self.new_handle,
            self.one_turn_sessions,
            self.registry.catalog.find_client,
            self.registry.delete_session_files,
            media=self.media_store,
        )
        self.swaps = Swaps(
            self.registry, self.sessions.live, config.swap_grace_s, self.counters.swap_ended
        )
        self.server = Server(
            self, self.connections, requests_max=REQUESTS_MAX, request_bytes=self.request_bytes
        )
        self.pending_restart: list[str] = []
        """Settings that were changed in the file and take effect after a restart."""
        self.calls: CallTable = {}
        self.immediate_calls: ImmediateCallTable = {}
        self.calls_without_task: BeginTable = {}
        self.model_exports, self.model_imports = ModelExports(), ModelImports()
        self.newest = NewestRequests()
        """The requests with `supersede`, by their owner and key."""
        self.uploads, self.copy_uploads = Uploads(), Uploads()
        self._handles = 0
        self._unflushed: set[ServerConnection] = set()
        self.apply_config(config)

    def apply_config(self, config: Config) -> None:
        """Apply the bounds and access rules of *config*. Sessions that exceed them stay open."""
        self.close_channels()  # the rules are checked before they are opened again
        self.config, bounds = config, self.ledger.bounds
        bounds.tasks_max = config.tasks_waiting_max
        bounds.tasks_owner_max = config.tasks_waiting_user_max
        bounds.prompt_tokens_max = config.prompt_tokens_waiting_max
        bounds.prompt_tokens_owner_max = config.prompt_tokens_waiting_user_max
        bounds.sessions_owner_max = config.sessions_user_max
        bounds.session_bytes_owner_max = config.session_bytes_user_max
        bounds.kept_sessions_owner_max = config.kept_sessions_user_max
        bounds.reasoning_max = config.reasoning_max
        self.kept_tensors.held.limits = HoldingLimits(
            user_max=config.kept_tensors_user_max,
            user_bytes_max=config.kept_tensor_bytes_user_max,
            bytes_max=config.kept_tensor_bytes_max,
        )
        self.buffers.held.limits = HoldingLimits(
            user_max=config.buffers_user_max,
            user_bytes_max=config.buffer_bytes_user_max,
            bytes_max=config.buffer_bytes_max,
        )
        self.usage.days_max = config.usage_days
        self.media_store.limits = MediaLimits(
            item_bytes_max=config.media_bytes_max,
            session_bytes_max=config.media_session_bytes_max,
            user_bytes_max=config.media_user_bytes_max,
            session_items_max=config.media_items_max,
            refuses_unread=config.media_on_swap == "refuse",
        )
        self.request_bytes.user_max = config.request_bytes_user_max
        self.request_bytes.total_max = config.request_bytes_max
        self.connections.apply_config(config)
        self.server.places.connections_max = config.connections_max
        self.server.descriptors.user_max = config.descriptors_user_max
        self.server.descriptors.total_max = descriptors_max(config.connections_max)
        self.sessions.set_limits(
            sessions_max=config.sessions_max,
            idle_timeout_s=config.idle_timeout_ms / 1000,
            dormant_limits=DormantLimits(
                sessions_max=config.dormant_sessions_max,
                seconds_max=config.dormant_days_max * DAY_S,
                bytes_max=config.dormant_bytes_max,
            ),
            place_bounds=PlaceBounds(
                waiting_max=config.sessions_waiting_max,
                waiting_user_max=config.sessions_waiting_user_max,
                yield_after_s=config.idle_yield_ms / 1000,
                reader_lag_s=config.reader_lag_ms / 1000,
                priority_strict=config.priority_strict,
            ),
        )
        self.jobs.limits = JobLimits(
            user_max=config.jobs_user_max,
            lines_max=config.jobs_lines_max,
            file_bytes_max=config.jobs_file_bytes_max,
            user_bytes_max=config.jobs_user_bytes_max,
            bytes_max=config.jobs_bytes_max,
            days_max=config.jobs_days_max,
            requests_max=config.jobs_requests_max,
        )
        self.jobs.wake.set()
        self.states.limits = StateLimits(
            states_max=config.states_max,
            states_user_max=config.states_user_max,
            bytes_max=config.states_bytes_max,
        )

    # The server's handler.

    def server_hello(self) -> ServerHello:
        """Return the daemon's first frame."""
        return ServerHello(
            protocol=PROTOCOL_VERSION,
            software=f"inferd/{__version__}",
            instance=self.instance,
            limits=Limits(
                frame_bytes_max=FRAME_BYTES_MAX,
                reply_bytes_max=REPLY_BYTES_MAX,
                nesting_max=NESTING_MAX,
                requests_max=REQUESTS_MAX,
                credit_default=CREDIT_DEFAULT,
                credit_max=CREDIT_MAX,
                tensor_bytes_max=TENSOR_BYTES_MAX,
                sessions_max=self.config.sessions_max,
                idle_timeout_ms=self.config.idle_timeout_ms,
            ),
            llama_build_number=LLAMA_BUILD_NUMBER,
            llama_commit=LLAMA_COMMIT,
        )

    async def run_call(self, request: Request) -> Any:
        """Run a call if its user has the right to it. Events logged meanwhile have the request's
        id.
        """
        if self.runs_at_once(request):
            return self.run_at_once(request)
        with self._recorded(request):
            try:
                result = await self.calls[request.call](self, request)
            except InferdError:
                await self._wait_usage(request)
                raise
            await self._wait_usage(request)
            return result

    async def _wait_usage(self, request: Request) -> None:
        """Wait, before the reply, until a kill no longer loses the usage of a request."""
        if request.row.computes:
            await self.journal.wait_usage()

    def runs_at_once(self, request: Request) -> bool:
        """Return whether the call never waits."""
        return request.call in self.immediate_calls

    def run_at_once(self, request: Request) -> Any:
        """Run a call that never waits; see `run_call`."""
        with self._recorded(request):
            return self.immediate_calls[request.call](self, request)

    @contextmanager
    def _recorded(self, request: Request) -> Iterator[None]:
        """Check the user's right to a call, which runs in the context, and log the call's end."""
        connection = request.connection.number
        number = f"{connection}.{request.number}"
        bind_contextvars(connection=connection, request=number)
        started_at = time.monotonic()
        try:
            self.connections.access.check_request(request)
            if request.row.begins_turns:
                self.check_usage(request)
            try:
                yield
            finally:
                if request.connection.wants_copies:
                    self.copies.send_changes(request.connection, request.number)
        except InferdError as exc:
            self.note_refusal(request, exc)
            raise
        if logs.is_logged("ipc", "debug"):
            seconds = round(time.monotonic() - started_at, 6)
            ipc_log.debug("call.done", call=request.call, seconds=seconds)

    def begin_call(self, request: Request, end: Callable[[Finish], None]) -> bool:
        """Begin a call that goes on without a task, if that is possible; see `Handler`."""
        return self.calls_without_task[request.call](self, request, end)

    def may_begin_call(self, request: Request) -> bool:
        """Return whether a call of this kind may go on without a task; see `Handler`."""
        return request.call in self.calls_without_task

    def note_refusal(self, request: Request, error: InferdError) -> None:
        """Count and log a call that has ended with an error."""
        self.counters.call_refused(request.call, error)
        if request.row.right is Right.USE and reason_of(error) is not None:
            owner, key = request.owner, request.connection.key
            self.usage.count_refusal(owner, key, self._model_of(request))
        cause = {"cause": error.message} if logs.texts else {}  # the message may quote a text
        ipc_log.debug("call.refused", call=request.call, error=error.name, **cause)

    def check_usage(self, request: Request) -> None:
        """Check that the usage of a call's user, and of its key, is below the limits. A turn that
        has begun is not cut off.

        :raises QuotaExceeded: a limit is reached.
        """
        user, key, key_limits = key_of(request)
        quota = self.ledger.bounds.quota_of(user)
        if request.row.starts is Starts.TOKEN:
            with suppress(InferdError):
                if self.session(request).active:
                    return
        self.usage.check_limits(user, quota.usage, key, key_limits, quota.bound(""))

    def _model_of(self, request: Request) -> ModelSource | None:
        """Return the model of the context or graph that a call names, if there is one."""
        named = request.params.__struct_fields__
        with suppress(InferdError):
            if "context" in named:
                return self.session(request).model
            if "graph" in named:
                return self.graph(request).lease
        return None

    def call_refused(self, call: str, error: InferdError) -> None:
        """Count a request that was refused before its call began."""
        self.counters.call_refused(call, error)

    def connection_ended(self, connection: ServerConnection) -> None:
        """Close a connection's sessions, tensors, graphs and leases."""
        self._unflushed.discard(connection)
        self.sessions.close_connection(connection)
        self.kept_tensors.close_connection(connection)
        self.buffers.close_connection(connection)
        self.graphs.close_graphs(connection)
        self.copies.remove_connection(connection)
        for transfers in (self.model_exports, self.model_imports):
            for transfer in transfers.of_owner(connection):
                self.registry.start_soon(transfers.end, transfer, connection)
        for uploads in (self.uploads, self.copy_uploads):
            for transfer in uploads.of_owner(connection):
                self.registry.start_soon(uploads.end, transfer, connection)
        if self.jobs.has_uploads(connection):
            self.registry.start_soon(self.jobs.end_uploads, connection)
        self.connections.remove_connection(connection)

    def call_failed(self, operation: str, error: Exception) -> None:
        """Count and log an unexpected failure of a call or connection."""
        self.counters.call_refused(operation, BackendError(repr(error)))
        log.error("call.failed", operation=operation, exc_info=error)

    # Writing.

    def emit(self, request: Request, event: Any) -> None:
        """Send an event together with the others of the same step."""
        request.emit(event, flush=False)
        self.flush_later(request.connection)

    def flush_later(self, connection: ServerConnection) -> None:
        """Write what is buffered for a connection with the next `flush`."""
        self._unflushed.add(connection)

    def flush(self) -> None:
        """Write the buffered events and answers; called after each frame of a worker's reports."""
        for connection in self._unflushed:
            connection.flush()
        self._unflushed.clear()

    def _unmap_buffer(self, buffer: int) -> None:
        for worker in self.registry.catalog.ready_workers():
            worker.client.unmap_buffer(buffer)

    # Handles.

    def new_handle(self) -> int:
        """Return a handle that neither this daemon nor an earlier one has used."""
        self._handles += 1
        return self.instance << 32 | self._handles

    def find_model(self, request: Request, name: str) -> NamedModel:
        """Return the model that *name* means to a request's user.

        :raises ModelNotFound: there is no such model that the user may use.
        """
        allowed = self.connections.access.models_of(request.connection)
        return self.registry.catalog.find(name, request.owner.user, allowed)

    def graph(self, request: Request) -> Graph:
        """Return the graph that a call names."""
        return self.graphs.get_graph(request.connection, request.params.graph)

    def all_sessions(self) -> list[Session]:
        """Return the open sessions, including those that exist for a single turn."""
        return [*self.sessions.live, *self.one_turn_sessions]

    def session(self, request: Request) -> Session:
        """Return the session that a call names."""
        return self.sessions.live.get_session(request.connection, request.params.context)

    def apply_log_levels(self) -> None:
        """Apply the log levels in force to the workers."""
        for worker in self.registry.catalog.ready_workers():
            worker.update_logging()

    @property
    def draining(self) -> bool:
        """Whether new work is refused."""
        return self.draining_since is not None

    def check_open(self) -> None:
        """Check that the daemon accepts new work.

        :raises ShuttingDown: the daemon drains.
        """
        if self.draining:
            raise ShuttingDown("the daemon is draining and accepts no new work")

    # Start and stop.

    async def restore(self) -> None:
        """Restore the sessions of earlier daemons as dormant ones."""
        started_at = time.monotonic()
        await anyio.to_thread.run_sync(remove_unfinished, self.config.models_dir)
        await self.media_store.open()
        self.states.restore_states(await self.state_journal.open_file())
        if self.state_journal.cause is None:
            shared = self.config.kv_share == "all"
            self.registry.kv_index.remove_unknown_states(
                {scoped(s.owner.user, s.kv_name, shared=shared) for s in self.states}
            )
        found = await self.journal.open_file()
        for stored in found:
            self.connections.access.own_user_names.add_name(
                stored.owner.user, stored.facts.on_behalf_of
            )
        self.clock.log_leap(len(found))
        self.sessions.restore_sessions(found, self.dormant_lease)
        journals = self.journal, self.state_journal
        if all(each.cause is None and each.set_aside is None for each in journals):
            await self.media_store.sweep()  # else sessions that were not read may have contents
        await self.jobs.open()
        for job in self.jobs.jobs(None):
            self.connections.access.own_user_names.add_name(
                job.row.owner.user, job.row.on_behalf_of
            )
        log.info(
            "sessions.restored",
            sessions=len(self.sessions.dormant),
            bytes=self.sessions.dormant.bytes,
            states=len(self.states),
            seconds=round(time.monotonic() - started_at, 3),
        )

    def journal_changed(self) -> None:
        """Report the journal's state: working, failing, refused, or new after a damaged one."""
        self._note_journal("journal", self.journal, "sessions may be missing")

    def state_journal_changed(self) -> None:
        """Report the state of the journal of named states."""
        self._note_journal("states", self.state_journal, "named states may be missing")

    def _draft_totals(self) -> dict[str, DraftGain]:
        """Return what drafts have brought each model since the start."""
        self.counters.read_workers(self.registry.catalog.known())
        return self.counters.draft_gains()

    def _note_journal(self, component: str, journal: Journal, missing: str) -> None:
        if journal.status["state"] == "refused":
            self.components.note(component, journal.cause, remedy=NEWER_JOURNAL)
        elif journal.cause is None and journal.set_aside is not None:
            self.components.note(
                component,
                f"a file was set aside as {journal.set_aside}: {journal.set_aside_cause}",
                missing=missing,
                remedy="check the disk if it was damaged; delete it when you no longer need it",
            )
        else:
            self.components.note(component, journal.cause)

    def dormant_lease(self, stored: StoredSession) -> ModelSource:
        """Return the model source of a stored session, for as long as the session is dormant."""
        name, user = stored.facts.model, stored.owner.user
        return DormantLease(name, partial(self.registry.catalog.find_client, name, user))

    def close_channels(self) -> None:
        """Close the clients' channels to graphs; their next calls come here."""
        for worker in self.registry.catalog.ready_workers():
            worker.client.close_channels()

    async def drain(self, grace_s: float) -> None:
        """Refuse waiting turns, and finish running ones and computations of tensors, for at most
        *grace_s*. A waiting turn that already has tokens counts as running.
        """
        if self.draining_since is None:
            self.draining_since = time.monotonic()
        error = ShuttingDown("the daemon is shutting down: the turn had not begun")
        self.registry.loader.refuse_requests(error)
        self.sessions.places.refuse_requests(
            ShuttingDown("the daemon is shutting down: no place for the session was free")
        )
        self.close_channels()
        for session in self.all_sessions():
            if session.state == "waiting" and session.turn is not None and not session.turn.tokens:
                session.cancel_turn(error)
        with anyio.move_on_after(grace_s):
            for session in [s for s in self.all_sessions() if s.active]:
                if session.turn is not None:
                    await session.turn.ended.wait()
            for session in self.all_sessions():
                if session.tensors.computation is not None:
                    await session.tensors.computation.wait()
            for worker in self.registry.catalog.ready_workers():
                for channel in tuple(worker.client.channels.values()):
                    await channel.ended.wait()
        with anyio.move_on_after(_RECORDING_S_MAX):
            for session in tuple(self.sessions.live):
                await session.wait_recorded()  # answers are sent before connections close
            await self.journal.wait_usage()
            await anyio.lowlevel.checkpoint()
