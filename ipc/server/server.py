"""The server of the protocol: serving connections, reading requests, running and answering them.

A `Handler` runs the calls; this module knows nothing of sessions and models. Everything runs on
one event loop. A `ServerConnection` is owned by its reader task; any task may send over it. Frames
that have begun to arrive are bounded: their bytes per user and in all, and their time.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol, TypeAlias

import anyio
import anyio.abc
import anyio.lowlevel
import msgspec

from ...backends.errors import BackendError, Busy, Cancelled, InferdError, ProtocolError
from ...wire.frames import FrameReader
from ..messages import CancelParams, ClientHello, Kind, ServerHello
from ..peer import peer_of
from .connection import (
    Request,
    ServerConnection,
    decode_integer,
    decode_request,
    open_frame,
    pack_error,
    pack_reply,
)
from .connection_places import Places
from .descriptors import ClientDescriptors
from .fairness import WITHOUT_TASK, FairStarts, LoopTime, SharedLimit
from .listener import Acceptor
from .request_bytes import SMALL_FRAME_BYTES, RequestBytes, Reserve, request_bytes
from .socket_connection import (
    HELLO_TIMEOUT_S,
    OUTBOXES_BYTES_MAX,
    SOFTWARE_CHARACTERS,
    ArrivalTimer,
    Pause,
    check_names,
    read_hello,
)

INCOMPLETE_BYTES_MAX = 64 << 20
"""Bytes of all incomplete frames. A user has at most as many as are free; alone, half of all."""
FRAME_S_MAX = 30.0
"""Time for one frame to arrive. The largest takes milliseconds on this machine."""


class IncompleteFrames:
    """The incomplete frames, one per connection at most. Lives on the daemon's event loop.

    A frame counts with its announced size from its first bytes on. If a frame does not fit, nothing
    more is read from its connection until frames of its user, or of others, have ended.
    """

    def __init__(self, bytes_max: int = INCOMPLETE_BYTES_MAX, seconds_max: float = FRAME_S_MAX):
        self.shares = SharedLimit(bytes_max)
        self._seconds_max = seconds_max
        self._sizes: dict[ServerConnection, int] = {}
        self._timers: dict[ServerConnection, ArrivalTimer] = {}
        """The timer of each connection whose frame is being read."""
        self._waiting: dict[ServerConnection, None] = {}
        """Connections that are not read from, in the order in which they began to wait."""

    def begin_frame(self, connection: ServerConnection, size: int) -> None:
        """Count a frame of *size* bytes that has not arrived completely, if it is not counted."""
        if self._sizes.get(connection) == size:
            return
        self.end_frame(connection)
        self._sizes[connection] = size
        if self.shares.fits(connection.uid, size):
            self._read_frame(connection)
        else:
            self._waiting[connection] = None
            connection.pause_reading(Pause.FRAME)

    def _read_frame(self, connection: ServerConnection) -> None:
        self.shares.take_amount(connection.uid, self._sizes[connection])
        self._start_timer(connection)

    def _start_timer(self, connection: ServerConnection) -> None:
        error = ProtocolError(
            f"a frame has not arrived completely within {self._seconds_max:g} s",
            hint="send a frame at once, and read replies meanwhile",
        )
        self._timers[connection] = ArrivalTimer(connection, self._seconds_max, error)

    def end_frame(self, connection: ServerConnection) -> None:
        """Forget a connection's frame, because it is complete or the connection has ended."""
        size = self._sizes.pop(connection, 0)
        if not size:
            return
        if connection in self._waiting:
            del self._waiting[connection]
            return
        self._timers.pop(connection).cancel()
        self.shares.take_amount(connection.uid, -size)
        for waiting in tuple(self._waiting):
            if self.shares.fits(waiting.uid, self._sizes[waiting]):
                del self._waiting[waiting]
                self._read_frame(waiting)
                waiting.resume_reading(Pause.FRAME)


class NeedsTask(Exception):
    """A call that has begun without a task has to be run again in a task."""


Finish: TypeAlias = Callable[[], Any]
"""Returns the result of a call that has ended, or raises its error, or `NeedsTask`."""


class Handler(Protocol):
    """The owner of the calls, which is also notified of the end of connections."""

    def server_hello(self) -> ServerHello:
        """Return the daemon's first frame."""

    async def run_call(self, request: Request) -> Any:
        """Run a call and return its result struct.

        :raises InferdError: the error to send as the answer.
        """

    def runs_at_once(self, request: Request) -> bool:
        """Return whether the request's call never waits, so that `run_at_once` can run it."""

    def run_at_once(self, request: Request) -> Any:
        """Run a call that never waits, and return its result struct.

        :raises InferdError: the error to send as the answer.
        """

    def may_begin_call(self, request: Request) -> bool:
        """Return whether a call of this kind may go on without a task."""

    def begin_call(self, request: Request, end: Callable[[Finish], None]) -> bool:
        """Begin a call that goes on without a task, if that is possible; return whether it has
        begun. At its end *end* is called, later and once, and then the connection is flushed, with
        other answers of the same moment if there are some. `request.on_cancel` cancels it.
        """

    def connection_ended(self, connection: ServerConnection) -> None:
        """Free a closed connection's resources; its requests are already cancelled."""

    def call_refused(self, call: str, error: InferdError) -> None:
        """Count a request that was refused before its call began."""

    def call_failed(self, operation: str, error: Exception) -> None:
        """Log that a call or a connection failed through a bug of the daemon."""


class ConnectionAdmission(Protocol):
    """The owner of the connections' users and rights."""

    def admit_connection(self, connection: ServerConnection) -> bool:
        """Check that a new connection may be served; return whether its user is an operator.

        :raises InferdError: the error to send before the connection is closed.
        """

    def connection_greeted(self, connection: ServerConnection, hello: ClientHello) -> None:
        """Record the owner of a connection, as the client's hello states.

        :raises InferdError: the error to send before the connection is closed.
        """

    async def connection_delegated(self, connection: ServerConnection, hello: ClientHello) -> None:
        """Record the owner of a connection that acts on behalf of the user whom the hello names.

        :raises InferdError: the error to send before the connection is closed.
        """

    def connection_refused(self, connection: ServerConnection, error: InferdError) -> None:
        """Log that a connection was closed because of *error*."""

    def accept_failed(self, error: OSError) -> None:
        """Log that a connection could not be accepted."""


class Server:
    """Serves connections on a listening socket."""

    def __init__(
        self,
        handler: Handler,
        admission: ConnectionAdmission,
        *,
        connections_max: int = 256,
        requests_max: int = 256,
        request_bytes: RequestBytes | None = None,
    ):
        self.places = Places[ServerConnection](connections_max)
        self._handler, self._admission = handler, admission
        self._incomplete = IncompleteFrames()
        self._outboxes = SharedLimit(OUTBOXES_BYTES_MAX)
        self._request_bytes = request_bytes or RequestBytes()
        self.descriptors = ClientDescriptors()
        self._requests_max = requests_max
        self._accepted = 0
        self._loop_time = LoopTime()
        self._starts = FairStarts(self._loop_time)
        self._acceptor = Acceptor(self.descriptors, self._loop_time, admission.accept_failed)

    async def serve(
        self,
        listener: socket.socket,
        *,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept connections until `stop_accepting`, and serve each until it ends."""
        listener.setblocking(False)
        try:
            async with anyio.create_task_group() as group:
                task_status.started()
                await self._acceptor.accept_connections(
                    listener, lambda sock: group.start_soon(self._serve_one, sock)
                )
        finally:
            self.descriptors.end_lingering()

    def stop_accepting(self) -> None:
        """Leave new connections in the listening socket, for the next daemon to accept."""
        self._acceptor.stop()

    async def _serve_one(self, sock: socket.socket) -> None:
        peer = peer_of(sock)
        user = self.descriptors.of_user(peer.uid)
        connection = ServerConnection(
            *(sock, peer, self._requests_max, user, self._outboxes, self._loop_time),
            self._request_bytes,
        )
        self._accepted += 1
        connection.number = self._accepted
        try:
            self._admit(connection)
            async with anyio.create_task_group() as group:
                await self._read(connection, group)
                group.cancel_scope.cancel()
        except InferdError as exc:
            self._send_goodbye(connection, exc)
        except ExceptionGroup as group_exc:
            self._send_goodbye(connection, self._refusal(group_exc))
        finally:
            for request in list(connection.requests.values()):  # those without a task
                request.interrupt()
            self.places.release_place(connection)
            self._incomplete.end_frame(connection)
            connection.close()
            self._handler.connection_ended(connection)

    def _admit(self, connection: ServerConnection) -> None:
        """Greet a new connection, and give it a place.

        :raises InferdError: its user has no access, or no place is free.
        """
        with self._acceptor.charged():
            connection.send([Kind.HELLO, self._handler.server_hello()])
            connection.is_operator = self._admission.admit_connection(connection)
            closed = self.places.take_place(connection)
            if closed is not None:
                closed.end(self.places.closed_for_another(closed))

    def _refusal(self, group: ExceptionGroup[Exception]) -> InferdError:
        """Return the error that ended a connection; any other exception is a bug of the daemon."""
        refusals, rest = group.split(InferdError)
        if rest is not None:
            self._handler.call_failed("connection", rest)
            return BackendError("the connection failed inside the daemon")
        first: BaseException | None = refusals
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        assert isinstance(first, InferdError)
        return first

    def _send_goodbye(self, connection: ServerConnection, error: InferdError) -> None:
        connection.send_goodbye(error)
        self._admission.connection_refused(connection, error)

    async def _read(self, connection: ServerConnection, group: anyio.abc.TaskGroup) -> None:
        frames, greeted = FrameReader(), False

        def handle_data(data: bytes) -> int:
            nonlocal greeted
            continued = frames.announced
            for frame in frames.read_frames(data):
                if continued:
                    self._incomplete.end_frame(connection)
                    continued = 0
                if greeted:
                    self._handle_frame(connection, frame, group)
                else:
                    hello = read_hello(*open_frame(frame))
                    connection.software = hello.software[:SOFTWARE_CHARACTERS]
                    connection.key, connection.key_limits = hello.key, hello.key_limits
                    connection.wants_copies = hello.copies
                    check_names(hello)
                    self._note_owner(connection, hello, group)
                    greeted = True
                    timer.cancel()
            if not frames.pending:
                return 0
            self._incomplete.begin_frame(connection, frames.announced)
            return frames.missing

        error = ProtocolError(f"no hello within {HELLO_TIMEOUT_S:g} s")
        timer = ArrivalTimer(connection, HELLO_TIMEOUT_S, error)
        try:
            await connection.receive(handle_data)
        finally:
            timer.cancel()
            frames.clear()

    def _note_owner(
        self, connection: ServerConnection, hello: ClientHello, group: anyio.abc.TaskGroup
    ) -> None:
        """Record the owner of a connection. Calls wait while another user is found, which may take
        long.
        """
        if hello.on_behalf_of:
            connection.identified = anyio.Event()
            group.start_soon(self._note_delegated_owner, connection, hello)
        else:
            self._admission.connection_greeted(connection, hello)

    async def _note_delegated_owner(self, connection: ServerConnection, hello: ClientHello) -> None:
        try:
            await self._admission.connection_delegated(connection, hello)
        except InferdError as exc:
            connection.end(exc)
        else:
            assert connection.identified is not None
            connection.identified.set()

    def _handle_frame(
        self, connection: ServerConnection, frame: bytes, group: anyio.abc.TaskGroup
    ) -> None:
        """Handle a frame of a connection that has sent its hello.

        :raises ProtocolError: the frame cannot be read; the connection then ends.
        """
        kind, items = open_frame(frame)
        if kind == Kind.CREDIT and len(items) >= 3:
            request = connection.requests.get(decode_integer(items[1]))
            if request is not None:
                request.grant_credit(decode_integer(items[2]))
        elif kind == Kind.REQUEST and len(items) >= 4:
            self._start_request(connection, frame, items, group)
        else:
            raise ProtocolError(f"unexpected frame: kind {kind} with {len(items)} items")

    def _start_request(
        self,
        connection: ServerConnection,
        frame: bytes,
        items: list[msgspec.Raw],
        group: anyio.abc.TaskGroup,
    ) -> None:
        number = decode_integer(items[1])
        if number in connection.requests:
            raise ProtocolError(f"request id {number} is already in use")
        try:
            request = decode_request(connection, number, frame, items)
        except ProtocolError:
            raise
        except InferdError as exc:
            connection.descriptors.close()  # their frame was not read: no request can claim them
            connection.send([Kind.ERROR, number, exc.to_wire()])
            return
        try:
            connection.check_capacity(request)
            runs_at_once = self._may_run_at_once(request)
            if not runs_at_once:
                _count_bytes(request, len(frame))
        except Busy as exc:
            self._handler.call_refused(request.call, exc)
            self._refuse_request(request, exc)
            request.close()
            return
        if runs_at_once:
            self._run_at_once(request)
        else:
            connection.requests[number] = request
            if not self._begin_without_task(request, group):
                self._start_task(request, group)

    def _start_task(
        self, request: Request, group: anyio.abc.TaskGroup, *, has_turn: bool = False
    ) -> None:
        """Run a request in a task. If it *has_turn*, it may start at once."""
        request.connection.requests_unstarted += 1
        request.connection.turns_unstarted += has_turn
        group.start_soon(self._run_request, request, has_turn)

    def _may_run_at_once(self, request: Request) -> bool:
        """Return whether a request can be answered before the next frame is read. It must not
        overtake others of its connection.
        """
        connection = request.connection
        return (
            not connection.requests
            and connection.identified is None
            and self._handler.runs_at_once(request)
            and self._starts.try_start(request.uid)
        )

    def _run_at_once(self, request: Request) -> None:
        """Answer a request without a task, as making one takes longer than most such calls."""
        try:
            result = copy_context().run(self._handler.run_at_once, request)
            request.connection.send_frame(pack_reply(request, result))
        except Exception as exc:
            self._send_error(request, exc)
        request.connection.request_ended(request)
        request.close()

    def _begin_without_task(self, request: Request, group: anyio.abc.TaskGroup) -> bool:
        """Begin a call without a task now or once it may start, as making one takes longer than
        many computations; return whether that is possible. It must not overtake earlier ones of its
        connection.
        """
        connection = request.connection
        is_identified = connection.identified is None or connection.identified.is_set()
        if connection.requests_unstarted or not is_identified:
            return False
        if not self._handler.may_begin_call(request):
            return False
        if connection.requests_queued or not self._starts.may_start(request.uid):
            self._queue_start(request, group)
            return True
        if not self._begin_call(request, group):
            return False
        self._starts.count_start(WITHOUT_TASK)
        return True

    def _begin_call(self, request: Request, group: anyio.abc.TaskGroup) -> bool:
        has_begun = self._handler.begin_call(request, partial(self._end_call, request, group))
        if has_begun:
            self._loop_time.add_requests(request.uid, 1)
        return has_begun

    def _queue_start(self, request: Request, group: anyio.abc.TaskGroup) -> None:
        """Begin a call once it may start, in a task if it cannot go on without one then."""
        connection = request.connection

        def start() -> float:
            if request.on_cancel is None:  # it was cancelled
                return 0.0
            leave()
            begin_s = time.thread_time()
            try:
                if not connection.turns_unstarted and self._begin_call(request, group):
                    return WITHOUT_TASK
                self._start_task(request, group, has_turn=True)
            except Exception as exc:
                refuse(exc)
            finally:
                self._loop_time.charge(request.uid, time.thread_time() - begin_s)
            return 1.0

        def cancel() -> None:
            leave()
            refuse(Cancelled(request.cancelled_why, data=request.cancelled_data))

        def refuse(error: Exception) -> None:
            self._send_error(request, error)
            connection.request_ended(request)
            request.close()

        def leave() -> None:
            request.on_cancel = None
            connection.requests_queued -= 1
            self._loop_time.add_requests(request.uid, -1)

        request.on_cancel = cancel
        connection.requests_queued += 1
        self._loop_time.add_requests(request.uid, 1)
        self._starts.start_later(request.uid, start)

    def _end_call(self, request: Request, group: anyio.abc.TaskGroup, finish: Finish) -> None:
        """Answer a call that has run without a task, or run it again in a task."""
        begin_s, connection = time.thread_time(), request.connection
        self._loop_time.add_requests(request.uid, -1)
        try:
            reply = pack_reply(request, finish())
        except NeedsTask:
            self._start_task(request, group)
            return
        except Exception as exc:
            self._send_error(request, exc)
        else:
            connection.requests.pop(request.number, None)
            connection.send_frame(reply, flush=False)
        connection.request_ended(request)
        request.close()
        self._loop_time.charge(request.uid, time.thread_time() - begin_s)

    async def _run_request(self, request: Request, has_turn: bool) -> None:
        connection = request.connection
        self._loop_time.add_requests(request.uid, 1)
        try:
            with request.scope:
                try:
                    if not has_turn:
                        await self._wait_turn(request)
                finally:
                    connection.requests_unstarted -= 1
                    connection.turns_unstarted -= has_turn
                reply = await self._loop_time.run_counted(request.uid, self._answer(request))
                connection.requests.pop(request.number, None)
                connection.send_frame(reply)
            if request.scope.cancelled_caught:
                raise Cancelled(request.cancelled_why, data=request.cancelled_data)
        except Exception as exc:
            self._send_error(request, exc)
        finally:
            connection.request_ended(request)
            self._loop_time.add_requests(request.uid, -1)
            request.close()

    async def _wait_turn(self, request: Request) -> None:
        """Wait until a request may start, behind the earlier ones of its connection."""
        connection = request.connection
        if connection.identified is not None:
            await connection.identified.wait()
        while connection.turns_unstarted:  # their tasks start in this iteration of the loop
            await anyio.lowlevel.checkpoint()
        await self._starts.wait_start(request.uid, is_first=_cancels_request(request))

    async def _answer(self, request: Request) -> bytes:
        """Run the call of a request and return its reply as a frame."""
        return pack_reply(request, await self._handler.run_call(request))

    def _send_error(self, request: Request, exc: Exception) -> None:
        """Answer a request with its error; any exception except an `InferdError` is a bug."""
        if not isinstance(exc, InferdError):
            self._handler.call_failed(request.call, exc)
            exc = BackendError(f"{request.call} failed inside the daemon: {exc!r}")
        self._refuse_request(request, exc)

    def _refuse_request(self, request: Request, error: InferdError) -> None:
        request.connection.requests.pop(request.number, None)
        request.connection.send_frame(pack_error(request.number, error))


def _count_bytes(request: Request, frame_bytes: int) -> None:
    """Count the memory of a request until it is closed.

    :raises Busy: its user, or all users together, would hold too much.
    """
    reserve = Reserve.SMALL if frame_bytes <= SMALL_FRAME_BYTES else Reserve.NONE
    if isinstance(request.params, CancelParams):
        reserve = Reserve.CANCEL
    request.charge.grow(request_bytes(request.params, frame_bytes), reserve)


def _cancels_request(request: Request) -> bool:
    """Return whether a request cancels an earlier one, which may still wait to start. A request
    that cancels a context's turn waits behind the request that starts that turn.
    """
    return isinstance(request.params, CancelParams) and request.params.request is not None
