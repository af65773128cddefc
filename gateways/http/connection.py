"""A client's connection: uvicorn's with httptools, with the gateway's bounds and errors. Over TLS,
it is counted and bounded during its handshake too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Literal

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from .app import Gateway
from .clients import Clients, address_of, uid_of
from .exchange.exchange import LINK, HttpRefusal
from .heads import OWS, check_head, expects_continue
from .limits import DROPPED_BYTES_MAX, HEADER_BYTES_MAX, Limits

_UNREADABLE = HttpRefusal(400, "this is not an HTTP request", hint="send HTTP/1.1")
_MALFORMED_HEAD = HttpRefusal(
    400,
    "the headers of the request are malformed",
    hint="send each header on one line as `Name: value`, without control characters, and either"
    " Content-Length or `Transfer-Encoding: chunked`, once",
)
_MALFORMED_BODY = HttpRefusal(
    400,
    "the body of the request is malformed: it does not consist of chunks",
    hint="send each chunk after its size in hexadecimal digits, or send Content-Length",
)
_CUT = HttpRefusal(
    400,
    "the request is incomplete: the client has closed its side of the connection",
    hint="send the whole body: Content-Length bytes, or all chunks with the last, empty one",
)


class Protocol(HttpToolsProtocol):
    """A client's connection. It ends if a request's headers are too long or take too long, or if
    the client does not read the end of a response.

    Closing a connection with unread data resets it, and the client may then lose the response.
    After a response to a request that has not arrived completely, the connection therefore
    *lingers*: only its sending side is closed, and further data are dropped until the client closes
    the other side.
    """

    _gateway: ClassVar[Gateway]
    _limits: ClassVar[Limits]
    _clients: ClassVar[Clients]
    # With more than 30 attributes in its dictionary, each connection would take a kilobyte more.
    __slots__ = (
        "_address",
        "_dropped_bytes",
        "_drops_data",
        "_eof_received",
        "_header_bytes",
        "_header_timer",
        "_late_refusal",
        "_linger_timer",
        "_reading",
        "_refusal",
        "lingers",
        "uid",
        "watchers",
    )

    def connection_made(self, transport: Any) -> None:
        """Accept the connection; the first request's headers have to arrive in time."""
        self._begin(transport)
        self._start(transport)

    def _start(self, transport: Any) -> None:
        super().connection_made(transport)

    def _begin(self, transport: Any) -> None:
        """Count the connection, for which another one may be closed, and start the timer."""
        self.transport = transport
        self._address = address_of(transport)
        self.uid = uid_of(transport)  # later, the descriptor may be that of another connection
        self._clients.add(self, self._address)
        self._header_timer: asyncio.TimerHandle | None = None
        self._refusal: HttpRefusal | None = None
        """The refusal by which this class has ended the parser, if it has."""
        self._reading: Literal["", "headers", "body"] = ""
        """The incomplete part of the last request, or empty."""
        self._drops_data = self._eof_received = False
        self._dropped_bytes = 0
        self._late_refusal: HttpRefusal | None = None
        """The refusal of the last request, to be written after the responses to those before it."""
        self.lingers = False
        """Whether the connection lingers after the response under way."""
        self._linger_timer: asyncio.TimerHandle | None = None
        self.watchers: list[Callable[[], None]] = []
        self._await_headers()

    def _await_headers(self) -> None:
        self._header_bytes = 0
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self._limits.receive_s_max, self.abort)

    def abort(self) -> None:
        """Cut the connection off."""
        self.transport.abort()

    @property
    def unread_bytes(self) -> int:
        """The bytes that the client has not read."""
        return self.transport.get_write_buffer_size()

    def take_place(self, caller: str) -> None:
        """Take a place for a caller, or without one for the client's address, unless the connection
        has a place.

        :raises Busy: no place is free.
        """
        self._clients.take_place(self, f"key {caller}" if caller else self._address)

    def withdraw_place(self) -> None:
        """Give the place back, because the caller is no longer known."""
        self._clients.withdraw_place(self, self._address)

    def pause_writing(self) -> None:
        """Let writes wait until the client has read."""
        super().pause_writing()
        self._clients.note_unread(self)

    def resume_writing(self) -> None:
        """Continue to write."""
        self._clients.note_read(self)
        super().resume_writing()

    def _end_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def data_received(self, data: bytes) -> None:
        """Read a part of a request, or drop it."""
        if not self._drops_data:
            super().data_received(data)
            return
        self._dropped_bytes += len(data)
        if self._dropped_bytes > DROPPED_BYTES_MAX:
            self.abort()

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn never keeps it open
        """Refuse a request that the client has cut. Return whether to keep the connection open,
        which TLS does not permit.
        """
        self._eof_received = True
        if self._reading and not self._drops_data:
            self._refuse_last_request(_CUT)
        return self._late_refusal is not None

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._reading = "headers"
        self._await_headers()

    def on_url(self, url: bytes) -> None:
        """Read a part of the path."""
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read a header, or drop a trailer: what comes after a body must not decide about it (RFC
        9110, 6.5.1), and no trailer has a meaning here.
        """
        self._count_header(len(name) + len(value))
        if self._reading != "body":
            self.headers.append((name.lower(), value.strip(OWS)))

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > HEADER_BYTES_MAX:
            message = f"the headers are longer than {HEADER_BYTES_MAX} bytes"
            self._refusal = HttpRefusal(431, message, hint="send shorter ones")
            raise self._refusal  # httptools turns it into a parser's error

    def on_headers_complete(self) -> None:
        """Run the request."""
        self._end_header_timer()
        version = self.parser.get_http_version()
        self._refusal = check_head(version, self.url, self.headers)
        if self._refusal is not None:
            raise self._refusal  # httptools turns it into a parser's error
        self.expect_100_continue = expects_continue(version, self.headers)
        super().on_headers_complete()
        self._reading = "body"
        self._clients.note_busy(self)
        self.scope["extensions"] = {LINK: _Link(self.cycle, self)}  # type: ignore[dict-item]
        if self.scope["http_version"] == "1.0":
            _end_body_with_connection(self.cycle)

    def on_message_complete(self) -> None:
        """End a request."""
        super().on_message_complete()
        self._reading = ""

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that cannot be read, and drop all data after it."""
        unreadable = _MALFORMED_BODY if self._reading == "body" else _UNREADABLE
        if self._reading == "headers" and self.url:
            unreadable = _MALFORMED_HEAD
        self._refuse_last_request(self._refusal or unreadable)

    def _refuse_last_request(self, refusal: HttpRefusal) -> None:
        """Refuse the last request, and drop all data after it. If the responses to earlier ones are
        not complete, a request without complete headers gets no response.
        """
        self._drops_data, cycle = True, self.cycle
        answered = cycle is None or cycle.response_complete
        if self._reading != "body":
            if answered:
                self._write_refusal(refusal)
            else:
                cycle.keep_alive = False
        elif answered:
            self._linger()
        elif cycle.response_started:
            cycle.keep_alive = False
        else:
            cycle.disconnected = True  # the application then ends, and its error is not written
            cycle.message_event.set()
            queued = [each for each in self.pipeline if each[0] is cycle]
            for each in queued:
                self.pipeline.remove(each)
            if queued:
                self._late_refusal = refusal
            else:
                self._write_refusal(refusal)

    def _write_refusal(self, refusal: HttpRefusal) -> None:
        path = getattr(self, "url", b"").decode("latin-1")
        body = self._gateway.refusal_body(path, refusal)
        self.transport.write(
            STATUS_LINE[refusal.status]
            + b"content-type: application/json\r\n"
            + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            + body
        )
        self._linger()

    def _linger(self) -> None:
        """Close the sending side; drop further data until the client closes the other side."""
        self._drops_data = True
        self._clients.note_idle(self)
        if self._eof_received or self.transport.is_closing():
            self.transport.close()
            return
        self._end_header_timer()
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger_timer = self.loop.call_later(self._limits.receive_s_max, self.abort)

    def shutdown(self) -> None:
        """Close the connection at the end of the server, after the response under way."""
        if self._linger_timer is not None:
            self.transport.close()
        else:
            super().shutdown()

    def on_response_complete(self) -> None:
        """Answer the next request, or wait for it."""
        if self.lingers:
            self._linger()
        elif self._late_refusal is not None and not self.pipeline:
            refusal, self._late_refusal = self._late_refusal, None
            self._write_refusal(refusal)
        else:
            if not self.pipeline:
                self._clients.note_idle(self)
            if self.transport.is_closing():  # once the client has read the rest
                self._linger_timer = self.loop.call_later(self._limits.receive_s_max, self.abort)
            super().on_response_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Do nothing, because a request for another protocol is answered like any other."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the requests that watch the connection."""
        self._end()
        super().connection_lost(exc)
        for on_lost in tuple(self.watchers):
            on_lost()

    def _end(self) -> None:
        """Forget the connection, and stop its timers."""
        self._clients.remove(self)
        self._end_header_timer()
        if self._linger_timer is not None:
            self._linger_timer.cancel()

    def timeout_keep_alive_handler(self) -> None:
        """Close an unused connection, or cut it off if the client has not read all data."""
        if self.unread_bytes:
            self.abort()
        else:
            super().timeout_keep_alive_handler()


class _Link:
    """A request's `ClientLink`."""

    __slots__ = ("_cycle", "_protocol")
    response_id: str | None = None

    def __init__(self, cycle: Any, protocol: Protocol):
        self._cycle, self._protocol = cycle, protocol

    @property
    def uid(self) -> int | None:
        """The user of a Unix socket's peer; None for other connections."""
        return self._protocol.uid

    def take_place(self, caller: str) -> None:
        """Take a place for the connection of an allowed request."""
        self._protocol.take_place(caller)

    def withdraw_place(self) -> None:
        """Give the place of the connection back."""
        self._protocol.withdraw_place()

    @property
    def unread(self) -> bool:
        """Whether the request has not arrived completely."""
        return bool(self._cycle.more_body)

    def linger(self) -> None:
        """Let the connection linger after the response, whose headers announce its end."""
        self._cycle.keep_alive = self._protocol.lingers = True  # else uvicorn closes it

    @property
    def blocked(self) -> bool:
        """Whether a write would wait because the client does not read."""
        return bool(self._cycle.flow.write_paused)

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
        self._protocol.watchers.append(on_lost)
        self._cycle.flow.resume_reading()
        if self._cycle.transport.is_closing():
            on_lost()

    def unwatch(self, on_lost: Callable[[], None]) -> None:
        """Stop calling *on_lost*."""
        if on_lost in self._protocol.watchers:
            self._protocol.watchers.remove(on_lost)


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
