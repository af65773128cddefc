"""A client's connection: uvicorn's with httptools, with the gateway's bounds and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .app import Gateway
from .exchange.exchange import LINK
from .exchange.statuses import HttpRefusal
from .limits import HEADER_BYTES_MAX, Limits

_UNREADABLE = HttpRefusal(400, "this is not an HTTP request", hint="send HTTP/1.1")


class Protocol(HttpToolsProtocol):
    """A client's connection. It ends if a request's headers are too long or take too long, or if
    the client does not read the end of a response.
    """

    _gateway: ClassVar[Gateway]
    _limits: ClassVar[Limits]
    # With more than 30 attributes in its dictionary, each connection would take a kilobyte more.
    __slots__ = ("_header_bytes", "_header_timer", "_refusal", "_watchers")

    def connection_made(self, transport: Any) -> None:
        """Accept the connection; the first request's headers have to arrive in time."""
        super().connection_made(transport)
        self._header_timer: asyncio.TimerHandle | None = None
        self._refusal: HttpRefusal | None = None
        """The refusal by which this class has ended the parser, if it has."""
        self._watchers: list[Callable[[], None]] = []
        self._await_headers()

    def _await_headers(self) -> None:
        self._header_bytes = 0
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self._limits.receive_s_max, self._abort)

    def _abort(self) -> None:
        self.transport.abort()

    def _end_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._await_headers()

    def on_url(self, url: bytes) -> None:
        """Read a part of the path."""
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read a header."""
        self._count_header(len(name) + len(value))
        super().on_header(name, value)

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > HEADER_BYTES_MAX:
            message = f"the headers are longer than {HEADER_BYTES_MAX} bytes"
            self._refuse(431, message, hint="send shorter ones")

    def _refuse(self, status: int, message: str, *, hint: str) -> None:
        self._refusal = HttpRefusal(status, message, hint=hint)
        raise self._refusal  # httptools turns it into a parser's error

    def on_headers_complete(self) -> None:
        """Run the request."""
        self._end_header_timer()
        if [name for name, _ in self.headers].count(b"host") > 1:
            self._refuse(400, "the request has several Host headers", hint="send one")
        super().on_headers_complete()
        is_excess = len(self.connections) > self._limits.clients_max
        self.scope["extensions"] = {LINK: _Link(self.cycle, self._watchers, is_excess)}  # type: ignore[dict-item]
        if self.scope["http_version"] == "1.0":
            _end_body_with_connection(self.cycle)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that cannot be read, unless the client is being answered already."""
        if self.cycle is None or self.cycle.response_complete:
            refusal = self._refusal or _UNREADABLE
            path = getattr(self, "url", b"").decode("latin-1")
            body = self._gateway.refusal_body(path, refusal)
            self.transport.write(
                STATUS_LINE[refusal.status]
                + b"content-type: application/json\r\n"
                + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
                + body
            )
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Do nothing, because a request for another protocol is answered like any other."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the requests that watch the connection."""
        self._end_header_timer()
        super().connection_lost(exc)
        for on_lost in tuple(self._watchers):
            on_lost()

    def timeout_keep_alive_handler(self) -> None:
        """Close an unused connection, or cut it off if the client has not read all data."""
        if self.transport.get_write_buffer_size():
            self._abort()
        else:
            super().timeout_keep_alive_handler()


class _Link:
    """A request's `ClientLink`."""

    __slots__ = ("_cycle", "_watchers", "excess")

    def __init__(self, cycle: Any, watchers: list[Callable[[], None]], excess: bool):
        self._cycle, self._watchers, self.excess = cycle, watchers, excess

    @property
    def blocked(self) -> bool:
        """Whether a write would wait because the client does not read."""
        return bool(self._cycle.flow.write_paused)

    def abort(self) -> None:
        """Cut the connection off."""
        self._cycle.transport.abort()

    def write_now(self, data: bytes) -> bool:
        """Write a chunk without uvicorn's coroutine and messages, which take longer than the rest
        of a token's way. Return whether it was written; if not, only uvicorn can write it.
        """
        cycle = self._cycle
        waits = cycle.flow.write_paused or cycle.disconnected or cycle.response_complete
        if waits or not cycle.chunked_encoding:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call *on_lost* when the client disconnects; to notice that, the connection is read."""
        self._watchers.append(on_lost)
        self._cycle.flow.resume_reading()
        if self._cycle.transport.is_closing():
            on_lost()

    def unwatch(self, on_lost: Callable[[], None]) -> None:
        """Stop calling *on_lost*."""
        if on_lost in self._watchers:
            self._watchers.remove(on_lost)


def _end_body_with_connection(cycle: Any) -> None:
    """Let the end of the connection mark the end of a response's body, because uvicorn would send
    chunks, which HTTP/1.0 does not have.
    """
    send = cycle.send
    cycle.chunked_encoding = False

    async def send_unchunked(message: Any) -> None:
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unchunked
