"""What is particular to faststream-outbox's table: headers, timers, its counters, its queues."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from pillarbox import Event, InvalidEvent, Retry
from pillarbox.errors import Unsupported
from pillarbox.event import DELIVERED, RELEASED, Dead
from pillarbox.stores import Counts, Filter, Mode
from tests.contract.faststream import either, put, rows, with_dlq, without_dlq
from tests.contract.layouts import HOUR, IN_AN_HOUR, NOW, Around, LayoutKit, claim, names
from tests.contract.stores import sync_engine, until
from tests.servers import server_url

AT_ONCE = Retry("503", timedelta(0))
EVERYTHING = Filter()
INSERT = "INSERT INTO {outbox} (queue, payload) VALUES (:queue, 'x')"


def change(kit: LayoutKit, verb: str, key: str, topic: str = "mails", **given: Any) -> int:
    with kit.engine.begin() as db:
        found: int = getattr(kit.outbox, verb)(db, dedup_key=key, topic=topic, **given)
        return found


# -- events and rows ---------------------------------------------------------------------------------------------------


@without_dlq
async def test_event_is_spread_over_columns_and_headers_and_comes_back_whole(layout_kit: LayoutKit) -> None:
    event = put(
        layout_kit,
        "order.placed",
        topic="orders",
        key="o-1",
        headers={"tenant": "acme", "retries": "3"},
        dedup_key="once",
        correlation_id="c-1",
        aggregate_type="order",
        aggregate_id="1",
        schema_version="2",
        causation_id="cause",
        source="shop",
        max_attempts=4,
    )
    [row] = rows(layout_kit, "queue, payload, headers, timer_id")
    assert (row["queue"], bytes(row["payload"]), row["timer_id"]) == ("orders", b'{"name":"order.placed"}', "once")
    assert row["headers"] == {
        "tenant": "acme",
        "retries": "3",
        "pillarbox-id": str(event.id),
        "pillarbox-type": "order.placed",
        "pillarbox-key": "o-1",
        "pillarbox-aggregate-type": "order",
        "pillarbox-aggregate-id": "1",
        "pillarbox-schema-version": "2",
        "pillarbox-causation-id": "cause",
        "pillarbox-source": "shop",
        "pillarbox-max-attempts": "4",
        "content-type": "application/json",
        "correlation_id": "c-1",
    }
    [found] = (await claim(await layout_kit.open())).claims
    read = found.event
    assert (read.id, read.type, read.topic, read.key) == (event.id, "order.placed", "orders", "o-1")
    assert (read.payload, read.content_type) == (b'{"name":"order.placed"}', "application/json")
    assert dict(read.headers) == {"tenant": "acme", "retries": "3"}
    assert (read.dedup_key, read.correlation_id, read.causation_id) == ("once", "c-1", "cause")
    assert (read.aggregate_type, read.aggregate_id, read.schema_version) == ("order", "1", "2")
    assert (read.source, read.max_attempts) == ("shop", 4)


@without_dlq
def test_plain_event_has_no_header_but_its_id_and_content_type(layout_kit: LayoutKit) -> None:
    event = put(layout_kit, "orders")
    [row] = rows(layout_kit, "queue, headers")
    assert row == {
        "queue": "orders",
        "headers": {"pillarbox-id": str(event.id), "content-type": "application/json"},
    }


@without_dlq
async def test_row_without_headers_is_an_event_of_its_queue_with_one_id_for_ever(layout_kit: LayoutKit) -> None:
    layout_kit.execute(INSERT, queue="plain")
    layout_kit.execute(INSERT, queue="plain")
    store = await layout_kit.open()
    ids: list[list[UUID]] = []
    for _ in range(2):
        batch = await claim(store)
        events = [each.event for each in batch.claims]
        assert [(each.type, each.topic, each.key, each.payload) for each in events] == [
            ("plain", "plain", None, b"x")
        ] * 2
        assert [each.content_type for each in events] == ["application/octet-stream"] * 2
        ids.append([each.id for each in events])
        await batch.settle([RELEASED] * 2)
    assert ids[0] == ids[1]
    assert ids[0][0] != ids[0][1]


@without_dlq
def test_id_in_a_header_keeps_nothing_apart(layout_kit: LayoutKit) -> None:
    event = put(layout_kit, "orders")
    assert layout_kit.put(event).new == (event,)
    assert [row["headers"]["pillarbox-id"] for row in rows(layout_kit)] == [str(event.id)] * 2


@without_dlq
@pytest.mark.parametrize("header", ["pillarbox-id", "content-type", "correlation_id"])
def test_header_that_the_table_needs_for_the_event_is_refused(layout_kit: LayoutKit, header: str) -> None:
    with pytest.raises(InvalidEvent, match=f"needs the header '{header}'"):
        put(layout_kit, "orders", headers={header: "mine"}, correlation_id="c-1")
    assert rows(layout_kit) == []


@without_dlq
async def test_row_whose_headers_are_no_object_is_claimed_as_defective(layout_kit: LayoutKit) -> None:
    layout_kit.execute("INSERT INTO {outbox} (queue, payload, headers) VALUES ('odd', 'x', '[1]')")
    layout_kit.execute(INSERT, queue="plain")
    batch = await claim(await layout_kit.open())
    assert [(each.event.topic, each.defect is None) for each in batch.claims] == [("odd", False), ("plain", True)]


@without_dlq
def test_queue_longer_than_its_column_is_refused_before_any_statement(layout_kit: LayoutKit) -> None:
    with layout_kit.engine.begin() as db, layout_kit.no_statements(), pytest.raises(InvalidEvent):
        layout_kit.outbox.put(db, Event("t", {}, topic="q" * 256))


@either
def test_half_a_lease_is_refused_by_the_table(layout_kit: LayoutKit) -> None:
    layout_kit.execute(INSERT, queue="orders")
    for half in ("acquired_at = now()", "acquired_token = gen_random_uuid()"):
        with pytest.raises(IntegrityError, match="lease_ck"):
            layout_kit.execute(f"UPDATE {{outbox}} SET {half}")


# -- timers ------------------------------------------------------------------------------------------------------------


@without_dlq
def test_timer_is_one_live_row_of_its_queue(layout_kit: LayoutKit) -> None:
    first = put(layout_kit, "first", topic="mails", dedup_key="reminder-7", delay=HOUR)
    again, elsewhere = (Event("again", {}, topic=topic, dedup_key="reminder-7") for topic in ("mails", "texts"))
    receipt = layout_kit.put(again, elsewhere)
    assert (receipt.new, receipt.existing) == ((elsewhere,), (again,))
    [row, other] = rows(layout_kit, "queue, timer_id, headers, next_attempt_at")
    assert (row["queue"], row["timer_id"], row["headers"]["pillarbox-id"]) == ("mails", "reminder-7", str(first.id))
    assert row["next_attempt_at"] == IN_AN_HOUR
    assert (other["queue"], other["timer_id"], other["next_attempt_at"]) == ("texts", "reminder-7", NOW)


@without_dlq
def test_second_event_of_a_timer_in_one_put_is_existing(layout_kit: LayoutKit) -> None:
    one, two = (Event(name, {}, topic="mails", dedup_key="reminder-7") for name in ("one", "two"))
    receipt = layout_kit.put(one, two)
    assert (receipt.new, receipt.existing) == ((one,), (two,))


@either
async def test_timer_is_free_again_after_delivery(layout_kit: LayoutKit, mode: Mode) -> None:
    put(layout_kit, "mails", dedup_key="reminder-7")
    await (await claim(await layout_kit.open(), mode=mode)).settle([DELIVERED])
    again = Event("mails", {}, dedup_key="reminder-7")
    assert layout_kit.put(again).new == (again,)


@with_dlq
async def test_timer_is_free_again_after_death(layout_kit: LayoutKit) -> None:
    put(layout_kit, "mails", dedup_key="reminder-7")
    await (await claim(await layout_kit.open())).settle([Dead("400")])
    assert rows(layout_kit, "queue, timer_id", "dead") == [{"queue": "mails", "timer_id": "reminder-7"}]
    again = Event("mails", {}, dedup_key="reminder-7")
    assert layout_kit.put(again).new == (again,)


@without_dlq
async def test_timer_is_taken_as_long_as_its_dead_row_is_parked(layout_kit: LayoutKit) -> None:
    put(layout_kit, "mails", dedup_key="reminder-7")
    store = await layout_kit.open()
    await (await claim(store)).settle([Dead("400")])
    again = Event("mails", {}, dedup_key="reminder-7")
    assert layout_kit.put(again).existing == (again,)
    assert await store.drop(EVERYTHING, actor="ann") == 1
    assert layout_kit.put(again).new == (again,)


@either
async def test_timer_is_cancelled_before_it_is_claimed_and_not_after(layout_kit: LayoutKit) -> None:
    put(layout_kit, "early", dedup_key="early", delay=HOUR)
    put(layout_kit, "held", dedup_key="held")
    store = await layout_kit.open()
    assert names(await claim(store)) == "held"
    assert [change(layout_kit, "cancel", key, key) for key in ("early", "held", "unknown", "early")] == [1, 0, 0, 0]
    assert [row["timer_id"] for row in rows(layout_kit)] == ["held"]


@either
async def test_timer_of_another_queue_is_left_alone(layout_kit: LayoutKit) -> None:
    put(layout_kit, "mails", dedup_key="reminder-7")
    put(layout_kit, "orders", dedup_key="reminder-7")
    assert change(layout_kit, "cancel", "reminder-7", "orders") == 1
    assert [row["queue"] for row in rows(layout_kit)] == ["mails"]
    with layout_kit.engine.begin() as db, pytest.raises(TypeError, match="unique within a topic; give topic= too"):
        layout_kit.outbox.cancel(db, dedup_key="reminder-7")


@either
async def test_cancelled_timer_comes_back_with_a_rollback(layout_kit: LayoutKit) -> None:
    put(layout_kit, "mails", dedup_key="reminder-7")
    with layout_kit.engine.connect() as db:
        assert layout_kit.outbox.cancel(db, dedup_key="reminder-7", topic="mails") == 1
        db.rollback()
    assert names(await claim(await layout_kit.open())) == "mails"


@either
async def test_timer_is_extended_in_its_place(layout_kit: LayoutKit) -> None:
    put(layout_kit, "mails", dedup_key="reminder-7")
    [before] = rows(layout_kit, "id, headers, created_at, timer_id")
    assert change(layout_kit, "reschedule", "reminder-7", due_at=datetime.now(UTC) + HOUR) == 1
    [after] = rows(layout_kit, "id, headers, created_at, timer_id, next_attempt_at")
    assert after == {**before, "next_attempt_at": IN_AN_HOUR}
    store = await layout_kit.open()
    assert names(await claim(store)) == ""
    assert change(layout_kit, "reschedule", "reminder-7", due_at=datetime.now(UTC) - HOUR) == 1
    await layout_kit.look_again()
    assert names(await claim(store)) == "mails"
    assert change(layout_kit, "reschedule", "reminder-7", due_at=datetime.now(UTC)) == 0


@without_dlq
async def test_dead_timer_is_neither_cancelled_nor_rescheduled(layout_kit: LayoutKit) -> None:
    put(layout_kit, "mails", dedup_key="reminder-7")
    store = await layout_kit.open()
    await (await claim(store)).settle([Dead("400")])
    assert change(layout_kit, "cancel", "reminder-7") == 0
    assert change(layout_kit, "reschedule", "reminder-7", due_at=datetime.now(UTC)) == 0
    assert (await store.counts()).dead == 1


@either
def test_event_is_not_cancelled_by_its_id_which_no_column_has(layout_kit: LayoutKit) -> None:
    with layout_kit.engine.begin() as db, pytest.raises(Unsupported, match="no column for the event's id"):
        layout_kit.outbox.cancel(db, uuid4())


@either
async def test_event_due_in_the_past_is_claimed_at_once(layout_kit: LayoutKit, mode: Mode) -> None:
    put(layout_kit, "past", due_at=datetime.now(UTC) - HOUR)
    put(layout_kit, "zero", delay=timedelta(0))
    assert [row["next_attempt_at"] for row in rows(layout_kit)] == [Around(-HOUR), NOW]
    batch = await claim(await layout_kit.open(), mode=mode)
    assert names(batch) == "past zero"
    await batch.abandon()


# -- attempts ----------------------------------------------------------------------------------------------------------


@either
async def test_every_attempt_is_counted_and_timed(layout_kit: LayoutKit) -> None:
    put(layout_kit, "flaky")
    store = await layout_kit.open()
    what = "attempts_count, deliveries_count, first_attempt_at, last_attempt_at"
    for attempt in (1, 2, 3):
        batch = await claim(store)
        assert [each.attempt for each in batch.claims] == [attempt]
        [held] = rows(layout_kit, what)
        assert (held["attempts_count"], held["deliveries_count"]) == (attempt - 1, attempt)
        await batch.settle([AT_ONCE])
        [row] = rows(layout_kit, what)
        first = NOW if attempt == 1 else Around(-(attempt - 1) * HOUR)
        assert row == {
            "attempts_count": attempt,
            "deliveries_count": attempt,
            "first_attempt_at": first,
            "last_attempt_at": NOW,
        }
        layout_kit.execute(
            "UPDATE {outbox} SET first_attempt_at = {back[first_attempt_at]}, "
            "last_attempt_at = {back[last_attempt_at]}",
            seconds=3600,
        )


@either
async def test_release_is_a_delivery_but_no_attempt(layout_kit: LayoutKit) -> None:
    put(layout_kit, "unsent")
    store = await layout_kit.open()
    for deliveries in (1, 2):
        await (await claim(store)).settle([RELEASED])
        [row] = rows(layout_kit, "attempts_count, deliveries_count, first_attempt_at, last_attempt_at")
        assert list(row.values()) == [0, deliveries, None, None]


@either
async def test_claim_of_the_other_system_is_respected_until_its_lease_ends(layout_kit: LayoutKit) -> None:
    layout_kit.execute(INSERT, queue="orders")
    layout_kit.execute(
        "UPDATE {outbox} SET acquired_token = gen_random_uuid(), acquired_at = {ago}, deliveries_count = 1", seconds=20
    )
    store = await layout_kit.open()
    assert names(await claim(store, lease=timedelta(seconds=5))) == ""
    due_in = await store.next_due()
    assert due_in is not None
    assert timedelta(seconds=5) < due_in <= timedelta(seconds=40)
    layout_kit.execute("UPDATE {outbox} SET acquired_at = {ago}", seconds=61)
    await layout_kit.look_again()
    batch = await claim(store, lease=timedelta(seconds=5))
    assert [(each.event.topic, each.attempt) for each in batch.claims] == [("orders", 2)]
    [row] = rows(layout_kit, "attempts_count, deliveries_count")
    assert list(row.values()) == [1, 2]


@either
async def test_row_that_the_other_system_failed_keeps_its_count(layout_kit: LayoutKit) -> None:
    layout_kit.execute(
        "INSERT INTO {outbox} (queue, payload, attempts_count, deliveries_count, first_attempt_at, last_attempt_at) "
        "VALUES ('orders', 'x', 4, 6, {ago}, {ago})",
        seconds=7200,
    )
    batch = await claim(await layout_kit.open())
    assert [each.attempt for each in batch.claims] == [5]
    await batch.settle([AT_ONCE])
    [row] = rows(layout_kit, "attempts_count, deliveries_count, first_attempt_at, last_attempt_at")
    assert list(row.values()) == [5, 7, Around(-2 * HOUR), NOW]


# -- queues ------------------------------------------------------------------------------------------------------------


@either
async def test_all_queues_are_found_without_naming_them_and_the_oldest_row_goes_first(
    layout_kit: LayoutKit, mode: Mode
) -> None:
    for queue, seconds in (("b", 30), ("a", 20), ("c", 40), ("a", 50), ("b", 10)):
        layout_kit.execute(
            "INSERT INTO {outbox} (queue, payload, next_attempt_at) VALUES (:queue, 'x', {ago})",
            queue=queue,
            seconds=seconds,
        )
    store = await layout_kit.open()
    first = await claim(store, 3, mode=mode)
    assert (names(first), first.is_full) == ("a c b", True)
    await first.settle([DELIVERED] * 3)
    rest = await claim(store, 3, mode=mode)
    assert names(rest) == "a b"
    await rest.settle([DELIVERED] * 2)
    assert rows(layout_kit) == []


@either
async def test_topics_restrict_a_store_to_their_queues(layout_kit: LayoutKit, mode: Mode) -> None:
    for queue in ("a", "b", "c", "d"):
        layout_kit.execute(INSERT, queue=queue)
    store = await layout_kit.open(topics=["a", "c", "unknown"])
    batch = await claim(store, mode=mode)
    assert sorted(names(batch).split()) == ["a", "c"]
    await batch.settle([DELIVERED] * 2)
    assert names(await claim(store, mode=mode)) == ""
    assert await store.counts() == Counts()
    assert [row["queue"] for row in rows(layout_kit)] == ["b", "d"]
    assert (await (await layout_kit.open()).counts()).new == 2


@either
async def test_lapsed_claims_of_other_queues_are_left_to_others(layout_kit: LayoutKit) -> None:
    layout_kit.execute(INSERT, queue="b")
    layout_kit.execute("UPDATE {outbox} SET acquired_token = gen_random_uuid(), acquired_at = {ago}", seconds=3600)
    before = rows(layout_kit)
    mine = await layout_kit.open(topics=["a"])
    assert names(await claim(mine, max_attempts=1)) == ""
    assert await mine.next_due() is None
    assert rows(layout_kit) == before


@without_dlq
async def test_listing_changes_nothing_and_shows_future_rows(layout_kit: LayoutKit) -> None:
    for number in range(3):
        put(layout_kit, "now", key=str(number))
    put(layout_kit, "future", delay=HOUR)
    before = rows(layout_kit)
    store = await layout_kit.open()
    assert [record.event.type for record in await store.events(EVERYTHING)] == ["future", "now", "now", "now"]
    assert [record.event.type for record in await store.events(Filter(topic="future"))] == ["future"]
    assert [record.event.key for record in await store.events(EVERYTHING, state="ready", limit=2)] == ["2", "1"]
    assert rows(layout_kit) == before


@without_dlq
async def test_claim_walks_the_index_of_due_rows(layout_kit: LayoutKit) -> None:
    layout_kit.execute(
        "INSERT INTO {outbox} (queue, payload, next_attempt_at) SELECT 'q' || n % 5, 'x', now() + n * interval '1 h' "
        "FROM generate_series(-2000, 8000) AS n"
    )
    layout_kit.execute("ANALYZE {outbox}")
    store = await layout_kit.open()
    sent: list[tuple[str, Any]] = []
    engine = sync_engine(store)
    sa.event.listen(engine, "before_cursor_execute", lambda _, __, sql, params, *___: sent.append((sql, params)))
    batch = await claim(store, 10)
    [(sql, params)] = [(sql, params) for sql, params in sent if "SKIP LOCKED" in sql and "queue" in sql]
    plan = await store.run(lambda db: "\n".join(db.exec_driver_sql(f"EXPLAIN {sql}", params).scalars()))
    await batch.abandon()
    assert f"Index Scan using {layout_kit.outbox.table.name}_pending_idx" in plan
    assert "Seq Scan" not in plan


@either
async def test_put_wakes_a_waiting_store_at_its_commit(layout_kit: LayoutKit) -> None:
    store = await layout_kit.open()

    async def is_notified() -> bool:
        return store.is_notified  # type: ignore[attr-defined,no-any-return]

    await until(is_notified)
    put(layout_kit, "orders")
    assert await store.wait(timedelta(seconds=30)) is True


async def listen(kit: LayoutKit, heard: list[str]) -> asyncpg.Connection:
    connection = await asyncpg.connect(server_url("postgres"))
    await connection.add_listener(f"outbox_{kit.outbox.table.name}", lambda *args: heard.append(str(args[3])))
    return connection


@without_dlq
async def test_each_queue_is_named_once_by_a_transaction_that_puts_and_not_by_one_that_does_not(
    layout_kit: LayoutKit,
) -> None:
    heard: list[str] = []
    connection = await listen(layout_kit, heard)

    async def queues() -> list[str]:
        await connection.execute("SELECT 1")  # what was sent before comes before the answer
        named = sorted(heard)
        heard.clear()
        return named

    put_in = layout_kit.outbox.put
    timer = Event("orders", {}, dedup_key="once")
    try:
        with layout_kit.engine.begin() as db:
            put_in(db, Event("orders", {}))
            put_in(db, Event("mails", {}), timer, Event("orders", {}))
        assert await queues() == ["mails", "orders"]
        with layout_kit.engine.begin() as db:
            put_in(db, Event("orders", {}, dedup_key="once"))
        assert await queues() == []
        with layout_kit.engine.begin() as db:
            savepoint = db.begin_nested()
            put_in(db, Event("orders", {}))
            savepoint.rollback()
        assert await queues() == []
        with layout_kit.engine.begin() as db:
            savepoint = db.begin_nested()
            put_in(db, Event("orders", {}))
            savepoint.rollback()
            put_in(db, Event("orders", {}))
        assert await queues() == ["orders"]
    finally:
        await connection.close()
