"""Closes of descriptors that clients pass, without the wait that a client can cause.

The last close of a TCP socket with SO_LINGER waits until its data is sent. Without the option, the
kernel sends it afterwards. A socket within an unread message of another socket keeps the option.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

from ....wire.descriptors import read_with_descriptors
from ....wire.frames import READ_BYTES

SCM_MAX_FD = 253
"""The kernel's bound on the descriptors of a message. The kernel closes those for which the
receiver has no space, on the receiver's thread.
"""
_NO_LINGER = struct.pack("ii", 0, 0)


def close_descriptor(descriptor: int) -> None:
    """Close a descriptor; a socket does not linger."""
    with suppress(OSError):  # it is not a socket
        # The family and type may differ from the socket's; given them, Python queries nothing.
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        finally:
            sock.detach()
    os.close(descriptor)


def close_unread_descriptors(sock: socket.socket) -> None:
    """Read what a connection that was shut down still holds, and close all descriptors in it.

    All descriptors of one message are open at once, so call this only for users whose descriptors
    can be closed.
    """
    data = b"unread"
    with suppress(OSError):  # nothing is left, or the client has reset the connection
        while data:
            data, descriptors, _ = read_with_descriptors(
                sock, READ_BYTES, SCM_MAX_FD, socket.MSG_DONTWAIT
            )
            for descriptor in descriptors:
                with suppress(OSError):
                    close_descriptor(descriptor)
