"""What a table itself refuses, by a trigger or a check, stops neither the relays nor the events beside it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from pillarbox import Relay
from pillarbox.event import DELIVERED, Event
from pillarbox.group import route_relays
from pillarbox.routing import Route, Routes
from pillarbox.sinks.callable import CallableSink
from pillarbox.sinks.memory import MemorySink
from pillarbox.stores import Batch, Counts, Mode, Settlement, Store
from pillarbox.stores.sql import SqlStore
from tests.contract.stores import EVERYTHING, SqlKit, claim, event

REFUSE = {
    "postgresql": (
        "CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF {row}.type = 'bad' {also} THEN RAISE EXCEPTION 'never that'; END IF; RETURN {row}; END $$",
        "CREATE TRIGGER {name} BEFORE {when} ON {table} FOR EACH ROW EXECUTE FUNCTION {name}()",
    ),
    "mysql": (
        "CREATE TRIGGER {name} BEFORE {when} ON {table} FOR EACH ROW BEGIN IF {row}.type = 'bad' {also} THEN "
        "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'never that'; END IF; END",
    ),
    "sqlite": (
        "CREATE TRIGGER {name} BEFORE {when} ON {table} WHEN {row}.type = 'bad' {also} BEGIN "
        "SELECT RAISE(ABORT, 'never that'); END",
    ),
}


@contextmanager
def refusing(kit: SqlKit, role: str, when: str, also: str = "") -> Iterator[None]:
    """Let a table refuse what is done to rows of type 'bad'."""
    table, backend = kit.database.outbox.tables[role].name, kit.database.backend
    name, row = f"{table}_{when.lower()}_no", "OLD" if when == "DELETE" else "NEW"
    for statement in REFUSE[backend]:
        with kit.database.engine.begin() as db:
            db.exec_driver_sql(statement.format(name=name, when=when, table=table, row=row, also=also))
    try:
        yield
    finally:
        with kit.database.engine.begin() as db:
            db.exec_driver_sql(f"DROP TRIGGER {name}" + (f" ON {table}" if backend == "postgresql" else ""))


async def leave_lapsed(kit: SqlKit, store: Store) -> None:
    """Let a relay claim three events and die."""
    kit.put(event("good", "g"), event("bad", "b"), event("fine", "f"), event("after", "b"))
    batch = await claim(store, 100)
    assert {each.event.type for each in batch.claims} >= {"good", "bad", "fine"}
    await kit.pass_time(timedelta(hours=1))


@pytest.mark.needs("sql")
async def test_lapsed_event_that_cannot_die_stops_nobody(
    kit: SqlKit, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    await leave_lapsed(kit, store)
    kit.put(event("new"))
    with refusing(kit, "dead", "INSERT"):
        await store.claim(0, mode="lease", lease=timedelta(seconds=30), max_attempts=1)
        found = {each.event.type: each.state for each in await store.events(EVERYTHING)}
        assert found == {"good": "dead", "fine": "dead", "after": found["after"], "bad": "leased", "new": "ready"}
        due = await store.next_due()
        assert due is None or due > timedelta(seconds=30)
        sink = MemorySink()
        relay = Relay(store, sink)
        await relay.drain()
        assert [each.type for each in sink.events] == ["new"]
        await kit.pass_time(timedelta(hours=1))
        await store.claim(0, mode="lease", lease=timedelta(seconds=30), max_attempts=1)
        assert sum("neither freed nor dead" in record.getMessage() for record in caplog.records) == 1
    await kit.pass_time(timedelta(hours=1))
    await store.claim(0, mode="lease", lease=timedelta(seconds=30), max_attempts=1)
    assert "bad" not in {each.event.type for each in await store.events(EVERYTHING) if each.state != "dead"}
    await relay.close()


@pytest.mark.needs("sql")
async def test_lapsed_event_that_cannot_be_freed_is_dead(kit: SqlKit, store: Store) -> None:
    await leave_lapsed(kit, store)
    with refusing(kit, "outbox", "UPDATE", "AND NEW.state = 0"):
        sink = MemorySink()
        relay = Relay(store, sink)
        await relay.drain()
    assert {"good", "fine"} <= {each.type for each in sink.events}
    found = {each.event.type: each for each in await store.events(EVERYTHING)}
    assert found["bad"].state == "dead"
    assert "never that" in (found["bad"].error or "")
    await relay.close()


@pytest.mark.needs("sql")
async def test_lapsed_event_that_nothing_can_be_done_about_is_no_hot_loop(kit: SqlKit, store: Store) -> None:
    await leave_lapsed(kit, store)
    with refusing(kit, "outbox", "UPDATE"), refusing(kit, "dead", "INSERT"):
        sink = MemorySink()
        relay = Relay(store, sink)
        await relay.drain()
        assert {each.type for each in sink.events} == {"good", "fine"}
        due = await store.next_due()
        assert due
        assert due > timedelta(0)
    await relay.close()


@pytest.mark.needs("sql")
async def test_delivered_event_that_cannot_be_deleted_is_dead_alone(kit: SqlKit, store: Store, mode: Mode) -> None:
    kit.put(*(event("bad" if number == 7 else f"e{number}") for number in range(20)))
    with refusing(kit, "outbox", "DELETE"):
        batch = await claim(store, mode=mode)
        settlement = await batch.settle([DELIVERED] * 20)
    # Its row can be moved as little as it can be deleted: it stays.
    assert settlement == Settlement(delivered=19, lost=1)
    [record] = await store.events(EVERYTHING)
    assert record.event.type == "bad"


@pytest.mark.needs("sql")
async def test_held_events_beside_one_that_stays_are_delivered_once(kit: SqlKit, store: Store) -> None:
    kit.put(*(event("bad" if number == 50 else f"e{number}") for number in range(100)))
    sink = MemorySink()
    relay = Relay(store, sink)
    with refusing(kit, "outbox", "DELETE"):
        await relay.drain()
    seen = Counter(each.type for each in sink.events)
    # Where rows can be held it is sent once so, and once by a lease that lasts.
    assert seen.pop("bad") <= 2
    assert seen == Counter(f"e{number}" for number in range(100) if number != 50)
    await relay.close()


@pytest.mark.needs("sql")
async def test_scheduled_event_that_cannot_come_due_is_dead(kit: SqlKit, store: Store) -> None:
    later = timedelta(hours=1)
    kit.put(event("good", delay=later), event("bad", delay=later), event("fine", delay=later))
    await kit.pass_time(2 * later)
    sink = MemorySink()
    relay = Relay(store, sink)
    with refusing(kit, "outbox", "UPDATE", "AND NEW.state = 0"):
        await relay.drain()
    assert sorted(each.type for each in sink.events) == ["fine", "good"]
    [record] = await store.events(EVERYTHING)
    assert (record.event.type, record.state) == ("bad", "dead")
    await relay.close()


@pytest.mark.needs("sql")
async def test_good_events_beside_one_that_stays_are_handled_once(kit: SqlKit, store: Store) -> None:
    seen: Counter[str] = Counter()

    def handle(placed: Event) -> None:
        seen[placed.type] += 1

    kit.put(*(event("bad" if number == 50 else f"e{number}") for number in range(100)))
    relay = Relay(store, CallableSink(handle))
    with refusing(kit, "outbox", "DELETE"):
        await relay.drain()
    assert relay.total.delivered == 99
    assert {name: count for name, count in seen.items() if name != "bad"} == {
        f"e{number}": 1 for number in range(100) if number != 50
    }
    await relay.close()


@pytest.mark.needs("sql")
async def test_event_whose_copy_for_a_sink_is_refused_is_dead_alone(kit: SqlKit) -> None:
    kit.put(*(event("bad" if number == 50 else f"e{number}") for number in range(100)))
    sinks = {"a": MemorySink(), "b": MemorySink()}
    group = route_relays(lambda sink: kit.make(sink=sink), sinks, Routes([Route(["a", "b"])]))
    with refusing(kit, "outbox", "INSERT", "AND NEW.sink = 'b'"):
        async with group, asyncio.timeout(60):
            remains = await group.drain()
            store = group.relays["fan-out"].store
            assert isinstance(store, SqlStore)
            [record] = await store.events(EVERYTHING)
    assert remains == {"fan-out": Counts(dead=1), "a": Counts(), "b": Counts()}
    assert (record.event.type, record.state) == ("bad", "dead")
    assert "never that" in (record.error or "")
    # Its copies are for all of its sinks or for none.
    good = Counter(f"e{number}" for number in range(100) if number != 50)
    assert [Counter(each.type for each in sink.events) for sink in sinks.values()] == [good, good]


@pytest.mark.needs("sql")
async def test_event_that_cannot_be_claimed_is_dead_and_stops_nobody(kit: SqlKit, store: Store) -> None:
    kit.put(event("good", "g"), event("bad", "b"), event("after", "b"), event("fine"))
    sink = MemorySink(is_quick=False)
    relay = Relay(store, sink)
    with refusing(kit, "outbox", "UPDATE"):
        await relay.drain()
    assert {each.type for each in sink.events} == {"good", "fine"}
    found = {each.event.type: each for each in await store.events(EVERYTHING)}
    assert (found["bad"].state, found["bad"].attempts) == ("dead", 0)
    assert "The database refused to let anybody claim this event" in (found["bad"].error or "")
    assert found["after"].state in ("ready", "blocked")
    await relay.close()


@pytest.mark.needs("sql")
async def test_event_that_can_be_neither_claimed_nor_dead_stops_nobody(kit: SqlKit, store: Store) -> None:
    kit.put(event("good", "g"), event("bad", "b"), event("after", "b"), event("fine"))
    sink = MemorySink(is_quick=False)
    relay = Relay(store, sink)
    with refusing(kit, "outbox", "UPDATE"), refusing(kit, "dead", "INSERT"):
        await relay.drain()
        assert {each.type for each in sink.events} == {"good", "fine"}
    await relay.close()


@pytest.mark.needs("server")
async def test_refused_hold_leaves_alone_what_others_have_claimed_meanwhile(
    kit: SqlKit, store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its locks are gone: another relay claims before what was delivered is settled apart."""
    other = await kit.open()
    kit.put(event("one", "k"), event("bad", "j"), event("two", "k"))
    taken: list[Batch] = []
    run_soon = store.run_soon

    async def run_after_other(work: Any, **options: Any) -> Any:
        if not taken:
            taken.append(await claim(other, 1))
        return await run_soon(work, **options)

    with refusing(kit, "outbox", "DELETE"):
        held = await claim(store, mode="hold")
        monkeypatch.setattr(store, "run_soon", run_after_other)
        settlement = await held.settle([DELIVERED] * 3)
    monkeypatch.undo()
    [batch] = taken
    assert [each.event.type for each in batch.claims] == ["one"]
    assert settlement.lost >= 1
    assert await batch.settle([DELIVERED]) == Settlement(delivered=1)
    assert await store.find_faults() == []
