"""Our puts as the Open Outbox Relay reads them, by a model of its rules written by hand.

Headers must be a JSON object of texts, else its row is dead with INVALID_HEADERS; null is an empty text to it. To Kafka
and Redis it passes every header on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pillarbox import Event, InvalidEvent, Outbox, Unsupported
from pillarbox.event import BYTES
from pillarbox.sinks.forms import make_form
from tests.peers.generated import HEADERS, OPTIONAL, TEXTS, VALUES, make_generated, read_back
from tests.servers import server_url

often = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


class InvalidHeaders(Exception):
    """The relay makes such a row dead."""


def read_headers(found: Any) -> dict[str, str]:
    if not isinstance(found, dict):
        raise InvalidHeaders(found)
    for value in found.values():
        if not isinstance(value, str | None):
            raise InvalidHeaders(found)
    return {name: value or "" for name, value in found.items()}


class OpenOutboxTable:
    """A table with our outbox on it."""

    def __init__(self) -> None:
        url = sa.make_url(server_url("postgres"))
        self.engine = sa.create_engine(url.set(drivername="postgresql+psycopg"))
        self.metadata = sa.MetaData()
        self.outbox = Outbox(self.metadata, "openoutbox", table=f"peer_{uuid4().hex[:10]}")
        self.metadata.create_all(self.engine)
        self.runner = asyncio.Runner()
        self.store = self.outbox.store(url, pooler=False)
        self.runner.run(self.store.open())

    def put(self, event: Event) -> None:
        with self.engine.begin() as db:
            db.execute(sa.delete(self.outbox.table))
            self.outbox.put(db, event)

    def row(self) -> Any:
        with self.engine.begin() as db:
            return db.execute(sa.select(self.outbox.table)).one()

    def close(self) -> None:
        self.runner.run(self.store.close())
        self.runner.close()
        self.metadata.drop_all(self.engine)
        self.engine.dispose()


@pytest.fixture(scope="module")
def openoutbox() -> Iterator[OpenOutboxTable]:
    made = OpenOutboxTable()
    yield made
    made.close()


EVENTS = st.fixed_dictionaries(
    {"type": TEXTS | st.just("order.placed"), "payload": VALUES | st.binary(max_size=8)},
    optional={
        "topic": TEXTS,
        "headers": HEADERS,
        "max_attempts": st.integers(1, 1_000_000),
        **dict.fromkeys(("key", "correlation_id", "causation_id", "trace_id", "source"), OPTIONAL),
        **dict.fromkeys(("aggregate_type", "aggregate_id", "schema_version"), OPTIONAL),
    },
)


@often
@example({"type": "t", "payload": b"raw", "headers": {"content-type": "text/plain"}})
@example({"type": "t", "payload": 1, "headers": {"pillarbox-type": "u"}})
@example({"type": "t", "payload": 1, "headers": {"n": 1}})
@given(fields=EVENTS)
def test_generated_event_is_refused_or_read_by_its_rules_as_it_was_put(
    openoutbox: OpenOutboxTable, fields: dict[str, Any]
) -> None:
    event = make_generated(fields)
    if event is None:
        return
    try:
        openoutbox.put(event)
    except (InvalidEvent, Unsupported):
        return
    row = openoutbox.row()
    headers = read_headers(row.headers)
    assert (row.event_id, row.event_type, row.partition_key, bytes(row.payload)) == (
        *(event.id, event.topic, event.key, event.payload),
    )
    ours = {name for name in headers if name.startswith("pillarbox-")} | {"content-type"}
    assert {name: value for name, value in headers.items() if name not in ours} == event.headers
    assert headers.get("content-type", BYTES) == event.content_type
    [found] = openoutbox.runner.run(read_back(openoutbox.store))
    assert found == event
    # What it sends of the row, and what we send of the event.
    written = {broker: make_form("openoutbox", broker=broker, sink="s")(found).headers for broker in ("kafka", "redis")}
    assert written["kafka"] == {**headers, "X-Event-ID": str(event.id)}
    key = {"partition_key": event.key} if event.key else {}
    assert written["redis"] == {"id": str(event.id), **key, **{f"h:{name}": text for name, text in headers.items()}}


@pytest.mark.parametrize("headers", [{"n": 1}, {"n": True}, {"n": 1.5}, {"n": None}], ids=str)
def test_header_that_it_could_not_read_is_refused(openoutbox: OpenOutboxTable, headers: dict[str, Any]) -> None:
    with pytest.raises(InvalidEvent, match="takes text for headers only"):
        openoutbox.put(Event("t", {"n": 1}, headers=headers))
