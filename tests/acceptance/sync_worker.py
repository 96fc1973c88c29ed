"""A sync service and a program that pushes, as processes to be killed; and what must have arrived in the end.

They are forks of the test's process. A push is acknowledged by a byte in a file after it has returned: whoever was
killed has stored what it acknowledged, and perhaps one push more.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from pillarbox.sync.config import SyncConfig, TableConfig, TargetConfig
from pillarbox.sync.queue import SqlQueue
from pillarbox.sync.service import SyncService
from pillarbox.sync.writers import Writer, open_writer
from tests.servers import ROOT, ServerName, server_url

Push = tuple[str, list[tuple[str, list[int]]]]

ADD = "UPDATE accounts SET balance = balance + ?, trace = (trace * 31 + ?) % 1000003 WHERE id = ?"
TABLES = ("accounts", "orders", "log", "plain")


# -- what is pushed, and what it makes of the tables -------------------------------------------------------------------


def pushes(producer: int) -> Iterator[Push]:
    """The pushes of one producer, in order: always the same."""
    yield "accounts", [("INSERT INTO accounts (id, balance, trace) VALUES (?, 0, 1)", [producer])]
    for number in range(producer * 10_000, producer * 10_000 + 10_000):
        amount = number % 97 + 1
        yield "accounts", [(ADD, [amount, amount, producer])]
        order = ("INSERT INTO orders (id, total) VALUES (?, ?)", [number, 1])
        yield "orders", [order, ("UPDATE orders SET total = total + ? WHERE id <= ?", [amount, number])]
        yield "log", [("INSERT INTO log (n) VALUES (?)", [number])]
        yield "plain", [("INSERT INTO plain (n) VALUES (?)", [number])]
        if number % 3 == 0:
            yield "orders", [("DELETE FROM orders WHERE id = ?", [number - 1])]
            yield "log", [("INSERT INTO log (n) VALUES (?)", [-number]), ("INSERT INTO log (n) VALUES (?)", [number])]


@dataclass
class Tables:
    """The content of the remote tables."""

    accounts: dict[int, tuple[int, int]] = field(default_factory=dict)
    orders: dict[int, int] = field(default_factory=dict)
    log: list[int] = field(default_factory=list)
    plain: list[int] = field(default_factory=list)

    def apply(self, sql: str, args: Sequence[int]) -> None:
        match sql.split()[0], *args:
            case "INSERT", int(key), int(total):
                self.orders[key] = total
            case "INSERT", int(key) if "accounts" in sql:
                self.accounts[key] = (0, 1)
            case "INSERT", int(number):
                (self.log if "INTO log" in sql else self.plain).append(number)
            case "UPDATE", int(amount), int(_), int(key):
                balance, trace = self.accounts[key]
                self.accounts[key] = (balance + amount, (trace * 31 + amount) % 1_000_003)
            case "UPDATE", int(amount), int(last):
                self.orders = {key: total + amount if key <= last else total for key, total in self.orders.items()}
            case "DELETE", int(key):
                self.orders.pop(key, None)


def expect(counts: Sequence[int]) -> Tables:
    """What must be there after so many pushes of each producer, one producer after the other."""
    made = Tables()
    for producer, count in enumerate(counts, 1):
        for _, statements in itertools.islice(pushes(producer), count):
            for sql, args in statements:
                made.apply(sql, args)
    return made


# -- the remote databases ----------------------------------------------------------------------------------------------

_DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}
_SERVERS: dict[str, ServerName] = {"postgresql": "postgres", "mariadb": "mariadb", "mysql": "mysql"}
_PLACES = {"postgresql": "bigserial", "mysql": "bigint auto_increment", "sqlite": "integer"}
_SESSIONS = {
    "postgresql": "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
    "mysql": "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()",
}


class Remote:
    """A database with the tables, asked without our writer; `url` is the writer's."""

    def __init__(self, url: str, engine_url: sa.URL) -> None:
        self.url = url
        self.kind = engine_url.get_backend_name()
        self.engine = sa.create_engine(engine_url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
        place = f"place {_PLACES[self.kind]} PRIMARY KEY"
        self.run("CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL, trace bigint NOT NULL)")
        self.run("CREATE TABLE orders (id bigint PRIMARY KEY, total bigint NOT NULL)")
        for table in ("log", "plain"):
            self.run(f"CREATE TABLE {table} ({place}, n bigint NOT NULL)")

    def run(self, sql: str) -> list[Any]:
        with self.engine.connect() as db:
            done = db.exec_driver_sql(sql)
            return [tuple(row) for row in done] if done.returns_rows else []

    def count(self, table: str) -> int:
        return int(self.run(f"SELECT count(*) FROM {table}")[0][0])

    def read(self) -> Tables:
        return Tables(
            {key: (balance, trace) for key, balance, trace in self.run("SELECT id, balance, trace FROM accounts")},
            dict(self.run("SELECT id, total FROM orders")),
            [number for (number,) in self.run("SELECT n FROM log ORDER BY place")],
            [number for (number,) in self.run("SELECT n FROM plain ORDER BY place")],
        )

    def end_sessions(self) -> int:
        """End everybody's sessions but our own; how many there were."""
        found = [number for (number,) in self.run(_SESSIONS[self.kind])]
        for number in found:
            # One that has just ended by itself is an error on MySQL.
            try:
                self.run(f"SELECT pg_terminate_backend({number})" if self.kind == "postgresql" else f"KILL {number}")
            except sa.exc.OperationalError:
                continue
        return len(found)


@contextmanager
def remote_database(name: str, path: Path) -> Iterator[Remote]:
    """A new database on a server, in a file, or in a file behind a libSQL server."""
    if name in ("sqlite", "libsql"):
        with closing(sqlite3.connect(path)) as file:
            file.execute("PRAGMA journal_mode = wal")
        with _served(path) if name == "libsql" else _plain(path) as url:
            yield Remote(url, sa.make_url(f"sqlite:///{path}"))
        return
    server = sa.make_url(server_url(_SERVERS[name]))
    engine_url = server.set(drivername=_DRIVERS[server.get_backend_name()])
    chosen = f"sync_crash_{uuid4().hex[:10]}"
    engine = sa.create_engine(engine_url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as db:
        db.exec_driver_sql(f"CREATE DATABASE {chosen}")
    try:
        url = server.set(database=chosen).render_as_string(hide_password=False)
        yield Remote(url, engine_url.set(database=chosen))
    finally:
        with engine.connect() as db:
            db.exec_driver_sql(f"DROP DATABASE {chosen}{' WITH (FORCE)' if 'postgresql' in str(engine_url) else ''}")


@contextmanager
def _plain(path: Path) -> Iterator[str]:
    yield f"sqlite:///{path}"


@contextmanager
def _served(path: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.hrana_server", str(path), "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
        finally:
            server.kill()


# -- the processes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shop:
    """The queues and where they go: `accounts` and `log` to both targets, `plain` without outbox_seq."""

    folder: Path
    urls: Mapping[str, str]

    @property
    def config(self) -> SyncConfig:
        tables = [*map(TableConfig, ("accounts", "orders", "log")), TableConfig("plain", inject_outbox_seq=False)]
        targets = [TargetConfig("main", tables, connection={"url": self.urls["main"]})]
        if "second" in self.urls:
            targets.append(TargetConfig("second", ["accounts", "log"], connection={"url": self.urls["second"]}))
        return SyncConfig.single(
            self.folder / "queues", targets, name="shop", batch_size=40, table_flush_threshold=1, flush_interval=0.2
        )

    def make_writers(self) -> dict[str, Writer]:
        return {f"shop.{name}": open_writer(url) for name, url in self.urls.items()}

    def drain(self) -> dict[str, int]:
        return asyncio.run(SyncService(self.config, self.make_writers()).drain())

    def fill(self, count: int) -> None:
        """Push here, as the first producer does."""
        with SqlQueue(self.folder / "queues") as queue:
            for table, statements in itertools.islice(pushes(1), count):
                queue.push_many(table, statements)

    def acknowledged(self, producer: int) -> int:
        try:
            return (self.folder / f"acknowledged-{producer}").stat().st_size
        except FileNotFoundError:
            return 0


def fork(run: Callable[..., None], *args: object) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=run, args=args, daemon=True)
    process.start()
    return process


def serve(shop: Shop) -> None:
    _note_errors(shop)
    asyncio.run(SyncService(shop.config, shop.make_writers()).run())


def produce(shop: Shop, producer: int, count: int) -> None:
    """Push singly and in batches, with a little pause, so that a service can keep up."""
    _note_errors(shop)
    queue = SqlQueue(shop.folder / "queues")
    file = os.open(shop.folder / f"acknowledged-{producer}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for table, statements in itertools.islice(pushes(producer), count):
        if len(statements) > 1:
            queue.push_many(table, statements)
        else:
            queue.push(table, *statements[0])
        os.write(file, b".")
        time.sleep(0.0005)


def _note_errors(shop: Shop) -> None:
    os.dup2(os.open(shop.folder / "errors.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)


def drain_until_statement(shop: Shop, last: int) -> None:
    """Drain, and die before a given statement on any SQLite file, a queue's or a target's."""
    _note_errors(shop)
    count = _countdown(last)
    _watch_statements(lambda path, text: count())
    asyncio.run(SyncService(shop.config, shop.make_writers()).drain())


def _countdown(times: int) -> Callable[[], None]:
    seen = itertools.count(1)

    def count() -> None:
        if next(seen) == times:
            os.kill(os.getpid(), signal.SIGKILL)

    return count


def _watch_statements(see: Callable[[str, str], None]) -> None:
    connect = sqlite3.connect

    def connect_watched(path: Any, *args: Any, **options: Any) -> sqlite3.Connection:
        db: sqlite3.Connection = connect(path, *args, **options)
        db.set_trace_callback(lambda text: see(str(path), text))
        return db

    sqlite3.connect = connect_watched  # type: ignore[assignment]


# -- dying at a given step ---------------------------------------------------------------------------------------------

REMOTE_STEPS = {
    "before-the-call": 3,
    "before-the-remote-commit": 3,
    "after-the-call": 3,
}
LOCAL_STEPS = {
    "before-the-audit-log": ("queues/orders.db", "INSERT OR IGNORE INTO outbox_sync_log", 3),
    "between-audit-log-and-queue": ("queues/orders.db", "DELETE FROM outbox_queue", 3),
    "before-progress-is-noted": ("queues/orders.db", "UPDATE pillarbox_sync_state SET settled", 3),
    "while-numbers-are-raised": ("queues/orders.db", "UPDATE outbox_queue SET seq = seq +", 1),
    "amid-the-first-copy": ("targets/shop.main/log.db", "INSERT INTO outbox_queue", 3),
    "between-the-copies": ("targets/shop.second/log.db", "INSERT INTO outbox_queue", 1),
    "between-copies-and-audit-log": ("queues/log.db", "INSERT OR IGNORE INTO outbox_sync_log", 2),
    "before-the-other-target": ("second.db", "UPDATE pillarbox_sync_marks", 1),
    "before-the-other-target-commits": ("second.db", "UPDATE accounts", 2),
}
"""Before which statement on which file a service dies, and the how manieth such statement that is."""


def drain_until_call(shop: Shop, step: str) -> None:
    """Drain, and die at a call of the first target's writer."""
    _note_errors(shop)
    writers = shop.make_writers()
    _watch_calls(writers["shop.main"], step, _countdown(REMOTE_STEPS[step]))
    asyncio.run(SyncService(shop.config, writers).drain())


def drain_until_step(shop: Shop, step: str) -> None:
    """Drain, and die before a statement on one of the files."""
    _note_errors(shop)
    file, start, times = LOCAL_STEPS[step]
    count = _countdown(times)
    _watch_statements(lambda path, text: count() if path.endswith(file) and text.startswith(start) else None)
    asyncio.run(SyncService(shop.config, shop.make_writers()).drain())


def _watch_calls(writer: Any, step: str, count: Callable[[], None]) -> None:
    write = writer.write_batch
    is_batch = False

    async def write_batch(statements: Any) -> Any:
        nonlocal is_batch
        # A batch begins with the mark and its guard; everything else is a question, or DDL.
        is_batch = len(statements) > 2
        if is_batch and step == "before-the-call":
            count()
        results = await write(statements)
        if is_batch and step == "after-the-call":
            count()
        return results

    writer.write_batch = write_batch
    if step == "before-the-remote-commit":
        connect = writer._transactions._connect

        async def connect_watched() -> Any:
            session = await connect()
            commit = session.commit

            async def commit_watched(number: int) -> None:
                if is_batch:
                    count()
                await commit(number)

            session.commit = commit_watched
            return session

        writer._transactions._connect = connect_watched
