"""Sending over a socket: whole frames, in order, never cut short by a cancelled caller."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence

import anyio


class Outbox:
    """Sends at once what the socket takes; `write_unsent` sends the rest. One loop owns it.

    A caller never waits in the middle of a frame, so that a cancelled one leaves none half sent.
    """

    def __init__(self, sock: socket.socket):
        self.unsent_bytes = 0
        self._socket = sock
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self._waiting = anyio.Event()

    def send(self, frame: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send *frame*, with *descriptors* beside its first byte; they stay the caller's."""
        sent = 0 if self._unsent else self._try(frame, descriptors)
        if sent == len(frame):
            return
        kept = [] if sent else [os.dup(fd) for fd in descriptors]
        self._unsent.append((memoryview(frame)[sent:], kept))
        self.unsent_bytes += len(frame) - sent
        self._waiting.set()

    def _try(self, data: bytes | memoryview, descriptors: Sequence[int]) -> int:
        try:
            if not descriptors:
                return self._socket.send(data)
            return socket.send_fds(self._socket, [data], descriptors)
        except BlockingIOError:
            return 0
        except OSError:
            # The daemon has closed its end. The reader task finds its goodbye and the end: both
            # would be lost if the connection were given up here.
            return len(data)

    async def write_unsent(self) -> None:
        """Send what the socket did not take at once, for ever."""
        while True:
            await self._waiting.wait()
            self._waiting = anyio.Event()
            while self._unsent:
                await anyio.wait_writable(self._socket)
                self._send_first()

    def _send_first(self) -> None:
        data, descriptors = self._unsent[0]
        sent = self._try(data, descriptors)
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
