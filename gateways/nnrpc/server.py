"""The gateway's server: clients, each with its own guest and its own connection to the daemon."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc
from grpclib.config import Configuration
from grpclib.encoding.proto import ProtoCodec
from grpclib.events import _DispatchServerEvents
from grpclib.protocol import Buffer, H2Protocol
from grpclib.protocol import Stream as H2Stream
from grpclib.server import Handler
from h2.config import H2Configuration
from h2.settings import SettingCodes

from ...backends.errors import TooLarge
from ...ipc.peer import peer_of
from ..guests import DaemonLink, Guest, ImageDirectory, Preload, Remote, read_image
from .limits import STOP_S_MAX, UNREAD_BYTES_MAX, Limits
from .service import RpcService

if TYPE_CHECKING:
    from ...ipc.client import AsyncClient
    from ...ipc.names import Priority

log = logging.getLogger(__name__)


class RpcConnection(Handler):
    """The calls of one client. grpclib runs each as a task, until it or the connection ends.

    grpclib calls `close`, which cancels the calls, when the client has closed its connection or has
    sent something that is not gRPC.
    """

    def __init__(self, guest: Guest, limits: Limits):
        super().__init__(RpcService(guest).handlers(), ProtoCodec(), None, _DispatchServerEvents())
        self.protocol = _Protocol(self, limits)
        self.closed = anyio.Event()
        self._message_bytes_max = limits.message_bytes_max
        self._calls: set[H2Stream] = set()
        self._stopping = False

    def accept(
        self, stream: H2Stream, headers: list[tuple[str, str]], release_stream: Callable[[], Any]
    ) -> None:
        """Run a call."""
        assert stream.id is not None
        acknowledge = partial(stream.connection.ack, stream.id)
        stream.buffer = _MessageBuffer(acknowledge, self._message_bytes_max)
        self._calls.add(stream)

        def end_call(_: object = None) -> None:
            if stream in self._calls:
                self._calls.remove(stream)
                release_stream()
                self._close_if_stopped()

        super().accept(stream, headers, end_call)
        # A call that is cancelled before its task has begun does not release its stream itself.
        self._tasks[stream].add_done_callback(end_call)

    def close(self) -> None:
        """Cancel all calls."""
        super().close()
        self.closed.set()

    def stop(self) -> None:
        """Close the connection as soon as it has no call under way."""
        self._stopping = True
        self._close_if_stopped()

    def _close_if_stopped(self) -> None:
        if self._stopping and not self._calls:
            self.end()

    def end(self) -> None:
        """Close the connection now."""
        processor = getattr(self.protocol, "processor", None)  # None until it is connected
        if processor is not None and not self.closing:
            processor.close("The gateway ends the connection")
        self.closed.set()


class _MessageBuffer(Buffer):
    """The received part of a request; its size is checked before its memory is allocated."""

    def __init__(self, acknowledge: Callable[[int], None], size_max: int):
        super().__init__(acknowledge)
        self._size_max = size_max

    async def read(self, size: int) -> bytes:
        if size > self._size_max:
            raise TooLarge(
                f"a request of {size} bytes; {self._size_max} are allowed", hint="send less"
            )
        return await super().read(size)


class _Protocol(H2Protocol):
    """HTTP/2 for one connection; the client may have `calls_max` calls under way."""

    def __init__(self, connection: RpcConnection, limits: Limits):
        http = H2Configuration(
            client_side=False,
            header_encoding="ascii",
            validate_inbound_headers=False,
            validate_outbound_headers=False,
            normalize_inbound_headers=False,
            normalize_outbound_headers=False,
        )
        super().__init__(connection, Configuration().__for_server__(), http)
        self._calls_max = limits.calls_max

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        super().connection_made(transport)
        http = self.connection._connection
        http.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: self._calls_max})
        self.connection.flush()

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
            if self._transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
                self._transport.abort()
        except Exception:  # of any kind, as h2 and grpclib do not expect every sequence of bytes
            log.debug("unreadable data", exc_info=True)
            self.processor.close("Unreadable data")


_PAUSE_S = 0.1


class Server:
    """The clients of a listening socket.

    A client's graphs and contexts belong to a connection to the daemon, which ends when the client
    disconnects; the daemon then frees them and cancels their turns. *connect* gets the client's
    process id. Clients may name images in *image_directories* with the key `image`.
    """

    def __init__(
        self,
        listener: socket.socket,
        connect: Callable[[int], AsyncClient],
        *,
        preloads: Mapping[str, Preload],
        priority: Priority,
        limits: Limits,
        image_directories: Sequence[ImageDirectory] = (),
    ):
        self._listener, self._connect = listener, connect
        self._image_directories = image_directories
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
            read_image=self._read_image,
            contexts_max=self._limits.contexts_max,
            graphs_max=self._limits.graphs_max,
        )

    async def _read_image(self, path: str) -> bytes:
        return await anyio.to_thread.run_sync(read_image, self._image_directories, path)

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
