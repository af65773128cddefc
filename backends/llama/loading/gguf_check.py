"""The checks of a model file before llama.cpp reads it, which aborts the process for some files.

They read a GGUF file's header, whose list of tensors determines the size that the file must have.
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
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from llama_cpp import llama_cpp as lib

from ...errors import LoadFailed
from ...gguf import MAGIC, parts_of
from ...gguf.header import ALIGNMENT_DEFAULT, DamagedHeader, GgufHeader, TensorEntry, read_header
from .devices import c_function
from .field_check import (
    TOKEN_BYTES_MAX,
    BadField,
    bad_place,
    bad_tensor,
    bad_vocabulary,
    is_charsmap_usable,
)

SAMPLE_BYTES, SAMPLES = 1 << 20, 64

_block_size = c_function("ggml_blck_size", ctypes.c_int64, ctypes.c_int)
_type_size = c_function("ggml_type_size", ctypes.c_size_t, ctypes.c_int)
_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
_SPLIT_COUNT = "split.count"
INTEGERS_MAX = 1024
"""Longer lists, such as the types of tokens, are not kept."""

_OPEN_HINTS: dict[type[Exception], str] = {
    FileNotFoundError: "check the path; `inferd models` lists the models",
    PermissionError: "let the user that runs the daemon read the file",
}


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
    """A checked GGUF file of *size* bytes: its header, and a hash of its contents."""

    size: int
    values: dict[str, object]
    """Numbers and texts, without lists."""
    kinds: dict[str, int]
    """The type of each entry, lists included."""
    lists: dict[str, tuple[int, ...]]
    """Lists of at most `INTEGERS_MAX` whole numbers."""
    tensors: dict[str, GgufTensor]
    data_begin: int
    vocab_hash: str
    token_bytes_max: int
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

    :raises LoadFailed: *fd* is not a regular file or not a GGUF file, or the file is empty, of
        another version, damaged or truncated.
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
            hint="let the program that loads it read the file",
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
    if data[:4] != MAGIC:
        raise LoadFailed(
            f"{name!r} is not a GGUF file: it begins with {data[:4]!r}",
            hint="convert the model with llama.cpp's convert_hf_to_gguf.py, or get a .gguf file",
        )
    try:
        header = read_header(data)
        tensors = {n: GgufTensor(*t, _tensor_bytes(t)) for n, t in header.tensors.items()}
    except DamagedHeader as exc:
        raise LoadFailed(
            f"the GGUF header of {name!r} is damaged: {exc}", hint="download the file again"
        ) from None
    needed = header.data_begin + max((t.begin + t.size for t in tensors.values()), default=0)
    if len(data) < needed:
        raise LoadFailed(
            f"the file {name!r} is cut off: it has {len(data)} bytes and needs {needed}",
            hint="download the file again",
            data={"size_bytes": len(data), "needed_bytes": needed},
        )
    bad = _bad_field(header, data)
    if bad is not None:
        raise unusable(name, bad)
    return GgufFile(
        size=len(data),
        values=header.values,
        kinds=header.kinds,
        lists={
            key: found.integers(data)
            for key, found in header.lists.items()
            if found.is_of_integers and found.length <= INTEGERS_MAX
        },
        tensors=tensors,
        data_begin=header.data_begin,
        vocab_hash=header.vocab_hash,
        token_bytes_max=header.token_bytes_max,
        content_hash=_content_hash(data),
    )


def unusable(name: str, bad: BadField, hint: str = "") -> LoadFailed:
    """Return the error for a file with a field that llama.cpp does not survive."""
    return LoadFailed(
        f"{name!r} cannot be loaded: {bad}",
        hint=hint or "download the file again, or convert it again: no working model has this",
        data={"key": bad.key, "value": str(bad.value)},
    )


def _bad_field(header: GgufHeader, data: mmap.mmap) -> BadField | None:
    if header.values.get("general.type") == "adapter":
        return None  # it has checks of its own
    alignment = header.values.get("general.alignment", ALIGNMENT_DEFAULT)
    bad = bad_place(header.data_begin, alignment, header.tensors) or bad_tensor(header.tensors)
    if bad is not None:
        return bad
    tokens, kinds = (header.lists.get(f"tokenizer.ggml.{k}") for k in ("tokens", "token_type"))
    if tokens is None or not tokens.is_of_texts:
        return None  # llama.cpp refuses it, unless the file is a later part of a model
    if header.token_bytes_max > TOKEN_BYTES_MAX:
        rule = f"the name of a token has at most {TOKEN_BYTES_MAX} bytes"
        found = f"a list with a name of {header.token_bytes_max} bytes"
        return BadField("tokenizer.ggml.tokens", found, rule)
    model = header.values.get("tokenizer.ggml.model")
    charsmap = header.lists.get(_CHARSMAP)
    is_read = model == "t5" and charsmap is not None and charsmap.is_of_integers
    if charsmap is not None and is_read and not is_charsmap_usable(charsmap.packed(data)):
        found = f"a map of {charsmap.length} bytes"
        return BadField(_CHARSMAP, found, "some texts lead out of it, or it is too large")
    types = kinds.integers(data) if kinds is not None and kinds.is_of_integers else ()
    return bad_vocabulary(model, lambda: tokens.texts(data), tokens.length, types)


def _content_hash(data: mmap.mmap) -> str:
    """Return a hash of the size, both ends and samples in between, because hashing all of a large
    file would take a minute.
    """
    size = len(data)
    digest = hashlib.sha256(struct.pack("<Q", size))
    digest.update(data[:SAMPLE_BYTES])
    step = max(4096, size // SAMPLES)
    for start in range(SAMPLE_BYTES, size - SAMPLE_BYTES, step):
        digest.update(data[start : start + 4096])
    digest.update(data[max(0, size - SAMPLE_BYTES) :])
    return digest.hexdigest()


def _tensor_bytes(tensor: TensorEntry) -> int:
    kind = tensor.kind
    # ggml does not check the index into its table of types.
    block, size = (_block_size(kind), _type_size(kind)) if kind < lib.GGML_TYPE_COUNT else (0, 0)
    if not block or not size:
        raise DamagedHeader(f"a tensor of the unknown type {kind}")
    return math.prod(tensor.shape) // block * size
