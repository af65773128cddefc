"""The client's connection to the daemon, any call of the protocol over it, and failures of
requests: retries of those refused for now, and turns that lost their connection.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Self, TypeVar
from warnings import warn

import msgspec

from ...backends.errors import (
    Busy,
    ConnectionLost,
    InferdError,
    InvalidArgument,
    ProtocolError,
    ShuttingDown,
    error_from_wire,
)
from .. import messages as w
from ..media_parts import has_parts
from ..names import check_key_name, check_label, check_user_name
from ..paths import client_socket_path
from ..payloads import Payload
from .connection.async_connection import AsyncDriver
from .connection.core import ConnectionCore, InFlight
from .connection.driver import Driver

RETRY_S_MAX = 30.0
RETRY_PAUSE_S = 0.05
RETRY_PAUSE_S_MAX = 1.0
"""The first and the longest pause between two attempts to connect or attach again."""
PROGRESS_HINT = (
    "`data` has the tokens and the text that were read; a session with an id continues after them"
    " by resume(tokens, text), or by itself if it is opened with resume=True"
)


def is_loss(error: InferdError) -> bool:
    """Return whether *error* means that a turn lost its connection or daemon."""
    return isinstance(error, ConnectionLost | ShuttingDown) or is_node_loss(error)


def is_node_loss(error: InferdError) -> bool:
    """Return whether *error* means that a fleet lost a node, while the connection was kept."""
    return bool(error.data.get("cause") == "node")


def with_progress(error: InferdError, tokens: list[int], text: str) -> InferdError:
    """Return *error* with the tokens and the text that were read."""
    fields = error.to_wire()
    fields["message"] = f"{error.message}; {len(tokens)} tokens of the answer were read"
    fields["hint"] = f"{error.hint}; {PROGRESS_HINT}"
    fields["data"] = {**error.data, "tokens": list(tokens), "text": text}
    return error_from_wire(fields)


def retry_delay_s(error: InferdError, remaining_s: float) -> float | None:
    """Return the delay before a retry after *error*, or None for no retry."""
    if not error.retryable or isinstance(error, ShuttingDown):
        return None  # a daemon that shuts down accepts nothing more on this connection
    daemon_delay_s = error.retry_after_s if isinstance(error, Busy) else 0.0
    # The jitter only adds: the daemon has estimated when a retry can succeed.
    delay_s = min(daemon_delay_s, RETRY_S_MAX) * random.uniform(1.0, 1.25)
    return delay_s if delay_s < remaining_s else None


async def retrying(
    attempt: Callable[[], Awaitable[InFlight]], retries: int, driver: Driver
) -> InFlight:
    """Return the request of the first *attempt* that is not refused, or of the last attempt.

    While retries remain, it returns only after the request's first event or its end, because
    nothing is retried after the first token.
    """
    while True:
        request = await attempt()
        if retries <= 0:
            return request
        retries -= 1
        try:
            await request.wait_begun()
        except BaseException:
            request.connection.abandon_request(request)
            raise
        delay_s = None
        if request.error is not None and not request.begun:
            delay_s = retry_delay_s(request.error, request.remaining_s)
        if delay_s is None:
            return request
        await driver.sleep(delay_s)


def retry_pauses() -> Iterator[float]:
    """Yield endlessly the pauses between attempts to connect again."""
    pause_s = RETRY_PAUSE_S
    while True:
        yield pause_s * random.uniform(1.0, 1.25)  # many clients retry at the same time
        pause_s = min(2 * pause_s, RETRY_PAUSE_S_MAX)


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

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        timeout: float = 600.0,
        connect_timeout: float = 5.0,
        resume_timeout: float = 60.0,
        retries: int = 0,
        reconnect: bool = False,
        software: str = "",
        label: str = "",
        on_behalf_of: str = "",
        key: str = "",
        key_limits: Mapping[str, int] | None = None,
    ):
        seconds = (timeout, connect_timeout, resume_timeout)
        if not all(s > 0 for s in seconds) or retries < 0:
            raise InvalidArgument(
                "timeouts must be above 0 s, and retries at least 0; given were timeout"
                f" {timeout:g}, connect_timeout {connect_timeout:g}, resume_timeout"
                f" {resume_timeout:g}, retries {retries}",
            )
        self._resume_timeout, self._retries = resume_timeout, retries
        self.path = Path(path) if path is not None else client_socket_path()
        """The daemon's socket."""
        self._timeout, self._reconnects = timeout, reconnect
        check_label(label)
        check_user_name(on_behalf_of)
        check_key_name(key)
        hello = w.ClientHello(
            protocol=w.PROTOCOL_VERSION,
            software=software or "inferd python client",
            label=label,
            on_behalf_of=on_behalf_of,
            key=key,
            key_limits=dict(key_limits or {}),
        )
        self._driver = self._make_driver(str(self.path), hello, connect_timeout)

    def _make_driver(self, path: str, hello: w.ClientHello, connect_timeout_s: float) -> Driver:
        return AsyncDriver(path, hello, connect_timeout_s)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.path}>"

    @property
    def _open_connection(self) -> ConnectionCore:
        """The connection that carries the calls.

        :raises ConnectionLost: the client is not open.
        """
        if self._driver.connection is None:
            raise ConnectionLost(
                f"the client of {self.path} is not open",
                hint="use it as `async with AsyncClient() as client:`, or make a call",
            )
        return self._driver.connection

    @property
    def connected(self) -> bool:
        """Whether the client has a connection that was not lost."""
        return self._driver.connection is not None and not self._driver.connection.lost

    @property
    def server(self) -> w.ServerHello:
        """The daemon's hello: its software, protocol and limits, and llama.cpp's build."""
        return self._open_connection.server

    async def open(self) -> Self:
        """Connect now, unless the client is open.

        :raises ConnectionLost: no daemon answers, or the client was closed.
        """
        await self._driver.open()
        return self

    async def aclose(self) -> None:
        """Close the connection, which ends all calls; a second call does nothing."""
        await self._driver.close()

    async def __aenter__(self) -> Self:
        if self._driver.connection is not None:
            raise InvalidArgument("the client is already open", hint="make another client")
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        driver: Driver | None = getattr(self, "_driver", None)  # None after a failed __init__
        if driver is not None and driver.close_unused():
            text = f"unclosed {self!r}: use `async with` (`with` for `Client`), or close it"
            warn(text, ResourceWarning, stacklevel=2, source=self)

    async def _live_connection(self, deadline: float) -> ConnectionCore:
        """Return the connection; if it was lost and the client reconnects, return a new one.

        :raises ConnectionLost: no daemon answers.
        """
        connection = self._driver.connection or await self._driver.open()
        if not self._reconnects or not connection.lost:
            return connection
        until = min(deadline, time.monotonic() + self._resume_timeout)
        for pause_s in retry_pauses():
            try:
                return await self._driver.reconnect()
            except InferdError as exc:
                final = not exc.retryable and not isinstance(exc, ConnectionLost)
                if final or self._driver.closed or time.monotonic() + pause_s > until:
                    raise
            await self._driver.sleep(pause_s)
        raise AssertionError("the pauses do not end")

    def _seconds(self, timeout: float | None) -> float:
        """Return *timeout*, or the client's timeout if it is None."""
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
        retries: int | None = None,
    ) -> R:
        """Make any call of the protocol; *params* and *result* are structs of `messages`. Without
        *retries*, those of the client are made.
        """
        deadline = time.monotonic() + self._seconds(timeout)
        connection = await self._live_connection(deadline)
        requests: list[InFlight] = []

        async def attempt() -> InFlight:
            request = InFlight(call, deadline)
            requests.append(request)
            await send_request(connection, self._driver, request, params, descriptors)
            if on_start is not None:
                on_start(request)
            return request

        try:
            count = self._retries if retries is None else retries
            request = await retrying(attempt, count, self._driver)
            await _pass_events(request, on_event)
        finally:
            for begun in requests:
                if not begun.done:
                    connection.abandon_request(begun)
        try:
            return msgspec.convert(request.outcome(), result)
        except msgspec.ValidationError as exc:
            raise ProtocolError(f"the answer to {call} cannot be read: {exc}") from None


async def send_request(
    connection: ConnectionCore,
    driver: Driver,
    request: InFlight,
    params: Any,
    descriptors: Sequence[int] = (),
) -> None:
    """Send a request as `start_request` does, with the images and sounds in its messages."""
    if not has_parts(getattr(params, "messages", None)):
        await connection.start_request(request, params, descriptors)
        return
    with closing(Payload(driver.run_in_thread)) as packed:
        params = await packed.pack_messages(params)
        await connection.start_request(request, params, packed.descriptors)


async def _pass_events(
    request: InFlight, on_event: Callable[[dict[str, Any]], object] | None
) -> None:
    """Pass the events of *request* on until it is done."""
    while True:
        await request.wait()
        if not request.has_events():
            return
        event = request.next_event()
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
