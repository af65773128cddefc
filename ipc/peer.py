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
"""The largest buffer that Python's `getsockopt` accepts: 256 groups."""


class Peer(NamedTuple):
    """The process, user and groups of a program at the time when it connected."""

    pid: int
    uid: int
    gid: int
    groups: frozenset[int] = frozenset()
    """The supplementary groups."""


def peer_of(sock: socket.socket) -> Peer:
    """Return the peer's credentials (SO_PEERCRED, SO_PEERGROUPS)."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(data)
    return Peer(pid, uid, gid, frozenset(_groups(sock, uid, gid)))


def _groups(sock: socket.socket, uid: int, gid: int) -> list[int]:
    """Return the process's groups, or those of its user if they are too many or not reported."""
    try:
        data = sock.getsockopt(socket.SOL_SOCKET, _PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        return [gid, *groups_of_user(uid)]
    return list(struct.unpack(f"{len(data) // 4}I", data))


def groups_of_user(uid: int) -> list[int]:
    """Return the groups of a user in the system's database; none for a user without a name."""
    try:
        user = pwd.getpwuid(uid)
        return os.getgrouplist(user.pw_name, user.pw_gid)
    except (KeyError, OSError):
        return []
