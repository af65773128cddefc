"""The socket of one client of the entry: reading, writing, and the pauses of reading."""

from __future__ import annotations

import asyncio
import select
import socket
import time
from collections.abc import Callable

from .....backends.errors import InferdError
from .....ipc.messages import Kind
from .....ipc.peer import Peer
from .....ipc.server.descriptors import SCM_MAX_FD, UserDescriptors
from .....ipc.server.fairness import SharedLimit
from .....ipc.server.outbox import Outbox, OutboxListener
from .....wire.descriptors import read_with_descriptors
from .....wire.frames import FrameReader, pack_frame
from .passed_descriptors import PassedDescriptors

READ_BYTES = 1 << 13
"""Bytes of one read; other clients are served between reads."""
_OWN = object()
"""The reason to pause while the client leaves too much unread."""
UNREAD_PAUSE_BYTES = 1 << 20


class ClientConnection(OutboxListener):
    """A client's connection. Lives on the entry's event loop.

    *handle_frame* of `receive` gets the frames; it may raise the error with which the connection
    ends. `descriptors` has those that the client has passed.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: Peer,
        user: UserDescriptors,
        outboxes: SharedLimit,
        contents: SharedLimit,
        frame_bytes_max: int,
    ):
        self.peer, self.uid = peer, peer.uid
        self.is_operator = False
        """Whether the user may take the places that are reserved for operators."""
        self.is_idle: Callable[[], bool] = lambda: True
        self.on_emptied: Callable[[], object] = lambda: None
        """Called when the client has read everything."""
        self.active_at_s = time.monotonic()
        self._sock, self._user = sock, user
        self.descriptors = PassedDescriptors(user, peer.uid, contents)
        self._outbox = Outbox(sock, peer.uid, outboxes, self)
        self.loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self.loop.create_future()
        self._pauses: set[object] = set()
        self._input_ended = False
        self._handle_frame: Callable[[bytes], None] = lambda _: None
        self._frames = FrameReader(frame_bytes_max)
        self._has_goodbye = False
        """Whether a goodbye was sent."""
        self._hangup: select.epoll | None = None
        """Opened when the client shuts down sending; readable once it has closed its socket."""

    @property
    def idle_since_s(self) -> float | None:
        """The time of the last request's end; None while a request is in flight."""
        return self.active_at_s if self.is_idle() else None

    @property
    def unsent_bytes(self) -> int:
        """The bytes that the client has not read."""
        return self._outbox.unsent_bytes

    def add_frame(self, frame: bytes) -> None:
        """Add a frame; `flush` sends it."""
        self._outbox.add_frame(frame)

    def flush(self) -> None:
        """Send as much as the client reads now, and the rest once it reads again."""
        self._outbox.flush()

    def send_goodbye(self, error: InferdError) -> None:
        """Send the reason for which the connection ends."""
        self.add_frame(pack_frame([int(Kind.GOODBYE), error.to_wire()]))
        self.flush()
        self._has_goodbye = True

    def outbox_emptied(self) -> None:
        """Read from the client again, and call `on_emptied`."""
        self.resume(_OWN)
        self.on_emptied()
        self._end_if_answered()

    def request_ended(self) -> None:
        """Note that a request was answered."""
        self.active_at_s = time.monotonic()
        self._end_if_answered()

    def _end_if_answered(self) -> None:
        if self._input_ended and self.is_idle() and not self.unsent_bytes:
            self.end()

    def pause(self, reason: object) -> None:
        """Read nothing until reading is resumed for this *reason*, and for all others."""
        self._pauses.add(reason)
        self.loop.remove_reader(self._sock)

    def resume(self, reason: object) -> None:
        """Read again, unless there are other reasons not to."""
        if reason in self._pauses:
            self._pauses.remove(reason)
            if not (self._pauses or self._ended.done() or self._input_ended):
                self.loop.add_reader(self._sock, self._readable)

    def cut(self) -> None:
        """Disconnect a client that leaves too much unread, or that is no longer there."""
        if self._outbox.is_open:
            self._outbox.close()
            self.end()

    def end(self, error: Exception | None = None) -> None:
        """End `receive`, which raises *error*."""
        if not self._ended.done():
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)

    async def receive(self, handle_frame: Callable[[bytes], None]) -> None:
        """Pass frames to *handle_frame* until the connection ends.

        :raises InferdError: an error of *handle_frame*, or the reason of the end.
        """
        self._handle_frame = handle_frame
        if not self._pauses:
            self.loop.add_reader(self._sock, self._readable)
        try:
            await self._ended
        finally:
            self.loop.remove_reader(self._sock)
            if self._hangup is not None:
                self.loop.remove_reader(self._hangup)
                self._hangup.close()

    def _readable(self) -> None:
        if self._ended.done():
            return
        if self.unsent_bytes > UNREAD_PAUSE_BYTES:
            self.pause(_OWN)
            return
        try:
            data = self._read()
            if data:
                for frame in self._frames.read_frames(data):
                    self._handle_frame(frame)
            elif data is not None:
                self._end_input()
        except Exception as exc:  # must end the reading task, not only this callback
            self.end(exc)

    def _end_input(self) -> None:
        """Read no more. A client that has only shut down its sending side still gets answers."""
        self._input_ended = True
        self.loop.remove_reader(self._sock)
        self._hangup = select.epoll()
        self._hangup.register(self._sock, 0)  # a hang-up is reported in any case
        self.loop.add_reader(self._hangup, self.end)
        self._end_if_answered()

    def _read(self) -> bytes | None:
        """Read once; return None if nothing has arrived, and no bytes at the end."""
        self._user.check_read()
        size = max(READ_BYTES, min(self._frames.missing, 1 << 16))
        try:
            # Space for all: the kernel would close those that do not fit, which can block the loop.
            data, descriptors, _ = read_with_descriptors(self._sock, size, SCM_MAX_FD)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        if descriptors:
            self.descriptors.add(descriptors)
        return data

    def close(self) -> None:
        """Close the socket, and the descriptors that no request has taken."""
        self._outbox.close()
        self.descriptors.close()
        self._user.end_connection(self._sock, has_goodbye=self._has_goodbye)
