"""One client's connection: its guest, its calls under way, and their end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
from grpclib.config import Configuration
from grpclib.encoding.proto import ProtoCodec
from grpclib.events import _DispatchServerEvents
from grpclib.protocol import Buffer, H2Protocol
from grpclib.protocol import Stream as H2Stream
from grpclib.server import Handler
from h2.config import H2Configuration
from h2.settings import SettingCodes

from ...backends.errors import TooLarge
from ..guests import Guest
from .limits import UNREAD_BYTES_MAX, Limits
from .service import RpcService

log = logging.getLogger(__name__)


class RpcConnection(Handler):
    """The calls of one client. grpclib runs each as a task, until it or the connection ends.

    grpclib calls `close`, which cancels the calls, when the client has closed its connection or has
    sent something that is not gRPC.
    """

    def __init__(self, guest: Guest, limits: Limits):
        super().__init__(RpcService(guest).handlers(), ProtoCodec(), None, _DispatchServerEvents())
        self.protocol = _Protocol(self, limits)
        self.closed = anyio.Event()
        self._message_bytes_max = limits.message_bytes_max
        self._calls: set[H2Stream] = set()
        self._stopping = False

    def accept(
        self, stream: H2Stream, headers: list[tuple[str, str]], release_stream: Callable[[], Any]
    ) -> None:
        """Run a call."""
        assert stream.id is not None
        acknowledge = partial(stream.connection.ack, stream.id)
        stream.buffer = _MessageBuffer(acknowledge, self._message_bytes_max)
        self._calls.add(stream)

        def end_call(_: object = None) -> None:
            if stream in self._calls:
                self._calls.remove(stream)
                release_stream()
                self._close_if_stopped()

        super().accept(stream, headers, end_call)
        # A call that is cancelled before its task has begun does not release its stream itself.
        self._tasks[stream].add_done_callback(end_call)

    def close(self) -> None:
        """Cancel all calls."""
        super().close()
        self.closed.set()

    def stop(self) -> None:
        """Close the connection as soon as it has no call under way."""
        self._stopping = True
        self._close_if_stopped()

    def _close_if_stopped(self) -> None:
        if self._stopping and not self._calls:
            self.end()

    def end(self) -> None:
        """Close the connection now."""
        processor = getattr(self.protocol, "processor", None)  # None until it is connected
        if processor is not None and not self.closing:
            processor.close("The gateway ends the connection")
        self.closed.set()


class _MessageBuffer(Buffer):
    """The received part of a request; its size is checked before its memory is allocated."""

    def __init__(self, acknowledge: Callable[[int], None], size_max: int):
        super().__init__(acknowledge)
        self._size_max = size_max

    async def read(self, size: int) -> bytes:
        if size > self._size_max:
            raise TooLarge(
                f"a request of {size} bytes; {self._size_max} are allowed", hint="send less"
            )
        return await super().read(size)


class _Protocol(H2Protocol):
    """HTTP/2 for one connection; the client may have `calls_max` calls under way."""

    def __init__(self, connection: RpcConnection, limits: Limits):
        http = H2Configuration(
            client_side=False,
            header_encoding="ascii",
            validate_inbound_headers=False,
            validate_outbound_headers=False,
            normalize_inbound_headers=False,
            normalize_outbound_headers=False,
        )
        super().__init__(connection, Configuration().__for_server__(), http)
        self._calls_max = limits.calls_max

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        super().connection_made(transport)
        http = self.connection._connection
        http.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: self._calls_max})
        self.connection.flush()

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
            if self._transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
                self._transport.abort()
        except Exception:  # of any kind, as h2 and grpclib do not expect every sequence of bytes
            log.debug("unreadable data", exc_info=True)
            self.processor.close("Unreadable data")
