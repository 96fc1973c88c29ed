"""What is in a row comes back as it was put, whatever it is; a row that cannot be read spoils nothing but itself."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

from pillarbox.errors import ConfigError, SchemaError, Unsupported
from pillarbox.event import DELIVERED, Dead, Event, Retry
from pillarbox.layouts.pillarbox import pillarbox_layout
from pillarbox.stores import Counts, Filter, Mode, Settlement, Store
from pillarbox.stores.url import open_store
from tests.contract.stores import (
    EVERYTHING,
    HOUR,
    Kit,
    SqlKit,
    claim,
    deliver,
    event,
    names,
    process_time_zone,
    states,
)

PAYLOADS = {
    "empty": b"",
    "every byte": bytes(range(256)),
    "a megabyte": b"\x00\xff'\\%:" * 174_762 + b"last",
    "json with every plane": {"text": "naïve 東京 🚀 \u2028 \\ ' \" % :name"},
    "not utf-8": b"\xff\xfe\xfa",
    "a null byte": b"\x00",
}
HEADERS: dict[str, dict[str, Any]] = {
    "none": {},
    "names and values in any script": {"Größe 🚀": "東京", "quote\"'": "\\ % :name {x}", "empty": ""},
    "numbers": {"zero": 0, "minus": -1, "signed": -(2**63), "unsigned": 2**63, "float": 0.1, "tiny": 1e-300},
    "truth and nothing": {"yes": True, "no": False, "nothing": None},
    "long": {"long": "x" * 100_000},
}


async def claim_one(store: Store, mode: Mode = "lease") -> Event:
    batch = await claim(store, mode=mode)
    assert len(batch.claims) == 1
    assert batch.claims[0].defect is None
    await batch.settle([DELIVERED])
    return batch.claims[0].event


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
async def test_payload_comes_back_byte_for_byte(kit: Kit, store: Store, payload: Any) -> None:
    put = Event("order.placed", payload)
    kit.put(put)
    assert (await claim_one(store)).payload == put.payload


@pytest.mark.parametrize("headers", HEADERS.values(), ids=HEADERS)
async def test_headers_come_back_as_they_were(kit: Kit, store: Store, headers: dict[str, Any]) -> None:
    kit.put(Event("order.placed", {}, headers=headers))
    found = (await claim_one(store)).headers
    assert dict(found) == headers
    assert {name: type(value) for name, value in found.items()} == {
        name: type(value) for name, value in headers.items()
    }


async def test_every_field_comes_back(kit: Kit, store: Store, mode: Mode) -> None:
    put = Event(
        "order.placed",
        b"<order/>",
        topic="orders",
        key="Ключ '1'",
        headers={"tenant": "acme"},
        id=UUID("12345678-1234-7234-8234-123456789abc"),
        content_type="application/xml",
        due_at=datetime(2024, 2, 29, 23, 59, 59, 123456, timezone(timedelta(hours=5, minutes=30))),
        dedup_key="order-1",
        aggregate_type="Order",
        aggregate_id=1,
        schema_version=2,
        correlation_id="c-1",
        causation_id="c-0",
        trace_id="t-1",
        source="shop 🛒",
        max_attempts=7,
    )
    kit.put(put)
    found = await claim_one(store, mode)
    assert found == put
    assert found.created_at is not None
    assert found.created_at.utcoffset() == timedelta(0)
    assert abs(found.created_at - datetime.now(UTC)) < timedelta(minutes=1)
    assert found.due_at == datetime(2024, 2, 29, 18, 29, 59, 123456, UTC)


async def test_longest_texts_fit(kit: Kit, store: Store) -> None:
    put = Event("t" * 255, {}, topic="é" * 255, key="🔑" * 255, dedup_key="d" * 255, source="s" * 255)
    kit.put(put)
    assert await claim_one(store) == put


async def test_listed_event_is_the_event_that_was_put(kit: Kit, store: Store) -> None:
    put = Event("order.placed", b"\xff\x00", key="k", headers={"n": 1, "s": "東京"}, max_attempts=3)
    kit.put(put)
    (record,) = await store.events(EVERYTHING)
    assert record.event == put
    await (await claim(store)).settle([Dead("400")])
    (record,) = await store.events(EVERYTHING)
    assert record.event == put


# -- rows that do not make an event ------------------------------------------------------------------------------

SPOILED = {
    "headers are a list": ("headers", "[1, 2]"),
    "headers are a text": ("headers", '"text"'),
    "headers are a number": ("headers", "7"),
    "id is no uuid": ("id", "not a uuid"),
    "headers are no json": ("headers", "{broken"),
    "time is no time": ("created_at", "yesterday"),
}
spoiled = pytest.mark.parametrize(
    "how",
    [
        *list(SPOILED)[:3],
        pytest.param("id is no uuid", marks=pytest.mark.needs("text ids")),
        pytest.param("headers are no json", marks=pytest.mark.needs("untyped columns")),
        pytest.param("time is no time", marks=pytest.mark.needs("untyped columns")),
    ],
)


def spoil(kit: SqlKit, victim: Event, how: str) -> None:
    """Change an event's row as only another program could."""
    column, value = SPOILED[how]
    given = "CAST(:value AS jsonb)" if kit.database.backend == "postgresql" else ":value"
    kit.execute(f"UPDATE {{outbox}} SET {column} = {given} WHERE type = :type", value=value, type=victim.type)


@pytest.mark.needs("sql")
@spoiled
async def test_row_that_cannot_be_read_dies_alone(kit: SqlKit, store: Store, mode: Mode, how: str) -> None:
    bad = event("bad", "k")
    kit.put(event("good", "g"), bad, event("fine", "f"))
    spoil(kit, bad, how)
    batch = await claim(store, mode=mode)
    assert names(batch) == "good bad fine"
    first, second, third = batch.claims
    assert first.defect is None
    assert third.defect is None
    assert second.defect is not None
    settlement = await batch.settle([DELIVERED, Dead(second.defect), DELIVERED])
    assert settlement == Settlement(delivered=2, dead=1)
    assert await store.counts() == Counts(dead=1)


@pytest.mark.needs("sql")
@spoiled
async def test_row_that_cannot_be_read_is_listed_redriven_and_dropped(kit: SqlKit, store: Store, how: str) -> None:
    bad = event("bad", "k")
    kit.put(bad, event("behind", "k"))
    spoil(kit, bad, how)
    assert await states(store) == {"bad": "ready", "behind": "ready"}
    await (await claim(store, 1)).settle([Dead("cannot be read")], park=False)
    assert await states(store) == {"bad": "dead", "behind": "ready"}
    assert await store.redrive(Filter(type="bad"), actor="ann") == 1
    await (await claim(store, 1)).settle([Dead("still cannot be read")])
    assert await store.drop(Filter(type="bad"), actor="ann") == 1
    assert await deliver(store) == "behind"


# -- sessions and schemas ----------------------------------------------------------------------------------------


async def test_time_zone_of_a_session_changes_nothing(kit: Kit) -> None:
    with process_time_zone("America/St_Johns"):
        store = await kit.open(retention=HOUR)
        with kit.session_time_zone(store) if isinstance(kit, SqlKit) else nullcontext():
            await assert_times_hold(kit, store)


async def assert_times_hold(kit: Kit, store: Store) -> None:
    minute = timedelta(minutes=1)
    now = kit.now()
    kit.put(event("now"), event("later", due_at=now + minute), event("delayed", delay=2 * minute))
    assert names(await claim(store, lease=minute)) == "now"
    due = await store.next_due()
    assert due is not None
    assert timedelta(0) < due <= minute
    records = {record.event.type: record for record in await store.events(EVERYTHING)}
    assert abs(records["now"].event.created_at - now) < minute
    assert records["later"].event.due_at == now + minute
    until_at = records["delayed"].until_at
    assert until_at is not None
    assert abs(until_at - (now + 2 * minute)) < minute
    await kit.pass_time(61 * timedelta(seconds=1))
    batch = await claim(store)
    assert names(batch) == "now later"
    await batch.settle([DELIVERED, Retry("503", minute)])
    counts = await store.counts()
    assert (counts.delivered, counts.retrying, counts.scheduled) == (1, 1, 1)
    assert counts.oldest_pending is not None
    assert minute < counts.oldest_pending < 2 * minute
    (delivered,) = await store.events(EVERYTHING, state="delivered")
    assert delivered.delivered_at is not None
    assert abs(delivered.delivered_at - now) < timedelta(minutes=2)
    assert (await store.prune(delivered_age=HOUR)).delivered == 0
    assert (await store.events(Filter(since=now - HOUR, until=now + HOUR), state="delivered")) == [delivered]


@pytest.mark.needs("server")
async def test_transactions_are_read_committed_whatever_the_default_is(kit: SqlKit) -> None:
    with kit.strict_database() as url:
        store = kit.make(url)
        level = await store.run(lambda db: db.get_isolation_level())
        await store.close()
    assert level == "READ COMMITTED"


@pytest.mark.needs("sql")
async def test_sinks_of_one_table_do_not_see_each_other(kit: Kit) -> None:
    store, other = await kit.open(), await kit.open(sink="other")
    kit.put(event("mine"))
    assert names(await claim(other)) == ""
    assert await other.counts() == Counts()
    assert await deliver(store) == "mine"


@pytest.mark.needs("sql")
async def test_relays_that_start_together_make_the_lanes_once(kit: SqlKit) -> None:
    stores = [kit.make(sink="started together") for _ in range(4)]
    try:
        await asyncio.gather(*(store.open() for store in stores))
        lanes = kit.database.outbox.tables["lanes"]
        with kit.database.engine.connect() as db:
            found = db.execute(sa.select(lanes.c.lane).where(lanes.c.sink == "started together")).scalars()
            assert sorted(found) == list(range(64))
    finally:
        kit.execute("DELETE FROM {lanes} WHERE sink = 'started together'")
        for store in stores:
            await store.close()


@pytest.mark.needs("sql")
async def test_other_number_of_lanes_is_refused(kit: SqlKit) -> None:
    await kit.open()
    store = kit.make(layout=pillarbox_layout(lanes=32))
    with pytest.raises(SchemaError, match=r"64 lanes .* expected 32"):
        await store.open()
    await store.close()


@pytest.mark.needs("sql")
async def test_missing_table_is_a_schema_error_that_says_what_to_do(kit: SqlKit) -> None:
    store = open_store(kit.database.url, table="no_such_outbox")
    with pytest.raises(SchemaError, match="pillarbox schema create"):
        await store.open()
    await store.close()


@pytest.mark.needs("pooler")
async def test_pooler_is_found_out_and_refuses_holds_unless_asked(kit: SqlKit) -> None:
    store = await kit.open(pooler=None, hold_behind_pooler=False)
    assert store.modes == {"lease"}
    with pytest.raises(Unsupported, match="cannot claim by hold"):
        await claim(store, mode="hold")


@pytest.mark.needs("direct connection")
async def test_direct_connection_is_found_out(kit: SqlKit) -> None:
    store = await kit.open(pooler=None)
    assert store.modes == {"hold", "lease"}


async def test_database_in_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected the path of a SQLite file"):
        open_store("sqlite://")
