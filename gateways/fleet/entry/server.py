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
)
from ....ipc.messages import Kind, Limits
from ....ipc.peer import peer_of
from ....ipc.server.descriptors import ClientDescriptors
from ....ipc.server.fairness import LoopTime, SharedLimit
from ....ipc.server.listener import Acceptor, UnixListener
from ....ipc.server.socket_connection import (
    HELLO_TIMEOUT_S,
    OUTBOXES_BYTES_MAX,
    SOFTWARE_CHARACTERS,
    ArrivalTimer,
    check_names,
    read_hello,
)
from ....wire.frames import FrameReader
from ..config import EntryConfig, UserRules, is_operator, name_of, user_on_nodes
from ..frames import open_message
from ..routing.homes import FleetUser
from .client import ClientConnection, Fleet, FleetClient
from .dispatcher import Dispatcher
from .metrics import MetricsListener
from .passed_descriptors import SENT_BYTES_MAX

STOP_S_MAX = 30.0
"""Time that requests have to end after `inferd stop`, as on a daemon."""


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
        self._loop_time = LoopTime()
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

        acceptor = Acceptor(self._descriptors, self._loop_time, note_failure)
        await acceptor.accept_connections(
            listener, lambda sock: group.start_soon(self._serve, sock)
        )

    async def _serve(self, sock: socket.socket) -> None:
        peer = peer_of(sock)
        user = self._descriptors.of_user(peer.uid)
        hello = self._fleet.nodes.hello(self._software, self._fleet.incarnations.starts)
        connection = ClientConnection(
            sock, peer, user, self._outboxes, self._loop_time, self._contents
        )
        try:
            connection.send([int(Kind.HELLO), hello])
            name = await self._admit(connection)
            async with anyio.create_task_group() as group:
                await self._exchange(connection, name, hello.limits, group)
                group.cancel_scope.cancel()
        except InferdError as exc:
            connection.send_goodbye(exc)
        except ExceptionGroup as exc_group:
            connection.send_goodbye(_refusal(exc_group))
        finally:
            self._fleet.places.release_place(connection)
            # After all tasks of the connection, one of which may just have registered one.
            self._fleet.buffers.close_connection(connection)
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
        limits: Limits,
        group: anyio.abc.TaskGroup,
    ) -> None:
        frames, dispatcher = FrameReader(limits.frame_bytes_max), None

        def handle_data(data: bytes) -> int:
            nonlocal dispatcher
            for frame in frames.read_frames(data):
                if dispatcher is None:
                    timer.cancel()
                    client = self._greet(connection, name, frame, group)
                    dispatcher = Dispatcher(client, connection, limits.requests_max)
                else:
                    dispatcher.handle_frame(frame)
            return frames.missing

        error = ProtocolError(f"no hello within {HELLO_TIMEOUT_S:g} s")
        timer = ArrivalTimer(connection, HELLO_TIMEOUT_S, error)
        try:
            await connection.receive(handle_data)
        finally:
            timer.cancel()
            if connection.client is not None:
                self._fleet.clients.discard(connection.client)
                connection.client.close()
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
        message = open_message(body)
        hello = read_hello(message.kind, message.items)
        check_names(hello)
        user = user_on_nodes(connection.uid, name, hello.on_behalf_of, self._rules)
        own = msgspec.structs.replace(
            hello,
            on_behalf_of=user,
            software=hello.software[:SOFTWARE_CHARACTERS],
            copies=self._fleet.copies.are_wanted,
        )
        client = FleetClient(self._fleet, connection, FleetUser(user, hello.label), own, group)
        connection.client = client
        self._fleet.clients.add(client)
        return client


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
