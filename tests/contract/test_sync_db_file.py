"""The sync service on the application's own database: a statement is sent if the business transaction commits."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pillarbox.errors import SinkUnavailable, StoreUnavailable
from pillarbox.sync.config import SyncConfig, TargetConfig
from pillarbox.sync.queue import SqlQueue
from pillarbox.sync.service import SyncService
from tests.contract.sqloutbox_files import GAPS, read
from tests.contract.sync_services import ADD, INSERT, Faulty, Remote, drain, running, until
from tests.servers import ROOT

VERSION = 77
OPEN = "INSERT INTO accounts (id, balance) VALUES (?, ?)"


class Application:
    """A program with a database of its own, whose changes it also pushes."""

    def __init__(self, path: Path, journal: str) -> None:
        self.path = path
        self.queue = SqlQueue(file=path)
        self.db = sqlite3.connect(path, timeout=30)
        self.db.execute(f"PRAGMA journal_mode = {journal}")
        self.db.execute(f"PRAGMA user_version = {VERSION}")
        with self.db:
            self.db.execute("CREATE TABLE sales (id INTEGER PRIMARY KEY)")
            self.queue.create_in(self.db)

    def sell(self, number: int) -> None:
        """Change business data and push, in a transaction that is left open."""
        self.db.execute("INSERT INTO sales VALUES (?)", (number,))
        self.queue.push_in(self.db, "orders", INSERT, [number, 10])

    @property
    def sales(self) -> list[int]:
        return [number for (number,) in self.ask("SELECT id FROM sales ORDER BY id")]

    def ask(self, sql: str) -> list[Any]:
        with closing(sqlite3.connect(self.path, timeout=30)) as db:
            return db.execute(sql).fetchall()

    def close(self) -> None:
        self.db.close()
        self.queue.close()


@pytest.fixture(params=["delete", "wal"])
def journal(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def application(tmp_path: Path, journal: str) -> Iterator[Application]:
    found = Application(tmp_path / "app.db", journal)
    yield found
    found.close()


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(tmp_path / "remote.db")


def make_config(path: Path, *targets: TargetConfig, **tuning: Any) -> SyncConfig:
    chosen = targets or (TargetConfig("main", ["orders"]),)
    return SyncConfig.single(None, chosen, name="shop", db_file=path, **tuning)


# -- one transaction ---------------------------------------------------------------------------------------------------


async def test_statement_goes_the_way_of_the_business_transaction(application: Application, remote: Remote) -> None:
    application.sell(1)
    application.db.commit()
    application.sell(2)
    application.db.rollback()
    application.sell(3)
    application.db.commit()
    assert await drain(make_config(application.path), Faulty(remote.path)) == {"shop.main/orders": 0}
    assert application.sales == [1, 3]
    assert remote.ids == [1, 3]
    assert application.ask("SELECT count(*) FROM outbox_queue") == [(0,)]


async def test_running_service_sends_nothing_before_the_commit_and_nothing_of_a_rollback(
    application: Application, remote: Remote
) -> None:
    config = make_config(application.path, table_flush_threshold=1, flush_interval=0.05)
    async with running(SyncService(config, {"shop.main": Faulty(remote.path)})) as service:
        application.sell(1)
        application.db.commit()
        await until(lambda: remote.ids == [1] and not application.ask("SELECT 1 FROM outbox_queue"))
        application.sell(2)
        assert await service.pending_count() == {"shop.main/orders": 0}
        application.db.rollback()
        application.sell(3)
        assert await service.pending_count() == {"shop.main/orders": 0}
        application.db.commit()
        await until(lambda: remote.ids == [1, 3] and not application.ask("SELECT 1 FROM outbox_queue"))
    assert application.sales == [1, 3]


async def test_tables_that_were_rolled_back_are_made_by_whoever_comes_next(tmp_path: Path, remote: Remote) -> None:
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as db, SqlQueue(file=path) as queue:
        db.execute("CREATE TABLE sales (id INTEGER PRIMARY KEY)")
        db.execute("BEGIN")
        queue.create_in(db)
        queue.push_in(db, "orders", INSERT, [1, 10])
        db.execute("ROLLBACK")
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("sales",)]
        assert await drain(make_config(path), Faulty(remote.path)) == {"shop.main/orders": 0}
        db.execute("BEGIN")
        queue.push_in(db, "orders", INSERT, [2, 10])
        db.execute("COMMIT")
    assert await drain(make_config(path), Faulty(remote.path)) == {"shop.main/orders": 0}
    assert remote.ids == [2]


async def test_application_writes_while_the_service_drains(application: Application, remote: Remote) -> None:
    config = make_config(application.path, table_flush_threshold=1, batch_size=7)

    def sell_all() -> None:
        with closing(sqlite3.connect(application.path, timeout=30)) as db:
            for number in range(1, 101):
                with db:
                    db.execute("INSERT INTO sales VALUES (?)", (number,))
                    application.queue.push_in(db, "orders", INSERT, [number, 10])

    async with running(SyncService(config, {"shop.main": Faulty(remote.path)})):
        await asyncio.to_thread(sell_all)
        await until(lambda: not application.ask("SELECT 1 FROM outbox_queue"))
    assert remote.ids == application.sales == list(range(1, 101))


# -- the file is the application's -------------------------------------------------------------------------------------


async def test_version_journal_and_tables_of_the_application_stay(
    application: Application, remote: Remote, journal: str
) -> None:
    application.sell(1)
    application.db.commit()
    config = make_config(application.path, table_max_wait=0)
    await drain(config, Faulty(remote.path))
    async with running(SyncService(config, {"shop.main": Faulty(remote.path)})):
        application.sell(2)
        application.db.commit()
        await until(lambda: remote.ids == [1, 2])
    assert application.ask("PRAGMA user_version") == [(VERSION,)]
    assert application.ask("PRAGMA journal_mode") == [(journal,)]
    names = {name for (name,) in application.ask("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert names == {
        *("sales", "outbox_queue", "outbox_sync_log", "outbox_dead_log", "pillarbox_sync_state", "sqlite_sequence")
    }


async def test_push_of_another_process_wakes_the_service(application: Application, remote: Remote) -> None:
    program = (
        "import sqlite3, sys; from pillarbox.sync.queue import SqlQueue; db = sqlite3.connect(sys.argv[1], timeout=30);"
        "SqlQueue(file=sys.argv[1]).push_in(db, 'orders', sys.argv[2], [2, 20]); db.commit(); db.close()"
    )
    config = make_config(application.path, table_flush_threshold=1, table_max_wait=3600, flush_interval=3600)
    async with running(SyncService(config, {"shop.main": Faulty(remote.path)})):
        application.sell(1)
        application.db.commit()
        await until(lambda: remote.ids == [1] and not application.ask("SELECT 1 FROM outbox_queue"))
        command = [sys.executable, "-c", program, str(application.path), INSERT]
        await asyncio.to_thread(subprocess.run, command, cwd=ROOT, check=True)
        await until(lambda: remote.ids == [1, 2])


# -- several tables ----------------------------------------------------------------------------------------------------


async def test_tables_of_one_file_keep_their_own_order_and_progress(application: Application, remote: Remote) -> None:
    queue, db = application.queue, application.db
    for number in (1, 2, 3):
        queue.push_in(db, "orders", INSERT, [number, 10 if number != 2 else None])
        queue.push_many_in(db, "accounts", [(OPEN, [number, 0]), (ADD, [number, number])])
    db.commit()
    config = make_config(application.path, TargetConfig("main", ["orders", "accounts"]), backoff_seconds=86400)
    assert await drain(config, Faulty(remote.path)) == {"shop.main/orders": 2, "shop.main/accounts": 0}
    assert remote.ids == [1]
    assert remote.run("SELECT id, balance FROM accounts ORDER BY id") == [(1, 1), (2, 2), (3, 3)]
    state = "SELECT namespace, head, attempts FROM pillarbox_sync_state ORDER BY namespace"
    assert application.ask(state) == [("accounts", None, 0), ("orders", 4, 1)]
    assert read(application.path, GAPS) == []
    remote.run("DROP TABLE orders")
    remote.run("CREATE TABLE orders (id INTEGER PRIMARY KEY, total INTEGER)")
    with db:
        db.execute("UPDATE pillarbox_sync_state SET due_at = NULL")
    assert await drain(config, Faulty(remote.path)) == {"shop.main/orders": 0, "shop.main/accounts": 0}
    assert remote.ids == [2, 3]


async def test_numbering_one_table_anew_leaves_the_other_tables_of_the_file(
    application: Application, remote: Remote
) -> None:
    remote.run("ALTER TABLE orders ADD COLUMN outbox_seq INTEGER NOT NULL DEFAULT 0")
    remote.run("INSERT INTO orders VALUES (1000, 0, 50)")
    for number in (1, 2, 3):
        application.queue.push_in(application.db, "orders", INSERT, [number, 10])
        application.queue.push_in(application.db, "accounts", OPEN, [number, 0])
    application.db.commit()
    config = make_config(application.path, TargetConfig("main", ["orders", "accounts"]))
    assert await drain(config, Faulty(remote.path)) == {"shop.main/orders": 0, "shop.main/accounts": 0}
    assert remote.run("SELECT id, outbox_seq FROM orders WHERE id < 1000") == [(1, 51), (2, 53), (3, 55)]
    assert remote.run("SELECT id, outbox_seq FROM accounts") == [(1, 2), (2, 4), (3, 6)]


async def test_table_for_two_targets_has_progress_of_its_own_for_each(
    application: Application, tmp_path: Path, journal: str
) -> None:
    one, two = Remote(tmp_path / "one.db"), Remote(tmp_path / "two.db")
    application.sell(1)
    application.queue.push_in(application.db, "accounts", OPEN, [7, 0])
    application.db.commit()
    config = make_config(
        application.path, TargetConfig("one", ["orders", "accounts"]), TargetConfig("two", ["orders"]), max_attempts=1
    )
    down = Faulty(two.path)

    def refuse(statements: Sequence[Any]) -> None:
        raise ConnectionError("the line is dead")

    down.before = refuse
    with pytest.raises((SinkUnavailable, StoreUnavailable), match="the line is dead"):
        await SyncService(config, {"shop.one": Faulty(one.path), "shop.two": down}).drain()
    assert (one.ids, one.run("SELECT id FROM accounts"), two.ids) == ([1], [(7,)], [])
    application.sell(2)
    application.db.rollback()
    application.sell(3)
    application.db.commit()
    service = SyncService(config, {"shop.one": Faulty(one.path), "shop.two": Faulty(two.path)})
    assert set((await service.drain()).values()) == {0}
    assert (one.ids, two.ids) == ([1, 3], [1, 3])
    assert application.ask("PRAGMA user_version") == [(VERSION,)]
    assert application.ask("PRAGMA journal_mode") == [(journal,)]
    assert application.ask("SELECT count(*) FROM outbox_queue") == [(0,)]
    assert [result.problems for result in await service.verify() if not result.is_ok] == []
