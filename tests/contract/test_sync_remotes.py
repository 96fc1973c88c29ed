"""The sync service on every kind of remote database: its schema, its numbers, what is refused, and once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import libsql_client
import pytest
import sqlalchemy as sa

from pillarbox.sync.config import SyncConfig, TargetConfig
from pillarbox.sync.queue import SqlQueue
from pillarbox.sync.remote_sql import ADDED, MARKS
from pillarbox.sync.service import SyncService
from pillarbox.sync.writers import open_writer
from tests.contract.sync_services import running, until
from tests.servers import server_url

DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "sqlite": "sqlite"}


class Database:
    """A remote database with a table of its own for the test."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.connect()
        self.table = f"orders_{uuid4().hex[:8]}"
        self.run(f"CREATE TABLE {self.table} (id INTEGER PRIMARY KEY, name VARCHAR(100) NOT NULL, total BIGINT)")

    def connect(self) -> None:
        parsed = sa.make_url(self.url)
        self.backend = parsed.get_backend_name().replace("mariadb", "mysql")
        self.engine = sa.create_engine(parsed.set(drivername=DRIVERS[self.backend]), poolclass=sa.NullPool)

    def run(self, sql: str) -> list[tuple[Any, ...]]:
        with self.engine.begin() as db:
            result = db.exec_driver_sql(sql.format(t=self.table))
            return [tuple(row) for row in result] if result.returns_rows else []

    @property
    def columns(self) -> list[str]:
        return [column["name"] for column in sa.inspect(self.engine).get_columns(self.table)]

    @property
    def unique_columns(self) -> list[list[str | None]]:
        """The columns of each unique index."""
        indexes = sa.inspect(self.engine).get_indexes(self.table)
        return [index["column_names"] for index in indexes if index["unique"]]

    @property
    def added(self) -> bool:
        return self.run(f"SELECT table_name FROM {ADDED} WHERE table_name = '{self.table}'") != []

    def config(self, folder: Path, **options: Any) -> SyncConfig:
        of_target = {name: options.pop(name) for name in ("inject_outbox_seq",) if name in options}
        target = TargetConfig("main", [self.table], connection={"url": self.url}, **of_target)
        return SyncConfig.single(folder, [target], name="shop", **options)

    async def drain(self, folder: Path, **options: Any) -> int:
        """Drain the queue; how many rows still wait."""
        remains = await SyncService(self.config(folder, **options)).drain()
        return remains[f"shop.main/{self.table}"]

    def close(self) -> None:
        self.run("DROP TABLE {t}")
        self.engine.dispose()


class LibsqlDatabase(Database):
    """Asked through a client that is not ours, as SQLAlchemy knows none."""

    def connect(self) -> None:
        self.backend = "sqlite"

    def run(self, sql: str) -> list[tuple[Any, ...]]:
        with libsql_client.create_client_sync(self.url) as client:
            return [tuple(row) for row in client.execute(sql.format(t=self.table)).rows]

    @property
    def columns(self) -> list[str]:
        return [name for (name,) in self.run("SELECT name FROM pragma_table_info('{t}')")]

    @property
    def unique_columns(self) -> list[list[str | None]]:
        indexes = self.run("SELECT name FROM pragma_index_list('{t}') WHERE \"unique\"")
        return [[name for (name,) in self.run(f"SELECT name FROM pragma_index_info('{each}')")] for (each,) in indexes]

    def close(self) -> None:
        self.run("DROP TABLE {t}")


@pytest.fixture(params=["sqlite", "postgres", "mariadb", "mysql", "libsql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path / 'remote.db'}" if request.param == "sqlite" else server_url(request.param)
    found = LibsqlDatabase(url) if request.param == "libsql" else Database(url)
    yield found
    found.close()


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[SqlQueue]:
    found = SqlQueue(tmp_path / "queues")
    yield found
    found.close()


def insert(database: Database) -> str:
    return f"INSERT INTO {database.table} (id, name, total) VALUES (?, ?, ?)"


async def test_statements_of_every_kind_arrive_with_the_numbers_of_inserts(
    database: Database, queue: SqlQueue, tmp_path: Path
) -> None:
    table = database.table
    queue.push_many(table, [(insert(database), [n, "50% of 'it'? -- yes", n * 10]) for n in (1, 2, 3, 4)])
    queue.push(table, f"UPDATE {table} SET total = total + ?", [1])
    queue.push(table, f"DELETE FROM {table} WHERE id IN (?, ?)", [2, 3])
    queue.push(table, f"INSERT INTO {table} VALUES (?, ?, ?), (?, ?, ?)", [5, "five", None, 6, "six", 60])
    assert await database.drain(tmp_path / "queues") == 0
    none = None if database.backend == "mysql" else 0
    assert database.run("SELECT id, name, total, outbox_seq FROM {t} ORDER BY id") == [
        (1, "50% of 'it'? -- yes", 11, 1),
        (4, "50% of 'it'? -- yes", 41, 4),
        (5, "five", None, 7),
        (6, "six", 60, none),
    ]


async def test_column_is_added_once_and_taken_away_when_it_is_not_wanted_any_more(
    database: Database, queue: SqlQueue, tmp_path: Path
) -> None:
    folder = tmp_path / "queues"
    for number in (1, 2):
        queue.push(database.table, insert(database), [number, "a", 1])
        assert await database.drain(folder) == 0
    assert database.columns == ["id", "name", "total", "outbox_seq"]
    assert database.unique_columns == [["outbox_seq"]]
    queue.push(database.table, insert(database), [3, "a", 1])
    assert await database.drain(folder, inject_outbox_seq=False) == 0
    assert database.columns == ["id", "name", "total"]
    assert database.run("SELECT id FROM {t} ORDER BY id") == [(1,), (2,), (3,)]
    assert not database.added


async def test_column_that_was_there_before_is_never_taken_away(
    database: Database, queue: SqlQueue, tmp_path: Path
) -> None:
    database.run("ALTER TABLE {t} ADD COLUMN outbox_seq BIGINT")
    queue.push(database.table, insert(database), [1, "a", 1])
    assert await database.drain(tmp_path / "queues") == 0
    queue.push(database.table, insert(database), [2, "a", 1])
    assert await database.drain(tmp_path / "queues", inject_outbox_seq=False) == 0
    assert database.run("SELECT id, outbox_seq FROM {t} ORDER BY id") == [(1, 1), (2, None)]


async def test_no_schema_is_touched_where_that_is_switched_off(
    database: Database, queue: SqlQueue, tmp_path: Path
) -> None:
    config = database.config(tmp_path / "queues", auto_schema=False)
    queue.push(database.table, insert(database), [1, "a", 1])
    statements: list[str] = []
    writer = open_writer(database.url)
    write = writer.write_batch

    async def record(batch: Sequence[Any]) -> Any:
        statements.extend(sql for sql, _ in batch)
        return await write(batch)

    writer.write_batch = record  # type: ignore[assignment, method-assign]
    database.run("ALTER TABLE {t} ADD COLUMN outbox_seq BIGINT")
    await SyncService(database.config(tmp_path / "other"), {"shop.main": open_writer(database.url)}).drain()
    assert await SyncService(config, {"shop.main": writer}).drain() == {f"shop.main/{database.table}": 0}
    assert database.run("SELECT id, outbox_seq FROM {t}") == [(1, 1)]
    assert not [sql for sql in statements if sql.split()[0] in ("CREATE", "ALTER", "DROP")]


@pytest.mark.parametrize(
    ("values", "reason"),
    [([1, "again", 1], "uplicate|UNIQUE"), ([2, None, 1], "null|NULL"), (["x", "y", "z"], "x|mismatch")],
    ids=["unique", "not-null", "type"],
)
async def test_violation_is_recorded_and_holds_what_stands_behind_it(
    database: Database, queue: SqlQueue, tmp_path: Path, values: list[Any], reason: str
) -> None:
    table = database.table
    queue.push(table, insert(database), [1, "first", 1])
    queue.push(table, insert(database), values)
    queue.push(table, f"DELETE FROM {table}")
    assert await database.drain(tmp_path / "queues", max_attempts=1) == 2
    assert database.run("SELECT id, name FROM {t}") == [(1, "first")]
    service = SyncService(database.config(tmp_path / "queues"))
    (source,) = service._sources.values()
    await source.open()
    state = await source.state()
    await source.close()
    assert (state.head, state.attempts) == (2, 1)
    assert state.dead_at is not None
    assert re.search(reason, state.error or "")


async def test_answers_that_get_lost_apply_nothing_twice(database: Database, queue: SqlQueue, tmp_path: Path) -> None:
    table = database.table
    queue.push(table, insert(database), [1, "sum", 0])
    queue.push_many(table, [(f"UPDATE {table} SET total = total + ? WHERE id = ?", [1, 1])] * 40)
    writer = open_writer(database.url)
    write = writer.write_batch
    lost = iter([False, True, False, True, True])

    async def lose(batch: Sequence[Any]) -> Any:
        results = await write(batch)
        if "UPDATE orders_" in str(batch) and next(lost, False):
            raise ConnectionError("the answer is lost")
        return results

    writer.write_batch = lose  # type: ignore[assignment, method-assign]
    service = SyncService(database.config(tmp_path / "queues", table_max_wait=0), {"shop.main": writer})
    async with running(service):
        await until(lambda: queue.waiting(table) == 0, seconds=60)
    assert database.run("SELECT total FROM {t}") == [(40,)]
    assert database.run(f"SELECT applied FROM {MARKS} WHERE table_name = '{table}'") == [(41,)]
