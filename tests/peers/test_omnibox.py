"""Our puts and takes on the tables that the real omni-box makes: it reads every row, or the row was refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, reject, settings
from hypothesis import strategies as st

from pillarbox import Event, InvalidEvent, Unsupported
from pillarbox.event import DELIVERED, Dead, Retry
from pillarbox.inbox import Message
from pillarbox.stores import Filter
from pillarbox.stores.sql import SqlStore
from tests.peers.generated import DELAYS, OBJECTS, OPTIONAL, TEXT_HEADERS, TEXTS, VALUES, make_generated, some_of
from tests.peers.omnibox import OmniBoxFailed, OmniBoxTables

OUTBOXES = ("outbox", "outbox-partitioned")
INBOXES = ("inbox", "inbox-partitioned")
AGGREGATE = "0b7f3c52-8a4e-4a53-9a3f-0f2b6c1d7e10"

each_outbox = pytest.mark.parametrize("table", OUTBOXES)
each_inbox = pytest.mark.parametrize("table", INBOXES)


@pytest.fixture(autouse=True)
def empty(omnibox: OmniBoxTables) -> None:
    omnibox.empty()


def make_event(**fields: Any) -> Event:
    usual = {"type": "OrderPlaced", "payload": {"n": 1}, "key": "k", "topic": "orders", "aggregate_type": "Order"}
    return Event(**{**usual, "aggregate_id": AGGREGATE, **fields})


def put(omnibox: OmniBoxTables, table: str, *events: Event) -> None:
    with omnibox.engine.begin() as db:
        omnibox.outbox(table).put(db, *events)


def take(omnibox: OmniBoxTables, table: str, message: Message, status: Any = "completed") -> bool:
    inbox = omnibox.inbox(table)
    inbox.check(message)
    with omnibox.engine.begin() as db:
        return inbox.write(db, [message], status=status)[0]


@asynccontextmanager
async def open_store(omnibox: OmniBoxTables, table: str) -> AsyncIterator[SqlStore]:
    store = omnibox.outbox(table).store(omnibox.url, pooler=False)
    await store.open()
    yield store
    await store.close()


# -- tables without defaults -------------------------------------------------------------------------------------------


@each_outbox
def test_put_into_tables_of_its_models_is_claimed_by_it(omnibox: OmniBoxTables, table: str) -> None:
    one, many = make_event(key="a"), [make_event(key="b"), make_event(key="c", max_attempts=2)]
    put(omnibox, table, one)
    put(omnibox, table, *many)
    found = omnibox.peer.call("claim", table=table, limit=10)
    assert sorted((row["partition_key"], row["attempts_made"], row["max_attempts"]) for row in found) == [
        ("a", 0, 6),
        ("b", 0, 6),
        ("c", 0, 2),
    ]


@each_inbox
@pytest.mark.parametrize("status", ["completed", "pending"])
def test_take_into_tables_of_its_models_is_read_by_it(omnibox: OmniBoxTables, table: str, status: str) -> None:
    assert take(omnibox, table, Message("m-1", "billing", "OrderPlaced", {"n": 1}, source="orders"), status)
    message = {"message_id": "m-1", "consumer_group": "billing", "source": "orders", "event_type": "OrderPlaced"}
    there = omnibox.peer.call("receive", table=table, message={**message, "payload": {"n": 2}})
    assert (there["is_new"], there["status"], there["payload"]) == (False, status, {"n": 1})


# -- what it cannot read -----------------------------------------------------------------------------------------------

BLANK = ("   ", " x", "x ", "\u2003x")
UNREADABLE: list[dict[str, Any]] = [
    {"headers": {"tenant": ""}},
    {"headers": {"tenant": "  "}},
    {"headers": {"  ": "x"}},
    {"headers": {"tenant": "a", "tenant ": "b"}},
    {"headers": {f"h{number}": "x" for number in range(100)}, "source": "shop"},
    {"source": "  "},
    *({name: text} for text in BLANK for name in ("type", "topic", "key", "aggregate_type", "dedup_key")),
    *({name: "  "} for name in ("schema_version", "correlation_id", "causation_id", "trace_id")),
    {"payload": {"text": "\0"}},
    # PostgreSQL reads the first value too, though the second one is kept.
    {"payload": b'{"text": "\\u0000", "text": ""}', "content_type": "application/json"},
]


@each_outbox
@pytest.mark.parametrize("fields", UNREADABLE, ids=lambda fields: str(fields)[:50])
def test_event_that_it_could_not_read_is_refused(omnibox: OmniBoxTables, table: str, fields: dict[str, Any]) -> None:
    event = make_event(**fields)
    with pytest.raises(InvalidEvent):
        put(omnibox, table, event)
    assert omnibox.run(table, "SELECT count(*) AS n FROM {table}") == [{"n": 0}]


@each_outbox
@pytest.mark.parametrize("state", ["tracestate", "a hundred headers"])
def test_trace_that_it_could_not_read_is_left_out(omnibox: OmniBoxTables, table: str, state: str) -> None:
    outbox = omnibox.outbox(table)
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    headers = {"tenant": "a"}
    if state == "tracestate":
        trace["tracestate"] = "x" * 513
    else:
        headers = {f"h{number}": "x" for number in range(100)}
    assert outbox._encoder.headers([make_event(headers=headers)], trace) == [json.dumps(headers, separators=(",", ":"))]
    assert outbox._encoder.headers([make_event()], {"traceparent": "00"}) == ['{"traceparent":"00"}']


YEAR = timedelta(days=365)


@each_outbox
def test_event_cannot_be_rescheduled_to_a_time_that_it_could_not_read(omnibox: OmniBoxTables, table: str) -> None:
    outbox, event = omnibox.outbox(table), make_event(delay=timedelta(days=1))
    put(omnibox, table, event)
    now = datetime.now(UTC)
    with omnibox.engine.begin() as db, pytest.raises(InvalidEvent, match="at most 365 days after it was put"):
        outbox.reschedule(db, event.id, due_at=now + YEAR + timedelta(hours=1))
    with omnibox.engine.begin() as db:
        assert outbox.reschedule(db, event.id, due_at=now + YEAR - timedelta(hours=1)) == 1
    assert omnibox.peer.call("read", table=table, id=str(event.id)) is not None
    # What counts is how old the row is by now.
    omnibox.run(table, "UPDATE {table} SET created_at = created_at - INTERVAL '100 days'")
    with omnibox.engine.begin() as db, pytest.raises(InvalidEvent, match="at most 365 days after it was put"):
        outbox.reschedule(db, event.id, due_at=now + timedelta(days=300))
    with omnibox.engine.begin() as db:
        assert outbox.reschedule(db, event.id, due_at=now + timedelta(days=200)) == 1
    assert omnibox.peer.call("read", table=table, id=str(event.id)) is not None


@each_outbox
@pytest.mark.parametrize("age", [0, 400])
@pytest.mark.parametrize("verb", ["retry", "redrive", "replay", "lapse"])
async def test_row_is_readable_whatever_becomes_of_it(omnibox: OmniBoxTables, table: str, age: int, verb: str) -> None:
    event = make_event()
    put(omnibox, table, event)
    omnibox.run(table, "UPDATE {table} SET created_at = created_at - :age * INTERVAL '1 day'", age=age)
    async with open_store(omnibox, table) as store:
        batch = await store.claim(10, mode="lease", lease=store.lease)
        if verb == "lapse":
            omnibox.run(table, "UPDATE {table} SET locked_at = locked_at - INTERVAL '1 hour'")
            store._look_at = 0.0
            assert len((await store.claim(10, mode="lease", lease=store.lease)).claims) == 1
        else:
            outcome = {"retry": Retry("later", timedelta(days=400)), "redrive": Dead("no"), "replay": DELIVERED}[verb]
            await batch.settle([outcome])
        if verb == "redrive":
            assert await store.redrive(Filter(), actor="test") == 1
        if verb == "replay":
            assert await store.replay(Filter(), actor="test") == 1
    read = omnibox.peer.call("read", table=table, id=str(event.id))
    assert read["status"] == "pending"


@each_outbox
@pytest.mark.parametrize(
    "headers", [{f"h{number}": "x" for number in range(100)}, {"Pillarbox-Late": "mine"}, {}], ids=len
)
async def test_replay_says_that_it_is_late_only_where_it_can_read_that(
    omnibox: OmniBoxTables, table: str, headers: dict[str, str]
) -> None:
    event = make_event(headers=headers)
    put(omnibox, table, event)
    async with open_store(omnibox, table) as store:
        await (await store.claim(10, mode="lease", lease=store.lease)).settle([DELIVERED])
        assert await store.replay(Filter(), actor="test") == 1
    [read] = omnibox.peer.call("claim", table=table, limit=10)
    assert read["headers"] == (headers or {"pillarbox-late": "true"})


# -- numbers -----------------------------------------------------------------------------------------------------------

# JSONB writes a whole number with all its digits, and omni-box cannot read one of more than 64 bits. It holds no more
# than 16383 digits behind the point: the server would abort the caller's transaction.
TOO_LARGE = [
    b'{"n": 1e30}',
    b'{"n": [{"n": -9223372036854775809}]}',
    b'{"n": 18446744073709551616}',
    b'{"n": 1.25e300}',
    b'{"n": %s}' % (b"9" * 5000),
    b'{"n": [%s]}' % b",".join([b"1e18"] * 60_000),
    b'{"n": 1e-16384}',
    b'{"n": 1.5e-16383}',
    b'{"n": 0.%s}' % (b"1" * 16_384),
    b'{"n": 1e-999999999999999999999}',
    b'{"n": 0e-16384}',
    b'{"n": 0e999999999999999999999}',
    b'{"n": 0e1073741823}',
]
NUMBERS = [b'{"n": 18446744073709551615, "m": -9223372036854775808}', b'{"n": 1e19, "m": 1.5e-300, "o": "1e30"}']
NUMBERS += [b'{"n": 0e500, "m": -0e400, "o": 0.0e1000000000}', b'{"n": 1e-16383, "m": 0e-16383}']


@each_outbox
@pytest.mark.parametrize("payload", TOO_LARGE, ids=lambda payload: payload[:30].decode())
def test_number_that_it_could_not_read_is_refused(omnibox: OmniBoxTables, table: str, payload: bytes) -> None:
    with pytest.raises(InvalidEvent, match="payload"):
        put(omnibox, table, make_event(payload=payload, content_type="application/json"))
    inbox = table.replace("outbox", "inbox")
    with pytest.raises(InvalidEvent, match="payload"):
        take(omnibox, inbox, Message("m", "g", "t", payload, content_type="application/json"), "pending")


@each_outbox
@pytest.mark.parametrize("payload", NUMBERS, ids=lambda payload: payload.decode())
def test_number_that_it_can_read_is_put(omnibox: OmniBoxTables, table: str, payload: bytes) -> None:
    put(omnibox, table, make_event(payload=payload, content_type="application/json"))
    [read] = omnibox.peer.call("claim", table=table, limit=10)
    assert read["payload"] == json.loads(payload)


# -- levels ------------------------------------------------------------------------------------------------------------


def nest(levels: int, kind: str) -> bytes:
    """A JSON object of so many levels."""
    if kind == "objects":
        return b'{"a":' * levels + b"1" + b"}" * levels
    inner = levels - 1
    return b'{"a":' + b"[" * inner + (b"" if kind == "empty" else b"1") + b"]" * inner + b"}"


KINDS = ["objects", "arrays", "empty"]


@each_outbox
@pytest.mark.parametrize("kind", KINDS)
def test_payload_of_254_levels_is_read_by_it(omnibox: OmniBoxTables, table: str, kind: str) -> None:
    put(omnibox, table, make_event(payload=nest(254, kind), content_type="application/json"))
    inbox = table.replace("outbox", "inbox")
    take(omnibox, inbox, Message("m", "g", "t", nest(254, kind), content_type="application/json"), "pending")
    for each in (table, inbox):
        [read] = omnibox.peer.call("claim", table=each, limit=10)
        assert read["payload"] == json.loads(nest(254, kind))


@each_outbox
@pytest.mark.parametrize("levels", [255, 256, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_deeper_payload_is_refused(omnibox: OmniBoxTables, table: str, kind: str, levels: int) -> None:
    payload, inbox = nest(levels, kind), table.replace("outbox", "inbox")
    with pytest.raises(InvalidEvent, match="expects a payload of at most 254 levels, got a deeper one"):
        put(omnibox, table, make_event(payload=payload, content_type="application/json"))
    with pytest.raises(InvalidEvent, match="expects a payload of at most 254 levels, got a deeper one"):
        take(omnibox, inbox, Message("m", "g", "t", payload, content_type="application/json"), "pending")


def test_payload_of_256_levels_stops_it(omnibox: OmniBoxTables) -> None:
    """Why it is refused."""
    put(omnibox, "outbox", make_event(key="good"), make_event(key="odd"))
    deep = nest(256, "objects").decode()
    omnibox.run("outbox", "UPDATE {table} SET payload = CAST(:deep AS JSONB) WHERE partition_key = 'odd'", deep=deep)
    with pytest.raises(OmniBoxFailed, match="payload"):
        omnibox.peer.call("claim", table="outbox", limit=10)


# -- generated events --------------------------------------------------------------------------------------------------

EVENTS = some_of(
    {"type": "t", "payload": {"n": 1}, "key": "k", "aggregate_type": "a"},
    {
        "payload": OBJECTS | VALUES,
        "headers": TEXT_HEADERS,
        "delay": DELAYS,
        "max_attempts": st.integers(1, 1_000_000),
        **dict.fromkeys(("type", "key", "aggregate_type", "topic"), TEXTS),
        **dict.fromkeys(
            ("dedup_key", "schema_version", "correlation_id", "causation_id", "trace_id", "source"), OPTIONAL
        ),
    },
)
often = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def as_floats(payload: str | bytes) -> Any:
    """JSONB writes large floats as whole numbers, in other digits of the same float."""
    return json.loads(payload, parse_int=float)


@each_outbox
@often
@example({"type": "t", "payload": {"n": 1}, "key": "k", "aggregate_type": "a", "headers": {"h": "x"}, "source": "s"})
@example({"type": "t", "payload": {"n": 1}, "key": "k", "aggregate_type": "a", "delay": YEAR})
@given(fields=EVENTS)
def test_generated_event_is_refused_or_read_by_it_as_it_was_put(
    omnibox: OmniBoxTables, table: str, fields: dict[str, Any]
) -> None:
    omnibox.run(table, "DELETE FROM {table}")
    event = make_generated(fields, aggregate_id=AGGREGATE)
    # Only what is read by omni-box counts as an example.
    assume(event is not None)
    assert event is not None
    try:
        put(omnibox, table, event)
    except (InvalidEvent, Unsupported):
        reject()
    if event.delay is None:
        [read] = omnibox.peer.call("claim", table=table, limit=10)
    else:
        read = omnibox.peer.call("read", table=table, id=str(event.id))
    carried = {} if event.source is None else {"pillarbox-source": event.source}
    assert as_floats(json.dumps(read.pop("payload"))) == as_floats(event.payload)
    assert {name: read[name] for name in read if name not in OF_LIFE} == {
        "id": str(event.id),
        "event_type": event.type,
        "headers": {**event.headers, **carried} or None,
        "trace_id": event.trace_id,
        "idempotency_key": event.dedup_key,
        "correlation_id": event.correlation_id,
        "causation_id": event.causation_id,
        "schema_version": event.schema_version,
        "max_attempts": event.max_attempts or 6,
        "aggregate_type": event.aggregate_type,
        "aggregate_id": AGGREGATE,
        "topic": event.topic,
        "partition_key": event.key,
    }


OF_LIFE = (
    *("status", "attempts_made", "last_error", "created_at", "scheduled_at", "completed_at", "locked_at", "locked_by"),
)

MESSAGES = some_of(
    {"id": "m", "group": "g", "type": "t", "payload": {"n": 1}},
    {
        "id": TEXTS | st.just(" m "),
        "payload": OBJECTS,
        "headers": TEXT_HEADERS,
        **dict.fromkeys(("group", "type", "source", "topic"), TEXTS),
        **dict.fromkeys(("key", "aggregate_type"), OPTIONAL),
        **dict.fromkeys(("schema_version", "correlation_id", "causation_id", "trace_id"), OPTIONAL),
    },
)


@each_inbox
@often
@example({"id": " m ", "group": "g", "type": "t", "payload": {"n": 1}, "headers": {"empty": ""}, "source": "  "})
@given(fields=MESSAGES)
def test_generated_message_is_refused_or_claimed_by_it(
    omnibox: OmniBoxTables, table: str, fields: dict[str, Any]
) -> None:
    omnibox.run(table, "DELETE FROM {table}")
    try:
        message = Message(**fields)
        take(omnibox, table, message, "pending")
    except (InvalidEvent, Unsupported):
        reject()
    [read] = omnibox.peer.call("claim", table=table, limit=10)
    assert (read["message_id"], read["consumer_group"]) == (message.id.strip(), message.group)
    assert read["event_type"] == message.type.strip()
    assert as_floats(json.dumps(read["payload"])) == as_floats(message.payload)
    [row] = omnibox.run(table, "SELECT * FROM {table}")
    # It reads what is there: nothing of the row is stripped in reading.
    texts = ("message_id", "source", "event_type", "headers", "trace_id", "correlation_id", "schema_version")
    assert {name: read[name] for name in texts} == {name: row[name] for name in texts}


@each_inbox
def test_message_id_is_the_same_with_blanks_around_it(omnibox: OmniBoxTables, table: str) -> None:
    def message(message_id: str) -> Message:
        return Message(message_id, "billing", "OrderPlaced", {"n": 1}, source="orders")

    assert take(omnibox, table, message(" m "))
    theirs = {"message_id": "m ", "consumer_group": "billing", "source": "orders", "event_type": "OrderPlaced"}
    assert not omnibox.peer.call("receive", table=table, message={**theirs, "payload": {"n": 1}})["is_new"]
    assert not take(omnibox, table, message("m"))
    with omnibox.engine.begin() as db:
        assert omnibox.inbox(table).take_many(db, [message("n"), message(" n"), message(" m")]) == [True, False, False]


def test_what_it_cannot_read_stops_it(omnibox: OmniBoxTables) -> None:
    """Why all of this is refused."""
    put(omnibox, "outbox", make_event(key="good"), make_event(key="odd"))
    omnibox.run("outbox", "UPDATE {table} SET headers = '{{\"h\": \"\"}}' WHERE partition_key = 'odd'")
    with pytest.raises(OmniBoxFailed, match="cannot be empty"):
        omnibox.peer.call("claim", table="outbox", limit=10)
