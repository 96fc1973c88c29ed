"""A row that another program wrote as no event can be dies at its first claim, and stops nobody."""

from __future__ import annotations

import pytest

from pillarbox import Event, Relay
from pillarbox.sinks.memory import MemorySink
from pillarbox.stores import Filter, Store
from tests.contract.stores import EVERYTHING, SqlKit, event

MOST = 2**31 - 1
ODD: dict[str, list[tuple[str, str]]] = {
    "postgresql": [
        ("created_at", "'20000-01-01'"),
        ("created_at", "'0044-03-15 BC'"),
        ("created_at", "'infinity'"),
        ("created_at", "'-infinity'"),
        ("attempts", str(MOST)),
        ("headers", "CAST('[1]' AS jsonb)"),
        ("headers", "CAST('\"text\"' AS jsonb)"),
    ],
    "mysql": [
        ("created_at", "'0000-00-00 00:00:00'"),
        ("created_at", "'2026-00-10 00:00:00'"),
        ("attempts", str(MOST)),
        ("headers", "'[1]'"),
        ("id", "'no uuid'"),
    ],
    "sqlite": [
        ("type", "CAST(X'62ff' AS TEXT)"),
        ("topic", "CAST(X'62ff' AS TEXT)"),
        ("key", "CAST(X'62ff' AS TEXT)"),
        ("headers", "CAST(X'7bff7d' AS TEXT)"),
        ("key", "X'00ff'"),
        ("type", "X'00ff'"),
        ("attempts", "'many'"),
        ("attempts", "1.5"),
        ("attempts", str(2**63 - 1)),
        ("max_attempts", "'few'"),
        ("created_at", "'yesterday'"),
        ("created_at", "X'ff'"),
        ("created_at", "20000"),
        ("payload", "5"),
        ("id", "X'00'"),
    ],
}
CASES = [pytest.param(backend, *odd, id=f"{backend}-{odd[0]}-{odd[1]}") for backend, all in ODD.items() for odd in all]


def spoil(kit: SqlKit, column: str, value: str) -> None:
    if kit.database.backend == "mysql":
        with kit.database.engine.connect() as db:
            db.exec_driver_sql("SET SESSION sql_mode = ''")
            table = kit.database.outbox.table.name
            quoted = f"`{column}`"
            db.exec_driver_sql(f"UPDATE {table} SET {quoted} = {value} WHERE type = 'bad'")
            db.commit()
            db.invalidate()
        return
    kit.execute(f"UPDATE {{outbox}} SET {column} = {value} WHERE type = 'bad'")


@pytest.mark.needs("sql")
@pytest.mark.parametrize(("backend", "column", "value"), CASES)
async def test_odd_row_dies_at_its_first_claim(
    kit: SqlKit, store: Store, backend: str, column: str, value: str
) -> None:
    if kit.database.backend != backend:
        pytest.skip("a row of another database")
    kit.put(event("good", "g"), event("bad", "k"), event("fine", "f"))
    spoil(kit, column, value)
    sink = MemorySink()
    relay = Relay(store, sink)
    await relay.drain()
    assert sorted(each.type for each in sink.events) == ["fine", "good"]
    assert (relay.total.delivered, relay.total.dead) == (2, 1)
    [record] = await store.events(EVERYTHING)
    assert record.state == "dead"
    assert "Row " in (record.error or "")
    assert await store.redrive(Filter(error="Row"), actor="ann") == 1
    assert (await store.counts()).new == 1
    await relay.drain()
    left = (await store.counts()).dead
    assert await store.drop(Filter(), actor="ann") == left
    await relay.close()


@pytest.mark.needs("sql")
async def test_events_behind_an_odd_row_of_their_key_wait(kit: SqlKit, store: Store) -> None:
    kit.put(event("first", "k"), event("bad", "k"), event("after", "k"), event("other", "o"))
    spoil(kit, "headers", "CAST('[1]' AS jsonb)" if kit.database.backend == "postgresql" else "'[1]'")
    sink = MemorySink()
    relay = Relay(store, sink)
    await relay.drain()
    assert sorted(each.type for each in sink.events) == ["first", "other"]
    assert await store.drop(Filter(), actor="ann") == 1
    await relay.drain()
    assert sorted(each.type for each in sink.events) == ["after", "first", "other"]
    await relay.close()


@pytest.mark.needs("sql")
@pytest.mark.parametrize("value", ["'infinity'", "'-infinity'", "'20000-01-01'", "'0044-03-15 BC'"])
@pytest.mark.parametrize("column", ["until_at", "due_at"])
async def test_odd_time_of_life_stops_nobody(kit: SqlKit, store: Store, column: str, value: str) -> None:
    if kit.database.backend != "postgresql":
        pytest.skip("only PostgreSQL has such times")
    kit.put(event("good"), event("bad"))
    kit.execute(f"UPDATE {{outbox}} SET {column} = {value}, state = 4 WHERE type = 'bad'")
    relay = Relay(store, MemorySink())
    await relay.drain()
    await store.next_due()
    await store.events(EVERYTHING)
    assert relay.total.delivered >= 1
    await relay.close()


@pytest.mark.needs("sql")
async def test_blank_type_and_broken_json_are_delivered_as_they_are(kit: SqlKit, store: Store) -> None:
    kit.put(event("bad"), Event("broken", b"{broken", content_type="application/json"))
    spoil(kit, "type", "'  '")
    sink = MemorySink()
    relay = Relay(store, sink)
    await relay.drain()
    assert sorted((each.type, each.payload) for each in sink.events) == [
        ("  ", b'{"name":"bad"}'),
        ("broken", b"{broken"),
    ]
    await relay.close()
