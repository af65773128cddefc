"""The inputs and outputs of an ONNX file, the files with its other weights, and the memory that its
graph takes, without an engine.

The file is a protobuf message (`onnx.proto`). Only the fields below are read; weights are skipped.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

from .. import ENGINES
from ..errors import LoadFailed
from ..graphs import GraphMemoryEstimator, file_bytes, model_path
from ..model_spec import ModelSpec
from ..tensors import DeclaredTensors, TensorInfo

ELEMENT_TYPES = {
    1: "fp32", 2: "u8", 3: "i8", 4: "u16", 5: "i16", 6: "i32", 7: "i64", 8: "string", 9: "bool",
    10: "fp16", 11: "fp64", 12: "u32", 13: "u64", 14: "complex64", 15: "complex128", 16: "bf16",
    17: "f8e4m3fn", 18: "f8e4m3fnuz", 19: "f8e5m2", 20: "f8e5m2fnuz", 21: "u4", 22: "i4", 23: "f4",
    24: "f8e8m0", 25: "u2", 26: "i2",
}  # fmt: skip
"""The names of `TensorProto.DataType`."""
_CONTAINERS = {4: "sequence", 5: "map", 8: "sparse tensor", 9: "optional"}
"""The kinds of values that are not tensors, by the fields of `TypeProto`."""
FIELD_BYTES_MAX = 1 << 20
"""The longest description of an input or output, name or path that is read."""
TENSORS_MAX = 4096
"""The most inputs or outputs of a graph."""
SIZE_MAX = 1 << 40
"""The largest size of a dimension. Larger ones are nonsense, and would not fit into a reply."""
DIMENSION_CHARACTERS_MAX = 100
FIELDS_MAX = 1_000_000
"""The most fields of a file that are read, in some seconds. A node is one, a weight about six."""
TEXT_BYTES_MAX = 64 << 20
"""The bytes of all names and descriptions together."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
R = TypeVar("R")


class OnnxHeader(NamedTuple):
    """The inputs that a caller must set, the outputs, and the paths of the files with weights,
    relative to the model's folder.
    """

    title: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    external: frozenset[str]


def declared_tensors(path: str | Path) -> DeclaredTensors:
    """Return the inputs and outputs of an ONNX file; see `read_onnx_header`."""
    header = read_onnx_header(path)
    return DeclaredTensors(header.inputs, header.outputs)


def read_onnx_header(path: str | Path) -> OnnxHeader:
    """Return the header of an ONNX file. Blocks.

    :raises LoadFailed: the file cannot be read, or is not an ONNX file.
    """
    return _with_file(path, _read_model)


def _with_file(path: str | Path, read: Callable[[_Source, int], R]) -> R:
    """Return the result of *read* on a file, which gets its source and its size.

    :raises LoadFailed: the file cannot be read, or is not an ONNX file.
    """
    try:
        with open(path, "rb", opener=_open_regular) as file:
            return read(_Source(file), os.fstat(file.fileno()).st_size)
    except OSError as exc:
        raise LoadFailed(
            f"cannot read {str(path)!r}: {exc.strerror or exc}", hint="check the file's path"
        ) from None
    except (_Damaged, RecursionError) as exc:
        raise LoadFailed(
            f"{str(path)!r} is not an ONNX file: {exc}", hint="export or download the model again"
        ) from None


class _Damaged(Exception):
    pass


class _Source:
    """A file, or a part of it in memory, whose fields and texts count towards those of *whole*."""

    def __init__(self, file: BinaryIO, whole: _Source | None = None):
        self.file, self._whole = file, whole or self
        self._fields, self._text_bytes = 0, 0

    def count_field(self) -> None:
        """Count a field."""
        self._whole._fields += 1
        if self._whole._fields > FIELDS_MAX:
            raise _Damaged(f"it has more than {FIELDS_MAX} fields")

    def count_text(self, size: int) -> None:
        """Count the bytes of a name or description, which will be read."""
        self._whole._text_bytes += size
        if self._whole._text_bytes > TEXT_BYTES_MAX:
            raise _Damaged(f"its names and descriptions have more than {TEXT_BYTES_MAX} bytes")


def _open_regular(path: str, flags: int) -> int:
    # O_NONBLOCK: opening a FIFO would otherwise wait for its writer.
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(None, "it is not a regular file")
    return fd


def _read_model(source: _Source, size: int) -> OnnxHeader:
    graphs = [end for number, kind, end in _fields(source, size) if (number, kind) == (7, _BYTES)]
    if not graphs:
        raise _Damaged("it has no graph")
    if len(graphs) > 1:
        raise _Damaged("it has several graphs")
    source.file.seek(0)
    for number, kind, end in _fields(source, size):
        if (number, kind) == (7, _BYTES):
            return _read_graph(source, end)
    raise AssertionError("the graph was found before")


def _read_graph(source: _Source, end: int) -> OnnxHeader:
    title, inputs, outputs = "", list[TensorInfo](), list[TensorInfo]()
    weights, external = set[str](), set[str]()
    for number, kind, field_end in _fields(source, end):
        if kind != _BYTES:
            continue
        match number:
            case 2:
                title = _text(source, field_end)
            case 5:
                name, files = _read_weight(source, field_end)
                weights.add(name)
                external |= files
            case 11 | 12:
                found = inputs if number == 11 else outputs
                if len(found) >= TENSORS_MAX:
                    raise _Damaged(f"it has more than {TENSORS_MAX} inputs or outputs")
                found.append(_read_value(source, field_end))
    # Older files list the weights among the inputs; a caller need not set these.
    needed = tuple(info for info in inputs if info.name not in weights)
    return OnnxHeader(title, needed, tuple(outputs), frozenset(external))


def _read_weight(source: _Source, end: int) -> tuple[str, set[str]]:
    name, files = "", set[str]()
    for number, kind, field_end in _fields(source, end):
        if kind != _BYTES:
            continue
        if number == 8:
            name = _text(source, field_end)
        elif number == 13:
            entry = dict.fromkeys((1, 2), "")
            for key, key_kind, key_end in _fields(source, field_end):
                if key_kind == _BYTES and key in entry:
                    entry[key] = _text(source, key_end)
            if entry[1] == "location":
                files.add(entry[2])
    return name, files


_TENSORS: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse tensor"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {
        **{5: "tensor", 10: "tensor", 22: "sparse tensor", 23: "sparse tensor"},
        **{6: "graph", 11: "graph"},
    },
    "sparse tensor": {1: "tensor", 2: "tensor"},
}
"""The kinds of messages that are or contain tensors: by the kind of a message, those of its fields.
"""


def check_one_file(path: str, name: str) -> None:
    """Check that an ONNX file names no other one, at any place where it may have a tensor. Blocks.

    :raises LoadFailed: it names one, cannot be read, or is damaged.
    """
    found = _with_file(path, lambda source, size: _named_files(source, size, "model"))
    if found:
        raise LoadFailed(
            f"the graph {name!r} has weights in another file, {found[:100]!r}",
            hint="save the model with all weights in one file, or load it by its name",
            data={"model": name},
        )


def _named_files(source: _Source, end: int, kind: str) -> str:
    """Return the path of the first file that a message of this *kind* names, or empty."""
    if kind == "tensor":
        return next(iter(_read_weight(source, end)[1]), "")
    parts = _TENSORS[kind]
    for number, wire, field_end in _fields(source, end):
        if wire == _BYTES and number in parts:
            found = _named_files(source, field_end, parts[number])
            if found:
                return found
    return ""


def _read_value(source: _Source, end: int) -> TensorInfo:
    data = _read(source, end)
    part, name, kind, shape = _Source(io.BytesIO(data), source), "", "unknown", None
    for number, wire, field_end in _fields(part, len(data)):
        if (number, wire) == (1, _BYTES):
            name = _text(part, field_end)
        elif (number, wire) == (2, _BYTES):
            kind, shape = _read_type(part, field_end)
    return TensorInfo(name, kind, shape)


def _read_type(source: _Source, end: int) -> tuple[str, tuple[int | str, ...] | None]:
    kind: str = "unknown"
    shape: tuple[int | str, ...] | None = None
    for number, wire, field_end in _fields(source, end):
        if wire == _BYTES and number in _CONTAINERS:
            kind = _CONTAINERS[number]
        elif wire == _BYTES and number == 1:
            for key, key_wire, key_end in _fields(source, field_end):
                if (key, key_wire) == (1, _VARINT):
                    kind = ELEMENT_TYPES.get(key_end, f"type {key_end}")
                elif (key, key_wire) == (2, _BYTES):
                    shape = _read_shape(source, key_end)
    return kind, shape


def _read_shape(source: _Source, end: int) -> tuple[int | str, ...]:
    shape: list[int | str] = []
    for number, wire, field_end in _fields(source, end):
        if (number, wire) != (1, _BYTES):
            continue
        size: int | str = ""
        for key, key_wire, key_end in _fields(source, field_end):
            if (key, key_wire) == (1, _VARINT):
                # Exporters write -1 for a free dimension; a negative number has all 64 bits.
                size = key_end if key_end <= SIZE_MAX else ""
            elif (key, key_wire) == (2, _BYTES):
                text = _text(source, key_end)[:DIMENSION_CHARACTERS_MAX]
                size = "".join(c if c.isprintable() else "?" for c in text)
        shape.append(size)
    return tuple(shape)


def _fields(source: _Source, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the fields of a message that ends at *end*: their numbers and kinds, and the value of a
    number, or else the end of the field. The next field is read from there.
    """
    file = source.file
    while (at := file.tell()) < end:
        source.count_field()
        key = _varint(source, end)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            yield number, kind, _varint(source, end)
            continue
        if kind == _BYTES:
            size = _varint(source, end)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise _Damaged(f"the field at byte {at} has the unknown kind {kind}")
        field_end = file.tell() + size
        if field_end > end:
            raise _Damaged(f"the field at byte {at} is cut off")
        yield number, kind, field_end
        file.seek(field_end)


def _varint(source: _Source, end: int) -> int:
    file, value, shift = source.file, 0, 0
    while file.tell() < end and shift < 70:
        byte = file.read(1)
        if not byte:
            break
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value & (1 << 64) - 1
        shift += 7
    raise _Damaged("a number is cut off")


def _read(source: _Source, end: int) -> bytes:
    size = end - source.file.tell()
    if size > FIELD_BYTES_MAX:
        raise _Damaged(f"a name or description has {size} bytes, more than {FIELD_BYTES_MAX}")
    source.count_text(size)
    return source.file.read(size)


def _text(source: _Source, end: int) -> str:
    return _read(source, end).decode("utf-8", "replace")


LIBRARY_BYTES = 40 << 20
"""ONNX Runtime and NumPy in a process that has not imported them."""


class OnnxMemoryEstimator(GraphMemoryEstimator):
    """The `MemoryEstimator` of graphs in ONNX.

    :raises LoadFailed: the file cannot be read, or is not an ONNX file.
    """

    def __init__(self, spec: ModelSpec):
        path = model_path(spec)
        header, folder = read_onnx_header(path), Path(path).parent
        # Nothing about other files is reported to the user who passes a graph.
        others = header.external if spec.fd < 0 else ()
        size = file_bytes(path) + sum(_size(folder / one) for one in others)
        super().__init__(round(ENGINES["onnx"].weights_factor * size), 0, LIBRARY_BYTES)


def _size(file: Path) -> int:
    try:
        return os.stat(file).st_size
    except OSError:  # the engine reports it
        return 0
