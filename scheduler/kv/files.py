"""The KV files of one model, and the file thread that writes, reads and checks them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..call_thread import CallThread
from .file_format import (
    FINGERPRINT,
    KvDamaged,
    KvFile,
    KvKey,
    read_key,
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
_READ_RANK, _READ_AHEAD_RANK, _WRITE_RANK = 0, 1, 2


@dataclass(frozen=True, slots=True)
class FileWritten:
    """The file was written."""

    file: KvFile


@dataclass(frozen=True, slots=True)
class FileFound:
    """The daemon has written the file, and its key was read."""

    file: KvFile


@dataclass(frozen=True, slots=True)
class FileRead:
    """The checked state of a file."""

    file: KvFile
    state: bytes


@dataclass(frozen=True, slots=True)
class FilesDeleted:
    """The files of one `queue_delete` were deleted, for *request*."""

    keys: tuple[KvKey, ...]
    request: int = 0


@dataclass(frozen=True, slots=True)
class FileFailed:
    """An *operation*, "write" or "read", failed. After a failed read the file is deleted."""

    key: KvKey
    operation: str
    cause: str


_Result = FileFound | FileWritten | FileRead | FilesDeleted | FileFailed


class KvFiles:
    """The KV files of one model, and the thread that reads and writes them.

    Its methods belong to the engine's thread and never block, except `scan`, `flush` and `close`.
    The file thread owns nothing: its jobs have immutable buffers. Reads precede writes, because
    tasks wait for them. The jobs whose results were not returned are bounded by `QUEUE_BYTES_MAX`
    and `QUEUE_COUNT_MAX`; a larger state is accepted if nothing else is queued.
    """

    def __init__(self, directory: Path, fingerprint: str) -> None:
        assert FINGERPRINT.fullmatch(fingerprint), fingerprint
        self._fingerprint = fingerprint
        self._folder = directory / fingerprint
        self.pending = 0
        """Jobs whose results were not returned, and deletions that are not done."""
        self._bytes = 0
        self._closed = False
        self._thread = CallThread("kv-files")
        self._thread.start()  # now: a failure at the first write would end turns
        self.fileno = self._thread.fileno

    def scan(self) -> list[KvFile]:
        """Return the files of this fingerprint, the least recently used first.

        Reads only headers, of at most `KV_FILES_MAX` files; states are checked when they are read.
        Deletes damaged, unrelated and unfinished files. Must be called once, before other methods.
        """
        found = itertools.islice(scan_folder(self._folder), KV_FILES_MAX)
        return [file for _, file in sorted(found, key=lambda pair: pair[0])]

    def queue_write(self, key: KvKey, state: bytes, seconds: float) -> bool:
        """Queue a state, which took *seconds* to compute; return False if the queue is full."""
        return self._queue_job(_WRITE_RANK, partial(self._write, key, state, seconds), len(state))

    def queue_read(self, file: KvFile, *, ahead: bool = False) -> bool:
        """Queue the reading of *file*; return False if the queue is full. One that is read *ahead*
        of its use comes after those that are needed now.
        """
        rank = _READ_AHEAD_RANK if ahead else _READ_RANK
        return self._queue_job(rank, partial(self._read, file, ahead), file.size)

    def queue_find(self, owner: int, name: str) -> bool:
        """Queue the reading of the key of a file; return False if the queue is full."""
        path = self._folder / str(owner) / name
        return self._queue_job(_READ_RANK, partial(self._find, path), 0)

    def queue_delete(self, keys: Sequence[KvKey], request: int = 0) -> None:
        """Queue the deletion of the files of *keys*, after the writes that were queued before.

        It is never refused, because there are no more files than were written. `pending` counts the
        deletion until it is done.
        """
        self._put(_WRITE_RANK, partial(self._delete, tuple(keys), request), 0)

    def results(self) -> list[FileFound | FileWritten | FileRead | FilesDeleted | FileFailed]:
        """Return the results since the last call; none after `close`."""
        results: list[_Result] = []
        for call in () if self._closed else self._thread.results():
            if isinstance(call.outcome, Exception):
                raise call.outcome
            if call.outcome is not None:  # None is the outcome of a `flush`
                result, size = call.outcome
                self.pending -= 1
                self._bytes -= size
                results.append(result)
        return results

    def path(self, key: KvKey) -> Path:
        """Return the path of the state of *key*, once it is written."""
        return self._folder / str(key.owner) / key.name

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued jobs are done; return False after *timeout_s*."""
        done = threading.Event()
        self._thread.queue_call(done.set, _WRITE_RANK)
        return done.wait(timeout_s)

    def close(self) -> None:
        """End the thread after its present job; later jobs are dropped."""
        if not self._closed:
            self._closed = True
            self._thread.close(CLOSE_S)

    def _queue_job(self, rank: int, job: Callable[[], _Result], size: int) -> bool:
        full = self._bytes and self._bytes + size > QUEUE_BYTES_MAX
        if self._closed or full or self.pending >= QUEUE_COUNT_MAX:
            return False
        self._put(rank, job, size)
        return True

    def _put(self, rank: int, job: Callable[[], _Result], size: int) -> None:
        self.pending += 1
        self._bytes += size
        self._thread.queue_call(partial(self._run_job, job, size), rank)

    # The jobs.

    def _run_job(self, job: Callable[[], _Result], size: int) -> tuple[_Result, int]:
        """Do *job*; return its result and the bytes that it took of `QUEUE_BYTES_MAX`."""
        return job(), size

    def _delete(self, keys: tuple[KvKey, ...], request: int) -> FilesDeleted:
        for key in keys:
            unlink_quietly(self.path(key))
        return FilesDeleted(keys, request)

    def _find(self, path: Path) -> FileFound | FilesDeleted:
        try:
            return FileFound(read_key(path))
        except (OSError, KvDamaged):
            return FilesDeleted(())

    def _write(self, key: KvKey, state: bytes, seconds: float) -> FileWritten | FileFailed:
        try:
            return FileWritten(write_state(self.path(key), self._fingerprint, key, state, seconds))
        except (OSError, MemoryError, KvDamaged) as exc:
            return FileFailed(key, "write", _cause(exc))

    def _read(self, file: KvFile, ahead: bool) -> FileRead | FileFailed:
        path = self.path(file.key)  # not `file.path`: this one is in our directory
        try:
            return FileRead(file, read_state(path, file.key, is_use=not ahead))
        except (OSError, MemoryError, KvDamaged) as exc:
            unlink_quietly(path)
            return FileFailed(file.key, "read", _cause(exc))


def _cause(exc: BaseException) -> str:
    if isinstance(exc, OSError):
        return exc.strerror or str(exc)
    return "there is too little memory" if isinstance(exc, MemoryError) else str(exc)
