"""What the tests of the sync service share: a remote SQLite file behind a writer that can be told to misbehave."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from pillarbox.sync.config import SyncConfig, TargetConfig
from pillarbox.sync.service import SyncService
from pillarbox.sync.writers.sqlite import SqliteWriter

INSERT = "INSERT INTO orders (id, total) VALUES (?, ?)"
ADD = "UPDATE accounts SET balance = balance + ? WHERE id = ?"


class Remote:
    """A remote database file with tables to write to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run("CREATE TABLE orders (id INTEGER PRIMARY KEY, total INTEGER NOT NULL)")
        self.run("CREATE TABLE accounts (id INTEGER PRIMARY KEY, balance INTEGER NOT NULL)")

    def run(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.path)) as db, db:
            return db.execute(sql, args).fetchall()

    def columns(self, table: str) -> list[str]:
        return [row[1] for row in self.run(f"PRAGMA table_info({table})")]

    @property
    def ids(self) -> list[int]:
        return [row[0] for row in self.run("SELECT id FROM orders ORDER BY rowid")]


class Faulty(SqliteWriter):
    """A writer whose calls can fail: `before` and `after` are called around each, and may raise."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"sqlite:///{path}")
        self.calls: list[list[tuple[str, list[Any]]]] = []
        self.before: Callable[[Sequence[Any]], None] = lambda statements: None
        self.after: Callable[[Sequence[Any]], None] = lambda statements: None

    async def write_batch(self, statements: Sequence[Any]) -> Any:
        self.calls.append([(sql, list(args)) for sql, args in statements])
        self.before(statements)
        results = await super().write_batch(statements)
        self.after(statements)
        return results


class Plain:
    """A writer as people write them: it says nothing of itself and goes on after a failure."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls: list[list[str]] = []

    async def write_batch(self, stmts: Sequence[tuple[str, Sequence[Any]]]) -> list[dict[str, Any]]:
        self.calls.append([sql for sql, _ in stmts])
        return [self._run(sql, args) for sql, args in stmts]

    def _run(self, sql: str, args: Sequence[Any]) -> dict[str, Any]:
        with closing(sqlite3.connect(self.path)) as db:
            try:
                with db:
                    cursor = db.execute(sql, args)
                    rows = [list(row) for row in cursor.fetchall()]
            except sqlite3.Error as error:
                return {"ok": False, "error": str(error)}
            return {"ok": True, "rows": rows} if cursor.description else {"ok": True, "rows_affected": cursor.rowcount}


def make_config(folder: Path, *tables: Any, inject: Any = True, **tuning: Any) -> SyncConfig:
    """One app called shop with one target, shop.main."""
    of_target = {name: tuning.pop(name) for name in ("batches", "dialect") if name in tuning}
    target = TargetConfig("main", tables or ("orders",), inject_outbox_seq=inject, **of_target)
    return SyncConfig.single(folder, [target], name="shop", **tuning)


async def drain(config: SyncConfig, writer: Any) -> dict[str, int]:
    return await SyncService(config, {target.name: writer for target in config.targets}).drain()


@asynccontextmanager
async def running(service: SyncService) -> AsyncIterator[SyncService]:
    """Run a service for the time of a block; its failure is the test's."""
    task = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        service.stop()
        await task


async def until(condition: Callable[[], object], *, seconds: float = 60) -> None:
    """Wait until something holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def table_of(folder: Path, sql: str, *args: Any, table: str = "orders") -> list[tuple[Any, ...]]:
    """Ask a queue file something."""
    with closing(sqlite3.connect(folder / f"{table}.db")) as db, db:
        return db.execute(sql, args).fetchall()
