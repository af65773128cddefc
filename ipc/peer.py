"""Who is at the other end of a Unix socket, as the kernel tells it."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

__all__ = ("Peer", "peer_of")

_UCRED = struct.Struct("3i")


class Peer(NamedTuple):
    """Process, user and group of the program that connected."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """Return the peer's credentials (SO_PEERCRED)."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return Peer(*_UCRED.unpack(data))
