"""Kits for layouts: a table of each layout on each of its databases, and what its columns say at every step of life.

A `Spec` is written by hand from the table's published contract. Rows are read by plain SQL, so that nothing of the code
under test stands between a test and the columns. Time passes by moving instants in the table, never by waiting.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.util import greenlet_spawn

from pillarbox import Event, Outbox, Relay
from pillarbox.receipt import Receipt
from pillarbox.stores import Batch, Counts, Mode
from pillarbox.stores.keyed import KeyedTransitions
from pillarbox.stores.sql import SqlStore
from pillarbox.stores.url import open_store
from tests.contract.stores import AllLanes, process_time_zone, sync_engine, wait_briefly
from tests.servers import ServerName, server_url

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)

Row = Mapping[str, Any]


# -- what a column may be ----------------------------------------------------------------------------------------------


class Around:
    """An instant at some distance from now, whichever way the database gives it: without a zone it is UTC."""

    def __init__(self, distance: timedelta = timedelta(0), *, within: timedelta = timedelta(minutes=2)) -> None:
        self._distance = distance
        self._within = within

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str | datetime):
            return False
        return abs(as_instant(other) - datetime.now(UTC) - self._distance) < self._within

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<about {datetime.now(UTC) + self._distance:%Y-%m-%d %H:%M:%S} UTC>"


class Like:
    """Text that a pattern matches as a whole."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def __eq__(self, other: object) -> bool:
        return re.fullmatch(self._pattern, str(other)) is not None

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<like {self._pattern}>"


NOW: Any = Around()
IN_AN_HOUR: Any = Around(HOUR)
OWNER: Any = Like(r"[A-Za-z0-9.-]+-\d+/[0-9a-f]{32}")
"""This process and one claim of it."""
LAPSED: Any = Like("The lease lapsed.*")


def as_instant(value: str | datetime) -> datetime:
    moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


# -- what a table is ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """One layout's table as its contract describes it.

    `steps` gives, for each step of life, the columns of the row in every table that the step touches; None means that
    there is no row. Columns that no step names are the event's own. The steps, as far as the layout has them:

        put        scheduled   leased     waiting    dead       released   leased again (after a lapse)   buried
        delivered  redriven    replayed   rescheduled

    Events are named by their type, which `{name}` in `insert` stands for.
    """

    layout: str
    databases: tuple[str, ...]
    steps: Mapping[str, Mapping[str, Row | None]]
    find: Mapping[str, str]
    """By role of the table: the condition that finds the row of `:id`."""
    touched: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By role: the columns that must move with every change."""
    ends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By role: the columns with the moments at which a row was delivered and died."""
    lapse: str = ""
    """Sets the claim of `:id` back by `{ago}`, an expression for the database's now minus `:seconds`."""
    lease: timedelta = timedelta(seconds=30)
    """After how long the other system's claims lapse; no claim is taken before."""
    last_try: str = ""
    """Lets the next attempt of `:id` be its last, where the row itself says how many it has."""
    fields: Callable[[], Mapping[str, Any]] = dict
    """The fields that an event needs for this table."""
    insert: str | None = None
    """The other system's own plain INSERT, with `:id`, `:name` and `:payload`; None: rows are put."""
    new_id: Callable[[], Any] = uuid4
    schema: str | None = None
    prepare: tuple[str, ...] = ()
    """DDL after the tables are made, such as partitions."""
    features: frozenset[str] = frozenset()
    """Of hold, lease, put, schedule, retention (delivered rows stay), cancel, replay, shared lease (a claim says when
    it began and not when it ends), parallel (rows do not wait for each other)."""

    @property
    def ids(self) -> list[str]:
        return [f"{self.layout}-{database}" for database in self.databases]


SPECS: dict[str, Spec] = {}
"""By the layout's name; test modules of other layouts register theirs with `register`."""


def register(*specs: Spec) -> None:
    SPECS.update({spec.layout: spec for spec in specs})


def partition_months(role: str) -> tuple[str, ...]:
    """DDL: a partition for each month from the last one to the next, and one for the rest."""
    first = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    months = [(first - DAY).replace(day=1), first, (first + 32 * DAY).replace(day=1), (first + 63 * DAY).replace(day=1)]
    name = f"{{{role}}}"
    made = [
        f"CREATE TABLE {name}_{start:%Y_%m} PARTITION OF {name} "
        f"FOR VALUES FROM ('{start:%Y-%m-%d} 00:00+00') TO ('{end:%Y-%m-%d} 00:00+00')"
        for start, end in pairwise(months)
    ]
    return (*made, f"CREATE TABLE {name}_rest PARTITION OF {name} DEFAULT")


def kit_names() -> list[str]:
    return [name for spec in SPECS.values() for name in spec.ids]


def offered_by(kit: str) -> frozenset[str]:
    """What a layout offers on a database."""
    layout, _, database = kit.rpartition("-")
    # SQLite locks files, not rows.
    without = {"hold", "row locks"} if database == "sqlite" else set()
    return (SPECS[layout].features | {"row locks", database}) - without


# -- tables and kits ---------------------------------------------------------------------------------------------------

ZONES = {"postgresql": "SET LOCAL TIME ZONE 'America/New_York'", "mysql": "SET time_zone = '-05:00'"}
DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "sqlite": "sqlite+pysqlite"}
SERVERS: dict[str, ServerName] = {"postgresql": "postgres", "mariadb": "mariadb", "mysql": "mysql"}


class LayoutDatabase:
    """The tables of one layout on one database, for a session of tests."""

    def __init__(self, spec: Spec, database: str, folder: Path) -> None:
        self.spec = spec
        self.name = database
        self.url = sa.make_url(
            f"sqlite:///{folder / 'layout.db'}" if database == "sqlite" else server_url(SERVERS[database])
        )
        self.backend = self.url.get_backend_name()
        self.engine = sa.create_engine(self.url.set(drivername=DRIVERS[self.backend]))
        wait_briefly(self.engine)
        suffix = uuid4().hex[:10]
        self.schema = None if spec.schema is None else f"{spec.schema}_{suffix}"
        self.metadata = sa.MetaData()
        self.outbox = Outbox(self.metadata, spec.layout, table=f"life_{suffix}", schema=self.schema)
        self.names = {role: table.fullname for role, table in self.outbox.tables.items()}
        self.built: dict[Any, Any] = {}
        with self.engine.begin() as db:
            if self.schema is not None:
                kind = "SCHEMA" if self.backend == "postgresql" else "DATABASE"
                db.exec_driver_sql(f"CREATE {kind} {self.schema}")
            self.metadata.create_all(db)
            for statement in spec.prepare:
                db.exec_driver_sql(statement.format(**self.names))

    def empty(self) -> None:
        with self.engine.begin() as db:
            for name in self.names.values():
                db.exec_driver_sql(f"DELETE FROM {name}")

    def drop(self) -> None:
        with self.engine.begin() as db:
            self.metadata.drop_all(db)
            if self.schema is not None:
                kind = "SCHEMA" if self.backend == "postgresql" else "DATABASE"
                db.exec_driver_sql(f"DROP {kind} {self.schema}")
        self.engine.dispose()

    def ago(self, seconds: str = ":seconds") -> str:
        """The database's now, in UTC, minus a number of seconds."""
        return {
            "postgresql": f"(clock_timestamp() - CAST({seconds} AS double precision) * INTERVAL '1 second')",
            "mysql": f"(UTC_TIMESTAMP(6) - INTERVAL {seconds} SECOND)",
            "sqlite": f"(strftime('%Y-%m-%d %H:%M:%f', 'now', (-1 * {seconds}) || ' seconds') || '000')",
        }[self.backend]

    @property
    def utc(self) -> str:
        """The database's now for a column without a zone."""
        is_postgres = self.backend == "postgresql"
        return "(clock_timestamp() AT TIME ZONE 'UTC')" if is_postgres else self.ago("0")

    def back(self, column: str, seconds: str = ":seconds") -> str:
        """A column's instant minus a number of seconds."""
        return {
            "postgresql": f"{column} - CAST({seconds} AS double precision) * INTERVAL '1 second'",
            "mysql": f"{column} - INTERVAL {seconds} SECOND",
            "sqlite": f"strftime('%Y-%m-%d %H:%M:%f', {column}, (-1 * {seconds}) || ' seconds') || '000'",
        }[self.backend]


class _Back:
    def __init__(self, database: LayoutDatabase) -> None:
        self._database = database

    def __getitem__(self, column: str) -> str:
        return self._database.back(column)


def make_layout_database(kit: str, folder: Path) -> LayoutDatabase:
    layout, _, database = kit.rpartition("-")
    return LayoutDatabase(SPECS[layout], database, folder)


@contextmanager
def _reuse_statements(built: dict[Any, Any]) -> Iterator[None]:
    """Let stores of one table share their statements: to build them takes longer than most tests."""
    build = SqlStore._build

    def reuse(store: SqlStore, dialect: str) -> None:
        what = (store.sink, store.retention is None, tuple(store.topics or ()), dialect)
        if what not in built:
            build(store, dialect)
            if isinstance(store.transitions, KeyedTransitions):
                store.transitions.share = AllLanes(store.layout.keyed.lanes)
            built[what] = (store.transitions, store.operations)
        store.dialect = dialect
        store.transitions, store.operations = built[what]

    with patch.object(SqlStore, "_build", reuse):
        yield


class LayoutKit:
    """An empty table of a layout on a database, with stores that claim from it."""

    def __init__(self, database: LayoutDatabase) -> None:
        self.database = database
        self.spec = database.spec
        self.outbox = database.outbox
        self.engine = database.engine
        self.stores: list[SqlStore] = []
        self._checked_out: set[Any] = set()
        self._zone: str | None = None
        database.empty()

    # -- stores -------------------------------------------------------------------------------------------------------

    async def open(self, **options: Any) -> SqlStore:
        given: dict[str, Any] = {"pooler": False} if self.database.backend == "postgresql" else {}
        with _reuse_statements(self.database.built):
            store = open_store(
                self.database.url,
                layout=self.spec.layout,
                table=self.outbox.table.name,
                schema=self.outbox.table.schema,
                **{**given, **options},
            )
        if self.database.backend == "mysql":
            wait_briefly(sync_engine(store))
        await store.open()
        self.stores.append(store)
        engine = sync_engine(store)
        sa.event.listen(engine, "checkout", lambda _, record, __: self._checked_out.add(record))
        sa.event.listen(engine, "checkin", lambda _, record: self._checked_out.discard(record))
        if self._zone is not None:
            sa.event.listen(engine, "begin", self._set_zone)
        return store

    async def close(self) -> None:
        leaked = list(self._checked_out)
        for record in leaked:
            await greenlet_spawn(record.invalidate)
        for store in self.stores:
            await store.close()
        assert not leaked, f"{len(leaked)} connections were still checked out"

    @contextmanager
    def far_from_utc(self) -> Iterator[None]:
        """Let this process and every session of writers and stores be in New York."""
        self._zone = ZONES.get(self.database.backend)
        if self._zone is not None:
            sa.event.listen(self.engine, "begin", self._set_zone)
        with process_time_zone("America/New_York"):
            yield
        if self._zone is not None:
            sa.event.remove(self.engine, "begin", self._set_zone)
            self.engine.dispose()

    def _set_zone(self, connection: sa.Connection) -> None:
        connection.exec_driver_sql(self._zone or "")

    # -- writing ------------------------------------------------------------------------------------------------------

    def event(self, name: str, payload: Any = None, **fields: Any) -> Event:
        """An event with all that the table requires."""
        body = {"name": name} if payload is None else payload
        return Event(name, body, **{**self.spec.fields(), **fields})

    def put(self, *events: Event) -> Receipt:
        with self.engine.begin() as db:
            return self.outbox.put(db, *events)

    def add(self, name: str, **fields: Any) -> Any:
        """One event by the shortest way: a put, or the other system's plain INSERT; returns the row's id."""
        if "put" not in self.spec.features:
            return self.insert(name)
        event = self.event(name, **fields)
        self.put(event)
        return event.id

    def insert(self, name: str, payload: str | bytes = b'{"n": 1}', sql: str | None = None, **given: Any) -> Any:
        """A row as the other system writes it."""
        statement = sql or self.spec.insert
        assert statement is not None, f"{self.spec.layout} has no INSERT of its own"
        row = given.pop("id", None) or self.spec.new_id()
        if isinstance(payload, bytes) and "AS jsonb" in statement:
            payload = payload.decode()
        self.execute(statement, id=row, name=name, payload=payload, **given)
        return row

    def execute(self, sql: str, **params: Any) -> int:
        """Run SQL with `{outbox}` and other roles for the tables' names.

        `{utc}` is now in a column without a zone, `{ago}` now minus `:seconds`, `{back[name]}` a column minus these.
        """
        moments = {"ago": self.database.ago(), "utc": self.database.utc, "back": _Back(self.database)}
        text = sql.format(**moments, **self.database.names)
        used = {name: self._plain(value) for name, value in params.items() if f":{name}" in text}
        with self.engine.begin() as db:
            return db.execute(sa.text(text), used).rowcount

    def _plain(self, value: Any) -> Any:
        is_text = self.database.backend != "postgresql" and not isinstance(value, int | float | str | bytes | None)
        return str(value) if is_text else value

    # -- reading ------------------------------------------------------------------------------------------------------

    def row(self, row: Any, role: str = "outbox") -> dict[str, Any] | None:
        """A row's columns as the driver gives them."""
        sql = f"SELECT * FROM {self.database.names[role]} WHERE {self.spec.find[role]}"
        with self.engine.begin() as db:
            found = db.execute(sa.text(sql), {"id": self._plain(row)}).mappings().all()
        assert len(found) <= 1, f"{len(found)} rows of {row}"
        return dict(found[0]) if found else None

    def is_there(self, row: Any) -> bool:
        """Whether any of the tables has the row."""
        return any(self.row(row, role) is not None for role in self.spec.find)

    def column(self, row: Any, name: str, role: str = "outbox") -> Any:
        found = self.row(row, role)
        assert found is not None, f"there is no row {row}"
        return found[name]

    def expect(self, row: Any, step: str, **changed: Any) -> None:
        """Assert what every column of life says at a step, then let what must move with each change grow old."""
        for role, columns in self.spec.steps[step].items():
            found = self.row(row, role)
            if columns is None:
                assert found is None, f"{step}: the row is still in {role}"
                continue
            assert found is not None, f"{step}: there is no row in {role}"
            wanted = {**columns, **{name: value for name, value in changed.items() if name in columns}}
            assert {name: found[name] for name in wanted} == wanted, step
        for role, names in self.spec.touched.items():
            moved = ", ".join(f"{name} = {self.database.back(name)}" for name in names)
            sql = f"UPDATE {self.database.names[role]} SET {moved} WHERE {self.spec.find[role]}"
            self.execute(sql, id=row, seconds=86400)

    def count(self, where: str = "1 = 1", role: str = "outbox") -> int:
        with self.engine.begin() as db:
            number: int = db.exec_driver_sql(
                f"SELECT count(*) FROM {self.database.names[role]} WHERE {where}"
            ).scalar_one()
        return number

    # -- time and locks -----------------------------------------------------------------------------------------------

    async def lapse(self, row: Any, by: timedelta = timedelta(seconds=1)) -> None:
        """Let the claim of a row be older than the other system's lease."""
        await self.age_claim(row, self.spec.lease + by)

    async def age_claim(self, row: Any, age: timedelta) -> None:
        assert self.execute(self.spec.lapse, id=row, seconds=age.total_seconds()) == 1
        await self.look_again()

    async def set(self, row: Any, sql: str, **params: Any) -> None:
        """Change columns of a row by hand."""
        changed = self.execute(f"UPDATE {{outbox}} SET {sql} WHERE {self.spec.find['outbox']}", id=row, **params)
        assert changed == 1
        await self.look_again()

    def age_ends(self, seconds: int) -> None:
        """Let the moments at which rows were delivered or died be earlier."""
        for role, columns in self.spec.ends.items():
            moved = ", ".join(f"{name} = {self.database.back(name)}" for name in columns)
            self.execute(f"UPDATE {self.database.names[role]} SET {moved}", seconds=seconds)

    async def look_again(self) -> None:
        """Let the next claim ask the database what is due, however soon it comes."""
        for store in self.stores:
            store._look_at = 0.0

    @contextmanager
    def locked(self, row: Any) -> Iterator[None]:
        """Lock a row in a transaction of somebody else's."""
        sql = f"SELECT 1 FROM {self.database.names['outbox']} WHERE {self.spec.find['outbox']} FOR UPDATE"
        with self.engine.connect() as db:
            assert db.execute(sa.text(sql), {"id": self._plain(row)}).all() == [(1,)]
            yield
            db.rollback()

    @contextmanager
    def no_statements(self) -> Iterator[None]:
        """Assert that nothing is sent to the database."""
        sent: list[str] = []

        def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            sent.append(statement)

        sa.event.listen(self.engine, "before_cursor_execute", note)
        yield
        sa.event.remove(self.engine, "before_cursor_execute", note)
        assert sent == []


async def claim(store: SqlStore, limit: int = 100, *, mode: Mode = "lease", **options: Any) -> Batch:
    """Claim for as long as the table's own system does."""
    batch: Batch = await store.claim(limit, mode=mode, **{"lease": store.lease, **options})
    return batch


async def drain(relay: Relay) -> Counts:
    """Deliver until nothing is left to try, also what must wait a moment for its next try."""
    async with relay, asyncio.timeout(60):
        while True:
            left = await relay.drain()
            if not (left.new or left.retrying or left.held):
                return left


def names(batch: Batch | Sequence[Any]) -> str:
    claims = batch if isinstance(batch, Sequence) else batch.claims
    return " ".join(claim.event.type for claim in claims)
