"""A graph in ONNX, as ONNX Runtime computes it on the CPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import onnxruntime

from ..base import ModelInfo
from ..errors import (
    BackendError,
    Cancelled,
    InferdError,
    InvalidArgument,
    LoadFailed,
    OutOfMemory,
    TooLarge,
    UnsupportedOperation,
    load_cancelled,
)
from ..model_spec import LoadProgress, ModelSpec
from ..tensors import OTHER_TYPES, TENSOR_TYPES, NamedTensor, Tensor, TensorInfo, match_inputs
from .header import ELEMENT_TYPES, OnnxHeader, read_onnx_header
from .memory import model_path

OUTPUT_BYTES_MAX = 64 << 20
"""The most bytes of all outputs of a computation. The daemon's own limit on replies is lower."""
MESSAGE_CHARACTERS_MAX = 500
"""The most characters of the engine's text in an error."""
PROVIDER = "CPUExecutionProvider"
"""By name, because the package also has a provider that sends tensors to remote endpoints."""
_AS_REQUESTED = 1
"""kSameAsRequested."""
_SILENT = 4
"""The log level of fatal errors: the engine also raises what it logs."""
_DTYPES: dict[str, Any] = {
    "fp16": np.float16, "fp32": np.float32, "fp64": np.float64, "bf16": np.uint16, "u8": np.uint8,
    "i32": np.int32, "i64": np.int64, "bool": np.bool_, "i8": np.int8, "i16": np.int16,
    "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
}  # fmt: skip
_NUMBERS = TENSOR_TYPES | OTHER_TYPES
_ELEMENT_NUMBERS = {name: number for number, name in ELEMENT_TYPES.items()}
_OUT_OF_MEMORY = re.compile(r"bad_alloc|bad allocation|Failed to allocate memory")
_TERMINATED = "terminate flag being set to true"
_SAMPLE_BYTES = 1 << 20
"""The bytes at the beginning and the end of a file that its fingerprint depends on."""


def load_onnx(spec: ModelSpec, progress: LoadProgress, *, renders: bool = False) -> OnnxModel:
    """Load the graph of *spec*; see `load_model`."""
    path = model_path(spec)
    header = read_onnx_header(path)
    _check_types(spec, header)
    if not progress(0.0):
        raise load_cancelled(spec.name)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = spec.lane_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _SILENT
    # Threads that spin take the cores from other models' steps.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    try:
        _register_allocator()
        options.add_session_config_entry("session.use_env_allocators", "1")
        session = onnxruntime.InferenceSession(path, options, providers=[PROVIDER])
        names = [one.name for one in session.get_inputs()]
    except Exception as exc:  # the engine's errors have no common class
        raise _load_error(spec, exc) from None
    if names != [info.name for info in header.inputs]:
        raise LoadFailed(
            f"the inputs of {spec.name!r} are ambiguous",
            hint="export the model again, each input with a name of its own",
        )
    if not progress(1.0):
        raise load_cancelled(spec.name)
    return OnnxModel(spec, session, header, path)


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


class OnnxModel:
    """The `GraphModel` of an ONNX file, with a session of ONNX Runtime that all lanes share.

    A session with one thread computes in the callers' threads. Otherwise it creates its threads
    once: their number does not change later.
    """

    tuning = None

    def __init__(
        self, spec: ModelSpec, session: onnxruntime.InferenceSession, header: OnnxHeader, path: str
    ):
        self._session: onnxruntime.InferenceSession | None = session
        size, digest = _sample(path)
        self.info = ModelInfo(
            description=header.title or "ONNX graph",
            fingerprint=f"onnx-{digest}",
            vocab_size=0,
            vocab_hash="",
            ctx_size=0,
            ctx_size_trained=0,
            batch_size=1,
            slots=1,
            logits_max=1,
            size_bytes=size,
            parameters=0,
            token_bytes_max=1,
            has_chat_template=False,
            generates=False,
            computes_tensors=True,
            inputs=header.inputs,
            outputs=header.outputs,
        )

    def set_threads(self, threads: int) -> None:
        """Do nothing: the threads of a session are fixed."""

    def compute(self, inputs: Sequence[NamedTensor]) -> list[NamedTensor]:
        """Return the outputs of *inputs*."""
        return self.new_computation(inputs).run()

    def new_computation(self, inputs: Sequence[NamedTensor]) -> OnnxComputation:
        """Return the computation of *inputs*; see `GraphModel`."""
        assert self._session is not None, "the model is closed"
        matched = match_inputs(self.info.inputs, inputs)
        return OnnxComputation(self._session, matched, self.info.outputs)

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
        inputs: Sequence[tuple[TensorInfo, Tensor]],
        outputs: Sequence[TensorInfo],
    ):
        self.inputs = inputs
        self._session, self._outputs = session, outputs
        self._options = onnxruntime.RunOptions()
        self._options.log_severity_level = _SILENT

    def cancel(self) -> None:
        """End the run before its next operator."""
        self._options.terminate = True

    def run(self, lane: int = 0) -> list[NamedTensor]:
        """Return the outputs; see `Computation`. All lanes are equal."""
        names = [info.name for info in self._outputs]
        try:
            # The values share the memory of the tensors' bytes, which the list keeps alive.
            values = {info.name: _value(info, tensor) for info, tensor in self.inputs}
            found = self._session.run_with_ort_values(names, values, self._options)
        except Exception as exc:  # the engine's errors have no common class
            raise _run_error(exc) from None
        size = sum(value.tensor_size_in_bytes() for value in found)
        if size > OUTPUT_BYTES_MAX:
            raise TooLarge(
                f"the outputs have {size} bytes, more than {OUTPUT_BYTES_MAX}",
                hint="send smaller inputs",
                data={"bytes": size, "bytes_max": OUTPUT_BYTES_MAX},
            )
        return [(name, _tensor(value)) for name, value in zip(names, found, strict=True)]


def _value(info: TensorInfo, tensor: Tensor) -> onnxruntime.OrtValue:
    array = np.frombuffer(tensor.data, _DTYPES[info.type]).reshape(tensor.dimensions)
    number = _ELEMENT_NUMBERS[info.type]
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, number)


def _tensor(value: onnxruntime.OrtValue) -> Tensor:
    kind = ELEMENT_TYPES.get(value.element_type(), "")
    if kind not in _NUMBERS:  # though the header declares another type
        raise BackendError(f"an output has elements of {kind or 'an unknown type'}")
    size = value.tensor_size_in_bytes()
    # Not by NumPy, which has no bfloat16.
    data = ctypes.string_at(value.data_ptr(), size) if size else b""
    return Tensor(data, tuple(value.shape()), _NUMBERS[kind])


def _check_types(spec: ModelSpec, header: OnnxHeader) -> None:
    """Raise UnsupportedOperation for an input or output whose type is not served."""
    for what, tensors in (("input", header.inputs), ("output", header.outputs)):
        for info in tensors:
            if info.type not in _NUMBERS:
                raise UnsupportedOperation(
                    f"the {what} {info.name[:100]!r} of {spec.name!r} is of type {info.type}",
                    hint=f"export the model with types among {', '.join(_NUMBERS)}",
                    data={"model": spec.name, "type": info.type},
                )


def _message(exc: Exception) -> str:
    """Return the engine's text in one line. A text that is not UTF-8 has become an exception."""
    text = " ".join(str(exc).split())
    return "".join(c for c in text if c.isprintable())[:MESSAGE_CHARACTERS_MAX]


def _load_error(spec: ModelSpec, exc: Exception) -> InferdError:
    if isinstance(exc, MemoryError) or _OUT_OF_MEMORY.search(str(exc)):
        return OutOfMemory(
            f"there is too little memory to load {spec.name!r}",
            hint="unload models or end other programs and try again",
            data={"model": spec.name},
        )
    return LoadFailed(
        f"ONNX Runtime does not load {spec.name!r}: {_message(exc)}",
        hint="check the file; a newer version of onnxruntime may know its operators",
        data={"model": spec.name},
    )


def _run_error(exc: Exception) -> InferdError:
    if _TERMINATED in str(exc):
        return Cancelled("the computation was cancelled")
    if isinstance(exc, MemoryError) or _OUT_OF_MEMORY.search(str(exc)):
        return OutOfMemory(
            "there is too little memory for the computation",
            hint="send smaller inputs, unload models or end other programs",
        )
    if type(exc).__name__ == "InvalidArgument":
        return InvalidArgument(
            f"ONNX Runtime refuses the inputs: {_message(exc)}",
            hint="send inputs that fit each other and the model",
        )
    return BackendError(f"the computation failed: {_message(exc)}", hint="change the inputs")


def _sample(path: str) -> tuple[int, str]:
    """Return the size of a file, and a digest of its size, beginning and end."""
    try:
        with open(path, "rb") as file:
            fd, size = file.fileno(), os.fstat(file.fileno()).st_size
            ends = [os.pread(fd, _SAMPLE_BYTES, at) for at in (0, max(0, size - _SAMPLE_BYTES))]
    except OSError as exc:
        raise LoadFailed(f"cannot read {path!r}: {exc.strerror}") from None
    return size, hashlib.blake2b(b"%d" % size + b"".join(ends), digest_size=16).hexdigest()
