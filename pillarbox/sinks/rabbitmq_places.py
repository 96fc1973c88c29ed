"""Exchanges and queues of RabbitMQ: made when asked for, else looked up before they are used for the first time.

A message for an exchange that does not exist would close the channel and lose the confirms of the others with it.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Final

import aiormq

from pillarbox.errors import ConfigError
from pillarbox.event import Event
from pillarbox.retry import describe_error
from pillarbox.sinks.rabbitmq_channels import Channels, ConnectionLost, Place
from pillarbox.sinks.refused import Refused
from pillarbox.sinks.templates import Template
from pillarbox.values import Read, one_of, read_number, read_switch, read_text

PLACE_OPTIONS: Final[dict[str, Read]] = {
    "create": read_switch,
    "exchange_type": one_of("topic", "direct", "fanout"),
    "queue": read_text,
    "binding_key": read_text,
    "queue_type": one_of("quorum", "classic", "stream"),
    "max_length": read_number,
}


class Places:
    """Knows which places there are, by asking the server once a connection.

    What is wrong with an exchange that every message goes to is an outage, and blames no message; with one that the
    event names, its messages are refused.
    """

    def __init__(
        self,
        channels: Channels,
        *,
        sink: str,
        exchange: str | None,
        create: bool,
        exchange_type: str | None,
        queue: str | None,
        binding_key: str | None,
        queue_type: str | None,
        max_length: int | None,
    ) -> None:
        given = {
            "exchange_type": exchange_type,
            "queue": queue,
            "binding_key": binding_key,
            "queue_type": queue_type,
            "max_length": max_length,
        }
        _check(sink, exchange, create, given)
        self._channels = channels
        self._exchange = exchange
        self._creates = create
        self._exchange_type = exchange_type or "topic"
        self._queue = None if queue is None else Template(queue, what=f"Sink {sink!r} queue")
        self._binding_key = None if binding_key is None else Template(binding_key, what=f"Sink {sink!r} binding_key")
        self._arguments: dict[str, Any] = {"x-queue-type": queue_type or "quorum"}
        if max_length is not None:
            # A full queue refuses what comes, where it would otherwise drop its oldest messages.
            self._arguments |= {"x-max-length": max_length, "x-overflow": "reject-publish"}
        self.is_exchange_fixed = exchange is not None and "{" not in exchange
        self.are_watched = create or exchange is not None

    def find(self, event: Event, exchange: str, routing_key: str) -> Place:
        """Return the place of an event's message; raises `Refused` when the event lacks a field."""
        if not self._creates:
            return Place(exchange)
        if not exchange:
            return Place(exchange, routing_key)
        if self._queue is None:
            return Place(exchange)
        binding = routing_key if self._binding_key is None else self._binding_key.fill(event)
        return Place(exchange, self._queue.fill(event), binding)

    async def ensure(self, place: Place, refused: dict[Place, Refused]) -> None:
        """Return when the place is there; raises `Refused`, and remembers it in `refused`, when it cannot be used."""
        if place in self._channels.places:
            return
        if place in refused:
            raise refused[place]
        try:
            await self._make(place)
        except Refused as error:
            refused[place] = error
            raise
        self._channels.places.add(place)

    def forget(self, place: Place) -> bool:
        """Ask again for the place next time; returns whether it has a queue that would be made then."""
        self._channels.places.discard(place)
        return place.queue is not None

    async def check(self) -> None:
        """Raise `ConnectionLost` when the one exchange of all messages is not there."""
        if self.is_exchange_fixed and not self._creates and self._exchange is not None:
            await self._make(Place(self._exchange))

    async def _make(self, place: Place) -> None:
        # On a channel of its own, which an error closes.
        async with self._channels.publisher() as publisher:
            channel = publisher.channel
            if place.exchange:
                declared = channel.exchange_declare(
                    place.exchange, exchange_type=self._exchange_type, passive=not self._creates, durable=True
                )
                await self._ask(declared, place.exchange, is_fixed=self.is_exchange_fixed)
            if place.queue is not None:
                made = channel.queue_declare(place.queue, durable=True, arguments=self._arguments)
                await self._ask(made, place.queue, is_fixed=False)
            if place.queue is not None and place.exchange:
                bound = channel.queue_bind(place.queue, place.exchange, place.binding or "")
                await self._ask(bound, place.queue, is_fixed=False)

    async def _ask(self, rpc: Awaitable[Any], name: str, *, is_fixed: bool) -> None:
        try:
            await self._channels.call(rpc)
        except aiormq.AMQPChannelError as error:
            if is_fixed:
                raise ConnectionLost(describe_error(error)) from error
            raise Refused(describe_error(error)) from error
        except ValueError as error:
            raise Refused(f"{name!r} is no name that RabbitMQ takes: {error}") from error


def _check(sink: str, exchange: str | None, create: bool, given: dict[str, Any]) -> None:
    chosen = [name for name, value in given.items() if value is not None]
    if chosen and not create:
        raise ConfigError(f"Sink {sink!r} {chosen[0]}: it is for what is created; give create = true as well")
    if exchange is None:
        for name in ("exchange_type", "queue", "binding_key"):
            if name in chosen:
                raise ConfigError(
                    f"Sink {sink!r} {name}: give exchange as well; without one the queue is named by routing_key"
                )
    elif "queue" not in chosen:
        for name in ("binding_key", "queue_type", "max_length"):
            if name in chosen:
                raise ConfigError(f"Sink {sink!r} {name}: give queue as well; only the exchange is created without it")
    if given["queue_type"] == "stream" and "max_length" in chosen:
        raise ConfigError(f"Sink {sink!r} max_length: a stream never refuses a message; use quorum or classic")
