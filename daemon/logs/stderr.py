"""Standard error as a destination of the log, written without waiting for its reader.

A reader may stop: a terminal by Ctrl-S, a pager at the end of a page, a journal that hangs. A wait
for it would block the daemon's event loop and with it all clients.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from functools import partial

_OPEN_FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


class StandardError:
    """Writes to *descriptor*. Owned by the thread that logs.

    Other programs share the descriptor, such as a shell its terminal. So it is not made
    non-blocking, but opened again, or written with `MSG_DONTWAIT`.
    """

    def __init__(self, descriptor: int = 2):
        self._socket: socket.socket | None = None
        self._opened = -1
        self._send = self._sender(descriptor)
        self._rest = b""
        """The unwritten rest of an event, which is written before the next event."""

    def _sender(self, descriptor: int) -> Callable[[bytes], int]:
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISSOCK(mode):
                self._socket = own = socket.socket(fileno=os.dup(descriptor))
                return lambda data: own.send(data, socket.MSG_DONTWAIT)
            if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
                self._opened = os.open(f"/proc/self/fd/{descriptor}", _OPEN_FLAGS)
                return partial(os.write, self._opened)
        except OSError:  # it belongs to another user, or /proc is missing
            pass
        return partial(os.write, descriptor)

    def write(self, data: bytes) -> bool:
        """Write *data*, or start to; return False if nothing of it was written."""
        try:
            if not self._drain():
                return False
            self._rest = data
            if not self._drain() and len(self._rest) == len(data):
                self._rest = b""
                return False
        except OSError:  # its reader has closed it, or the disk is full
            self._rest = b""
            return False
        return True

    def _drain(self) -> bool:
        """Write the rest as far as possible; return whether all of it is written."""
        while self._rest:
            try:
                self._rest = self._rest[self._send(self._rest) :]
            except BlockingIOError:
                return False
        return True

    def close(self) -> None:
        """Close the additional descriptor or socket."""
        if self._socket is not None:
            self._socket.close()
        if self._opened >= 0:
            os.close(self._opened)
