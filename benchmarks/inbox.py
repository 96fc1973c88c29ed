"""Taking messages on PostgreSQL, over bare inserts of the same rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import asyncpg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from benchmarks.common import PAYLOAD, ROUNDS, Result, alternate, server_url
from pillarbox import Event
from pillarbox.event import uuid7
from pillarbox.inbox import Inbox, Message

BATCH = 500
BATCHES = 40
SINGLE = 400
EVENT = Event("order.placed", PAYLOAD)

_COLUMNS = "consumer_group, message_id, source, type, taken_at"
_MANY = (
    f"INSERT INTO bench_inbox ({_COLUMNS}) SELECT g.*, statement_timestamp()"
    " FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) AS g"
)
_ONE = f"INSERT INTO bench_inbox ({_COLUMNS}) VALUES ($1, $2, $3, $4, statement_timestamp())"


async def inbox_take() -> Result:
    """Messages taken in batches of 500, a transaction each, over the driver's own insert from unnest.

    What is taken and what is inserted is made beforehand.
    """
    async with _inbox() as (inbox, db):
        connection = await asyncpg.connect(server_url("postgres"))

        async def take(messages: list[Message]) -> None:
            async with db.begin():
                is_new = await inbox.take_many_async(db, messages)
            assert all(is_new)

        async def insert(rows: list[list[str]]) -> None:
            async with connection.transaction():
                await connection.execute(_MANY, *rows)

        def make_messages(ids: list[str]) -> list[Message]:
            return [_message(each) for each in ids]

        def make_rows(ids: list[str]) -> list[list[str]]:
            return [["billing"] * BATCH, ids, ["orders"] * BATCH, [EVENT.type] * BATCH]

        def rate(
            make: Callable[[list[str]], Any], work: Callable[[Any], Awaitable[None]]
        ) -> Callable[[], Awaitable[float]]:
            async def run() -> float:
                await connection.execute("TRUNCATE bench_inbox")
                batches = [make([str(uuid7()) for _ in range(BATCH)]) for _ in range(BATCHES)]
                started = time.perf_counter()
                for batch in batches:
                    await work(batch)
                return BATCH * BATCHES / (time.perf_counter() - started)

            return run

        value, baseline, ratio = await alternate(rate(make_messages, take), rate(make_rows, insert))
        await connection.close()
    return Result("inbox_take", value, "messages/s", baseline, ratio, 0.6)


async def inbox_take_single() -> Result:
    """Messages taken one by one, a transaction each, over a bare insert through the same connection."""
    numbers = count()
    taken: list[float] = []
    inserted: list[float] = []
    async with _inbox() as (inbox, db):

        async def take(id: str) -> None:
            async with db.begin():
                assert await inbox.take_async(db, _message(id))

        async def insert(id: str) -> None:
            async with db.begin():
                await db.exec_driver_sql(_ONE, ("billing", id, "orders", EVENT.type))

        # One of each in turn, so that whatever else the machine does hits both alike.
        for _ in range(ROUNDS * SINGLE):
            for work, times in ((take, taken), (insert, inserted)):
                started = time.perf_counter()
                await work(f"{next(numbers)}-{uuid7()}")
                times.append(time.perf_counter() - started)
    value, baseline = (1 / statistics.median(times) for times in (taken, inserted))
    return Result("inbox_take_single", value, "messages/s", baseline, value / baseline, 0.6)


BENCHMARKS = (inbox_take, inbox_take_single)


def _message(id: str) -> Message:
    return Message(id, "billing", source="orders", event=EVENT)


@asynccontextmanager
async def _inbox() -> AsyncIterator[tuple[Inbox, AsyncConnection]]:
    """An inbox in a fresh table and a connection; the table is dropped afterwards."""
    metadata = sa.MetaData()
    inbox = Inbox(metadata, table="bench_inbox", queue=False)
    engine = create_async_engine(server_url("postgres").replace("postgresql:", "postgresql+asyncpg:"))

    async def run(work: Any) -> None:
        async with engine.begin() as db:
            await db.run_sync(work)

    await run(metadata.drop_all)
    await run(metadata.create_all)
    try:
        async with engine.connect() as db:
            yield inbox, db
    finally:
        await run(metadata.drop_all)
        await engine.dispose()
