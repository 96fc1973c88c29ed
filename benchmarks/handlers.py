"""Handlers without a session, called by the relay on PostgreSQL, over the bare statements of claim and settlement."""

from __future__ import annotations

from benchmarks.common import Result
from benchmarks.relay import measure
from pillarbox import Event, Handlers, HandlerSink

BAR = 0.5


async def handler_dispatch() -> Result:
    """An async handler that does nothing, for every event of a backlog, by lease."""
    return await measure("handler_dispatch", "lease", make_sink=make_sink, bar=BAR)


def make_sink() -> HandlerSink:
    handlers = Handlers()

    @handlers.on("bench")
    async def handle(event: Event) -> None: ...

    return HandlerSink(handlers, "handle")


BENCHMARKS = (handler_dispatch,)
