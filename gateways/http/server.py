"""The HTTP server: uvicorn with httptools, bounded headers, and connections that do not linger."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .app import Gateway
from .exchange.exchange import ABORT
from .limits import HEADER_BYTES_MAX, Limits

KEEP_ALIVE_S = 30


class Protocol(HttpToolsProtocol):
    """A client's connection. It ends if a request's headers are too long or take too long, or if
    the client does not read the end of a response.
    """

    _receive_s_max = Limits.receive_s_max
    _header_bytes = 0
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin; the first request has to arrive in time."""
        super().connection_made(transport)
        self._await_headers()

    def _await_headers(self) -> None:
        self._header_bytes = 0
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self._receive_s_max, self._abort)

    def _abort(self) -> None:
        self.transport.abort()

    def _end_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self.transport.abort}  # type: ignore[dict-item]
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
            raise ValueError("the headers are too long")  # httptools makes it a parser's error

    def on_headers_complete(self) -> None:
        """Run the request."""
        self._end_header_timer()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._end_header_timer()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """End an unused connection; one whose client does not read is cut off."""
        if self.transport.get_write_buffer_size():
            self._abort()
        else:
            super().timeout_keep_alive_handler()


def run_server(
    gateway: Gateway,
    listener: socket.socket,
    limits: Limits,
    *,
    on_ready: Callable[[], object],
    certificate: Path | None = None,
    key: Path | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; requests may then end, for `stop_s_max`."""
    protocol = type("BoundProtocol", (Protocol,), {"_receive_s_max": limits.receive_s_max})
    config = uvicorn.Config(
        gateway,
        loop="uvloop",
        http=protocol,
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=limits.clients_max,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(limits.stop_s_max),
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    # uvicorn raises the signal again after its end, which would end the process before the socket's
    # path is removed.
    signal.signal(signal.SIGTERM, lambda *_: None)
    _Server(config, on_ready).run([listener])


class _Server(uvicorn.Server):
    """A server that reports when it is ready."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], object]):
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        await super().startup(sockets)
        if self.started:
            self._on_ready()
