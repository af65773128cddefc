"""Tensors as models take and return them, and wasi-nn's types of their elements.

This module does not use numpy: a tensor is its bytes.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import msgspec

TENSOR_TYPES = {"fp16": 0, "fp32": 1, "fp64": 2, "u8": 3, "i32": 4, "i64": 5, "bf16": 6}
"""Types by name; 0 to 5 are WasmEdge's numbers."""
_ELEMENT_BYTES = {0: 2, 1: 4, 2: 8, 3: 1, 4: 4, 5: 8, 6: 2}


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """The elements in *data*, with the number of their type. Neither is checked: a model refuses
    tensors that do not fit its inputs.
    """

    data: bytes
    dimensions: tuple[int, ...] = ()
    type: int = TENSOR_TYPES["u8"]

    @property
    def holds_numbers(self) -> bool:
        """Whether it is an array, and not a text. Guests send texts as u8 or, because hosts have
        disagreed on the numbers of types, as another type with the shape [1].
        """
        elements = math.prod(self.dimensions)
        fits = elements * _ELEMENT_BYTES.get(self.type, 0) == len(self.data)
        return fits and elements > 1 and self.type != TENSOR_TYPES["u8"]


NamedTensor: TypeAlias = tuple[str, Tensor]
