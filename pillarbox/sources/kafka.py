"""Kafka: a consumer group as a source."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from operator import methodcaller
from typing import Any, Final, Literal

from pillarbox.errors import ConfigError, MissingExtra, StoreUnavailable
from pillarbox.inbox.message import make_event_id
from pillarbox.sinks.kafka_settings import CONNECTION, MECHANISMS, KafkaSettings, make_settings, mask, read_table
from pillarbox.sinks.options import read_login, read_options, read_path, read_servers
from pillarbox.sinks.tls import TLS_OPTIONS
from pillarbox.sinks.url import SinkUrl
from pillarbox.sources import DeadLetters
from pillarbox.sources.broker import PREFETCH, BrokerSource
from pillarbox.sources.kafka_consumer import KafkaConsumer
from pillarbox.sources.kafka_progress import Part
from pillarbox.sources.kafka_topics import list_topics
from pillarbox.sources.pending import Entry
from pillarbox.sources.reading import Raw, read_message
from pillarbox.sources.url import speak_of_sources
from pillarbox.values import Read, one_of, read_number, read_pause, read_switch, read_texts

try:
    from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaException, Message
except ImportError as error:
    raise MissingExtra("Kafka", "kafka") from error

PORT: Final = 9092
SESSION: Final = timedelta(seconds=45)
TIMEOUT: Final = timedelta(seconds=10)
# Longer would keep the whole group waiting for one slow handler.
_GIVE_UP: Final = 5.0
TOMBSTONE: Final = "pillarbox-tombstone"
"""The header of an event whose message had no value: in a compacted topic, that its key is deleted."""
# An id has room for 255 characters, and the longest numbers after the topic take 51.
_LONG: Final = 200
_STRATEGIES: Final = {"cooperative": "cooperative-sticky", "eager": "range,roundrobin"}
_OPTIONS: Final[dict[str, Read]] = {
    "topics": read_texts,
    "prefetch": read_number,
    "start": one_of("earliest", "latest"),
    "rebalancing": one_of(*_STRATEGIES),
    "session": read_pause,
    "timeout": read_pause,
    "sasl_mechanism": one_of(*MECHANISMS),
    "tls": read_switch,
    **TLS_OPTIONS,
    "config": read_table,
}
# For a name that is no text the client returns a list with holes and an error. Called in the plain way an interpreter
# may overlook the error, and ends at a hole; called so it looks for it.
_ask_headers: Final = methodcaller("headers")
# Settings that belong to an option, with what to do instead, and those that the promise hangs on.
_OURS: Final = {
    **CONNECTION,
    "group.id": "it is the source's group",
    "auto.offset.reset": "use the option start",
    "partition.assignment.strategy": "use the option rebalancing",
    "session.timeout.ms": "use the option session",
    **dict.fromkeys(
        ("enable.auto.commit", "enable.auto.offset.store", "error_cb", "on_commit", "logger", "enable.partition.eof"),
        "it is set by the source and cannot be changed",
    ),
}


class KafkaSource(BrokerSource):
    """Consumes topics as a member of a group. Url: `kafka://host:port,host:port`, with `user:password@` for SASL.

    `topics` are names, or patterns that begin with `^`; a name that does not exist is an error when the source is
    opened. A group that has no offset yet begins at the `start`, and keeps that offset. Messages of one key are handled
    in order. An offset moves up to the first message that is not done: after a crash what was done beyond it comes
    again. Kafka does not count attempts, so they begin anew then, too. A message without a value gives an event with an
    empty payload and the header `pillarbox-tombstone`. `session` is after which time a silent consumer's partitions go
    to others, `config` further settings of librdkafka.
    """

    def __init__(
        self,
        servers: str | Iterable[str],
        *,
        topics: Sequence[str],
        group: str,
        dead: DeadLetters,
        name: str | None = None,
        prefetch: int = PREFETCH,
        start: Literal["earliest", "latest"] = "earliest",
        rebalancing: Literal["cooperative", "eager"] = "cooperative",
        session: timedelta = SESSION,
        timeout: timedelta = TIMEOUT,
        user: str | None = None,
        password: str | None = None,
        sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None,
        tls: bool | None = None,
        tls_ca: str | None = None,
        tls_certificate: str | None = None,
        tls_key: str | None = None,
        tls_verify: bool | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        servers = [servers] if isinstance(servers, str) else list(servers)
        super().__init__(name or f"kafka://{','.join(servers)}", dead=dead, prefetch=prefetch)
        tls_options = {
            "tls_ca": tls_ca,
            "tls_certificate": tls_certificate,
            "tls_key": tls_key,
            "tls_verify": tls_verify,
        }
        own = _check_config(config or {}, self.name)
        with speak_of_sources():
            settings = make_settings(
                servers,
                name=self.name,
                user=user,
                password=password,
                sasl_mechanism=sasl_mechanism,
                tls=tls,
                tls_options={option: value for option, value in tls_options.items() if value is not None},
                timeout=timeout,
            )
        # With what is secret of them: it is to be hidden, too.
        self._settings = replace(settings, connection=settings.connection | own)
        self._topics = list(topics)
        self._begins_at_end = start == "latest"
        self._given = {
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            # Also for `latest`, whose offset the consumer commits: what has gone missing is never skipped to the end.
            "auto.offset.reset": "earliest",
            "partition.assignment.strategy": _STRATEGIES[rebalancing],
            "session.timeout.ms": round(session.total_seconds() * 1000),
            # What is fetched ahead waits in the client's memory, and is fetched again after a pause.
            "queued.min.messages": max(1000, prefetch),
            "fetch.queue.backoff.ms": 50,
            "fetch.wait.max.ms": 100,
            # The client wants it to be a second longer than a fetch may wait.
            "socket.timeout.ms": min(max(round(timeout.total_seconds() * 1000), 2000), 300_000),
            "log.connection.close": False,
            **own,
        }
        _try_out(self._settings, self._given, self.name)
        self._consumer: KafkaConsumer | None = None

    @classmethod
    def from_url(cls, url: SinkUrl, *, group: str, dead: DeadLetters) -> KafkaSource:
        options = read_options(url, _OPTIONS)
        servers = [
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in read_servers(url, port=PORT)
        ]
        user, password = read_login(url)
        if read_path(url):
            raise ConfigError(f"Source {url.name!r}: expected nothing after the servers; use the option topics")
        if "topics" not in options:
            raise ConfigError(f"Source {url.name!r}: expected the option topics, the names of the topics to consume")
        return cls(servers, name=url.name, group=group, dead=dead, user=user, password=password, **options)

    # -- the connection ----------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        await self._check_topics()
        self._consumer = KafkaConsumer(
            self._settings,
            self._given,
            name=self.name,
            prefetch=self._prefetch,
            count=self.pending.__len__,
            withdraw=self._withdraw,
            patience=_GIVE_UP,
            begins_at_end=self._begins_at_end,
        )
        self._consumer.start(self._topics)

    async def _disconnect(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            await consumer.stop()

    async def _reconnect(self) -> None:
        """Wait for the brokers; the client keeps its membership by itself, and says what it has lost."""
        consumer = self._consumer
        if consumer is None or consumer.failure is not None:
            await super()._reconnect()
            return
        await self._check_topics()
        consumer.down = None

    async def _check_topics(self) -> None:
        found = await asyncio.to_thread(list_topics, self._settings, self._given, name=self.name)
        missing = [topic for topic in self._topics if not topic.startswith("^") and topic not in found]
        if missing:
            raise self._refusal(
                f"Source {self.name!r} topics: {missing[0]!r} does not exist, or is hidden from this user; make it"
            )

    # -- messages ----------------------------------------------------------------------------------------------------

    async def _receive(self, most: int, timeout: float) -> Sequence[Entry]:
        consumer = self._require()
        found = await consumer.receive(most, timeout)
        try:
            return [_make_entry(part, message) for part, message in found]
        except Exception as error:
            # What was just received is at hand nowhere: only another membership brings it again.
            consumer.fail(f"{type(error).__name__}: {error}")
            raise

    async def _acknowledge(self, entries: Sequence[Entry]) -> None:
        consumer = self._require()
        lost = [entry for entry in entries if not consumer.progress.finish(*entry.token)]
        if lost:
            self.lose(lost)
        await consumer.commit(self._settings.timeout)

    async def _withdraw(self, parts: Sequence[Part], is_lost: bool) -> None:
        """Give up partitions: what is under way of them may end first, if there is time."""
        limit = time.monotonic() + (0.0 if is_lost else _GIVE_UP)
        while (ours := self._list_entries(parts)) and time.monotonic() < limit:
            self.lose(entry for entry in ours if entry.state != "taken")
            await asyncio.sleep(0.01)
        self.lose(ours)

    def _list_entries(self, parts: Sequence[Part]) -> list[Entry]:
        return [entry for entry in self.pending if entry.token[0] in parts]

    def _require(self) -> KafkaConsumer:
        if self._consumer is None:
            raise StoreUnavailable(f"Source {self.name}: it is closed")
        return self._consumer


def _make_entry(part: Part, message: Message) -> Entry:
    offset, value, key = message.offset(), message.value(), message.key()
    assert offset is not None
    try:
        headers, defect = _read_headers(message), None
    except SystemError as error:
        # The client's, for a name that is no text; it shows none of the headers then.
        headers, defect = {}, f"Message cannot be read: its headers: {error.__cause__ or error}"
    if value is None:
        headers[TOMBSTONE] = "true"
    kind, stamp = message.timestamp()
    raw = Raw(
        id=_make_id(part, offset, stamp),
        topic=part.topic,
        body=_as_bytes(value),
        headers=headers,
        # A key that is no text is shown as one, each its own way.
        key=_as_bytes(key).decode(errors="backslashreplace") or None,
        sent_at=None if kind == TIMESTAMP_NOT_AVAILABLE else _as_time(stamp),
    )
    read = read_message(raw, ce_prefix="ce_")
    if defect is not None:
        read = replace(read, defect=defect)
    return Entry(read, token=(part, offset), place=(part.partition, offset))


def _make_id(part: Part, offset: int, stamp: int) -> str:
    """The id of a message; the time is in it because a topic that is made again counts its offsets anew."""
    topic = part.topic if len(part.topic) <= _LONG else str(make_event_id(part.topic))
    return f"{topic}:{part.partition}:{offset}:{stamp}"


def _as_time(milliseconds: int) -> datetime | None:
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None  # whoever sent it counts in another unit


def _read_headers(message: Message) -> dict[str, str | bytes | None]:
    """The headers by name; of several with one name the last has it, the others a number as well."""
    found: dict[str, str | bytes | None] = {}
    given: Any = _ask_headers(message) or []
    for name, value in given:
        if name in found:
            number = 1
            while f"{name}#{number}" in found:
                number += 1
            found[f"{name}#{number}"] = found[name]
        found[name] = value
    return found


def _as_bytes(value: str | bytes | None) -> bytes:
    if value is None:
        return b""
    return value.encode() if isinstance(value, str) else value


def _check_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    for setting in config:
        if setting in _OURS:
            raise ConfigError(f"Source {name!r} config: {setting!r} is not taken here; {_OURS[setting]}")
    return dict(config)


def _try_out(settings: KafkaSettings, given: dict[str, Any], name: str) -> None:
    """Let the client check its settings now: without a server it connects to nobody."""
    connection = {setting: value for setting, value in settings.connection.items() if setting != "bootstrap.servers"}
    try:
        Consumer({**connection, **given, "logger": _Silence()}).close()
    except (KafkaException, TypeError, ValueError) as error:
        reason = error.args[0].str() if isinstance(error, KafkaException) else str(error)
        raise ConfigError(f"Source {name!r}: the Kafka client refuses its settings: {mask(reason, settings)}") from None


class _Silence:
    def log(self, level: int, form: str, *values: object) -> None:
        pass
