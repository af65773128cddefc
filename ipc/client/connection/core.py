"""The state of a client's connection, without I/O: requests in flight by id, events, credit.

Reads go in, frames come out through an outbox. `AsyncConnection` and `BlockingConnection` add the
socket and the waiting.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import time
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import starmap
from typing import Any, NamedTuple, TypeAlias, cast

import msgspec

from ....backends.errors import (
    ConnectionLost,
    InferdError,
    ProtocolError,
    Timeout,
    TooLarge,
    error_from_wire,
)
from ....wire.frames import HEADER_BYTES, REPLY_BYTES_MAX, UNREADABLE, frame_size
from ...greeting import read_server_hello
from ...messages import ClientHello, Kind, ServerHello
from ...payloads import pack_message
from ..results import Metadata

Message: TypeAlias = list[Any]
_decode = msgspec.msgpack.Decoder(list[Any]).decode


class Received(NamedTuple):
    """The result of all reads so far; each read makes a new one.

    An interrupt leaves the old value or the new one, so that no read is lost or counted twice.
    """

    reads: int
    """The number of reads."""
    messages: deque[Message | InferdError]
    """The messages completed by the last read, and the error if its bytes cannot be read."""
    parts: tuple[bytes, ...] = ()
    """The incomplete frame."""
    missing: int = HEADER_BYTES
    """The least number of bytes that the incomplete frame still needs."""

    def after_read(self, data: bytes) -> Received:
        """Return the value after another read, of *data*."""
        missing = self.missing - len(data)
        if missing > 0:
            return Received(self.reads + 1, deque(), (*self.parts, data), missing)
        data = b"".join((*self.parts, data)) if self.parts else data
        messages: deque[Message | InferdError] = deque()
        start = 0
        while True:
            missing = start + HEADER_BYTES - len(data)
            if missing <= 0:
                try:
                    end = start + HEADER_BYTES + frame_size(data, start, REPLY_BYTES_MAX)
                    missing = end - len(data)
                    if missing <= 0:
                        messages.append(_decode(memoryview(data)[start + HEADER_BYTES : end]))
                        start = end
                        continue
                except TooLarge as exc:
                    messages.append(exc)
                except UNREADABLE as exc:
                    messages.append(unreadable(exc))
            rest = (data[start:],) if start < len(data) else ()
            return Received(self.reads + 1, messages, rest, missing)


def unreadable(exc: Exception) -> ProtocolError:
    """Return the error for a frame that cannot be read because of *exc*."""
    return ProtocolError(f"a frame from the daemon cannot be read: {exc}")


class _UnsentFrame:
    """A frame, the descriptors sent with its first byte, and the sizes of the parts sent."""

    __slots__ = ("data", "descriptors", "sent")

    def __init__(self, data: bytes, descriptors: Sequence[int]):
        self.data = data
        self.descriptors = [os.dup(fd) for fd in descriptors] if descriptors else []
        self.sent: list[int] = []


class Outbox:
    """The frames that are not sent yet, of a socket that does not block.

    Neither a cancelled caller nor Ctrl-C between any two lines truncates or repeats a frame: the
    number of bytes that the kernel accepted is recorded by the same C function that sends them.
    """

    def __init__(self, sock: socket.socket):
        self.unsent_bytes = 0
        self._socket = sock
        self._unsent: deque[_UnsentFrame] = deque()

    def add_frame(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        """Add *frame* with *descriptors*, which stay the caller's; `flush` sends it."""
        self._unsent.append(_UnsentFrame(frame, descriptors))
        self.unsent_bytes += len(frame)

    def flush(self) -> None:
        """Send as much as the socket accepts."""
        while self._unsent:
            frame = self._unsent[0]
            position = sum(frame.sent)
            if position < len(frame.data):
                try:
                    self._send_part(frame, position)
                except BlockingIOError:
                    return
                except OSError:  # the daemon closed its end; a goodbye must still be read
                    frame.sent.append(len(frame.data) - position)
            else:
                self._unsent.popleft()
                if frame.descriptors:
                    _close(frame.descriptors)
        self.unsent_bytes = 0

    def _send_part(self, frame: _UnsentFrame, position: int) -> None:
        if position or not frame.descriptors:
            data = memoryview(frame.data)[position:] if position else frame.data
            frame.sent.extend(map(self._socket.send, (data,)))
        else:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", frame.descriptors))
            frame.sent.extend(starmap(self._socket.sendmsg, [([frame.data], [rights])]))
        self.unsent_bytes -= sum(frame.sent) - position

    def shut_down(self) -> None:
        """End the sending and the reading of the socket."""
        with suppress(OSError):  # it has already ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Drop the unsent frames."""
        while self._unsent:
            _close(self._unsent.popleft().descriptors)
        self.unsent_bytes = 0


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


_READ_EVENTS_MAX = 8
"""Events that are kept after they were read; the removal of all of them at once costs less."""


def no_metadata() -> Metadata:
    """Return the metadata of a turn that has not ended."""
    return cast("Metadata", {})


class InFlight:
    """A request, its events and its result. Its connection writes them, its caller reads them.

    `done` means that the request has a result or an error for the caller. `answered` means that the
    daemon has finished it too; a request that was timed out or abandoned is done before. `begun`
    means that an event has arrived, read or not. `lost` means that the connection was lost before
    the answer. `metadata` is that of a turn, from the result or from the data of `Cancelled`.
    `waiters` belongs to the connection.
    """

    __slots__ = (
        "_events", "_events_read", "abandoned", "answered", "begun", "call", "connection",
        "deadline", "done", "error", "id", "lost", "metadata", "result", "waiters",
    )  # fmt: skip

    def __init__(self, call: str, deadline: float):
        self.id = 0
        self.connection: ConnectionCore
        self.call = call
        self.deadline = deadline
        self.result: dict[str, Any] = {}
        self.error: InferdError | None = None
        self.metadata = no_metadata()
        self.done = self.answered = self.abandoned = self.begun = self.lost = False
        self.waiters: list[Any] = []
        self._events: list[dict[str, Any]] = []
        self._events_read = 0

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def add_event(self, event: dict[str, Any]) -> None:
        """Add an event that the connection received; adding the last one again changes nothing."""
        if not self._events or self._events[-1] is not event:
            self._events.append(event)
        self.begun = True

    def has_events(self) -> bool:
        """Return whether there is an event to read."""
        return self._events_read < len(self._events)

    def next_event(self) -> dict[str, Any]:
        event = self._events[self._events_read]
        self._events_read += 1
        if self._events_read > _READ_EVENTS_MAX:
            del self._events[:_READ_EVENTS_MAX]  # not the last: `add_event` compares it
            self._events_read -= _READ_EVENTS_MAX
        return event

    def finish(self, result: dict[str, Any] | None, error: InferdError | None) -> None:
        """Set the result or the error; only the first call counts."""
        if not self.done:
            self.result, self.error, self.done = result or {}, error, True

    def outcome(self) -> dict[str, Any]:
        """Return the result of a request that is done.

        :raises InferdError: the request failed; each caller gets a separate exception.
        """
        if self.error is not None:
            raise error_from_wire(self.error.to_wire())
        return self.result

    def has_news(self) -> bool:
        """Return whether there is an event to read, or the request is done."""
        return self.done or self._events_read < len(self._events)

    def has_begun(self) -> bool:
        """Return whether the first event has arrived, or the request is done."""
        return self.done or self.begun

    def is_done(self) -> bool:
        """Return whether there is a result or an error for the caller."""
        return self.done

    def is_answered(self) -> bool:
        """Return whether the daemon has answered, or the connection was lost."""
        return self.answered

    async def wait(self) -> None:
        """Wait until there is an event to read, or the request is done."""
        if not self.has_news():
            await self.connection.wait_for(self, self.has_news)

    async def wait_begun(self) -> None:
        """Wait until the first event has arrived, or the request is done."""
        if not self.has_begun():
            await self.connection.wait_for(self, self.has_begun)

    async def wait_answered(self, s_max: float) -> None:
        """Wait until the daemon has answered, or the connection was lost, for at most *s_max*."""
        if not self.answered:
            await self.connection.wait_for(self, self.is_answered, time.monotonic() + s_max)


_EVENT = int(Kind.EVENT)
_CANCELS_MAX = 16
"""Requests in flight that are reserved for cancels."""
_OUTBOX_BYTES_MAX = 16 << 20

_forks = 0
"""The forks from the program's start to this process; cheaper to compare than process ids."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class ConnectionCore(ABC):
    """A connection to the daemon. One thread at a time changes it.

    KeyboardInterrupt may come between any two lines. Each change is therefore one assignment or one
    C call, and repeatable: the next use continues where an interrupted one stopped.
    """

    def __init__(self, path: str, outbox: Outbox):
        self.path = path
        self.server: ServerHello
        self.greeted = False
        self._pid, self._forks = os.getpid(), _forks
        self._outbox = outbox
        self._received = Received(0, deque())
        self._ids = itertools.count(1)
        self._in_flight: dict[int, InFlight] = {}
        self._in_flight_max = 1
        self._cancels: set[int] = set()
        self._to_cancel: deque[InFlight] = deque()
        self._actions: deque[Callable[[], object]] = deque()
        self._channels: list[ConnectionCore] = []
        self._lost: InferdError | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} to {self.path} [{len(self._in_flight)} requests in flight]>"

    @abstractmethod
    async def start_request(
        self, request: InFlight, params: Any, descriptors: Sequence[int] = ()
    ) -> None:
        """Send *request*; wait only while too many are in flight or too much data is unsent.

        :raises ConnectionLost: the connection was lost.
        :raises Timeout: the request's deadline passed while it waited here.
        :raises TooLarge: the params do not fit into a frame.
        """

    @abstractmethod
    async def wait_for(
        self, request: InFlight, ready: Callable[[], bool], until: float = math.inf
    ) -> None:
        """Wait until *request* has changed so that *ready* returns true, or until the deadline
        *until* (monotonic).

        A request that is not done is timed out at its own deadline.
        """

    async def exchange(self, request: InFlight, params: Any) -> None:
        """Send *request*, and wait until it is done; see `start_request`."""
        await self.start_request(request, params)
        if not request.done:
            await self.wait_for(request, request.is_done)

    @abstractmethod
    async def wait_lost(self, until: float) -> None:
        """Wait until the connection was lost, or until the deadline *until* (monotonic)."""

    @abstractmethod
    def run_soon(self, action: Callable[[], object]) -> None:
        """Run *action* soon, in a task or thread that may use the connection.

        This is for `__del__`, which may run at any point, in any thread, and after a fork.
        """

    @abstractmethod
    def _notify(self, request: InFlight | None) -> None:
        """Wake the tasks that wait for *request*, or with None those waiting for the connection."""

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that connected."""
        return self._forks != _forks

    @property
    def lost(self) -> bool:
        """Whether the connection was lost."""
        return self._lost is not None

    @property
    def loss(self) -> InferdError | None:
        """The error by which the connection was lost, or None."""
        return self._lost

    def raise_if_lost(self) -> None:
        """Check that requests can be sent.

        :raises ConnectionLost: the connection was lost, or another process opened it before a fork.
        """
        if self.forked:
            raise ConnectionLost(
                f"this client was opened by process {self._pid}, before a fork: process"
                f" {os.getpid()} cannot use its connection",
                hint="make a new Client in the child process",
            )
        if isinstance(self._lost, ConnectionLost):
            raise error_from_wire(self._lost.to_wire())
        if self._lost is not None:
            raise ConnectionLost(
                f"the daemon at {self.path} has closed the connection: {self._lost.message}",
                hint="make a new client, or one with reconnect=True",
                data={"cause": self._lost.name},
            )

    def add_channel(self, channel: ConnectionCore) -> None:
        """Let *channel*, a connection to the process of a graph, end with this connection."""
        self._channels.append(channel)
        for one in self._channels[:]:
            if one.loss is not None:
                with suppress(ValueError):  # another thread may have removed it
                    self._channels.remove(one)
        if self._lost is not None:
            channel.shut_down()

    def shut_down(self) -> None:
        """Let the connection end soon. This is safe in any thread, and at any point."""
        if not self.forked:
            self._outbox.shut_down()

    def close(self) -> None:
        """End the connection, and with it its calls. This is safe in `__del__`."""
        self.shut_down()

    def may_send(self) -> bool:
        """Return whether a request can be sent at once, or fails at once."""
        return self._lost is not None or (
            len(self._in_flight) < self._in_flight_max
            and self._outbox.unsent_bytes <= _OUTBOX_BYTES_MAX
        )

    def send_hello(self, hello: ClientHello) -> None:
        """Send the client's hello."""
        self._send((Kind.HELLO, hello))

    def check_greeted(self) -> None:
        """Check the outcome of the exchange of hellos.

        :raises VersionMismatch: the daemon speaks another major version.
        :raises InferdError: the daemon has refused the connection.
        """
        if self._lost is not None:
            raise error_from_wire(self._lost.to_wire())

    def _send(self, message: tuple[Any, ...]) -> None:
        self._outbox.add_frame(pack_message(message))
        self._flush()

    def _flush(self) -> None:
        self._outbox.flush()

    def send_request(self, request: InFlight, params: Any, descriptors: Sequence[int] = ()) -> None:
        """Send *request*, at once as far as the socket accepts it."""
        self.raise_if_lost()
        request.connection, number = self, next(self._ids)
        frame = pack_message((Kind.REQUEST, number, request.call, params))
        bytes_max = self.server.limits.frame_bytes_max
        if len(frame) - 4 > bytes_max:
            raise TooLarge(
                f"{request.call} takes a frame of {len(frame)} bytes; the limit is {bytes_max}",
                hint="send less; a program can set a raw text of up to 8 MiB before the turn, by"
                " client.set_input(session.context, 0, text)",
                data={"bytes": len(frame), "frame_bytes_max": bytes_max},
            )
        request.id = number
        self._outbox.add_frame(frame, descriptors)
        self._in_flight[number] = request
        self._flush()

    def too_many_in_flight(self, request: InFlight) -> Timeout:
        """Return the error for *request*, which has waited too long to be sent."""
        return Timeout(
            f"{request.call}: {len(self._in_flight)} earlier calls are in flight",
            data={"timeout": "total"},
            retryable=True,  # the daemon has received nothing of it
        )

    def grant_credit(self, request: InFlight, events: int) -> None:
        """Allow the daemon to send *events* more events of *request*."""
        if not request.done and self._lost is None and not self.forked:
            self._send((Kind.CREDIT, request.id, events))

    def post_request(self, call: str, params: Any) -> None:
        """Send a request without waiting for its answer, unless too many are in flight."""
        if self._lost is None and self.may_send():
            self.send_request(InFlight(call, math.inf), params)

    def abandon_request(self, request: InFlight) -> None:
        """Cancel *request* in the daemon; its events are dropped."""
        if request.answered or request.abandoned or not request.id or self.forked:
            return
        self._to_cancel.append(request)
        request.abandoned = True
        self._send_cancels()

    def _send_cancels(self) -> None:
        while self._to_cancel and len(self._cancels) < _CANCELS_MAX:
            request = self._to_cancel[0]
            if not request.answered and self._lost is None:
                number = next(self._ids)
                self._cancels.add(number)
                self._send((Kind.REQUEST, number, "cancel", {"request": request.id}))
            self._to_cancel.popleft()

    def time_out(self, request: InFlight) -> None:
        """End *request* because its deadline has passed."""
        text = f"{request.call} took longer than its timeout"
        request.finish(None, Timeout(text, data={"timeout": "total"}))
        self.abandon_request(request)
        self._notify(request)

    def receive(self, number: int, data: bytes) -> None:
        """Handle the data of read *number*, counted from 0; the same read again changes nothing."""
        if number == self._received.reads:
            if data:
                self._received = self._received.after_read(data)
            else:
                self.lose(ConnectionLost(f"the daemon at {self.path} closed the connection"))
        self._handle_messages()

    def _handle_messages(self) -> None:
        messages = self._received.messages
        while messages and self._lost is None:
            message = messages[0]
            if isinstance(message, InferdError):
                self.lose(message)
                return
            try:
                self._handle_message(message)
            except InferdError as exc:
                self.lose(exc)
            except (IndexError, TypeError) as exc:
                self.lose(unreadable(exc))
            messages.popleft()

    def _handle_message(self, message: Message) -> None:
        """Handle a message; the same message again changes nothing."""
        kind = message[0]
        if kind == _EVENT:
            request = self._in_flight.get(message[1])
            if request is not None and not request.abandoned:
                request.add_event(_as_map(message[2]))
                self._notify(request)
        elif kind == Kind.REPLY:
            self._finish_request(message[1], _as_map(message[2]), None)
        elif kind == Kind.ERROR:
            self._finish_request(message[1], None, error_from_wire(_as_map(message[2])))
        elif kind == Kind.GOODBYE:
            self.lose(error_from_wire(_as_map(message[1])))
        elif kind == Kind.HELLO:
            self._accept_hello(_as_map(message[1]))

    def _finish_request(
        self, number: int, result: dict[str, Any] | None, error: InferdError | None
    ) -> None:
        request = self._in_flight.get(number)
        if request is not None:
            answer = result if error is None else error.data
            request.metadata = cast("Metadata", (answer or {}).get("metadata") or {})
            request.answered = True
            request.finish(result, error)
            self._notify(request)
            self._in_flight.pop(number, None)
        else:
            self._cancels.discard(number)
            self._send_cancels()
        self._notify(None)

    def _accept_hello(self, fields: dict[str, Any]) -> None:
        self.accept_server(read_server_hello(self.path, fields))

    def accept_server(self, server: ServerHello) -> None:
        """Let requests be sent, within the limits in *server*."""
        self.server = server
        self._in_flight_max = max(1, self.server.limits.requests_max - _CANCELS_MAX)
        self.greeted = True
        self._notify(None)

    def lose(self, error: InferdError) -> None:
        """End the connection: all requests in flight fail with *error*, later ones at once."""
        if self._lost is None:
            self._lost = error
        for channel in self._channels[:]:
            channel.shut_down()  # without its lock, which its own thread may wait with
        self._to_cancel.clear()
        self._outbox.close()
        for number, request in tuple(self._in_flight.items()):
            request.lost = request.answered = True
            request.finish(None, self._lost)
            self._notify(request)
            self._in_flight.pop(number, None)
        self._notify(None)


def closed_error(path: str) -> ConnectionLost:
    """Return the error for requests on a connection to *path* that the client has closed."""
    return ConnectionLost(f"the client's connection to {path} is closed", hint="open a new client")


def client_closed_error(path: str) -> ConnectionLost:
    """Return the error for calls of a client of *path* that was closed."""
    return ConnectionLost(f"the client of {path} is closed", hint="make a new client")


def read_error(path: str, exc: OSError) -> ConnectionLost:
    """Return the error for a connection to *path* from which reading failed."""
    return ConnectionLost(f"the connection to {path} failed: {exc.strerror}")


def _as_map(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise TypeError(f"a {type(value).__name__} instead of a map")
    return value
