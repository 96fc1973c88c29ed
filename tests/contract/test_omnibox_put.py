"""Putting events into omni-box's tables: what is refused before any SQL, and one row for one idempotency key."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from pillarbox import Event, InvalidEvent
from pillarbox.receipt import Receipt
from tests.contract.layouts import HOUR, NOW, Around, LayoutKit, claim, names

OUTBOXES = ["omnibox-postgresql", "omnibox-partitioned-postgresql"]

each_outbox = pytest.mark.parametrize("layout_kit", OUTBOXES, indirect=True)
partitioned = pytest.mark.parametrize("layout_kit", OUTBOXES[1:], indirect=True)


class Interrupted(Exception):
    """The application changes its mind."""


# -- what is refused before any SQL ------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"key": None}, "column 'partition_key' .* the event has no key"),
    ({"aggregate_type": None}, "column 'aggregate_type' .* the event has no aggregate_type"),
    ({"aggregate_id": None}, "column 'aggregate_id' .* the event has no aggregate_id"),
    ({"aggregate_id": "order-7"}, "column 'aggregate_id' .* expected a UUID .* got 'order-7'"),
    ({"type": "t" * 101}, "column 'event_type' .* at most 100 characters fit, the event's type has 101"),
    ({"aggregate_type": "a" * 51}, "column 'aggregate_type' .* at most 50 characters fit"),
    ({"dedup_key": "d" * 129}, "column 'idempotency_key' .* at most 128 characters fit"),
    ({"correlation_id": "c" * 65}, "column 'correlation_id' .* at most 64 characters fit"),
    ({"causation_id": "c" * 65}, "column 'causation_id' .* at most 64 characters fit"),
    ({"payload": [1, 2]}, "payload: .* expects a JSON object that is not empty, got b'\\[1,2\\]'"),
    ({"payload": {}}, "payload: .* expects a JSON object that is not empty, got b'{}'"),
    ({"payload": None}, "payload: .* expects a JSON object that is not empty, got b'null'"),
    ({"payload": b"\x00"}, "column 'payload' .* holds JSON, the event's content type is 'application/octet-stream'"),
    (
        {"payload": b"{", "content_type": "application/json"},
        "column 'payload' .* holds JSON, which the payload is not",
    ),
    ({"payload": {"text": "x" * 1_000_000}}, "expects a payload of at most 1000000 bytes, got 1000011"),
    ({"headers": {"n": 1}}, "header 'n': .* takes text for headers only, got 1"),
    ({"headers": {"n": None}}, "header 'n': .* takes text for headers only, got None"),
    ({"headers": {"pillarbox-source": "x"}, "source": "shop"}, "needs the header 'pillarbox-source'"),
    ({"headers": {f"h{number}": "x" for number in range(101)}}, "at most 100 headers, got 101"),
    ({"headers": {"h" * 65: "x"}}, "names of at most 64 characters"),
    ({"headers": {"h": "x" * 513}}, "values of at most 512 characters"),
    ({"headers": {"Tenant": "a", "tenant": "b"}}, "'tenant' twice"),
    ({"delay": timedelta(days=366)}, "due at most 365 days ahead"),
    ({"due_at": datetime.now(UTC) + timedelta(days=366)}, "due at most 365 days ahead"),
]


@each_outbox
@pytest.mark.parametrize(("given", "message"), REFUSED, ids=lambda given: str(given)[:40])
def test_event_that_the_table_or_omnibox_could_not_take_is_refused_before_any_sql(
    layout_kit: LayoutKit, given: dict[str, Any], message: str
) -> None:
    fields = {"type": "placed", "payload": {"n": 1}, **layout_kit.spec.fields(), **given}
    event = Event(fields.pop("type"), fields.pop("payload"), **fields)
    with layout_kit.engine.connect() as db, layout_kit.no_statements(), pytest.raises(InvalidEvent, match=message):
        layout_kit.outbox.put(db, event)
    assert layout_kit.count() == 0


@each_outbox
def test_what_fits_exactly_is_taken(layout_kit: LayoutKit) -> None:
    fits = layout_kit.event(
        "é" * 100,
        aggregate_type="a" * 50,
        dedup_key="d" * 128,
        correlation_id="c" * 64,
        topic="t" * 255,
        headers={"h" * 64: "x" * 512},
        delay=timedelta(days=364),
    )
    assert layout_kit.put(fits).new == (fits,)


@each_outbox
def test_payload_is_fixed_when_the_event_is_made(layout_kit: LayoutKit) -> None:
    body = {"n": 1}
    placed = layout_kit.event("placed", body)
    body["n"] = 2
    layout_kit.put(placed)
    assert layout_kit.column(placed.id, "payload") == {"n": 1}


@pytest.mark.parametrize("payload", [float("nan"), float("inf"), object()])
def test_payload_without_a_json_form_is_refused(payload: object) -> None:
    with pytest.raises(InvalidEvent):
        Event("placed", {"n": payload})


def test_due_time_without_a_zone_is_refused() -> None:
    with pytest.raises(InvalidEvent, match="has no time zone"):
        Event("placed", {"n": 1}, due_at=datetime(2030, 1, 1))  # noqa: DTZ001


@each_outbox
def test_due_time_of_another_zone_is_the_same_instant(layout_kit: LayoutKit) -> None:
    in_tokyo = (datetime.now(UTC) + HOUR).astimezone(timezone(timedelta(hours=9)))
    row = layout_kit.add("later", due_at=in_tokyo)
    assert layout_kit.column(row, "scheduled_at") == Around(HOUR)


@each_outbox
async def test_row_is_never_due_before_it_was_put(layout_kit: LayoutKit) -> None:
    # omni-box cannot read such a row, and stops at it.
    row = layout_kit.add("late", due_at=datetime.now(UTC) - HOUR)
    assert layout_kit.column(row, "scheduled_at") == NOW
    with layout_kit.engine.begin() as db:
        layout_kit.outbox.reschedule(db, row, due_at=datetime.now(UTC) - HOUR)
    assert layout_kit.column(row, "scheduled_at") == layout_kit.column(row, "created_at")
    assert names(await claim(await layout_kit.open())) == "late"


# -- the caller's transaction ------------------------------------------------------------------------------------------


@each_outbox
def test_event_goes_with_the_callers_transaction(layout_kit: LayoutKit) -> None:
    kept, gone = layout_kit.event("kept"), layout_kit.event("gone")
    with layout_kit.engine.begin() as db:
        layout_kit.outbox.put(db, kept)
    with suppress(Interrupted), layout_kit.engine.begin() as db:
        layout_kit.outbox.put(db, gone)
        raise Interrupted
    assert (layout_kit.row(kept.id) is not None, layout_kit.row(gone.id)) == (True, None)


@each_outbox
@pytest.mark.parametrize("shared", ["id", "dedup_key"])
def test_second_put_finds_the_first_and_the_transaction_goes_on(layout_kit: LayoutKit, shared: str) -> None:
    first = layout_kit.event("first", dedup_key="k")
    same: dict[str, Any] = {"id": first.id} if shared == "id" else {"dedup_key": "k"}
    second, third = layout_kit.event("second", **same), layout_kit.event("third", dedup_key="other")
    with layout_kit.engine.begin() as db:
        assert layout_kit.outbox.put(db, first).new == (first,)
        receipt = layout_kit.outbox.put(db, second, third)
        assert (receipt.new, receipt.existing) == ((third,), (second,))
        assert layout_kit.outbox.put(db, layout_kit.event("fourth")).existing == ()
    assert (layout_kit.count(), layout_kit.column(first.id, "event_type")) == (3, "first")


@each_outbox
def test_of_two_events_with_one_key_in_one_put_the_first_is_written(layout_kit: LayoutKit) -> None:
    first, second = layout_kit.event("first", dedup_key="k"), layout_kit.event("second", dedup_key="k")
    receipt = layout_kit.put(first, second)
    assert (receipt.new, receipt.existing, layout_kit.count()) == ((first,), (second,), 1)


@each_outbox
def test_put_of_nothing_sends_nothing(layout_kit: LayoutKit) -> None:
    with layout_kit.engine.connect() as db, layout_kit.no_statements():
        receipt = layout_kit.outbox.put(db)
    assert (receipt.new, receipt.existing) == ((), ())


@each_outbox
@pytest.mark.parametrize("shared", ["id", "dedup_key"])
@pytest.mark.parametrize("target", ["connection", "session", "async connection", "asyncpg", "psycopg", "async psycopg"])
async def test_two_puts_at_once_give_one_row(layout_kit: LayoutKit, shared: str, target: str) -> None:
    first = layout_kit.event("first", dedup_key="k")
    same: dict[str, Any] = {"id": first.id} if shared == "id" else {"dedup_key": "k"}
    second = layout_kit.event("second", **same)
    with layout_kit.engine.connect() as db:
        assert layout_kit.outbox.put(db, first).new == (first,)
        waiting = asyncio.create_task(put_through(layout_kit, target, second))
        await until_blocked_by(layout_kit, db, waiting)
        await asyncio.to_thread(db.commit)
        receipt = await waiting
    assert (receipt.new, receipt.existing) == ((), (second,))
    assert (layout_kit.count(), layout_kit.column(first.id, "event_type")) == (1, "first")


@each_outbox
async def test_second_put_is_written_when_the_first_rolls_back(layout_kit: LayoutKit) -> None:
    first, second = layout_kit.event("first", dedup_key="k"), layout_kit.event("second", dedup_key="k")
    with layout_kit.engine.connect() as db:
        layout_kit.outbox.put(db, first)
        waiting = asyncio.create_task(put_through(layout_kit, "connection", second))
        await until_blocked_by(layout_kit, db, waiting)
        await asyncio.to_thread(db.rollback)
        receipt = await waiting
    assert (receipt.new, layout_kit.count()) == ((second,), 1)


async def put_through(layout_kit: LayoutKit, target: str, event: Event) -> Receipt:
    """Put one event in a transaction of its own and commit it."""
    outbox, url = layout_kit.outbox, layout_kit.database.url
    dsn = url.set(drivername="postgresql").render_as_string(hide_password=False)

    def put() -> Receipt:
        if target == "psycopg":
            with psycopg.connect(dsn) as connection:
                return outbox.put(connection, event)
        if target == "session":
            with Session(layout_kit.engine) as session:
                receipt = outbox.put(session, event)
                session.commit()
                return receipt
        with layout_kit.engine.begin() as db:
            return outbox.put(db, event)

    if target in ("connection", "session", "psycopg"):
        return await asyncio.to_thread(put)
    if target == "asyncpg":
        raw = await asyncpg.connect(dsn)
        try:
            async with raw.transaction():
                return await outbox.put_async(raw, event)
        finally:
            await raw.close()
    if target == "async psycopg":
        async with await psycopg.AsyncConnection.connect(dsn) as alone:
            return await outbox.put_async(alone, event)
    engine = create_async_engine(url.set(drivername="postgresql+asyncpg"))
    try:
        async with engine.begin() as connection:
            return await outbox.put_async(connection, event)
    finally:
        await engine.dispose()


async def until_blocked_by(layout_kit: LayoutKit, db: sa.Connection, waiting: asyncio.Task[Any]) -> None:
    """Wait until somebody waits for a lock of this connection's."""
    number = db.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    query = f"SELECT count(*) FROM pg_stat_activity WHERE {number} = ANY(pg_blocking_pids(pid))"
    async with asyncio.timeout(10):
        while not waiting.done():
            with layout_kit.engine.connect() as other:
                if other.exec_driver_sql(query).scalar_one():
                    return
            await asyncio.sleep(0.01)
    raise AssertionError(f"the second put did not wait: {waiting.result()}")


@partitioned
def test_row_lands_in_the_partition_of_its_month(layout_kit: LayoutKit) -> None:
    row = layout_kit.add("placed")
    table = layout_kit.database.names["outbox"]
    with layout_kit.engine.connect() as db:
        query = sa.text(f"SELECT tableoid::regclass::text, created_at FROM {table} WHERE id = :id")
        [(partition, created_at)] = db.execute(query, {"id": row}).all()
    assert partition == f"{table}_{created_at.astimezone(UTC):%Y_%m}"
