"""The relay from PostgreSQL to a Redis stream, over pipelines of redis-py with the same entries."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from benchmarks.common import PAYLOAD, Result, server_url
from benchmarks.sinks import Place, measure
from pillarbox import open_sink

STREAM = "bench"
FIELDS: dict[Any, Any] = {
    "event-id": "01890a5d-ac96-774b-bcce-b302099a8057",
    "event-type": "bench",
    "event-key": "key-123",
    "event-time": "2026-03-01T12:30:00.123456+00:00",
    "content-type": "application/octet-stream",
    "payload": PAYLOAD,
}


@asynccontextmanager
async def redis_place() -> AsyncIterator[Place]:
    url = server_url("redis")
    client = Redis.from_url(url)

    async def send(count: int) -> None:
        pipeline = client.pipeline(transaction=False)
        for _ in range(count):
            pipeline.xadd(STREAM, FIELDS)
        await pipeline.execute()

    await client.delete(STREAM)
    yield Place(lambda: open_sink(url, stream=STREAM), send)
    await client.delete(STREAM)
    await client.aclose()


async def sink_redis() -> Result:
    """Redis Streams: pipelined XADD."""
    return await measure("sink_redis", redis_place())


BENCHMARKS = (sink_redis,)
