"""The builder of one exchange, frame by frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from inferd.backends.errors import InferdError
from inferd.ipc import messages as w
from inferd.wire.frames import FRAME_BYTES_MAX, NESTING_MAX, REPLY_BYTES_MAX, pack_frame

__all__ = ("INSTANCE", "SOFTWARE", "Exchange", "daemon_hello")

INSTANCE = 1
SOFTWARE = "vectors"
TIMES = ["queue_ms", "ttft_ms", "prompt_ms", "predicted_ms"]
STATS = {"seed", "llama_build_number", "llama_commit", *TIMES}


def plain(value: Any) -> Any:
    """Return *value* in types of JSON."""
    if isinstance(value, bytes):
        return {"$bin": value.hex()}
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


class Exchange:
    """Builds one exchange: hellos, then requests and their replies."""

    def __init__(self, name: str):
        self.name = name
        self.frames: list[dict[str, Any]] = []
        self._number = self._handles = 0
        self._daemon([0, daemon_hello()], ["/1/software", "/1/llama_commit"])
        self._client([0, w.ClientHello(protocol=w.PROTOCOL_VERSION, software=SOFTWARE)])

    def _add(self, side: str, message: Any, **more: Any) -> None:
        frame = pack_frame(message)
        means = plain(msgspec.msgpack.decode(frame[4:]))
        self.frames.append({"from": side, "hex": frame.hex(), "means": means, **more})

    def _client(self, message: Any, **more: Any) -> None:
        self._add("client", message, **more)

    def _daemon(self, message: Any, varies: list[str] | None = None) -> None:
        self._add("daemon", message, **({"varies": varies} if varies else {}))

    def handle(self) -> int:
        """Return the next handle of the daemon."""
        self._handles += 1
        return INSTANCE << 32 | self._handles

    def request(self, call: str, params: Any, **more: Any) -> int:
        """Add a request and return its id."""
        self._number += 1
        self._client([1, self._number, call, params], **more)
        return self._number

    def call(self, call: str, params: Any, result: Any, **more: Any) -> None:
        """Add a request whose reply is *result*."""
        number = self.request(call, params, **more)
        answer = msgspec.to_builtins(result, builtin_types=(bytes,))
        varies = [f"/2/metadata/{key}" for key in answer.get("metadata", ()) if key in STATS]
        self._daemon([2, number, result], varies)

    def refused(self, call: str, params: Any, error: InferdError) -> None:
        """Add a request whose reply is *error*."""
        number = self.request(call, params)
        self._daemon([3, number, error.to_wire()], ["/2/message", "/2/hint"])

    def event(self, number: int, event: Any, varies: list[str] | None = None) -> None:
        """Add an event from the daemon."""
        self._daemon([4, number, event], varies)

    def credit(self, number: int, events: int) -> None:
        """Add credit for more events."""
        self._client([5, number, events])

    def reply(self, number: int, result: w.TurnResult, more: Sequence[str] = ()) -> None:
        """Add the reply to a request with events. *more* lists further fields of it that vary."""
        varies = [*more]
        varies += [f"/2/metadata/{key}" for key in result.metadata if key in STATS]
        self._daemon([2, number, result], varies)

    def open(self) -> tuple[int, int]:
        """Load the echo model, open a context and return both handles."""
        graph, context = self.handle(), self.handle()
        self.call(
            "load_by_name",
            w.LoadByNameParams(name="echo"),
            w.GraphResult(
                graph=graph,
                model="echo",
                fingerprint="echo-1",
                ctx_size=4096,
                slots=4,
                tensors=True,
            ),
        )
        self.call(
            "init_execution_context", w.GraphParams(graph=graph), w.ContextResult(context=context)
        )
        return graph, context

    def done(self) -> dict[str, Any]:
        """Return the exchange in the format of the file."""
        return {"name": self.name, "frames": self.frames}


def daemon_hello() -> w.ServerHello:
    """Return the hello of a daemon with the default configuration."""
    return w.ServerHello(
        protocol=w.PROTOCOL_VERSION,
        software="inferd/0.1.0",
        instance=INSTANCE,
        limits=w.Limits(
            frame_bytes_max=FRAME_BYTES_MAX,
            reply_bytes_max=REPLY_BYTES_MAX,
            nesting_max=NESTING_MAX,
            requests_max=w.REQUESTS_MAX,
            credit_default=w.CREDIT_DEFAULT,
            credit_max=w.CREDIT_MAX,
            tensor_bytes_max=w.TENSOR_BYTES_MAX,
            sessions_max=100,
            idle_timeout_ms=300_000,
        ),
        llama_commit="0c1e57098",
    )
