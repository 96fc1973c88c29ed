"""Routes and fan-out on every database: who gets an event, and that each sink keeps its own progress."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from unittest.mock import patch
from uuid import uuid4

import pytest
import sqlalchemy as sa

from pillarbox import Claim, Dead, Event, Outbox, Outcome, Relay, Retry, SinkUnavailable, StoreUnavailable, Unsupported
from pillarbox.breaker import Breaker
from pillarbox.group import RelayGroup, route_relays
from pillarbox.routing import FanOut, Route, Routes
from pillarbox.sinks.memory import MemorySink
from pillarbox.stores import Counts, Effect, Filter, Settlement
from pillarbox.stores.sql import SqlStore
from tests.contract.stores import Database

DATABASES = ["postgres", "mariadb", "mysql", "sqlite"]
BOTH = Routes([Route(["a", "b"])])


@pytest.fixture(params=DATABASES)
def database(request, databases):
    made = databases(request.param)
    made.empty()
    return made


def put(database: Database, *events: Event) -> None:
    with database.engine.begin() as db:
        database.outbox.put(db, *events)


def quick_breaker(name: str) -> Breaker:
    return Breaker(name, first=timedelta(milliseconds=20), cap=timedelta(milliseconds=100))


def make_group(database: Database, sinks: dict[str, MemorySink], routes: Routes, **options) -> RelayGroup:
    return route_relays(
        lambda sink: database.outbox.store(database.url, sink=sink),
        sinks,
        routes,
        make_relay=lambda store, sink, hook: Relay(
            store, sink, hook=hook, breaker=quick_breaker(sink.name), poll=timedelta(milliseconds=50), **options
        ),
    )


def types(sink: MemorySink) -> list[str]:
    return sorted(event.type for event in sink.events)


def rows_of(database: Database) -> dict[str, int]:
    outbox = database.outbox.table
    with database.engine.connect() as db:
        query = sa.select(outbox.c.sink, sa.func.count()).group_by(outbox.c.sink)
        return {row[0]: row[1] for row in db.execute(query)}


async def test_events_go_where_the_first_matching_route_says(database):
    sinks = {name: MemorySink(name=name) for name in ("orders", "audit", "rest")}
    routes = Routes(
        [
            Route(["orders", "audit"], type=["order.*"]),
            Route(["audit"], topic=["user-?", "staff"], headers={"tenant": "ac*", "vip": "true"}),
            Route(["rest"], topic=["*"]),
        ]
    )
    put(
        database,
        Event("order.placed", {}),
        Event("seen", {}, topic="user-1", headers={"tenant": "acme", "vip": True}),
        Event("left", {}, topic="staff", headers={"tenant": "acme", "vip": True}),
        Event("other", {}, topic="user-1", headers={"tenant": "acme", "vip": False}),
        Event("third", {}, topic="user-12", headers={"tenant": "acme", "vip": True}),
        Event("fourth", {}, topic="user-1", headers={"vip": True}),
    )
    async with make_group(database, sinks, routes) as group:
        assert set((await group.drain()).values()) == {Counts()}
    assert types(sinks["orders"]) == ["order.placed"]
    assert types(sinks["audit"]) == ["left", "order.placed", "seen"]
    assert types(sinks["rest"]) == ["fourth", "other", "third"]


async def test_copy_is_the_event_as_it_was_put(database):
    sent = Event(
        "order.placed",
        b"\x00\xff",
        topic="shop",
        key="k",
        headers={"n": 1, "tenant": "acme"},
        dedup_key="d",
        aggregate_type="order",
        aggregate_id="7",
        schema_version="2",
        correlation_id="c",
        causation_id="b",
        trace_id="t",
        source="s",
        max_attempts=3,
    )
    put(database, sent)
    outbox = database.outbox.table
    with database.engine.connect() as db:
        put_at = db.execute(sa.select(outbox.c.created_at)).scalar_one()
    sinks = {"a": MemorySink(), "b": MemorySink()}
    async with make_group(database, sinks, BOTH) as group:
        await group.drain()
    for sink in sinks.values():
        assert sink.events == [sent]
        assert sink.events[0].created_at == put_at


async def test_dead_destination_neither_stops_nor_repeats_the_others(database):
    sinks = {"a": MemorySink(name="a"), "b": MemorySink(name="b")}
    sinks["b"].go_down()
    put(database, *(Event("order.placed", {"n": n}, key=f"k{n % 3}") for n in range(30)))
    async with make_group(database, sinks, BOTH) as group:
        with pytest.raises(SinkUnavailable):
            await group.drain()
        assert len(sinks["a"].events) == 30
        assert rows_of(database) == {"b": 30}
        with pytest.raises(SinkUnavailable):
            await group.drain()
        sinks["b"].come_back()
        running = asyncio.create_task(group.run())
        async with asyncio.timeout(30):
            while rows_of(database):
                await asyncio.sleep(0.02)
        group.stop()
        await running
    assert len(sinks["a"].events) == len(sinks["b"].events) == 30


async def test_running_group_delivers_what_is_put_meanwhile(database):
    sinks = {"a": MemorySink(), "b": MemorySink()}
    async with make_group(database, sinks, BOTH) as group:
        running = asyncio.create_task(group.run())
        put(database, Event("order.placed", {}))
        async with asyncio.timeout(30):
            while not (sinks["a"].events and sinks["b"].events):
                await asyncio.sleep(0.01)
        group.stop()
        await running


async def test_relay_that_fails_for_good_stops_the_group(database):
    group = make_group(database, {"a": MemorySink(), "b": MemorySink()}, BOTH)

    async def fail(**options):
        raise RuntimeError("no way on")

    async with group:
        with patch.object(group.relays["a"], "_loop", fail), pytest.raises(RuntimeError, match="no way on"):
            await group.run()


def store_of(group: RelayGroup) -> SqlStore:
    """The store whose events are routed."""
    store = group.relays["fan-out"].store
    assert isinstance(store, SqlStore)
    return store


async def test_event_without_a_route_is_dead_by_default_and_may_be_redriven(database):
    put(database, Event("order.placed", {}), Event("user.seen", {}))
    sinks = {"a": MemorySink()}
    async with make_group(database, sinks, Routes([Route(["a"], type=["order.*"])])) as group:
        remains = await group.drain()
        assert remains["fan-out"] == Counts(dead=1)
        (record,) = await store_of(group).events(Filter(), state="dead")
        assert record.error == "No route matches topic 'user.seen' and type 'user.seen'. Add a route, then redrive."
    async with make_group(database, sinks, Routes([Route(["a"])])) as group:
        assert await store_of(group).redrive(Filter(), actor="test") == 1
        await group.drain()
    assert types(sinks["a"]) == ["order.placed", "user.seen"]


async def test_event_without_a_route_may_be_dropped_and_is_counted(database):
    put(database, Event("order.placed", {}), Event("user.seen", {}), Event("user.left", {}))
    sinks = {"a": MemorySink()}
    async with make_group(database, sinks, Routes([Route(["a"], type=["order.*"])], unmatched="drop")) as group:
        assert set((await group.drain()).values()) == {Counts()}
        fan_out = group.relays["fan-out"].sink
        assert isinstance(fan_out, FanOut)
        assert fan_out.dropped == group.dropped == 2
    assert types(sinks["a"]) == ["order.placed"]


@pytest.mark.parametrize("mode", ["auto", "lease"])
async def test_what_was_dropped_is_counted_once_though_its_settlement_failed_first(database, mode):
    put(database, Event("user.seen", {}), Event("user.left", {}))
    routes = Routes([Route(["a"], type=["order.*"])], unmatched="drop")
    failures = [StoreUnavailable("away for a moment")]
    effect = FanOut.effect

    def make_flaky(fan_out: FanOut, claims: Sequence[Claim], outcomes: Sequence[Outcome]) -> Effect:
        write = effect(fan_out, claims, outcomes)

        def write_and_fail(db: sa.Connection) -> None:
            write(db)
            if failures:
                raise failures.pop()

        return write_and_fail

    # A batch of one is held from the first, where rows can be held.
    async with make_group(database, {"a": MemorySink()}, routes, claim=mode, batch_size=1) as group:
        with patch.object(FanOut, "effect", make_flaky):
            await group.drain()
        assert failures == []
        assert group.dropped == 2


@pytest.mark.parametrize(
    ("value", "pattern"),
    [(True, "true"), (None, "null"), (3, "3"), (1.5, "1.5")],
)
def test_header_that_is_no_text_is_compared_as_json(value, pattern):
    routes = Routes([Route(["a"], headers={"h": pattern})], unmatched="drop")
    assert routes.match(Event("t", {}, headers={"h": value})) == ("a",)
    assert routes.match(Event("t", {}, headers={"h": "other"})) == ()


async def test_event_without_a_route_may_go_to_a_default_sink(database):
    put(database, Event("order.placed", {}), Event("user.seen", {}))
    sinks = {"a": MemorySink(), "rest": MemorySink()}
    async with make_group(database, sinks, Routes([Route(["a"], type=["order.*"])], unmatched="rest")) as group:
        await group.drain()
    assert (types(sinks["a"]), types(sinks["rest"])) == (["order.placed"], ["user.seen"])


async def test_copies_and_settlement_are_one_transaction(database):
    """A crash after the copies and before the original is gone leaves the original alone."""
    put(database, Event("order.placed", {}, key="k"))
    store = database.outbox.store(database.url)
    await store.open()
    batch = await store.claim(10, mode="lease", lease=timedelta(minutes=1))
    fan_out = FanOut(store, BOTH)
    outcomes = await fan_out.deliver_in(batch, batch.claims)
    with (
        patch.object(store.transitions, "settle", side_effect=RuntimeError("killed here")),
        pytest.raises(RuntimeError, match="killed here"),
    ):
        await batch.settle(outcomes, effect=fan_out.effect(batch.claims, outcomes))
    assert rows_of(database) == {"": 1}
    assert await batch.settle(outcomes, effect=fan_out.effect(batch.claims, outcomes)) == Settlement(delivered=1)
    assert rows_of(database) == {"a": 1, "b": 1}
    await store.close()


async def test_fan_out_that_lost_a_claim_copies_nothing_and_releases_the_rest(database):
    put(database, Event("one", {}, key="j"), Event("two", {}, key="k"))
    store = database.outbox.store(database.url)
    await store.open()
    batch = await store.claim(10, mode="lease", lease=timedelta(minutes=1))
    assert len(batch.claims) == 2
    outbox = database.outbox.table
    with database.engine.begin() as db:  # as if it had lapsed, and another relay had it
        taken = sa.update(outbox).where(outbox.c.type == "two").values(token="01890a5d-ac96-774b-bcce-b302099a8057")
        db.execute(taken)
    fan_out = FanOut(store, BOTH)
    outcomes = await fan_out.deliver_in(batch, batch.claims)
    settlement = await batch.settle(outcomes, effect=fan_out.effect(batch.claims, outcomes))
    assert settlement == Settlement(released=1, lost=1)
    assert rows_of(database) == {"": 2}
    again = await store.claim(10, mode="lease", lease=timedelta(minutes=1))
    assert [claim.event.type for claim in again.claims] == ["one"]
    await store.close()


async def test_event_routed_twice_has_one_row_a_sink(database):
    """As after a crash between the commit of the copies and its acknowledgement."""
    event = Event("order.placed", {}, key="k", dedup_key="d")
    sinks = {"a": MemorySink(), "b": MemorySink()}
    group = make_group(database, sinks, BOTH)
    async with group:
        for _ in range(2):
            put(database, event)
            assert await group.relays["fan-out"].drain() == Counts()
        assert rows_of(database) == {"a": 1, "b": 1}
        await group.drain()
    assert sinks["a"].events == sinks["b"].events == [event]


async def test_order_is_kept_through_the_fan_out_with_failures(database):
    """Two groups at once, as of two processes; every tenth event of one sink fails once."""
    put(database, *(Event("step", {"n": n}, key=f"k{n % 10}", headers={"n": n}) for n in range(600)))
    sinks = {"a": MemorySink(name="a"), "b": MemorySink(name="b")}
    failed: set[object] = set()

    def fails_once(event: Event) -> bool:
        if event.headers["n"] % 10 or event.id in failed:
            return False
        failed.add(event.id)
        return True

    sinks["b"].fail(fails_once, Retry("once", after=timedelta(0)), times=None)
    groups = [make_group(database, sinks, BOTH, batch_size=25) for _ in range(2)]
    running = [asyncio.create_task(group.run()) for group in groups]
    async with asyncio.timeout(90):
        while rows_of(database):
            await asyncio.sleep(0.05)
    for group in groups:
        group.stop()
    await asyncio.gather(*running)
    for group in groups:
        await group.close()
    assert len(failed) == 60
    for sink in sinks.values():
        by_key: dict[str | None, list[int]] = defaultdict(list)
        for event in sink.events:
            by_key[event.key].append(event.headers["n"])
        assert by_key == {f"k{key}": list(range(key, 600, 10)) for key in range(10)}


async def test_scheduled_event_is_routed_when_it_is_due(database):
    put(database, Event("later", {}, delay=timedelta(hours=1)))
    sinks = {"a": MemorySink(), "b": MemorySink()}
    async with make_group(database, sinks, BOTH) as group:
        assert (await group.drain())["fan-out"].scheduled == 1
        assert sinks["a"].events == []
        database.shift(timedelta(hours=2))
        await group.drain()
    assert types(sinks["a"]) == types(sinks["b"]) == ["later"]


async def test_counts_and_dead_letters_are_each_sinks_own(database):
    put(database, Event("order.placed", {}))
    sinks = {"a": MemorySink(), "b": MemorySink()}
    sinks["b"].fail(lambda event: True, Dead("no"), times=None)
    async with make_group(database, sinks, BOTH) as group:
        remains = await group.drain()
        assert remains == {"fan-out": Counts(), "a": Counts(), "b": Counts(dead=1)}
        store = group.relays["b"].store
        assert isinstance(store, SqlStore)
        assert {"", "a", "b"} <= set(await store.sinks())


# -- a table of another system -----------------------------------------------------------------------------------------


@pytest.fixture
def foreign(database):
    """An Open Outbox table in the same database."""
    metadata = sa.MetaData()
    outbox = Outbox(metadata, "openoutbox", table=f"foreign_{uuid4().hex[:8]}")
    metadata.create_all(database.engine)
    yield outbox
    metadata.drop_all(database.engine)


def make_foreign_group(database: Database, foreign: Outbox, sinks: dict[str, MemorySink], routes: Routes) -> RelayGroup:
    return route_relays(
        lambda sink: database.outbox.store(database.url, sink=sink) if sink else foreign.store(database.url),
        sinks,
        routes,
        into=database.outbox,
    )


async def test_table_of_another_system_is_routed_into_an_outbox_beside_it(database, foreign):
    sinks = {"a": MemorySink(), "b": MemorySink()}
    events = [
        Event(
            "step",
            {"n": n},
            key=f"k{n % 3}",
            aggregate_type="order",
            aggregate_id=f"k{n % 3}",
            headers={"n": str(n)},
        )
        for n in range(30)
    ]
    with database.engine.begin() as db:
        foreign.put(db, *events)
        put_at = db.execute(sa.select(sa.func.min(foreign.table.c.created_at))).scalar_one()
    async with make_foreign_group(database, foreign, sinks, BOTH) as group:
        sinks["b"].go_down()
        with pytest.raises(SinkUnavailable):
            await group.drain()
        assert len(sinks["a"].events) == 30
        sinks["b"].come_back()
    async with make_foreign_group(database, foreign, sinks, BOTH) as group:
        remains = await group.drain()
    assert (remains["a"], remains["b"]) == (Counts(), Counts())
    for sink in sinks.values():
        assert sorted(event.id for event in sink.events) == sorted(event.id for event in events)
        assert {int(event.headers["n"]) for event in sink.events} == set(range(30))
        assert {event.created_at.replace(tzinfo=None) for event in sink.events if event.created_at} >= {
            put_at.replace(tzinfo=None)
        }


async def test_event_that_our_table_cannot_take_is_dead_alone(database, foreign):
    good, long = (Event("step", {}, aggregate_type="order", aggregate_id="1") for _ in range(2))
    carried = foreign.layout.carried["aggregate_id"]
    with database.engine.begin() as db:
        foreign.put(db, good, long)
        table = foreign.table
        db.execute(sa.update(table).where(table.c.event_id == long.id).values(headers={carried: "x" * 300}))
    sinks = {"a": MemorySink()}
    async with make_foreign_group(database, foreign, sinks, Routes([Route(["a"])])) as group:
        await group.drain()
        (record,) = await store_of(group).events(Filter(), state="dead")
    assert [event.id for event in sinks["a"].events] == [good.id]
    assert record.error == f"Table {database.table!r}: at most 255 characters of aggregate_id, got 300"


def test_table_without_a_column_for_the_sink_needs_an_outbox_to_route_into():
    store = Outbox(sa.MetaData(), "openoutbox").store("sqlite:///shop.db")
    with pytest.raises(Unsupported, match="Layout 'openoutbox': its table has no column for the sink"):
        FanOut(store, BOTH)
    with pytest.raises(Unsupported, match="expected to route into an outbox of layout 'pillarbox', got 'openoutbox'"):
        FanOut(store, BOTH, into=Outbox(sa.MetaData(), "openoutbox"))
