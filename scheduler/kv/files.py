"""The KV files of one model, and the file thread that writes, reads and checks them."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .file_format import (
    FINGERPRINT,
    KvDamaged,
    KvFile,
    KvKey,
    read_state,
    scan_folder,
    unlink_quietly,
    write_state,
)

KV_FILES_MAX = 10_000
"""Bound on the files of all fingerprints and owners together, and on a scan."""
QUEUE_BYTES_MAX = 256 << 20
QUEUE_COUNT_MAX = 64
CLOSE_S = 5.0
_READ_RANK, _WRITE_RANK, _STOP_RANK = 1, 2, 0


@dataclass(frozen=True, slots=True)
class FileWritten:
    """The file was written."""

    file: KvFile


@dataclass(frozen=True, slots=True)
class FileRead:
    """The checked state of a file."""

    file: KvFile
    state: bytes


@dataclass(frozen=True, slots=True)
class FilesDeleted:
    """The files of one `queue_delete` were deleted."""

    keys: tuple[KvKey, ...]


@dataclass(frozen=True, slots=True)
class FileFailed:
    """An *operation*, "write" or "read", failed. After a failed read the file is deleted."""

    key: KvKey
    operation: str
    cause: str


@dataclass(frozen=True, slots=True)
class _Write:
    key: KvKey
    state: bytes
    seconds: float


_Job = _Write | KvFile | tuple[KvKey, ...] | threading.Event | None
_Result = FileWritten | FileRead | FilesDeleted | FileFailed


class KvFiles:
    """The KV files of one model, and the thread that reads and writes them.

    Its methods belong to the engine's thread and never block, except `scan`, `flush` and `close`.
    The file thread owns nothing: it takes jobs with immutable buffers from one queue and puts
    results into another. Reads precede writes, because tasks wait for them. The jobs whose results
    were not returned are bounded by `QUEUE_BYTES_MAX` and `QUEUE_COUNT_MAX`; a larger state is
    accepted if nothing else is queued.
    """

    def __init__(self, directory: Path, fingerprint: str) -> None:
        assert FINGERPRINT.fullmatch(fingerprint), fingerprint
        self._fingerprint = fingerprint
        self._folder = directory / fingerprint
        self._jobs: queue.PriorityQueue[tuple[int, int, _Job]] = queue.PriorityQueue()
        self._results: queue.SimpleQueue[tuple[_Result, int]] = queue.SimpleQueue()
        self._serials = itertools.count()
        self.pending = 0
        """Jobs whose results were not returned, and deletions that are not done."""
        self._bytes = 0
        self._closed = False
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._work, name="kv-files", daemon=True)
        self._thread.start()

    # Called by the engine.

    def scan(self) -> list[KvFile]:
        """Return the files of this fingerprint, the least recently used first.

        Reads only headers, of at most `KV_FILES_MAX` files; states are checked when they are read.
        Deletes damaged, unrelated and unfinished files. Must be called once, before other methods.
        """
        found = itertools.islice(scan_folder(self._folder), KV_FILES_MAX)
        return [file for _, file in sorted(found, key=lambda pair: pair[0])]

    def queue_write(self, key: KvKey, state: bytes, seconds: float) -> bool:
        """Queue a state, which took *seconds* to compute; return False if the queue is full."""
        return self._queue_job(_WRITE_RANK, _Write(key, state, seconds), len(state))

    def queue_read(self, file: KvFile) -> bool:
        """Queue the reading of *file*; return False if the queue is full."""
        return self._queue_job(_READ_RANK, file, file.size)

    def queue_delete(self, keys: Sequence[KvKey]) -> None:
        """Queue the deletion of the files of *keys*, after the writes that were queued before.

        Never refused: there are no more files than were written. `pending` counts it until done.
        """
        self.pending += 1
        self._put(_WRITE_RANK, tuple(keys))

    def results(self) -> list[FileWritten | FileRead | FilesDeleted | FileFailed]:
        """Return the results since the last call; none after `close`."""
        if self._closed:
            return []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        results: list[_Result] = []
        with contextlib.suppress(queue.Empty):
            while True:
                result, size = self._results.get_nowait()
                self.pending -= 1
                self._bytes -= size
                results.append(result)
        return results

    def fileno(self) -> int:
        """Return a descriptor that is readable while results wait (and sometimes without any)."""
        return self._event

    def path(self, key: KvKey) -> Path:
        """Return the path of the state of *key*, once it is written."""
        return self._folder / str(key.owner) / key.name

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued jobs are done; return False after *timeout_s*."""
        done = threading.Event()
        self._put(_WRITE_RANK, done)
        return done.wait(timeout_s)

    def close(self) -> None:
        """End the thread after its present job; later jobs are dropped."""
        if self._closed:
            return
        self._closed = True
        self._put(_STOP_RANK, None)
        self._thread.join(CLOSE_S)
        if (
            not self._thread.is_alive()
        ):  # otherwise it hangs in a file operation, and may still write to this
            os.close(self._event)

    def _queue_job(self, rank: int, job: _Job, size: int) -> bool:
        full = self._bytes and self._bytes + size > QUEUE_BYTES_MAX
        if self._closed or full or self.pending >= QUEUE_COUNT_MAX:
            return False
        self.pending += 1
        self._bytes += size
        self._put(rank, job)
        return True

    def _put(self, rank: int, job: _Job) -> None:
        self._jobs.put((rank, next(self._serials), job))

    # The file thread.

    def _work(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            if isinstance(job, threading.Event):
                job.set()
                continue
            self._results.put(self._run_job(job))
            del job  # a state must not stay in memory until the next job
            os.eventfd_write(self._event, 1)

    def _run_job(self, job: _Write | KvFile | tuple[KvKey, ...]) -> tuple[_Result, int]:
        """Do *job*; return its result and the bytes that it held of the queue's bound."""
        if isinstance(job, _Write):
            return self._write(job), len(job.state)
        if isinstance(job, KvFile):
            return self._read(job), job.size
        for key in job:
            unlink_quietly(self.path(key))
        return FilesDeleted(job), 0

    def _write(self, job: _Write) -> FileWritten | FileFailed:
        path = self.path(job.key)
        try:
            file = write_state(path, self._fingerprint, job.key, job.state, job.seconds)
        except (OSError, MemoryError, KvDamaged) as exc:
            return FileFailed(job.key, "write", _cause(exc))
        return FileWritten(file)

    def _read(self, file: KvFile) -> FileRead | FileFailed:
        path = self.path(file.key)  # not `file.path`: this one is in our directory
        try:
            return FileRead(file, read_state(path, file.key))
        except (OSError, MemoryError, KvDamaged) as exc:
            unlink_quietly(path)
            return FileFailed(file.key, "read", _cause(exc))


def _cause(exc: BaseException) -> str:
    if isinstance(exc, OSError):
        return exc.strerror or str(exc)
    return "memory is short" if isinstance(exc, MemoryError) else str(exc)
