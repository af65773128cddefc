"""The daemon's end of a worker's socket pair: commands out, reports in."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import msgspec

from ...scheduler import messages as m
from ...wire.frames import ANY_LENGTH, READ_BYTES, FrameReader, pack_frame

__all__ = ("WorkerLink", "send_load")


def send_load(sock: socket.socket, load: m.Load) -> None:
    """Send the first command, with the descriptor of a model that came by one."""
    frame = pack_frame([load])
    if load.spec.fd >= 0:
        socket.send_fds(sock, [frame], [load.spec.fd])
    else:
        sock.send(frame)


class WorkerLink:
    """Lives on the daemon's event loop. Commands wait until there is a line.

    *on_report* is called with each report, *on_frame* after all of a frame, *on_sent* when the
    worker has something to take that it did not have.
    """

    def __init__(
        self,
        on_report: Callable[[m.Report], None],
        on_frame: Callable[[], None],
        on_sent: Callable[[], None],
    ):
        self._on_report, self._on_frame, self._on_sent = on_report, on_frame, on_sent
        self._line: socket.socket | None = None
        self._commands: list[m.Command] = []
        self._unsent = bytearray()
        self._writing = False
        self._decoder = msgspec.msgpack.Decoder(list[m.Report])
        self._frames = FrameReader(ANY_LENGTH)

    def send(self, command: m.Command) -> None:
        """Send a command, in one frame with those that come before the loop's next turn."""
        if not self._commands and self._line is not None:
            asyncio.get_running_loop().call_soon(self._write)
            self._on_sent()
        self._commands.append(command)

    async def talk(self, sock: socket.socket) -> None:
        """Write commands and read reports until the process is gone.

        One callback for each, for good: what a wake-up costs here is paid per step.

        :raises msgspec.DecodeError: what it says cannot be read.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        loop.add_reader(sock, self._read, sock, ended)
        self._line = sock
        if self._commands:
            self._on_sent()
        self._write()
        try:
            await ended
        finally:
            self._line = None
            loop.remove_reader(sock)
            loop.remove_writer(sock)

    def _write(self) -> None:
        """Send the commands that have come since, in one frame, or what the socket takes of it."""
        sock = self._line
        if sock is None:
            return  # the process is gone
        commands, self._commands = self._commands, []
        if commands:
            self._unsent += pack_frame(commands)
        try:
            while self._unsent:
                del self._unsent[: sock.send(self._unsent)]
        except BlockingIOError:
            asyncio.get_running_loop().add_writer(sock, self._write)
            self._writing = True
        except OSError:
            self._unsent.clear()  # the process is gone: the reader sees it too
        if self._writing and not self._unsent:
            asyncio.get_running_loop().remove_writer(sock)
            self._writing = False

    def _read(self, sock: socket.socket, ended: asyncio.Future[None]) -> None:
        if ended.done():
            return
        try:
            if not self._read_some(sock):
                ended.set_result(None)
        except Exception as exc:  # it ends `talk`, not only this callback
            ended.set_exception(exc)

    def _read_some(self, sock: socket.socket) -> bool:
        """Read once and pass the reports on; return whether more may come."""
        try:
            data = sock.recv(READ_BYTES)
        except BlockingIOError:
            return True
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
