"""The inputs and outputs that a graph's file states for OpenVINO, and the memory that the graph
takes, without the engine. The file is the XML of OpenVINO's format, or an ONNX file.

The XML has a `layers` element with the operators, those of type Parameter and Result among them,
and an `edges` element. Only the outermost graph is read, not those in the bodies of its loops.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.parsers import expat

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
from ..model_encodings import IR_SUFFIX, files_of_graph
from ..model_spec import ModelSpec
from ..onnx.header import declared_tensors as declared_in_onnx
from ..onnx.header import read_onnx_header
from ..tensors import DeclaredTensors, TensorInfo

FILE_BYTES_MAX = 64 << 20
"""The longest XML file that is read, in some seconds."""
LAYERS_MAX = 1 << 20
"""The most operators of a graph."""
DEPTH_MAX = 256
"""The most elements within each other."""
NAME_CHARACTERS_MAX = 1 << 16
"""The most characters of the names of a tensor."""
VERSION_MIN = 11
"""In older versions the engine makes up names of tensors."""
ELEMENT_TYPES = {
    "f16": "fp16", "f32": "fp32", "f64": "fp64", "bf16": "bf16", "boolean": "bool",
    **{name: name for name in ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "string")},
}  # fmt: skip
"""The names of types by OpenVINO's. Other types keep OpenVINO's name."""
_PRECISIONS = {"fp16": "f16", "fp32": "f32", "fp64": "f64", "bool": "boolean"}
"""OpenVINO's names of types by those of ports, where these are others."""
_CHUNK_BYTES = 64 << 10
_NAMES = re.compile(r"(?:[^\\,]|\\.)+")
"""A name in a list, in which commas are escaped."""
_LAYER, _PORTS, _PORT, _EDGE = 3, 4, 5, 3
"""The depths of elements: net/layers/layer/output/port and net/edges/edge."""


def declared_tensors(path: str | Path) -> DeclaredTensors | None:
    """Return the inputs and outputs of a graph in ONNX or in OpenVINO's format, or None if they are
    known once it is loaded: of a SavedModel, and of older files. Blocks.

    :raises LoadFailed: the file cannot be read, or is damaged.
    """
    suffix = os.path.splitext(path)[1].lower()
    if suffix == ".onnx":
        return declared_in_onnx(path)
    return read_xml(path) if suffix == IR_SUFFIX else None


def read_xml(path: str | Path) -> DeclaredTensors | None:
    """Return the inputs and outputs of an XML file, or None if it does not state their names.

    :raises LoadFailed: the file cannot be read, or is damaged.
    """
    reader = _Reader()
    try:
        with open(path, "rb", opener=opened_regular) as file:
            if os.fstat(file.fileno()).st_size > FILE_BYTES_MAX:
                raise _Damaged(f"it has more than {FILE_BYTES_MAX} bytes")
            while data := file.read(_CHUNK_BYTES):
                reader.feed(data)
            return reader.end()
    except OSError as exc:
        raise LoadFailed(
            f"cannot read {str(path)!r}: {exc.strerror or exc}", hint="check the file's path"
        ) from None
    except (_Damaged, expat.ExpatError) as exc:
        raise LoadFailed(
            f"{str(path)!r} is not an OpenVINO file: {exc}",
            hint="convert or download the model again",
        ) from None


def port_names(found: Sequence[str]) -> list[str]:
    """Return the names of inputs or outputs: those that were *found*, or the indices if some are
    missing or occur twice.
    """
    if all(found) and len({*found}) == len(found):
        return list(found)
    return [str(index) for index in range(len(found))]


def shortest_name(names: Iterable[str]) -> str:
    """Return the name of a port with several names; of a SavedModel these are the name in the
    signature, and that of the tensor. Empty without a name.
    """
    return min(names, key=lambda name: (len(name), name), default="")


class _Damaged(Exception):
    pass


class _Layer(NamedTuple):
    """An input or output of the graph."""

    number: str
    name: str
    names: list[str]
    """The names of its tensor; of an output, the operator that computes it may have them."""
    kind: str
    shape: tuple[int | str, ...] | None


class _Reader:
    """The state of an expat parser: the element that it is in, and the parts that were read.

    A document type, which may declare entities, is refused: expat then expands none.
    """

    def __init__(self) -> None:
        self._parser = expat.ParserCreate("UTF-8")
        self._parser.StartElementHandler = self._begin
        self._parser.EndElementHandler = self._end
        self._parser.StartDoctypeDeclHandler = self._refuse_doctype
        self._version = 0
        self._path: list[str] = []
        self._layers = 0
        self._layer: Mapping[str, str] = {}
        """The attributes of the layer that is being read."""
        self._data: Mapping[str, str] = {}
        self._port: Mapping[str, str] = {}
        self._sizes: list[str] = []
        self._text: list[str] = []
        self._inputs: list[_Layer] = []
        self._results: list[_Layer] = []
        self._names: dict[tuple[str, str], str] = {}
        """The names of tensors by the operators and their ports."""
        self._sources: dict[str, tuple[str, str]] = {}
        """By the operators of type Result, the ports whose tensors they return."""

    def feed(self, data: bytes) -> None:
        """Read the next part of the file."""
        self._parser.Parse(data)

    def end(self) -> DeclaredTensors | None:
        """Return the inputs and outputs, once all parts were read."""
        self._parser.Parse(b"", True)
        if self._version < VERSION_MIN:
            return None
        results = [
            one._replace(names=one.names or self._names_of(self._sources.get(one.number)))
            for one in self._results
        ]
        return DeclaredTensors(_infos(self._inputs), _infos(results))

    def _names_of(self, port: tuple[str, str] | None) -> list[str]:
        return _names_in(self._names.get(port, "")) if port is not None else []

    def _refuse_doctype(self, *_: object) -> None:
        raise _Damaged("it has a document type")

    def _begin(self, name: str, attributes: dict[str, str]) -> None:
        path = self._path
        path.append(name)
        if len(path) > DEPTH_MAX:
            raise _Damaged(f"it has more than {DEPTH_MAX} elements within each other")
        if len(path) == 1:
            self._begin_net(name, attributes)
        elif path[:3] == ["net", "layers", "layer"]:
            self._begin_in_layer(name, attributes)
        elif len(path) == _EDGE and path[:2] == ["net", "edges"]:
            source = attributes.get("from-layer", ""), attributes.get("from-port", "")
            self._sources[attributes.get("to-layer", "")] = source

    def _begin_net(self, name: str, attributes: Mapping[str, str]) -> None:
        if name != "net":
            raise _Damaged(f"its first element is {name[:50]!r}")
        version = attributes.get("version", "")
        self._version = int(version) if version.isdecimal() and len(version) < 9 else 0

    def _begin_in_layer(self, name: str, attributes: Mapping[str, str]) -> None:
        depth = len(self._path)
        if depth == _LAYER:
            self._layers += 1
            if self._layers > LAYERS_MAX:
                raise _Damaged(f"it has more than {LAYERS_MAX} operators")
            self._layer, self._data, self._port, self._sizes = attributes, {}, {}, []
        elif depth == _PORTS and name == "data":
            self._data = attributes
        elif depth == _PORT and name == "port":
            self._begin_port(attributes)
        elif depth == _PORT + 1 and name == "dim" and self._is_port_read:
            self._text = []
            self._parser.CharacterDataHandler = self._text.append

    @property
    def _is_port_read(self) -> bool:
        return self._layer.get("type") in ("Parameter", "Result")

    def _begin_port(self, attributes: Mapping[str, str]) -> None:
        if self._is_port_read:
            self._port, self._sizes = attributes, []
        if self._path[-2] == "output" and (names := attributes.get("names")):
            self._names[self._layer.get("id", ""), attributes.get("id", "")] = names

    def _end(self, name: str) -> None:
        depth = len(self._path)
        self._path.pop()
        if depth == _PORT + 1 and name == "dim":
            self._parser.CharacterDataHandler = None
            if self._is_port_read:
                self._sizes.append("".join(self._text)[:20])
        elif depth == _LAYER and name == "layer" and self._is_port_read:
            self._add_layer()

    def _add_layer(self) -> None:
        is_input = self._layer["type"] == "Parameter"
        found = self._inputs if is_input else self._results
        if len(found) >= PORTS_MAX:
            raise _Damaged(f"it has more than {PORTS_MAX} inputs or outputs")
        precision = self._port.get("precision", "").lower()
        kind = self._data.get("element_type") or _PRECISIONS.get(precision, precision)
        names = self._port if is_input else self._layer
        found.append(
            _Layer(
                self._layer.get("id", ""),
                self._layer.get("name", ""),
                _names_in(names.get("names" if is_input else "output_names", "")),
                ELEMENT_TYPES.get(kind, kind)[:50],
                _shape(self._data.get("shape") if is_input else None, self._sizes),
            )
        )


def _infos(layers: Sequence[_Layer]) -> tuple[TensorInfo, ...]:
    names = port_names([shortest_name(one.names) or one.name for one in layers])
    return tuple(
        TensorInfo(name, one.kind, one.shape) for name, one in zip(names, layers, strict=True)
    )


def _names_in(text: str) -> list[str]:
    if len(text) > NAME_CHARACTERS_MAX:
        raise _Damaged(f"the names of a tensor have more than {NAME_CHARACTERS_MAX} characters")
    return [re.sub(r"\\(.)", r"\1", one) for one in _NAMES.findall(text)]


def _shape(text: str | None, sizes: Sequence[str]) -> tuple[int | str, ...] | None:
    """Return the dimensions in the *text* of an input, or the *sizes* of its port. An output
    without sizes may be a scalar, or of any shape.
    """
    if text is not None:
        if text == "...":
            return None
        sizes = [one.strip() for one in text[:NAME_CHARACTERS_MAX].split(",")] if text else ()
    elif not sizes:
        return None
    return tuple(map(_size, sizes))


def _size(text: str) -> int | str:
    if text.isascii() and text.isdecimal() and len(text) < 20:
        size = int(text)
        return size if size <= DIMENSION_MAX else ""
    return text[:50] if ".." in text else ""


LIBRARY_BYTES = 80 << 20
"""OpenVINO with its plugin for the CPU, and NumPy, in a process that has not imported them."""


class OpenVinoMemoryEstimator(GraphMemoryEstimator):
    """The `MemoryEstimator` of graphs in OpenVINO.

    :raises LoadFailed: a file cannot be read.
    """

    def __init__(self, spec: ModelSpec):
        size = sum(map(file_bytes, graph_paths(spec)))
        factor = ENGINES["openvino"].weights_factor
        if spec.fd >= 0:
            factor += 1  # the bytes of the files, which are read before
        super().__init__(round(factor * size), 0, LIBRARY_BYTES)


def graph_paths(spec: ModelSpec) -> list[str]:
    """Return the paths of the files of *spec*, which may be descriptors of this process.

    :raises LoadFailed: a file in ONNX cannot be read, or is damaged.
    """
    path = model_path(spec)
    if spec.fd >= 0:
        return [path, *([f"/proc/self/fd/{spec.weights_fd}"] if spec.weights_fd >= 0 else [])]
    files = files_of_graph(Path(path))
    if path.lower().endswith(".onnx"):
        folder = Path(path).parent
        others = [folder / one for one in sorted(read_onnx_header(path).external)]
        files += [one for one in others if one.is_file()]  # the engine reports a missing one
    return [str(one) for one in files]
