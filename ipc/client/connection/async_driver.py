"""The driver of the asynchronous client, for asyncio and trio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from ...messages import ClientHello
from .async_connection import AsyncConnection
from .connecting import hold_connection
from .core import client_closed_error
from .owner import ConnectionOwner

R = TypeVar("R")


class AsyncDriver:
    """The owner of a connection that the tasks of a loop share."""

    runs_coroutines = True

    def __init__(self, path: str, hello: ClientHello, connect_timeout_s: float):
        self.connection: AsyncConnection | None = None
        self.closed = False
        self._path, self._hello = path, hello
        self._connect_timeout_s = connect_timeout_s
        self._owner: ConnectionOwner | None = None
        self._connecting = anyio.Lock()

    async def open(self) -> AsyncConnection:
        """Return the connection; see `Driver.open`."""
        async with self._connecting:
            self._check_not_closed()
            if self.connection is not None:
                return self.connection
            owner = ConnectionOwner()
            try:
                await owner.start()
                connection = await self._connect(owner)
                self._check_not_closed()
            except BaseException:
                await owner.aclose()
                raise
            self._owner, self.connection = owner, connection
            return connection

    async def reconnect(self) -> AsyncConnection:
        """Return the connection; see `Driver.reconnect`."""
        await self.open()
        async with self._connecting:
            self._check_not_closed()
            assert self._owner is not None and self.connection is not None, "it is open"
            if self.connection.lost:
                self.connection = await self._connect(self._owner)
            return self.connection

    async def _connect(self, owner: ConnectionOwner) -> AsyncConnection:
        connection = await owner.group.start(
            hold_connection, self._path, self._hello, self._connect_timeout_s
        )
        assert isinstance(connection, AsyncConnection)
        return connection

    def _check_not_closed(self) -> None:
        if self.closed:
            raise client_closed_error(self._path)

    async def close(self) -> None:
        """Close the connection; see `Driver.close`."""
        self.closed = True
        owner, self._owner, self.connection = self._owner, None, None
        if owner is not None:
            await owner.aclose()

    def close_unused(self) -> bool:
        """Close the connection; see `Driver.close_unused`."""
        owner, connection = self._owner, self.connection
        if owner is None or connection is None or connection.forked:
            return False
        connection.run_soon(owner.close_soon)
        return True

    async def sleep(self, seconds: float) -> None:
        """Wait for that time."""
        await anyio.sleep(seconds)

    def lock(self) -> anyio.Lock:
        """Return a lock between tasks."""
        return anyio.Lock()

    def shield(self) -> anyio.CancelScope:
        """Return a context manager whose body finishes even if its task is cancelled in it."""
        return anyio.CancelScope(shield=True)

    async def run_in_thread(self, function: Callable[..., R], *args: Any) -> R:
        """Run a function that takes long in another thread."""
        return await anyio.to_thread.run_sync(function, *args)

    def caller(self) -> int:
        """Return the calling task's number."""
        return anyio.get_current_task().id
