"""The daemon's end of the socket: accepts, reads requests, runs each, writes what it answers.

Knows nothing of sessions and models: a `Handler` does the calls. Everything runs on one event
loop; a `Connection` is owned by its reader task, and its outbox may be written by anybody on it.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import stat
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import anyio
import anyio.abc
import msgspec

from ..backends.errors import (
    BackendError,
    Busy,
    Cancelled,
    InferdError,
    InvalidArgument,
    ProtocolError,
    UnsupportedOperation,
    VersionMismatch,
)
from ..backends.params import nearest
from .frames import FrameReader, check_nesting, pack
from .messages import CALLS, CREDIT_MAX, PROTOCOL_VERSION, ClientHello, Kind, ServerHello
from .peer import Peer, peer_of

__all__ = ("Connection", "Handler", "Request", "Server", "UnixServer")

DESCRIPTORS_MAX = 16
HELLO_TIMEOUT_S = 10.0
ACCEPT_PAUSE_S = 0.1
OUTBOX_PAUSE_BYTES = 1 << 20
"""A client that leaves this much unread is not read from either."""
OUTBOX_BYTES_MAX = 64 << 20
_READ_BYTES = 1 << 16

_envelope = msgspec.msgpack.Decoder(list[msgspec.Raw])
_kind = msgspec.msgpack.Decoder(int)
_name = msgspec.msgpack.Decoder(str)
_hello = msgspec.msgpack.Decoder(ClientHello)
_params = {name: msgspec.msgpack.Decoder(call.params) for name, call in CALLS.items()}


class Request:
    """One call under way. `emit` sends events before the reply; `on_credit` hears of credit."""

    def __init__(self, connection: Connection, number: int, call: str, params: Any):
        self.connection, self.number, self.call, self.params = connection, number, call, params
        self.scope = anyio.CancelScope()
        self.on_credit: Callable[[int], None] = lambda _: None

    def emit(self, event: Any, *, flush: bool = True) -> None:
        """Send an event; without *flush* it goes with the next `Connection.flush`."""
        self.connection.send([Kind.EVENT, self.number, event], flush=flush)


class Handler(Protocol):
    """What does the calls."""

    def hello(self) -> ServerHello:
        """Return the daemon's first frame."""

    async def call(self, request: Request) -> Any:
        """Do a call and return its result struct.

        :raises InferdError: answered as it is.
        """

    def left(self, connection: Connection) -> None:
        """Forget a connection that has ended; its requests are already cancelled."""

    def refused(self, connection: Connection, error: InferdError) -> None:
        """Note that a connection was closed because of *error*."""

    def accept_failed(self, error: OSError) -> None:
        """Note that a connection could not be accepted."""

    def failed(self, request: Request, error: Exception) -> None:
        """Note that a call failed in a way that nobody thought of."""


class Connection:
    """One client: its requests in flight and its outbox."""

    def __init__(self, sock: socket.socket, peer: Peer, requests_max: int):
        self.peer = peer
        self.requests: dict[int, Request] = {}
        self.software = ""
        self.descriptors: deque[int] = deque()
        self.requests_max = requests_max
        self._sock = sock
        self._unsent = bytearray()
        self._writable = anyio.Event()
        self._drained = anyio.Event()
        self._open = True

    def __repr__(self) -> str:
        return f"<Connection of uid {self.peer.uid} [{len(self.requests)} requests]>"

    def send(self, message: Any, *, flush: bool = True) -> None:
        """Send a message, or keep what the socket does not take; a client too slow is cut off."""
        if not self._open:
            return
        self._unsent += pack(message)
        if flush:
            self.flush()

    def flush(self) -> None:
        """Send what the socket takes now; the rest goes when it can be written again."""
        try:
            while self._unsent and self._open:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            self._writable.set()
            if len(self._unsent) > OUTBOX_BYTES_MAX:
                self.cut()
        except OSError:
            self.cut()

    def cut(self) -> None:
        """Stop writing and reading: the reader task sees the end and cleans up."""
        if self._open:
            self._open = False
            self._unsent.clear()
            self._writable.set()
            self._drained.set()
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # the other end has gone already

    async def write_on(self) -> None:
        """Write what did not fit, for as long as the connection is open."""
        while self._open:
            await self._writable.wait()
            self._writable = anyio.Event()
            while self._unsent and self._open:
                await anyio.wait_writable(self._sock)
                self.flush()
            self._drained.set()
            self._drained = anyio.Event()

    async def receive(self) -> bytes:
        """Return some bytes, none at the end; waits while too much is unread by the client."""
        while len(self._unsent) > OUTBOX_PAUSE_BYTES and self._open:
            await self._drained.wait()
        while self._open:
            await anyio.wait_readable(self._sock)
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(
                    _READ_BYTES, socket.CMSG_SPACE(4 * DESCRIPTORS_MAX)
                )
            except BlockingIOError:
                continue
            except OSError:
                return b""
            self._take_descriptors(ancillary)
            if len(self.descriptors) > DESCRIPTORS_MAX or flags & socket.MSG_CTRUNC:
                raise ProtocolError(f"more than {DESCRIPTORS_MAX} descriptors that no call takes")
            return data
        return b""

    def _take_descriptors(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self.descriptors.extend(fds)

    def claim_descriptor(self) -> int:
        """Return the descriptor that came first of those not yet claimed."""
        if not self.descriptors:
            raise InvalidArgument(
                "the call names a descriptor, but none was passed",
                hint="send it beside the frame with SCM_RIGHTS",
            )
        return self.descriptors.popleft()

    def close(self) -> None:
        """Close the socket and what was passed and not claimed."""
        self.cut()
        self._sock.close()
        while self.descriptors:
            os.close(self.descriptors.popleft())


class Server:
    """Serves connections on a listening socket for as long as its task group runs."""

    def __init__(self, handler: Handler, *, connections_max: int = 256, requests_max: int = 256):
        self.connections: set[Connection] = set()
        self._handler = handler
        self._connections_max = connections_max
        self._requests_max = requests_max

    async def serve(
        self,
        listener: socket.socket,
        *,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept connections for ever."""
        listener.setblocking(False)
        async with anyio.create_task_group() as group:
            task_status.started()
            while True:
                await anyio.wait_readable(listener)
                try:
                    sock, _ = listener.accept()
                except BlockingIOError:
                    continue
                except OSError as exc:  # out of descriptors: wait for some to come back
                    self._handler.accept_failed(exc)
                    await anyio.sleep(ACCEPT_PAUSE_S)
                    continue
                sock.setblocking(False)
                group.start_soon(self._serve_one, sock)

    async def _serve_one(self, sock: socket.socket) -> None:
        connection = Connection(sock, peer_of(sock), self._requests_max)
        self.connections.add(connection)
        try:
            connection.send([Kind.HELLO, self._handler.hello()])
            self._check_room()
            async with anyio.create_task_group() as group:
                group.start_soon(connection.write_on)
                await self._read(connection, group)
                group.cancel_scope.cancel()
        except InferdError as exc:
            self._goodbye(connection, exc)
        except BaseExceptionGroup as group_exc:
            self._goodbye(connection, _only_refusal(group_exc))
        finally:
            self.connections.discard(connection)
            self._handler.left(connection)
            connection.close()

    def _check_room(self) -> None:
        if len(self.connections) > self._connections_max:
            raise Busy(
                f"{self._connections_max} connections are open: no more are taken",
                hint="share connections, or raise connections_max",
                data={"connections_max": self._connections_max, "retry_after_s": 1.0},
            )

    def _goodbye(self, connection: Connection, error: InferdError) -> None:
        connection.send([Kind.GOODBYE, error.to_wire()])
        self._handler.refused(connection, error)

    async def _read(self, connection: Connection, group: anyio.abc.TaskGroup) -> None:
        frames, greeted = FrameReader(), False
        with anyio.move_on_after(HELLO_TIMEOUT_S) as hello_scope:
            while data := await connection.receive():
                for frame in frames.feed(data):
                    if greeted:
                        self._take(connection, frame, group)
                    else:
                        _greet(connection, frame)
                        greeted = True
                        hello_scope.deadline = float("inf")
        if hello_scope.cancelled_caught:
            raise ProtocolError(f"no hello within {HELLO_TIMEOUT_S:g} s")

    def _take(self, connection: Connection, frame: bytes, group: anyio.abc.TaskGroup) -> None:
        """Take one frame of a connection that has said hello.

        :raises ProtocolError: it cannot be read; the connection ends.
        """
        kind, items = _open_frame(frame)
        if kind == Kind.CREDIT and len(items) >= 3:
            request = connection.requests.get(_integer(items[1]))
            if request is not None:
                request.on_credit(max(0, min(_integer(items[2]), CREDIT_MAX)))
        elif kind == Kind.REQUEST and len(items) >= 4:
            self._start(connection, items, group)
        else:
            raise ProtocolError(f"a frame of kind {kind} with {len(items)} items")

    def _start(
        self, connection: Connection, items: list[msgspec.Raw], group: anyio.abc.TaskGroup
    ) -> None:
        number = _integer(items[1])
        if number in connection.requests:
            raise ProtocolError(f"request id {number} is in use already")
        try:
            if len(connection.requests) >= connection.requests_max:
                raise Busy(
                    f"{connection.requests_max} requests are in flight on this connection",
                    data={"requests_max": connection.requests_max, "retry_after_s": 0.1},
                )
            request = _decode_request(connection, number, items)
        except InferdError as exc:
            connection.send([Kind.ERROR, number, exc.to_wire()])
            return
        connection.requests[number] = request
        group.start_soon(self._run, request)

    async def _run(self, request: Request) -> None:
        connection = request.connection
        try:
            with request.scope:
                result = await self._handler.call(request)
                connection.requests.pop(request.number, None)
                connection.send([Kind.REPLY, request.number, result])
            if request.scope.cancelled_caught:
                raise Cancelled("the request was cancelled")
        except InferdError as exc:
            self._refuse(request, exc)
        except Exception as exc:  # our own bug: the one place that catches everything
            self._handler.failed(request, exc)
            self._refuse(request, BackendError(f"{request.call} failed inside the daemon: {exc!r}"))
        finally:
            connection.requests.pop(request.number, None)

    def _refuse(self, request: Request, error: InferdError) -> None:
        request.connection.requests.pop(request.number, None)
        request.connection.send([Kind.ERROR, request.number, error.to_wire()])


class UnixServer:
    """A listening socket at a path: made with a mode, taken over from a dead daemon, removed."""

    def __init__(self, path: str, mode: int = 0o600):
        self.path, self._mode = path, mode
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._identity: tuple[int, int] | None = None
        self._lock_fd = -1

    def bind(self, backlog: int = 128) -> None:
        """Bind and listen. A socket that nobody answers is a dead daemon's, and is taken over.

        :raises Busy: a daemon answers there.
        """
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        self._lock()
        self._remove_dead()
        old = os.umask(0o777 & ~self._mode)
        try:
            self.socket.bind(self.path)
        except OSError as exc:
            raise InvalidArgument(
                f"cannot listen on {self.path}: {exc.strerror or exc}",
                hint="choose another path with --socket or INFERD_SOCKET",
            ) from None
        finally:
            os.umask(old)
        status = os.stat(self.path)
        self._identity = (status.st_dev, status.st_ino)
        self.socket.listen(backlog)

    def _lock(self) -> None:
        """Take the lock beside the socket: of two daemons that start at once, one gets it."""
        self._lock_fd = os.open(self.path + ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._answered() from None

    def _answered(self) -> Busy:
        return Busy(
            f"a daemon answers on {self.path} already",
            hint="use it, stop it with `inferd stop`, or choose another --socket",
        )

    def _remove_dead(self) -> None:
        if not os.path.lexists(self.path):
            return
        if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
            raise InvalidArgument(
                f"{self.path} is there and is no socket",
                hint="choose another path with --socket or INFERD_SOCKET",
            )
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            probe.connect(self.path)
        except ConnectionRefusedError:
            os.unlink(self.path)
        except OSError as exc:
            raise InvalidArgument(
                f"{self.path} is there and is no socket of a daemon: {exc.strerror or exc}",
                hint="remove it, or choose another path with --socket",
            ) from None
        else:
            raise self._answered()
        finally:
            probe.close()

    def close(self) -> None:
        """Close, and remove the path if it is still this socket's."""
        self.socket.close()
        try:
            status = os.stat(self.path)
            if (status.st_dev, status.st_ino) == self._identity:
                os.unlink(self.path)
                os.unlink(self.path + ".lock")
        except OSError:
            return  # somebody removed it before
        finally:
            if self._lock_fd >= 0:
                os.close(self._lock_fd)


def _only_refusal(group: BaseExceptionGroup[BaseException]) -> InferdError:
    """Return the refusal that ended a connection, or raise *group* on: it is our own bug."""
    refusals, rest = group.split(InferdError)
    if rest is not None:
        raise group
    first: BaseException | None = refusals
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    assert isinstance(first, InferdError)
    return first


def _open_frame(frame: bytes) -> tuple[int, list[msgspec.Raw]]:
    check_nesting(frame)
    try:
        items = _envelope.decode(frame)
        return _kind.decode(items[0]), items
    except (msgspec.DecodeError, RecursionError, IndexError) as exc:
        raise ProtocolError(f"no msgpack array of the protocol: {exc}") from None


def _integer(raw: msgspec.Raw) -> int:
    try:
        return _kind.decode(raw)
    except msgspec.DecodeError as exc:
        raise ProtocolError(f"no integer where one belongs: {exc}") from None


def _greet(connection: Connection, frame: bytes) -> None:
    """Read the client's hello.

    :raises VersionMismatch: it speaks another major version.
    """
    kind, items = _open_frame(frame)
    if kind != Kind.HELLO or len(items) < 2:
        raise ProtocolError("the first frame is no hello")
    try:
        hello = _hello.decode(items[1])
    except msgspec.DecodeError as exc:
        raise ProtocolError(f"the hello cannot be read: {exc}") from None
    if hello.protocol[0] != PROTOCOL_VERSION[0]:
        ours, theirs = PROTOCOL_VERSION[0], hello.protocol[0]
        raise VersionMismatch(
            f"you speak version {theirs} of the protocol, this daemon version {ours}",
            data={"protocol": list(PROTOCOL_VERSION)},
        )
    connection.software = hello.software[:200]


def _decode_request(connection: Connection, number: int, items: list[msgspec.Raw]) -> Request:
    try:
        call = _name.decode(items[2])
        if call not in _params:
            raise UnsupportedOperation(f"there is no call {call!r}", hint=nearest(call, CALLS))
        params = _params[call].decode(items[3])
    except (msgspec.DecodeError, RecursionError) as exc:
        raise InvalidArgument(f"the call's params do not fit: {exc}") from None
    for part in _parts_with_descriptors(params):
        part.fd = connection.claim_descriptor()
    return Request(connection, number, call, params)


def _parts_with_descriptors(params: Any) -> list[Any]:
    """Return the parts of a call's params that name a descriptor, in the order of the frame."""
    tensors = [tensor for _, tensor in getattr(params, "inputs", None) or ()]
    parts = [params, getattr(params, "tensor", None), *tensors]
    return [part for part in parts if getattr(part, "fd", -1) >= 0]
