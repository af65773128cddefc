"""Trace context of a call: the `traceparent` that the client sends."""

from __future__ import annotations

import sys


def traceparent_of(given: str | None) -> str:
    """Return *given*, or else the W3C `traceparent` of OpenTelemetry's current span; empty where
    there is none.

    Nothing is imported: without an import of OpenTelemetry, no span is current.
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
