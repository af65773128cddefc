"""Calls on buffers: shared memory of a client and the workers of graphs."""

from __future__ import annotations

import os

from ...backends.errors import InvalidArgument
from ...ipc import messages as w
from ...ipc.server.connection import Request
from ..buffers import Buffer
from ..core import Daemon


async def register_buffer(daemon: Daemon, request: Request) -> w.BufferResult:
    """Register a memfd of the client's, or a new buffer."""
    p: w.RegisterBufferParams = request.params
    if p.fd >= 0:
        buffer = await daemon.buffers.register_passed(request, p.fd)
    else:
        buffer = await daemon.buffers.register_new(request, p.size)
    return w.BufferResult(buffer=buffer.handle, size=buffer.size)


async def write_buffer(daemon: Daemon, request: Request) -> w.Empty:
    """Write a part of a buffer."""
    p: w.WriteBufferParams = request.params
    buffer = daemon.buffers.get_buffer(request.connection, p.buffer)
    _check_range(buffer, p.offset, len(p.data))
    await request.connection.user.run(_write, buffer.fd, p.data, p.offset)
    return w.Empty()


async def read_buffer(daemon: Daemon, request: Request) -> w.ReadBufferResult:
    """Return a part of a buffer."""
    p: w.ReadBufferParams = request.params
    buffer = daemon.buffers.get_buffer(request.connection, p.buffer)
    _check_range(buffer, p.offset, p.size)
    if p.size > w.BUFFER_PART_BYTES_MAX:
        raise InvalidArgument(
            f"a part of {p.size} bytes; {w.BUFFER_PART_BYTES_MAX} are allowed",
            hint="read the buffer in several parts",
        )
    request.charge.grow(p.size)
    data = await request.connection.user.run(os.pread, buffer.fd, p.size, p.offset)
    return w.ReadBufferResult(data=data)


def free_buffers(daemon: Daemon, request: Request) -> w.Empty:
    """Free buffers."""
    daemon.buffers.free_buffers(request.connection, request.params.buffers)
    return w.Empty()


def _check_range(buffer: Buffer, offset: int, size: int) -> None:
    if offset < 0 or size < 0 or offset + size > buffer.size:
        raise InvalidArgument(
            f"{size} bytes at {offset} are not within the buffer of {buffer.size} bytes",
            hint="name a part of the buffer",
            data={"bytes": buffer.size},
        )


def _write(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of *data*; the pages are there already."""
    left = memoryview(data)
    while left:
        count = os.pwrite(descriptor, left, offset)
        left, offset = left[count:], offset + count
