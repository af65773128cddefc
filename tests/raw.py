"""A client made of only a socket and msgpack, as in another language."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from inferd.backends.errors import InferdError, error_from_wire

HELLO: tuple[int, dict[str, Any]] = (0, {"protocol": [1, 0], "software": "raw"})


class Closed(Exception):
    """The daemon closed the connection."""


class RawClient:
    """Sends and receives frames; `call` waits for its reply and keeps the events."""

    def __init__(self, path: str, *, hello: bool = True, timeout_s: float = 60.0, **greeting: Any):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(timeout_s)
        self.socket.connect(path)
        self.events: list[Any] = []
        self.changes: list[Any] = []
        """The messages with changes of sessions, if the hello asks for copies."""
        self._replies: dict[int, list[Any]] = {}
        self.server_hello = self.read_message()
        self._number = 0
        if hello:
            with contextlib.suppress(BrokenPipeError):  # the goodbye to a refused client follows
                self.write([HELLO[0], HELLO[1] | greeting])

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send_bytes(self, data: bytes, fds: Sequence[int] = ()) -> None:
        if fds:
            socket.send_fds(self.socket, [data], list(fds))
        else:
            self.socket.sendall(data)

    def write(self, message: Any, fds: Sequence[int] = ()) -> None:
        body = msgspec.msgpack.encode(message)
        self.send_bytes(struct.pack("<I", len(body)) + body, fds)

    def _read_bytes(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            if not part:
                raise Closed
            data += part
        return data

    def read_message(self) -> Any:
        (size,) = struct.unpack("<I", self._read_bytes(4))
        return msgspec.msgpack.decode(self._read_bytes(size))

    def start_request(self, call: str, fds: Sequence[int] = (), /, **params: Any) -> int:
        """Send a request and return its id."""
        self._number += 1
        self.write([1, self._number, call, params], fds)
        return self._number

    def wait_result(self, number: int) -> Any:
        """Return the result of a request, or raise its error; keep other replies."""
        while number not in self._replies:
            message = self.read_message()
            if message[0] == 6:
                raise error_from_wire(message[1])
            if message[0] == 4:
                self.events.append(message)
            elif message[0] == 7:
                self.changes.append(message)
            else:
                self._replies[message[1]] = message
        kind, _, content, *_ = self._replies.pop(number)
        if kind == 3:
            raise error_from_wire(content)
        return content

    def begin_stream(self, context: int, text: str) -> int:
        """Stream a raw turn on *text*; return its id when its first tokens have arrived."""
        number = self.start_request("stream", context=context, prompt=text, raw=True, credit=1000)
        while (message := self.read_message())[0] == 7:
            self.changes.append(message)
        self.events.append(message)
        return number

    @property
    def streamed_text(self) -> str:
        """The text of all streams so far."""
        return b"".join(event[2].get("text", b"") for event in self.events).decode()

    def has_answer(self, number: int) -> bool:
        """Return whether the answer to a request was already read, along with others."""
        return number in self._replies

    def call(self, call: str, fds: Sequence[int] = (), /, **params: Any) -> Any:
        return self.wait_result(self.start_request(call, fds, **params))

    def context(self, model: str = "echo", config: str = "") -> int:
        """Load a model and return a new context's handle."""
        graph = self.call("load_by_name_with_config", name=model, config=config)["graph"]
        return int(self.call("init_execution_context", graph=graph)["context"])

    def set_input(self, context: int, data: bytes, index: int = 0, **tensor: Any) -> None:
        fields = {"data": data, "dimensions": [1], "type": 3, **tensor}
        self.call("set_input", context=context, index=index, tensor=fields)

    def output(self, context: int, index: int = 0, **params: Any) -> bytes:
        return bytes(self.call("get_output", context=context, index=index, **params)["data"])

    def metadata(self, context: int) -> dict[str, Any]:
        decoded: dict[str, Any] = msgspec.json.decode(self.output(context, 1))
        return decoded

    def compute_single(self, context: int) -> bytes:
        """Compute the next token, and return the output of `get_output_single`."""
        self.call("compute_single", context=context)
        return bytes(self.call("get_output_single", context=context)["data"])

    def goodbye(self) -> InferdError:
        """Read until the daemon's goodbye, and return its error."""
        while True:
            message = self.read_message()
            if message[0] == 6:
                return error_from_wire(message[1])
