"""What the history costs: plans of the real statements on PostgreSQL, with twelve months of delivered events.

A claim and a settlement read a few times their batch, whatever is kept. What operators ask for goes by an index, and
where it names a time it reads the months of that time only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
import sqlalchemy as sa

from pillarbox import Outbox
from pillarbox.event import DELIVERED, Dead, Outcome, Retry
from pillarbox.schema.partitions import ensure_partitions
from pillarbox.stores import Filter
from pillarbox.stores.postgres import PostgresStore
from tests.integration.test_claim_plans import Plans, explain_everything, nodes, rows_read
from tests.servers import server_url

BATCH = 500
BACKLOG = 20_000
KEPT = 10_000
"""In each month."""
MONTHS = [datetime(2021, month, 1, tzinfo=UTC) for month in range(1, 13)]
MAY = "outbox_history_2021_05"

COLUMNS = {
    "id": "gen_random_uuid()",
    "lane": "n % 64",
    "type": "'t'",
    "topic": "'t'",
    "key": "'key-' || n % 1000",
    "content_type": "'application/json'",
    "payload": "convert_to(repeat('x', 300), 'UTF8')",
    "created_at": "now()",
}


class Filled(NamedTuple):
    store: PostgresStore
    plans: Plans
    partitions: set[str]


@pytest.fixture(scope="module")
def schema() -> Any:
    """Twelve full months, the current one and the next, and a backlog."""
    name = f"history_plans_{uuid4().hex[:8]}"
    engine = sa.create_engine(server_url("postgres").replace("postgresql:", "postgresql+psycopg:"))
    outbox = Outbox(sa.MetaData(), "pillarbox-partitioned", schema=name)
    with engine.begin() as db:
        db.exec_driver_sql(f"CREATE SCHEMA {name}")
        outbox.table.metadata.create_all(db)
        ensure_partitions(db, "outbox_history", schema=name)
        ensure_partitions(db, "outbox_history", schema=name, now=MONTHS[0], months_ahead=11)
        insert(db, f"{name}.outbox", COLUMNS, BACKLOG)
        for number, month in enumerate(MONTHS):
            moment = f"timestamptz '{month:%Y-%m-%d} 00:00+00' + n * interval '1 minute'"
            seq = f"n - 1000000 + {number * KEPT}"
            insert(db, f"{name}.outbox_history", {**COLUMNS, "seq": seq, "delivered_at": moment}, KEPT)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
        db.exec_driver_sql(f"VACUUM ANALYZE {name}.outbox")
        db.exec_driver_sql(f"VACUUM ANALYZE {name}.outbox_history")
    yield name
    with engine.begin() as db:
        db.exec_driver_sql(f"DROP SCHEMA {name} CASCADE")
    engine.dispose()


def insert(db: sa.Connection, table: str, columns: dict[str, str], count: int) -> None:
    names, values = ", ".join(columns), ", ".join(columns.values())
    sql = f"INSERT INTO {table} ({names}) SELECT {values} FROM generate_series(1, {count}) AS n"
    db.exec_driver_sql(sql.replace("%", "%%"))


@pytest.fixture
async def filled(schema: str) -> AsyncIterator[Filled]:
    outbox = Outbox(sa.MetaData(), "pillarbox-partitioned", schema=schema)
    store = outbox.store(server_url("postgres"), notify=False, pooler=False)
    assert isinstance(store, PostgresStore)
    await store._connect()
    plans = explain_everything(store)
    await store.open()
    plans.take()
    names = await store.run(lambda db: sa.inspect(db).get_table_names(schema=schema), writes=False)
    yield Filled(store, plans, {name for name in names if name.startswith("outbox_history_2")})
    await store.close()


def scans(plans: list[dict[str, Any]], tables: set[str]) -> list[tuple[str, str, float]]:
    """The parts of plans that read one of these tables, with the rows that each gave; not those never executed."""
    return [
        (node["Relation Name"], node["Node Type"], node["Actual Rows"])
        for plan in plans
        for node in nodes(plan["Plan"])
        if node.get("Relation Name") in tables and "Scan" in node["Node Type"] and node["Actual Loops"] > 0
    ]


@pytest.mark.parametrize("mode", ["hold", "lease"])
async def test_batch_reads_a_few_times_its_size_and_nothing_of_the_history(filled: Filled, mode: Any) -> None:
    store, plans, partitions = filled
    for _ in range(6):  # so often that the server plans the statements once and for all
        batch = await store.claim(BATCH, mode=mode, lease=timedelta(minutes=1))
        assert len(batch.claims) > BATCH // 2
        assert (await batch.settle([DELIVERED] * len(batch.claims))).delivered == len(batch.claims)
    batch = await store.claim(BATCH, mode=mode, lease=timedelta(minutes=1))
    kinds: list[Outcome] = [DELIVERED, Retry("503", timedelta(hours=1)), Dead("400")]
    settlement = await batch.settle([kinds[number % 3] for number in range(len(batch.claims))])
    assert (settlement.delivered + settlement.retried + settlement.dead, settlement.lost) == (len(batch.claims), 0)
    found = plans.take()
    assert len(found) > 20
    assert scans(found, partitions) == []
    for plan in found:
        whole = [node for node in nodes(plan["Plan"]) if node["Node Type"] == "Seq Scan"]
        assert "outbox" not in {node.get("Relation Name") for node in whole}, plan["Query Text"]
        assert rows_read(plan["Plan"], {"outbox", "outbox_dead"}) <= 5 * BATCH, plan["Query Text"]


async def test_count_reads_the_index_and_not_the_rows(filled: Filled) -> None:
    store, plans, partitions = filled
    assert (await store.counts()).delivered >= 12 * KEPT
    kinds = {kind for name, kind, _ in scans(plans.take(), partitions) if "_2021_" in name}
    assert kinds == {"Index Only Scan"}


async def test_listing_reads_the_newest_of_each_month(filled: Filled) -> None:
    store, plans, partitions = filled
    assert len(await store.events(Filter(), state="delivered", limit=50)) == 50
    found = plans.take()
    full = [(name, kind) for name, kind, _ in scans(found, partitions) if "_2021_" in name]
    assert {kind for _, kind in full} == {"Index Scan"}
    history = {name for name in partitions if "_2021_" in name}
    assert sum(rows_read(plan["Plan"], history) for plan in found) <= 12 * 51


async def test_event_is_found_by_its_id_in_every_month(filled: Filled) -> None:
    store, plans, partitions = filled
    may = MONTHS[4]
    [record, *_] = await store.events(Filter(since=may, until=may + timedelta(hours=1)), limit=1)
    plans.take()
    assert [each.seq for each in await store.events(Filter((record.event.id,)))] == [record.seq]
    found = [each for each in scans(plans.take(), partitions) if "_2021_" in each[0]]
    assert {kind for _, kind, _ in found} <= {"Index Scan", "Bitmap Heap Scan", "Bitmap Index Scan"}
    assert sum(rows for _, _, rows in found) == 1


async def test_replay_of_a_time_looks_in_its_months_only(filled: Filled) -> None:
    store, plans, partitions = filled
    since = MONTHS[4] + timedelta(days=1)
    where = Filter(since=since, until=since + timedelta(minutes=20))
    assert await store.replay(where, actor="ann", dry_run=True) == 20
    found = scans(plans.take(), partitions)
    assert {(name, kind) for name, kind, _ in found} == {(MAY, "Index Scan")}
    assert await store.replay(where, actor="ann") == 20
    found = scans(plans.take(), partitions)
    full = {(name, kind) for name, kind, rows in found if "_2021_" in name and kind == "Seq Scan"}
    assert full == set()
    assert max(rows for _, _, rows in found) == 20


async def test_prune_takes_one_batch_by_the_index(filled: Filled) -> None:
    store, plans, partitions = filled
    oldest = sorted(partitions)
    age = datetime.now(UTC) - (MONTHS[1] + timedelta(days=1))
    removed = await store.run(lambda db: store.operations.prune(db, "delivered", age, 100, False))
    assert removed == 100
    found = scans(plans.take(), partitions)
    assert {name for name, _, _ in found} == set(oldest[:2])
    assert "Seq Scan" not in {kind for _, kind, _ in found}
    assert max(rows for _, _, rows in found) == 100
