"""Our own delivered events by month on PostgreSQL: moved, found again, and never lost for want of a partition."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import orjson
import pytest
import sqlalchemy as sa

from pillarbox import Event, Outbox, Relay
from pillarbox.errors import LayoutError, SchemaError, StoreUnavailable
from pillarbox.event import DELIVERED, Dead
from pillarbox.schema import ddl
from pillarbox.schema.cron import partitions_sql
from pillarbox.schema.gather import gather_delivered
from pillarbox.schema.partitions import drop_partitions, ensure_partitions
from pillarbox.sinks.memory import MemorySink
from pillarbox.stores import Filter, Mode, Pruned, Settlement
from pillarbox.stores.postgres import PostgresStore
from tests.contract.stores import EVERYTHING, claim, deliver, event, events, names, states
from tests.servers import ROOT, server_url

LAYOUT = "pillarbox-partitioned"
DAY = timedelta(days=1)


class Shop:
    """Our partitioned tables in a schema of their own, without a partition."""

    def __init__(self) -> None:
        self.schema = f"history_{uuid4().hex[:12]}"
        self.engine = sa.create_engine(server_url("postgres").replace("postgresql:", "postgresql+psycopg:"))
        self.outbox = Outbox(sa.MetaData(), LAYOUT, schema=self.schema)
        self._stores: list[PostgresStore] = []
        with self.engine.begin() as db:
            db.exec_driver_sql(f"CREATE SCHEMA {self.schema}")
            self.outbox.table.metadata.create_all(db)

    async def open(self, *, pooler: bool = False, **options: Any) -> PostgresStore:
        store = self.outbox.store(server_url("postgres"), pooler=pooler, **options)
        assert isinstance(store, PostgresStore)
        self._stores.append(store)
        await store.open()
        return store

    async def close(self) -> None:
        for store in self._stores:
            await store.close()
        with self.engine.begin() as db:
            db.exec_driver_sql(f"DROP SCHEMA {self.schema} CASCADE")
        self.engine.dispose()

    def put(self, *given: Event) -> Any:
        with self.engine.begin() as db:
            return self.outbox.put(db, *given)

    def make_months(self, *, now: datetime | None = None, months_ahead: int = 1) -> list[str]:
        with self.engine.begin() as db:
            return ensure_partitions(
                db, "outbox_history", schema=self.schema, now=now or datetime.now(UTC), months_ahead=months_ahead
            )

    def execute(self, sql: str) -> Any:
        """Run SQL with `{name}` for a table of the schema."""
        text = sql.replace("{", f"{self.schema}.").replace("}", "")
        with self.engine.begin() as db:
            result = db.exec_driver_sql(text)
            return result.all() if result.returns_rows else result.rowcount

    def types(self, table: str) -> list[str]:
        return [row[0] for row in self.execute(f"SELECT type FROM {{{table}}} ORDER BY seq")]

    def command(self, *args: str) -> list[str]:
        where = ["--store", server_url("postgres"), "--layout", LAYOUT, "--table", f"{self.schema}.outbox"]
        return [sys.executable, "-m", "pillarbox", *args, *where]

    def run_plain(self, *args: str) -> str:
        line = self.command(*args)
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def run(self, *args: str) -> Any:
        return orjson.loads(self.run_plain(*args, "--json"))


@pytest.fixture
async def bare() -> AsyncIterator[Shop]:
    made = Shop()
    yield made
    await made.close()
    await asyncio.sleep(0)
    assert not asyncio.all_tasks() - {asyncio.current_task()}


@pytest.fixture
def shop(bare: Shop) -> Shop:
    """With partitions for this month and the next."""
    bare.make_months()
    return bare


def month_name(offset: int = 0) -> str:
    now = datetime.now(UTC)
    count = now.year * 12 + now.month - 1 + offset
    return f"outbox_history_{count // 12}_{count % 12 + 1:02}"


# -- moving --------------------------------------------------------------------------------------------------


async def test_delivered_event_is_moved_with_everything_but_its_dedup_key(shop: Shop, mode: Mode) -> None:
    given = Event(
        "order.placed",
        b"\x00\xff",
        topic="orders",
        key="o-1",
        headers={"tenant": "acme"},
        dedup_key="once",
        aggregate_type="order",
        aggregate_id="17",
        schema_version="2",
        correlation_id="c",
        causation_id="d",
        trace_id="t",
        source="shop",
        max_attempts=3,
        content_type="application/x-raw",
    )
    shop.put(given)
    store = await shop.open()
    assert await (await claim(store, mode=mode)).settle([DELIVERED]) == Settlement(delivered=1)
    assert shop.execute("SELECT count(*) FROM {outbox}") == [(0,)]
    [record] = await store.events(EVERYTHING)
    assert (record.state, record.attempts, record.error, record.until_at) == ("delivered", 1, None, None)
    assert record.delivered_at is not None
    assert abs(record.delivered_at - datetime.now(UTC)) < timedelta(minutes=1)
    names_of = [name for name in given.__slots__ if name not in ("created_at", "dedup_key")]
    assert {name: getattr(record.event, name) for name in names_of} == {name: getattr(given, name) for name in names_of}
    assert record.event.dedup_key is None
    assert shop.put(event("again", dedup_key="once")).new != ()


@pytest.mark.parametrize("mode", ["hold", "lease"])
async def test_settlement_that_dies_before_its_commit_moves_nothing(shop: Shop, mode: Mode) -> None:
    shop.put(event("placed"), event("other"))
    store = await shop.open()
    batch = await claim(store, mode=mode)
    # The server ends the session when the row is in the history and the transaction is not yet committed.
    shop.execute(
        "CREATE FUNCTION {die()} RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$"
    )
    shop.execute(
        "CREATE CONSTRAINT TRIGGER dies AFTER INSERT ON {outbox_history} DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION {die()}"
    )
    with pytest.raises(StoreUnavailable):
        await batch.settle([DELIVERED] * 2)
    assert (shop.types("outbox"), shop.types("outbox_history")) == (["placed", "other"], [])
    shop.execute("DROP TRIGGER dies ON {outbox_history}")
    store = await shop.open()
    shop.execute("UPDATE {outbox} SET until_at = now() - interval '1 second' WHERE state = 1")
    batch = await claim(store)
    # A lease had counted its attempt, a hold had not.
    assert [each.attempt for each in batch.claims] == ([2, 2] if mode == "lease" else [1, 1])
    assert await batch.settle([DELIVERED] * 2) == Settlement(delivered=2)
    assert (shop.types("outbox"), shop.types("outbox_history")) == ([], ["placed", "other"])


@pytest.mark.parametrize("is_prepared", [False, True], ids=["without a month", "with a month"])
async def test_batch_behind_a_pooler_is_counted(bare: Shop, is_prepared: bool) -> None:
    if is_prepared:
        bare.make_months()
    bare.put(*events("one two three"), event("bad"))
    batch = await claim(await bare.open(pooler=True))
    outcomes = [Dead("400") if each.event.type == "bad" else DELIVERED for each in batch.claims]
    assert await batch.settle(outcomes) == Settlement(delivered=3, dead=1)
    assert len(bare.types("outbox_history")) == (3 if is_prepared else 0)


async def test_relay_moves_what_it_delivers_in_order(shop: Shop) -> None:
    shop.put(*(event(f"e{number}", "k") for number in range(30)))
    sink = MemorySink()
    async with Relay(await shop.open(), sink, batch_size=7) as relay:
        remaining = await relay.drain()
    expected = [f"e{number}" for number in range(30)]
    assert [each.type for each in sink.events] == expected
    assert (shop.types("outbox"), shop.types("outbox_history"), remaining.delivered) == ([], expected, 30)


async def test_each_sink_has_a_history_of_its_own(shop: Shop) -> None:
    shop.put(*events("one two"))
    shop.execute("UPDATE {outbox} SET sink = 'mails' WHERE type = 'two'")
    mine, other = await shop.open(), await shop.open(sink="mails")
    assert (await deliver(mine), await deliver(other)) == ("one", "two")
    assert (await states(mine), await states(other)) == ({"one": "delivered"}, {"two": "delivered"})
    assert [(await store.counts()).delivered for store in (mine, other)] == [1, 1]
    assert await other.prune(delivered_age=timedelta(0)) == Pruned(delivered=1)
    assert shop.types("outbox_history") == ["one"]


async def test_table_that_is_missing_is_found_out_before_anything_is_delivered(bare: Shop) -> None:
    bare.execute("DROP TABLE {outbox_history}")
    with pytest.raises(
        SchemaError,
        match=r"outbox_history.* does not exist\. Run `pillarbox schema create --layout pillarbox-partitioned`",
    ):
        await bare.open()


@pytest.mark.parametrize("url", ["sqlite:///shop.db", "mysql://localhost/shop", "mariadb://localhost/shop"])
def test_other_databases_are_refused(url: str) -> None:
    outbox = Outbox(sa.MetaData(), LAYOUT)
    with pytest.raises(LayoutError, match="Layout 'pillarbox-partitioned': its table exists on postgresql; got"):
        outbox.store(url)
    with pytest.raises(LayoutError, match="its table exists on postgresql; got 'sqlite'"):
        ddl(LAYOUT, "sqlite")


# -- a month without a partition -----------------------------------------------------------------------------


async def test_event_of_a_month_without_a_partition_stays_delivered_in_the_outbox(
    bare: Shop, mode: Mode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "pillarbox.store")
    bare.put(event("one", "k"), event("two", "k"), event("bad"))
    store = await bare.open()
    batch = await claim(store, mode=mode)
    outcomes = [Dead("400") if each.event.type == "bad" else DELIVERED for each in batch.claims]
    assert await batch.settle(outcomes) == Settlement(delivered=2, dead=1)
    assert names(await claim(store)) == ""
    assert bare.execute("SELECT type, state, attempts, token, until_at FROM {outbox} ORDER BY seq") == [
        ("one", 5, 1, None, None),
        ("two", 5, 1, None, None),
    ]
    counts = await store.counts()
    assert (counts.new, counts.delivered, counts.dead) == (0, 2, 1)
    assert await states(store) == {"one": "delivered", "two": "delivered", "bad": "dead"}
    bare.put(event("three"))
    assert await deliver(store) == "three"
    [said] = caplog.messages
    assert said == (
        f"Table {bare.schema}.outbox_history has no partition for events delivered now; they stay in "
        f"{bare.schema}.outbox until `pillarbox partitions ensure` has run."
    )
    bare.make_months()
    bare.put(event("four"))
    assert await deliver(store) == "four"
    assert (bare.types("outbox"), bare.types("outbox_history")) == (["one", "two", "three"], ["four"])


async def test_relay_without_partitions_delivers_every_event_once(bare: Shop) -> None:
    bare.put(*(event(f"e{number}", f"k{number % 5}") for number in range(25)))
    sink = MemorySink()
    async with Relay(await bare.open(), sink, batch_size=10) as relay:
        await relay.drain()
        await relay.drain()
    assert sorted(each.type for each in sink.events) == sorted(f"e{number}" for number in range(25))
    assert bare.execute("SELECT count(*) FROM {outbox} WHERE state = 5") == [(25,)]


async def test_events_that_stayed_are_replayed_and_pruned_like_the_others(bare: Shop) -> None:
    bare.put(*events("stayed stays"))
    store = await bare.open()
    await deliver(store)
    bare.make_months()
    bare.put(*events("moved gone"))
    await deliver(store)
    assert await store.replay(Filter(type="stayed"), actor="ann") == 1
    assert await store.replay(Filter(type="moved"), actor="ann") == 1
    assert await states(store) == {"stayed": "ready", "moved": "ready", "stays": "delivered", "gone": "delivered"}
    assert await store.prune(delivered_age=timedelta(0), dry_run=True) == Pruned(delivered=2)
    assert await store.prune(delivered_age=timedelta(0), batch=1) == Pruned(delivered=2)
    assert await states(store) == {"stayed": "ready", "moved": "ready"}


async def test_dry_run_counts_all_that_a_prune_takes(bare: Shop) -> None:
    bare.put(*events("stayed stays"))
    store = await bare.open()
    await deliver(store)
    bare.make_months()
    bare.put(*events("moved gone"))
    await deliver(store)
    assert await store.prune(delivered_age=timedelta(0), batch=1, dry_run=True) == Pruned(delivered=4)
    assert await store.prune(delivered_age=timedelta(0), batch=1) == Pruned(delivered=4)


async def test_replay_takes_the_oldest_wherever_they_are(bare: Shop) -> None:
    bare.put(*events("one three"))
    store = await bare.open()
    await deliver(store)
    bare.make_months()
    bare.put(*events("two four"))
    await deliver(store)
    moments = {"one": 4, "two": 3, "three": 2, "four": 1}
    for table in ("outbox", "outbox_history"):
        cases = " ".join(f"WHEN '{name}' THEN {hours}" for name, hours in moments.items())
        bare.execute(f"UPDATE {{{table}}} SET created_at = now() - interval '1 hour' * (CASE type {cases} END)")
    assert await store.replay(EVERYTHING, actor="ann", limit=3, dry_run=True) == 3
    assert await store.replay(EVERYTHING, actor="ann", limit=3) == 3
    assert await states(store) == {"one": "ready", "two": "ready", "three": "ready", "four": "delivered"}
    assert [(each.action, each.events) for each in await store.audit()] == [("replay", 3)]


async def test_dead_letter_of_a_month_without_a_partition_stops_with_what_to_do(shop: Shop, mode: Mode) -> None:
    shop.execute("ALTER TABLE {outbox_dead} RENAME TO plain")
    shop.execute(
        "CREATE TABLE {outbox_dead} (LIKE {plain}, PRIMARY KEY (seq, died_at)) PARTITION BY RANGE (died_at)".replace(
            "{plain}", f"{shop.schema}.plain"
        )
    )
    shop.put(event("bad"))
    batch = await claim(await shop.open(), mode=mode)
    with pytest.raises(SchemaError, match=r"no partition .*outbox_dead.*`pillarbox partitions ensure` makes"):
        await batch.settle([Dead("400")])
    await batch.abandon()
    assert shop.types("outbox") == ["bad"]


# -- ids ---------------------------------------------------------------------------------------------------


async def test_id_put_again_after_its_delivery_is_a_new_event(shop: Shop) -> None:
    first = event("first")
    shop.put(first)
    assert shop.put(event("too soon", id=first.id)).new == ()
    store = await shop.open()
    await deliver(store)
    assert len(shop.put(event("again", id=first.id)).new) == 1
    # While it is alive, the delivered one of the id stays where it is.
    assert await store.replay(EVERYTHING, actor="ann", dry_run=True) == 0
    assert await store.replay(EVERYTHING, actor="ann") == 0
    assert await deliver(store) == "again"
    assert shop.types("outbox_history") == ["first", "again"]
    # Of those delivered with one id, one can live.
    assert await store.replay(Filter((first.id,)), actor="ann") == 1
    assert (shop.types("outbox"), shop.types("outbox_history")) == (["first"], ["again"])


async def test_id_of_an_event_that_stayed_is_refused_until_it_is_moved(bare: Shop) -> None:
    first = event("first")
    bare.put(first)
    await deliver(await bare.open())
    assert bare.put(event("again", id=first.id)).new == ()
    bare.make_months()
    bare.run("partitions", "ensure")
    assert len(bare.put(event("again", id=first.id)).new) == 1


# -- partitions ----------------------------------------------------------------------------------------------


async def test_ensure_makes_the_months_and_takes_along_what_stayed(bare: Shop) -> None:
    bare.put(*(event(f"e{number}") for number in range(5)))
    store = await bare.open()
    await deliver(store)
    # One that is older than any partition stays, one that somebody has locked is left for another time.
    bare.execute("UPDATE {outbox} SET delivered_at = '2020-01-05' WHERE type = 'e1'")
    table = f"{bare.schema}.outbox_history"
    with bare.engine.begin() as db:
        db.exec_driver_sql(f"SELECT 1 FROM {bare.schema}.outbox WHERE type = 'e2' FOR UPDATE")
        made = [month_name(), month_name(1)]
        assert bare.run("partitions", "ensure") == [{"table": table, "made": made, "moved": 3}]
    assert bare.run("partitions", "ensure") == [{"table": table, "made": [], "moved": 1}]
    assert bare.types("outbox") == ["e1"]
    assert bare.types("outbox_history") == bare.types(month_name()) == ["e0", "e2", "e3", "e4"]
    assert (await store.counts()).delivered == 5
    assert bare.run_plain("partitions", "ensure") == f"{table}: nothing to make\n"
    bare.execute("UPDATE {outbox} SET delivered_at = now()")
    moved = f"{table}: 1 delivered event moved here from the outbox\n"
    assert bare.run_plain("partitions", "ensure") == f"{table}: nothing to make\n{moved}"


def test_gathering_has_a_limit_and_leaves_pending_events_alone(shop: Shop) -> None:
    shop.put(*(event(f"e{number}") for number in range(5)))
    shop.execute("UPDATE {outbox} SET state = CASE type WHEN 'e4' THEN 0 ELSE 5 END, delivered_at = now()")
    counts = []
    for _ in range(3):
        with shop.engine.begin() as db:
            counts.append(gather_delivered(db, shop.outbox.layout, shop.outbox.tables, limit=3))
    assert (counts, shop.types("outbox")) == ([3, 1, 0], ["e4"])


def test_four_processes_at_once_make_each_month_and_move_each_event_once(bare: Shop) -> None:
    bare.put(*(event(f"e{number:04}") for number in range(2500)))
    bare.execute("UPDATE {outbox} SET state = 5, delivered_at = now()")
    line = bare.command("partitions", "ensure", "--months-ahead", "5", "--json")
    processes = [
        subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)
    ]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [(process.returncode, err) for process, (_, err) in zip(processes, outputs, strict=True)] == [(0, "")] * 4
    told = [each for out, _ in outputs for each in orjson.loads(out)]
    assert sorted(name for each in told for name in each["made"]) == [month_name(offset) for offset in range(6)]
    assert sum(each["moved"] for each in told) == 2500
    assert (bare.types("outbox"), len(bare.types("outbox_history"))) == ([], 2500)


async def test_old_months_are_dropped_and_not_deleted(shop: Shop) -> None:
    shop.make_months(now=datetime(2020, 1, 15, tzinfo=UTC))
    shop.put(*events("old older new"))
    store = await shop.open()
    await deliver(store)
    shop.execute("UPDATE {outbox_history} SET delivered_at = '2020-01-31 23:59:59+00' WHERE type = 'older'")
    shop.execute("UPDATE {outbox_history} SET delivered_at = '2020-02-01 00:00:00+00' WHERE type = 'old'")
    assert shop.types("outbox_history_2020_01") == ["older"]
    table = f"{shop.schema}.outbox_history"
    old = ["outbox_history_2020_01", "outbox_history_2020_02"]
    dropped = {"table": table, "dropped": old, "dry_run": True}
    assert shop.run("partitions", "drop", "--keep", "12", "--dry-run") == [dropped]
    assert len(await states(store)) == 3
    assert shop.run("partitions", "drop", "--keep", "12") == [{**dropped, "dry_run": False}]
    assert await states(store) == {"new": "delivered"}


async def test_drop_waits_for_no_relay_longer_than_its_time_and_a_relay_goes_on(shop: Shop) -> None:
    shop.make_months(now=datetime(2020, 1, 15, tzinfo=UTC))
    shop.put(*events("one two"))
    store = await shop.open()
    batch = await claim(store, mode="hold")
    with shop.engine.begin() as db:
        # A hold has not touched the history yet, so that a month can go meanwhile.
        assert len(drop_partitions(db, "outbox_history", schema=shop.schema)) == 2
    assert await batch.settle([DELIVERED] * 2) == Settlement(delivered=2)


def test_statement_for_pg_cron_is_that_of_the_history(bare: Shop) -> None:
    line = [sys.executable, "-m", "pillarbox", "partitions", "sql", "--layout", LAYOUT, "--keep", "3"]
    printed = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed == partitions_sql("outbox_history", keep=3)
    with bare.engine.begin() as db:
        db.exec_driver_sql(partitions_sql("outbox_history", schema=bare.schema).replace("%", "%%"))
    assert bare.make_months() == []


# -- both forms on one table ---------------------------------------------------------------------------------


async def test_plain_layout_and_partitioned_one_take_over_from_each_other(shop: Shop) -> None:
    plain = Outbox(sa.MetaData(), schema=shop.schema)
    shop.put(*events("one two"))
    store = plain.store(server_url("postgres"), pooler=False, retention=DAY)
    await store.open()
    try:
        assert await deliver(store) == "one two"
        assert shop.run("partitions", "ensure")[0]["moved"] == 2
        assert await states(store) == {}
        assert await states(await shop.open()) == {"one": "delivered", "two": "delivered"}
    finally:
        await store.close()
