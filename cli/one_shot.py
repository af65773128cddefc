"""A blocking client for commands that make one or two calls and print the replies.

It needs no event loop and avoids the client library, whose import, with asyncio and anyio, takes
0.1 s of CPU time, more than such a command itself.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from ..backends.errors import ConnectionLost, ProtocolError, Timeout, error_from_wire
from ..ipc import messages as w
from ..ipc.greeting import connect_error, connect_timeout_error, read_server_hello
from ..ipc.names import check_label
from ..ipc.paths import check_server, check_socket_folder, client_socket_path
from ..wire.frames import READ_BYTES, FrameReader, pack_frame
from .client import SOFTWARE

CONNECT_S_MAX = 5.0
CALL_S_MAX = 600.0
CONNECT_PAUSE_S = 0.02
R = TypeVar("R")
_decode = msgspec.msgpack.Decoder(list[Any]).decode


class OneShotClient:
    """A connection to the daemon, for one call at a time. Its methods are named as in `Client`."""

    server: w.ServerHello

    def __init__(self, path: Path | None, *, timeout_s: float = CALL_S_MAX, label: str = ""):
        check_label(label)
        self._label = label
        self._path, self._timeout_s = str(path or client_socket_path()), timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._frames = FrameReader()
        self._messages: deque[list[Any]] = deque()
        self._ids = itertools.count(1)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.callback(self._socket.close)
            connect_s = min(CONNECT_S_MAX, self._timeout_s)
            try:
                self._connect(connect_s)
            except TimeoutError:
                raise connect_timeout_error(self._path, connect_s) from None
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _connect(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                self._limit_wait(deadline)
                with contextlib.suppress(BlockingIOError):
                    check_socket_folder(self._path)
                    self._socket.connect(self._path)
                    check_server(self._socket, self._path)
                    break
                time.sleep(CONNECT_PAUSE_S)  # the daemon's backlog is full; no event reports space
        except TimeoutError:
            raise
        except OSError as exc:
            raise connect_error(self._path, exc) from None
        hello = w.ClientHello(protocol=w.PROTOCOL_VERSION, software=SOFTWARE, label=self._label)
        _, fields = self._exchange((w.Kind.HELLO, hello), deadline)
        self.server = read_server_hello(self._path, fields)

    def _exchange(self, message: Any, deadline: float) -> list[Any]:
        """Send a message and return the next message of the daemon.

        :raises TimeoutError: *deadline* has passed.
        """
        try:
            self._limit_wait(deadline)
            self._socket.sendall(pack_frame(message))
            while not self._messages:
                self._limit_wait(deadline)
                data = self._socket.recv(READ_BYTES)
                if not data:
                    raise ConnectionLost(f"the daemon at {self._path} closed the connection")
                self._messages.extend(map(_decode, self._frames.read_frames(data)))
        except TimeoutError:
            raise
        except OSError as exc:
            raise ConnectionLost(f"the connection to {self._path} broke: {exc.strerror}") from None
        except msgspec.DecodeError as exc:
            raise ProtocolError(f"a frame of the daemon cannot be read: {exc}") from None
        reply = self._messages.popleft()
        if reply[0] in (w.Kind.ERROR, w.Kind.GOODBYE):
            raise error_from_wire(reply[-1])
        return reply

    def _limit_wait(self, deadline: float) -> None:
        """Let the next operation on the socket end at *deadline*."""
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        self._socket.settimeout(remaining_s)

    def call(self, call: str, params: Any, result: type[R]) -> R:
        """Make any call of the protocol that has no events."""
        number, deadline = next(self._ids), time.monotonic() + self._timeout_s
        try:
            _, _, reply = self._exchange((w.Kind.REQUEST, number, call, params), deadline)
        except TimeoutError:
            text = f"{call} took longer than its timeout"
            raise Timeout(text, data={"timeout": "total"}) from None
        try:
            return msgspec.convert(reply, result)
        except msgspec.ValidationError as exc:
            raise ProtocolError(f"the answer to {call} cannot be read: {exc}") from None

    def models(self) -> list[dict[str, Any]]:
        return self.models_and_files(all_files=False).models

    def models_and_files(self, *, all_files: bool) -> w.ModelsResult:
        """Return all models, and with *all_files* the files that are not offered as models."""
        return self.call("models", w.ModelsParams(all_files=all_files), w.ModelsResult)

    def sessions(
        self, *, dormant: bool = False, all_users: bool = False, search: str = ""
    ) -> list[dict[str, Any]]:
        """Return the user's sessions, with *dormant* also dormant sessions."""
        params = w.SessionsParams(dormant=dormant, all=all_users, search=search)
        return self.call("sessions", params, w.SessionsResult).sessions

    def list_deletions(self) -> list[dict[str, Any]]:
        """Return the notes on sessions that the daemon has deleted by itself."""
        return self.call("list_deletions", w.ListDeletionsParams(), w.ListDeletionsResult).deletions

    def list_states(self) -> list[dict[str, Any]]:
        """Return the user's named states."""
        return self.call("list_states", w.Empty(), w.ListStatesResult).states

    def jobs(self, *, all_users: bool = False) -> list[dict[str, Any]]:
        """Return the user's jobs."""
        return self.call("jobs", w.JobsParams(all=all_users), w.JobsResult).jobs

    def queue(self, *, all_users: bool = False) -> list[dict[str, Any]]:
        """Return the user's waiting and running tasks."""
        return self.call("queue", w.QueueParams(all=all_users), w.QueueResult).tasks

    def usage(self, by: Sequence[str], *, since_s: float, all_users: bool = False) -> w.UsageResult:
        """Return the sums of usage of the last *since_s* seconds."""
        params = w.UsageParams(by=list(by), since_s=since_s, all=all_users)
        return self.call("usage", params, w.UsageResult)

    def stats(self) -> dict[str, Any]:
        """Return the daemon's state and metrics."""
        found: dict[str, Any] = self.call("stats", w.Empty(), w.StatsResult).stats
        return found
