"""Action logs under contract: each layout on each of its databases, through blocking and asynchronous sessions.

Tests write the body of an action once, for a `Session`; the asynchronous face runs it inside an `AsyncSession`.
Sessions live in a time zone other than UTC. Rows are read with plain SQL through another connection, in the order of
their dates.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.util import await_only

from pillarbox.actions import Action, ActionLog
from tests.contract.put_targets import zoned
from tests.servers import ServerName, server_url

PLACES = (
    *(f"ekbatan-{database}" for database in ("postgresql", "mysql", "mariadb")),
    *(f"actions-{database}" for database in ("postgresql", "mysql", "mariadb", "sqlite")),
)
FACES = ("sync", "async")
KITS = tuple(f"{place}-{face}" for place in PLACES for face in FACES)
EACH_DATABASE = ("ekbatan-postgresql-async", "ekbatan-mysql-sync", "ekbatan-mariadb-async", "actions-sqlite-sync")
"""For what is decided before any SQL."""
SERVERS: dict[str, ServerName] = {"postgresql": "postgres", "mysql": "mysql", "mariadb": "mariadb"}
DRIVERS = {
    "postgresql": ("psycopg", "asyncpg"),
    "mysql": ("pymysql", "aiomysql"),
    "sqlite": ("pysqlite", "aiosqlite"),
}
NAMESPACE = "shop.wallets"

Body = Callable[[Action[Any], Session], Any]


class Place:
    """The tables of a log and of the models it tells of, on one database, for a session of tests."""

    def __init__(self, name: str, folder: Path) -> None:
        self.layout, self.database = name.split("-")
        is_file = self.database == "sqlite"
        self.url = sa.make_url(f"sqlite:///{folder / 'log.db'}" if is_file else server_url(SERVERS[self.database]))
        self.backend = self.url.get_backend_name()
        self.engine = sa.create_engine(self.driver_url(0))
        suffix = uuid4().hex[:10]
        self.schema = f"eventlog_{suffix}" if self.layout == "ekbatan" else None
        self.table = f"log_{suffix}_events"
        self.Wallet, self.Seat, self.metadata = make_models(suffix)
        self.log = self.make_log()
        self.create()

    def driver_url(self, face: int) -> sa.URL:
        return self.url.set(drivername=f"{self.backend}+{DRIVERS[self.backend][face]}")

    def make_log(self, **options: Any) -> ActionLog:
        given = {"namespace": NAMESPACE, "layout": self.layout, "table": self.table, "schema": self.schema}
        return ActionLog(self.metadata, **{**given, **options})

    def create(self) -> None:
        with self.engine.begin() as db:
            if self.schema is not None:
                db.exec_driver_sql(f"CREATE SCHEMA {self.schema}")
            self.metadata.create_all(db)

    def empty(self) -> None:
        with self.engine.begin() as db:
            for table in self.metadata.tables.values():
                db.execute(sa.delete(table))

    def drop(self) -> None:
        with self.engine.begin() as db:
            self.metadata.drop_all(db)
            if self.schema is not None:
                db.exec_driver_sql(f"DROP SCHEMA {self.schema}")
        self.engine.dispose()

    def read(self, table: sa.Table, order: str) -> list[dict[str, Any]]:
        with self.engine.connect() as db:
            found = db.exec_driver_sql(f"SELECT * FROM {table.fullname} ORDER BY {order}").mappings().all()
        return [{name: _plain(name, value) for name, value in row.items()} for row in found]


def make_models(suffix: str) -> tuple[Any, Any, sa.MetaData]:
    """A model whose key the database makes and whose version is checked, and one with a composite key."""

    class Base(DeclarativeBase):
        pass

    class Wallet(Base):
        __tablename__ = f"wallets_{suffix}"
        id: Mapped[int] = mapped_column(primary_key=True)
        balance: Mapped[int]
        version: Mapped[int] = mapped_column()
        __mapper_args__ = {"version_id_col": version}  # noqa: RUF012 - as SQLAlchemy spells it

    class Seat(Base):
        __tablename__ = f"seats_{suffix}"
        hall: Mapped[str] = mapped_column(sa.String(50), primary_key=True)
        number: Mapped[int] = mapped_column(primary_key=True)

    return Wallet, Seat, Base.metadata


def _plain(name: str, value: Any) -> Any:
    if name in ("action_params", "payload") and isinstance(value, str):
        return json.loads(value)
    if name.endswith("_date"):
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
        assert moment.tzinfo is None
        return moment.replace(tzinfo=UTC)
    if name in ("id", "action_id") and isinstance(value, str):
        return UUID(value)
    return bool(value) if name == "delivered" else value


class ActionKit:
    """A log, empty unless told to `keep` its rows, reached through one kind of session."""

    def __init__(self, place: Place, face: str, *, keep: bool = False) -> None:
        self.place = place
        self.is_async = face == "async"
        self.Wallet, self.Seat = place.Wallet, place.Seat
        if not keep:
            place.empty()
        url, arguments = (
            place.driver_url(int(self.is_async)),
            zoned(place.backend, DRIVERS[place.backend][self.is_async]),
        )
        make: Any = create_async_engine if self.is_async else sa.create_engine
        self.engine = make(url, connect_args=arguments)
        self.log = self.make_log()
        self.sql: list[str] = []
        sync: sa.Engine = self.engine.sync_engine if self.is_async else self.engine
        sa.event.listen(sync, "before_cursor_execute", lambda _, __, sql, *rest: self.sql.append(sql))
        self._pool = sync.pool

    def make_log(self, **options: Any) -> ActionLog:
        return self.place.make_log(**{"engine": self.engine, **options})

    async def close(self) -> None:
        left = self._pool.checkedout()  # type: ignore[attr-defined]
        if self.is_async:
            await self.engine.dispose()
        else:
            self.engine.dispose()
        assert left == 0, f"{left} connections were still checked out"

    # -- running -----------------------------------------------------------------------------------------------------

    async def act(
        self, body: Body | None = None, *, name: str = "wallet.deposit", log: ActionLog | None = None, **options: Any
    ) -> Action[Any]:
        """Run a body in the block of an action; a blocking one in a thread, so that two can run at once."""
        scope = (log or self.log).action(name, **{"params": {"amount": 5}, **options})
        if self.is_async:
            async with scope as act:
                if body is not None:
                    await act.session.run_sync(lambda session: body(act, session))
            return act

        def run() -> Action[Session]:
            with scope as act:
                if body is not None:
                    body(act, act.session)
            return act

        return await asyncio.to_thread(run)

    async def run(self, body: Body, *, log: ActionLog | None = None, decorate: Any = None, **options: Any) -> Any:
        """Run a body as a function that may be called again; returns its result."""
        given = {"retry": decorate} if decorate is not None else {}
        decorator = (log or self.log).run_as("wallet.deposit", **given)
        params = options.pop("params", {"amount": 5})
        if self.is_async:

            @decorator
            async def work(act: Action[AsyncSession], params: Any) -> Any:
                return await act.session.run_sync(lambda session: body(act, session))

            return await work(params, **options)

        @decorator
        def work_sync(act: Action[Session], params: Any) -> Any:
            return body(act, act.session)

        return await asyncio.to_thread(lambda: work_sync(params, **options))

    @asynccontextmanager
    async def session(self) -> Any:
        """A session of the caller's, for `on` and for joining."""
        if self.is_async:
            async with AsyncSession(self.engine, expire_on_commit=False) as session:
                yield session
        else:
            with Session(self.engine, expire_on_commit=False) as plain:
                yield plain

    async def on(self, session: Any, work: Callable[[Session], Any]) -> Any:
        return await session.run_sync(work) if self.is_async else work(session)

    @asynccontextmanager
    async def block(self, name: str = "wallet.deposit", params: Any = None, **options: Any) -> AsyncIterator[Any]:
        """The block of an action in this very task, whichever face it has."""
        scope = self.log.action(name, {"amount": 5} if params is None else params, **options)
        if self.is_async:
            async with scope as act:
                yield act
        else:
            with scope as plain:
                yield plain

    async def join(self, session: Any, body: Body | None = None, *, name: str = "wallet.join", **options: Any) -> Any:
        """Run a body in an action that joins a session."""
        async with self.block(name, session=session, **options) as act:
            if body is not None:
                await self.on(session, lambda plain: body(act, plain))
        return act

    # -- reading -----------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        return self.place.read(self.log.table, "event_date, id")

    def side(self) -> list[dict[str, Any]]:
        return self.place.read(self.log.tables["actions"], "action_id")

    def types(self) -> list[str | None]:
        return [row["event_type"] for row in self.rows()]

    def balances(self) -> list[int]:
        return [row["balance"] for row in self.place.read(self.Wallet.__table__, "id")]

    def inserts(self) -> list[str]:
        """The statements that wrote into the event table."""
        return [
            sql for sql in self.sql if sql.startswith("INSERT INTO") and f"{self.place.table} " in sql.replace("`", "")
        ]

    def change(self, sql: str) -> None:
        """Run SQL with `{wallets}` and `{events}` as somebody else."""
        names = {"wallets": self.Wallet.__tablename__, "events": self.log.table.fullname}
        with self.place.engine.begin() as db:
            db.exec_driver_sql(sql.format(**names))

    async def until_blocked(self, count: int = 1) -> None:
        """Wait until so many wait for the side table; SQLite cannot tell."""
        table = self.log.tables["actions"].name
        waiting = {
            "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            f" AND query LIKE '%%INSERT INTO%%{table}%%'",
            "mysql": "SELECT count(*) FROM information_schema.processlist WHERE command = 'Query'"
            f" AND id <> CONNECTION_ID() AND info LIKE 'INSERT INTO%%{table}%%'",
            "sqlite": "SELECT 1",
        }[self.place.backend]
        async with asyncio.timeout(20):
            while True:
                with self.place.engine.connect() as db:
                    if db.exec_driver_sql(waiting).scalar_one() >= count:
                        return
                await asyncio.sleep(0.01)

    def gate(self) -> Gate:
        return AsyncGate() if self.is_async else Gate()


class Gate:
    """Lets a body wait in the middle, until the test opens it."""

    def __init__(self) -> None:
        self._reached, self._opened = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        """For the body."""
        self._reached.set()
        assert self._opened.wait(20)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, 20)

    def open(self) -> None:
        self._opened.set()


class AsyncGate(Gate):
    def __init__(self) -> None:
        self._arrived, self._free = asyncio.Event(), asyncio.Event()

    def pass_through(self) -> None:
        self._arrived.set()
        await_only(asyncio.wait_for(self._free.wait(), 20))

    async def reached(self) -> None:
        await asyncio.wait_for(self._arrived.wait(), 20)

    def open(self) -> None:
        self._free.set()


# -- fixtures ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Place]]:
    """The logs that tests asked for so far; each is made once."""
    made: dict[str, Place] = {}

    def get(name: str) -> Place:
        if name not in made:
            made[name] = Place(name, tmp_path_factory.mktemp("actions"))
        return made[name]

    yield get
    for place in made.values():
        place.drop()


@pytest.fixture(params=KITS)
async def actions(request: pytest.FixtureRequest, places: Callable[[str], Place]) -> AsyncIterator[ActionKit]:
    """An empty log; a test that leaves a connection behind fails."""
    place, _, face = request.param.rpartition("-")
    kit = ActionKit(places(place), face)
    yield kit
    await kit.close()
