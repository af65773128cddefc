"""The HTTP server: the APIs that it serves, uvicorn with httptools, and its end by signals."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

import uvicorn

from .anthropic import ANTHROPIC
from .app import Gateway
from .connection import Protocol, TlsProtocol
from .exchange import Api
from .inferd_api import INFERD
from .limits import Limits
from .llama_server import LLAMA_SERVER
from .ollama import OLLAMA
from .open_inference import OPEN_INFERENCE
from .openai import OPENAI
from .reranking import RERANKING
from .web_page import PAGE

APIS: Sequence[Api] = (
    *(PAGE, ANTHROPIC, OLLAMA, INFERD, RERANKING, OPEN_INFERENCE, LLAMA_SERVER, OPENAI),
)
"""Longer prefixes of paths come first. The last API shapes the errors of paths that belong to
none.
"""


KEEP_ALIVE_S = 30
_DATE_S = 1.0
"""The resolution of the Date header."""


def run_server(
    gateway: Gateway,
    listeners: Sequence[socket.socket],
    limits: Limits,
    *,
    on_ready: Callable[[], object],
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; requests may then end, for `stop_s_max`."""
    bound = {"_gateway": gateway, "_limits": limits, "_clients": gateway.clients, "_tls": tls}
    protocol = Protocol if tls is None else TlsProtocol
    config = uvicorn.Config(
        gateway,
        loop="uvloop",
        http=type("BoundProtocol", (protocol,), bound),
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(limits.stop_s_max),
    )
    # uvicorn raises the signal again after its end, which would end the process before the socket's
    # path is removed.
    signal.signal(signal.SIGTERM, lambda *_: None)
    _Server(config, on_ready, gateway.stop).run([*listeners])


class _Server(uvicorn.Server):
    """A server that reports when it is ready and when it stops.

    It wakes once a second for the date of its responses; uvicorn's own loop wakes ten times as
    often, to poll for signals.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_ready: Callable[[], object],
        on_stop: Callable[[], object],
    ):
        super().__init__(config)
        self._on_ready, self._on_stop = on_ready, on_stop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signalled = asyncio.Event()

    async def main_loop(self) -> None:
        """Run until a signal ends the server."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(_DATE_S):
                    await self._signalled.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End the server; a signal handler runs in no task."""
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._signalled.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            # Later collections then skip the modules, which would pause all streams for 10 ms.
            gc.collect()
            gc.freeze()
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, and wait for the requests under way."""
        self._on_stop()
        await super().shutdown(sockets)
