"""Where events of faststream-outbox's table go when they die: into its dead letters, or parked where they are."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import sqlalchemy as sa

from pillarbox import Event, Outbox, Relay, Retry
from pillarbox.errors import Unsupported
from pillarbox.event import DELIVERED, Dead
from pillarbox.retry import Constant
from pillarbox.sinks.memory import MemorySink
from pillarbox.stores import Counts, Filter, Mode, Pruned, Settlement
from tests.contract.catalog import new_schema
from tests.contract.faststream import either, put, rows, with_dlq, without_dlq
from tests.contract.layouts import HOUR, NOW, LayoutKit, claim, drain, names
from tests.contract.specs import NEVER
from tests.servers import server_url

EVERYTHING = Filter()
AT_ONCE = Retry("503", timedelta(0))


@with_dlq
async def test_dead_row_moves_whole_and_returns_whole(layout_kit: LayoutKit) -> None:
    event = put(layout_kit, "orders", dedup_key="once", headers={"tenant": "acme"})
    [before] = rows(layout_kit)
    store = await layout_kit.open()
    await (await claim(store)).settle([AT_ONCE])
    await layout_kit.look_again()
    await (await claim(store)).settle([Dead("400: no such order")])
    assert rows(layout_kit) == []
    [dead] = rows(layout_kit, role="dead")
    assert {name: dead[name] for name in ("original_id", "queue", "payload", "headers", "created_at", "timer_id")} == {
        "original_id": before["id"],
        **{name: before[name] for name in ("queue", "payload", "headers", "created_at", "timer_id")},
    }
    assert (dead["deliveries_count"], dead["failure_reason"]) == (2, "retry_terminal")
    assert (dead["last_exception"], dead["failed_at"]) == ("400: no such order", NOW)
    [record] = await store.events(EVERYTHING, state="dead")
    assert (record.event.id, record.attempts, record.error, record.died_at) == (
        *(event.id, 2, "400: no such order"),
        NOW,
    )
    assert await store.redrive(Filter(error="no such order"), actor="ann") == 1
    assert rows(layout_kit, role="dead") == []
    headers = {**before["headers"], "pillarbox-late": "true"}
    assert rows(layout_kit) == [{**before, "headers": headers, "next_attempt_at": NOW}]


@with_dlq
async def test_longest_error_is_cut_to_what_the_other_system_keeps(layout_kit: LayoutKit) -> None:
    put(layout_kit, "orders")
    await (await claim(await layout_kit.open())).settle([Dead("é" * 9000)])
    [dead] = rows(layout_kit, "last_exception", "dead")
    assert dead["last_exception"] == "é" * 8192


@with_dlq
async def test_row_stays_when_its_dead_letter_cannot_be_written(layout_kit: LayoutKit, mode: Mode) -> None:
    put(layout_kit, "good")
    cursed = put(layout_kit, "cursed")
    layout_kit.execute("ALTER TABLE {dead} ADD CONSTRAINT never CHECK (queue <> 'cursed')")
    try:
        batch = await claim(await layout_kit.open(), mode=mode)
        [_, before] = rows(layout_kit)
        # The row that is refused stays as it is, and holds up no other.
        assert await batch.settle([Dead("400"), Dead("400")]) == Settlement(dead=1, lost=1)
        assert rows(layout_kit) == [before]
        assert [row["queue"] for row in rows(layout_kit, "queue, id", "dead")] == ["good"]
    finally:
        layout_kit.execute("ALTER TABLE {dead} DROP CONSTRAINT never")
    if mode == "lease":
        await layout_kit.lapse(cursed.id)
    batch = await claim(await layout_kit.open())
    assert names(batch) == "cursed"
    assert await batch.settle([Dead("400")]) == Settlement(dead=1)
    assert [row["queue"] for row in rows(layout_kit, "queue, id", "dead")] == ["good", "cursed"]


@with_dlq
async def test_no_dead_letter_is_left_when_its_row_cannot_go(layout_kit: LayoutKit, mode: Mode) -> None:
    put(layout_kit, "kept")
    layout_kit.execute("CREATE TABLE {outbox}_keeper AS SELECT id FROM {outbox}")
    layout_kit.execute("ALTER TABLE {outbox}_keeper ADD FOREIGN KEY (id) REFERENCES {outbox}")
    try:
        batch = await claim(await layout_kit.open(), mode=mode)
        assert await batch.settle([Dead("400")]) == Settlement(lost=1)
        assert (len(rows(layout_kit)), rows(layout_kit, role="dead")) == (1, [])
    finally:
        layout_kit.execute("DROP TABLE {outbox}_keeper")


@with_dlq
async def test_lost_claim_writes_no_dead_letter(layout_kit: LayoutKit) -> None:
    event = put(layout_kit, "orders")
    store = await layout_kit.open()
    late = await claim(store)
    await layout_kit.lapse(event.id)
    await claim(store)
    assert await late.settle([Dead("400")]) == Settlement(lost=1)
    assert (len(rows(layout_kit)), rows(layout_kit, role="dead")) == (1, [])


@with_dlq
async def test_dead_timers_of_two_queues_return_together_unless_one_lives_again(layout_kit: LayoutKit) -> None:
    for queue in ("mails", "texts"):
        put(layout_kit, "remind", topic=queue, dedup_key="reminder-7")
    store = await layout_kit.open()
    await (await claim(store)).settle([Dead("400")] * 2)
    put(layout_kit, "remind", topic="mails", dedup_key="reminder-7")
    assert await store.redrive(EVERYTHING, actor="ann") == 1
    assert sorted(row["queue"] for row in rows(layout_kit)) == ["mails", "texts"]
    assert [row["queue"] for row in rows(layout_kit, "queue, id", "dead")] == ["mails"]
    await (await claim(store)).settle([DELIVERED] * 2)
    assert await store.redrive(EVERYTHING, actor="ann") == 1
    batch = await claim(store)
    assert [(each.event.topic, each.attempt) for each in batch.claims] == [("mails", 1)]
    await batch.settle([Dead("400")])
    put(layout_kit, "remind", topic="texts", dedup_key="reminder-7")
    await (await claim(store)).settle([Dead("400")])
    assert await store.redrive(EVERYTHING, actor="ann") == 2


@with_dlq
async def test_old_dead_letters_are_pruned(layout_kit: LayoutKit) -> None:
    put(layout_kit, "orders")
    store = await layout_kit.open()
    await (await claim(store)).settle([Dead("400")])
    assert await store.prune(dead_age=HOUR) == Pruned()
    layout_kit.execute("UPDATE {dead} SET failed_at = {ago}", seconds=3700)
    assert await store.prune(dead_age=HOUR) == Pruned(dead=1)
    assert rows(layout_kit, role="dead") == []


@without_dlq
async def test_dead_row_without_a_dlq_is_parked_counted_listed_and_pruned_by_its_age(layout_kit: LayoutKit) -> None:
    event = put(layout_kit, "orders")
    store = await layout_kit.open()
    await (await claim(store)).settle([Dead("400: no such order")])
    [row] = rows(layout_kit, "next_attempt_at, acquired_token")
    assert list(row.values()) == [NEVER, None]
    await layout_kit.look_again()
    assert names(await claim(store)) == ""
    assert await store.next_due() is None
    assert await store.counts() == Counts(dead=1)
    [record] = await store.events(EVERYTHING, state="dead")
    assert (record.event.id, record.attempts, record.state, record.died_at) == (event.id, 1, "dead", NOW)
    assert [record.state for record in await store.events(EVERYTHING)] == ["dead"]
    with pytest.raises(Unsupported, match="keeps no error text"):
        await store.redrive(Filter(error="no such order"), actor="ann")
    assert await store.prune(dead_age=HOUR) == Pruned()
    layout_kit.execute("UPDATE {outbox} SET last_attempt_at = {ago}", seconds=3700)
    assert await store.prune(dead_age=HOUR) == Pruned(dead=1)
    assert rows(layout_kit) == []


@either
async def test_failing_event_is_retried_and_then_dead_and_success_never_is(layout_kit: LayoutKit) -> None:
    put(layout_kit, "good")
    put(layout_kit, "bad")
    sink = MemorySink()
    sink.fail(lambda event: event.type == "bad", Retry("503 from the destination"), times=None)
    retry = Constant(timedelta(milliseconds=1), max_attempts=3)
    assert await drain(Relay(await layout_kit.open(), sink, retry=retry)) == Counts(dead=1)
    [record] = await (await layout_kit.open()).events(EVERYTHING)
    assert (record.event.type, record.state, record.attempts) == ("bad", "dead", 3)
    assert [event.type for event in sink.events] == ["good"]


@pytest.fixture
def elsewhere() -> Iterator[tuple[sa.Engine, Outbox]]:
    """The tables in a schema of their own."""
    engine = sa.create_engine(sa.make_url(server_url("postgres")).set(drivername="postgresql+psycopg"))
    with new_schema(engine) as schema:
        metadata = sa.MetaData()
        outbox = Outbox(metadata, "faststream-dlq", schema=schema)
        metadata.create_all(engine)
        yield engine, outbox
    engine.dispose()


async def test_dead_letter_stays_in_the_schema_of_its_table(elsewhere: tuple[sa.Engine, Outbox]) -> None:
    engine, outbox = elsewhere
    with engine.begin() as db:
        outbox.put(db, Event("orders", {}, dedup_key="once"))
    store = outbox.store(engine.url)
    await store.open()
    try:
        await (await claim(store)).settle([Dead("400")])
        assert await store.redrive(EVERYTHING, actor="ann", dry_run=True) == 1
    finally:
        await store.close()
    with engine.begin() as db:
        letters = db.exec_driver_sql(f"SELECT queue, timer_id FROM {outbox.table.schema}.outbox_dlq").all()
    assert letters == [("orders", "once")]
