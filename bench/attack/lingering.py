"""TCP sockets whose last close blocks: SO_LINGER and unread data."""

from __future__ import annotations

import socket
import struct

BUFFER_BYTES = 4096


class LingeringSockets:
    """Makes sockets whose last `close` waits *linger_s* for a peer that reads nothing."""

    def __init__(self, linger_s: int):
        self._linger_s = linger_s
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(1024)

    def __enter__(self) -> LingeringSockets:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()  # resets the connections, which ends every wait

    def new_socket(self) -> socket.socket:
        """Return a socket with unsent data. Pass it on before closing it; the last close waits."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        sock.connect(self._listener.getsockname())
        linger = struct.pack("ii", 1, self._linger_s)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        sock.setblocking(False)
        try:
            while True:
                sock.send(b"x" * BUFFER_BYTES)
        except BlockingIOError:
            return sock
