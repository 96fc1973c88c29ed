"""The relay on each layout's table on PostgreSQL to the null sink, over the same statements run bare with asyncpg."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import sqlalchemy as sa

from benchmarks.common import KEYS, Result, alternate, server_url
from pillarbox import Event, Outbox, Relay, open_sink
from pillarbox.event import DELIVERED
from pillarbox.stores.postgres import PostgresStore

EVENTS = 40_000
BATCH = 500
BAR = 0.6
PAYLOAD = {"text": "x" * 240}

Statement = tuple[str, tuple[Any, ...]]
LAYOUTS = ("omnibox", "openoutbox", "faststream", "ekbatan", "debezium")


_OWN: dict[str, tuple[str, ...]] = {
    "omnibox": ("aggregate_type", "aggregate_id"),
    "ekbatan": ("source", "correlation_id"),
    "debezium": ("aggregate_type",),
}


def _context(aggregate: str, layout: str) -> dict[str, Any]:
    values = {"aggregate_type": "order", "aggregate_id": aggregate, "source": "bench", "correlation_id": aggregate}
    return {name: values[name] for name in _OWN.get(layout, ())}


def events_for(layout: str, count: int) -> list[Event]:
    context = _context(str(uuid4()), layout)
    return [Event("bench", PAYLOAD, key=f"key-{number % KEYS}", **context) for number in range(count)]


@contextmanager
def layout_outbox(layout: str) -> Iterator[tuple[Outbox, sa.Engine]]:
    """An outbox of a layout in a schema of its own, dropped afterwards."""
    schema = f"bench_{layout}"
    metadata = sa.MetaData()
    outbox = Outbox(metadata, layout, schema=schema)
    engine = sa.create_engine(server_url("postgres").replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as db:
        db.exec_driver_sql(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
        db.exec_driver_sql(f"CREATE SCHEMA {schema}")
    metadata.create_all(engine)
    try:
        yield outbox, engine
    finally:
        with engine.begin() as db:
            db.exec_driver_sql(f"DROP SCHEMA {schema} CASCADE")
        engine.dispose()


def refill(outbox: Outbox, engine: sa.Engine, count: int) -> None:
    with engine.begin() as db:
        for table in outbox.tables.values():
            db.exec_driver_sql(f"TRUNCATE {table.fullname}")
    for start in range(0, count, 1000):
        with engine.begin() as db:
            outbox.put(db, *events_for(outbox.layout.name, min(1000, count - start)))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
        for table in outbox.tables.values():
            db.exec_driver_sql(f"VACUUM ANALYZE {table.fullname}")


async def record(outbox: Outbox) -> list[Statement]:
    """What the store sends for one full batch that is held and delivered."""
    store = outbox.store(server_url("postgres"), notify=False)
    assert isinstance(store, PostgresStore)
    await store.open()
    sent: list[Statement] = []

    def listen(connection: Any, cursor: Any, sql: str, params: Any, context: Any, many: bool) -> None:
        sent.append((sql, tuple(params)))

    await store.next_due()
    sa.event.listen(store._engine.sync_engine, "before_cursor_execute", listen)
    batch = await store.claim(BATCH, mode="hold", lease=timedelta(seconds=30))
    assert len(batch.claims) == BATCH
    await batch.settle([DELIVERED] * BATCH)
    await store.close()
    return sent


async def run_bare(statements: Sequence[Statement], count: int) -> float:
    """The statements of a batch in a loop, each with the rows that the claim found."""
    connection = await asyncpg.connect(server_url("postgres"))
    done = 0
    started = time.perf_counter()
    while done < count:
        async with connection.transaction():
            rows: Sequence[Any] = ()
            for sql, params in statements:
                found = await connection.fetch(sql, *(_fill(value, rows) for value in params))
                if found and len(found[0]) > len(rows[0] if rows else ()):
                    rows = found
        if not rows:
            break
        done += len(rows)
    elapsed = time.perf_counter() - started
    await connection.close()
    return done / elapsed


def _fill(value: Any, rows: Sequence[Any]) -> Any:
    """Lists of recorded rows become those of this batch; everything else stays."""
    if not isinstance(value, list) or not value:
        return value
    first = value[0]
    if isinstance(first, datetime):
        return [row[1] for row in rows]
    is_row = isinstance(first, UUID | int) or type(first).__name__ == "UUID"
    return [row[0] for row in rows] if is_row else value


async def relay_rate(outbox: Outbox, count: int) -> float:
    relay = Relay(
        outbox.store(server_url("postgres"), notify=False), open_sink("null:"), claim="hold", batch_size=BATCH
    )
    async with relay:
        relay._size = BATCH
        started = time.perf_counter()
        await relay._loop(drains=True)
        return count / (time.perf_counter() - started)


async def measure(layout: str) -> Result:
    with layout_outbox(layout) as (outbox, engine):
        refill(outbox, engine, 3 * BATCH)
        statements = await record(outbox)

        async def ours() -> float:
            await asyncio.to_thread(refill, outbox, engine, EVENTS)
            return await relay_rate(outbox, EVENTS)

        async def bare() -> float:
            await asyncio.to_thread(refill, outbox, engine, EVENTS)
            return await run_bare(statements, EVENTS)

        value, baseline, ratio = await alternate(ours, bare)
    return Result(f"layout_{layout}", value, "events/s", baseline, ratio, BAR)


def make_benchmark(layout: str) -> Callable[[], Coroutine[Any, Any, Result]]:
    async def benchmark() -> Result:
        return await measure(layout)

    benchmark.__name__ = f"layout_{layout}"
    benchmark.__doc__ = f"By hold from the table of layout {layout}, batches of 500."
    return benchmark


# What the Go relay does for a batch: rows due, in the order of its index, become its own in one statement.
_GO_CLAIM = """
    WITH due AS (
        SELECT event_id FROM {table} WHERE status = 'PENDING' AND available_at <= now()
        ORDER BY available_at, created_at LIMIT $1 FOR UPDATE SKIP LOCKED
    )
    UPDATE {table} AS event SET status = 'DELIVERING', locked_by = $2, locked_at = now(), updated_at = now()
    FROM due WHERE event.event_id = due.event_id
    RETURNING event.event_id, event_type, partition_key, payload, headers, attempts, created_at
"""
_GO_SETTLE = """
    UPDATE {table}
    SET status = 'DELIVERED', delivered_at = now(), locked_by = NULL, locked_at = NULL, updated_at = now()
    WHERE event_id = ANY($1) AND status = 'DELIVERING' AND locked_by = $2
"""


async def layout_openoutbox_ties() -> Result:
    """The whole relay by hold from 20,000 rows of one time, over the Go relay's statements run bare.

    The Go relay knows leases only: two writes per row, against one of ours, but no loop and no sink around them.
    """
    count = EVENTS // 2
    with layout_outbox("openoutbox") as (outbox, engine):
        table = outbox.table.fullname

        def tie() -> None:
            refill(outbox, engine, count)
            with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
                db.exec_driver_sql(f"UPDATE {table} SET available_at = now(), created_at = now()")
                db.exec_driver_sql(f"VACUUM FULL ANALYZE {table}")

        async def ours() -> float:
            await asyncio.to_thread(tie)
            return await relay_rate(outbox, count)

        async def theirs() -> float:
            await asyncio.to_thread(tie)
            return await run_go(table, count)

        value, baseline, ratio = await alternate(ours, theirs)
    return Result("layout_openoutbox_ties", value, "events/s", baseline, ratio, BAR)


async def run_go(table: str, count: int) -> float:
    connection = await asyncpg.connect(server_url("postgres"))
    done = 0
    started = time.perf_counter()
    while rows := await connection.fetch(_GO_CLAIM.format(table=table), BATCH, "go"):
        await connection.execute(_GO_SETTLE.format(table=table), [row[0] for row in rows], "go")
        done += len(rows)
    elapsed = time.perf_counter() - started
    await connection.close()
    assert done == count
    return done / elapsed


BENCHMARKS = [*(make_benchmark(layout) for layout in LAYOUTS), layout_openoutbox_ties]
