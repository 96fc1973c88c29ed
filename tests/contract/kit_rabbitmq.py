"""RabbitMQ, read with pika: a classic queue that takes the events of one type."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import pika
from pika.adapters.blocking_connection import BlockingChannel

from pillarbox.event import Claim
from pillarbox.sinks import Sink, open_sink
from tests.brokers import BrokerName
from tests.contract.broker_kits import BrokerKit, Received, named_claim

RABBITMQCTL = "/usr/lib/rabbitmq/bin/rabbitmqctl"


class RabbitmqKit(BrokerKit):
    broker: ClassVar[BrokerName] = "rabbitmq"
    ce_prefix: ClassVar[str] = "cloudEvents:"

    def prepare(self) -> None:
        self.queue = f"{self.place}.order.placed"
        with connect(self.url) as connection:
            connection.channel().queue_declare(self.queue, durable=True)
        if self.server is not None:
            # RabbitMQ 3.10 answers before a queue is on disk: one made within the last second is gone after a kill.
            self.server.run(RABBITMQCTL, "eval", "mnesia:sync_log().")

    def make_sink(self, **options: Any) -> Sink:
        return open_sink(self.url, **{"routing_key": f"{self.place}.{{type}}", "name": "rabbitmq", **options})

    def make_stranger(self) -> Sink:
        return open_sink(self.url.replace(":pillarbox@", ":not-the-password@"))

    def refused_by_server(self, name: str, key: str | None = None) -> Claim:
        return named_claim(name, key, type="taken")

    def received(self) -> list[Received]:
        with connect(self.url) as connection:
            return [
                Received(
                    body,
                    properties.headers or {},
                    properties.content_type,
                    (properties.headers or {}).get("event-key"),
                )
                for properties, body in read_all(connection.channel(), self.queue)
            ]

    def dispose(self) -> None:
        with connect(self.url) as connection:
            connection.channel().queue_delete(self.queue)


def connect(url: str) -> pika.BlockingConnection:
    # Here a path of "/" is the virtual host "".
    return pika.BlockingConnection(pika.URLParameters(url.removesuffix("/") + "/%2F"))


def read_all(channel: BlockingChannel, queue: str) -> list[tuple[pika.BasicProperties, bytes]]:
    """Read everything that a queue has, and leave it there: what is taken out may be back after a kill."""
    found: list[tuple[pika.BasicProperties, bytes]] = []
    count = channel.queue_declare(queue, passive=True).method.message_count
    if not count:
        return found
    last = 0
    for method, properties, body in channel.consume(queue):
        found.append((properties, body))
        last = method.delivery_tag
        if len(found) == count:
            break
    channel.cancel()
    channel.basic_nack(last, multiple=True, requeue=True)
    # The messages go back without an answer.
    deadline = time.monotonic() + 30
    while channel.queue_declare(queue, passive=True).method.message_count < count:
        assert time.monotonic() < deadline, f"{queue} did not take its messages back"
    return found
