"""Reports of the node's load to the entries that are connected, and pings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import anyio

from ....backends.errors import InferdError
from ....ipc.client import AsyncClient
from ....wire.frames import pack_frame
from ..link import BUFFER_BYTES, PING_S, REPORT_S, ReportKind, set_options
from .load import LoadQuery

RETRY_S = 0.2


class Subscriber(asyncio.Protocol):
    """An entry's report connection. *on_change* is called when it opens and when it ends."""

    def __init__(self, on_change: Callable[[Subscriber, bool], object]):
        self._on_change = on_change
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to receive reports."""
        self._transport = cast("asyncio.Transport", transport)
        set_options(transport.get_extra_info("socket"))
        self._on_change(self, True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_change(self, False)

    def data_received(self, data: bytes) -> None:
        """End: an entry sends nothing here."""
        self.end()

    def send(self, frame: bytes) -> None:
        """Send a frame. An entry that reads nothing misses it; the next frame replaces it."""
        assert self._transport is not None
        if self._transport.get_write_buffer_size() < BUFFER_BYTES:
            self._transport.write(frame)

    def end(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class LoadReporter:
    """Queries the daemon while an entry listens, and sends every entry the same reports. Lives on
    the relay's event loop. *connect* makes a client of the daemon.
    """

    def __init__(self, connect: Callable[[], AsyncClient]):
        self._connect = connect
        self._subscribers: set[Subscriber] = set()
        self._wanted = anyio.Event()
        self._query = LoadQuery()
        self._state = b""
        """The frames with which an entry begins: the daemon's hello and last load, or its loss."""

    def new_subscriber(self) -> Subscriber:
        """Return the protocol of a new report connection."""
        return Subscriber(self._change_subscriber)

    def _change_subscriber(self, subscriber: Subscriber, is_open: bool) -> None:
        if is_open:
            self._subscribers.add(subscriber)
            subscriber.send(pack_frame([ReportKind.PING]) + self._state)
            self._wanted.set()
        else:
            self._subscribers.discard(subscriber)

    def close(self) -> None:
        for subscriber in tuple(self._subscribers):
            subscriber.end()

    async def run(self) -> None:
        """Report until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._send_pings)
            while True:
                await self._wait_wanted()
                try:
                    async with self._connect() as client:
                        await self._report(client)
                except InferdError as exc:
                    self._publish(pack_frame([ReportKind.DAEMON_LOST, exc.to_wire()]))
                await anyio.sleep(RETRY_S)

    async def _wait_wanted(self) -> None:
        if not self._subscribers:
            self._wanted = anyio.Event()
            self._state = b""  # what was known is old when the next entry comes
            await self._wanted.wait()

    async def _report(self, client: AsyncClient) -> None:
        """Report while entries listen.

        :raises InferdError: the daemon was lost, or does not answer.
        """
        hello = pack_frame([ReportKind.HELLO, client.server])
        begin = hello
        while self._subscribers:
            load = await self._query.run(client)
            self._publish(begin + pack_frame([ReportKind.LOAD, load]), hello)
            begin = b""
            await anyio.sleep(REPORT_S)

    def _publish(self, frames: bytes, hello: bytes = b"") -> None:
        self._state = frames if frames.startswith(hello) else hello + frames
        for subscriber in tuple(self._subscribers):
            subscriber.send(frames)

    async def _send_pings(self) -> None:
        while True:
            await anyio.sleep(PING_S)
            for subscriber in tuple(self._subscribers):
                subscriber.send(pack_frame([ReportKind.PING]))
