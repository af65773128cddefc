"""KV states on disk: the format of their files, and the file thread, which writes, reads and checks
them for the engine.

A file is ``<directory>/<fingerprint>/<owner>/<name>`` and never changes: it is written under a
temporary name and renamed. It holds, in this order::

    magic 8 bytes | version u32 | header's length u32 | checksum of the header, 20 bytes
    header: msgpack, with the key, the state's length and its checksum
    state

Every byte is covered by a comparison or a checksum, so a damaged or foreign file is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import math
import os
import queue
import re
import stat
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

__all__ = (
    "KV_FILES_MAX",
    "Deleted",
    "Failed",
    "KvDamaged",
    "KvFile",
    "KvFiles",
    "KvKey",
    "Read",
    "Written",
    "scan_folder",
)

KV_FILES_MAX = 10_000
"""Files of all fingerprints and owners together; a scan reads no more either."""
QUEUE_BYTES_MAX = 256 << 20
QUEUE_COUNT_MAX = 64
HEADER_BYTES_MAX = 16 << 20
"""Four million tokens, and the rest of a key."""
CLOSE_S = 5.0
_MAGIC = b"inferdKV"
_VERSION = 1
_DIGEST_BYTES = 20
_PREFIX = struct.Struct(f"<8sII{_DIGEST_BYTES}s")
_FINGERPRINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_READ_RANK, _WRITE_RANK, _STOP_RANK = 1, 2, 0
_encoder = msgspec.msgpack.Encoder()


class KvDamaged(Exception):
    """It is not what its name and the format promise: not to be used."""


@dataclass(frozen=True, slots=True)
class KvKey:
    """Whose state, of which tokens: `tokens` are packed by `messages.pack_tokens`.

    `session` is the one that wrote it; a `private` state serves that session alone.
    """

    owner: int
    tokens: bytes
    session: str = ""
    private: bool = False
    adapters: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of its file: a hash of all of it, 40 hex digits."""
        fields = (self.owner, self.tokens, self.session, self.private, self.adapters)
        return _digest(_encoder.encode(fields)).hex()


@dataclass(frozen=True, slots=True)
class KvFile:
    """A state on disk: `size` is the whole file's in bytes, `seconds` what it took to compute."""

    key: KvKey
    size: int
    seconds: float
    path: Path


@dataclass(frozen=True, slots=True)
class Written:
    """The file is there."""

    file: KvFile


@dataclass(frozen=True, slots=True)
class Read:
    """The state of a file, checked."""

    file: KvFile
    state: bytes


@dataclass(frozen=True, slots=True)
class Deleted:
    """What one `delete` asked for is gone."""

    keys: tuple[KvKey, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """What ("write" or "read") failed, and why. After a failed read the file is gone."""

    key: KvKey
    what: str
    cause: str


class _Header(msgspec.Struct, frozen=True, array_like=True):
    fingerprint: str
    owner: int
    tokens: bytes
    session: str
    private: bool
    adapters: tuple[str, ...]
    seconds: float
    size: int
    checksum: bytes

    @property
    def key(self) -> KvKey:
        return KvKey(self.owner, self.tokens, self.session, self.private, self.adapters)


_decoder = msgspec.msgpack.Decoder(_Header)


@dataclass(frozen=True, slots=True)
class _Write:
    key: KvKey
    state: bytes
    seconds: float


@dataclass(frozen=True, slots=True)
class _Delete:
    keys: tuple[KvKey, ...]


_Job = _Write | KvFile | _Delete | threading.Event | None
_Result = Written | Read | Deleted | Failed


class KvFiles:
    """The KV files of one model, and the thread that works on them.

    Its methods belong to the engine's thread and never wait, but for `scan`, `flush` and `close`.
    The file thread owns nothing: it takes jobs with immutable buffers out of one queue and puts
    answers into another. Reads overtake writes, for somebody waits for them. What is asked and
    not yet drained by `results` is bounded by `QUEUE_BYTES_MAX` and `QUEUE_COUNT_MAX`; a state
    that is larger by itself is taken when there is nothing else.
    """

    def __init__(self, directory: Path, fingerprint: str) -> None:
        assert _FINGERPRINT.fullmatch(fingerprint), fingerprint
        self._fingerprint = fingerprint
        self._folder = directory / fingerprint
        self._jobs: queue.PriorityQueue[tuple[int, int, _Job]] = queue.PriorityQueue()
        self._answers: queue.SimpleQueue[tuple[_Result, int]] = queue.SimpleQueue()
        self._serials = itertools.count()
        self._pending = 0
        self._bytes = 0
        self._closed = False
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._work, name="kv-files", daemon=True)
        self._thread.start()

    # What the engine calls.

    def scan(self) -> list[KvFile]:
        """Return the files of this fingerprint, the least recently used first.

        Reads headers only, of at most `KV_FILES_MAX`; the states are checked when they are read.
        Deletes damaged, foreign and unfinished files. To be called once, before anything else.
        """
        found = itertools.islice(scan_folder(self._folder), KV_FILES_MAX)
        return [file for _, file in sorted(found, key=lambda pair: pair[0])]

    def write(self, key: KvKey, state: bytes, seconds: float) -> bool:
        """Queue a state that took *seconds* to compute; False if the queue is full."""
        return self._ask(_WRITE_RANK, _Write(key, state, seconds), len(state))

    def read(self, file: KvFile) -> bool:
        """Queue the reading of *file*; False if the queue is full."""
        return self._ask(_READ_RANK, file, file.size)

    def delete(self, keys: Sequence[KvKey]) -> None:
        """Delete the files of *keys*, after the writes that were asked for before.

        Never refused: there are no more than were written. `pending` counts it until it is done.
        """
        self._pending += 1
        self._put(_WRITE_RANK, _Delete(tuple(keys)))

    def results(self) -> list[Written | Read | Deleted | Failed]:
        """Return the answers that are there; none after `close`."""
        if self._closed:
            return []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        results: list[_Result] = []
        with contextlib.suppress(queue.Empty):
            while True:
                result, size = self._answers.get_nowait()
                self._pending -= 1
                self._bytes -= size
                results.append(result)
        return results

    def fileno(self) -> int:
        """Return a descriptor that is readable while results wait (and now and then for none)."""
        return self._event

    @property
    def pending(self) -> int:
        """Requests whose answers `results` has not returned; deletes that are not done."""
        return self._pending

    def path(self, key: KvKey) -> Path:
        """Return where the state of *key* is, once it is written."""
        return self._folder / str(key.owner) / key.name

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything asked for is done; False if *timeout_s* pass before."""
        done = threading.Event()
        self._put(_WRITE_RANK, done)
        return done.wait(timeout_s)

    def close(self) -> None:
        """End the thread after the job that it is at; what is queued behind it is dropped."""
        if self._closed:
            return
        self._closed = True
        self._put(_STOP_RANK, None)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():  # else it is stuck in a file, and will write to this yet
            os.close(self._event)

    def _ask(self, rank: int, job: _Job, size: int) -> bool:
        full = self._bytes and self._bytes + size > QUEUE_BYTES_MAX
        if self._closed or full or self._pending >= QUEUE_COUNT_MAX:
            return False
        self._pending += 1
        self._bytes += size
        self._put(rank, job)
        return True

    def _put(self, rank: int, job: _Job) -> None:
        self._jobs.put((rank, next(self._serials), job))

    # What the file thread does.

    def _work(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            if isinstance(job, threading.Event):
                job.set()
                continue
            self._answers.put(self._answer(job))
            del job  # a state must not stay in memory until the next job comes
            os.eventfd_write(self._event, 1)

    def _answer(self, job: _Write | KvFile | _Delete) -> tuple[_Result, int]:
        """Do *job*; return its result and the bytes that it held of the queue's bound."""
        if isinstance(job, _Write):
            return self._write(job), len(job.state)
        if isinstance(job, KvFile):
            return self._read(job), job.size
        for key in job.keys:
            _unlink(self.path(key))
        return Deleted(job.keys), 0

    def _write(self, job: _Write) -> Written | Failed:
        path = self.path(job.key)
        try:
            head = _pack_head(self._fingerprint, job)
            _make_private(path.parent)
            _write_file(path, (head, job.state))
        except (OSError, MemoryError, KvDamaged) as exc:
            return Failed(job.key, "write", _cause(exc))
        return Written(KvFile(job.key, len(head) + len(job.state), job.seconds, path))

    def _read(self, file: KvFile) -> Read | Failed:
        path = self.path(file.key)  # not the one that *file* names: this is in our directory
        try:
            return Read(file, _read_state(path, file.key))
        except (OSError, MemoryError, KvDamaged) as exc:
            _unlink(path)
            return Failed(file.key, "read", _cause(exc))


# The format.


def scan_folder(folder: Path) -> Iterator[tuple[float, KvFile]]:
    """Yield the files of one fingerprint's *folder*, each with the time it was last used at.

    Deletes what is damaged, foreign or was never finished (its name is not its state's). What
    cannot be read now is left out.
    """
    for path in _files_below(folder):
        try:
            with _opened(path) as fd:
                found = os.fstat(fd).st_mtime, _read_head(fd, path)[1]
        except KvDamaged:
            _unlink(path)
        except OSError:
            continue
        else:
            yield found


def _pack_head(fingerprint: str, job: _Write) -> bytes:
    key, checksum = job.key, _digest(job.state)
    header = _encoder.encode(
        _Header(
            fingerprint,
            key.owner,
            key.tokens,
            key.session,
            key.private,
            key.adapters,
            job.seconds,
            len(job.state),
            checksum,
        )
    )
    if len(header) > HEADER_BYTES_MAX:
        raise KvDamaged(f"its header has {len(header)} bytes, more than {HEADER_BYTES_MAX}")
    return _PREFIX.pack(_MAGIC, _VERSION, len(header), _digest(header)) + header


def _read_head(fd: int, path: Path) -> tuple[_Header, KvFile]:
    """Read and check everything before the state; leave *fd* at the state."""
    magic, version, size, checksum = _PREFIX.unpack(_read_exactly(fd, _PREFIX.size))
    if magic != _MAGIC or version != _VERSION:
        raise KvDamaged(f"it is of another format: {magic!r}, version {version}")
    if size > HEADER_BYTES_MAX:
        raise KvDamaged(f"its header has {size} bytes, more than {HEADER_BYTES_MAX}")
    content = _read_exactly(fd, size)
    if _digest(content) != checksum:
        raise KvDamaged("its header's checksum is wrong")
    header = _decode(content)
    whole = _PREFIX.size + size + header.size
    if os.fstat(fd).st_size != whole:
        raise KvDamaged(f"it has {os.fstat(fd).st_size} bytes and should have {whole}")
    key = header.key
    if path.parts[-3:] != (header.fingerprint, str(key.owner), key.name):
        raise KvDamaged("it is another model's, another user's or another state")
    return header, KvFile(key, whole, header.seconds, path)


def _decode(content: bytes) -> _Header:
    try:
        header = _decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise KvDamaged(f"its header cannot be read: {exc}") from exc
    fits = header.size >= 0 and 0 <= header.seconds < math.inf and len(header.tokens) % 4 == 0
    if not fits:
        raise KvDamaged("its header has impossible values")
    return header


def _read_state(path: Path, key: KvKey) -> bytes:
    with _opened(path) as fd:
        header, file = _read_head(fd, path)
        if file.key != key:  # of the same hash, should there ever be two
            raise KvDamaged("it is the state of other tokens")
        state = _read_exactly(fd, header.size)
        if _digest(state) != header.checksum:
            raise KvDamaged("its state's checksum is wrong")
        with contextlib.suppress(OSError):
            os.utime(fd)  # the next scan then knows what was used lately
    return state


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


# Files.


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a regular file of our own: no link is followed, no pipe waited for."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise KvDamaged("it is a symbolic link") from exc
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise KvDamaged("it is no regular file of this user")
        yield fd
    finally:
        os.close(fd)


def _read_exactly(fd: int, size: int) -> bytes:
    """Read *size* bytes; one read returns at most 2 GiB."""
    parts: list[bytes] = []
    while size:
        part = os.read(fd, size)
        if not part:
            raise KvDamaged("it is cut off")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write_file(path: Path, parts: Sequence[bytes]) -> None:
    """Write a file whole or not at all.

    It is not synced: what a power loss takes or tears fails its checksum and is computed again.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        _write_new(temporary, parts)
        os.replace(temporary, path)
    except (OSError, MemoryError):
        _unlink(temporary)
        raise


def _write_new(path: Path, parts: Sequence[bytes]) -> None:
    _unlink(path)  # left by a process that had our number
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        for part in parts:
            rest = memoryview(part)
            while rest:  # a write takes at most 2 GiB, and less where the disk gets full
                rest = rest[os.write(fd, rest) :]
    finally:
        os.close(fd)


def _make_private(owner_folder: Path) -> None:
    """Make the directories of one owner's files, which only this user may look into."""
    for folder in (owner_folder.parent.parent, owner_folder.parent, owner_folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield what lies in the owners' directories of one fingerprint."""
    for owner_folder in _entries(folder):
        if owner_folder.is_dir(follow_symlinks=False):
            yield from (Path(entry.path) for entry in _entries(owner_folder.path))


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):  # gone already, or no file at all
        path.unlink()


def _cause(exc: BaseException) -> str:
    if isinstance(exc, OSError):
        return exc.strerror or str(exc)
    return "memory is short" if isinstance(exc, MemoryError) else str(exc)
