"""A graph as OpenVINO computes it.

Inputs are only passed as tensors over memory of this module. Other ways of OpenVINO's Python API
ignore a wrong shape or a missing input, and answer with the previous caller's; with free dimensions
they write one caller's input into another's memory.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino

from ..errors import InferdError, InvalidArgument, LoadFailed, load_cancelled
from ..graphs import (
    DIMENSION_MAX,
    PORTS_MAX,
    TYPE_NUMBERS,
    VIEW_BYTES_MIN,
    LaneGraph,
    array_bytes,
    check_copy,
    check_output_bytes,
    check_types,
    engine_text,
    graph_info,
    load_error,
    no_device,
    opened_regular,
    ran_out_of_memory,
    run_error,
)
from ..model_encodings import SAVED_MODEL
from ..model_spec import CPU, LoadProgress, ModelSpec, device_of
from ..onnx.header import read_onnx_header
from ..tensors import ARRAY_TYPES, Inputs, NamedTensor, Tensor, TensorInfo
from .header import ELEMENT_TYPES, graph_paths, port_names, shortest_name

PRECISION = "precision"
"""The option with the precision in which floating-point numbers are computed."""
PRECISION_DEFAULT = "f32"
_WIDE_INTEGERS = ("i64", "u64")
"""OpenVINO computes these with 32 bits on the CPU, and drops the others."""
_UNBOUNDED = (1 << 31) - 1
"""The upper bound of some free dimensions."""
_ANY_TITLE = "_Frontend_IR"
"""The end of the names of graphs that have none in their files."""
_BOILERPLATE = re.compile(
    r"Exception from [^\s:]+:\d+:|Check '[^']*' failed at [^\s:]+:\d+:|\[ GENERAL_ERROR \]"
)


@functools.cache
def engine_core() -> openvino.Core:
    """Return the process's only `Core`, which is kept until the process ends.

    A core gives the thread that first compiles with it a stack for signal handlers, and frees that
    stack at its own end. If cores overlap, the one that ends last restores the stack of the other,
    which is already freed: the next signal that Python handles ends the process by SIGSEGV, without
    a message.
    """
    return openvino.Core()


def load_openvino(
    spec: ModelSpec, progress: LoadProgress, *, renders: bool = False
) -> OpenVinoModel:
    """Load the graph of *spec*; see `load_model`."""
    if not progress(0.0):
        raise load_cancelled(spec.name)
    files = graph_paths(spec)
    try:
        core = engine_core()
        graph = _read_graph(core, spec, files)
        inputs, outputs = list(graph.inputs), list(graph.outputs)
        if max(len(inputs), len(outputs)) > PORTS_MAX:
            raise LoadFailed(
                f"{spec.name!r} has more than {PORTS_MAX} inputs or outputs",
                hint="export it with fewer",
            )
        stated = _stated_names(spec)
        ports = _Ports(
            _port_infos(inputs, stated[0]),
            _port_infos(outputs, stated[1]),
            _other_names(inputs, stated[0]),
        )
        # Its Python API drops zeros at the end of strings, and fails with SIGFPE on empty ones.
        check_types(spec, ports.inputs, ports.outputs, tuple(ARRAY_TYPES))
        # Constants are folded here, which may take for ever: the daemon ends a load that hangs.
        device = find_device(spec, core)
        compiled = core.compile_model(graph, device, _settings(spec, device))
        model = OpenVinoModel(spec, compiled, ports, files, str(graph.get_friendly_name()))
    except InferdError:
        raise
    except Exception as exc:  # OpenVINO's errors have no common class
        raise load_error("OpenVINO", "openvino", spec, _short(exc)) from None
    if not progress(1.0):
        raise load_cancelled(spec.name)
    return model


def find_device(spec: ModelSpec, core: Any) -> str:
    """Return the engine's name of the device that the graph is set to.

    :raises UnsupportedOperation: the engine does not have it.
    """
    wanted = device_of(spec).upper()
    if wanted == CPU.upper():
        return wanted  # a search for others would load their plugins
    available: list[str] = core.available_devices
    if not any(name == wanted or name.startswith(f"{wanted}.") for name in available):
        raise no_device(spec, "OpenVINO", map(str.lower, available))
    return wanted


def check_device(spec: ModelSpec) -> None:
    """Check that the engine has the device that the graph is set to.

    :raises UnsupportedOperation: it does not.
    """
    find_device(spec, engine_core())


def _settings(spec: ModelSpec, device: str) -> dict[str, Any]:
    # By default it computes in bfloat16 where the CPU can.
    precision = spec.options.get(PRECISION, PRECISION_DEFAULT)
    common = {"INFERENCE_PRECISION_HINT": precision, "NUM_STREAMS": spec.lanes}
    if device != CPU.upper():
        return common
    return {
        **common,
        "INFERENCE_NUM_THREADS": spec.lanes * spec.lane_threads,
        # By default the threads of all processes are pinned to the same cores.
        "ENABLE_CPU_PINNING": False,
    }


def _read_graph(core: Any, spec: ModelSpec, files: Sequence[str]) -> Any:
    path = Path(spec.path)
    if spec.fd >= 0:
        return core.read_model(*map(_read_file, files))
    return core.read_model(str(path.parent if path.name == SAVED_MODEL else path))


def _read_file(path: str) -> bytes:
    try:
        with open(path, "rb", opener=opened_regular) as file:
            return file.read()
    except OSError as exc:
        raise LoadFailed(
            f"cannot read {path!r}: {exc.strerror or exc}", hint="check the file"
        ) from None


class _Ports:
    """The inputs and outputs of a graph, and the names of inputs by their other names."""

    def __init__(
        self,
        inputs: tuple[TensorInfo, ...],
        outputs: tuple[TensorInfo, ...],
        other_names: Mapping[str, str],
    ):
        self.inputs, self.outputs, self.other_names = inputs, outputs, other_names


def _stated_names(spec: ModelSpec) -> tuple[list[str], list[str]]:
    """Return the names of inputs and outputs that an ONNX file states. OpenVINO merges tensors that
    are copies of each other, and then names a port like several of them.
    """
    if spec.fd >= 0 or not spec.path.lower().endswith(".onnx"):
        return [], []
    header = read_onnx_header(spec.path)
    return [one.name for one in header.inputs], [one.name for one in header.outputs]


def _port_infos(ports: Sequence[Any], stated: Sequence[str]) -> tuple[TensorInfo, ...]:
    names = port_names([_name(port) for port in ports])
    if len(stated) == len(names):
        for index, (port, name) in enumerate(zip(ports, stated, strict=True)):
            if name in port.get_names() and name not in names:
                names[index] = name
    return tuple(_port_info(port, name) for port, name in zip(ports, names, strict=True))


def _name(port: Any) -> str:
    """Return the shortest name of a port. Without names, it is that of the node."""
    return shortest_name(map(str, port.get_names())) or str(port.get_node().get_friendly_name())


def _other_names(ports: Sequence[Any], stated: Sequence[str]) -> dict[str, str]:
    infos = _port_infos(ports, stated)
    own = {info.name for info in infos}
    return {
        str(name): info.name
        for port, info in zip(ports, infos, strict=True)
        for name in port.get_names()
        if str(name) not in own
    }


def _port_info(port: Any, name: str) -> TensorInfo:
    kind = str(port.get_element_type().get_type_name())
    shape = port.get_partial_shape()
    sizes = None if shape.rank.is_dynamic else tuple(map(_size, shape))
    return TensorInfo(name, ELEMENT_TYPES.get(kind, kind), sizes)


def _size(dimension: Any) -> int | str:
    if dimension.is_static:
        size = int(dimension.get_length())
        return size if size <= DIMENSION_MAX else ""
    if dimension.get_min_length() <= 1 and dimension.get_max_length() in (-1, _UNBOUNDED):
        return ""
    return str(dimension)  # a range


def _title(name: str) -> str:
    return "OpenVINO graph" if not name or name.endswith(_ANY_TITLE) else name


class OpenVinoModel(LaneGraph["_Request"]):
    """The `GraphModel` of a compiled graph. Its lanes share the weights."""

    computes_in_caller = False  # a request computes in a thread of OpenVINO

    def __init__(
        self, spec: ModelSpec, compiled: Any, ports: _Ports, files: Sequence[str], title: str
    ):
        self._compiled = compiled
        info = graph_info("openvino", _title(title), files, ports.inputs, ports.outputs)
        super().__init__(info, ports.other_names)

    def close(self) -> None:
        """Free the requests and the graph."""
        super().close()
        self._compiled = None

    def new_runner(self) -> _Request:
        """Return a request.

        :raises InferdError: OpenVINO has failed.
        """
        try:
            return _Request(self._compiled)
        except Exception as exc:  # OpenVINO's errors have no common class
            raise run_error(_short(exc)) from None


class _Request:
    """A request of a compiled graph, for one thread at a time, with the memory of its inputs."""

    def __init__(self, compiled: Any):
        self._request = compiled.create_infer_request()
        self._has_state = bool(self._request.query_state())
        self._inputs: list[tuple[Any, Any]] = []
        """The arrays and tensors of the last computation. The request refers to their memory, and
        does not keep them.
        """

    def compute(self, inputs: Inputs, outputs: Sequence[TensorInfo]) -> list[NamedTensor]:
        """Return the *outputs* of *inputs*; see `LaneRunner`."""
        self._set_inputs(inputs)
        try:
            if self._has_state:  # of the previous caller
                self._request.reset_state()
            self._request.start_async()
            self._request.wait()
            found = [self._request.get_output_tensor(index) for index in range(len(outputs))]
        except Exception as exc:  # OpenVINO's errors have no common class
            raise run_error(_short(exc)) from None
        check_output_bytes(sum(int(one.get_byte_size()) for one in found))
        return [(info.name, _tensor(one, info)) for one, info in zip(found, outputs, strict=True)]

    def _set_inputs(self, inputs: Inputs) -> None:
        try:
            passed = [_own_tensor(info, tensor) for info, tensor in inputs]
            for index, (_, tensor) in enumerate(passed):
                self._request.set_input_tensor(index, tensor)
        except InferdError:
            raise
        except Exception as exc:  # OpenVINO's errors have no common class
            if ran_out_of_memory(exc):
                raise run_error(exc) from None
            raise InvalidArgument(
                f"OpenVINO refuses an input: {engine_text(_short(exc))}",
                hint="send the declared shape; `inferd show` prints it",
            ) from None
        self._inputs = passed


def _own_tensor(info: TensorInfo, tensor: Tensor) -> tuple[Any, Any]:
    """Return memory with the bytes of *tensor*, and OpenVINO's tensor over it. It is writable, as
    OpenVINO requires.
    """
    array = np.frombuffer(tensor.data, ARRAY_TYPES[info.type]).reshape(tensor.dimensions).copy()
    check_copy(info, array)
    if info.type in _WIDE_INTEGERS and array.size:
        _check_range(info, int(array.min()), int(array.max()))
    if info.type == "bf16":  # which NumPy does not have
        return array, openvino.Tensor(array, list(tensor.dimensions), openvino.Type.bf16)
    return array, openvino.Tensor(array, shared_memory=True)


def _check_range(info: TensorInfo, least: int, most: int) -> None:
    for value in (least, most):
        if not -(1 << 31) <= value < 1 << 31:
            raise InvalidArgument(
                f"the input {info} got {value}, and OpenVINO computes with 32 bits",
                hint="send smaller numbers, or run an ONNX file with ONNX Runtime",
            )


def _tensor(found: Any, info: TensorInfo) -> Tensor:
    array = found.data  # the memory of the request, which its next computation changes
    data = array_bytes(array.copy() if array.nbytes >= VIEW_BYTES_MIN else array)
    return Tensor(data, tuple(map(int, found.shape)), TYPE_NUMBERS[info.type])


def _short(exc: Exception) -> Exception:
    """Return an error without the places in OpenVINO's source that its text names."""
    return exc if isinstance(exc, MemoryError) else type(exc)(_BOILERPLATE.sub("", str(exc)))
