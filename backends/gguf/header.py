"""The header of a GGUF file: the metadata, and the list of tensors.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md specifies it. Every count is bounded, so
that garbage uses neither time nor memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from . import MAGIC

VERSIONS = (2, 3)
ENTRIES_MAX = 1 << 16
TENSORS_MAX = 1 << 20
STRINGS_MAX = 1 << 22
"""Texts in all lists: the largest vocabularies have 262 k tokens and 500 k merges."""
DIMENSIONS_MAX = 4
ALIGNMENT_DEFAULT = 32

_STRING, _ARRAY = 8, 9
_FLOATS = (6, 12)
_SCALARS = {kind: struct.Struct("<" + code) for kind, code in enumerate("BbHhIif?__Qqd")
            if kind not in (_STRING, _ARRAY)}  # fmt: skip
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_TOKENS = "tokenizer.ggml.tokens"
_VOCABULARY = (_TOKENS, "tokenizer.ggml.token_type", "tokenizer.ggml.model", "tokenizer.ggml.pre")


class DamagedHeader(Exception):
    """The header has contents that no writer of GGUF files produces."""


class CutOffHeader(DamagedHeader):
    """The header continues past the end of the data."""


class TensorEntry(NamedTuple):
    """A tensor's type, its shape in ggml's order, and where its data begins, relative to the
    beginning of all data.
    """

    kind: int
    shape: tuple[int, ...]
    begin: int


class ListEntry(NamedTuple):
    """A list's type of items, their number, and the byte where the first one begins."""

    kind: int
    length: int
    begin: int

    @property
    def is_of_texts(self) -> bool:
        """Whether its items are texts."""
        return self.kind == _STRING

    @property
    def is_of_integers(self) -> bool:
        """Whether its items are whole numbers or booleans."""
        return self.kind in _SCALARS and self.kind not in _FLOATS

    def integers(self, data: mmap.mmap | bytes) -> tuple[int, ...]:
        """Return its items, which are whole numbers or booleans."""
        packed = self.packed(data)
        return tuple(number for (number,) in _SCALARS[self.kind].iter_unpack(packed))

    def packed(self, data: mmap.mmap | bytes) -> bytes:
        """Return the bytes of its items, which are numbers or booleans."""
        return data[self.begin : self.begin + self.length * _SCALARS[self.kind].size]

    def texts(self, data: mmap.mmap | bytes) -> Iterator[bytes]:
        """Yield its items, which are texts."""
        position, unpack, size = self.begin, _U64.unpack_from, _U64.size
        for _ in range(self.length):
            begin = position + size
            position = begin + unpack(data, position)[0]
            yield data[begin:position]


@dataclass
class GgufHeader:
    """A header, and where the tensors' data behind it begins (`data_begin`)."""

    values: dict[str, object] = field(default_factory=dict)
    """Numbers and texts, without lists."""
    kinds: dict[str, int] = field(default_factory=dict)
    """The type of each entry, lists included."""
    lists: dict[str, ListEntry] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    data_begin: int = 0
    vocab_hash: str = ""
    token_bytes_max: int = 1


def read_header(data: mmap.mmap | bytes) -> GgufHeader:
    """Return the header at the beginning of *data*, which begins with `MAGIC`.

    :raises CutOffHeader: *data* ends before the header does.
    :raises DamagedHeader: this is not the header of a GGUF file.
    """
    return _Reader(data).read()


def read_beginning(data: bytes) -> dict[str, object]:
    """Return the numbers and texts in *data*, the beginning of a header, up to the first damage."""
    reader = _Reader(data)
    with contextlib.suppress(DamagedHeader):
        reader.read()
    return reader.header.values


class _Reader:
    """A reader of one header, from its first byte to the last tensor's description."""

    def __init__(self, data: mmap.mmap | bytes):
        self.data = data
        self.size = len(data)
        self.position = len(MAGIC)
        self.header = GgufHeader()
        self.vocabulary = hashlib.sha256()
        self.strings = 0

    def read(self) -> GgufHeader:
        version = self._number(_U32)
        if version not in VERSIONS:
            raise DamagedHeader(f"version {version}, not one of {VERSIONS}")
        tensors, entries = self._number(_U64), self._number(_U64)
        if tensors > TENSORS_MAX or entries > ENTRIES_MAX:
            raise DamagedHeader(f"{tensors} tensors and {entries} metadata entries")
        for _ in range(entries):
            self._entry()
        for _ in range(tensors):
            self._tensor()
        self.header.vocab_hash = self.vocabulary.hexdigest()[:32]
        self.header.data_begin = self._aligned(self.position)
        return self.header

    def _aligned(self, position: int) -> int:
        alignment = self.header.values.get("general.alignment", ALIGNMENT_DEFAULT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise DamagedHeader(f"an alignment of {alignment!r}")
        return -(-position // alignment) * alignment

    def _take(self, count: int) -> int:
        """Skip *count* bytes; return where they begin."""
        begin = self.position
        if count > self.size - begin:
            raise CutOffHeader(f"it continues past the file's end at byte {begin}")
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
        self.header.kinds[key] = kind
        if kind in _SCALARS:
            packed = _SCALARS[kind]
            self.header.values[key] = packed.unpack_from(self.data, self._take(packed.size))[0]
        elif kind == _STRING:
            self.header.values[key] = self._text()
        elif kind == _ARRAY:
            self._array(key)
        else:
            raise DamagedHeader(f"an entry of the unknown type {kind}")
        if key in _VOCABULARY:
            self.vocabulary.update(self.data[begin : self.position])

    def _array(self, key: str) -> None:
        kind, count = self._number(_U32), self._number(_U64)
        self.header.lists[key] = ListEntry(kind, count, self.position)
        if kind in _SCALARS:
            self._take(count * _SCALARS[kind].size)
        elif kind == _STRING and count <= STRINGS_MAX - self.strings:
            self.strings += count
            longest = self._skip_texts(count)
            if key == _TOKENS:
                self.header.token_bytes_max = max(1, longest)
        else:
            raise DamagedHeader(f"a list of {count} entries of type {kind}")

    def _skip_texts(self, count: int) -> int:
        """Skip texts; return the size of the longest. Takes 30 ms for Gemma's 262 k tokens."""
        data, size, position, longest = self.data, self.size, self.position, 0
        unpack = _U64.unpack_from
        for _ in range(count):
            if position + 8 > size:
                raise CutOffHeader("a list continues past the file's end")
            (length,) = unpack(data, position)
            position += 8 + length
            if length > longest:
                longest = length
        if position > size:
            raise CutOffHeader("a list continues past the file's end")
        self.position = position
        return longest

    def _tensor(self) -> None:
        name = self._text()
        dimensions = self._number(_U32)
        if dimensions > DIMENSIONS_MAX:
            raise DamagedHeader(f"a tensor of {dimensions} dimensions")
        shape = tuple(self._number(_U64) for _ in range(dimensions))
        kind, begin = self._number(_U32), self._number(_U64)
        self.header.tensors[name] = TensorEntry(kind, shape, begin)


BLOCKS: Mapping[int, tuple[int, int]] = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    9: (32, 36), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
    15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18),
    21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8),
    28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36),
    41: (128, 18), 42: (64, 18),
}  # fmt: skip
"""By ggml's type of a tensor: the numbers in a block, and the block's bytes."""


def bytes_promised(header: GgufHeader) -> int:
    """Return the bytes that a file with *header* has at least. Of a tensor whose type is unknown,
    only the position counts.
    """
    ends = [header.data_begin if not header.tensors else 0]
    for tensor in header.tensors.values():
        numbers, size = BLOCKS.get(tensor.kind, (1, 0))
        length = math.prod(tensor.shape) // numbers * size
        ends.append(header.data_begin + tensor.begin + length)
    return max(ends)
