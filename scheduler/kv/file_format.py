"""The format of KV files: reading, checking and writing them.

A file is ``<directory>/<fingerprint>/<owner>/<name>`` and never changes: it is written under a
temporary name and renamed. It consists of::

    magic 8 bytes | version u32 | header's length u32 | checksum of the header, 16 bytes
    header: msgpack, with the key, the state's length and its checksum
    state

Comparisons and checksums (XXH3, 128 bits) cover every byte, so a damaged or unrelated file is
rejected. A user's files are written by the daemon's user alone, so the checksum need not withstand
forgery; BLAKE2b took 110 ms for the 48 MB of 2000 tokens of SmolLM2, and XXH3 takes 4 ms.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

HEADER_BYTES_MAX = 16 << 20
"""Space for four million tokens and the rest of a key."""
_MAGIC = b"inferdKV"
_VERSION = 3
_NAME_BYTES = 20
_PREFIX = struct.Struct("<8sII16s")
FINGERPRINT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_encoder = msgspec.msgpack.Encoder()


class KvDamaged(Exception):
    """A file does not match its name or the format."""


class KvKey(msgspec.Struct, frozen=True, array_like=True):
    """The owner of a state and its tokens, packed by `messages.pack_tokens`.

    `session` wrote the state; a `private` state serves only that session. A `checkpoint` is the
    recurrent part of a hybrid's state.
    """

    owner: int
    tokens: bytes
    session: str = ""
    private: bool = False
    adapters: tuple[str, ...] = ()
    checkpoint: bool = False

    @property
    def name(self) -> str:
        """The name of its file: a hash of all fields, 40 hex digits. That of a whole state lacks
        the last field, as earlier versions wrote it.
        """
        fields = msgspec.structs.astuple(self)
        hashed = _encoder.encode(fields if self.checkpoint else fields[:-1])
        return hashlib.blake2b(hashed, digest_size=_NAME_BYTES).hexdigest()


class KvFile(msgspec.Struct, frozen=True):
    """A state on disk: `size` is that of the whole file, `seconds` the time to compute it."""

    key: KvKey
    size: int
    seconds: float
    path: Path


class _FileHeader(msgspec.Struct, frozen=True, array_like=True):
    fingerprint: str
    key: KvKey
    seconds: float
    size: int
    checksum: bytes


_decoder = msgspec.msgpack.Decoder(_FileHeader)


def scan_folder(folder: Path) -> Iterator[tuple[float, KvFile]]:
    """Yield the files of one fingerprint's *folder*, each with the time of its last use.

    Deletes damaged, unrelated and unfinished files (whose names are not those of their states).
    Omits files that cannot be read now.
    """
    for path in _files_below(folder):
        try:
            with _open_file(path) as file:
                found = os.fstat(file.fileno()).st_mtime, _read_head(file, path)[1]
        except KvDamaged:
            unlink_quietly(path)
        except OSError:
            continue
        else:
            yield found


def read_key(path: Path) -> KvFile:
    """Return a file without its state.

    :raises KvDamaged: the file does not match its name or the format.
    :raises OSError: it cannot be read.
    """
    with _open_file(path) as file:
        return _read_head(file, path)[1]


def _read_head(file: BinaryIO, path: Path) -> tuple[_FileHeader, KvFile]:
    """Read and check everything before the state; leave *file* at the state."""
    magic, version, size, checksum = _PREFIX.unpack(_read_exactly(file, _PREFIX.size))
    if magic != _MAGIC or version != _VERSION:
        raise KvDamaged(f"it is of another format: {magic!r}, version {version}")
    if size > HEADER_BYTES_MAX:
        raise KvDamaged(f"its header has {size} bytes, more than {HEADER_BYTES_MAX}")
    content = _read_exactly(file, size)
    if _checksum(content) != checksum:
        raise KvDamaged("its header's checksum is wrong")
    header = _decode(content)
    whole = _PREFIX.size + size + header.size
    if (actual := os.fstat(file.fileno()).st_size) != whole:
        raise KvDamaged(f"it has {actual} bytes and should have {whole}")
    key = header.key
    if path.parts[-3:] != (header.fingerprint, str(key.owner), key.name):
        raise KvDamaged("it belongs to another model, user or state")
    return header, KvFile(key, whole, header.seconds, path)


def _decode(content: bytes) -> _FileHeader:
    try:
        header = _decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise KvDamaged(f"its header cannot be read: {exc}") from exc
    whole_tokens = len(header.key.tokens) % 4 == 0
    if not (header.size >= 0 and 0 <= header.seconds < math.inf and whole_tokens):
        raise KvDamaged("its header has impossible values")
    return header


def write_state(path: Path, fingerprint: str, key: KvKey, state: bytes, seconds: float) -> KvFile:
    """Write a state that took *seconds* to compute to *path*, in directories that it creates.

    :raises KvDamaged: the key is too large for a header.
    """
    header = _encoder.encode(_FileHeader(fingerprint, key, seconds, len(state), _checksum(state)))
    if len(header) > HEADER_BYTES_MAX:
        raise KvDamaged(f"its header has {len(header)} bytes, more than {HEADER_BYTES_MAX}")
    head = _PREFIX.pack(_MAGIC, _VERSION, len(header), _checksum(header)) + header
    for folder in reversed(path.parents[:3]):  # only this user can read them
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write_file(path, (head, state))
    return KvFile(key, len(head) + len(state), seconds, path)


def read_state(path: Path, key: KvKey, *, is_use: bool = True) -> bytes:
    """Return the state of *key*. If this *is_use* of its file, mark the file as used now.

    :raises KvDamaged: the file does not match its name or the format.
    """
    with _open_file(path) as file:
        header, _ = _read_head(file, path)
        if header.key != key:  # another key with the same hash
            raise KvDamaged("it is the state of other tokens")
        state = _read_exactly(file, header.size)
        if _checksum(state) != header.checksum:
            raise KvDamaged("its state's checksum is wrong")
        with contextlib.suppress(OSError):
            if is_use:
                os.utime(file.fileno())  # for the order of the next scan
    return state


def _checksum(content: bytes) -> bytes:
    return xxhash.xxh3_128_digest(content)


# States that move to another machine.


class KvHead(msgspec.Struct, frozen=True, array_like=True):
    """A description of a state, without its owner and session. The state has *size* bytes."""

    fingerprint: str
    tokens: bytes
    private: bool
    adapters: tuple[str, ...]
    seconds: float
    size: int
    checksum: bytes


def export_head(path: Path) -> tuple[KvHead, int]:
    """Return a file's head, and the offset of its state.

    :raises KvDamaged: the file does not match its name or the format.
    :raises OSError: it cannot be read.
    """
    with _open_file(path) as file:
        header, found = _read_head(file, path)
    key = header.key
    head = KvHead(
        header.fingerprint,
        key.tokens,
        key.private,
        key.adapters,
        header.seconds,
        header.size,
        header.checksum,
    )
    return head, found.size - header.size


def read_part(path: Path, offset: int, size: int) -> bytes:
    """Return bytes of a file.

    :raises KvDamaged: the path is not a regular file of this user.
    :raises OSError: the file cannot be read.
    """
    with _open_file(path) as file:
        return os.pread(file.fileno(), size, offset)


class StateWriter:
    """Writes the state of *head*, which arrives in parts, as that of another owner and session.
    Used by one thread at a time.
    """

    def __init__(self, directory: Path, head: KvHead, owner: int, session: str):
        self._head = head
        self.key = KvKey(owner, head.tokens, session, head.private, head.adapters)
        self.path = directory / head.fingerprint / str(owner) / self.key.name
        self._temporary = self.path.with_name(f".{self.key.name}.{os.getpid()}-arriving")
        self._hash = xxhash.xxh3_128()
        self._written = 0

    def write(self, data: bytes) -> None:
        """Write the next bytes.

        :raises OSError: they cannot be written.
        """
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        if not self._written:
            for folder in reversed(self.path.parents[:3]):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            unlink_quietly(self._temporary)
            flags |= os.O_CREAT | os.O_EXCL
        with open(os.open(self._temporary, flags, 0o600), "wb") as file:
            if not self._written:
                file.write(self._prefix())
            file.write(data)
        self._hash.update(data)
        self._written += len(data)

    def _prefix(self) -> bytes:
        head = self._head
        header = _encoder.encode(
            _FileHeader(head.fingerprint, self.key, head.seconds, head.size, head.checksum)
        )
        return _PREFIX.pack(_MAGIC, _VERSION, len(header), _checksum(header)) + header

    def finish(self) -> KvFile:
        """Publish the file, whose bytes have all arrived.

        :raises KvDamaged: the bytes do not match the head.
        :raises OSError: the file cannot be written.
        """
        if (self._written, self._hash.digest()) != (self._head.size, self._head.checksum):
            self.discard()
            raise KvDamaged("its state's checksum is wrong")
        os.replace(self._temporary, self.path)
        size = len(self._prefix()) + self._head.size
        return KvFile(self.key, size, self._head.seconds, self.path)

    def discard(self) -> None:
        """Delete what was written."""
        unlink_quietly(self._temporary)


# Files.


@contextlib.contextmanager
def _open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file of our own; follow no link, wait for no pipe."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise KvDamaged("it is a symbolic link") from exc
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise KvDamaged("it is not a regular file of this user")
        with open(fd, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(fd)


def _read_exactly(file: BinaryIO, size: int) -> bytes:
    content = file.read(size)
    if len(content) < size:
        raise KvDamaged("it is truncated")
    return content


def _write_file(path: Path, parts: Sequence[bytes]) -> None:
    """Write a file completely or not at all.

    It is not synced: a file that a power loss damages fails its checksum and is computed again.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    unlink_quietly(temporary)  # left by a process that had our process id
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            file.writelines(parts)
        os.replace(temporary, path)
    except (OSError, MemoryError):
        unlink_quietly(temporary)
        raise


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the entries of the owners' directories of one fingerprint."""
    for owner_folder in _entries(folder):
        if owner_folder.is_dir(follow_symlinks=False):
            yield from (Path(entry.path) for entry in _entries(owner_folder.path))


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def unlink_quietly(path: Path) -> None:
    """Delete a file, if it exists and can be deleted."""
    with contextlib.suppress(OSError):  # deleted already, or not a file
        path.unlink()
