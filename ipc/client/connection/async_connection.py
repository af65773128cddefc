"""A connection to the daemon on an event loop (asyncio or trio), in three tasks.

The reader receives frames, the writer sends the data that the socket did not accept at once, and
the deadline watcher times out requests, so that neither a call nor a token needs a timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import anyio
from anyio.lowlevel import current_token

from ....wire.frames import READ_BYTES
from ....wire.reading import read_until_end
from ...messages import ClientHello
from .core import ConnectionCore, closed_error, read_error
from .inflight import InFlight
from .outbox import Outbox


class _Waiter:
    """A task that waits until *ready* returns true. The reader checks that, so that the task wakes
    only then, and not for every event.
    """

    __slots__ = ("_error", "_ready", "_woken")

    def __init__(self, ready: Callable[[], bool]):
        self._ready, self._woken = ready, _new_event()
        self._error: Exception | None = None

    def check(self) -> None:
        """Wake the task if it is ready."""
        woken = self._woken
        if woken.done() if isinstance(woken, asyncio.Future) else woken.is_set():
            return
        try:
            if not self._ready():
                return
        except Exception as exc:  # must end the waiting task, not the reader
            self._error = exc
        if not isinstance(woken, asyncio.Future):
            woken.set()
        elif not woken.done():  # `ready` may have cancelled the task
            woken.set_result(None)

    async def wait(self) -> None:
        """Wait until the task is woken; raise the exception of *ready* if it raised one."""
        woken = self._woken
        await (woken if isinstance(woken, asyncio.Future) else woken.wait())
        if self._error is not None:
            raise self._error


class AsyncConnection(ConnectionCore):
    """A connection to the daemon; all methods except `run_soon` run on its loop."""

    def __init__(self, sock: socket.socket, path: str):
        super().__init__(path, Outbox(sock))
        self._thread = threading.get_ident()
        self._socket = sock
        self._space = anyio.Event()
        """Set when waiting requests are to check again whether they may be sent."""
        self._greeted = anyio.Event()
        self.ended = anyio.Event()
        """Set when the connection was lost."""
        self._unsent = anyio.Event()
        self._tick = anyio.Event()
        self._tick_at = 0.0
        self._reading = False
        self._changed: dict[InFlight, None] = {}
        """Requests that the present read has changed, in that order."""

    async def start_request(
        self, request: InFlight, params: Any, descriptors: Sequence[int] = ()
    ) -> None:
        """Send *request*; see `ConnectionCore.start_request`."""
        while not self.may_send():
            with anyio.move_on_after(request.remaining_s) as scope:
                if self._space.is_set():
                    self._space = anyio.Event()
                await self._space.wait()
            if scope.cancelled_caught:
                raise self.too_many_in_flight(request)
        self.send_request(request, params, descriptors)
        if request.deadline < self._tick_at:
            self._tick.set()

    def _flush(self) -> None:
        if self._reading:
            return  # `_receive_all` flushes once
        super()._flush()
        if self._outbox.unsent_bytes:
            self._unsent.set()

    async def wait_for(
        self, request: InFlight, ready: Callable[[], bool], until: float = math.inf
    ) -> None:
        """Wait until *ready* returns true; see `ConnectionCore.wait_for`."""
        if until < math.inf:
            with anyio.move_on_after(until - time.monotonic()):
                return await self.wait_for(request, ready)
        if ready():
            return
        waiter = _Waiter(ready)
        request.waiters.append(waiter)
        try:
            await waiter.wait()
        finally:
            request.waiters.remove(waiter)

    def _notify(self, request: InFlight | None) -> None:
        if request is None:
            self._space.set()
            if self.greeted or self._lost is not None:
                self._greeted.set()
            return
        if self._reading:
            self._changed[request] = None
        else:
            _check_waiters(request)

    async def wait_lost(self, until: float) -> None:
        """Wait until the connection was lost, or until the deadline *until*."""
        with anyio.move_on_after(until - time.monotonic()):
            await self.ended.wait()

    def run_soon(self, action: Callable[[], object]) -> None:
        """Run *action* soon in the deadline watcher; see `ConnectionCore.run_soon`."""
        if self._lost is None and not self.forked:
            self._actions.append(action)
            if threading.get_ident() == self._thread:
                self._tick.set()

    async def read_frames(self) -> None:
        """Read frames until the connection ends; the requests then in flight fail."""
        try:
            if isinstance(current_token().native_token, asyncio.AbstractEventLoop):
                await read_until_end(self._socket, self._read_some)
                return
            while self._lost is None:  # trio
                await anyio.wait_readable(self._socket)
                with contextlib.suppress(BlockingIOError):
                    self._read_some()
        finally:
            self.lose(closed_error(self.path))
            self.ended.set()

    def _read_some(self) -> bool:
        """Read once and handle the messages; return whether the connection was not lost.

        :raises BlockingIOError: nothing has arrived.
        """
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            raise
        except OSError as exc:
            self.lose(read_error(self.path, exc))
            return False
        self._receive_all(data)
        return self._lost is None

    def _receive_all(self, data: bytes) -> None:
        """Handle the messages of a read. Tasks are checked once for all its events, and the credit
        that they grant is sent at once.
        """
        self._reading = True
        try:
            self.receive(self._received.reads, data)
            while self._changed:
                changed, self._changed = self._changed, {}
                for request in changed:
                    _check_waiters(request)
        finally:
            self._reading = False
            self._flush()

    async def write_unsent(self) -> None:
        """Send the data that the socket did not accept at once, until cancelled."""
        while True:
            await self._unsent.wait()
            self._unsent = anyio.Event()
            while self._outbox.unsent_bytes:
                await anyio.wait_writable(self._socket)
                self._outbox.flush()
            self._space.set()

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
                    self.time_out(request)
            self._tick_at = min((r.deadline for r in open_requests if not r.done), default=math.inf)
            with anyio.move_on_after(self._tick_at - now):
                await self._tick.wait()

    async def greet(self, hello: ClientHello) -> None:
        """Exchange hellos; see `check_greeted`."""
        self.send_hello(hello)
        await self._greeted.wait()
        self.check_greeted()


def _check_waiters(request: InFlight) -> None:
    for waiter in request.waiters:
        waiter.check()


def _new_event() -> asyncio.Future[None] | anyio.Event:
    """Return an event, or on asyncio a future, because an event takes a kilobyte."""
    try:
        return asyncio.get_running_loop().create_future()
    except RuntimeError:
        return anyio.Event()
