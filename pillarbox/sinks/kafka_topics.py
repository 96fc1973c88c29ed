"""Making topics, for those who ask for it: each when it is first needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import wait
from typing import Any

from pillarbox.errors import MissingExtra
from pillarbox.sinks.kafka_producer import KafkaProducer
from pillarbox.sinks.kafka_settings import ClientLog, KafkaSettings

try:
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic
except ImportError as error:
    raise MissingExtra("Kafka", "kafka") from error

_SLICE = 0.1


class TopicMaker:
    """Makes topics with these settings; what is not given is the cluster's default."""

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        name: str,
        partitions: int | None = None,
        replication: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._settings = settings
        self._log = ClientLog(settings, name)
        self._partitions = -1 if partitions is None else partitions
        self._replication = -1 if replication is None else replication
        self._config = {setting: _as_text(value) for setting, value in (config or {}).items()}
        self._made: set[str] = set()

    def make(self, topics: Iterable[str], producer: KafkaProducer) -> dict[str, KafkaError]:
        """Make those that are not there, within the producer's time; returns the errors of those that cannot be."""
        missing = set(topics) - self._made
        if not missing:
            return {}
        given: dict[str, Any] = {**self._settings.connection, "logger": self._log}
        client = AdminClient(given)
        wanted = [NewTopic(topic, self._partitions, self._replication, config=self._config) for topic in missing]
        limit = max(0.1, producer.remaining)
        futures = client.create_topics(wanted, operation_timeout=limit, request_timeout=limit)
        while wait(futures.values(), timeout=_SLICE).not_done:
            producer.look()
        refused: dict[str, KafkaError] = {}
        for topic, future in futures.items():
            failure = future.exception()
            if isinstance(failure, KafkaException):
                if failure.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    refused[topic] = failure.args[0]
            elif failure is not None:
                raise failure
        self._made |= missing - refused.keys()
        return refused

    def forget(self, topic: str) -> None:
        """Make the topic again when it is next needed: somebody has deleted it."""
        self._made.discard(topic)


def _as_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
