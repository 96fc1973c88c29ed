"""What only Kafka's source does: offsets, partitions, rebalancing, and messages as Kafka has them."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from pillarbox.errors import StoreUnavailable
from pillarbox.event import DELIVERED, Retry
from pillarbox.sources import kafka
from pillarbox.sources.url import open_source
from pillarbox.stores import Settlement
from tests.contract.kit_kafka import make_topic
from tests.contract.source_kit_kafka import KafkaSourceKit, produce, read_lags
from tests.contract.sources import (
    GROUP,
    claim,
    claims_of,
    name_of,
    names_of,
    number_names,
    settle,
    take,
    take_names,
    until,
    until_told,
)
from tests.servers import ServerName, certificates, server_url


@pytest.fixture(params=["cooperative", "eager"])
async def kit(request):
    made = KafkaSourceKit(None)
    made.options["rebalancing"] = request.param
    yield made
    for each in reversed(made.made):
        await each.close()


def send_to(kit: KafkaSourceKit, partition: int, *names: str) -> None:
    produce(kit.url, kit.topic, *(f'{{"name": "{name}"}}'.encode() for name in names), partition=partition)


def lags(kit: KafkaSourceKit) -> list[int]:
    return read_lags(kit.url, GROUP, kit.topic, kit.partitions)


async def test_offset_moves_up_to_the_first_message_that_is_not_done(kit):
    send_to(kit, 0, "a", "b", "c")
    send_to(kit, 1, "x")
    source = await kit.open_source()
    batches = {names_of([batch])[0]: batch for batch in await take(source, 4, limit=1)}
    await settle([batches["b"], batches["c"], batches["x"]])
    assert await asyncio.to_thread(lags, kit) == [3, 0, 0]
    await settle([batches["a"]])
    assert await asyncio.to_thread(lags, kit) == [0, 0, 0]


async def test_retried_message_holds_its_offset_and_later_ones_go_on(kit):
    send_to(kit, 0, *number_names(40))
    source = await kit.open_source(prefetch=10)
    (first,) = await take(source, 1)
    assert names_of([first]) == ["0"]
    await first.settle([Retry("no", timedelta(seconds=60))])
    assert sorted(await take_names(source, 39), key=int) == number_names(39, start=1)
    assert await asyncio.to_thread(lags, kit) == [40, 0, 0]


async def test_message_without_a_value_is_an_event_that_says_so(kit):
    producer = Producer({"bootstrap.servers": kit.url.removeprefix("kafka://")})
    producer.produce(kit.topic, None, key="order-7")
    assert producer.flush(30) == 0
    source = await kit.open_source()
    (received,) = claims_of(await take(source, 1))
    assert received.defect is None
    assert (received.event.key, received.event.payload) == ("order-7", b"")
    assert dict(received.event.headers) == {"pillarbox-tombstone": "true"}


async def test_id_key_time_and_headers_are_those_of_the_message(kit):
    producer = Producer({"bootstrap.servers": kit.url.removeprefix("kafka://")})
    headers: Any = [("city", b"Bern"), ("city", b"Basel"), ("city", None), ("nothing", None)]
    producer.produce(kit.topic, b"{}", key=b"\xffk", partition=2, timestamp=1_772_368_200_250, headers=headers)
    assert producer.flush(30) == 0
    source = await kit.open_source()
    (received,) = claims_of(await take(source, 1))
    assert received.row.read.id == f"{kit.topic}:2:0"
    assert received.event.key == r"\xffk"
    assert received.event.created_at is not None
    assert received.event.created_at.isoformat() == "2026-03-01T12:30:00.250000+00:00"
    assert dict(received.event.headers) == {"city#1": "Bern", "city#2": "Basel", "city": None, "nothing": None}


async def test_latest_begins_with_what_comes_after(kit):
    send_to(kit, 0, "before")
    source = await kit.open_source(start="latest")
    await kit.until_balanced([source])
    # The client asks for the end of each partition after it was assigned.
    found: list[str] = []
    while not found:
        send_to(kit, 0, "after")
        found += names_of([await claim(source)])
        await source.wait(timedelta(milliseconds=200))
    assert set(found) == {"after"}


async def test_pattern_finds_topics_also_later_ones(kit):
    source = await kit.open_source(
        topics=[f"^{kit.place}.*"], config={"topic.metadata.refresh.interval.ms": 500}, session="6s"
    )
    send_to(kit, 0, "a")
    assert await take_names(source, 1) == ["a"]
    make_topic(kit.url, f"{kit.place}.returns")
    produce(kit.url, f"{kit.place}.returns", b'{"name": "b"}')
    (received,) = claims_of(await take(source, 1, within=30))
    assert (name_of(received.event), received.event.topic) == ("b", f"{kit.place}.returns")


async def test_rebalancing_while_there_is_no_room_loses_nothing(kit):
    for partition in range(3):
        send_to(kit, partition, *number_names(30, start=partition * 30))
    first = await kit.open_source(prefetch=5)
    held = await take(first, 5)
    # Long enough without room that the partitions are paused.
    await until(lambda: len(first._consumer._paused) == 3)
    second = await kit.open_source(prefetch=5)
    found = names_of(held)
    await settle(held)
    while set(found) != set(number_names(90)):
        for source in (first, second):
            batch = await claim(source)
            found += names_of([batch])
            await batch.settle([DELIVERED] * len(batch.claims))
        await asyncio.sleep(0.02)
    await until_told(lambda: lags(kit), [0, 0, 0])


async def test_partition_is_given_up_when_what_is_under_way_is_settled(kit, monkeypatch):
    asked = asyncio.Event()
    withdraw = kafka.KafkaSource._withdraw

    async def note_and_withdraw(self: Any, parts: Any, is_lost: bool) -> None:
        asked.set()
        await withdraw(self, parts, is_lost)

    monkeypatch.setattr(kafka.KafkaSource, "_withdraw", note_and_withdraw)
    for partition in range(3):
        send_to(kit, partition, f"{partition}")
    first = await kit.open_source()
    batches = await take(first, 3, limit=1)
    second = await kit.open_source()
    async with asyncio.timeout(20):
        await asked.wait()
    asked_at = time.monotonic()
    assert await settle(batches) == Settlement(delivered=3)
    assert time.monotonic() - asked_at < 4
    await kit.until_balanced([first, second])
    for source in (first, second):
        assert (await claim(source)).claims == []
    await until_told(lambda: lags(kit), [0, 0, 0])


async def test_what_takes_too_long_is_lost_with_its_partition_and_given_to_the_next(kit, monkeypatch):
    monkeypatch.setattr(kafka, "_GIVE_UP", 0.1)
    for partition in range(3):
        send_to(kit, partition, f"{partition}")
    first = await kit.open_source()
    batches = await take(first, 3, limit=1)
    second = await kit.open_source()
    await kit.until_balanced([first, second])
    (moved, *_) = await take(second, 1)
    total = await settle(batches)
    assert total.lost >= 1
    assert names_of([moved])[0] in number_names(3)
    assert sum(await asyncio.to_thread(lags, kit)) >= 1
    await moved.settle([DELIVERED] * len(moved.claims))


async def test_members_share_the_partitions_and_the_rest_takes_over(kit):
    first, second = await kit.open_source(), await kit.open_source()
    await kit.until_balanced([first, second])
    await second.close()
    await until(lambda: len(first._consumer.progress.list_places()) == 3, within=30)


@pytest.mark.parametrize("server", ["kafka_sasl", "kafka_tls"])
async def test_source_logs_in_and_encrypts(kit, server: ServerName):
    url, options = server_url(server), dict[str, str]()
    if server == "kafka_sasl":
        url = url.replace("//", "//pillarbox:pillarbox@")
    else:
        folder = certificates()
        files = {"tls_ca": "ca.pem", "tls_certificate": "client.pem", "tls_key": "client.key"}
        options = {option: str(folder / file) for option, file in files.items()}
    topic = f"{kit.place}.orders"
    source = kit.keep(kafka_source(kit, url, topic, **options))
    await source.open()
    send_to(kit, 0, "a")
    assert await take_names(source, 1) == ["a"]


def kafka_source(kit: KafkaSourceKit, url: str, topic: str, **options: Any) -> Any:
    return open_source(url, group=GROUP, dead=kit.letters, topics=[topic], **options)


async def test_topic_that_is_deleted_is_told(kit):
    source = await kit.open_source(config={"topic.metadata.refresh.interval.ms": 500}, timeout="2s")
    await kit.until_balanced([source])
    admin = AdminClient({"bootstrap.servers": kit.url.removeprefix("kafka://")})
    for future in admin.delete_topics([kit.topic]).values():
        future.result(timeout=30)
    with pytest.raises(StoreUnavailable, match=r"(?i)topic"):
        await claim_for_ever(source)


async def claim_for_ever(source: Any) -> None:
    async with asyncio.timeout(30):
        while True:
            await claim(source)
            await source.wait(timedelta(milliseconds=100))
