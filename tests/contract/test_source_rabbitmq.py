"""What is special to the RabbitMQ source: kinds of queues, what ends a channel, ids, properties and options."""

from __future__ import annotations

import asyncio
import hashlib
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import aiormq
import pika
import pytest
from pamqp import commands
from pamqp.header import ContentHeader

from pillarbox.errors import ConfigError, StoreUnavailable
from pillarbox.event import DELIVERED, Retry
from pillarbox.sources import rabbitmq_connection
from pillarbox.sources.rabbitmq import RabbitmqSource
from pillarbox.sources.rabbitmq_damage import tolerant
from pillarbox.sources.url import open_source
from pillarbox.stores import Settlement
from tests.contract.kit_rabbitmq import connect
from tests.contract.sources import (
    GROUP,
    Letters,
    claim,
    claims_of,
    is_silent,
    names_of,
    settle,
    source_kit,
    take,
    take_names,
    until,
    until_told,
)
from tests.servers import certificates, server_url

__all__ = ["source_kit"]


def kits(*names: str, needs: frozenset[str] = frozenset()) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kit", [pytest.param((name, needs), id=name) for name in names], indirect=True)


one_queue = kits("rabbitmq")
both_queues = kits("rabbitmq", "rabbitmq-quorum")
both_queues_of_an_own_server = kits("rabbitmq", "rabbitmq-quorum", needs=frozenset({"goes down"}))
own_server = kits("rabbitmq", needs=frozenset({"goes down"}))


def send(kit: Any, body: bytes, **properties: Any) -> None:
    with connect(kit.url) as connection:
        connection.channel().basic_publish(kit.place, f"{kit.place}.x", body, pika.BasicProperties(**properties))


async def take_patiently(source: Any, count: int) -> list[str]:
    """Take names although the server is away for a while."""
    names: list[str] = []
    deadline = time.monotonic() + 30
    while len(names) < count:
        assert time.monotonic() < deadline, names
        try:
            names += await take_names(source, 1, within=15)
        except StoreUnavailable:
            await asyncio.sleep(0.1)
    return names


# -- what ends a channel ---------------------------------------------------------------------------------------------


@both_queues_of_an_own_server
async def test_connection_closed_by_the_server_loses_what_is_at_hand_and_keeps_the_order(kit):
    kit.send_named("1", "2", "3", "4", "5", key="k")
    source = await kit.open_source()
    await until(lambda: len(source.pending) == 5)
    await (await claim(source, 1)).settle([DELIVERED])
    under_way = await claim(source, 2)
    kit.run("close_all_connections", "maintenance")
    await until(lambda: not len(source.pending))
    assert await under_way.settle([DELIVERED] * 2) == Settlement(lost=2)
    kit.send_named("6", key="k")
    assert await take_patiently(source, 5) == ["2", "3", "4", "5", "6"]
    await until_told(kit.remaining, 0)


@both_queues_of_an_own_server
async def test_killed_server_gives_everything_again_in_order(kit):
    kit.send_named("1", "2", "3", key="k")
    source = await kit.open_source()
    batches = await take(source, 1)
    kit.go_down()
    await until(lambda: source._receiver.done())
    with pytest.raises(StoreUnavailable, match="Source rabbitmq: "):
        await claim(source)
    assert await settle(batches) == Settlement(lost=1)
    kit.come_back()
    assert await take_patiently(source, 3) == ["1", "2", "3"]


@own_server
async def test_full_source_notices_that_its_channel_is_gone(kit):
    kit.send_named("1", "2", "3")
    source = await kit.open_source(prefetch=2)
    batches = await take(source, 2)
    kit.run("close_all_connections", "maintenance")
    await until(lambda: source._receiver.done(), within=5)
    assert await settle(batches) == Settlement(lost=2)
    assert sorted(await take_patiently(source, 3)) == ["1", "2", "3"]


@own_server
async def test_delay_longer_than_the_consumer_timeout_ends_early_and_loses_nothing(kit):
    def set_timeouts(consumer: str, tick: int) -> None:
        kit.run("eval", f"application:set_env(rabbit, consumer_timeout, {consumer}).")
        kit.run("eval", f"application:set_env(rabbit, channel_tick_interval, {tick}).")

    kit.send_named("1", "2", key="k")
    try:
        set_timeouts("500", 200)
        source = await kit.open_source()
        (batch,) = await take(source, 1)
        await batch.settle([Retry("no", timedelta(hours=1))])
        await until(lambda: source._receiver.done())
        assert "delivery acknowledgement" in str(source._receiver.exception())
        (again,) = claims_of(await take(source, 1))
        assert (again.event.payload, again.attempt) == (b'{"name": "1"}', 2)
    finally:
        set_timeouts("1800000", 60_000)


@one_queue
async def test_deleted_queue_is_an_outage_until_it_is_back(kit):
    kit.send_named("1")
    source = await kit.open_source()
    batches = await take(source, 1)
    queue = f"{kit.place}.{GROUP}"
    with connect(kit.url) as connection:
        connection.channel().queue_delete(queue)
    await until(lambda: source._receiver.done())
    assert "the server cancelled the consumer" in str(source._receiver.exception())
    assert await settle(batches) == Settlement(lost=1)
    with pytest.raises(StoreUnavailable, match=f"queue '{queue}' does not exist"):
        await claim(source)
    with connect(kit.url) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True)
        channel.queue_bind(queue, kit.place, "#")
    kit.send_named("2")
    assert await take_names(source, 1) == ["2"]


@own_server
async def test_settlement_that_the_server_does_not_read_fails(kit):
    kit.send_named("1")
    source = await kit.open_source(timeout="500ms")
    batches = await take(source, 1)
    kit.server.pause()
    with pytest.raises(StoreUnavailable, match=r"no answer within 0\.5 s"):
        await settle(batches)
    assert await settle(batches) == Settlement(lost=1)
    kit.server.resume()
    # The acknowledgement may have been on its way.
    await until_told(lambda: kit.remaining() in (0, 1), True)


# -- acknowledging, handing over, order ------------------------------------------------------------------------------


@both_queues
async def test_acknowledging_some_leaves_those_between_them_alone(kit):
    kit.send_named(*"abcdefg")
    first = await kit.open_source()
    batches = {names_of([batch])[0]: batch for batch in await take(first, 7, limit=1)}
    for name in "cea":
        assert await batches[name].settle([DELIVERED]) == Settlement(delivered=1)
    assert await batches["b"].settle([Retry("no", timedelta(hours=1))]) == Settlement(retried=1)
    assert await asyncio.to_thread(kit.remaining) == 4
    await first.close()
    second = await kit.open_source()
    assert await take_names(second, 4) == list("bdfg")
    assert await is_silent(second, for_seconds=0.3)


@both_queues
async def test_server_gives_out_no_more_than_prefetch(kit):
    kit.send_named(*(f"{number}" for number in range(30)))
    source = await kit.open_source(prefetch=10)

    def count_ready() -> int:
        with connect(kit.url) as connection:
            declared = connection.channel().queue_declare(f"{kit.place}.{GROUP}", passive=True)
            return int(declared.method.message_count)

    await until(lambda: len(source.pending) == 10)
    assert await asyncio.to_thread(count_ready) == 20


@both_queues
async def test_closing_hands_over_at_once_and_in_order(kit):
    kit.send_named(*(f"{number}" for number in range(20)), key="k")
    first = await kit.open_source()
    await until(lambda: len(first.pending) == 20)
    await (await claim(first, 1)).settle([Retry("no", timedelta(hours=1))])
    await first.close()
    second = await kit.open_source()
    assert await take_names(second, 20, within=5) == [f"{number}" for number in range(20)]


@one_queue
async def test_exclusive_consumer_lets_others_wait_until_it_is_gone(kit):
    kit.send_named("1", "2", key="k")
    first = await kit.open_source(exclusive=True)
    second = kit.make_source(exclusive=True)
    with pytest.raises(StoreUnavailable, match="exclusive"):
        await second.open()
    assert await take_names(first, 1) == ["1"]
    await first.close()
    await second.open()
    assert await take_names(second, 1) == ["2"]


@one_queue
async def test_single_active_consumer_takes_over_in_order(kit):
    options = {"queue": f"{kit.place}.single", "create": True, "single_active": True}
    first = await kit.open_source(**options)
    with connect(kit.url) as connection:
        connection.channel().queue_bind(f"{kit.place}.single", kit.place, "#")
    second = await kit.open_source(**options)
    kit.send_named(*"12345", key="k")
    assert await take_names(first, 1) == ["1"]
    await until(lambda: len(first.pending) == 4)
    assert await is_silent(second, for_seconds=0.3)
    await first.close()
    assert await take_names(second, 4) == list("2345")
    await second.close()
    with connect(kit.url) as connection:
        connection.channel().queue_delete(f"{kit.place}.single")


# -- attempts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kit", "expected"),
    [
        pytest.param(("rabbitmq", frozenset()), 2, id="rabbitmq"),
        pytest.param(("rabbitmq-quorum", frozenset()), 4, id="rabbitmq-quorum"),
    ],
    indirect=["kit"],
)
async def test_deliveries_before_count_as_attempts_as_far_as_the_queue_knows(kit, expected):
    kit.send_named("a")
    for _ in range(3):
        source = await kit.open_source()
        await take(source, 1)
        await source.close()
    source = await kit.open_source()
    (received,) = claims_of(await take(source, 1))
    assert received.attempt == expected
    assert dict(received.event.headers) == {}


@both_queues_of_an_own_server
async def test_lost_channel_leaves_attempts_as_they_were(kit):
    kit.send_named("tried", "untried", key="k")
    source = await kit.open_source()
    for _ in range(2):
        await (await take(source, 1))[0].settle([Retry("no", timedelta(0))])
    kit.run("close_all_connections", "maintenance")
    await until(lambda: source._receiver.done())
    received = claims_of(await take(source, 2))
    assert [each.attempt for each in received] == [3, 1]


# -- reading ---------------------------------------------------------------------------------------------------------


@one_queue
async def test_message_without_an_id_is_a_defect_with_its_bytes(kit):
    source = await kit.open_source()
    send(kit, b"same")
    send(kit, b"same")
    received = claims_of(await take(source, 2))
    assert all(str(each.defect).startswith("The message has no id: ") for each in received)
    assert [each.event.payload for each in received] == [b"same", b"same"]
    assert len({each.event.id for each in received}) == 2


@one_queue
async def test_id_is_made_of_what_the_user_says(kit):
    send(kit, b"same")
    send(kit, b"named", message_id="theirs")
    send(kit, b"held", headers={"x-id": "7"})
    source = await kit.open_source(id_from="body")
    received = claims_of(await take(source, 3))
    hashed = [hashlib.sha256(body).hexdigest() for body in (b"same", b"held")]
    assert [each.row.read.id for each in received] == [hashed[0], "theirs", hashed[1]]
    await source.close()
    source = await kit.open_source(id_from="header:x-id")
    received = claims_of(await take(source, 3))
    assert str(received[0].defect).startswith("The message has no id")
    assert [each.row.read.id for each in received[1:]] == ["theirs", "7"]


@one_queue
async def test_properties_of_a_stranger_are_the_events_fields(kit):
    source = await kit.open_source()
    sent_at = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
    send(
        kit,
        b"<x/>",
        message_id="m-1",
        type="order.paid",
        content_type="text/xml",
        content_encoding="gzip",
        correlation_id="c-1",
        app_id="shop",
        timestamp=int(sent_at.timestamp()),
        headers={"n": 7, "yes": True, "none": None, "list": [1, {"a": "b"}], "event-key": "k"},
    )
    (received,) = claims_of(await take(source, 1))
    event = received.event
    assert received.defect is None
    assert (event.type, event.content_type, event.correlation_id) == ("order.paid", "text/xml", "c-1")
    assert (event.source, event.key, event.created_at) == ("shop", "k", sent_at)
    assert dict(event.headers) == {
        "n": "7",
        "yes": "true",
        "none": None,
        "list": '[1,{"a":"b"}]',
        "content-encoding": "gzip",
    }


@one_queue
async def test_message_whose_properties_cannot_be_read_is_a_defect_and_blocks_nobody(kit):
    send(kit, b"body", message_id="m-1", timestamp=1_772_368_200_000_000)  # in microseconds
    send(kit, b'{"name": "after"}', message_id="m-2")
    source = await kit.open_source()
    bad, good = claims_of(await take(source, 2))
    assert str(bad.defect).startswith("Message cannot be read: its properties are damaged: year ")
    assert (bad.event.payload, bad.row.read.raw.id) == (b"body", "m-1")
    assert (1_772_368_200_000_000).to_bytes(8) in bad.row.read.raw.headers["amqp-properties"]
    assert (good.defect, good.event.payload) == (None, b'{"name": "after"}')


async def test_connections_of_others_read_properties_as_before():
    header = ContentHeader(properties=commands.Basic.Properties(message_id="m-1", timestamp=datetime.now(UTC)))
    data = header.marshal()
    damaged = data[:-8] + (1_772_368_200_000_000).to_bytes(8)
    with pytest.raises(ValueError, match="out of range"):
        ContentHeader().unmarshal(damaged)
    with tolerant():
        ContentHeader().unmarshal(damaged)
    whole = ContentHeader()
    whole.unmarshal(data)
    assert whole.properties.message_id == "m-1"


@one_queue
async def test_routing_key_is_the_key_where_that_is_asked_for(kit):
    send(kit, b"{}", message_id="1")
    source = await kit.open_source(key_from="routing_key")
    assert [each.event.key for each in claims_of(await take(source, 1))] == [f"{kit.place}.x"]


# -- queues and logins -----------------------------------------------------------------------------------------------


@one_queue
async def test_queue_is_made_only_when_asked(kit):
    name = f"{kit.place}.made"
    with pytest.raises(ConfigError, match=f"queue '{name}' does not exist; make it first, or give create=true"):
        await kit.open_source(queue=name)
    source = await kit.open_source(queue=name, create=True)
    with connect(kit.url) as connection:
        arguments = {"x-queue-type": "quorum"}
        connection.channel().queue_declare(name, durable=True, arguments=arguments)
    await source.close()
    with pytest.raises(ConfigError, match=f"queue '{name}' exists with other settings"):
        await kit.open_source(queue=name, create=True, queue_type="classic")
    with connect(kit.url) as connection:
        connection.channel().queue_delete(name)


@one_queue
async def test_stream_is_refused(kit):
    name = f"{kit.place}.stream"
    with connect(kit.url) as connection:
        channel = connection.channel()
        channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
    source = await kit.open_source(queue=name)
    with connect(kit.url) as connection:
        connection.channel().basic_publish("", name, b"{}", pika.BasicProperties(message_id="1"))
    await until(lambda: source._receiver.done())
    with pytest.raises(ConfigError, match=f"queue '{name}' is a stream"):
        await claim(source)
    await source.close()
    with connect(kit.url) as connection:
        connection.channel().queue_delete(name)


@one_queue
async def test_source_is_made_without_a_url(kit):
    kit.send_named("a")
    source = RabbitmqSource(lambda: aiormq.connect(kit.url), queue=f"{kit.place}.{GROUP}", dead=Letters())
    await source.open()
    assert await take_names(source, 1) == ["a"]
    await source.close()


@one_queue
async def test_group_is_the_queue_unless_another_is_named(kit):
    source = open_source(kit.url, group=f"{kit.place}.{GROUP}", dead=Letters())
    await source.open()
    kit.send_named("a")
    assert await take_names(source, 1) == ["a"]
    await source.close()


async def test_virtual_host_that_does_not_exist_is_named():
    source = open_source(server_url("rabbitmq") + "nowhere", group=GROUP, dead=Letters())
    with pytest.raises(StoreUnavailable, match="the server refused virtual host 'nowhere'"):
        await source.open()


async def test_server_that_cannot_be_reached_is_an_outage_without_secrets():
    source = open_source("amqp://me:hidden@127.0.0.1:1,127.0.0.1:2/", group=GROUP, dead=Letters())
    with pytest.raises(StoreUnavailable) as refused:
        await source.open()
    assert "hidden" not in source.name + str(refused.value) + repr(source)


async def test_tls_checks_the_server():
    url = server_url("rabbitmq_tls")
    source = open_source(url, group="nowhere", dead=Letters(), tls_ca=str(certificates() / "ca.pem"))
    with pytest.raises(ConfigError, match="queue 'nowhere' does not exist"):
        await source.open()
    with pytest.raises(StoreUnavailable, match="certificate verify failed"):
        await open_source(url, group="nowhere", dead=Letters()).open()


# -- the limit of deliveries that newer servers have -----------------------------------------------------------------


@pytest.fixture
def limited(monkeypatch):
    """This server is taken for one with a limit. It knows no -1, so the queue is made with a limit that it can have."""
    monkeypatch.setattr(rabbitmq_connection, "_LIMITED_SINCE", 3)
    monkeypatch.setattr(rabbitmq_connection, "_UNLIMITED", 1000)


def limit_of(kit: Any, queue: str) -> str:
    lines = kit.run("list_queues", "--no-table-headers", "name", "arguments").splitlines()
    return next(str(line) for line in lines if line.startswith(f"{queue}\t"))


@one_queue
async def test_queue_is_made_with_a_limit_of_its_own_where_the_server_has_one(kit, limited, caplog):
    name = f"{kit.place}.made"
    source = await kit.open_source(queue=name, create=True)
    assert '{"x-delivery-limit",1000}' in limit_of(kit, name)
    await source.close()
    # It exists now, as it was asked for.
    await kit.open_source(queue=name, create=True)
    assert caplog.text == ""
    with connect(kit.url) as connection:
        connection.channel().queue_delete(name)


@one_queue
async def test_queue_is_made_without_a_limit_where_the_server_has_none(kit, caplog):
    name = f"{kit.place}.made"
    await kit.open_source(queue=name, create=True)
    assert "x-delivery-limit" not in limit_of(kit, name)
    await kit.open_source(queue=f"{kit.place}.{GROUP}")
    assert caplog.text == ""
    with connect(kit.url) as connection:
        connection.channel().queue_delete(name)


@one_queue
@pytest.mark.parametrize("create", [False, True], ids=["found", "made before"])
async def test_queue_that_may_drop_messages_is_consumed_with_a_warning(kit, limited, caplog, create):
    name = f"{kit.place}.before"
    with connect(kit.url) as connection:
        connection.channel().queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
        connection.channel().queue_bind(name, kit.place, "#")
    source = await kit.open_source(queue=name, create=create)
    kit.send_named("a")
    assert await take_names(source, 1) == ["a"]
    assert f"if queue '{name}' is a quorum queue, this server drops a message" in caplog.text
    await source.close()
    with connect(kit.url) as connection:
        connection.channel().queue_delete(name)


@one_queue
async def test_queue_of_another_type_is_refused_as_before(kit, limited):
    with pytest.raises(ConfigError, match="exists with other settings"):
        await kit.open_source(queue=f"{kit.place}.{GROUP}", create=True)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"prefetch": 65_536}, "Source 'here' prefetch: expected at most 65535, got 65536"),
        ({"id_from": "topic"}, "Source 'here' id_from: expected body or header:NAME, got 'topic'"),
        ({"key_from": "body"}, "Source 'here' key_from: expected header or routing_key, got 'body'"),
        ({"queue_type": "classic"}, "Source 'here' queue_type: it is for a queue to be made; give create=true as well"),
        ({"single_active": True}, "Source 'here' single_active: it is for a queue to be made"),
        ({"heartbeat": "1500ms"}, "Source 'here' heartbeat: expected whole seconds below 65535"),
        ({"tls_ca": "x"}, "Source 'here': unknown option 'tls_ca'"),
    ],
    ids=["prefetch", "id", "key", "queue type", "single active", "heartbeat", "tls"],
)
async def test_bad_option_is_refused(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        open_source("amqp://127.0.0.1/", group=GROUP, dead=Letters(), name="here", **options)
