"""Kafka, read with kcat: once for the bytes of keys and values, once as JSON for the headers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any, ClassVar

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from pillarbox.event import Claim
from pillarbox.sinks import Sink, open_sink
from pillarbox.sinks.kafka import KafkaSink
from tests.brokers import BrokerName
from tests.contract.broker_kits import BROKER, BrokerKit, Received, make_place, named_claim
from tests.servers import server_url


class KafkaKit(BrokerKit):
    broker: ClassVar[BrokerName] = "kafka"
    ce_prefix = "ce_"

    def prepare(self) -> None:
        self.topic = f"{self.place}.order.placed"
        make_topic(self.url, self.topic)

    def make_sink(self, **options: Any) -> Sink:
        return open_sink(self.url, **{"topic": f"{self.place}.{{type}}", "name": "kafka", **options})

    def make_stranger(self) -> Sink:
        return open_sink(server_url("kafka_sasl").replace("//", "//pillarbox:not-the-password@"))

    def refused_by_server(self, name: str, key: str | None = None) -> Claim:
        # Room for the markers of transactions, which Kafka itself would else write in vain for ever.
        make_topic(self.url, f"{self.place}.tiny", config={"max.message.bytes": "128"})
        return named_claim(name, key, type="tiny")

    def received(self) -> list[Received]:
        return read_topic(self.url, self.topic)


class KafkaTransactionsKit(KafkaKit):
    """Kafka with one transaction a batch; read by consumers that wait for the commit."""

    features = BROKER - {"goes down", "asks for a login"}

    def make_sink(self, **options: Any) -> Sink:
        return super().make_sink(**{"transactional_id": make_place(), "timeout": "10s", **options})


def make_kafka_sink(url: str, **options: Any) -> KafkaSink:
    sink = open_sink(url, **options)
    assert isinstance(sink, KafkaSink)
    return sink


def make_topic(url: str, topic: str, *, partitions: int = 1, config: dict[str, str] | None = None) -> None:
    client = AdminClient({"bootstrap.servers": url.removeprefix("kafka://")})
    for future in client.create_topics([NewTopic(topic, partitions, 1, config=config or {})]).values():
        future.result(timeout=30)


def read_topic(
    url: str, topic: str, *, isolation: str = "read_committed", partition: int | None = None
) -> list[Received]:
    """Everything in a topic, partition by partition."""

    def kcat(*options: str) -> bytes:
        command = ["kcat", "-b", url.removeprefix("kafka://"), "-C", "-e", "-q", "-t", topic, "-o", "beginning"]
        chosen = [] if partition is None else ["-p", str(partition)]
        settings = ["-X", f"isolation.level={isolation}", *chosen, *options]
        return subprocess.run([*command, *settings], check=True, capture_output=True, timeout=60).stdout

    texts = {(each["partition"], each["offset"]): each for each in map(_decode, kcat("-J").splitlines())}
    messages = {}
    for place, key, body in _split(kcat("-f", "%p %o %K %S\n%k%s\n")):
        listed = texts[place].get("headers", [])
        headers = dict(zip(listed[::2], listed[1::2], strict=True))
        messages[place] = Received(body, headers, headers.get("content-type"), key)
    assert len(messages) == len(texts)
    return [messages[place] for place in sorted(messages)]


def _decode(line: bytes) -> Any:
    return json.loads(line.decode(errors="replace"))


def _split(found: bytes) -> Iterator[tuple[tuple[int, int], str | None, bytes]]:
    while found:
        line, _, found = found.partition(b"\n")
        partition, offset, key_size, size = map(int, line.split())
        assert size >= 0, "a message without a value"
        key = None if key_size < 0 else found[:key_size].decode()
        found = found[max(0, key_size) :]
        yield (partition, offset), key, found[:size]
        assert found[size : size + 1] == b"\n"
        found = found[size + 1 :]
