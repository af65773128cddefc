"""The computation of jobs' requests: a bounded number at a time, as ordinary turns of their owners.

The requests are in the form of the HTTP gateway, and one process with the gateway's application
answers them (`gateways/http/job_process.py`). It is started with the first request, is a client of
this daemon that acts for the jobs' owners, and ends when no job is left. It keeps nothing, so that
it may end at any time: the runner sends requests without a stored result again.

A request that is refused for now (a full queue, a quota, a daemon that drains) is sent again later;
every other answer is its result. Requests wait in the scheduler's queue like those of any client,
in the class `low` unless their job has another one.
"""

from __future__ import annotations

import heapq
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple, cast

import anyio
import anyio.abc
import msgspec
import structlog
from anyio.streams.memory import MemoryObjectSendStream

from ...backends.errors import BackendError, InferdError, LoadFailed, TooLarge
from ...ipc import job_messages as j
from ...ipc.names import Priority
from ...wire.frames import FrameReader, pack_frame
from ..workers.process import SpawnedProcess, spawn_program
from ..workers.worker_log import WorkerLog
from .jobs import Job, Jobs
from .store import Line, RequestLine, read_request, result_line

log = structlog.get_logger(logger_name="jobs")
MODULE = "inferd.gateways.http.job_process"
JOB_REQUESTS_MAX = 8
"""Requests of one job at a time."""
OK = 200
REFUSED = frozenset((429, 502, 503))
"""HTTP statuses of requests that are refused for now."""
REFUSED_S_MAX = 86_400.0
"""The time for which a refused request is sent again; then the refusal is its result."""
RETRY_S, RETRY_S_MAX = 0.5, 30.0
"""The first and the longest pause before a refused request is sent again."""
STORE_RETRY_S = 1.0
"""The pause before a result is written again that could not be."""
LOSSES_MAX = 3
"""Processes that a request may end before it counts as failed."""
IDLE_S = 30.0
"""The time after which a process without jobs is ended."""
_ANSWERS_MAX = 16
"""Answers of one request that wait for the disk."""
_READ_BYTES = 64 << 10


class Candidate(NamedTuple):
    """A job that has a request to send: its user, class, requests under way, and date."""

    id: str
    user: int
    is_low: bool
    running: int
    created_at: float


def next_job(jobs: Sequence[Candidate], running: Sequence[Candidate], requests_max: int) -> str:
    """Return the job whose request is sent next, or an empty text if all places are taken.

    The user with the fewest requests under way comes first, then the job with the fewest. Jobs of
    the class `low` leave a quarter of the places to others, whose clients may wait for them.
    """
    taken = sum(job.running for job in running)
    low = sum(job.running for job in running if job.is_low)
    if taken >= requests_max:
        return ""
    by_user: dict[int, int] = {}
    for job in running:
        by_user[job.user] = by_user.get(job.user, 0) + job.running
    low_max = max(1, requests_max - requests_max // 4)
    fitting = [
        job for job in jobs if job.running < JOB_REQUESTS_MAX and (not job.is_low or low < low_max)
    ]
    order = [
        (by_user.get(job.user, 0), job.is_low, job.running, job.created_at, job.id)
        for job in fitting
    ]
    return min(order)[-1] if order else ""


def retry_pause_s(refusals: int, retry_after_s: float | None) -> float:
    """Return the pause before a request is sent again that was refused *refusals* times before."""
    pause_s = RETRY_S * 2 ** min(refusals, 10) if retry_after_s is None else retry_after_s
    return min(max(pause_s, RETRY_S), RETRY_S_MAX)


class ProcessLost(Exception):
    """The process has ended."""


class ProcessNotStarted(ProcessLost):
    """No process could be started."""


@dataclass
class _Refused:
    """A request that is sent again."""

    line: Line
    since: float = 0.0
    refusals: int = 0
    losses: int = 0


@dataclass
class _Feed:
    """The progress through the file of a job that has not ended."""

    offset: int = 0
    number: int = 0
    is_read: bool = False
    """Whether each line was sent, or has a result."""
    again: list[tuple[float, int, _Refused]] = field(default_factory=list)
    """A heap of requests that are sent again, by time."""

    def is_ready(self, now: float) -> bool:
        return bool(self.again and self.again[0][0] <= now) or not (self.is_read or self.again)


class JobProcess:
    """The process that answers requests. Lives on the event loop."""

    def __init__(self) -> None:
        self.pid = 0
        self.lost = False
        self._process: SpawnedProcess | None = None
        self._log = WorkerLog(lambda: {"process": "jobs"})
        self._stream: anyio.abc.SocketStream | None = None
        self._sending = anyio.Lock()
        self._frames = FrameReader(j.REPLY_BYTES_MAX)
        self._decoder = msgspec.msgpack.Decoder(j.Answer)
        self._waiting: dict[int, MemoryObjectSendStream[j.Answer]] = {}

    async def start(self, socket_path: str) -> None:
        """Start the process. `end` must follow, even after an error.

        :raises OSError: it cannot be started.
        :raises LoadFailed: the thread that starts processes has ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            self._stream = await anyio.abc.UNIXSocketStream.from_socket(ours)
            self._process = await spawn_program(MODULE, theirs, self._log.writer, socket_path)
        self._log.close_writer()
        self.pid = self._process.pid

    async def read(self) -> None:
        """Pass answers on to those who wait for them, until the process ends."""
        assert self._stream is not None, "it was started"
        try:
            while True:
                for frame in self._frames.read_frames(await self._stream.receive(_READ_BYTES)):
                    answer = self._decoder.decode(frame)
                    if (waiting := self._waiting.get(answer.number)) is not None:
                        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                            await waiting.send(answer)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        except (msgspec.MsgspecError, TooLarge) as exc:
            log.error("jobs.process_garbage", cause=str(exc))
        finally:
            self.lost = True
            for stream in self._waiting.values():
                stream.close()

    async def _send(self, command: j.Command) -> None:
        assert self._stream is not None, "it was started"
        try:
            async with self._sending:
                with anyio.CancelScope(shield=True):  # half a frame would end the process
                    await self._stream.send(pack_frame(command))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise ProcessLost from None

    @asynccontextmanager
    async def request(self, command: j.Compute) -> AsyncIterator[AsyncIterator[j.Answer]]:
        """Send a request and yield its answers, the last of which is `Done`. A request that is left
        earlier is cancelled.

        :raises ProcessLost: the process ends before.
        """
        send, receive = anyio.create_memory_object_stream[j.Answer](_ANSWERS_MAX)
        self._waiting[command.number] = send
        done = False

        async def answers() -> AsyncIterator[j.Answer]:
            nonlocal done
            async for answer in receive:
                done = isinstance(answer, j.Done)
                yield answer
                if done:
                    return
            raise ProcessLost

        try:
            if self.lost:
                raise ProcessLost
            await self._send(command)
            yield answers()
        finally:
            del self._waiting[command.number]
            send.close()
            receive.close()
            if not done and not self.lost:
                with anyio.CancelScope(shield=True), suppress(ProcessLost):
                    await self._send(j.Cancel(number=command.number))

    async def end(self) -> None:
        """End the process."""
        self.lost = True
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
        if self._stream is not None:
            await self._stream.aclose()
        self._log.close()


class JobRunner:
    """Sends the requests of jobs to the process, and stores their results. Lives on the event loop.

    *socket_path* is the daemon's socket. *may_start* says whether new requests may be sent, and
    *on_process* is called with the process's id, or 0 when it has ended.
    """

    def __init__(
        self,
        jobs: Jobs,
        socket_path: Callable[[], str],
        may_start: Callable[[], bool],
        on_process: Callable[[int], object],
    ):
        self._jobs, self._socket_path = jobs, socket_path
        self._may_start, self._on_process = may_start, on_process
        self._feeds: dict[str, _Feed] = {}
        self._process: JobProcess | None = None
        self._sending = anyio.Lock()
        self._numbers = count(1)
        self._group: anyio.abc.TaskGroup

    async def run(self) -> None:
        """Compute requests until cancelled."""
        async with anyio.create_task_group() as self._group:
            try:
                while True:
                    self._jobs.wake = anyio.Event()
                    wake = self._jobs.wake
                    now = time.monotonic()
                    job = self._choose(now)
                    if job is not None:
                        await self._start_next(job, now)
                        continue
                    with anyio.move_on_after(self._pause_s(now)) as pause:
                        await wake.wait()
                    if pause.cancelled_caught and not self._jobs.unfinished():
                        await self._end_process()
            finally:
                self._group.cancel_scope.cancel()
                await self._end_process()

    def _pause_s(self, now: float) -> float:
        """Return the time until a request may be sent again, or the process ends."""
        times = [feed.again[0][0] - now for feed in self._feeds.values() if feed.again]
        return min([IDLE_S, *(max(0.0, seconds) for seconds in times if seconds > 0)])

    def _choose(self, now: float) -> Job | None:
        unfinished = {job.row.id: job for job in self._jobs.unfinished()}
        self._feeds = {name: self._feeds.get(name) or _Feed() for name in unfinished}
        if not unfinished or not self._may_start():
            return None
        candidates = [
            Candidate(
                *(name, job.row.owner.user, job.row.priority == "low"),
                *(job.running, job.row.created_at),
            )
            for name, job in unfinished.items()
        ]
        ready = [each for each in candidates if self._feeds[each.id].is_ready(now)]
        chosen = next_job(ready, candidates, self._jobs.limits.requests_max)
        return unfinished[chosen] if chosen else None

    async def _start_next(self, job: Job, now: float) -> None:
        """Start the next request of a job, or note that it has none."""
        feed = self._feeds[job.row.id]
        if feed.again and feed.again[0][0] <= now:
            again = heapq.heappop(feed.again)[2]
        else:
            try:
                line = await self._jobs.in_reader(partial(self._next_line, job, feed))
            except (OSError, InferdError) as exc:
                await self._end_failed(job, f"its file cannot be read: {exc}")
                return
            if line is None:
                feed.is_read = True
                return
            again = _Refused(line)
        if not job.ended:
            await self._jobs.start(job)
            self._group.start_soon(self._run_request, job, feed, again)

    def _next_line(self, job: Job, feed: _Feed) -> Line | None:
        """Return the next line without a result. Runs in a thread, one at a time for each job."""
        for line, _ in self._jobs.store.scan(job.row.file, feed.offset, feed.number):
            feed.offset, feed.number = line.offset + line.size, line.number + 1
            if line.number not in job.done:
                return line
        return None

    async def _end_failed(self, job: Job, error: str) -> None:
        with suppress(BackendError):
            await self._jobs.end(job, "failed", error)

    async def _run_request(self, job: Job, feed: _Feed, again: _Refused) -> None:
        """Compute a request until it has an answer, or its job ends."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_cancel_with_job, job, group.cancel_scope)
                try:
                    await self._compute(job, feed, again)
                except ProcessLost as exc:
                    await self._note_loss(job, feed, again, exc)
                except (InferdError, OSError) as exc:  # such as a file that somebody has changed
                    await self._end_failed(job, str(exc))
                group.cancel_scope.cancel()
        finally:
            job.running -= 1
            if not job.ended:
                job.report_change()
            self._jobs.wake.set()

    async def _compute(self, job: Job, feed: _Feed, again: _Refused) -> None:
        row, line = job.row, again.line
        async with AsyncExitStack() as stack:
            async with self._sending:  # one request at a time is in memory
                process = await self._live_process()
                data = await self._jobs.in_reader(self._jobs.store.read, row.file, *line[1:])
                request = read_request(data, line.number, row.endpoint)
                command = self._command(job, request)
                answers = await stack.enter_async_context(process.request(command))
                del data, command
                name, events = request.custom_id, 0
                del request
            async for answer in answers:
                if isinstance(answer, j.Event):
                    if not self._may_start() and _is_failure(answer.data):
                        return  # the daemon stops, and computes the response again
                    await self._store(partial(self._jobs.add_event, job, events, answer.data))
                    events += 1
                elif answer.status in REFUSED and self._is_sent_again(feed, again, answer):
                    pass
                elif answer.status == OK and row.events:
                    await self._store(partial(self._jobs.end_events, job))
                else:
                    await self._store_result(job, line, name, answer.status, answer.body)

    def _command(self, job: Job, request: RequestLine) -> j.Compute:
        row = job.row
        return j.Compute(
            number=next(self._numbers),
            user=f"{row.owner.user}.{row.gateway}",
            label=row.owner.label,
            key=row.key,
            key_limits=row.key_limits,
            priority=cast("Priority", row.priority),
            models=row.models,
            url=request.url,
            body=bytes(request.body),
            response_id=row.id if row.events else "",
        )

    async def _store_result(
        self, job: Job, line: Line, name: str, status: int, body: bytes
    ) -> None:
        data = result_line(job.row.id, line.number, name, status, body)
        await self._store(partial(self._jobs.add_result, job, line, data, failed=status != OK))

    def _is_sent_again(self, feed: _Feed, again: _Refused, answer: j.Done) -> bool:
        """Note that a refused request is sent again; return whether it is."""
        now = time.monotonic()
        again.since = again.since or now
        if now - again.since > REFUSED_S_MAX:
            return False
        pause_s = retry_pause_s(again.refusals, answer.retry_after_s) * random.uniform(1.0, 1.2)
        again.refusals += 1
        heapq.heappush(feed.again, (now + pause_s, next(self._numbers), again))
        return True

    async def _note_loss(self, job: Job, feed: _Feed, again: _Refused, exc: ProcessLost) -> None:
        """Send a request again whose process has ended, unless it may be the cause."""
        again.losses += not isinstance(exc, ProcessNotStarted)
        if again.losses < LOSSES_MAX:
            pause_s = retry_pause_s(again.losses, None)
            entry = (time.monotonic() + pause_s, next(self._numbers), again)
            heapq.heappush(feed.again, entry)
            return
        line, text = again.line, f"{LOSSES_MAX} processes ended while they computed the request"
        body = msgspec.json.encode({"error": {"message": text, "type": "server_error"}})
        data = await self._jobs.in_reader(self._jobs.store.read, job.row.file, *line[1:])
        name = read_request(data, line.number, job.row.endpoint).custom_id
        await self._store_result(job, line, name, 500, body)

    async def _store(self, store: Callable[[], Awaitable[None]]) -> None:
        """Store a result, and try again while that fails: it is not computed again."""
        while True:
            try:
                await store()
                return
            except BackendError:
                await anyio.sleep(STORE_RETRY_S)

    # The process.

    async def _live_process(self) -> JobProcess:
        """Return the process, after it was started if necessary. One request at a time calls it.

        :raises ProcessNotStarted: it cannot be started now.
        """
        if self._process is not None and not self._process.lost:
            return self._process
        await self._end_process()
        process = JobProcess()
        try:
            await process.start(self._socket_path())
        except (OSError, LoadFailed) as exc:
            await process.end()
            log.error("jobs.process_not_started", cause=str(exc))
            raise ProcessNotStarted from None
        except BaseException:
            with anyio.CancelScope(shield=True):
                await process.end()
            raise
        self._process = process
        self._on_process(process.pid)
        self._group.start_soon(process.read)
        log.info("jobs.process_started", pid=process.pid)
        return process

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._on_process(0)
            with anyio.CancelScope(shield=True):
                await process.end()


def _is_failure(event: bytes) -> bool:
    """Return whether an event is the failure of a response."""
    return event.startswith(b'{"type":"response.failed"')


async def _cancel_with_job(job: Job, scope: anyio.CancelScope) -> None:
    """Cancel *scope* when a job ends."""
    while not job.ended:
        await job.changed.wait()
    scope.cancel()
