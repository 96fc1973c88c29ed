"""RabbitMQ for the Source suite: an exchange with a queue for each group, filled and looked at with pika."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Literal
from uuid import uuid4

import pika

from pillarbox.sinks import Sink, open_sink
from pillarbox.sources import Source
from pillarbox.sources.url import open_source
from tests.brokers import BrokerName, PrivateBroker
from tests.contract.kit_rabbitmq import RABBITMQCTL, connect
from tests.contract.sources import FEATURES, GROUP, OTHER, SourceKit
from tests.servers import ENV_FILE
from tools.servers.rabbitmq import RabbitmqServer

_COUNT = """
{ok, Queue} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"%s">>)),
case amqqueue:get_type(Queue) of
    rabbit_quorum_queue ->
        {ok, {_, Count}, _} = ra:leader_query(amqqueue:get_pid(Queue), fun rabbit_fifo:query_messages_total/1),
        Count;
    _ ->
        [{messages, Count}] = rabbit_amqqueue:info(Queue, [messages]),
        Count
end.
"""
_CLOSE = """
{ok, Queue} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"%s">>)),
[begin
    [{connection, Connection}] = rabbit_channel:info(element(1, Consumer), [connection]),
    rabbit_networking:close_connection(Connection, "taken away")
end || Consumer <- rabbit_amqqueue:consumers(Queue)].
"""


class RabbitmqSourceKit(SourceKit):
    broker: ClassVar[BrokerName] = "rabbitmq"
    features: ClassVar[frozenset[str]] = FEATURES - {"has keys", "counts attempts", "carries any header"}
    queue_type: ClassVar[Literal["classic", "quorum"]] = "classic"

    def prepare(self) -> None:
        self.options = {"queue": f"{self.place}.{{group}}"}
        with connect(self.url) as connection:
            channel = connection.channel()
            channel.exchange_declare(self.place, "topic", durable=True)
            for group in (GROUP, OTHER):
                queue = f"{self.place}.{group}"
                channel.queue_declare(queue, durable=True, arguments={"x-queue-type": self.queue_type})
                channel.queue_bind(queue, self.place, "#")
        if self.server is not None:
            # RabbitMQ 3.10 answers before a queue is on disk: one made within the last second is gone after a kill.
            self.run("eval", "mnesia:sync_log().")

    def send(self, *bodies: bytes, key: str | None = None, headers: dict[str, str | bytes] | None = None) -> None:
        lines = dict(headers or {})
        content_type = lines.pop("content-type", None)
        if key is not None:
            lines["event-key"] = key
        with connect(self.url) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            for body in bodies:
                properties = pika.BasicProperties(
                    headers=lines, content_type=content_type, delivery_mode=2, message_id=uuid4().hex
                )
                channel.basic_publish(self.place, f"{self.place}.order", body, properties, mandatory=True)

    def make_sink(self, **options: Any) -> Sink:
        sink: Sink = self.keep(
            open_sink(self.url, exchange=self.place, routing_key=f"{self.place}.{{type}}", **options)
        )
        return sink

    def remaining(self, group: str = GROUP) -> int:
        # No client can ask for what is unacknowledged, and of a quorum queue the server's lists are seconds old.
        return int(self.run("eval", _COUNT % f"{self.place}.{group}"))

    def run(self, *command: str) -> str:
        """Run the server's own tool."""
        server = self.server or PrivateBroker(RabbitmqServer(ENV_FILE.parent))
        return server.run(RABBITMQCTL, "--quiet", *command)

    def make_stranger(self) -> Source:
        url = self.url.replace(":pillarbox@", ":not-the-password@")
        source: Source = self.keep(open_source(url, group=GROUP, dead=self.letters))
        return source

    def make_missing(self) -> Source:
        source: Source = self.make_source(queue=f"{self.place}.nowhere", name="nowhere")
        return source

    async def take_away(self, source: Any) -> None:
        """Close the connections of those who consume the queue."""
        await asyncio.to_thread(self.run, "eval", _CLOSE % f"{self.place}.{GROUP}")
        async with asyncio.timeout(10):
            while len(source.pending):
                await asyncio.sleep(0.02)

    def dispose(self) -> None:
        # A server of the test's own may be down, and goes with everything it has.
        if self.server is not None:
            return
        with connect(self.url) as connection:
            channel = connection.channel()
            for group in (GROUP, OTHER):
                channel.queue_delete(f"{self.place}.{group}")
            channel.exchange_delete(self.place)


class RabbitmqQuorumSourceKit(RabbitmqSourceKit):
    queue_type = "quorum"
