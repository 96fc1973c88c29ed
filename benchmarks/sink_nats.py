"""The relay from PostgreSQL to JetStream, over a bare loop of the same client.

The bare loop publishes with a reply subject and counts the answers: about twice as quick as the client's own
`publish_async`, so the harder baseline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from uuid import uuid4

from benchmarks.common import KEYS, PAYLOAD, Result, server_url
from benchmarks.sinks import Place, measure
from pillarbox import open_sink

STREAM = "bench"


@asynccontextmanager
async def nats_place() -> AsyncIterator[Place]:
    import nats
    from nats.aio.msg import Msg
    from nats.js.errors import NotFoundError

    url = server_url("nats")
    client = await nats.connect(url)
    jetstream = client.jetstream()
    with suppress(NotFoundError):
        await jetstream.delete_stream(STREAM)
    # Room for every round: a stream of one subject, on disk.
    await jetstream.add_stream(name=STREAM, subjects=[STREAM])
    inbox = client.new_inbox()
    waiting: set[str] = set()
    answered = asyncio.Event()
    numbers = count()

    async def answer(message: Msg) -> None:
        assert b'"error"' not in message.data
        waiting.discard(message.subject)
        if not waiting:
            answered.set()

    async def send(amount: int) -> None:
        answered.clear()
        for number in range(amount):
            reply = f"{inbox}.{next(numbers)}"
            waiting.add(reply)
            await client.publish(STREAM, PAYLOAD, reply, _headers(number))
        await answered.wait()

    await client.subscribe(f"{inbox}.*", cb=answer)
    yield Place(lambda: open_sink(url, subject=STREAM), send)
    await jetstream.delete_stream(STREAM)
    await client.close()


def _headers(number: int) -> dict[str, str]:
    identity = str(uuid4())
    return {
        "event-id": identity,
        "event-type": "bench",
        "event-key": f"key-{number % KEYS}",
        "event-time": "2026-03-01T12:30:00.250000+00:00",
        "content-type": "application/octet-stream",
        "Nats-Msg-Id": identity,
    }


async def sink_nats() -> Result:
    """NATS JetStream: one window of publishes a batch."""
    return await measure("sink_nats", nats_place())


BENCHMARKS = (sink_nats,)
