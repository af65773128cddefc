"""The client's connection to the daemon, and any call of the protocol over it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

import anyio
import anyio.abc
import msgspec

from ...backends.errors import ConnectionLost, InvalidArgument, ProtocolError
from .. import messages as w
from ..paths import client_socket_path
from .connection.connecting import hold_connection, own_group
from .connection.connection import ClientConnection
from .connection.inflight import InFlight
from .failures import retrying

R = TypeVar("R")
E = TypeVar("E", bound=w.Map)
CLOSE_S_MAX = 5.0
"""Time that the daemon has to close a client's contexts and leases."""


class AsyncCaller:
    """The owner of a connection to the daemon, opened and closed by `async with`.

    A call's `timeout` is in seconds; the default is the client's. Every call raises `Timeout` when
    that time is over (the daemon then cancels the call), `ConnectionLost` when the connection was
    lost, and any error that the daemon returns.
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
        self.path = Path(path) if path is not None else client_socket_path()
        """The daemon's socket."""
        self._timeout, self._connect_timeout = timeout, connect_timeout
        self._software = software or "inferd python client"
        self._connection: ClientConnection | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._connecting = anyio.Lock()
        self._stack = AsyncExitStack()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.path}>"

    @property
    def connection(self) -> ClientConnection:
        """The connection that carries the calls.

        :raises ConnectionLost: the client is not open.
        """
        if self._connection is None:
            raise ConnectionLost(
                f"the client of {self.path} is not open",
                hint="use it as `async with AsyncClient() as client:`",
            )
        return self._connection

    @property
    def server(self) -> w.ServerHello:
        """The daemon's hello: its software, protocol and limits, and llama.cpp's build."""
        return self.connection.server

    async def __aenter__(self) -> Self:
        if self._connection is not None:
            raise InvalidArgument("the client is already open", hint="make another client")
        group = await self._stack.enter_async_context(own_group())
        try:
            self._connection = await self._connect(group)
        except BaseException:
            await self._stack.aclose()
            raise
        self._group = group
        return self

    async def _connect(self, group: anyio.abc.TaskGroup) -> ClientConnection:
        connection = await group.start(
            hold_connection, str(self.path), self._software, self._connect_timeout
        )
        assert isinstance(connection, ClientConnection)
        return connection

    async def reconnect(self) -> None:
        """Connect again if the connection was lost; its requests have all ended.

        :raises ConnectionLost: no daemon answers.
        """
        async with self._connecting:
            if self._group is None:
                raise InvalidArgument("the client is not open", hint="open a new one")
            if self.connection.lost:
                self._connection = await self._connect(self._group)

    async def __aexit__(self, *error: Any) -> bool | None:
        self._connection = self._group = None
        return await self._stack.__aexit__(*error)

    def seconds(self, timeout: float | None) -> float:
        """Return *timeout*, or the client's where it is None."""
        return self._timeout if timeout is None else timeout

    async def call(
        self,
        call: str,
        params: Any,
        result: type[R],
        timeout: float | None,
        *,
        descriptors: Sequence[int] = (),
        on_event: Callable[[dict[str, Any]], object] | None = None,
        on_start: Callable[[InFlight], None] | None = None,
    ) -> R:
        """Make any call of the protocol; *params* and *result* are structs of `messages`."""
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
            await _pass_events(request, on_event)
        finally:
            if not request.done:
                connection.abandon_request(request)
        try:
            return msgspec.convert(request.outcome(), result)
        except msgspec.ValidationError as exc:
            raise ProtocolError(f"the answer to {call} cannot be read: {exc}") from None


async def _pass_events(
    request: InFlight, on_event: Callable[[dict[str, Any]], object] | None
) -> None:
    """Pass the events of *request* on until it is done."""
    while True:
        await request.wait()
        if not request.events:
            return
        event = request.events.popleft()
        if on_event is not None:
            on_event(event)


def as_event(event: dict[str, Any], kind: type[E]) -> E:
    """Return an event as its struct.

    :raises ProtocolError: the event does not fit the struct.
    """
    try:
        return msgspec.convert(event, kind)
    except msgspec.ValidationError as exc:
        raise ProtocolError(f"a {kind.__name__} cannot be read: {exc}") from None
