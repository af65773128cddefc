"""The driver of the synchronous client: every wait blocks the calling thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from ...messages import ClientHello
from .blocking_connection import BlockingConnection
from .core import client_closed_error

R = TypeVar("R")


class BlockingDriver:
    """The owner of a connection that threads share."""

    runs_coroutines = False

    def __init__(self, path: str, hello: ClientHello, connect_timeout_s: float):
        self.connection: BlockingConnection | None = None
        self.closed = False
        self._path, self._hello = path, hello
        self._connect_timeout_s = connect_timeout_s
        self._connecting = threading.RLock()

    async def open(self) -> BlockingConnection:
        """Return the connection; see `Driver.open`."""
        connection = self.connection
        if connection is None:
            with self._connecting:
                self._check_not_closed()
                connection = self.connection = self.connection or self._connect()
        return connection

    async def reconnect(self) -> BlockingConnection:
        """Return the connection; see `Driver.reconnect`."""
        connection = await self.open()
        if connection.lost and not connection.forked:
            with self._connecting:
                self._check_not_closed()
                old = self.connection
                if old is None or old.lost:
                    connection = self.connection = self._connect()
                    if old is not None:
                        old.close()
                else:
                    connection = old
        return connection

    def _connect(self) -> BlockingConnection:
        return BlockingConnection.connect(self._path, self._hello, self._connect_timeout_s)

    def _check_not_closed(self) -> None:
        if self.closed:
            raise client_closed_error(self._path)

    async def close(self) -> None:
        """Close the connection; see `Driver.close`."""
        self.closed = True
        if self.connection is not None and self.connection.forked:
            self.close_unused()
        else:
            with self._connecting:  # a call that connects now must not leave a connection behind
                self.close_unused()

    def close_unused(self) -> bool:
        """Close the connection; see `Driver.close_unused`."""
        connection, self.connection = self.connection, None
        if connection is None:
            return False
        connection.close()
        return not connection.forked

    async def sleep(self, seconds: float) -> None:
        """Block for that time."""
        time.sleep(seconds)  # noqa: ASYNC251 - it blocks by intention

    def lock(self) -> BlockingLock:
        """Return a lock between threads."""
        return BlockingLock()

    def shield(self) -> AbstractContextManager[Any]:
        """Return a context manager without effect, as nothing cancels a call that blocks."""
        return nullcontext()

    async def run_in_thread(self, function: Callable[..., R], *args: Any) -> R:
        """Run the function in the calling thread, which may block."""
        return function(*args)

    def caller(self) -> int:
        """Return the calling thread's number."""
        return threading.get_ident()


class BlockingLock:
    """A lock between threads, with the interface of a lock between tasks."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    async def __aenter__(self) -> None:
        self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()
