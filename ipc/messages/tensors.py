"""Tensors, with wasi-nn's types."""

from __future__ import annotations

from .base import Map

__all__ = ("TENSOR_BYTES_MAX", "TENSOR_TYPES", "Tensor")

TENSOR_BYTES_MAX = 64 << 20
"""Bytes of a prompt or tensor that is passed in a descriptor."""
TENSOR_TYPES = {"fp16": 0, "fp32": 1, "fp64": 2, "u8": 3, "i32": 4, "i64": 5, "bf16": 6}
"""Tensor types; 0 to 5 are WasmEdge's numbers."""


class Tensor(Map):
    """A wasi-nn tensor. `type` is a name or number of `TENSOR_TYPES`; `data` its bytes.

    A tensor too large for a frame travels in a memfd passed beside the frame: `fd` is then its
    place among the frame's descriptors, and `data` is empty.
    """

    data: bytes = b""
    dimensions: list[int] = []
    type: int | str = "u8"
    fd: int = -1
