"""The index of the KV files on disk, of all models and users, and their eviction.

Workers write and read the files (`scheduler/kv/disk.py`); the daemon counts and deletes them. A
worker that does not find a file computes its state again.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
import structlog

from ...backends.errors import BackendError
from ...scheduler.kv.disk import KV_FILES_MAX
from ...scheduler.kv.eviction_order import EvictionOrder
from ...scheduler.kv.file_format import scan_folder
from ...scheduler.kv.store import is_named_state

log = structlog.get_logger()


class KvFilePlace(NamedTuple):
    """The key of a file; its name is unique within a fingerprint."""

    fingerprint: str
    name: str


class KvFileEntry(NamedTuple):
    """A file's entry: `size` in bytes, `seconds` that computing the state again takes."""

    owner: int
    session: str
    size: int
    seconds: float

    @property
    def is_named_state(self) -> bool:
        """Whether it belongs to a named state."""
        return is_named_state(self.owner, self.session)


class _OwnerFiles:
    """The files of one user, in the order of their eviction: those of named states are last."""

    def __init__(self) -> None:
        self.bytes = self.count = 0
        self._values = EvictionOrder[KvFilePlace]()
        self._named = EvictionOrder[KvFilePlace]()
        self._sessions = 0
        """The number of files that belong to no named state."""

    def add_file(self, place: KvFilePlace, entry: KvFileEntry) -> None:
        """Add a file, as just used."""
        self.count += 1
        self.bytes += entry.size
        self._sessions += not entry.is_named_state
        self._order_of(entry).record_use(place, entry.size, entry.seconds)

    def remove_file(self, place: KvFilePlace, entry: KvFileEntry) -> None:
        self.count -= 1
        self.bytes -= entry.size
        self._sessions -= not entry.is_named_state
        self._order_of(entry).remove(place)

    def _order_of(self, entry: KvFileEntry) -> EvictionOrder[KvFilePlace]:
        return self._named if entry.is_named_state else self._values

    def evict_least(self) -> KvFilePlace:
        """Return the file to evict, which must exist; the caller removes it."""
        return (self._values if self._sessions else self._named).evict_least()


class KvIndex:
    """The files below *directory*, at most *bytes_max* and *files_max* of them. Past these bounds,
    the user who has most loses the least valuable files.

    *file_evicted* is called with each file that is removed to free space or with its session.
    *note_state* is called with the reason why a file could not be written or deleted, and with None
    once a file was written. Lives on the event loop; threads read and delete. A removed file is in
    `_doomed` until `run` has deleted it.
    """

    def __init__(
        self,
        directory: Path,
        bytes_max: int,
        files_max: int = KV_FILES_MAX,
        *,
        file_evicted: Callable[[KvFilePlace], None] = lambda _: None,
        note_state: Callable[[str | None], None] = lambda _: None,
    ):
        self._file_evicted, self._note_state = file_evicted, note_state
        self._directory = directory
        self._bytes_max, self._files_max = bytes_max, files_max
        self._entries: dict[KvFilePlace, KvFileEntry] = {}
        self._by_owner: dict[int, _OwnerFiles] = {}
        self._doomed: dict[Path, KvFileEntry] = {}
        self._wake = anyio.Event()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(files.bytes for files in self._by_owner.values())

    @property
    def directory(self) -> Path:
        """The directory of the files."""
        return self._directory

    def accepts(self, size: int) -> bool:
        """Return whether a file of *size* bytes may be written."""
        return size <= self._bytes_max

    def find_session_file(self, owner: int, session: str) -> Path | None:
        """Return the largest file of a session, if it has one."""
        found = [(e.size, p, e) for p, e in self._entries.items() if e[:2] == (owner, session)]
        return self._path(*max(found)[1:]) if found else None

    async def load(self) -> None:
        """Read the files of earlier daemons, and delete damaged files and those past the bounds.

        Call this before a worker starts: unfinished files are deleted, too.
        """
        start = time.monotonic()
        found = await anyio.to_thread.run_sync(_read_tree, self._directory, self._files_max)
        for place, entry in found:
            self._insert(place, entry)
        self._evict()
        log.info("kv.indexed", files=len(self), bytes=self.bytes, seconds=time.monotonic() - start)

    async def run(self) -> None:
        """Delete removed files forever; log those that cannot be deleted."""
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            for path, cause in (await self._delete(dict(self._doomed))).items():
                log.warning("kv.not_deleted", path=str(path), cause=cause)
                self._note_state(f"{path} cannot be deleted: {cause}")

    # Reports of workers.

    def add_file(
        self, fingerprint: str, name: str, owner: int, session: str, size: int, seconds: float
    ) -> None:
        """Add a file that a worker has written, or written again, and evict others for it."""
        place, entry = KvFilePlace(fingerprint, name), KvFileEntry(owner, session, size, seconds)
        self._doomed.pop(self._path(place, entry), None)
        if place not in self._entries:
            self._note_state(None)  # a known file may only have been read
        self._insert(place, entry)
        if size > self._bytes_max:  # else it would evict all others and still not fit
            self._doom(place)
        self._evict()

    def remove_file(self, fingerprint: str, name: str, cause: str = "") -> None:
        """Remove a file that a worker has deleted, has not found, or could not write (*cause*)."""
        self._remove(KvFilePlace(fingerprint, name))
        if cause:
            self._note_state(cause)

    def delete_fingerprint(self, fingerprint: str) -> tuple[int, int]:
        """Delete all files of a fingerprint; return their number and bytes."""
        doomed = {p: e.size for p, e in self._entries.items() if p.fingerprint == fingerprint}
        for place in doomed:
            self._doom(place)
        return len(doomed), sum(doomed.values())

    async def delete_session_files(self, owner: int, session: str) -> int:
        """Delete the files of a session in every fingerprint; return their number.

        Let the workers delete the session's states before this, or they may still write its files.

        :raises BackendError: a file cannot be deleted.
        """
        key = (owner, session)
        for place in [p for p, e in self._entries.items() if (e.owner, e.session) == key]:
            self._doom(place)
        doomed = {p: e for p, e in self._doomed.items() if (e.owner, e.session) == key}
        failures = await self._delete(doomed)
        if failures:
            path, cause = next(iter(failures.items()))
            raise BackendError(
                f"{len(failures)} KV files of the session cannot be deleted: {path}: {cause}",
                hint="delete them by hand, and let the daemon's user own their directory",
            )
        return len(doomed)

    def state_bytes(self) -> Counter[tuple[int, str]]:
        """Return the size of the files of each named state, in every fingerprint, by owner and
        name. They are counted in one pass, because a list may have hundreds of states.
        """
        sizes: Counter[tuple[int, str]] = Counter()
        for entry in self._entries.values():
            if entry.is_named_state:
                sizes[entry.owner, entry.session] += entry.size
        return sizes

    def remove_unknown_states(self, known: Collection[tuple[int, str]]) -> None:
        """Remove the files of named states other than the *known* ones, by owner and name. Such a
        state could not be deleted completely, or its journal was lost.
        """
        for place, entry in list(self._entries.items()):
            if entry.is_named_state and (entry.owner, entry.session) not in known:
                self._doom(place)

    def _insert(self, place: KvFilePlace, entry: KvFileEntry) -> None:
        self._remove(place)
        self._entries[place] = entry
        files = self._by_owner.setdefault(entry.owner, _OwnerFiles())
        files.add_file(place, entry)

    def _remove(self, place: KvFilePlace) -> KvFileEntry | None:
        entry = self._entries.pop(place, None)
        if entry is not None:
            files = self._by_owner[entry.owner]
            files.remove_file(place, entry)
            if not files.count:
                del self._by_owner[entry.owner]
        return entry

    def _evict(self) -> None:
        """Evict files past the bounds, of the user who has most."""
        while self.bytes > self._bytes_max:
            self._evict_least(max(self._by_owner.values(), key=lambda files: files.bytes))
        while len(self) > self._files_max:
            self._evict_least(max(self._by_owner.values(), key=lambda files: files.count))

    def _evict_least(self, files: _OwnerFiles) -> None:
        self._doom(files.evict_least())

    def _doom(self, place: KvFilePlace) -> None:
        entry = self._remove(place)
        if entry is not None:
            self._doomed[self._path(place, entry)] = entry
            self._file_evicted(place)
            self._wake.set()

    def _path(self, place: KvFilePlace, entry: KvFileEntry) -> Path:
        return self._directory / place.fingerprint / str(entry.owner) / place.name

    async def _delete(self, doomed: dict[Path, KvFileEntry]) -> dict[Path, str]:
        """Delete files; return the causes for those that cannot be deleted."""
        failures = await anyio.to_thread.run_sync(_unlink_all, tuple(doomed))
        for path, entry in doomed.items():
            if self._doomed.get(path) is entry:  # else it was written and removed again meanwhile
                del self._doomed[path]
        return failures


# In a thread.


def _read_tree(directory: Path, files_max: int) -> list[tuple[KvFilePlace, KvFileEntry]]:
    """Return the files of all fingerprints, least recently used first. Files beyond *files_max* are
    deleted.
    """
    found: list[tuple[float, KvFilePlace, KvFileEntry]] = []
    for folder in _folders(directory):
        for used_at, file in scan_folder(folder):
            if len(found) < files_max:
                key = file.key
                entry = KvFileEntry(key.owner, key.session, file.size, file.seconds)
                found.append((used_at, KvFilePlace(folder.name, file.path.name), entry))
            else:
                _unlink_all((file.path,))
        _remove_if_empty((*_folders(folder), folder))
    return [(place, entry) for _, place, entry in sorted(found)]


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False)]
    except OSError:  # it is missing or not ours
        return []


def _remove_if_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _unlink_all(paths: Iterable[Path]) -> dict[Path, str]:
    failures: dict[Path, str] = {}
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            failures[path] = exc.strerror or str(exc)
    return failures
