"""Kafka: the relay over the bare client, which produces windows of 500 with the same settings and messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from uuid import uuid4

from benchmarks.common import KEYS, PAYLOAD, Result, server_url
from benchmarks.sinks import Place, measure
from pillarbox import open_sink

TOPIC = "bench"
NULL_BAR = 0.5


@asynccontextmanager
async def kafka_place() -> AsyncIterator[Place]:
    from confluent_kafka import KafkaError, Message, Producer
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    url = server_url("kafka")
    servers = url.removeprefix("kafka://")
    admin = AdminClient({"bootstrap.servers": servers})
    topic = f"{TOPIC}-{uuid4().hex[:12]}"
    await asyncio.to_thread(admin.create_topics([NewTopic(topic, 3, 1)])[topic].result, 30)
    producer = Producer({"bootstrap.servers": servers, "acks": "all", "enable.idempotence": True})
    headers = {
        "event-id": str(uuid4()),
        "event-type": "bench",
        "event-key": "key-1",
        "event-time": "2026-03-01T12:30:00.250000+00:00",
        "content-type": "application/octet-stream",
    }

    def send(count: int) -> None:
        acknowledged = 0

        def report(error: KafkaError | None, message: Message) -> None:
            nonlocal acknowledged
            assert error is None
            acknowledged += 1

        for number in range(count):
            key = f"key-{number % KEYS}"
            producer.produce(topic, value=PAYLOAD, key=key, headers=dict(headers), on_delivery=report)
        producer.flush()
        assert acknowledged == count

    async def send_in_thread(count: int) -> None:
        await asyncio.to_thread(send, count)

    yield Place(lambda: open_sink(url, topic=topic), send_in_thread)
    await asyncio.to_thread(admin.delete_topics([topic])[topic].result, 30)


_measured: list[Result] = []


async def sink_kafka() -> Result:
    """Kafka: one window of an idempotent producer."""
    _measured[:] = [await measure("sink_kafka", kafka_place())]
    return _measured[0]


async def sink_kafka_over_null() -> Result:
    """The same relay, in the same rounds, over one to nowhere: what Kafka costs it."""
    result = _measured[0] if _measured else await sink_kafka()
    null = result.parts["store"]
    return replace(result, name="sink_kafka_over_null", baseline=null, ratio=result.value / null, bar=NULL_BAR)


BENCHMARKS = (sink_kafka, sink_kafka_over_null)
