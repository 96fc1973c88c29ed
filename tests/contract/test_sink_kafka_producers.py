"""Kafka's producers: which of them a call gets, the spare, and what they ask the cluster when something is wrong."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from pillarbox.errors import SinkUnavailable
from pillarbox.event import DELIVERED, RELEASED, Dead
from pillarbox.sinks import kafka
from pillarbox.sinks.kafka import KafkaSink
from pillarbox.sinks.kafka_errors import Outage
from pillarbox.sinks.kafka_producer import KafkaProducer, Stopped
from tests.contract.broker_kits import make_place, named_claim
from tests.contract.kit_kafka import make_kafka_sink, make_topic
from tests.servers import server_url


@pytest.fixture
def url() -> str:
    return server_url("kafka")


@pytest.fixture
def topic(url: str) -> str:
    place = make_place()
    make_topic(url, place)
    return place


@pytest.fixture
async def sink(url: str, topic: str) -> AsyncIterator[KafkaSink]:
    made = make_kafka_sink(url, topic=topic)
    yield made
    await made.close()


async def settle(sink: KafkaSink) -> None:
    """Wait until no producer is at work or being made."""
    if sink._running:
        await asyncio.wait(sink._running)


# -- in turn ---------------------------------------------------------------------------------------------------------


async def test_producers_are_used_in_turn(sink, monkeypatch):
    used: list[KafkaProducer] = []
    original = KafkaProducer.begin

    def begin(self: KafkaProducer, stop: threading.Event) -> None:
        used.append(self)
        original(self, stop)

    monkeypatch.setattr(KafkaProducer, "begin", begin)
    for name in "abcd":
        assert await sink.deliver([named_claim(name)]) == [DELIVERED]
        await settle(sink)
    assert used[0] is not used[1]
    assert used[2:] == used[:2]
    assert sink._made == 2


# -- the spare -------------------------------------------------------------------------------------------------------


async def test_delivery_leaves_a_spare_producer_that_has_a_client(sink):
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    await settle(sink)
    assert [producer._producer is not None for producer in sink._idle] == [True, True]


async def test_transactions_have_no_spare(url, topic):
    sink = make_kafka_sink(url, topic=topic, transactional_id=topic, timeout="20s")
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    await settle(sink)
    assert len(sink._idle) == sink._made == 1
    await sink.close()


async def test_check_makes_no_spare(sink):
    await sink.open()
    await sink.check()
    await settle(sink)
    assert len(sink._idle) == sink._made == 1


async def test_spare_that_cannot_be_made_harms_no_delivery(sink, monkeypatch):
    original = KafkaProducer.have_client
    failed: list[KafkaProducer] = []

    def have_client(self: KafkaProducer) -> None:
        has_begun = self._deadline > 0
        if not has_begun:
            failed.append(self)
            raise KafkaException(KafkaError(KafkaError._FAIL))
        original(self)

    monkeypatch.setattr(KafkaProducer, "have_client", have_client)
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    await settle(sink)
    (spare,) = failed
    assert spare in sink._idle
    assert await sink.deliver([named_claim("b")]) == [DELIVERED]
    assert spare._producer is not None


async def test_spare_is_made_later_when_there_was_no_thread_for_it(sink):
    sink._threads = ThreadPoolExecutor()
    sink._threads.shutdown()
    with pytest.raises(RuntimeError):
        await sink.deliver([named_claim("a")])
    sink._threads = None
    assert await sink.deliver([named_claim("a")]) == [DELIVERED]
    await settle(sink)
    assert len(sink._idle) == 2


# -- what the cluster is asked ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_transaction", [False, True], ids=["plain", "transaction"])
async def test_missing_topic_is_asked_for_once_a_batch(url, monkeypatch, is_transaction):
    missing = make_place()
    asked: list[str] = []
    original = KafkaProducer.has_topic

    def has_topic(self: KafkaProducer, topic: str) -> bool:
        asked.append(topic)
        return original(self, topic)

    monkeypatch.setattr(KafkaProducer, "has_topic", has_topic)
    options = {"transactional_id": missing, "timeout": "20s"} if is_transaction else {}
    sink = make_kafka_sink(url, topic=missing, **options)
    gone = Dead(f"Topic {missing!r} does not exist; make it, or use the option create")
    # The third batch has the first one's client, which knows before it sends that the topic is missing.
    for batch in (1, 2, 3):
        assert await sink.deliver([named_claim(f"{number}") for number in range(50)]) == [gone] * 50
        assert asked == [missing] * batch
    await sink.close()


async def test_cluster_that_does_not_answer_is_asked_for_one_topic(url, monkeypatch):
    asked: list[str] = []

    def has_topic(self: KafkaProducer, topic: str) -> bool:
        asked.append(topic)
        raise Outage("no broker can be reached")

    monkeypatch.setattr(KafkaProducer, "has_topic", has_topic)
    sink = make_kafka_sink(url, topic="{topic}")
    missing = [make_place() for _ in range(3)]
    with pytest.raises(SinkUnavailable, match="no broker can be reached") as outage:
        await sink.deliver([named_claim(f"{number}", topic=missing[number % 3]) for number in range(12)])
    assert outage.value.outcomes == [RELEASED] * 12
    assert len(asked) == 1
    await sink.close()


async def test_topic_that_the_client_does_not_know_yet_is_an_outage(url, monkeypatch):
    monkeypatch.setattr(KafkaProducer, "has_topic", lambda *_: True)
    sink = make_kafka_sink(url, topic=make_place())
    with pytest.raises(SinkUnavailable, match="is there, but the client does not know it yet") as outage:
        await sink.deliver([named_claim("a")])
    assert outage.value.outcomes == [RELEASED]
    await sink.close()


class Client:
    """A client whose cluster has no topics; with a `stop` it never answers and is stopped meanwhile."""

    def __init__(self, stop: threading.Event | None = None) -> None:
        self.stop = stop
        self.waits: list[float] = []

    def list_topics(self, topic: str, timeout: float) -> Any:
        self.waits.append(timeout)
        if self.stop is None:
            return SimpleNamespace(topics={})
        self.stop.set()
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    def poll(self, timeout: float) -> int:
        return 0


def begun(stop: threading.Event, client: Client) -> KafkaProducer:
    producer = KafkaProducer(make_kafka_sink("kafka://127.0.0.1:1")._settings, name="orders")
    producer._producer = client  # type: ignore[assignment]
    producer.begin(stop)
    return producer


def test_stop_is_noticed_while_the_cluster_is_asked_for_a_topic():
    stop = threading.Event()
    client = Client(stop)
    with pytest.raises(Stopped):
        begun(stop, client).has_topic("a")
    assert client.waits == [0.1]


def test_cluster_is_not_asked_after_a_stop():
    stop = threading.Event()
    client = Client()
    producer = begun(stop, client)
    stop.set()
    with pytest.raises(Stopped):
        producer.has_topic("a")
    assert client.waits == []


def test_topic_is_asked_for_shortly_after_the_limit_and_not_later():
    client = Client()
    producer = begun(threading.Event(), client)
    producer._deadline = time.monotonic()
    assert not producer.has_topic("a")
    producer._deadline = time.monotonic() - 1
    with pytest.raises(Outage, match="no answer within 4 s"):
        producer.has_topic("a")
    assert len(client.waits) == 1


async def test_acknowledged_message_ends_the_suspicion_that_all_brokers_are_down(sink, monkeypatch):
    original = KafkaProducer.wait
    clients: list[Any] = []

    def wait(self: KafkaProducer, *failed: Any) -> None:
        self._note(KafkaError(KafkaError._ALL_BROKERS_DOWN))
        clients.append(self._producer)
        original(self, *failed)

    monkeypatch.setattr(KafkaProducer, "wait", wait)
    for name in "abc":
        assert await sink.deliver([named_claim(name)]) == [DELIVERED]
        await settle(sink)
    # The third batch has the first one's producer, which has kept its client.
    assert clients[2] is clients[0]


# -- what is remembered ----------------------------------------------------------------------------------------------


def test_few_names_of_topics_are_remembered(monkeypatch):
    monkeypatch.setattr(kafka, "_KNOWN_NAMES", 3)
    sink = make_kafka_sink("kafka://127.0.0.1:1", topic="{topic}")
    claims = [named_claim("a", topic=f"topic-{number}") for number in range(10)]
    assert len(sink._list_topics(claims)) == 10
    assert sink._known_names == {"topic-9"}
