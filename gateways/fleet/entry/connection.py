"""The socket of one client of the entry, and the descriptors that it passes."""

from __future__ import annotations

import asyncio
import select
import socket
import time
from collections.abc import Callable, Sequence

from ....backends.errors import Busy, InferdError, TooLarge
from ....ipc.messages import Kind
from ....ipc.peer import Peer
from ....ipc.server.descriptors import (
    SCM_MAX_FD,
    UnclaimedDescriptors,
    UserDescriptors,
    read_tensor,
    tensor_size,
)
from ....ipc.server.fairness import SharedLimit
from ....ipc.server.outbox import Outbox, OutboxListener
from ....wire.descriptors import read_with_descriptors
from ....wire.frames import FrameReader, pack_frame
from ..link import CONTENTS_BYTES_MAX, PART_BYTES, ContentKind
from ..nodes.upstream import Upstream

SENT_BYTES_MAX = 256 << 20
"""Bytes of contents that are on their way to nodes, shared by all users."""
_END = pack_frame([ContentKind.END])
_DROP = pack_frame([ContentKind.DROP])


class PassedDescriptors(UnclaimedDescriptors):
    """The descriptors of a connection that no request has taken. Lives on the entry's event loop.

    *uid* is the client's user, and *limit* bounds the bytes of all users on their way to nodes.
    """

    def __init__(self, user: UserDescriptors, uid: int, limit: SharedLimit):
        super().__init__(user)
        self._uid, self._limit = uid, limit

    def close_claimed(self, descriptors: Sequence[int]) -> None:
        """Close descriptors that were claimed."""
        self._user.close(tuple(descriptors))

    async def send_contents(self, descriptors: Sequence[int], upstream: Upstream) -> None:
        """Send the contents of claimed descriptors to a node, for the next request with contents.

        :raises InvalidArgument: a descriptor is not a file, or cannot be read.
        :raises TooLarge: the contents exceed a limit.
        :raises Busy: the contents on their way, of this user or of all users, exceed a limit.
        :raises Timeout: a descriptor takes too long.
        """
        self._user.check_call()
        sizes = [await self._user.run(tensor_size, descriptor) for descriptor in descriptors]
        total = sum(sizes)
        if total > CONTENTS_BYTES_MAX:
            raise TooLarge(
                f"tensors of {total} bytes; the limit of a request to a fleet is"
                f" {CONTENTS_BYTES_MAX}",
                data={"bytes": total, "bytes_max": CONTENTS_BYTES_MAX},
            )
        if not self._limit.fits(self._uid, total):
            raise Busy(
                "too many tensors are on their way to nodes",
                data={"bytes": total, "retry_after_s": 0.1},
            )
        self._limit.take_amount(self._uid, total)
        try:
            for descriptor, size in zip(descriptors, sizes, strict=True):
                await self._send_content(descriptor, size, upstream)
        except BaseException:
            upstream.send_frame(_DROP)
            raise
        finally:
            self._limit.take_amount(self._uid, -total)

    async def _send_content(self, descriptor: int, size: int, upstream: Upstream) -> None:
        offset = 0
        while offset < size:
            part = await self._user.run(
                read_tensor, descriptor, min(PART_BYTES, size - offset), offset
            )
            if not part:
                break
            await upstream.send_and_wait(pack_frame([ContentKind.PART, part]))
            offset += len(part)
        upstream.send_frame(_END)


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
