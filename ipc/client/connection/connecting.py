"""Connecting to a daemon: the socket, the connection's tasks, errors until the hello."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.abc

from ...greeting import connect_error, connect_timeout_error
from ...messages import ClientHello
from ...paths import check_server, check_socket_folder
from .async_connection import AsyncConnection

_CONNECT_PAUSE_S = 0.02


@asynccontextmanager
async def own_group() -> AsyncIterator[anyio.abc.TaskGroup]:
    """Yield a task group that ends with its body; the body's error is raised ungrouped."""
    error: BaseException | None = None
    async with anyio.create_task_group() as group:
        try:
            yield group
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as exc:
            error = exc  # the group would wrap it
        finally:
            group.cancel_scope.cancel()
    if error is not None:
        raise error


async def hold_connection(
    path: str,
    hello: ClientHello,
    timeout_s: float,
    *,
    task_status: anyio.abc.TaskStatus[AsyncConnection] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Connect, run the connection's tasks until it is lost, and close it.

    :raises ConnectionLost: no daemon answers at *path*.
    :raises PermissionDenied: this user may not use the socket.
    :raises VersionMismatch: the daemon speaks another major version.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        connection = AsyncConnection(sock, path)
        async with own_group() as group:
            with anyio.move_on_after(timeout_s) as scope:
                await _connect(sock, path)
                group.start_soon(connection.read_frames)
                group.start_soon(connection.write_unsent)
                group.start_soon(connection.watch_deadlines)
                await connection.greet(hello)
            if scope.cancelled_caught:
                raise connect_timeout_error(path, timeout_s)
            task_status.started(connection)
            await connection.ended.wait()


async def _connect(sock: socket.socket, path: str) -> None:
    while True:
        try:
            check_socket_folder(path)
            sock.connect(path)
            check_server(sock, path)
            return
        except BlockingIOError:
            await anyio.sleep(_CONNECT_PAUSE_S)  # the backlog is full; no event reports space
        except OSError as exc:
            raise connect_error(path, exc) from None
