"""One client's connection in the daemon: its reading, its calls under way, its descriptors."""

from __future__ import annotations

import asyncio
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from functools import cached_property
from typing import Any

import anyio

from ...backends.errors import Busy, InferdError
from ...scheduler.owner import Owner
from ...wire.descriptors import read_with_descriptors
from ...wire.frames import READ_BYTES, pack_frame
from ...wire.reading import SocketReading
from ..messages import CALLS, CREDIT_MAX, Kind
from ..peer import Peer
from .descriptors import SCM_MAX_FD, UnclaimedDescriptors, UserDescriptors
from .fairness import CHECK_S, LoopTime, SharedLimit
from .outbox import Outbox, OutboxListener
from .request_bytes import Charge, RequestBytes

CALLS_DESCRIPTORS_MAX = 64
"""Descriptors of a connection's calls that have not ended."""
REQUESTS_BYTES = 1 << 12
"""Bytes of one read, except inside of a larger frame. They hold about 200 of the smallest requests,
whose handling occupies the loop for about 10 ms.
"""
OUTBOX_PAUSE_BYTES = 1 << 20
"""Above this amount of data that a client has not read, the daemon stops reading from it."""


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


class ServerConnection(OutboxListener):
    """A client's connection, owned by the daemon's asyncio loop. *user* has the descriptors of all
    connections of its user.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: Peer,
        requests_max: int,
        user: UserDescriptors,
        outboxes: SharedLimit,
        loop_time: LoopTime,
        request_bytes: RequestBytes,
    ):
        self.peer, self.uid, self.user = peer, peer.uid, user
        self.owner = Owner(peer.uid)
        """The owner of its sessions; the client's hello decides it."""
        self.on_behalf_of = ""
        """The name of the user on behalf of whom it acts."""
        self.identified: anyio.Event | None = None
        """Set once the owner of a connection on behalf of another user is known."""
        self.is_operator = False
        """Whether the user may take the places that are reserved for operators."""
        self.number = 0
        """Its number in the order in which the daemon accepted connections."""
        self.requests: dict[int, Request] = {}
        self.software = ""
        self.wants_copies = False
        """Whether the client gets the changes of its sessions."""
        self.descriptors = UnclaimedDescriptors(user)
        self.requests_max, self.request_bytes = requests_max, request_bytes
        self._sock = sock
        self._reading = SocketReading(sock, self._read_some)
        self._outbox = Outbox(sock, self.uid, outboxes, self)
        self._loop_time = loop_time
        self._loop = asyncio.get_running_loop()
        self.active_at_s = time.monotonic()
        """The time of the connection's beginning, or of its last request's end."""
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._handle_data: Callable[[bytes], int] = lambda _: 0
        self._bytes_missing = 0
        """Bytes of the incomplete frame that have not arrived."""
        self._pauses: set[Pause] = set()
        """The reasons why nothing is read now."""
        self._has_goodbye = False
        """Whether a goodbye was sent."""
        self.was_delayed = False
        """Whether reading has paused because its user's share of the loop's time was used up."""
        self._hangup: select.epoll | None = None
        """Made once the client has shut down sending; readable once it has closed its socket."""

    def __repr__(self) -> str:
        return f"<ServerConnection of uid {self.peer.uid} [{len(self.requests)} requests]>"

    @property
    def idle_since_s(self) -> float | None:
        """The time of the last request's end; None while a request is in flight."""
        return None if self.requests else self.active_at_s

    def send(self, message: Any, *, flush: bool = True) -> None:
        """Send a message; buffer the rest where the socket is full."""
        self.send_frame(pack_frame(message), flush=flush)

    def send_frame(self, frame: bytes, *, flush: bool = True) -> None:
        """Send a message that is already a frame."""
        self._outbox.add_frame(frame)
        if flush:
            self.flush()

    def send_goodbye(self, error: InferdError) -> None:
        """Send the last message: the reason why the connection ends."""
        self.send([Kind.GOODBYE, error.to_wire()])
        self._has_goodbye = True

    def flush(self) -> None:
        """Send as much as the socket accepts now, and the rest once it is writable."""
        self._outbox.flush()

    def outbox_emptied(self) -> None:
        """Resume reading if that was paused."""
        self.resume_reading(Pause.OUTBOX)
        self._end_if_answered()

    def pause_reading(self, reason: Pause) -> None:
        """Read nothing until reading is resumed for this *reason*, and for all others."""
        self._pauses.add(reason)
        self._reading.stop()

    def resume_reading(self, reason: Pause) -> None:
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
        if self._outbox.is_open:
            self._outbox.close()
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
        """Read once and handle the data, unless reading pauses; return whether there was any."""
        if self._ended.done():
            return False
        if self._outbox.unsent_bytes > OUTBOX_PAUSE_BYTES:
            self.pause_reading(Pause.OUTBOX)
            return False
        if pause_s := self._loop_time.reading_pause_s(self.uid):
            self.pause_reading(Pause.LOOP_TIME)
            self.was_delayed = True
            self._loop.call_later(min(pause_s, CHECK_S), self.resume_reading, Pause.LOOP_TIME)
            return False
        begin_s = time.thread_time()
        data = None
        try:
            data = self._read()
            if data:
                self._bytes_missing = self._handle_data(data)
            elif data is not None:
                self._end_input()
        except Exception as exc:  # must end the reader task, not only this callback
            self.end(exc)
        finally:
            self._loop_time.charge_reading(self.uid, time.thread_time() - begin_s)
        return bool(data)

    def _end_input(self) -> None:
        """Read no more. The client has closed the connection or only its sending side. In the
        second case the connection ends once its requests are answered.
        """
        if not (self.requests or self._outbox.unsent_bytes):
            self.end()
            return
        self.pause_reading(Pause.END)
        self._hangup = select.epoll()
        self._hangup.register(self._sock, 0)  # a hang-up is reported in any case
        self._loop.add_reader(self._hangup, self.end)

    def _end_if_answered(self) -> None:
        if self._hangup is not None and not (self.requests or self._outbox.unsent_bytes):
            self.end()

    def request_ended(self, request: Request) -> None:
        """Remove a request that was answered, or whose connection has ended."""
        self.requests.pop(request.number, None)
        self.active_at_s = time.monotonic()
        self._end_if_answered()

    def _read(self) -> bytes | None:
        """Read once; return None if nothing has arrived, and empty bytes at the end of the data."""
        self.user.check_read()
        size = min(max(self._bytes_missing, REQUESTS_BYTES), READ_BYTES)
        try:
            # With space for all, as the kernel would close the rest here, which can block the loop.
            data, descriptors, _ = read_with_descriptors(self._sock, size, SCM_MAX_FD)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        if descriptors:
            self.descriptors.add(descriptors)
        return data

    def check_capacity(self, request: Request) -> None:
        """Check that the connection may have another request under way.

        :raises Busy: too many requests are under way, or the requests of the connection, of its
            user or of all users have too many descriptors.
        """
        if len(self.requests) >= self.requests_max:
            raise Busy(
                f"{self.requests_max} requests are in flight on this connection",
                data={"requests_max": self.requests_max, "retry_after_s": 0.1},
            )
        if not request.descriptors:
            return
        kept = sum(len(other.descriptors) for other in self.requests.values())
        if kept + len(request.descriptors) > CALLS_DESCRIPTORS_MAX:
            raise Busy(
                f"the calls in flight on this connection have {kept} descriptors",
                hint="wait for their answers",
                data={"calls_descriptors_max": CALLS_DESCRIPTORS_MAX, "retry_after_s": 0.1},
            )
        self.user.check_call()

    def close(self) -> None:
        """Close the socket and the unclaimed descriptors, neither of them on the loop."""
        self._stop()
        self.descriptors.close()
        self.user.end_connection(self._sock, has_goodbye=self._has_goodbye)


_EVENT = int(Kind.EVENT)
"""A plain integer, as msgspec's look-up of an enum's value takes a third of encoding an event."""


class Request:
    """A call under way. `cancelled_data` becomes the data of its error if it is cancelled."""

    def __init__(self, connection: ServerConnection, number: int, call: str, params: Any):
        self.connection, self.number, self.call, self.params = connection, number, call, params
        self.row = CALLS[call]
        self.uid = connection.uid
        self.descriptors: list[int] = []
        """Descriptors passed with the frame. They are closed with the request, except those that
        the call takes.
        """
        self.cancelled_data: dict[str, Any] = {}
        self._early_credit = 0
        """Credit that the client has granted before the call's turn began."""
        self._add_credit: Callable[[int], None] | None = None

    @cached_property
    def scope(self) -> anyio.CancelScope:
        """The scope in which the call runs, unless it runs at once."""
        return anyio.CancelScope()

    @cached_property
    def charge(self) -> Charge:
        """Its memory, counted for the user on whose behalf the connection acts now. A request that
        runs at once is not counted.
        """
        return Charge(self.connection.request_bytes, self.connection.owner.user)

    @property
    def owner(self) -> Owner:
        """The owner of the objects that the call makes."""
        return self.connection.owner

    def grant_credit(self, events: int) -> None:
        """Grant the call's turn at most `CREDIT_MAX` more events; keep them until it begins."""
        events = max(0, min(events, CREDIT_MAX))
        if self._add_credit is None:
            self._early_credit = min(self._early_credit + events, CREDIT_MAX)
        else:
            self._add_credit(events)

    def pass_credit_to(self, add_credit: Callable[[int], None]) -> None:
        """Call *add_credit* with all credit that the client has granted and will grant."""
        self._add_credit = add_credit
        if self._early_credit:
            add_credit(self._early_credit)

    def close(self) -> None:
        """Close the descriptors that came with the request, and count its memory no more."""
        self.params = None  # a reference cycle may keep the request until a collection
        if "charge" in vars(self):
            self.charge.end()
        self.close_descriptors(tuple(self.descriptors))

    def close_descriptors(self, descriptors: Sequence[int]) -> None:
        """Close some of the request's descriptors, which the call no longer needs."""
        for descriptor in descriptors:
            self.descriptors.remove(descriptor)
        self.connection.user.close(descriptors)

    def take_descriptor(self, descriptor: int) -> None:
        """Keep a descriptor open after the request; the caller closes it."""
        self.descriptors.remove(descriptor)

    def emit(self, event: Any, *, flush: bool = True) -> None:
        """Send an event before the reply; without *flush*, the next flush sends it."""
        self.connection.send([_EVENT, self.number, event], flush=flush)
