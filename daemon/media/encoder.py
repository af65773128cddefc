"""The encoder of one loaded model: its images and sounds are read and encoded in a process of its
own, one at a time, while the worker computes.

The process reads untrusted bytes with C code. If it dies, the evidence decides: a content that
crashed it is quarantined for its user, and one that did not is processed again in the next process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Any, Generic, NamedTuple, TypeVar

import anyio
import anyio.abc
import anyio.to_thread
import msgspec
import structlog

from ... import backends
from ...backends import ENGINES, ModelSpec
from ...backends import media_process as p
from ...backends.errors import (
    BackendError,
    InferdError,
    LoadFailed,
    Outcome,
    OutOfMemory,
    TooLarge,
    UnsupportedOperation,
    WorkerCrashed,
    error_from_wire,
)
from ...backends.fd_frames import close_all
from ...backends.library import LLAMA_COMMIT
from ...backends.media import MediaContent, MediaItem, MediaKind, MediaTokens
from ...backends.memory import resident_bytes
from ...scheduler.kv.store import scoped
from ...scheduler.owner import Requester
from ...scheduler.record import Activity, ActivityKind
from ..workers.cores import LOADING
from ..workers.deaths import (
    ENCODER_PROCESS,
    Cause,
    Death,
    Quarantine,
    Verdict,
    quarantine_error,
)
from ..workers.process import describe_exit
from ..workers.recovery import LOAD_FAULTS_MAX, Restarts
from .answers import BadAnswer, encoded_items, read_media
from .caches import EncodedItem, MediaCaches, ReadMedia
from .encoder_process import EncoderProcess, ProcessLost, start_error
from .encoder_queue import EncoderBounds, EncoderQueue, Job, JobKey, Wish
from .settings import MediaSettings

COMPUTED_S_FACTOR = 5
"""The time for an encoding, in times of that in which a worker must make progress: a large image
takes minutes on one thread, and shows no progress meanwhile. Opening can encode one, to measure.
"""
IDLE_S = 1.0
"""The interval at which an encoder without work looks whether the machine is idle."""
ATTEMPTS_MAX = 3
"""The processes that may be lost with one content, without evidence against it."""
_READING = Activity(ActivityKind.PROMPT, (), 0.0)
_IDLE = Activity(ActivityKind.IDLE, (), 0.0)
"""The activities of a process that dies, by which `deaths` judges it."""
_CPU_LIMITS = (signal.SIGPROF, signal.SIGXCPU)
"""The signals of a process that has used up its CPU time in one request."""

log = structlog.get_logger()


class EncodingResult(StrEnum):
    """The end of a request for embeddings, as metrics count it."""

    ENCODED = "encoded"
    CACHED = "cached"
    """The embeddings were there, or another request's encoding was awaited."""
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EncodingEnded:
    """A request for embeddings has ended; an encoding took *seconds*."""

    result: EncodingResult
    seconds: float = 0.0


class EncoderChange(Enum):
    """An event of an encoder without further facts."""

    WORK = auto()
    """It has begun or ended to compute."""
    DIED = auto()
    """Its process has died."""


EncoderEvent = EncodingEnded | EncoderChange


class Embeddings(NamedTuple):
    """The embeddings of an item in sealed memory; the descriptor *fd* belongs to the receiver.
    *causal* is whether the item's entries see only those before them. They were encoded for this
    request, in *seconds*, unless they are *cached*.
    """

    fd: int
    causal: bool
    seconds: float
    cached: bool


R = TypeVar("R")


class _Waiting(Wish, Generic[R]):
    """A caller that waits for a result, which belongs to the wish until it is taken."""

    def __init__(self, requester: Requester, size_bytes: int):
        super().__init__(requester, size_bytes)
        self.done = anyio.Event()
        self.result: R | InferdError | None = None

    async def wait(self) -> R:
        """Wait for the result and take it."""
        await self.done.wait()
        result, self.result = self.result, None
        if isinstance(result, InferdError):
            raise result
        assert result is not None, "it is done"
        return result


class _EncodeWish(_Waiting[Embeddings]):
    """A caller that waits for the embeddings of the item *digest*, for the sake of *by*."""

    def __init__(self, requester: Requester, digest: bytes, by: object):
        super().__init__(requester, 0)
        self.digest, self.by = digest, by

    def close(self) -> None:
        """Close embeddings that nobody has taken."""
        if isinstance(self.result, Embeddings):
            os.close(self.result.fd)
            self.result = None


class MediaEncoder:
    """Reads and encodes the images and sounds of the model *spec*. Lives on the daemon's event
    loop; `run` owns the process.

    *open_content* returns a descriptor of a user's content, and may block. *quarantine* is that of
    the model's contents. *known* are the facts of its projector from an earlier process; if there
    are none, the process measures its memory. *caches* are those of an earlier encoder of the
    model. *note_opened* gets the facts of each process. *emit* gets the events. *idle_threads*
    returns the cores that are free, or 0 while a model computes.
    """

    def __init__(
        self,
        spec: ModelSpec,
        settings: MediaSettings,
        *,
        open_content: Callable[[int, bytes], int],
        quarantine: Quarantine,
        shared: bool,
        hang_s: float,
        emit: Callable[[EncoderEvent], None],
        known: p.ProjectorFacts | None = None,
        caches: MediaCaches | None = None,
        note_opened: Callable[[p.ProjectorFacts], None] = lambda _: None,
        claim_oom_kill: Callable[[], bool] = lambda: False,
        idle_threads: Callable[[], int] = lambda: 0,
        bounds: EncoderBounds | None = None,
        strict: bool = False,
        seconds: Callable[[], float] = time.monotonic,
    ):
        self.facts = known
        """Facts about the projector, once they are known."""
        self.error: InferdError | None = None
        """The reason for which the process does not start."""
        self.pid = 0
        """The process, or 0 if there is none now."""
        self.size_whole_max = 0
        """The most entries of an item that must be computed in one step; 0: unbounded."""
        self.caches = MediaCaches(settings.cache_bytes) if caches is None else caches
        self.keeps_caches = False
        """The caches outlive the encoder."""
        self._spec, self._settings = spec, settings
        self._open_content, self._shared = open_content, shared
        self._hang_s, self._emit, self._note_opened = hang_s, emit, note_opened
        self._name, self._quarantine = spec.name, quarantine
        self._claim_oom_kill, self._seconds = claim_oom_kill, seconds
        self._idle_threads = idle_threads
        self._queue = EncoderQueue(bounds, strict=strict)
        self._restarts = Restarts(seconds)
        self._threads = self._threads_sent = 1
        self._is_opened = self._is_opening = self._made_progress = False
        self._starts_on_demand = False
        self._open_faults = 0
        self._job: Job | None = None
        """The job that the process does."""
        self._wake = anyio.Event()
        self._scope = anyio.CancelScope()
        self._group: anyio.abc.TaskGroup | None = None
        self._closed = False

    def bind_model(self, name: str, quarantine: Quarantine) -> None:
        """Serve as the model *name* from now on, with that model's quarantine."""
        self._name, self._quarantine = name, quarantine

    # Requests.

    async def read(
        self, requester: Requester, contents: Sequence[MediaContent]
    ) -> list[MediaTokens]:
        """Return the tokens and entries of contents, without encoding them.

        :raises UnsupportedOperation: the model does not read contents of this kind.
        :raises InvalidArgument: a content is not what it is said to be.
        :raises TooLarge: an item is larger than a step may be, or too large to decode.
        :raises Busy: too many contents of the user wait.
        :raises WorkerCrashed: a content has crashed the process.

        The errors' `data.item` is the index of the content.
        """
        user, scope = requester.owner.user, self._scope_of(requester)
        for index, content in enumerate(contents):
            self._check_content(user, content, index)
        found = [self.caches.find_read(scope, content) for content in contents]
        missing = [index for index, read in enumerate(found) if read is None]
        if missing:
            wanted = {index: contents[index] for index in missing}
            sizes = await anyio.to_thread.run_sync(_content_sizes, self._open_content, user, wanted)
            now_read = await self._wait_read(requester, wanted, sizes)
            found = [now_read.get(index, read) for index, read in enumerate(found)]
        tokens = []
        for index, read in enumerate(found):
            assert read is not None, "all were read"
            self._check_size(read, index)
            tokens.append(read.media_tokens())
        return tokens

    async def _wait_read(
        self,
        requester: Requester,
        contents: Mapping[int, MediaContent],
        sizes: Mapping[int, int],
    ) -> dict[int, ReadMedia]:
        """Wait until the process has read *contents*."""
        self._check_open()
        self._queue.check_bounds(requester.owner.user, len(contents), sum(sizes.values()))
        scope, found = self._scope_of(requester), dict[int, ReadMedia]()
        jobs = dict[_Waiting[ReadMedia], Job]()
        wishes = {index: _Waiting[ReadMedia](requester, size) for index, size in sizes.items()}
        for index, wish in wishes.items():
            jobs[wish] = self._queue.add_wish(JobKey(scope, contents[index], False), wish)
        self._wake.set()
        try:
            for index, wish in wishes.items():
                try:
                    found[index] = await wish.wait()
                except InferdError as exc:
                    raise error_of_item(exc, index) from exc
        finally:
            for wish, job in jobs.items():
                self._queue.remove_wish(job, wish)
        return found

    async def embeddings(
        self, requester: Requester, item: MediaItem, by: object = None
    ) -> Embeddings:
        """Return the embeddings of an item. They count as encoded for the first of the requests
        that wait for them, and for all others of the same *by*.

        :raises InferdError: they cannot be computed.
        """
        try:
            found = await self._find_embeddings(requester, item, by)
        except InferdError as exc:
            refused = exc.outcome is Outcome.REFUSED
            self._emit(EncodingEnded(EncodingResult.REFUSED if refused else EncodingResult.FAILED))
            raise
        result = EncodingResult.CACHED if found.cached else EncodingResult.ENCODED
        self._emit(EncodingEnded(result, found.seconds))
        return found

    async def _find_embeddings(
        self, requester: Requester, item: MediaItem, by: object
    ) -> Embeddings:
        user, scope = requester.owner.user, self._scope_of(requester)
        self._check_content(user, item.content, None)
        self._check_open()
        cached = self.caches.find_encoded(scope, item.digest)
        if cached is not None:
            return _copied(cached, 0.0, cached=True)
        wish = _EncodeWish(requester, item.digest, by)
        job = self._queue.add_wish(JobKey(scope, item.content, True), wish)
        self._wake.set()
        try:
            return await wish.wait()
        finally:
            self._queue.remove_wish(job, wish)
            wish.close()

    def scope_of(self, user: int) -> int:
        """Return the scope of KV states to which a user's embeddings belong."""
        return scoped(user, "", shared=self._shared)[0]

    def _scope_of(self, requester: Requester) -> int:
        return self.scope_of(requester.owner.user)

    def _check_content(self, user: int, content: MediaContent, index: int | None) -> None:
        refusal = self._quarantine.refusal_of_text(self._name, user, _quarantined(content))
        if refusal is not None:
            raise refusal if index is None else error_of_item(refusal, index)

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()

    def _closed_error(self) -> WorkerCrashed:
        return WorkerCrashed(
            f"the encoder process of {self._name!r} ended with the model",
            data={"model": self._name},
        )

    def _check_size(self, read: ReadMedia, index: int) -> None:
        if not 0 < self.size_whole_max < read.size_whole:
            return
        raise TooLarge(
            f"the image has {read.size_whole} tokens, which see each other and are computed in one"
            f" step; a step of {self._name!r} holds {self.size_whole_max}",
            hint="raise batch-size, or lower image-tokens-max",
            data={"item": index, "tokens": read.size_whole, "tokens_max": self.size_whole_max},
        )

    # The use of cores; see `workers.cores.CoreUser`.

    @property
    def claim(self) -> int | None:
        """The claim on the cores: what turns leave, but one core."""
        return LOADING if self._is_opening or self._job is not None else None

    @property
    def users(self) -> Collection[int]:
        """The users for whom it computes."""
        job = self._job
        return {wish.requester.owner.user for wish in job.wishes} if job is not None else set()

    @property
    def threads_max(self) -> int:
        """The threads that the configuration allows."""
        return max(1, self._spec.threads or self._settings.cores)

    def set_threads(self, threads: int, first: int) -> None:
        """Compute with *threads* threads from the next content on."""
        self._threads = threads

    # Facts.

    @property
    def kinds(self) -> frozenset[MediaKind]:
        """The kinds of contents that it reads; all while its projector is unknown."""
        facts = self.facts
        found: dict[MediaKind, bool] = {
            "image": facts is None or facts.images,
            "audio": facts is None or facts.sounds,
        }
        return frozenset(kind for kind, reads in found.items() if reads)

    @property
    def resident_bytes(self) -> int:
        """The memory that the process occupies now; 0 if there is none."""
        return resident_bytes(self.pid) if self.pid else 0

    @property
    def waiting(self) -> int:
        """The number of requests that wait for the process, or for which it works."""
        return len(self._queue)

    # The process.

    async def run(
        self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Start the process, serve, and start another one whenever it dies, until `close`."""
        try:
            with self._scope:
                async with anyio.create_task_group() as self._group:
                    task_status.started()
                    while True:
                        await self._wait_start()
                        await self._serve_process()
        finally:
            self._group = None
            self.close()

    def close(self) -> None:
        """End the process, and refuse the requests that wait and all later ones."""
        self._closed = True
        self._scope.cancel()
        self._refuse_waiting(self._closed_error())
        if self._group is None and not self.keeps_caches:
            self.caches.clear()

    def start_soon(self, work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> bool:
        """Run *work* until the encoder is closed; return False if it is closed."""
        if self._group is None or self._closed:
            return False
        self._group.start_soon(_guarded, work, *arguments)
        return True

    async def _wait_start(self) -> None:
        """Wait until a process may start: after deaths with a delay, and after a failed start only
        once it is needed.
        """
        while True:
            while self._starts_on_demand and not self._queue.has_waiting_job:
                await self._wait_wake()
            try:
                delay_s = self._restarts.delay_s(self._name)
            except WorkerCrashed as exc:
                self._refuse_waiting(
                    WorkerCrashed(
                        f"the encoder process of {self._name!r} has died too often",
                        hint="see the daemon's log; a later request starts it again",
                        data=exc.data | {"cause": "input"},
                    )
                )
                self._starts_on_demand = True
                continue
            if not delay_s:
                return
            await anyio.sleep(delay_s)

    async def _wait_wake(self) -> None:
        if not self._wake.is_set():
            await self._wake.wait()
        self._wake = anyio.Event()

    async def _serve_process(self) -> None:
        """Start a process and serve until it has exited, then judge its exit."""
        module = f"{backends.__name__}.{ENGINES[self._spec.backend].encoder}"
        process = EncoderProcess(module, lambda: {"model": self._name, "process": ENCODER_PROCESS})
        error: InferdError | None = None
        code: int | None = None
        self._is_opened = self._made_progress = False
        try:
            await process.start()
            self.pid = process.pid
            await self._open(process)
            await self._serve(process)
        except ProcessLost:
            pass
        except OSError as exc:
            error = start_error(self._name, exc)
        except InferdError as exc:
            error = exc
        finally:
            with anyio.CancelScope(shield=True):
                code = await process.end()
            self.pid = 0
        if error is None:
            self._note_death(process, code)
        else:
            self._note_failed_start(error)
        self._emit(EncoderChange.WORK)

    async def _open(self, process: EncoderProcess) -> None:
        """Open the projector.

        :raises InferdError: it cannot be opened.
        """
        self._is_opening, began = True, self._seconds()
        self._emit(EncoderChange.WORK)
        try:
            self._threads_sent = self._threads
            spec = msgspec.structs.replace(self._spec, name=self._name)
            request = p.OpenProjector(
                *(spec, self._threads, 0 if self.facts is None else self.facts.buffer_bytes),
                *(self._settings.pixels_max, self._settings.seconds_max),
            )
            reply = await self._request(process, request)
        finally:
            self._is_opening = False
        if not isinstance(reply, p.ProjectorOpened):
            process.sent_garbage = True
            raise ProcessLost
        self.facts, self.error, self._is_opened = reply.facts, None, True
        self.caches.use_projector(reply.facts.fingerprint)
        self._starts_on_demand, self._open_faults = False, 0
        took = round(self._seconds() - began, 3)
        log.info(
            "encoder.started",
            model=self._name,
            pid=self.pid,
            projector=reply.facts.kind,
            seconds=took,
        )
        self._note_opened(reply.facts)
        self._emit(EncoderChange.WORK)

    async def _request(
        self, process: EncoderProcess, request: p.OpenProjector | p.ReadContent, content: int = -1
    ) -> p.Reply:
        """Return the answer to a request, which has no descriptors.

        :raises InferdError: the request is refused.
        """
        seconds_max = self._hang_s
        if isinstance(request, p.OpenProjector):
            seconds_max *= COMPUTED_S_FACTOR
        reply, descriptors = await process.request(request, content, seconds_max=seconds_max)
        close_all(descriptors)
        if isinstance(reply, p.Refused):
            raise error_from_wire(reply.error)
        return reply

    async def _serve(self, process: EncoderProcess) -> None:
        """Do the jobs, one at a time, until the process has exited."""
        loop, exit_fileno = asyncio.get_running_loop(), process.exit_fileno()
        loop.add_reader(exit_fileno, lambda: self._wake.set())
        try:
            while not process.has_exited:
                job = self._queue.next_job()
                if job is None:
                    await self._wait_job(process)
                else:
                    await self._do_job(process, job)
        finally:
            loop.remove_reader(exit_fileno)

    async def _wait_job(self, process: EncoderProcess) -> None:
        """Wait for a job. While the machine is idle, the process is brought to all its threads, for
        which it opens the projector again, so that the next image need not wait for that.
        """
        has_all = self._threads_sent >= self.threads_max
        with anyio.move_on_after(None if has_all else IDLE_S):
            await self._wait_wake()
            return
        threads = min(self._idle_threads(), self.threads_max)
        if threads > self._threads_sent:
            self._threads = self._threads_sent = threads
            await process.send(p.UseThreads(threads))

    async def _do_job(self, process: EncoderProcess, job: Job) -> None:
        self._job, began = job, self._seconds()
        self._emit(EncoderChange.WORK)
        try:
            await self._process_content(process, job)
        except InferdError as exc:
            self._fail_job(job, exc, self._seconds() - began)
        # A job whose process was lost stays until the exit is judged.
        self._made_progress, self._job = True, None
        self._emit(EncoderChange.WORK)

    async def _process_content(self, process: EncoderProcess, job: Job) -> None:
        """Read or encode a content, and settle the wishes for it.

        :raises InferdError: it cannot be processed.
        """
        content, began = job.key.content, self._seconds()
        self._check_kind(content)
        if job.key.encodes and self._threads != self._threads_sent:  # it opens the projector again
            self._threads_sent = self._threads
            await process.send(p.UseThreads(self._threads))
        descriptor = await anyio.to_thread.run_sync(
            self._open_content, job.requester.owner.user, content.sha256
        )
        try:
            read = self.caches.find_read(job.key.scope, content)
            if read is None:
                read = await self._read(process, job.key, descriptor)
            if job.key.encodes:
                began = self._seconds()
                items = await self._encode(process, content, read, descriptor)
                self._settle_encoded(job, items, self._seconds() - began)
            else:
                self._settle_read(job, read, self._seconds() - began)
        finally:
            os.close(descriptor)

    def _check_kind(self, content: MediaContent) -> None:
        if content.kind not in self.kinds:
            raise unsupported_kind(self._name, content.kind)

    async def _read(self, process: EncoderProcess, key: JobKey, descriptor: int) -> ReadMedia:
        content = key.content
        request = p.ReadContent(content.kind, content.tokens_max)
        reply = await self._request(process, request, descriptor)
        assert self.facts is not None, "the process is open"
        try:
            if not isinstance(reply, p.ContentRead):
                raise BadAnswer("no pieces")
            read = read_media(reply.pieces, content, self.facts.fingerprint, LLAMA_COMMIT)
        except BadAnswer as exc:
            process.sent_garbage = True
            raise ProcessLost from exc
        self.caches.add_read(key.scope, content, read)
        return read

    async def _encode(
        self, process: EncoderProcess, content: MediaContent, read: ReadMedia, descriptor: int
    ) -> dict[bytes, EncodedItem]:
        """Return the embeddings of a content's items, by digest."""
        request = p.EncodeContent(content.kind, content.tokens_max)
        seconds_max = COMPUTED_S_FACTOR * self._hang_s
        reply, received = await process.request(request, descriptor, seconds_max=seconds_max)
        assert self.facts is not None, "the process is open"
        try:
            if isinstance(reply, p.Refused):
                raise error_from_wire(reply.error)
            if not isinstance(reply, p.ContentEncoded):
                raise BadAnswer("no embeddings")
            return encoded_items(read.items, reply.causal, received, self.facts)
        except BadAnswer as exc:
            close_all(received)
            process.sent_garbage = True
            raise ProcessLost from exc
        except InferdError:
            close_all(received)
            raise

    # The ends of jobs.

    def _settle_read(self, job: Job, read: ReadMedia, seconds: float) -> None:
        for wish in self._queue.end_job(job, seconds):
            _settle(wish, read)

    def _settle_encoded(self, job: Job, items: Mapping[bytes, EncodedItem], seconds: float) -> None:
        wishes = [w for w in self._queue.end_job(job, seconds) if isinstance(w, _EncodeWish)]
        for wish in wishes:
            item, first = items.get(wish.digest), wishes[0]
            if item is None:
                _settle(wish, other_projector(self._name))
                continue
            is_own = wish is first or (wish.by is not None and wish.by == first.by)
            try:
                _settle(wish, _copied(item, seconds if wish is first else 0.0, cached=not is_own))
            except BackendError as exc:
                _settle(wish, exc)
        for digest, item in items.items():
            self.caches.add_encoded(job.key.scope, digest, item)

    def _fail_job(self, job: Job, error: InferdError, seconds: float = 0.0) -> None:
        for wish in self._queue.end_job(job, seconds):
            _settle(wish, error)

    def _refuse_waiting(self, error: InferdError) -> None:
        for wish in self._queue.remove_jobs():
            _settle(wish, error)
        self._job = None

    # The exit of the process.

    def _note_failed_start(self, error: InferdError) -> None:
        self.error, self._starts_on_demand = error, True
        log.error("encoder.failed", model=self._name, cause=error.message)
        self._restarts.note_death(made_progress=False, needed=self._queue.has_waiting_job)
        self._refuse_waiting(error)

    def _note_death(self, process: EncoderProcess, code: int | None) -> None:
        """Judge the death of the process, and the content with which it died."""
        used_up_cpu = code is not None and -code in _CPU_LIMITS
        if used_up_cpu:
            code = -signal.SIGKILL
        death = Death(
            activity=_IDLE if self._job is None else _READING,
            loaded=self._is_opened,
            code=code,
            was_killed_as_hung=process.was_killed_as_hung or used_up_cpu,
            used_cpu=process.used_cpu or used_up_cpu,
            was_oom_killed=code == -signal.SIGKILL and self._claim_oom_kill(),
            sent_garbage=process.sent_garbage,
            made_progress=self._made_progress,
        )
        status = "used up its CPU time" if used_up_cpu else describe_exit(code)
        log.warning(
            "encoder.died",
            model=self._name,
            cause=status,
            classified=death.cause.value,
            phase=death.phase.value,
        )
        self._emit(EncoderChange.DIED)
        self._restarts.note_death(
            made_progress=death.made_progress, needed=self._queue.has_waiting_job
        )
        job, self._job = self._job, None
        if not death.loaded:
            self._judge_start(death.cause, status)
        elif job is not None:
            self._judge_job(job, death.verdict)

    def _judge_start(self, cause: Cause, status: str) -> None:
        """Refuse the waiting requests if the projector is to blame for a death."""
        self._open_faults += cause in (Cause.FAULT, Cause.HANG)
        if cause is Cause.OUT_OF_MEMORY:
            error: InferdError = out_of_memory(self._name, "its start")
        elif self._open_faults >= LOAD_FAULTS_MAX:
            error = LoadFailed(
                f"opening the projector of {self._name!r} ended its process ({status})",
                hint="the projector's file is probably damaged: see the daemon's log",
                data={"cause": "crashed"},
            )
        else:
            return
        self._open_faults, self._starts_on_demand, self.error = 0, True, error
        self._refuse_waiting(error)

    def _judge_job(self, job: Job, verdict: Verdict) -> None:
        content, user = job.key.content, job.requester.owner.user
        match verdict:
            case Verdict.REFUSE_INPUT:
                self._quarantine.add_text(user, _quarantined(content))
                log.error(
                    "media.quarantined", model=self._name, sha256=content.sha256.hex(), user=user
                )
                self._fail_job(job, quarantine_error(self._name, ENCODER_PROCESS))
            case Verdict.REFUSE_TASK_FOR_MEMORY:
                self._fail_job(job, out_of_memory(self._name, f"this {word_of(content.kind)}"))
            case _:
                job.attempts += 1
                if job.attempts < ATTEMPTS_MAX:
                    self._queue.repeat_job(job)
                    return
                error = BackendError(
                    f"the encoder process of {self._name!r} was killed {ATTEMPTS_MAX} times with"
                    f" this {word_of(content.kind)}",
                    hint="find out which program kills it, and send the request again",
                )
                self._fail_job(job, error)


def word_of(kind: str) -> str:
    """Return the word for a kind of content."""
    return "image" if kind == "image" else "sound"


def unsupported_kind(model: str, kind: str) -> UnsupportedOperation:
    """Return the error of a content that no projector of a model reads."""
    return UnsupportedOperation(
        f"the model {model!r} reads no {word_of(kind)}s",
        hint="put the projector that belongs to the model, a file mmproj-*.gguf, beside its file,"
        f' or name it in the configuration: [models."{model}"] mmproj = "FILE"; or use a model'
        f" that reads {word_of(kind)}s",
        data={"model": model, "kind": kind},
    )


def other_projector(model: str) -> BackendError:
    """Return the error of an item that another projector, or another version of it, has read."""
    return BackendError(
        f"an image or sound of the history was read by another projector than that of {model!r}",
        hint="send the next turn: the history is read again",
        data={"model": model, "cause": "projector"},
    )


def out_of_memory(model: str, what: str) -> OutOfMemory:
    """Return the error of work for which the kernel has killed the process."""
    return OutOfMemory(
        f"memory ran out while the encoder process of {model!r} computed {what}",
        hint="end other programs, unload models, or send a smaller image",
        data={"model": model},
    )


def error_of_item(error: InferdError, index: int) -> InferdError:
    """Return *error* as that of the content number *index*."""
    fields = error.to_wire()
    fields["data"] = {**error.data, "item": index}
    return error_from_wire(fields)


def _quarantined(content: MediaContent) -> tuple[str, bytes]:
    return content.kind, content.sha256


def _content_sizes(
    open_content: Callable[[int, bytes], int], user: int, contents: Mapping[int, MediaContent]
) -> dict[int, int]:
    """Return the bytes of a user's *contents*, by index. May block."""
    sizes = {}
    for index, content in contents.items():
        try:
            descriptor = open_content(user, content.sha256)
        except InferdError as exc:
            raise error_of_item(exc, index) from exc
        try:
            sizes[index] = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
    return sizes


def _copied(item: EncodedItem, seconds: float, *, cached: bool) -> Embeddings:
    try:
        return Embeddings(item.copy().fd, item.causal, seconds, cached)
    except OSError as exc:
        raise BackendError(
            f"the embeddings cannot be passed on: {exc.strerror}",
            hint="raise the daemon's limit of open files (LimitNOFILE)",
        ) from exc


def _settle(wish: Wish, result: ReadMedia | Embeddings | InferdError) -> None:
    assert isinstance(wish, _Waiting), "no other wishes are added"
    wish.result = result
    wish.done.set()


async def _guarded(work: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
    try:
        await work(*arguments)
    except Exception:  # the other requests continue
        log.exception("background.failed", work=work.__qualname__)
