"""The process of a node: its checks of the daemon's rights, its relay, its signals."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import anyio

from ....backends.errors import ConnectionLost, PermissionDenied
from ....ipc.client import AsyncClient
from ..addresses import NodeAddress, listen_at, parse_node_address
from ..certificates.tls import EXPIRES_SOON_DAYS, RENEW, days_left, node_context
from .relay import Relay
from .reporter import LoadReporter

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
