"""Sending of whole frames over a socket, in order; cancelling a caller never truncates one."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence

import anyio


class Outbox:
    """Sends at once as much as the socket accepts; `write_unsent` sends the rest.

    One loop owns it. `send` never waits, so a cancelled caller cannot leave half a frame.
    """

    def __init__(self, sock: socket.socket):
        self.unsent_bytes = 0
        self._socket = sock
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self._waiting = anyio.Event()

    def send(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send *frame* with *descriptors*, which stay the caller's, at its first byte."""
        sent = 0 if self._unsent else self._try_send(frame, descriptors)
        if sent == len(frame):
            return
        duplicates = [] if sent else [os.dup(fd) for fd in descriptors]
        self._unsent.append((memoryview(frame)[sent:], duplicates))
        self.unsent_bytes += len(frame) - sent
        self._waiting.set()

    def _try_send(self, data: bytes | memoryview, descriptors: Sequence[int]) -> int:
        try:
            if not descriptors:
                return self._socket.send(data)
            return socket.send_fds(self._socket, [data], descriptors)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # the daemon closed its end; the reader task must still read a goodbye

    async def write_unsent(self) -> None:
        """Send the data that the socket did not accept at once, until cancelled."""
        while True:
            await self._waiting.wait()
            self._waiting = anyio.Event()
            while self._unsent:
                await anyio.wait_writable(self._socket)
                self._send_first()

    def _send_first(self) -> None:
        data, descriptors = self._unsent[0]
        sent = self._try_send(data, descriptors)
        self.unsent_bytes -= sent
        if sent:
            self._unsent[0] = (data[sent:], [])
            _close(descriptors)
        if sent == len(data):
            self._unsent.popleft()

    def close(self) -> None:
        """Drop the unsent frames."""
        while self._unsent:
            _close(self._unsent.popleft()[1])
        self.unsent_bytes = 0


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
