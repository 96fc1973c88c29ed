"""Kits: a store on a database that the tests can write to, look into, and whose time they can let pass.

Tables are made once a session and emptied before each test. Time passes by moving every instant in the tables into
the past, so that leases, delays and ages of hours need no waiting.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch
from uuid import UUID, uuid4

import sqlalchemy as sa
from sqlalchemy.util import greenlet_spawn

from pillarbox import Outbox
from pillarbox.event import DELIVERED, Claim, Event
from pillarbox.stores import Batch, Filter, Mode, Store
from pillarbox.stores.keyed import KeyedTransitions
from pillarbox.stores.lanes import LaneShare
from pillarbox.stores.sql import SqlStore
from pillarbox.stores.url import open_store
from pillarbox.testing import ManualClock, MemoryStore
from tests.servers import ServerName, server_url

LEASE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
EVERYTHING = Filter()

Put = Callable[..., Any]


class Kit(Protocol):
    """What the suite needs of a store's surroundings."""

    async def open(self, **options: Any) -> Store:
        """Open one more store on the same events."""

    def put(self, *events: Event) -> Any: ...

    def transaction(self) -> Any: ...

    def cancel(self, *ids: UUID) -> int: ...

    def now(self) -> datetime: ...

    async def pass_time(self, by: timedelta) -> None: ...


class MemoryKit:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self._store = MemoryStore(clock=self.clock)
        self.put = self._store.put
        self.transaction = self._store.transaction
        self.cancel = self._store.cancel

    async def open(self, *, retention: timedelta | None = None) -> Store:
        self._store.retention = retention
        return self._store

    def now(self) -> datetime:
        return self.clock()

    async def pass_time(self, by: timedelta) -> None:
        self.clock.advance(by)

    async def close(self) -> None: ...


class Database:
    """The outbox tables of one database, for a session of tests."""

    def __init__(self, url: sa.URL, *, store_url: sa.URL | None = None, name: str = "contract") -> None:
        drivers = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "sqlite": "sqlite+pysqlite"}
        self.url = store_url or url
        self.backend = url.get_backend_name()
        self.engine = sa.create_engine(url.set(drivername=drivers[self.backend]))
        wait_briefly(self.engine)
        self.table = f"{name}_{uuid4().hex[:12]}"
        self.metadata = sa.MetaData()
        self.outbox = Outbox(self.metadata, table=self.table)
        self.metadata.create_all(self.engine)
        self.built: dict[Any, Any] = {}

    def empty(self) -> None:
        with self.engine.begin() as db:
            for role in ("outbox", "dead", "audit"):
                db.execute(sa.delete(self.outbox.tables[role]))

    def drop(self) -> None:
        self.metadata.drop_all(self.engine)
        self.engine.dispose()

    def shift(self, by: timedelta) -> None:
        """Move every instant of the tables into the past."""
        for role, key in (("outbox", "seq"), ("dead", "seq"), ("audit", "number")):
            table = self.outbox.tables[role]
            columns = [table.c[name] for name in INSTANTS if name in table.c]
            with self.engine.begin() as db:
                rows = db.execute(sa.select(table.c[key], *columns)).all()
                values = [
                    {"row": row[0], **{f"v_{c.name}": at and at - by for c, at in zip(columns, row[1:], strict=True)}}
                    for row in rows
                ]
                change: dict[str, Any] = {c.name: sa.bindparam(f"v_{c.name}") for c in columns}
                if values:
                    db.execute(sa.update(table).where(table.c[key] == sa.bindparam("row")).values(change), values)


INSTANTS = ("until_at", "due_at", "created_at", "delivered_at", "died_at", "at")


def wait_briefly(engine: sa.Engine) -> None:
    """Let a statement that waits for a lock fail soon: nobody in this suite gives one up later."""
    settings = {"postgresql": "SET lock_timeout = '5s'", "mysql": "SET SESSION innodb_lock_wait_timeout = 2"}
    setting = settings.get(engine.dialect.name)
    if setting is not None:

        @sa.event.listens_for(engine, "connect")
        def prepare(connection: Any, record: Any) -> None:
            cursor = connection.cursor()
            cursor.execute(setting)
            cursor.close()
            connection.commit()


class AllLanes(LaneShare):
    """Latches every free lane and reads each to the end, so that a test knows what a claim takes."""

    def __post_init__(self) -> None:
        self.wanted = self.lanes

    def latched(self, *counts: int) -> None: ...

    def rows_per_lane(self, limit: int, lanes: int) -> int:
        return limit


@contextmanager
def reuse_statements(built: dict[Any, Any]) -> Iterator[None]:
    """Let stores of one table share their statements: to build them takes longer than most tests."""
    build = SqlStore._build

    def reuse(store: SqlStore, dialect: str) -> None:
        what = (store.sink, store.retention is None, store.layout.keyed.lanes)
        if what not in built:
            build(store, dialect)
            assert isinstance(store.transitions, KeyedTransitions)
            store.transitions.share = AllLanes(store.layout.keyed.lanes)
            built[what] = (store.transitions, store.operations)
        store.transitions, store.operations = built[what]

    with patch.object(SqlStore, "_build", reuse):
        yield


class SqlKit:
    def __init__(self, database: Database, **options: Any) -> None:
        self.database = database
        self._options = options
        self._stores: list[SqlStore] = []
        self._checked_out: set[Any] = set()
        database.empty()

    @property
    def is_pooled(self) -> bool:
        return bool(self._options.get("pooler"))

    async def open(self, *, all_lanes: bool = True, **options: Any) -> SqlStore:
        with reuse_statements(self.database.built) if all_lanes else nullcontext():
            store = self.make(**options)
        if self.database.backend == "mysql":
            wait_briefly(sync_engine(store))
        await store.open()
        self._stores.append(store)
        engine = sync_engine(store)
        sa.event.listen(engine, "checkout", lambda _, record, __: self._checked_out.add(record))
        sa.event.listen(engine, "checkin", lambda _, record: self._checked_out.discard(record))
        return store

    def make(self, url: sa.URL | None = None, **options: Any) -> SqlStore:
        """A store that is not open, for the test to close."""
        chosen = url or self.database.url
        return open_store(chosen, table=self.database.table, **{**self._options, **options})

    def put(self, *events: Event) -> Any:
        with self.transaction() as put:
            return put(*events)

    @contextmanager
    def transaction(self) -> Iterator[Put]:
        with self.database.engine.begin() as db:
            yield lambda *events: self.database.outbox.put(db, *events)

    def cancel(self, *ids: UUID) -> int:
        with self.database.engine.begin() as db:
            return self.database.outbox.cancel(db, *ids)

    def now(self) -> datetime:
        return datetime.now(UTC)

    async def pass_time(self, by: timedelta) -> None:
        self.database.shift(by)
        for store in self._stores:
            await store.next_due()  # the next claim looks at the clock again, however soon it comes

    def execute(self, sql: str, **params: Any) -> None:
        """Run SQL with `{outbox}`, `{dead}`, `{lanes}` for the tables' names."""
        names = {role: table.name for role, table in self.database.outbox.tables.items()}
        with self.database.engine.begin() as db:
            db.execute(sa.text(sql.format(**names)), params)

    @contextmanager
    def lock(self, event: Event) -> Iterator[None]:
        """Lock an event's row in a transaction of somebody else's."""
        table = self.database.outbox.table
        with self.database.engine.connect() as db:
            found = db.execute(sa.select(table.c.seq).where(table.c.id == event.id).with_for_update()).all()
            assert len(found) == 1
            yield
            db.rollback()

    @contextmanager
    def session_time_zone(self, store: Store) -> Iterator[None]:
        """Let the sessions of the writers and of a store be nine hours ahead of UTC."""
        settings = {"postgresql": "SET LOCAL TIME ZONE 'Asia/Tokyo'", "mysql": "SET time_zone = '+09:00'"}
        assert isinstance(store, SqlStore)
        engines = [self.database.engine, sync_engine(store)] if self.database.backend in settings else []

        def set_zone(connection: sa.Connection) -> None:
            connection.exec_driver_sql(settings[self.database.backend])

        for engine in engines:
            sa.event.listen(engine, "begin", set_zone)
        yield
        for engine in engines:
            sa.event.remove(engine, "begin", set_zone)
        self.database.engine.dispose()

    @contextmanager
    def strict_database(self) -> Iterator[sa.URL]:
        """A database whose transactions are not READ COMMITTED unless one says so."""
        if self.database.backend != "postgresql":
            yield self.database.url  # REPEATABLE READ is the default there
            return
        name = f"{self.database.table}_strict"
        with self.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
            db.exec_driver_sql(f"CREATE DATABASE {name}")
            db.exec_driver_sql(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
            yield self.database.url.set(database=name)
            db.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")

    async def kill(self, batch: Any) -> None:
        """End the server's side of the connection on which a batch is held."""
        is_postgres = self.database.backend == "postgresql"
        own = "SELECT pg_backend_pid()" if is_postgres else "SELECT CONNECTION_ID()"
        number = (await batch._connection.exec_driver_sql(own)).scalar_one()
        with self.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
            db.exec_driver_sql(f"SELECT pg_terminate_backend({number})" if is_postgres else f"KILL {number}")

    async def session_timeouts(self, store: Store) -> set[Any]:
        """After how long the server ends an idle session, for the connections in a store's pool."""
        assert isinstance(store, SqlStore)
        is_postgres = self.database.backend == "postgresql"
        show = "SHOW idle_in_transaction_session_timeout" if is_postgres else "SELECT @@session.wait_timeout"
        # A pool hands its connections out in turn.
        return {await store.run(lambda db: db.exec_driver_sql(show).scalar_one()) for _ in range(5)}

    async def close(self) -> None:
        if self.database.backend == "sqlite":
            # A look that was cancelled still runs in the store's thread, which ends before the store is closed.
            for store in self._stores:
                await store.close()
        leaked = list(self._checked_out)
        for record in leaked:
            # What it has locked must not stop the next test.
            await greenlet_spawn(record.invalidate)
        for store in self._stores:
            await store.close()
        assert not leaked, f"{len(leaked)} connections were still checked out"


def sync_engine(store: SqlStore) -> sa.Engine:
    engine: Any = store._engine  # type: ignore[attr-defined]
    found: sa.Engine = getattr(engine, "sync_engine", engine)
    return found


SERVER = {"hold", "open transactions", "server", "sql"}
FEATURES = {
    "memory": {"hold", "open transactions", "wakes"},
    "sqlite": {"sql", "text ids", "untyped columns", "wakes"},
    "postgres": SERVER | {"direct connection", "wakes"},
    "pgbouncer": SERVER | {"pooler"},
    "mariadb": SERVER | {"text ids"},
    "mysql": SERVER | {"text ids"},
}
KITS = tuple(FEATURES)


def make_database(name: str, folder: Path) -> Database:
    """The tables of a kit's database; `pgbouncer` writes directly, because only relays must bear a pooler."""
    if name == "sqlite":
        return Database(sa.make_url(f"sqlite:///{folder / 'contract.db'}"))
    if name == "pgbouncer":
        return Database(sa.make_url(server_url("postgres")), store_url=sa.make_url(server_url("pgbouncer")))
    servers: dict[str, ServerName] = {"postgres": "postgres", "mariadb": "mariadb", "mysql": "mysql"}
    return Database(sa.make_url(server_url(servers[name])))


def make_kit(name: str, database: Database | None) -> MemoryKit | SqlKit:
    if database is None:
        return MemoryKit()
    options = {
        "postgres": {"pooler": False},
        "pgbouncer": {"pooler": True, "hold_behind_pooler": True},
    }
    return SqlKit(database, **options.get(name, {}))


# -- what tests say a lot ----------------------------------------------------------------------------------------


def event(name: str, key: str | None = None, **fields: Any) -> Event:
    """An event whose type is its name."""
    return Event(name, {"name": name}, key=key, **fields)


def events(names: str, key: str | None = None, **fields: Any) -> list[Event]:
    return [event(name, key, **fields) for name in names.split()]


async def claim(store: Store, limit: int = 100, *, mode: Mode = "lease", **options: Any) -> Batch:
    return await store.claim(limit, mode=mode, **{"lease": LEASE, **options})


def names(batch: Batch | Sequence[Claim]) -> str:
    """The names of claimed events in order."""
    claims = batch if isinstance(batch, Sequence) else batch.claims
    return " ".join(claim.event.type for claim in claims)


async def deliver(store: Store) -> str:
    """Deliver what can be claimed until nothing can; returns the names in order."""
    delivered: list[str] = []
    while (batch := await claim(store)).claims:
        delivered.append(names(batch))
        settlement = await batch.settle([DELIVERED] * len(batch.claims))
        assert settlement.delivered == len(batch.claims)
    return " ".join(delivered)


async def states(store: Store) -> dict[str, str]:
    """The state of every stored event by its name."""
    return {record.event.type: record.state for record in await store.events(EVERYTHING, limit=1000)}


async def attempts(store: Store) -> dict[str, int]:
    """How often every stored event was tried, by its name."""
    return {record.event.type: record.attempts for record in await store.events(EVERYTHING, limit=1000)}


async def until(condition: Callable[[], Awaitable[Any]], *, seconds: float = 60.0) -> Any:
    """Ask again until the answer is true; returns it."""
    async with asyncio.timeout(seconds):
        while not (answer := await condition()):
            await asyncio.sleep(0.01)
        return answer


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def process_time_zone(name: str) -> Iterator[None]:
    import time

    before = os.environ.get("TZ")
    os.environ["TZ"] = name
    time.tzset()
    try:
        yield
    finally:
        os.environ.pop("TZ") if before is None else os.environ.update(TZ=before)
        time.tzset()
