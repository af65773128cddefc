"""The frames that a client of the daemon has not read yet."""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

from .fairness import SharedLimit

OUTBOX_BYTES_MAX = 64 << 20
OUTBOXES_BYTES_MAX = 128 << 20
"""Unread data of all connections. A user has at most as much as is free; alone, half of all."""


class OutboxListener(Protocol):
    """The connection of an outbox."""

    def outbox_emptied(self) -> None:
        """Continue after the socket has accepted everything."""

    def cut(self) -> None:
        """Disconnect a client that leaves too much unread, or has closed the connection."""


class Outbox:
    """Unsent frames of one connection. Lives on the daemon's event loop. *shared* is the limit on
    the bytes of all outboxes.
    """

    def __init__(
        self, sock: socket.socket, uid: int, shared: SharedLimit, listener: OutboxListener
    ):
        self.is_open = True
        self._sock, self._uid, self._shared, self._listener = sock, uid, shared, listener
        self._unsent = bytearray()
        self._counted = 0
        """The unsent bytes that are counted in the shared limit."""
        self._writing = False
        self._loop = asyncio.get_running_loop()

    @property
    def unsent_bytes(self) -> int:
        """The bytes that the socket has not accepted."""
        return len(self._unsent)

    def add_frame(self, frame: bytes) -> None:
        """Add a frame; `flush` sends it."""
        if self.is_open:
            self._unsent += frame

    def flush(self) -> None:
        """Send as much as the socket accepts now, and the rest once it is writable.

        A client that leaves more than `OUTBOX_BYTES_MAX` unread, or more than its user's part of
        `OUTBOXES_BYTES_MAX`, is disconnected.
        """
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            if not self._count_unsent():
                self._listener.cut()
            elif not self._writing:
                self._loop.add_writer(self._sock, self.flush)
                self._writing = True
        except OSError:
            self._listener.cut()
        else:
            self._stop_writing()
            self._listener.outbox_emptied()

    def _count_unsent(self) -> bool:
        """Count the unsent bytes; return whether they are within the bounds."""
        size = len(self._unsent)
        more = size - self._counted
        if size > OUTBOX_BYTES_MAX or (more > 0 and not self._shared.fits(self._uid, more)):
            return False
        self._shared.take_amount(self._uid, more)
        self._counted = size
        return True

    def _stop_writing(self) -> None:
        """Stop waiting for a writable socket."""
        if self._writing:
            self._loop.remove_writer(self._sock)
            self._writing = False
            self._shared.take_amount(self._uid, -self._counted)
            self._counted = 0

    def close(self) -> None:
        """Drop the unsent frames, and accept no more."""
        self.is_open = False
        self._unsent.clear()
        self._stop_writing()
