"""The durable consumer a NATS source receives by: made when it is missing, refused when it would lose messages."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal

from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, DeliverPolicy
from nats.js.errors import NotFoundError

from pillarbox.errors import ConfigError
from pillarbox.sinks.nats_connection import Connection

# The first server that takes several subjects; an older one would take no notice of them and give out everything.
_SEVERAL_SUBJECTS: Final = (2, 10)


@dataclass(frozen=True, slots=True)
class Consumer:
    """What is asked for."""

    stream: str
    durable: str
    subjects: tuple[str, ...]
    start: Literal["all", "new"]
    prefetch: int
    lease: timedelta
    is_shared: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What is there.

    The server waits `ack_wait` seconds for an acknowledgement, and for at most so many at a time. Of the messages up to
    number `delivered` some are unacknowledged by those who got them.
    """

    stream_id: str
    ack_wait: float
    most: int
    unacknowledged: int
    delivered: int


async def ensure_consumer(connection: Connection, wanted: Consumer, *, source: str, timeout: float) -> Found:
    """Return the consumer's state, after making it if need be; raises `ConfigError`, and what the client raises."""
    where = f"Source {source}: consumer {wanted.durable!r} of stream {wanted.stream!r}"
    if len(wanted.subjects) > 1:
        server = connection.client.connected_server_version
        if (server.major, server.minor) < _SEVERAL_SUBJECTS:
            raise ConfigError(
                f"{where}: several subjects need a server of version 2.10, this one has {server.major}.{server.minor}; "
                f"expected one subject, got {', '.join(wanted.subjects)}"
            )

    async def find(jetstream: JetStreamContext) -> tuple[str, ConsumerInfo]:
        try:
            stream = await jetstream.stream_info(wanted.stream)
        except NotFoundError as error:
            raise ConfigError(
                f"Source {source}: stream {wanted.stream!r} does not exist on this server; make it first"
            ) from error
        created = stream.created
        # A stream that is deleted and made again counts from 1 again: its name alone would not tell them apart.
        stream_id = wanted.stream if created is None else f"{wanted.stream}:{int(created.timestamp() * 1000):x}"
        try:
            return stream_id, await jetstream.consumer_info(wanted.stream, wanted.durable)
        except NotFoundError:
            return stream_id, await jetstream.add_consumer(wanted.stream, _settings(wanted))

    stream_id, info = await connection.ask(find, timeout=timeout)
    _check(info.config, wanted, where)
    return Found(
        stream_id,
        ack_wait=info.config.ack_wait or wanted.lease.total_seconds(),
        most=_most(info.config),
        unacknowledged=info.num_ack_pending or 0,
        delivered=info.delivered.stream_seq if info.delivered is not None else 0,
    )


def _settings(wanted: Consumer) -> ConsumerConfig:
    return ConsumerConfig(
        durable_name=wanted.durable,
        deliver_policy=DeliverPolicy(wanted.start),
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=wanted.lease.total_seconds(),
        max_deliver=-1,
        max_ack_pending=wanted.prefetch,
        filter_subject=wanted.subjects[0] if len(wanted.subjects) == 1 else None,
        filter_subjects=list(wanted.subjects) if len(wanted.subjects) > 1 else None,
    )


def _check(found: ConsumerConfig, wanted: Consumer, where: str) -> None:
    if found.deliver_subject:
        raise ConfigError(f"{where} is a push consumer; expected a pull consumer. Give another durable name")
    if found.ack_policy != AckPolicy.EXPLICIT:
        raise ConfigError(f"{where}: expected ack policy explicit, got {found.ack_policy}")
    if found.max_deliver is not None and found.max_deliver > 0:
        raise ConfigError(
            f"{where}: max_deliver {found.max_deliver} would let JetStream drop messages; expected no limit (-1)"
        )
    if found.headers_only:
        raise ConfigError(f"{where} gives out headers without payloads; expected whole messages")
    if wanted.is_shared and wanted.prefetch == 1 and _most(found) != 1:
        raise ConfigError(
            f"{where}: order across processes needs max_ack_pending 1, it has {found.max_ack_pending}. "
            "Change the consumer, or give another durable name"
        )
    subjects = found.filter_subjects or ([found.filter_subject] if found.filter_subject else [])
    if sorted(subjects) != sorted(wanted.subjects):
        shown, asked = (", ".join(each) or "all subjects" for each in (subjects, wanted.subjects))
        raise ConfigError(f"{where} filters by {shown}, the source asks for {asked}; make them the same")


def _most(found: ConsumerConfig) -> int:
    limit = found.max_ack_pending
    return limit if limit is not None and limit > 0 else sys.maxsize
