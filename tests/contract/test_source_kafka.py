"""What only Kafka's source does: offsets, partitions, rebalancing, and messages as Kafka has them."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from datetime import timedelta
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import AdminClient

from pillarbox.errors import ConfigError, StoreUnavailable
from pillarbox.event import DELIVERED, Retry
from pillarbox.sinks.kafka_settings import ClientLog
from pillarbox.sources import kafka, kafka_consumer
from pillarbox.sources.kafka_progress import Part
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
    return read_lags(kit.url, kit.named(GROUP), kit.topic, kit.partitions)


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
    assert received.row.read.id == f"{kit.topic}:2:0:1772368200250"
    assert received.event.key == r"\xffk"
    assert received.event.created_at is not None
    assert received.event.created_at.isoformat() == "2026-03-01T12:30:00.250000+00:00"
    assert dict(received.event.headers) == {"city#1": "Bern", "city#2": "Basel", "city": None, "nothing": None}


async def test_latest_begins_with_what_comes_after(kit):
    send_to(kit, 0, "before")
    source = await kit.open_source(start="latest")
    await kit.until_balanced([source])
    send_to(kit, 0, "after")
    assert await take_names(source, 1) == ["after"]
    assert await asyncio.to_thread(lags, kit) == [0, 0, 0]


async def test_latest_keeps_what_came_since_the_first_start_until_it_is_done(kit):
    send_to(kit, 0, "before")
    first = await kit.open_source(start="latest")
    await kit.until_balanced([first])
    send_to(kit, 0, "a", "b", "c")
    await settle(await take(first, 3), Retry("no", timedelta(seconds=60)))
    await first.close()
    second = await kit.open_source(start="latest")
    assert await take_names(second, 3) == ["a", "b", "c"]


async def test_latest_keeps_its_offsets_when_members_come_and_go(kit):
    first = await kit.open_source(start="latest")
    await kit.until_balanced([first])
    for partition in range(3):
        send_to(kit, partition, f"{partition}")
    await settle(await take(first, 3), Retry("no", timedelta(seconds=60)))
    second, third = await kit.open_source(start="latest"), await kit.open_source(start="latest")
    await kit.until_balanced([first, second, third])
    for each in (first, second):
        await each.close()
    found: set[str] = set()
    async with asyncio.timeout(30):
        while found != {"0", "1", "2"}:
            found.update(await take_names(third, 1))


async def test_latest_begins_nowhere_before_its_offset_is_committed(kit, monkeypatch):
    refused: list[KafkaError] = []
    commit_ends = kafka_consumer.KafkaConsumer._commit_ends

    def refuse_once(self: Any, *arguments: Any) -> None:
        if not refused:
            refused.append(KafkaError(KafkaError._TIMED_OUT))
            raise KafkaException(refused[0])
        commit_ends(self, *arguments)

    monkeypatch.setattr(kafka_consumer.KafkaConsumer, "_commit_ends", refuse_once)
    send_to(kit, 0, "before")
    source = await kit.open_source(start="latest")
    await until(lambda: refused and source._receiver.done())
    assert (await claim(source)).claims == []
    await kit.until_balanced([source])
    send_to(kit, 0, "after")
    assert await take_names(source, 1) == ["after"]


async def test_time_that_no_calendar_has_is_left_out(kit):
    topic = f"{kit.place}.strange"
    make_topic(kit.url, topic, config={"message.timestamp.after.max.ms": f"{2**63 - 1}"})
    producer = Producer({"bootstrap.servers": kit.url.removeprefix("kafka://")})
    producer.produce(topic, b"{}", timestamp=1_772_368_200_250_000)
    assert producer.flush(30) == 0
    source = await kit.open_source(topics=[topic])
    (received,) = claims_of(await take(source, 1))
    assert (received.defect, received.event.created_at) == (None, None)


async def test_header_whose_name_is_no_text_makes_a_message_unreadable(kit):
    command = ["kcat", "-b", kit.url.removeprefix("kafka://"), "-P", "-t", kit.topic, "-H", b"\xff=1"]
    await asyncio.to_thread(subprocess.run, command, input=b"hello", check=True, timeout=60)
    source = await kit.open_source()
    (received,) = claims_of(await take(source, 1))
    assert received.defect is not None
    assert received.defect.startswith("Message cannot be read: its headers: ")
    assert received.event.payload == b"hello"


def _refuse_entry(part: Part, message: Message) -> Any:
    raise ZeroDivisionError


async def test_what_could_not_be_taken_up_comes_again(kit, monkeypatch):
    make_entry = kafka._make_entry
    monkeypatch.setattr(kafka, "_make_entry", _refuse_entry)
    send_to(kit, 0, "a", "b")
    source = await kit.open_source()
    with pytest.raises(ZeroDivisionError):
        await claim_for_ever(source)
    monkeypatch.setattr(kafka, "_make_entry", make_entry)
    assert await take_names(source, 2) == ["a", "b"]


async def test_messages_of_a_topic_made_again_have_other_ids(kit):
    ids = []
    admin = AdminClient({"bootstrap.servers": kit.url.removeprefix("kafka://")})
    for _ in range(2):
        send_to(kit, 0, "a")
        source = await kit.open_source()
        batches = await take(source, 1)
        ids.append(claims_of(batches)[0].row.read.id)
        await settle(batches)
        await source.close()
        for future in admin.delete_topics([kit.topic]).values():
            future.result(timeout=30)
        await until_told(lambda: kit.topic in admin.list_topics(timeout=30).topics, False)
        make_topic(kit.url, kit.topic, partitions=3)
    assert [each.rsplit(":", 1)[0] for each in ids] == [f"{kit.topic}:0:0"] * 2
    assert ids[0] != ids[1]


def test_id_fits_whatever_the_topics_name():
    longest = kafka._make_id(Part("t" * 249, 2**31 - 1), 2**63 - 1, 2**63 - 1)
    assert longest == "c545092e-2162-5fca-b0ff-ebb908bc9e71:2147483647:9223372036854775807:9223372036854775807"
    assert kafka._make_id(Part("t" * 200, 0), 7, 1_772_368_200_250) == f"{'t' * 200}:0:7:1772368200250"


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
    async with asyncio.timeout(60):
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
    # Whoever waited for that would not be balanced in time.
    monkeypatch.setattr(kafka, "_GIVE_UP", 100.0)
    for partition in range(3):
        send_to(kit, partition, f"{partition}")
    first = await kit.open_source()
    batches = await take(first, 3, limit=1)
    second = await kit.open_source()
    async with asyncio.timeout(20):
        await asked.wait()
    assert await settle(batches) == Settlement(delivered=3)
    await kit.until_balanced([first, second])
    for source in (first, second):
        assert (await claim(source)).claims == []
    await until_told(lambda: lags(kit), [0, 0, 0])


async def test_nothing_is_claimed_of_a_partition_that_is_being_given_up(kit, monkeypatch):
    leaving: list[Part] = []
    slipped: list[Part] = []
    gate, held = asyncio.Event(), asyncio.Event()
    withdraw, receive = kafka.KafkaSource._withdraw, kafka_consumer.KafkaConsumer.receive

    async def note_and_withdraw(self: Any, parts: Any, is_lost: bool) -> None:
        if self is first:
            leaving.extend(parts)
        await withdraw(self, parts, is_lost)

    async def wait_and_receive(self: Any, most: int, timeout: float) -> Any:
        if self is first._consumer and not gate.is_set():
            held.set()
            await gate.wait()
        found = await receive(self, most, timeout)
        slipped.extend(part for part, _ in found if part in leaving)
        return found

    monkeypatch.setattr(kafka.KafkaSource, "_withdraw", note_and_withdraw)
    monkeypatch.setattr(kafka_consumer.KafkaConsumer, "receive", wait_and_receive)
    for partition in range(3):
        send_to(kit, partition, f"{partition}")
    first = kit.make_source()
    gate.set()
    await first.open()
    batches = await take(first, 3, limit=1)
    # What the client has received now is not at hand yet when the partitions are taken away.
    gate.clear()
    async with asyncio.timeout(20):
        await held.wait()
    for partition in range(3):
        send_to(kit, partition, f"{partition} later")
    await until(lambda: len(first._consumer._buffer) == 3)
    second = await kit.open_source()
    await until(lambda: leaving)
    gate.set()
    await until(lambda: not first._consumer._buffer)
    claimed = (await claim(first)).claims
    assert [name_of(each.event) for each in claimed if each.row.token[0] in leaving] == []
    assert slipped == []
    await settle(batches)
    await kit.until_balanced([first, second])
    assert not [entry for entry in first.pending if entry.token[0] in leaving]
    await until_told(lambda: sum(lags(kit)), 3)


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
    return open_source(url, group=kit.named(GROUP), dead=kit.letters, topics=[topic], **options)


async def test_topic_that_is_deleted_is_told(kit):
    source = await kit.open_source(config={"topic.metadata.refresh.interval.ms": 500}, timeout="2s")
    await kit.until_balanced([source])
    admin = AdminClient({"bootstrap.servers": kit.url.removeprefix("kafka://")})
    for future in admin.delete_topics([kit.topic]).values():
        future.result(timeout=30)
    with pytest.raises(StoreUnavailable, match=r"(?i)topic"):
        await claim_for_ever(source)


@pytest.mark.parametrize(
    ("is_settling", "config", "is_left"),
    [
        pytest.param(False, {}, False, id="idle"),
        pytest.param(True, {}, False, id="settling"),
        pytest.param(True, {"socket.timeout.ms": 60_000}, True, id="patient"),
    ],
)
async def test_close_ends_while_the_broker_stands_still(
    private_broker, caplog, monkeypatch, is_settling, config, is_left
):
    monkeypatch.setattr(kafka, "_GIVE_UP", 0.5)
    kit = KafkaSourceKit(private_broker)
    assert kit.server is not None
    kit.send_named("a")
    source = await kit.open_source(timeout="2s", config=config)
    (batch,) = await take(source, 1)
    thread = source._consumer._thread
    kit.server.pause()
    try:
        if is_settling:
            with pytest.raises(StoreUnavailable):
                await batch.settle([DELIVERED])
        # The timeout, what a rebalancing may take, and a second; and some more.
        async with asyncio.timeout(2 + 0.5 + 1 + 1):
            await source.close()
    finally:
        kit.server.resume()
    await until(lambda: not thread.is_alive(), within=30)
    assert "goes without having left the group" in caplog.text or not is_left
    assert "Sink" not in caplog.text
    # The broker may have found the commit of the first one when it went on.
    kit.send_named("b", "c")
    again = await kit.open_source()
    try:
        assert await until_taken(again, "b", "c") - {"a"} == {"b", "c"}
    finally:
        await again.close()


async def until_taken(source: Any, *names: str) -> set[str]:
    """Take until these have come, in whatever order: their partitions are read side by side."""
    found: set[str] = set()
    while not found.issuperset(names):
        found.update(await take_names(source, 1))
    return found


async def test_what_the_client_cannot_give_is_told_once(kit, caplog):
    source = await kit.open_source()
    bad = Message(topic=kit.topic, partition=1, offset=4, error=KafkaError(KafkaError._BAD_COMPRESSION))
    other = Message(error=KafkaError(KafkaError.INCONSISTENT_GROUP_PROTOCOL))
    for message in (bad, bad, other, other):
        assert source._consumer._keep(message) is False
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == [
        f"Source kafka: topic {kit.topic!r}, partition 1, offset 4 cannot be received: "
        "_BAD_COMPRESSION: Local: Invalid compressed data",
        "Source kafka: INCONSISTENT_GROUP_PROTOCOL: Broker: Inconsistent group protocol",
    ]


def test_secrets_of_the_config_are_hidden(kit, caplog):
    source = kit.make_source(config={"ssl.key.password": "0ther-s3cr3t"})
    lines = ClientLog(source._settings, "orders", owner="Source")
    lines.log(logging.WARNING, "%s [%s] %s", "CONFWARN", "consumer-1", "0ther-s3cr3t is weak")
    assert [(each.name, each.getMessage()) for each in caplog.records] == [
        ("pillarbox.source", "Source orders: CONFWARN [consumer-1] *** is weak")
    ]


@pytest.mark.parametrize("setting", ["sasl.password", "security.protocol", "metadata.broker.list", "ssl.ca.location"])
def test_setting_that_has_an_option_is_refused(kit, setting):
    with pytest.raises(ConfigError, match=rf"Source 'kafka' config: '{setting}' is not taken here"):
        kit.make_source(config={setting: "x"})


async def claim_for_ever(source: Any) -> None:
    async with asyncio.timeout(30):
        while True:
            await claim(source)
            await source.wait(timedelta(milliseconds=100))
