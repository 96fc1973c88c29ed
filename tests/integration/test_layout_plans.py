"""The other systems' own indexes serve our statements: plans of the real ones on PostgreSQL, at a backlog of 200,000.

Beside the backlog stand as many delivered rows, and dead, scheduled and lapsed ones. What a batch reads may be a few
times its size; nothing reads a table from end to end or sorts a backlog.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from pillarbox import Event, Outbox
from pillarbox.event import DELIVERED, Retry
from pillarbox.layouts import declare_layout, get_layout
from pillarbox.schema.ddl import table_ddl
from pillarbox.stores import Mode
from pillarbox.stores.postgres import PostgresStore
from pillarbox.stores.url import open_store
from tests.integration.test_claim_plans import Plans, explain_everything, nodes, rows_read
from tests.servers import server_url

BATCH = 500
MODES: tuple[Mode, ...] = ("hold", "lease")
BACKLOG = 200_000
MOST_ROWS = 5 * BATCH

AGO, LATER = "now() - interval '1 hour' + n * interval '1 millisecond'", "now() + interval '1 day'"
LONG_AGO = "now() - interval '40 days'"
UTC_AGO = "(now() AT TIME ZONE 'UTC') - interval '1 hour' + n * interval '1 millisecond'"

Rows = dict[str, str]


@dataclass(frozen=True)
class Sample:
    """How rows of each kind are spelled in one layout's table."""

    layout: str
    common: Rows
    ready: Rows
    others: dict[str, Rows]
    delivered: Rows | None = None
    is_side: bool = False


OMNIBOX = Sample(
    "omnibox",
    {
        "id": "gen_random_uuid()",
        "event_type": "'t'",
        "aggregate_type": "'a'",
        "aggregate_id": "gen_random_uuid()",
        "topic": "'topic'",
        "partition_key": "'key-' || n % 1000",
        "payload": """'{"n": 1}'""",
        "created_at": AGO,
        "updated_at": AGO,
        "scheduled_at": AGO,
    },
    {},
    {
        "failed": {"status": "'failed'", "attempts_made": "6", "updated_at": f"{LONG_AGO}"},
        "scheduled": {"scheduled_at": LATER},
        "lapsed": {"locked_at": AGO, "locked_by": "'gone'"},
    },
    {"status": "'completed'", "completed_at": LONG_AGO},
)
OPENOUTBOX = Sample(
    "openoutbox",
    {
        "event_id": "gen_random_uuid()",
        "event_type": "'topic'",
        "partition_key": "'key-' || n % 1000",
        "payload": "'x'",
        "available_at": AGO,
        "created_at": AGO,
        "updated_at": AGO,
    },
    {},
    {
        "dead": {"status": "'DEAD'", "updated_at": LONG_AGO},
        "scheduled": {"available_at": LATER},
        "lapsed": {"status": "'DELIVERING'", "locked_at": AGO, "locked_by": "'gone'"},
    },
    {"status": "'DELIVERED'", "delivered_at": LONG_AGO},
)
FASTSTREAM = Sample(
    "faststream-dlq",
    {"queue": "'queue-' || n % 5", "payload": "'x'", "next_attempt_at": AGO, "created_at": AGO},
    {},
    {
        "scheduled": {"next_attempt_at": LATER},
        "lapsed": {"acquired_at": AGO, "acquired_token": "gen_random_uuid()"},
    },
)
NOTIFICATIONS = Sample(
    "ekbatan-notifications",
    {
        "id": "gen_random_uuid()",
        "event_id": "gen_random_uuid()",
        "handler_name": "'h'",
        "namespace": "'n'",
        "action_id": "gen_random_uuid()",
        "action_name": "'a'",
        "action_params": "'{}'",
        **dict.fromkeys(("started_date", "completion_date", "event_date", "created_date"), UTC_AGO),
        "event_type": "'t'",
        "payload": "'{}'",
        "state": "'PENDING'",
        "next_retry_at": UTC_AGO,
        "updated_date": UTC_AGO,
    },
    {},
    {
        "expired": {"state": "'EXPIRED'"},
        "scheduled": {"state": "'FAILED'", "next_retry_at": f"({LATER}) AT TIME ZONE 'UTC'"},
    },
    {"state": "'SUCCEEDED'"},
)
DEBEZIUM = Sample(
    "debezium",
    {
        "id": "gen_random_uuid()",
        "aggregatetype": "'order'",
        "aggregateid": "'key-' || n % 1000",
        "type": "'t'",
        "payload": "'{}'",
    },
    {},
    {},
    is_side=True,
)
SAMPLES = [OMNIBOX, OPENOUTBOX, FASTSTREAM, NOTIFICATIONS, DEBEZIUM]


def insert(db: sa.Connection, table: sa.Table, columns: Rows, count: int) -> None:
    names, values = ", ".join(columns), ", ".join(columns.values())
    db.exec_driver_sql(
        f"INSERT INTO {table.fullname} ({names}) SELECT {values} FROM generate_series(1, {count}) AS n".replace(
            "%", "%%"
        )
    )


@contextmanager
def filled(sample: Sample, *, ready: int, delivered: int, other: int) -> Iterator[dict[str, sa.Table]]:
    """A layout's tables with rows of every kind, analyzed."""
    schema = f"plans_{uuid4().hex[:8]}"
    tables = dict(declare_layout(get_layout(sample.layout), sa.MetaData(), schema=schema))
    engine = sa.create_engine(server_url("postgres").replace("postgresql:", "postgresql+psycopg:"))
    try:
        with engine.begin() as db:
            db.exec_driver_sql(f"CREATE SCHEMA {schema}")
            for table in tables.values():
                for statement in table_ddl(table, engine.dialect):
                    db.exec_driver_sql(statement.replace("%", "%%"))
            main = tables["outbox"]
            insert(db, main, sample.common | sample.ready, ready)
            if sample.delivered is not None:
                insert(db, main, sample.common | sample.delivered, delivered)
            for columns in sample.others.values():
                insert(db, main, sample.common | columns, other)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
            for table in tables.values():
                db.exec_driver_sql(f"VACUUM ANALYZE {table.fullname}")
        yield tables
    finally:
        with engine.begin() as db:
            db.exec_driver_sql(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
        engine.dispose()


async def open_explained(sample: Sample, schema: str | None) -> tuple[PostgresStore, Plans]:
    store = open_store(server_url("postgres"), layout=sample.layout, schema=schema, notify=False, pooler=False)
    assert isinstance(store, PostgresStore)
    await store._connect()
    plans = explain_everything(store)
    await store.open()
    plans.take()
    return store, plans


def whole_reads(plans: list[dict[str, Any]], tables: set[str]) -> list[str]:
    """The parts of plans that read a table from end to end."""
    return [
        plan["Query Text"]
        for plan in plans
        for node in nodes(plan["Plan"])
        if node["Node Type"] == "Seq Scan" and node.get("Relation Name") in tables and node["Actual Rows"] > BATCH
    ]


def big_sorts(plans: list[dict[str, Any]]) -> list[str]:
    """The parts of plans that sort more than a few batches."""
    return [
        plan["Query Text"]
        for plan in plans
        for node in nodes(plan["Plan"])
        if node["Node Type"] == "Sort" and any(child["Actual Rows"] > MOST_ROWS for child in node.get("Plans", ()))
    ]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.layout)
async def test_a_batch_reads_a_few_times_its_size(sample: Sample) -> None:
    other = 2_000
    with filled(sample, ready=BACKLOG, delivered=BACKLOG, other=other) as tables:
        store, plans = await open_explained(sample, tables["outbox"].schema)
        names = {table.name for table in tables.values()}
        try:
            # Lapsed rows are let go first, all of them.
            batch = await store.claim(BATCH, mode="lease", lease=timedelta(minutes=1))
            assert len(batch.claims) == BATCH
            woken = plans.take()
            assert not whole_reads(woken, names)
            assert sum(rows_read(plan["Plan"], names) for plan in woken) <= MOST_ROWS + 6 * other

            await batch.renew(timedelta(minutes=1))
            half = BATCH // 2
            await batch.settle([DELIVERED] * half + [Retry("later", timedelta(minutes=5))] * half)
            again = await store.claim(BATCH, mode="hold", lease=timedelta(minutes=1))
            assert len(again.claims) + (BATCH if again.has_tried else 0) >= BATCH
            if again.claims:
                await again.settle([DELIVERED] * len(again.claims))
            await store.next_due()
            found = plans.take()
            assert not whole_reads(found, names)
            assert not big_sorts(found)
            most = max(rows_read(plan["Plan"], names) for plan in found)
            assert most <= MOST_ROWS
        finally:
            await store.close()


@pytest.mark.parametrize("sample", [OMNIBOX, OPENOUTBOX], ids=lambda sample: sample.layout)
async def test_status_and_prune_go_by_the_tables_own_indexes(sample: Sample) -> None:
    with filled(sample, ready=2_000, delivered=BACKLOG, other=1_000) as tables:
        store, plans = await open_explained(sample, tables["outbox"].schema)
        names = {tables["outbox"].name}
        try:
            counts = await store.counts()
            assert (counts.new, counts.scheduled, counts.held, counts.delivered) == (2_000, 1_000, 1_000, BACKLOG)
            assert counts.dead == 1_000
            # Counting what was delivered reads its index; everything else is small.
            for plan in plans.take():
                scans = [node for node in nodes(plan["Plan"]) if node.get("Relation Name") in names]
                assert {node["Node Type"] for node in scans} <= {
                    "Index Scan",
                    "Index Only Scan",
                    "Bitmap Heap Scan",
                    "Seq Scan",
                }
                assert sum(node["Node Type"] == "Seq Scan" for node in scans) <= 1
            pruned = await store.prune(dead_age=timedelta(days=30), batch=BATCH)
            assert pruned.dead == 1_000
            found = plans.take()
            assert not whole_reads(found, names)
            assert max(rows_read(plan["Plan"], names) for plan in found) <= MOST_ROWS
        finally:
            await store.close()


TIED = {
    "omnibox": dict.fromkeys(("scheduled_at", "created_at"), "now() - interval '1 hour'"),
    "openoutbox": dict.fromkeys(("available_at", "created_at"), "now() - interval '1 hour'"),
}


@pytest.mark.parametrize("sample", [OMNIBOX, OPENOUTBOX], ids=lambda sample: sample.layout)
async def test_a_claim_among_rows_of_one_time_reads_a_few_times_its_size(sample: Sample) -> None:
    tied = replace(sample, ready=TIED[sample.layout], others={}, delivered=None)
    with filled(tied, ready=100_000, delivered=0, other=0) as tables:
        store, plans = await open_explained(tied, tables["outbox"].schema)
        try:
            for mode in MODES:
                batch = await store.claim(BATCH, mode=mode, lease=timedelta(minutes=5))
                assert len(batch.claims) == BATCH
                await batch.settle([DELIVERED] * BATCH)
            most = max(rows_read(plan["Plan"], {tables["outbox"].name}) for plan in plans.take())
            assert most <= MOST_ROWS
        finally:
            await store.close()


@pytest.mark.parametrize("limit", [1, 7, 300])
async def test_rows_due_at_one_time_go_out_in_the_order_of_their_puts(limit: int) -> None:
    """Though they lie in the table the other way round, and a batch ends among them."""
    due = {"scheduled_at": "now() - interval '1 hour'", "created_at": "now() - interval '2 hours' - n * interval '1 s'"}
    tied = replace(OMNIBOX, ready=due, others={}, delivered=None)
    with filled(tied, ready=1_000, delivered=0, other=0) as tables:
        store, _ = await open_explained(tied, tables["outbox"].schema)
        try:
            assert (await store.claim(0, mode="lease", lease=timedelta(minutes=5))).claims == []
            batches = [await store.claim(limit, mode="lease", lease=timedelta(minutes=5)) for _ in range(3)]
            moments = [claim.event.created_at for batch in batches for claim in batch.claims]
            assert len(moments) == 3 * limit
            assert moments == sorted(moments)
        finally:
            await store.close()


@pytest.mark.parametrize("is_mixed", [False, True], ids=["alone", "beside a scheduled one"])
@pytest.mark.parametrize("layout", ["omnibox", "openoutbox", "faststream"])
def test_events_of_one_put_have_times_of_their_own(layout: str, is_mixed: bool) -> None:
    sample = {"omnibox": OMNIBOX, "openoutbox": OPENOUTBOX, "faststream": replace(FASTSTREAM, layout="faststream")}[
        layout
    ]
    context: dict[str, Any] = {"aggregate_type": "a", "aggregate_id": str(uuid4())} if layout == "omnibox" else {}
    with filled(replace(sample, others={}, delivered=None), ready=0, delivered=0, other=0) as tables:
        outbox = Outbox(sa.MetaData(), layout, schema=tables["outbox"].schema)
        engine = sa.create_engine(server_url("postgres").replace("postgresql:", "postgresql+psycopg:"))
        with engine.begin() as db:
            scheduled = [Event("t", {"n": 200}, key="k", delay=timedelta(days=1), **context)] if is_mixed else []
            outbox.put(db, *(Event("t", {"n": number}, key="k", **context) for number in range(200)), *scheduled)
            payload, order = outbox.table.c.payload, [outbox.table.c[name] for name in outbox.layout.order_by]
            listed = sa.cast(payload, sa.LargeBinary) if layout != "omnibox" else payload
            rows = db.execute(sa.select(listed, order[0]).order_by(*order).limit(200)).all()
        engine.dispose()
    numbers = [row[0]["n"] if isinstance(row[0], dict) else json.loads(bytes(row[0]))["n"] for row in rows]
    assert numbers == list(range(200))
    # Two may be written in one microsecond, and then their ids tell.
    assert len({row[1] for row in rows}) > 100
