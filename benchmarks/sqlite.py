"""SQLite: putting and draining, over the bare statements on the same table."""

from __future__ import annotations

import json
import sqlite3
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import sqlalchemy as sa

from benchmarks.common import KEYS, PAYLOAD, Result, alternate, fill
from pillarbox import Event, Outbox, Relay, open_sink
from pillarbox.event import uuid7

EVENTS = 20_000
BATCH = 500

_NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now') || '000'"
_BARE_PUT = (
    "INSERT INTO outbox (id, lane, type, topic, key, payload, content_type, created_at)"
    f" VALUES (?, ?, ?, ?, ?, ?, ?, {_NOW})"
)
_BARE_READ = "SELECT * FROM outbox WHERE state = 0 ORDER BY seq LIMIT 500"
_BARE_CLAIM = (
    "UPDATE outbox SET state = 1, attempts = attempts + 1, token = ?,"
    " until_at = strftime('%Y-%m-%d %H:%M:%f', 'now', '30 seconds') || '000'"
    " WHERE seq IN (SELECT value FROM json_each(?))"
)
_BARE_SETTLE = "DELETE FROM outbox WHERE seq IN (SELECT value FROM json_each(?)) AND token = ?"


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
            return await outcome if hasattr(outcome, "__await__") else outcome  # type: ignore[return-value,misc]

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
            [
                (str(uuid7()), zlib.crc32(key.encode()) % 64, "bench", "bench", key, PAYLOAD, "application/octet-stream")
                for key in keys
            ],
        )
        connection.execute("COMMIT")
    return EVENTS / (time.perf_counter() - started)


async def sqlite_drain() -> Result:
    """(f) A drain to the null sink, over reading, claiming and deleting the same rows."""
    return await _compare("sqlite_drain", _drain_ours, _drain_bare)


async def _drain_ours(folder: str) -> float:
    path, outbox, engine = _fresh(folder)
    fill(outbox, engine, EVENTS)
    async with Relay(outbox.store(f"sqlite:///{path}"), open_sink("null:"), batch_size=BATCH) as relay:
        started = time.perf_counter()
        await relay.drain()
        return EVENTS / (time.perf_counter() - started)


def _drain_bare(folder: str) -> float:
    path, outbox, engine = _fresh(folder)
    fill(outbox, engine, EVENTS)
    connection = _connect(path)
    started = time.perf_counter()
    while True:
        connection.execute("BEGIN IMMEDIATE")
        rows = connection.execute(_BARE_READ).fetchall()
        if not rows:
            connection.execute("COMMIT")
            return EVENTS / (time.perf_counter() - started)
        token, numbers = str(uuid4()), json.dumps([row[0] for row in rows])
        connection.execute(_BARE_CLAIM, (token, numbers))
        connection.execute("COMMIT")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(_BARE_SETTLE, (numbers, token))
        connection.execute("COMMIT")
