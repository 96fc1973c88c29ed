"""Which topics a Kafka cluster has, as far as this user may know."""

from __future__ import annotations

import time
from typing import Any, Final

from pillarbox.errors import MissingExtra, StoreUnavailable
from pillarbox.sinks.kafka_errors import describe
from pillarbox.sinks.kafka_settings import ClientLog, KafkaSettings, mask

try:
    from confluent_kafka import Consumer, KafkaError, KafkaException
except ImportError as error:
    raise MissingExtra("Kafka", "kafka") from error

REFUSED: Final = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
    }
)
"""The brokers are there, and do not let this user in."""


def list_topics(settings: KafkaSettings, given: dict[str, Any], *, name: str) -> set[str]:
    """Ask the cluster which topics there are; raises `StoreUnavailable`. Blocks for a while: run it in a thread."""
    reasons: list[KafkaError] = []
    logger = ClientLog(settings, name, owner="Source")
    client = Consumer({**settings.connection, **given, "error_cb": reasons.append, "logger": logger})
    limit = time.monotonic() + settings.timeout
    pause = 0.5
    try:
        while True:
            try:
                found = client.list_topics(timeout=min(pause, max(0.1, limit - time.monotonic()))).topics
                return {topic for topic, details in found.items() if details.error is None}
            except KafkaException as error:
                client.poll(0)
                refused = [reason for reason in reasons if reason.code() in REFUSED]
                if refused or time.monotonic() >= limit:
                    told = [reason for reason in reasons if reason.code() != KafkaError._ALL_BROKERS_DOWN]
                    reason = [error.args[0], *told, *refused][-1]
                    raise StoreUnavailable(f"Source {name}: {mask(describe(reason), settings)}") from error
                # Each call asks anew, and a cluster may be slow to answer.
                pause *= 2
    finally:
        client.close()
