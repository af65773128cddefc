"""A collector of OpenTelemetry's spans over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

__all__ = ("SECONDS_MAX", "Collector", "ReceivedSpan", "Trace", "collecting")

SECONDS_MAX = 60.0
PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class ReceivedSpan:
    """A received span; times are nanoseconds since 1970."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    began: int
    ended: int
    attributes: dict[str, Any]
    failed: bool
    resource: dict[str, Any]

    @property
    def seconds(self) -> float:
        return (self.ended - self.began) / 1e9


@dataclass(frozen=True)
class Trace:
    """A request's span, and its child spans in order."""

    outer: ReceivedSpan
    inside: list[ReceivedSpan]

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.inside]


class Collector:
    """The received `bodies` and the `paths` of their requests. While `answers` is not set
    nobody is answered; `status` is the answer, and `location` where it sends on to. With `padding`
    the answer has so many bytes more; `cut_off` says that they were not read.
    """

    def __init__(self, port: int = 0):
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.status = 200
        self.location = ""
        self.padding = 0
        self.cut_off = threading.Event()
        self.answers = threading.Event()
        self.answers.set()
        self._received: Queue[ReceivedSpan] = Queue()
        self.server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self.server.daemon_threads = True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.answers.wait(SECONDS_MAX)
                self.answer(collector.take(self.path, body))

            def answer(self, status: int) -> None:
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer) + collector.padding))
                if collector.location:
                    self.send_header("Location", collector.location)
                self.end_headers()
                try:
                    self.wfile.write(answer)
                    for _ in range(0, collector.padding, PIECE_BYTES):
                        self.wfile.write(bytes(PIECE_BYTES))
                except OSError:  # who asked has given up
                    collector.cut_off.set()

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def take(self, path: str, body: bytes) -> int:
        """Keep what came, unless it is refused; return the answer's status."""
        if self.status == 200:
            self.bodies.append(body)
            self.paths.append(path)
            for received in _spans(ExportTraceServiceRequest.FromString(body)):
                self._received.put(received)
        return self.status

    def next(self) -> Trace:
        """Return the next request's trace."""
        inside = []
        while (received := self._received.get(timeout=SECONDS_MAX)).kind != Span.SPAN_KIND_SERVER:
            inside.append(received)
        assert all(span.parent_id == received.span_id for span in inside)
        assert all(span.trace_id == received.trace_id for span in inside)
        return Trace(received, inside)


@contextmanager
def collecting(port: int = 0) -> Iterator[Collector]:
    """Run a collector."""
    collector = Collector(port)
    thread = threading.Thread(target=collector.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield collector
    finally:
        collector.answers.set()
        collector.server.shutdown()
        thread.join()
        collector.server.server_close()


def _spans(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource in request.resource_spans:
        of = _values(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    span.name,
                    span.kind,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    _values(span.attributes),
                    span.status.code == Status.STATUS_CODE_ERROR,
                    of,
                )


def _values(pairs: Any) -> dict[str, Any]:
    found: list[KeyValue] = list(pairs)
    return {pair.key: _value(pair.value) for pair in found}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None
