"""A span around an action, where OpenTelemetry is installed; without it, or without its SDK, nothing happens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_trace: Any
try:
    from opentelemetry import trace as _trace
except ImportError:
    _trace = None

if TYPE_CHECKING:
    from pillarbox.actions.action import Call


class Span:
    """The span of one call, all its attempts included."""

    def __init__(self, call: Call) -> None:
        self._retries = 0
        self._span: Any = None
        if _trace is None:
            return
        attributes = {"pillarbox.action.name": call.name, "pillarbox.action.namespace": call.namespace}
        if call.actor is not None:
            attributes["pillarbox.action.actor"] = call.actor
        self._span = _trace.get_tracer("pillarbox").start_span("pillarbox.action", attributes=attributes)
        self._manager = _trace.use_span(self._span, record_exception=False, set_status_on_exception=False)
        self._manager.__enter__()

    def note_retry(self, error: BaseException) -> None:
        self._retries += 1
        if self._span is not None:
            self._span.add_event("retry", {"exception.type": type(error).__name__, "attempt": self._retries})

    def end(self, error: BaseException | None) -> None:
        if self._span is None:
            return
        span, self._span = self._span, None
        span.set_attribute("pillarbox.action.retries", self._retries)
        span.set_attribute("pillarbox.action.outcome", "done" if error is None else "failed")
        if error is not None:
            span.record_exception(error)
            span.set_status(_trace.Status(_trace.StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        self._manager.__exit__(None, None, None)
        span.end()
