"""The trace context that the client sends with a call, as a W3C `traceparent`."""

from __future__ import annotations

import sys


def traceparent_of(given: str | None) -> str:
    """Return *given*, or else the `traceparent` of OpenTelemetry's current span, or else "".

    OpenTelemetry is not imported here: a program that has not imported it has no current span.
    """
    if given is not None:
        return given
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 0xFF:02x}"
