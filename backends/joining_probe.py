"""The probe whether joined computations of a graph have the results of single ones.

Some graphs have a free first dimension and nevertheless mix their rows: by a mean over all of them,
or by the scale of a quantization that is measured at run time. Only results show it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .base import GraphModel
from .errors import InferdError
from .joining import cut_outputs, join_inputs, obstacle
from .tensors import (
    ARRAY_TYPES,
    OTHER_TYPES,
    TENSOR_TYPES,
    TYPE_NAMES,
    NamedTensor,
    Tensor,
    TensorInfo,
)

PROBE_S_MAX = 2.0
"""The most time of a probe; a graph that takes longer is not joined."""
FREE_SIZES = (8, 2, 1, 32, 64, 224)
"""The sizes that are tried for the other free dimensions, all of one size."""
ROWS, SCALES = (1, 2), (0.5, 2.0)
"""The rows of the two computations, and the largest numbers in them. They differ, so that a common
scale of all rows shows.
"""
TOLERANCES: Mapping[str, float] = {"fp16": 2e-2, "bf16": 2e-2, "fp32": 2e-3, "fp64": 1e-6}
"""By type, the differences of results relative to the largest number in an output. Sums in another
order differ by less, an 8-bit scale by more.
"""
ELEMENTS_MAX = 1 << 22
"""The most elements of an input; with more, a graph is not probed."""


def probe_joining(model: GraphModel, seconds_max: float = PROBE_S_MAX) -> str:
    """Return the reason for which computations of *model* must not be joined, or empty. Compute two
    in its lane 0, alone and joined.
    """
    declared = model.info.inputs
    reason = obstacle(declared, model.info.outputs)
    if reason:
        return reason
    runs = _Runs(model, seconds_max)
    has_free = any(isinstance(size, str) for info in declared for size in (info.shape or ())[1:])
    for size in FREE_SIZES if has_free else FREE_SIZES[:1]:
        pair = [_inputs(declared, size, *of) for of in zip(ROWS, SCALES, strict=True)]
        if any(tensor is None for part in pair for _, tensor in part):
            return f"an input has more than {ELEMENTS_MAX} elements"
        try:
            alone = [runs.run(part) for part in pair]
        except InferdError as exc:
            reason = f"it cannot be probed: {exc.message}"
        else:
            reason = _compare(runs, pair, alone)
            if not (reason and runs.is_late):
                return reason
        if runs.is_late:
            break
    return f"its probe took more than {seconds_max:g} s" if runs.is_late else reason


class _Runs:
    """Computations of one row set after the other, all within a time."""

    def __init__(self, model: GraphModel, seconds_max: float):
        self._model, self._end = model, time.monotonic() + seconds_max

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self._end

    def run(self, inputs: Sequence[NamedTensor]) -> list[NamedTensor]:
        computation = self._model.new_computation(inputs)
        timer = threading.Timer(max(0.0, self._end - time.monotonic()), computation.cancel)
        timer.daemon = True
        timer.start()
        try:
            return computation.run()
        finally:
            timer.cancel()


def _compare(
    runs: _Runs, pair: Sequence[Sequence[NamedTensor]], alone: Sequence[Sequence[NamedTensor]]
) -> str:
    model_inputs = [[(_info(name, tensor), tensor) for name, tensor in part] for part in pair]
    try:
        cut_outputs(alone[0], ROWS[:1])
        cut_outputs(alone[1], ROWS[1:])
        joined = cut_outputs(runs.run(join_inputs(model_inputs)), ROWS)
    except InferdError as exc:
        return f"joined inputs fail: {exc.message}"
    if all(_first_row(a) == _first_row(b) for (_, a), (_, b) in zip(*alone, strict=True)):
        return "it cannot be probed: its outputs do not depend on its inputs"
    for part, expected in zip(joined, alone, strict=True):
        for (name, found), (_, single) in zip(part, expected, strict=True):
            if not _are_alike(found, single):
                return f"joined inputs change the output {name[:100]!r}"
    return ""


def _info(name: str, tensor: Tensor) -> TensorInfo:
    return TensorInfo(name, TYPE_NAMES[tensor.type], tensor.dimensions)


def _first_row(tensor: Tensor) -> bytes:
    return tensor.data[: len(tensor.data) // max(1, tensor.dimensions[0])]


def _inputs(
    declared: Sequence[TensorInfo], size: int, rows: int, scale: float
) -> list[tuple[str, Any]]:
    """Return inputs of *rows* with numbers up to *scale*, whose other free dimensions have *size*;
    None instead of a tensor that would be too large. Whole numbers are 0 or 1, which are valid as
    indexes, masks and kinds; those of one row are others than those of the next.
    """
    rng = np.random.default_rng(rows)
    found: list[tuple[str, Any]] = []
    for info in declared:
        assert info.shape
        shape = (rows, *(s if isinstance(s, int) else size for s in info.shape[1:]))
        if np.prod(shape, dtype=float) > ELEMENTS_MAX:
            found.append((info.name, None))
            continue
        if info.type == "bf16":
            wide = rng.uniform(-scale, scale, shape).astype(np.float32)
            array = (wide.view(np.uint32) >> 16).astype(np.uint16)
        elif info.type in TOLERANCES:
            array = rng.uniform(-scale, scale, shape).astype(ARRAY_TYPES[info.type])
        else:
            bits = np.random.default_rng(0).integers(0, 2, shape[1:])
            array = np.stack([bits ^ (rows + n) % 2 for n in range(rows)])
            array = array.astype(ARRAY_TYPES[info.type])
        number = (TENSOR_TYPES | OTHER_TYPES)[info.type]
        found.append((info.name, Tensor(array.tobytes(), shape, number)))
    return found


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether two outputs are equal, or as numbers of floating point nearly."""
    if (one.type, one.dimensions) != (other.type, other.dimensions):
        return False
    name = TYPE_NAMES[one.type]
    if name not in TOLERANCES or one.data == other.data:
        return one.data == other.data
    a, b = _numbers(one, name), _numbers(other, name)
    finite = np.abs(b[np.isfinite(b)])
    most = TOLERANCES[name] * float(finite.max(initial=0.0))
    return bool(np.allclose(a, b, rtol=0.0, atol=most, equal_nan=True))


def _numbers(tensor: Tensor, name: str) -> Any:
    array = np.frombuffer(tensor.data, ARRAY_TYPES[name])
    if name == "bf16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)
