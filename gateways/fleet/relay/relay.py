"""The process of a node: its check of the daemon's rights, and its listener for entries."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.abc

from ....backends.errors import Busy, ConnectionLost, InferdError, PermissionDenied
from ....ipc.client import AsyncClient
from ....ipc.greeting import connect_error
from ..certificates import DATA, EXPIRES_SOON_DAYS, RENEW, REPORTS, days_left, node_context
from ..link import HANDSHAKE_S_MAX, NodeAddress, listen_at, parse_node_address
from .load import LoadReporter
from .pipe import DaemonEnd, EntryEnd, PassedFiles

CONNECTIONS_MAX = 1024
SHUTDOWN_S_MAX = 2.0
"""Time for the end of TLS on a connection that is closed."""


class _Switch(asyncio.Protocol):
    """A new connection, until TLS has negotiated its protocol."""

    def __init__(self, choose: Callable[[str | None], asyncio.Protocol | None]):
        self._choose = choose

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hand the connection over to the protocol that it has negotiated, or close it."""
        assert isinstance(transport, asyncio.Transport)
        tls: ssl.SSLObject = transport.get_extra_info("ssl_object")
        protocol = self._choose(tls.selected_alpn_protocol())
        if protocol is None:
            transport.abort()
            return
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


class Relay:
    """Serves entries until it is cancelled. *path* is the daemon's socket."""

    def __init__(self, path: str, reporter: LoadReporter, connections_max: int = CONNECTIONS_MAX):
        self._path, self._reporter, self._connections_max = path, reporter, connections_max
        self._ends: set[EntryEnd] = set()
        self._files = PassedFiles()

    async def serve(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        descriptors: str = "",
        *,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept entries, and pass their frames to the daemon and its frames to them. An entry on
        this machine passes files at the socket *descriptors*, unless that is empty.
        """
        loop = asyncio.get_running_loop()
        async with anyio.create_task_group() as group:

            def choose(protocol: str | None) -> asyncio.Protocol | None:
                if protocol == REPORTS:
                    return self._reporter.new_subscriber()
                return self._new_pipe(group) if protocol == DATA else None

            server = await loop.create_server(
                lambda: _Switch(choose),
                sock=listener,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_S_MAX,
                ssl_shutdown_timeout=SHUTDOWN_S_MAX,
            )
            try:
                group.start_soon(self._reporter.run)
                if descriptors:
                    await group.start(self._files.serve, descriptors)
                task_status.started()
                await anyio.sleep_forever()
            finally:
                server.close()
                self._reporter.close()
                for end in tuple(self._ends):
                    end.end()

    def _new_pipe(self, group: anyio.abc.TaskGroup) -> EntryEnd:
        end = EntryEnd(lambda: self._ends.discard(end), self._files)
        self._ends.add(end)
        group.start_soon(self._join_daemon, end)
        return end

    async def _join_daemon(self, entry: EntryEnd) -> None:
        try:
            if len(self._ends) > self._connections_max:
                raise Busy(
                    f"the relay has {self._connections_max} connections",
                    data={"connections_max": self._connections_max, "retry_after_s": 1.0},
                )
            daemon = await self._connect_daemon()
        except InferdError as exc:
            entry.refuse(exc)
            return
        entry.join_daemon(daemon)

    async def _connect_daemon(self) -> DaemonEnd:
        """Return a connection to the daemon.

        :raises InferdError: it cannot be reached.
        """
        loop = asyncio.get_running_loop()
        try:
            _, daemon = await loop.create_unix_connection(
                lambda: DaemonEnd(self._files), self._path
            )
        except BlockingIOError:  # the daemon's backlog is full
            raise Busy(
                "too many programs connect to the daemon", data={"retry_after_s": 0.1}
            ) from None
        except OSError as exc:
            raise connect_error(self._path, exc) from None
        return daemon


SOFTWARE = "inferd fleet node"
TRIAL_USER = "@fleet"
"""A user on behalf of whom the relay connects to check that it may do so."""


def run_node(
    name: str,
    *,
    listen: str,
    folder: Path,
    path: str,
    descriptors: str = "",
    on_ready: Callable[[str], object],
    on_expiry: Callable[[str], object],
) -> signal.Signals:
    """Serve entries until SIGTERM or SIGINT, and return that signal. *path* is the daemon's socket,
    and *descriptors* the one at which an entry on this machine passes files, if there is one.

    :raises InvalidArgument: the address or the certificate cannot be used.
    :raises PermissionDenied: the daemon does not let this user relay.
    """
    context = node_context(folder, name)
    left = days_left(folder, name)
    if left < EXPIRES_SOON_DAYS:
        on_expiry(f"the certificate of {name} expires in {left:.0f} days: {RENEW}")
    listener = listen_at(parse_node_address(listen))

    async def serve() -> signal.Signals:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            await check_rights(path)
            relay = Relay(path, LoadReporter(lambda: AsyncClient(path, software=SOFTWARE)))
            async with anyio.create_task_group() as group:
                await group.start(relay.serve, listener, context, descriptors)
                host, port = listener.getsockname()[:2]
                on_ready(str(NodeAddress(host, port)))
                ended_by = await anext(signals)
                group.cancel_scope.cancel()
        return ended_by

    try:
        return anyio.run(serve)
    finally:
        listener.close()


async def check_rights(path: str) -> None:
    """Check that the daemon, if it runs, lets this user report on it and act for others.

    :raises PermissionDenied: the daemon does not let this user do that.
    """
    try:
        async with AsyncClient(path, software=SOFTWARE) as client:
            await client.queue(all_users=True)
        async with AsyncClient(path, software=SOFTWARE, on_behalf_of=TRIAL_USER) as client:
            await client.sessions()
    except ConnectionLost:
        return  # entries are served as soon as it runs
    except PermissionDenied as exc:
        raise PermissionDenied(
            f"the daemon at {path} does not let this user relay: {exc.message}",
            hint="run the relay as the daemon's user, or give its user the rights use, see-all and"
            " delegate by an access rule",
            data=exc.data,
        ) from None
