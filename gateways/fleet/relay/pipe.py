"""Pipes between an entry and the daemon, without a task; the daemon's bytes pass as they arrive.

Contents of descriptors pass as memfds of the relay. An entry on this machine passes the file of a
model as a descriptor, at a socket of the relay's own, with a random token that it then names on its
data connection. No operation on such a file runs on the event loop, because it can take as long as
its sender wants.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple, cast

import anyio
import anyio.abc
import msgspec

from ....backends.errors import BackendError, InferdError, InvalidArgument, ProtocolError
from ....backends.fd_frames import frame_of, read_with_descriptors
from ....ipc.messages import Kind
from ....ipc.server.descriptors import BlockingThread
from ....ipc.server.listener import UnixListener
from ....wire.frames import FRAME_BYTES_MAX, FrameReader, pack_frame
from ..link import (
    BUFFER_BYTES,
    CONTENTS_BYTES_MAX,
    CONTENTS_MAX,
    HANDSHAKE_S_MAX,
    RECEIVED,
    REFUSED,
    TOKEN_BYTES,
    ContentKind,
    set_options,
)

FILES_MAX = 64
"""Files of all entries that are passed and not yet closed."""
ACCEPT_RETRY_S = 0.1
TAKE_S_MAX = 10.0
"""Time in which the request for a passed file has to follow."""


class PassedFiles:
    """The files by their token, until their requests take them. Lives on the relay's event loop."""

    def __init__(self) -> None:
        self._files: dict[bytes, int] = {}
        self._open: set[int] = set()
        self._closer = BlockingThread("passed-files")

    async def serve(
        self, path: str, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Receive files at *path* from processes of this user and of root, until cancelled.

        :raises InvalidArgument: the socket cannot be used.
        """
        listener = UnixListener(path, 0o600, gateway=True)
        listener.bind()
        try:
            listener.socket.setblocking(False)
            task_status.started()
            async with anyio.create_task_group() as group:
                while True:
                    try:
                        sock, _ = await asyncio.get_running_loop().sock_accept(listener.socket)
                    except OSError:  # no descriptors are left, for example
                        await anyio.sleep(ACCEPT_RETRY_S)
                    else:
                        group.start_soon(self._receive, sock)
        finally:
            listener.close()

    async def _receive(self, sock: socket.socket) -> None:
        with sock, suppress(OSError), anyio.move_on_after(HANDSHAKE_S_MAX):
            sock.setblocking(False)
            await anyio.wait_readable(sock)
            token, descriptors, _ = read_with_descriptors(sock, TOKEN_BYTES, 1)
            self._open.update(descriptors)
            is_file = len(token) == TOKEN_BYTES and len(descriptors) == 1
            if not is_file or token in self._files or len(self._open) > FILES_MAX:
                self.close_files(descriptors)
                sock.send(REFUSED)
                return
            self._files[token] = descriptors[0]
            asyncio.get_running_loop().call_later(TAKE_S_MAX, self._drop, token)
            sock.send(RECEIVED)

    def _drop(self, token: bytes) -> None:
        descriptor = self._files.pop(token, None)
        if descriptor is not None:
            self.close_files((descriptor,))

    def take_file(self, token: bytes) -> int:
        """Return the descriptor of a file that was passed with *token*; it belongs to the caller,
        which closes it by `close_files`.

        :raises InvalidArgument: there is no such file.
        """
        descriptor = self._files.pop(token, None)
        if descriptor is None:
            raise InvalidArgument("the file of a load was not passed to the relay in time")
        return descriptor

    def close_files(self, descriptors: Iterable[int]) -> None:
        """Close descriptors; those of passed files in a thread."""
        for descriptor in descriptors:
            if descriptor in self._open:
                self._closer.submit(partial(self._close, descriptor))
            else:
                os.close(descriptor)

    def _close(self, descriptor: int) -> None:
        self._open.discard(descriptor)  # first, as another file may get the number at once
        os.close(descriptor)


FRAME_GROWTH_BYTES = 1 << 10
"""Bytes that a frame of the entry may have beside the request in it."""
_HEADERS = range(0x91, 0x93)
_KINDS = frozenset(ContentKind)
_items = msgspec.msgpack.Decoder(list[int | bytes])


class Passage(NamedTuple):
    """Bytes for the daemon, and the descriptors that are passed with them."""

    data: bytes
    descriptors: tuple[int, ...] = ()


class ContentReader:
    """The frames of one entry's connection, and the contents for its next request. *files* are
    those that entries on this machine have passed.
    """

    def __init__(self, files: PassedFiles) -> None:
        self._files = files
        self._frames = FrameReader(FRAME_BYTES_MAX + FRAME_GROWTH_BYTES)
        self._open: int | None = None
        """The memfd of the content whose end has not arrived."""
        self._ready: list[int] = []
        self._bytes = 0

    def read(self, data: bytes) -> Iterator[Passage]:
        """Add *data*, the connection's next bytes, and yield what the daemon gets of it.

        :raises InferdError: the frames or the contents exceed a limit; reading cannot continue.
        """
        plain = bytearray()
        for body in self._frames.read_frames(data):
            if not is_content(body):
                plain += frame_of(body)
                continue
            if plain:
                yield Passage(bytes(plain))
                plain.clear()
            request = self._handle(body)
            if request is not None:
                ready, self._ready, self._bytes = tuple(self._ready), [], 0
                yield Passage(frame_of(request), ready)
        if plain:
            yield Passage(bytes(plain))

    def _handle(self, body: bytes) -> bytes | None:
        """Handle a frame of contents; return the request in it."""
        try:
            kind, data = (*_items.decode(body), b"")[:2]
        except msgspec.DecodeError as exc:
            raise ProtocolError(f"a frame of contents cannot be read: {exc}") from None
        if not isinstance(data, bytes):
            raise ProtocolError("a frame of contents without bytes")
        if kind == ContentKind.REQUEST:
            return data
        if kind == ContentKind.PART:
            self._write(data)
        elif kind == ContentKind.PASSED:
            if len(self._ready) >= CONTENTS_MAX:
                raise ProtocolError("the contents of a request exceed their limits")
            self._ready.append(self._files.take_file(data))
        elif kind == ContentKind.END:
            self._write(b"")
            assert self._open is not None, "`_write` has opened it"
            self._ready.append(self._open)
            self._open = None
        else:
            self.close()
        return None

    def _write(self, part: bytes) -> None:
        self._bytes += len(part)
        if self._bytes > CONTENTS_BYTES_MAX or len(self._ready) >= CONTENTS_MAX:
            raise ProtocolError("the contents of a request exceed their limits")
        try:
            if self._open is None:
                self._open = os.memfd_create("inferd-fleet", os.MFD_CLOEXEC)
            while part:
                part = part[os.write(self._open, part) :]
        except OSError as exc:
            raise BackendError(f"the relay cannot keep a tensor: {exc.strerror}") from None

    def close(self) -> None:
        self._files.close_files((*self._ready, *(() if self._open is None else (self._open,))))
        self._ready, self._open, self._bytes = [], None, 0


def is_content(body: bytes) -> bool:
    """Return whether a frame is one of contents, which the daemon does not get."""
    return len(body) > 1 and body[0] in _HEADERS and body[1] in _KINDS


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
            self.transport.abort()  # its reader has stopped reading, so the data has no reader
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
        self._contents.close()
        super().connection_lost(exc)
