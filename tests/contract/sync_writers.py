"""Kits for the suite of sync writers: a database with one table, an independent connection to it, and its breakdowns.

A kit says by `features` what its database can be made to do; a test asks for what it needs with `writers_that`. To add
a writer, write a kit and put it into `KITS`.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit
from uuid import uuid4

import libsql_client
import psycopg
import pymysql
import pytest

from pillarbox.sync.writers import Statement, Writer, open_writer
from tests.contract.stores import until
from tests.private import private_server
from tests.servers import ServerName, miss, server_url
from tools.servers.sqld import PROGRAM, SqldServer

COLUMNS = """
    id {number} PRIMARY KEY, name varchar(50) NOT NULL UNIQUE, amount numeric(8, 2) CHECK (amount >= 0),
    note {text}, at {instant}, raw {binary}, doc {json}, ratio double precision,
    parent {number} REFERENCES {table} (id)"""


class WriterKit:
    """One database with one empty table, `self.table`; `types` are the names of its column types."""

    features: ClassVar[frozenset[str]] = frozenset()
    dialect: str
    types: ClassVar[dict[str, str]]
    concurrency: ClassVar[int] = 4
    duplicate_code: ClassVar[str]
    """How an error about a value that is there already ends."""
    url: str

    def __init__(self, folder: Path, needs: frozenset[str]) -> None:
        self.folder = folder
        self.needs = needs
        self.table = f"synced_{uuid4().hex[:12]}"
        self.writers: list[Any] = []

    async def start(self) -> None:
        self.execute(f"CREATE TABLE {self.table} ({COLUMNS.format(table=self.table, **self.types)})")

    async def stop(self) -> None:
        for writer in self.writers:
            await writer.close()
        self.execute(f"DROP TABLE {self.table}")

    def make_writer(self, url: str | None = None, **options: Any) -> Writer:
        self.writers.append(open_writer(url or self.url, **options))
        made: Writer = self.writers[-1]
        return made

    def connect(self) -> Any:
        """Connect with another driver, or at least not through the writer; statements commit by themselves."""
        raise NotImplementedError

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        connection = self.connect()
        try:
            cursor = connection.cursor()
            cursor.execute(statement)
            return list(cursor.fetchall())
        finally:
            connection.close()

    def execute(self, *statements: str) -> None:
        connection = self.connect()
        try:
            cursor = connection.cursor()
            for statement in statements:
                cursor.execute(statement)
        finally:
            connection.close()

    # -- what tests write and look for -------------------------------------------------------------------------------

    def insert(self, number: int, name: str | None = "", **more: Any) -> Statement:
        names = ["id", "name", *more]
        sql = f"INSERT INTO {self.table} ({', '.join(names)}) VALUES ({', '.join('?' for _ in names)})"
        return sql, [number, f"name {number}" if name == "" else name, *more.values()]

    def update(self, number: int, note: str) -> Statement:
        return f"UPDATE {self.table} SET note = ? WHERE id = ?", [note, number]

    def ids(self) -> list[int]:
        return [number for (number,) in self.query(f"SELECT id FROM {self.table} ORDER BY id")]

    # -- breakdowns: for kits with the feature of that name ----------------------------------------------------------

    def lock_row(self, number: int) -> Any:
        """Change a row in a transaction of somebody else's; returns the connection, whose `rollback` frees it."""
        other = self.connect()
        cursor = other.cursor()
        cursor.execute("BEGIN")
        cursor.execute(f"UPDATE {self.table} SET amount = 1 WHERE id = {number}")
        return other

    def waiting(self) -> list[int]:
        """The sessions that wait for a lock in a statement on the table."""
        raise NotImplementedError

    async def until_waiting(self, count: int = 1) -> list[int]:
        async def found() -> list[int]:
            sessions = await asyncio.to_thread(self.waiting)
            return sessions if len(sessions) >= count else []

        sessions: list[int] = await until(found)
        return sessions

    def has_session(self, session: int) -> bool:
        raise NotImplementedError

    async def until_gone(self, session: int) -> None:
        """Wait until the server has ended a session, and with it the session's transaction."""

        async def is_gone() -> bool:
            return not await asyncio.to_thread(self.has_session, session)

        await until(is_gone)

    def kill(self, session: int) -> None:
        raise NotImplementedError

    def go_down(self) -> None:
        raise NotImplementedError

    def come_back(self) -> None:
        raise NotImplementedError


class ServerKit(WriterKit):
    features = frozenset({"locks rows", "kills sessions", "goes down", "is remote", "has a login"})
    server_name: ServerName

    def __init__(self, folder: Path, needs: frozenset[str]) -> None:
        super().__init__(folder, needs)
        self.server: Any = None
        if "goes down" in needs:
            self.server = private_server(self.server_name)
            self.server.start()
        self.url = server_url(self.server_name) if self.server is None else self.server.url

    async def stop(self) -> None:
        if self.server is not None:
            self.server.start()
        await super().stop()

    def go_down(self) -> None:
        self.server.kill()

    def come_back(self) -> None:
        self.server.start()


class PostgresKit(ServerKit):
    dialect = "postgresql"
    duplicate_code = "(SQLSTATE 23505)"
    server_name: ServerName = "postgres"
    types: ClassVar[dict[str, str]] = {
        "number": "bigint",
        "text": "text",
        "instant": "timestamptz",
        "binary": "bytea",
        "json": "jsonb",
    }

    def connect(self) -> Any:
        return psycopg.connect(self.url, autocommit=True)

    def waiting(self) -> list[int]:
        found = self.query(
            f"SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%{self.table}%'"
        )
        return [pid for (pid,) in found]

    def has_session(self, session: int) -> bool:
        return bool(self.query(f"SELECT pid FROM pg_stat_activity WHERE pid = {session}"))

    def kill(self, session: int) -> None:
        self.query(f"SELECT pg_terminate_backend({session})")


class MariadbKit(ServerKit):
    dialect = "mysql"
    duplicate_code = "(1062)"
    server_name: ServerName = "mariadb"
    types: ClassVar[dict[str, str]] = {
        "number": "bigint",
        "text": "longtext",
        "instant": "datetime(6)",
        "binary": "longblob",
        "json": "json",
    }

    def connect(self) -> Any:
        parts = urlsplit(self.url)
        return pymysql.connect(
            host=parts.hostname,
            port=parts.port or 3306,
            user=parts.username,
            password=parts.password or "",
            database=parts.path.removeprefix("/"),
            charset="utf8mb4",
            autocommit=True,
        )

    def waiting(self) -> list[int]:
        # Not from information_schema.innodb_trx: it is not renewed while anybody reads it ten times a second.
        [(_, _, status)] = self.query("SHOW ENGINE INNODB STATUS")
        transactions = [each for each in status.split("---TRANSACTION") if "LOCK WAIT" in each and self.table in each]
        return [int(match[1]) for each in transactions if (match := re.search(r"thread id (\d+)", each))]

    def has_session(self, session: int) -> bool:
        return bool(self.query(f"SELECT id FROM information_schema.processlist WHERE id = {session}"))

    def kill(self, session: int) -> None:
        self.execute(f"KILL {session}")


class MysqlKit(MariadbKit):
    """The driver is MariaDB's, and so is what it makes of a lost server: this one is not killed."""

    features = ServerKit.features - {"goes down"}
    server_name: ServerName = "mysql"


class SqliteKit(WriterKit):
    features = frozenset({"goes down"})
    dialect = "sqlite"
    concurrency = 1
    duplicate_code = "(SQLITE_CONSTRAINT_UNIQUE)"
    types: ClassVar[dict[str, str]] = {
        "number": "integer",
        "text": "text",
        "instant": "text",
        "binary": "blob",
        "json": "text",
    }

    def __init__(self, folder: Path, needs: frozenset[str]) -> None:
        super().__init__(folder, needs)
        self.home = folder / "remote"
        self.home.mkdir()
        self.path = self.home / "remote.db"
        self.url = f"sqlite:///{self.path}"

    def connect(self) -> Any:
        return sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)

    def go_down(self) -> None:
        self.home.rename(self.home.with_name("away"))

    def come_back(self) -> None:
        self.home.with_name("away").rename(self.home)


class LibsqlKit(WriterKit):
    """The shared sqld; one of its own for a test that kills it."""

    features = frozenset({"goes down", "is remote"})
    dialect = "sqlite"
    duplicate_code = "(SQLITE_CONSTRAINT)"
    types = SqliteKit.types

    def __init__(self, folder: Path, needs: frozenset[str]) -> None:
        super().__init__(folder, needs)
        self.url = server_url("libsql")
        if "goes down" in needs:
            if not PROGRAM.exists():
                miss("the program of libsql is not on this machine")
            # Not in the test's folder, which the user that the server runs as cannot enter.
            self.home = tempfile.TemporaryDirectory(prefix="pillarbox-server-")
            Path(self.home.name).chmod(0o755)
            self.server = SqldServer(Path(self.home.name))
            self.server.dies_with_starter = True
            self.server.start()
            self.url = self.server.url

    async def stop(self) -> None:
        await super().stop()
        if "goes down" in self.needs:
            self.server.kill()
            self.home.cleanup()

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with libsql_client.create_client_sync(self.url) as client:
            return [tuple(row) for row in client.execute(statement).rows]

    def execute(self, *statements: str) -> None:
        with libsql_client.create_client_sync(self.url) as client:
            for statement in statements:
                client.execute(statement)

    def go_down(self) -> None:
        self.server.kill()

    def come_back(self) -> None:
        self.server.start()


KITS: dict[str, type[WriterKit]] = {
    "sqlite": SqliteKit,
    "postgresql": PostgresKit,
    "mariadb": MariadbKit,
    "mysql": MysqlKit,
    "libsql": LibsqlKit,
}


def writers_that(*needs: str, only: Sequence[str] = ()) -> Callable[[Any], Any]:
    """Run a test on every writer whose database has these features, or on those named."""
    wanted = frozenset(needs)
    names = [name for name, kit in KITS.items() if wanted <= kit.features and name in (only or KITS)]
    return pytest.mark.parametrize("kit", [pytest.param((name, wanted), id=name) for name in names], indirect=True)


every_writer = writers_that()


@pytest.fixture(name="kit")
async def writer_kit(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[WriterKit]:
    """One kit; a test that leaves a task behind fails."""
    name, needs = request.param
    made = KITS[name](tmp_path, needs)
    await made.start()
    yield made
    await made.stop()
    await asyncio.sleep(0)
    alive = asyncio.all_tasks() - {asyncio.current_task()}
    assert not alive, f"tasks still alive: {alive}"


@pytest.fixture
def writer(kit: WriterKit) -> Writer:
    return kit.make_writer()
