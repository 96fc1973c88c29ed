"""What the tests with real processes share: a database of their own, writers, the relay as a command, a judge.

A delivery can be stopped in its middle without any luck: the file sink writes under a lock on its file, so whoever
takes that lock makes every relay wait between claim and settlement.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import random
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson
import pytest
import sqlalchemy as sa

from pillarbox import Event, Outbox
from pillarbox.stores.checking import Fault
from tests.acceptance.launcher import Launcher
from tests.servers import ServerName, server_url

DATABASES = ("sqlite", "postgres", "mariadb", "mysql")
LEASED = 1
SLACK = 100.0
"""How long anything may take on a machine that has much else to do."""


def until(condition: Callable[[], Any], what: str = "what the test waits for", seconds: float = SLACK) -> Any:
    """Ask again until the answer is true, and return it."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {seconds:.0f} s in vain: {what}")
        time.sleep(0.01)
    return answer


# -- the database ------------------------------------------------------------------------------------------


class Database:
    """An outbox, and a table whose rows count the events of each key, in a database that nobody else uses.

    `url` is where relays connect; writers and the test itself go to the server directly.
    """

    def __init__(self, url: sa.URL, *, relay_url: sa.URL | None = None) -> None:
        drivers = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "sqlite": "sqlite+pysqlite"}
        self.backend = url.get_backend_name()
        self.url = (relay_url or url).render_as_string(hide_password=False)
        # No pool: what is connected when a test has ended is somebody's leak.
        self.engine = sa.create_engine(url.set(drivername=drivers[self.backend]), poolclass=sa.NullPool)
        if self.backend == "sqlite":
            _begin_immediately(self.engine)
        metadata = sa.MetaData()
        self.outbox = Outbox(metadata)
        self.counters = sa.Table(
            "counters",
            metadata,
            sa.Column("name", sa.String(50), primary_key=True),
            sa.Column("number", sa.Integer, nullable=False),
        )
        metadata.create_all(self.engine)

    def put(self, *events: Event) -> None:
        with self.engine.begin() as db:
            self.outbox.put(db, *events)

    def _look(self) -> sa.Connection:
        return self.engine.connect().execution_options(only_reads=True)

    def rows(self, *columns: str) -> list[tuple[Any, ...]]:
        """The outbox's rows in order, as far as `columns` are concerned."""
        table = self.outbox.table
        with self._look() as db:
            found = db.execute(sa.select(*(table.c[name] for name in columns)).order_by(table.c.seq))
            return [tuple(row) for row in found]

    def leased(self) -> list[tuple[Any, ...]]:
        """The seq and token of the rows under lease."""
        return [(seq, token) for seq, token, state in self.rows("seq", "token", "state") if state == LEASED]

    def is_empty(self) -> bool:
        return not self.rows("seq")

    def dead(self) -> list[str]:
        """The types of the dead events."""
        table = self.outbox.tables["dead"]
        with self._look() as db:
            return list(db.execute(sa.select(table.c.type).order_by(table.c.seq)).scalars())

    def faults(self) -> list[Fault]:
        """What `pillarbox events check` finds among the rows of any sink; relays may run meanwhile."""
        return asyncio.run(self._find_faults({"", *(sink for (sink,) in self.rows("sink"))}))

    async def _find_faults(self, sinks: Collection[str]) -> list[Fault]:
        found: list[Fault] = []
        for sink in sinks:
            store = self.outbox.store(self.url, sink=sink)
            await store.open()
            found += await store.find_faults()
            await store.close()
        return found

    def connections(self) -> list[int]:
        """The sessions besides this one that are connected to the database."""
        queries = {
            "postgresql": "SELECT pid FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()",
            "mysql": "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()",
        }
        if self.backend not in queries:
            return []
        with self.engine.connect() as db:
            return list(db.exec_driver_sql(queries[self.backend]).scalars())

    def end_connections(self) -> None:
        """End every session but this one."""
        end = "SELECT pg_terminate_backend({})" if self.backend == "postgresql" else "KILL {}"
        numbers = self.connections()
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
            for number in numbers:
                db.exec_driver_sql(end.format(number))

    def can_write(self) -> bool:
        """Whether nobody keeps SQLite's write lock; the servers have no such lock."""
        if self.backend != "sqlite":
            return True
        with closing(sqlite3.connect(self.engine.url.database or "", timeout=0.2, isolation_level=None)) as db:
            try:
                db.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return False
            return True


def _begin_immediately(engine: sa.Engine) -> None:
    @sa.event.listens_for(engine, "connect")
    def prepare(connection: Any, record: Any) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA busy_timeout = 30000")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        only_reads = connection.get_execution_options().get("only_reads", False)
        connection.exec_driver_sql("BEGIN" if only_reads else "BEGIN IMMEDIATE")


@contextmanager
def temporary_database(name: str, folder: Path) -> Iterator[Database]:
    """A database with an empty outbox; `pgbouncer` is PostgreSQL that relays reach through the pooler."""
    if name == "sqlite":
        yield Database(sa.make_url(f"sqlite:///{folder / 'outbox.db'}"))
        return
    servers: dict[str, ServerName] = {"mariadb": "mariadb", "mysql": "mysql"}
    server = sa.make_url(server_url(servers.get(name, "postgres")))
    pooler = sa.make_url(server_url("pgbouncer")) if name == "pgbouncer" else None
    chosen = f"acceptance_{uuid4().hex[:12]}"
    driver = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}[server.get_backend_name()]
    engine = sa.create_engine(server.set(drivername=driver), poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as db:
        db.exec_driver_sql(f"CREATE DATABASE {chosen}")
    try:
        yield Database(server.set(database=chosen), relay_url=None if pooler is None else pooler.set(database=chosen))
    finally:
        with engine.connect() as db:
            force = " WITH (FORCE)" if driver.startswith("postgresql") else ""
            db.exec_driver_sql(f"DROP DATABASE {chosen}{force}")


# -- writers -----------------------------------------------------------------------------------------------


class Writers:
    """Threads that put events of the same keys until they are told to stop; every fifth event is rolled back.

    Each counts its key's row up first, as an application locks its aggregate, and puts the number it got: so the
    numbers of a key are in the order of its commits. Some events have no key. They rest while more than `ahead`
    of their events are not in the relays' file yet.
    """

    def __init__(self, database: Database, file: Path, *, threads: int = 3, keys: int = 40, ahead: int = 600) -> None:
        self.committed: dict[str, tuple[str | None, int]] = {}
        self.rolled_back: set[str] = set()
        self.database = database
        self._file = file
        self._keys = keys
        self._ahead = ahead
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"writer-{number}") for number in range(threads)
        ]
        names = [{"name": f"key-{number}", "number": 0} for number in range(keys)]
        with database.engine.begin() as db:
            db.execute(sa.insert(database.counters), names)

    def __enter__(self) -> Writers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._errors and error[0] is None:
            raise self._errors[0]

    def _run(self, seed: int) -> None:
        try:
            self._write(random.Random(seed))
        except BaseException as error:
            self._errors.append(error)

    def _write(self, chance: random.Random) -> None:
        with self.database.engine.connect() as db:
            for turn in itertools.count():
                while turn % 20 == 0 and len(self.committed) - count_delivered(self._file) > self._ahead:
                    if self._stop.wait(0.01):
                        return
                if self._stop.wait(0.001):
                    return
                key = None if turn % 10 == 0 else f"key-{chance.randrange(self._keys)}"
                self._write_one(db, key, chance.random() < 0.2)

    def _write_one(self, db: sa.Connection, key: str | None, is_undone: bool) -> None:
        event = None
        try:
            number = 0 if key is None else self._count_up(db, key)
            event = Event("stepped", {"number": number}, key=key)
            self.database.outbox.put(db, event)
            if is_undone:
                db.rollback()
            else:
                db.commit()
                self.committed[str(event.id)] = (key, number)
                return
        except sa.exc.OperationalError:
            db.rollback()  # the loser of a deadlock
        if event is not None:
            self.rolled_back.add(str(event.id))

    def _count_up(self, db: sa.Connection, key: str) -> int:
        counters = self.database.counters
        mine = counters.c.name == key
        db.execute(sa.update(counters).where(mine).values(number=counters.c.number + 1))
        return int(db.execute(sa.select(counters.c.number).where(mine)).scalar_one())


# -- what was delivered ------------------------------------------------------------------------------------


def read_lines(*files: Path) -> list[dict[str, Any]]:
    """The delivered events in the order of the files; a torn line is skipped, as every reader must."""
    lines = []
    for path in files:
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with suppress(orjson.JSONDecodeError):
                lines.append(orjson.loads(line))
    return lines


def judge(lines: Sequence[dict[str, Any]], writers: Writers) -> None:
    """Fail unless every committed event was delivered and no other, first deliveries are in order, and the table is."""
    first = dict.fromkeys(line["id"] for line in lines)
    lost = writers.committed.keys() - first.keys()
    assert not lost, f"{len(lost)} of {len(writers.committed)} committed events were never delivered"
    undone = writers.rolled_back & first.keys()
    assert not undone, f"{len(undone)} events were delivered although they were rolled back"
    assert first.keys() <= writers.committed.keys(), "something was delivered that nobody put"
    numbers: dict[str, list[int]] = {}
    for event_id in first:
        key, number = writers.committed[event_id]
        if key is not None:
            numbers.setdefault(key, []).append(number)
    wrong = {key: found for key, found in numbers.items() if found != sorted(found)}
    assert not wrong, f"{len(wrong)} keys were delivered out of order, for example {next(iter(wrong.items()))}"
    assert writers.database.faults() == []


def await_progress(path: Path, lines: int = 100) -> None:
    wanted = count_delivered(path) + lines
    until(lambda: count_delivered(path) >= wanted, f"{lines} more deliveries")


def count_delivered(path: Path) -> int:
    """How many lines there are, without reading what they say."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def is_delivered(path: Path, writers: Writers) -> bool:
    if count_delivered(path) < len(writers.committed):
        return False
    return writers.committed.keys() <= {line["id"] for line in read_lines(path)}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep every relay that writes to this file in the middle of its delivery."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# -- the relay as a process --------------------------------------------------------------------------------


class RelayProcess:
    """`pillarbox relay` from a database to a file, with its log."""

    def __init__(self, launcher: Launcher, database: Database, file: Path, *options: str) -> None:
        self.file = file
        self.log_file = file.parent / f"relay-{uuid4().hex[:8]}.log"
        where = ["--store", database.url, "--sink", f"file:{file}?lock_timeout=60s"]
        args = ["relay", *where, *options, "-vv"]
        self.process = launcher.start(*args, cwd=file.parent, out=self.log_file, err=self.log_file)

    @property
    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    def wait_for_log(self, text: str, *, times: int = 1) -> None:
        until(lambda: self.log.count(text) >= times or self._is_gone(), f"{text!r} in the log {self.log_file}")
        assert self.log.count(text) >= times, f"the relay ended: {self.log}"

    def wait_for_start(self) -> None:
        """Wait until the relay is at work; before that a signal just ends it."""
        self.wait_for_log("Relaying: ")

    def wait_for_delivery(self) -> None:
        """Wait until the relay has its file open: it does that in its first delivery."""
        until(lambda: str(self.file) in self.process.open_files, "a delivery")

    def _is_gone(self) -> bool:
        return self.process.poll() is not None

    def freeze(self, database: Database) -> None:
        """SIGSTOP, at a moment when the process keeps no lock that stops every writer."""

        def is_frozen() -> bool:
            self.process.send_signal(signal.SIGSTOP)
            until(lambda: self.process.is_stopped, "the relay to stop")
            if not database.can_write():
                self.thaw()
                return False
            return True

        until(is_frozen, "a moment to stop the relay")

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self, *, within: float = SLACK) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the relay did not end within {within} s of SIGTERM: {self.log}")


StartRelay = Callable[..., RelayProcess]


@contextmanager
def relay_processes(launcher: Launcher, folder: Path) -> Iterator[StartRelay]:
    """Start relays; whatever is still there at the end is ended."""
    started: list[RelayProcess] = []

    def start(database: Database, *options: str, file: Path | None = None) -> RelayProcess:
        relay = RelayProcess(launcher, database, file or folder / "delivered.jsonl", *options)
        started.append(relay)
        return relay

    try:
        yield start
    finally:
        for relay in started:
            relay.kill()


def run_command(launcher: Launcher, folder: Path, *args: str) -> Any:
    """Run a command to its end; returns what its `--json` printed."""
    name = uuid4().hex[:8]
    out, err = folder / f"{name}.out", folder / f"{name}.err"
    code = launcher.run(*args, "--json", cwd=folder, out=out, err=err)
    assert code == 0, err.read_text()
    return orjson.loads(out.read_bytes())
