"""What is particular to RabbitMQ: exchanges, routing, properties, creation, TLS, and what each of its errors means."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import aiormq
import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from pillarbox import Event
from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.event import DELIVERED, EVENT_FIELDS, RELEASED, Claim, Dead, Retry, load_event
from pillarbox.relay import HOLD_TIMEOUT
from pillarbox.sinks import Sink, open_sink
from pillarbox.sinks.rabbitmq import RabbitmqSink
from pillarbox.sinks.rabbitmq_channels import Ack, Channels, Connect, Framed, Publisher
from tests.contract.broker_kits import make_place, named_claim
from tests.contract.kit_rabbitmq import connect, read_all
from tests.servers import certificates, server_url

ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")


class Places:
    """Queues and exchanges with names of their own, deleted afterwards."""

    def __init__(self, channel: BlockingChannel) -> None:
        self.channel = channel
        self.name = make_place()
        self.queues: list[str] = []
        self.exchanges: list[str] = []

    def queue(self, end: str = "", *, is_made: bool = True, **arguments: Any) -> str:
        name = self.name + end
        self.queues.append(name)
        if is_made:
            self.channel.queue_declare(name, durable=True, arguments=arguments)
        return name

    def exchange(self, end: str = ".x", *, kind: str = "topic", is_made: bool = True, **options: Any) -> str:
        name = self.name + end
        self.exchanges.append(name)
        if is_made:
            self.channel.exchange_declare(name, kind, durable=True, **options)
        return name

    def messages(self, queue: str) -> list[tuple[pika.BasicProperties, bytes]]:
        return read_all(self.channel, queue)

    def names(self, queue: str) -> list[str]:
        return [json.loads(body)["name"] for _, body in self.messages(queue)]

    def delete(self) -> None:
        for queue in self.queues:
            self.channel.queue_delete(queue)
        for exchange in self.exchanges:
            self.channel.exchange_delete(exchange)


@pytest.fixture
def url() -> str:
    return server_url("rabbitmq")


@pytest.fixture
def places(url: str) -> Iterator[Places]:
    with connect(url) as connection:
        made = Places(connection.channel())
        yield made
        made.delete()


@pytest.fixture
async def make_sink(url: str):
    sinks: list[Sink] = []

    def make(address: str = url, **options: Any) -> Sink:
        sinks.append(open_sink(address, **options))
        return sinks[-1]

    yield make
    for sink in sinks:
        await sink.close()


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many messages were sent at once, each time."""
    sizes: list[int] = []
    publish = Publisher.publish

    async def count(publisher: Publisher, messages: Sequence[Framed], acks: list[Ack]) -> None:
        sizes.append(len(messages))
        await publish(publisher, messages, acks)

    monkeypatch.setattr(Publisher, "publish", count)
    return sizes


def claim_of(event: Event, **fields: Any) -> Claim:
    """A claim as another system's row may give it."""
    values = {name: getattr(event, name) for name in EVENT_FIELDS}
    return Claim(row=1, event=load_event(*{**values, **fields}.values()), attempt=1)


def remember(made: list[aiormq.abc.AbstractConnection], url: str) -> Connect:
    """Connects to the server, and keeps each connection in `made`."""

    async def connect_mine() -> aiormq.abc.AbstractConnection:
        made.append(await aiormq.connect(url))
        return made[-1]

    return connect_mine


# -- what is sent ----------------------------------------------------------------------------------------------------


async def test_message_has_the_events_properties_and_is_persistent(places, make_sink):
    queue = places.queue()
    event = Event("order.placed", b"<a/>", topic=queue, id=ID, content_type="application/xml", correlation_id="c-1")
    sent = claim_of(event, source="shop", created_at=datetime(2026, 3, 1, 12, 30, 5, 700_000, tzinfo=UTC))
    assert await make_sink().deliver([sent]) == [DELIVERED]
    ((properties, body),) = places.messages(queue)
    assert body == b"<a/>"
    assert properties.delivery_mode == 2
    assert properties.message_id == "01890a5d-ac96-774b-bcce-b302099a8057"
    assert properties.type == "order.placed"
    assert properties.timestamp == 1772368205
    assert properties.content_type == "application/xml"
    assert properties.correlation_id == "c-1"
    assert properties.app_id == "shop"
    assert "content-type" not in properties.headers
    assert properties.headers["event-type"] == "order.placed"


async def test_property_that_the_event_lacks_is_absent(places, make_sink):
    queue = places.queue()
    assert await make_sink(persistent=False).deliver([named_claim("a", topic=queue)]) == [DELIVERED]
    ((properties, _),) = places.messages(queue)
    assert properties.delivery_mode == 1
    assert (properties.correlation_id, properties.app_id, properties.timestamp) == (None, None, None)


async def test_source_too_long_for_a_property_is_whole_in_the_header(places, make_sink):
    queue = places.queue()
    sent = claim_of(Event("order.placed", {}, topic=queue), source="ü" * 128)
    assert await make_sink().deliver([sent]) == [DELIVERED]
    ((properties, _),) = places.messages(queue)
    assert properties.app_id is None
    assert properties.headers["event-source"] == "ü" * 128


async def test_header_name_of_255_bytes_arrives_whole(places, make_sink):
    queue = places.queue()
    assert await make_sink().deliver([named_claim("a", topic=queue, headers={"h" * 255: "1"})]) == [DELIVERED]
    ((properties, _),) = places.messages(queue)
    assert properties.headers["h" * 255] == "1"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"headers": {"ü" * 128: "1"}}, "expected at most 255 bytes, got 256"),
        ({"headers": {"a": "\ud800"}}, "no UTF-8"),
        ({"headers": {"a": "x" * 131_072}}, "frames hold 131064"),
        ({"topic": "ü" * 128}, "Routing key 'ü+' cannot be sent: expected at most 255 bytes, got 256"),
        ({"content_type": "t" * 256}, "Content type 't+' cannot be sent"),
    ],
    ids=["header name", "surrogate", "frame", "routing key", "content type"],
)
async def test_message_without_a_form_in_amqp_is_dead_and_its_neighbours_arrive(places, make_sink, fields, reason):
    queue = places.queue()
    bad = claim_of(Event("order.placed", {"name": "bad"}, topic=queue, key="k"), **fields)
    sink = make_sink()
    batch = [named_claim("a", topic=queue), bad, named_claim("after", "k", topic=queue), named_claim("b", topic=queue)]
    outcomes = await sink.deliver(batch)
    assert isinstance(outcomes[1], Dead)
    assert re.search(reason, outcomes[1].error)
    assert [outcomes[0], *outcomes[2:]] == [DELIVERED, RELEASED, DELIVERED]
    assert places.names(queue) == ["a", "b"]


async def test_batch_of_many_megabytes_arrives_in_order(places, make_sink):
    queue = places.queue()
    payloads = [bytes([number]) * 1_000_000 for number in range(12)]
    sent = [claim_of(Event("order.placed", payload, topic=queue, key="k")) for payload in payloads]
    assert await make_sink().deliver(sent) == [DELIVERED] * 12
    assert [body for _, body in places.messages(queue)] == payloads


# -- where it goes ---------------------------------------------------------------------------------------------------


async def test_exchange_and_routing_key_are_templates(places, make_sink):
    exchange, queue = places.exchange(".shop"), places.queue()
    places.channel.queue_bind(queue, exchange, "*.order-7")
    sink = make_sink(exchange=f"{places.name}.{{headers.app}}", routing_key="{type}.{key}")
    sent = [
        named_claim("a", "order-7", type="placed", headers={"app": "shop"}),
        named_claim("b", "order-8", type="placed", headers={"app": "shop"}),
        named_claim("c", type="placed", headers={"app": "shop"}),
    ]
    first, second, third = await sink.deliver(sent)
    assert first == DELIVERED
    assert second == Dead(f"No queue is bound to exchange '{exchange}' for routing key 'placed.order-8'")
    assert isinstance(third, Dead)
    assert "needs key" in third.error
    assert places.names(queue) == ["a"]


async def test_message_no_queue_takes_is_dead_unless_it_may_be_dropped(places, make_sink):
    sent = [named_claim("a", topic=places.name)]
    text = f"No queue is bound to the default exchange for routing key '{places.name}'"
    assert await make_sink().deliver(sent) == [Dead(text)]
    assert await make_sink(mandatory=False).deliver(sent) == [DELIVERED]


async def test_same_event_twice_in_a_batch_is_judged_twice(places, make_sink):
    queue = places.queue()
    sink = make_sink()
    twice = [named_claim("a", topic=places.name + ".nowhere", id=ID)] * 2
    assert [type(outcome) for outcome in await sink.deliver(twice)] == [Dead, Dead]
    assert await sink.deliver([named_claim("a", topic=queue, id=ID)] * 2) == [DELIVERED, DELIVERED]
    assert places.names(queue) == ["a", "a"]


async def test_full_queue_that_refuses_is_a_retry_of_those_messages(places, make_sink):
    full = places.queue(".full", **{"x-max-length": 1, "x-overflow": "reject-publish"})
    queue = places.queue()
    sink = make_sink()
    # The server notices that a queue is full with a delay, so it is full before.
    assert await sink.deliver([named_claim("first", topic=full)]) == [DELIVERED]
    batch = [named_claim("a", "k", topic=full), named_claim("b", "k", topic=queue), named_claim("c", topic=queue)]
    first, second, third = await sink.deliver(batch)
    assert isinstance(first, Retry)
    assert "full" in first.error
    assert [second, third] == [RELEASED, DELIVERED]
    assert places.names(full) == ["first"]


# -- exchanges that are not there ------------------------------------------------------------------------------------


async def test_missing_exchange_of_some_events_is_dead_for_those(places, make_sink):
    exchange, queue = places.exchange(".there"), places.queue()
    places.channel.queue_bind(queue, exchange, "#")
    sink = make_sink(exchange=f"{places.name}.{{type}}")
    missing = f"no exchange '{places.name}.away' in vhost '/'"
    batch = [
        named_claim("a", type="there"),
        named_claim("bad", "k", type="away"),
        named_claim("after", "k", type="there"),
        named_claim("worse", type="away"),
        named_claim("b", type="there"),
    ]
    outcomes = await sink.deliver(batch)
    assert [outcomes[0], outcomes[2], outcomes[4]] == [DELIVERED, RELEASED, DELIVERED]
    assert all(isinstance(each, Dead) and missing in each.error for each in (outcomes[1], outcomes[3]))
    assert places.names(queue) == ["a", "b"]


async def test_exchange_that_is_deleted_meanwhile_is_dead_for_its_messages(places, make_sink):
    exchange, queue = places.exchange(".there"), places.queue()
    gone = places.exchange(".gone")
    for each in (exchange, gone):
        places.channel.queue_bind(queue, each, "#")
    sink = make_sink(exchange=f"{places.name}.{{type}}")
    assert await sink.deliver([named_claim("1", type="gone"), named_claim("2", type="there")]) == [DELIVERED] * 2
    places.channel.exchange_delete(gone)
    batch = [named_claim("bad", "k", type="gone"), named_claim("a", type="there"), named_claim("worse", type="gone")]
    outcomes = await sink.deliver(batch)
    assert [type(outcome) for outcome in outcomes] == [Dead, type(DELIVERED), Dead]
    assert places.names(queue) == ["1", "2", "a"]


async def test_missing_exchange_of_all_events_is_an_outage_and_blames_none(places, make_sink):
    exchange = places.exchange(is_made=False)
    sink = make_sink(exchange=exchange)
    with pytest.raises(SinkUnavailable, match=f"no exchange '{exchange}'"):
        await sink.open()
    with pytest.raises(SinkUnavailable, match=f"no exchange '{exchange}'") as outage:
        await sink.deliver([named_claim("a"), named_claim("b")])
    assert outage.value.outcomes == [RELEASED, RELEASED]
    queue = places.queue()
    places.exchange(kind="fanout")
    places.channel.queue_bind(queue, exchange)
    await sink.open()
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    places.channel.exchange_delete(exchange)
    with pytest.raises(SinkUnavailable, match=f"no exchange '{exchange}'"):
        await sink.deliver([named_claim("b")])
    assert places.names(queue) == ["a"]


async def test_name_that_no_exchange_can_have_is_dead(make_sink):
    (outcome,) = await make_sink(exchange="{type}").deliver([named_claim("a", type="it's")])
    assert isinstance(outcome, Dead)
    assert "it's" in outcome.error


async def test_error_that_names_nobody_is_traced_to_its_message(places, make_sink):
    queue = places.queue()
    # RabbitMQ reads a header of this name as a list of further routing keys.
    bad = named_claim("bad", "k", topic=queue, headers={"CC": "text"})
    names = [f"{number}" for number in range(6)]
    batch = [named_claim(name, topic=queue) for name in names]
    batch[3:3] = [bad, named_claim("after", "k", topic=queue)]
    outcomes = await make_sink().deliver(batch)
    assert isinstance(outcomes[3], Dead)
    assert "CC" in outcomes[3].error
    assert [*outcomes[:3], *outcomes[4:]] == [DELIVERED] * 3 + [RELEASED] + [DELIVERED] * 3
    # Those before the bad one may have come twice.
    assert list(dict.fromkeys(places.names(queue))) == names


async def test_rest_of_a_batch_goes_in_windows_again_once_its_bad_messages_are_found(places, make_sink, windows):
    queue = places.queue()
    batch = [named_claim(f"{number}", topic=queue) for number in range(40)]
    for position in (0, 20):
        batch[position] = named_claim("bad", topic=queue, headers={"CC": "text"})
    outcomes = await make_sink().deliver(batch)
    assert [position for position, outcome in enumerate(outcomes) if isinstance(outcome, Dead)] == [0, 20]
    assert outcomes.count(DELIVERED) == 38
    # All, the first alone, 2 + 4 + 8, 16 with the other one, up to 6 alone, and 2 + 4 + 8 + 5.
    assert windows[:6] == [40, 1, 2, 4, 8, 16]
    assert windows[-4:] == [2, 4, 8, 5]
    assert len(windows) <= 16
    names = places.names(queue)
    assert list(dict.fromkeys(names)) == [f"{number}" for number in range(40) if number not in (0, 20)]
    assert max(names.count(name) for name in names) <= 2


async def test_batch_of_bad_messages_is_not_sent_whole_for_each(places, make_sink, windows):
    queue = places.queue()
    batch = [named_claim("bad", topic=queue, headers={"CC": "text"}) for _ in range(16)]
    assert all(isinstance(outcome, Dead) for outcome in await make_sink().deliver(batch))
    assert windows == [16, *[1, 2] * 14, 1, 1]
    assert places.names(queue) == []


# -- creation --------------------------------------------------------------------------------------------------------


async def test_queue_is_created_as_a_quorum_queue_only_when_asked(places, make_sink):
    queue = places.queue(is_made=False)
    assert isinstance((await make_sink().deliver([named_claim("a", topic=queue)]))[0], Dead)
    assert await make_sink(create=True).deliver([named_claim("a", topic=queue)] * 2) == [DELIVERED] * 2
    # Declaring it otherwise would be an error.
    places.channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
    assert places.names(queue) == ["a", "a"]


async def test_exchange_queue_and_binding_are_created(places, make_sink):
    exchange, queue = places.exchange(is_made=False), places.queue(".order", is_made=False)
    options = {"exchange_type": "direct", "queue_type": "classic", "max_length": 2}
    sink = make_sink(
        f"{server_url('rabbitmq')}?create=true",
        exchange=exchange,
        routing_key="{type}",
        queue=f"{places.name}.{{aggregate_type}}",
        binding_key="placed",
        **options,
    )
    sent = [named_claim("a", type="placed", aggregate_type="order"), named_claim("b", aggregate_type="order")]
    assert [type(outcome) for outcome in await sink.deliver(sent)] == [type(DELIVERED), Retry]
    places.channel.exchange_declare(exchange, "direct", durable=True)
    arguments = {"x-queue-type": "classic", "x-max-length": 2, "x-overflow": "reject-publish"}
    places.channel.queue_declare(queue, durable=True, arguments=arguments)
    assert places.names(queue) == ["a"]


async def test_binding_is_the_routing_key_when_none_is_given(places, make_sink):
    exchange, queue = places.exchange(is_made=False), places.queue(is_made=False)
    sink = make_sink(create=True, exchange=exchange, queue=queue, routing_key="{type}")
    assert await sink.deliver([named_claim("a", type="x.1"), named_claim("b", type="x.2")]) == [DELIVERED] * 2
    places.channel.exchange_declare(exchange, "topic", durable=True)
    assert places.names(queue) == ["a", "b"]


async def test_created_queue_that_was_deleted_is_created_again(places, make_sink):
    queue = places.queue(is_made=False)
    sink = make_sink(create=True, queue_type="classic")
    assert await sink.deliver([named_claim("a", topic=queue)]) == [DELIVERED]
    places.channel.queue_delete(queue)
    assert [type(each) for each in await sink.deliver([named_claim("b", topic=queue)])] == [Retry]
    assert await sink.deliver([named_claim("b", topic=queue)]) == [DELIVERED]
    assert places.names(queue) == ["b"]


async def test_new_connection_looks_for_its_queues_again(url, places):
    queue = places.queue(is_made=False)
    made: list[aiormq.abc.AbstractConnection] = []
    sink = RabbitmqSink(remember(made, url), routing_key=queue, create=True, queue_type="classic")
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    places.channel.queue_delete(queue)
    await made[0].close()
    assert await sink.deliver([named_claim("b")]) == [DELIVERED]
    await sink.close()
    assert places.names(queue) == ["b"]


async def test_queue_of_another_kind_is_dead_for_its_messages(places, make_sink):
    other, queue = places.queue(".other"), places.queue(is_made=False)
    first, second = await make_sink(create=True).deliver([named_claim("a", topic=other), named_claim("b", topic=queue)])
    assert isinstance(first, Dead)
    assert "inequivalent arg 'x-queue-type'" in first.error
    assert second == DELIVERED


# -- connecting ------------------------------------------------------------------------------------------------------


async def test_tls_with_the_servers_authority(places, make_sink):
    queue = places.queue()
    folder = certificates()
    sink = make_sink(server_url("rabbitmq_tls"), tls_ca=str(folder / "ca.pem"))
    assert await sink.deliver([named_claim("a", topic=queue)]) == [DELIVERED]
    files = {"tls_certificate": str(folder / "client.pem"), "tls_key": str(folder / "client.key")}
    sink = make_sink(server_url("rabbitmq_tls"), tls_ca=str(folder / "ca.pem"), **files)
    assert await sink.deliver([named_claim("b", topic=queue)]) == [DELIVERED]
    assert places.names(queue) == ["a", "b"]


async def test_server_of_an_unknown_authority_is_refused_unless_it_is_not_checked(make_sink):
    with pytest.raises(SinkUnavailable, match="certificate verify failed"):
        await make_sink(server_url("rabbitmq_tls")).open()
    await make_sink(server_url("rabbitmq_tls"), tls_verify=False).open()


async def test_unknown_virtual_host_is_an_outage(url, make_sink):
    with pytest.raises(SinkUnavailable, match="the server refused virtual host 'no/such'"):
        await make_sink(f"{url}no%2Fsuch").open()


async def test_servers_are_tried_in_turn(url, places, make_sink):
    queue = places.queue()
    parts = urlsplit(url)
    sink = make_sink(f"amqp://pillarbox:pillarbox@127.0.0.1:1,127.0.0.1:{parts.port}/")
    assert await sink.deliver([named_claim("a", topic=queue)]) == [DELIVERED]
    with pytest.raises(SinkUnavailable, match=r"127\.0\.0\.1', 2"):
        await make_sink("amqp://pillarbox:pillarbox@127.0.0.1:1,127.0.0.1:2/").open()


async def test_sink_made_in_python_uses_the_callers_connections(url, places):
    queue = places.queue()
    made: list[aiormq.abc.AbstractConnection] = []
    sink = RabbitmqSink(remember(made, url), routing_key=queue, timeout=timedelta(seconds=30))
    assert sink.name == "amqp:"
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    await made[0].close()
    assert await sink.deliver([named_claim("b")]) == [DELIVERED]
    await sink.close()
    assert [connection.is_closed for connection in made] == [True, True]
    assert places.names(queue) == ["a", "b"]


async def test_channel_of_a_dropped_connection_is_not_lent_again(url, monkeypatch):
    made: list[aiormq.abc.AbstractConnection] = []
    channels = Channels(remember(made, url), timeout=30, is_mandatory=True, is_persistent=True)
    is_answering = asyncio.Event()
    async with channels.publisher() as old:
        close = old.connection.close

        async def close_when_answered() -> None:
            await is_answering.wait()
            await close()

        monkeypatch.setattr(old.connection, "close", close_when_answered)
        channels.drop(old.connection)
        async with channels.publisher() as new:
            assert [old.connection, new.connection] == made
        assert old.is_open
    async with channels.publisher() as again, channels.publisher() as other:
        assert again is new
        assert other.connection is made[1]
    is_answering.set()
    await channels.close()
    assert [connection.is_closed for connection in made] == [True, True]


async def test_connection_dropped_late_leaves_the_one_that_took_its_place(url):
    made: list[aiormq.abc.AbstractConnection] = []
    channels = Channels(remember(made, url), timeout=30, is_mandatory=True, is_persistent=True)
    async with channels.publisher() as old:
        channels.drop(old.connection)
    async with channels.publisher() as new:
        channels.drop(old.connection)
    async with channels.publisher() as again:
        assert again is new
    assert len(made) == 2
    await channels.close()


async def test_late_timeout_of_a_lost_connection_leaves_the_one_that_took_its_place(url, places, monkeypatch):
    queue = places.queue()
    made: list[aiormq.abc.AbstractConnection] = []
    is_stuck = asyncio.Event()
    publish = Publisher.publish

    async def hang(*_: object) -> None:
        is_stuck.set()
        await asyncio.Event().wait()

    sink = RabbitmqSink(remember(made, url), routing_key=queue, timeout=timedelta(seconds=1))
    monkeypatch.setattr(Publisher, "publish", hang)
    late = asyncio.create_task(sink.deliver([named_claim("late")]))
    await is_stuck.wait()
    monkeypatch.setattr(Publisher, "publish", publish)
    await made[0].close()
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    assert not late.done()
    with pytest.raises(SinkUnavailable, match="no confirm within 1 s"):
        await late
    assert not made[1].is_closed
    assert await sink.deliver([named_claim("b")]) == [DELIVERED]
    await sink.close()
    assert len(made) == 2
    assert places.names(queue) == ["a", "b"]


def test_default_timeout_ends_before_a_relay_that_holds_its_rows_gives_up():
    assert inspect.signature(RabbitmqSink).parameters["timeout"].default < HOLD_TIMEOUT


async def test_cancelled_delivery_leaves_a_sink_that_works(places, make_sink):
    queue = places.queue()
    sink = make_sink()
    await sink.open()
    before = asyncio.all_tasks()
    delivery = asyncio.create_task(sink.deliver([named_claim(f"{n}", "k", topic=queue) for n in range(3)]))
    await asyncio.sleep(0)
    delivery.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivery
    assert asyncio.all_tasks() == before
    again = [named_claim(f"{n}", "k", topic=queue) for n in range(4)]
    assert await sink.deliver(again) == [DELIVERED] * 4
    assert places.names(queue)[-4:] == ["0", "1", "2", "3"]


def test_secret_is_not_shown(url):
    sink = open_sink("amqp://shop:hush@127.0.0.1:1/")
    assert "hush" not in sink.name + repr(sink) + str(vars(sink))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mandatory": "perhaps"}, "mandatory: expected true or false, got 'perhaps'"),
        ({"exchange": " "}, "exchange: expected text, got ' '"),
        ({"exchange": "{topc}"}, "exchange: unknown field 'topc'"),
        ({"routing_key": "{"}, "routing_key: '{' alone"),
        ({"timeout": "0s"}, "timeout: expected a duration above zero"),
        ({"heartbeat": "1500ms"}, "heartbeat: expected whole seconds below 65535, got 0:00:01.5"),
        (
            {"create": True, "exchange": "x", "exchange_type": "round"},
            "exchange_type: expected topic, direct or fanout",
        ),
        ({"queue_type": "quorum"}, "queue_type: it is for what is created; give create = true as well"),
        ({"create": True, "queue": "q"}, "queue: give exchange as well; without one the queue is named by routing_key"),
        ({"create": True, "exchange": "x", "max_length": 3}, "max_length: give queue as well"),
        ({"create": True, "queue_type": "stream", "max_length": 3}, "max_length: a stream never refuses a message"),
        ({"tls_ca": "ca.pem"}, "unknown option 'tls_ca'"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_option_is_refused(options, message):
    with pytest.raises(ConfigError) as refused:
        open_sink("amqp://127.0.0.1/", **options)
    assert message in str(refused.value)


def test_missing_certificate_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="tls_ca: there is no file"):
        open_sink("amqps://127.0.0.1/", tls_ca=str(tmp_path / "ca.pem"))
