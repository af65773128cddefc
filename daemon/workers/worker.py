"""A worker process, seen from the daemon: given tasks, asked, listened to, buried."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
import anyio.abc
import msgspec
import structlog
from structlog.contextvars import clear_contextvars

from ...backends import AdapterInfo, AdapterSpec, ModelInfo, ModelSpec, Rendering, Shape
from ...backends.base import PLAIN_RENDERING
from ...backends.errors import (
    InferdError,
    LoadFailed,
    WorkerCrashed,
    error_from_wire,
)
from ...backends.library_log import LEVELS
from ...scheduler import messages as m
from ...scheduler.recording.engine_counters import Figures
from ...scheduler.recording.recorder import Act, Doing, Recorder, make_record
from ...sessions.worker_client import TaskReader
from ..logs.setup import logs
from .cores import LOADING
from .hang_detector import Watch
from .listener import WorkerListener
from .queries import Questions
from .recovery import Poison, fail_readers, poisonous
from .worker_link import WorkerLink, send_load
from .worker_process import death, end_of, load_failed, spawn
from .worker_stderr import WorkerLines

__all__ = ("Worker",)

HANG_S = 120.0
REQUESTS_TOLD_MAX = 20
"""Requests that a process was computing for, as the log names them when it dies."""

_UNASKED = 0
"""The id of a command whose answer nobody awaits."""

log = structlog.get_logger()


class Worker:
    """One process with one model. Lives on the daemon's event loop; `run` owns the process.

    Implements `sessions.Port`. *known* are earlier memory estimates of the same files.
    """

    def __init__(
        self,
        spec: ModelSpec,
        listener: WorkerListener,
        *,
        limits: dict[str, Any] | None = None,
        kv_dir: str = "",
        hang_s: float = HANG_S,
        known: Sequence[m.Reckoned] = (),
    ):
        self.spec = spec
        self.hang_s = hang_s
        self.limits = limits or {}
        self.kv_dir = kv_dir
        self.known = list(known)
        self.embeds = False
        """What makes embeddings is in the memory that it was promised."""
        self.heir: Callable[[Mapping[int, TaskReader]], None] | None = None
        """Takes the tasks that still come after the process was told to quit; else they fail."""
        self.poison = Poison()
        """Inputs that are refused, as they ended a process before."""
        self.pid = 0
        self.progress = 0.0
        self.loaded = anyio.Event()
        """Set once the model is ready, or `error` says why it is not."""
        self.adapters: dict[str, m.AdapterReport] = {}
        """By their names, in the order in which they came; those with an error are not there."""
        self.error: InferdError | None = None
        self.gone = anyio.Event()
        self._changed = anyio.Event()
        self._info: ModelInfo | None = None
        self._listener = listener
        self._made_embedding = False
        self._lines: WorkerLines | None = None
        self._logging: m.Logging | None = None
        """What the process was told to log."""
        self._readers: dict[int, TaskReader] = {}
        self._record = make_record()
        self._recorder = Recorder(self._record)
        self.figures = Figures(self._record)
        """What its engine has done, as of now or of when it ended."""
        self.died = False
        """It has ended, and nobody told it to."""
        self._watch = Watch(self._recorder, hang_s, self._is_awaited, self._kill)
        self._link = WorkerLink(self._take, listener.reports_handled, self._watch.sent)
        self._questions = Questions()
        self._quitting = False

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
        self._link.send(m.Submit(spec))
        self._listener.work_changed()
        if self.gone.is_set():
            self._part(self._crash())

    def cancel(self, task_id: int) -> None:
        """Stop a task before the next step."""
        self._link.send(m.Cancel(task_id))

    def has(self, task_id: int) -> bool:
        """Tell whether the worker has a task."""
        return task_id in self._readers

    async def park(self, task_id: int) -> bool:
        """Let a task give way to those who wait; tell whether it does."""
        answer: bool = await self._ask(lambda i: m.Park(i, task_id))
        return answer

    def credit(self, task_id: int, events: int) -> None:
        """Let a push task tell *events* more."""
        self._link.send(m.Credit(task_id, events))

    def pull(self, task_id: int) -> None:
        """Ask a pull task for its next token."""
        self._link.send(m.Pull(task_id))

    def adjust(self, command: m.Adjust) -> None:
        """Let a task's parameters hold from its next token on."""
        self._link.send(command)

    def judge(self, verdict: m.Verdict) -> None:
        """Tell a task whether it ends with its last sentence."""
        self._link.send(verdict)

    async def tokenize(
        self, text: bytes, *, special: bool, bos: bool, turn: bool = False
    ) -> list[int]:
        """Return the token ids of *text*; the next step waits a moment for the task of a *turn*."""
        packed = await self._ask(lambda i: m.Tokenize(i, text, special, bos, turn), text)
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
        rendering: Rendering = PLAIN_RENDERING,
        *,
        turn: bool = False,
    ) -> tuple[str, list[int], bool]:
        """Return the rendered text, its tokens, and whether these only add to *said*."""
        told = list(messages)
        text, packed, appended = await self._ask(
            lambda i: m.ChatPrompt(i, told, said, answer, rendering, turn),
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
            await self._listener.reserve_embedding_memory(self)

    def keep(
        self, owner: int, session: str, adapters: tuple[str, ...], tokens: Sequence[int]
    ) -> None:
        """Have a session's KV state written to disk, some time soon; nobody waits for it."""
        self._link.send(m.Keep(_UNASKED, owner, session, adapters, m.pack_tokens(tokens)))

    def evicted(self, name: str) -> None:
        """Tell that a KV file was deleted."""
        self._link.send(m.Evicted(name))

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
        self._link.send(m.Threads(threads))

    def use_logging(self) -> None:
        """Let the process log what is logged now; one that loads is told when it has."""
        logging = logs.for_workers()
        if self.loaded.is_set() and not self.leaving and logging != self._logging:
            self._logging = logging
            self._link.send(logging)

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
        self._link.send(m.Reckon(shape))

    def proceed(self) -> None:
        """Let the model be loaded in the shape that was reckoned last."""
        self._link.send(m.Proceed())

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
        self._link.send(m.Quit())

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
        self._listener.work_changed()
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    def _is_awaited(self) -> bool:
        return bool(self._readers or self._questions or self._quitting)

    def _kill(self) -> None:
        """End a process that hangs."""
        clear_contextvars()  # a timer has those of the request that set it
        log.error("worker.hangs", model=self.spec.name, pid=self.pid, seconds=self.hang_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    async def _ask(self, command: Callable[[int], m.Command], given: bytes = b"") -> Any:
        if given in self.poison:
            raise poisonous(self.spec.name)
        number = self._questions.put(given)
        self._link.send(command(number))
        if self.gone.is_set():
            self._part(self._crash())
        return await self._questions.answer_to(number)

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
            self._logging = logs.for_workers()
            known, logging = self.known, self._logging
            send_load(ours, m.Load(self.spec, self.limits, self.kv_dir, known, logging))
            await self._link.talk(ours)
        except BrokenPipeError:
            log.warning("worker.died_at_once", model=self.spec.name, pid=self.pid)
        except msgspec.DecodeError as exc:
            log.error("worker.unreadable", model=self.spec.name, pid=self.pid, cause=str(exc))
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
        self._lines = WorkerLines(self._hear)
        process = await spawn(theirs, self._record, self._lines.writer)
        self._lines.close_writer()
        self.pid = process.pid
        return process

    def _take(self, report: m.Report) -> None:
        match report:
            case m.Tokens() | m.Sentence() | m.Moved() | m.Position() | m.Shifted():
                reader = self._readers.get(report.task_id)
                if reader is not None:
                    reader.report(report)
            case m.Embedded(task_id):
                if not self._made_embedding:
                    self._made_embedding = True
                    self._listener.embedding_context_created(self)
                if task_id in self._readers:
                    self._readers[task_id].report(report)
            case m.Finished() | m.Failed():
                reader = self._readers.pop(report.task_id, None)
                if reader is not None:
                    reader.report(report)
                    self._work_changed()
            case m.Answer(number, value):
                self._questions.answered(number, value)
            case m.Refused(number, error):
                self._questions.refused(number, error_from_wire(error))
            case m.Stored() | m.Unstored():
                self._listener.kv_file_changed(self, report)
            case m.Reckoned():
                self._listener.memory_estimated(self, report)
            case m.Progress(fraction):
                self.progress = fraction
                self._listener.load_progressed(fraction)
            case m.Loaded(info, adapters):
                self._info = info
                self.adapters = {report.spec.name: report for report in adapters}
                self.loaded.set()
                self.use_logging()
                self._listener.work_changed()
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

    async def _bury(self, process: anyio.abc.Process | None) -> None:
        """Wait for the process's end, helping if it must be, and tell everybody who waits."""
        code = None if process is None else await end_of(process)
        if self._lines is not None:
            self._lines.close()
        self.gone.set()
        if self.error is None and self._info is None:
            self.error = load_failed(self.spec.name, code)
        self.loaded.set()
        if not self._quitting and self._info is not None:
            self.died = True
            log.warning(
                "worker.died",
                model=self.spec.name,
                pid=self.pid,
                cause=death(code),
                requests=[r.spec.request for r in self._readers.values()][:REQUESTS_TOLD_MAX],
            )
        self._part(self._crash(code))
        self._work_changed()
        self._watch.stop()
        os.close(self._record)

    def _crash(self, code: int | None = None) -> WorkerCrashed:
        return WorkerCrashed(
            f"the worker process of {self.spec.name!r} ended ({death(code)})",
            data={"model": self.spec.name},
        )

    def _part(self, error: InferdError) -> None:
        """Give the tasks away, or let them fail, and answer everybody who waits."""
        readers, self._readers = self._readers, {}
        act = self._recorder.read()
        if readers and self._quitting and self.heir is not None:
            self.heir(readers)
        elif readers and not self._quitting:
            self._listener.tasks_orphaned(readers, act)
        else:
            fail_readers(readers, error)
        self._questions.refuse_all(lambda number, given: self._refusal(act, number, given) or error)
        self._listener.reports_handled()

    def _refusal(self, act: Act, number: int, given: bytes) -> InferdError | None:
        """Return why a question is refused that ended the process; None: it did not."""
        if act.doing is not Doing.PROMPT or number not in act.ids:
            return None
        self.poison.add(given)
        return poisonous(self.spec.name)
