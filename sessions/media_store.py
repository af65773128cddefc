"""The images and sounds of users' sessions, stored once per user and content.

A content is a file `USER/SHA256` below a directory. It is written beside its place, flushed to the
disk and renamed, so that a journal never names a content that is only half there. Sessions, named
states and copies *hold* contents; calls hold what they have just added by a *lease*. A content that
nobody holds is deleted. Hashes of one user find nothing of another one, and bytes that two users
send are stored twice, so that neither sees from the time or the disk what the other one has.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count as numbers
from pathlib import Path
from typing import NamedTuple, TypeVar

import anyio
import anyio.to_thread
import structlog

from ..backends.errors import BackendError, InvalidArgument, NotFound, QuotaExceeded, TooLarge
from ..backends.media import MediaKind

_THREADS = 4
"""Threads that write, hash and delete contents."""
RETRY_S = 10.0
"""A failed deletion is tried again after this time."""
_NAME = re.compile(r"[0-9a-f]{64}")
_USER = re.compile(r"[0-9]{1,10}")
_UNFINISHED = ".new-"
"""The beginning of the names of files that are being written."""
NOTHING = frozenset[bytes]()
NO_DIRECTORY = Path("/dev/null/media")
"""The directory of a store that is never opened."""
KIND_NAMES: dict[MediaKind, str] = {"image": "image", "audio": "sound"}
log = structlog.get_logger(logger_name="sessions")
_T = TypeVar("_T")


class MediaLimits(NamedTuple):
    """The bounds of contents: of one, of those of a session, and of those of a user; and whether a
    turn is refused if its model cannot read a content of the session's history.
    """

    item_bytes_max: int = 32 << 20
    session_bytes_max: int = 256 << 20
    user_bytes_max: int = 1 << 30
    session_items_max: int = 64
    refuses_unread: bool = False


@dataclass(slots=True)
class _Content:
    """A content of a user: its size if it is stored, and the number of its holders."""

    size: int = -1
    holders: int = 0

    @property
    def is_stored(self) -> bool:
        return self.size >= 0


class _Hold(NamedTuple):
    user: int
    contents: frozenset[bytes]


class MediaStore:
    """Lives on the daemon's event loop; threads do the work on files. Without a usable *directory*
    it has a temporary one, whose contents end with the daemon; *note_state* gets the cause, or
    None.
    """

    def __init__(
        self,
        directory: Path,
        limits: MediaLimits = MediaLimits(),  # noqa: B008 (it is frozen)
        note_state: Callable[[str | None], None] = lambda _: None,
    ):
        self.limits = limits
        self._directory, self._note_state = directory, note_state
        self._temporary: Path | None = None
        self._is_open = False
        self._users: dict[int, dict[bytes, _Content]] = {}
        self._holds: dict[Hashable, _Hold] = {}
        self._bytes, self._reserved = Counter[int](), Counter[int]()
        """The bytes that each user's contents take, and that are being written."""
        self._unused: dict[Path, int] = {}
        """Files to delete, with their sizes."""
        self._deleting = frozenset[Path]()
        """Those that a thread is deleting."""
        self._changing = anyio.Lock()
        """Held while files get their names or lose them."""
        self._wake = anyio.Event()
        self._numbers = numbers(1)
        self._threads: anyio.CapacityLimiter | None = None

    @property
    def item_bytes_max(self) -> int:
        """The most bytes of a content."""
        return self.limits.item_bytes_max

    @property
    def total_bytes(self) -> int:
        """The bytes of all contents."""
        return self._bytes.total()

    def bytes_of(self, user: int) -> int:
        """Return the bytes of a user's contents."""
        return self._bytes[user]

    @property
    def count(self) -> int:
        """The number of all contents."""
        return sum(c.is_stored for contents in self._users.values() for c in contents.values())

    # Start and end.

    async def open(self) -> None:
        """Find the contents on disk, which nobody holds yet."""
        try:
            found = await self._in_thread(partial(_scan, self._directory))
        except OSError as exc:
            self._note_state(f"{self._directory}: {exc.strerror or exc}")
            try:
                self._directory = self._temporary = await self._in_thread(_new_temporary)
            except OSError as error:
                log.error("media.not_stored", cause=str(error))
                return
            found = []
        for user, sha256, size in found:
            self._users.setdefault(user, {})[sha256] = _Content(size)
            self._bytes[user] += size
        self._is_open = True

    async def sweep(self) -> None:
        """Delete the contents that nobody holds, after the stored sessions were restored."""
        swept = 0
        for user, contents in list(self._users.items()):
            for sha256 in [key for key, c in contents.items() if not c.holders]:
                self._forget(user, sha256)
                swept += 1
        if swept:
            log.info("media.swept", contents=swept)
        with suppress(BackendError):  # `run` tries again
            await self.delete_unused()

    async def run(self) -> None:
        """Delete contents that nobody holds, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            try:
                await self.delete_unused()
            except BackendError as error:
                log.warning("media.not_deleted", cause=error.message)
                with anyio.move_on_after(RETRY_S):
                    await self._wake.wait()
                self._wake.set()

    async def close(self) -> None:
        """Delete what nobody holds, and the temporary directory."""
        with suppress(BackendError):  # the next start sweeps
            await self.delete_unused()
        if self._temporary is not None:
            temporary = self._temporary
            await self._in_thread(partial(shutil.rmtree, temporary, ignore_errors=True))

    # Holders.

    @contextmanager
    def lease(self, user: int) -> Iterator[MediaLease]:
        """Yield a lease, which holds the contents that are added by it."""
        lease = MediaLease(self, user)
        try:
            yield lease
        finally:
            lease.release()

    def hold(self, holder: Hashable, user: int, contents: Collection[bytes]) -> None:
        """Hold these *contents* of a user, and no others."""
        before = self._holds.get(holder)
        if before is None and not contents:
            return
        old = NOTHING if before is None else before.contents
        new = frozenset(contents)
        for sha256 in new - old:
            self._content(user, sha256).holders += 1
        if new:
            self._holds[holder] = _Hold(user, new)
        else:
            del self._holds[holder]
        for sha256 in old - new:
            self._drop(user, sha256)

    def release(self, holder: Hashable) -> None:
        """Hold nothing from now on. A holder that holds nothing is ignored."""
        found = self._holds.pop(holder, None)
        if found is not None:
            for sha256 in found.contents:
                self._drop(found.user, sha256)

    def held_by(self, holder: Hashable) -> frozenset[bytes]:
        """Return the contents that a holder holds."""
        found = self._holds.get(holder)
        return NOTHING if found is None else found.contents

    def _content(self, user: int, sha256: bytes) -> _Content:
        """Return the entry of a content. If its file is about to be deleted, it stays."""
        content = self._users.setdefault(user, {}).setdefault(sha256, _Content())
        if self._unused and not content.is_stored:
            path = self._path(user, sha256)
            if path in self._unused and path not in self._deleting:
                content.size = self._unused.pop(path)
                self._bytes[user] += content.size
        return content

    def _drop(self, user: int, sha256: bytes) -> None:
        content = self._users[user][sha256]
        content.holders -= 1
        if content.holders == 0:
            self._forget(user, sha256)

    def _forget(self, user: int, sha256: bytes) -> None:
        """Remove an entry, and leave its file to `delete_unused`."""
        content = self._users[user].pop(sha256)
        if not self._users[user]:
            del self._users[user]
        if content.is_stored:
            self._bytes[user] -= content.size
            if not self._bytes[user]:
                del self._bytes[user]
            self._delete_later(self._path(user, sha256), content.size)

    def check_session(self, user: int, contents: Collection[bytes]) -> None:
        """Check that one session may hold all of these contents.

        :raises TooLarge: they are too many, or have too many bytes.
        """
        if contents:
            known = self._users.get(user, {})
            stored = (known[c].size for c in contents if c in known and known[c].is_stored)
            self._check_totals(len(contents), sum(stored))

    def check_arrival(self, user: int, sizes: Mapping[bytes, int]) -> None:
        """Check that a session with contents of these *sizes* may arrive.

        :raises TooLarge: they are too many, or have too many bytes.
        :raises QuotaExceeded: the user's contents would take too many bytes.
        """
        if sizes:
            self._check_totals(len(sizes), sum(sizes.values()))
            new = [size for content, size in sizes.items() if not self.has(user, content)]
            if new:
                self._check_user(user, sum(new))

    def _check_totals(self, count: int, size: int) -> None:
        limits = self.limits
        if count > limits.session_items_max:
            raise TooLarge(
                f"the session would have {count} images and sounds; the limit is"
                f" {limits.session_items_max}",
                hint="begin another session, or rewind this one",
                data={"items": count, "media_items_max": limits.session_items_max},
            )
        if size > limits.session_bytes_max:
            raise TooLarge(
                f"the session's images and sounds would have {size} bytes; the limit is"
                f" {limits.session_bytes_max}",
                hint="begin another session, rewind this one, or send smaller images",
                data={"bytes": size, "media_session_bytes_max": limits.session_bytes_max},
            )

    # Contents.

    def size_of(self, user: int, sha256: bytes) -> int:
        """Return the bytes of a user's content.

        :raises NotFound: the user has no such content.
        """
        if not self.has(user, sha256):
            raise _not_found(sha256)
        return self._users[user][sha256].size

    def open_content(self, user: int, sha256: bytes) -> int:
        """Return a descriptor from which a user's content can be read; the caller closes it. This
        blocks, in any thread.

        :raises NotFound: the user has no such content.
        :raises BackendError: it cannot be read.
        """
        try:
            return os.open(self._path(user, sha256), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise _not_found(sha256) from None
        except OSError as exc:
            raise BackendError(f"a stored content cannot be read: {exc.strerror}") from exc

    def has(self, user: int, sha256: bytes) -> bool:
        """Return whether a user has a content."""
        content = self._users.get(user, {}).get(sha256)
        return content is not None and content.is_stored

    async def read(self, user: int, sha256: bytes) -> bytes:
        """Return the bytes of a user's content.

        :raises NotFound: the user has no such content.
        :raises BackendError: it cannot be read.
        """
        return await self._in_thread(partial(self._read, user, sha256))

    def _read(self, user: int, sha256: bytes) -> bytes:
        with os.fdopen(self.open_content(user, sha256), "rb") as file:
            return file.read()

    def _path(self, user: int, sha256: bytes) -> Path:
        return self._directory / str(user) / sha256.hex()

    async def add(self, lease: MediaLease, data: bytes, kind: MediaKind) -> bytes:
        """Store a content, which the lease holds, and return its hash; see `MediaLease.add`."""
        self._check_item(len(data), kind)
        sha256 = await self._in_thread(lambda: hashlib.sha256(data).digest())
        content = self.begin_content(lease, sha256, len(data), kind, is_checked=True)
        try:
            await content.write(data)
            await content.finish()
        finally:
            content.close()
        return sha256

    def begin_content(
        self,
        lease: MediaLease,
        sha256: bytes,
        size: int,
        kind: MediaKind,
        *,
        is_checked: bool = False,
    ) -> ArrivingContent:
        """Return a content whose bytes arrive in parts, for the user of a lease, which holds it.
        Close it at the end; unless it is finished then, nothing of it stays. With *is_checked*, the
        bytes are known to have the hash.

        :raises InferdError: it may not be added; see `MediaLease.add`.
        """
        self._check_item(size, kind)
        is_stored = self._take(lease, sha256)
        if not is_stored:
            self._check_user(lease.user, size)
            self._reserved[lease.user] += size
        name = f"{_UNFINISHED}{next(self._numbers)}"
        file = None if is_stored else self._path(lease.user, sha256).with_name(name)
        return ArrivingContent(self, lease, sha256, size, kind, file, is_checked=is_checked)

    async def _publish(self, content: ArrivingContent, file: Path) -> bool:
        """Give a written file its name; return False if the content was stored meanwhile."""
        lease, sha256, size = content.lease, content.sha256, content.size
        path = self._path(lease.user, sha256)
        async with self._changing:
            if self._take(lease, sha256):  # another call has stored it
                return False
            await self._in_thread(partial(os.rename, file, path))
            self._unused.pop(path, None)  # its deletion has failed; the file is a new one
            self._content(lease.user, sha256).size = size
            self._bytes[lease.user] += size
            self._take(lease, sha256)
        return True

    def _unreserve(self, user: int, size: int) -> None:
        self._reserved[user] -= size
        if not self._reserved[user]:
            del self._reserved[user]

    def _take(self, lease: MediaLease, sha256: bytes) -> bool:
        """Let a lease hold a content; return whether it is stored."""
        self.hold(lease, lease.user, self.held_by(lease) | {sha256})
        return self._users[lease.user][sha256].is_stored

    def _check_item(self, size: int, kind: MediaKind) -> None:
        if not self._is_open:
            raise BackendError(
                "images and sounds cannot be stored", hint="see the daemon's log for the cause"
            )
        name, limit = KIND_NAMES[kind], self.item_bytes_max
        if not size:
            raise InvalidArgument(f"the {name} is empty")
        if size > limit:
            raise TooLarge(
                f"the {name} has {size} bytes; media-bytes-max is {limit}",
                hint="send a smaller one",
                data={"bytes": size, "media_bytes_max": limit},
            )

    def _check_user(self, user: int, size: int) -> None:
        limit, own = self.limits.user_bytes_max, self._bytes[user] + self._reserved[user]
        if own + size > limit:
            raise QuotaExceeded(
                f"the images and sounds of your sessions have {own} bytes; {size} more would exceed"
                f" the limit of {limit}",
                hint="delete sessions with images that are no longer needed",
                data={
                    "bound": "media-user-bytes-max",
                    "bytes": own,
                    "more": size,
                    "bytes_max": limit,
                },
                retryable=False,
            )

    async def copy_contents(self, lease: MediaLease, user: int, contents: Iterable[bytes]) -> None:
        """Add contents of another *user* for the user of a lease, because an access rule shares
        them. Those that are missing are left out.

        :raises InferdError: one of them cannot be added; see `add`.
        """
        for sha256 in contents:
            with suppress(NotFound):
                await lease.add(await self.read(user, sha256), "image")

    # Deletion.

    def _delete_later(self, path: Path, size: int) -> None:
        self._unused[path] = size
        self._wake.set()

    async def delete_unused(self, user: int | None = None) -> None:
        """Delete the files of contents that nobody holds.

        :raises BackendError: some of *user*, by default of any user, cannot be deleted; `run`
            tries again.
        """
        if not self._unused:
            return
        async with self._changing:
            # A content that is added meanwhile is written again, after its deletion.
            self._deleting = frozenset(self._unused)
            try:
                failed = await self._in_thread(partial(_unlink_all, self._deleting))
                for path in self._deleting.difference(failed):
                    del self._unused[path]
            finally:
                self._deleting = frozenset()
        if failed:
            log.warning("media.files_not_deleted", files=len(failed), first=str(next(iter(failed))))
        own = [c for p, c in failed.items() if user is None or p.parent.name == str(user)]
        if own:
            raise BackendError(
                f"{len(own)} stored images or sounds cannot be deleted: {own[0]}",
                hint="let the daemon's user write to the state directory",
            )

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        if self._threads is None:
            self._threads = anyio.CapacityLimiter(_THREADS)
        return await anyio.to_thread.run_sync(work, limiter=self._threads)


class MediaLease:
    """Contents that a call has added for a *user*, until a session holds them."""

    def __init__(self, store: MediaStore, user: int):
        self.user = user
        self._store = store

    async def add(self, data: bytes, kind: MediaKind) -> bytes:
        """Store a content of this *kind*, unless the user has it; return its SHA-256.

        :raises InvalidArgument: it is empty.
        :raises TooLarge: it has more bytes than one may have.
        :raises QuotaExceeded: the user's contents would take too many bytes.
        :raises BackendError: it cannot be written, for example because the disk is full.
        """
        return await self._store.add(self, data, kind)

    def release(self) -> None:
        """Hold nothing from now on."""
        self._store.release(self)


class ArrivingContent:
    """A content of *size* bytes that a thread writes to *file*; None if the user has it already.
    One task at a time uses it.
    """

    def __init__(
        self,
        store: MediaStore,
        lease: MediaLease,
        sha256: bytes,
        size: int,
        kind: MediaKind,
        file: Path | None,
        *,
        is_checked: bool,
    ):
        self.lease, self.sha256, self.size = lease, sha256, size
        self.received = 0
        self._store, self._kind, self._file = store, kind, file
        self._digest = None if is_checked else hashlib.sha256()
        self._descriptor = -1
        self._is_stored = False

    @property
    def missing(self) -> int:
        """The number of bytes that have not arrived."""
        return self.size - self.received

    async def write(self, data: bytes) -> None:
        """Write the next bytes, at most `missing`.

        :raises BackendError: they cannot be written.
        """
        assert len(data) <= self.missing
        if self._file is not None:
            try:
                await self._store._in_thread(partial(self._write, self._file, data))
            except OSError as exc:
                raise _write_error(exc, self._kind) from exc
        self.received += len(data)

    async def finish(self) -> None:
        """Store the content, once no byte is missing.

        :raises InvalidArgument: its bytes have another hash.
        :raises BackendError: it cannot be stored.
        """
        assert not self.missing
        if self._file is None:
            return
        if self._digest is not None and self._digest.digest() != self.sha256:
            raise InvalidArgument(
                f"an image or sound has the SHA-256 {self._digest.hexdigest()}, not"
                f" {self.sha256.hex()}"
            )
        try:
            self._is_stored = await self._store._publish(self, self._file)
        except OSError as exc:
            raise _write_error(exc, self._kind) from exc

    def close(self) -> None:
        """Forget the content, and delete its file unless it was stored."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._file is not None:
            self._store._unreserve(self.lease.user, self.size)
            if not self._is_stored:
                self._store._delete_later(self._file, 0)
            self._file = None

    def _write(self, file: Path, data: bytes) -> None:
        """Write bytes, and flush the whole content to the disk."""
        if self._descriptor < 0:
            self._descriptor = _new_file(file)
        if self._digest is not None:
            self._digest.update(data)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        if len(data) == self.missing:
            os.fdatasync(self._descriptor)


def _not_found(sha256: bytes) -> NotFound:
    return NotFound(
        f"there is no image or sound {sha256.hex()[:16]}… of yours", hint="send it again"
    )


def _write_error(exc: OSError, kind: MediaKind) -> BackendError:
    return BackendError(
        f"the {KIND_NAMES[kind]} cannot be stored: {exc.strerror or exc}",
        hint="free space on the disk of state-dir, or let the daemon's user write there",
    )


# In a thread.


def _new_temporary() -> Path:
    return Path(tempfile.mkdtemp(prefix="inferd-media-"))


def _scan(directory: Path) -> list[tuple[int, bytes, int]]:
    """Return the user, hash and size of each content, and delete files that were not finished."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = []
    for folder in os.scandir(directory):
        if not _USER.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
            continue
        for entry in os.scandir(folder.path):
            if entry.name.startswith(_UNFINISHED):
                os.unlink(entry.path)
            elif _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                size = entry.stat(follow_symlinks=False).st_size
                found.append((int(folder.name), bytes.fromhex(entry.name), size))
    return found


def _new_file(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    while True:
        # Not `Path.mkdir(exist_ok=True)`: it fails if another thread deletes the folder meanwhile.
        with suppress(FileExistsError):
            os.mkdir(path.parent, 0o700)
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:  # another thread has deleted the empty folder meanwhile
            if not path.parent.parent.is_dir():
                raise


def _unlink_all(paths: Iterable[Path]) -> dict[Path, str]:
    """Delete files, and folders that become empty; return the causes of failures."""
    failed, folders = dict[Path, str](), dict[Path, None]()
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            failed[path] = exc.strerror or str(exc)
        folders[path.parent] = None
    for folder in folders:
        with suppress(OSError):  # others are in it
            folder.rmdir()
    return failed
