"""The inputs and outputs of a TensorFlow Lite file, and the memory that its graph takes, without an
engine.

The file is a FlatBuffer (`schema.fbs` of TensorFlow Lite). Only the fields below are read.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .. import ENGINES
from ..errors import LoadFailed
from ..graphs import (
    DIMENSION_MAX,
    PORTS_MAX,
    GraphMemoryEstimator,
    file_bytes,
    model_path,
    opened_regular,
)
from ..model_encodings import TFLITE_MAGIC
from ..model_spec import ModelSpec
from ..tensors import DeclaredTensors, TensorInfo

ELEMENT_TYPES = {
    0: "fp32", 1: "fp16", 2: "i32", 3: "u8", 4: "i64", 5: "string", 6: "bool", 7: "i16",
    8: "complex64", 9: "i8", 10: "fp64", 11: "complex128", 12: "u64", 13: "resource",
    14: "variant", 15: "u32", 16: "u16", 17: "i4", 18: "bf16",
}  # fmt: skip
"""The names of `TensorType`."""
_BYTES = {
    **{"fp32": 4, "fp16": 2, "i32": 4, "u8": 1, "i64": 8, "bool": 1, "i16": 2, "complex64": 8},
    **{"i8": 1, "fp64": 8, "complex128": 16, "u64": 8, "u32": 4, "u16": 2, "bf16": 2},
}
_STATEFUL = frozenset((142, 143, 144))
"""VAR_HANDLE, READ_VARIABLE, ASSIGN_VARIABLE: variables of the interpreter, which another
computation would see.
"""
NAME_BYTES_MAX = 1 << 16
TENSORS_MAX = OPERATORS_MAX = 1 << 20
DIMENSIONS_MAX = 64
SIGNATURES_MAX = 64
NUMBERS_MAX = 4_000_000
"""The numbers that are read of a file, in some seconds. Parts of a damaged file may be referred to
any number of times.
"""
DEFAULT_SIGNATURE = "serving_default"
_WINDOW_BYTES = 1 << 16


class LiteRtHeader(NamedTuple):
    """The inputs and outputs of the first subgraph, in its order.

    Their names are those of the file's signature, if it has only one or a default one: converters
    give the tensors names of their own. *tensor_names* are these by the inputs' names.
    """

    title: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    tensor_names: Mapping[str, str]
    """The names of inputs by those of their tensors, if these are others."""
    activation_bytes: int
    """The most bytes of tensors that computing needs at once, with free dimensions of 1."""
    has_variables: bool
    """Whether an interpreter keeps values from one computation to the next."""


def declared_tensors(path: str | Path) -> DeclaredTensors:
    """Return the inputs and outputs of a TensorFlow Lite file; see `read_litert_header`."""
    header = read_litert_header(path)
    return DeclaredTensors(header.inputs, header.outputs)


def read_litert_header(path: str | Path) -> LiteRtHeader:
    """Return the header of a TensorFlow Lite file. Blocks.

    :raises LoadFailed: the file cannot be read, or is not a TensorFlow Lite file.
    """
    try:
        with open(path, "rb", opener=opened_regular) as file:
            fd = file.fileno()
            return _read_model(_Buffer(fd, os.fstat(fd).st_size))
    except OSError as exc:
        raise LoadFailed(
            f"cannot read {str(path)!r}: {exc.strerror or exc}", hint="check the file's path"
        ) from None
    except _Damaged as exc:
        raise LoadFailed(
            f"{str(path)!r} is not a TensorFlow Lite file: {exc}",
            hint="convert or download the model again",
        ) from None


class _Damaged(Exception):
    pass


class _Buffer:
    """A FlatBuffer in a file. Each position is one in the file; 0 stands for an absent field."""

    def __init__(self, fd: int, size: int):
        self._fd, self.size = fd, size
        self._window, self._at = b"", 0
        self._numbers_left = NUMBERS_MAX

    def read(self, at: int, count: int) -> bytes:
        """Return *count* bytes, less than a window's, from *at* on."""
        self._numbers_left -= 1 + count // 8
        if self._numbers_left < 0:
            raise _Damaged(f"it has more than {NUMBERS_MAX} numbers")
        start = at - self._at
        if start < 0 or start + count > len(self._window):
            self._window, self._at, start = os.pread(self._fd, _WINDOW_BYTES, at), at, 0
        found = self._window[start : start + count]
        if len(found) < count:
            raise _Damaged(f"it ends before byte {at + count}")
        return found

    def number(self, form: str, at: int) -> int:
        """Return the number of a format of `struct` at a position."""
        if at < 0:
            raise _Damaged("an offset leads out of the file")
        value: int = struct.unpack(form, self.read(at, struct.calcsize(form)))[0]
        return value

    def field(self, table: int, index: int) -> int:
        """Return the position of a field of a table."""
        layout = table - self.number("<i", table)
        place = 4 + 2 * index
        if place + 2 > self.number("<H", layout):
            return 0
        offset = self.number("<H", layout + place)
        return table + offset if offset else 0

    def scalar(self, table: int, index: int, form: str) -> int:
        """Return a field that is a number; its default is 0."""
        at = self.field(table, index)
        return self.number(form, at) if at else 0

    def reference(self, at: int) -> int:
        """Return the position to which that at *at* refers."""
        return at + self.number("<I", at)

    def vector(self, table: int, index: int, count_max: int) -> tuple[int, int]:
        """Return the position of the first element of a vector, and how many it has."""
        at = self.field(table, index)
        if not at:
            return 0, 0
        start = self.reference(at)
        count = self.number("<I", start)
        if count > count_max or start + 4 + count > self.size:
            raise _Damaged(f"a list at byte {start} has {count} entries")
        return start + 4, count

    def tables(self, table: int, index: int, count_max: int) -> Iterator[int]:
        """Yield the tables of a vector."""
        start, count = self.vector(table, index, count_max)
        for number in range(count):
            yield self.reference(start + 4 * number)

    def integers(self, table: int, index: int, count_max: int) -> list[int]:
        """Return a vector of 32-bit integers."""
        start, count = self.vector(table, index, count_max)
        return [self.number("<i", start + 4 * number) for number in range(count)]

    def text(self, table: int, index: int) -> str:
        """Return a field that is a text."""
        start, count = self.vector(table, index, NAME_BYTES_MAX)
        step = _WINDOW_BYTES // 2
        pieces = (self.read(start + i, min(step, count - i)) for i in range(0, count, step))
        return b"".join(pieces).decode("utf-8", "replace")


def _read_model(buffer: _Buffer) -> LiteRtHeader:
    if buffer.size < 8 or buffer.read(4, 4) != TFLITE_MAGIC:
        raise _Damaged("its identifier is missing")
    model = buffer.reference(0)
    subgraphs = list(buffer.tables(model, 2, PORTS_MAX))
    if not subgraphs:
        raise _Damaged("it has no subgraph")
    graph = subgraphs[0]
    start, count = buffer.vector(graph, 0, TENSORS_MAX)
    tensors = [buffer.reference(start + 4 * number) for number in range(count)]
    inputs, outputs = (_ports(buffer, graph, index, tensors) for index in (1, 2))
    input_names, output_names = _signature_names(buffer, model)
    named = _with_names(inputs, input_names)
    by_tensor = {
        one.name: other.name
        for (_, one), other in zip(inputs, named, strict=True)
        if one.name not in {other.name for other in named}
    }
    codes = [_operator(buffer, code) for code in buffer.tables(model, 1, OPERATORS_MAX)]
    return LiteRtHeader(
        title=buffer.text(model, 3),
        inputs=named,
        outputs=_with_names(outputs, output_names),
        tensor_names=by_tensor,
        activation_bytes=_activation_bytes(buffer, graph, tensors),
        has_variables=bool(_STATEFUL.intersection(codes))
        or any(buffer.scalar(tensor, 5, "<B") for tensor in tensors),
    )


def _operator(buffer: _Buffer, code: int) -> int:
    """Return the number of an operator. Older files have it in one byte, up to 127."""
    return max(buffer.scalar(code, 0, "<b"), buffer.scalar(code, 3, "<i"))


def _ports(
    buffer: _Buffer, graph: int, index: int, tensors: Sequence[int]
) -> list[tuple[int, TensorInfo]]:
    """Return the inputs or outputs of a subgraph, with the numbers of their tensors."""
    found = []
    for number in buffer.integers(graph, index, PORTS_MAX):
        if not 0 <= number < len(tensors):
            raise _Damaged(f"an input or output is tensor {number} of {len(tensors)}")
        found.append((number, _tensor_info(buffer, tensors[number])))
    return found


def _tensor_info(buffer: _Buffer, tensor: int) -> TensorInfo:
    number = buffer.scalar(tensor, 1, "<b")
    kind = ELEMENT_TYPES.get(number, f"type {number}")
    sizes = _shape(buffer, tensor)
    free = buffer.integers(tensor, 7, DIMENSIONS_MAX)
    if len(free) == len(sizes):
        sizes = free
    # Older converters wrote no rank, so that a scalar and a tensor of any shape look the same.
    is_unknown = not sizes and not buffer.scalar(tensor, 8, "<B")
    shape = tuple(size if 0 <= size <= DIMENSION_MAX else "" for size in sizes)
    return TensorInfo(buffer.text(tensor, 3), kind, None if is_unknown else shape)


def _shape(buffer: _Buffer, tensor: int) -> list[int]:
    return buffer.integers(tensor, 0, DIMENSIONS_MAX)


def _with_names(
    ports: Sequence[tuple[int, TensorInfo]], names: Mapping[int, str]
) -> tuple[TensorInfo, ...]:
    """Return inputs or outputs with the *names* of a signature by tensor, if these are distinct, or
    else with those of the tensors, or else with their indices.
    """
    for known in (names, {number: info.name for number, info in ports}):
        found = [known.get(number, "") for number, _ in ports]
        if all(found) and len({*found}) == len(found):
            break
    else:
        found = [str(index) for index in range(len(ports))]
    return tuple(
        TensorInfo(name, info.type, info.shape)
        for name, (_, info) in zip(found, ports, strict=True)
    )


def _signature_names(buffer: _Buffer, model: int) -> tuple[dict[int, str], dict[int, str]]:
    """Return the names of tensors that are inputs, and of those that are outputs, in the signature
    that describes the first subgraph.
    """
    signatures = list(buffer.tables(model, 7, SIGNATURES_MAX))
    if len(signatures) > 1:
        signatures = [s for s in signatures if buffer.text(s, 2) == DEFAULT_SIGNATURE]
    if len(signatures) != 1 or buffer.scalar(signatures[0], 4, "<I"):
        return {}, {}
    inputs, outputs = (
        {
            buffer.scalar(entry, 1, "<I"): buffer.text(entry, 0)
            for entry in buffer.tables(signatures[0], index, PORTS_MAX)
        }
        for index in (0, 1)
    )
    return inputs, outputs


def _activation_bytes(buffer: _Buffer, graph: int, tensors: Sequence[int]) -> int:
    """Return the most bytes of tensors that are alive at once, if each operator's outputs are
    allocated when it runs, and freed after the last operator that reads them.
    """
    steps = [
        (buffer.integers(operator, 1, TENSORS_MAX), buffer.integers(operator, 2, TENSORS_MAX))
        for operator in buffer.tables(graph, 3, OPERATORS_MAX)
    ]
    inputs, outputs = (buffer.integers(graph, index, PORTS_MAX) for index in (1, 2))
    last_use = {one: step for step, (read, _) in enumerate(steps) for one in read}
    last_use |= dict.fromkeys(outputs, len(steps))
    sizes = {
        one: _tensor_bytes(buffer, tensors[one])
        for one in {*inputs, *(one for _, written in steps for one in written)}
        if 0 <= one < len(tensors)
    }
    alive = sum(sizes.get(one, 0) for one in {*inputs})
    most = alive
    for step, (read, written) in enumerate(steps):
        alive += sum(sizes.get(one, 0) for one in {*written})
        most = max(most, alive)
        ended = {one for one in {*read, *written} if last_use.get(one, step) == step}
        alive -= sum(sizes.get(one, 0) for one in ended)
    return most


def _tensor_bytes(buffer: _Buffer, tensor: int) -> int:
    kind = ELEMENT_TYPES.get(buffer.scalar(tensor, 1, "<b"), "")
    sizes = [size if 0 <= size <= DIMENSION_MAX else 1 for size in _shape(buffer, tensor)]
    return math.prod(sizes) * _BYTES.get(kind, 0)


LIBRARY_BYTES = 40 << 20
"""LiteRT and NumPy in a process that has not imported them."""


class LiteRtMemoryEstimator(GraphMemoryEstimator):
    """The `MemoryEstimator` of graphs in TensorFlow Lite.

    :raises LoadFailed: the file cannot be read, or is not a TensorFlow Lite file.
    """

    def __init__(self, spec: ModelSpec):
        path = model_path(spec)
        header = read_litert_header(path)
        weights = round(ENGINES["litert"].weights_factor * file_bytes(path))
        super().__init__(weights, header.activation_bytes, LIBRARY_BYTES)
