"""RabbitMQ: one window of messages a batch on one channel, which keeps their order, and a publisher confirm for each.

An error of one message closes its channel, and the server forgets which of the messages before it to confirm. They
are sent again on another channel without the one to blame, so they may arrive twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, Literal
from urllib.parse import quote

try:
    import aiormq
except ImportError as error:
    from pillarbox.errors import MissingExtra

    raise MissingExtra("RabbitMQ", "rabbitmq") from error

from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.event import DELIVERED, RELEASED, Claim, Dead, Event, Outcome, Retry, reload_event
from pillarbox.retry import describe_error
from pillarbox.sinks import Sink
from pillarbox.sinks.forms import FORM_OPTIONS, FormName, form_options, make_form
from pillarbox.sinks.message import DEFAULT_SOURCE, Message
from pillarbox.sinks.options import read_login, read_options, read_path, read_servers
from pillarbox.sinks.order import release_successors
from pillarbox.sinks.rabbitmq_channels import (
    Ack,
    Blocked,
    Channels,
    Connect,
    ConnectionLost,
    Framed,
    Place,
    Publisher,
)
from pillarbox.sinks.rabbitmq_places import PLACE_OPTIONS, Places
from pillarbox.sinks.refused import Refused
from pillarbox.sinks.templates import Template
from pillarbox.sinks.tls import TLS_OPTIONS, make_tls_context
from pillarbox.sinks.url import SinkUrl
from pillarbox.values import Read, read_pause, read_switch, read_text

CE_PREFIX: Final = "cloudEvents:"
# Below the time for which a relay may hold its rows.
TIMEOUT: Final = timedelta(seconds=4)
HEARTBEAT: Final = timedelta(seconds=20)
_TOPIC_REFUSED: Final = "access to topic "
_OPTIONS: Final[dict[str, Read]] = {
    "exchange": read_text,
    "routing_key": read_text,
    "mandatory": read_switch,
    "persistent": read_switch,
    **PLACE_OPTIONS,
    "timeout": read_pause,
    "heartbeat": read_pause,
    **FORM_OPTIONS,
}


class RabbitmqSink(Sink):
    """Publishes each event to an exchange. Url: `amqp://user:password@host:port/vhost`, `amqps://` with TLS.

    `exchange` and `routing_key` are templates; without an exchange the routing key is the queue's name. A message that
    no queue takes is dead, unless `mandatory` is off: then it is dropped by the server. With `create` the exchange and
    the queues are made, as `exchange_type`, `queue`, `binding_key`, `queue_type` and `max_length` say.

    In Python, `connect` makes a connection of aiormq whenever the sink needs one; the sink closes it.
    """

    is_quick: bool = True

    def __init__(
        self,
        connect: Connect,
        *,
        name: str = "amqp:",
        exchange: str | None = None,
        routing_key: str = "{topic}",
        mandatory: bool = True,
        persistent: bool = True,
        create: bool = False,
        exchange_type: Literal["topic", "direct", "fanout"] | None = None,
        queue: str | None = None,
        binding_key: str | None = None,
        queue_type: Literal["quorum", "classic", "stream"] | None = None,
        max_length: int | None = None,
        timeout: timedelta = TIMEOUT,
        message: FormName | None = None,
        cloudevents: Literal["binary", "structured"] | None = None,
        cloudevents_source: str = DEFAULT_SOURCE,
    ) -> None:
        self.name = name
        self._exchange = None if exchange is None else Template(exchange, what=f"Sink {name!r} exchange")
        self._routing_key = Template(routing_key, what=f"Sink {name!r} routing_key")
        self._timeout = timeout.total_seconds()
        self._channels = Channels(connect, timeout=self._timeout, is_mandatory=mandatory, is_persistent=persistent)
        self._places = Places(
            self._channels,
            sink=name,
            exchange=exchange,
            create=create,
            exchange_type=exchange_type,
            queue=queue,
            binding_key=binding_key,
            queue_type=queue_type,
            max_length=max_length,
        )
        self._has_own_properties = message != "faststream"
        self._render = make_form(
            message,
            broker="rabbitmq",
            sink=name,
            cloudevents=cloudevents,
            cloudevents_source=cloudevents_source,
            ce_prefix=CE_PREFIX,
            has_content_type_header=False,
        )

    @classmethod
    def from_url(cls, url: SinkUrl) -> RabbitmqSink:
        is_secure = url.scheme == "amqps"
        options = read_options(url, {**_OPTIONS, **(TLS_OPTIONS if is_secure else {})})
        connect = make_connect(url, options, is_secure=is_secure)
        others = {"heartbeat", *TLS_OPTIONS, *FORM_OPTIONS}
        chosen = {name: value for name, value in options.items() if name not in others}
        return cls(connect, name=url.name, **chosen, **form_options(options))

    async def open(self) -> None:
        await self.check()

    async def check(self) -> None:
        try:
            async with self._channels.publisher() as publisher:
                await self._channels.call(publisher.channel.confirm_delivery())
            await self._places.check()
        except (ConnectionLost, Blocked) as error:
            raise self._unavailable(error) from error

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        outcomes: list[Outcome | None] = [None] * len(claims)
        try:
            await self._deliver(claims, outcomes)
        except (ConnectionLost, Blocked) as error:
            raise self._unavailable(error, outcomes=_close(claims, outcomes)) from error
        return _close(claims, outcomes)

    async def close(self) -> None:
        await self._channels.close()

    async def _deliver(self, claims: Sequence[Claim], outcomes: list[Outcome | None]) -> None:
        waiting = list(range(len(claims)))
        size = len(claims)
        last_suspect = -1
        while waiting:
            is_searching = waiting[0] <= last_suspect
            window = waiting[: 1 if is_searching else size]
            async with self._channels.publisher() as publisher:
                sent, messages = await self._prepare(publisher, claims, window, outcomes)
                error = await self._publish(publisher, claims, sent, messages, outcomes)
            if error is not None:
                unknown = [position for position in sent if outcomes[position] is None]
                if self._blame(error, claims, unknown, outcomes):
                    last_suspect = -1
                else:
                    # One at a time until it is found, then windows that grow again: if they were whole at once, a
                    # batch with many to blame would be sent once for each of them.
                    last_suspect, size = unknown[-1], 2
            elif not is_searching:
                size *= 2
            waiting = _find_waiting(claims, waiting, outcomes)

    async def _prepare(
        self, publisher: Publisher, claims: Sequence[Claim], window: Sequence[int], outcomes: list[Outcome | None]
    ) -> tuple[list[int], list[Framed]]:
        """Make the messages of a window, and an outcome for each that cannot be sent."""
        sent: list[int] = []
        messages: list[Framed] = []
        stopped: set[str] = set()
        seen: set[object] = set()
        refused: dict[Place, Refused] = {}
        encode, render = publisher.encoder.encode, self._render
        for position in window:
            event = claims[position].event
            if event.key in stopped:
                continue
            if event.id in seen:
                # A returned message is known by its id alone: the same id again is for the next window.
                break
            try:
                exchange, routing_key = self._address(event)
                if self._places.are_watched:
                    await self._places.ensure(self._places.find(event, exchange, routing_key), refused)
                message = render(event)
                described = event if self._has_own_properties else _describe_plainly(event, message)
                frames = encode(described, message, exchange=exchange, routing_key=routing_key)
            except Refused as error:
                outcomes[position] = Dead(str(error))
                if event.key is not None:
                    stopped.add(event.key)
                continue
            seen.add(event.id)
            sent.append(position)
            messages.append(Framed(str(event.id), frames))
        return sent, messages

    def _address(self, event: Event) -> tuple[str, str]:
        return "" if self._exchange is None else self._exchange.fill(event), self._routing_key.fill(event)

    async def _publish(
        self,
        publisher: Publisher,
        claims: Sequence[Claim],
        sent: Sequence[int],
        messages: Sequence[Framed],
        outcomes: list[Outcome | None],
    ) -> aiormq.AMQPChannelError | None:
        """Send a window and fill in the outcomes; returns the error that closed the channel before all had one."""
        acks: list[Ack] = []
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                await publisher.publish(messages, acks)
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            for position, ack in zip(sent, acks, strict=False):
                if ack.done():
                    error = ack.exception()
                    outcomes[position] = DELIVERED if error is None else self._judge(claims[position].event, error)
        if limit.expired():
            if await publisher.is_blocked():
                raise Blocked("the server is short of memory or disk and takes no messages")
            self._channels.drop(publisher.connection)
            raise ConnectionLost(f"no confirm within {self._timeout:g} s")
        closed = publisher.error
        if closed is None or isinstance(closed, aiormq.AMQPChannelError):
            return closed
        raise ConnectionLost(describe_error(closed))

    def _judge(self, event: Event, error: BaseException) -> Outcome:
        if not isinstance(error, aiormq.PublishError):
            return Retry("The server could not take the message: its queue is full or failed", cause=error)
        exchange, routing_key = self._address(event)
        where = f"exchange {exchange!r}" if exchange else "the default exchange"
        text = f"No queue is bound to {where} for routing key {routing_key!r}"
        if self._places.forget(self._places.find(event, exchange, routing_key)):
            return Retry(f"{text} any more", cause=error)
        return Dead(text)

    def _blame(
        self,
        error: aiormq.AMQPChannelError,
        claims: Sequence[Claim],
        unknown: Sequence[int],
        outcomes: list[Outcome | None],
    ) -> bool:
        """Give an outcome to the messages whose error closed the channel; returns False when they are not known.

        Raises `ConnectionLost` when the error is about the one exchange of all messages.
        """
        text = describe_error(error)
        is_missing = isinstance(error, aiormq.ChannelNotFoundEntity)
        if is_missing:
            self._channels.places.clear()
        is_forbidden = isinstance(error, aiormq.ChannelAccessRefused) and _TOPIC_REFUSED not in text
        has_one_exchange = self._exchange is None or self._places.is_exchange_fixed
        if has_one_exchange and (is_missing or is_forbidden):
            raise ConnectionLost(text)
        guilty = [position for position in unknown if self._is_named(str(error), claims[position].event)]
        if len(unknown) == 1:
            guilty = list(unknown)
        for position in guilty:
            outcomes[position] = Dead(text)
        return bool(guilty) or not unknown

    def _is_named(self, text: str, event: Event) -> bool:
        exchange, routing_key = self._address(event)
        if _TOPIC_REFUSED in text and f"topic '{routing_key}'" not in text:
            return False
        return f"exchange '{exchange}'" in text

    def _unavailable(self, error: Exception, *, outcomes: list[Outcome] | None = None) -> SinkUnavailable:
        return SinkUnavailable(f"Sink {self.name}: {error}", outcomes=outcomes)


def _describe_plainly(event: Event, message: Message) -> Event:
    """The event for a message whose properties say its correlation alone."""
    return reload_event(event, type="", source=None, correlation_id=message.headers["correlation_id"])


def _find_waiting(claims: Sequence[Claim], waiting: list[int], outcomes: Sequence[Outcome | None]) -> list[int]:
    """Return those without an outcome whose key is not stopped by one that failed."""
    left: list[int] = []
    stopped: set[str] = set()
    for position in waiting:
        key, outcome = claims[position].event.key, outcomes[position]
        if outcome is None and key not in stopped:
            left.append(position)
        elif outcome is not None and outcome is not DELIVERED and key is not None:
            stopped.add(key)
    return left


def _close(claims: Sequence[Claim], outcomes: Sequence[Outcome | None]) -> list[Outcome]:
    closed: list[Outcome] = [RELEASED if outcome is None else outcome for outcome in outcomes]
    return closed if all(outcome is DELIVERED for outcome in closed) else release_successors(claims, closed)


def make_connect(url: SinkUrl, options: dict[str, Any], *, is_secure: bool) -> Connect:
    """Return a function that connects to the first server of the url that answers."""
    heartbeat: timedelta = options.get("heartbeat", HEARTBEAT)
    seconds = int(heartbeat.total_seconds())
    if seconds != heartbeat.total_seconds() or seconds >= 65_535:
        raise ConfigError(f"Sink {url.name!r} heartbeat: expected whole seconds below 65535, got {heartbeat}")
    user, password = read_login(url)
    login = "" if user is None else f"{quote(user, safe='')}:{quote(password or '', safe='')}@"
    vhost = read_path(url) or "/"
    servers = read_servers(url, port=5671 if is_secure else 5672)
    context = make_tls_context(options, sink=url.name) if is_secure else None

    async def connect() -> aiormq.abc.AbstractConnection:
        failure: Exception | None = None
        for host, port in servers:
            shown = f"[{host}]" if ":" in host else host
            place = f"{shown}:{port}/{quote(vhost, safe='')}"
            try:
                return await aiormq.connect(
                    f"{url.scheme}://{login}{place}?name=pillarbox&heartbeat={seconds}", context=context
                )
            except aiormq.InvalidFrameError:
                # The library does not pass on what the server says here.
                failure = ConnectionLost(
                    f"the server refused virtual host {vhost!r}: it does not exist, or the user may not use it"
                )
            except (aiormq.AMQPError, OSError) as error:
                failure = error
        raise failure or ConnectionLost("no server is named")

    return connect
