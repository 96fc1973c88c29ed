"""What `pillarbox events check` finds in a table, and mends."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from pillarbox.event import DELIVERED, Dead, Event
from pillarbox.stores import Settlement
from pillarbox.stores.sql import SqlStore
from tests.contract.stores import HOUR, SqlKit, claim, deliver, event, events, states

pytestmark = pytest.mark.needs("sql")


async def by_name(store: SqlStore) -> set[tuple[str, str]]:
    table = store.tables["outbox"]
    rows = await store.run(lambda db: db.execute(sa.select(table.c.seq, table.c.type)).all())
    names = dict(iter(rows))
    return {(names[fault.seq], fault.kind) for fault in await store.find_faults()}


async def test_table_at_work_has_no_fault(kit: SqlKit, store: SqlStore) -> None:
    kit.put(*events("one two three", "k"), *events("four five", "j"), event("six", "i", delay=HOUR), event("seven"))
    batch = await claim(store, 1)
    await batch.settle([Dead("400")])
    await claim(store, 1)
    await claim(store)
    assert "blocked" in (await states(store)).values()
    assert await store.find_faults() == []


async def test_event_behind_nothing_or_behind_a_later_dead_one_is_found_and_mended(
    kit: SqlKit, store: SqlStore
) -> None:
    kit.put(event("early", "k", delay=HOUR), event("dead", "k"), event("after", "k"), *events("lone next", "j"))
    batch = await claim(store, 1)
    await batch.settle([Dead("400")])
    kit.execute("UPDATE {outbox} SET state = 3, until_at = NULL WHERE type IN ('early', 'after', 'lone')")
    assert await by_name(store) == {("early", "blocked"), ("lone", "blocked")}
    mended = await store.mend_faults(await store.find_faults(), actor="ann")
    assert len(mended) == 2
    assert await store.find_faults() == []
    assert await deliver(store) == "early lone next"
    [line] = await store.audit()
    assert (line.actor, line.action, line.events) == ("ann", "mend", 2)


@pytest.mark.parametrize("state", [1, 2, 4])
async def test_event_without_the_time_it_waits_for_is_found_and_mended(
    kit: SqlKit, store: SqlStore, state: int
) -> None:
    kit.put(event("one", "k"))
    kit.execute("UPDATE {outbox} SET state = :state, until_at = NULL", state=state)
    assert await by_name(store) == {("one", "timeless")}
    await store.mend_faults(await store.find_faults(), actor="ann")
    await store.next_due()
    assert await deliver(store) == "one"


async def test_event_whose_time_is_missing_is_not_delivered_before_it_is_due(kit: SqlKit, store: SqlStore) -> None:
    kit.put(event("one", "k", delay=HOUR))
    kit.execute("UPDATE {outbox} SET until_at = NULL")
    assert len(await store.mend_faults(await store.find_faults(), actor="ann")) == 1
    assert await store.find_faults() == []
    await store.next_due()
    assert await deliver(store) == ""
    await kit.pass_time(2 * HOUR)
    assert await deliver(store) == "one"


async def test_mend_that_comes_too_late_takes_no_claim_from_its_relay(kit: SqlKit, store: SqlStore) -> None:
    kit.put(event("one", "k"))
    batch = await claim(store)
    kit.execute("UPDATE {outbox} SET until_at = NULL")
    faults = await store.find_faults()
    assert await batch.renew(HOUR) == []
    await store.mend_faults(faults, actor="ann")
    await store.next_due()
    assert await deliver(store) == ""
    assert await batch.settle([DELIVERED]) == Settlement(delivered=1)


@pytest.mark.needs("untyped columns")
@pytest.mark.parametrize("key", ["X'00ff'", "CAST(X'62ff' AS TEXT)", "NULL"])
async def test_blocked_event_whose_key_is_no_text_is_mended(kit: SqlKit, store: SqlStore, key: str) -> None:
    kit.put(event("one", "k"))
    kit.execute(f"UPDATE {{outbox}} SET state = 3, key = {key}")
    assert len(await store.mend_faults(await store.find_faults(), actor="ann")) == 1
    assert await store.find_faults() == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("lane = CASE lane WHEN 0 THEN 1 ELSE 0 END WHERE type = 'one'", {("one", "split"), ("two", "split")}),
        ("state = 9 WHERE type = 'other'", {("other", "state")}),
        ("state = 1, until_at = created_at, token = id WHERE key_of", {("one", "twice"), ("two", "twice")}),
    ],
    ids=["split", "state", "twice"],
)
async def test_what_cannot_be_mended_is_found(kit: SqlKit, store: SqlStore, change: str, found: object) -> None:
    kit.put(*events("one two", "k"), Event("other", {}))
    kit.execute("UPDATE {outbox} SET " + change.replace("key_of", "type IN ('one', 'two')"))
    assert await by_name(store) == found
    assert await store.mend_faults(await store.find_faults(), actor="ann") == []


async def test_nothing_is_recorded_when_nothing_was_mended(kit: SqlKit, store: SqlStore) -> None:
    kit.put(event("one", "k"))
    assert await store.mend_faults(await store.find_faults(), actor="ann") == []
    assert list(await store.audit()) == []
    batch = await claim(store)
    await batch.settle([DELIVERED])
