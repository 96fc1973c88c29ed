"""The relay from PostgreSQL to a quorum queue of RabbitMQ, over the client's own publishes, 500 at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast
from uuid import uuid4

import aiormq

from benchmarks.common import PAYLOAD, Result, server_url
from benchmarks.sinks import Place, measure
from pillarbox import open_sink

# Both sides fill the same queue: it keeps its newest messages only.
_QUEUE: dict[str, Any] = {"x-queue-type": "quorum", "x-max-length": 10_000}


def make_properties() -> aiormq.spec.Basic.Properties:
    """The properties and headers that the sink gives an event of the benchmark."""
    number = str(uuid4())
    return aiormq.spec.Basic.Properties(
        content_type="application/octet-stream",
        headers={
            "event-id": number,
            "event-type": "bench",
            "event-key": "key-1",
            "event-time": "2026-03-01T12:30:00.250000+00:00",
        },
        delivery_mode=2,
        message_id=number,
        message_type="bench",
    )


@asynccontextmanager
async def rabbitmq_place() -> AsyncIterator[Place]:
    url = server_url("rabbitmq")
    queue = f"bench-{uuid4().hex[:8]}"
    connection = await aiormq.connect(url)
    channel = cast(aiormq.Channel, await connection.channel())
    await channel.queue_declare(queue, durable=True, arguments=_QUEUE)

    async def send(count: int) -> None:
        await asyncio.gather(
            *(
                channel.basic_publish(
                    PAYLOAD, routing_key=queue, properties=make_properties(), mandatory=True, wait=False
                )
                for _ in range(count)
            )
        )

    try:
        yield Place(lambda: open_sink(url, routing_key=queue), send)
    finally:
        await channel.queue_delete(queue)
        await connection.close()


async def sink_rabbitmq() -> Result:
    """RabbitMQ: publisher confirms in windows."""
    return await measure("sink_rabbitmq", rabbitmq_place())


BENCHMARKS = (sink_rabbitmq,)
