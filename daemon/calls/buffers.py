"""Calls on buffers: shared memory of a client and the workers of graphs."""

from __future__ import annotations

from ...ipc import messages as w
from ...ipc.server.connection import Request
from ..core import Daemon


async def register_buffer(daemon: Daemon, request: Request) -> w.BufferResult:
    """Register a memfd of the client's, or a new buffer."""
    p: w.RegisterBufferParams = request.params
    connection, user = request.connection, request.owner.user
    if p.fd >= 0:
        buffer = await daemon.buffers.register_passed(connection, user, p.fd)
        request.take_descriptor(p.fd)
    else:
        buffer = await daemon.buffers.register_new(connection, user, p.size)
    return w.BufferResult(buffer=buffer.handle, size=buffer.size)


async def write_buffer(daemon: Daemon, request: Request) -> w.Empty:
    """Write a part of a buffer."""
    p: w.WriteBufferParams = request.params
    buffer = daemon.buffers.get_buffer(request.connection, p.buffer)
    buffer.check_range(p.offset, len(p.data))
    await buffer.write(p.offset, p.data)
    return w.Empty()


async def read_buffer(daemon: Daemon, request: Request) -> w.ReadBufferResult:
    """Return a part of a buffer."""
    p: w.ReadBufferParams = request.params
    buffer = daemon.buffers.get_buffer(request.connection, p.buffer)
    buffer.check_read(p.offset, p.size)
    request.charge.grow(p.size)
    return w.ReadBufferResult(data=await buffer.read(p.offset, p.size))


def free_buffers(daemon: Daemon, request: Request) -> w.Empty:
    """Free buffers."""
    daemon.buffers.free_buffers(request.connection, request.params.buffers)
    return w.Empty()
