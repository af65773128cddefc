"""The process of an entry: its clients, its nodes, its signals."""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from ....backends.errors import (
    BackendError,
    InferdError,
    ProtocolError,
    VersionMismatch,
)
from ....ipc.messages import PROTOCOL_VERSION, ClientHello, Kind
from ....ipc.names import check_label, check_user_name
from ....ipc.peer import peer_of
from ....ipc.server.acceptor import Acceptor
from ....ipc.server.descriptors import ClientDescriptors
from ....ipc.server.fairness import LoopTime, SharedLimit
from ....ipc.server.listener import UnixListener
from ....ipc.server.outbox import OUTBOXES_BYTES_MAX
from ....wire.frames import pack_frame
from ..config import EntryConfig, UserRules, is_operator, name_of, user_on_nodes
from ..frames import open_message
from ..routing.homes import FleetUser
from .client import Fleet, FleetClient
from .connection import SENT_BYTES_MAX, ClientConnection
from .dispatcher import Dispatcher
from .metrics import MetricsListener

HELLO_S_MAX = 10.0
STOP_S_MAX = 30.0
"""Time that requests have to end after `inferd stop`, as on a daemon."""
SOFTWARE_CHARACTERS = 200
_hello = msgspec.msgpack.Decoder(ClientHello)


class Entry:
    """The entry of a fleet. *note* prints what an operator should know.

    :raises InvalidArgument: the certificate cannot be used.
    """

    def __init__(self, config: EntryConfig, note: Callable[[str], object]):
        settings = config.settings
        self._config, self._note = config, note
        self._group = anyio.create_task_group()
        self._fleet = Fleet(config, note, self._group)
        self._rules = UserRules(settings.users, settings.operators, settings.delegates)
        self._descriptors = ClientDescriptors()
        self._outboxes = SharedLimit(OUTBOXES_BYTES_MAX)
        self._contents = SharedLimit(SENT_BYTES_MAX)
        self._software = f"inferd/{version('inferd')} fleet"

    async def run(self, on_ready: Callable[[str], object]) -> signal.Signals | None:
        """Serve clients until SIGTERM or SIGINT, and return that signal, or None if an operator has
        stopped the entry.

        :raises InvalidArgument: the state directory or the socket cannot be used.
        :raises Busy: another program listens on the socket.
        """
        self._fleet.open()
        listener = UnixListener(str(self._config.socket), self._config.socket_mode, gateway=True)
        try:
            listener.bind()
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async with self._group as group:
                    await self._fleet.start()
                    group.start_soon(self._accept, listener.socket, group)
                    on_ready(listener.path)
                    if not self._config.metrics.is_off:
                        pages = MetricsListener(self._fleet, self._config.metrics, self._note)
                        group.start_soon(pages.run)
                    ended_by = await self._until_stopped(signals)
                    group.cancel_scope.cancel()
        finally:
            self._descriptors.end_lingering()
            listener.close()
        return ended_by

    async def _until_stopped(self, signals: AsyncIterator[signal.Signals]) -> signal.Signals | None:
        """Wait for a signal and return it, or until an operator has stopped the entry and its
        requests have ended.
        """
        ended_by = None
        async with anyio.create_task_group() as waiting:

            async def wait_for_requests() -> None:
                await self._fleet.stopping.wait()
                self._fleet.check_idle()
                with anyio.move_on_after(STOP_S_MAX):
                    await self._fleet.idle.wait()
                waiting.cancel_scope.cancel()

            waiting.start_soon(wait_for_requests)
            ended_by = await anext(signals)
            waiting.cancel_scope.cancel()
        return ended_by

    async def _accept(self, listener: socket.socket, group: anyio.abc.TaskGroup) -> None:
        listener.setblocking(False)

        def note_failure(exc: OSError) -> None:
            self._note(f"cannot accept clients: {exc}")

        acceptor = Acceptor(self._descriptors, LoopTime(), note_failure)
        await acceptor.accept_connections(
            listener, lambda sock: group.start_soon(self._serve, sock)
        )

    async def _serve(self, sock: socket.socket) -> None:
        peer = peer_of(sock)
        user = self._descriptors.of_user(peer.uid)
        hello = self._fleet.nodes.hello(self._software, self._fleet.incarnations.starts)
        connection = ClientConnection(
            sock, peer, user, self._outboxes, self._contents, hello.limits.frame_bytes_max
        )
        try:
            connection.add_frame(pack_frame([int(Kind.HELLO), hello]))
            connection.flush()
            name = await self._admit(connection)
            async with anyio.create_task_group() as group:
                await self._exchange(connection, name, hello.limits.requests_max, group)
                group.cancel_scope.cancel()
        except InferdError as exc:
            connection.send_goodbye(exc)
        except ExceptionGroup as exc_group:
            connection.send_goodbye(_refusal(exc_group))
        finally:
            self._fleet.places.release_place(connection)
            connection.close()

    async def _admit(self, connection: ClientConnection) -> str:
        """Give a client a place, and return the name of its user.

        :raises Busy: no place is free.
        """
        name = await anyio.to_thread.run_sync(name_of, connection.uid)
        connection.is_operator = is_operator(connection.uid, name, self._rules)
        closed = self._fleet.places.take_place(connection)
        if closed is not None:
            closed.end(self._fleet.places.closed_for_another(closed))
        return name

    async def _exchange(
        self,
        connection: ClientConnection,
        name: str,
        requests_max: int,
        group: anyio.abc.TaskGroup,
    ) -> None:
        client: FleetClient | None = None
        dispatch: Callable[[bytes], None] | None = None

        def handle_frame(body: bytes) -> None:
            nonlocal client, dispatch
            if dispatch is not None:
                dispatch(body)
                return
            timer.cancel()
            client = self._greet(connection, name, body, group)
            dispatch = Dispatcher(client, connection, requests_max).handle_frame

        timer = _EndLater(connection)
        try:
            await connection.receive(handle_frame)
        finally:
            timer.cancel()
            if client is not None:
                self._fleet.clients.discard(client)
                client.close()
                self._fleet.check_idle()

    def _greet(
        self,
        connection: ClientConnection,
        name: str,
        body: bytes,
        group: anyio.abc.TaskGroup,
    ) -> FleetClient:
        """Return the state of a client that has sent its hello.

        :raises InferdError: the hello cannot be read, or the user may not act as it says.
        """
        hello = read_hello(body)
        user = user_on_nodes(connection.uid, name, hello.on_behalf_of, self._rules)
        own = msgspec.structs.replace(
            hello,
            on_behalf_of=user,
            software=hello.software[:SOFTWARE_CHARACTERS],
            copies=self._fleet.copies.are_wanted,
        )
        client = FleetClient(self._fleet, connection, FleetUser(user, hello.label), own, group)
        connection.is_idle = lambda: not client.requests
        connection.on_emptied = lambda: client.read_upstreams(reading=True)
        self._fleet.clients.add(client)
        return client


class _EndLater:
    """Ends a connection whose client sends no hello."""

    def __init__(self, connection: ClientConnection):
        error = ProtocolError(f"no hello within {HELLO_S_MAX:g} s")
        loop = connection.loop
        self._handle = loop.call_later(HELLO_S_MAX, connection.end, error)

    def cancel(self) -> None:
        """Note that the hello has arrived, or that the connection has ended."""
        self._handle.cancel()


def read_hello(body: bytes) -> ClientHello:
    """Return a client's hello.

    :raises InferdError: it cannot be read, or is of another version.
    """
    message = open_message(body)
    if message.kind != Kind.HELLO:
        raise ProtocolError("the first frame is not a hello")
    try:
        hello = _hello.decode(message.items[1])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"the hello cannot be read: {exc}") from None
    if hello.protocol[0] != PROTOCOL_VERSION[0]:
        raise VersionMismatch(
            f"the client speaks version {hello.protocol[0]} of the protocol, this fleet version"
            f" {PROTOCOL_VERSION[0]}",
            data={"protocol": list(PROTOCOL_VERSION)},
        )
    check_label(hello.label)
    check_user_name(hello.on_behalf_of)
    return hello


def _refusal(group: ExceptionGroup[Any]) -> InferdError:
    """Return the error that ended a connection; any other exception is a bug of the entry."""
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    if isinstance(first, InferdError):
        return first
    return BackendError(f"the connection failed inside the entry: {first!r}")


def run_entry(
    config: EntryConfig, *, on_ready: Callable[[str], object], note: Callable[[str], object]
) -> signal.Signals | None:
    """Serve a fleet until SIGTERM or SIGINT; see `Entry.run`."""

    async def run() -> signal.Signals | None:
        return await Entry(config, note).run(on_ready)

    return anyio.run(run)
