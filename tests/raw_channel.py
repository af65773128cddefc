"""A channel to the process of a graph, made of only a socket and msgpack."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import msgspec

from inferd import Tensor
from inferd.backends.errors import error_from_wire
from inferd.wire.frames import ANY_LENGTH, FrameReader, pack_frame
from tests.raw import RawClient

__all__ = ("ChannelEnded", "RawChannel", "message_of", "open_graph", "pass_socket")


class ChannelEnded(Exception):
    """The process or the daemon has closed the channel."""


def message_of(tensor: Tensor) -> dict[str, Any]:
    return {"data": tensor.data, "dimensions": tensor.dimensions, "type": tensor.type}


def open_graph(client: RawClient, name: str) -> int:
    """Load a model, and return the graph."""
    return int(client.call("load_by_name", name=name)["graph"])


def pass_socket(client: RawClient, graph: int, passed: socket.socket) -> None:
    """Open a channel by this very socket, which stays open here."""
    assert client.call("open_channel", [passed.fileno()], graph=graph, fd=0) == {}


class RawChannel:
    """A channel of *graph*, which *client* has loaded; waits for answers fail after *timeout_s*."""

    def __init__(self, client: RawClient, graph: int, timeout_s: float = 60.0):
        self.socket, theirs = socket.socketpair()
        with theirs:
            try:
                pass_socket(client, graph, theirs)
            except BaseException:
                self.socket.close()
                raise
        self.socket.settimeout(timeout_s)
        self._frames = FrameReader(ANY_LENGTH)
        self._replies: dict[int, list[Any]] = {}
        self._number = 0

    def __enter__(self) -> RawChannel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.socket.close()

    def start(self, inputs: Mapping[str, Tensor], **params: Any) -> int:
        """Send a computation, and return its number."""
        named = [[name, message_of(tensor)] for name, tensor in inputs.items()]
        return self.start_request("compute", inputs=named, **params)

    def start_request(self, call: str, **params: Any) -> int:
        self._number += 1
        try:
            self.socket.sendall(pack_frame([1, self._number, call, params]))
        except BrokenPipeError:
            raise ChannelEnded from None
        return self._number

    def wait(self, number: int) -> dict[str, Any]:
        """Return the outputs of a computation by name, or raise its error.

        :raises ChannelEnded: the channel was closed before.
        """
        while number not in self._replies:
            self._receive()
        kind, _, content = self._replies.pop(number)
        if kind == 3:
            raise error_from_wire(content)
        return dict(content.get("outputs", ()))

    def has_answer(self, number: int) -> bool:
        """Return whether the answer to a request was already read, along with others."""
        return number in self._replies

    def compute(self, inputs: Mapping[str, Tensor], **params: Any) -> dict[str, Any]:
        """Return the outputs of *inputs* by name."""
        return self.wait(self.start(inputs, **params))

    def wait_end(self) -> None:
        """Read until the channel is closed; answers are kept for `wait`."""
        try:
            while True:
                self._receive()
        except ChannelEnded:
            pass

    def _receive(self) -> None:
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            raise ChannelEnded
        for frame in self._frames.read_frames(data):
            message = msgspec.msgpack.decode(frame)
            if message[0] == 6:
                raise error_from_wire(message[1])
            self._replies[message[1]] = message
