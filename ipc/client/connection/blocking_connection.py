"""A connection to the daemon for threads that block, without an event loop or a thread of its own.

Of the threads that wait, the first one (the leader) reads the socket and wakes the others (the
followers) whose requests have changed. When it has its own answer, the next one leads. No other
thread reads, because if it read the leader's answer, the leader would not wake.
"""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import islice, repeat
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ....backends.errors import InvalidArgument
from ....wire.frames import READ_BYTES
from ....wire.spinning import Spinning
from ...greeting import connect_error, connect_timeout_error
from ...messages import ClientHello
from ...paths import check_server, check_socket_folder
from .core import ConnectionCore, InFlight, Outbox, client_closed_error, closed_error, read_error

R = TypeVar("R")


class BlockingDriver:
    """The owner of a connection that threads share."""

    runs_coroutines = False

    def __init__(self, path: str, hello: ClientHello, connect_timeout_s: float):
        self.connection: BlockingConnection | None = None
        self.closed = False
        self._path, self._hello = path, hello
        self._connect_timeout_s = connect_timeout_s
        self._connecting = threading.RLock()

    async def open(self) -> BlockingConnection:
        """Return the connection; see `Driver.open`."""
        connection = self.connection
        if connection is None:
            with self._connecting:
                self._check_not_closed()
                connection = self.connection = self.connection or self._connect()
        return connection

    async def reconnect(self) -> BlockingConnection:
        """Return the connection; see `Driver.reconnect`."""
        connection = await self.open()
        if connection.lost and not connection.forked:
            with self._connecting:
                self._check_not_closed()
                old = self.connection
                if old is None or old.lost:
                    connection = self.connection = self._connect()
                    if old is not None:
                        old.close()
                else:
                    connection = old
        return connection

    async def open_channel(
        self, sock: socket.socket, connection: ConnectionCore
    ) -> BlockingConnection:
        """Return a connection over *sock*; see `Driver.open_channel`."""
        channel = BlockingConnection(connection.path, sock)
        channel.accept_server(connection.server)
        connection.add_channel(channel)
        return channel

    def _connect(self) -> BlockingConnection:
        return BlockingConnection.connect(self._path, self._hello, self._connect_timeout_s)

    def _check_not_closed(self) -> None:
        if self.closed:
            raise client_closed_error(self._path)

    async def close(self) -> None:
        """Close the connection; see `Driver.close`."""
        self.closed = True
        if self.connection is not None and self.connection.forked:
            self.close_unused()
        else:
            with self._connecting:  # a call that connects now must not leave a connection behind
                self.close_unused()

    def close_unused(self) -> bool:
        """Close the connection; see `Driver.close_unused`."""
        connection, self.connection = self.connection, None
        if connection is None:
            return False
        connection.close()
        return not connection.forked

    async def sleep(self, seconds: float) -> None:
        """Block for that time."""
        time.sleep(seconds)  # noqa: ASYNC251 - it blocks by intention

    def lock(self) -> BlockingLock:
        """Return a lock between threads."""
        return BlockingLock()

    def shield(self) -> AbstractContextManager[Any]:
        """Return a context manager without effect, as nothing cancels a call that blocks."""
        return nullcontext()

    async def run_in_thread(self, function: Callable[..., R], *args: Any) -> R:
        """Run the function in the calling thread, which may block."""
        return function(*args)

    def caller(self) -> int:
        """Return the calling thread's number."""
        return threading.get_ident()


class BlockingLock:
    """A lock between threads, with the interface of a lock between tasks."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    async def __aenter__(self) -> None:
        self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()


_CONNECT_PAUSE_S = 0.02
_FOLLOWER_S_MAX = 1.0
"""A follower checks after this time whether it now leads, as an interrupted leader may have woken
no thread.
"""
_LEADER_S_MAX = 1.0
"""The leader polls for no longer at a time: no poll notices a signal that came just before it, and
Python handles the signal after the poll.
"""


class _Waiter:
    """A thread that waits until *ready* returns true."""

    __slots__ = ("_wakes", "ready", "thread")

    def __init__(self, ready: Callable[[], bool]):
        self.ready, self.thread = ready, threading.get_ident()
        self._wakes: SimpleQueue[None] = SimpleQueue()

    def wake(self) -> None:
        """Make the thread check again."""
        self._wakes.put(None)

    def wait(self, s_max: float) -> None:
        """Wait for `wake`, for at most *s_max*."""
        with suppress(Empty):
            self._wakes.get(timeout=s_max)


def _never() -> bool:
    return False


class BlockingConnection(ConnectionCore):
    """A connection to the daemon; any number of threads may use it.

    The lock is held while a thread changes the state, never while it waits.
    """

    def __init__(self, path: str, sock: socket.socket | None = None):
        """*sock* is connected to the process of a graph; without it, `connect` follows."""
        self._spinning = None if sock is None else Spinning()
        if sock is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._socket = sock
        self._socket.setblocking(False)
        super().__init__(path, Outbox(self._socket))
        self._lock = threading.RLock()
        self._waiters: list[_Waiter] = []
        # One C call reads, numbers and stores the data, so that no interrupt can come between.
        self._reads = enumerate(map(self._socket.recv, repeat(READ_BYTES)))
        self._last_read: deque[tuple[int, bytes]] = deque(maxlen=1)
        self._unhandled = False
        """Whether the last read may not have been handled, because of an interrupt."""

    @classmethod
    def connect(cls, path: str, hello: ClientHello, timeout_s: float) -> BlockingConnection:
        """Connect and exchange hellos.

        :raises ConnectionLost: no daemon answers there.
        :raises PermissionDenied: this user may not use the socket.
        :raises VersionMismatch: the daemon speaks another major version.
        """
        connection = cls(path)
        try:
            connection._connect(hello, time.monotonic() + timeout_s, timeout_s)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self, hello: ClientHello, until: float, timeout_s: float) -> None:
        while True:
            try:
                check_socket_folder(self.path)
                self._socket.connect(self.path)
                check_server(self._socket, self.path)
                break
            except BlockingIOError:  # the backlog is full; no event reports space
                if time.monotonic() > until:
                    raise connect_timeout_error(self.path, timeout_s) from None
                time.sleep(_CONNECT_PAUSE_S)
            except OSError as exc:
                raise connect_error(self.path, exc) from None
        self.send_hello(hello)
        if not self._wait_until(lambda: self.greeted or self._lost is not None, until):
            raise connect_timeout_error(self.path, timeout_s)
        self.check_greeted()

    def close(self) -> None:
        """End the connection, and with it the calls of all threads."""
        if self.forked:
            self._socket.close()
            return
        with self._lock:
            self.lose(closed_error(self.path))
            self.shut_down()  # wakes the leader
        for waiter in self._waiters[:]:
            waiter.wake()
        self._close_socket()

    def _close_socket(self) -> None:
        """Close the socket of a lost connection, unless a thread still polls it."""
        if self._lost is not None and not self._waiters:
            self._socket.close()

    @property
    def lost(self) -> bool:
        """Whether the connection was lost, even if that happened since the last call."""
        if not self.forked and not self._lock_is_mine():
            self._read_arrived()
        return self._lost is not None

    async def start_request(
        self, request: InFlight, params: Any, descriptors: Sequence[int] = ()
    ) -> None:
        """Send *request*; see `ConnectionCore.start_request`."""
        self._check_usable()
        self._read_arrived()  # the connection may have ended since the last call
        self._send_or_wait(request, params, descriptors)

    def _send_or_wait(
        self, request: InFlight, params: Any, descriptors: Sequence[int] = ()
    ) -> None:
        while True:
            with self._lock:
                if self.may_send():
                    self.send_request(request, params, descriptors)
                    return
            if not self._wait_until(self.may_send, request.deadline):
                raise self.too_many_in_flight(request)

    async def wait_for(
        self, request: InFlight, ready: Callable[[], bool], until: float = math.inf
    ) -> None:
        """Block until *ready* returns true; see `ConnectionCore.wait_for`."""
        self._check_usable()
        self._wait_for(request, ready, until)

    async def exchange(self, request: InFlight, params: Any) -> None:
        """Send *request*, and block until it is done; see `ConnectionCore.exchange`. A loss of the
        connection since the last call is noticed after the request was sent.
        """
        self._check_usable()
        self._send_or_wait(request, params)
        self._wait_for(request, request.is_done, math.inf)

    def _wait_for(self, request: InFlight, ready: Callable[[], bool], until: float) -> None:
        deadline = math.inf if request.done else request.deadline
        if self._wait_until(ready, min(until, deadline)):
            return
        if self._lost is not None:
            request.finish(None, self._lost)
            request.answered = True
        elif deadline <= until:
            self.time_out(request)

    async def wait_lost(self, until: float) -> None:
        """Block until the connection was lost, or until the deadline *until*."""
        self._check_usable()
        self._wait_until(lambda: self._lost is not None, until)

    def _check_usable(self) -> None:
        """Check that this process and this thread may use the connection now.

        :raises ConnectionLost: the connection was opened before a fork.
        :raises InvalidArgument: a signal handler has interrupted a call of this thread.
        """
        if self.forked:
            self.raise_if_lost()
        nested = self._lock_is_mine()
        if self._waiters:
            me = threading.get_ident()
            nested = nested or any(waiter.thread == me for waiter in self._waiters[:])
        if nested:
            raise InvalidArgument(
                "a signal handler has called a client in the middle of another call",
                hint="use a client of its own in the handler",
            )

    def _lock_is_mine(self) -> bool:
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]  # as `Condition` does

    def _wait_until(self, ready: Callable[[], bool], until: float) -> bool:
        """Block until *ready* returns true, or until *until*; return whether it is true."""
        waiter = _Waiter(ready)
        try:
            self._waiters.append(waiter)
            return self._wait_as(waiter, until)
        finally:
            try:  # noqa: SIM105 - an interrupt could come before the body of `suppress`
                self._waiters.remove(waiter)
            except ValueError:
                pass
            for leader in self._waiters[:1]:
                leader.wake()
            self._close_socket()

    def _wait_as(self, waiter: _Waiter, until: float) -> bool:
        while True:
            if self._actions:
                self._run_actions()
            if self._unhandled or self._lost is not None:
                with self._lock:
                    self._handle_read()
                self._wake_ready(waiter)
            if waiter.ready():
                return True
            if self._lost is not None:
                return False
            remaining_s = until - time.monotonic()
            leads = self._waiters[0] is waiter
            if remaining_s <= 0:
                if leads:  # the data may have arrived in time, but is read late
                    self._read_all(waiter)
                return waiter.ready()
            if leads:
                self._lead(waiter, min(remaining_s, _LEADER_S_MAX))
            elif self._outbox.unsent_bytes:
                self._poll(select.POLLOUT, min(remaining_s, _FOLLOWER_S_MAX))
            else:
                waiter.wait(min(remaining_s, _FOLLOWER_S_MAX))

    def _lead(self, leader: _Waiter, s_max: float) -> None:
        """Wait for data, read it, and wake the followers whose requests have changed."""
        unsent = self._outbox.unsent_bytes
        self._poll(select.POLLIN | select.POLLOUT if unsent else select.POLLIN, s_max)
        with self._lock:
            self._read_once()
        self._wake_ready(leader)

    def _wake_ready(self, caller: _Waiter) -> None:
        if len(self._waiters) > 1:
            for waiter in self._waiters[:]:
                if waiter is not caller and waiter.ready():
                    waiter.wake()

    def _read_arrived(self) -> None:
        """Handle the data that have arrived, unless a thread waits for data."""
        if self._lost is None and not self._waiters and self._may_read():
            self._wait_until(_never, 0.0)

    def _may_read(self) -> bool:
        """Return whether there is anything to read or to continue; this costs less than a read."""
        if self._unhandled or self._actions:
            return True
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except ValueError:  # another thread has closed it
            return True
        return bool(poll.poll(0))

    def _poll(self, events: int, s_max: float) -> None:
        poll = select.poll()
        poll.register(self._socket, events)
        if self._spinning is None:
            poll.poll(math.ceil(s_max * 1000))
        else:
            self._spinning.poll(poll.poll, math.ceil(s_max * 1000))
        if events & select.POLLOUT:
            with self._lock:
                self._flush()

    def _read_all(self, leader: _Waiter) -> None:
        """Handle all data that have arrived."""
        with self._lock:
            while self._lost is None and self._read_once():
                pass
        self._wake_ready(leader)

    def _read_once(self) -> bool:
        """Read once without waiting, and handle the messages; return whether there was data."""
        if self._unhandled:
            self._handle_read()
        self._unhandled = True
        try:
            self._last_read.extend(islice(self._reads, 1))
        except BlockingIOError:
            self._unhandled = False
            return False
        except OSError as exc:
            self.lose(read_error(self.path, exc))
        self._handle_read()
        return True

    def _handle_read(self) -> None:
        """Handle the last read, as far as that has not been done."""
        if self._lost is not None:
            self.lose(self._lost)
        elif self._last_read:
            self.receive(*self._last_read[0])
        self._unhandled = False

    def run_soon(self, action: Callable[[], object]) -> None:
        """Run *action* now, or after the change that this thread is making to the connection."""
        if self._lost is None and not self.forked:
            self._actions.append(action)
            if not self._lock_is_mine():
                self._run_actions()

    def _run_actions(self) -> None:
        while self._actions:
            with self._lock:
                if self._actions:
                    self._actions[0]()
                    self._actions.popleft()

    def _notify(self, request: InFlight | None) -> None:
        """Do nothing: the leader checks after each read which threads to wake."""

    # Changes without a wait.

    def grant_credit(self, request: InFlight, events: int) -> None:
        """Allow the daemon to send *events* more events of *request*."""
        if not self.forked:
            with self._lock:
                super().grant_credit(request, events)

    def post_request(self, call: str, params: Any) -> None:
        """Send a request without waiting for its answer, unless too many are in flight."""
        if not self.forked:
            with self._lock:
                super().post_request(call, params)

    def abandon_request(self, request: InFlight) -> None:
        """Cancel *request* in the daemon; its events are dropped."""
        if not self.forked:
            with self._lock:
                super().abandon_request(request)

    def time_out(self, request: InFlight) -> None:
        """End *request* because its deadline has passed."""
        with self._lock:
            super().time_out(request)
