"""The parts that the backends of graphs have in common: files, bounds, types and errors."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

from .base import Computation, ModelInfo
from .errors import (
    BackendError,
    Cancelled,
    InferdError,
    LoadFailed,
    OutOfMemory,
    TooLarge,
    UnsupportedOperation,
)
from .memory import Device, MemoryNeed, resident_bytes
from .model_spec import ModelSpec, Shape, device_of
from .tensors import (
    OTHER_TYPES,
    STRING,
    STRINGS_MAX,
    TENSOR_TYPES,
    Inputs,
    NamedTensor,
    Tensor,
    TensorInfo,
    match_inputs,
    not_bools,
    pack_strings,
    too_many_strings,
)

OUTPUT_BYTES_MAX = 64 << 20
"""The most bytes of all outputs of a computation. The daemon's own limit on replies is lower."""
VIEW_BYTES_MIN = 1 << 20
"""Outputs of this size or more are views where possible: the pages of a copy as `bytes` take longer
than its content.
"""
PORTS_MAX = 4096
"""The most inputs or outputs of a graph."""
DIMENSION_MAX = 1 << 40
"""The largest size of a dimension. Larger ones are nonsense, and would not fit into a reply."""
MESSAGE_CHARACTERS_MAX = 500
"""The most characters of an engine's text in an error."""
TYPE_NUMBERS = TENSOR_TYPES | OTHER_TYPES
"""The types of the tensors of graphs."""
_OUT_OF_MEMORY = re.compile(
    r"bad_alloc|bad allocation|Failed to allocate (?:\d+ bytes of )?memory|Cannot allocate memory"
)
_SAMPLE_BYTES = 1 << 20
"""The bytes at the beginning and the end of a file that its fingerprint depends on."""


def model_path(spec: ModelSpec) -> str:
    """Return the path of the file of *spec*, which may be a descriptor of this process."""
    return f"/proc/self/fd/{spec.fd}" if spec.fd >= 0 else spec.path


def opened_regular(path: str, flags: int) -> int:
    """Open a regular file; an opener of `open`.

    :raises OSError: it is another kind of file.
    """
    # O_NONBLOCK: opening a FIFO would otherwise wait for its writer.
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(None, "it is not a regular file")
    return fd


class FileGraph(ABC):
    """The part of a `GraphModel` that its engines have in common. An engine creates its threads
    once: their number does not change later.
    """

    tuning = None
    info: ModelInfo
    computes_in_caller = True

    def set_threads(self, threads: int) -> None:  # noqa: B027  # it has no threads to set
        """Do nothing."""

    def compute(self, inputs: Sequence[NamedTensor]) -> list[NamedTensor]:
        """Return the outputs of *inputs*."""
        return self.new_computation(inputs).run()

    @abstractmethod
    def new_computation(self, inputs: Sequence[NamedTensor]) -> Computation:
        """Return the computation of *inputs*; see `GraphModel`."""


class LaneRunner(Protocol):
    """The part of an engine that computes in one lane."""

    def compute(self, inputs: Inputs, outputs: Sequence[TensorInfo]) -> list[NamedTensor]:
        """Return the *outputs* of *inputs*.

        :raises InferdError: the engine has failed, or the outputs are too large.
        """


R = TypeVar("R", bound=LaneRunner)


class LaneGraph(FileGraph, Generic[R]):
    """A graph with a runner for each lane, because a runner serves one thread at a time.

    *other_names* are further names of inputs, with the names that *info* has. Unless
    *reuses_runners*, each computation has a new one.
    """

    def __init__(
        self, info: ModelInfo, other_names: Mapping[str, str], *, reuses_runners: bool = True
    ):
        self.info = info
        self._other_names, self._reuses_runners = other_names, reuses_runners
        self._lanes: list[R | None] = []
        """The runners; None for one that is not to be used again."""
        self.add_lane()

    @abstractmethod
    def new_runner(self) -> R:
        """Return a runner.

        :raises InferdError: the engine has failed.
        """

    def new_computation(self, inputs: Sequence[NamedTensor]) -> LaneComputation:
        """Return the computation of *inputs*; see `GraphModel`."""
        renamed = [(self._other_names.get(name, name), tensor) for name, tensor in inputs]
        return LaneComputation(self.run_lane, match_inputs(self.info.inputs, renamed))

    def add_lane(self) -> None:
        """Add a runner; see `GraphModel`."""
        self._lanes.append(self.new_runner())

    def run_lane(self, lane: int, inputs: Inputs) -> list[NamedTensor]:
        """Return the outputs of *inputs* that fit. A runner that has failed is not used again."""
        runner, self._lanes[lane] = self._lanes[lane], None
        runner = runner or self.new_runner()
        outputs = runner.compute(inputs, self.info.outputs)
        if self._reuses_runners:
            self._lanes[lane] = runner
        return outputs

    def close(self) -> None:
        """Free the runners."""
        self._lanes.clear()


class LaneComputation:
    """One computation by an engine that cannot end one that runs: LiteRT has no call for it, and
    OpenVINO's `cancel` returns while a loop goes on. *run_lane* computes the *inputs* in a lane.
    """

    def __init__(
        self,
        run_lane: Callable[[int, Inputs], list[NamedTensor]],
        inputs: Inputs,
    ):
        self.inputs = inputs
        self._run_lane, self._cancelled = run_lane, False

    def cancel(self) -> None:
        """Let `run` fail unless it has begun."""
        self._cancelled = True

    def run(self, lane: int = 0) -> list[NamedTensor]:
        """Return the outputs; see `Computation`."""
        if self._cancelled:
            raise Cancelled("the computation was cancelled")
        return self._run_lane(lane, self.inputs)


class GraphMemoryEstimator:
    """The `MemoryEstimator` of a graph, which has one shape: *weights*, the buffers in which it
    computes (*compute*), and *library_bytes* in a process that has not imported the engine.
    """

    def __init__(self, weights: int, compute: int, library_bytes: int):
        self.shape = Shape(slots=1, ctx_size=0, batch_size=1)
        self.devices: list[Device] = []
        self._weights, self._compute, self._library_bytes = weights, compute, library_bytes

    def need(self, shape: Shape) -> MemoryNeed:
        """Return the memory of the graph."""
        return MemoryNeed(
            weights=self._weights,
            compute=self._compute,
            process=resident_bytes() + self._library_bytes,
        )

    def close(self) -> None:
        """Close nothing."""


def graph_info(
    kind: str,
    title: str,
    files: Sequence[str],
    inputs: tuple[TensorInfo, ...],
    outputs: tuple[TensorInfo, ...],
) -> ModelInfo:
    """Return the facts about a graph. Its fingerprint begins with *kind*, and depends on the bytes
    at the ends of its *files*.

    :raises LoadFailed: a file cannot be read.
    """
    samples = [_sample(file) for file in files]
    digest = hashlib.blake2b(b"".join(sample for _, sample in samples), digest_size=16).hexdigest()
    return ModelInfo(
        description="".join(c for c in title if c.isprintable())[:MESSAGE_CHARACTERS_MAX],
        fingerprint=f"{kind}-{digest}",
        vocab_size=0,
        vocab_hash="",
        ctx_size=0,
        ctx_size_trained=0,
        batch_size=1,
        slots=1,
        logits_max=1,
        size_bytes=sum(size for size, _ in samples),
        parameters=0,
        token_bytes_max=1,
        has_chat_template=False,
        generates=False,
        computes_tensors=True,
        inputs=inputs,
        outputs=outputs,
    )


def _sample(path: str) -> tuple[int, bytes]:
    """Return the size of a file, and its size, beginning and end as bytes."""
    try:
        with open(path, "rb", opener=opened_regular) as file:
            fd, size = file.fileno(), os.fstat(file.fileno()).st_size
            ends = [os.pread(fd, _SAMPLE_BYTES, at) for at in (0, max(0, size - _SAMPLE_BYTES))]
    except OSError as exc:
        raise LoadFailed(
            f"cannot read {path!r}: {exc.strerror or exc}", hint="check the file's path"
        ) from None
    return size, b"%d" % size + b"".join(ends)


def file_bytes(path: str) -> int:
    """Return the size of a file.

    :raises LoadFailed: it cannot be read.
    """
    try:
        return os.stat(path).st_size
    except OSError as exc:
        raise LoadFailed(
            f"cannot read {path!r}: {exc.strerror}", hint="check the file's path"
        ) from None


def check_types(
    spec: ModelSpec,
    inputs: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    served: Sequence[str] = tuple(TYPE_NUMBERS),
) -> None:
    """Check that the types of inputs and outputs are among those *served*.

    :raises UnsupportedOperation: one is not.
    """
    for what, tensors in (("input", inputs), ("output", outputs)):
        for info in tensors:
            if info.type not in served:
                raise UnsupportedOperation(
                    f"the {what} {info.name[:100]!r} of {spec.name!r} is of type {info.type}",
                    hint=f"export the model with types among {', '.join(served)}",
                    data={"model": spec.name, "type": info.type},
                )


def check_output_bytes(size: int) -> None:
    """Check that the outputs of a computation are not too large.

    :raises TooLarge: they are.
    """
    if size > OUTPUT_BYTES_MAX:
        raise TooLarge(
            f"the outputs have {size} bytes, more than {OUTPUT_BYTES_MAX}",
            hint="send smaller inputs",
            data={"bytes": size, "bytes_max": OUTPUT_BYTES_MAX},
        )


def check_copy(info: TensorInfo, array: Any) -> None:
    """Check an input in an array of NumPy that its client cannot change.

    :raises InvalidArgument: it has bools, and other bytes.
    """
    if info.type == "bool" and array.size and array.view("u1").max() > 1:
        raise not_bools(info)


def array_bytes(array: Any) -> bytes:
    """Return the bytes of an output in an array of NumPy that nothing else uses, of a large one as
    a view.
    """
    if array.nbytes < VIEW_BYTES_MIN:
        return bytes(array.tobytes())
    return cast(bytes, array.reshape(-1).view("u1").data)


def string_tensor(strings: Iterable[bytes], dimensions: Sequence[int], count: int) -> Tensor:
    """Return an output of *count* strings.

    :raises TooLarge: there are too many, or they are too long.
    """
    if count > STRINGS_MAX:
        raise too_many_strings()
    data = pack_strings(strings)
    check_output_bytes(len(data))
    return Tensor(data, tuple(dimensions), TYPE_NUMBERS[STRING])


def engine_text(exc: Exception) -> str:
    """Return an engine's text in one line. A text that is not UTF-8 has become an exception."""
    text = " ".join(str(exc).split())
    return "".join(c for c in text if c.isprintable())[:MESSAGE_CHARACTERS_MAX]


def ran_out_of_memory(exc: Exception) -> bool:
    """Return whether an engine has found too little memory."""
    return isinstance(exc, MemoryError) or _OUT_OF_MEMORY.search(str(exc)) is not None


def load_error(engine: str, package: str, spec: ModelSpec, exc: Exception) -> InferdError:
    """Return the error for a load that failed in an *engine*, of a Python *package*."""
    if ran_out_of_memory(exc):
        return OutOfMemory(
            f"there is too little memory to load {spec.name!r}",
            hint="unload models or end other programs and try again",
            data={"model": spec.name},
        )
    return LoadFailed(
        f"{engine} does not load {spec.name!r}: {engine_text(exc)}",
        hint=f"check the file; a newer version of {package} may know its operators",
        data={"model": spec.name},
    )


def no_device(spec: ModelSpec, engine: str, available: Iterable[str]) -> UnsupportedOperation:
    """Return the error for a device that the installed *engine* does not have."""
    wanted = device_of(spec)
    return UnsupportedOperation(
        f"the installed {engine} has no device {wanted!r}, which {spec.name!r} is set to",
        hint=f"set `device` to one of {', '.join(sorted(available))}, or install a build of"
        f" {engine} that has it",
        data={"model": spec.name, "device": wanted},
    )


def run_error(exc: Exception) -> InferdError:
    """Return the error for a computation that failed in an engine."""
    if ran_out_of_memory(exc):
        return OutOfMemory(
            "there is too little memory for the computation",
            hint="send smaller inputs, unload models or end other programs",
        )
    return BackendError(f"the computation failed: {engine_text(exc)}", hint="change the inputs")
