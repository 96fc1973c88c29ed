"""NATS JetStream: a durable pull consumer as a source.

What is at hand is kept from lapsing (`+WPI`) until it is acknowledged, and every acknowledgement is confirmed by the
server. A process that stood still for longer than the consumer waits begins anew, because its messages may be somebody
else's. One that stops gives back what it has, so that others get it at once.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final, Literal

from pillarbox.errors import ConfigError, MissingExtra, StoreUnavailable
from pillarbox.event import Claim, Outcome
from pillarbox.retry import describe_error
from pillarbox.sinks.nats_connection import Answer, Connection, Lost, Window
from pillarbox.sinks.nats_message import NatsMessage
from pillarbox.sinks.nats_options import TIMEOUT, read_nats_url
from pillarbox.sinks.options import read_options
from pillarbox.sinks.tls import TLS_OPTIONS
from pillarbox.sinks.url import SinkUrl
from pillarbox.sources import DeadLetters
from pillarbox.sources.broker import LEASE, PREFETCH, BrokerBatch, BrokerSource
from pillarbox.sources.nats_consumer import Consumer, Progress, ensure_consumer
from pillarbox.sources.nats_gathering import Gathering
from pillarbox.sources.nats_pull import EXPIRES, Pull
from pillarbox.sources.nats_reading import MessageReader
from pillarbox.sources.pending import Entry
from pillarbox.stores import Mode, Settlement
from pillarbox.values import Read, one_of, read_number, read_pause, read_switch, read_text, read_texts

try:
    from nats.aio.msg import Msg
    from nats.errors import Error as ClientError
except ImportError as error:
    raise MissingExtra("NATS", "nats") from error

log = logging.getLogger("pillarbox.source")

_CONNECTION: Final[dict[str, Read]] = {
    "timeout": read_pause,
    "domain": read_text,
    "api_prefix": read_text,
    "inbox_prefix": read_text,
    "nkey_seed": read_text,
    "credentials": read_text,
}
_OPTIONS: Final[dict[str, Read]] = {
    "stream": read_text,
    "subjects": read_texts,
    "start": one_of("all", "new"),
    "prefetch": read_number,
    "lease": read_pause,
    "shared": read_switch,
    "key_from": one_of("subject", "header"),
}
# The server takes some more, which differ by version.
_NAME: Final = re.compile(r"[\w\-]+")
_ACK: Final = b"+ACK"
_NAK: Final = b"-NAK"
_PROGRESS: Final = b"+WPI"
_HEAD: Final = b"NATS/1.0\r\n\r\n"


@dataclass(slots=True)
class Held:
    """What answers for a message that is at hand: its number in the stream, and where acknowledgements go."""

    number: int
    reply: str


class NatsSource(BrokerSource):
    """Receives the messages of a stream as the consumer `durable`, which is made when the stream has none of that name.

    Order: messages of one subject and key are handled in the order of the stream, whatever fails, is retried, restarted
    or killed, as long as one process at a time uses the consumer. A process that comes after one that was killed waits
    until JetStream gives out again what that one had: up to `lease` and two seconds. Several processes may share a
    consumer and its work. JetStream deals the messages out to them one by one, so there is no order across processes:
    say so with `is_shared`, then no process waits for what another one has, nor takes everything. For order across
    processes give each a consumer of its own with `subjects` of its own, the key being part of the subject; or
    `prefetch=1`: then JetStream gives out one message at a time, to whoever asks, and only then `keeps_order` is true.

    A message without an id of its own (our header, a CloudEvent's, `Nats-Msg-Id`) is known by its place: the stream's
    name and time of creation, and its number there. `key_from="subject"` makes the subject the key of those that have
    none.

    `lease` is how long JetStream waits for a process that is gone. An attempt is counted for every delivery by
    JetStream, also if the message was given back untried.
    """

    def __init__(
        self,
        servers: Sequence[str],
        *,
        stream: str,
        durable: str,
        dead: DeadLetters,
        name: str = "nats:",
        subjects: Sequence[str] = (),
        start: Literal["all", "new"] = "all",
        prefetch: int = PREFETCH,
        lease: timedelta = LEASE,
        is_shared: bool = False,
        key_from: Literal["header", "subject"] = "header",
        timeout: timedelta = TIMEOUT,
        domain: str | None = None,
        api_prefix: str | None = None,
        connect: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(name, dead=dead, prefetch=prefetch)
        if domain is not None and api_prefix is not None:
            raise ConfigError(f"Source {name!r}: expected domain or api_prefix, got both")
        for what, value in (("stream", stream), ("group", durable)):
            if not _NAME.fullmatch(value):
                raise ConfigError(f"Source {name!r} {what}: expected letters, digits, - and _, got {value!r}")
        if lease < timedelta(seconds=1):
            raise ConfigError(f"Source {name!r} lease: expected at least a second, got {lease}")
        if key_from not in ("header", "subject"):
            raise ConfigError(f"Source {name!r} key_from: expected header or subject, got {key_from!r}")
        self.keeps_order = prefetch == 1
        self._consumer = Consumer(stream, durable, tuple(subjects), start, prefetch, lease, is_shared)
        self._servers = list(servers)
        self._is_secure = any(server.startswith("tls:") for server in servers)
        self._options = dict(connect or {})
        self._timeout = timeout.total_seconds()
        self._api = api_prefix or (f"$JS.{domain}.API" if domain else "$JS.API")
        self._reader = MessageReader(stream, has_subject_keys=key_from == "subject")
        self._connection: Connection | None = None
        self._pull: Pull | None = None
        self._gathering: Gathering | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._held: dict[int, Entry] = {}
        self._left: list[Held] = []
        self._tries: dict[int, int] = {}
        self._progress = Progress(is_shared=is_shared)
        self._ack_wait = lease.total_seconds()
        self._safe_until = 0.0

    @classmethod
    def from_url(cls, url: SinkUrl, *, group: str, dead: DeadLetters) -> NatsSource:
        """The source of `nats://user:password@host:port,host:port?stream=…`; the group is the consumer's name."""
        options = read_options(url, {**_OPTIONS, **_CONNECTION, **(TLS_OPTIONS if url.scheme == "tls" else {})})
        if "stream" not in options:
            raise ConfigError(f"Source {url.name!r}: give stream, the name of the stream to read")
        own = {name: options[name] for name in _OPTIONS if name in options}
        own["is_shared"] = own.pop("shared", False)
        others = {name: value for name, value in url.options.items() if name not in _OPTIONS}
        server = read_nats_url(replace(url, options=MappingProxyType(others)))
        given = {name: server[name] for name in ("servers", "name", "timeout", "connect")}
        given |= {name: server[name] for name in ("domain", "api_prefix") if name in server}
        return cls(**given, **own, durable=group, dead=dead)

    @property
    def lease(self) -> timedelta:
        return self._consumer.lease

    # -- connecting ----------------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        connection = Connection(api=self._api)
        try:
            async with asyncio.timeout(self._timeout):
                await connection.connect(self._servers, self._options, is_secure=self._is_secure)
            await self._join(connection)
        except (ClientError, OSError, Lost, ValueError) as error:
            await connection.close()
            raise self._unavailable(error) from error
        except BaseException:
            await connection.close()
            raise
        self._connection = connection
        self._keeper = asyncio.create_task(self._keep(connection), name=f"pillarbox-keeper-{self.name}")

    async def _join(self, connection: Connection) -> None:
        now = time.monotonic()
        try:
            found = await ensure_consumer(
                connection, self._consumer, progress=self._progress, source=self.name, timeout=self._timeout
            )
        except ConfigError as error:
            raise self._refusal(str(error)) from error
        if found.most < self._prefetch:
            log.warning(
                "Source %s: the consumer allows %d unacknowledged messages, fewer than prefetch %d.",
                *(self.name, found.most, self._prefetch),
            )
        elif self._consumer.is_shared and self._prefetch == found.most > 1:
            log.warning(
                "Source %s: the consumer allows %d unacknowledged messages for all processes, and prefetch is %d: one "
                "may take them all.",
                *(self.name, found.most, self._prefetch),
            )
        self._progress.join(found)
        # What an earlier consumer gave out is not given back to a new one, which would send it twice.
        still_ours = self._left if now < self._safe_until and not found.is_new else []
        self._left = []
        self.keeps_order = self._prefetch == found.most == 1
        self._ack_wait = found.ack_wait
        self._safe_until = now + self._ack_wait
        self._reader.stream_id = found.stream_id
        self._gathering = None
        if not self._consumer.is_shared and found.unacknowledged:
            self._gathering = Gathering(
                found.unacknowledged, last=found.delivered, ack_wait=found.ack_wait, prefetch=self._prefetch
            )
            log.info(
                "Source %s: waits up to %g s for %d messages that the last process left; give shared=true if another "
                "process is running.",
                *(self.name, self._gathering.longest, found.unacknowledged),
            )
        consumer = self._consumer
        self._pull = Pull(
            connection, f"{self._api}.CONSUMER.MSG.NEXT.{consumer.stream}.{consumer.durable}", timeout=self._timeout
        )
        await self._pull.start()
        if still_ours:
            # What this process had when it lost its connection comes again at once, not when its time is up.
            await self._pull.ask(len(still_ours))
            await self._tell(connection, still_ours, _NAK)

    async def _disconnect(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            with suppress(asyncio.CancelledError):
                await keeper
        connection, self._connection = self._connection, None
        pull, self._pull = self._pull, None
        if connection is not None:
            if pull is not None and connection.lost is None:
                with suppress(ClientError, OSError, Lost, StoreUnavailable):
                    await self._hand_over(connection, pull)
            await connection.close()
        if self._held:
            self._left = self._list_held()
            self._forget_held()

    async def _hand_over(self, connection: Connection, pull: Pull) -> None:
        """Give back what is not done, in order; JetStream gives it to the next who asks."""
        async with asyncio.timeout(EXPIRES + self._timeout):
            on_their_way = await pull.stop()
        for message in on_their_way:
            self._take(message)
        if self._held and time.monotonic() < self._safe_until:
            await self._tell(connection, self._list_held(), _NAK)
            self._forget_held()

    # -- receiving -----------------------------------------------------------------------------------------------------

    async def _receive(self, most: int, timeout: float) -> Sequence[Entry]:
        pull, gathering = self._pull, self._gathering
        assert pull is not None
        try:
            messages = await pull.next(most if gathering is None else gathering.most(), timeout)
        except (ClientError, OSError, Lost) as error:
            self.lose(self.pending)
            raise self._unavailable(error) from error
        entries = [entry for message in messages if (entry := self._take(message)) is not None]
        if gathering is None:
            return entries
        gathering.add(entries)
        if not gathering.is_over:
            return []
        self._gathering = None
        if gathering.left <= 0:
            self._progress.gather(self._held)
        return gathering.let_go()

    def _take(self, message: Msg) -> Entry | None:
        """Make an entry of a message; none when it is at hand already and only came again."""
        told = message.metadata
        number = told.sequence.stream
        at_hand = self._held.get(number)
        if at_hand is not None:
            at_hand.token.reply = message.reply
            return None
        # What this process knows of its own tries is exact; JetStream counts deliveries, tried or not.
        tries = self._tries.pop(number, told.num_delivered - 1)
        entry = Entry(self._reader.read(message, number), Held(number, message.reply), attempts=tries, place=number)
        self._held[number] = entry
        self._progress.receive(number)
        return entry

    # -- what the relay does -------------------------------------------------------------------------------------------

    async def claim(
        self,
        limit: int,
        *,
        mode: Mode,
        lease: timedelta,
        max_attempts: int | None = None,
        park: bool = True,
        is_prefetch: bool = False,
        max_bytes: int | None = None,
    ) -> BrokerBatch:
        await self._notice_standstill()
        return await super().claim(
            limit,
            mode=mode,
            lease=lease,
            max_attempts=max_attempts,
            park=park,
            is_prefetch=is_prefetch,
            max_bytes=max_bytes,
        )

    async def settle(self, claims: Sequence[Claim], outcomes: Sequence[Outcome]) -> Settlement:
        await self._notice_standstill()
        return await super().settle(claims, outcomes)

    async def _acknowledge(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        await self._tell(self._connected(), [entry.token for entry in entries], _ACK)
        for entry in entries:
            self._held.pop(entry.token.number, None)
            self._progress.finish(entry.token.number)

    # -- keeping -------------------------------------------------------------------------------------------------------

    async def _keep(self, connection: Connection) -> None:
        """Tell JetStream of everything at hand, also of what waits here for its turn, that it is being worked on."""
        with suppress(StoreUnavailable, Lost):
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._ack_wait / 3):
                        # Nothing is asked: this ends when the connection does.
                        await connection.ask(lambda _: asyncio.Event().wait(), timeout=self._timeout)
                await self._notice_standstill()
                now = time.monotonic()
                await self._tell(connection, self._list_held(), _PROGRESS)
                self._safe_until = now + self._ack_wait
        # Wakes a receiver that waits for room, so that it hears of the loss as well.
        self.lose(self.pending)

    async def _notice_standstill(self) -> None:
        """Give up everything at hand when it was not renewed in time: it may be with somebody else by now."""
        if self._held and self._connection is not None and time.monotonic() > self._safe_until:
            reason = Lost(f"nothing was renewed for {self._ack_wait:g} s: this process or the server stood still")
            self.lose(self.pending)
            self._forget_held()
            await self._connection.drop(reason)

    def _list_held(self) -> list[Held]:
        return [self._held[number].token for number in sorted(self._held)]

    def _forget_held(self) -> None:
        self._tries = {number: entry.attempts for number, entry in self._held.items()}
        self._held.clear()

    async def _tell(self, connection: Connection, tokens: Sequence[Held], what: bytes) -> None:
        """Send an answer for each message and wait until the server has taken them all."""
        if not tokens:
            return
        window = Window()
        try:
            for position, held in enumerate(tokens):
                connection.put(window, position, NatsMessage(held.reply, _HEAD, what))
            async with asyncio.timeout(self._timeout):
                await connection.wait(window)
        except Lost as error:
            raise self._unavailable(error) from error
        except TimeoutError as error:
            connection.forget(window)
            reason = Lost(f"no confirmation of an acknowledgement within {self._timeout:g} s")
            await connection.drop(reason)
            raise self._unavailable(reason) from error
        for answer in window.answers.values():
            if not isinstance(answer, Answer) or answer.is_unheard:
                reason = Lost(f"acknowledgements are not taken: {_describe(answer)}")
                await connection.drop(reason)
                raise self._unavailable(reason)

    def _connected(self) -> Connection:
        if self._connection is None:
            raise self._unavailable(Lost("not connected"))
        return self._connection

    def _unavailable(self, error: BaseException) -> StoreUnavailable:
        text = str(error) if isinstance(error, Lost) else describe_error(error)
        if isinstance(error, TimeoutError):
            text = f"no answer within {self._timeout:g} s"
        return StoreUnavailable(f"Source {self.name}: {text}")


def _describe(answer: Any) -> str:
    if isinstance(answer, Answer):
        return "the consumer is gone"
    return f"this user may not publish to {answer.subject!r}"
