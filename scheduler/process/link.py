"""The worker's end of the socket pair: commands in, reports out."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence

import msgspec

from ...wire.descriptors import read_with_descriptors
from ...wire.frames import ANY_LENGTH, READ_BYTES, FrameReader, pack_frame
from .. import messages as m

_FDS_MAX = 4
READS_MAX = 512
"""Reads at a time, 8 MiB; a daemon that sends more than that waits until the engine has handled it.
"""


class LinkClosed(Exception):
    """The daemon has closed its end, or has exited."""


class SocketLink:
    """Receives lists of commands, sends lists of reports. A slow daemon does not block it: data
    that the socket does not accept waits in `_unsent`, bounded by the credit of the tasks.
    """

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._sock = sock
        self._poll = select.poll()  # `select` rejects descriptors from 1024 on
        self._poll.register(sock, select.POLLIN)
        self.filenos = [sock.fileno()]
        """The descriptors at which `receive_commands` returns."""
        self._decoder = msgspec.msgpack.Decoder(list[m.Command])
        self._frames = FrameReader(ANY_LENGTH)
        self._unsent = bytearray()
        self.descriptors: list[int] = []

    def receive_commands(self, timeout_s: float | None) -> list[m.Command]:
        """Return the commands that have arrived; wait up to *timeout_s* for some, or without limit
        if it is None.

        :raises LinkClosed: the other end is closed.
        """
        if timeout_s != 0:
            self._wait(timeout_s)
        commands: list[m.Command] = []
        for _ in range(READS_MAX):
            if not self._read(commands):
                break
        self.flush()
        return commands

    def send_reports(self, reports: Sequence[m.Report]) -> None:
        """Send one frame, or keep the rest that the socket does not accept for the next call."""
        if reports:
            self._unsent += pack_frame(reports)
            self.flush()

    def flush(self) -> None:
        """Send as much as the socket accepts now."""
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as exc:
            raise LinkClosed from exc

    def drain(self, timeout_s: float) -> None:
        """Send everything; wait up to *timeout_s* for the daemon to read it."""
        writable = select.poll()
        writable.register(self._sock, select.POLLOUT)
        while self._unsent and writable.poll(1000 * timeout_s):
            self.flush()

    def wake_on(self, fileno: int) -> None:
        """Have `receive_commands` also return when the descriptor *fileno* is readable."""
        self._poll.register(fileno, select.POLLIN)
        self.filenos.append(fileno)

    def _wait(self, timeout_s: float | None) -> None:
        timeout_ms = None if timeout_s is None else 1000 * timeout_s
        while True:
            wanted = select.POLLIN | select.POLLOUT if self._unsent else select.POLLIN
            self._poll.modify(self._sock, wanted)
            events = [event for _, event in self._poll.poll(timeout_ms)]
            if timeout_s is not None or any(event != select.POLLOUT for event in events):
                return
            self.flush()

    def _read(self, commands: list[m.Command]) -> bool:
        """Read once and add the complete *commands*; return whether there may be more."""
        try:
            data, descriptors, _ = read_with_descriptors(self._sock, READ_BYTES, _FDS_MAX)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise LinkClosed from exc
        self.descriptors.extend(descriptors)
        if not data:
            raise LinkClosed
        for frame in self._frames.read_frames(data):
            commands.extend(self._decoder.decode(frame))
        return len(data) == READ_BYTES
