"""The client's connection to the daemon, and any call of the protocol over it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar
from warnings import warn

import anyio
import msgspec

from ...backends.errors import ConnectionLost, InvalidArgument, ProtocolError
from .. import messages as w
from ..paths import client_socket_path
from .connection.connecting import hold_connection
from .connection.connection import ClientConnection
from .connection.inflight import InFlight
from .connection.owner import ConnectionOwner
from .failures import retrying

R = TypeVar("R")
E = TypeVar("E", bound=w.Map)
CLOSE_S_MAX = 5.0
"""Time that the daemon has to close a client's contexts and leases."""


class AsyncCaller:
    """The owner of a connection to the daemon. `async with` opens and closes it; without, the first
    call opens it, and `aclose` closes it.

    A call's `timeout` is in seconds; the default is the client's. Every call raises `Timeout` when
    that time is over (the daemon then cancels the call), `ConnectionLost` when the connection was
    lost, and any error that the daemon returns.
    """

    _connection: ClientConnection | None = None
    _owner: ConnectionOwner | None = None
    _closed = False

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
        self._resume_timeout, self._retries = resume_timeout, retries
        self.path = Path(path) if path is not None else client_socket_path()
        """The daemon's socket."""
        self._timeout, self._connect_timeout = timeout, connect_timeout
        self._software = software or "inferd python client"
        self._connecting = anyio.Lock()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.path}>"

    @property
    def _open_connection(self) -> ClientConnection:
        """The connection that carries the calls.

        :raises ConnectionLost: the client is not open.
        """
        if self._connection is None:
            raise ConnectionLost(
                f"the client of {self.path} is not open",
                hint="use it as `async with AsyncClient() as client:`, or make a call",
            )
        return self._connection

    @property
    def connected(self) -> bool:
        """Whether the connection stands; a client that is not open has none."""
        return self._connection is not None and not self._connection.lost

    @property
    def server(self) -> w.ServerHello:
        """The daemon's hello: its software, protocol and limits, and llama.cpp's build."""
        return self._open_connection.server

    async def open(self) -> Self:
        """Connect now, unless the client is open.

        :raises ConnectionLost: no daemon answers, or the client was closed.
        """
        async with self._connecting:
            self._check_not_closed()
            if self._owner is None:
                owner = ConnectionOwner()
                try:
                    await owner.start()
                    connection = await self._connect(owner)
                    self._check_not_closed()
                except BaseException:
                    await owner.aclose()
                    raise
                self._owner, self._connection = owner, connection
        return self

    def _check_not_closed(self) -> None:
        if self._closed:
            raise ConnectionLost(f"the client of {self.path} is closed", hint="make a new client")

    async def aclose(self) -> None:
        """Close the connection, which ends all calls; a second call does nothing."""
        self._closed = True
        owner, self._owner, self._connection = self._owner, None, None
        if owner is not None:
            await owner.aclose()

    async def __aenter__(self) -> Self:
        if self._owner is not None:
            raise InvalidArgument("the client is already open", hint="make another client")
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        owner, connection = self._owner, self._connection
        if owner is not None and connection is not None and not connection.forked:
            connection.run_soon(owner.close_soon)
            text = f"unclosed {self!r}: use `async with` (`with` for `Client`), or close it"
            warn(text, ResourceWarning, stacklevel=2, source=self)

    async def _connect(self, owner: ConnectionOwner) -> ClientConnection:
        connection = await owner.group.start(
            hold_connection, str(self.path), self._software, self._connect_timeout
        )
        assert isinstance(connection, ClientConnection)
        return connection

    async def _reconnect(self) -> None:
        """Connect again if the connection was lost; its requests have all ended.

        :raises ConnectionLost: no daemon answers.
        """
        await self.open()
        async with self._connecting:
            if self._open_connection.lost and self._owner is not None:
                self._connection = await self._connect(self._owner)

    def _seconds(self, timeout: float | None) -> float:
        """Return *timeout*, or the client's where it is None."""
        return self._timeout if timeout is None else timeout

    async def _call(
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
        connection = self._connection or (await self.open())._open_connection
        deadline = time.monotonic() + self._seconds(timeout)

        async def attempt() -> InFlight:
            request = InFlight(call, deadline)
            await connection.start_request(request, params, descriptors)
            if on_start is not None:
                on_start(request)
            return request

        request = await retrying(attempt, self._retries)
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
