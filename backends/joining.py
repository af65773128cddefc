"""Computations that are joined along the first dimension of their tensors, and the check whether a
graph allows it.

The elements of a tensor are in row-major order, so that the tensors of several callers are joined
by appending their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from .base import Computation, GraphModel
from .errors import BackendError, Cancelled
from .tensors import STRING, Inputs, NamedTensor, Tensor, TensorInfo

JoinKey = tuple[tuple[int, ...], ...]
"""The dimensions of each input after the first one. Only computations with equal ones are joined.
"""


def obstacle(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]) -> str:
    """Return the reason for which the declared tensors of a graph cannot be joined, or empty."""
    if not inputs or not outputs:
        return f"it has no {'outputs' if inputs else 'inputs'}"
    names = {info.shape[0] for info in inputs if info.shape} - {""}
    for kind, tensors in (("input", inputs), ("output", outputs)):
        for info in tensors:
            if not info.shape:
                return f"the {kind} {info} has no first dimension"
            if info.type == STRING:
                return f"the {kind} {info} has strings"
            if isinstance(info.shape[0], int):
                return f"the first dimension of the {kind} {info} is fixed"
            if info.shape[0] in info.shape[1:] and info.shape[0]:
                return f"the {kind} {info} has its first dimension twice"
    if len(names) > 1:
        return f"its inputs have different first dimensions: {', '.join(sorted(map(str, names)))}"
    return ""


def rows_of(inputs: Inputs) -> int:
    """Return the size of the first dimension of all *inputs*; 0 if they have different ones."""
    sizes = {tensor.dimensions[0] for _, tensor in inputs if tensor.dimensions}
    return sizes.pop() if len(sizes) == 1 else 0


def key_of(inputs: Inputs) -> JoinKey:
    """Return the key of *inputs*, which have rows."""
    return tuple([tensor.dimensions[1:] for _, tensor in inputs])


def join_inputs(parts: Sequence[Inputs]) -> list[NamedTensor]:
    """Return the inputs of one computation instead of several with the same key."""
    joined = []
    for column in zip(*parts, strict=True):
        info, first = column[0]
        rows = sum(tensor.dimensions[0] for _, tensor in column)
        data = b"".join(tensor.data for _, tensor in column)
        joined.append((info.name, Tensor(data, (rows, *first.dimensions[1:]), first.type)))
    return joined


def cut_outputs(outputs: Sequence[NamedTensor], rows: Sequence[int]) -> list[list[NamedTensor]]:
    """Return the outputs of each part of a joined computation, whose parts have *rows*.

    :raises BackendError: an output does not have the rows of all parts.
    """
    total, ends = sum(rows), list(accumulate(rows, initial=0))
    for name, tensor in outputs:
        if not tensor.dimensions or tensor.dimensions[0] != total:
            raise BackendError(
                f"the output {name[:100]!r} of a joined computation has the shape"
                f" {list(tensor.dimensions)[:16]}, not {total} rows"
            )
    return [[(name, _rows(tensor, *part)) for name, tensor in outputs] for part in pairwise(ends)]


def _rows(tensor: Tensor, begin: int, end: int) -> Tensor:
    size = len(tensor.data) // tensor.dimensions[0]
    data = tensor.data[size * begin : size * end]
    return Tensor(data, (end - begin, *tensor.dimensions[1:]), tensor.type)


class JoinedComputation:
    """One run of a model for several computations of the same key."""

    def __init__(self, model: GraphModel, parts: Sequence[Computation]):
        self._model, self._parts = model, parts
        self._rows = [rows_of(part.inputs) for part in parts]
        self._computation: Computation | None = None
        self._is_cancelled = False

    def run(self, lane: int = 0) -> list[list[NamedTensor]]:
        """Return the outputs of each computation, once; see `Computation.run`."""
        inputs = join_inputs([part.inputs for part in self._parts])
        self._computation = computation = self._model.new_computation(inputs)
        if self._is_cancelled:  # before there was a computation to cancel
            raise Cancelled("the computation was cancelled")
        return cut_outputs(computation.run(lane), self._rows)

    def cancel(self) -> None:
        """Let `run` end soon; see `Computation.cancel`."""
        self._is_cancelled = True
        if self._computation is not None:
            self._computation.cancel()
