"""The disk tier of the KV store: an index of the files, reads ahead of use, and writes of states
that memory cannot hold or whose session becomes dormant.

The engine owns `DiskTier`, in which nothing waits for a file. `KvFiles` has the file thread, which
writes, reads and checks the files of one model.
"""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ...backends.base import KvKind
from ...backends.media import has_short_item
from .. import messages as m
from ..call_thread import CallThread
from ..prefix import common_prefix
from ..task import Task
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
from .slots import StateSearch
from .store import KvStore, Origin, SavedState, covered_tokens, is_named_state, thinned

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


@dataclass(slots=True)
class _Read:
    """A file that is being read, with the origins of the states that it becomes in memory, and the
    tasks that wait for them. *ahead* means that no task has needed it yet.
    """

    ahead: bool
    origins: list[Origin] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)


class DiskTier:
    """The files of one model, beside the *store* of its states in memory."""

    def __init__(self, files: KvFiles, store: KvStore, kv_kind: KvKind):
        self.failures = 0
        self.cause = ""
        """The cause of the last failed write or read."""
        self._files, self._store, self._kv_kind = files, store, kv_kind
        self._index: dict[str, tuple[KvFile, array[int]]] = {}
        self._writing: dict[str, KvKey] = {}
        self._reads: dict[str, _Read] = {}
        self._requests: dict[str, list[tuple[int, int | str]]] = {}
        """Requests that wait for the end of a write, each with its answer."""
        for file in files.scan():
            self._index_file(file)

    def __len__(self) -> int:
        return len(self._index)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has results."""
        return self._files.fileno()

    @property
    def bytes(self) -> int:
        """Total size of the files."""
        return sum(file.size for file, _ in self._index.values())

    @property
    def writing(self) -> bool:
        """Whether states wait to be written."""
        return bool(self._writing)

    def _index_file(self, file: KvFile) -> None:
        tokens = array("i")
        tokens.frombytes(file.key.tokens)
        self._index.pop(file.key.name, None)
        self._index[file.key.name] = file, tokens
        while len(self._index) > KV_FILES_MAX:
            del self._index[next(iter(self._index))]

    # Reading.

    def find_file(
        self, origin: Origin, tokens: array[int], more_than: int
    ) -> tuple[KvFile | None, int]:
        """Return the file that covers most of *tokens*, and how many it covers. Return None and 0
        if none covers more than *more_than*.
        """
        best, most = None, more_than
        for file, have in self._index.values():
            if file.key.checkpoint or not self._will_serve(file, origin):
                continue
            if covered := covered_tokens(have, tokens, self._kv_kind, most):
                best, most = file, covered
        return best, most if best is not None else 0

    def find_cut(
        self, origin: Origin, tokens: array[int], more_than: int, search: StateSearch
    ) -> tuple[list[KvFile], int]:
        """Return the files with which a hybrid's state can be cut at a checkpoint that covers most
        of *tokens*, and how many it covers: the checkpoint, a state whose text begins with that of
        the checkpoint, or both, if only one of them or none is in memory. Return no files and 0 if
        none covers more than *more_than*.
        """
        serving = [
            (file, have) for file, have in self._index.values() if self._will_serve(file, origin)
        ]
        places: dict[int, KvFile | None] = {
            len(have): file
            for file, have in serving
            if file.key.checkpoint and len(have) < len(tokens) and tokens[: len(have)] == have
        }
        for saved in self._store.checkpoints_in(origin, tokens[:-1]):
            places[len(saved.tokens)] = None
        if max(places, default=0) <= more_than:
            return [], 0
        wholes = [
            (common_prefix(have, tokens), number)
            for number, (file, have) in enumerate(serving)
            if not file.key.checkpoint
        ]
        on_disk, number = max(wholes, default=(0, -1))
        in_memory = search.longest_text(origin, tokens)
        keep = max((at for at in places if at <= max(on_disk, in_memory)), default=0)
        if keep <= more_than:
            return [], 0
        state = serving[number][0] if in_memory < keep else None
        return [file for file in (places[keep], state) if file is not None], keep

    def prefetch_named_states(self, bytes_max: int) -> None:
        """Read the files of named states into memory, the last used first, at most *bytes_max*, so
        that the first sessions from them do not wait for the disk.
        """
        for file, _ in reversed(list(self._index.values())):
            origin = _origin(file.key)
            if is_named_state(origin.scope, origin.session) and file.size <= bytes_max:
                bytes_max -= file.size
                self.prefetch_state(file, origin, ahead=True)

    def _will_serve(self, file: KvFile, origin: Origin) -> bool:
        """Return whether a file may serve a task of *origin*, or is being read for its user."""
        return _origin(file.key).serves(origin) or self._is_read_for(file, origin)

    def _is_read_for(self, file: KvFile, origin: Origin) -> bool:
        read = self._reads.get(file.key.name)
        return read is not None and any(target.serves(origin) for target in read.origins)

    def fetch_state(self, task: Task, file: KvFile) -> None:
        """Read *file* into memory for *task*, which is `fetching` until that is done."""
        is_read = self._is_read_for(file, task.origin)
        if is_read or self.prefetch_state(file, _origin(file.key)):
            task.fetching = True
            read = self._reads[file.key.name]
            read.ahead = False
            read.tasks.append(task)

    def prefetch_state(self, file: KvFile, target: Origin, *, ahead: bool = False) -> bool:
        """Read *file* into memory as a state of the origin *target*, for tasks to come; return
        False if the queue is full. For *ahead* see `KvFiles.queue_read`.
        """
        name = file.key.name
        if name not in self._reads:
            if not self._files.queue_read(file, ahead=ahead):
                return False
            self._reads[name] = _Read(ahead)
        read = self._reads[name]
        read.ahead &= ahead
        if target not in read.origins:
            read.origins.append(target)
        return True

    def poll(self) -> Iterator[m.Report]:
        """Apply the file thread's results: states enter memory, tasks stop waiting."""
        for result in self._files.results():
            if isinstance(result, FileWritten):
                yield from self._written(result.file)
            elif isinstance(result, FileRead):
                yield from self._read(result)
            elif isinstance(result, FileFound):
                self._index_file(result.file)
            elif isinstance(result, FilesDeleted):
                yield m.CommandResult(result.request, None)
            else:
                yield from self._failed(result)

    def _written(self, file: KvFile) -> Iterator[m.Report]:
        key = file.key
        if self._writing.pop(key.name, None) is not None:  # otherwise it was deleted meanwhile
            self._index_file(file)
            yield _stored(file)
        yield from self._answer_requests(key.name, is_written=key.name in self._index)

    def _answer_requests(self, name: str, *, is_written: bool) -> Iterator[m.CommandResult]:
        for request, answer in self._requests.pop(name, ()):
            yield m.CommandResult(request, answer if is_written else type(answer)())

    def _read(self, result: FileRead) -> Iterator[m.Report]:
        file, name = result.file, result.file.key.name
        if name in self._index:  # otherwise it was deleted meanwhile
            tokens = self._index[name][1]
            for origin in self._reads[name].origins:
                entry = self._store.add_state(
                    origin, tokens, result.state, file.seconds, checkpoint=file.key.checkpoint
                )
                if entry is not None:
                    entry.fetched = True
            if not self._reads[name].ahead:
                yield _stored(file)
        self._release_tasks(name)

    def _failed(self, result: FileFailed) -> Iterator[m.Report]:
        self.failures += 1
        self.cause = result.cause
        name = result.key.name
        self._writing.pop(name, None)
        if result.operation == "read":
            if self._index.pop(name, None) is not None:
                yield m.KvFileLost(name)
            self._release_tasks(name)
        else:
            yield m.KvFileLost(name, result.cause)
            yield from self._answer_requests(name, is_written=False)

    def _release_tasks(self, name: str) -> None:
        read = self._reads.pop(name, None)
        for task in () if read is None else read.tasks:
            task.fetching = any(task in other.tasks for other in self._reads.values())

    # Writing.

    def save_state(self, entry: SavedState) -> bool:
        """Write an entry; return whether it is or will be on disk."""
        origin = entry.origin
        if not origin.persist or has_short_item(entry.tokens):
            return False
        key = self._key(entry)
        name = key.name
        if name in self._index or name in self._writing:
            return True
        if not self._files.queue_write(key, entry.state, entry.seconds):
            return False
        self._writing[name] = key
        return True

    def save_with_checkpoints(self, entry: SavedState) -> bool:
        """Write an entry and the checkpoints in its text; return whether it is or will be on disk.
        The checkpoints take at most as much space as the entry.
        """
        if not self.save_state(entry):
            return False
        checkpoints = self._store.checkpoints_in(entry.origin, entry.tokens)
        size = max((len(checkpoint.state) for checkpoint in checkpoints), default=1)
        places = thinned([len(c.tokens) for c in checkpoints], len(entry.state) // size)
        for checkpoint in checkpoints:
            if len(checkpoint.tokens) in places:
                self.save_state(checkpoint)
        return True

    def save_named_state(self, entry: SavedState, request: int) -> Iterator[m.CommandResult]:
        """Write the entry of a named state, which may be on disk already. The answer to *request*,
        here or by `poll` once it is written, is the number of its tokens on disk.
        """
        yield from self._save_for(request, entry, len(entry.tokens))

    def export_state(self, entry: SavedState, request: int) -> Iterator[m.CommandResult]:
        """Write an entry. The answer to *request*, here or by `poll` once it is written, is the
        name of its file, or empty.
        """
        yield from self._save_for(request, entry, self._key(entry).name)

    def _save_for(
        self, request: int, entry: SavedState, answer: int | str
    ) -> Iterator[m.CommandResult]:
        """Write an entry. Its *request* gets the *answer* once the entry is on disk, or the empty
        answer of the same type if it cannot be written.
        """
        name = self._key(entry).name
        if not self.save_state(entry):
            yield m.CommandResult(request, type(answer)())
        elif name in self._writing:
            self._requests.setdefault(name, []).append((request, answer))
        else:
            yield m.CommandResult(request, answer)

    def find_named_state(self, origin: Origin, tokens: array[int]) -> KvFile | None:
        """Return the file of a named state with at least all but the last of *tokens*."""
        for file, have in self._index.values():
            named = _origin(file.key) == origin and len(have) >= len(tokens) - 1
            if named and have == tokens[: len(have)]:
                return file
        return None

    def save_all(self, seconds: float) -> list[m.Report]:
        """Write all states, the most valuable first, for at most *seconds*; return the reports."""
        reports: list[m.Report] = []
        end = time.monotonic() + seconds
        for entry in self._store.by_value():
            if not self.save_state(entry) and entry.origin.persist:  # the queue is full
                self._files.flush(max(0.0, end - time.monotonic()))
                reports += self.poll()
                self.save_state(entry)
        self._files.flush(max(0.0, end - time.monotonic()))
        return [*reports, *self.poll()]

    def add_file(self, owner: int, name: str) -> None:
        """Index a file that the daemon has written, if the queue has space for that."""
        self._files.queue_find(owner, name)

    def forget_file(self, name: str) -> None:
        """Forget a file that was deleted to free disk space."""
        self._index.pop(name, None)

    def delete_session_files(self, scope: int, session: str, request: int) -> None:
        """Delete the files of a session; `poll` answers the *request* when that is done."""
        keys = [f.key for f, _ in self._index.values()] + list(self._writing.values())
        keys_to_delete = [k for k in keys if (k.owner, k.session) == (scope, session)]
        for key in keys_to_delete:
            self._index.pop(key.name, None)
            self._writing.pop(key.name, None)
        self._files.queue_delete(keys_to_delete, request)

    def close(self) -> None:
        """End the file thread."""
        self._files.close()

    def _key(self, entry: SavedState) -> KvKey:
        origin = entry.origin
        return KvKey(
            origin.scope,
            entry.tokens.tobytes(),
            origin.session,
            origin.approximate,
            origin.adapters,
            not self._store.is_whole(entry),
        )


def _stored(file: KvFile) -> m.KvFileWritten:
    key = file.key
    return m.KvFileWritten(key.name, key.owner, key.session, file.size, file.seconds)


def _origin(key: KvKey) -> Origin:
    return Origin(key.owner, key.session, key.adapters, key.private, persist=True)
