"""What is particular to sqloutbox's file: strict order, a log of what was delivered, and a chain that stays whole."""

from __future__ import annotations

import sqlite3
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from pillarbox import Relay, Retry
from pillarbox.errors import StoreUnavailable, Unsupported
from pillarbox.event import DELIVERED, RELEASED, Dead
from pillarbox.retry import Constant
from pillarbox.sinks.memory import MemorySink
from pillarbox.stores import Counts, Filter, Pruned, Settlement
from pillarbox.stores.sql import SqlStore
from tests.contract.layouts import HOUR, NOW, LayoutKit, claim, drain, names
from tests.contract.stores import sync_engine

pytestmark = pytest.mark.parametrize("layout_kit", ["sqloutbox-sqlite"], indirect=True)

EVERYTHING = Filter()
LATER = Retry("503 from the destination", HOUR)

# The recovery statements of the other system's page.
PENDING = "SELECT seq, namespace, tag, created_at, prev_seq FROM {outbox} WHERE synced = 0 ORDER BY namespace, seq"
GAPS = (
    "SELECT q.seq, q.namespace, q.prev_seq FROM {outbox} q WHERE q.prev_seq IS NOT NULL "
    "AND NOT EXISTS (SELECT 1 FROM {outbox} WHERE seq = q.prev_seq) "
    "AND NOT EXISTS (SELECT 1 FROM {log} WHERE seq = q.prev_seq)"
)
SKIP = "INSERT OR IGNORE INTO {log} (seq, namespace, synced_at) VALUES (:seq, 'orders', datetime('now'))"


def read(kit: LayoutKit, sql: str) -> list[Any]:
    with sqlite3.connect(kit.database.url.database or "") as db:
        found = db.execute(sql.format(**kit.database.names)).fetchall()
    db.close()
    return found


def push(kit: LayoutKit, *tags: str) -> list[int]:
    return [kit.insert(tag) for tag in tags]


async def deliver(kit: LayoutKit, store: SqlStore, count: int) -> None:
    batch = await claim(store, count)
    assert await batch.settle([DELIVERED] * count) == Settlement(delivered=count)


async def test_row_is_read_as_an_event_with_one_id_for_ever(layout_kit: LayoutKit) -> None:
    push(layout_kit, "INSERT INTO orders (id) VALUES (?)", "UPDATE orders SET id = ?")
    store = await layout_kit.open()
    ids = []
    for _ in range(2):
        batch = await claim(store)
        first = batch.claims[0].event
        assert (first.topic, first.type, first.key) == (*["INSERT INTO orders (id) VALUES (?)"] * 2, "orders")
        assert (first.source, first.payload, first.content_type) == ("shop", b'{"n": 1}', "application/json")
        assert first.created_at == NOW
        ids.append([each.event.id for each in batch.claims])
        await batch.settle([RELEASED] * 2)
        await layout_kit.look_again()
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 2


async def test_events_are_not_put_into_a_chain_that_others_write(layout_kit: LayoutKit) -> None:
    with pytest.raises(Unsupported, match="written by its own system"):
        layout_kit.put(layout_kit.event("order"))


async def test_rows_that_were_marked_by_the_other_drain_are_not_claimed(layout_kit: LayoutKit) -> None:
    marked, _ = push(layout_kit, "marked", "waiting")
    layout_kit.execute("UPDATE {outbox} SET synced = 1 WHERE seq = :seq", seq=marked)
    store = await layout_kit.open()
    assert (await store.counts()).new == 1
    assert names(await claim(store)) == "waiting"


# -- order -------------------------------------------------------------------------------------------------------------


async def test_rows_are_claimed_in_the_order_they_were_pushed(layout_kit: LayoutKit) -> None:
    push(layout_kit, *(f"s{number}" for number in range(12)))
    store = await layout_kit.open()
    claimed = []
    for _ in range(4):
        batch = await claim(store, 3)
        claimed.append(names(batch))
        await batch.settle([DELIVERED] * 3)
    assert claimed == ["s0 s1 s2", "s3 s4 s5", "s6 s7 s8", "s9 s10 s11"]


async def test_failed_head_holds_up_every_later_row(layout_kit: LayoutKit) -> None:
    head, *_ = push(layout_kit, "head", "second", "third")
    store = await layout_kit.open()
    batch = await claim(store)
    assert await batch.settle([LATER, RELEASED, RELEASED]) == Settlement(retried=1, released=2)
    push(layout_kit, "fourth")
    assert names(await claim(store)) == ""
    layout_kit.execute("UPDATE {state} SET until_at = {back[until_at]} WHERE seq = :seq", seq=head, seconds=3601)
    await layout_kit.look_again()
    batch = await claim(store)
    assert [(each.event.type, each.attempt) for each in batch.claims] == [
        ("head", 2),
        ("second", 1),
        ("third", 1),
        ("fourth", 1),
    ]
    await batch.settle([DELIVERED] * 4)


async def test_row_in_the_middle_that_failed_holds_up_those_behind_it_only(layout_kit: LayoutKit) -> None:
    push(layout_kit, "first", "middle", "last")
    store = await layout_kit.open()
    await (await claim(store)).settle([RELEASED, LATER, RELEASED])
    await layout_kit.look_again()
    batch = await claim(store)
    assert names(batch) == "first"
    await batch.settle([DELIVERED])
    assert names(await claim(store)) == ""


async def test_claimed_rows_hold_up_the_later_ones_for_everybody(layout_kit: LayoutKit) -> None:
    push(layout_kit, "one", "two", "three")
    first, second = await layout_kit.open(), await layout_kit.open()
    batch = await claim(first, 1)
    assert (names(batch), names(await claim(second)), names(await claim(first))) == ("one", "", "")
    await batch.settle([DELIVERED])
    assert names(await claim(second)) == "two three"


async def test_dead_row_holds_up_the_later_ones_until_it_is_redriven_or_dropped(layout_kit: LayoutKit) -> None:
    push(layout_kit, "bad", "next", "last")
    store = await layout_kit.open()
    await (await claim(store, 1)).settle([Dead("400")])
    assert names(await claim(store)) == ""
    assert await store.redrive(EVERYTHING, actor="ann") == 1
    await layout_kit.look_again()
    batch = await claim(store)
    assert names(batch) == "bad next last"
    await batch.settle([Dead("400"), RELEASED, RELEASED])
    assert await store.drop(EVERYTHING, actor="ann") == 1
    await layout_kit.look_again()
    assert names(await claim(store)) == "next last"


async def test_relay_delivers_in_order_whatever_fails(layout_kit: LayoutKit) -> None:
    tags = [f"s{number}" for number in range(60)]
    push(layout_kit, *tags)
    sink = MemorySink()
    sink.fail(lambda event: event.type in ("s7", "s8", "s31"), Retry("503"), times=6)
    store = await layout_kit.open()
    await drain(Relay(store, sink, batch_size=7, retry=Constant(timedelta(milliseconds=1))))
    assert [event.type for event in sink.events] == tags


# -- the log and the chain ---------------------------------------------------------------------------------------------


async def test_delivered_rows_are_in_the_log_and_no_longer_in_the_queue(layout_kit: LayoutKit) -> None:
    seqs = push(layout_kit, "one", "two", "three")
    store = await layout_kit.open()
    await deliver(layout_kit, store, 2)
    assert read(layout_kit, "SELECT seq FROM {outbox}") == [(seqs[2],)]
    logged = read(layout_kit, "SELECT seq, namespace, synced_at FROM {log} ORDER BY seq")
    assert logged == [(seqs[0], "orders", NOW), (seqs[1], "orders", NOW)]
    assert read(layout_kit, "SELECT * FROM {state}") == []
    assert (await store.counts()).new == 1


async def test_chain_has_no_gap_at_any_step(layout_kit: LayoutKit) -> None:
    push(layout_kit, "a", "b", "c", "d", "e")
    store = await layout_kit.open()
    assert read(layout_kit, GAPS) == []
    await deliver(layout_kit, store, 2)
    assert read(layout_kit, GAPS) == []
    assert [row[2] for row in read(layout_kit, PENDING)] == ["c", "d", "e"]
    await (await claim(store, 1)).settle([Dead("400")])
    assert await store.drop(EVERYTHING, actor="ann") == 1
    assert read(layout_kit, GAPS) == []
    await (await claim(store, 1)).settle([Dead("400")])
    layout_kit.execute("UPDATE {state} SET died_at = {back[died_at]}", seconds=3700)
    assert await store.prune(dead_age=HOUR) == Pruned(dead=1)
    assert read(layout_kit, GAPS) == []
    await layout_kit.look_again()
    await deliver(layout_kit, store, 1)
    assert (read(layout_kit, PENDING), read(layout_kit, GAPS)) == ([], [])
    assert read(layout_kit, "SELECT count(*) FROM {log}") == [(5,)]


async def test_lost_row_is_found_and_skipped_by_the_recovery_statements(layout_kit: LayoutKit) -> None:
    seqs = push(layout_kit, "a", "lost", "c")
    store = await layout_kit.open()
    await deliver(layout_kit, store, 1)
    layout_kit.execute("DELETE FROM {outbox} WHERE seq = :seq", seq=seqs[1])
    assert read(layout_kit, GAPS) == [(seqs[2], "orders", seqs[1])]
    layout_kit.execute(SKIP, seq=seqs[1])
    assert read(layout_kit, GAPS) == []
    await layout_kit.look_again()
    await deliver(layout_kit, store, 1)


async def test_row_that_somebody_logged_already_is_delivered_all_the_same(layout_kit: LayoutKit) -> None:
    seqs = push(layout_kit, "a", "b")
    layout_kit.execute(SKIP, seq=seqs[0])
    store = await layout_kit.open()
    await deliver(layout_kit, store, 2)
    assert read(layout_kit, "SELECT seq FROM {log} ORDER BY seq") == [(seqs[0],), (seqs[1],)]
    assert await store.counts() == Counts()


@pytest.mark.parametrize("statement", ["INSERT OR IGNORE", "DELETE FROM"])
async def test_crash_between_log_and_queue_leaves_both_as_they_were(layout_kit: LayoutKit, statement: str) -> None:
    seqs = push(layout_kit, "a", "b")
    store = await layout_kit.open()
    batch = await claim(store)
    engine, table = sync_engine(store), layout_kit.outbox.table.name

    def die(_: Any, __: Any, sql: str, *___: Any) -> None:
        if sql.startswith(statement) and (statement != "DELETE FROM" or f"{table} " in sql):
            raise sqlite3.OperationalError("disk I/O error")

    after = "after_cursor_execute"
    sa.event.listen(engine, after, die)
    with pytest.raises((StoreUnavailable, sqlite3.OperationalError), match="disk I/O error"):
        await batch.settle([DELIVERED] * 2)
    sa.event.remove(engine, after, die)
    assert read(layout_kit, "SELECT seq, synced FROM {outbox}") == [(seqs[0], 0), (seqs[1], 0)]
    assert (read(layout_kit, "SELECT * FROM {log}"), read(layout_kit, GAPS)) == ([], [])
    # The claim is still ours.
    assert await batch.settle([DELIVERED] * 2) == Settlement(delivered=2)
    assert read(layout_kit, "SELECT count(*) FROM {log}") == [(2,)]


async def test_late_settlement_logs_nothing(layout_kit: LayoutKit) -> None:
    [seq] = push(layout_kit, "a")
    first, second = await layout_kit.open(), await layout_kit.open()
    late = await claim(first)
    await layout_kit.lapse(seq)
    batch = await claim(second)
    assert await late.settle([DELIVERED]) == Settlement(lost=1)
    assert (read(layout_kit, "SELECT * FROM {log}"), layout_kit.count()) == ([], 1)
    assert await batch.settle([DELIVERED]) == Settlement(delivered=1)
