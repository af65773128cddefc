"""The HTTP server of `GET /metrics` and `GET /health` on the event loop of a process.

It serves one request per connection, and closes slow, large and surplus connections. It is
optional: while it cannot listen, it tries again, and the process runs without it.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import TypeAlias

import anyio
import anyio.abc

from .metrics_address import Address

CONNECTIONS_MAX = 8
HEAD_BYTES_MAX = 8192
REST_BYTES_MAX = 1 << 16
"""Bytes of an unexpected body that are read before the connection is closed."""
REQUEST_TIMEOUT_S = 5.0
"""The default time from the connection to the end of the response."""
LISTEN_RETRY_S = 2.0
BACKLOG = 16
METHODS = ("GET", "HEAD")
END = b"\r\n\r\n"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of the metrics."""
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"

Response = tuple[int, str, bytes]
"""Status, content type, body."""
Paths: TypeAlias = Mapping[str, Callable[[], Awaitable[Response]]]
"""The function that responds to each path."""


class HttpListener:
    """Serves *paths* at *address*. *report* gets the reason why it cannot listen, and None once it
    can. *note_failure* gets the path and the exception of a response that failed through a bug.
    """

    def __init__(
        self,
        address: Address,
        paths: Paths,
        report: Callable[[str | None], object],
        note_failure: Callable[[str, Exception], object],
        request_s_max: float = REQUEST_TIMEOUT_S,
    ):
        self.where: str | None = None
        """The address at which it listens; None while it does not."""
        self._address, self._paths = address, paths
        self._report, self._note_failure = report, note_failure
        self._request_s_max = request_s_max
        self._sock: socket.socket | None = None
        self._open_connections = 0

    def open(self) -> None:
        """Listen, or report the cause of the failure."""
        try:
            self._sock = _listening_socket(self._address)
        except OSError as exc:
            self._report_failure(exc)
            return
        self.where = self._address.path or str(Address(*self._sock.getsockname()[:2]))
        self._report(None)

    def _report_failure(self, error: OSError) -> None:
        # `strerror` may have more text, from `socket.create_server`.
        cause = os.strerror(error.errno) if error.errno else error
        self._report(f"{self._address}: {cause}")

    async def run(self) -> None:
        """Serve until cancelled; while the server cannot listen, try every `LISTEN_RETRY_S`."""
        async with anyio.create_task_group() as group:
            while True:
                if self._sock is not None:
                    await self._serve(self._sock, group)
                await anyio.sleep(LISTEN_RETRY_S)
                self.open()

    async def _serve(self, sock: socket.socket, group: anyio.abc.TaskGroup) -> None:
        """Serve until the socket fails."""
        try:
            async with await anyio.abc.SocketListener.from_socket(sock) as listener:
                await listener.serve(self._serve_connection, group)
        except OSError as exc:
            self._report_failure(exc)
        finally:
            self._sock = self.where = None
            if self._address.path:
                with suppress(OSError):
                    os.unlink(self._address.path)

    async def _serve_connection(self, stream: anyio.abc.SocketStream) -> None:
        self._open_connections += 1
        try:
            async with stream:
                with anyio.move_on_after(self._request_s_max):
                    await self._serve_request(stream)
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # the client has closed the connection
        finally:
            self._open_connections -= 1

    async def _serve_request(self, stream: anyio.abc.SocketStream) -> None:
        if self._open_connections > CONNECTIONS_MAX:
            await stream.send(_response_bytes((503, TEXT, b"too many connections: try again\n")))
            return
        head = await _read_head(stream)
        await stream.send(
            _response_bytes(await self._respond(head), body=not head.startswith(b"HEAD "))
        )
        await stream.send_eof()
        await _read_rest(stream)

    async def _respond(self, head: bytes) -> Response:
        if len(head) > HEAD_BYTES_MAX:
            return 431, TEXT, f"at most {HEAD_BYTES_MAX} bytes\n".encode()
        words = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if not head.endswith(END) or len(words) != 3 or not words[2].startswith("HTTP/1."):
            return 400, TEXT, b"not an HTTP/1 request\n"
        path = words[1].partition("?")[0]
        if path not in self._paths:
            return 404, TEXT, f"there are {' and '.join(self._paths)}\n".encode()
        if words[0] not in METHODS:
            return 405, TEXT, b"use GET\n"
        try:
            return await self._paths[path]()
        except Exception as exc:  # a bug here must not end the process
            self._note_failure(path, exc)
            return 500, TEXT, b"see the log\n"


def _listening_socket(address: Address) -> socket.socket:
    """Return a socket that listens at *address*. A Unix socket admits only its owner, and replaces
    one whose process has exited.

    :raises OSError: the address cannot be bound.
    """
    if not address.path:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        return socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
    path = Path(address.path)
    if path.is_socket() and not path.is_symlink() and _is_stale(path):
        path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(str(path))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _is_stale(path: Path) -> bool:
    """Return whether the Unix socket at *path* refuses connections, as its process has exited."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED


async def _read_head(stream: anyio.abc.SocketStream) -> bytes:
    """Return a request up to its empty line, or the received part if it is too long or cut off."""
    head = b""
    while END not in head and len(head) <= HEAD_BYTES_MAX:
        try:
            head += await stream.receive(HEAD_BYTES_MAX)
        except anyio.EndOfStream:
            return head
    return head[: head.index(END) + len(END)] if END in head else head


def _response_bytes(response: Response, *, body: bool = True) -> bytes:
    """Return the bytes of a response; without *body*, its headers alone."""
    status, content_type, content = response
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(content)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
        *([f"Allow: {', '.join(METHODS)}"] if status == 405 else ()),
    ]
    return "\r\n".join(lines).encode() + END + (content if body else b"")


async def _read_rest(stream: anyio.abc.SocketStream) -> None:
    """Read the rest of the request, within a bound; closing earlier would discard the response."""
    received = 0
    with suppress(anyio.EndOfStream):
        while received < REST_BYTES_MAX:
            received += len(await stream.receive())
