"""Everything events can be put through: each session and connection kind on each database, with one face.

A target is one transaction of an application. Its connections live in a time zone other than UTC, and every
statement that goes through them is noted. What is stored is read back with plain SQL through another connection.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal
from uuid import UUID, uuid4

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from pillarbox import Event, Outbox, Receipt
from tests.servers import server_url

DatabaseName = Literal["postgres", "mariadb", "mysql", "sqlite"]
DATABASES: tuple[DatabaseName, ...] = ("postgres", "mariadb", "mysql", "sqlite")

_ZONED = {
    "postgres": {"options": "-c timezone=Asia/Kolkata"},
    "mysql": {"init_command": "SET time_zone = '+05:30'"},
    "sqlite": {"check_same_thread": False},
    "asyncpg": {"server_settings": {"timezone": "Asia/Kolkata"}},
}


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
            "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            " AND (query LIKE '%%{table}%%' OR query LIKE '%%advisory%%')",
            "mysql": "SELECT count(*) FROM information_schema.innodb_trx"
            " WHERE trx_state = 'LOCK WAIT' AND trx_query LIKE '%%{table}%%'",
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
    """One transaction of an application; opens by itself, and again after its end."""

    is_session: ClassVar[bool] = False
    driver: ClassVar[str | None] = None

    def __init__(self, database: Database, driver: str) -> None:
        self.database = database
        self.outbox = database.outbox
        self.url = database.url.set(drivername=f"{database.backend}+{driver}")
        self.sql: list[str] = []
        self.handle: Any = None

    @property
    def inserts(self) -> list[str]:
        return [sql for sql in self.sql if "INSERT INTO" in sql and self.database.table in sql]

    async def open(self) -> Target:
        """Connect; `handle` is what the outbox gets."""
        raise NotImplementedError

    async def put(self, *events: Event, **options: Any) -> Receipt:
        return await asyncio.to_thread(self.outbox.put, self.handle, *events, **options)

    async def put_wrongly(self, *events: Event) -> Any:
        """Put through the other method than the one for this kind of target."""
        return await self.outbox.put_async(self.handle, *events)

    async def flush(self) -> None: ...

    async def commit(self) -> None:
        self.handle.commit()

    async def rollback(self) -> None:
        self.handle.rollback()

    async def fail(self) -> None:
        """Let a statement fail in the transaction."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close what the outbox gets."""
        self.handle.close()

    async def dispose(self) -> None:
        await self.close()

    async def autocommit(self) -> None:
        """Let every statement commit by itself from here on."""
        raise NotImplementedError


class ConnectionTarget(Target):
    handle: sa.Connection
    engine: sa.Engine

    async def open(self) -> Target:
        self.engine = make_engine(self.url)
        note_statements(self.engine, self.sql)
        await self.connect()
        return self

    async def connect(self) -> None:
        self.handle = self.engine.connect()

    async def fail(self) -> None:
        try:
            self.handle.exec_driver_sql("SELECT nothing FROM nowhere")
        except sa.exc.DBAPIError:
            return

    async def dispose(self) -> None:
        await self.close()
        self.engine.dispose()

    async def autocommit(self) -> None:
        await self.close()
        self.engine = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        await self.connect()


class SessionTarget(ConnectionTarget):
    is_session = True
    handle: Session  # type: ignore[assignment]

    async def connect(self) -> None:
        self.handle = Session(self.engine)

    async def flush(self) -> None:
        await asyncio.to_thread(self.handle.flush)

    async def fail(self) -> None:
        try:
            self.handle.execute(sa.text("SELECT nothing FROM nowhere"))
        except sa.exc.DBAPIError:
            return

    async def close(self) -> None:
        # A session that is closed for good; an ordinary one can be used again after close().
        self.handle._close_state = type(self.handle._close_state).CLOSED
        super(Session, self.handle).__init__()


class ScopedSessionTarget(SessionTarget):
    async def connect(self) -> None:
        self.handle = scoped_session(sessionmaker(self.engine), scopefunc=lambda: 0)  # type: ignore[assignment]
