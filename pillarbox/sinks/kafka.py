"""Kafka: an idempotent producer, one window of messages a batch, or one transaction.

Each call of `deliver` has a producer and a thread to itself while it runs, so that giving up on a batch cannot touch
another one. The order of a key holds across producers because no key is in two batches at once. Producers are kept for
the next call; there are as many as there were calls at a time, and one more: the client takes half a second to get a
new one its number from the cluster, before which it sends nothing.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from traceback import clear_frames
from typing import Any, Final, Literal, TypeVar

from pillarbox.errors import ConfigError, MissingExtra, SinkUnavailable
from pillarbox.event import Claim, Dead, Event, Outcome, Retry
from pillarbox.sinks import Sink
from pillarbox.sinks.forms import FORM_OPTIONS, FormName, make_form
from pillarbox.sinks.kafka_delivery import Delivery, Headers
from pillarbox.sinks.kafka_errors import Outage, describe
from pillarbox.sinks.kafka_producer import KafkaProducer
from pillarbox.sinks.kafka_settings import (
    COMPRESSIONS,
    JAVA,
    MECHANISMS,
    PARTITIONERS,
    make_settings,
    mask,
    read_table,
)
from pillarbox.sinks.kafka_topics import TopicMaker
from pillarbox.sinks.message import DEFAULT_SOURCE
from pillarbox.sinks.options import read_login, read_options, read_path, read_servers
from pillarbox.sinks.order import release_successors
from pillarbox.sinks.refused import Refused
from pillarbox.sinks.templates import Template
from pillarbox.sinks.threads import finish
from pillarbox.sinks.tls import TLS_OPTIONS
from pillarbox.sinks.url import SinkUrl
from pillarbox.values import Read, one_of, read_number, read_pause, read_switch, read_text

try:
    from confluent_kafka import KafkaException
except ImportError as error:
    raise MissingExtra("Kafka", "kafka") from error

T = TypeVar("T")

_OPTIONS: Final[dict[str, Read]] = {
    "topic": read_text,
    "acks": one_of("all", "1", "0"),
    "idempotence": read_switch,
    "compression": one_of(*COMPRESSIONS),
    "timeout": read_pause,
    "transactional_id": read_text,
    "sasl_mechanism": one_of(*MECHANISMS),
    "tls": read_switch,
    **TLS_OPTIONS,
    "create": read_switch,
    "partitions": read_number,
    "replication": read_number,
    "topic_config": read_table,
    "config": read_table,
    **FORM_OPTIONS,
}
_TOPIC: Final = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")
_KNOWN_NAMES: Final = 10_000
_THREADS: Final = 64
PORT: Final = 9092


class KafkaSink(Sink):
    """Produces each event to a topic. Url: `kafka://host:port,host:port`, with `user:password@` for SASL.

    `topic` is the template of the topic's name, and the event's key the message's key. What is not acknowledged within
    `timeout` is taken back and counts as not sent. With `transactional_id` each batch is one transaction; no two relays
    at work may have the same. With `create` a missing topic is made with `partitions`, `replication` and
    `topic_config`. `config` are further settings of librdkafka.
    """

    is_quick: bool = True

    def __init__(
        self,
        servers: str | Iterable[str],
        *,
        name: str | None = None,
        topic: str = "{topic}",
        acks: Literal["all", "1", "0"] = "all",
        idempotence: bool | None = None,
        compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "none",
        timeout: timedelta = timedelta(seconds=4),
        transactional_id: str | None = None,
        user: str | None = None,
        password: str | None = None,
        sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None,
        tls: bool | None = None,
        tls_ca: str | None = None,
        tls_certificate: str | None = None,
        tls_key: str | None = None,
        tls_verify: bool | None = None,
        create: bool = False,
        partitions: int | None = None,
        replication: int | None = None,
        topic_config: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        message: FormName | None = None,
        cloudevents: Literal["binary", "structured"] | None = None,
        cloudevents_source: str = DEFAULT_SOURCE,
    ) -> None:
        servers = [servers] if isinstance(servers, str) else list(servers)
        self.name = name or f"kafka://{','.join(servers)}"
        tls_options = {
            "tls_ca": tls_ca,
            "tls_certificate": tls_certificate,
            "tls_key": tls_key,
            "tls_verify": tls_verify,
        }
        self._settings = make_settings(
            servers,
            name=self.name,
            user=user,
            password=password,
            sasl_mechanism=sasl_mechanism,
            tls=tls,
            tls_options={option: value for option, value in tls_options.items() if value is not None},
            acks=acks,
            idempotence=idempotence,
            compression=compression,
            timeout=timeout,
            transactional_id=transactional_id,
            partitioner=PARTITIONERS.get(message or "", JAVA),
            config=config,
        )
        self._transactional_id = transactional_id
        self._topics: TopicMaker | None = None
        made_with = {"partitions": partitions, "replication": replication, "config": topic_config}
        if create:
            self._topics = TopicMaker(self._settings, name=self.name, **made_with)  # type: ignore[arg-type]
        elif any(value is not None for value in made_with.values()):
            raise ConfigError(f"Sink {self.name!r}: partitions, replication and topic_config need create")
        self._topic = Template(topic, what=f"Sink {self.name!r} topic")
        self._make_message = make_form(
            message,
            broker="kafka",
            sink=self.name,
            cloudevents=cloudevents,
            cloudevents_source=cloudevents_source,
            ce_prefix="ce_",
        )
        self._known_names: set[str] = set()
        # Used in turn: what a client has to say is kept in its memory until it is used again.
        self._idle: deque[KafkaProducer] = deque()
        self._made = 0
        self._is_making_spare = False
        self._running: set[asyncio.Future[Any]] = set()
        self._threads: ThreadPoolExecutor | None = None

    @classmethod
    def from_url(cls, url: SinkUrl) -> KafkaSink:
        options = read_options(url, _OPTIONS)
        servers = [
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in read_servers(url, port=PORT)
        ]
        user, password = read_login(url)
        if read_path(url):
            raise ConfigError(f"Sink {url.name!r}: expected nothing after the servers; the topic is the option topic")
        return cls(servers, name=url.name, user=user, password=password, **options)

    async def open(self) -> None:
        await self.check()

    async def check(self) -> None:
        await self._run(KafkaProducer.check)

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        if not claims:
            return []
        delivery = Delivery(claims, self._render)
        try:
            return await self._run(partial(self._deliver, delivery), keeps_spare=True)
        except SinkUnavailable as error:
            error.outcomes = release_successors(claims, delivery.outcomes)
            raise

    async def close(self) -> None:
        if self._running:
            await asyncio.wait(self._running)
        threads, self._threads = self._threads, None
        if threads is not None:
            await asyncio.to_thread(self._end, threads)

    def _end(self, threads: ThreadPoolExecutor) -> None:
        while self._idle:
            self._idle.pop().discard()
        self._made = 0
        threads.shutdown()

    async def _run(self, work: Callable[[KafkaProducer, threading.Event], T], *, keeps_spare: bool = False) -> T:
        """Run work with a producer of its own in a thread of ours."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="pillarbox-kafka")
        producer = self._idle.popleft() if self._idle else self._make_producer()
        if keeps_spare:
            self._have_spare(self._threads)
        stop = threading.Event()
        running = asyncio.get_running_loop().run_in_executor(self._threads, self._guard, work, producer, stop)
        self._running.add(running)
        running.add_done_callback(partial(self._give_back, producer))
        return await finish(running, stop.set)

    def _have_spare(self, threads: ThreadPoolExecutor) -> None:
        """Make a producer for the next call that finds all others at work; a transaction's has its number at once."""
        if self._idle or self._transactional_id is not None or self._is_making_spare:
            return
        spare = self._make_producer()
        making = asyncio.get_running_loop().run_in_executor(threads, spare.have_client)
        self._is_making_spare = True
        self._running.add(making)
        making.add_done_callback(partial(self._keep_spare, spare))

    def _keep_spare(self, spare: KafkaProducer, making: asyncio.Future[None]) -> None:
        self._is_making_spare = False
        self._running.discard(making)
        # Why it could not be made is known to the call that needs it: it tries again.
        if not making.cancelled():
            making.exception()
        self._idle.append(spare)

    def _make_producer(self) -> KafkaProducer:
        number, self._made = self._made, self._made + 1
        transactional_id = None if self._transactional_id is None else f"{self._transactional_id}-{number}"
        return KafkaProducer(self._settings, name=self.name, transactional_id=transactional_id)

    def _give_back(self, producer: KafkaProducer, running: asyncio.Future[Any]) -> None:
        self._running.discard(running)
        self._idle.append(producer)

    # -- in the thread --------------------------------------------------------------------------------------------

    def _guard(
        self, work: Callable[[KafkaProducer, threading.Event], T], producer: KafkaProducer, stop: threading.Event
    ) -> T:
        """Let nothing be sent by a producer whose work has failed."""
        try:
            return work(producer, stop)
        except BaseException as error:
            # These frames hold the client. Without them it ends here, and not in the event loop's thread.
            clear_frames(error.__traceback__)
            producer.discard()
            if isinstance(error, KafkaException):
                raise self._unavailable(describe(error.args[0])) from error
            if isinstance(error, Outage):
                raise self._unavailable(str(error)) from error
            raise

    def _deliver(self, delivery: Delivery, producer: KafkaProducer, stop: threading.Event) -> list[Outcome]:
        producer.begin(stop)
        refused = {} if self._topics is None else self._topics.make(self._list_topics(delivery.claims), producer)
        delivery.use(producer, partial(self._judge_missing, producer), refused=refused)
        return delivery.send() if self._transactional_id is None else delivery.send_in_transaction()

    def _unavailable(self, reason: str) -> SinkUnavailable:
        return SinkUnavailable(f"Sink {self.name}: {mask(reason, self._settings)}")

    def _name_topic(self, event: Event) -> str:
        topic = self._topic.fill(event)
        if topic not in self._known_names:
            if _TOPIC.fullmatch(topic) is None:
                raise Refused(f"Topic {topic!r}: expected up to 249 letters, digits, dots, underscores and hyphens")
            if len(self._known_names) >= _KNOWN_NAMES:
                self._known_names.clear()
            self._known_names.add(topic)
        return topic

    def _render(self, event: Event) -> tuple[str, bytes, Headers]:
        topic = self._name_topic(event)
        message = self._make_message(event)
        headers: Headers = message.headers  # type: ignore[assignment]
        # The client cuts texts at a zero byte, but not bytes.
        if "\0" in "".join(message.headers.values()):
            headers = {name: value.encode() for name, value in message.headers.items()}
        for name in headers:
            if "\0" in name:
                raise Refused(f"Header {name!r} cannot be sent: its name has a zero byte")
        return topic, message.body, headers

    def _list_topics(self, claims: Sequence[Claim]) -> set[str]:
        topics = set()
        for claim in claims:
            with suppress(Refused):
                topics.add(self._name_topic(claim.event))
        return topics

    def _judge_missing(self, producer: KafkaProducer, topic: str) -> Outcome:
        if producer.has_topic(topic):
            raise Outage(f"topic {topic!r} is there, but the client does not know it yet")
        if self._topics is not None:
            self._topics.forget(topic)
            return Retry(f"Topic {topic!r} does not exist any more")
        return Dead(f"Topic {topic!r} does not exist; make it, or use the option create")
