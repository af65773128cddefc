"""The socket of one client of a daemon or of the entry of a fleet: its reading, the frames that the
client has not read yet, and the client's hello.
"""

from __future__ import annotations

import asyncio
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Any

import msgspec

from ...backends.errors import InferdError, ProtocolError, VersionMismatch
from ...backends.fd_frames import LENGTH, SCM_MAX_FD, read_with_descriptors
from ...wire.frames import READ_BYTES, pack_frame
from ...wire.reading import SocketReading
from ..messages import PROTOCOL_VERSION, ClientHello, Kind
from ..names import check_key_name, check_label, check_user_name
from ..peer import Peer
from .descriptors import UnclaimedDescriptors, UserDescriptors
from .fairness import CHECK_S, LoopTime, SharedLimit

HELLO_TIMEOUT_S = 10.0
SOFTWARE_CHARACTERS = 200
"""Characters of a client's name that are kept."""
_hello = msgspec.msgpack.Decoder(ClientHello)
REQUESTS_BYTES = 1 << 12
"""Bytes of one read, except inside of a larger frame. They hold about 200 of the smallest requests,
whose handling occupies the loop for about 10 ms.
"""
LARGE_FRAMES_MAX = 4
"""Larger frames that are read in one iteration of the loop. Their commands are sent together to a
worker at once, which then wakes once.
"""
OUTBOX_PAUSE_BYTES = 1 << 20
"""Above this amount of data that a client has not read, the daemon stops reading from it."""
OUTBOX_BYTES_MAX = 64 << 20
OUTBOXES_BYTES_MAX = 128 << 20
"""Unread data of all connections. A user has at most as much as is free; alone, half of all."""


class Pause(Enum):
    """A reason to read nothing from a connection."""

    OUTBOX = auto()
    """The client leaves too much unread."""
    FRAME = auto()
    """Its incomplete frame does not fit into the user's share."""
    LOOP_TIME = auto()
    """Its user's share of the loop's time is used up."""
    END = auto()
    """The client sends no more."""


class SocketConnection:
    """The socket of a client's connection, owned by the event loop. *user* has the descriptors of
    all connections of its user; *unclaimed* those of this one that no request has taken. *outboxes*
    is the limit on the unread bytes of all connections.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: Peer,
        user: UserDescriptors,
        unclaimed: UnclaimedDescriptors,
        outboxes: SharedLimit,
        loop_time: LoopTime,
    ):
        self.peer, self.uid, self.user = peer, peer.uid, user
        self.is_operator = False
        """Whether the user may take the places that are reserved for operators."""
        self._sock, self._unclaimed = sock, unclaimed
        self._reading = SocketReading(sock, self._read_some)
        self._outboxes = outboxes
        self._unsent = bytearray()
        self._unsent_counted = 0
        """The unsent bytes that are counted in the shared limit."""
        self._accepts_frames, self._writing = True, False
        self._loop_time = loop_time
        self._loop = asyncio.get_running_loop()
        self.active_at_s = time.monotonic()
        """The time of the connection's beginning, or of its last request's end."""
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._handle_data: Callable[[bytes], int] = lambda _: 0
        self._bytes_missing = 0
        """Bytes of the incomplete frame that have not arrived."""
        self._pauses: set[object] = set()
        """The reasons why nothing is read now."""
        self._has_goodbye = False
        """Whether a goodbye was sent."""
        self.was_delayed = False
        """Whether reading has paused because its user's share of the loop's time was used up."""
        self._hangup: select.epoll | None = None
        """Made once the client has shut down sending; readable once it has closed its socket."""

    @property
    def has_requests(self) -> bool:
        """Whether requests are in flight."""
        raise NotImplementedError

    @property
    def idle_since_s(self) -> float | None:
        """The time of the last request's end; None while a request is in flight."""
        return None if self.has_requests else self.active_at_s

    @property
    def unsent_bytes(self) -> int:
        """The bytes that the client has not read."""
        return len(self._unsent)

    def send(self, message: Any, *, flush: bool = True) -> None:
        """Send a message; buffer the rest where the socket is full."""
        self.send_frame(pack_frame(message), flush=flush)

    def send_frame(self, frame: bytes, *, flush: bool = True) -> None:
        """Send a message that is already a frame; without *flush*, the next flush sends it."""
        if self._accepts_frames:
            self._unsent += frame
        if flush:
            self.flush()

    def send_goodbye(self, error: InferdError) -> None:
        """Send the last message: the reason why the connection ends."""
        self.send([Kind.GOODBYE, error.to_wire()])
        self._has_goodbye = True

    def flush(self) -> None:
        """Send as much as the socket accepts now, and the rest once it is writable.

        A client that leaves more than `OUTBOX_BYTES_MAX` unread, or more than its user's part of
        `OUTBOXES_BYTES_MAX`, is disconnected.
        """
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            if not self._count_unsent():
                self.cut()
            elif not self._writing:
                self._loop.add_writer(self._sock, self.flush)
                self._writing = True
        except OSError:
            self.cut()
        else:
            self._stop_writing()
            self.outbox_emptied()

    def _count_unsent(self) -> bool:
        """Count the unsent bytes; return whether they are within the bounds."""
        size = len(self._unsent)
        more = size - self._unsent_counted
        if size > OUTBOX_BYTES_MAX or (more > 0 and not self._outboxes.fits(self.uid, more)):
            return False
        self._outboxes.take_amount(self.uid, more)
        self._unsent_counted = size
        return True

    def _stop_writing(self) -> None:
        """Stop waiting for a writable socket."""
        if self._writing:
            self._loop.remove_writer(self._sock)
            self._writing = False
            self._outboxes.take_amount(self.uid, -self._unsent_counted)
            self._unsent_counted = 0

    def outbox_emptied(self) -> None:
        """Resume reading if that was paused."""
        if self._pauses:
            self.resume_reading(Pause.OUTBOX)
        self._end_if_answered()

    def pause_reading(self, reason: object) -> None:
        """Read nothing until reading is resumed for this *reason*, and for all others."""
        self._pauses.add(reason)
        self._reading.stop()

    def resume_reading(self, reason: object) -> None:
        """Read again unless there are other reasons to pause."""
        if reason in self._pauses:
            self._pauses.remove(reason)
            if not self._pauses and not self._ended.done():
                self._reading.start()

    def cut(self) -> None:
        """Stop writing and reading; the reader task then ends and cleans up."""
        self._stop()
        with suppress(OSError):  # the other end is already closed
            self._sock.shutdown(socket.SHUT_RDWR)

    def _stop(self) -> None:
        """Drop the unsent frames, accept no more, and end the reader task."""
        if self._accepts_frames:
            self._accepts_frames = False
            self._unsent.clear()
            self._stop_writing()
            self.outbox_emptied()
            self.end()

    def end(self, error: Exception | None = None) -> None:
        """End the reader task, which sends *error* as a goodbye."""
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)

    async def receive(self, handle_data: Callable[[bytes], int]) -> None:
        """Call *handle_data* with data as it arrives, until the connection ends. *handle_data*
        returns the number of bytes that an incomplete frame lacks.

        Reading pauses while the client leaves too much unread, and while its user's share of the
        loop's time is used up.

        :raises ProtocolError: too many descriptors arrived; exceptions of *handle_data* are raised
            too.
        """
        self._handle_data = handle_data
        self._reading.start()
        try:
            await self._ended
        finally:
            self._reading.stop()
            self._pauses.clear()
            if self._hangup is not None:
                self._loop.remove_reader(self._hangup)
                self._hangup.close()

    def _read_some(self) -> bool:
        """Read and handle some data, unless reading pauses; return whether there may be more."""
        if self._ended.done():
            return False
        if len(self._unsent) > OUTBOX_PAUSE_BYTES:
            self.pause_reading(Pause.OUTBOX)
            return False
        if pause_s := self._loop_time.reading_pause_s(self.uid):
            self.pause_reading(Pause.LOOP_TIME)
            self.was_delayed = True
            self._loop.call_later(min(pause_s, CHECK_S), self.resume_reading, Pause.LOOP_TIME)
            return False
        begin_s = time.thread_time()
        data, reads = None, 0
        try:
            while data := self._read():
                reads += 1
                self._bytes_missing = self._handle_data(data)
                is_large_frame = len(data) > REQUESTS_BYTES and not self._bytes_missing
                if not is_large_frame or reads == LARGE_FRAMES_MAX:
                    break
                if self._pauses or self._ended.done():
                    break
            if data == b"":
                self._end_input()
        except Exception as exc:  # must end the reader task, not only this callback
            self.end(exc)
        if reads or data is not None:
            self._loop_time.charge_reading(self.uid, time.thread_time() - begin_s)
        return bool(data)

    def _end_input(self) -> None:
        """Read no more. The client has closed the connection or only its sending side. In the
        second case the connection ends once its requests are answered.
        """
        if not (self.has_requests or self._unsent):
            self.end()
            return
        self.pause_reading(Pause.END)
        self._hangup = select.epoll()
        self._hangup.register(self._sock, 0)  # a hang-up is reported in any case
        self._loop.add_reader(self._hangup, self.end)

    def _end_if_answered(self) -> None:
        if self._hangup is not None and not (self.has_requests or self._unsent):
            self.end()

    def note_request_ended(self) -> None:
        """Note that a request was answered."""
        self.active_at_s = time.monotonic()
        self._end_if_answered()

    def _read(self) -> bytes | None:
        """Read once; return None if nothing has arrived, and empty bytes at the end of the data."""
        self.user.check_read()
        # The rest of a frame is read by itself, so that the next read begins with a frame.
        size = min(self._bytes_missing or REQUESTS_BYTES, READ_BYTES)
        data = self._read_part(size)
        if data is None or len(data) < size or self._bytes_missing:
            return data
        # A tensor's frame has mostly arrived as a whole; it needs no timer and no further callback.
        missing = int(LENGTH.unpack_from(data)[0]) + LENGTH.size - size
        rest = self._read_part(min(missing, READ_BYTES)) if missing > 0 else None
        return data + rest if rest else data

    def _read_part(self, size: int) -> bytes | None:
        try:
            # With space for all, as the kernel would close the rest here, which can block the loop.
            data, descriptors, _ = read_with_descriptors(self._sock, size, SCM_MAX_FD)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        if descriptors:
            self._unclaimed.add(descriptors)
        return data

    def close(self) -> None:
        """Close the socket and the unclaimed descriptors, neither of them on the loop."""
        self._stop()
        self._unclaimed.close()
        self.user.end_connection(self._sock, has_goodbye=self._has_goodbye)


class ArrivalTimer:
    """Ends a connection with *error* if its data has not arrived after *seconds_max*. The time
    begins again if the daemon has delayed reading.
    """

    def __init__(self, connection: SocketConnection, seconds_max: float, error: ProtocolError):
        self._connection, self._seconds_max, self._error = connection, seconds_max, error
        self._start()

    def _start(self) -> None:
        self._connection.was_delayed = False
        loop = asyncio.get_running_loop()
        self._handle = loop.call_later(self._seconds_max, self._end_late)

    def _end_late(self) -> None:
        if self._connection.was_delayed:
            self._start()
        else:
            self._connection.end(self._error)

    def cancel(self) -> None:
        """Stop the timer, because the data has arrived or the connection has ended."""
        self._handle.cancel()


def read_hello(kind: int, items: Sequence[msgspec.Raw]) -> ClientHello:
    """Return the client's hello, its first message. `check_names` checks its names, so that the log
    of a refused client has its software.

    :raises VersionMismatch: the client speaks another major version.
    """
    if kind != Kind.HELLO or len(items) < 2:
        raise ProtocolError("the first frame is not a hello")
    try:
        hello = _hello.decode(items[1])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"the hello cannot be read: {exc}") from None
    if hello.protocol[0] != PROTOCOL_VERSION[0]:
        ours, theirs = PROTOCOL_VERSION[0], hello.protocol[0]
        raise VersionMismatch(
            f"the client speaks version {theirs} of the protocol, this daemon version {ours}",
            data={"protocol": list(PROTOCOL_VERSION)},
        )
    return hello


def check_names(hello: ClientHello) -> None:
    """Check the label, and the names of a user and of a key, in a hello.

    :raises InvalidArgument: one of them is not allowed.
    """
    check_label(hello.label)
    check_user_name(hello.on_behalf_of)
    check_key_name(hello.key)
