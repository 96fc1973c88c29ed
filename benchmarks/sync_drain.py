"""The sync service: draining a queue file to a writer that does nothing, and to PostgreSQL over bare executemany."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg

from benchmarks.common import ROUNDS, Result, alternate, server_url
from pillarbox.sync.config import SyncConfig, TargetConfig
from pillarbox.sync.queue import SqlQueue
from pillarbox.sync.service import SyncService
from pillarbox.sync.writers import Writer, open_writer

ROWS = 50_000
BATCH = 500
INSERT = "INSERT INTO {table} (id, customer, total) VALUES (?, ?, ?)"
FLOOR = 20_000


class NullWriter:
    """Answers as a table with its column and index does, and writes nothing."""

    batches = "ordered"

    async def write_batch(self, statements: Sequence[tuple[str, Sequence[Any]]]) -> list[dict[str, Any]]:
        return [self._answer(sql) for sql, _ in statements]

    @staticmethod
    def _answer(sql: str) -> dict[str, Any]:
        if not sql.startswith("SELECT"):
            return {"ok": True, "rows_affected": 1}
        return {"ok": True, "rows": [[0 if "MAX(" in sql else "outbox_seq"]]}


def _push(folder: Path, table: str) -> None:
    sql = INSERT.format(table=table)
    queue = SqlQueue(folder)
    for start in range(0, ROWS, BATCH):
        queue.push_many(table, [(sql, [n, f"customer {n % 1000}", n * 3]) for n in range(start, start + BATCH)])
    queue.close()


async def _drain(writer: Writer, table: str) -> float:
    """Rows a second, all settings at their defaults."""
    with tempfile.TemporaryDirectory() as name:
        _push(Path(name), table)
        config = SyncConfig.single(name, [TargetConfig("main", [table])])
        service = SyncService(config, {target.name: writer for target in config.targets})
        start = time.perf_counter()
        remains = await service.drain()
        seconds = time.perf_counter() - start
        assert not any(remains.values()), remains
    return ROWS / seconds


async def sync_drain() -> Result:
    """Rows a second from a queue file with 50,000 rows to a writer that does nothing."""
    rate = statistics.median([await _drain(NullWriter(), "orders") for _ in range(ROUNDS)])
    return Result("sync_drain", rate, "rows/s", FLOOR, rate / FLOOR, bar=1.0)


async def sync_drain_postgres() -> Result:
    """The same to PostgreSQL, over the same statements run bare by executemany in transactions of the same size."""
    table = f"bench_sync_{uuid4().hex[:8]}"
    url = server_url("postgres")
    columns = "(id bigint primary key, customer text, total bigint, outbox_seq bigint not null default 0)"
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(f"CREATE TABLE {table} {columns}")
        db.execute(f"CREATE UNIQUE INDEX ON {table} (outbox_seq) WHERE outbox_seq <> 0")
        try:

            async def run_ours() -> float:
                db.execute(f"TRUNCATE {table}")
                return await _drain(open_writer(url), table)

            async def run_bare() -> float:
                db.execute(f"TRUNCATE {table}")
                return await _run_bare(url, table)

            value, baseline, ratio = await alternate(run_ours, run_bare)
        finally:
            db.execute(f"DROP TABLE {table}")
    return Result("sync_drain_postgres", value, "rows/s", baseline, ratio, bar=0.5)


async def _run_bare(url: str, table: str) -> float:
    sql = f"INSERT INTO {table} (id, customer, total, outbox_seq) VALUES (%s, %s, %s, %s)"
    async with await psycopg.AsyncConnection.connect(url) as db, db.cursor() as cursor:
        start = time.perf_counter()
        for first in range(0, ROWS, BATCH):
            rows = [(n, f"customer {n % 1000}", n * 3, n + 1) for n in range(first, first + BATCH)]
            await cursor.executemany(sql, rows)
            await db.commit()
        return ROWS / (time.perf_counter() - start)


BENCHMARKS = (sync_drain, sync_drain_postgres)
