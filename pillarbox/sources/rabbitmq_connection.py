"""A connection to RabbitMQ with one channel that consumes a queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import aiormq
from aiormq.abc import AbstractConnection, ChannelFrame, DeliveredMessage
from pamqp import commands

from pillarbox.retry import describe_error
from pillarbox.sinks.rabbitmq_channels import Connect, ConnectionLost, await_answer
from pillarbox.sources.rabbitmq_damage import tolerant

_GOODBYE: Final = 3.0
# From this version on a quorum queue drops what was returned to it too often, unless it is made without that limit.
_LIMITED_SINCE: Final = 4
_LIMIT: Final = "x-delivery-limit"
# Only for those versions: an older one takes it for zero.
_UNLIMITED: Final = -1
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Queue:
    """The queue that is consumed, and how: `create` are the arguments of a queue that is made when there is none."""

    name: str
    prefetch: int
    is_exclusive: bool
    create: dict[str, Any] | None


class Missing(Exception):
    """The queue does not exist, or this user may not read it."""


class Consumer:
    """One channel's consumer. Once it is lost, everything unacknowledged has gone back to the queue; `on_loss` is told.

    Made by `join`; `messages` are those that have come and were not taken yet.
    """

    def __init__(self, connect: Connect, *, timeout: float, on_loss: Callable[[], None]) -> None:
        self._connect = connect
        self._timeout = timeout
        self._on_loss = on_loss
        self._connection: AbstractConnection | None = None
        self._channel: aiormq.Channel | None = None
        self._closing: asyncio.Future[None] | None = None
        self._messages: deque[DeliveredMessage] = deque()
        self._news = asyncio.Event()
        self._is_leaving = False
        self.lost: ConnectionLost | None = None
        self.may_drop = False
        """Whether the queue may have the server's own limit of deliveries, beyond which it drops messages."""

    async def join(self, queue: Queue) -> None:
        """Connect and begin to consume; raises `ConnectionLost` or `Missing`, and leaves nothing open then."""
        try:
            with tolerant():
                self._connection = await self._call(self._connect())
            arguments = await self._choose_arguments(self._connection, queue)
            opened = await self._call(self._connection.channel(publisher_confirms=False, frame_buffer_size=0))
            self._channel = channel = cast(aiormq.Channel, opened)
            self._closing = channel.closing
            self._closing.add_done_callback(self._on_closed)
            channel.on_consumer_cancel_callbacks.add(self._on_cancelled)
            if arguments is None:
                await self._call(channel.queue_declare(queue.name, passive=True))
            else:
                await self._call(channel.queue_declare(queue.name, durable=True, arguments=arguments))
            await self._call(channel.basic_qos(prefetch_count=queue.prefetch))
            await self._call(channel.basic_consume(queue.name, self._on_message, exclusive=queue.is_exclusive))
        except aiormq.AMQPChannelError as error:
            await self.leave()
            raise _judge(error, queue) from error
        except BaseException:
            await self.leave()
            raise

    async def _choose_arguments(self, connection: AbstractConnection, queue: Queue) -> dict[str, Any] | None:
        """The arguments of the queue that is made: without a limit of deliveries, unless it exists with one."""
        if _major_version(connection) < _LIMITED_SINCE:
            return queue.create
        if queue.create is None or queue.create["x-queue-type"] != "quorum":
            self.may_drop = queue.create is None
            return queue.create
        arguments = {**queue.create, _LIMIT: _UNLIMITED}
        # A refusal ends its channel.
        channel = await self._call(connection.channel(publisher_confirms=False))
        try:
            await self._call(channel.queue_declare(queue.name, durable=True, arguments=arguments))
        except aiormq.ChannelPreconditionFailed as error:
            if _LIMIT not in describe_error(error):
                raise
            self.may_drop = True
            return queue.create
        await self._call(channel.close())
        return arguments

    async def take(self, most: int, timeout: float) -> list[DeliveredMessage]:
        """Up to so many messages, none when none came in time; raises `ConnectionLost`."""
        if not self._messages and self.lost is None:
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._news.wait()
        if self.lost is not None:
            raise self.lost
        return [self._messages.popleft() for _ in range(min(most, len(self._messages)))]

    async def acknowledge(self, tags: Sequence[tuple[int, bool]]) -> None:
        """Acknowledge delivery tags, each alone or with all before it; returns when the server has read them.

        Raises `ConnectionLost`: then they may come again.
        """
        channel = self._channel
        if channel is None or self.lost is not None:
            raise self.lost or ConnectionLost("not connected")
        frames = [commands.Basic.Ack(delivery_tag=tag, multiple=with_earlier) for tag, with_earlier in tags]
        try:
            # One piece for all of them; then a question whose answer comes after they have been read.
            frame = ChannelFrame.marshall(channel_number=channel.number, frames=frames)
            await self._call(channel.write_queue.put(frame))
            await self._call(channel.flow(active=True))
        except (aiormq.AMQPChannelError, ConnectionLost) as error:
            lost = self._lose(error)
            raise lost from error

    async def leave(self) -> None:
        """Close channel and connection: the server puts everything unacknowledged back where it was."""
        self._is_leaving = True
        connection, self._connection = self._connection, None
        if self._closing is not None:
            self._closing.remove_done_callback(self._on_closed)
            self._closing.cancel()
        self._lose(ConnectionLost("closed"))
        if connection is None:
            return
        closing = asyncio.ensure_future(connection.close())
        # A server that does not answer would keep us for as long as several heartbeats.
        await asyncio.wait([closing], timeout=_GOODBYE)
        closing.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await closing

    async def _on_message(self, message: DeliveredMessage) -> None:
        self._messages.append(message)
        self._news.set()

    def _on_cancelled(self, frame: Any) -> None:
        self._lose(ConnectionLost("the server cancelled the consumer: its queue was deleted or moved"))

    def _on_closed(self, closing: asyncio.Future[None]) -> None:
        error = None if closing.cancelled() else closing.exception()
        self._lose(error or ConnectionLost("the channel was closed"))

    def _lose(self, error: BaseException) -> ConnectionLost:
        if self.lost is None:
            self.lost = error if isinstance(error, ConnectionLost) else ConnectionLost(describe_error(error))
            self._messages.clear()
            self._news.set()
            if not self._is_leaving:
                self._on_loss()
        return self.lost

    async def _call(self, rpc: Awaitable[T]) -> T:
        return await await_answer(rpc, self._timeout)


def _major_version(connection: AbstractConnection) -> int:
    number = str(connection.server_properties.get("version", "")).partition(".")[0]
    return int(number) if number.isdigit() else 0


def _judge(error: aiormq.AMQPChannelError, queue: Queue) -> Exception:
    text = describe_error(error)
    if isinstance(error, aiormq.ChannelNotFoundEntity):
        return Missing(f"queue {queue.name!r} does not exist; make it first, or give create=true")
    if isinstance(error, aiormq.ChannelPreconditionFailed):
        return Missing(f"queue {queue.name!r} exists with other settings: {text}")
    # An exclusive consumer of another process ends some time; missing rights do not.
    if isinstance(error, aiormq.ChannelAccessRefused) and "exclusive" not in text:
        return Missing(f"this user may not read queue {queue.name!r}: {text}")
    return ConnectionLost(text)
