"""The disk tier of the KV store: which states are there, fetched before they are needed, written
when memory has no room for them or their session goes to sleep.

Owned by the engine; the file thread behind it does the work. Nothing in here waits for a file.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator

from ...backends.base import Memory
from .. import messages as m
from ..task import Task
from .file_format import KvFile, KvKey
from .files import (
    KV_FILES_MAX,
    FileFailed,
    FileRead,
    FilesDeleted,
    FileWritten,
    KvFiles,
)
from .origin import Origin
from .store import KvStore, SavedState, usable


class DiskTier:
    """The files of one model, beside the *store* of its states in memory."""

    def __init__(self, files: KvFiles, store: KvStore, memory: Memory):
        self.forgotten = 0
        """Calls of `forget` that are done: they are in the order in which they were made."""
        self.failures = 0
        self.cause = ""
        """Why the last write or read failed."""
        self._files, self._store, self._memory = files, store, memory
        self._index: dict[str, tuple[KvFile, array[int]]] = {}
        self._writing: dict[str, KvKey] = {}
        self._fetches: dict[str, list[Task]] = {}
        for file in files.scan():
            self._add(file)

    def __len__(self) -> int:
        return len(self._index)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has something to say."""
        return self._files.fileno()

    @property
    def bytes(self) -> int:
        """Bytes of the files."""
        return sum(file.size for file, _ in self._index.values())

    @property
    def writing(self) -> bool:
        """Tell whether states wait to be written."""
        return bool(self._writing)

    def _add(self, file: KvFile) -> None:
        tokens = array("i")
        tokens.frombytes(file.key.tokens)
        self._index.pop(file.key.name, None)
        self._index[file.key.name] = file, tokens
        while len(self._index) > KV_FILES_MAX:
            del self._index[next(iter(self._index))]

    # Reading.

    def find(self, origin: Origin, tokens: array[int], at_least: int) -> tuple[KvFile | None, int]:
        """Return the file that spares most of *tokens*, and how many; more than *at_least*."""
        best, most = None, at_least
        for file, have in self._index.values():
            if _origin(file.key).serves(origin):
                spared = usable(have, tokens, self._memory, most)
                if spared:
                    best, most = file, spared
        return best, most if best is not None else 0

    def fetch(self, task: Task, file: KvFile) -> None:
        """Read *file* into memory for *task*, which is `fetching` until that is done."""
        name = file.key.name
        if name not in self._fetches:
            if not self._files.read(file):
                return
            self._fetches[name] = []
        task.fetching = True
        self._fetches[name].append(task)

    def poll(self) -> Iterator[m.Report]:
        """Take what the file thread has done: states come into memory, tasks stop waiting."""
        for result in self._files.results():
            if isinstance(result, FileWritten):
                yield from self._written(result.file)
            elif isinstance(result, FileRead):
                yield from self._read(result)
            elif isinstance(result, FilesDeleted):
                self.forgotten += 1
            else:
                yield from self._failed(result)

    def _written(self, file: KvFile) -> Iterator[m.Report]:
        key = file.key
        if self._writing.pop(key.name, None) is not None:  # else it was forgotten meanwhile
            self._add(file)
            yield _stored(file)

    def _read(self, result: FileRead) -> Iterator[m.Report]:
        file, name = result.file, result.file.key.name
        if name in self._index:  # else it was forgotten while it was read
            tokens = self._index[name][1]
            entry = self._store.put(_origin(file.key), tokens, result.state, file.seconds)
            if entry is not None:
                entry.fetched = True
            yield _stored(file)
        self._release(name)

    def _failed(self, result: FileFailed) -> Iterator[m.Report]:
        self.failures += 1
        self.cause = result.cause
        name = result.key.name
        self._writing.pop(name, None)
        if result.what == "read":
            if self._index.pop(name, None) is not None:
                yield m.KvFileLost(name)
            self._release(name)
        else:
            yield m.KvFileLost(name, result.cause)

    def _release(self, name: str) -> None:
        for task in self._fetches.pop(name, ()):
            task.fetching = False

    # Writing.

    def spill(self) -> None:
        """Write what memory has had no room for, as far as its sessions may be on disk."""
        evicted, self._store.evicted = self._store.evicted, []
        for entry in evicted:
            self.save(entry)

    def save(self, entry: SavedState) -> bool:
        """Write an entry; tell whether it is on disk or on its way there."""
        origin = entry.origin
        if not origin.persist:
            return False
        key = KvKey(
            origin.scope,
            entry.tokens.tobytes(),
            origin.session,
            origin.approximate,
            origin.adapters,
        )
        name = key.name
        if name in self._index or name in self._writing:
            return True
        if not self._files.write(key, entry.state, entry.seconds):
            return False
        self._writing[name] = key
        return True

    def save_all(self, seconds: float) -> list[m.Report]:
        """Write every state in memory, the most valuable first, for at most *seconds*; return what
        is to be told of it.
        """
        reports: list[m.Report] = []
        end = time.monotonic() + seconds
        for entry in self._store.by_value():
            if not self.save(entry) and entry.origin.persist:  # the queue is full
                self._files.flush(max(0.0, end - time.monotonic()))
                reports += self.poll()
                self.save(entry)
        self._files.flush(max(0.0, end - time.monotonic()))
        return [*reports, *self.poll()]

    def evicted(self, name: str) -> None:
        """Take note that a file was deleted to make room."""
        self._index.pop(name, None)

    def forget(self, scope: int, session: str) -> None:
        """Delete the files of a session; they are gone once `forgotten` counts it."""
        keys = [f.key for f, _ in self._index.values()] + list(self._writing.values())
        doomed = [k for k in keys if (k.owner, k.session) == (scope, session)]
        for key in doomed:
            self._index.pop(key.name, None)
            self._writing.pop(key.name, None)
        self._files.delete(doomed)

    def close(self) -> None:
        """End the file thread."""
        self._files.close()


def _stored(file: KvFile) -> m.KvFileWritten:
    key = file.key
    return m.KvFileWritten(key.name, key.owner, key.session, file.size, file.seconds)


def _origin(key: KvKey) -> Origin:
    return Origin(key.owner, key.session, key.adapters, key.private, persist=True)
