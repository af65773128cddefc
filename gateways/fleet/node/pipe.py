"""Pipes of bytes between an entry and the daemon, without a task or a look at the frames."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from ..link import BUFFER_BYTES, set_options


class PipeEnd(asyncio.Protocol):
    """One side of a pipe. Lives on the relay's event loop.

    A reader that is slower than the other side's writer makes it wait: at most twice
    `BUFFER_BYTES` and one read are buffered. When one side ends, the other one ends at once.
    """

    def __init__(self, on_lost: Callable[[], object] | None = None) -> None:
        self.transport: asyncio.Transport | None = None
        self._other: PipeEnd | None = None
        self._on_lost = on_lost
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Bound the data that waits for this side's reader."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=BUFFER_BYTES)

    def join(self, other: PipeEnd) -> None:
        """Pass data between this side and *other*, both of which are connected."""
        self._other, other._other = other, self
        for end, opposite in ((self, other), (other, self)):
            if end._is_lost:
                opposite.end()

    def data_received(self, data: bytes) -> None:
        """Pass data on."""
        if self._other is not None and self._other.transport is not None:
            self._other.transport.write(data)

    def pause_writing(self) -> None:
        """Read no more from the other side."""
        if self._other is not None and self._other.transport is not None:
            self._other.transport.pause_reading()

    def resume_writing(self) -> None:
        """Read from the other side again."""
        if self._other is not None and self._other.transport is not None:
            self._other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the other side."""
        self._is_lost = True
        if self._other is not None:
            self._other.end()
        if self._on_lost is not None:
            self._on_lost()

    def end(self) -> None:
        """Close this side: what the other one has sent before its end is still sent, if its reader
        takes it now.
        """
        if self.transport is None:
            return
        if self.transport.get_write_buffer_size() > BUFFER_BYTES:
            self.transport.abort()  # its reader has stopped reading: nobody waits for it
        else:
            self.transport.close()


class EntryEnd(PipeEnd):
    """The entry's side of a pipe, which waits for the daemon's side before it reads."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Read nothing until `join`."""
        super().connection_made(transport)
        sock: socket.socket = transport.get_extra_info("socket")
        set_options(sock)
        assert self.transport is not None
        self.transport.pause_reading()

    def join(self, other: PipeEnd) -> None:
        """Pass data between the entry and the daemon."""
        super().join(other)
        assert self.transport is not None
        if not self.transport.is_closing():
            self.transport.resume_reading()
