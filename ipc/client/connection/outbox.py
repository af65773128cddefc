"""Sending of whole frames over a socket, in order, without waiting.

Neither a cancelled caller nor Ctrl-C between any two lines truncates or repeats a frame: the number
of bytes that the kernel accepted is recorded by the same C function that sends them.
"""

from __future__ import annotations

import os
import socket
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import starmap


class _UnsentFrame:
    """A frame, the descriptors sent with its first byte, and the sizes of the parts sent."""

    __slots__ = ("data", "descriptors", "sent")

    def __init__(self, data: bytes, descriptors: Sequence[int]):
        self.data = data
        self.descriptors = [os.dup(fd) for fd in descriptors]
        self.sent: list[int] = []


class Outbox:
    """The frames that are not sent yet, of a socket that does not block."""

    def __init__(self, sock: socket.socket):
        self.unsent_bytes = 0
        self._socket = sock
        self._unsent: deque[_UnsentFrame] = deque()

    def add_frame(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        """Add *frame* with *descriptors*, which stay the caller's; `flush` sends it."""
        self._unsent.append(_UnsentFrame(frame, descriptors))
        self.unsent_bytes += len(frame)

    def flush(self) -> None:
        """Send as much as the socket accepts."""
        while self._unsent:
            frame = self._unsent[0]
            position = sum(frame.sent)
            if position < len(frame.data):
                try:
                    self._send_part(frame, position)
                except BlockingIOError:
                    return
                except OSError:  # the daemon closed its end; a goodbye must still be read
                    frame.sent.append(len(frame.data) - position)
            else:
                self._unsent.popleft()
                _close(frame.descriptors)
        self.unsent_bytes = 0

    def _send_part(self, frame: _UnsentFrame, position: int) -> None:
        if position or not frame.descriptors:
            data = memoryview(frame.data)[position:] if position else frame.data
            frame.sent.extend(map(self._socket.send, (data,)))
        else:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", frame.descriptors))
            frame.sent.extend(starmap(self._socket.sendmsg, [([frame.data], [rights])]))
        self.unsent_bytes -= sum(frame.sent) - position

    def close(self) -> None:
        """Drop the unsent frames."""
        while self._unsent:
            _close(self._unsent.popleft().descriptors)
        self.unsent_bytes = 0


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
