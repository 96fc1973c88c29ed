"""Everything events can be put through: each kind of session and connection on each database, with one face.

A target is one transaction of an application. Its connections live in a time zone other than UTC, and every
statement that goes through them is noted. What is stored is read with plain SQL through another connection.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal
from uuid import UUID, uuid4

import aiosqlite
import asyncpg
import psycopg
import pymysql
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from pillarbox import Event, Outbox, Receipt
from tests.servers import server_url

DatabaseName = Literal["postgres", "mariadb", "mysql", "sqlite"]
DATABASES: tuple[DatabaseName, ...] = ("postgres", "mariadb", "mysql", "sqlite")


GetDatabase = Callable[[DatabaseName], "Database"]


@contextmanager
def make_databases(folders: pytest.TempPathFactory) -> Iterator[GetDatabase]:
    """The databases that a test module asks for, each with tables of its own."""
    made: dict[DatabaseName, Database] = {}

    def get(name: DatabaseName) -> Database:
        if name not in made:
            made[name] = Database(name, folders.mktemp("put"))
        made[name].empty()
        return made[name]

    yield get
    for database in made.values():
        database.drop()


class Database:
    """The outbox tables of one test module on one database."""

    def __init__(self, name: DatabaseName, folder: Path) -> None:
        self.name: DatabaseName = name
        url = f"sqlite:///{folder / 'put.db'}" if name == "sqlite" else server_url(name)
        self.url = sa.make_url(url)
        self.backend = self.url.get_backend_name()
        drivers = {"postgresql": "psycopg", "mysql": "pymysql", "sqlite": "pysqlite"}
        self.engine = sa.create_engine(self.url.set(drivername=f"{self.backend}+{drivers[self.backend]}"))
        self.metadata = sa.MetaData()
        self.outbox = Outbox(self.metadata, table=f"put_{uuid4().hex[:12]}")
        self.table = self.outbox.table.name
        self.metadata.create_all(self.engine)

    def empty(self) -> None:
        with self.engine.begin() as db:
            for table in self.outbox.tables.values():
                db.execute(sa.delete(table))

    def drop(self) -> None:
        self.metadata.drop_all(self.engine)
        self.engine.dispose()

    def rows(self) -> list[dict[str, Any]]:
        """The stored rows in order; ids, times and headers as Python sees them, everything else as it is."""
        with self.engine.connect() as db:
            found = db.exec_driver_sql(f"SELECT * FROM {self.table} ORDER BY seq").mappings().all()
        return [{name: _plain(name, value) for name, value in row.items()} for row in found]

    def ids(self) -> list[UUID]:
        return [row["id"] for row in self.rows()]

    def run(self, sql: str) -> Any:
        with self.engine.begin() as db:
            result = db.exec_driver_sql(sql.format(table=self.table))
            return result.all() if result.returns_rows else result.rowcount

    async def wait_until_blocked(self) -> None:
        """Wait until somebody waits for a lock on the tables; SQLite cannot tell."""
        waiting = {
            "postgresql": "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'"
            " AND (query LIKE '%%{table}%%' OR query LIKE '%%advisory%%')",
            "mysql": "SELECT count(*) FROM information_schema.processlist"
            " WHERE command = 'Query' AND id <> CONNECTION_ID() AND info LIKE 'INSERT INTO {table}%%'",
            "sqlite": "SELECT 1",
        }[self.backend]
        async with asyncio.timeout(10):
            while not self.run(waiting)[0][0]:
                await asyncio.sleep(0.01)


def _plain(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in ("id", "token"):
        return value if isinstance(value, UUID) else UUID(value)
    if name.endswith("_at"):
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    if name == "headers" and isinstance(value, str):
        return json.loads(value)
    return value


class Target:
    """One transaction of an application; the next one begins when it ends."""

    is_session: ClassVar[bool] = False

    def __init__(self, database: Database, driver: str) -> None:
        self.database = database
        self.outbox = database.outbox
        self.driver = driver
        self.sql: list[str] = []
        self.handle: Any = None
        """What the outbox gets."""

    @property
    def inserts(self) -> list[str]:
        return [sql for sql in self.sql if f"INSERT INTO {self.database.table} " in sql]

    async def open(self) -> None:
        raise NotImplementedError

    async def put(self, *events: Event, **options: Any) -> Receipt:
        return await asyncio.to_thread(self.outbox.put, self.handle, *events, **options)

    async def put_wrongly(self, *events: Event) -> None:
        """Put through the method that is for the other kind of targets."""
        await self.outbox.put_async(self.handle, *events)

    async def flush(self) -> None:
        """Send what waits in a session."""

    async def commit(self) -> None:
        self.handle.commit()

    async def rollback(self) -> None:
        self.handle.rollback()

    async def execute(self, sql: str) -> None:
        self.handle.cursor().execute(sql)

    async def autocommit(self) -> None:
        """From here on every statement would commit by itself."""
        raise NotImplementedError

    async def close(self) -> None:
        self.handle.close()

    async def dispose(self) -> None:
        await self.close()


class AsyncTarget(Target):
    """What is put through `put_async`."""

    async def put(self, *events: Event, **options: Any) -> Receipt:
        return await self.outbox.put_async(self.handle, *events, **options)

    async def put_wrongly(self, *events: Event) -> None:
        self.outbox.put(self.handle, *events)

    async def commit(self) -> None:
        await self.handle.commit()

    async def rollback(self) -> None:
        await self.handle.rollback()

    async def execute(self, sql: str) -> None:
        await self.handle.execute(sql)

    async def close(self) -> None:
        await self.handle.close()


# -- SQLAlchemy ----------------------------------------------------------------------------------------------


class ConnectionTarget(Target):
    engine: sa.Engine

    async def open(self) -> None:
        url = self.database.url.set(drivername=f"{self.database.backend}+{self.driver}")
        self.engine = sa.create_engine(url, connect_args=zoned(self.database.backend, self.driver))
        sa.event.listen(self.engine, "before_cursor_execute", note(self.sql))
        self.connect()

    def connect(self) -> None:
        self.handle = self.engine.connect()

    async def execute(self, sql: str) -> None:
        self.handle.execute(sa.text(sql))

    async def autocommit(self) -> None:
        self.handle.close()
        self.engine = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self.connect()

    async def dispose(self) -> None:
        self.handle.close()
        self.engine.dispose()


class SessionTarget(ConnectionTarget):
    is_session = True

    def connect(self) -> None:
        # An ordinary session can be used again after close().
        self.handle = Session(self.engine, close_resets_only=False)

    async def flush(self) -> None:
        await asyncio.to_thread(self.handle.flush)


class ScopedSessionTarget(SessionTarget):
    def connect(self) -> None:
        maker = sessionmaker(self.engine, close_resets_only=False)
        self.handle = scoped_session(maker, scopefunc=lambda: 0)


class AsyncConnectionTarget(AsyncTarget):
    engine: AsyncEngine

    async def open(self) -> None:
        url = self.database.url.set(drivername=f"{self.database.backend}+{self.driver}")
        self.engine = create_async_engine(url, connect_args=zoned(self.database.backend, self.driver))
        sa.event.listen(self.engine.sync_engine, "before_cursor_execute", note(self.sql))
        await self.connect()

    async def connect(self) -> None:
        self.handle = await self.engine.connect()

    async def execute(self, sql: str) -> None:
        await self.handle.execute(sa.text(sql))

    async def autocommit(self) -> None:
        await self.handle.close()
        self.engine = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        await self.connect()

    async def dispose(self) -> None:
        await self.handle.close()
        await self.engine.dispose()


class AsyncSessionTarget(AsyncConnectionTarget):
    """`put` into an AsyncSession: a plain call, sent by the next flush."""

    is_session = True

    async def connect(self) -> None:
        self.handle = AsyncSession(self.engine, close_resets_only=False)

    async def put(self, *events: Event, **options: Any) -> Receipt:
        return self.outbox.put(self.handle, *events, **options)

    async def put_wrongly(self, *events: Event) -> None:
        # Both methods take it; what neither takes is its maker.
        await self.outbox.put_async(async_sessionmaker(self.engine), *events)

    async def flush(self) -> None:
        await self.handle.flush()


class FlushedSessionTarget(AsyncSessionTarget):
    """`put_async` into an AsyncSession: sent at once."""

    is_session = False

    async def put(self, *events: Event, **options: Any) -> Receipt:
        return await self.outbox.put_async(self.handle, *events, **options)


class AsyncScopedSessionTarget(AsyncSessionTarget):
    async def connect(self) -> None:
        maker = async_sessionmaker(self.engine, close_resets_only=False)
        self.handle = async_scoped_session(maker, scopefunc=lambda: 0)


# -- drivers -------------------------------------------------------------------------------------------------


class AsyncpgTarget(AsyncTarget):
    transaction: Any = None

    async def open(self) -> None:
        self.handle = await asyncpg.connect(self.dsn, **zoned("postgresql", "asyncpg"))
        self.handle.add_query_logger(lambda query: self.sql.append(query.query))
        await self.begin()

    @property
    def dsn(self) -> str:
        return self.database.url.render_as_string(hide_password=False)

    async def begin(self) -> None:
        self.transaction = self.handle.transaction()
        await self.transaction.start()

    async def commit(self) -> None:
        await self.transaction.commit()
        await self.begin()

    async def rollback(self) -> None:
        await self.transaction.rollback()
        await self.begin()

    async def autocommit(self) -> None:
        await self.transaction.rollback()


class AsyncpgPoolTarget(AsyncpgTarget):
    """A connection that a pool lends."""

    pool: Any

    async def open(self) -> None:
        self.pool = await asyncpg.create_pool(self.dsn, min_size=1, max_size=1, **zoned("postgresql", "asyncpg"))
        self.handle = await self.pool.acquire()
        self.handle.add_query_logger(lambda query: self.sql.append(query.query))
        await self.begin()

    async def close(self) -> None:
        await self.pool.release(self.handle)

    async def dispose(self) -> None:
        await self.close()
        await self.pool.close()


class PsycopgTarget(Target):
    async def open(self) -> None:
        log = self.sql

        class Noting(psycopg.Cursor[Any]):
            def execute(self, query: Any, *args: Any, **options: Any) -> Any:
                log.append(str(query))
                return super().execute(query, *args, **options)

        dsn = self.database.url.render_as_string(hide_password=False)
        self.handle = psycopg.connect(dsn, cursor_factory=Noting, **zoned("postgresql", "psycopg"))

    async def autocommit(self) -> None:
        self.handle.rollback()
        self.handle.autocommit = True


class AsyncPsycopgTarget(AsyncTarget):
    async def open(self) -> None:
        log = self.sql

        class Noting(psycopg.AsyncCursor[Any]):
            async def execute(self, query: Any, *args: Any, **options: Any) -> Any:
                log.append(str(query))
                return await super().execute(query, *args, **options)

        dsn = self.database.url.render_as_string(hide_password=False)
        options = zoned("postgresql", "psycopg")
        self.handle = await psycopg.AsyncConnection.connect(dsn, cursor_factory=Noting, **options)

    async def autocommit(self) -> None:
        await self.handle.rollback()
        await self.handle.set_autocommit(True)


class Psycopg2Target(Target):
    async def open(self) -> None:
        import psycopg2  # type: ignore[import-untyped, unused-ignore]
        from psycopg2.extensions import connection  # type: ignore[import-untyped, unused-ignore]

        log = self.sql

        class Noting(connection):  # type: ignore[misc]
            def cursor(self, *args: Any, **options: Any) -> Any:
                return NotedCursor(super().cursor(*args, **options), log)

        dsn = self.database.url.render_as_string(hide_password=False)
        self.handle = psycopg2.connect(dsn, connection_factory=Noting, **zoned("postgresql", "psycopg2"))

    async def autocommit(self) -> None:
        self.handle.rollback()
        self.handle.autocommit = True


class NotedCursor:
    def __init__(self, cursor: Any, log: list[str]) -> None:
        self._cursor = cursor
        self._log = log

    def execute(self, sql: str, *args: Any) -> None:
        self._log.append(sql)
        self._cursor.execute(sql, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cursor, name)


class PymysqlTarget(Target):
    async def open(self) -> None:
        url = self.database.url
        self.handle = pymysql.connect(
            host=url.host,
            port=url.port or 3306,
            user=url.username,
            password=url.password or "",
            database=url.database,
            **zoned("mysql", "pymysql"),
        )
        run = self.handle.query

        def query(sql: Any, *args: Any, **options: Any) -> Any:
            text = sql if isinstance(sql, str) else sql.decode(errors="replace")
            self.sql.append(text)
            return run(sql, *args, **options)

        self.handle.query = query

    async def autocommit(self) -> None:
        self.handle.rollback()
        self.handle.autocommit(True)

    async def close(self) -> None:
        if self.handle.open:
            self.handle.close()


class Sqlite3Target(Target):
    async def open(self) -> None:
        self.handle = sqlite3.connect(self.database.url.database or "", check_same_thread=False)
        self.handle.set_trace_callback(self.sql.append)

    async def autocommit(self) -> None:
        self.handle.rollback()
        self.handle.isolation_level = None


class AiosqliteTarget(AsyncTarget):
    async def open(self) -> None:
        self.handle = await aiosqlite.connect(self.database.url.database or "")
        await self.handle.set_trace_callback(self.sql.append)

    async def autocommit(self) -> None:
        await self.handle.close()
        self.handle = await aiosqlite.connect(self.database.url.database or "", isolation_level=None)


# -- all of them ---------------------------------------------------------------------------------------------


def zoned(backend: str, driver: str) -> dict[str, Any]:
    """Arguments of `connect` for a session in a time zone other than UTC."""
    if driver == "asyncpg":
        return {"server_settings": {"timezone": "Asia/Kolkata"}}
    if backend == "postgresql":
        return {"options": "-c timezone=Asia/Kolkata"}
    if backend == "mysql":
        return {"init_command": "SET time_zone = '+05:30'", "charset": "utf8mb4"}
    return {"check_same_thread": False}


def note(log: list[str]) -> Callable[..., None]:
    def before(connection: Any, cursor: Any, sql: str, *args: Any) -> None:
        log.append(sql)

    return before


_MYSQL: dict[str, tuple[type[Target], str]] = {
    "session": (SessionTarget, "pymysql"),
    "async-session": (AsyncSessionTarget, "aiomysql"),
    "connection": (ConnectionTarget, "pymysql"),
    "async-connection": (AsyncConnectionTarget, "aiomysql"),
    "pymysql": (PymysqlTarget, "pymysql"),
}
TARGETS: dict[tuple[DatabaseName, str], tuple[type[Target], str]] = {
    ("postgres", "session"): (SessionTarget, "psycopg"),
    ("postgres", "scoped-session"): (ScopedSessionTarget, "psycopg"),
    ("postgres", "async-session"): (AsyncSessionTarget, "asyncpg"),
    ("postgres", "async-session-psycopg"): (AsyncSessionTarget, "psycopg"),
    ("postgres", "async-scoped-session"): (AsyncScopedSessionTarget, "asyncpg"),
    ("postgres", "async-session-at-once"): (FlushedSessionTarget, "asyncpg"),
    ("postgres", "connection"): (ConnectionTarget, "psycopg"),
    ("postgres", "connection-psycopg2"): (ConnectionTarget, "psycopg2"),
    ("postgres", "async-connection"): (AsyncConnectionTarget, "asyncpg"),
    ("postgres", "async-connection-psycopg"): (AsyncConnectionTarget, "psycopg"),
    ("postgres", "asyncpg"): (AsyncpgTarget, "asyncpg"),
    ("postgres", "asyncpg-pool"): (AsyncpgPoolTarget, "asyncpg"),
    ("postgres", "psycopg"): (PsycopgTarget, "psycopg"),
    ("postgres", "psycopg-async"): (AsyncPsycopgTarget, "psycopg"),
    ("postgres", "psycopg2"): (Psycopg2Target, "psycopg2"),
    **{("mariadb", name): target for name, target in _MYSQL.items()},
    **{("mysql", name): target for name, target in _MYSQL.items()},
    ("sqlite", "session"): (SessionTarget, "pysqlite"),
    ("sqlite", "async-session"): (AsyncSessionTarget, "aiosqlite"),
    ("sqlite", "connection"): (ConnectionTarget, "pysqlite"),
    ("sqlite", "async-connection"): (AsyncConnectionTarget, "aiosqlite"),
    ("sqlite", "sqlite3"): (Sqlite3Target, "sqlite3"),
    ("sqlite", "aiosqlite"): (AiosqliteTarget, "aiosqlite"),
}
if importlib.util.find_spec("psycopg2") is None:  # not among our own dependencies
    TARGETS = {name: target for name, target in TARGETS.items() if target[1] != "psycopg2"}
