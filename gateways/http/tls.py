"""A client's connection over TLS, which is counted and bounded during its handshake too."""

from __future__ import annotations

import logging
import os
import socket
import ssl
from contextlib import suppress
from typing import Any, ClassVar

from .connection import Protocol

log = logging.getLogger(__name__)


class TlsProtocol(Protocol):
    """A client's connection over TLS. Handshake and headers have to arrive in time together.

    A server of uvloop reports a connection only after its handshake. Connections without one would
    have no bound except the limit of open files. Therefore the server listens without TLS, and this
    class begins the handshake.
    """

    _tls: ClassVar[ssl.SSLContext]
    _shaken = False
    __slots__ = ("_plain", "_socket")

    def connection_made(self, transport: Any) -> None:
        """Begin the handshake of a new connection, or read requests after it."""
        if transport.get_extra_info("sslcontext") is not None:
            self._shaken = True
            self._start(transport)
            return
        self._begin(transport)
        # uvloop may read from this transport before `start_tls` can stop that.
        self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self._plain = True
        """Whether the end of the transport without TLS has not been reported."""
        transport.abort()
        self._clients.start_handshake(self._shake_hands)

    async def _shake_hands(self) -> None:
        try:
            await self.loop.connect_accepted_socket(
                lambda: self,
                self._socket,
                ssl=self._tls,
                ssl_handshake_timeout=self._limits.receive_s_max,
                ssl_shutdown_timeout=self._limits.receive_s_max,
            )
        except OSError as exc:  # also an error of TLS, a timeout, and a lost connection
            log.debug("client.handshake_failed cause=%s", exc)
        finally:
            if not self._shaken:
                self._socket.close()
                self._end()

    def abort(self) -> None:
        """Cut the connection off."""
        if self._shaken:
            super().abort()
        else:
            with suppress(OSError):  # the client has closed it
                self._socket.shutdown(socket.SHUT_RDWR)

    def shutdown(self) -> None:
        """Close the connection at the end of the server, after the response under way. Without one,
        the client's agreement to the end is not awaited.
        """
        if (self.cycle is None or self.cycle.response_complete) and not self.unread_bytes:
            self.abort()
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the requests that watch the connection."""
        if self._plain:
            self._plain = False
        else:
            super().connection_lost(exc)
