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
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import anyio.abc
import anyio.to_thread
from anyio.lowlevel import current_token

from ....wire.frames import READ_BYTES
from ....wire.reading import read_until_end
from ...greeting import connect_error, connect_timeout_error
from ...messages import ClientHello
from ...paths import check_server, check_socket_folder
from .core import ConnectionCore, InFlight, Outbox, client_closed_error, closed_error, read_error

_CONNECT_PAUSE_S = 0.02


@asynccontextmanager
async def own_group() -> AsyncIterator[anyio.abc.TaskGroup]:
    """Yield a task group that ends with its body; the body's error is raised ungrouped."""
    error: BaseException | None = None
    async with anyio.create_task_group() as group:
        try:
            yield group
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as exc:
            error = exc  # the group would wrap it
        finally:
            group.cancel_scope.cancel()
    if error is not None:
        raise error


async def hold_connection(
    path: str,
    hello: ClientHello,
    timeout_s: float,
    *,
    task_status: anyio.abc.TaskStatus[AsyncConnection] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Connect, run the connection's tasks until it is lost, and close it.

    :raises ConnectionLost: no daemon answers at *path*.
    :raises PermissionDenied: this user may not use the socket.
    :raises VersionMismatch: the daemon speaks another major version.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        connection = AsyncConnection(sock, path)
        async with own_group() as group:
            with anyio.move_on_after(timeout_s) as scope:
                await _connect(sock, path)
                connection.start_tasks(group)
                await connection.greet(hello)
            if scope.cancelled_caught:
                raise connect_timeout_error(path, timeout_s)
            task_status.started(connection)
            await connection.ended.wait()


async def hold_channel(
    sock: socket.socket,
    connection: ConnectionCore,
    *,
    task_status: anyio.abc.TaskStatus[AsyncConnection] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Run a channel over *sock*, which ends with *connection*, until it is lost, and close it."""
    with sock:
        sock.setblocking(False)
        channel = AsyncConnection(sock, connection.path)
        channel.accept_server(connection.server)
        try:
            async with own_group() as group:
                channel.start_tasks(group)
                connection.add_channel(channel)
                task_status.started(channel)
                await channel.ended.wait()
        finally:
            channel.lose(closed_error(connection.path))  # the reader may not have begun


async def _connect(sock: socket.socket, path: str) -> None:
    while True:
        try:
            check_socket_folder(path)
            sock.connect(path)
            check_server(sock, path)
            return
        except BlockingIOError:
            await anyio.sleep(_CONNECT_PAUSE_S)  # the backlog is full; no event reports space
        except OSError as exc:
            raise connect_error(path, exc) from None


class ConnectionOwner:
    """A task with the group in which a client's connections run, until `aclose`.

    The task belongs to the event loop, so that any task may close the client, and a client that is
    never closed ends with the loop. A task group of the caller could be closed only by the
    caller's task.
    """

    group: anyio.abc.TaskGroup

    async def start(self) -> None:
        """Start the task."""
        self._started, self._closing, self._ended = anyio.Event(), anyio.Event(), anyio.Event()
        self._error: Exception | None = None
        loop = current_token().native_token
        if isinstance(loop, asyncio.AbstractEventLoop):
            self._task = loop.create_task(self._run())
        else:
            from trio.lowlevel import spawn_system_task

            spawn_system_task(self._run)
        await self._started.wait()

    async def _run(self) -> None:
        try:
            async with own_group() as self.group:
                self._started.set()
                await self._closing.wait()
        except Exception as exc:  # a bug of the client's, which `aclose` raises
            self._error = exc
        finally:
            self._ended.set()

    def close_soon(self) -> None:
        """End the task, without waiting."""
        self._closing.set()

    async def aclose(self) -> None:
        """End the task, and wait for its end."""
        self._closing.set()
        with anyio.CancelScope(shield=True):
            await self._ended.wait()
        if self._error is not None:
            raise self._error


R = TypeVar("R")


class AsyncDriver:
    """The owner of a connection that the tasks of a loop share."""

    runs_coroutines = True

    def __init__(self, path: str, hello: ClientHello, connect_timeout_s: float):
        self.connection: AsyncConnection | None = None
        self.closed = False
        self._path, self._hello = path, hello
        self._connect_timeout_s = connect_timeout_s
        self._owner: ConnectionOwner | None = None
        self._connecting = anyio.Lock()

    async def open(self) -> AsyncConnection:
        """Return the connection; see `Driver.open`."""
        async with self._connecting:
            self._check_not_closed()
            if self.connection is not None:
                return self.connection
            owner = ConnectionOwner()
            try:
                await owner.start()
                connection = await self._connect(owner)
                self._check_not_closed()
            except BaseException:
                await owner.aclose()
                raise
            self._owner, self.connection = owner, connection
            return connection

    async def reconnect(self) -> AsyncConnection:
        """Return the connection; see `Driver.reconnect`."""
        await self.open()
        async with self._connecting:
            self._check_not_closed()
            assert self._owner is not None and self.connection is not None, "it is open"
            if self.connection.lost:
                self.connection = await self._connect(self._owner)
            return self.connection

    async def _connect(self, owner: ConnectionOwner) -> AsyncConnection:
        connection = await owner.group.start(
            hold_connection, self._path, self._hello, self._connect_timeout_s
        )
        assert isinstance(connection, AsyncConnection)
        return connection

    async def open_channel(
        self, sock: socket.socket, connection: ConnectionCore
    ) -> AsyncConnection:
        """Return a connection over *sock*; see `Driver.open_channel`."""
        self._check_not_closed()
        assert self._owner is not None, "it is open"
        channel = await self._owner.group.start(hold_channel, sock, connection)
        assert isinstance(channel, AsyncConnection)
        return channel

    def _check_not_closed(self) -> None:
        if self.closed:
            raise client_closed_error(self._path)

    async def close(self) -> None:
        """Close the connection; see `Driver.close`."""
        self.closed = True
        owner, self._owner, self.connection = self._owner, None, None
        if owner is not None:
            await owner.aclose()

    def close_unused(self) -> bool:
        """Close the connection; see `Driver.close_unused`."""
        owner, connection = self._owner, self.connection
        if owner is None or connection is None or connection.forked:
            return False
        connection.run_soon(owner.close_soon)
        return True

    async def sleep(self, seconds: float) -> None:
        """Wait for that time."""
        await anyio.sleep(seconds)

    def lock(self) -> anyio.Lock:
        """Return a lock between tasks."""
        return anyio.Lock()

    def shield(self) -> anyio.CancelScope:
        """Return a context manager whose body finishes even if its task is cancelled in it."""
        return anyio.CancelScope(shield=True)

    async def run_in_thread(self, function: Callable[..., R], *args: Any) -> R:
        """Run a function that takes long in another thread."""
        return await anyio.to_thread.run_sync(function, *args)

    def caller(self) -> int:
        """Return the calling task's number."""
        return anyio.get_current_task().id


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

    def start_tasks(self, group: anyio.abc.TaskGroup) -> None:
        """Start the tasks of the connection in *group*."""
        group.start_soon(self.read_frames)
        group.start_soon(self.write_unsent)
        group.start_soon(self.watch_deadlines)

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
