"""What is particular to the table of Debezium's router: a row is inserted and deleted, all else stands beside it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pytest
import sqlalchemy as sa

from pillarbox import Event, InvalidEvent, Outbox, Relay, Retry
from pillarbox.errors import Unsupported
from pillarbox.event import DELIVERED, RELEASED, Dead, Outcome
from pillarbox.layouts.debezium import debezium_layout
from pillarbox.retry import Constant
from pillarbox.sinks.memory import MemorySink
from pillarbox.stores import Counts, Filter, Mode, Pruned, Settlement
from tests.contract.catalog import DRIVERS, SERVERS, empty_database, new_schema
from tests.contract.layouts import HOUR, IN_AN_HOUR, NOW, LayoutKit, claim, drain, names
from tests.contract.specs import LEASE_END, UUID_TEXT
from tests.servers import server_url

ALL = ("postgresql", "mariadb", "mysql", "sqlite")
everywhere = pytest.mark.parametrize("layout_kit", [f"debezium-{name}" for name in ALL], indirect=True)
crowded = pytest.mark.parametrize("layout_kit", ["debezium-postgresql", "debezium-mariadb"], indirect=True)

EVERYTHING = Filter()
LATER = Retry("503 from the destination", HOUR)
AT_ONCE = Retry("503", timedelta(0))


def entry(kit: LayoutKit, row: Any) -> dict[str, Any] | None:
    found = kit.row(row, "state")
    return None if found is None else {name: value for name, value in found.items() if name != "id"}


# -- events and rows ---------------------------------------------------------------------------------------------------


@everywhere
async def test_event_is_written_as_the_router_reads_it(layout_kit: LayoutKit) -> None:
    event = layout_kit.event("OrderPlaced", {"n": 1}, key="o-7")
    layout_kit.put(event)
    row = layout_kit.row(event.id)
    assert row is not None
    assert sorted(row) == ["aggregateid", "aggregatetype", "id", "payload", "type"]
    assert (str(row["id"]), row["aggregatetype"], row["aggregateid"]) == (str(event.id), "order", "o-7")
    assert row["type"] == "OrderPlaced"
    [found] = (await claim(await layout_kit.open())).claims
    read = found.event
    assert (read.id, read.type, read.topic, read.key) == (event.id, "OrderPlaced", "outbox.event.order", "o-7")
    assert (read.aggregate_type, read.aggregate_id, read.content_type) == ("order", "o-7", "application/json")
    assert read.payload.replace(b" ", b"") == b'{"n":1}'


@everywhere
@pytest.mark.parametrize(
    ("fields", "column"),
    [({"key": None}, "aggregateid"), ({"aggregate_type": None}, "aggregatetype")],
    ids=["key", "aggregate_type"],
)
def test_event_without_what_the_router_needs_is_refused(layout_kit: LayoutKit, fields: Any, column: str) -> None:
    with pytest.raises(InvalidEvent, match=f"column '{column}'"):
        layout_kit.put(layout_kit.event("OrderPlaced", **fields))
    assert layout_kit.count() == 0


@everywhere
@pytest.mark.parametrize(
    "fields", [{"headers": {"a": "b"}}, {"delay": HOUR}, {"topic": "elsewhere"}, {"correlation_id": "c"}], ids=str
)
def test_what_the_five_columns_have_no_place_for_is_refused(layout_kit: LayoutKit, fields: Any) -> None:
    with pytest.raises(Unsupported, match=f"no place for the event's {next(iter(fields))}"):
        layout_kit.put(layout_kit.event("OrderPlaced", **fields))


@everywhere
def test_payload_that_is_no_json_is_refused(layout_kit: LayoutKit) -> None:
    event = Event("OrderPlaced", b"\x00\x01", content_type="application/octet-stream", **layout_kit.spec.fields())
    with pytest.raises(InvalidEvent, match="it holds JSON"):
        layout_kit.put(event)


@everywhere
def test_row_is_put_once_and_no_entry_with_it(layout_kit: LayoutKit) -> None:
    event = layout_kit.event("OrderPlaced")
    assert layout_kit.put(event).new == (event,)
    assert layout_kit.put(event).existing == (event,)
    assert (layout_kit.count(), layout_kit.count(role="state")) == (1, 0)


# -- the side table ----------------------------------------------------------------------------------------------------


@everywhere
async def test_every_step_is_written_beside_the_row_and_never_into_it(layout_kit: LayoutKit) -> None:
    row = layout_kit.add("placed")
    before = layout_kit.row(row)
    store = await layout_kit.open()
    batch = await claim(store)
    leased = {"attempts": 1, "state": 1, "token": UUID_TEXT, "until_at": LEASE_END, "error": None, "died_at": None}
    assert entry(layout_kit, row) == leased
    await batch.settle([LATER])
    waiting = {**leased, "state": 2, "token": None, "until_at": IN_AN_HOUR, "error": "503 from the destination"}
    assert entry(layout_kit, row) == waiting
    layout_kit.execute("UPDATE {state} SET until_at = {back[until_at]}", seconds=3601)
    await layout_kit.look_again()
    batch = await claim(store)
    assert entry(layout_kit, row) == {**leased, "attempts": 2}
    await batch.settle([RELEASED])
    assert entry(layout_kit, row) == {**waiting, "until_at": NOW, "error": None}
    await layout_kit.look_again()
    await (await claim(store)).settle([Dead("400")])
    dead = {"attempts": 2, "state": 3, "token": None, "until_at": None, "error": "400", "died_at": NOW}
    assert entry(layout_kit, row) == dead
    assert layout_kit.row(row) == before
    assert await store.redrive(Filter(error="400"), actor="ann") == 1
    assert entry(layout_kit, row) == {
        **dead,
        "attempts": 0,
        "state": 2,
        "until_at": NOW,
        "error": None,
        "died_at": None,
    }
    await layout_kit.look_again()
    await (await claim(store)).settle([DELIVERED])
    assert (layout_kit.row(row), entry(layout_kit, row)) == (None, None)


@everywhere
async def test_row_that_failed_does_not_stop_the_others(layout_kit: LayoutKit, mode: Mode) -> None:
    layout_kit.add("slow")
    store = await layout_kit.open()
    await (await claim(store, mode=mode)).settle([LATER])
    layout_kit.add("quick")
    batch = await claim(store, mode=mode)
    assert names(batch) == "quick"
    assert await batch.settle([DELIVERED]) == Settlement(delivered=1)


@everywhere
async def test_row_that_somebody_deleted_leaves_nothing_that_is_due(layout_kit: LayoutKit) -> None:
    for name in ("leased", "failed"):
        layout_kit.add(name)
    store = await layout_kit.open()
    batch = await claim(store)
    await batch.settle([AT_ONCE if each.event.type == "failed" else RELEASED for each in batch.claims])
    await layout_kit.look_again()
    late = await claim(store)
    assert sorted(names(late).split()) == ["failed", "leased"]
    layout_kit.execute("DELETE FROM {outbox}")
    layout_kit.execute("UPDATE {state} SET until_at = {back[until_at]}", seconds=60)
    await layout_kit.look_again()
    assert names(await claim(store)) == ""
    assert (layout_kit.count(role="state"), await store.next_due(), await store.counts()) == (0, None, Counts())
    assert await late.settle([DELIVERED] * 2) == Settlement(lost=2)


@everywhere
async def test_dead_rows_are_listed_dropped_and_pruned_with_their_entries(layout_kit: LayoutKit) -> None:
    dropped, pruned, young = (layout_kit.add(name) for name in ("dropped", "pruned", "young"))
    store = await layout_kit.open()
    batch = await claim(store)
    await batch.settle([Dead(f"400 {each.event.type}") for each in batch.claims])
    records = await store.events(EVERYTHING, state="dead")
    assert sorted((each.event.type, each.error, each.attempts) for each in records) == [
        ("dropped", "400 dropped", 1),
        ("pruned", "400 pruned", 1),
        ("young", "400 young", 1),
    ]
    assert await store.drop(Filter(ids=[dropped]), actor="ann") == 1
    assert (layout_kit.row(dropped), entry(layout_kit, dropped)) == (None, None)
    layout_kit.execute("UPDATE {state} SET died_at = {back[died_at]} WHERE id = :id", id=pruned, seconds=3700)
    assert await store.prune(dead_age=HOUR, dry_run=True) == Pruned(dead=1)
    assert await store.prune(dead_age=HOUR) == Pruned(dead=1)
    assert (layout_kit.row(pruned), entry(layout_kit, pruned)) == (None, None)
    assert layout_kit.row(young) is not None
    assert await store.counts() == Counts(dead=1)


@everywhere
async def test_hold_leaves_no_entry_unless_something_fails(layout_kit: LayoutKit) -> None:
    if layout_kit.database.name == "sqlite":
        with pytest.raises(Unsupported, match="cannot claim by hold"):
            await claim(await layout_kit.open(), mode="hold")
        return
    rows = {name: layout_kit.add(name) for name in ("good", "slow", "bad", "unsent")}
    outcomes: dict[str, Outcome] = {"good": DELIVERED, "slow": LATER, "bad": Dead("400"), "unsent": RELEASED}
    batch = await claim(await layout_kit.open(), mode="hold")
    assert layout_kit.count(role="state") == 0
    settled = await batch.settle([outcomes[each.event.type] for each in batch.claims])
    assert settled == Settlement(delivered=1, retried=1, dead=1, released=1)
    assert {name: (entry(layout_kit, row) or {}).get("state") for name, row in rows.items()} == {
        "good": None,
        "slow": 2,
        "bad": 3,
        "unsent": None,
    }
    assert layout_kit.row(rows["good"]) is None


# -- several relays at once --------------------------------------------------------------------------------------------


@crowded
@pytest.mark.parametrize("modes", ["lease lease lease", "hold hold hold", "hold lease hold"])
async def test_relays_at_once_never_share_a_row(layout_kit: LayoutKit, modes: str) -> None:
    layout_kit.put(*(layout_kit.event(f"e{number}") for number in range(400)))
    taken: Counter[str] = Counter()

    async def work(number: int, mode: Any) -> None:
        store = await layout_kit.open()
        idle = 0
        while idle < 3:
            batch = await claim(store, 7, mode="lease" if idle else mode)
            idle = 0 if batch.claims else idle + 1
            # Every ninth fails once, so that entries come and go beneath the others.
            outcomes: list[Outcome] = []
            for each in batch.claims:
                fails = int(each.event.type[1:]) % 9 == 0 and each.attempt == 1
                outcomes.append(AT_ONCE if fails else DELIVERED)
                taken[f"{each.event.type}/{each.attempt}"] += 1
            settlement = await batch.settle(outcomes) if batch.claims else Settlement()
            assert settlement.lost == 0

    await asyncio.gather(*(work(number, mode) for number, mode in enumerate(modes.split())))
    expected = {f"e{number}/1": 1 for number in range(400)} | {f"e{number}/2": 1 for number in range(0, 400, 9)}
    assert taken == expected
    assert (layout_kit.count(), layout_kit.count(role="state")) == (0, 0)


@crowded
async def test_row_that_another_relay_claimed_while_it_was_looked_for_is_left_to_it(layout_kit: LayoutKit) -> None:
    for name in ("one", "two"):
        layout_kit.add(name)
    first, second = await layout_kit.open(), await layout_kit.open()
    # What a statement finds that began before the other's claim was committed, and locked after.
    find = second.transitions._find  # type: ignore[attr-defined]
    stale = await second.run(lambda db: find.fetch(db, {"limit": 10}))
    batch = await claim(first, 1)
    with patch.object(second.transitions, "_find", SimpleNamespace(fetch=lambda db, params: stale)):
        late = await claim(second)
    assert sorted((names(batch), names(late))) == ["one", "two"]


@crowded
async def test_relays_that_fail_and_die_between_them_lose_nothing(layout_kit: LayoutKit) -> None:
    layout_kit.put(*(layout_kit.event(f"e{number}") for number in range(200)))
    dying = await claim(await layout_kit.open(), 50)
    layout_kit.execute("UPDATE {state} SET until_at = {back[until_at]}", seconds=60)
    sink = MemorySink()
    sink.fail(lambda event: int(event.type[1:]) % 10 == 0, Retry("503"), times=20)
    retry = Constant(timedelta(milliseconds=1), max_attempts=50)
    relays = [Relay(await layout_kit.open(), sink, batch_size=20, retry=retry) for _ in range(2)]
    await asyncio.gather(*(drain(relay) for relay in relays))
    assert sorted(event.type for event in sink.events) == sorted(f"e{number}" for number in range(200))
    assert await dying.settle([DELIVERED] * 50) == Settlement(lost=50)
    assert (layout_kit.count(), layout_kit.count(role="state")) == (0, 0)


# -- optional columns --------------------------------------------------------------------------------------------------


@pytest.fixture(params=ALL)
def wide(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[sa.Engine, Outbox]]:
    """An empty table with the router's optional columns for headers and time."""
    name = request.param
    if name == "sqlite":
        with empty_database(name, tmp_path) as engine:
            yield engine, _make_wide(engine, None)
        return
    url = sa.make_url(server_url(SERVERS[name]))
    engine = sa.create_engine(url.set(drivername=DRIVERS[url.get_backend_name()]))
    with new_schema(engine) as schema:
        yield engine, _make_wide(engine, schema)
    engine.dispose()


def _make_wide(engine: sa.Engine, schema: str | None) -> Outbox:
    metadata = sa.MetaData()
    outbox = Outbox(metadata, debezium_layout("headers", "timestamp"), schema=schema)
    metadata.create_all(engine)
    return outbox


async def test_optional_columns_take_headers_and_time(wide: tuple[sa.Engine, Outbox]) -> None:
    engine, outbox = wide
    event = Event(
        "OrderPlaced", {"n": 1}, key="o-7", aggregate_type="order", headers={"tenant": "acme"}, correlation_id="c-1"
    )
    with engine.begin() as db:
        if engine.dialect.name == "postgresql":
            db.exec_driver_sql("SET LOCAL TIME ZONE 'Asia/Tokyo'")
        outbox.put(db, event)
    with engine.begin() as db:
        row = db.exec_driver_sql(f"SELECT * FROM {outbox.table.fullname}").mappings().one()
        headers = db.execute(sa.select(outbox.table.c.headers)).scalar_one()
    assert headers == {"tenant": "acme", "pillarbox-correlation-id": "c-1"}
    assert row["timestamp"] == NOW
    store = outbox.store(engine.url)
    await store.open()
    try:
        [found] = (await claim(store)).claims
        assert dict(found.event.headers) == {"tenant": "acme"}
        assert (found.event.correlation_id, found.event.created_at) == ("c-1", NOW)
        age = (await store.counts()).oldest_pending
        assert age is not None
        assert age < timedelta(minutes=1)
    finally:
        await store.close()


def test_unknown_id_is_not_cancelled_as_nothing_is(wide: tuple[sa.Engine, Outbox]) -> None:
    engine, outbox = wide
    with engine.begin() as db, pytest.raises(Unsupported, match="cannot be cancelled"):
        outbox.cancel(db, uuid4())
