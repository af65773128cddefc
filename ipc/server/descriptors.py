"""Descriptors that clients pass: their numbers by user, the part of the limit of open files that
they may use, and the threads that operate on them.

An operation on such a descriptor takes as long as its sender wants: the last close of a TCP socket
with SO_LINGER, or the read or close of a file whose FUSE server does not answer. So no operation
runs on the event loop. A user's operations run in a thread of that user. A second thread closes the
user's connections, as unread messages hold descriptors, too, which the kernel then closes.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import stat
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import anyio

from ...backends.errors import Busy, InvalidArgument, ProtocolError, Timeout, TooLarge
from ...backends.fd_frames import SCM_MAX_FD, close_descriptor, unread_descriptors
from ..messages import TENSOR_BYTES_MAX

_LIMIT_MAX = 1 << 20
FILES_RESERVED = 768
"""Files for workers (six each while they start), embeddings of images (256 of a model that reads
them), the journal, the log and the listeners.
"""
DESCRIPTORS_MIN = 64


def raise_open_files_limit() -> None:
    """Raise this process's limit of open files as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, _LIMIT_MAX)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(OSError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def open_files_limit() -> int:
    """Return this process's limit of open files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _LIMIT_MAX if limit == resource.RLIM_INFINITY else limit


def descriptors_max(connections_max: int) -> int:
    """Return how many descriptors of clients the daemon may hold besides *connections_max*
    connections and its own files. A connection whose client sends no more has two descriptors.
    """
    return max(DESCRIPTORS_MIN, open_files_limit() - 2 * connections_max - FILES_RESERVED)


OPERATION_S_MAX = 30.0
"""The time that a call waits for an operation on its descriptor."""
INTERRUPT_S, INTERRUPT_S_MIN = 0.01, 0.001
"""Interval at which closes are interrupted, with few and with many connections to close, because a
program can make sockets that linger for years. `close_descriptor` needs no interrupt.
"""
MANY_CLOSING = 16
LINGER_S, LINGERING_MAX = 1.0, 64
"""The time for which the sockets of ended connections stay open, and how many of all users at once.
A client that writes meanwhile can still read why its connection has ended. Node.js, for example,
closes a socket at the first write that fails, and drops all unread data.
"""
USERS_WITH_THREADS = 256
"""Users with threads of their own; further users share two."""
_SHARED = -1
ResultT = TypeVar("ResultT")


class UserDescriptors:
    """The descriptors that one user's programs have passed, until they are closed."""

    def __init__(self, everybody: ClientDescriptors, name: str):
        self.count = 0
        self.sockets_closing = 0
        self._everybody = everybody
        self._lock = threading.Lock()
        self._operations = BlockingThread(f"descriptors-{name}")
        self._sockets = BlockingThread(f"sockets-{name}")

    async def run(self, operation: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Run an operation on a descriptor, and return its result.

        :raises Timeout: the operation takes longer than `OPERATION_S_MAX`.
        """
        future: Future[ResultT] = Future()
        self._operations.submit(partial(_fulfil, future, operation, arguments))
        try:
            with anyio.fail_after(OPERATION_S_MAX):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise Timeout(
                f"the descriptor could not be read within {OPERATION_S_MAX:g} s",
                hint="pass a memfd, or a file on a file system that answers",
                data={"seconds": OPERATION_S_MAX},
            ) from None

    def note_received(self, count: int) -> None:
        """Count descriptors that have arrived."""
        with self._lock:
            self.count += count

    def check_call(self) -> None:
        """Check that a call may keep the descriptors that came with it.

        :raises Busy: the user, or all users together, have passed too many.
        """
        self._check(0)

    def check_read(self) -> None:
        """Check that another message may be read. Calls that hold too many descriptors are refused
        before; more stay open only if they cannot be closed.

        :raises Busy: too many of the user's descriptors are open.
        """
        if self.count:
            self._check(SCM_MAX_FD)

    def _check(self, reserve: int) -> None:
        limits = self._everybody
        if self.count > limits.user_max + reserve:
            raise Busy(
                f"programs of your user have passed {self.count} descriptors that are still open",
                hint="wait for the answers to the requests with files, or raise"
                " descriptors-user-max",
                data={"descriptors_user_max": limits.user_max, "retry_after_s": 1.0},
            )
        if limits.count > limits.total_max + reserve:
            raise Busy(
                f"all programs together have passed {limits.count} descriptors that are still open",
                hint="try again later, or raise the daemon's limit of open files (LimitNOFILE=)",
                data={"descriptors_max": limits.total_max, "retry_after_s": 1.0},
            )

    def close(self, descriptors: Sequence[int]) -> None:
        """Close descriptors that were counted, after the operations on them."""
        if descriptors:
            self._operations.submit(partial(self._close, descriptors), can_interrupt=True)
            self._everybody.interrupt_soon()

    def end_connection(self, sock: socket.socket, *, has_goodbye: bool) -> None:
        """Close the socket of a connection. If the client *has_goodbye* to read, close it after
        `LINGER_S`, unless too many sockets wait for that. Data that the client still writes is
        not read.
        """
        directions = socket.SHUT_WR if has_goodbye else socket.SHUT_RDWR
        with suppress(OSError):  # the client has closed it
            sock.shutdown(directions)
        lingering = self._everybody.lingering
        if has_goodbye and len(lingering) < LINGERING_MAX:
            timer = asyncio.get_running_loop().call_later(LINGER_S, self.end_lingering, sock)
            lingering[sock] = self, timer
        else:
            self._close_soon(sock)

    def end_lingering(self, sock: socket.socket) -> None:
        """Close the socket of a connection that has ended."""
        del self._everybody.lingering[sock]
        self._close_soon(sock)

    def _close_soon(self, sock: socket.socket) -> None:
        with self._lock:
            self.sockets_closing += 1
        self._sockets.submit(partial(self._close_socket, sock), can_interrupt=True)
        self._everybody.interrupt_soon()

    def interrupt_closes(self) -> bool:
        """Interrupt the closes under way; return whether there are any."""
        return self._operations.interrupt() | self._sockets.interrupt()

    def _close(self, descriptors: Sequence[int]) -> None:
        for descriptor in descriptors:
            with suppress(OSError):  # it is closed all the same
                close_descriptor(descriptor)
            with self._lock:
                self.count -= 1

    def _close_socket(self, sock: socket.socket) -> None:
        with suppress(OSError):
            if self.count < SCM_MAX_FD:
                # Else the user's descriptors cannot be closed, and there may be no place for more.
                for descriptor in unread_descriptors(sock):
                    with suppress(OSError):
                        close_descriptor(descriptor)
            sock.close()
        with self._lock:
            self.sockets_closing -= 1


def _fulfil(
    future: Future[ResultT], operation: Callable[..., ResultT], arguments: Sequence[Any]
) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = operation(*arguments)
    except Exception as exc:  # it belongs to the call that waits
        future.set_exception(exc)
    else:
        future.set_result(result)


class ClientDescriptors:
    """The passed descriptors of all users: *user_max* each, *total_max* together. Lives on the
    event loop.
    """

    def __init__(self, user_max: int = 256, total_max: int = 1 << 20):
        self.user_max, self.total_max = user_max, total_max
        self.lingering: dict[socket.socket, tuple[UserDescriptors, asyncio.TimerHandle]] = {}
        """The sockets that are closed later, with the timers for that."""
        self._users: WeakValueDictionary[int, UserDescriptors] = WeakValueDictionary()
        self._interrupts = False

    def of_user(self, uid: int) -> UserDescriptors:
        """Return a user's descriptors."""
        if uid not in self._users and len(self._users) >= USERS_WITH_THREADS:
            uid = _SHARED
        user = self._users.get(uid)
        if user is None:
            user = self._users[uid] = UserDescriptors(self, str(uid))
        return user

    @property
    def count(self) -> int:
        """The descriptors that are not closed yet."""
        return sum(user.count for user in list(self._users.values()))

    @property
    def sockets_closing(self) -> int:
        """The connections whose sockets are not closed yet."""
        return sum(user.sockets_closing for user in list(self._users.values()))

    def end_lingering(self) -> None:
        """Close now the sockets that would be closed later."""
        for sock, (user, timer) in list(self.lingering.items()):
            timer.cancel()
            user.end_lingering(sock)

    def interrupt_soon(self) -> None:
        """Interrupt closes that take long, until all are done."""
        if not self._interrupts:
            self._interrupts = True
            many = self.sockets_closing >= MANY_CLOSING
            interval_s = INTERRUPT_S_MIN if many else INTERRUPT_S
            asyncio.get_running_loop().call_later(interval_s, self._interrupt)

    def _interrupt(self) -> None:
        self._interrupts = False
        closing = [user.interrupt_closes() for user in list(self._users.values())]
        if any(closing):
            self.interrupt_soon()


IDLE_S = 2.0
"""Time after which a thread without operations ends."""
INTERRUPT = signal.SIGURG
"""The kernel ignores it in a process that has not called `allow_interrupts`."""

Operation = Callable[[], None]


def allow_interrupts() -> None:
    """Let `BlockingThread.interrupt` end system calls of this process; call it in the main
    thread.
    """
    signal.signal(INTERRUPT, lambda *_: None)


class BlockingThread:
    """Runs operations in their order, in a thread that exists while there are any."""

    def __init__(self, name: str):
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Operation, bool]] = deque()
        self._thread: threading.Thread | None = None
        self._can_interrupt = False

    def submit(self, operation: Operation, *, can_interrupt: bool = False) -> None:
        """Run *operation*, which raises nothing, after those submitted before."""
        with self._changed:
            self._waiting.append((operation, can_interrupt))
            if self._thread is not None:
                self._changed.notify()
                return
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no more threads now: the next operation tries again
                self._thread = None

    def interrupt(self) -> bool:
        """Send a signal to the thread if it runs an operation that may be interrupted. Return
        whether it runs one, or has other operations to run.

        The signal ends the wait of a socket's last close, not that of an unanswered FUSE request.
        """
        with self._changed:
            if self._thread is None:
                return False
            if self._can_interrupt:
                assert self._thread.ident is not None, "it was started"
                signal.pthread_kill(self._thread.ident, INTERRUPT)
            return self._can_interrupt or bool(self._waiting)

    def _run(self) -> None:
        while (operation := self._next_operation()) is not None:
            operation()
            del operation  # it may hold the last reference to this thread's owner

    def _next_operation(self) -> Operation | None:
        with self._changed:
            self._can_interrupt = False
            if not self._changed.wait_for(lambda: self._waiting, IDLE_S):
                self._thread = None
                return None
            operation, self._can_interrupt = self._waiting.popleft()
            return operation


DESCRIPTORS_MAX = 16
"""Descriptors of a connection that no call has claimed."""


class UnclaimedDescriptors:
    """Descriptors in the order in which a client has passed them. Lives on the event loop."""

    def __init__(self, user: UserDescriptors):
        self._user = user
        self._descriptors: deque[int] = deque()

    def add(self, descriptors: Sequence[int]) -> None:
        """Add descriptors that have arrived.

        :raises ProtocolError: too many descriptors are unclaimed.
        """
        self._user.note_received(len(descriptors))
        self._descriptors.extend(descriptors)
        if len(self._descriptors) > DESCRIPTORS_MAX:
            raise ProtocolError(f"more than {DESCRIPTORS_MAX} descriptors that no call claims")

    def claim(self, count: int) -> list[int]:
        """Return the first *count* descriptors; the caller closes them.

        :raises InvalidArgument: fewer descriptors have arrived.
        """
        if len(self._descriptors) < count:
            raise InvalidArgument(
                f"the call refers to {count} descriptors, but {len(self._descriptors)} were passed",
                hint="send them with the frame, by SCM_RIGHTS",
            )
        return [self._descriptors.popleft() for _ in range(count)]

    def close(self) -> None:
        """Close the descriptors, off the event loop."""
        self._user.close(tuple(self._descriptors))
        self._descriptors.clear()


# These run in the thread of the user who passed the descriptor.


def file_size(descriptor: int) -> int:
    """Return the size of the file in a descriptor.

    :raises InvalidArgument: the descriptor is not that of a file, or cannot be read.
    """
    try:
        status = os.fstat(descriptor)
    except OSError as exc:
        raise _unreadable(exc) from None
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgument("the descriptor is not that of a file", hint="pass a file or a memfd")
    return status.st_size


def tensor_size(descriptor: int) -> int:
    """Return the size of the tensor in a descriptor.

    :raises InvalidArgument: the descriptor is not that of a file, or cannot be read.
    :raises TooLarge: the tensor exceeds the limit.
    """
    size = file_size(descriptor)
    if size > TENSOR_BYTES_MAX:
        raise TooLarge(
            f"a tensor of {size} bytes; the limit is {TENSOR_BYTES_MAX}",
            data={"bytes": size, "tensor_bytes_max": TENSOR_BYTES_MAX},
        )
    return size


def read_tensor(descriptor: int, size: int, offset: int = 0) -> bytes:
    """Return up to *size* bytes of the tensor in a descriptor.

    :raises InvalidArgument: the descriptor cannot be read.
    """
    try:
        return os.pread(descriptor, size, offset)
    except OSError as exc:
        raise _unreadable(exc) from None


def content_size(descriptor: int, bytes_max: int) -> int:
    """Return the size of an image or a sound in a descriptor.

    :raises InvalidArgument: the descriptor is not that of a file, or cannot be read.
    :raises TooLarge: there are more than *bytes_max*.
    """
    size = file_size(descriptor)
    if size > bytes_max:
        raise TooLarge(
            f"this has {size} bytes; the limit is {bytes_max}",
            hint="send a smaller one, or raise media-bytes-max",
            data={"bytes": size, "media_bytes_max": bytes_max},
        )
    return size


def read_content(descriptor: int, size: int) -> bytes:
    """Return the *size* bytes of a descriptor whose size was checked.

    :raises InvalidArgument: the descriptor cannot be read, or has another size by now.
    """
    data = bytearray()
    while len(data) <= size:
        part = read_tensor(descriptor, size + 1 - len(data), len(data))
        if not part:
            break
        data += part
    if len(data) != size:
        raise InvalidArgument(
            "this has changed while it was read", hint="pass a file that nothing writes to"
        )
    return bytes(data)


def _unreadable(exc: OSError) -> InvalidArgument:
    return InvalidArgument(f"the descriptor cannot be read: {exc.strerror}")
