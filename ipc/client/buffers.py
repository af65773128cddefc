"""Buffers that a client shares with the daemon, and the tensors in them."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from ...backends.errors import InvalidArgument
from ...backends.shared_memory import ALIGNMENT
from .. import messages as w
from .arrays import ARRAY_NAMES, dtype_of, element_bytes, find_numpy
from .connection.core import ConnectionCore
from .kept_tensors import TensorReference

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPARE_MAX = 2
"""Unused buffers that an open graph keeps."""


class Buffer:
    """Memory that the client and the processes of its graphs map, made by `client.buffer`.

    Tensors in it are neither sent nor read by the daemon: `view` returns one, a value for inputs of
    `graph.run` and a place for outputs. It is freed by `client.free_buffers`, when the last
    reference to it has gone, and with the connection.
    """

    def __init__(self, handle: int, memory: mmap.mmap, connection: ConnectionCore | None):
        self.handle, self.size = handle, len(memory)
        self.memory = memoryview(memory)
        """Its bytes, which can be written."""
        self._connection = connection

    def __repr__(self) -> str:
        return f"<Buffer of {self.size} bytes>"

    def view(self, shape: Sequence[int], type: str = "fp32", offset: int = 0) -> BufferView:
        """Return a tensor with this shape and *type* (`fp32`, or NumPy's `float32`) that begins at
        *offset*, a multiple of 64.

        :raises InvalidArgument: it does not lie within the buffer.
        """
        return BufferView(self, shape, type, offset)

    def __del__(self) -> None:
        connection = self._connection
        if connection is None or connection.lost or connection.forked:
            return
        params = w.FreeBuffersParams(buffers=[self.handle])
        connection.run_soon(lambda: connection.post_request("free_buffers", params))


class BufferView(TensorReference):
    """A tensor in a buffer, made by `Buffer.view`."""

    def __init__(self, buffer: Buffer, shape: Sequence[int], type: str, offset: int):
        names = {name: kind for kind, name in ARRAY_NAMES.items()}
        self.buffer, self.shape, self.offset = buffer, tuple(shape), offset
        self.type = names.get(type, type)
        if self.type not in ARRAY_NAMES:
            raise InvalidArgument(
                f"there is no type {type[:50]!r}", hint=f"use one of {', '.join(ARRAY_NAMES)}"
            )
        self.length = math.prod(self.shape) * element_bytes(self.type)
        if offset % ALIGNMENT or min(offset, *self.shape, 0) < 0:
            raise InvalidArgument(
                f"a tensor of the shape {list(self.shape)} at the offset {offset}",
                hint=f"use dimensions of 0 or more, and a multiple of {ALIGNMENT} as offset",
            )
        if offset + self.length > buffer.size:
            raise InvalidArgument(
                f"{self.length} bytes at {offset} are not within the buffer of {buffer.size} bytes",
                hint="make a larger buffer",
            )

    def __repr__(self) -> str:
        return f"<BufferView {self.type} {list(self.shape)}>"

    @property
    def memory(self) -> memoryview:
        """Its bytes, which can be written."""
        return self.buffer.memory[self.offset : self.offset + self.length]

    @property
    def array(self) -> NDArray[Any]:
        """The tensor as an array of NumPy, in place; one of bfloat16 has its bits (`uint16`).

        :raises InvalidArgument: NumPy is not installed.
        """
        numpy = find_numpy()
        if numpy is None:
            raise InvalidArgument("NumPy is not installed", hint="install it, or use `memory`")
        kind = "u16" if self.type == "bf16" else self.type
        found: NDArray[Any] = numpy.frombuffer(self.memory, dtype_of(kind)).reshape(self.shape)
        return found

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Copy *data*, of as many bytes as the tensor, into the buffer."""
        self.memory[:] = data

    def read(self, length: int) -> bytes:
        """Return a copy of the first *length* bytes."""
        return bytes(self.memory[:length])

    def read_into_array(self, length: int) -> bytes:
        """Return a copy of the first *length* bytes as a view that can be written. NumPy gets large
        memory in huge pages, without which the pages take longer than the copy.
        """
        numpy = find_numpy()
        if numpy is None:
            return self.read(length)
        return cast(bytes, numpy.frombuffer(self.memory[:length], "u1").copy().data)

    def resized(self, shape: Sequence[int], type: str) -> BufferView:
        """Return the tensor at the same place that a graph has written."""
        return BufferView(self.buffer, shape, type, self.offset)

    def as_input(self) -> w.Tensor:
        """Return it in the form of the protocol."""
        return w.Tensor(
            buffer=self.buffer.handle,
            offset=self.offset,
            length=self.length,
            dimensions=list(self.shape),
            type=self.type,
        )

    def as_place(self, name: str) -> tuple[str, int, int, int]:
        """Return it as the place of the output *name*, in the form of the protocol."""
        return name, self.buffer.handle, self.offset, self.length


class SpareBuffers:
    """Buffers for the large tensors of a graph's runs. A buffer whose run has ended is used again;
    one whose run has failed is not, because the graph may still compute.
    """

    def __init__(self, new_buffer: Callable[[int], Awaitable[Buffer]]):
        self._new_buffer = new_buffer
        self._spare: list[Buffer] = []

    async def take(self, size: int) -> Buffer:
        """Return an unused buffer of at least *size* bytes.

        :raises QuotaExceeded: the user's buffers are too many or too large.
        """
        for number, buffer in enumerate(self._spare):
            if buffer.size >= size:
                return self._spare.pop(number)
        self._spare.clear()  # they are too small for the runs that come now
        return await self._new_buffer(size)

    def put_back(self, buffer: Buffer) -> None:
        """Keep a buffer for later runs, or free it."""
        if len(self._spare) < SPARE_MAX:
            self._spare.append(buffer)

    def clear(self) -> None:
        """Free the buffers."""
        self._spare.clear()


def places_in(buffer: Buffer, sizes: Sequence[int]) -> list[BufferView]:
    """Return places of *sizes* bytes, one behind the other in a buffer of `room_of` these."""
    starts = [0, *itertools.accumulate(map(_aligned, sizes))]
    return [
        BufferView(buffer, [size], "u8", start) for size, start in zip(sizes, starts, strict=False)
    ]


def room_of(sizes: Iterable[int]) -> int:
    """Return the bytes of a buffer for tensors of *sizes*."""
    return sum(map(_aligned, sizes))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
