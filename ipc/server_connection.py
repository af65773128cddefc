"""One client as the daemon sees it: its requests in flight, its outbox, its descriptors."""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio

from ..backends.errors import InvalidArgument, ProtocolError
from .frames import pack
from .messages import Kind
from .peer import Peer

__all__ = ("Connection", "Request")

DESCRIPTORS_MAX = 16
OUTBOX_PAUSE_BYTES = 1 << 20
"""A client that leaves this much unread is not read from either."""
OUTBOX_BYTES_MAX = 64 << 20
_READ_BYTES = 1 << 16


class Request:
    """One call under way. `emit` sends events before the reply; `on_credit` hears of credit."""

    def __init__(self, connection: Connection, number: int, call: str, params: Any):
        self.connection, self.number, self.call, self.params = connection, number, call, params
        self.scope = anyio.CancelScope()
        self.descriptors: list[int] = []
        """What came beside the frame; closed with the request, who keeps one duplicates it."""
        self.on_credit: Callable[[int], None] = lambda _: None

    def close(self) -> None:
        """Close the descriptors that came with the request."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def emit(self, event: Any, *, flush: bool = True) -> None:
        """Send an event; without *flush* it goes with the next `Connection.flush`."""
        self.connection.send([Kind.EVENT, self.number, event], flush=flush)


class Connection:
    """One client: its requests in flight and its outbox."""

    def __init__(self, sock: socket.socket, peer: Peer, requests_max: int):
        self.peer = peer
        self.requests: dict[int, Request] = {}
        self.software = ""
        self.descriptors: deque[int] = deque()
        self.requests_max = requests_max
        self._sock = sock
        self._unsent = bytearray()
        self._writable = anyio.Event()
        self._drained = anyio.Event()
        self._open = True

    def __repr__(self) -> str:
        return f"<Connection of uid {self.peer.uid} [{len(self.requests)} requests]>"

    def send(self, message: Any, *, flush: bool = True) -> None:
        """Send a message, or keep what the socket does not take; a client too slow is cut off."""
        if not self._open:
            return
        self._unsent += pack(message)
        if flush:
            self.flush()

    def flush(self) -> None:
        """Send what the socket takes now; the rest goes when it can be written again."""
        try:
            while self._unsent and self._open:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            self._writable.set()
            if len(self._unsent) > OUTBOX_BYTES_MAX:
                self.cut()
        except OSError:
            self.cut()

    def cut(self) -> None:
        """Stop writing and reading: the reader task sees the end and cleans up."""
        if self._open:
            self._open = False
            self._unsent.clear()
            self._writable.set()
            self._drained.set()
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # the other end has gone already

    async def write_on(self) -> None:
        """Write what did not fit, for as long as the connection is open."""
        while self._open:
            await self._writable.wait()
            self._writable = anyio.Event()
            while self._unsent and self._open:
                await anyio.wait_writable(self._sock)
                self.flush()
            self._drained.set()
            self._drained = anyio.Event()

    async def receive(self) -> bytes:
        """Return some bytes, none at the end; waits while too much is unread by the client."""
        while len(self._unsent) > OUTBOX_PAUSE_BYTES and self._open:
            await self._drained.wait()
        while self._open:
            await anyio.wait_readable(self._sock)
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(
                    _READ_BYTES, socket.CMSG_SPACE(4 * DESCRIPTORS_MAX)
                )
            except BlockingIOError:
                continue
            except OSError:
                return b""
            self._take_descriptors(ancillary)
            if len(self.descriptors) > DESCRIPTORS_MAX or flags & socket.MSG_CTRUNC:
                raise ProtocolError(f"more than {DESCRIPTORS_MAX} descriptors that no call takes")
            return data
        return b""

    def _take_descriptors(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self.descriptors.extend(fds)

    def claim_descriptor(self) -> int:
        """Return the descriptor that came first of those not yet claimed."""
        if not self.descriptors:
            raise InvalidArgument(
                "the call names a descriptor, but none was passed",
                hint="send it beside the frame with SCM_RIGHTS",
            )
        return self.descriptors.popleft()

    def close(self) -> None:
        """Close the socket and what was passed and not claimed."""
        self.cut()
        self._sock.close()
        self.drop_descriptors()

    def drop_descriptors(self) -> None:
        """Close the descriptors that no request has claimed."""
        while self.descriptors:
            os.close(self.descriptors.popleft())
