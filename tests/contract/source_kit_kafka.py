"""Kafka for the Source suite: filled by kcat, and asked by the admin client."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Sequence
from typing import Any, ClassVar

from confluent_kafka import Consumer, TopicPartition

from pillarbox.sinks import open_sink
from pillarbox.sources.url import open_source
from tests.brokers import BrokerName
from tests.contract.kit_kafka import make_topic
from tests.contract.sources import GROUP, SourceKit, until
from tests.servers import server_url


class KafkaSourceKit(SourceKit):
    broker: ClassVar[BrokerName] = "kafka"
    features: ClassVar = SourceKit.features - {"counts attempts"}
    partitions: ClassVar[int] = 3
    rebalancing: ClassVar[str] = "cooperative"
    keeps_one_offset: ClassVar[bool] = True
    slow: ClassVar[float] = 8.0
    slow_options: ClassVar[dict[str, Any]] = {"config": {"max.poll.interval.ms": 6000}}
    repeats: ClassVar[int] = 120

    def prepare(self) -> None:
        self.topic = f"{self.place}.orders"
        make_topic(self.url, self.topic, partitions=self.partitions)
        # The shortest session that brokers allow.
        self.options = {"topics": [self.topic], "session": "6s", "rebalancing": self.rebalancing}

    def send(self, *bodies: bytes, key: str | None = None, headers: dict[str, str | bytes] | None = None) -> None:
        produce(self.url, self.topic, *bodies, key=key, headers=headers)

    def make_sink(self, **options: Any) -> Any:
        return self.keep(open_sink(self.url, topic=self.topic, **options))

    def remaining(self, group: str = GROUP) -> int:
        return sum(lag for lag in read_lags(self.url, self.named(group), self.topic, self.partitions))

    def make_stranger(self) -> Any:
        url = server_url("kafka_sasl").replace("//", "//pillarbox:not-the-password@")
        return self.keep(open_source(url, group=GROUP, dead=self.letters, topics=["x"], timeout="5s"))

    def make_missing(self) -> Any:
        return self.make_source(topics=[f"{self.place}.nowhere"])

    def send_pairs(self, pairs: Sequence[tuple[str, str]]) -> None:
        lines = "\n".join(f'{key}\t{{"name": "{name}"}}' for key, name in pairs)
        command = [
            "kcat",
            "-b",
            self.url.removeprefix("kafka://"),
            "-P",
            "-t",
            self.topic,
            "-K",
            "\t",
            "-X",
            "acks=all",
        ]
        subprocess.run(command, input=lines.encode(), check=True, timeout=60)

    async def until_balanced(self, sources: Sequence[Any]) -> None:
        def shares() -> list[int]:
            return [len(source._consumer.progress.list_places()) for source in sources]

        await until(lambda: min(shares()) and sum(shares()) == self.partitions, within=30)

    async def take_away(self, source: Any) -> None:
        # As the client does when the session has lapsed.
        consumer = source._consumer
        places = consumer.progress.list_places()
        await asyncio.to_thread(consumer._lose, None, [TopicPartition(*place) for place in places])
        await source.close()


class KafkaEagerSourceKit(KafkaSourceKit):
    features: ClassVar = SourceKit.features - {"counts attempts", "asks for a login", "misses its place"}
    rebalancing: ClassVar[str] = "eager"

    def named(self, group: str) -> str:
        # A group has one way of rebalancing, also for those who have just left it.
        return f"{group}-eager"


def produce(
    url: str,
    topic: str,
    *bodies: bytes,
    key: str | None = None,
    headers: dict[str, str | bytes] | None = None,
    partition: int | None = None,
) -> None:
    """Send messages with kcat, or, where it has no form for them, with a producer of the plain client."""
    if headers is not None or any(b"\n" in body or not body for body in bodies):
        _produce_any(url, topic, bodies, key, headers, partition)
        return
    command = ["kcat", "-b", url.removeprefix("kafka://"), "-P", "-t", topic, "-X", "acks=all"]
    command += [] if key is None else ["-k", key]
    command += [] if partition is None else ["-p", str(partition)]
    subprocess.run(command, input=b"\n".join(bodies), check=True, timeout=60)


def _produce_any(url: str, topic: str, bodies: Any, key: Any, headers: Any, partition: int | None) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": url.removeprefix("kafka://")})
    chosen: dict[str, Any] = {} if partition is None else {"partition": partition}
    for body in bodies:
        producer.produce(topic, body, key=key, headers=list((headers or {}).items()), **chosen)
    assert producer.flush(30) == 0


def read_lags(url: str, group: str, topic: str, partitions: int) -> list[int]:
    """How many messages of each partition lie behind the group's offset."""
    client = Consumer({"bootstrap.servers": url.removeprefix("kafka://"), "group.id": group})
    try:
        places = [TopicPartition(topic, number) for number in range(partitions)]
        lags = []
        for place in client.committed(places, timeout=30):
            low, high = client.get_watermark_offsets(TopicPartition(topic, place.partition), timeout=30)
            lags.append(high - (place.offset if place.offset >= 0 else low))
        return lags
    finally:
        client.close()
