"""Pipes between an entry and the daemon, without a task; the daemon's bytes pass as they arrive."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import cast

from ....backends.errors import InferdError
from ....ipc.messages import Kind
from ....wire.frames import pack_frame
from ..link import BUFFER_BYTES, set_options
from .contents import ContentReader, Passage
from .passed_files import PassedFiles


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
        """Close this side. Data that the other side has sent before its end is still sent, if this
        side's reader takes it now.
        """
        if self.transport is None:
            return
        if self.transport.get_write_buffer_size() > BUFFER_BYTES:
            self.transport.abort()  # its reader has stopped reading, so nobody waits for the data
        else:
            self.transport.close()


class DaemonEnd(PipeEnd):
    """The daemon's side of a pipe, which also passes descriptors; *files* closes them."""

    def __init__(self, files: PassedFiles) -> None:
        super().__init__()
        self._files = files
        self._unsent: deque[Passage] = deque()
        """Data behind descriptors that cannot be passed before the daemon has read what is sent."""
        self._socket: socket.socket | None = None
        """A duplicate of the transport's socket, by which descriptors are passed."""
        self._is_full = False
        """Whether the transport has enough to send."""

    def send(self, passage: Passage) -> None:
        """Send data, and pass its descriptors, which are closed then."""
        assert self.transport is not None
        if self._is_lost:
            self._files.close_files(passage.descriptors)
        elif not (self._unsent or passage.descriptors):
            self.transport.write(passage.data)
        else:
            self._unsent.append(passage)
            self._send_unsent()

    def _send_unsent(self) -> None:
        """Send until descriptors have to wait; go on as soon as the daemon reads."""
        assert self.transport is not None
        loop = asyncio.get_running_loop()
        while self._unsent:
            passage, sent = self._unsent[0], 0
            if passage.descriptors:
                # They pass beside the transport, while that has nothing to send.
                if not self.transport.get_write_buffer_size():
                    sent = self._pass_descriptors(passage)
                if not sent:
                    loop.add_writer(self._own_socket, self._send_unsent)
                    if self._other is not None and self._other.transport is not None:
                        self._other.transport.pause_reading()
                    return
            self._unsent.popleft()
            self._files.close_files(passage.descriptors)
            if passage.data[sent:]:
                self.transport.write(passage.data[sent:])
        if loop.remove_writer(self._own_socket) and not self._is_full:
            self.resume_writing()

    @property
    def _own_socket(self) -> socket.socket:
        if self._socket is None:
            assert self.transport is not None
            number = self.transport.get_extra_info("socket").fileno()
            self._socket = socket.socket(fileno=os.dup(number))
        return self._socket

    def _pass_descriptors(self, passage: Passage) -> int:
        """Send the beginning of the data with its descriptors; return how many bytes were sent."""
        try:
            return socket.send_fds(
                self._own_socket, [passage.data[:BUFFER_BYTES]], passage.descriptors
            )
        except BlockingIOError:
            return 0
        except OSError:  # the daemon has closed the connection, which the transport notices, too
            self.end()
            return len(passage.data)

    def resume_writing(self) -> None:
        """Read from the entry again, unless descriptors wait."""
        self._is_full = False
        if not self._unsent:
            super().resume_writing()

    def pause_writing(self) -> None:
        """Read no more from the entry."""
        self._is_full = True
        super().pause_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the entry's side, and close the descriptors that were not passed."""
        for passage in self._unsent:
            self._files.close_files(passage.descriptors)
        self._unsent.clear()
        if self._socket is not None:
            asyncio.get_running_loop().remove_writer(self._socket)
            self._socket.close()
        super().connection_lost(exc)


class EntryEnd(PipeEnd):
    """The entry's side of a pipe, which waits for the daemon's side before it reads."""

    def __init__(self, on_lost: Callable[[], object], files: PassedFiles) -> None:
        super().__init__(on_lost)
        self._daemon: DaemonEnd | None = None
        self._contents = ContentReader(files)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Read nothing until `join_daemon`."""
        super().connection_made(transport)
        sock: socket.socket = transport.get_extra_info("socket")
        set_options(sock)
        assert self.transport is not None
        self.transport.pause_reading()

    def join_daemon(self, daemon: DaemonEnd) -> None:
        """Pass data between the entry and the daemon."""
        self._daemon = daemon
        self.join(daemon)
        assert self.transport is not None
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Pass frames on, and contents as descriptors."""
        assert self._daemon is not None, "nothing is read before"
        try:
            for passage in self._contents.read(data):
                self._daemon.send(passage)
        except InferdError as exc:
            self.refuse(exc)

    def refuse(self, error: InferdError) -> None:
        """Send the reason for which the pipe ends, and end it."""
        if self.transport is not None:
            self.transport.write(pack_frame([Kind.GOODBYE, error.to_wire()]))
            self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the daemon's side, and drop the contents."""
        self._contents.close()
        super().connection_lost(exc)
