"""One producer of the Kafka client, used by one thread at a time, with a time limit for everything.

A batch begins with `begin`, which sets the limit. Whoever gives up on a batch calls `discard`: what the client still
has of it is thrown away, so that nothing is sent after its claims were given back, and the next batch gets a new
producer. So does one that comes after the client has lost all its brokers or its transactional id.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Final

from pillarbox.errors import MissingExtra
from pillarbox.sinks.kafka_errors import DOWN, Outage, describe
from pillarbox.sinks.kafka_settings import ClientLog, KafkaSettings

try:
    from confluent_kafka import KafkaError, KafkaException, Producer
except ImportError as error:
    raise MissingExtra("Kafka", "kafka") from error

# How long a call of the client may take before a stop is noticed.
_SLICE: Final = 0.1
_ABORT: Final = 1.0
# A client may take nearly the whole limit to say that a topic is missing; asking the cluster comes after that.
_GRACE: Final = 0.5


class Stopped(Exception):
    """The delivery was cancelled."""


class KafkaProducer:
    """A producer that is made when it is needed, and made anew after an outage."""

    def __init__(self, settings: KafkaSettings, *, name: str, transactional_id: str | None = None) -> None:
        self._settings = settings
        self._log = ClientLog(settings, name)
        self._transactional_id = transactional_id
        self._producer: Producer | None = None
        self._is_ready = False
        self._stop = threading.Event()
        self._deadline = 0.0
        self._reason: KafkaError | None = None
        self._is_refused = False
        self._down_at: float | None = None

    # -- time ---------------------------------------------------------------------------------------------------

    def begin(self, stop: threading.Event) -> None:
        """Start the time of a batch and have a producer for it."""
        self._stop = stop
        self._deadline = time.monotonic() + self._settings.timeout
        self.have_client()

    def have_client(self) -> None:
        """Keep the client if it can still be used, else make a new one."""
        if self._producer is not None:
            # What has happened since the last batch: an idle connection may be closed by either side.
            self._producer.poll(0)
            if self._down_at is not None or self._is_refused:
                self.discard()
        if self._producer is None:
            self._reason, self._is_refused, self._down_at = None, False, None
            given = self._settings.connection | self._settings.producer
            if self._transactional_id is not None:
                given["transactional.id"] = self._transactional_id
            self._producer = Producer({**given, "error_cb": self._note, "logger": self._log})
        if self._transactional_id is not None and not self._is_ready:
            self.repeat(self._producer.init_transactions)
            self._is_ready = True

    @property
    def client(self) -> Producer:
        assert self._producer is not None
        return self._producer

    @property
    def remaining(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    @property
    def is_late(self) -> bool:
        """Whether no further round should be begun: what is left comes again."""
        return self.remaining < self._settings.timeout / 4

    def look(self, *, grace: float = 0.0) -> None:
        """Raise `Stopped` or `Outage` when there is no use in waiting longer; `grace` is added to the limit."""
        if self._stop.is_set():
            raise Stopped
        if self._is_refused:
            raise Outage(self._why("this client is refused"))
        # Not at once: a host may have several addresses, of which the first does not answer.
        if self._down_at is not None and time.monotonic() > self._down_at + self._settings.timeout / 2:
            raise Outage(self._why("no broker can be reached"))
        if time.monotonic() >= self._deadline + grace:
            raise Outage(self._why(f"no answer within {self._settings.timeout:g} s"))

    # -- sending ------------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Wait a moment after the client's queue was full."""
        self.client.poll(_SLICE)
        self.look()

    def wait(self, failed: Collection[Any] = ()) -> None:
        """Wait until every message has been answered, or something stands in `failed`."""
        # Unlike polling, flushing does not let the last messages linger for company.
        client = self.client
        while client.flush(min(_SLICE, self.remaining)):
            if failed:
                return
            self.look()

    def note_answer(self) -> None:
        """A message was acknowledged: the client has found a broker again."""
        self._down_at = None

    def repeat(self, call: Callable[[float], Any]) -> Any:
        """Call a function of the client that takes a timeout and may be called again after it, until the limit."""
        while True:
            try:
                return call(max(0.01, min(_SLICE, self.remaining)))
            except KafkaException as error:
                problem: KafkaError = error.args[0]
                self.client.poll(0)
                if problem.fatal() or not (problem.retriable() or problem.code() == KafkaError._TIMED_OUT):
                    raise
            self.look()

    def check(self, stop: threading.Event) -> None:
        """Ask the cluster for its metadata."""
        self.begin(stop)
        self._list_topics()

    def has_topic(self, topic: str) -> bool:
        """Ask the cluster, not the client's memory; raises `Outage` when it does not answer."""
        self.look(grace=_GRACE)
        found = self._list_topics(topic, grace=_GRACE)
        return topic in found and found[topic].error is None

    def _list_topics(self, topic: str | None = None, *, grace: float = 0.0) -> dict[str, Any]:
        pause = _SLICE
        while True:
            try:
                limit = min(pause, max(0.01, self.remaining + grace))
                found: dict[str, Any] = self.client.list_topics(topic, timeout=limit).topics
            except KafkaException as error:
                self.client.poll(0)
                if error.args[0].code() not in DOWN:
                    raise Outage(describe(error.args[0])) from error
                self.look(grace=grace)
                if self._down_at is None:
                    # A cluster may be slow to answer, and each call asks anew.
                    pause *= 2
            else:
                self._down_at = None
                return found

    # -- ending -------------------------------------------------------------------------------------------------

    def discard(self) -> None:
        """Throw away what was not answered, and the producer."""
        producer, self._producer = self._producer, None
        was_ready, self._is_ready = self._is_ready, False
        if producer is None:
            return
        producer.purge()
        producer.flush(0)
        if was_ready:
            # If that fails the next producer of this id does it.
            with suppress(KafkaException):
                producer.abort_transaction(_ABORT)

    def _why(self, what: str) -> str:
        return what if self._reason is None else f"{what}: {describe(self._reason)}"

    def _note(self, error: KafkaError) -> None:
        """What the client says about its connections while it is polled."""
        code = error.code()
        if code == KafkaError._ALL_BROKERS_DOWN:
            self._down_at = time.monotonic()
            return
        self._reason = error
        if error.fatal() or code in (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED):
            self._is_refused = True
