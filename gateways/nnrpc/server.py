"""The gateway's server: clients, each with its own guest and its own connection to the daemon."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from ...ipc.peer import peer_of
from ..guests import DaemonLink, Guest, Preload, Remote
from .connection import RpcConnection
from .limits import STOP_S_MAX, Limits

if TYPE_CHECKING:
    from ...ipc.client import AsyncClient
    from ...ipc.priorities import Priority

_PAUSE_S = 0.1


class Server:
    """The clients of a listening socket.

    A client's graphs and contexts belong to a connection to the daemon, which ends when the client
    disconnects; the daemon then frees them and cancels their turns. *connect* gets the client's
    process id.
    """

    def __init__(
        self,
        listener: socket.socket,
        connect: Callable[[int], AsyncClient],
        *,
        preloads: Mapping[str, Preload],
        priority: Priority,
        limits: Limits,
    ):
        self._listener, self._connect = listener, connect
        self._preloads, self._priority, self._limits = preloads, priority, limits
        self._connections: set[RpcConnection] = set()

    async def run(
        self, on_ready: Callable[[], object], on_stop: Callable[[], object]
    ) -> signal.Signals:
        """Serve clients until SIGTERM or SIGINT, and return that signal. Calls under way then have
        time to end: up to `STOP_S_MAX`, or until a second signal.
        """
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with anyio.create_task_group() as clients:
                async with anyio.create_task_group() as accepting:
                    accepting.start_soon(self._accept_clients, clients)
                    on_ready()
                    ended_by = await anext(signals)
                    accepting.cancel_scope.cancel()
                on_stop()
                await self._stop_clients(signals)
        return ended_by

    async def _accept_clients(self, clients: anyio.abc.TaskGroup) -> None:
        self._listener.setblocking(False)
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError:  # too many open files; the end of a client frees some
                await anyio.sleep(_PAUSE_S)
                continue
            if len(self._connections) < self._limits.connections_max:
                connect = partial(self._connect, peer_of(sock).pid)
                client = connect()
                link = DaemonLink(client, connect)
                connection = RpcConnection(self._new_guest(link), self._limits)
                self._connections.add(connection)
                clients.start_soon(self._hold_connection, connection, sock, client, link)
            else:
                sock.close()  # gRPC tries again, with growing pauses

    def _new_guest(self, link: DaemonLink) -> Guest:
        return Guest(
            Remote(link, self._priority),
            preloads=self._preloads,
            contexts_max=self._limits.contexts_max,
            graphs_max=self._limits.graphs_max,
        )

    async def _hold_connection(
        self, connection: RpcConnection, sock: socket.socket, client: AsyncClient, link: DaemonLink
    ) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: connection.protocol, sock)
            await connection.closed.wait()
        finally:
            connection.end()
            self._connections.discard(connection)
            with anyio.CancelScope(shield=True):
                await client.aclose()
                await connection.wait_closed()
                await link.close()

    async def _stop_clients(self, signals: AsyncIterator[signal.Signals]) -> None:
        connections = tuple(self._connections)
        async with anyio.create_task_group() as ending:
            ending.start_soon(self._end_calls, signals)
            for connection in connections:
                connection.stop()
            for connection in connections:
                await connection.closed.wait()
            ending.cancel_scope.cancel()

    async def _end_calls(self, signals: AsyncIterator[signal.Signals]) -> None:
        with anyio.move_on_after(STOP_S_MAX):
            await anext(signals)
        for connection in tuple(self._connections):
            connection.end()
