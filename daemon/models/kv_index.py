"""The index of KV files: which lie on the disk, of all models and users, and which have to go.

Workers write and read the files (`scheduler/kv/files.py`); the daemon counts and deletes them. A
worker that looks for a deleted file computes its state again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import anyio
import anyio.to_thread
import structlog

from ...backends.errors import BackendError
from ...scheduler.kv.file_format import scan_folder
from ...scheduler.kv.files import KV_FILES_MAX
from ...scheduler.kv.greedy_dual import GreedyDual

log = structlog.get_logger()


class KvFilePlace(NamedTuple):
    """The key of a file: a name is unique among all owners' of one fingerprint."""

    fingerprint: str
    name: str


class KvFileEntry(NamedTuple):
    """The index's entry of a file: `size` in bytes, `seconds` to compute it again."""

    owner: int
    session: str
    size: int
    seconds: float


class KvIndexListener(Protocol):
    """The receiver of the index's events."""

    def kv_file_evicted(self, place: KvFilePlace) -> None:
        """Note that a file leaves the index, for want of space or with its session."""

    def kv_disk_checked(self, cause: str | None) -> None:
        """Note why a file could not be written or deleted, or with None that one was written."""


class KvIndex:
    """The files below *directory*, at most *bytes_max* and *files_max* of them.

    Lives on the event loop; reading and deleting happen in threads. A file leaves the index at
    once and the disk soon after: `run` deletes it, and until then it is in `_doomed`.
    """

    def __init__(
        self,
        directory: Path,
        bytes_max: int,
        files_max: int = KV_FILES_MAX,
        *,
        listener: KvIndexListener,
    ):
        self.bytes = 0
        self._listener = listener
        self._directory = directory
        self._bytes_max, self._files_max = bytes_max, files_max
        self._entries: dict[KvFilePlace, KvFileEntry] = {}
        self._values = GreedyDual[KvFilePlace]()
        self._doomed: dict[Path, KvFileEntry] = {}
        self._wake = anyio.Event()

    def __len__(self) -> int:
        return len(self._entries)

    def places(self) -> list[KvFilePlace]:
        """Return which files there are."""
        return list(self._entries)

    async def load(self) -> None:
        """Read what earlier daemons left, and delete what is damaged or past the bounds.

        To be done before a worker starts: unfinished files are deleted, too.
        """
        start = time.monotonic()
        found = await anyio.to_thread.run_sync(_read_tree, self._directory, self._files_max)
        for place, entry in found:
            self._insert(place, entry)
        self._evict()
        log.info("kv.indexed", files=len(self), bytes=self.bytes, seconds=time.monotonic() - start)

    async def run(self) -> None:
        """Delete what has left the index, for ever. What cannot be deleted is logged."""
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            for path, cause in (await self._delete(dict(self._doomed))).items():
                log.warning("kv.not_deleted", path=str(path), cause=cause)
                self._listener.kv_disk_checked(f"{path} cannot be deleted: {cause}")

    @property
    def doomed(self) -> int:
        """Files that have left the index and are not deleted yet."""
        return len(self._doomed)

    # What workers report.

    def stored(
        self, fingerprint: str, name: str, owner: int, session: str, size: int, seconds: float
    ) -> None:
        """Take in a file that a worker has written, or written again; make room for it."""
        place, entry = KvFilePlace(fingerprint, name), KvFileEntry(owner, session, size, seconds)
        self._doomed.pop(self._path(place, entry), None)
        if place not in self._entries:
            self._listener.kv_disk_checked(None)  # else it may just have been read
        self._insert(place, entry)
        if size > self._bytes_max:  # rather it alone than all others for nothing
            self._doom(place)
        self._evict()

    def used(self, fingerprint: str, name: str) -> None:
        """Note that a worker has read a file."""
        if entry := self._entries.get(place := KvFilePlace(fingerprint, name)):
            self._values.record_use(place, entry.size, entry.seconds)

    def unstored(self, fingerprint: str, name: str, cause: str = "") -> None:
        """Note that a worker has deleted a file or found it gone, or why it could not write it."""
        self._remove(KvFilePlace(fingerprint, name))
        if cause:
            self._listener.kv_disk_checked(cause)

    # What calls ask.

    async def forget_session(self, owner: int, session: str) -> int:
        """Delete the files of a session in every fingerprint; return how many there were.

        The workers must have forgotten it before, or one of them may yet write and report a file.

        :raises BackendError: one of them cannot be deleted.
        """
        whose = (owner, session)
        for place in [p for p, e in self._entries.items() if (e.owner, e.session) == whose]:
            self._doom(place)
        mine = {p: e for p, e in self._doomed.items() if (e.owner, e.session) == whose}
        failures = await self._delete(mine)
        if failures:
            path, cause = next(iter(failures.items()))
            raise BackendError(
                f"{len(failures)} KV files of the session cannot be deleted: {path}: {cause}",
                hint="delete them by hand, and let the daemon's user own their directory",
            )
        return len(mine)

    # Keeping count.

    def _insert(self, place: KvFilePlace, entry: KvFileEntry) -> None:
        self._remove(place)
        self._entries[place] = entry
        self._values.record_use(place, entry.size, entry.seconds)
        self.bytes += entry.size

    def _remove(self, place: KvFilePlace) -> KvFileEntry | None:
        entry = self._entries.pop(place, None)
        if entry is not None:
            self._values.remove(place)
            self.bytes -= entry.size
        return entry

    def _evict(self) -> None:
        while self.bytes > self._bytes_max or len(self) > self._files_max:
            self._doom(self._values.evict_least())

    def _doom(self, place: KvFilePlace) -> None:
        entry = self._remove(place)
        if entry is not None:
            self._doomed[self._path(place, entry)] = entry
            self._listener.kv_file_evicted(place)
            self._wake.set()

    def _path(self, place: KvFilePlace, entry: KvFileEntry) -> Path:
        return self._directory / place.fingerprint / str(entry.owner) / place.name

    async def _delete(self, doomed: dict[Path, KvFileEntry]) -> dict[Path, str]:
        """Delete files; return those that cannot be, with the causes."""
        failures = await anyio.to_thread.run_sync(_unlink_all, tuple(doomed))
        for path, entry in doomed.items():
            # Meanwhile it may have been written again, and doomed again.
            if self._doomed.get(path) is entry:
                del self._doomed[path]
        return failures


# In a thread.


def _read_tree(directory: Path, files_max: int) -> list[tuple[KvFilePlace, KvFileEntry]]:
    """Return the files of all fingerprints, the least recently used first.

    What there is beyond *files_max* is deleted.
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
    except OSError:  # there is none, or it is not ours
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
