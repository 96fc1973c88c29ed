"""RabbitMQ with rights, limits and alarms that only a server of the test's own may have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlsplit

import pytest

from pillarbox.errors import SinkUnavailable
from pillarbox.event import DELIVERED, RELEASED, Dead, Outcome
from pillarbox.sinks import Sink, open_sink
from tests.brokers import BrokerName, PrivateBroker
from tests.contract.broker_kits import named_claim
from tests.contract.kit_rabbitmq import connect
from tests.contract.test_sink_rabbitmq import Places

CTL = "/usr/lib/rabbitmq/bin/rabbitmqctl"
MAX_SIZE = "application:set_env(rabbit, max_message_size, {})."


@pytest.fixture
def broker(private_broker: Callable[[BrokerName], PrivateBroker]) -> PrivateBroker:
    return private_broker("rabbitmq")


@pytest.fixture
def places(broker: PrivateBroker) -> Iterator[Places]:
    with connect(broker.url) as connection:
        made = Places(connection.channel())
        yield made
        made.delete()


async def test_message_the_user_may_not_send_is_dead_and_its_neighbours_arrive(broker, places):
    user = places.name
    for end in (".mine", ".theirs"):
        places.exchange(end)
    places.channel.queue_bind(places.queue(), f"{user}.mine", "#")
    broker.run(CTL, "add_user", user, "secret")
    broker.run(CTL, "set_permissions", user, "^$", rf"^{user}\.mine$", "^$")
    broker.run(CTL, "set_topic_permissions", user, f"{user}.mine", "^open", "^$")
    sink = open_sink(
        broker.url.replace("pillarbox:pillarbox", f"{user}:secret"), exchange=f"{user}.{{type}}", name="mine"
    )
    batch = [
        named_claim("a", type="mine", topic="open"),
        named_claim("exchange", "k", type="theirs", topic="open"),
        named_claim("after", "k", type="mine", topic="open"),
        named_claim("topic", type="mine", topic="closed"),
        named_claim("exchange again", type="theirs", topic="open"),
        named_claim("b", type="mine", topic="open"),
    ]
    outcomes = await sink.deliver(batch)
    await sink.close()
    assert [outcomes[0], outcomes[2], outcomes[5]] == [DELIVERED, RELEASED, DELIVERED]
    for position, reason in ((1, f"exchange '{user}.theirs'"), (3, "topic 'closed'"), (4, f"exchange '{user}.theirs'")):
        outcome = outcomes[position]
        assert isinstance(outcome, Dead)
        assert "ACCESS_REFUSED" in outcome.error
        assert reason in outcome.error
    # Those before a bad one may have come twice.
    assert set(places.names(places.name)) == {"a", "b"}
    assert places.names(places.name)[-1] == "b"


@pytest.mark.parametrize("options", [{}, {"exchange": "amq.topic"}], ids=["default exchange", "fixed exchange"])
async def test_one_exchange_the_user_may_not_write_to_is_an_outage_and_blames_none(broker, places, options):
    user = places.name
    places.channel.queue_bind(places.queue(), "amq.topic", user)
    broker.run(CTL, "add_user", user, "secret")
    broker.run(CTL, "set_permissions", user, "^$", "^$", "^$")
    sink = open_sink(broker.url.replace("pillarbox:pillarbox", f"{user}:secret"), routing_key=user, **options)
    exchange = options.get("exchange", "amq.default")
    try:
        with pytest.raises(SinkUnavailable, match=f"ACCESS_REFUSED - .*access to exchange '{exchange}'") as outage:
            await sink.deliver([named_claim("a"), named_claim("b")])
        assert outage.value.outcomes == [RELEASED, RELEASED]
        broker.run(CTL, "set_permissions", user, "^$", f"^{exchange}$", "^$")
        # The server remembers for each channel what it may do; an error closed the one above.
        assert await sink.deliver([named_claim("a"), named_claim("b")]) == [DELIVERED, DELIVERED]
    finally:
        await sink.close()
    assert places.names(user) == ["a", "b"]


async def test_topic_the_user_may_not_send_to_is_dead_where_all_go_to_one_exchange(broker, places):
    user = places.name
    places.channel.queue_bind(places.queue(), places.exchange(), "#")
    broker.run(CTL, "add_user", user, "secret")
    broker.run(CTL, "set_permissions", user, "^$", ".*", "^$")
    broker.run(CTL, "set_topic_permissions", user, f"{user}.x", "^open", "^$")
    sink = open_sink(broker.url.replace("pillarbox:pillarbox", f"{user}:secret"), exchange=f"{user}.x")
    closed, opened = await sink.deliver([named_claim("bad", topic="closed"), named_claim("a", topic="open")])
    await sink.close()
    assert isinstance(closed, Dead)
    assert "access to topic 'closed'" in closed.error
    assert opened == DELIVERED
    assert places.names(user) == ["a"]


async def test_message_above_the_servers_limit_is_dead_and_its_neighbours_arrive(broker, places):
    queue = places.queue()
    broker.run(CTL, "eval", MAX_SIZE.format(1000))
    sink = open_sink(broker.url, routing_key=queue)
    large = [named_claim("x" * 1000, "k"), named_claim("after", "k"), named_claim("y" * 2000)]
    outcomes = await sink.deliver([named_claim("a"), *large, named_claim("b")])
    await sink.close()
    broker.run(CTL, "eval", MAX_SIZE.format(134217728))
    assert [outcomes[0], outcomes[2], outcomes[4]] == [DELIVERED, RELEASED, DELIVERED]
    for position, size in ((1, 1011), (3, 2011)):
        outcome = outcomes[position]
        assert isinstance(outcome, Dead)
        assert f"message size {size} is larger than configured max size 1000" in outcome.error
    assert set(places.names(queue)) == {"a", "b"}


async def test_server_short_of_memory_is_an_outage_until_it_has_some(broker, places):
    queue = places.queue()
    sink = open_sink(broker.url, routing_key=queue, timeout="1s")
    assert await sink.deliver([named_claim("before")]) == [DELIVERED]
    broker.run(CTL, "set_vm_memory_high_watermark", "0")
    with pytest.raises(SinkUnavailable, match="short of memory or disk") as outage:
        await sink.deliver([named_claim("a", "k"), named_claim("b", "k")])
    assert outage.value.outcomes == [RELEASED, RELEASED]
    with pytest.raises(SinkUnavailable, match="short of memory or disk"):
        await sink.deliver([named_claim("a", "k")])
    with pytest.raises(SinkUnavailable, match="short of memory or disk"):
        await sink.check()
    broker.run(CTL, "set_vm_memory_high_watermark", "0.6")
    again = await deliver_when_back(sink, ["a", "b", "c"])
    await sink.close()
    assert again == [DELIVERED] * 3
    # What was on its way when the server stopped reading comes first.
    assert places.names(queue)[-3:] == ["a", "b", "c"]


async def deliver_when_back(sink: Sink, names: list[str]) -> Sequence[Outcome]:
    async with asyncio.timeout(60):
        while True:
            try:
                return await sink.deliver([named_claim(name, "k") for name in names])
            except SinkUnavailable as error:
                if "short of memory" not in str(error):
                    raise


async def test_server_that_does_not_answer_is_an_outage_and_serves_again_later(broker, places):
    queue = places.queue()
    sink = open_sink(broker.url, routing_key=queue, timeout="1s")
    assert await sink.deliver([named_claim("before")]) == [DELIVERED]
    broker.pause()
    # A goodbye that nobody answers takes two seconds, and must not come on top.
    with pytest.raises(SinkUnavailable, match="no confirm within 1 s") as outage:
        async with asyncio.timeout(2):
            await sink.deliver([named_claim("a"), named_claim("b")])
    assert outage.value.outcomes == [RELEASED, RELEASED]
    with pytest.raises(SinkUnavailable, match="no answer within 1 s"):
        async with asyncio.timeout(2):
            await sink.deliver([named_claim("a")])
    broker.resume()
    broker.start()
    after = await sink.deliver([named_claim("after")])
    await sink.close()
    assert after == [DELIVERED]
    assert "after" in places.names(queue)


async def test_server_sees_our_name_and_heartbeat(broker):
    sink = open_sink(broker.url, heartbeat="7s")
    await sink.open()
    port = urlsplit(broker.url).port
    listed = broker.run(CTL, "--quiet", "list_connections", "port", "timeout", "client_properties")
    await sink.close()
    assert any(line.startswith(f"{port}\t7\t") and '"pillarbox"' in line for line in listed.splitlines()), listed
