"""The frames between a worker and its sandboxes."""

from __future__ import annotations

import socket
from typing import BinaryIO

_PREFIX_BYTES = 4


def send_frame(sock: socket.socket, body: bytes) -> None:
    """Send a frame: a length of 4 bytes, and *body*."""
    sock.sendall(len(body).to_bytes(_PREFIX_BYTES, "little") + body)


def receive_frame(file: BinaryIO) -> bytes:
    """Return the next frame's body, which is cut off or empty if the other side has closed."""
    return file.read(int.from_bytes(file.read(_PREFIX_BYTES), "little"))
