"""Connecting to a daemon: the socket, the connection's tasks, errors before the hello."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import anyio.abc

from ....backends.errors import ConnectionLost, InferdError, InvalidArgument, PermissionDenied
from .connection import Connection

_CONNECT_PAUSE_S = 0.02


@asynccontextmanager
async def own_group() -> AsyncIterator[anyio.abc.TaskGroup]:
    """Yield a task group that ends with its body, whose error is raised as it is, ungrouped."""
    error: BaseException | None = None
    async with anyio.create_task_group() as group:
        try:
            yield group
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as exc:
            error = exc  # kept out of the group, which would wrap it
        finally:
            group.cancel_scope.cancel()
    if error is not None:
        raise error


async def hold_connection(
    path: str,
    software: str,
    timeout_s: float,
    *,
    task_status: anyio.abc.TaskStatus[Connection] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Connect, run the connection's tasks until it is lost, and close it.

    :raises ConnectionLost: no daemon answers there.
    :raises PermissionDenied: the socket is not for this user.
    :raises VersionMismatch: the daemon speaks another major version.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        connection = Connection(sock, path)
        async with own_group() as group:
            with _connect_timeout(path, timeout_s):
                await _connect(sock, path)
                group.start_soon(connection.read_frames)
                group.start_soon(connection.write_frames)
                group.start_soon(connection.watch_deadlines)
                await connection.greet(software)
            task_status.started(connection)
            await connection.ended.wait()


@contextmanager
def _connect_timeout(path: str, timeout_s: float) -> Iterator[None]:
    try:
        with anyio.fail_after(timeout_s):
            yield
    except TimeoutError:
        raise ConnectionLost(
            f"the daemon at {path} did not answer within {timeout_s:g} s",
            hint="see `inferd status` and the daemon's log, or raise connect_timeout",
        ) from None


async def _connect(sock: socket.socket, path: str) -> None:
    while True:
        try:
            sock.connect(path)
            return
        except BlockingIOError:
            await anyio.sleep(_CONNECT_PAUSE_S)  # the daemon's backlog is full; nothing to wait on
        except OSError as exc:
            raise _connect_error(path, exc) from None


def _connect_error(path: str, exc: OSError) -> InferdError:
    if isinstance(exc, PermissionError):
        return PermissionDenied(
            f"the socket {path} is not open to this user",
            hint="ask whoever runs that daemon, or start your own with `inferd serve`",
        )
    if isinstance(exc, FileNotFoundError | ConnectionRefusedError | ConnectionResetError):
        return ConnectionLost(
            f"no daemon answers at {path}: {exc.strerror}",
            hint="start it with `inferd serve`, or set INFERD_SOCKET to its socket",
        )
    return InvalidArgument(
        f"{path} is no socket that can be connected to: {exc.strerror or exc}",
        hint="a socket's path has at most 107 bytes; set INFERD_SOCKET or pass `path`",
    )
