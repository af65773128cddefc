"""A worker process, seen from the daemon: spawned, fed with commands, listened to, buried."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import msgspec
import structlog
from structlog.contextvars import clear_contextvars

from ..backends import AdapterInfo, AdapterSpec, ModelInfo, ModelSpec, Rendering, Shape
from ..backends.base import PLAIN
from ..backends.errors import (
    InferdError,
    LoadFailed,
    WorkerCrashed,
    error_from_wire,
)
from ..backends.library_log import LEVELS
from ..scheduler import messages as m
from ..scheduler.figures import Figures
from ..scheduler.link import pack_frame
from ..scheduler.recorder import Act, Doing, Recorder, make_record
from ..sessions.port import TaskReader
from .cores import LOADING
from .logs import logs
from .recovery import Poison, fail_readers, poisonous
from .watch import Watch
from .worker_lines import WorkerLines

__all__ = ("Worker",)

READ_BYTES = 1 << 14
"""With 256 KiB a read costs 45 us more, as malloc maps such a buffer anew each time; with 64 KiB
it tidies its free lists each time.
"""
HANG_S = 120.0
QUIT_S = 5.0
"""A worker whose line is closed and that is still there after this is killed."""
REQUESTS_TOLD_MAX = 20
"""Requests that a process was computing for, as the log names them when it dies."""

_UNASKED = 0
"""The id of a command whose answer nobody awaits."""

log = structlog.get_logger()
SPINS, SPIN_COUNT = "GOMP_SPINCOUNT", 10_000
"""libgomp's variable; some tenths of a millisecond. Threads that sleep at once wait for each other
in the kernel, many times a step: a third of the speed.
"""


class _Pending:
    """An answer that is awaited."""

    def __init__(self, given: bytes) -> None:
        self.given = given
        """What was asked about, if it is of the client's making."""
        self.done = anyio.Event()
        self.value: Any = None
        self.error: InferdError | None = None


class Worker:
    """One process with one model. Lives on the daemon's event loop; `run` owns the process.

    Implements `sessions.Port`. *on_frame* is called after each frame of reports, so that what
    they caused is written to the clients at once and together.
    """

    def __init__(
        self,
        spec: ModelSpec,
        on_frame: Callable[[], None],
        limits: dict[str, Any] | None = None,
        kv_dir: str = "",
        hang_s: float = HANG_S,
    ):
        self.spec = spec
        self.hang_s = hang_s
        self.limits = limits or {}
        self.kv_dir = kv_dir
        self.known: list[m.Reckoned] = []
        """What was reckoned of the same file before."""
        self.embeds = False
        """What makes embeddings is in the memory that it was promised."""
        self.on_embed: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint
        """Has memory promised to it for that, before the first embedding."""
        self.on_embedded: Callable[[], None] = lambda: None
        """Hears of the first embedding: what makes them is there."""
        self.on_kv: Callable[[m.Stored | m.Unstored], None] = lambda _: None
        """Hears of files that KV states are written to."""
        self.on_orphans: Callable[[Mapping[int, TaskReader], Act], None] | None = None
        """Takes the tasks of a process that died; without it they fail."""
        self.heir: Callable[[Mapping[int, TaskReader]], None] | None = None
        """Takes the tasks that still come after the process was told to quit; else they fail."""
        self.poison = Poison()
        """Inputs that are refused, as they ended a process before."""
        self.pid = 0
        self.progress = 0.0
        self.on_progress: Callable[[float], None] = lambda _: None
        self.on_work: Callable[[], None] = lambda: None
        """Hears that work has appeared or ended."""
        self.on_reckoned: Callable[[m.Reckoned], None] = lambda _: self.proceed()
        """Hears what the model will take, and answers: `reckon`, `proceed` or `refuse`."""
        self.loaded = anyio.Event()
        """Set once the model is ready, or `error` says why it is not."""
        self.adapters: dict[str, m.AdapterReport] = {}
        """By their names, in the order in which they came; those with an error are not there."""
        self.error: InferdError | None = None
        self.gone = anyio.Event()
        self._changed = anyio.Event()
        self._info: ModelInfo | None = None
        self._on_frame = on_frame
        self._commands: list[m.Command] = []
        self._line: socket.socket | None = None
        self._lines: WorkerLines | None = None
        self._logging: m.Logging | None = None
        """What the process was told to log."""
        self._unsent = bytearray()
        self._writing = False
        self._readers: dict[int, TaskReader] = {}
        self._record = make_record()
        self._recorder = Recorder(self._record)
        self.figures = Figures(self._record)
        """What its engine has done, as of now or of when it ended."""
        self.died = False
        """It has ended, and nobody told it to."""
        self._watch = Watch(self._recorder, hang_s, self._is_awaited, self._kill)
        self._pending: dict[int, _Pending] = {}
        self._requests = 0
        self._quitting = False
        self._decoder = msgspec.msgpack.Decoder(list[m.Report])
        self._buffer = bytearray()

    @property
    def info(self) -> ModelInfo:
        """Facts about the model; only once it is loaded."""
        assert self._info is not None, "the model is not loaded yet"
        return self._info

    @property
    def claim(self) -> int | None:
        """What it has to do; see `cores.Worker.claim`."""
        if not self.loaded.is_set():
            return LOADING
        if self.leaving or not self._readers:
            return None
        return max(reader.spec.priority for reader in self._readers.values())

    @property
    def threads_max(self) -> int:
        """Threads that the configuration allows it."""
        return self.spec.threads

    @property
    def silent_s(self) -> float:
        """How long it has done the same: a step, a prompt; 0 while it rests."""
        act = self._recorder.read()
        return 0.0 if act.doing is Doing.REST else max(0.0, time.monotonic() - act.at)

    @property
    def overdue(self) -> bool:
        """Whether it should have been replaced by now, as it hangs; see `watchdog`."""
        return self._watch.overdue

    @property
    def tasks(self) -> int:
        """Tasks that the worker has."""
        return len(self._readers)

    # The port.

    def submit(self, spec: m.TaskSpec, reader: TaskReader) -> None:
        """Queue a task, of which *reader* hears."""
        if spec.tokens in self.poison:
            reader.report(m.Failed(spec.id, poisonous(self.spec.name).to_wire()))
            return
        self._readers[spec.id] = reader
        self._send(m.Submit(spec))
        self.on_work()
        if self.gone.is_set():
            self._part(self._crash())

    def cancel(self, task_id: int) -> None:
        """Stop a task before the next step."""
        self._send(m.Cancel(task_id))

    def has(self, task_id: int) -> bool:
        """Tell whether the worker has a task."""
        return task_id in self._readers

    async def park(self, task_id: int) -> bool:
        """Let a task give way to those who wait; tell whether it does."""
        answer: bool = await self._ask(lambda i: m.Park(i, task_id))
        return answer

    def credit(self, task_id: int, events: int) -> None:
        """Let a push task tell *events* more."""
        self._send(m.Credit(task_id, events))

    def pull(self, task_id: int) -> None:
        """Ask a pull task for its next token."""
        self._send(m.Pull(task_id))

    def adjust(self, command: m.Adjust) -> None:
        """Let a task's parameters hold from its next token on."""
        self._send(command)

    def judge(self, verdict: m.Verdict) -> None:
        """Tell a task whether it ends with its last sentence."""
        self._send(verdict)

    async def tokenize(self, text: bytes, *, special: bool, bos: bool) -> list[int]:
        """Return the token ids of *text*."""
        packed = await self._ask(lambda i: m.Tokenize(i, text, special, bos), text)
        return m.unpack_tokens(packed)

    async def detokenize(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes that *tokens* stand for."""
        answer: bytes = await self._ask(lambda i: m.Detokenize(i, m.pack_tokens(tokens)))
        return answer

    async def chat_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        said: str = "",
        answer: str = "",
        rendering: Rendering = PLAIN,
    ) -> tuple[str, list[int], bool]:
        """Return the rendered text, its tokens, and whether these only add to *said*."""
        told = list(messages)
        text, packed, appended = await self._ask(
            lambda i: m.ChatPrompt(i, told, said, answer, rendering),
            msgspec.msgpack.encode((told, rendering)),
        )
        return text, m.unpack_tokens(packed), appended

    async def lookup(
        self, owner: int, session: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> int:
        """Return how many of *tokens* need not be computed again for a session, as of now."""
        packed = m.pack_tokens(tokens)
        answer: int = await self._ask(lambda i: m.Lookup(i, owner, session, adapters, packed))
        return answer

    async def forget(self, owner: int, session: str) -> None:
        """Forget a session's KV states, in memory and on disk; returns when it is done."""
        await self._ask(lambda i: m.Forget(i, owner, session))

    async def make_room_to_embed(self) -> None:
        """Have memory for the second context, in which embeddings are made."""
        if not self.embeds:
            await self.on_embed()

    def keep(
        self, owner: int, session: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> None:
        """Have a session's KV state written to disk, some time soon; nobody waits for it."""
        self._send(m.Keep(_UNASKED, owner, session, adapters, m.pack_tokens(tokens)))

    def evicted(self, name: str) -> None:
        """Tell that a KV file was deleted."""
        self._send(m.Evicted(name))

    async def queue(self) -> list[m.QueueEntry]:
        """Return who runs and who waits, in order."""
        answer = await self._ask(m.Queue)
        return msgspec.convert(answer, list[m.QueueEntry])

    async def statistics(self) -> dict[str, Any]:
        """Return the engine's counters."""
        answer: dict[str, Any] = await self._ask(m.Stats)
        return answer

    async def thrift(self, *, on: bool) -> int:
        """Let the worker hold no KV states but those of parked tasks, while memory is short;
        return the bytes that it lets go.
        """
        answer: int = await self._ask(lambda i: m.Thrift(i, on))
        return answer

    def set_threads(self, threads: int) -> None:
        """Let the engine use *threads* from its next step on."""
        self._send(m.Threads(threads))

    def use_logging(self) -> None:
        """Let the process log what is logged now; one that loads is told when it has."""
        logging = logs.for_workers()
        if self.loaded.is_set() and not self.leaving and logging != self._logging:
            self._logging = logging
            self._send(logging)

    async def add_adapter(self, spec: AdapterSpec) -> m.AdapterReport:
        """Load an adapter into the process."""
        answer = await self._ask(lambda i: m.AddAdapter(i, spec))
        report = m.AdapterReport(spec=spec, info=msgspec.convert(answer, AdapterInfo))
        self.adapters[spec.name] = report
        return report

    async def remove_adapter(self, adapter_id: str, *, force: bool) -> None:
        """Let the process free an adapter; with *force* the tasks that have it fail."""
        await self._ask(lambda i: m.RemoveAdapter(i, adapter_id, force))

    # Before the model is loaded.

    def reckon(self, shape: Shape) -> None:
        """Ask what the model takes in another shape."""
        self._send(m.Reckon(shape))

    def proceed(self) -> None:
        """Let the model be loaded in the shape that was reckoned last."""
        self._send(m.Proceed())

    def refuse(self, error: InferdError) -> None:
        """Do not let the model be loaded: *error* says why."""
        self.error = error
        self.loaded.set()
        self.quit()

    @property
    def leaving(self) -> bool:
        """Tell whether the process was told to quit, has failed to load, or is gone."""
        return self._quitting or self.error is not None or self.gone.is_set()

    def quit(self) -> None:
        """Let the process free its model and end; a load under way is given up."""
        self._quitting = True
        self._send(m.Quit())

    def _send(self, command: m.Command) -> None:
        if not self._commands and self._line is not None:
            asyncio.get_running_loop().call_soon(self._write)
            self._watch.sent()
        self._commands.append(command)

    async def changed(self) -> None:
        """Wait until a task has ended, or the process."""
        await self._changed.wait()

    def give_away(self, *, waiting: bool = False) -> dict[int, TaskReader]:
        """Return the tasks, or those alone that still wait: the process computes them no more."""
        given = {n: r for n, r in self._readers.items() if not (waiting and r.begun)}
        for number in given:
            del self._readers[number]
            self.cancel(number)
        if given:
            self._work_changed()
        return given

    def _work_changed(self) -> None:
        self.on_work()
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    def _is_awaited(self) -> bool:
        return bool(self._readers or self._pending or self._quitting)

    def _kill(self) -> None:
        """End a process that hangs."""
        clear_contextvars()  # a timer has those of the request that set it
        log.error("worker.hangs", model=self.spec.name, pid=self.pid, seconds=self.hang_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    async def _ask(self, command: Callable[[int], m.Command], given: bytes = b"") -> Any:
        if given in self.poison:
            raise poisonous(self.spec.name)
        self._requests += 1
        number, pending = self._requests, _Pending(given)
        self._pending[number] = pending
        self._send(command(number))
        if self.gone.is_set():
            self._part(self._crash())
        try:
            await pending.done.wait()
        finally:
            self._pending.pop(number, None)
        if pending.error is not None:
            raise pending.error
        return pending.value

    # The process.

    async def run(self) -> None:
        """Spawn the process, load the model, and serve until the process is gone."""
        clear_contextvars()  # it serves others, too, than the request that has it loaded
        process, line = None, None
        try:
            ours, theirs = socket.socketpair()
            line = ours
            with theirs:
                process = await self._spawn(theirs)
            ours.setblocking(False)
            self._send_load(ours)
            await self._talk(ours)
        except BrokenPipeError:
            log.warning("worker.died_at_once", model=self.spec.name, pid=self.pid)
        except OSError as exc:
            self.error = LoadFailed(
                f"no worker process could be started for {self.spec.name!r}: {exc.strerror or exc}",
                hint="memory, processes or descriptors ran out: free some and try again",
            )
        finally:
            if line is not None:
                line.close()
            with anyio.CancelScope(shield=True):
                await self._bury(process)

    async def _spawn(self, theirs: socket.socket) -> anyio.abc.Process:
        arguments = [str(theirs.fileno()), str(os.getpid()), str(self._record)]
        self._lines = WorkerLines(self._hear)
        process = await anyio.open_process(
            [sys.executable, "-P", "-m", "inferd.scheduler.worker", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._lines.writer,
            pass_fds=(theirs.fileno(), self._record),
            env=_environment(),
        )
        self._lines.close_writer()
        self.pid = process.pid
        return process

    def _send_load(self, sock: socket.socket) -> None:
        self._logging = logs.for_workers()
        load = m.Load(self.spec, self.limits, self.kv_dir, self.known, self._logging)
        frame = pack_frame([load])
        if self.spec.fd >= 0:
            socket.send_fds(sock, [frame], [self.spec.fd])
        else:
            sock.send(frame)

    async def _talk(self, sock: socket.socket) -> None:
        """Write commands and read reports until the process is gone.

        One callback for each, for good: what a wake-up costs here is paid per step.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        loop.add_reader(sock, self._read, sock, ended)
        self._line = sock
        if self._commands:
            self._watch.sent()
        self._write()
        try:
            await ended
        finally:
            self._line = None
            loop.remove_reader(sock)
            loop.remove_writer(sock)

    def _write(self) -> None:
        """Send the commands that have come since, in one frame, or what the socket takes of it."""
        sock = self._line
        if sock is None:
            return  # the process is gone
        commands, self._commands = self._commands, []
        if commands:
            self._unsent += pack_frame(commands)
        try:
            while self._unsent:
                del self._unsent[: sock.send(self._unsent)]
        except BlockingIOError:
            asyncio.get_running_loop().add_writer(sock, self._write)
            self._writing = True
        except OSError:
            self._unsent.clear()  # the process is gone: the reader sees it too
        if self._writing and not self._unsent:
            asyncio.get_running_loop().remove_writer(sock)
            self._writing = False

    def _read(self, sock: socket.socket, ended: asyncio.Future[None]) -> None:
        if ended.done():
            return
        try:
            if not self._read_some(sock):
                ended.set_result(None)
        except Exception as exc:  # it ends `run`, not only this callback
            ended.set_exception(exc)

    def _read_some(self, sock: socket.socket) -> bool:
        """Take the reports that are there; tell whether more may come."""
        try:
            data = sock.recv(READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._buffer += data
        try:
            self._take_frames()
        except msgspec.DecodeError as exc:
            log.error("worker.unreadable", model=self.spec.name, pid=self.pid, cause=str(exc))
            return False
        return bool(data)

    def _take_frames(self) -> None:
        start, buffer = 0, self._buffer
        while len(buffer) - start >= 4:
            end = start + 4 + int.from_bytes(buffer[start : start + 4], "little")
            if end > len(buffer):
                break
            for report in self._decoder.decode(memoryview(buffer)[start + 4 : end]):
                self._take(report)
            start = end
        if start:
            self._buffer = bytearray(buffer[start:])
            self._on_frame()

    def _take(self, report: m.Report) -> None:
        match report:
            case m.Tokens() | m.Sentence() | m.Moved() | m.Position() | m.Shifted():
                reader = self._readers.get(report.task_id)
                if reader is not None:
                    reader.report(report)
            case m.Embedded(task_id):
                self.on_embedded()
                self.on_embedded = lambda: None
                if task_id in self._readers:
                    self._readers[task_id].report(report)
            case m.Finished() | m.Failed():
                reader = self._readers.pop(report.task_id, None)
                if reader is not None:
                    reader.report(report)
                    self._work_changed()
            case m.Answer(number, value):
                self._answer(number, value, None)
            case m.Refused(number, error):
                self._answer(number, None, error_from_wire(error))
            case m.Stored() | m.Unstored():
                self.on_kv(report)
            case m.Reckoned():
                self.on_reckoned(report)
            case m.Progress(fraction):
                self.progress = fraction
                self.on_progress(fraction)
            case m.Loaded(info, adapters):
                self._info = info
                self.adapters = {report.spec.name: report for report in adapters}
                self.loaded.set()
                self.use_logging()
                self.on_work()
            case m.Said():
                self._log(report.level, report.event, report.room, report.fields)
            case m.LoadFailed(error):
                self.error = self.error or error_from_wire(error)
                self.loaded.set()

    def _hear(self, level: str, event: str, text: str) -> None:
        self._log(level, event, "llama", {"text": text})

    def _log(self, level: str, event: str, room: str, fields: dict[str, Any]) -> None:
        """Log an event of the process."""
        told = {**fields, "room": room, "model": self.spec.name, "pid": self.pid}
        log.log(LEVELS.get(level, LEVELS["error"]), event, **told)

    def _answer(self, number: int, value: Any, error: InferdError | None) -> None:
        pending = self._pending.get(number)
        if pending is not None:
            pending.value, pending.error = value, error
            pending.done.set()

    async def _bury(self, process: anyio.abc.Process | None) -> None:
        """Wait for the process's end, helping if it must be, and tell everybody who waits."""
        code = None
        if process is not None:
            with anyio.move_on_after(QUIT_S):
                code = await process.wait()
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                code = await process.wait()
        if self._lines is not None:
            self._lines.close()
        self.gone.set()
        if self.error is None and self._info is None:
            self.error = LoadFailed(
                f"loading {self.spec.name!r} ended the worker process ({_death(code)})",
                hint="the file is probably damaged, or memory ran out: see the daemon's log",
                data={"cause": "died"},
            )
        self.loaded.set()
        if not self._quitting and self._info is not None:
            self.died = True
            log.warning(
                "worker.died",
                model=self.spec.name,
                pid=self.pid,
                cause=_death(code),
                requests=[r.spec.request for r in self._readers.values()][:REQUESTS_TOLD_MAX],
            )
        self._part(self._crash(code))
        self._work_changed()
        self._watch.stop()
        os.close(self._record)

    def _crash(self, code: int | None = None) -> WorkerCrashed:
        return WorkerCrashed(
            f"the worker process of {self.spec.name!r} ended ({_death(code)})",
            data={"model": self.spec.name},
        )

    def _part(self, error: InferdError) -> None:
        """Give the tasks away, or let them fail, and answer everybody who waits."""
        readers, self._readers = self._readers, {}
        act = self._recorder.read()
        if readers and self._quitting and self.heir is not None:
            self.heir(readers)
        elif readers and not self._quitting and self.on_orphans is not None:
            self.on_orphans(readers, act)
        else:
            fail_readers(readers, error)
        for number, pending in list(self._pending.items()):
            if act.doing is Doing.PROMPT and number in act.ids:
                self.poison.add(pending.given)
                self._answer(number, None, poisonous(self.spec.name))
            else:
                self._answer(number, None, error)
        self._on_frame()


def _death(code: int | None) -> str:
    if code is None:
        return "it is gone"
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit status {code}"


def _environment() -> dict[str, str]:
    """Return a worker's: OpenMP's threads spin for a moment between steps, unless the operator
    says how they are to wait.

    They would for milliseconds, and hold the core on which the daemon is to wake with the step's
    tokens: it then takes the worker's own. (Measured on two cores, SmolLM2, one stream: telling a
    step's tokens 350 µs, with this 60.)
    """
    if os.environ.keys() & {"OMP_WAIT_POLICY", SPINS}:
        return dict(os.environ)
    return os.environ | {SPINS: str(SPIN_COUNT)}
