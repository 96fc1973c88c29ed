"""From commit to sink when the relay is idle, woken by NOTIFY."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence

from benchmarks.common import Result, postgres_outbox, server_url
from pillarbox import Claim, Event, Outcome, Relay
from pillarbox.event import DELIVERED

EVENTS = 300


class ClockSink:
    """Notes when an event arrived."""

    name = "clock"
    is_quick = True

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[float] = asyncio.Queue()

    async def open(self) -> None: ...

    async def check(self) -> None: ...

    async def close(self) -> None: ...

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        self.arrived.put_nowait(time.perf_counter())
        return [DELIVERED] * len(claims)


async def measure_latencies() -> list[float]:
    """One event at a time: commit, wait until the sink has it, wait until the relay is idle again."""
    latencies: list[float] = []
    with postgres_outbox() as (outbox, engine):
        sink = ClockSink()
        relay = Relay(outbox.store(server_url("postgres")), sink)
        await relay.open()
        running = asyncio.create_task(relay.run())

        def put(number: int) -> float:
            with engine.begin() as connection:
                outbox.put(connection, Event("tick", {"n": number}, key=f"key-{number % 10}"))
            return time.perf_counter()

        for number in range(EVENTS + 20):
            committed = await asyncio.to_thread(put, number)
            arrived = await sink.arrived.get()
            if number >= 20:
                latencies.append((arrived - committed) * 1e3)
            await asyncio.sleep(0.01)
        relay.stop()
        await running
        await relay.close()
    return latencies


async def latency_p50() -> Result:
    """(e) The median in milliseconds; the bar is the figure itself."""
    value = statistics.median(await measure_latencies())
    return Result("latency_p50", value, "ms", 5.0, value, 5.0, at_most=True)


async def latency_p99() -> Result:
    """(e) The 99th percentile in milliseconds."""
    value = statistics.quantiles(await measure_latencies(), n=100)[98]
    return Result("latency_p99", value, "ms", 25.0, value, 25.0, at_most=True)
