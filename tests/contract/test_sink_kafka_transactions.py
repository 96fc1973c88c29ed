"""One Kafka transaction a batch: what readers of committed messages see, and who may use a transactional id."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from typing import Any

import pytest
from confluent_kafka import Producer

from pillarbox.errors import SinkUnavailable
from pillarbox.event import DELIVERED, RELEASED, Claim, Dead
from pillarbox.sinks import Sink, open_sink
from pillarbox.sinks.kafka_producer import KafkaProducer
from tests.contract.broker_kits import make_place, named_claim
from tests.contract.kit_kafka import make_topic, read_topic
from tests.servers import ROOT, server_url


@pytest.fixture
def url() -> str:
    return server_url("kafka")


@pytest.fixture
def topic(url: str) -> str:
    place = make_place()
    make_topic(url, place, config={"max.message.bytes": "20000"})
    return place


@pytest.fixture
async def sinks(url: str):
    """Makes sinks that are closed at the end."""
    made: list[Sink] = []

    def make(topic: str, **options: Any) -> Sink:
        made.append(open_sink(url, topic=topic, **{"transactional_id": topic, "timeout": "20s", **options}))
        return made[-1]

    yield make
    for sink in made:
        await sink.close()


def names(url: str, topic: str, isolation: str = "read_committed") -> list[str]:
    return [message.body.decode().split('"')[3][:10] for message in read_topic(url, topic, isolation=isolation)]


def claims(count: int) -> list[Claim]:
    return [named_claim(f"{number}", f"k{number % 3}") for number in range(count)]


async def test_batch_is_committed(url, topic, sinks):
    sink = sinks(topic)
    await sink.open()
    assert await sink.deliver(claims(20)) == [DELIVERED] * 20
    assert await sink.deliver([named_claim("next")]) == [DELIVERED]
    assert names(url, topic) == [*(f"{number}" for number in range(20)), "next"]


async def test_bad_message_is_dead_and_its_neighbours_are_committed_once(url, topic, sinks):
    batch = claims(9)
    batch[4] = named_claim("x" * 30_000, "k1")  # too large for the topic: only the broker knows
    outcomes = await sinks(topic).deliver(batch)
    assert isinstance(outcomes[4], Dead)
    assert "MSG_SIZE_TOO_LARGE" in outcomes[4].error
    assert [outcome for n, outcome in enumerate(outcomes) if n not in (4, 7)] == [DELIVERED] * 7
    assert outcomes[7] == RELEASED
    assert names(url, topic) == ["0", "1", "2", "3", "5", "6", "8"]
    # An aborted try is there for those who want to see it.
    assert len(names(url, topic, "read_uncommitted")) > 7


async def test_message_refused_before_it_is_sent_aborts_nothing(url, topic, sinks):
    batch = claims(4)
    batch[1] = named_claim("x" * 2_000_000, "k1")
    outcomes = await sinks(topic).deliver(batch)
    assert isinstance(outcomes[1], Dead)
    assert [outcomes[0], *outcomes[2:]] == [DELIVERED] * 3
    assert names(url, topic) == names(url, topic, "read_uncommitted") == ["0", "2", "3"]


async def test_missing_topic_is_dead_and_the_others_are_committed(url, topic, sinks):
    sink = sinks("{topic}", transactional_id=topic)
    batch = [named_claim("a", topic=topic), named_claim("b", topic=f"{topic}-missing"), named_claim("c", topic=topic)]
    outcomes = await sink.deliver(batch)
    assert isinstance(outcomes[1], Dead)
    assert [outcomes[0], outcomes[2]] == [DELIVERED, DELIVERED]
    assert names(url, topic) == ["a", "c"]


async def test_second_sink_of_the_same_id_fences_the_first_which_can_come_back(url, topic, sinks):
    first, second = sinks(topic), sinks(topic)
    assert await first.deliver([named_claim("a")]) == [DELIVERED]
    assert await second.deliver([named_claim("b")]) == [DELIVERED]
    with pytest.raises(SinkUnavailable, match=r"(?i)fenced|epoch") as outage:
        await first.deliver([named_claim("c"), named_claim("d")])
    assert outage.value.outcomes == [RELEASED, RELEASED]
    assert names(url, topic) == ["a", "b"]
    assert await first.deliver([named_claim("c"), named_claim("d")]) == [DELIVERED] * 2
    assert names(url, topic) == ["a", "b", "c", "d"]


async def test_messages_that_were_acknowledged_before_a_failed_commit_are_not_delivered(url, topic, sinks, monkeypatch):
    original = KafkaProducer.repeat

    def repeat(self: KafkaProducer, call: Any) -> Any:
        if call.__name__ == "commit_transaction":
            servers = url.removeprefix("kafka://")
            Producer({"bootstrap.servers": servers, "transactional.id": f"{topic}-0"}).init_transactions(30)
        return original(self, call)

    monkeypatch.setattr(KafkaProducer, "repeat", repeat)
    with pytest.raises(SinkUnavailable) as outage:
        await sinks(topic).deliver(claims(3))
    assert outage.value.outcomes == [RELEASED] * 3
    assert len(names(url, topic, "read_uncommitted")) == 3
    assert names(url, topic) == []


async def test_calls_at_a_time_have_transactions_of_their_own(url, topic, sinks):
    sink = sinks(topic)
    batches = [[named_claim(f"{key}{number}", key) for number in range(5)] for key in "abcd"]
    results = await asyncio.gather(*(sink.deliver(batch) for batch in batches))
    assert list(results) == [[DELIVERED] * 5] * 4
    found = names(url, topic)
    for key in "abcd":
        assert [name for name in found if name.startswith(key)] == [f"{key}{number}" for number in range(5)]


async def test_cancelled_batch_is_never_visible(url, topic, sinks, monkeypatch):
    sink = sinks(topic)
    await sink.open()
    waiting = asyncio.Event()
    loop = asyncio.get_running_loop()
    original = KafkaProducer.repeat

    def repeat(self: KafkaProducer, call: Any) -> Any:
        if call.__name__ == "commit_transaction":
            loop.call_soon_threadsafe(waiting.set)
            self._stop.wait()
            self.look()
        return original(self, call)

    monkeypatch.setattr(KafkaProducer, "repeat", repeat)
    delivery = asyncio.create_task(sink.deliver(claims(5)))
    await waiting.wait()
    delivery.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivery
    monkeypatch.undo()
    assert names(url, topic, "read_uncommitted") == ["0", "1", "2", "3", "4"]
    assert names(url, topic) == []
    assert await sink.deliver([named_claim("after")]) == [DELIVERED]
    assert names(url, topic) == ["after"]


KILLED = """
import asyncio, os, signal, sys
from pillarbox.sinks import open_sink
from pillarbox.sinks.kafka_producer import KafkaProducer
from tests.contract.test_sink_kafka_transactions import claims

def repeat(self, call, original=KafkaProducer.repeat):
    if call.__name__ == "commit_transaction":
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, call)

KafkaProducer.repeat = repeat
url, topic = sys.argv[1:]
asyncio.run(open_sink(url, topic=topic, transactional_id=topic, timeout="20s").deliver(claims(12)))
"""


async def test_killed_between_sending_and_commit_shows_nothing_and_delivers_once_afterwards(url, topic, sinks):
    killed = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", KILLED, url, topic], cwd=ROOT, capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    sent = [f"{number}" for number in range(12)]
    assert names(url, topic, "read_uncommitted") == sent
    assert names(url, topic) == []
    assert await sinks(topic).deliver(claims(12)) == [DELIVERED] * 12
    assert names(url, topic) == sent
    assert names(url, topic, "read_uncommitted") == sent * 2
