"""The tensors of a session: its inputs by index, and the outputs computed of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from ...backends.tensors import NamedTensor, Tensor
from ..memory import memory_bytes


@dataclass
class SessionTensors:
    """The tensors that `set_input` has set and `get_output` returns. New text drops them, and
    neither the history nor the journal has them. Owned by its session.
    """

    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    computation: anyio.Event | None = None
    """Set at the end of the computation that is under way."""

    @property
    def kept_bytes(self) -> int:
        """The memory that they take."""
        return sum(
            len(tensor.data) + memory_bytes(tensor.dimensions)
            for tensor in (*self.inputs.values(), *self.outputs)
        )

    def set_input(self, index: int, tensor: Tensor) -> None:
        """Set the input of an index, and drop the outputs."""
        self.inputs[index], self.outputs = tensor, []

    def named_inputs(self) -> list[NamedTensor]:
        """Return the inputs by their indices as names."""
        return [(str(index), tensor) for index, tensor in sorted(self.inputs.items())]

    def clear(self) -> None:
        """Drop all tensors."""
        self.inputs, self.outputs = {}, []
