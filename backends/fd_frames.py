"""Frames and descriptors on stream sockets between processes of one machine.

A frame is a length of 4 bytes, little-endian, and a body. Its descriptors (`SCM_RIGHTS`) arrive
with its first byte. `FrameReader` never reads past a frame, so descriptors belong to the frame with
which they came.
"""

from __future__ import annotations

import os
import socket
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import BinaryIO

LENGTH = struct.Struct("<I")
_CLOSE_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
DESCRIPTORS_MAX = 64
"""Descriptors beside one frame; the kernel's bound is 253."""
FRAME_BYTES_MAX = 1 << 26
SCM_MAX_FD = 253
"""The kernel's bound on the descriptors of a message. The kernel closes those for which the
receiver has no space, on the receiver's thread.
"""
_SCM_PIDFD = 4
_OTHER_BYTES = 1024
"""More than credentials, a security label and a pidfd take beside descriptors."""
_NO_LINGER = struct.pack("ii", 0, 0)
_READ_BYTES = 1 << 14


class BrokenFrame(Exception):
    """The other side has sent something that is not a frame, or too many descriptors."""


def frame_of(body: bytes) -> bytes:
    """Return *body* with its length."""
    return LENGTH.pack(len(body)) + body


def send_frame(sock: socket.socket, body: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send *body* as a frame, with *descriptors* beside it, which stay open here. Blocks."""
    assert len(descriptors) <= DESCRIPTORS_MAX
    frame = frame_of(body)
    if not descriptors:
        sock.sendall(frame)
        return
    sent = socket.send_fds(sock, [frame], list(descriptors))
    if sent < len(frame):  # the other side may have closed once it has all of it
        sock.sendall(frame[sent:])


def receive_frame(file: BinaryIO) -> bytes:
    """Return the next frame's body, which is cut off or empty if the other side has closed."""
    return file.read(int.from_bytes(file.read(LENGTH.size), "little"))


def read_with_descriptors(
    sock: socket.socket,
    bytes_max: int,
    descriptors_max: int,
    flags: int = 0,
    *,
    shared: bool = False,
) -> tuple[bytes, list[int], int]:
    """Read once with *flags*; return the data, the descriptors that came with it, and the flags of
    the message. No program started later inherits the descriptors.

    If the other side *shares* this end, too, it may have set it to receive credentials, labels and
    pidfds; these are descriptors like others.

    Python's `socket.recv_fds` ignores its flags (CPython's issue 107898).
    """
    descriptors = array("i")
    room = socket.CMSG_LEN(descriptors_max * descriptors.itemsize)
    if shared:
        room = socket.CMSG_SPACE(descriptors_max * descriptors.itemsize) + _OTHER_BYTES
    data, items, flags_received, _ = sock.recvmsg(bytes_max, room, flags | _CLOSE_ON_EXEC)
    for level, kind, content in items:
        if level == socket.SOL_SOCKET and kind in (socket.SCM_RIGHTS, _SCM_PIDFD):
            whole = len(content) - len(content) % descriptors.itemsize
            descriptors.frombytes(content[:whole])
    return data, descriptors.tolist(), flags_received


def unread_descriptors(sock: socket.socket) -> Iterator[int]:
    """Read what a socket that was shut down still holds, and yield the descriptors in it, which the
    caller closes. All descriptors of one message are open at once.
    """
    data = b"unread"
    with suppress(OSError):  # nothing is left, or the other side has reset the connection
        while data:
            data, descriptors, _ = read_with_descriptors(
                sock, _READ_BYTES, SCM_MAX_FD, socket.MSG_DONTWAIT, shared=True
            )
            yield from descriptors


def close_descriptor(descriptor: int) -> None:
    """Close a descriptor; a socket does not linger.

    The last close of a TCP socket with SO_LINGER waits until its data is sent. Without the option,
    the kernel sends it afterwards. A socket within an unread message of another socket keeps the
    option.
    """
    with suppress(OSError):  # it is not a socket
        # The family and type may differ from the socket's; given them, Python queries nothing.
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        finally:
            sock.detach()
    os.close(descriptor)


class FrameReader:
    """Reads frames with their descriptors from a blocking socket. Owned by one thread."""

    def __init__(self, sock: socket.socket):
        self._sock = sock

    def receive(self) -> tuple[bytes, list[int]]:
        """Return the next frame's body and descriptors, which the caller closes; an empty body if
        the other side has closed, also in the middle of a frame.

        :raises BrokenFrame: this is not a frame.
        """
        descriptors: list[int] = []
        try:
            prefix = self._read(LENGTH.size, descriptors)
            size = int.from_bytes(prefix, "little")
            if size > FRAME_BYTES_MAX:
                raise BrokenFrame(f"a frame of {size} bytes")
            body = self._read(size, descriptors) if len(prefix) == LENGTH.size else b""
            if len(body) == size and body:
                found, descriptors = descriptors, []
                return body, found
            return b"", []
        finally:
            close_all(descriptors)

    def _read(self, size: int, descriptors: list[int]) -> bytes:
        """Read *size* bytes, or fewer if the other side has closed."""
        data = bytearray()
        while len(data) < size:
            part, found, flags = read_with_descriptors(
                self._sock, size - len(data), DESCRIPTORS_MAX
            )
            descriptors += found
            if flags & socket.MSG_CTRUNC or len(descriptors) > DESCRIPTORS_MAX:
                raise BrokenFrame(f"more than {DESCRIPTORS_MAX} descriptors beside a frame")
            if not part:
                break
            data += part
        return bytes(data)


def close_all(descriptors: Sequence[int]) -> None:
    """Close *descriptors*."""
    for descriptor in descriptors:
        os.close(descriptor)
