"""Inboxes under contract: our own table on each database, and omni-box's two, with every kind of target.

A consumer is one transaction of an application in a session far from UTC. What is stored is read with plain SQL through
another connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from pillarbox import Claim, Event, Relay
from pillarbox.inbox import Inbox, Message
from pillarbox.sinks.memory import MemorySink
from pillarbox.sources.pending import Entry
from pillarbox.sources.reading import Raw, read_message
from tests.contract.layouts import partition_months
from tests.contract.put_targets import zoned
from tests.servers import ServerName, server_url

INBOXES = ("postgres", "mariadb", "mysql", "sqlite", "omnibox", "omnibox-partitioned")
OWN = INBOXES[:4]
OMNIBOX = INBOXES[4:]
KINDS = ("connection", "session", "scoped-session", "async-connection", "async-session")

SYNC_DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql", "sqlite": "pysqlite"}
ASYNC_DRIVERS = {"postgresql": "asyncpg", "mysql": "aiomysql", "sqlite": "aiosqlite"}
SERVERS: dict[str, ServerName] = {"mariadb": "mariadb", "mysql": "mysql"}


class InboxDatabase:
    """The tables of one inbox, for a module of tests."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        is_file = name == "sqlite"
        self.url = sa.make_url(
            f"sqlite:///{folder / 'inbox.db'}" if is_file else server_url(SERVERS.get(name, "postgres"))
        )
        self.backend = self.url.get_backend_name()
        self.is_own = name in OWN
        self.engine = sa.create_engine(self.url.set(drivername=f"{self.backend}+{SYNC_DRIVERS[self.backend]}"))
        self.metadata = sa.MetaData()
        layout = "pillarbox" if self.is_own else name
        self.inbox = Inbox(self.metadata, layout, table=f"in_{uuid4().hex[:10]}")
        self.table = self.inbox.table.name
        self.metadata.create_all(self.engine)
        if name == "omnibox-partitioned":
            for statement in partition_months("outbox"):
                self.run(statement.format(outbox=self.table))

    def drop(self) -> None:
        self.metadata.drop_all(self.engine)
        self.engine.dispose()

    def empty(self) -> None:
        with self.engine.begin() as db:
            for table in self.metadata.tables.values():
                db.execute(sa.delete(table))

    def run(self, sql: str, **params: Any) -> Any:
        with self.engine.begin() as db:
            result = db.execute(sa.text(sql.format(inbox=self.table, queue=f"{self.table}_queue")), params)
            return result.mappings().all() if result.returns_rows else result.rowcount

    def taken(self) -> list[tuple[str, str]]:
        """The group and id of every message that is written down."""
        found = self.run("SELECT consumer_group, message_id FROM {inbox} ORDER BY 1, 2")
        return [(row["consumer_group"], row["message_id"]) for row in found]

    def ago(self, seconds: int) -> str:
        return {
            "postgresql": f"(clock_timestamp() - INTERVAL '{seconds} seconds')",
            "mysql": f"(UTC_TIMESTAMP(6) - INTERVAL {seconds} SECOND)",
            "sqlite": f"(strftime('%Y-%m-%d %H:%M:%f', 'now', '-{seconds} seconds') || '000')",
        }[self.backend]

    async def wait_until_blocked(self, count: int = 1) -> None:
        """Wait until somebody waits for a lock on the inbox; SQLite cannot tell."""
        waiting = {
            "postgresql": "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database()"
            " AND wait_event_type = 'Lock' AND (query LIKE '%{inbox}%' OR query LIKE '%advisory%')",
            "mysql": "SELECT count(*) AS n FROM information_schema.processlist"
            " WHERE command = 'Query' AND id <> CONNECTION_ID() AND info LIKE 'INSERT INTO {inbox} %'",
            "sqlite": "SELECT 1000 AS n",
        }[self.backend]
        async with asyncio.timeout(10):
            while self.run(waiting)[0]["n"] < count:
                await asyncio.sleep(0.01)


@contextmanager
def make_inboxes(folders: pytest.TempPathFactory) -> Iterator[Callable[[str], InboxDatabase]]:
    """The inboxes that a test module asks for, each with tables of its own."""
    made: dict[str, InboxDatabase] = {}

    def get(name: str) -> InboxDatabase:
        if name not in made:
            made[name] = InboxDatabase(name, folders.mktemp("inbox"))
        made[name].empty()
        return made[name]

    yield get
    for database in made.values():
        database.drop()


def message(id: str = "m-1", *, group: str = "billing", payload: Any = None, **fields: Any) -> Message:
    body = {"id": id} if payload is None else payload
    return Message(id, group, "order.placed", body, **{"source": "orders", **fields})


class Consumer:
    """One transaction of an application; the next one begins when it ends."""

    def __init__(self, database: InboxDatabase, kind: str = "connection", **options: Any) -> None:
        self.database = database
        self.inbox = database.inbox
        self.is_async = kind.startswith("async")
        drivers = ASYNC_DRIVERS if self.is_async else SYNC_DRIVERS
        driver = drivers[database.backend]
        url = database.url.set(drivername=f"{database.backend}+{driver}")
        arguments = zoned(database.backend, driver)
        make: Any = create_async_engine if self.is_async else sa.create_engine
        self.engine: Any = make(url, connect_args=arguments, **options)
        pooled = self.engine.sync_engine if self.is_async else self.engine
        if database.backend == "sqlite":
            begin_by_hand(pooled)
        self.handle: Any = self._open(kind)

    def _open(self, kind: str) -> Any:
        if kind == "session":
            return Session(self.engine)
        if kind == "scoped-session":
            return scoped_session(sessionmaker(self.engine), scopefunc=lambda: 0)
        if kind == "async-session":
            return AsyncSession(self.engine)
        return None

    async def _ready(self) -> Any:
        if self.handle is None:
            if isinstance(self.engine, AsyncEngine):
                self.handle = await self.engine.connect()
            else:
                self.handle = await asyncio.to_thread(self.engine.connect)
        return self.handle

    async def take(self, *messages: Message) -> list[bool]:
        handle = await self._ready()
        if self.is_async:
            return await self.inbox.take_many_async(handle, messages)
        return await asyncio.to_thread(self.inbox.take_many, handle, messages)

    async def take_one(self, each: Message) -> bool:
        handle = await self._ready()
        if self.is_async:
            return await self.inbox.take_async(handle, each)
        return await asyncio.to_thread(self.inbox.take, handle, each)

    async def take_in_savepoint(self, messages: Sequence[Message], *, commits: bool) -> list[bool]:
        handle = await self._ready()
        if self.is_async:
            savepoint = await handle.begin_nested()
            found = await self.inbox.take_many_async(handle, messages)
            await (savepoint.commit() if commits else savepoint.rollback())
            return found
        with handle.begin_nested() as nested:
            found = self.inbox.take_many(handle, messages)
            if not commits:
                nested.rollback()
        return found

    async def execute(self, sql: str) -> None:
        handle = await self._ready()
        if self.is_async:
            await handle.execute(sa.text(sql))
        else:
            handle.execute(sa.text(sql))

    async def commit(self) -> None:
        await (self.handle.commit() if self.is_async else asyncio.to_thread(self.handle.commit))

    async def rollback(self) -> None:
        await (self.handle.rollback() if self.is_async else asyncio.to_thread(self.handle.rollback))

    async def close(self) -> None:
        if self.is_async:
            if self.handle is not None:
                await self.handle.close()
            await self.engine.dispose()
        else:
            if self.handle is not None:
                self.handle.close()
            self.engine.dispose()


def begin_by_hand(engine: sa.Engine) -> None:
    """As SQLAlchemy advises for savepoints on SQLite."""

    @sa.event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")


def received(id: str, body: bytes | None = None, *, attempt: int = 1, **fields: Any) -> Claim:
    """A claim of a message as a source makes it from what a broker handed over."""
    payload = b'{"id": "%b"}' % id.encode() if body is None else body
    fields = {"topic": "orders", "content_type": "application/json", **fields}
    read = read_message(
        Raw(f"broker-{id}", body=payload, **{**fields, "headers": {"event-id": id, **fields.get("headers", {})}})
    )
    return Entry(read, None, attempts=attempt).claim()


async def drain_queue(database: InboxDatabase, group: str = "billing") -> list[Event]:
    """What a relay on the stored messages delivers."""
    sink = MemorySink()
    given = None if database.is_own else group
    async with Relay(database.inbox.store(database.url, group=given), sink) as relay:
        await relay.drain()
    return sink.events
