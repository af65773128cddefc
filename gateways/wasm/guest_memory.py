"""A guest's memory: checked reads and writes, and the layouts of wasi-nn in it."""

from __future__ import annotations

import ctypes
import struct
from functools import cached_property
from typing import TYPE_CHECKING

from ...backends.errors import InvalidArgument
from ...backends.tensors import Tensor

if TYPE_CHECKING:
    from wasmtime import Caller, Memory

BUILDERS_MAX = 16
DIMENSIONS_MAX = 64
"""Dimensions of a tensor; more are ignored, as they are of texts."""
_TENSOR = struct.Struct("<IIB3xII")
"""Pointer and number of the dimensions, type, pointer and size of the data. The type is one byte,
which some guests write as four.
"""
_BUILDER = struct.Struct("<II")


class GuestMemory:
    """The memory of the guest that calls a host function, during this call.

    The guest does not run meanwhile, so its memory neither grows nor moves: its size and address
    are read once. wasmtime's own methods read them several times for each access.
    """

    def __init__(self, memory: Memory, caller: Caller):
        self._memory, self._caller = memory, caller

    @cached_property
    def _size(self) -> int:
        return int(self._memory.data_len(self._caller))

    @cached_property
    def _start(self) -> int:
        return ctypes.addressof(self._memory.data_ptr(self._caller).contents)

    def check_range(self, address: int, size: int) -> None:
        """Check that the guest's memory has *size* bytes at *address*.

        :raises InvalidArgument: the memory ends before that.
        """
        if address + size > self._size:
            raise InvalidArgument(
                f"{size} bytes at {address:#x} are outside of the memory of {self._size} bytes",
                hint="the guest passed a wrong pointer or size",
            )

    def read(self, address: int, size: int) -> bytes:
        """Return *size* bytes at *address*."""
        self.check_range(address, size)
        # Not `string_at`, which takes the size as a C int: -1 would mean "up to a zero byte".
        return (ctypes.c_char * size).from_address(self._start + address).raw if size else b""

    def write(self, address: int, data: bytes) -> None:
        """Write *data* at *address*."""
        self.check_range(address, len(data))
        if data:
            ctypes.memmove(self._start + address, data, len(data))

    def write_u32(self, address: int, number: int) -> None:
        """Write a u32 at *address*."""
        self.write(address, struct.pack("<I", number))

    def read_tensor(self, address: int) -> Tensor:
        """Return the tensor recorded at *address*."""
        record = self.read(address, _TENSOR.size)
        dimensions, dimensions_len, kind, data, size = _TENSOR.unpack(record)
        self.check_range(dimensions, 4 * dimensions_len)
        shape = self.read(dimensions, 4 * min(dimensions_len, DIMENSIONS_MAX))
        return Tensor(self.read(data, size), struct.unpack(f"<{len(shape) // 4}I", shape), kind)

    def read_builders(self, address: int, number: int) -> list[bytes]:
        """Return the builders of a graph, whose records are at *address*."""
        if number > BUILDERS_MAX:
            raise InvalidArgument(f"{number} builders", hint="the first names a model")
        records = self.read(address, _BUILDER.size * number)
        return [self.read(*record) for record in _BUILDER.iter_unpack(records)]
