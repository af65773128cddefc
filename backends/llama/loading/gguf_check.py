"""The checks of a model file before llama.cpp reads it, which aborts the process for some files.

They read a GGUF file's header (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): the
metadata, and the list of tensors, which determines the size that the file must have. Every count is
bounded, so that garbage uses neither time nor memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import mmap
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from llama_cpp import llama_cpp as lib

from ...errors import LoadFailed
from ...split_gguf import parts_of
from .devices import c_function

VERSIONS = (2, 3)
ENTRIES_MAX = 1 << 16
TENSORS_MAX = 1 << 20
STRINGS_MAX = 1 << 22
"""Texts in one list: the largest vocabularies have 262 k tokens and 500 k merges."""
DIMENSIONS_MAX = 4
ALIGNMENT_DEFAULT = 32
SAMPLE_BYTES, SAMPLES = 1 << 20, 64

_STRING, _ARRAY = 8, 9
_SCALARS = {kind: struct.Struct("<" + code) for kind, code in enumerate("BbHhIif?__Qqd")
            if kind not in (_STRING, _ARRAY)}  # fmt: skip
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_block_size = c_function("ggml_blck_size", ctypes.c_int64, ctypes.c_int)
_type_size = c_function("ggml_type_size", ctypes.c_size_t, ctypes.c_int)
_SPLIT_COUNT = "split.count"
_TOKENS = "tokenizer.ggml.tokens"
_VOCABULARY = (_TOKENS, "tokenizer.ggml.token_type", "tokenizer.ggml.model", "tokenizer.ggml.pre")

_OPEN_HINTS: dict[type[Exception], str] = {
    FileNotFoundError: "check the path; `inferd models` lists the models",
    PermissionError: "let the user that runs the daemon read the file",
}


class _Damaged(Exception):
    """The header has contents that no writer of GGUF files produces."""


class GgufTensor(NamedTuple):
    """A tensor's type, its shape in ggml's order, and its *size* bytes of data, which are *begin*
    bytes after the file's `data_begin`.
    """

    kind: int
    shape: tuple[int, ...]
    begin: int
    size: int


@dataclass
class GgufFile:
    """The header of a GGUF file."""

    size: int
    values: dict[str, object] = field(default_factory=dict)
    """Numbers and texts, without lists."""
    kinds: dict[str, int] = field(default_factory=dict)
    """The type of each entry, lists included."""
    tensors: dict[str, GgufTensor] = field(default_factory=dict)
    data_begin: int = 0
    vocab_hash: str = ""
    token_bytes_max: int = 1
    content_hash: str = ""

    @property
    def is_split(self) -> bool:
        """Whether this is one of several files that make up a model."""
        count = self.values.get(_SPLIT_COUNT, 1)
        return isinstance(count, int) and count > 1


@contextmanager
def open_model_file(path: str) -> Iterator[int]:
    """Open a model file for reading; yield its descriptor."""
    name = os.path.basename(path)
    try:
        # O_NONBLOCK: opening a FIFO would otherwise wait for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as exc:  # ValueError: the path contains a NUL
        reason = exc.strerror if isinstance(exc, OSError) else exc
        hint = _OPEN_HINTS.get(type(exc), "check the path")
        raise LoadFailed(f"cannot open the file {name!r}: {reason}", hint=hint) from None
    try:
        yield fd
    finally:
        os.close(fd)


def read_gguf(fd: int, name: str) -> GgufFile:
    """Check the open file *fd* and read its header. The descriptor's position does not change.

    :raises LoadFailed: it is not a regular file or not a GGUF file, or it is empty, of another
        version, damaged or truncated.
    """
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            raise LoadFailed(f"{name!r} is a directory", hint="name the .gguf file inside it")
        if not stat.S_ISREG(status.st_mode):
            raise LoadFailed(f"{name!r} is not a regular file", hint="name a .gguf file")
        if status.st_size == 0:
            raise LoadFailed(f"the file {name!r} is empty", hint="download the file again")
        data = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    except OSError as exc:
        raise LoadFailed(
            f"the file {name!r} cannot be read: {exc.strerror}",
            hint="the descriptor must be open for reading",
        ) from None
    with data:
        return _check(data, name)


def read_parts(path: str, first: GgufFile) -> None:
    """Check the other parts of a split model whose first part is at *path*; add their hashes and
    tensors to *first*.

    :raises LoadFailed: a part is missing, unreadable, damaged or truncated, or misnamed.
    """
    if not first.is_split:
        return
    files, count = parts_of(Path(path)), first.values[_SPLIT_COUNT]
    if len(files) != count:
        raise LoadFailed(
            f"{os.path.basename(path)!r} is one of {count} parts, which its name does not show",
            hint="rename the parts to NAME-00001-of-00003.gguf and so on",
        )
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise LoadFailed(
            f"{missing[0]!r} is missing, one of the {count} parts of a split model",
            hint="put all parts into one folder",
            data={"missing": missing[:100]},
        )
    hashes = [first.content_hash]
    for file in files[1:]:
        with open_model_file(str(file)) as fd:
            part = read_gguf(fd, file.name)
        hashes.append(part.content_hash)
        first.tensors |= part.tensors
    first.content_hash = hashlib.sha256(" ".join(hashes).encode()).hexdigest()


def _check(data: mmap.mmap, name: str) -> GgufFile:
    if data[:4] != b"GGUF":
        raise LoadFailed(
            f"{name!r} is not a GGUF file: it begins with {data[:4]!r}",
            hint="convert the model with llama.cpp's convert_hf_to_gguf.py, or get a .gguf file",
        )
    try:
        file, needed = _Header(data).read()
    except _Damaged as exc:
        raise LoadFailed(
            f"the GGUF header of {name!r} is damaged: {exc}", hint="download the file again"
        ) from None
    if len(data) < needed:
        raise LoadFailed(
            f"the file {name!r} is cut off: it has {len(data)} bytes and needs {needed}",
            hint="download the file again",
            data={"size_bytes": len(data), "needed_bytes": needed},
        )
    file.content_hash = _content_hash(data)
    return file


def _content_hash(data: mmap.mmap) -> str:
    """Hash the size, both ends and samples in between: all of a large file would take a minute."""
    size = len(data)
    digest = hashlib.sha256(_U64.pack(size))
    digest.update(data[:SAMPLE_BYTES])
    step = max(4096, size // SAMPLES)
    for start in range(SAMPLE_BYTES, size - SAMPLE_BYTES, step):
        digest.update(data[start : start + 4096])
    digest.update(data[max(0, size - SAMPLE_BYTES) :])
    return digest.hexdigest()


class _Header:
    """A reader of one header, from its first byte to the last tensor's description."""

    def __init__(self, data: mmap.mmap):
        self.data = data
        self.size = len(data)
        self.position = 4
        self.file = GgufFile(size=self.size)
        self.vocabulary = hashlib.sha256()

    def read(self) -> tuple[GgufFile, int]:
        """Return the header, and the size that the file must have."""
        version = self._number(_U32)
        if version not in VERSIONS:
            raise _Damaged(f"version {version}, not one of {VERSIONS}")
        tensors, entries = self._number(_U64), self._number(_U64)
        if tensors > TENSORS_MAX or entries > ENTRIES_MAX:
            raise _Damaged(f"{tensors} tensors and {entries} metadata entries")
        for _ in range(entries):
            self._entry()
        end = max((self._tensor() for _ in range(tensors)), default=0)
        self.file.vocab_hash = self.vocabulary.hexdigest()[:32]
        self.file.data_begin = self._aligned(self.position)
        return self.file, self.file.data_begin + end

    def _aligned(self, position: int) -> int:
        alignment = self.file.values.get("general.alignment", ALIGNMENT_DEFAULT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise _Damaged(f"an alignment of {alignment!r}")
        return -(-position // alignment) * alignment

    def _take(self, count: int) -> int:
        """Skip *count* bytes; return where they begin."""
        begin = self.position
        if count > self.size - begin:
            raise _Damaged(f"it continues past the file's end at byte {begin}")
        self.position = begin + count
        return begin

    def _number(self, kind: struct.Struct) -> int:
        return int(kind.unpack_from(self.data, self._take(kind.size))[0])

    def _text(self) -> str:
        length = self._number(_U64)
        begin = self._take(length)
        return self.data[begin : begin + length].decode("utf-8", "replace")

    def _entry(self) -> None:
        key, kind, begin = self._text(), self._number(_U32), self.position
        self.file.kinds[key] = kind
        if kind in _SCALARS:
            packed = _SCALARS[kind]
            self.file.values[key] = packed.unpack_from(self.data, self._take(packed.size))[0]
        elif kind == _STRING:
            self.file.values[key] = self._text()
        elif kind == _ARRAY:
            self._array(key)
        else:
            raise _Damaged(f"an entry of the unknown type {kind}")
        if key in _VOCABULARY:
            self.vocabulary.update(self.data[begin : self.position])

    def _array(self, key: str) -> None:
        kind, count = self._number(_U32), self._number(_U64)
        if kind in _SCALARS:
            self._take(count * _SCALARS[kind].size)
        elif kind == _STRING and count <= STRINGS_MAX:
            longest = self._skip_texts(count)
            if key == _TOKENS:
                self.file.token_bytes_max = max(1, longest)
        else:
            raise _Damaged(f"a list of {count} entries of type {kind}")

    def _skip_texts(self, count: int) -> int:
        """Skip texts; return the size of the longest. Takes 30 ms for Gemma's 262 k tokens."""
        data, size, position, longest = self.data, self.size, self.position, 0
        unpack = _U64.unpack_from
        for _ in range(count):
            if position + 8 > size:
                raise _Damaged("a list continues past the file's end")
            (length,) = unpack(data, position)
            position += 8 + length
            if length > longest:
                longest = length
        if position > size:
            raise _Damaged("a list continues past the file's end")
        self.position = position
        return longest

    def _tensor(self) -> int:
        """Return where this tensor's data ends, relative to the beginning of all data."""
        name = self._text()
        dimensions = self._number(_U32)
        if dimensions > DIMENSIONS_MAX:
            raise _Damaged(f"a tensor of {dimensions} dimensions")
        shape = [self._number(_U64) for _ in range(dimensions)]
        kind, offset = self._number(_U32), self._number(_U64)
        size = _tensor_bytes(kind, shape)
        self.file.tensors[name] = GgufTensor(kind, tuple(shape), offset, size)
        return offset + size


def _tensor_bytes(kind: int, shape: list[int]) -> int:
    # ggml does not check the index into its table of types.
    block, size = (_block_size(kind), _type_size(kind)) if kind < lib.GGML_TYPE_COUNT else (0, 0)
    if not block or not size:
        raise _Damaged(f"a tensor of the unknown type {kind}")
    return math.prod(shape) // block * size
