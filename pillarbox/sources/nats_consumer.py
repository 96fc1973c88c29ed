"""The durable consumer a NATS source receives by: made when it is missing, refused when it would lose messages.

One that is deleted under a source is made again where that source stood, so that nothing is skipped.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal

from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, DeliverPolicy
from nats.js.errors import NotFoundError

from pillarbox.errors import ConfigError
from pillarbox.sinks.nats_connection import Connection

log = logging.getLogger("pillarbox.source")

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

    A consumer that `is_new` knows nothing of what another of its name gave out before. The server waits `ack_wait`
    seconds for an acknowledgement, and for at most so many at a time. Of the messages up to number `delivered` some are
    unacknowledged by those who got them, none up to number `done`.
    """

    stream_id: str
    is_new: bool
    ack_wait: float
    most: int
    unacknowledged: int
    delivered: int
    done: int


class Progress:
    """How far a source has come in its stream: where a consumer begins that has to be made again.

    Without other processes that is the first message that was given out and is not done. What others have is unknown:
    where the consumer is shared, it is the first one that was not done when the source connected.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._stream_id: str | None = None
        self._seen = 0
        self._done = 0
        self._owed: set[int] = set()

    def join(self, found: Found) -> None:
        if found.stream_id != self._stream_id:
            self._seen = 0
            self._owed.clear()
        self._stream_id = found.stream_id
        self._done = found.done
        self._seen = max(self._seen, found.delivered)
        self._owed = {number for number in self._owed if number > found.done}
        if found.unacknowledged:
            # Whoever had them, they come again; what is known of them is which one is the first at most.
            self._owed.add(found.done + 1)

    def receive(self, number: int) -> None:
        self._seen = max(self._seen, number)
        self._owed.add(number)

    def finish(self, number: int) -> None:
        self._owed.discard(number)

    def gather(self, numbers: Iterable[int]) -> None:
        """All that was left has come: these are the ones at hand."""
        self._owed = set(numbers)

    def find_start(self, stream_id: str) -> int | None:
        """With which number to begin; none for a source that never joined."""
        if self._stream_id is None:
            return None
        if stream_id != self._stream_id:
            return 1  # another stream of the same name, in which everything is new
        return self._done + 1 if self._is_shared else min(self._owed, default=self._seen + 1)


async def ensure_consumer(
    connection: Connection, wanted: Consumer, *, progress: Progress, source: str, timeout: float
) -> Found:
    """Return the consumer's state, after making it if need be; raises `ConfigError`, and what the client raises."""
    where = f"Source {source}: consumer {wanted.durable!r} of stream {wanted.stream!r}"
    if len(wanted.subjects) > 1:
        server = connection.client.connected_server_version
        if (server.major, server.minor) < _SEVERAL_SUBJECTS:
            raise ConfigError(
                f"{where}: several subjects need a server of version 2.10, this one has {server.major}.{server.minor}; "
                f"expected one subject, got {', '.join(wanted.subjects)}"
            )

    async def find(jetstream: JetStreamContext) -> tuple[str, ConsumerInfo, bool]:
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
            return stream_id, await jetstream.consumer_info(wanted.stream, wanted.durable), False
        except NotFoundError:
            start = progress.find_start(stream_id)
            info = await jetstream.add_consumer(wanted.stream, _settings(wanted, start))
            if start is not None:
                log.warning("%s was gone and is made again, to begin with message %d.", where, start)
            return stream_id, info, True

    stream_id, info, is_new = await connection.ask(find, timeout=timeout)
    _check(info.config, wanted, where)
    delivered = info.delivered.stream_seq if info.delivered is not None else 0
    unacknowledged = info.num_ack_pending or 0
    done = info.ack_floor.stream_seq if unacknowledged and info.ack_floor is not None else delivered
    return Found(
        stream_id,
        is_new=is_new,
        ack_wait=info.config.ack_wait or wanted.lease.total_seconds(),
        most=_most(info.config),
        unacknowledged=unacknowledged,
        delivered=delivered,
        done=done,
    )


def _settings(wanted: Consumer, start: int | None) -> ConsumerConfig:
    return ConsumerConfig(
        durable_name=wanted.durable,
        deliver_policy=DeliverPolicy(wanted.start) if start is None else DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=start,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=wanted.lease.total_seconds(),
        max_deliver=-1,
        # The limit is one for all processes: the first would take everything.
        max_ack_pending=-1 if wanted.is_shared and wanted.prefetch > 1 else wanted.prefetch,
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
    if found.inactive_threshold:
        raise ConfigError(
            f"{where}: inactive_threshold {found.inactive_threshold:g} s would let JetStream delete it while no "
            "process runs, and what it has not given out would be skipped; expected none"
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
