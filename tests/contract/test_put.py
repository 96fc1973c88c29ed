"""What a put promises, over every kind of session and connection on every database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import psycopg
import pymysql
import pytest
import sqlalchemy as sa
from psycopg.rows import dict_row, scalar_row
from pymysql.cursors import DictCursor
from sqlalchemy.orm import Session

from pillarbox import Event, ReceiptPending, TransactionError
from tests.contract.put_targets import (
    DATABASES,
    TARGETS,
    Database,
    DatabaseName,
    GetDatabase,
    Target,
    make_databases,
)


@pytest.fixture(scope="module")
def put_databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GetDatabase]:
    with make_databases(tmp_path_factory) as get:
        yield get


@pytest.fixture
def database(target: Target) -> Database:
    return target.database


MakeTarget = Callable[[], Awaitable[Target]]


@pytest.fixture(params=TARGETS, ids="-".join)
async def make_target(request: pytest.FixtureRequest, put_databases: GetDatabase) -> AsyncIterator[MakeTarget]:
    """Makes targets of one kind on one database with an empty outbox."""
    kind, driver = TARGETS[request.param]
    database = put_databases(request.param[0])
    opened: list[Target] = []

    async def make() -> Target:
        target = kind(database, driver)
        await target.open()
        opened.append(target)
        return target

    yield make
    for target in opened:
        await target.dispose()


@pytest.fixture
async def target(make_target: MakeTarget) -> Target:
    return await make_target()


def make_events(count: int, **fields: Any) -> list[Event]:
    return [Event(f"event.{number}", {"number": number}, **fields) for number in range(count)]


# -- the caller's transaction --------------------------------------------------------------------------------


async def test_commit_keeps_every_event(target: Target, database: Database) -> None:
    events = make_events(3)
    await target.put(*events)
    await target.flush()
    assert database.ids() == []  # nothing is committed by the put itself
    await target.commit()
    assert database.ids() == [event.id for event in events]


async def test_rollback_leaves_no_event(target: Target, database: Database) -> None:
    await target.put(*make_events(3))
    await target.flush()
    await target.rollback()
    [later] = make_events(1)
    await target.put(later)
    await target.commit()
    assert database.ids() == [later.id]


async def test_no_events_are_fine(target: Target, database: Database) -> None:
    receipt = await target.put()
    assert (receipt.events, receipt.new, receipt.existing) == ((), (), ())
    await target.commit()
    assert database.ids() == []
    assert target.inserts == []


async def test_many_events_are_one_insert_in_the_order_of_putting(target: Target, database: Database) -> None:
    events = make_events(50)[::-1]
    await target.put(*events)
    await target.commit()
    assert database.ids() == [event.id for event in events]
    assert len(target.inserts) == 1


async def test_more_than_a_thousand_events_are_split_in_order(target: Target, database: Database) -> None:
    events = make_events(1001)[::-1]
    receipt = await target.put(*events)
    await target.commit()
    assert database.ids() == [event.id for event in events]
    assert len(target.inserts) == 2
    assert receipt.new == tuple(events)


# -- what is new ---------------------------------------------------------------------------------------------


async def test_an_id_that_is_there_is_left_alone_and_reported(target: Target, database: Database) -> None:
    first, second, third = make_events(3)
    await target.put(second)
    await target.commit()
    again = Event("other", {"other": True}, id=second.id)
    receipt = await target.put(first, again, third)
    await target.flush()
    assert receipt.new == (first, third)
    assert receipt.existing == (again,)
    await target.commit()
    assert [(row["id"], row["type"]) for row in database.rows()] == [
        (second.id, "event.1"),
        (first.id, "event.0"),
        (third.id, "event.2"),
    ]


async def test_an_id_that_is_there_needs_no_write(target: Target, database: Database) -> None:
    [event] = make_events(1)
    await target.put(event)
    await target.commit()
    receipt = await target.put(event)
    await target.commit()
    assert (receipt.new, receipt.existing) == ((), (event,))
    assert database.ids() == [event.id]


async def test_a_dedup_key_has_one_live_event_in_one_put(target: Target, database: Database) -> None:
    first, second = make_events(2, dedup_key="invoice-7")
    other = Event("event", {}, dedup_key="Invoice-7")
    receipt = await target.put(first, second, other)
    await target.commit()
    assert (receipt.new, receipt.existing) == ((first, other), (second,))
    assert database.ids() == [first.id, other.id]


async def test_a_dedup_key_has_one_live_event_over_time(target: Target, database: Database) -> None:
    first, second, third = make_events(3, dedup_key="invoice-7")
    await target.put(first)
    await target.commit()
    refused = await target.put(second)
    await target.commit()
    assert refused.existing == (second,)
    database.run("DELETE FROM {table}")  # delivered
    taken = await target.put(third)
    await target.commit()
    assert taken.new == (third,)
    assert database.ids() == [third.id]


async def test_a_dedup_key_has_one_live_event_of_two_transactions(
    make_target: MakeTarget, target: Target, database: Database
) -> None:
    first, second = make_events(2, dedup_key="invoice-7")
    other = await make_target()
    receipt = await target.put(first)
    await target.flush()

    async def put_second() -> Any:
        receipt = await other.put(second)
        await other.flush()
        return receipt

    task = asyncio.create_task(put_second())
    await database.wait_until_blocked()
    await target.commit()
    late = await task
    await other.commit()
    assert (receipt.new, late.existing) == ((first,), (second,))
    assert database.ids() == [first.id]


async def test_a_dedup_key_is_free_again_after_a_rollback(
    make_target: MakeTarget, target: Target, database: Database
) -> None:
    first, second = make_events(2, dedup_key="invoice-7")
    other = await make_target()
    await target.put(first)
    await target.flush()

    async def put_second() -> Any:
        receipt = await other.put(second)
        await other.flush()
        return receipt

    task = asyncio.create_task(put_second())
    await database.wait_until_blocked()
    await target.rollback()
    late = await task
    await other.commit()
    assert late.new == (second,)
    assert database.ids() == [second.id]


async def test_a_session_s_receipt_is_known_after_its_flush(target: Target) -> None:
    receipt = await target.put(*make_events(2))
    assert receipt.is_known is not target.is_session
    for name in ("new", "existing") if target.is_session else ():
        with pytest.raises(ReceiptPending, match=r"Call session\.flush\(\) or commit first"):
            getattr(receipt, name)
    await target.flush()
    assert (receipt.is_known, receipt.new, receipt.existing) == (True, receipt.events, ())


# -- what is stored ------------------------------------------------------------------------------------------

FULL = Event(
    "Bestellung.angelegt",
    bytes(range(256)) * 3,
    topic="aufträge/日本",
    key="Ключ 'one' \"two\" %s {x} \\ 🚀",
    headers={"emoji": "🚀 'q' \"d\" \\n %", "count": 2**53 + 1, "ratio": 0.1, "yes": True, "none": None},
    id=UUID("0190d0a1-0000-7000-8000-00000000abcd"),
    content_type="application/x-protobuf",
    dedup_key="dédup ß",
    aggregate_type="Order",
    aggregate_id=4711,
    schema_version="v2",
    correlation_id="corr-1",
    causation_id="cause-1",
    trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
    source="shop/π",
    max_attempts=7,
)
STORED = {
    "id": UUID("0190d0a1-0000-7000-8000-00000000abcd"),
    "type": "Bestellung.angelegt",
    "topic": "aufträge/日本",
    "key": "Ключ 'one' \"two\" %s {x} \\ 🚀",
    "payload": bytes(range(256)) * 3,
    "content_type": "application/x-protobuf",
    "headers": {"emoji": "🚀 'q' \"d\" \\n %", "count": 2**53 + 1, "ratio": 0.1, "yes": True, "none": None},
    "dedup_key": "dédup ß",
    "aggregate_type": "Order",
    "aggregate_id": "4711",
    "schema_version": "v2",
    "correlation_id": "corr-1",
    "causation_id": "cause-1",
    "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
    "source": "shop/π",
    "max_attempts": 7,
    "due_at": None,
    "lane": 50,
    "sink": "",
    "state": 0,
    "attempts": 0,
    "until_at": None,
    "error": None,
    "delivered_at": None,
}


async def test_every_field_comes_back_identical(target: Target, database: Database) -> None:
    await target.put(FULL)
    await target.commit()
    [row] = database.rows()
    assert {name: row[name] for name in STORED} == STORED


async def test_a_bare_event_has_no_more_than_it_says(target: Target, database: Database) -> None:
    # The lane of an event without a key follows its id.
    await target.put(Event("ping", {"n": 1}, id=UUID("0190d0a1-0000-7000-8000-00000000abcd")))
    await target.commit()
    [row] = database.rows()
    assert {name: value for name, value in row.items() if value is not None} == {
        "seq": row["seq"],
        "id": UUID("0190d0a1-0000-7000-8000-00000000abcd"),
        "type": "ping",
        "topic": "ping",
        "payload": b'{"n":1}',
        "content_type": "application/json",
        "sink": "",
        "lane": 5,
        "state": 0,
        "attempts": 0,
        "created_at": row["created_at"],
        # The mark by which MySQL and MariaDB know whose row it is.
        **({"token": row["token"]} if database.backend == "mysql" else {}),
    }


async def test_events_that_differ_in_their_fields_share_an_insert(target: Target, database: Database) -> None:
    bare = Event("bare", {})
    due = Event("due", {}, due_at=datetime(2031, 1, 2, 3, 4, 5, 678901, tzinfo=UTC), key="k")
    delayed = Event("delayed", b"\x00", delay=timedelta(hours=1), headers={"a": "b"})
    await target.put(bare, due, delayed, FULL)
    await target.commit()
    assert len(target.inserts) == 1
    found = [(row["type"], row["key"], row["headers"], row["state"]) for row in database.rows()]
    assert found == [
        ("bare", None, None, 0),
        ("due", "k", None, 4),
        ("delayed", None, {"a": "b"}, 4),
        ("Bestellung.angelegt", STORED["key"], STORED["headers"], 0),
    ]


async def test_times_are_stored_by_the_database_s_clock(target: Target, database: Database) -> None:
    kolkata = timezone(timedelta(hours=5, minutes=30))
    future = datetime(2031, 1, 2, 8, 34, 5, 678901, tzinfo=kolkata)
    past = datetime(2001, 1, 1, tzinfo=UTC)
    before = _clock(database)
    await target.put(
        Event("future", {}, due_at=future),
        Event("past", {}, due_at=past),
        Event("delayed", {}, delay=timedelta(hours=2, milliseconds=250)),
        Event("at once", {}, delay=timedelta(0)),
        Event("plain", {}),
    )
    await target.commit()
    after = _clock(database)
    rows = {row["type"]: row for row in database.rows()}
    stored = datetime(2031, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    assert (rows["future"]["due_at"], rows["future"]["until_at"], rows["future"]["state"]) == (
        stored,
        stored,
        4,
    )
    assert (rows["past"]["due_at"], rows["past"]["until_at"], rows["past"]["state"]) == (past, None, 0)
    delayed = rows["delayed"]
    assert delayed["due_at"] - delayed["created_at"] == timedelta(hours=2, milliseconds=250)
    assert (delayed["until_at"], delayed["state"]) == (delayed["due_at"], 4)
    assert (rows["at once"]["until_at"], rows["at once"]["state"]) == (None, 0)
    assert (rows["plain"]["due_at"], rows["plain"]["until_at"], rows["plain"]["state"]) == (None, None, 0)
    assert all(before <= row["created_at"] <= after for row in rows.values())


def _clock(database: Database) -> datetime:
    now = {
        "postgresql": "SELECT clock_timestamp()",
        "mysql": "SELECT UTC_TIMESTAMP(6)",
        "sqlite": "SELECT strftime('%Y-%m-%d %H:%M:%f', 'now')",
    }[database.backend]
    [[moment]] = database.run(now)
    moment = datetime.fromisoformat(moment) if isinstance(moment, str) else moment
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)


# -- what is refused -----------------------------------------------------------------------------------------


async def test_the_other_method_says_which_one_to_use(target: Target, database: Database) -> None:
    with pytest.raises(TypeError, match=r"expected a SQLAlchemy .*; got .*\. For .* use put(_async)?\(\)\."):
        await target.put_wrongly(*make_events(1))
    assert target.inserts == []


async def test_a_closed_target_is_refused(target: Target) -> None:
    await target.put()
    await target.close()
    target.sql.clear()
    with pytest.raises(TransactionError, match=r"closed"):
        await target.put(*make_events(1))
    assert target.sql == []


async def test_a_target_that_commits_by_itself_is_refused(target: Target, database: Database) -> None:
    await target.autocommit()
    target.sql.clear()
    with pytest.raises(TransactionError, match=r"commit\w* .*(by itself|on its own)"):
        await target.put(*make_events(1))
    assert target.sql == []


# Only on PostgreSQL does a transaction fail with one of its statements.
@pytest.mark.parametrize(
    "make_target", [name for name in TARGETS if name[0] == "postgres"], indirect=True, ids="-".join
)
async def test_a_failed_transaction_is_refused_until_it_is_rolled_back(target: Target, database: Database) -> None:
    async def put_and_flush() -> None:
        await target.put(*make_events(1))
        await target.flush()

    with pytest.raises(Exception, match="nowhere"):
        await target.execute("SELECT nothing FROM nowhere")
    with pytest.raises(TransactionError, match=r"has failed"):
        await put_and_flush()
    await target.rollback()
    events = make_events(1)
    await target.put(*events)
    await target.commit()
    assert database.ids() == [events[0].id]


# -- one database at a time -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DATABASES)
def test_many_megabytes_are_split_in_order(put_databases: GetDatabase, name: DatabaseName) -> None:
    database = put_databases(name)
    events = [Event(f"event.{number}", bytes([number]) * 1024 * 1024) for number in range(9)]
    sql: list[str] = []
    with database.engine.begin() as db:
        sa.event.listen(db, "before_cursor_execute", lambda *args: sql.append(args[2]))
        assert database.outbox.put(db, *events).new == tuple(events)
    assert [row["payload"][:2] for row in database.rows()] == [bytes([number] * 2) for number in range(9)]
    inserts = [text for text in sql if "INSERT INTO" in text]
    # MySQL and MariaDB take statements of at most 16 MB, in which a byte has two digits.
    assert len(inserts) == (3 if database.backend == "mysql" else 2)


@pytest.mark.parametrize("name", ["postgres", "mariadb", "mysql"])
def test_a_driver_that_commits_by_itself_is_refused(put_databases: GetDatabase, name: DatabaseName) -> None:
    database = put_databases(name)
    engine = sa.create_engine(database.engine.url, connect_args={"autocommit": True})
    if not hasattr(engine.dialect, "detect_autocommit_setting"):
        pytest.skip("this version of SQLAlchemy cannot tell")
    with engine.connect() as db, pytest.raises(TransactionError, match="commits every statement by itself"):
        database.outbox.put(db, *make_events(1))
    engine.dispose()
    assert database.ids() == []


def connect_psycopg(database: Database) -> Any:
    return psycopg.connect(database.url.render_as_string(hide_password=False), row_factory=dict_row)


def connect_client_side(database: Database) -> Any:
    url = database.url.render_as_string(hide_password=False)
    return psycopg.connect(url, row_factory=scalar_row, cursor_factory=psycopg.ClientCursor)


def connect_pymysql(database: Database) -> Any:
    url = database.url
    return pymysql.connect(
        host=url.host,
        port=url.port or 3306,
        user=url.username,
        password=url.password or "",
        database=url.database,
        cursorclass=DictCursor,
    )


@pytest.mark.parametrize(
    ("name", "connect"),
    [("postgres", connect_psycopg), ("postgres", connect_client_side), ("mysql", connect_pymysql)],
)
def test_a_driver_s_rows_may_be_of_any_kind(
    put_databases: GetDatabase, name: DatabaseName, connect: Callable[[Database], Any]
) -> None:
    database = put_databases(name)
    connection = connect(database)
    first, second = make_events(2)
    assert database.outbox.put(connection, first).new == (first,)
    assert database.outbox.put(connection, first, second).existing == (first,)
    connection.commit()
    connection.close()
    assert database.ids() == [first.id, second.id]


@pytest.mark.parametrize("name", ["mariadb", "mysql"])
def test_two_phase_sessions_take_events(put_databases: GetDatabase, name: DatabaseName) -> None:
    database = put_databases(name)
    events = make_events(2)
    with Session(database.engine, twophase=True) as session:
        database.outbox.put(session, events[0])
        session.commit()
        database.outbox.put(session, events[1])
        session.flush()
        session.rollback()
    assert database.ids() == [events[0].id]


def test_every_database_has_targets() -> None:
    assert {name for name, _ in TARGETS} == set(DATABASES)
