"""SQLite: one file, one writer at a time.

The write lock that `BEGIN IMMEDIATE` takes is the latch, so claims of several processes exclude each other; there is no
hold, because a transaction open during a delivery would stop every writer: a handler that takes a session does so. WAL
lets applications put while a relay reads. All work runs in one thread of its own: the standard library's driver blocks.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from pillarbox.errors import ConfigError, Unsupported
from pillarbox.stores import Joins, Mode
from pillarbox.stores.sql import SqlStore, T, Work

BUSY_TIMEOUT = timedelta(seconds=30)
FIRST_POLL = 0.005
LONGEST_POLL = 0.1


class SqliteStore(SqlStore):
    """The relay's side of an outbox in a SQLite file."""

    dialect = "sqlite"
    modes: frozenset[Mode] = frozenset({"lease"})
    joins: frozenset[Joins] = frozenset({"sync"})
    in_flight = 1

    def __init__(self, url: sa.URL, *args: Any, **options: Any) -> None:
        if not url.database or url.database == ":memory:":
            raise ConfigError(
                f"Store {str(url)!r}: expected the path of a SQLite file, e.g. sqlite:///shop.db; a database in memory "
                "is private to its connection, so a relay could never see what an application puts"
            )
        super().__init__(url, *args, **options)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pillarbox-sqlite")
        self._engine = make_sqlite_engine(url)
        self._version: int | None = None
        self._is_closed = False

    async def open(self) -> None:
        if not Path(self.url.database or "").exists():  # noqa: ASYNC240 - one look at start-up
            raise ConfigError(f"Store {self.name}: there is no such file. Run `pillarbox schema create` first.")
        await super().open()

    async def _transact(self, work: Work[T], *, writes: bool) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact_here, work, writes)

    def _transact_here(self, work: Work[T], writes: bool) -> T:
        with self._engine.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
            result = work(connection)
            connection.commit()
            return result

    async def _hold(self, limit: int) -> Any:
        raise Unsupported(f"Store {self.name}: SQLite cannot hold rows")

    async def wait(self, timeout: timedelta) -> bool:
        """Watch the file's change counter, which moves when another connection commits."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout.total_seconds()
        pause = FIRST_POLL
        while True:
            version = await loop.run_in_executor(self._thread, self._data_version)
            if version != self._version:
                self._version = version
                return True
            left = deadline - loop.time()
            if left <= 0:
                return False
            await asyncio.sleep(min(pause, left))
            pause = min(LONGEST_POLL, pause * 1.5)

    def _data_version(self) -> int:
        with self._engine.connect() as connection:
            return int(connection.exec_driver_sql("PRAGMA data_version").scalar_one())

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.dispose)
            self._thread.shutdown()


def make_sqlite_engine(url: sa.URL) -> sa.Engine:
    """An engine with one connection in WAL mode, whose transactions are begun by hand."""
    engine = sa.create_engine(
        url.set(drivername="sqlite+pysqlite"),
        poolclass=StaticPool,
        json_deserializer=orjson.loads,
        connect_args={"check_same_thread": False, "timeout": BUSY_TIMEOUT.total_seconds()},
    )

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")

    return engine
