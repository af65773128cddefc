"""A graph in ONNX, as ONNX Runtime computes it."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, cast

import numpy as np
import onnxruntime

from ..errors import (
    BackendError,
    Cancelled,
    InferdError,
    InvalidArgument,
    LoadFailed,
    load_cancelled,
)
from ..graphs import (
    TYPE_NUMBERS,
    VIEW_BYTES_MIN,
    FileGraph,
    array_bytes,
    check_copy,
    check_output_bytes,
    check_types,
    engine_text,
    graph_info,
    load_error,
    model_path,
    no_device,
    ran_out_of_memory,
    run_error,
    string_tensor,
)
from ..model_spec import LoadProgress, ModelSpec, device_of
from ..tensors import (
    ARRAY_TYPES,
    FLOATS,
    STRING,
    Inputs,
    NamedTensor,
    Tensor,
    TensorInfo,
    match_inputs,
    unpack_strings,
)
from .header import ELEMENT_TYPES, OnnxHeader, check_one_file, read_onnx_header

PROVIDER = "CPUExecutionProvider"
_SUFFIX = "ExecutionProvider"
_REMOTE = "AzureExecutionProvider"
"""It sends tensors to remote endpoints, and is in every package."""
_AS_REQUESTED = 1
"""kSameAsRequested."""
_SILENT = 4
"""The log level of fatal errors: the engine also raises what it logs."""
_ELEMENT_NUMBERS = {name: number for number, name in ELEMENT_TYPES.items()}
_STRING_NUMBER = _ELEMENT_NUMBERS[STRING]
_NUMBERS_OF_ARRAYS = {
    code: TYPE_NUMBERS[kind] for kind, code in ARRAY_TYPES.items() if kind != "bf16"
}
"""The numbers of types by NumPy's codes."""
_SPIN_US = 100
"""On two cores, a computation of magika is 1.5 times as fast as on one without spinning, and 1.6
times with this; if both threads have one core, it is 5 % slower than without.
"""
_TERMINATED = "terminate flag being set to true"


def load_onnx(spec: ModelSpec, progress: LoadProgress, *, renders: bool = False) -> OnnxModel:
    """Load the graph of *spec*; see `load_model`."""
    path = model_path(spec)
    if spec.fd >= 0:  # the engine would look for others in its folder, which are not its user's
        check_one_file(path, spec.name)
    header = read_onnx_header(path)
    check_types(spec, header.inputs, header.outputs)
    provider = find_provider(spec, onnxruntime.get_available_providers())
    if not progress(0.0):
        raise load_cancelled(spec.name)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = spec.lane_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _SILENT
    # Threads that spin take the cores from other models' steps. Those of one computation may do so
    # within it, for a short time: to wake them for each operator takes longer.
    spins = spec.lane_threads > 1
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spins)))
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    if spins:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(_SPIN_US))
        options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        _register_allocator()
        options.add_session_config_entry("session.use_env_allocators", "1")
        # Without the second one, operators that the first one lacks would fail the load.
        providers = list(dict.fromkeys((provider, PROVIDER)))
        session = onnxruntime.InferenceSession(path, options, providers=providers)
        session.disable_fallback()  # to another device after an error, which nobody would see
        names = [one.name for one in session.get_inputs()]
    except Exception as exc:  # the engine's errors have no common class
        raise load_error("ONNX Runtime", "onnxruntime", spec, exc) from None
    if provider not in session.get_providers():  # the engine has only logged why
        raise LoadFailed(
            f"ONNX Runtime cannot start {provider} for {spec.name!r}",
            hint="check the driver and the libraries that it needs, or set `device` to cpu",
        )
    if names != [info.name for info in header.inputs]:
        raise LoadFailed(
            f"the inputs of {spec.name!r} are ambiguous",
            hint="export the model again, each input with a name of its own",
        )
    if not progress(1.0):
        raise load_cancelled(spec.name)
    return OnnxModel(spec, session, header, path)


def find_provider(spec: ModelSpec, installed: Sequence[str]) -> str:
    """Return the one of the *installed* providers that the graph is set to.

    :raises UnsupportedOperation: it is not one of them.
    """
    wanted = device_of(spec).lower()
    names = {name.removesuffix(_SUFFIX).lower(): name for name in installed if name != _REMOTE}
    found = names.get(wanted.removesuffix(_SUFFIX.lower()))
    if found is None:
        raise no_device(spec, "ONNX Runtime", names)
    return found


def check_device(spec: ModelSpec) -> None:
    """Check that the engine has the device that the graph is set to.

    :raises UnsupportedOperation: it does not.
    """
    find_provider(spec, onnxruntime.get_available_providers())


@cache
def _register_allocator() -> None:
    """Let the sessions of this process get memory in pieces of the size that they request. By
    default each piece is twice as large as the last one, and remains so after a request that was
    refused: then every later request fails.
    """
    kinds = onnxruntime.OrtAllocatorType, onnxruntime.OrtMemType
    memory = onnxruntime.OrtMemoryInfo("Cpu", kinds[0].ORT_ARENA_ALLOCATOR, 0, kinds[1].DEFAULT)
    onnxruntime.create_and_register_allocator(
        memory, onnxruntime.OrtArenaCfg({"arena_extend_strategy": _AS_REQUESTED})
    )


class OnnxModel(FileGraph):
    """The `GraphModel` of an ONNX file, with a session of ONNX Runtime that all lanes share.

    A session with one thread computes in the callers' threads.
    """

    def __init__(
        self, spec: ModelSpec, session: onnxruntime.InferenceSession, header: OnnxHeader, path: str
    ):
        self._session: onnxruntime.InferenceSession | None = session
        title = header.title or "ONNX graph"
        self.info = graph_info("onnx", title, [path], header.inputs, header.outputs)
        self.computes_in_caller = session.get_providers() == [PROVIDER]
        self._output_names = [info.name for info in header.outputs]
        given = {info.type for info in header.inputs}
        kinds = given | {info.type for info in header.outputs}
        self._needs_values = "bf16" in kinds and STRING not in given
        """Whether tensors are passed as the engine's values, which have a type that NumPy does not
        have, but are not made of strings.
        """

    def new_computation(self, inputs: Sequence[NamedTensor]) -> OnnxComputation:
        """Return the computation of *inputs*; see `GraphModel`."""
        assert self._session is not None, "the model is closed"
        matched = match_inputs(self.info.inputs, inputs)
        names, as_values = self._output_names, self._needs_values
        return OnnxComputation(self._session, matched, names, as_values=as_values)

    def add_lane(self) -> None:
        """Do nothing: any number of threads may run the session."""

    def close(self) -> None:
        """Free the session."""
        self._session = None


class OnnxComputation:
    """One run of a session, with options of its own, because those that were cancelled cannot be
    used again.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        inputs: Inputs,
        outputs: Sequence[str],
        *,
        as_values: bool,
    ):
        self.inputs = inputs
        self._session, self._outputs, self._as_values = session, outputs, as_values
        self._options = onnxruntime.RunOptions()
        self._options.log_severity_level = _SILENT

    def cancel(self) -> None:
        """End the run before its next operator."""
        self._options.terminate = True

    def run(self, lane: int = 0) -> list[NamedTensor]:
        """Return the outputs; see `Computation`. All lanes are equal."""
        try:
            # They share the memory of the tensors' bytes, or of copies, and keep it alive.
            arrays = {info.name: _array(info, tensor) for info, tensor in self.inputs}
            tensors = self._run_values(arrays) if self._as_values else self._run_arrays(arrays)
        except InferdError:
            raise
        except Exception as exc:  # the engine's errors have no common class
            raise _run_error(exc) from None
        return list(zip(self._outputs, tensors, strict=True))

    def _run_arrays(self, arrays: dict[str, Any]) -> list[Tensor]:
        """Return the outputs, which are not too large."""
        found = [*map(np.asarray, self._session.run(self._outputs, arrays, self._options))]
        check_output_bytes(sum([one.nbytes for one in found if one.dtype != object]))
        return [_tensor_of_array(one) for one in found]

    def _run_values(self, arrays: dict[str, Any]) -> list[Tensor]:
        """As `_run_arrays`, for inputs of any numbers. This takes 30 us more."""
        make_value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type
        values = {
            info.name: make_value(arrays[info.name], _ELEMENT_NUMBERS[info.type])
            for info, _ in self.inputs
        }
        found = self._session.run_with_ort_values(self._outputs, values, self._options)
        numbers = (one for one in found if one.element_type() != _STRING_NUMBER)
        check_output_bytes(sum(value.tensor_size_in_bytes() for value in numbers))
        borrowed = [one.data_ptr() for one in values.values()]
        return [_tensor_of_value(one, borrowed) for one in found]


def _array(info: TensorInfo, tensor: Tensor) -> Any:
    """Return an input as an array.

    :raises InvalidArgument: a string is not UTF-8.
    """
    if info.type == STRING:
        return _strings(info, tensor)
    array = np.frombuffer(tensor.data, ARRAY_TYPES[info.type]).reshape(tensor.dimensions)
    if isinstance(tensor.data, memoryview) and info.type not in FLOATS:
        array = array.copy()  # the client may change it between the engine's check and its use
        check_copy(info, array)
    return array


def _strings(info: TensorInfo, tensor: Tensor) -> Any:
    try:
        texts = [one.decode() for one in unpack_strings(tensor.data)]
    except UnicodeDecodeError:
        raise InvalidArgument(
            f"the input {info} got a string that is not UTF-8", hint="send strings in UTF-8"
        ) from None
    return np.array(texts, object).reshape(tensor.dimensions)


def _tensor_of_array(array: Any) -> Tensor:
    """Return an output in an array. The engine has copied one that is an input.

    :raises TooLarge: it has too many strings, or too long ones.
    """
    if array.dtype == object:
        return string_tensor((str(one).encode() for one in array.flat), array.shape, array.size)
    number = _NUMBERS_OF_ARRAYS.get(array.dtype.str)
    if number is None:  # though the header declares another type
        raise BackendError(f"an output has elements of {array.dtype}")
    return Tensor(array_bytes(array), array.shape, number)


def _tensor_of_value(value: onnxruntime.OrtValue, borrowed: Collection[int]) -> Tensor:
    """Return an output in a value; one at a *borrowed* address is an input, whose memory is freed
    or changes after the run, and is copied.
    """
    kind = ELEMENT_TYPES.get(value.element_type(), "")
    if kind not in TYPE_NUMBERS:  # though the header declares another type
        raise BackendError(f"an output has elements of {kind or 'an unknown type'}")
    if kind == STRING:
        return _tensor_of_array(np.asarray(value.numpy(), object))
    size = value.tensor_size_in_bytes()
    # Not by NumPy, which has no bfloat16.
    if size >= VIEW_BYTES_MIN and value.data_ptr() not in borrowed:
        data = cast(bytes, _view(value, size))
    else:
        data = ctypes.string_at(value.data_ptr(), size) if size else b""
    return Tensor(data, tuple(value.shape()), TYPE_NUMBERS[kind])


def _view(value: onnxruntime.OrtValue, size: int) -> memoryview:
    """Return the bytes of *value* in place; the view keeps the value."""
    memory = (ctypes.c_ubyte * size).from_address(value.data_ptr())
    memory.owner = value  # type: ignore[attr-defined]  # of this object alone
    return np.frombuffer(memoryview(memory), np.uint8).data


def _run_error(exc: Exception) -> InferdError:
    if _TERMINATED in str(exc):
        return Cancelled("the computation was cancelled")
    if type(exc).__name__ == "InvalidArgument" and not ran_out_of_memory(exc):
        return InvalidArgument(
            f"ONNX Runtime refuses the inputs: {engine_text(exc)}",
            hint="send inputs that fit each other and the model",
        )
    return run_error(exc)
