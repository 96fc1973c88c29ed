"""SQLite: one file, one writer at a time.

The write lock that `BEGIN IMMEDIATE` takes is the latch, so claims of several processes exclude each other; there is no
hold, because a transaction open during a delivery would stop every writer: a handler that takes a session does so. WAL
lets applications put while a relay reads. All work runs in one thread of its own: the standard library's driver blocks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from pillarbox.errors import ConfigError, StoreUnavailable, Unsupported
from pillarbox.stores import Joins, Mode
from pillarbox.stores.sql import SqlStore, T, Work
from pillarbox.urls import check_options

log = logging.getLogger("pillarbox.store")

BUSY_TIMEOUT = timedelta(seconds=30)
BUSY_GLANCE = timedelta(milliseconds=250)
FIRST_POLL = 0.005
LONGEST_POLL = 0.1
# What else a file's url may say, as `mode=ro`, is for SQLite itself and needs uri=true.
_OPTIONS = ("uri", "timeout", "isolation_level", "detect_types", "check_same_thread", "cached_statements")


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
        path = url.database or ""
        # As SQLite took it: the process may change its folder later.
        self._path = path if path.startswith("file:") else os.path.abspath(path)
        self._files: tuple[Stamp | None, Stamp | None] = (None, None)
        """The database and its WAL, as they were when the connection was made."""
        self._is_another = False
        self._version: int | None = None
        self._is_closed = False

    async def open(self) -> None:
        if not Path(self.url.database or "").exists():  # noqa: ASYNC240 - one look at start-up
            raise ConfigError(f"Store {self.name}: there is no such file. Run `pillarbox schema create` first.")
        await super().open()

    async def _transact(self, work: Work[T], *, writes: bool, is_long: bool) -> T:
        if self._is_closed:
            raise StoreUnavailable(f"Store {self.name}: it was closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact_here, work, writes)

    def _connect(self) -> sa.Connection:
        """The connection, to the file that is at the path now: SQLite itself would go on with one that was replaced."""
        database, wal = _stamp(self._path), _stamp(f"{self._path}-wal")
        known, known_wal = self._files
        # A file that never was there is made, by whoever creates the tables.
        if database is None and (known is not None or self._is_another):
            self._disconnect()
            raise StoreUnavailable(f"Store {self.name}: the file is gone; it is used again when it is back")
        if known is not None and database != known:
            if wal is not None and wal == known_wal and os.path.getsize(f"{self._path}-wal") > 0:
                # The old connection stays open: another file must not get the number of its WAL.
                raise StoreUnavailable(
                    f"Store {self.name}: the file was replaced, and the WAL of the one before is still beside it. "
                    f"Delete {self._path}-wal and {self._path}-shm: SQLite would mix the two"
                )
            self._disconnect()
            log.warning("Store %s: the file was replaced; using the one that is there now.", self.name)
        connection = self._engine.connect()
        if self._files[0] is None:
            self._files = (_stamp(self._path), _stamp(f"{self._path}-wal"))
        elif known_wal is None:  # made by the first statement that reads or writes
            self._files = (database, wal)
        if self._is_another:
            # A file from before this relay first ran has no lanes for it, and without them nothing is claimed. One that
            # is still being made may have no tables.
            try:
                self._begin(connection, "BEGIN IMMEDIATE")
                (self._look if self.layout.order is None else self._ensure_lanes)(connection)
                connection.commit()
            except sa.exc.OperationalError as error:
                connection.close()
                raise StoreUnavailable(
                    f"Store {self.name}: the file is another one, not ready yet: {error.orig}"
                ) from error
            except BaseException:
                connection.close()
                raise
        self._is_another = False
        return connection

    def _disconnect(self) -> None:
        self._engine.dispose()
        self._files = (None, None)
        self._is_another = True
        self._version = None

    def _transact_here(self, work: Work[T], writes: bool) -> T:
        with self._connect() as connection:
            self._begin(connection, "BEGIN IMMEDIATE" if writes else "BEGIN")
            result = work(connection)
            connection.commit()
            return result

    def _begin(self, connection: sa.Connection, statement: str) -> None:
        """Begin, and wait for the lock in small steps: the end of the process waits for this thread."""
        deadline = time.monotonic() + BUSY_TIMEOUT.total_seconds()
        while True:
            try:
                connection.exec_driver_sql(statement)
                return
            except sa.exc.OperationalError as error:
                is_busy = getattr(error.orig, "sqlite_errorname", "").startswith("SQLITE_BUSY")
                if not is_busy or self._is_closed or time.monotonic() > deadline:
                    raise

    async def _hold(self, limit: int) -> Any:
        raise Unsupported(f"Store {self.name}: SQLite cannot hold rows")

    async def wait(self, timeout: timedelta) -> bool:
        """Watch the file's change counter, which moves when another connection commits."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout.total_seconds()
        pause = FIRST_POLL
        while True:
            try:
                version = await loop.run_in_executor(self._thread, self._data_version)
            except (StoreUnavailable, sa.exc.DBAPIError):
                return True  # the next claim says what is wrong
            if version != self._version:
                self._version = version
                return True
            left = deadline - loop.time()
            if left <= 0:
                return False
            await asyncio.sleep(min(pause, left))
            pause = min(LONGEST_POLL, pause * 1.5)

    def _data_version(self) -> int:
        with self._connect() as connection:
            return int(connection.exec_driver_sql("PRAGMA data_version").scalar_one())

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await asyncio.get_running_loop().run_in_executor(self._thread, self._engine.dispose)
            self._thread.shutdown()


Stamp = tuple[int, int]


def _stamp(path: str) -> Stamp | None:
    """Which file is at a path."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _read_text(raw: bytes) -> str | bytes:
    """Text, or its bytes where they are not UTF-8: the driver would fail on every row beside it."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def make_sqlite_engine(url: sa.URL) -> sa.Engine:
    """An engine with one connection in WAL mode, whose transactions are begun by hand."""
    check_options(url, {*_OPTIONS, *(url.query if "uri" in url.query else ())}, driver="sqlite+pysqlite", what="Store")
    engine = sa.create_engine(
        url.set(drivername="sqlite+pysqlite"),
        poolclass=StaticPool,
        json_deserializer=orjson.loads,
        connect_args={"check_same_thread": False, "timeout": BUSY_TIMEOUT.total_seconds()},
    )

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself
        connection.text_factory = _read_text
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA busy_timeout = {BUSY_GLANCE // timedelta(milliseconds=1)}")

    return engine
