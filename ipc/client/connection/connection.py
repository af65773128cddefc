"""The client's connection: requests in flight by id, their events, credit and deadlines.

Everything runs on one event loop (asyncio or trio), in three tasks. The reader receives frames, the
writer sends the data that the socket did not accept at once, and the deadline watcher times out
requests, so that neither a call nor a token needs a timer.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import anyio
import msgspec
from anyio.lowlevel import current_token

from ....backends.errors import (
    ConnectionLost,
    InferdError,
    ProtocolError,
    Timeout,
    TooLarge,
    error_from_wire,
)
from ....wire.frames import READ_BYTES, REPLY_BYTES_MAX, FrameReader
from ....wire.reading import read_until_end
from ...greeting import read_server_hello
from ...messages import PROTOCOL_VERSION, ClientHello, Kind, ServerHello
from ...payloads import pack_message
from ..results import Metadata
from .inflight import InFlight
from .outbox import Outbox

_EVENT = int(Kind.EVENT)
_CANCELS_MAX = 16
"""The number of the requests allowed in flight that is reserved for cancels."""
_OUTBOX_BYTES_MAX = 16 << 20

_decode = msgspec.msgpack.Decoder(list[Any]).decode


class ClientConnection:
    """A connection to the daemon; all methods except `run_soon` run on its loop."""

    def __init__(self, sock: socket.socket, path: str):
        self.path = path
        self.server: ServerHello
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._socket = sock
        self._frames = FrameReader(REPLY_BYTES_MAX)
        self.outbox = Outbox(sock)
        self._ids = itertools.count(1)
        self._in_flight: dict[int, InFlight] = {}
        self._in_flight_max = 1
        self._cancels: set[int] = set()
        self._to_cancel: deque[InFlight] = deque()
        self._actions: deque[Callable[[], object]] = deque()
        self._space = anyio.Event()
        """Set when waiting requests are to check again whether they may be sent."""
        self._greeted = anyio.Event()
        self.ended = anyio.Event()
        """Set when the connection was lost."""
        self._lost: InferdError | None = None
        self._end: InferdError
        self._tick = anyio.Event()
        self._tick_at = 0.0

    def __repr__(self) -> str:
        return f"<ClientConnection to {self.path} [{len(self._in_flight)} requests in flight]>"

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that connected."""
        return os.getpid() != self._pid

    @property
    def lost(self) -> bool:
        """Whether the connection was lost."""
        return self._lost is not None

    async def start_request(
        self, request: InFlight, params: Any, descriptors: Sequence[int] = ()
    ) -> None:
        """Send *request*; wait only while too many are in flight or too much data is unsent.

        :raises ConnectionLost: the connection was lost.
        :raises Timeout: the request's deadline passed while it waited here.
        :raises TooLarge: the params do not fit into a frame.
        """
        while not self._may_send():
            with anyio.move_on_after(request.remaining_s) as scope:
                if self._space.is_set():
                    self._space = anyio.Event()
                await self._space.wait()
            if scope.cancelled_caught:
                raise Timeout(f"{request.call}: {len(self._in_flight)} earlier calls are in flight")
        self._send_request(request, params, descriptors)

    def _may_send(self) -> bool:
        return self._lost is not None or (
            len(self._in_flight) < self._in_flight_max
            and self.outbox.unsent_bytes <= _OUTBOX_BYTES_MAX
        )

    def _send_request(self, request: InFlight, params: Any, descriptors: Sequence[int]) -> None:
        self.raise_if_lost()
        request.id, request.connection = next(self._ids), self
        frame = pack_message((Kind.REQUEST, request.id, request.call, params))
        bytes_max = self.server.limits.frame_bytes_max
        if len(frame) - 4 > bytes_max:
            raise TooLarge(
                f"{request.call} takes a frame of {len(frame)} bytes; the limit is {bytes_max}",
                hint="send less; a program can set a raw text of up to 8 MiB before the turn, by"
                " client.set_input(session.context, 0, text)",
                data={"bytes": len(frame), "frame_bytes_max": bytes_max},
            )
        self._in_flight[request.id] = request
        self.outbox.send(frame, descriptors)
        if request.deadline < self._tick_at:
            self._tick.set()

    def raise_if_lost(self) -> None:
        """Raise the error that ended the connection, if it was lost."""
        if self.forked:
            raise ConnectionLost(
                f"this client was opened by process {self._pid}, before a fork",
                hint="make a new client in the child process",
            )
        if self._lost is not None:
            raise error_from_wire(self._lost.to_wire())

    def grant_credit(self, request: InFlight, events: int) -> None:
        """Allow the daemon *events* more events of *request*."""
        if not request.done and self._lost is None and not self.forked:
            self.outbox.send(pack_message((Kind.CREDIT, request.id, events)))

    def post_request(self, call: str, params: Any) -> None:
        """Send a request whose answer nobody awaits, unless too many are in flight."""
        if self._lost is None and self._may_send():
            self._send_request(InFlight(call, math.inf), params, ())

    def abandon_request(self, request: InFlight) -> None:
        """Cancel *request* on the daemon; its events are dropped."""
        if request.answered or request.abandoned or self.forked:
            return
        request.abandoned = True
        self._to_cancel.append(request)
        self._send_cancels()

    def run_soon(self, action: Callable[[], object]) -> None:
        """Run *action* soon in the deadline watcher.

        It serves `__del__`, which may run at any point, in any thread, and after a fork.
        """
        if self._lost is None and not self.forked:
            self._actions.append(action)
            if threading.get_ident() == self._thread:
                self._tick.set()

    def _send_cancels(self) -> None:
        while self._to_cancel and len(self._cancels) < _CANCELS_MAX:
            request = self._to_cancel.popleft()
            if not request.answered:
                number = next(self._ids)
                self._cancels.add(number)
                params = {"request": request.id}
                self.outbox.send(pack_message((Kind.REQUEST, number, "cancel", params)))

    async def read_frames(self) -> None:
        """Read frames until the connection ends; the requests then in flight fail."""
        self._end = ConnectionLost(
            f"the client's connection to {self.path} is closed", hint="open a new client"
        )
        try:
            if isinstance(current_token().native_token, asyncio.AbstractEventLoop):
                await read_until_end(self._socket, self._read_some)
                return
            while self._read_some():  # trio
                await anyio.wait_readable(self._socket)
        finally:
            self._lose(self._end)

    def _read_some(self) -> bool:
        """Read once and handle the messages; at the end, set `_end` and return False."""
        try:
            data = self._socket.recv(READ_BYTES)
            if not data:
                self._end = ConnectionLost(f"the daemon at {self.path} closed the connection")
                return False
            for frame in self._frames.read_frames(data):
                goodbye = self._handle_message(_decode(frame))
                if goodbye is not None:
                    self._end = goodbye
                    return False
        except BlockingIOError:
            return True
        except OSError as exc:
            self._end = ConnectionLost(f"the connection to {self.path} failed: {exc.strerror}")
        except InferdError as exc:
            self._end = exc
        except (msgspec.DecodeError, IndexError, TypeError) as exc:
            self._end = ProtocolError(f"a frame from the daemon cannot be read: {exc}")
        else:
            return True
        return False

    def _handle_message(self, message: list[Any]) -> InferdError | None:
        """Handle a message; return the error if it is a goodbye."""
        kind = message[0]
        if kind == _EVENT:
            request = self._in_flight.get(message[1])
            if request is not None and not request.abandoned:
                request.add_event(_as_map(message[2]))
        elif kind == Kind.REPLY:
            self._finish_request(message[1], _as_map(message[2]), None)
        elif kind == Kind.ERROR:
            self._finish_request(message[1], None, error_from_wire(_as_map(message[2])))
        elif kind == Kind.GOODBYE:
            return error_from_wire(_as_map(message[1]))
        elif kind == Kind.HELLO:
            self._accept_hello(_as_map(message[1]))
        return None

    def _finish_request(
        self, number: int, result: dict[str, Any] | None, error: InferdError | None
    ) -> None:
        request = self._in_flight.pop(number, None)
        if request is not None:
            request.answered = True
            answer = result if error is None else error.data
            request.metadata = cast("Metadata", (answer or {}).get("metadata") or {})
            request.finish(result, error)
        else:
            self._cancels.discard(number)
            self._send_cancels()
        self._space.set()

    def _accept_hello(self, fields: dict[str, Any]) -> None:
        self.server = read_server_hello(self.path, fields)
        self._in_flight_max = max(1, self.server.limits.requests_max - _CANCELS_MAX)
        self._greeted.set()

    def _lose(self, error: InferdError) -> None:
        self._lost = error
        requests = list(self._in_flight.values())
        self._in_flight.clear()
        self._to_cancel.clear()
        self.outbox.close()
        for request in requests:
            request.answered = request.lost = True
            request.finish(None, error)
        self._greeted.set()
        self._space.set()
        self.ended.set()

    async def watch_deadlines(self) -> None:
        """Time out requests at their deadlines, and run the actions of `run_soon`."""
        while True:
            self._tick = anyio.Event()
            while self._actions:
                self._actions.popleft()()
            now = time.monotonic()
            open_requests = [r for r in self._in_flight.values() if not r.done]
            for request in open_requests:
                if request.deadline <= now:
                    self._time_out(request)
            self._tick_at = min((r.deadline for r in open_requests if not r.done), default=math.inf)
            with anyio.move_on_after(self._tick_at - now):
                await self._tick.wait()

    def _time_out(self, request: InFlight) -> None:
        request.finish(None, Timeout(f"{request.call} took longer than its timeout"))
        self.abandon_request(request)

    async def greet(self, software: str) -> None:
        """Exchange hellos.

        :raises VersionMismatch: the daemon speaks another major version.
        """
        self.outbox.send(
            pack_message((Kind.HELLO, ClientHello(protocol=PROTOCOL_VERSION, software=software)))
        )
        await self._greeted.wait()
        self.raise_if_lost()


def _as_map(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise TypeError(f"a {type(value).__name__} instead of a map")
    return value
