"""Drivers, which connect a client to the daemon and wait for it, in tasks of a loop or by blocking.

The client's calls are written once, as coroutines that wait only by the driver's methods. With a
driver that blocks they never suspend.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Protocol, TypeVar

from .core import ConnectionCore

R = TypeVar("R")


class Driver(Protocol):
    """The owner of a client's connection, and its ways to wait."""

    runs_coroutines: bool
    """Whether the functions of programs may be coroutine functions."""

    @property
    def connection(self) -> ConnectionCore | None:
        """The connection that carries the calls; None if the client is not open."""

    @property
    def closed(self) -> bool:
        """Whether the client was closed."""

    async def open(self) -> ConnectionCore:
        """Return the connection; connect first, if the client is not open.

        :raises ConnectionLost: no daemon answers, or the client was closed.
        """

    async def reconnect(self) -> ConnectionCore:
        """Return the connection; connect again, if it was lost.

        :raises ConnectionLost: no daemon answers, or the client was closed.
        """

    async def open_channel(self, sock: socket.socket, connection: ConnectionCore) -> ConnectionCore:
        """Return a connection over *sock*, the connected socket of a channel, which it closes. It
        ends with *connection*.

        :raises ConnectionLost: the client was closed.
        """

    async def close(self) -> None:
        """Close the connection, which ends all calls; a second call does nothing."""

    def close_unused(self) -> bool:
        """Close the connection of a client that was not closed; return whether it was open.

        `__del__` calls this, at any point and in any thread.
        """

    async def sleep(self, seconds: float) -> None:
        """Wait for that time."""

    def lock(self) -> AbstractAsyncContextManager[Any]:
        """Return a lock."""

    def shield(self) -> AbstractContextManager[Any]:
        """Return a context manager whose body finishes even if the caller is cancelled in it."""

    async def run_in_thread(self, function: Callable[..., R], *args: Any) -> R:
        """Run a function that takes long."""

    def caller(self) -> int:
        """Return the number of the calling task or thread."""


def run_blocking(call: Coroutine[Any, Any, R]) -> R:
    """Return the result of a *call* whose driver blocks."""
    try:
        call.send(None)
    except StopIteration as end:
        result: R = end.value
        return result
    call.close()
    raise AssertionError("a call of a synchronous client was suspended")
