"""One node as the entry knows it, by its report connection."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec

from .....backends.errors import InferdError, ProtocolError, error_from_wire
from .....ipc.messages import ServerHello
from .....wire.frames import READ_BYTES, REPLY_BYTES_MAX, FrameReader
from ...addresses import NodeAddress
from ...certificates.folder import server_name
from ...certificates.tls import failure_reason, refusal_reason
from ...link import HANDSHAKE_S_MAX, LOST_S, ReportKind, set_options
from ...routing.loads import NodeLoad
from .own_turns import OwnTurns

RETRY_S = 1.0
_message = msgspec.msgpack.Decoder(list[msgspec.Raw])
_kind = msgspec.msgpack.Decoder(int)
_load = msgspec.msgpack.Decoder(NodeLoad)
_hello = msgspec.msgpack.Decoder(ServerHello)
_map = msgspec.msgpack.Decoder(dict[str, Any])


class NodeCounters:
    """Events of a node since it became one of the fleet. Owned by the entry's event loop."""

    def __init__(self) -> None:
        self.losses = 0
        self.contexts_opened = 0
        self.contexts_refused = 0
        self.contexts_lost = 0
        self.sessions_moved = 0
        self.session_move_failures = 0


class NodeLink:
    """The state of a node. Lives on the entry's event loop; its task runs `run`.

    *on_change* is called when the node or a new start of its daemon is found, and when the node is
    lost or the first attempt to reach it fails. `load` is None while it cannot be reached, and
    `cause` is the reason. `address` is None until the node publishes one.
    """

    def __init__(
        self,
        name: str,
        address: NodeAddress | None,
        context: ssl.SSLContext,
        own_certificate: tuple[Path, str],
        on_change: Callable[[NodeLink], object],
    ):
        self.name, self.address = name, address
        self.load: NodeLoad | None = None
        self.hello: ServerHello | None = None
        self.cause = "it has not answered yet"
        self.lost_at = time.monotonic()
        """The time since which it cannot be reached."""
        self._attempt: anyio.CancelScope | None = None
        self._context, self._own_certificate = context, own_certificate
        self._on_change = on_change
        self.turns = OwnTurns()
        self._reported = anyio.Event()
        """Set at the next report."""
        self.swapped = Counter[str]()
        """The swaps under way by model, during which new contexts go to other nodes."""
        self.counters = NodeCounters()
        self.reported_at: float | None = None
        """The time of its last report."""
        self.settled = anyio.Event()
        """Set once the node was found, or could not be reached."""

    async def run(self) -> None:
        """Listen to the node's reports, and connect again after a loss, until cancelled."""
        while True:
            with anyio.CancelScope() as self._attempt:
                if self.address is None:
                    self._lose("its address is not published yet")
                    await anyio.sleep_forever()
                else:
                    await self._try(self.address)
                    await anyio.sleep(RETRY_S)

    def move(self, address: NodeAddress) -> None:
        """Connect to another address from now on."""
        if address != self.address:
            self.address = address
            if self.load is not None:
                self._lose(f"it has moved to {address}")
            if self._attempt is not None:
                self._attempt.cancel()

    async def _try(self, address: NodeAddress) -> None:
        try:
            await self._listen(address)
        except InferdError as exc:
            self._lose(exc.message)
        except OSError as exc:
            self._lose(failure_reason(exc, self.name))

    async def _listen(self, address: NodeAddress) -> None:
        with anyio.move_on_after(HANDSHAKE_S_MAX) as scope:
            reader, writer = await asyncio.open_connection(
                address.host,
                address.port,
                ssl=self._context,
                server_hostname=server_name(self.name),
            )
        if scope.cancelled_caught:
            self._lose(f"it has not answered within {HANDSHAKE_S_MAX:g} s")
            return
        try:
            set_options(writer.get_extra_info("socket"))
            await self._read_reports(reader)
        finally:
            writer.transport.abort()

    async def _read_reports(self, reader: asyncio.StreamReader) -> None:
        frames, received = FrameReader(REPLY_BYTES_MAX), False
        while True:
            with anyio.move_on_after(LOST_S) as scope:
                data = await reader.read(READ_BYTES)
            if scope.cancelled_caught:
                self._lose(f"its relay was silent for {LOST_S:g} s")
                return
            if not data:
                self._lose("its relay has closed the connection" if received else self._refusal())
                return
            for frame in frames.read_frames(data):
                received = True
                self._handle(frame)

    def _refusal(self) -> str:
        return refusal_reason(*self._own_certificate)

    def _handle(self, frame: bytes) -> None:
        try:
            items = _message.decode(frame)
            kind = _kind.decode(items[0])
            if kind == ReportKind.LOAD:
                self._accept_load(_load.decode(items[1]))
            elif kind == ReportKind.HELLO:
                self.hello = _hello.decode(items[1])
            elif kind == ReportKind.DAEMON_LOST:
                self._lose(error_from_wire(_map.decode(items[1])).message)
        except (msgspec.DecodeError, IndexError) as exc:
            raise ProtocolError(f"a report cannot be read: {exc}") from None

    async def wait_report(self) -> None:
        """Wait for the next report."""
        await self._reported.wait()

    def _accept_load(self, load: NodeLoad) -> None:
        is_new = self.load is None or self.load.instance != load.instance
        self.load, self.cause = load, ""
        self.reported_at = time.monotonic()
        self.turns.note_report(load, self.reported_at)
        self._reported.set()
        self._reported = anyio.Event()
        if is_new:
            self.settled.set()
            self._on_change(self)

    def _lose(self, cause: str) -> None:
        is_news = self.load is not None or not self.settled.is_set()
        if self.load is not None:
            self.lost_at = time.monotonic()
        self.counters.losses += self.load is not None
        self.load, self.cause = None, cause
        self.settled.set()
        if is_news:
            self._on_change(self)
