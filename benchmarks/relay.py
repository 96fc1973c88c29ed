"""The relay on PostgreSQL to the null sink, over the same statements run bare with asyncpg."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import asyncpg
import psutil
import sqlalchemy as sa

from benchmarks.common import Result, alternate, fill, postgres_outbox, server_url
from pillarbox import Outbox, Relay, Sink, open_sink
from pillarbox.event import DELIVERED
from pillarbox.stores.postgres import PostgresStore

EVENTS = 30_000
BATCH = 500
BAR = 0.7
MEMORY_EVENTS = 200_000

Mode = Literal["hold", "lease"]
Statement = tuple[str, tuple[Any, ...]]


async def record_statements(outbox: Outbox, mode: Mode) -> list[Statement]:
    """What the store sends for one full batch: claim, then settlement."""
    store = outbox.store(server_url("postgres"), notify=False)
    assert isinstance(store, PostgresStore)
    await store.open()
    sent: list[Statement] = []

    def listen(connection: Any, cursor: Any, sql: str, params: Any, context: Any, many: bool) -> None:
        sent.append((sql, tuple(params)))

    await store.claim(1, mode="lease", lease=timedelta(seconds=30))
    engine = store._engine.sync_engine
    sa.event.listen(engine, "before_cursor_execute", listen)
    batch = await store.claim(BATCH, mode=mode, lease=timedelta(seconds=30))
    await batch.settle([DELIVERED] * len(batch.claims))
    await store.close()
    return sent


async def run_bare(statements: list[Statement], mode: Mode, count: int) -> float:
    """The statements of a batch in a loop, with nothing around them but the values one hands to the next."""
    latch, pick = statements[0], statements[1]
    lease, unblock = (statements[2], statements[4]) if mode == "lease" else (None, None)
    settle = statements[3] if mode == "lease" else statements[2]
    connection = await asyncpg.connect(server_url("postgres"))
    done = 0
    started = time.perf_counter()
    while done < count:
        transaction = connection.transaction()
        await transaction.start()
        lanes = [row[0] for row in await connection.fetch(latch[0], *latch[1])]
        rows = await connection.fetch(pick[0], *(lanes if isinstance(value, list) else value for value in pick[1]))
        if not rows:
            await transaction.commit()
            break
        if lease is not None and unblock is not None:
            await connection.fetch(lease[0], *_filled(lease, rows))
            await transaction.commit()
            transaction = connection.transaction()
            await transaction.start()
        await connection.fetch(settle[0], *_filled(settle, rows))
        if unblock is not None:
            await connection.fetch(unblock[0], *_filled(unblock, rows))
        await transaction.commit()
        done += len(rows)
    elapsed = time.perf_counter() - started
    await connection.close()
    return done / elapsed


def _filled(statement: Statement, rows: list[Any]) -> list[Any]:
    """The recorded parameters with this batch's rows or keys in place of the recorded ones."""

    def fill_in(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return list({row[1] for row in rows}) if value and isinstance(value[0], str) else [row[0] for row in rows]

    return [fill_in(value) for value in statement[1]]


async def relay_rate(outbox: Outbox, mode: Mode, count: int, sink: Sink) -> float:
    relay = Relay(outbox.store(server_url("postgres"), notify=False), sink, claim=mode, batch_size=BATCH)
    async with relay:
        relay._size = BATCH
        started = time.perf_counter()
        await relay._loop(drains=True)
        return count / (time.perf_counter() - started)


def open_null() -> Sink:
    return open_sink("null:")


async def measure(name: str, mode: Mode, *, make_sink: Callable[[], Sink] = open_null, bar: float = BAR) -> Result:
    with postgres_outbox() as (outbox, engine):
        fill(outbox, engine, 3 * BATCH)
        statements = await record_statements(outbox, mode)

        async def prepare() -> None:
            with engine.begin() as connection:
                connection.exec_driver_sql(f"TRUNCATE {outbox.table.fullname}")
            await asyncio.to_thread(fill, outbox, engine, EVENTS)

        async def ours() -> float:
            await prepare()
            return await relay_rate(outbox, mode, EVENTS, make_sink())

        async def bare() -> float:
            await prepare()
            return await run_bare(statements, mode, EVENTS)

        value, baseline, ratio = await alternate(ours, bare)
    return Result(name, value, "events/s", baseline, ratio, bar)


async def relay_hold() -> Result:
    """(a) Hold, ordered, batches of 500, payloads of 256 bytes."""
    return await measure("relay_hold", "hold")


async def relay_lease() -> Result:
    """(b) The same by lease."""
    return await measure("relay_lease", "lease")


async def relay_memory() -> Result:
    """(g) Resident memory after 200,000 events over that after the first 20,000."""
    process = psutil.Process(os.getpid())
    with postgres_outbox() as (outbox, engine):
        relay = Relay(outbox.store(server_url("postgres"), notify=False), open_sink("null:"), batch_size=BATCH)
        sizes: list[int] = []
        async with relay:
            for _ in range(MEMORY_EVENTS // 20_000):
                await asyncio.to_thread(fill, outbox, engine, 20_000)
                await relay.drain()
                sizes.append(process.memory_info().rss)
    first, last = sizes[0] / 2**20, sizes[-1] / 2**20
    return Result("relay_memory", last, "MiB", first, last / first, 1.1, at_most=True)
