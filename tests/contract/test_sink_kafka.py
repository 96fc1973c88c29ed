"""What is particular to Kafka: topics, partitions, error codes, topics made when asked, and giving up on a batch."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.event import DELIVERED, EVENT_FIELDS, RELEASED, Claim, Dead, Event, Outcome, Retry, load_event
from pillarbox.sinks import open_sink
from pillarbox.sinks.kafka import KafkaSink
from pillarbox.sinks.kafka_errors import Outage, judge
from pillarbox.sinks.kafka_settings import ClientLog
from tests.brokers import PrivateBroker
from tests.contract.broker_kits import make_place, named_claim
from tests.contract.kit_kafka import make_kafka_sink, make_topic, read_topic
from tests.servers import server_url


@pytest.fixture
def url() -> str:
    return server_url("kafka")


@pytest.fixture
def topic(url: str) -> str:
    place = make_place()
    make_topic(url, place)
    return place


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[KafkaSink]:
    sink = make_kafka_sink(url, **options)
    yield sink
    await sink.close()


async def send(url: str, *claims: Claim, **options: Any) -> list[Outcome]:
    async with opened(url, **options) as sink:
        return list(await sink.deliver(claims))


def to(topic: str, name: str = "a", key: str | None = None, **fields: Any) -> Claim:
    return named_claim(name, key, topic=topic, **fields)


def loaded(**fields: Any) -> Claim:
    """A claim as another system's row may give it: unchecked."""
    event = Event("order.placed", b"{}", topic=fields.pop("topic"))
    values = {name: getattr(event, name) for name in EVENT_FIELDS} | fields
    return Claim(row=1, event=load_event(*values.values()), attempt=1)


def list_topics(url: str) -> dict[str, int]:
    """The cluster's topics and how many partitions each has."""
    admin = AdminClient({"bootstrap.servers": url.removeprefix("kafka://")})
    found = admin.list_topics(timeout=30).topics
    return {name: len(each.partitions) for name, each in found.items()}


def names(url: str, topic: str, **options: Any) -> list[str]:
    return [message.body.decode().split('"')[3] for message in read_topic(url, topic, **options)]


# -- where messages go -----------------------------------------------------------------------------------------------


async def test_events_go_to_the_topic_that_the_template_names(url):
    place = make_place()
    for name in ("orders", "acme"):
        make_topic(url, f"{place}-{name}")
    assert await send(url, to(f"{place}-orders", "a")) == [DELIVERED]
    claim = named_claim("b", headers={"tenant": "acme"})
    assert await send(url, claim, topic=f"{place}-{{headers.tenant}}") == [DELIVERED]
    assert names(url, f"{place}-orders") == ["a"]
    assert names(url, f"{place}-acme") == ["b"]


async def test_keys_go_to_the_partitions_of_the_java_client(url):
    topic = make_place()
    make_topic(url, topic, partitions=4)
    # murmur2 of these keys, as Kafka's own tests give it, without its sign, modulo 4.
    expected = {"21": 0, "foobar": 2, "a-little-bit-long-string": 0, "a-little-bit-longer-string": 3, "abc": 3}
    assert await send(url, *(to(topic, key, key) for key in expected)) == [DELIVERED] * 5
    for partition in range(4):
        keys = {message.key for message in read_topic(url, topic, partition=partition)}
        assert keys == {key for key, place in expected.items() if place == partition}


async def test_event_without_a_key_has_no_message_key(url, topic):
    await send(url, to(topic, "a"), to(topic, "b", "Zürich"))
    assert [message.key for message in read_topic(url, topic)] == [None, "Zürich"]


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_compressed_messages_arrive(url, topic, compression):
    claims = [to(topic, f"{number}") for number in range(50)]
    assert await send(url, *claims, compression=compression) == [DELIVERED] * 50
    assert names(url, topic) == [f"{number}" for number in range(50)]


async def test_header_with_a_zero_byte_is_not_cut(url, topic):
    outcomes = await send(url, loaded(topic=topic, headers={"x": "a\0b"}), loaded(topic=topic, headers={"a\0b": "x"}))
    assert outcomes[0] == DELIVERED
    assert outcomes[1] == Dead(r"Header 'a\x00b' cannot be sent: its name has a zero byte")
    (message,) = read_topic(url, topic)
    assert message.headers["x"] == "a\0b"


async def test_key_that_has_no_bytes_is_dead(url, topic):
    outcomes = await send(url, loaded(topic=topic, key="\ud800"), to(topic, "b"))
    assert isinstance(outcomes[0], Dead)
    assert "cannot be sent" in outcomes[0].error
    assert outcomes[1] == DELIVERED


async def test_more_messages_than_the_client_queues_wait_for_room(url, topic):
    claims = [to(topic, f"{number:03}", "k") for number in range(300)]
    config = {"queue.buffering.max.messages": 10}
    assert await send(url, *claims, config=config) == [DELIVERED] * 300
    assert names(url, topic) == [f"{number:03}" for number in range(300)]


async def test_batch_wakes_the_event_loop_once(url, topic, monkeypatch):
    async with opened(url) as sink:
        await sink.deliver([to(topic, "first")])
        if sink._running:
            await asyncio.wait(sink._running)  # until there is a spare producer
        wakings = []
        loop = asyncio.get_running_loop()
        original = loop.call_soon_threadsafe

        def wake(*call: Any, **context: Any) -> asyncio.Handle:
            wakings.append(call)
            return original(*call, **context)

        monkeypatch.setattr(loop, "call_soon_threadsafe", wake)
        assert await sink.deliver([to(topic, f"{number}") for number in range(500)]) == [DELIVERED] * 500
        assert len(wakings) == 1


# -- what answers mean -----------------------------------------------------------------------------------------------


async def test_message_beyond_the_clients_limit_is_dead_at_once(url, topic):
    big = to(topic, "x" * 1_100_000, "k")
    outcomes = await send(url, to(topic, "a", "k"), big, to(topic, "b", "k"), to(topic, "c", "j"))
    assert isinstance(outcomes[1], Dead)
    assert outcomes[1].error.startswith(f"Topic {topic!r}: MSG_SIZE_TOO_LARGE: ")
    assert [outcomes[0], *outcomes[2:]] == [DELIVERED, RELEASED, DELIVERED]
    assert names(url, topic) == ["a", "c"]


async def test_limit_can_be_raised(url):
    topic = make_place()
    make_topic(url, topic, config={"max.message.bytes": "3000000"})
    big = to(topic, "x" * 2_000_000)
    assert await send(url, big, config={"message.max.bytes": 3_000_000}) == [DELIVERED]


async def test_message_too_large_for_its_topic_is_dead_and_its_small_neighbours_arrive(url):
    topic = make_place()
    make_topic(url, topic, config={"max.message.bytes": "2000"})
    claims = [to(topic, f"{number:02}", f"k{number % 3}") for number in range(30)]
    claims[13] = to(topic, "x" * 3000, "k1")
    outcomes = await send(url, *claims)
    assert isinstance(outcomes[13], Dead)
    assert "MSG_SIZE_TOO_LARGE" in outcomes[13].error
    released = {position for position in range(14, 30) if position % 3 == 1}
    assert [n for n, outcome in enumerate(outcomes) if outcome == RELEASED] == sorted(released)
    assert [n for n, outcome in enumerate(outcomes) if outcome == DELIVERED] == sorted(set(range(30)) - released - {13})
    found = names(url, topic)
    for key in range(3):
        good = [f"{n:02}" for n in range(key, 30, 3) if n not in released | {13}]
        # Whatever came before the request was refused comes again: the last of each event are in order.
        assert [name for name in dict.fromkeys(reversed(found)) if name in good] == good[::-1]


async def test_message_without_a_key_to_a_compacted_topic_is_dead(url):
    topic = make_place()
    make_topic(url, topic, config={"cleanup.policy": "compact"})
    outcomes = await send(url, to(topic, "a", "k"), to(topic, "b"), to(topic, "c", "k"))
    assert isinstance(outcomes[1], Dead)
    assert "INVALID_RECORD" in outcomes[1].error
    assert [outcomes[0], outcomes[2]] == [DELIVERED, DELIVERED]
    assert list(dict.fromkeys(names(url, topic))) == ["a", "c"]


async def test_missing_topic_is_dead_and_found_once_it_is_made(url, topic):
    missing = make_place()
    async with opened(url) as sink:
        outcomes = await sink.deliver([to(topic, "a"), to(missing, "b")])
        gone = Dead(f"Topic {missing!r} does not exist; make it, or use the option create")
        assert list(outcomes) == [DELIVERED, gone]
        assert await sink.deliver([to(missing, "b")]) == [gone]
        assert missing not in list_topics(url)
        make_topic(url, missing)
        found: list[Outcome] = []
        outages = set[str]()
        async with asyncio.timeout(60):
            while not found:
                try:
                    found.extend(await sink.deliver([to(missing, "b")]))
                except SinkUnavailable as outage:
                    # Either of the two producers may have to be told that it is there now.
                    outages.add(str(outage).partition(f"{missing!r} ")[2])
        assert found == [DELIVERED]
        assert outages <= {"is there, but the client does not know it yet"}
    assert names(url, missing) == ["b"]


@pytest.mark.parametrize("name", ["grüße", "a b", "..", "x" * 250, "a/b"])
async def test_topic_that_cannot_exist_is_dead_without_being_sent(url, name):
    (outcome,) = await send(url, to(name))
    assert outcome == Dead(f"Topic {name!r}: expected up to 249 letters, digits, dots, underscores and hyphens")


async def test_topic_without_the_right_to_write_is_dead(url, topic):
    forbidden = make_place()
    make_topic(url, forbidden)
    admin = AdminClient({"bootstrap.servers": url.removeprefix("kafka://")})
    rule = AclBinding(
        ResourceType.TOPIC,
        forbidden,
        ResourcePatternType.LITERAL,
        "User:limited",
        "*",
        AclOperation.WRITE,
        AclPermissionType.DENY,
    )
    for future in admin.create_acls([rule]).values():
        future.result(timeout=30)
    login = server_url("kafka_sasl").replace("//", "//limited:limited@")
    outcomes = await send(login, to(topic, "a"), to(forbidden, "b"))
    assert outcomes[0] == DELIVERED
    assert isinstance(outcomes[1], Dead)
    assert "TOPIC_AUTHORIZATION_FAILED" in outcomes[1].error


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (KafkaError.MSG_SIZE_TOO_LARGE, Dead),
        (KafkaError.RECORD_LIST_TOO_LARGE, Dead),
        (KafkaError.INVALID_MSG, Dead),
        (KafkaError.INVALID_RECORD, Dead),
        (KafkaError.TOPIC_EXCEPTION, Dead),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, Dead),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, Dead),
        (KafkaError._UNKNOWN_TOPIC, Dead),
        (KafkaError._MSG_TIMED_OUT, Outage),
        (KafkaError._TRANSPORT, Outage),
        (KafkaError._ALL_BROKERS_DOWN, Outage),
        (KafkaError._AUTHENTICATION, Outage),
        (KafkaError._SSL, Outage),
        (KafkaError._RESOLVE, Outage),
        (KafkaError._PURGE_QUEUE, Outage),
        (KafkaError._FATAL, Outage),
        (KafkaError._FENCED, Outage),
        (KafkaError.CLUSTER_AUTHORIZATION_FAILED, Outage),
        (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, Outage),
        (KafkaError.NOT_ENOUGH_REPLICAS, Outage),
        (KafkaError.NOT_LEADER_FOR_PARTITION, Outage),
        (KafkaError.LEADER_NOT_AVAILABLE, Outage),
        (KafkaError.REQUEST_TIMED_OUT, Outage),
        (KafkaError.PRODUCER_FENCED, Outage),
        (KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, Outage),
        (KafkaError.UNKNOWN, Retry),
        (KafkaError.UNSUPPORTED_COMPRESSION_TYPE, Retry),
        (KafkaError._BAD_MSG, Retry),
    ],
)
def test_error_codes_are_told_apart(code, expected):
    try:
        found: type = type(judge(KafkaError(code), "orders"))
    except Outage:
        found = Outage
    assert found is expected


def test_fatal_error_is_an_outage_whatever_its_code():
    with pytest.raises(Outage):
        judge(KafkaError(KafkaError.UNKNOWN, "broken", fatal=True), "orders")


async def test_nobody_there_is_an_outage_that_says_why():
    text = r"Sink kafka://127.0.0.1:1: no broker can be reached: .*Connection refused"
    async with opened("kafka://127.0.0.1:1", timeout="1s") as sink:
        deliver = partial(sink.deliver, [to("a")])
        for call in (deliver, deliver, deliver, sink.open, deliver, sink.check, deliver, deliver):
            with pytest.raises(SinkUnavailable, match=text):
                await call()


# -- giving up -------------------------------------------------------------------------------------------------------

# One message at a time on the way, so that the others are in the client's queue.
ONE_AT_A_TIME = {"max.in.flight.requests.per.connection": 1, "batch.num.messages": 1}


@pytest.fixture
def broker(private_broker: Callable[[str], PrivateBroker]) -> PrivateBroker:
    return private_broker("kafka")


async def test_unanswered_messages_are_taken_back_when_the_time_is_up(broker):
    topic = make_place()
    make_topic(broker.url, topic)
    async with opened(broker.url, timeout="2s", config=ONE_AT_A_TIME) as sink:
        assert await sink.deliver([to(topic, "before")]) == [DELIVERED]
        broker.pause()
        with pytest.raises(SinkUnavailable, match="no answer within 2 s") as outage:
            await sink.deliver([to(topic, f"{number}") for number in range(50)])
        assert outage.value.outcomes == [RELEASED] * 50
        broker.resume()
        while True:
            try:
                assert await sink.deliver([to(topic, "after")]) == [DELIVERED]
                break
            except SinkUnavailable:
                continue
    found = names(broker.url, topic)
    assert [found[0], found[-1]] == ["before", "after"]
    assert set(found[1:-1]) <= {"0", "after"}


async def test_what_was_answered_before_an_outage_is_delivered_and_nothing_else(broker):
    topic = make_place()
    make_topic(broker.url, topic)
    reader = Consumer({"bootstrap.servers": broker.url.removeprefix("kafka://"), "group.id": topic})
    async with opened(broker.url, timeout="5s", config=ONE_AT_A_TIME) as sink:
        await sink.open()
        delivery = asyncio.create_task(sink.deliver([to(topic, f"{number}") for number in range(20_000)]))
        while not reader.get_watermark_offsets(TopicPartition(topic, 0), timeout=10)[1]:
            await asyncio.sleep(0)
        broker.pause()
        with pytest.raises(SinkUnavailable) as outage:
            await delivery
        broker.resume()
    reader.close()
    outcomes = outage.value.outcomes
    assert outcomes is not None
    won = list(outcomes).index(RELEASED)
    assert won > 0
    assert list(outcomes) == [DELIVERED] * won + [RELEASED] * (20_000 - won)
    # One message may have been written without an answer.
    assert won <= len(names(broker.url, topic)) <= won + 1


async def test_cancelled_delivery_takes_back_what_was_not_answered_and_touches_no_other(broker):
    topic = make_place()
    make_topic(broker.url, topic)
    async with opened(broker.url, timeout="30s", config=ONE_AT_A_TIME) as sink:
        assert await sink.deliver([to(topic, "before")]) == [DELIVERED]
        broker.pause()
        cancelled = asyncio.create_task(sink.deliver([to(topic, f"{number}") for number in range(50)]))
        other = asyncio.create_task(sink.deliver([to(topic, "other")]))
        while len(sink._running) < 2:
            await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert not other.done()
        broker.resume()
        assert await other == [DELIVERED]
        assert await sink.deliver([to(topic, "after")]) == [DELIVERED]
    assert set(names(broker.url, topic)) <= {"before", "0", "other", "after"}


async def test_close_waits_for_a_delivery_under_way(url, topic):
    sink = make_kafka_sink(url)
    delivery = asyncio.create_task(sink.deliver([to(topic, f"{number}") for number in range(200)]))
    await asyncio.sleep(0)
    await sink.close()
    assert await delivery == [DELIVERED] * 200
    assert not sink._idle
    assert len(names(url, topic)) == 200


# -- topics made when asked ------------------------------------------------------------------------------------------


async def test_topics_are_made_when_asked(url):
    place = make_place()
    options = {"create": True, "partitions": 5, "replication": 1, "topic_config": {"max.message.bytes": 500}}
    claims = [to(f"{place}-a"), to(f"{place}-b"), to(f"{place}-a", "x" * 600), to("not a name")]
    outcomes = await send(url, *claims, **options)
    assert outcomes[:2] == [DELIVERED, DELIVERED]
    assert [type(outcome) for outcome in outcomes[2:]] == [Dead, Dead]
    found = list_topics(url)
    assert [found[f"{place}-a"], found[f"{place}-b"]] == [5, 5]


async def test_topic_is_made_with_the_clusters_defaults_and_again_after_it_was_deleted(url):
    topic = make_place()
    admin = AdminClient({"bootstrap.servers": url.removeprefix("kafka://")})
    async with opened(url, create=True) as sink:
        assert await sink.deliver([to(topic, "a")]) == [DELIVERED]
        assert list_topics(url)[topic] == 1
        await asyncio.to_thread(admin.delete_topics([topic])[topic].result, 30)
        # Whether the client first says that the topic or that a connection is gone is a matter of time.
        gone = Retry(f"Topic {topic!r} does not exist any more")
        outcome: Outcome = gone
        async with asyncio.timeout(60):
            while outcome != DELIVERED:
                assert outcome == gone
                with suppress(SinkUnavailable):
                    (outcome,) = await sink.deliver([to(topic, "b")])
    assert names(url, topic) == ["b"]


async def test_topic_that_cannot_be_made_as_asked_blames_no_message(url):
    with pytest.raises(SinkUnavailable, match="INVALID_REPLICATION_FACTOR"):
        await send(url, to(make_place()), create=True, replication=3)


async def test_topic_that_is_there_already_is_used(url, topic):
    assert await send(url, to(topic), create=True, partitions=7) == [DELIVERED]
    assert list_topics(url)[topic] == 1


# -- options ---------------------------------------------------------------------------------------------------------


async def test_sink_is_made_with_options_in_python(url, topic):
    sink = KafkaSink(url.removeprefix("kafka://"), topic=topic, timeout=timedelta(seconds=5))
    assert sink.name == url
    assert await sink.deliver([to("elsewhere", "a")]) == [DELIVERED]
    await sink.close()
    assert names(url, topic) == ["a"]


async def test_weaker_promises_are_an_option(url, topic):
    assert await send(url, to(topic, "a"), acks="1") == [DELIVERED]
    assert await send(url, to(topic, "b"), acks="0") == [DELIVERED]
    assert await send(url, to(topic, "c"), idempotence=False) == [DELIVERED]
    assert names(url, topic) == ["a", "b", "c"]


async def test_options_become_settings_of_the_client(url):
    def settings(**options: Any) -> dict[str, Any]:
        return make_kafka_sink(url, **options)._settings.producer

    usual = settings()
    assert usual["acks"] == "all"
    assert usual["enable.idempotence"] is True
    assert usual["message.timeout.ms"] == 4000
    assert usual["partitioner"] == "murmur2_random"
    assert settings(compression="zstd")["compression.type"] == "zstd"
    assert settings(config={"linger.ms": 20})["linger.ms"] == 20
    assert settings(config={"max.in.flight": 2})["max.in.flight"] == 2
    assert settings(timeout="1500ms")["message.timeout.ms"] == 1500
    weak = settings(acks="1")
    assert [weak["acks"], weak["enable.idempotence"], weak["max.in.flight.requests.per.connection"]] == ["1", False, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"acks": "1"}}, "config: 'acks' is not taken here; use the option acks"),
        ({"config": {"enable.idempotence": False}}, "use the option idempotence"),
        ({"config": {"bootstrap.servers": "x"}}, "name the servers in the url"),
        ({"config": {"delivery.timeout.ms": 1}}, "use the option timeout"),
        ({"config": {"partitioner": "random"}}, "'partitioner' is set by the sink and cannot be changed"),
        ({"config": {"delivery.report.only.error": True}}, "is set by the sink and cannot be changed"),
        (
            {"acks": "1", "config": {"max.in.flight.requests.per.connection": 5}},
            "config: 'max.in.flight.requests.per.connection' is 1 without idempotence, to keep the order of keys",
        ),
        ({"idempotence": False, "config": {"max.in.flight": 1}}, "config: 'max.in.flight' is 1 without idempotence"),
        ({"config": {"linger": 1}}, 'the Kafka client refuses its settings: No such configuration property: "linger"'),
        ({"config": {"linger.ms": "soon"}}, "the Kafka client refuses its settings"),
        ({"config": "linger.ms=5"}, "config: expected a table of settings"),
        ({"config": {"a": [1]}}, "config: expected a table of settings"),
        ({"acks": "2"}, "acks: expected all, 1 or 0, got '2'"),
        ({"acks": "1", "idempotence": True}, "idempotence: needs acks all, got '1'"),
        ({"acks": "1", "transactional_id": "a"}, "transactional_id: needs acks all and idempotence"),
        ({"compression": "brotli"}, "compression: expected none, gzip, snappy, lz4 or zstd, got 'brotli'"),
        ({"sasl_mechanism": "GSSAPI"}, "sasl_mechanism: expected PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512, got 'GSSAPI'"),
        ({"sasl_mechanism": "PLAIN"}, "sasl_mechanism: give user and password in the url as well"),
        ({"partitions": 3}, "partitions, replication and topic_config need create"),
        ({"create": True, "partitions": 0}, "partitions: expected a whole number of 1 or more, got 0"),
        ({"timeout": "0s"}, "timeout: expected a duration above zero"),
        ({"topic": "{nothing}"}, "topic: unknown field 'nothing'"),
        ({"tls_ca": "/nowhere.pem"}, "tls_ca: there is no file '/nowhere.pem'"),
        ({"tls": False, "tls_verify": False}, "tls_verify: of no use with tls off"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError) as refused:
        open_sink("kafka://127.0.0.1:9092", name="orders", **options)
    assert message in str(refused.value)
    assert str(refused.value).startswith("Sink 'orders'")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("kafka://", "expected kafka://host:port"),
        ("kafka://host:port", "expected kafka://host:port"),
        ("kafka://host:9092/orders", "the topic is the option topic"),
        ("kafka://user@host", "expected both user and password in the url, or neither"),
    ],
)
def test_bad_urls_are_refused(url, message):
    with pytest.raises(ConfigError) as refused:
        open_sink(url)
    assert message in str(refused.value)


def test_several_servers_and_the_usual_port():
    sink = make_kafka_sink("kafka://one,two:9093,[::1]:9094")
    assert sink._settings.connection["bootstrap.servers"] == "one:9092,two:9093,[::1]:9094"


# -- logs ------------------------------------------------------------------------------------------------------------


async def test_client_logs_through_python_and_hides_secrets(caplog, capfd):
    caplog.set_level(logging.DEBUG, logger="pillarbox.sinks.kafka")
    url = server_url("kafka_sasl").replace("//", "//pillarbox:s3cr3t-w0rd@")
    async with opened(url, config={"debug": "security,broker,conf", "ssl.key.password": "0ther-s3cr3t"}) as sink:
        with pytest.raises(SinkUnavailable) as refused:
            await sink.open()
    # The client's own lines begin with their level: %7|…
    assert re.search(r"^%\d\|", capfd.readouterr().err, re.MULTILINE) is None
    records = [record for record in caplog.records if record.name == "pillarbox.sinks.kafka"]
    assert any("sasl.username" in record.getMessage() for record in records)
    shown = f"{caplog.text} {refused.value} {sink!r} {sink.name} {sink._settings!r}"
    assert "s3cr3t" not in shown


def test_secret_in_a_line_of_the_client_is_hidden(caplog):
    caplog.set_level(logging.DEBUG, logger="pillarbox.sinks.kafka")
    sink = make_kafka_sink("kafka://ann:s3cr3t-w0rd@127.0.0.1:1", config={"ssl.key.password": "0ther-s3cr3t"})
    lines = ClientLog(sink._settings, "orders")
    lines.log(logging.WARNING, "%s [%s] %s", "CONFWARN", "producer-1", "s3cr3t-w0rd and 0ther-s3cr3t are weak")
    lines.log(logging.ERROR, "%s [%s] %s", "FAIL", "producer-1", "Connection refused")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "Sink orders: CONFWARN [producer-1] *** and *** are weak"),
        ("DEBUG", "Sink orders: FAIL [producer-1] Connection refused"),
    ]


def test_missing_package_names_the_extra():
    code = "import sys; sys.modules['confluent_kafka'] = None; from pillarbox import open_sink; open_sink('kafka://a')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Kafka support is not installed. Run: pip install 'pillarbox[kafka]'" in ran.stderr
