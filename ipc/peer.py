"""Credentials of the process at the other end of a Unix socket, from the kernel."""

from __future__ import annotations

import os
import pwd
import socket
import struct
from typing import NamedTuple

_UCRED = struct.Struct("i2I")
_PEERGROUPS = 59
"""SO_PEERGROUPS of asm-generic/socket.h; Python has no name for it."""
_GROUPS_BYTES = 1024
"""The most that Python's `getsockopt` takes: 256 groups."""


class Peer(NamedTuple):
    """Process, user and groups of the program that connected, as they were then."""

    pid: int
    uid: int
    gid: int
    groups: frozenset[int] = frozenset()
    """Its supplementary groups."""


def peer_of(sock: socket.socket) -> Peer:
    """Return the peer's credentials (SO_PEERCRED, SO_PEERGROUPS)."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(data)
    return Peer(pid, uid, gid, frozenset(_groups(sock, uid, gid)))


def _groups(sock: socket.socket, uid: int, gid: int) -> list[int]:
    """Return the process's groups; its user's groups if there are too many, or if the kernel does
    not report them.
    """
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, _PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        return _known_groups(uid, gid)
    return list(struct.unpack(f"{len(data) // 4}I", data))


def _known_groups(uid: int, gid: int) -> list[int]:
    try:
        return os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except (KeyError, OSError):  # a user without a name is in their own group only
        return [gid]
