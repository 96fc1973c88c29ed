"""A burst after a quiet time: statements planned on a nearly empty table cost the same when 30,000 rows are in it.

The server has the statistics of a nearly empty table and plans each statement once, for good. Then the rows come, and
the same connection goes on with the plans it has. A second connection plans each time anew, as behind a pooler, and
has stale statistics only. What each statement reads is compared, in pages, with a connection that plans with fresh
statistics: pages do not depend on what else the machine does.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from pillarbox.event import DELIVERED, RELEASED, Dead, Outcome, Retry
from pillarbox.layouts import declare_layout, get_layout
from pillarbox.layouts.clock import later
from pillarbox.layouts.layout import Feature
from pillarbox.schema.ddl import table_ddl
from pillarbox.schema.partitions import ensure_partitions
from pillarbox.stores import Filter, State
from pillarbox.stores.postgres import BY_INDEX, PostgresStore
from pillarbox.stores.url import open_store
from tests.integration.test_claim_plans import Plans, explain_everything, nodes
from tests.integration.test_layout_plans import (
    AGO,
    DEBEZIUM,
    FASTSTREAM,
    NOTIFICATIONS,
    OMNIBOX,
    OPENOUTBOX,
    UTC_AGO,
    Rows,
    Sample,
    insert,
)
from tests.servers import server_url

BATCH = 50
BURST = 30_000
BESIDE = 1_000
"""Rows of every other kind."""
LEASE = timedelta(minutes=10)
MOST_RATIO = 2
FEW = 4 * BATCH
"""Pages that any statement may read more: a batch that is looked up by an index, and no row of it is wanted."""
MOST_PER_ROW = 40
"""Pages that a row costs at most where there is nothing to compare with: an UPDATE looks into seven indexes."""

LATER = "now() + interval '1 day'"
KEYED = {"key": "'other-' || n", "attempts": "1", "until_at": AGO}
PILLARBOX = Sample(
    "pillarbox",
    {
        "id": "gen_random_uuid()",
        "lane": "n % 64",
        "type": "'t'",
        "topic": "'t'",
        "key": "'key-' || n % 10000",
        "content_type": "'application/json'",
        "payload": "'{}'",
        "created_at": AGO,
    },
    {},
    {
        "waiting": KEYED | {"state": "2"},
        "lapsed": KEYED | {"state": "1", "token": "gen_random_uuid()"},
        "scheduled": {"state": "4", "until_at": LATER},
        "due": {"state": "4", "until_at": AGO},
    },
    {"state": "5", "delivered_at": AGO},
)
EVENTS = {
    name: NOTIFICATIONS.common[name]
    for name in ("id", "namespace", "action_id", "action_name", "action_params", "started_date", "completion_date")
}
EKBATAN = Sample(
    "ekbatan",
    EVENTS | {"event_type": "'t'", "payload": "'{}'", "event_date": UTC_AGO},
    {"delivered": "FALSE"},
    {},
    {"delivered": "TRUE"},
    is_side=True,
)
SAMPLES = [
    PILLARBOX,
    replace(PILLARBOX, layout="pillarbox-partitioned"),
    OMNIBOX,
    replace(OMNIBOX, layout="omnibox-partitioned"),
    OPENOUTBOX,
    FASTSTREAM,
    EKBATAN,
    NOTIFICATIONS,
    DEBEZIUM,
]

Costs = dict[str, tuple[int, int]]
"""The pages and the rows of the dearest run of each statement."""


@contextmanager
def made(sample: Sample) -> Iterator[tuple[sa.Engine, dict[str, sa.Table]]]:
    """A layout's tables in a schema of their own, which nobody vacuums or analyzes unasked."""
    schema = f"stale_{uuid4().hex[:8]}"
    tables = dict(declare_layout(get_layout(sample.layout), sa.MetaData(), schema=schema))
    engine = sa.create_engine(server_url("postgres").replace("postgresql:", "postgresql+psycopg:"))
    try:
        with engine.begin() as db:
            db.exec_driver_sql(f"CREATE SCHEMA {schema}")
            for table in tables.values():
                for statement in table_ddl(table, engine.dialect):
                    db.exec_driver_sql(statement.replace("%", "%%"))
                if table.dialect_options["postgresql"]["partition_by"]:
                    ensure_partitions(db, table.name, schema=schema)
            names = "SELECT oid::regclass::text FROM pg_class WHERE relnamespace = %s::regnamespace AND relkind = 'r'"
            for name in db.exec_driver_sql(names, (schema,)).scalars().all():
                db.exec_driver_sql(f"ALTER TABLE {name} SET (autovacuum_enabled = false)")
                db.exec_driver_sql(f"ALTER TABLE {name} SET UNLOGGED")
        yield engine, tables
    finally:
        with engine.begin() as db:
            db.exec_driver_sql(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
        engine.dispose()


def analyze(engine: sa.Engine, tables: dict[str, sa.Table]) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
        for table in tables.values():
            db.exec_driver_sql(f"ANALYZE {table.fullname}")


def add(engine: sa.Engine, sample: Sample, table: sa.Table, *, ready: int, beside: int) -> None:
    kinds: list[Rows] = [*sample.others.values(), *([] if sample.delivered is None else [sample.delivered])]
    with engine.begin() as db:
        insert(db, table, sample.common | sample.ready, ready)
        for columns in kinds:
            insert(db, table, sample.common | columns, beside)


@asynccontextmanager
async def explained(sample: Sample, schema: str | None, *settings: str) -> AsyncIterator[tuple[PostgresStore, Plans]]:
    """A store whose server tells what each statement reads."""
    store = open_store(server_url("postgres"), layout=sample.layout, schema=schema, notify=False, pooler=False)
    assert isinstance(store, PostgresStore)
    await store._connect()
    plans = explain_everything(store, "SET auto_explain.log_buffers = on", *(f"SET {each}" for each in settings))
    await store.open()
    plans.take()
    try:
        yield store, plans
    finally:
        await store.close()


async def live(store: PostgresStore, size: int) -> None:
    """Everything that relays and operators do, in batches of a size."""
    await relay(store, size)
    await change(store)
    await operate(store, size)


async def relay(store: PostgresStore, size: int) -> None:
    async def lease(outcomes: list[Outcome], *, renews: bool = False) -> None:
        batch = await store.claim(size, mode="lease", lease=LEASE)
        if renews:
            await batch.renew(LEASE)
        await batch.settle([outcomes[number % len(outcomes)] for number in range(len(batch.claims))])

    await store.run(lambda db: store.transitions.wake(db, 10, True))
    await store.next_due()
    await store.list_waiting()
    batch = await store.claim(size, mode="hold", lease=LEASE)
    if batch.claims:
        await batch.settle([DELIVERED] * len(batch.claims))
    for _ in range(2):
        await lease([DELIVERED, Retry("503", timedelta(hours=1)), Dead("400"), RELEASED], renews=True)
    for outcome in (DELIVERED, RELEASED, Retry("503", timedelta(hours=1)), Dead("400")):
        await lease([outcome])
    batch = await store.claim(size, mode="lease", lease=LEASE)
    await block_behind(store, batch.claims, size)
    await batch.settle([DELIVERED] * len(batch.claims))


async def block_behind(store: PostgresStore, claims: Any, size: int) -> None:
    """Mark rows that wait behind claims, as claims of other relays would."""
    if not store.keeps_order:
        return
    c = store.tables["outbox"].c
    later_ones = sa.select(c.seq, c.key).where(c.key.in_([claim.event.key for claim in claims]), c.state == 0)
    rows = await store.run(lambda db: [(row, key) for row, key in db.execute(later_ones.limit(size))])
    await store.run(lambda db: store.transitions.block(db, rows))


async def change(store: PostgresStore) -> None:
    if store.layout.cancellable is None or "id" not in store.layout.fields:
        return
    batch = await store.claim(4, mode="lease", lease=LEASE)
    ids = [claim.event.id for claim in batch.claims]
    await batch.settle([RELEASED] * len(ids))
    for due in (later(sa.literal(0.0)), None):
        given = SimpleNamespace(due=due, due_at=datetime.now(UTC))
        await store.run(lambda db, given=given: store.transitions.change(db, ids, None, given))  # type: ignore[misc]


async def operate(store: PostgresStore, size: int) -> None:
    await store.counts()
    states: tuple[State | None, ...] = (None, "ready", "dead", "leased", "waiting")
    for state in states:
        await store.events(Filter(), state=state, limit=50)
    await store.redrive(Filter(), actor="ann", limit=size)
    await store.drop(Filter(), actor="ann", limit=size)
    if store.layout.replay is not None and Feature.RETENTION in store.layout.features:
        await store.replay(Filter(), actor="ann", limit=size)
    if store.keeps_order:
        await store.find_faults()
    for what in ("delivered", "dead"):
        await store.run(lambda db, what=what: store.operations.prune(db, what, timedelta(0), size, False))  # type: ignore[misc]


def costs(plans: list[dict[str, Any]]) -> Costs:
    """What each statement read in its dearest run; lists of any length are the same statement."""
    most: Costs = {}
    for plan in plans:
        root = plan["Plan"]
        pages = root["Shared Hit Blocks"] + root["Shared Read Blocks"]
        written = [
            child["Actual Rows"]
            for node in nodes(root)
            if node["Node Type"] == "ModifyTable"
            for child in node["Plans"]
        ]
        query = re.sub(r" IN \([^()]*\)", " IN (…)", plan["Query Text"])
        if pages >= most.get(query, (0, 0))[0]:
            most[query] = pages, max([root["Actual Rows"], *written])
    return most


def dear(found: Costs, fresh: Costs) -> list[str]:
    """The statements that read too much, with what they read a row and what they should."""
    told = []
    for query, (pages, rows) in found.items():
        usual, usual_rows = fresh.get(query, (0, 0))
        allowed = MOST_RATIO * usual * max(1.0, rows / max(usual_rows, 1)) if usual else MOST_PER_ROW * rows
        if pages > allowed + FEW:
            told.append(f"{pages} pages for {rows} rows, with fresh statistics {usual} for {usual_rows}: {query}")
    return told


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.layout)
async def test_statements_planned_for_an_empty_table_read_no_more_after_a_burst(sample: Sample) -> None:
    with made(sample) as (engine, tables):
        outbox = tables["outbox"]
        add(engine, sample, outbox, ready=80, beside=2)
        analyze(engine, tables)
        once = "plan_cache_mode = force_generic_plan"
        freely = [f"{name} = on" for name in BY_INDEX]
        async with explained(sample, outbox.schema, once) as (store, plans):
            await live(store, 4)
            plans.take()
            add(engine, sample, outbox, ready=BURST, beside=BESIDE)
            await live(store, BATCH)
            cached = costs(plans.take())
        add(engine, sample, outbox, ready=0, beside=BESIDE)
        async with explained(sample, outbox.schema, "plan_cache_mode = force_custom_plan", *freely) as (store, plans):
            await relay(store, BATCH)
            anew = costs(plans.take())
        add(engine, sample, outbox, ready=0, beside=BESIDE)
        analyze(engine, tables)
        async with explained(sample, outbox.schema, once) as (store, plans):
            await live(store, BATCH)
            fresh = costs(plans.take())
        assert len(cached) > 15
        assert dear(cached, fresh) == []
        assert dear(anew, fresh) == []
