"""The client's connection, and any call of the protocol over it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import anyio.abc
import msgspec

from ...backends.errors import ConnectionLost, InvalidArgument, ProtocolError
from .. import messages as w
from ..paths import client_socket_path
from .connection.connecting import hold_connection, own_group
from .connection.connection import Connection
from .connection.inflight import InFlight
from .retries import retrying

R = TypeVar("R")
CLOSE_S_MAX = 5.0
"""How long a client waits for the daemon to close what it opened."""


class AsyncCaller:
    """Owner of a connection to the daemon, opened and closed by `async with`.

    Every call raises `Timeout` when its time is up (it is then cancelled on the daemon),
    `ConnectionLost` when the connection was lost, and any error that the daemon returns. A call's
    `timeout` is in seconds; without one the client's holds.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        timeout: float = 600.0,
        connect_timeout: float = 5.0,
        resume_timeout: float = 60.0,
        retries: int = 0,
        software: str = "",
    ):
        seconds = (timeout, connect_timeout, resume_timeout)
        if not all(s > 0 for s in seconds) or retries < 0:
            raise InvalidArgument(
                f"timeout {timeout:g}, connect_timeout {connect_timeout:g}, resume_timeout"
                f" {resume_timeout:g}, retries {retries}",
                hint="timeouts are above 0 s, retries 0 or more",
            )
        self.resume_timeout, self.retries = resume_timeout, retries
        self._path = Path(path) if path is not None else client_socket_path()
        self._timeout, self._connect_timeout = timeout, connect_timeout
        self._software = software or "inferd python client"
        self._connection: Connection | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._connecting = anyio.Lock()
        self._stack = AsyncExitStack()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._path}>"

    @property
    def path(self) -> Path:
        """The daemon's socket."""
        return self._path

    @property
    def connection(self) -> Connection:
        """The connection that the calls go over.

        :raises ConnectionLost: the client is not open.
        """
        if self._connection is None:
            raise ConnectionLost(
                f"the client of {self._path} is not open",
                hint="use it as `async with AsyncClient() as client:`",
            )
        return self._connection

    @property
    def server(self) -> w.ServerHello:
        """The daemon's hello: software, protocol, limits, llama.cpp's build."""
        return self.connection.server

    async def __aenter__(self) -> Self:
        if self._connection is not None:
            raise InvalidArgument("the client is open already", hint="make another one")
        group = await self._stack.enter_async_context(own_group())
        try:
            self._connection = await self._connect(group)
        except BaseException:
            await self._stack.aclose()
            raise
        self._group = group
        return self

    async def _connect(self, group: anyio.abc.TaskGroup) -> Connection:
        connection = await group.start(
            hold_connection, str(self._path), self._software, self._connect_timeout
        )
        assert isinstance(connection, Connection)
        return connection

    async def reconnect(self) -> None:
        """Connect again if the connection was lost; everything that belonged to it has ended.

        :raises ConnectionLost: no daemon answers.
        """
        async with self._connecting:
            if self._group is None:
                raise InvalidArgument("the client is not open", hint="open a new one")
            if self.connection.lost:
                self._connection = await self._connect(self._group)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self._connection = self._group = None
        return await self._stack.__aexit__(kind, error, traceback)

    def seconds(self, timeout: float | None) -> float:
        """Return *timeout*, or the client's."""
        return self._timeout if timeout is None else timeout

    async def call(
        self,
        call: str,
        params: Any,
        result: type[R],
        timeout: float | None,
        *,
        descriptors: Sequence[int] = (),
        on_event: Callable[[dict[str, Any]], None] | None = None,
        on_start: Callable[[InFlight], None] | None = None,
    ) -> R:
        """Make any call of the protocol; *params* and *result* are its structs of `messages`."""
        connection = self.connection
        deadline = time.monotonic() + self.seconds(timeout)

        async def attempt() -> InFlight:
            request = InFlight(call, deadline)
            await connection.start_request(request, params, descriptors)
            if on_start is not None:
                on_start(request)
            return request

        request = await retrying(attempt, self.retries)
        try:
            if on_event is not None:
                await _pass_events(request, on_event)
            await request.wait()
        finally:
            if not request.done:
                connection.abandon_request(request)
        try:
            return msgspec.convert(request.outcome(), result)
        except msgspec.ValidationError as exc:
            raise ProtocolError(f"the answer to {call} cannot be read: {exc}") from None


async def _pass_events(request: InFlight, on_event: Callable[[dict[str, Any]], None]) -> None:
    while True:
        await request.wait()
        if not request.events:
            return
        on_event(request.events.popleft())
