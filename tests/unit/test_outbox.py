"""The outbox's own part of a put, on SQLite in memory: checks, errors, traces and declarations."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session

from pillarbox import Event, InvalidEvent, LayoutError, Outbox, PayloadTooLarge, TransactionError
from pillarbox.layouts.pillarbox import pillarbox_layout


@pytest.fixture
def outbox() -> Outbox:
    return Outbox(sa.MetaData())


@pytest.fixture
def engine(outbox: Outbox) -> Iterator[sa.Engine]:
    engine = sa.create_engine("sqlite://")
    outbox.table.metadata.create_all(engine)
    yield engine
    engine.dispose()


def stored(db: sa.Connection, column: str) -> list[Any]:
    return list(db.exec_driver_sql(f"SELECT {column} FROM outbox ORDER BY seq").scalars())


# -- declaring -----------------------------------------------------------------------------------------------


def test_an_outbox_declares_its_tables_and_creates_nothing() -> None:
    metadata = sa.MetaData()
    outbox = Outbox(metadata)
    assert set(metadata.tables) == {"outbox", "outbox_dead", "outbox_lanes", "outbox_audit"}
    assert outbox.table is metadata.tables["outbox"]


@pytest.mark.parametrize(
    ("metadata", "options", "expected"),
    [
        (sa.MetaData(), {"table": "billing.outbox"}, "billing.outbox"),
        (sa.MetaData(), {"table": "events", "schema": "billing"}, "billing.events"),
        (sa.MetaData(schema="shop"), {}, "shop.outbox"),
        (sa.MetaData(schema="shop"), {"table": "billing.outbox"}, "billing.outbox"),
        (sa.MetaData(schema="shop"), {"table": "events", "schema": "billing"}, "billing.events"),
    ],
)
def test_the_table_s_schema_is_the_nearest_one_given(metadata: Any, options: Any, expected: str) -> None:
    outbox = Outbox(metadata, layout="pillarbox", **options)
    assert outbox.table.fullname == expected
    assert outbox.tables["dead"].fullname == f"{expected}_dead"
    assert {str(index.name) for index in outbox.table.indexes} >= {f"{outbox.table.name}_id"}


@pytest.mark.parametrize("schema", [None, "shop"])
def test_a_second_outbox_on_the_same_tables_uses_them(schema: str | None) -> None:
    metadata = sa.MetaData(schema=schema)
    first, second = Outbox(metadata), Outbox(metadata, notify=False)
    assert second.table is first.table
    assert dict(second.tables) == dict(first.tables)


def test_a_table_that_is_no_outbox_is_not_taken_for_one() -> None:
    metadata = sa.MetaData()
    sa.Table("outbox", metadata, sa.Column("id", sa.Integer, primary_key=True))
    with pytest.raises(LayoutError, match="'outbox': the metadata has a table of this name that is not an outbox"):
        Outbox(metadata)


def test_an_unknown_layout_gets_a_suggestion() -> None:
    with pytest.raises(
        LayoutError, match=r"expected one of .*pillarbox.*; got 'pilarbox'\. Did you mean 'pillarbox'\?"
    ):
        Outbox(sa.MetaData(), layout="pilarbox")


def test_a_base_instead_of_its_metadata_is_named() -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(TypeError, match=r"expected a sqlalchemy\.MetaData, e\.g\. Base\.metadata"):
        Outbox(Base)  # type: ignore[arg-type]


def test_the_number_of_lanes_is_the_layout_s(outbox: Outbox) -> None:
    small = Outbox(sa.MetaData(), layout=pillarbox_layout(lanes=2))
    engine = sa.create_engine("sqlite://")
    small.table.metadata.create_all(engine)
    with engine.begin() as db:
        small.put(db, *(Event("a", {}, key=f"k{number}") for number in range(50)))
        assert set(stored(db, "lane")) == {0, 1}
    with engine.begin() as db, pytest.raises(sa.exc.IntegrityError, match="outbox_lane"):
        outbox.put(db, *(Event("a", {}, key=f"k{number}") for number in range(50)))
    engine.dispose()


# -- checking ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100, 101])
def test_a_payload_above_the_limit_is_refused_before_any_sql(engine: sa.Engine, size: int) -> None:
    outbox = Outbox(sa.MetaData(), max_payload=100)
    events = [Event("small", b""), Event("large", bytes(size))]
    with engine.begin() as db:
        if size <= 100:
            outbox.put(db, *events)
        else:
            with pytest.raises(PayloadTooLarge, match=r"'large' \(.*\): its payload has 101 bytes, at most 100"):
                outbox.put(db, *events)
        assert stored(db, "type") == (["small", "large"] if size <= 100 else [])


def test_the_default_limit_is_a_megabyte(engine: sa.Engine, outbox: Outbox) -> None:
    with engine.begin() as db:
        outbox.put(db, Event("a", bytes(1024 * 1024)))
        with pytest.raises(PayloadTooLarge):
            outbox.put(db, Event("b", bytes(1024 * 1024 + 1)))


def test_what_is_not_an_event_is_refused(engine: sa.Engine, outbox: Outbox) -> None:
    with engine.begin() as db:
        with pytest.raises(TypeError, match=r"expected Event objects, got \[.*\. Unpack it: put\(…, \*events\)"):
            outbox.put(db, [Event("a", {})])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"expected Event objects, got 7$"):
            outbox.put(db, Event("a", {}), 7)  # type: ignore[arg-type]
        assert stored(db, "type") == []


def test_one_id_twice_in_a_put_is_refused(engine: sa.Engine, outbox: Outbox) -> None:
    event = Event("a", {})
    with engine.begin() as db, pytest.raises(InvalidEvent, match=rf"'a': id {event.id} is twice in one put"):
        outbox.put(db, event, Event("b", {}), event)


@pytest.mark.parametrize("target", [None, "engine", "maker", "cursor"])
def test_other_targets_are_named_in_the_error(engine: sa.Engine, outbox: Outbox, target: str | None) -> None:
    raw = sqlite3.connect(":memory:")
    given = {"engine": engine, "maker": Session, "cursor": raw.cursor()}.get(target or "")
    with pytest.raises(TypeError, match=r"put: expected a SQLAlchemy Session, .*; got .* use put_async\(\)\."):
        outbox.put(given)
    raw.close()


async def test_an_async_connection_that_was_never_opened_is_refused(outbox: Outbox) -> None:
    engine = create_async_engine("sqlite+aiosqlite://")
    with pytest.raises(TransactionError, match="closed or was never opened"):
        await outbox.put_async(AsyncConnection(engine), Event("a", {}))
    await engine.dispose()


def test_an_ended_transaction_is_refused(engine: sa.Engine, outbox: Outbox) -> None:
    with engine.connect() as db, db.begin() as transaction:
        transaction.rollback()
        with pytest.raises(TransactionError, match="transaction"):
            outbox.put(db, Event("a", {}))


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("where", ["engine", "options", "connection"])
def test_autocommit_is_refused_also_before_a_transaction_began(outbox: Outbox, where: str, begun: bool) -> None:
    engine = sa.create_engine("sqlite://", **({"isolation_level": "AUTOCOMMIT"} if where == "engine" else {}))
    if where == "options":
        engine = engine.execution_options(isolation_level="AUTOCOMMIT")
    sql: list[str] = []
    sa.event.listen(engine, "before_cursor_execute", lambda *args: sql.append(args[2]))
    with engine.connect() as db:
        if where == "connection":
            db = db.execution_options(isolation_level="AUTOCOMMIT")
        if begun:
            db.begin()
        with pytest.raises(TransactionError, match="another isolation level than AUTOCOMMIT"):
            outbox.put(db, Event("a", {}))
    assert sql == []
    engine.dispose()


def test_a_connection_may_leave_autocommit_again(engine: sa.Engine, outbox: Outbox) -> None:
    with engine.execution_options(isolation_level="AUTOCOMMIT").connect() as db:
        db = db.execution_options(isolation_level="SERIALIZABLE")
        outbox.put(db, Event("a", {}))
        db.commit()
        assert stored(db, "type") == ["a"]


# -- row factories of the application ------------------------------------------------------------------------


def test_a_driver_s_rows_may_be_of_any_kind(outbox: Outbox) -> None:
    connection = sqlite3.connect(":memory:")
    for table in outbox.tables.values():
        connection.execute(str(sa.schema.CreateTable(table).compile(dialect=sa.create_engine("sqlite://").dialect)))
    connection.execute("CREATE UNIQUE INDEX unique_id ON outbox (id)")
    connection.row_factory = lambda cursor, row: {"row": row}
    connection.text_factory = bytes
    event = Event("a", {})
    assert outbox.put(connection, event).new == (event,)
    assert outbox.put(connection, event, Event("b", {})).existing == (event,)
    connection.close()


# -- receipts ------------------------------------------------------------------------------------------------


def test_a_receipt_says_what_it_knows(engine: sa.Engine, outbox: Outbox) -> None:
    with Session(engine) as session:
        receipt = outbox.put(session, Event("a", {}), Event("b", {}))
        assert repr(receipt) == "<Receipt of 2 events, not flushed>"
        session.flush()
        assert repr(receipt) == "<Receipt of 2 events, 2 new>"


# -- traces --------------------------------------------------------------------------------------------------


def headers(db: sa.Connection) -> list[Any]:
    return [None if text is None else json.loads(text) for text in stored(db, "headers")]


def test_the_span_of_the_put_is_stored_also_when_the_flush_comes_later(engine: sa.Engine, outbox: Outbox) -> None:
    tracer = TracerProvider().get_tracer("test")
    own = {"traceparent": "00-11111111111111111111111111111111-2222222222222222-01"}
    with Session(engine) as session:
        with tracer.start_as_current_span("order") as span:
            outbox.put(session, Event("a", {}), Event("b", {}, headers={"x": 1}), Event("c", {}, headers=own))
        outbox.put(session, Event("d", {}))
        with tracer.start_as_current_span("other"):
            session.commit()
        context = span.get_span_context()
        expected = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        assert headers(session.connection()) == [
            {"traceparent": expected},
            {"x": 1, "traceparent": expected},
            own,
            None,
        ]


def test_without_a_span_no_trace_is_stored(engine: sa.Engine, outbox: Outbox) -> None:
    assert not trace.get_current_span().get_span_context().is_valid
    with engine.begin() as db:
        outbox.put(db, Event("a", {}), Event("b", {}, headers={"x": 1}))
        assert headers(db) == [None, {"x": 1}]


@pytest.mark.parametrize("missing", ["opentelemetry", "greenlet"])
def test_puts_work_without_optional_packages(missing: str) -> None:
    script = f"""
import sys
sys.modules[{missing!r}] = None
import sqlalchemy as sa
from sqlalchemy.orm import Session
from pillarbox import Event, Outbox
outbox = Outbox(sa.MetaData())
engine = sa.create_engine("sqlite://", poolclass=sa.pool.StaticPool)
outbox.table.metadata.create_all(engine)
with Session(engine) as session:
    outbox.put(session, Event("a", {{}}))
    session.commit()
with engine.begin() as db:
    outbox.put(db, Event("b", {{}}))
    print(db.exec_driver_sql("SELECT type, headers FROM outbox").all())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr) == ("[('a', None), ('b', None)]\n", "")


def test_the_store_has_the_outbox_s_table_and_retention() -> None:
    outbox = Outbox(sa.MetaData(), table="billing.events", retention="2d")
    store = outbox.store("postgresql://localhost/shop")
    assert store.tables["outbox"].fullname == "billing.events"
    assert store.retention == timedelta(days=2)
