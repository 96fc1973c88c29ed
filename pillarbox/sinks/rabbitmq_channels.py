"""A connection to RabbitMQ and its channels; a channel publishes a window of messages and collects their confirms.

Built on aiormq, which does the handshake, TLS, heartbeats and the reading of confirms. Its own `basic_publish` takes a
lock, a timeout, a wait for the socket and several futures a message, and gives order only by queueing for that lock:
140 to 210 µs of processor time each, and the server, which sees them trickle in, confirms most of them singly. Here the
frames of the whole window go to the connection's writer in one piece, in order, and a future a delivery tag is left
with the channel: 30 µs, and one confirm for many. The rest of aiormq is used as it is; nothing is sent twice unasked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, TypeVar, cast

import aiormq
from aiormq.abc import AbstractConnection, ChannelFrame

from pillarbox.retry import describe_error
from pillarbox.sinks.amqp import Encoder

Connect = Callable[[], Awaitable[AbstractConnection]]
Ack = asyncio.Future[Any]
T = TypeVar("T")

_PIECE: Final = 4_000_000
_GOODBYE: Final = 3.0


class ConnectionLost(Exception):
    """The connection ended, was refused, or does not answer."""


class Blocked(Exception):
    """The server takes no messages: it is short of memory or disk."""


class Place(NamedTuple):
    """Where a message goes: an exchange, and a queue bound to it where the sink makes one."""

    exchange: str
    queue: str | None = None
    binding: str | None = None


class Framed(NamedTuple):
    """A message ready to be sent."""

    id: str
    frames: bytes


class Publisher:
    """One channel with confirms, used by one delivery at a time."""

    def __init__(self, connection: AbstractConnection, channel: aiormq.Channel, encoder: Encoder) -> None:
        self.connection = connection
        self.channel = channel
        self.encoder = encoder
        self._is_torn = False

    @property
    def is_open(self) -> bool:
        return not self.channel.is_closed and not self._is_torn

    @property
    def error(self) -> BaseException | None:
        """Why the channel is closed, None while it is open."""
        closing = self.channel.closing
        if not closing.done():
            closing.cancel()
            return None
        return asyncio.CancelledError() if closing.cancelled() else closing.exception()

    async def is_blocked(self) -> bool:
        return await _is_blocked(self.connection)

    async def publish(self, messages: Sequence[Framed], acks: list[Ack]) -> None:
        """Send the messages in order and wait until each is confirmed, refused or returned, or the channel is closed.

        `acks` gets a future for each message as it is sent, whatever happens then.
        """
        channel = self.channel
        closing = channel.closing
        try:
            for piece in _cut(messages):
                for message in piece:
                    channel.delivery_tag += 1
                    ack = channel.confirmations[channel.delivery_tag] = channel.loop.create_future()
                    channel.message_id_delivery_tag[message.id] = channel.delivery_tag
                    acks.append(ack)
                await self._write(b"".join([message.frames for message in piece]), closing)
            for ack in acks:
                if not ack.done() and not closing.done():
                    await asyncio.wait((ack, closing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
            for ack in acks:
                if not ack.done():
                    # Left with the channel: a confirm that comes later finds its place, and nobody waiting.
                    ack.add_done_callback(_look_at)
            for message in messages:
                channel.message_id_delivery_tag.pop(message.id, None)

    async def _write(self, frames: bytes, closing: asyncio.Future[None]) -> None:
        """Hand the frames to the connection's writer; wait for the socket when they are many."""
        queue = self.channel.write_queue
        drained = self.channel.loop.create_future() if len(frames) > _PIECE else None
        frame = ChannelFrame(frames, should_close=False, drain_future=drained)
        # What is given up here has its delivery tags already: the channel's count would be wrong from now on.
        self._is_torn = True
        if queue.full():
            await _first(asyncio.ensure_future(queue.put(frame)), closing)
        else:
            queue.put_nowait(frame)
        self._is_torn = False
        if drained is not None:
            await _first(drained, closing)


class Channels:
    """A connection, made when it is first needed and again after it was lost, and its channels.

    `places` are what the server is known to have; a new connection knows nothing.
    """

    def __init__(self, connect: Connect, *, timeout: float, is_mandatory: bool, is_persistent: bool) -> None:
        self._connect = connect
        self._timeout = timeout
        self._is_mandatory = is_mandatory
        self._is_persistent = is_persistent
        self._connection: AbstractConnection | None = None
        self._connecting = asyncio.Lock()
        self._idle: list[Publisher] = []
        self._dropped: set[asyncio.Future[None]] = set()
        self.places: set[Place] = set()

    @asynccontextmanager
    async def publisher(self) -> AsyncIterator[Publisher]:
        """Lend a channel; raises `ConnectionLost` when there is no connection, `Blocked` when it takes nothing.

        The channel last given back comes first: what a cancelled delivery left on its way stays before what comes
        next.
        """
        connection = await self._connected()
        if await _is_blocked(connection):
            raise Blocked("the server is short of memory or disk and takes no messages")
        while self._idle:
            publisher = self._idle.pop()
            if publisher.is_open:
                break
        else:
            publisher = await self._open_channel(connection)
        try:
            yield publisher
        finally:
            if publisher.is_open:
                # While it was lent, its connection may have been dropped and another one made.
                if connection is self._connection:
                    self._idle.append(publisher)
            elif not publisher.channel.is_closed:
                self.drop(connection)

    async def call(self, rpc: Awaitable[T]) -> T:
        """Await an answer of the server; raises `ConnectionLost` when none comes. A channel's error passes."""
        return await await_answer(rpc, self._timeout)

    def drop(self, connection: AbstractConnection) -> None:
        """Use the connection no more and close it meanwhile; nothing happens when it is not the current one."""
        if connection is not self._connection:
            return
        self._connection = None
        self._idle.clear()
        # The library says goodbye and waits two seconds for an answer: too long for a relay that holds its rows.
        closing = asyncio.ensure_future(connection.close())
        self._dropped.add(closing)
        closing.add_done_callback(self._dropped.discard)

    async def close(self) -> None:
        """Drop the connection, and wait until all that were dropped are closed."""
        if self._connection is not None:
            self.drop(self._connection)
        if self._dropped:
            # A server that does not answer would keep us for as long as several heartbeats.
            await asyncio.wait(self._dropped, timeout=_GOODBYE)

    async def _connected(self) -> AbstractConnection:
        async with self._connecting:
            if self._connection is None or self._connection.is_closed:
                self._connection = None
                self._idle.clear()
                self.places.clear()
                self._connection = await self.call(self._connect())
            return self._connection

    async def _open_channel(self, connection: AbstractConnection) -> Publisher:
        channel = cast(aiormq.Channel, await self.call(connection.channel(frame_buffer_size=0)))
        encoder = Encoder(
            channel.number,
            frame_max=connection.connection_tune.frame_max,
            is_mandatory=self._is_mandatory,
            is_persistent=self._is_persistent,
        )
        return Publisher(connection, channel, encoder)


def _cut(messages: Sequence[Framed]) -> list[list[Framed]]:
    """Cut a batch where it would not fit into memory twice."""
    pieces: list[list[Framed]] = [[]]
    size = 0
    for message in messages:
        if size > _PIECE:
            pieces.append([])
            size = 0
        pieces[-1].append(message)
        size += len(message.frames)
    return pieces


async def _first(one: asyncio.Future[Any], closing: asyncio.Future[None]) -> None:
    try:
        await asyncio.wait((one, closing), return_when=asyncio.FIRST_COMPLETED)
    finally:
        one.cancel()


async def _is_blocked(connection: AbstractConnection) -> bool:
    try:
        async with asyncio.timeout(0):
            await connection.ready()
    except TimeoutError:
        return True
    return False


def _look_at(ack: Ack) -> None:
    # asyncio complains about an exception that nobody asked for.
    if not ack.cancelled():
        ack.exception()


async def await_answer(rpc: Awaitable[T], timeout: float) -> T:
    """Await an answer of the server; raises `ConnectionLost` when none comes. A channel's error passes."""
    try:
        async with asyncio.timeout(timeout):
            return await rpc
    except aiormq.AMQPChannelError:
        raise
    except TimeoutError:
        raise ConnectionLost(f"no answer within {timeout:g} s") from None
    except asyncio.CancelledError:
        # The library cancels what waits on a connection that it closes.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ConnectionLost("the connection was closed") from None
    except (aiormq.AMQPError, OSError, RuntimeError) as error:
        raise ConnectionLost(describe_error(error)) from error
