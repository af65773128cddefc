"""The daemon's side of a worker process, from its start to its exit."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import msgspec
import structlog
from structlog.contextvars import clear_contextvars

from ...backends import ENGINES, ModelInfo, ModelSpec
from ...backends.errors import InferdError, LoadFailed, error_from_wire
from ...backends.memory import resident_bytes
from ...backends.tuning_choice import ModelTuning
from ...ipc.server.request_bytes import RequestBytes
from ...scheduler import messages as m
from ...scheduler.record import ActivityKind, MetricsPage, Recorder, create_record
from ...wire.frames import ANY_LENGTH, READ_BYTES, FrameReader, pack_frame
from ...wire.reading import read_until_end
from .cores import LOADING
from .deaths import Death, Quarantine
from .process import (
    BUSY_SHARE,
    HangDetector,
    SpawnedProcess,
    cpu_seconds,
    describe_exit,
    spawn_worker,
    stands_still,
    usage_of,
)
from .process_client import ProcessClient, ProcessExited, WorkerChange, WorkerEvent
from .worker_log import WorkerLog

HANG_S = 120.0
REQUESTS_LOGGED_MAX = 20
"""Requests that the log names when their process dies."""

log = structlog.get_logger()


class Worker:
    """One process with one model. Lives on the daemon's event loop; `run` owns the process.

    Tasks and queries go through its `client`. *emit* gets the events, *flush* is called after each
    frame of reports. *known_estimates* are earlier memory estimates of the same files.
    """

    def __init__(
        self,
        spec: ModelSpec,
        emit: Callable[[WorkerEvent], None],
        *,
        flush: Callable[[], None],
        request_bytes: RequestBytes,
        reserve_embedding_memory: Callable[[], Awaitable[None]],
        settings: dict[str, Any] | None = None,
        kv_dir: str = "",
        hang_s: float = HANG_S,
        known_estimates: Sequence[m.MemoryEstimate] = (),
    ):
        self.known_estimates = list(known_estimates)
        self.pid = 0
        self.progress = 0.0
        self.loaded = anyio.Event()
        """Set once the model is ready, or `error` is set."""
        self.error: InferdError | None = None
        self.exited = anyio.Event()
        """Set once the process has exited."""
        self.released = anyio.Event()
        """Set once its encoder has ended, too, and its memory counts as free."""
        self.died = False
        """The process has exited after its load, without an order to quit."""
        self.remains: SpawnedProcess | None = None
        """The process, if it could not be ended."""
        self.tuning: ModelTuning | None = None
        """The setting of the loaded model, if it has another one."""
        self.has_no_room_for_embeddings = False
        """The load has left out the memory for embeddings, because it fits in no shape."""
        self._settings, self._kv_dir, self._hang_s = settings or {}, kv_dir, hang_s
        self._emit = emit
        self._has_embedding_context = False
        self._sent_garbage = self._was_killed_as_hung = False
        self._log: WorkerLog | None = None
        self._record = create_record()
        self._recorder = Recorder(self._record)
        self.metrics_page = MetricsPage(self._record)
        """The engine's counters and gauges, as of now or as of its exit."""
        self._hang_detector = HangDetector(
            self._recorder,
            hang_s,
            self._is_awaited,
            self._kill_hung_process,
            cpu_s=lambda: cpu_seconds(self.pid),
        )
        self._link = WorkerLink(
            *(self._handle_report, flush, self._hang_detector.note_command),
            lambda command: self.client.user_of(command),
            request_bytes.add,
        )
        self.client = ProcessClient(
            *(spec, self._link.send_command, self.exited, emit),
            flush=flush,
            request_bytes=request_bytes,
            reserve_embedding_memory=reserve_embedding_memory,
        )

    @property
    def spec(self) -> ModelSpec:
        """The model as it was sent to the process, with its current name."""
        return self.client.spec

    def bind_model(self, name: str, quarantine: Quarantine) -> None:
        """Serve as the model *name* from now on, with that model's quarantine."""
        self.client.close_channels()  # their clients' graphs may be another model's now
        self.client.spec = msgspec.structs.replace(self.spec, name=name)
        self.client.quarantine = quarantine

    @property
    def info(self) -> ModelInfo:
        """Facts about the model, once it is loaded."""
        return self.client.info

    @property
    def claim(self) -> int | None:
        """The claim on the cores; see `cores.CoreUser.claim`."""
        if not self.loaded.is_set():
            return LOADING
        return None if self.unloading else self.client.claim

    @property
    def users(self) -> set[int]:
        """The users of its tasks, or of the computations of a graph."""
        return self.client.users

    @property
    def threads_max(self) -> int:
        """The threads that the configuration allows."""
        return max(self.spec.threads, int(self.spec.options.get("threads-batch", 0)))

    @property
    def pids(self) -> list[int]:
        """The processes of the model: its own, and that of its encoder."""
        encoder = self.client.encoder
        return [pid for pid in (self.pid, 0 if encoder is None else encoder.pid) if pid]

    @property
    def resident_bytes(self) -> int:
        """The memory that the processes of the model occupy now; 0 if there are none."""
        return sum(map(resident_bytes, self.pids))

    @property
    def silent_s(self) -> float:
        """The seconds that the current step or prompt has taken; 0 while the process is idle."""
        act = self._recorder.read_activity()
        return 0.0 if act.kind is ActivityKind.IDLE else max(0.0, time.monotonic() - act.at)

    @property
    def overdue(self) -> bool:
        """Whether the worker is hung and should have been replaced by now. `ServiceNotifier` then
        withholds the watchdog.
        """
        return self._hang_detector.overdue

    @property
    def unloading(self) -> bool:
        """Whether the process was ordered to quit, failed to load, or has exited."""
        return self.client.quitting or self.error is not None or self.exited.is_set()

    # Control of the process.

    def set_threads(self, threads: int, first: int) -> None:
        """Let the engine use *threads* from its next step on; see `cores.CoreUser.set_threads`."""
        self.client.send_command(m.SetThreads(threads, first))

    def update_logging(self) -> None:
        """Send the log levels in force to the process, or after its load if it still loads."""
        if self._log is None or not self.loaded.is_set() or self.unloading:
            return
        levels, changed = self._log.read_levels()
        if changed:
            self.client.send_command(levels)

    async def set_low_memory(self, *, on: bool) -> int:
        """Switch the low-memory mode, in which the worker keeps only the KV states of parked
        tasks; return the bytes that this frees.
        """
        return int(await self.client.query(lambda i: m.SetLowMemory(i, on)))

    def quit(self) -> None:
        """Order the process to free its model and exit; a load under way is aborted."""
        self.client.quitting = True
        self.client.send_command(m.Quit())
        self._emit(WorkerChange.QUIT_ORDERED)

    def refuse_load(self, error: InferdError) -> None:
        self.error = error
        self.loaded.set()
        self.quit()

    async def end_stalled_load(self, *, waits: Callable[[], bool]) -> bool:
        """Wait for the load's end. If it makes no progress for `hang_s`, except while it *waits*,
        end it and return True. Then its file does not answer, and perhaps the process cannot be
        killed. The CPU time of a graph's load is progress up to `hang_s` only.
        """
        is_graph, computes = ENGINES[self.spec.backend].graphs, False

        def signs() -> object:
            nonlocal computes
            if not self.pid or waits():
                return None
            if is_graph and cpu_seconds(self.pid) > self._hang_s:
                computes = True
                return self.progress
            # Idle threads wake at times, so only the CPU time of a computation counts.
            computed = cpu_seconds(self.pid) // (BUSY_SHARE * self._hang_s)
            return self.progress, computed, usage_of(self.pid)

        if not await stands_still(self.loaded, self._hang_s, signs):
            return False
        self.refuse_load(
            _computes_for_ever(self.spec, self._hang_s)
            if computes
            else LoadFailed(
                f"loading {self.spec.name!r} made no progress for {self._hang_s:g} s",
                hint="check that the model's file can be read, and load it again",
                data={"cause": "silent", "seconds": self._hang_s},
            )
        )
        self._kill_hung_process()
        self._link.end_exchange()
        return True

    # The process.

    async def run(self) -> None:
        """Start the process, load the model, and serve until the process has exited."""
        clear_contextvars()  # it serves more than the request that caused the load
        process, ours = None, None
        try:
            if self.unloading:
                return  # the load was cancelled before it began
            ours, theirs = socket.socketpair()
            with theirs:
                self._log = WorkerLog(lambda: {"model": self.spec.name, "pid": self.pid})
                process = await spawn_worker(theirs, self._record, self._log.writer)
            self._log.close_writer()
            self.pid = process.pid
            ours.setblocking(False)
            levels, _ = self._log.read_levels()
            known = self.known_estimates
            send_load(ours, m.LoadModel(self.spec, self._settings, self._kv_dir, known, levels))
            await self._link.exchange(ours)
        except BrokenPipeError:
            log.warning("worker.died_at_startup", model=self.spec.name, pid=self.pid)
        except msgspec.DecodeError as exc:
            self._sent_garbage = True
            log.error("worker.unreadable", model=self.spec.name, pid=self.pid, cause=str(exc))
        except LoadFailed as exc:
            self.error = exc
        except OSError as exc:
            self.error = LoadFailed(
                f"the worker process of {self.spec.name!r} did not start: {exc.strerror or exc}",
                hint="memory, processes or open files ran out: free some and try again",
            )
        finally:
            if ours is not None:
                ours.close()
            with anyio.CancelScope(shield=True):
                await self._wait_for_exit(process)

    def _handle_report(self, report: m.Report) -> None:
        client = self.client
        match report:
            case m.MediaWanted():
                client.tasks.want_media(report, self.spec.name)
            case m.TaskMessage():
                if isinstance(report, m.Embedded) and not self._has_embedding_context:
                    self._has_embedding_context = True
                    self._emit(WorkerChange.EMBEDDING_CONTEXT_CREATED)
                client.tasks.deliver_report(report)
            case m.CommandResult(number, value):
                client.queries.answer_query(number, value)
            case m.Refused(number, error):
                client.queries.answer_query(number, error_from_wire(error))
            case m.ChannelsUsed(uses, busy_s):
                client.note_channels(uses, busy_s)
                self._hang_detector.watch()
            case m.KvFileWritten() | m.KvFileLost() | m.MemoryEstimate() | m.Measured():
                self._emit(report)
            case m.Progress(fraction):
                self.progress = fraction
                self._emit(report)
            case m.Loaded(info, adapters, tuning):
                client.model_info, self.tuning = info, tuning
                client.adapters = {report.spec.name: report for report in adapters}
                if client.encoder is not None:
                    client.encoder.size_whole_max = info.media_size_max
                self.loaded.set()
                self.update_logging()
                self._emit(WorkerChange.WORK)
            case m.LogEvent():
                assert self._log is not None, "a process that reports was started"
                self._log.log_event(report.level, report.event, report.logger, report.fields)
            case m.ModelNotLoaded():
                self._emit(report)
                self.loaded.set()

    def _is_awaited(self) -> bool:
        client = self.client
        return bool(client.tasks or client.queries or client.channel_work or client.quitting)

    def _kill_hung_process(self) -> None:
        clear_contextvars()  # a timer has those of the request that set it
        log.error("worker.hung", model=self.spec.name, pid=self.pid, seconds=self._hang_s)
        self._was_killed_as_hung = True
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def evidence_of_death(self, code: int | None) -> Death:
        """Return the evidence that the process and its reports have left."""
        return Death(
            activity=self._recorder.read_activity(),
            loaded=self.client.model_info is not None,
            code=code,
            was_killed_as_hung=self._was_killed_as_hung,
            used_cpu=self._hang_detector.used_cpu,
            sent_garbage=self._sent_garbage,
            made_progress=self.client.tasks.made_progress,
        )

    async def _wait_for_exit(self, process: SpawnedProcess | None) -> None:
        """Wait until the process has exited, or kill it, and settle its tasks and queries."""
        code = None if process is None else await process.wait()
        self.remains = process if code is None else None
        if self._log is not None:
            self._log.close()
        self.exited.set()
        self._emit(ProcessExited(code))
        self.loaded.set()
        client = self.client
        if client.model_info is not None and client.death is not None:
            self.died = True
            log.warning(
                "worker.died",
                model=self.spec.name,
                pid=self.pid,
                cause=describe_exit(code),
                classified=client.death.cause.value,
                requests=client.tasks.requests(REQUESTS_LOGGED_MAX),
            )
        client.settle(code)
        client.tasks.notify_changed()
        self._hang_detector.stop()
        os.close(self._record)


def _computes_for_ever(spec: ModelSpec, hang_s: float) -> LoadFailed:
    return LoadFailed(
        f"loading {spec.name!r} has computed for more than {2 * hang_s:g} s",
        hint="export the graph with its constant parts computed, or raise worker-hang-timeout-s",
        data={"cause": "slow", "seconds": 2 * hang_s},
    )


def send_load(sock: socket.socket, load: m.LoadModel) -> None:
    """Send the first command, with the descriptors of a model that has no path."""
    frame = pack_frame([load])
    descriptors = [fd for fd in (load.spec.fd, load.spec.weights_fd) if fd >= 0]
    if descriptors:
        socket.send_fds(sock, [frame], descriptors)
    else:
        sock.send(frame)


class _Unsent:
    """A frame, or the rest of one, and the *descriptor* beside its first byte until that is sent;
    -1: none.
    """

    __slots__ = ("data", "descriptor")

    def __init__(self, data: bytes, descriptor: int = -1):
        self.data, self.descriptor = bytearray(data), descriptor

    def send_some(self, sock: socket.socket) -> bool:
        """Send as much as *sock* accepts, and return whether it was all.

        :raises BlockingIOError: it accepts nothing now.
        """
        if self.descriptor >= 0:
            sent = socket.send_fds(sock, [self.data], [self.descriptor])
            _close(self.descriptor)  # the message has it now
            self.descriptor = -1
        else:
            sent = sock.send(self.data)
        del self.data[:sent]
        return not self.data


def _frames_of(commands: Iterable[tuple[m.Command, int]]) -> Iterator[_Unsent]:
    """Yield the frames of *commands* in their order."""
    plain: list[m.Command] = []
    for command, descriptor in commands:
        if descriptor < 0:
            plain.append(command)
            continue
        if plain:
            yield _Unsent(pack_frame(plain))
            plain = []
        yield _Unsent(pack_frame([command]), descriptor)
    if plain:
        yield _Unsent(pack_frame(plain))


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


class WorkerLink:
    """Sends commands and reads reports on the daemon's event loop. Commands are queued until
    `exchange` has a socket and the socket is writable.

    *on_report* is called with each report, *on_frame* after the reports that arrived together.
    *on_sent* is called when the first of the next frame's commands is queued.

    *count_unsent* is called with the user of a command, which *user_of* returns, and its bytes, if
    the socket does not accept it at once; and again, with the negative number, once it does.
    """

    def __init__(
        self,
        on_report: Callable[[m.Report], None],
        on_frame: Callable[[], None],
        on_sent: Callable[[], None],
        user_of: Callable[[m.Command], int],
        count_unsent: Callable[[int, int], None],
    ):
        self._on_report, self._on_frame, self._on_sent = on_report, on_frame, on_sent
        self._user_of, self._report_unsent = user_of, count_unsent
        self._counted: Counter[int] = Counter()
        """The bytes that are counted as unsent, by user."""
        self._sock: socket.socket | None = None
        self._has_ended = False
        self._commands: list[tuple[m.Command, int]] = []
        """Each with its descriptor, or -1."""
        self._unsent: deque[_Unsent] = deque()
        self._writing = False
        self._decoder = msgspec.msgpack.Decoder(list[m.Report])
        self._frames = FrameReader(ANY_LENGTH)

    def send_command(self, command: m.Command, descriptor: int = -1) -> None:
        """Send a command, in one frame with others of the same loop iteration. One with a
        *descriptor* has a frame of its own, and the descriptor is closed once it was sent.
        """
        if self._has_ended:
            _close(descriptor)
            return
        if not self._commands and self._sock is not None:
            asyncio.get_running_loop().call_soon(self._write)
            self._on_sent()
        self._commands.append((command, descriptor))

    async def exchange(self, sock: socket.socket) -> None:
        """Write commands and read reports until the process closes its end.

        :raises msgspec.DecodeError: a report cannot be read.
        """
        self._sock = sock
        if self._commands:
            self._on_sent()
        self._write()
        try:
            await read_until_end(sock, partial(self._read_reports, sock))
        finally:
            self._sock, self._has_ended = None, True
            self._drop_unsent()
            self._count_sent()
            asyncio.get_running_loop().remove_writer(sock)

    def end_exchange(self) -> None:
        """End `exchange`, even if the process does not close its end."""
        if self._sock is not None:
            with suppress(OSError):  # the other end is already closed
                self._sock.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        """Send the queued commands in one frame, or the part of it that the socket accepts."""
        sock = self._sock
        if sock is None:
            return  # the process has exited
        commands, self._commands = self._commands, []
        self._unsent.extend(_frames_of(commands))
        try:
            while self._unsent:
                if self._unsent[0].send_some(sock):
                    self._unsent.popleft()
        except BlockingIOError:
            self._count_unsent(command for command, _ in commands)
            asyncio.get_running_loop().add_writer(sock, self._write)
            self._writing = True
        except OSError:
            self._drop_unsent()  # the process has exited, which the reader notices too
        if self._writing and not self._unsent:
            asyncio.get_running_loop().remove_writer(sock)
            self._writing = False
            self._count_sent()

    def _drop_unsent(self) -> None:
        for unsent in self._unsent:
            _close(unsent.descriptor)
        for _, descriptor in self._commands:
            _close(descriptor)
        self._unsent.clear()
        self._commands.clear()

    def _count_unsent(self, commands: Iterable[m.Command]) -> None:
        for command in commands:
            user, size = self._user_of(command), len(pack_frame(command))
            self._counted[user] += size
            self._report_unsent(user, size)

    def _count_sent(self) -> None:
        for user, size in self._counted.items():
            self._report_unsent(user, -size)
        self._counted.clear()

    def _read_reports(self, sock: socket.socket) -> bool:
        """Read once and pass the reports on; return False at the end of the stream.

        :raises BlockingIOError: nothing has arrived.
        """
        try:
            data = sock.recv(READ_BYTES)
        except BlockingIOError:
            raise
        except OSError:
            return False
        framed = False
        for frame in self._frames.read_frames(data):
            framed = True
            for report in self._decoder.decode(frame):
                self._on_report(report)
        if framed:
            self._on_frame()
        return bool(data)
