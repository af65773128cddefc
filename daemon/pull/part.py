"""The unfinished file of a pull, and its header check, size and hash."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ...backends.errors import BackendError, LoadFailed, Outcome
from ...backends.gguf import MAGIC
from ...backends.gguf.facts import header_of
from ...backends.gguf.header import (
    ENTRIES_MAX,
    TENSORS_MAX,
    VERSIONS,
    CutOffHeader,
    DamagedHeader,
    bytes_promised,
)
from ...backends.onnx.header import read_onnx_header

BLOCK = 1 << 20
BYTES_MAX = 1 << 42
NOTE_BYTES_MAX = 1 << 20
NOTE_NAME = re.compile(r"(?:LICEN[CS]E|NOTICE|[A-Z_]+TERMS)[A-Za-z0-9._-]{0,32}")
"""Names of files that are kept beside a model: licences, notices and terms."""
_FICLONE = 0x40049409
"""`ioctl` of linux/fs.h."""
_HEADER = struct.Struct("<4sIQQ")
_GRAPH_PART = ".onnx.part"
_CUT_OFF_HINT = "the file is cut off: get it again; nothing was kept"


Progress = Callable[[str, int, int | None], None]
"""Called with the stage, the bytes done, and the total or None if it is unknown."""


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class PullFailed(BackendError, outcome=Outcome.FAILED):
    """The model could not be fetched; nothing was published under its name."""

    hint_default = "try again, or get the file yourself and `inferd pull FILE`"


def check_header(head: bytes, origin: str) -> None:
    """Check the first bytes of a GGUF file.

    :raises PullFailed: llama.cpp cannot read this header.
    """
    if not head.startswith(MAGIC):
        raise PullFailed(
            f"{origin} is not a GGUF file: it begins with {head[:16]!r}",
            hint="inferd runs GGUF models; use the URL of the file itself, not of a page about it",
        )
    if len(head) < _HEADER.size:
        raise PullFailed(
            f"{origin} ends within its GGUF header, after {len(head)} bytes", hint=_CUT_OFF_HINT
        )
    _, version, tensors, entries = _HEADER.unpack_from(head)
    if version not in VERSIONS or tensors > TENSORS_MAX or entries > ENTRIES_MAX:
        raise PullFailed(
            f"{origin} has GGUF version {version}, {tensors} tensors and {entries} entries, "
            "which inferd cannot read",
            hint="get a little-endian GGUF file of version 2 or 3",
        )


class Part:
    """The file ``NAME.gguf.part``, or that of a graph in ONNX; `resumable` is whether a later pull
    may continue it.

    `notes` are small texts to keep beside the model, such as its licence.
    """

    def __init__(self, path: Path, origin: str, progress: Progress):
        self.path, self._is_graph = path, path.name.endswith(_GRAPH_PART)
        self.origin_path = path.with_name(f"{path.name}.json")
        self.origin = origin
        self.total: int | None = None
        self.stage = "downloading"
        self.resumable = False
        self.notes: dict[str, bytes] = {}
        self.progress = progress
        self._file: BinaryIO | None = None
        self._head = b""
        self._digest = hashlib.sha256()
        self.size = 0

    @property
    def sha256(self) -> str:
        """The SHA-256 of the bytes written so far."""
        return self._digest.hexdigest()

    def open_file(self, *, keep: bool = False) -> None:
        """Open the file empty, or with *keep* as it is, after reading its bytes for the hash."""
        if keep:
            self.close()
            self._reset()
            self._file = self.path.open("r+b")
            self._read()
        else:
            self.remove()  # never truncate it: it may be a link that a killed pull left
            self._file = self.path.open("xb")

    def clone_file(self, source: Path) -> bool:
        """Make the file share the blocks of *source* (a reflink) and read it; return False if the
        file system cannot do that.
        """
        with source.open("rb") as file:
            if not self.clone_descriptor(file.fileno()):
                return False
        self._read()
        return True

    def clone_descriptor(self, descriptor: int) -> bool:
        """Make the file share the blocks of a file, for `read_block` to count them; return False if
        the file system cannot do that.
        """
        self.remove()
        self._file = self.path.open("x+b")
        try:
            fcntl.ioctl(self._file, _FICLONE, descriptor)
        except OSError:
            return False
        return True

    def read_block(self) -> bool:
        """Read and count the next block of a file that was not written by `write_block`; return
        whether there was one.

        :raises PullFailed: the file is not GGUF.
        """
        assert self._file is not None
        block = self._file.read(BLOCK)
        if block:
            self._count(block, "checking")
        return bool(block)

    def write_block(self, block: bytes) -> None:
        """Append *block*; the header is checked as soon as it is complete.

        :raises PullFailed: the file is not GGUF, or is too large.
        """
        assert self._file is not None
        if self.size + len(block) > BYTES_MAX:
            raise PullFailed(f"{self.origin} is larger than {BYTES_MAX} bytes")
        self._file.write(block)
        self._count(block, self.stage)

    def check_space(self, total: int | None, *, keep_free: int = 0) -> None:
        """Set the total size, and check that the disk has space for the rest, of which *keep_free*
        bytes stay free.

        :raises PullFailed: the disk has too little free space.
        """
        self.total = total
        free = max(0, shutil.disk_usage(self.path.parent).free - keep_free)
        if total is not None and total - self.size > free:
            raise PullFailed(
                f"{self.origin} needs {total - self.size} bytes, {self.path.parent} has {free}",
                hint="free some space, or use another --models-dir",
            )

    def check_complete(self) -> None:
        """Check that the file has all bytes that its header promises, because a server may end a
        transfer early without an error, and a local file may be a cut-off download.

        :raises PullFailed: it has fewer.
        """
        assert self._file is not None
        self._file.flush()
        if self._is_graph:
            self._check_graph()
            return
        self._check_header()
        try:
            promised = bytes_promised(header_of(self.path))
        except CutOffHeader:
            raise PullFailed(
                f"{self.origin} ends within its GGUF header, after {self.size} bytes",
                hint=_CUT_OFF_HINT,
            ) from None
        except DamagedHeader:
            return  # perhaps of a newer format: the error of a load has more details
        if self.size < promised:
            raise PullFailed(
                f"{self.origin} ends after {self.size} bytes; its header promises {promised}",
                hint=_CUT_OFF_HINT,
            )

    def finish_file(self, sha256: str) -> None:
        """Check the header, and *sha256* if that is not empty; sync the file to disk and close it.

        :raises PullFailed: the file has another hash, or is not GGUF.
        """
        assert self._file is not None
        self._check_header()
        if sha256 and self.sha256 != sha256.lower():
            raise PullFailed(
                f"{self.origin} has the SHA-256 {self.sha256}, not {sha256.lower()}",
                hint="the file is damaged or another one; it was removed",
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()

    def close(self) -> None:
        """Close the file and keep it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Close the file; remove it and its record of origin."""
        self.close()
        self.path.unlink(missing_ok=True)
        self.origin_path.unlink(missing_ok=True)
        self._reset()

    def _reset(self) -> None:
        self._head, self._digest, self.size = b"", hashlib.sha256(), 0

    def _check_graph(self) -> None:
        try:
            read_onnx_header(self.path)
        except LoadFailed as exc:
            raise PullFailed(f"{self.origin}: {exc.message}") from None

    def _check_header(self) -> None:
        if self._is_graph:
            return
        try:
            check_header(self._head, self.origin)
        except PullFailed:
            self.resumable = False
            raise

    def _read(self) -> None:
        while self.read_block():
            pass

    def _count(self, block: bytes, stage: str) -> None:
        self._digest.update(block)
        self.size += len(block)
        if len(self._head) < _HEADER.size:
            self._head += block[: _HEADER.size]
            if len(self._head) >= _HEADER.size:
                self._check_header()
        self.progress(stage, self.size, self.total)
