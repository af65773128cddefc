"""A server that breaks one rule at a time: a proxy before a daemon, which changes messages."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

FRAME_BYTES_MAX = 1 << 20
"""A frame that claims to be longer than the daemon's limit is passed on as it arrives."""
Message = list[Any]


class Fault:
    """Broken rules. This one breaks none: it passes on every message."""

    held_s = 0.0
    """How long the daemon's side stays open when the client has closed its own."""

    def request(self, link: Link, message: Message) -> list[Message]:
        """Return the messages that the daemon gets for one of the client."""
        return [message]

    def answer(self, link: Link, message: Message) -> list[Message]:
        """Return the messages that the client gets for one of the daemon."""
        return [message]

    def fds(self, fds: list[int]) -> list[int]:
        """Return the descriptors that the daemon gets."""
        return fds


class Link:
    """One client of the proxy: two sockets, and the calls of its requests."""

    def __init__(self, server: WrongServer, client: socket.socket):
        self._server, self._client = server, client
        self._daemon = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._daemon.connect(server.daemon)
        self.calls: dict[Any, tuple[str, dict[str, Any]]] = {}
        """By the request's id, its call and params."""
        self.notes: dict[Any, Any] = {}
        """Notes of the fault."""
        self._fds: list[int] = []
        self.threads = [
            threading.Thread(target=self._run, args=(part,), daemon=True)
            for part in (self._read_client, self._read_daemon)
        ]

    def _run(self, part: Any) -> None:
        with contextlib.suppress(OSError, struct.error):
            part()

    def _read_client(self) -> None:
        buffer = b""
        while True:
            data, fds, _, _ = socket.recv_fds(self._client, 1 << 16, 32)
            self._fds += fds
            if not data:
                break
            buffer = self._pass_frames(buffer + data)
        if self._server.fault.held_s < math.inf:
            time.sleep(self._server.fault.held_s)
            self._daemon.shutdown(socket.SHUT_WR)
            closed = select.poll()
            closed.register(self._client, 0)  # POLLHUP: both directions are shut down
            closed.poll()
            self._daemon.shutdown(socket.SHUT_RDWR)

    def _pass_frames(self, buffer: bytes) -> bytes:
        while len(buffer) >= 4:
            (size,) = struct.unpack_from("<I", buffer)
            if size > FRAME_BYTES_MAX:
                self._to_daemon(buffer)
                return b""
            if len(buffer) < 4 + size:
                break
            frame, buffer = buffer[: 4 + size], buffer[4 + size :]
            self._pass_request(frame)
        return buffer

    def _pass_request(self, frame: bytes) -> None:
        try:
            message = msgspec.msgpack.decode(frame[4:])
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError, RecursionError):
            message = None
        is_request = isinstance(message, list) and len(message) >= 2 and message[0] in (0, 1, 5)
        if message is None or not is_request:
            return self._to_daemon(frame)
        if message[0] == 1 and len(message) >= 4 and isinstance(message[3], dict):
            self.calls[message[1]] = (message[2], message[3])
        passed = self._server.fault.request(self, message)
        if passed == [msgspec.msgpack.decode(frame[4:])]:
            return self._to_daemon(frame)
        for changed in passed:
            self._to_daemon(_frame(changed))

    def _to_daemon(self, data: bytes) -> None:
        fds, self._fds = self._fds, []
        passed = self._server.fault.fds(fds)
        if passed:
            sent = socket.send_fds(self._daemon, [data], passed)
            data = data[sent:]
        self._daemon.sendall(data)
        for fd in fds:
            os.close(fd)

    def _read_daemon(self) -> None:
        try:
            while True:
                (size,) = struct.unpack("<I", self._read_exactly(4))
                message = msgspec.msgpack.decode(self._read_exactly(size))
                for changed in self._server.fault.answer(self, message):
                    self.to_client(changed)
        finally:
            self._client.shutdown(socket.SHUT_RDWR)

    def _read_exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._daemon.recv(size - len(data))
            if not part:
                raise OSError
            data += part
        return data

    def to_client(self, message: Message) -> None:
        """Send a message to the client."""
        self._client.sendall(_frame(message))

    def hang_up(self) -> None:
        """Close the client's connection."""
        self._client.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close both sockets, and wait for the threads."""
        for end in (self._client, self._daemon):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        self._client.close()
        self._daemon.close()


class WrongServer:
    """The proxy: `path` is its socket."""

    def __init__(self, daemon: str, fault: Fault):
        self.daemon, self.fault = daemon, fault
        self._folder = tempfile.TemporaryDirectory(prefix="wrong-")
        self.path = str(Path(self._folder.name) / "wrong.sock")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._links: list[Link] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                link = Link(self, client)
                self._links.append(link)
                for thread in link.threads:
                    thread.start()

    def __enter__(self) -> WrongServer:
        self._listener.bind(self.path)
        self._listener.listen(128)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for link in self._links:
            link.close()
        self._folder.cleanup()


def _frame(message: Message) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


def maps_in(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all maps in a value, the outer one first."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            yield from maps_in(item)
