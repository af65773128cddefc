"""Reading of a Unix socket whose messages carry descriptors (`SCM_RIGHTS`)."""

from __future__ import annotations

import socket
from array import array

_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)


def read_with_descriptors(
    sock: socket.socket, bytes_max: int, descriptors_max: int, flags: int = 0
) -> tuple[bytes, list[int], int]:
    """Read once with *flags*; return the data, the descriptors that came with it, and the flags of
    the message. No program started later inherits the descriptors.

    Python's `socket.recv_fds` ignores its flags (CPython's issue 107898).
    """
    descriptors = array("i")
    room = socket.CMSG_LEN(descriptors_max * descriptors.itemsize)
    data, items, flags_received, _ = sock.recvmsg(bytes_max, room, flags | _CLOSE_ON_EXEC)
    for level, kind, content in items:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(content) - len(content) % descriptors.itemsize
            descriptors.frombytes(content[:whole])
    return data, descriptors.tolist(), flags_received
