"""The daemon's end of a worker's socket pair, which sends commands and reads reports."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import msgspec

from ...scheduler import messages as m
from ...wire.frames import ANY_LENGTH, READ_BYTES, FrameReader, pack_frame
from ...wire.reading import read_until_end


def send_load(sock: socket.socket, load: m.LoadModel) -> None:
    """Send the first command, with the descriptor of a model that has no path."""
    frame = pack_frame([load])
    if load.spec.fd >= 0:
        socket.send_fds(sock, [frame], [load.spec.fd])
    else:
        sock.send(frame)


class WorkerLink:
    """Sends commands and reads reports on the daemon's event loop. Commands are queued until
    `exchange` has a socket and the socket is writable.

    *on_report* is called with each report, *on_frame* after the reports that arrived together.
    *on_sent* is called when the first of the next frame's commands is queued.

    *count_unsent* is called with the user of a command, which *user_of* returns, and its bytes, if
    the socket does not accept it at once; and again, with the negative number, once it does.
    """

    def __init__(
        self,
        on_report: Callable[[m.Report], None],
        on_frame: Callable[[], None],
        on_sent: Callable[[], None],
        user_of: Callable[[m.Command], int],
        count_unsent: Callable[[int, int], None],
    ):
        self._on_report, self._on_frame, self._on_sent = on_report, on_frame, on_sent
        self._user_of, self._report_unsent = user_of, count_unsent
        self._counted: Counter[int] = Counter()
        """The bytes that are counted as unsent, by user."""
        self._sock: socket.socket | None = None
        self._commands: list[m.Command] = []
        self._unsent = bytearray()
        self._writing = False
        self._decoder = msgspec.msgpack.Decoder(list[m.Report])
        self._frames = FrameReader(ANY_LENGTH)

    def send_command(self, command: m.Command) -> None:
        """Send a command, in one frame with others of the same loop iteration."""
        if not self._commands and self._sock is not None:
            asyncio.get_running_loop().call_soon(self._write)
            self._on_sent()
        self._commands.append(command)

    async def exchange(self, sock: socket.socket) -> None:
        """Write commands and read reports until the process closes its end.

        :raises msgspec.DecodeError: a report cannot be read.
        """
        self._sock = sock
        if self._commands:
            self._on_sent()
        self._write()
        try:
            await read_until_end(sock, partial(self._read_reports, sock))
        finally:
            self._sock = None
            self._count_sent()
            asyncio.get_running_loop().remove_writer(sock)

    def end_exchange(self) -> None:
        """End `exchange`, even if the process does not close its end."""
        if self._sock is not None:
            with suppress(OSError):  # the other end is already closed
                self._sock.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        """Send the queued commands in one frame, or the part of it that the socket accepts."""
        sock = self._sock
        if sock is None:
            return  # the process has exited
        commands, self._commands = self._commands, []
        if commands:
            self._unsent += pack_frame(commands)
        try:
            while self._unsent:
                del self._unsent[: sock.send(self._unsent)]
        except BlockingIOError:
            self._count_unsent(commands)
            asyncio.get_running_loop().add_writer(sock, self._write)
            self._writing = True
        except OSError:
            self._unsent.clear()  # the process has exited, which the reader notices too
        if self._writing and not self._unsent:
            asyncio.get_running_loop().remove_writer(sock)
            self._writing = False
            self._count_sent()

    def _count_unsent(self, commands: Iterable[m.Command]) -> None:
        for command in commands:
            user, size = self._user_of(command), len(pack_frame(command))
            self._counted[user] += size
            self._report_unsent(user, size)

    def _count_sent(self) -> None:
        for user, size in self._counted.items():
            self._report_unsent(user, -size)
        self._counted.clear()

    def _read_reports(self, sock: socket.socket) -> bool:
        """Read once and pass the reports on; return False at the end of the stream.

        :raises BlockingIOError: nothing has arrived.
        """
        try:
            data = sock.recv(READ_BYTES)
        except BlockingIOError:
            raise
        except OSError:
            return False
        framed = False
        for frame in self._frames.read_frames(data):
            framed = True
            for report in self._decoder.decode(frame):
                self._on_report(report)
        if framed:
            self._on_frame()
        return bool(data)
