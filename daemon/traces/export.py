"""Export of spans by OpenTelemetry's SDK, in a thread of the SDK, when a request has ended.

The SDK bounds the queue of unsent spans (`OTEL_BSP_MAX_QUEUE_SIZE`, 2048) and drops the oldest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import requests
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span as OpenSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from urllib3.exceptions import HTTPError

from ... import __version__
from ..logs.setup import LogFile
from .spans import Span
from .target import Target

SPANS_FILE_BYTES_MAX = 1 << 30
ANSWER_BYTES_MAX = 1 << 12
SERVICE = "inferd"
_propagator = TraceContextTextMapPropagator()
Note = Callable[[str | None], None]
"""Called from any thread with the reason why spans do not arrive, or None if they arrive."""


class Export:
    """Creates spans and sends them to *target*. One thread calls `export_spans`."""

    def __init__(self, target: Target, note: Note):
        self._health = _ExportHealth(str(target), note)
        exporter = FileExporter(Path(target.path)) if target.path else _collector(target)
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(_NotingExporter(exporter, self._health))
        )
        self._tracer = self._provider.get_tracer(SERVICE, __version__)
        logger = logging.getLogger("opentelemetry")
        logger.propagate = False
        logger.addHandler(self._health)

    def export_spans(self, spans: Sequence[Span], parent: str) -> None:
        """Export *spans*, of which the first is the parent of the others. *parent* is the
        `traceparent` of the first; an empty one starts a trace.
        """
        now, date_ns = time.monotonic(), time.time_ns()

        def date(at: float) -> int:
            return date_ns - round((now - at) * 1e9)

        first, *inside = spans
        carrier = {"traceparent": parent} if parent else {}
        outer = self._start_span(
            first, _propagator.extract(carrier, Context()), SpanKind.SERVER, date
        )
        within = set_span_in_context(outer, Context())
        for span in inside:
            self._start_span(span, within, SpanKind.INTERNAL, date).end(date(span.ended_at))
        outer.end(date(first.ended_at))

    def _start_span(
        self, span: Span, context: Context, kind: SpanKind, date: Callable[[float], int]
    ) -> OpenSpan:
        started = self._tracer.start_span(
            span.name, context, kind, span.attributes, start_time=date(span.began_at)
        )
        if span.error is not None:
            started.set_status(Status(StatusCode.ERROR, span.error))
        return started

    def close(self) -> None:
        """Send the remaining spans, which may take long."""
        self._provider.shutdown()
        logging.getLogger("opentelemetry").removeHandler(self._health)


class FileExporter(SpanExporter):
    """Appends spans to a file as JSON lines. The file may be moved away at any time."""

    def __init__(self, path: Path, bytes_max: int = SPANS_FILE_BYTES_MAX):
        self._file = LogFile(path, bytes_max=bytes_max)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write *spans*.

        :raises OSError: the spans cannot be written, or the file is full.
        """
        lines = (f"{span.to_json(indent=None)}\n" for span in spans)
        self._file.append_lines("".join(lines).encode())
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file."""
        self._file.close()


class _ExportHealth(logging.Handler):
    """Reports warnings of the SDK and its exporter, which appear only in Python's log."""

    def __init__(self, where: str, note: Note):
        super().__init__(logging.WARNING)
        self._where, self.note = where, note
        self._cause = "the spans are not accepted"

    def emit(self, record: logging.LogRecord) -> None:
        """Report a warning at once, because a failing export is retried for some seconds."""
        self._cause = record.getMessage()
        self.note_failure()

    def note_failure(self, cause: str = "") -> None:
        """Report that spans do not arrive, because of *cause* or the last warning."""
        self.note(f"{self._where}: {cause or self._cause}")


class _NotingExporter(SpanExporter):
    """An exporter that reports whether spans arrive."""

    def __init__(self, exporter: SpanExporter, health: _ExportHealth):
        self._exporter, self._health = exporter, health

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export *spans*, and report the outcome."""
        try:
            result = self._exporter.export(spans)
        except OSError as exc:
            self._health.note_failure(exc.strerror or str(exc))
            return SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self._health.note(None)
        else:
            self._health.note_failure()
        return result

    def shutdown(self) -> None:
        """Shut the exporter down; an export under way is aborted."""
        self._exporter.shutdown()


def _collector(target: Target) -> OTLPSpanExporter:
    session = requests.Session()
    session.max_redirects = 0  # a redirect may lead to another machine
    session.stream = True
    session.hooks["response"].append(_read_answer)
    if not target.is_remote:
        session.trust_env = False  # a proxy may be another machine
    return OTLPSpanExporter(endpoint=target.url, session=session)


def _read_answer(response: requests.Response, **_: object) -> None:
    """Read an answer of at most `ANSWER_BYTES_MAX`, so that the connection can be reused. The body
    is ignored: only the status counts.
    """
    with suppress(HTTPError):
        response.raw.read(ANSWER_BYTES_MAX)
    response.close()


def _resource() -> Resource:
    """Return the resource of the spans; OpenTelemetry's environment variables take precedence."""
    given = Resource.create()
    own: dict[str, str] = {}
    if str(given.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        own[SERVICE_NAME] = SERVICE
    if SERVICE_VERSION not in given.attributes:
        own[SERVICE_VERSION] = __version__
    return given.merge(Resource(own))
