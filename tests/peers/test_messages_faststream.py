"""Messages as FastStream writes them, as they lie in the broker; the values are recorded from FastStream 0.7."""

from __future__ import annotations

from uuid import UUID, uuid4

import pika

from pillarbox import Event
from pillarbox.event import DELIVERED, Claim
from pillarbox.sinks import open_sink
from tests.contract.kit_rabbitmq import connect, read_all
from tests.contract.kit_redis import Wire
from tests.servers import server_url

# As one that is made from a row.
ID = UUID("018f3f7a-0000-5000-8000-000000000001")


async def send(url: str, topic: str, payload: object, **fields: object) -> None:
    sink = open_sink(url, message="faststream")
    await sink.open()
    try:
        event = Event(topic, payload, id=ID, **fields)  # type: ignore[arg-type]
        assert await sink.deliver([Claim(row=1, event=event, attempt=1)]) == [DELIVERED]
    finally:
        await sink.close()


async def receive(queue: str, payload: object, **fields: object) -> tuple[pika.BasicProperties, bytes]:
    url = server_url("rabbitmq")
    with connect(url) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True)
        await send(url, queue, payload, **fields)
        [found] = read_all(channel, queue)
        channel.queue_delete(queue)
    return found


async def test_rabbitmq() -> None:
    found, body = await receive(
        f"q{uuid4().hex[:10]}", {"a": 1}, headers={"tenant": "acme"}, correlation_id="corr", source="shop"
    )
    assert body == b'{"a":1}'
    assert (found.content_type, found.correlation_id) == ("application/json", "corr")
    assert found.headers == {
        "content-type": "application/json",
        "correlation_id": "corr",
        "tenant": "acme",
        "pillarbox-source": "shop",
    }
    assert (found.message_id, found.type, found.app_id) == (str(ID), None, None)


async def test_bytes_in_rabbitmq_have_no_content_type() -> None:
    found, body = await receive(f"q{uuid4().hex[:10]}", b"\x00raw", correlation_id="corr")
    assert (body, found.content_type, found.headers) == (b"\x00raw", None, {"correlation_id": "corr"})


async def test_redis() -> None:
    url, stream = server_url("redis"), f"q{uuid4().hex[:10]}"
    await send(url, stream, b"\x00raw", correlation_id="56381286-39be-44dd-9dba-1f7ad1140337")
    with Wire(url) as wire:
        [(_, fields)] = wire.call("XRANGE", stream, "-", "+")
        wire.call("DEL", stream)
    assert fields == [
        b"__data__",
        b"\x89BIN\r\n\x1a\n\x00\x01\x00\x00\x00\x12\x00\x00\x00J\x00\x01"
        b"\x00\x0ecorrelation_id\x00$56381286-39be-44dd-9dba-1f7ad1140337\x00raw",
    ]
