"""The buffers that clients share with the processes of graphs, by connection and handle."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import anyio.to_thread

from ...backends.errors import InvalidArgument, NotFound, OutOfMemory
from ...backends.shared_memory import ALIGNMENT, allocate, check_shared_memory, new_shared_memory
from ..messages import BUFFER_PART_BYTES_MAX
from .holdings import Holdings
from .socket_connection import SocketConnection


class Buffer:
    """Shared memory of *size* bytes behind the descriptor *fd*, which *close* closes."""

    def __init__(
        self,
        handle: int,
        connection: SocketConnection,
        user: Hashable,
        size: int,
    ):
        self.handle, self.connection, self.user, self.size = handle, connection, user, size
        self.fd = -1
        self.close: Callable[[], None] = lambda: None

    @property
    def is_open(self) -> bool:
        """Whether it has its memory, and was not freed."""
        return self.fd >= 0

    def check_part(self, offset: int, length: int) -> None:
        """Check that a part lies within the buffer.

        :raises InvalidArgument: it does not, or begins at another place than a tensor may.
        """
        self.check_range(offset, length)
        if offset % ALIGNMENT:
            raise InvalidArgument(
                f"the offset {offset} in a buffer is not a multiple of {ALIGNMENT}",
                hint=f"let each tensor begin at a multiple of {ALIGNMENT}",
            )

    def check_range(self, offset: int, size: int) -> None:
        """Check that bytes to read or write, which may begin anywhere, lie within the buffer.

        :raises InvalidArgument: they do not.
        """
        if offset < 0 or size < 0 or offset + size > self.size:
            raise InvalidArgument(
                f"{size} bytes at {offset} are not within the buffer of {self.size} bytes",
                hint="name a part of the buffer, or register a larger one",
                data={"bytes": self.size},
            )

    def check_read(self, offset: int, size: int) -> None:
        """Check a part that a client reads.

        :raises InvalidArgument: it is not within the buffer, or too large for one call.
        """
        self.check_range(offset, size)
        if size > BUFFER_PART_BYTES_MAX:
            raise InvalidArgument(
                f"a part of {size} bytes; {BUFFER_PART_BYTES_MAX} are allowed",
                hint="read the buffer in several parts",
            )

    async def read(self, offset: int, size: int) -> bytes:
        """Return bytes of the buffer, off the event loop.

        :raises NotFound: it was freed.
        """
        self._check_open()
        return await self.connection.user.run(os.pread, self.fd, size, offset)

    async def write(self, offset: int, data: bytes) -> None:
        """Write *data* to the buffer, off the event loop.

        :raises NotFound: it was freed.
        """
        self._check_open()
        await self.connection.user.run(_write, self.fd, data, offset)

    def _check_open(self) -> None:
        if not self.is_open:
            raise no_buffer(self.handle)

    def new_descriptor(self) -> int:
        """Return another descriptor of it, which the caller closes.

        :raises NotFound: it was freed.
        """
        self._check_open()
        return os.dup(self.fd)


class Buffers:
    """The table of all buffers. Owned by the server's event loop. *unmap* is called with the handle
    of each that is freed.
    """

    def __init__(self, new_handle: Callable[[], int], unmap: Callable[[int], None]):
        self.held = Holdings("buffer")
        self._new_handle, self._unmap = new_handle, unmap
        self._buffers: dict[SocketConnection, dict[int, Buffer]] = {}

    async def register_passed(
        self, connection: SocketConnection, user: Hashable, fd: int
    ) -> Buffer:
        """Register a memfd that a client has passed; the buffer closes it from then on.

        :raises InvalidArgument: it is not one of fixed size.
        :raises QuotaExceeded: the user has too many, or too large ones; or `Busy`, all users have.
        """
        bytes_max = self.held.limits.user_bytes_max
        size = await connection.user.run(check_shared_memory, fd, bytes_max)
        buffer = self._add(connection, user, size)  # counted before its pages are allocated
        try:
            await connection.user.run(allocate, fd, size)
        except BaseException:
            self._remove(buffer)
            raise
        buffer.fd, buffer.close = fd, partial(connection.user.close, (fd,))
        return buffer

    async def register_new(self, connection: SocketConnection, user: Hashable, size: int) -> Buffer:
        """Make and register a buffer of *size* bytes.

        :raises QuotaExceeded: the user has too many, or too large ones; or `Busy`, all users have.
        """
        if size < 1:
            raise InvalidArgument(
                f"a buffer of {size} bytes", hint="pass its size, or a memfd (`fd`)"
            )
        buffer, fd = self._add(connection, user, size), -1
        try:
            fd = new_shared_memory(size)
            await anyio.to_thread.run_sync(allocate, fd, size)
        except BaseException as exc:
            self._remove(buffer)
            if fd >= 0:
                os.close(fd)
            if isinstance(exc, OSError):
                raise OutOfMemory(f"cannot make a buffer: {exc.strerror}") from None
            raise
        connection.user.note_received(1)
        buffer.fd, buffer.close = fd, partial(connection.user.close, (fd,))
        return buffer

    def _add(self, connection: SocketConnection, user: Hashable, size: int) -> Buffer:
        self.held.add(user, 1, size)
        buffer = Buffer(self._new_handle(), connection, user, size)
        self._buffers.setdefault(connection, {})[buffer.handle] = buffer
        return buffer

    def get_buffer(self, connection: SocketConnection, handle: int) -> Buffer:
        """Return a buffer of a connection.

        :raises NotFound: the connection has no such buffer.
        """
        buffer = self._buffers.get(connection, {}).get(handle)
        if buffer is None or not buffer.is_open:
            raise no_buffer(handle)
        return buffer

    def free_buffers(self, connection: SocketConnection, handles: Sequence[int]) -> None:
        """Free buffers of a connection; those that it does not have are ignored."""
        buffers = self._buffers.get(connection, {})
        for handle in handles:
            buffer = buffers.get(handle)
            if buffer is not None and buffer.is_open:
                self._remove(buffer)

    def close_connection(self, connection: SocketConnection) -> None:
        """Free all buffers of a connection."""
        for buffer in tuple(self._buffers.get(connection, {}).values()):
            self._remove(buffer)

    def _remove(self, buffer: Buffer) -> None:
        buffers = self._buffers.get(buffer.connection, {})
        if buffers.pop(buffer.handle, None) is None:
            return
        if not buffers:
            del self._buffers[buffer.connection]
        self.held.remove(buffer.user, buffer.size)
        buffer.close()
        buffer.fd = -1
        self._unmap(buffer.handle)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of *data*; the pages are there already."""
    left = memoryview(data)
    while left:
        count = os.pwrite(descriptor, left, offset)
        left, offset = left[count:], offset + count


def no_buffer(handle: int) -> NotFound:
    """Return the error of a handle that the connection does not have."""
    return NotFound(
        f"there is no buffer {handle} on this connection",
        hint="register it: a buffer ends when it is freed, and with its connection",
        data={"buffer": handle},
    )
