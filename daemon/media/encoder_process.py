"""The daemon's end of one encoder process: its start, requests with descriptors, and its exit."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import msgspec

from ...backends import media_process as m
from ...backends.errors import BackendError, LoadFailed, TooLarge
from ...backends.fd_frames import DESCRIPTORS_MAX, close_all, read_with_descriptors
from ...wire.frames import READ_BYTES, FrameReader, pack_frame
from ..workers.process import BUSY_SHARE, SpawnedProcess, cpu_seconds, spawn_program
from ..workers.worker_log import WorkerLog

REPLY_BYTES_MAX = 1 << 20
"""More than the pieces of the largest content need. The process has read untrusted bytes."""


class ProcessLost(Exception):
    """The process has exited, or was killed because it was of no more use."""


class EncoderProcess:
    """A process that runs *module*, with the log's *fields*. It has one request at a time. Lives on
    the daemon's event loop.
    """

    def __init__(self, module: str, fields: Callable[[], dict[str, Any]]):
        self.pid = 0
        self.sent_garbage = False
        """Whether it sent something that is not an answer."""
        self.was_killed_as_hung = False
        self.used_cpu = False
        """Whether it used CPU time in the request that it did not answer in time."""
        self._module, self._fields = module, fields
        self._socket: socket.socket | None = None
        self._process: SpawnedProcess | None = None
        self._log: WorkerLog | None = None
        self._frames = FrameReader(REPLY_BYTES_MAX)
        self._descriptors: list[int] = []
        """Those of the answer that is being read."""
        self._lacks_descriptors = False
        self._decoder = msgspec.msgpack.Decoder(m.Reply)

    async def start(self) -> None:
        """Start the process. `end` must follow, even after an error.

        :raises OSError: it cannot be started.
        :raises LoadFailed: the thread that starts processes has ended.
        """
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            self._log = WorkerLog(self._fields)
            self._process = await spawn_program(self._module, theirs, self._log.writer)
        self._log.close_writer()
        self.pid = self._process.pid

    @property
    def has_exited(self) -> bool:
        """Whether the process has exited."""
        assert self._process is not None, "it was started"
        exits = select.poll()  # `select` rejects descriptors from 1024 on
        exits.register(self._process.fileno(), select.POLLIN)
        return bool(exits.poll(0))

    def exit_fileno(self) -> int:
        """Return the descriptor that is readable once the process has exited."""
        assert self._process is not None, "it was started"
        return self._process.fileno()

    async def send(self, request: m.Request, descriptor: int = -1) -> None:
        """Send a request, with the descriptor of a content if that is not negative.

        :raises ProcessLost: the process has closed its end.
        """
        assert self._socket is not None, "it was started"
        unsent, descriptors = pack_frame(request), [descriptor] if descriptor >= 0 else []
        while unsent:
            try:
                sent = socket.send_fds(self._socket, [unsent], descriptors)
            except BlockingIOError:
                await anyio.wait_writable(self._socket)
                continue
            except OSError as exc:
                raise ProcessLost from exc
            unsent, descriptors = unsent[sent:], []

    async def request(
        self, request: m.Request, descriptor: int = -1, *, seconds_max: float
    ) -> tuple[m.Reply, list[int]]:
        """Send a request and return its answer with its descriptors, which belong to the caller.
        A process that does not answer within *seconds_max* is killed.

        :raises ProcessLost: there is no answer.
        :raises BackendError: the daemon has too many open files for the answer.
        """
        cpu_before_s = cpu_seconds(self.pid)
        try:
            with anyio.fail_after(seconds_max):
                await self.send(request, descriptor)
                return await self._receive()
        except TimeoutError as exc:
            used_s = cpu_seconds(self.pid) - cpu_before_s
            self.was_killed_as_hung = True
            self.used_cpu = used_s > BUSY_SHARE * seconds_max
            raise ProcessLost from exc

    async def _receive(self) -> tuple[m.Reply, list[int]]:
        assert self._socket is not None, "it was started"
        while True:
            try:
                data, descriptors, flags = read_with_descriptors(
                    self._socket, READ_BYTES, DESCRIPTORS_MAX
                )
            except BlockingIOError:
                await anyio.wait_readable(self._socket)
                continue
            except OSError as exc:
                raise ProcessLost from exc
            self._descriptors += descriptors
            self._lacks_descriptors |= bool(flags & socket.MSG_CTRUNC)
            if not data:
                raise ProcessLost
            frames = self._read_frames(data)
            if not frames:
                continue
            received, self._descriptors = self._descriptors, []
            if self._lacks_descriptors:
                self._lacks_descriptors = False
                close_all(received)
                raise BackendError(
                    "the embeddings could not be received: too many files are open",
                    hint="raise the daemon's limit of open files (LimitNOFILE)",
                )
            return frames[0], received

    def _read_frames(self, data: bytes) -> list[m.Reply]:
        try:
            frames = [self._decoder.decode(frame) for frame in self._frames.read_frames(data)]
            if len(frames) > 1 or (frames and self._frames.pending):
                raise msgspec.DecodeError("more than one answer")
        except (msgspec.DecodeError, TooLarge) as exc:
            self.sent_garbage = True
            raise ProcessLost from exc
        return frames

    async def end(self) -> int | None:
        """End the process, and return its exit status: its own if it had already exited. It has
        nothing to save.
        """
        close_all(self._descriptors)
        self._descriptors = []
        sock, process = self._socket, self._process
        if process is None:
            code = None
        else:
            # A process that exits by itself closes its end first, and keeps its own status.
            if not self._is_exiting():
                process.kill()
            code = await process.wait()
        self.pid = 0
        if sock is not None:
            sock.close()
        if self._log is not None:
            self._log.close()
        return code

    def _is_exiting(self) -> bool:
        """Return whether the process has closed its end, which it never does while it works."""
        assert self._socket is not None, "it was started"
        if self.was_killed_as_hung or self.sent_garbage:
            return False
        with suppress(BlockingIOError):
            try:
                return not self._socket.recv(1, socket.MSG_PEEK)
            except ConnectionError:
                return True
        return False


def start_error(model: str, exc: OSError) -> LoadFailed:
    """Return the error of a process that cannot be started."""
    return LoadFailed(
        f"the encoder process of {model!r} did not start: {exc.strerror or exc}",
        hint="memory, processes or open files ran out: free some and try again",
    )
