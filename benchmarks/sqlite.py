"""SQLite: putting and draining, over the bare statements on the same table."""

from __future__ import annotations

import json
import sqlite3
import tempfile
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from benchmarks.common import KEYS, PAYLOAD, Result, alternate, fill
from pillarbox import Event, Outbox, Relay, open_sink
from pillarbox.event import BYTES, DELIVERED, uuid7

EVENTS = 20_000
BATCH = 500

Statement = tuple[str, tuple[Any, ...]]

_NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now') || '000'"
_BARE_PUT = (
    "INSERT INTO outbox (id, lane, type, topic, key, payload, content_type, created_at)"
    f" VALUES (?, ?, ?, ?, ?, ?, ?, {_NOW})"
)


def _fresh(folder: str) -> tuple[Path, Outbox, sa.Engine]:
    path = Path(folder) / f"{uuid4().hex}.db"
    metadata = sa.MetaData()
    outbox = Outbox(metadata)
    engine = sa.create_engine(f"sqlite:///{path}")
    metadata.create_all(engine)
    return path, outbox, engine


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


async def _compare(name: str, ours: Callable[[str], object], bare: Callable[[str], object]) -> Result:
    with tempfile.TemporaryDirectory() as folder:

        async def run_ours() -> float:
            outcome = ours(folder)
            return await outcome if hasattr(outcome, "__await__") else outcome  # type: ignore[return-value]

        async def run_bare() -> float:
            return bare(folder)  # type: ignore[return-value]

        value, baseline, ratio = await alternate(run_ours, run_bare)
    return Result(name, value, "events/s", baseline, ratio, 0.5)


async def sqlite_put() -> Result:
    """(f) Events put a thousand a transaction, over executemany of the same rows."""
    return await _compare("sqlite_put", _put_ours, _put_bare)


def _put_ours(folder: str) -> float:
    path, outbox, _ = _fresh(folder)
    connection = _connect(path)
    started = time.perf_counter()
    for start in range(0, EVENTS, 1000):
        connection.execute("BEGIN IMMEDIATE")
        outbox.put(connection, *(Event("bench", PAYLOAD, key=f"key-{n % KEYS}") for n in range(start, start + 1000)))
        connection.execute("COMMIT")
    return EVENTS / (time.perf_counter() - started)


def _put_bare(folder: str) -> float:
    path, _, _ = _fresh(folder)
    connection = _connect(path)
    started = time.perf_counter()
    for start in range(0, EVENTS, 1000):
        keys = [f"key-{n % KEYS}" for n in range(start, start + 1000)]
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(
            _BARE_PUT,
            [(str(uuid7()), zlib.crc32(key.encode()) % 64, "bench", "bench", key, PAYLOAD, BYTES) for key in keys],
        )
        connection.execute("COMMIT")
    return EVENTS / (time.perf_counter() - started)


async def sqlite_drain() -> Result:
    """(f) A drain to the null sink, over the statements of its batches run bare."""
    with tempfile.TemporaryDirectory() as folder:
        statements = await _record_statements(folder)
        return await _compare("sqlite_drain", _drain_ours, lambda place: _drain_bare(place, statements))


async def _drain_ours(folder: str) -> float:
    path, outbox, engine = _fresh(folder)
    fill(outbox, engine, EVENTS)
    async with Relay(outbox.store(f"sqlite:///{path}"), open_sink("null:"), batch_size=BATCH) as relay:
        started = time.perf_counter()
        await relay.drain()
        return EVENTS / (time.perf_counter() - started)


async def _record_statements(folder: str) -> list[Statement]:
    """What the store sends for one full batch: the claim's transaction, then the settlement's."""
    path, outbox, engine = _fresh(folder)
    fill(outbox, engine, 2 * BATCH)
    store = outbox.store(f"sqlite:///{path}")
    await store.open()
    await store.next_due()
    sent: list[Statement] = []

    def listen(connection: Any, cursor: Any, sql: str, params: Any, context: Any, many: bool) -> None:
        sent.append((sql, tuple(params)))

    sa.event.listen(store._engine, "before_cursor_execute", listen)  # type: ignore[attr-defined]
    batch = await store.claim(BATCH, mode="lease", lease=timedelta(seconds=30))
    await batch.settle([DELIVERED] * len(batch.claims))
    await store.close()
    return [statement for statement in sent if not statement[0].startswith("BEGIN")]


def _drain_bare(folder: str, statements: list[Statement]) -> float:
    path, outbox, engine = _fresh(folder)
    fill(outbox, engine, EVENTS)
    connection = _connect(path)
    with connection:
        connection.executemany("INSERT INTO outbox_lanes (sink, lane) VALUES ('', ?)", [(lane,) for lane in range(64)])
    latch, pick, claim, settle, unblock = statements
    started = time.perf_counter()
    while True:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(*latch).fetchall()
        rows = connection.execute(*pick).fetchall()
        if not rows:
            connection.execute("COMMIT")
            return EVENTS / (time.perf_counter() - started)
        numbers, keys = json.dumps([row[0] for row in rows]), json.dumps(list({row[1] for row in rows}))
        connection.execute(claim[0], _with(claim[1], numbers))
        connection.execute("COMMIT")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(settle[0], _with(settle[1], numbers))
        connection.execute(unblock[0], _with(unblock[1], keys))
        connection.execute("COMMIT")


def _with(params: tuple[Any, ...], numbers: str) -> tuple[Any, ...]:
    return tuple(numbers if isinstance(value, str) and value.startswith("[") else value for value in params)
