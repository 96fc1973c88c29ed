"""The relay from PostgreSQL to each sink, over a bare loop of the same client with the same window.

The relay can be no quicker than its store or its client, so the baseline is the smaller of the two, measured in the
same run: the bare client, and the relay to the null sink.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

import sqlalchemy as sa

from benchmarks.common import ROUNDS, Result, fill, postgres_outbox, server_url
from pillarbox import Outbox, Relay, open_sink
from pillarbox.sinks import Sink

EVENTS = 20_000
WINDOW = 500
WARM_UP = 4
"""How many windows are sent before the time is taken."""
BAR = 0.7

Send = Callable[[int], Awaitable[None]]
"""Sends that many messages of 256 bytes with the bare client and waits for all their acknowledgements."""


class Place(NamedTuple):
    """Where a benchmark sends: a sink as users make it, and the bare client."""

    sink: Callable[[], Sink]
    send: Send


async def relay_rate(outbox: Outbox, engine: sa.Engine, sink: Sink, *, events: int) -> float:
    """Events a second from a full outbox to the sink, once it has sent a few windows, as the bare client has."""
    with engine.begin() as connection:
        connection.exec_driver_sql(f"TRUNCATE {outbox.table.fullname}")
    relay = Relay(outbox.store(server_url("postgres"), notify=False), sink, batch_size=WINDOW)
    async with relay:
        await asyncio.to_thread(fill, outbox, engine, WARM_UP * WINDOW)
        await relay.drain()
        await asyncio.to_thread(fill, outbox, engine, events)
        relay._size = WINDOW
        started = time.perf_counter()
        await relay._loop(drains=True)
        return events / (time.perf_counter() - started)


async def bare_rate(send: Send, *, events: int) -> float:
    await send(WINDOW)
    started = time.perf_counter()
    for _ in range(events // WINDOW):
        await send(WINDOW)
    return events / (time.perf_counter() - started)


async def measure(name: str, place: AbstractAsyncContextManager[Place], *, events: int = EVENTS) -> Result:
    rounds: list[tuple[float, float, float]] = []
    with postgres_outbox(f"bench_{name}") as (outbox, engine):
        async with place as (make_sink, send):
            for number in range(ROUNDS):
                measured = {}
                for each in ("relay", "client", "store") if number % 2 else ("store", "client", "relay"):
                    if each == "client":
                        measured[each] = await bare_rate(send, events=events)
                    else:
                        sink = make_sink() if each == "relay" else open_sink("null:")
                        measured[each] = await relay_rate(outbox, engine, sink, events=events)
                rounds.append((measured["relay"], measured["client"], measured["store"]))
    ours, client, store = (statistics.median(each) for each in zip(*rounds, strict=True))
    ratio = statistics.median(rate / min(bare, null) for rate, bare, null in rounds)
    return Result(name, ours, "events/s", min(client, store), ratio, BAR, parts={"client": client, "store": store})
