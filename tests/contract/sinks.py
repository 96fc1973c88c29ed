"""Kits for the Sink suite: a sink before a destination that a test can look into, break and block.

What a destination cannot do (nothing arrives at `null:`) its kit does not list among its features. A kit learns what
its test needs, so that only those which break a server get one of their own.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import pytest

from pillarbox.errors import SinkUnavailable
from pillarbox.event import Claim, Dead, Event, Retry
from pillarbox.sinks import Sink
from pillarbox.sinks.callable import CallableSink
from pillarbox.sinks.file import FileSink
from pillarbox.sinks.memory import MemorySink
from pillarbox.sinks.null import NullSink
from pillarbox.sinks.stdout import StdoutSink
from tests.contract.broker_kits import Surroundings, unwritable
from tests.contract.kit_http import HttpBatchKit, HttpKit
from tests.contract.kit_kafka import KafkaKit, KafkaTransactionsKit
from tests.contract.kit_mqtt import MqttKit
from tests.contract.kit_nats import NatsKit
from tests.contract.kit_rabbitmq import RabbitmqKit
from tests.contract.kit_redis import RedisClusterKit, RedisKit
from tests.contract.kit_sql import SQL_KITS

FAILED = (Retry, Dead)


def event(name: str, key: str | None = None, **headers: Any) -> Event:
    """An event whose topic is its name: what the kits find at the destination."""
    return Event("order.placed", {"name": name}, topic=name, key=key, headers=headers)


def claim(name: str, key: str | None = None, **headers: Any) -> Claim:
    return Claim(row=name, event=event(name, key, **headers), attempt=1)


def names(lines: str) -> list[str]:
    return [json.loads(line)["topic"] for line in lines.splitlines() if line]


class NullKit:
    features: ClassVar[set[str]] = set()

    def __init__(self, surroundings: Surroundings) -> None:
        self.sink: Sink = NullSink()

    def dispose(self) -> None:
        pass


class FileKit:
    features: ClassVar = {"arrives", "refuses", "goes down", "is checked", "blocks", "writes lines"}
    refused = staticmethod(unwritable)

    def __init__(self, surroundings: Surroundings) -> None:
        self.folder = surroundings.folder / "out"
        self.folder.mkdir()
        self.path = self.folder / "events.jsonl"
        self.path.touch()
        self.sink: Sink = FileSink(self.path, lock_timeout=timedelta(hours=1))

    def read(self) -> bytes:
        return self.path.read_bytes()

    def arrived(self) -> list[str]:
        return names(self.read().decode())

    def go_down(self) -> None:
        self.folder.rename(self.folder.with_name("away"))

    def come_back(self) -> None:
        self.folder.with_name("away").rename(self.folder)

    def block(self) -> None:
        self.lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def unblock(self) -> None:
        os.close(self.lock)

    def dispose(self) -> None:
        pass


class StdoutKit:
    """The sink writes into a pipe; the kit reads the other end."""

    features: ClassVar = {"arrives", "refuses", "goes down", "is checked", "blocks", "writes lines"}
    refused = staticmethod(unwritable)

    def __init__(self, surroundings: Surroundings) -> None:
        self.reader, writer = os.pipe()
        self.stream = os.fdopen(writer, "w")
        self.sink: Sink = StdoutSink(stream=self.stream)
        self.text = b""

    def read(self) -> bytes:
        os.set_blocking(self.reader, False)
        found = b""
        while True:
            try:
                found += os.read(self.reader, 65536)
            except BlockingIOError:
                return found

    def arrived(self) -> list[str]:
        self.text += self.read()
        return names(self.text.decode())

    def go_down(self) -> None:
        os.close(self.reader)

    def come_back(self) -> None:
        self.reader, writer = os.pipe()
        os.dup2(writer, self.stream.fileno())
        os.close(writer)

    def block(self) -> None:
        os.set_blocking(self.stream.fileno(), False)
        with suppress(BlockingIOError):
            while os.write(self.stream.fileno(), b"\n" * 4096):
                pass
        os.set_blocking(self.stream.fileno(), True)

    def unblock(self) -> None:
        self.read()

    def dispose(self) -> None:
        os.close(self.reader)
        self.stream.close()


class MemoryKit:
    features: ClassVar = {"arrives", "refuses", "goes down", "goes down midway", "is checked", "blocks"}

    def __init__(self, surroundings: Surroundings) -> None:
        self.memory = MemorySink()
        self.memory.fail(lambda event: "refuse" in event.headers, Retry("no"), times=None)
        self.sink: Sink = self.memory
        self.go_down, self.come_back = self.memory.go_down, self.memory.come_back
        self.block, self.unblock = self.memory.block, self.memory.unblock

    def refused(self, name: str, key: str | None = None) -> Claim:
        return claim(name, key, refuse=True)

    def arrived(self) -> list[str]:
        return [event.topic for event in self.memory.events]

    def go_down_at(self, name: str) -> None:
        self.memory.go_down_at(lambda event: event.topic == name)

    def dispose(self) -> None:
        pass


class CallableKit:
    features: ClassVar = {"arrives", "refuses", "goes down", "goes down midway", "blocks"}

    def __init__(self, surroundings: Surroundings) -> None:
        self.sink: Sink = CallableSink(self.handle, concurrency=4)
        self.found: list[str] = []
        self.down_at: str | None = None
        self.gate = asyncio.Event()
        self.unblock, self.block = self.gate.set, self.gate.clear
        self.unblock()

    async def handle(self, event: Event) -> None:
        await self.gate.wait()
        if self.down_at in ("all", event.topic):
            raise SinkUnavailable("the service is down")
        if "refuse" in event.headers:
            raise ValueError("no")
        self.found.append(event.topic)

    def refused(self, name: str, key: str | None = None) -> Claim:
        return claim(name, key, refuse=True)

    def arrived(self) -> list[str]:
        return self.found

    def go_down(self) -> None:
        self.down_at = "all"

    def go_down_at(self, name: str) -> None:
        self.down_at = name

    def come_back(self) -> None:
        self.down_at = None

    def dispose(self) -> None:
        pass


KITS: dict[str, Any] = {
    "null": NullKit,
    "file": FileKit,
    "stdout": StdoutKit,
    "memory": MemoryKit,
    "callable": CallableKit,
    "rabbitmq": RabbitmqKit,
    "kafka": KafkaKit,
    "kafka transactions": KafkaTransactionsKit,
    "nats": NatsKit,
    "redis": RedisKit,
    "mqtt": MqttKit,
    "http": HttpKit,
    "http-batch": HttpBatchKit,
    **SQL_KITS,
    "redis-cluster": RedisClusterKit,
}


def sinks_that(*features: str, unless: str = "") -> pytest.MarkDecorator:
    """Run a test on the sinks with these features, but not on those with the feature `unless`."""
    needs = frozenset(features)
    chosen = [
        pytest.param((name, needs), id=name)
        for name, kit in KITS.items()
        if kit.features >= needs and unless not in kit.features
    ]
    return pytest.mark.parametrize("kit", chosen, indirect=True)


every_sink = sinks_that()


@pytest.fixture(name="kit")
async def sink_kit(request, tmp_path):
    name, needs = request.param
    # Asked for only when a test breaks a server: that brings one up.
    private = request.getfixturevalue("private_broker") if "goes down" in needs else None
    made = KITS[name](Surroundings(tmp_path, needs, private))
    yield made
    await made.sink.close()
    made.dispose()
