"""RabbitMQ: a consumer of one queue as a source.

A channel that ends takes everything unacknowledged with it: the server puts it back into the queue where it was and
gives it to the next consumer. So what is at hand is lost at that moment, and comes again after connecting anew.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, Literal

from pillarbox.errors import ConfigError, MissingExtra, StoreUnavailable
from pillarbox.sinks.options import read_options
from pillarbox.sinks.tls import TLS_OPTIONS
from pillarbox.sinks.url import SinkUrl
from pillarbox.sources import DeadLetters
from pillarbox.sources.broker import PREFETCH, BrokerSource
from pillarbox.sources.pending import Entry
from pillarbox.values import Read, one_of, read_number, read_pause, read_switch, read_text

try:
    from aiormq.abc import DeliveredMessage

    from pillarbox.sinks.rabbitmq import make_connect
    from pillarbox.sinks.rabbitmq_channels import Connect, ConnectionLost
    from pillarbox.sources.rabbitmq_connection import Consumer, Missing, Queue
    from pillarbox.sources.rabbitmq_reading import MessageReader, count_deliveries, is_of_a_stream
except ImportError as error:
    raise MissingExtra("RabbitMQ", "rabbitmq") from error

log = logging.getLogger("pillarbox.source")

TIMEOUT: Final = timedelta(seconds=5)
_MOST_PREFETCH: Final = 65_535
_OPTIONS: Final[dict[str, Read]] = {
    "queue": read_text,
    "prefetch": read_number,
    "exclusive": read_switch,
    "create": read_switch,
    "queue_type": one_of("quorum", "classic"),
    "single_active": read_switch,
    "id_from": read_text,
    "key_from": one_of("header", "routing_key"),
    "timeout": read_pause,
}


class RabbitmqSource(BrokerSource):
    """Receives the messages of a queue. Url: `amqp://user:password@host:port/vhost`, `amqps://` with TLS.

    A group is a queue: several processes that consume it share its messages, another group has a queue of its own. The
    queue must exist, unless `create` is on: then a durable one is made, of `queue_type`; binding it to an exchange is
    left to whoever sends.

    Order: messages of one routing key and event key are handled in the order of the queue, whatever fails, is retried,
    restarted or killed, as long as one process at a time consumes the queue. Where several run, let all but one wait:
    with a queue whose `x-single-active-consumer` is set (`single_active` makes it so, with `create`), or with
    `exclusive`, which refuses the others until the first is gone; `keeps_order` is true with one of these options.
    Otherwise RabbitMQ deals the messages out to all of them one by one, and there is no order across processes.

    Ids: a message is known by our header `event-id`, a CloudEvent's id or the property `message_id`. RabbitMQ has no
    lasting name of its own for a message. One without an id is dead at once, with that reason: an id made of its
    content would make two equal messages one, and the second would be dropped without a word. Where equal content does
    mean the same message, say `id_from="body"`; where another header has the id, `id_from="header:NAME"`.

    Long delays: RabbitMQ closes a channel on which a message is unacknowledged for longer than `consumer_timeout` (30
    minutes unless the server says otherwise). What waits for its retry is unacknowledged. A longer delay ends then:
    everything at hand comes again, and is tried with its attempts as they were.

    An attempt is counted for every delivery that RabbitMQ knows of, also of messages that were given back untried:
    quorum queues count them, classic ones only know whether there was one. From RabbitMQ 4 on a quorum queue drops a
    message after 20 returns unless it says otherwise: `create` makes it without a limit there, and for a queue that
    exists a warning is logged.
    """

    def __init__(
        self,
        connect: Connect,
        *,
        queue: str,
        dead: DeadLetters,
        name: str = "amqp:",
        prefetch: int = PREFETCH,
        exclusive: bool = False,
        create: bool = False,
        queue_type: Literal["quorum", "classic"] | None = None,
        single_active: bool | None = None,
        id_from: str | None = None,
        key_from: Literal["header", "routing_key"] = "header",
        timeout: timedelta = TIMEOUT,
    ) -> None:
        super().__init__(name, dead=dead, prefetch=prefetch)
        if prefetch > _MOST_PREFETCH:
            raise ConfigError(f"Source {name!r} prefetch: expected at most {_MOST_PREFETCH}, got {prefetch}")
        if id_from is not None and id_from != "body" and not id_from.startswith("header:"):
            raise ConfigError(f"Source {name!r} id_from: expected body or header:NAME, got {id_from!r}")
        if key_from not in ("header", "routing_key"):
            raise ConfigError(f"Source {name!r} key_from: expected header or routing_key, got {key_from!r}")
        if not create and (queue_type is not None or single_active is not None):
            option = "single_active" if queue_type is None else "queue_type"
            raise ConfigError(f"Source {name!r} {option}: it is for a queue to be made; give create=true as well")
        arguments: dict[str, Any] = {"x-queue-type": queue_type or "quorum"}
        if single_active:
            arguments["x-single-active-consumer"] = True
        self._queue = Queue(queue, prefetch, exclusive, arguments if create else None)
        self.keeps_order = exclusive or bool(single_active)
        self._connect_to = connect
        self._timeout = timeout.total_seconds()
        self._reader = MessageReader(queue, id_from=id_from, has_routing_keys=key_from == "routing_key")
        self._consumer: Consumer | None = None
        self._unacknowledged: dict[int, Entry] = {}
        self._tries: dict[str, int] = {}

    @classmethod
    def from_url(cls, url: SinkUrl, *, group: str, dead: DeadLetters) -> RabbitmqSource:
        """The source of a url; the queue's name is the group's, or `queue`, in which `{group}` stands for that."""
        is_secure = url.scheme == "amqps"
        readers = {**_OPTIONS, "heartbeat": read_pause, **(TLS_OPTIONS if is_secure else {})}
        options = read_options(url, readers)
        connect = make_connect(url, options, is_secure=is_secure)
        given = {name: options[name] for name in _OPTIONS if name in options}
        given["queue"] = given.get("queue", "{group}").replace("{group}", group)
        return cls(connect, **given, name=url.name, dead=dead)

    async def _connect(self) -> None:
        consumer = Consumer(self._connect_to, timeout=self._timeout, on_loss=self._lose_all)
        try:
            await consumer.join(self._queue)
        except Missing as error:
            raise self._refusal(f"Source {self.name}: {error}") from error
        except ConnectionLost as error:
            raise self._unavailable(error) from error
        if consumer.may_drop and not self._was_connected:
            log.warning(
                "Source %s: if queue %r is a quorum queue, this server drops a message that was returned to it more "
                "than 20 times, also by consumers that stop. Let a policy set a delivery-limit that is never reached "
                "and a dead-letter exchange, or make the queue with x-delivery-limit -1.",
                *(self.name, self._queue.name),
            )
        self._consumer = consumer

    async def _disconnect(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await consumer.leave()
        self._lose_all()

    async def _receive(self, most: int, timeout: float) -> Sequence[Entry]:
        assert self._consumer is not None
        try:
            messages = await self._consumer.take(most, timeout)
        except ConnectionLost as error:
            raise self._unavailable(error) from error
        return [self._take(message) for message in messages]

    def _take(self, message: DeliveredMessage) -> Entry:
        if is_of_a_stream(message):
            raise ConfigError(
                f"Source {self.name}: queue {self._queue.name!r} is a stream, which never notes what is acknowledged; "
                "expected a quorum or classic queue"
            )
        tag = message.delivery_tag
        assert tag is not None
        read = self._reader.read(message)
        # What this process knows of its own tries is exact; RabbitMQ counts deliveries at most.
        tries = self._tries.pop(read.id, count_deliveries(message))
        entry = Entry(read, tag, attempts=tries, place=tag)
        self._unacknowledged[tag] = entry
        return entry

    async def _acknowledge(self, entries: Sequence[Entry]) -> None:
        if self._consumer is None:
            raise StoreUnavailable(f"Source {self.name}: not connected")
        try:
            await self._consumer.acknowledge(self._group({entry.token for entry in entries}))
        except ConnectionLost as error:
            raise self._unavailable(error) from error
        for entry in entries:
            self._unacknowledged.pop(entry.token, None)

    def _group(self, done: set[int]) -> list[tuple[int, bool]]:
        """The tags to acknowledge, those at once before which nothing else is unacknowledged."""
        first = 0
        for tag in self._unacknowledged:
            if tag not in done:
                break
            first = tag
        together = [(first, True)] if first else []
        return together + [(tag, False) for tag in sorted(done) if tag > first]

    def _lose_all(self) -> None:
        """Everything went back to the queue; what is under way here changes nothing any more."""
        if self._unacknowledged:
            self._tries = {entry.read.id: entry.attempts for entry in self._unacknowledged.values()}
            self._unacknowledged.clear()
        # Wakes a receiver that waits for room, so that it hears of the loss as well.
        self.lose(self.pending)

    def _unavailable(self, error: ConnectionLost) -> StoreUnavailable:
        return StoreUnavailable(f"Source {self.name}: {error}")
