"""The trace an event was put in, when OpenTelemetry is installed."""

from __future__ import annotations

try:
    from opentelemetry import trace as _trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    _propagator = None
else:
    _propagator = TraceContextTextMapPropagator()


def current_trace_headers() -> dict[str, str]:
    """W3C `traceparent` and `tracestate` of the current span; empty without one."""
    if _propagator is None or not _trace.get_current_span().get_span_context().is_valid:
        return {}
    headers: dict[str, str] = {}
    _propagator.inject(headers)
    return headers
