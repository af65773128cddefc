"""A connection of the suite: frames over a Unix socket, and the rules that hold for all of them."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from .page import ERROR_NUMBERS

HELLO, REQUEST, RESULT, ERROR, EVENT, CREDIT, GOODBYE = range(7)
PROTOCOL = [1, 1]
"""The version that this suite checks."""
EVENTS_MAX = 100_000
"""Events that the suite keeps of one request."""
BODY_BYTES_MAX = 64 << 20
"""The largest body that the suite reads, whatever length a server announces."""

Map = dict[str, Any]


class Failure(Exception):
    """The server broke a rule."""


class Skipped(Exception):
    """The case cannot be run against this server; the text is the reason."""


class Closed(Failure):
    """The server closed the connection."""


class ErrorReceived(Exception):
    """An error reply or a goodbye, whose form was checked."""

    def __init__(self, error: Map):
        super().__init__(f"{error['name']} ({error['number']}): {error['message']}")
        self.error = error
        self.name = str(error["name"])
        self.data: Map = error["data"]


def check(holds: object, broken: str) -> None:
    """Raise `Failure` with the text *broken* unless the rule *holds*."""
    if not holds:
        raise Failure(broken)


def check_error(error: Any) -> Map:
    """Check the form and number of a wire error, and return it with its defaults."""
    check(isinstance(error, dict), f"an error is not a map: {error!r}")
    full = {"hint": "", "retryable": False, "data": {}} | error
    kinds = {"name": str, "number": int, "message": str, "hint": str, "retryable": bool}
    for key, kind in {**kinds, "data": dict}.items():
        check(type(full.get(key)) is kind, f"{key!r} of an error is {full.get(key)!r}")
    name, number = full["name"], full["number"]
    known = ERROR_NUMBERS.get(name)
    check(known in (None, number), f"{name} has the number {number}, not {known}")
    return dict(full)


@dataclass(slots=True)
class SentRequest:
    """A request under way: its events so far and, once it has arrived, its reply."""

    events: list[Map] = field(default_factory=list)
    reply: list[Any] | None = None

    @property
    def text(self) -> bytes:
        """The text of the events so far."""
        return b"".join(event.get("text", b"") for event in self.events)


class Connection:
    """One connection to the server. Every wait ends after `timeout_s` with `Failure`."""

    def __init__(self, path: str, timeout_s: float, hello: Map | None):
        self.timeout_s = timeout_s
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.requests: dict[int, SentRequest] = {}
        self.server_hello: Map = {}
        self._number = 0
        self._buffer = bytearray()
        try:
            self._connect(path)
        except BaseException:
            self.close()
            raise
        if hello is not None:
            self.send([HELLO, {"protocol": PROTOCOL, "software": "conformance", **hello}])

    def _connect(self, path: str) -> None:
        """Connect, with retries until `timeout_s` while the server's listen queue is full."""
        end = time.monotonic() + self.timeout_s
        self.socket.settimeout(self.timeout_s)
        while True:
            try:
                return self.socket.connect(path)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise Failure("connect fails with EAGAIN for too long") from None
                time.sleep(0.01)

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def end(self, until: float) -> None:
        """Close the connection once the server has, or at the time *until* on the monotonic clock:
        before that its contexts and its place count for the user.
        """
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            while (left_s := until - time.monotonic()) > 0:
                self.socket.settimeout(left_s)
                if not self.socket.recv(1 << 16):
                    break
        self.close()

    def send_bytes(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send bytes as they are. If the server has closed the connection, the next read fails."""
        try:
            if fds:
                sent = socket.send_fds(self.socket, [data], list(fds))
                data = data[sent:]
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass
        except TimeoutError:
            raise Failure(f"the server reads nothing for {self.timeout_s:g} s") from None

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send one frame."""
        self.send_bytes(frame(message), fds)

    def _read_exactly(self, size: int) -> bytes:
        end = time.monotonic() + self.timeout_s
        while len(self._buffer) < size:
            self.socket.settimeout(max(0.001, end - time.monotonic()))
            try:
                part = self.socket.recv(1 << 16)
            except TimeoutError:
                raise Failure(f"nothing arrived within {self.timeout_s:g} s") from None
            except ConnectionResetError:
                part = b""
            if not part:
                raise Closed("the server closed the connection")
            self._buffer += part
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def read_message(self) -> list[Any]:
        """Read the next message from the server, check its shape, and return it."""
        (size,) = struct.unpack("<I", self._read_exactly(4))
        check(size <= BODY_BYTES_MAX, f"a frame of {size} bytes")
        try:
            message = msgspec.msgpack.decode(self._read_exactly(size))
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise Failure(f"a frame is not msgpack: {exc}") from None
        check(isinstance(message, list) and message, f"a frame is not an array: {message!r}")
        return list(message)

    def read_hello(self) -> Map:
        """Return the server's hello, which is its first frame."""
        message = self.read_message()
        if message[0] == GOODBYE:
            raise ErrorReceived(check_error(message[1]))
        check(message[0] == HELLO and len(message) > 1, f"the first frame is {message!r}")
        check(isinstance(message[1], dict), f"the hello is {message[1]!r}")
        self.server_hello = message[1]
        return self.server_hello

    def start(self, call: str, params: Map | None = None, fds: Sequence[int] = ()) -> int:
        """Send a request and return its id."""
        self._number += 1
        self.requests[self._number] = SentRequest()
        self.send([REQUEST, self._number, call, params or {}], fds)
        return self._number

    def read_one(self) -> None:
        """Read one message, and add it to its request.

        :raises ErrorReceived: the message is a goodbye.
        """
        kind, *rest = self.read_message()
        if kind == GOODBYE:
            raise ErrorReceived(check_error(rest[0] if rest else None))
        check(kind in (RESULT, ERROR, EVENT) and len(rest) >= 2, f"a message {[kind, *rest]!r}")
        number, content = rest[:2]
        request = self.requests.get(number)
        if request is None:
            raise Failure(f"a message of kind {kind} for {number!r}, which is not a request's id")
        check(isinstance(content, dict), f"the content of a message is {content!r}")
        check(request.reply is None, f"request {number} has a message after its reply")
        if kind == EVENT:
            check(len(request.events) < EVENTS_MAX, f"request {number} has too many events")
            request.events.append(content)
        else:
            request.reply = [kind, content]

    def wait(self, number: int) -> Map:
        """Return the result of a request; messages of other requests are kept.

        :raises ErrorReceived: the reply is an error.
        """
        request = self.requests[number]
        while request.reply is None:
            self.read_one()
        kind, content = request.reply
        if kind == ERROR:
            raise ErrorReceived(check_error(content))
        return dict(content)

    def wait_events(self, number: int, events: int) -> list[Map]:
        """Return the first *events* events of a request."""
        request = self.requests[number]
        while len(request.events) < events:
            check(request.reply is None, f"the reply came after {len(request.events)} events")
            self.read_one()
        return request.events[:events]

    def call(self, call: str, fds: Sequence[int] = (), /, **params: Any) -> Map:
        """Send a request and return its result.

        :raises ErrorReceived: the reply is an error.
        """
        return self.wait(self.start(call, params, fds))

    def refusal(self, call: str, fds: Sequence[int] = (), /, **params: Any) -> ErrorReceived:
        """Send a request and return the error in its reply."""
        return self.refused(self.start(call, params, fds))

    def refused(self, number: int) -> ErrorReceived:
        """Return the error in the reply to a request."""
        try:
            result = self.wait(number)
        except ErrorReceived as refused:
            return refused
        raise Failure(f"the reply is {result!r:.200}, not an error")

    def goodbye(self) -> ErrorReceived:
        """Return the error of the goodbye, and check that the server closes the connection."""
        try:
            while True:
                self.read_one()
        except ErrorReceived as refused:
            self.expect_end()
            return refused
        except Closed:
            raise Failure("the connection ended without a goodbye") from None

    def expect_end(self) -> None:
        """Check that the server closes the connection."""
        try:
            message = self.read_message()
        except Closed:
            return
        raise Failure(f"a message {message!r:.200} where the connection should end")


def frame(message: Any) -> bytes:
    """Return a message as a frame."""
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body
