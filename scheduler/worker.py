"""A worker process: one model, and one engine, whose thread owns both.

`python -m inferd.scheduler.worker BUILD_ID SOCKET_FD PARENT_PID RECORD_FD` starts it. Other
threads work on long texts, wait for chat templates, read and write KV files, and end a slice of the
idle measurement as soon as the engine gets work. Commands and reports go through a socket pair. The
threads in which a graph computes read and send there, too: whichever has the turn.

It belongs to the daemon: it ignores Ctrl-C and SIGTERM, dies with its parent, and is the first
process that the kernel kills if memory runs out.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import resource
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import cast

import msgspec

from ..backends import (
    ENGINES,
    AdapterSpec,
    Chunk,
    GraphModel,
    InferdError,
    LanguageModel,
    MemoryEstimator,
    ModelSpec,
    estimate_memory,
    load_model,
)
from ..backends.child_process import bind_to_parent
from ..backends.errors import load_cancelled
from ..backends.fd_frames import read_with_descriptors
from ..backends.library import library_log
from ..backends.memory import return_large_blocks
from ..wire.frames import ANY_LENGTH, READ_BYTES, FrameReader, pack_frame
from ..wire.spinning import Spinning
from . import messages as m
from .build import EXIT_OTHER_BUILD, build_id
from .call_thread import CallResult
from .channels import Channels
from .engine.engine import Engine
from .engine.reporter import set_library_level, write_library_line
from .engine.standby import Standby
from .engine.tensor_engine import Lane, TensorEngine
from .kv.disk import KvFiles
from .settings import EngineSettings

_FDS_MAX = 16
"""Descriptors that come with one read."""
READS_MAX = 512
"""Reads at a time, 8 MiB; a daemon that sends more than that waits until the engine has handled it.
"""


class LinkClosed(Exception):
    """The daemon has closed its end, or has exited."""


class SocketLink:
    """Receives lists of commands, sends lists of reports. A slow daemon does not block it: data
    that the socket does not accept waits in `_unsent`, bounded by the credit of the tasks.
    """

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._sock = sock
        self._poll = select.epoll()  # other threads may change what it watches meanwhile
        self._poll.register(sock, select.EPOLLIN)
        self._fileno, self._others = sock.fileno(), list[int]()
        self._polled = select.EPOLLIN
        """The events for which the socket is polled."""
        self.channels: Channels | None = None
        """Those of a graph."""
        self.turn: threading.Lock | None = None
        """Released while the owner's thread waits; then another one may use the link."""
        self._waits_until = math.inf
        self._woken = -1
        self._resting: select.epoll | None = None
        """Watches what ends a rest: results of lanes, and `wake`."""
        self._rests_until = 0.0
        self._is_resting = False
        self._spinning = Spinning()
        self.may_spin = False
        """Whether short waits may spin: no thread computes, so that a core is free."""
        self._reads = 0
        """How often commands were received, by any thread."""
        self._decoder = msgspec.msgpack.Decoder(list[m.Command])
        self._frames = FrameReader(ANY_LENGTH)
        self._unsent = bytearray()
        self.descriptors: list[int] = []

    def receive_commands(self, timeout_s: float | None) -> list[m.Command]:
        """Return the commands that have arrived; wait up to *timeout_s* for some, or without limit
        if it is None.

        :raises LinkClosed: the other end is closed.
        """
        commands: list[m.Command] = []
        ready = self._wait(timeout_s)
        self._reads += 1
        if self.channels is not None:  # first: the daemon may close and open some
            commands += self.channels.read_round(ready)
        for fileno, _ in ready:
            if fileno == self._fileno:
                for _ in range(READS_MAX):
                    if not self._read(commands):
                        break
            elif fileno == self._woken:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fileno)
        if self._unsent:
            self.flush()
        return commands

    def has_arrived(self) -> bool:
        """Return whether `receive_commands` would return at once."""
        has_backlog = self.channels is not None and self.channels.has_backlog
        return has_backlog or bool(self._poll.poll(0))

    def send_reports(self, reports: Sequence[m.Report]) -> None:
        """Send one frame, or keep the rest that the socket does not accept for the next call. The
        answers to channels are sent there.
        """
        if self.channels is not None:
            reports = self.channels.take_reports(reports)
        if reports:
            self._unsent += pack_frame(reports)
            self.flush()

    def flush(self) -> None:
        """Send as much as the socket accepts now."""
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as exc:
            raise LinkClosed from exc

    def drain(self, timeout_s: float) -> None:
        """Send everything; wait up to *timeout_s* for the daemon to read it."""
        writable = select.poll()
        writable.register(self._sock, select.POLLOUT)
        while self._unsent and writable.poll(1000 * timeout_s):
            self.flush()

    @property
    def filenos(self) -> list[int]:
        """The descriptors at which `receive_commands` returns, without those of channels."""
        return [self._fileno, *self._others]

    @property
    def watched(self) -> list[tuple[int, int]]:
        """The descriptors at which `receive_commands` returns now, with their events."""
        channels = () if self.channels is None else self.channels.watched
        return [*((fileno, select.POLLIN) for fileno in self.filenos), *channels]

    def wake_on(self, fileno: int) -> None:
        """Have `receive_commands` also return when the descriptor *fileno* is readable."""
        self._poll.register(fileno, select.EPOLLIN)
        self._others.append(fileno)

    def share(self, turn: threading.Lock) -> None:
        """Let other threads use the link while the owner's thread waits, which has the *turn*."""
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.wake_on(self._woken)
        self._resting = select.epoll()
        for fileno in self._others:
            self._resting.register(fileno, select.EPOLLIN)
        self.turn = turn

    @property
    def rests(self) -> bool:
        """Whether the owner's thread leaves the commands that arrive to the other threads, or has
        not noticed yet that this is over.
        """
        return self._is_resting or self._rests_until > time.monotonic()

    def rest_for(self, rest_s: float) -> None:
        """Let the owner's thread leave commands to the other threads for *rest_s* from now on; 0
        ends this.
        """
        if rest_s and not self._unsent and not (self.channels and self.channels.has_unsent):
            self._rests_until = time.monotonic() + rest_s
        elif self._rests_until:
            self._rests_until = 0.0
            if self._is_resting:
                self.wake_now()

    def due_in(self, due_s: float | None, most_s: float = math.inf) -> float:
        """Return *due_s*, or fewer seconds if a channel is due before, and at most *most_s*."""
        channels_s = None if self.channels is None else self.channels.due_in()
        return min([most_s, *(one for one in (due_s, channels_s) if one is not None)])

    def wake(self, due_s: float | None) -> None:
        """Wake the owner's thread if it waits for longer than *due_s*, or has to send the rest of
        the reports.
        """
        is_late = time.monotonic() + self.due_in(due_s) < self._waits_until - WAKE_S
        if is_late or self._unsent:
            self.wake_now()

    def wake_now(self) -> None:
        """Wake the owner's thread, or let its next wait end at once."""
        os.eventfd_write(self._woken, 1)

    def new_channels(self, outputs: Iterable[str]) -> Channels:
        """Return the channels of a graph, whose outputs have these names, for `channels`."""
        return Channels(self._poll, self._send_now, outputs)

    def _send_now(self, reports: list[m.Report]) -> None:
        self._unsent += pack_frame(reports)
        self.flush()

    def _wait(self, timeout_s: float | None) -> list[tuple[int, int]]:
        """Return the descriptors that are ready, with their events."""
        if self.channels is not None and (due_s := self.channels.due_in()) is not None:
            timeout_s = due_s if timeout_s is None else min(due_s, timeout_s)
        while True:
            wanted = select.EPOLLIN | select.EPOLLOUT if self._unsent else select.EPOLLIN
            if wanted != self._polled:
                self._polled = wanted
                self._poll.modify(self._sock, wanted)
            found = self._poll_for(timeout_s)
            if timeout_s is not None or any(
                event != select.EPOLLOUT or fileno != self._fileno for fileno, event in found
            ):
                return found
            self.flush()

    def _poll_for(self, timeout_s: float | None) -> list[tuple[int, int]]:
        if self.turn is None or timeout_s == 0:
            return self._poll.poll(timeout_s)
        self._waits_until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._is_resting = self._rests_until > time.monotonic()  # others may end that from here on
        reads = self._reads
        self.turn.release()
        try:
            if self._is_resting:
                self._rest()
                if timeout_s is not None:
                    timeout_s = max(0.0, self._waits_until - time.monotonic())
            if self.may_spin:
                found = self._spinning.poll(self._poll.poll, timeout_s)
            else:
                found = self._poll.poll(timeout_s)
        finally:
            self.turn.acquire()
            self._waits_until = -math.inf
        if self._reads != reads:  # a descriptor may be closed by now, or another channel's
            found = self._poll.poll(0)
        return found

    def _rest(self) -> None:
        assert self._resting is not None, "the link is shared"
        while (rest_s := min(self._rests_until, self._waits_until) - time.monotonic()) > 0:
            if self._resting.poll(rest_s):
                break
        self._is_resting = False

    def _read(self, commands: list[m.Command]) -> bool:
        """Read once and add the complete *commands*; return whether there may be more."""
        try:
            data, descriptors, _ = read_with_descriptors(self._sock, READ_BYTES, _FDS_MAX)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise LinkClosed from exc
        self.descriptors.extend(descriptors)
        if not data:
            raise LinkClosed
        for frame in self._frames.read_frames(data):
            received = self._decoder.decode(frame)
            for command in received:
                if isinstance(command, m.MediaReady | m.MapBuffer | m.OpenChannel):
                    command.fd = self.descriptors.pop(0) if self.descriptors else -1
                if isinstance(command, m.OpenChannel | m.CloseChannel):
                    commands += self._change_channel(command)
                else:
                    commands.append(command)
        if not self._frames.pending and not any(isinstance(c, m.LoadModel) for c in commands):
            while self.descriptors:  # no command has them
                os.close(self.descriptors.pop())
        return len(data) == READ_BYTES or bool(descriptors)

    def _change_channel(self, command: m.OpenChannel | m.CloseChannel) -> list[m.Command]:
        assert self.channels is not None, "the model is a loaded graph"
        if isinstance(command, m.CloseChannel):
            return self.channels.close_channel(command)
        self.channels.open_channel(command)
        return []


_BEGIN, _END, _CLOSE = b"b", b"e", b"c"


class WorkWatch:
    """Watches descriptors that are readable once the engine has work. The engine's thread owns it,
    and does not read them meanwhile. The thread runs from the first slice until `close`.
    """

    def __init__(self, filenos: list[int]):
        self._filenos = filenos
        self._orders, self._order = os.pipe()
        self._thread: threading.Thread | None = None
        self._on_work: Callable[[], None] = lambda: None
        self._has_work = False

    @contextmanager
    def __call__(self, on_work: Callable[[], None]) -> Iterator[Callable[[], bool]]:
        """Call *on_work* once when a descriptor becomes readable; see `WorkWatch` in the engine."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="work-watch", daemon=True)
            self._thread.start()
        self._on_work, self._has_work = on_work, False
        os.write(self._order, _BEGIN)
        try:
            yield lambda: self._has_work
        finally:
            os.write(self._order, _END)

    def close(self) -> None:
        """End the thread; a second call does nothing."""
        if self._order < 0:
            return
        os.write(self._order, _CLOSE)
        if self._thread is not None:
            self._thread.join()
        os.close(self._orders)
        os.close(self._order)
        self._order = -1

    def _run(self) -> None:
        watched = select.poll()  # `select` rejects descriptors from 1024 on
        for fileno in (*self._filenos, self._orders):
            watched.register(fileno, select.POLLIN)
        while (order := os.read(self._orders, 1)) != _CLOSE:
            if order == _BEGIN and all(fd != self._orders for fd, _ in watched.poll()):
                self._has_work = True
                self._on_work()


OOM_SCORE_ADJ = 500
LARGE_BLOCK_BYTES = 2 << 20
"""Larger blocks are returned to the system when they are freed. This is more than the logits of a
token. Without flash attention, llama.cpp allocates a larger work buffer whenever a context has
grown by 256 tokens. The previous buffers left 32 MB in the heap; now those below this size leave
3 MB.
"""
PROGRESS_STEP = 0.01
GRAPH_SPARE_BYTES = 4 << 30
GRAPH_SPARE_FACTOR = 4
"""A graph's process may allocate this many bytes, or this many times its weights if that is more.
Without a limit, a small file took 8.5 GB before the engine failed.
"""


def main() -> None:
    """Run the worker; see the module's docstring for its arguments."""
    if sys.argv[1] != build_id():
        sys.exit(EXIT_OTHER_BUILD)
    fd, parent, record = (int(argument) for argument in sys.argv[2:5])
    bind_to_parent(parent, OOM_SCORE_ADJ)
    return_large_blocks(LARGE_BLOCK_BYTES)
    gc.freeze()  # the modules so far stay; no later collection walks their objects
    gc.disable()  # until the engine runs; collections take a tenth of the backend's imports
    library_log.write_line = write_library_line
    run_worker(SocketLink(socket.socket(fileno=fd)), record)


def run_worker(link: SocketLink, record: int = -1) -> None:
    """Load the model that the first command names, then run its engine until `Quit`."""
    try:
        commands = _EarlyCommands(link)
        command = commands.next_command()
        if not isinstance(command, m.LoadModel):
            return
        set_library_level(command.logging)
        model = _load_model(link, commands, command)
        if model is not None and not isinstance(model, LanguageModel):
            _serve_graph(link, model, command, record, commands)
        elif model is not None:
            engine = _start_engine(link, model, command, record)
            if engine is not None:
                _run_engine(link, engine, commands.for_engine())
                model.close()
        link.drain(1.0)
    except LinkClosed:
        pass


class _EarlyCommands:
    """The commands that arrive before the engine runs."""

    def __init__(self, link: SocketLink):
        self._link = link
        self._waiting: deque[m.Command] = deque()
        self._threads: list[m.SetThreads] = []
        """The last `SetThreads`, if one has arrived."""

    def next_command(self) -> m.Command:
        """Wait for the next command, except `SetThreads`, and return it."""
        while not self._waiting:
            self._receive(None)
        return self._waiting.popleft()

    def has_quit(self) -> bool:
        """Return whether `Quit` has arrived."""
        self._receive(0)
        return any(isinstance(c, m.Quit) for c in self._waiting)

    def apply_threads(self, model: LanguageModel) -> None:
        """Let *model* use the threads that the daemon has assigned so far."""
        self._receive(0)
        for command in self._threads:
            model.set_threads(command.threads)

    def for_engine(self) -> list[m.Command]:
        """Return the commands that remain for the engine, the number of threads first."""
        return [*self._threads, *self._waiting]

    def _receive(self, wait_s: float | None) -> None:
        for command in self._link.receive_commands(wait_s):
            if isinstance(command, m.SetThreads):
                self._threads = [command]
            else:
                self._waiting.append(command)


def _load_model(
    link: SocketLink, commands: _EarlyCommands, command: m.LoadModel
) -> LanguageModel | GraphModel | None:
    sent, spec = 0.0, command.spec
    if spec.fd >= 0:
        spec = msgspec.structs.replace(spec, fd=link.descriptors.pop(0))
    if spec.weights_fd >= 0:
        spec = msgspec.structs.replace(spec, weights_fd=link.descriptors.pop(0))

    def progress(fraction: float) -> bool:
        nonlocal sent
        if fraction - sent >= PROGRESS_STEP or fraction >= 1.0:
            sent = fraction
            link.send_reports([m.Progress(fraction)])
        return not commands.has_quit()

    try:
        shaped = _agree_on_shape(link, commands, spec, command.known)
        if ENGINES[spec.backend].graphs:
            _limit_memory(spec)
        model = load_model(shaped, progress, renders=True)
        if not isinstance(model, LanguageModel):
            return cast(GraphModel, model)
        # The first token takes about 15 ms more. An echo model's `fail_at_step` counts all steps.
        if spec.backend != "echo" or command.settings.get("careful_s"):
            commands.apply_threads(model)  # with too many, the token can take seconds
            compute_token(model)
    except InferdError as exc:
        link.send_reports([m.ModelNotLoaded(exc.to_wire())])
        return None
    return model


def _start_engine(
    link: SocketLink, model: LanguageModel, command: m.LoadModel, record: int
) -> Engine | None:
    """Report that the model is loaded, once the engine has all its threads; else return None."""
    kv_dir = Path(command.kv_dir) if command.kv_dir else None
    try:
        files = None if kv_dir is None else KvFiles(kv_dir, model.info.fingerprint)
        settings, cores = EngineSettings(**command.settings), command.spec.threads
        engine = Engine(model, settings, files=files, record=record, cores=cores)
        for lane in engine.tokenizing.lanes:
            lane.thread.start()  # now: a failure at the first text would end the tasks
    except InferdError as exc:
        link.send_reports([m.ModelNotLoaded(exc.to_wire())])
        return None
    adapters = load_adapters(model, command.spec.adapters)
    link.send_reports([m.Loaded(model.info, adapters, model.tuning)])
    engine.reporter.configure_log(command.logging)
    return engine


def _limit_memory(spec: ModelSpec) -> None:
    """Limit the memory that the process of a graph may allocate from now on. The engine reports the
    limit as an error.
    """
    with contextlib.closing(estimate_memory(spec)) as estimator:
        weights = estimator.need(estimator.shape).weights
    pages = int(Path("/proc/self/statm").read_bytes().split()[5])
    allocated = pages * os.sysconf("SC_PAGE_SIZE")
    limit = allocated + max(GRAPH_SPARE_BYTES, GRAPH_SPARE_FACTOR * weights)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _serve_graph(
    link: SocketLink, model: GraphModel, command: m.LoadModel, record: int, commands: _EarlyCommands
) -> None:
    """Report that a graph is loaded, then compute it until `Quit`."""
    settings, spec = EngineSettings(**command.settings), command.spec
    reason = _no_batches(model, spec, settings)
    info = msgspec.structs.replace(
        model.info, batch_max=1 if reason else spec.batch_max, no_batches=reason
    )
    strict, joins = settings.priority_strict, not reason
    engine = TensorEngine(model, spec, record=record, strict=strict, joins=joins)
    try:
        engine.start()
    except InferdError as exc:
        link.send_reports([m.ModelNotLoaded(exc.to_wire())])
        return
    link.channels = link.new_channels(output.name for output in info.outputs)
    link.send_reports([m.Loaded(info, [], None)])
    _freeze_objects()
    link.wake_on(engine.fileno())
    with contextlib.suppress(RuntimeError):  # without another thread, lanes make all computations
        standby = Standby(partial(drive_graph, link, engine))
        standby.start()
        engine.standby = standby
        link.share(standby.turn)
        engine.take_turn = partial(take_turn, link, engine, standby.turn)
        engine.has_arrived = link.has_arrived
    received = commands.for_engine()
    while not engine.quit:
        end_step(link, engine, engine.advance(received))
        if engine.failure is None and not engine.quit:
            received = link.receive_commands(engine.wait_s_max())
        if engine.failure is not None:
            raise engine.failure
    link.channels.close()
    link.send_reports([])  # their last use
    engine.close()
    model.close()


WAKE_S = 0.001
"""The engine's thread is not woken for a time limit that it notices so much later anyway."""


TURN_WAIT_S = 0.002
"""The longest wait of a lane for the turn, during a rest: the thread that has it is soon done."""
REST_S = 0.03
"""While all lanes compute and as much work waits, the engine's thread rests, and a lane reads what
has arrived once it has computed. If none has for so long, the engine's thread reads it. To wake
that for each request, on a core that computes, takes longer than to read it, and slows both down.
"""


def end_step(link: SocketLink, engine: TensorEngine, reports: Sequence[m.Report]) -> None:
    """Send the *reports* of a step, and let the engine's thread rest, or spin in short waits."""
    link.send_reports(reports)
    link.rest_for(REST_S if engine.is_full else 0.0)
    link.may_spin = not engine.is_computing


def take_turn(
    link: SocketLink, engine: TensorEngine, turn: threading.Lock, lane: Lane, result: CallResult
) -> bool:
    """Take the *result* of a lane in its thread, read commands there during a rest, and begin the
    next computation, if no other thread has the turn; return whether the result was taken.
    """
    if not turn.acquire(timeout=TURN_WAIT_S if link.rests else 0.0):
        return False
    try:
        if engine.failure is not None:
            link.wake_now()  # again: a lane may have read the first one
            return False
        reports = engine.take_result(lane, result)
        received = link.receive_commands(0) if link.rests else []
        end_step(link, engine, reports + engine.advance(received, lane))
        link.wake(0.0 if engine.quit else engine.wait_s_max())
    except LinkClosed:
        link.wake_now()  # the engine's thread finds that, too
    except BaseException as exc:  # a bug, which ends the process
        engine.failure = exc
        link.wake_now()
    finally:
        turn.release()
    return True


STANDBY_WAIT_S = 0.05
"""The longest wait of a standby for commands, after which it sends what the daemon has not read."""


def drive_graph(
    link: SocketLink,
    engine: TensorEngine,
    ended: int,
    has_ended: Callable[[], bool],
    turn: threading.Lock,
) -> None:
    """Handle the commands and results of a graph while the engine's thread computes."""
    wait_s = 0.0
    while not has_ended():
        poll = select.poll()  # channels come and go, and are not always read
        for fileno, events in (*link.watched, (ended, select.POLLIN)):
            poll.register(fileno, events)
        poll.poll(1000 * wait_s)
        with turn:
            if has_ended():
                return
            try:
                end_step(link, engine, engine.advance(link.receive_commands(0)))
                wait_s = link.due_in(engine.wait_s_max(), STANDBY_WAIT_S)
            except LinkClosed:
                engine.quit = True
            except BaseException as exc:  # a bug, which ends the process
                engine.failure = exc
            if engine.quit or engine.failure is not None:
                engine.cancel_running()
                return


def _no_batches(model: GraphModel, spec: ModelSpec, settings: EngineSettings) -> str:
    """Return the reason for which several inputs of a graph are not computed together, or empty."""
    if spec.batch_max <= 1:
        return "batch-max is 1"
    if not settings.probes:
        return "its last load has crashed, and this one had no probe"
    from ..backends.joining_probe import probe_joining  # with NumPy, which graphs need

    return probe_joining(model)


def compute_token(model: LanguageModel) -> None:
    """Compute one token, to test the model without a task. An encoder is not tested.

    :raises InferdError: the model cannot compute it.
    """
    if model.info.generates:
        start = model.info.decoder_start_token
        first = model.tokenize(b"", special=True, bos=True)[:1] or [0]
        model.step([Chunk(0, first if start is None else [start, start], 0, logits=True)])
        model.trim(0, 0)


def load_adapters(model: LanguageModel, specs: Iterable[AdapterSpec]) -> list[m.AdapterReport]:
    """Load the adapters of a loaded model. If one fails, this is reported, and the model works
    without it.
    """
    reports = []
    for spec in specs:
        try:
            reports.append(m.AdapterReport(spec=spec, info=model.add_adapter(spec)))
        except InferdError as exc:
            reports.append(m.AdapterReport(spec=spec, error=exc.to_wire()))
    return reports


def _agree_on_shape(
    link: SocketLink, commands: _EarlyCommands, spec: ModelSpec, known: list[m.MemoryEstimate]
) -> ModelSpec:
    """Report the memory that the model needs in each shape that the daemon requests; return the
    spec with the shape to load. The file is read only for shapes that are not *known* from earlier
    loads. The first one known is the spec's own.

    :raises Cancelled: the daemon cancels the load.
    """
    if commands.has_quit():
        raise load_cancelled(spec.name)
    with contextlib.ExitStack() as stack:

        @cache
        def estimator() -> MemoryEstimator:
            return stack.enter_context(contextlib.closing(estimate_memory(spec)))

        estimates = {estimate.shape: estimate for estimate in known}
        shape, unreported = known[0].shape if known else estimator().shape, not known
        while True:
            if unreported:
                estimate = estimates.get(shape)
                if estimate is None:
                    need = estimator().need(shape)
                    estimate = m.MemoryEstimate(shape, need, estimator().devices)
                link.send_reports([estimate])
            command = commands.next_command()
            unreported = isinstance(command, m.EstimateMemory)
            match command:
                case m.EstimateMemory(requested):
                    shape = requested
                case m.Proceed():
                    return shape.apply_to(spec)
                case m.Quit():
                    raise load_cancelled(spec.name)


def _run_engine(link: SocketLink, engine: Engine, commands: list[m.Command]) -> None:
    """Run the engine until `Quit`, from *commands* on; wait only if there is nothing to compute."""
    _freeze_objects()
    for lane in engine.tokenizing.lanes:
        link.wake_on(lane.thread.fileno())
    if engine.kv.disk is not None:
        link.wake_on(engine.kv.disk.fileno())
    watch = WorkWatch(link.filenos)
    link.send_reports(engine.begin_iteration(commands))
    while not engine.quit:
        waits = engine.wait_s_max(), engine.metrics.publish()
        wait_s = min((seconds for seconds in waits if seconds is not None), default=None)
        received = link.receive_commands(0 if engine.may_measure else wait_s)
        link.send_reports(engine.begin_iteration(received))
        link.send_reports(engine.compute_step())
        engine.end_iteration()
        if not received and engine.may_measure:
            link.send_reports(engine.measure(watch))
    engine.measuring.close()
    watch.close()
    engine.metrics.publish(at_once=True)
    link.send_reports(engine.kv.close())
    engine.tokenizing.close()


def _freeze_objects() -> None:
    """Leave the objects so far out of collections, which took up to 5 ms for them between steps."""
    gc.collect()
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    main()
