"""Our puts on the table that the real faststream-outbox makes: it claims every row as it was put, or it was refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import faststream_outbox
import pytest
import sqlalchemy as sa
from faststream_outbox.parser.parser import OutboxParser
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import Event, InvalidEvent, Outbox, Unsupported
from pillarbox.event import BYTES
from tests.peers.generated import HEADERS, OPTIONAL, TEXTS, VALUES, make_generated, read_back
from tests.servers import server_url

often = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


class FastStreamTable:
    """A table that it made, with our outbox on it, and its own client."""

    def __init__(self) -> None:
        self.url = sa.make_url(server_url("postgres"))
        self.name = f"peer_{uuid4().hex[:10]}"
        self.engine = sa.create_engine(self.url.set(drivername="postgresql+psycopg"))
        self.table = faststream_outbox.make_outbox_table(sa.MetaData(), table_name=self.name)
        self.table.create(self.engine)
        self.outbox = Outbox(sa.MetaData(), "faststream", table=self.name)
        self.runner = asyncio.Runner()
        self.store = self.outbox.store(self.url, pooler=False)
        self.runner.run(self.store.open())
        self._theirs = create_async_engine(self.url.set(drivername="postgresql+asyncpg"))

    def put(self, event: Event) -> None:
        with self.engine.begin() as db:
            self.outbox.put(db, event)

    def empty(self) -> None:
        with self.engine.begin() as db:
            db.execute(sa.delete(self.table))

    def claim(self, queue: str) -> list[Any]:
        """What one of its subscribers gets to see of a queue."""
        return self.runner.run(self._claim(queue))

    async def _claim(self, queue: str) -> list[Any]:
        client = faststream_outbox.OutboxBroker(self._theirs, outbox_table=self.table).client
        async with self._theirs.connect() as db:
            found = await client.fetch(db, [queue], limit=10, lease_ttl_seconds=60)
            await db.rollback()
        return [await OutboxParser().parse_message(message) for message in found]

    def close(self) -> None:
        self.runner.run(self._theirs.dispose())
        self.runner.run(self.store.close())
        self.runner.close()
        self.table.drop(self.engine)
        self.engine.dispose()


@pytest.fixture(scope="module")
def faststream() -> Iterator[FastStreamTable]:
    made = FastStreamTable()
    yield made
    made.close()


EVENTS = st.fixed_dictionaries(
    {"type": TEXTS | st.just("OrderPlaced"), "payload": VALUES | st.binary(max_size=8)},
    optional={
        "topic": TEXTS | st.text("q", min_size=254, max_size=256),
        "headers": HEADERS,
        "max_attempts": st.integers(1, 1_000_000),
        **dict.fromkeys(("key", "dedup_key", "correlation_id", "causation_id", "trace_id", "source"), OPTIONAL),
        **dict.fromkeys(("aggregate_type", "aggregate_id", "schema_version"), OPTIONAL),
    },
)


@often
@example({"type": "t", "payload": b"raw", "headers": {"content-type": "application/json"}})
@example({"type": "t", "payload": 1, "headers": {"pillarbox-key": "k"}})
@example({"type": "t", "payload": 1, "headers": {"correlation_id": "c"}})
@example({"type": "t", "payload": 1, "headers": {"n": 1}})
@given(fields=EVENTS)
def test_generated_event_is_refused_or_claimed_by_it_as_it_was_put(
    faststream: FastStreamTable, fields: dict[str, Any]
) -> None:
    faststream.empty()
    event = make_generated(fields)
    if event is None:
        return
    try:
        faststream.put(event)
    except (InvalidEvent, Unsupported):
        return
    assert faststream.runner.run(read_back(faststream.store)) == [event]
    [found] = faststream.claim(event.topic)
    row = found.raw_message
    assert (row.queue, row.payload, row.timer_id) == (event.topic, event.payload, event.dedup_key)
    assert (row.attempts_count, row.first_attempt_at) == (0, None)
    assert found.content_type == (None if event.content_type == BYTES else event.content_type)
    assert found.correlation_id == (event.correlation_id or found.message_id)
    # Its relay writes every header to a broker as text.
    assert all(isinstance(value, str) for value in found.headers.values())
    ours = {name for name in found.headers if name.startswith("pillarbox-")} | {"content-type", "correlation_id"}
    assert {name: value for name, value in found.headers.items() if name not in ours} == event.headers
    if isinstance(fields["payload"], dict | list):
        decoded = faststream.runner.run(OutboxParser().decode_message(found))
        assert decoded == json.loads(event.payload)


@pytest.mark.parametrize(
    "headers",
    [{"content-type": "application/json"}, {"correlation_id": "c"}, {"pillarbox-key": "k"}, {"n": 1}, {"n": None}],
    ids=str,
)
def test_header_that_it_would_read_otherwise_is_refused(faststream: FastStreamTable, headers: dict[str, Any]) -> None:
    faststream.empty()
    with pytest.raises(InvalidEvent, match=next(iter(headers))):
        faststream.put(Event("t", b"raw", headers=headers))
    assert faststream.claim("t") == []


def count(faststream: FastStreamTable) -> tuple[int, int]:
    counts = faststream.runner.run(faststream.store.counts())
    return counts.scheduled, counts.dead


def test_event_that_is_due_at_the_end_of_time_is_not_dead(faststream: FastStreamTable) -> None:
    faststream.empty()
    end = datetime(9999, 12, 31, 23, tzinfo=UTC)
    faststream.put(Event("t", {"n": 1}, due_at=end, dedup_key="once"))
    assert count(faststream) == (1, 0)
    with faststream.engine.begin() as db:
        assert faststream.outbox.reschedule(db, dedup_key="once", topic="t", due_at=end) == 1
    assert count(faststream) == (1, 0)
