"""What an error code of Kafka says, and about whom: a topic, a message, a batch of messages, or the cluster."""

from __future__ import annotations

from typing import Final

from pillarbox.errors import MissingExtra
from pillarbox.event import Dead, Outcome, Retry

try:
    from confluent_kafka import KafkaError
except ImportError as error:
    raise MissingExtra("Kafka", "kafka") from error

UNKNOWN_TOPIC: Final = frozenset(
    {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
)
"""The topic is not there, as far as the client knows."""

TOPIC: Final = frozenset({KafkaError.TOPIC_EXCEPTION, KafkaError.TOPIC_AUTHORIZATION_FAILED})
"""Nothing can be sent to this topic."""

BATCH: Final = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.POLICY_VIOLATION,
    }
)
"""At least one message is bad of those that the client put into one request to a partition."""

PURGED: Final = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})
"""The message was thrown away before it was answered."""

DOWN: Final = PURGED | frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._AUTHENTICATION,
        KafkaError._DESTROY,
        KafkaError._FATAL,
        KafkaError._FENCED,
        KafkaError._ISR_INSUFF,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._RESOLVE,
        KafkaError._SSL,
        KafkaError._STATE,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._TRANSPORT,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.CONCURRENT_TRANSACTIONS,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.INVALID_CONFIG,
        KafkaError.INVALID_PARTITIONS,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.INVALID_PRODUCER_ID_MAPPING,
        KafkaError.INVALID_REPLICATION_FACTOR,
        KafkaError.INVALID_TXN_STATE,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.NOT_CONTROLLER,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
        KafkaError.PRODUCER_FENCED,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.THROTTLING_QUOTA_EXCEEDED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN_PRODUCER_ID,
    }
)
"""The cluster or this producer is in no state to take messages, or to make topics as the options say."""


class Outage(Exception):
    """The cluster cannot be used now; its text says why."""


def judge(error: KafkaError, topic: str) -> Outcome:
    """Return what became of one message to that topic; raises `Outage` when the error is about the cluster."""
    code = error.code()
    text = f"Topic {topic!r}: {describe(error)}"
    if error.fatal() or code in DOWN:
        raise Outage(text)
    if code in TOPIC or code in BATCH or code in UNKNOWN_TOPIC:
        return Dead(text)
    return Retry(text)


def describe(error: KafkaError) -> str:
    return f"{error.name()}: {error.str()}"
