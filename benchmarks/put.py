"""Putting events on PostgreSQL, over the bare insert and over the business transaction alone."""

from __future__ import annotations

import statistics
import time
import zlib
from typing import Any

import asyncpg
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from benchmarks.common import KEYS, PAYLOAD, ROUNDS, Result, alternate, postgres_outbox, server_url
from pillarbox import Event, Outbox
from pillarbox.event import uuid7

EVENTS = 1000
TRANSACTIONS = 20
ORDERS = 400

_COLUMNS = "id, lane, type, topic, key, payload, content_type, created_at"
_BARE = (
    f"INSERT INTO bench_outbox ({_COLUMNS}) SELECT g.*, statement_timestamp() FROM unnest($1::uuid[], $2::smallint[],"
    " $3::text[], $4::text[], $5::text[], $6::bytea[], $7::text[]) AS g"
)


async def put_many() -> Result:
    """(c) A thousand events in one transaction, over a bare insert from unnest of the same rows."""
    with postgres_outbox() as (outbox, engine):
        connection = await asyncpg.connect(server_url("postgres"))

        async def prepare() -> None:
            with engine.begin() as db:
                db.exec_driver_sql(f"TRUNCATE {outbox.table.fullname}")

        async def ours() -> float:
            await prepare()
            return await _rate(_put_ours, connection, outbox)

        async def bare() -> float:
            await prepare()
            return await _rate(_put_bare, connection, outbox)

        value, baseline, ratio = await alternate(ours, bare)
        await connection.close()
    return Result("put_many", value, "events/s", baseline, ratio, 0.5)


async def _rate(put: Any, connection: Any, outbox: Outbox) -> float:
    started = time.perf_counter()
    for _ in range(TRANSACTIONS):
        async with connection.transaction():
            await put(connection, outbox)
    return EVENTS * TRANSACTIONS / (time.perf_counter() - started)


async def _put_ours(connection: Any, outbox: Outbox) -> None:
    events = [Event("bench", PAYLOAD, key=f"key-{number % KEYS}") for number in range(EVENTS)]
    await outbox.put_async(connection, *events)


async def _put_bare(connection: Any, outbox: Outbox) -> None:
    keys = [f"key-{number % KEYS}" for number in range(EVENTS)]
    same = ["bench"] * EVENTS
    await connection.execute(
        _BARE,
        [uuid7() for _ in keys],
        [zlib.crc32(key.encode()) % 64 for key in keys],
        *(same, same, keys, [PAYLOAD] * EVENTS, ["application/octet-stream"] * EVENTS),
    )


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "bench_orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    total: Mapped[int]


async def put_session() -> Result:
    """(d) One event put beside a business row through a session, over the business row alone; NOTIFY included."""
    with postgres_outbox() as (outbox, engine):
        Base.metadata.drop_all(engine)
        Base.metadata.create_all(engine)
        ours: list[float] = []
        bare: list[float] = []
        try:
            for _ in range(ROUNDS):
                # One of each in turn, so that whatever else the machine does hits both alike.
                for number in range(ORDERS):
                    bare.append(_place(engine, None, number))
                    ours.append(_place(engine, outbox, number))
        finally:
            Base.metadata.drop_all(engine)
    value, baseline = statistics.median(ours) * 1e3, statistics.median(bare) * 1e3
    return Result("put_session", value, "ms", baseline, value / baseline, 1.35, at_most=True)


def _place(engine: sa.Engine, outbox: Outbox | None, number: int) -> float:
    started = time.perf_counter()
    with Session(engine) as session:
        session.add(Order(customer=f"customer-{number}", total=number))
        if outbox is not None:
            outbox.put(session, Event("order.placed", {"number": number}, key=f"customer-{number}"))
        session.commit()
    return time.perf_counter() - started
