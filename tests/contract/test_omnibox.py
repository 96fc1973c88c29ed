"""omni-box's tables: fields and columns, attempts, its workers beside ours, what operators do, spoiled rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa

from pillarbox import Constant, Event, Relay, Retry, Unsupported
from pillarbox.errors import ConfigError, SchemaError
from pillarbox.event import DELIVERED, RELEASED, Dead
from pillarbox.sinks.memory import MemorySink
from pillarbox.stores import Filter, Mode, Settlement
from pillarbox.stores.url import open_store
from tests.contract.layouts import HOUR, NOW, OWNER, Around, LayoutKit, claim, names

OUTBOXES = ["omnibox-postgresql", "omnibox-partitioned-postgresql"]
INBOXES = ["omnibox-inbox-postgresql", "omnibox-inbox-partitioned-postgresql"]
AGGREGATE = "c0ffee00-0000-4000-8000-000000000001"
SOON = Constant(timedelta(milliseconds=1), max_attempts=20)

each_outbox = pytest.mark.parametrize("layout_kit", OUTBOXES, indirect=True)
each_inbox = pytest.mark.parametrize("layout_kit", INBOXES, indirect=True)
each_table = pytest.mark.parametrize("layout_kit", OUTBOXES + INBOXES, indirect=True)
partitioned = pytest.mark.parametrize("layout_kit", OUTBOXES[1:], indirect=True)


# -- fields and columns ------------------------------------------------------------------------------------------------


@each_outbox
def test_put_writes_each_field_into_its_column(layout_kit: LayoutKit) -> None:
    placed = Event(
        "order.placed",
        {"order": 7, "note": "köln"},
        topic="orders",
        key="o-7",
        headers={"tenant": "acme"},
        dedup_key="place-7",
        aggregate_type="order",
        aggregate_id=AGGREGATE,
        schema_version=2,
        correlation_id="corr-1",
        causation_id="cause-1",
        trace_id="4bf92f3577b34da6a3ce929d0e0e4736",
        source="shop",
        max_attempts=3,
    )
    layout_kit.put(placed)
    assert layout_kit.row(placed.id) == {
        "id": placed.id,
        "event_type": "order.placed",
        "aggregate_type": "order",
        "aggregate_id": UUID(AGGREGATE),
        "topic": "orders",
        "partition_key": "o-7",
        "payload": {"order": 7, "note": "köln"},
        "headers": {"tenant": "acme", "pillarbox-source": "shop"},
        "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
        "idempotency_key": "place-7",
        "correlation_id": "corr-1",
        "causation_id": "cause-1",
        "schema_version": "2",
        "status": "pending",
        "attempts_made": 0,
        "max_attempts": 3,
        "last_error": None,
        "scheduled_at": NOW,
        "completed_at": None,
        "locked_at": None,
        "locked_by": None,
        "created_at": NOW,
        "updated_at": NOW,
    }


@each_outbox
def test_fields_that_an_event_lacks_are_null_or_the_default(layout_kit: LayoutKit) -> None:
    placed = layout_kit.event("placed")
    layout_kit.put(placed)
    row = layout_kit.row(placed.id)
    assert row is not None
    lacking = ("headers", "trace_id", "idempotency_key", "correlation_id", "causation_id", "schema_version")
    assert {name: row[name] for name in lacking} == dict.fromkeys(lacking)
    assert (row["max_attempts"], row["topic"]) == (6, "placed")


@each_outbox
@pytest.mark.parametrize("count", [1, 3])
async def test_claimed_event_is_the_one_that_was_put(layout_kit: LayoutKit, mode: Mode, count: int) -> None:
    put = [
        layout_kit.event(
            f"placed.{number}",
            {"n": number},
            topic="orders",
            headers={"tenant": "acme"},
            dedup_key=f"place-{number}",
            schema_version="2",
            correlation_id="corr",
            causation_id="cause",
            trace_id="trace",
            source="shop",
            max_attempts=3,
        )
        for number in range(count)
    ]
    layout_kit.put(*put)
    batch = await claim(await layout_kit.open(), mode=mode)
    found = sorted((each.event for each in batch.claims), key=lambda event: event.type)
    for event, original in zip(found, put, strict=True):
        number = original.type[-1]
        # JSONB has a text of its own.
        assert event.payload == f'{{"n": {number}}}'.encode()
        assert event.created_at == NOW
        for name in ("id", "type", "topic", "key", "content_type", "headers", "dedup_key", "aggregate_type"):
            assert getattr(event, name) == getattr(original, name), name
        for name in ("aggregate_id", "schema_version", "correlation_id", "causation_id", "trace_id", "source"):
            assert getattr(event, name) == getattr(original, name), name
        assert event.max_attempts == 3
    await batch.abandon()


@each_outbox
@pytest.mark.parametrize(
    ("stored", "headers"),
    [
        (None, {}),
        ("{}", {}),
        ("null", {}),
        ('{"tenant": "acme"}', {"tenant": "acme"}),
        ('{"n": 1, "is": true, "x": null}', {"n": 1, "is": True, "x": None}),
    ],
)
async def test_headers_of_the_other_system_are_passed_on(
    layout_kit: LayoutKit, stored: str | None, headers: Any
) -> None:
    row = layout_kit.insert("placed")
    await layout_kit.set(row, "headers = CAST(:headers AS jsonb)", headers=stored)
    [found] = (await claim(await layout_kit.open())).claims
    assert (found.defect, dict(found.event.headers)) == (None, headers)


@each_table
@pytest.mark.parametrize(
    ("payload", "passed_on"),
    [
        ('{"b":1,"a":[1,2]}', b'{"a": [1, 2], "b": 1}'),
        ("[1,2]", b"[1, 2]"),
        ("3", b"3"),
        ('"text"', b'"text"'),
        ("null", b"null"),
        ("{}", b"{}"),
        ('{"n":12345678901234567890.123456789}', b'{"n": 12345678901234567890.123456789}'),
    ],
)
async def test_payload_is_passed_on_as_the_database_writes_it(
    layout_kit: LayoutKit, mode: Mode, payload: str, passed_on: bytes
) -> None:
    layout_kit.insert("placed", payload)
    batch = await claim(await layout_kit.open(), mode=mode)
    assert [(each.defect, each.event.payload) for each in batch.claims] == [(None, passed_on)]
    assert batch.claims[0].event.content_type == "application/json"
    await batch.abandon()


@each_inbox
async def test_inbox_row_has_its_source_and_its_type_for_a_topic(layout_kit: LayoutKit) -> None:
    row = layout_kit.insert("order.placed")
    [found] = (await claim(await layout_kit.open())).claims
    event = found.event
    assert (event.id, event.type, event.topic, event.source) == (row, "order.placed", "order.placed", "shop")
    assert (event.key, event.aggregate_type, event.max_attempts) == (None, None, 6)


@each_inbox
def test_inbox_takes_no_puts(layout_kit: LayoutKit) -> None:
    with layout_kit.no_statements(), pytest.raises(Unsupported, match="rows are written by its own system"):
        layout_kit.outbox.put(layout_kit.engine.connect(), Event("placed", {"n": 1}))


# -- attempts and errors -----------------------------------------------------------------------------------------------


@each_table
async def test_row_that_its_own_attempts_are_spent_for_is_failed(layout_kit: LayoutKit) -> None:
    row = layout_kit.insert("placed")
    await layout_kit.set(row, "max_attempts = 2")
    sink = MemorySink(is_quick=False)
    sink.fail(lambda event: True, Retry("503", timedelta(0)), times=None)
    async with Relay(await layout_kit.open(), sink, retry=SOON) as relay:
        assert await relay.run_once() == Settlement(retried=1)
        assert (layout_kit.column(row, "status"), layout_kit.column(row, "attempts_made")) == ("pending", 1)
        await layout_kit.look_again()
        assert await relay.run_once() == Settlement(dead=1)
    assert (layout_kit.column(row, "status"), layout_kit.column(row, "attempts_made")) == ("failed", 2)
    assert (len(sink.batches), layout_kit.column(row, "last_error")) == (2, "503")


@each_table
async def test_row_with_more_attempts_than_the_policy_has_keeps_them(layout_kit: LayoutKit) -> None:
    row = layout_kit.insert("placed")
    await layout_kit.set(row, "max_attempts = 9")
    sink = MemorySink(is_quick=False)
    sink.fail(lambda event: True, Retry("503", timedelta(0)), times=None)
    async with Relay(await layout_kit.open(), sink, retry=Constant(timedelta(milliseconds=1), max_attempts=1)) as relay:
        for _ in range(3):
            await layout_kit.look_again()
            assert await relay.run_once() == Settlement(retried=1)
    assert (layout_kit.column(row, "status"), layout_kit.column(row, "attempts_made")) == ("pending", 3)


@each_table
async def test_retry_without_an_attempt_left_does_not_strand_the_row(layout_kit: LayoutKit, mode: Mode) -> None:
    row = layout_kit.insert("placed")
    await layout_kit.set(row, "max_attempts = 1")
    batch = await claim(await layout_kit.open(), mode=mode)
    await batch.settle([Retry("503", HOUR)])
    assert (layout_kit.column(row, "status"), layout_kit.column(row, "attempts_made")) == ("failed", 1)


@each_table
async def test_release_of_the_last_attempt_leaves_the_row_pending(layout_kit: LayoutKit) -> None:
    row = layout_kit.insert("placed")
    await layout_kit.set(row, "max_attempts = 1")
    store = await layout_kit.open()
    batch = await claim(store)
    await batch.settle([RELEASED])
    assert (layout_kit.column(row, "status"), layout_kit.column(row, "attempts_made")) == ("pending", 0)
    assert names(await claim(store)) == "placed"


@each_table
async def test_attempts_lowered_meanwhile_do_not_stop_the_batch(layout_kit: LayoutKit) -> None:
    first, second = layout_kit.insert("first"), layout_kit.insert("second")
    for row in (first, second):
        await layout_kit.set(row, "attempts_made = 4")
    batch = await claim(await layout_kit.open())
    await layout_kit.set(first, "max_attempts = 4")
    assert await batch.settle([Retry("503", HOUR)] * 2) == Settlement(retried=2)
    assert (layout_kit.column(first, "status"), layout_kit.column(first, "attempts_made")) == ("failed", 4)
    assert (layout_kit.column(second, "status"), layout_kit.column(second, "attempts_made")) == ("pending", 5)


@each_table
async def test_row_without_attempts_left_is_not_claimed(layout_kit: LayoutKit, mode: Mode) -> None:
    row = layout_kit.insert("spent")
    await layout_kit.set(row, "attempts_made = 6")
    assert names(await claim(await layout_kit.open(), mode=mode)) == ""


@each_table
async def test_each_row_of_a_batch_gets_its_own_retry_time_and_error(layout_kit: LayoutKit) -> None:
    rows = {name: layout_kit.insert(name) for name in ("a", "b")}
    batch = await claim(await layout_kit.open())
    given = {"a": Retry("first", HOUR), "b": Retry("second", 2 * HOUR)}
    await batch.settle([given[each.event.type] for each in batch.claims])
    assert layout_kit.column(rows["a"], "scheduled_at") == Around(HOUR)
    assert layout_kit.column(rows["b"], "scheduled_at") == Around(2 * HOUR)
    assert [layout_kit.column(row, "last_error") for row in rows.values()] == ["first", "second"]


@each_table
@pytest.mark.parametrize("outcome", [Retry, Dead])
@pytest.mark.parametrize(
    ("error", "kept"),
    [
        ("x" * 2000, "x" * 2000),
        ("x" * 2001, "x" * 2000),
        ("é" * 3000, "é" * 2000),
        ("x" * 1999 + "🐙🐙", "x" * 1999 + "🐙"),
    ],
    ids=["fits", "long", "two bytes", "four bytes at the cut"],
)
async def test_error_is_cut_to_2000_characters(
    layout_kit: LayoutKit, mode: Mode, outcome: Any, error: str, kept: str
) -> None:
    row = layout_kit.insert("placed")
    batch = await claim(await layout_kit.open(), mode=mode)
    await batch.settle([outcome(error)])
    assert layout_kit.column(row, "last_error") == kept


# -- omni-box's workers beside us --------------------------------------------------------------------------------------


@each_table
async def test_claim_of_an_omnibox_worker_is_left_alone_until_it_lapses(layout_kit: LayoutKit, mode: Mode) -> None:
    row = layout_kit.insert("placed")
    await layout_kit.set(row, "locked_by = 'worker-1', locked_at = now() - interval '280 seconds'")
    store = await layout_kit.open()
    assert names(await claim(store, mode=mode)) == ""
    assert layout_kit.column(row, "locked_by") == "worker-1"
    await layout_kit.set(row, "locked_at = now() - interval '301 seconds'")
    [found] = (await claim(store)).claims
    assert (found.event.type, found.attempt, layout_kit.column(row, "locked_by")) == ("placed", 2, OWNER)


@each_table
async def test_owner_is_one_that_omnibox_takes_and_differs_with_each_claim(layout_kit: LayoutKit) -> None:
    rows = [layout_kit.insert("one"), layout_kit.insert("two")]
    store = await layout_kit.open()
    for _ in rows:
        await claim(store, 1)
    owners = [layout_kit.column(row, "locked_by") for row in rows]
    assert owners == [OWNER, OWNER]
    assert len(set(owners)) == 2
    assert max(len(owner) for owner in owners) <= 255


@each_table
async def test_row_completed_by_an_omnibox_worker_meanwhile_is_lost_to_us(layout_kit: LayoutKit) -> None:
    row = layout_kit.insert("placed")
    batch = await claim(await layout_kit.open())
    await layout_kit.set(row, "status = 'completed', completed_at = now(), locked_at = NULL, locked_by = NULL")
    before = layout_kit.row(row)
    assert await batch.settle([Retry("503", HOUR)]) == Settlement(lost=1)
    assert layout_kit.row(row) == before


@each_table
async def test_more_lapsed_rows_than_one_look_takes_are_all_let_go(layout_kit: LayoutKit) -> None:
    row = layout_kit.insert("placed")
    columns = "event_type, payload, scheduled_at, created_at, updated_at, locked_at, locked_by"
    own = (
        ("message_id, consumer_group, source", "gen_random_uuid()::text, consumer_group, source")
        if "inbox" in layout_kit.spec.layout
        else ("aggregate_type, aggregate_id, topic, partition_key",) * 2
    )
    layout_kit.execute(
        f"INSERT INTO {{outbox}} (id, {own[0]}, {columns}) SELECT gen_random_uuid(), {own[1]}, event_type, payload, "
        "scheduled_at, created_at, updated_at, now() - interval '1 hour', 'worker-1' "
        "FROM {outbox}, generate_series(1, 2500) WHERE id = :id",
        id=row,
    )
    batch = await claim(await layout_kit.open(), 3000)
    assert len(batch.claims) == 2501
    assert layout_kit.count("locked_by = 'worker-1'") == 0


@each_table
async def test_rows_go_out_in_the_order_of_their_times(layout_kit: LayoutKit, mode: Mode) -> None:
    rows = {name: layout_kit.insert(name) for name in ("c", "a", "b")}
    for name, scheduled, created in (("a", 30, 5), ("b", 20, 9), ("c", 20, 5)):
        today = "date_trunc('day', now())"
        times = f"scheduled_at = {today} - interval '{scheduled} s', created_at = {today} - interval '{created} s'"
        await layout_kit.set(rows[name], times)
    batch = await claim(await layout_kit.open(), mode=mode)
    assert names(batch) == "a b c"
    await batch.abandon()


# -- what operators do -------------------------------------------------------------------------------------------------


@each_table
async def test_redrive_takes_only_failed_rows_and_clears_what_the_checks_require(layout_kit: LayoutKit) -> None:
    failed, pending, completed = (layout_kit.insert(name) for name in ("failed", "pending", "completed"))
    await layout_kit.set(failed, "status = 'failed', attempts_made = 6, last_error = 'broken'")
    await layout_kit.set(pending, "attempts_made = 2, last_error = 'slow', scheduled_at = now() + interval '1 hour'")
    await layout_kit.set(completed, "status = 'completed', completed_at = now(), attempts_made = 1")
    before = [layout_kit.row(row) for row in (pending, completed)]
    store = await layout_kit.open()
    assert await store.redrive(Filter(ids=[failed, pending, completed]), actor="ann") == 1
    row = layout_kit.row(failed)
    assert row is not None
    wanted = {"status": "pending", "attempts_made": 0, "last_error": None, "completed_at": None, "scheduled_at": NOW}
    assert {name: row[name] for name in wanted} == wanted
    assert [layout_kit.row(row) for row in (pending, completed)] == before


@each_outbox
async def test_events_are_cancelled_and_rescheduled_by_their_idempotency_key(layout_kit: LayoutKit) -> None:
    first, second = layout_kit.event("first", dedup_key="a"), layout_kit.event("second", dedup_key="b")
    layout_kit.put(first, second)
    with layout_kit.engine.begin() as db:
        assert layout_kit.outbox.cancel(db, dedup_key="a") == 1
        assert layout_kit.outbox.reschedule(db, dedup_key="b", due_at=datetime.now(UTC) + HOUR) == 1
        assert layout_kit.outbox.cancel(db, dedup_key="a") == 0
    assert layout_kit.row(first.id) is None
    layout_kit.expect(second.id, "rescheduled")
    assert layout_kit.put(layout_kit.event("third", dedup_key="a")).existing == ()


@each_table
async def test_events_are_listed_with_their_state_error_and_times(layout_kit: LayoutKit) -> None:
    failed, completed = layout_kit.insert("failed"), layout_kit.insert("completed")
    await layout_kit.set(failed, "status = 'failed', attempts_made = 6, last_error = 'broken'")
    await layout_kit.set(completed, "status = 'completed', completed_at = now()")
    layout_kit.insert("ready")
    store = await layout_kit.open()
    records = {record.event.type: record for record in await store.events(Filter())}
    assert {name: record.state for name, record in records.items()} == {
        "failed": "dead",
        "completed": "delivered",
        "ready": "ready",
    }
    dead = records["failed"]
    assert (dead.seq, dead.attempts, dead.error, dead.died_at) == (failed, 6, "broken", NOW)
    assert records["completed"].delivered_at == NOW
    assert [record.event.type for record in await store.events(Filter(error="rok"))] == ["failed"]
    assert [record.event.type for record in await store.events(Filter(), state="ready")] == ["ready"]


@partitioned
@pytest.mark.parametrize("action", ["prune delivered", "prune dead", "drop", "redrive", "replay"])
async def test_action_leaves_another_row_with_the_same_id_alone(layout_kit: LayoutKit, action: str) -> None:
    # Nothing in a partitioned table keeps ids apart across its partitions.
    is_delivered = action in ("prune delivered", "replay")
    ended = "status = 'completed', completed_at = now() - interval '1 day'" if is_delivered else "status = 'failed'"
    row = layout_kit.insert("ended")
    old = "created_at = '2001-01-01', updated_at = now() - interval '1 day'"
    await layout_kit.set(row, f"{ended}, attempts_made = 6, {old}")
    layout_kit.insert("pending", id=row)
    layout_kit.execute("UPDATE {outbox} SET attempts_made = 2, last_error = 'slow' WHERE event_type = 'pending'")
    store = await layout_kit.open()
    if action.startswith("prune"):
        await store.prune(delivered_age=HOUR, dead_age=HOUR)
    else:
        await getattr(store, action)(Filter(), actor="ann")
    assert layout_kit.count("event_type = 'pending' AND attempts_made = 2 AND last_error = 'slow'") == 1
    assert layout_kit.count("event_type = 'ended' AND attempts_made = 0") == (action in ("redrive", "replay"))
    assert layout_kit.count("event_type = 'ended' AND attempts_made = 6") == 0


# -- rows that do not decode -------------------------------------------------------------------------------------------


@each_table
@pytest.mark.parametrize("headers", ["[1, 2]", '"text"', "7"])
@pytest.mark.parametrize("is_quick", [True, False], ids=["quick sink", "slow sink"])
async def test_row_whose_headers_are_no_object_is_failed_alone(
    layout_kit: LayoutKit, headers: str, is_quick: bool
) -> None:
    layout_kit.insert("before")
    row = layout_kit.insert("broken")
    await layout_kit.set(row, "headers = CAST(:headers AS jsonb)", headers=headers)
    layout_kit.insert("after")
    sink = MemorySink(is_quick=is_quick)
    async with Relay(await layout_kit.open(), sink) as relay:
        remaining = await relay.drain()
    assert sorted(event.type for event in sink.events) == ["after", "before"]
    assert (remaining.dead, remaining.new, remaining.delivered) == (1, 0, 2)
    assert layout_kit.column(row, "status") == "failed"
    assert "headers are not a JSON object" in layout_kit.column(row, "last_error")


# -- what the store refuses --------------------------------------------------------------------------------------------


@each_outbox
async def test_missing_table_is_a_schema_error_with_its_cause(layout_kit: LayoutKit) -> None:
    store = open_store(layout_kit.database.url, layout=layout_kit.spec.layout, table=f"no_{uuid4().hex[:8]}")
    with pytest.raises(SchemaError, match="does not exist") as caught:
        await store.open()
    assert isinstance(caught.value.__cause__, sa.exc.DBAPIError)
    await store.close()


@each_outbox
async def test_relay_without_a_batch_size_is_refused(layout_kit: LayoutKit) -> None:
    with pytest.raises(ConfigError, match="positive batch_size"):
        Relay(await layout_kit.open(), MemorySink(), batch_size=0)


@each_outbox
async def test_outcomes_must_be_as_many_as_claims(layout_kit: LayoutKit) -> None:
    row = layout_kit.add("placed")
    batch = await claim(await layout_kit.open())
    with pytest.raises(ValueError, match="zip"):
        await batch.settle([DELIVERED, DELIVERED])
    assert layout_kit.column(row, "status") == "pending"
    assert await batch.settle([DELIVERED]) == Settlement(delivered=1)
