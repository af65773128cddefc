"""The line between daemon and worker, seen from the worker: frames of msgpack on a socket."""

from __future__ import annotations

import array
import select
import socket
import struct
from collections.abc import Sequence

import msgspec

from .. import messages as m

__all__ = ("LinkClosed", "SocketLink", "pack_frame")

_LENGTH = struct.Struct("<I")
_FDS_MAX = 4
_READ_BYTES = 1 << 14
_ANCILLARY_BYTES = socket.CMSG_LEN(4 * _FDS_MAX)
_encoder = msgspec.msgpack.Encoder()


class LinkClosed(Exception):
    """The daemon is gone."""


def pack_frame(items: Sequence[m.Command] | Sequence[m.Report]) -> bytes:
    """Return the length and the msgpack array of *items*."""
    body = _encoder.encode(items)
    return _LENGTH.pack(len(body)) + body


class SocketLink:
    """Receives lists of commands, sends lists of reports. Never blocks on a slow daemon for long:
    what the socket does not take waits in `_unsent`, bounded by the credit of the tasks.
    """

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._sock = sock
        self._sources: list[socket.socket | int] = [sock]
        self._decoder = msgspec.msgpack.Decoder(list[m.Command])
        self._buffer = bytearray()
        self._unsent = bytearray()
        self.descriptors: list[int] = []

    def receive(self, timeout_s: float | None) -> list[m.Command]:
        """Return the commands that are there; wait up to *timeout_s* (None: for ever) for some.

        :raises LinkClosed: the other end is closed.
        """
        if timeout_s != 0:
            self._wait(timeout_s)
        commands: list[m.Command] = []
        while self._read():
            pass
        self.flush()
        while (frame := self._frame()) is not None:
            commands.extend(self._decoder.decode(frame))
        return commands

    def send(self, reports: Sequence[m.Report]) -> None:
        """Send one frame, or keep what the socket does not take for the next `receive`."""
        if reports:
            self._unsent += pack_frame(reports)
            self.flush()

    def flush(self) -> None:
        """Send what the socket takes now."""
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as exc:
            raise LinkClosed from exc

    def drain(self, timeout_s: float) -> None:
        """Send everything, waiting up to *timeout_s* for the daemon to take it."""
        while self._unsent:
            if not select.select([], [self._sock], [], timeout_s)[1]:
                return
            self.flush()

    def wake_on(self, fileno: int) -> None:
        """Let `receive` return, too, when the descriptor *fileno* is readable."""
        self._sources.append(fileno)

    def _wait(self, timeout_s: float | None) -> None:
        while True:
            out = [self._sock] if self._unsent else []
            readable, writable, _ = select.select(self._sources, out, [], timeout_s)
            if writable:
                self.flush()
            if readable or timeout_s is not None:
                return

    def _read(self) -> bool:
        """Read once; tell whether there may be more."""
        try:
            data, ancillary, _, _ = self._sock.recvmsg(_READ_BYTES, _ANCILLARY_BYTES)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise LinkClosed from exc
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self.descriptors.extend(fds)
        if not data:
            raise LinkClosed
        self._buffer += data
        return len(data) == _READ_BYTES

    def _frame(self) -> bytes | None:
        if len(self._buffer) < 4:
            return None
        (size,) = _LENGTH.unpack_from(self._buffer)
        if len(self._buffer) < 4 + size:
            return None
        frame = bytes(self._buffer[4 : 4 + size])
        del self._buffer[: 4 + size]
        return frame
