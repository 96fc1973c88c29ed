"""The real sqloutbox, both releases, on queue files with our service: at the same time, before it and after it."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pillarbox.errors import ConfigError
from pillarbox.sync.queue import SqlQueue
from pillarbox.sync.queues import find_queues
from pillarbox.sync.service import SyncService
from pillarbox.sync.toml import load_sync_config
from pillarbox.sync.verify import verify_queues
from tests.contract.sqloutbox_files import GAPS, Sqloutbox, queue
from tests.contract.sync_queue_kit import run_python
from tests.contract.sync_services import Faulty, Plain, drain, make_config, running, until
from tests.sqloutbox06 import sqloutbox06

INSERT = "INSERT INTO log (who, n) VALUES (?, ?)"
QUICK = {"table_flush_threshold": 1, "flush_interval": 0.1}

# Pushes as an application does, one by one and in batches; a push that sqloutbox drops ends it.
PUSHER = """
import sys
from pathlib import Path
from sqloutbox import Outbox, OutboxConfig, SQLMiddleware

def told(original):
    def run(*args, **options):
        answer = original(*args, **options)
        if not answer:
            raise SystemExit("sqloutbox has dropped a push")
        return answer
    return run

Outbox.enqueue, Outbox.enqueue_batch = told(Outbox.enqueue), told(Outbox.enqueue_batch)
folder, who, first, last = sys.argv[1], *map(int, sys.argv[2:])

class Shop(SQLMiddleware):
    def __init__(self):
        self._config = OutboxConfig(db_dir=Path(folder))

    def run(self):
        for n in range(first, last, 5):
            for each in (n, n + 1):
                self._push("log", "INSERT INTO log (who, n) VALUES (?, ?)", [who, each])
            batch = [("INSERT INTO log (who, n) VALUES (?, ?)", [who, each]) for each in (n + 2, n + 3, n + 4)]
            self._push_many("log", batch)

Shop().run()
"""

# A writer as people have them, in a module beside the configuration.
WRITERS = """
import os, sqlite3

class FileWriter:
    def __init__(self, path, dies=False):
        self.path = path
        self.dies = dies

    async def write_batch(self, stmts):
        results = []
        for sql, args in stmts:
            db = sqlite3.connect(self.path)
            try:
                with db:
                    cursor = db.execute(sql, args)
                    rows = [list(row) for row in cursor.fetchall()]
                read = cursor.description is not None
                results.append({"ok": True, "rows": rows} if read else {"ok": True, "rows_affected": cursor.rowcount})
            except sqlite3.Error as error:
                results.append({"ok": False, "error": str(error)})
            finally:
                db.close()
        if self.dies and any("INTO log" in sql for sql, _ in stmts):
            os._exit(9)
        return results
"""

CONFIG = """
[app.shop]
db_dir = "queues"
flush_interval = 0.05
table_flush_threshold = 1

[app.shop.db.main]
writer_class = "shop_writers:FileWriter"
tables = ["log"]

[app.shop.db.main.connection]
path = "${SHOP_REMOTE}"
"""


class Remote:
    """A remote file with one table, whose rows are in the order of their arrival."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run("CREATE TABLE log (place INTEGER PRIMARY KEY, who INTEGER NOT NULL, n INTEGER NOT NULL)")

    def run(self, sql: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.path)) as db, db:
            return db.execute(sql).fetchall()

    def numbers(self, who: int) -> list[int]:
        return [n for (n,) in self.run(f"SELECT n FROM log WHERE who = {who} ORDER BY place")]


class Other:
    """One release of sqloutbox as an application and as a service, on a folder of queues."""

    def __init__(self, release: str, home: Path) -> None:
        self.release = release
        self.home = home
        self.folder = home / "queues"
        folders = [] if release == "0.4" else [str(sqloutbox06())]
        self.env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*folders, str(home)]),
            "SHOP_REMOTE": str(home / "remote.db"),
        }
        (home / "shop_writers.py").write_text(WRITERS)
        (home / "outbox.toml").write_text(CONFIG)

    def start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *args],
            cwd=self.home,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def start_pushing(self, who: int, first: int, last: int) -> subprocess.Popen[str]:
        return self.start("-c", PUSHER, str(self.folder), str(who), str(first), str(last))

    def push(self, who: int, first: int, last: int) -> None:
        finish(self.start_pushing(who, first, last))

    def verify(self) -> None:
        finish(self.start("-m", "sqloutbox", "verify", "--db-dir", str(self.folder)))

    @contextmanager
    def serving(self) -> Iterator[subprocess.Popen[str]]:
        """Its own service, told to stop in the end."""
        with self.start("-m", "sqloutbox", "runservice") as service:
            try:
                yield service
            finally:
                service.send_signal(signal.SIGTERM)
                service.communicate(timeout=30)


def finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(tmp_path / "remote.db")


@pytest.fixture(params=["0.4", "0.6"], ids=lambda release: f"sqloutbox-{release}")
def other(request: pytest.FixtureRequest, tmp_path: Path) -> Other:
    return Other(request.param, tmp_path)


def ask(other: Other, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(other.folder / "log.db")) as db:
        return db.execute(sql).fetchall()


def is_drained(other: Other) -> bool:
    return ask(other, "SELECT 1 FROM outbox_queue LIMIT 1") == []


def assert_whole(other: Other) -> None:
    assert is_drained(other)
    assert ask(other, GAPS) == []
    assert [result.problems for result in verify_queues(find_queues(other.folder)) if not result.is_ok] == []


# -- one after the other -----------------------------------------------------------------------------------------------


async def test_sqloutbox_pushes_while_our_service_drains_and_goes_on_after_it(other: Other, remote: Remote) -> None:
    """Three of its processes and one of our threads push; then it pushes and drains alone; then we do again."""
    queue_ = SqlQueue(other.folder)
    queue_.push("log", INSERT, [0, 0])
    config = make_config(other.folder, "log", **QUICK)
    async with running(SyncService(config, {"shop.main": Faulty(remote.path)})):
        pushing = [other.start_pushing(who, 0, 100) for who in (1, 2, 3)]
        for n in range(1, 100):
            await asyncio.to_thread(queue_.push, "log", INSERT, [0, n])
        await asyncio.gather(*(asyncio.to_thread(finish, each) for each in pushing))
        await until(lambda: is_drained(other))
    everything = list(range(100))
    assert [remote.numbers(who) for who in range(4)] == [everything] * 4
    assert_whole(other)
    assert ask(other, "PRAGMA user_version") == [(0 if other.release == "0.4" else 5,)]

    other.push(1, 100, 120)
    other.verify()
    with other.serving():
        await until(lambda: is_drained(other))
    other.verify()
    assert remote.numbers(1) == list(range(120))

    queue_.push("log", INSERT, [0, 100])
    other.push(1, 120, 130)
    assert await drain(config, Faulty(remote.path)) == {"shop.main/log": 0}
    assert [remote.numbers(0), remote.numbers(1)] == [list(range(101)), list(range(130))]
    assert remote.run("SELECT count(*) - count(DISTINCT outbox_seq) FROM log") == [(0,)]
    assert_whole(other)
    other.verify()
    queue_.close()


async def test_configuration_and_writer_of_sqloutbox_run_unchanged(
    other: Other, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_REMOTE", str(remote.path))
    other.push(1, 0, 10)
    with other.serving():
        await until(lambda: is_drained(other))
    other.push(1, 10, 20)
    # The module lies beside the configuration.
    monkeypatch.delitem(sys.modules, "shop_writers", raising=False)
    config = load_sync_config(other.home / "outbox.toml")
    assert await SyncService(config).drain() == {"shop.main/log": 0}
    assert remote.numbers(1) == list(range(20))
    other.push(1, 20, 30)
    with other.serving():
        await until(lambda: is_drained(other))
    assert remote.numbers(1) == list(range(30))
    monkeypatch.delitem(sys.modules, "shop_writers", raising=False)


@pytest.mark.parametrize("kind", [Faulty, Plain])
async def test_rows_that_a_dying_sqloutbox_had_written_are_not_written_again(
    other: Other, remote: Remote, kind: type[Any]
) -> None:
    """Its service dies between the remote database and its own file, which has the rows still."""
    other.push(1, 0, 5)
    with other.serving():
        await until(lambda: is_drained(other))
    other.push(1, 5, 15)
    (other.home / "outbox.toml").write_text(f"{CONFIG}dies = true")
    service = other.start("-m", "sqloutbox", "runservice")
    await asyncio.to_thread(service.communicate, timeout=30)
    assert service.returncode == 9
    assert remote.numbers(1) == list(range(15))
    assert not is_drained(other)
    other.push(1, 15, 25)
    assert await drain(make_config(other.folder, "log"), kind(remote.path)) == {"shop.main/log": 0}
    assert remote.numbers(1) == list(range(25))


async def test_dead_rows_and_attempts_of_sqloutbox_lose_no_row(tmp_path: Path, remote: Remote) -> None:
    other = Other("0.6", tmp_path)
    ref = queue(other.folder / "log.db")
    other.push(1, 0, 10)
    calls = [
        ("record_attempt", 1, "no answer", "TRANSIENT"),
        ("record_attempt", 4, "no such column", "DETERMINISTIC"),
        ("dead_letter", 4, "max_attempts"),
        ("dead_letter", 7, "manual_skip"),
    ]
    assert Sqloutbox("0.6").call(ref, *calls) == [1, 1, True, True]
    config = make_config(other.folder, "log")
    assert await drain(config, Faulty(remote.path)) == {"shop.main/log": 0}
    assert remote.numbers(1) == [0, 1, 2, 4, 5, 7, 8, 9]
    assert ask(other, "SELECT seq, attempts, reason FROM outbox_dead_log ORDER BY seq") == [
        (4, 1, "max_attempts"),
        (7, 0, "manual_skip"),
    ]
    # Both come back at the tail.
    assert Sqloutbox("0.6").call(ref, ("replay", 4), ("replay", 7)) == [11, 12]
    assert await drain(config, Faulty(remote.path)) == {"shop.main/log": 0}
    assert remote.numbers(1) == [0, 1, 2, 4, 5, 7, 8, 9, 3, 6]
    assert ask(other, "SELECT count(*) FROM outbox_dead_log") == [(0,)]


async def test_services_of_both_kinds_exclude_each_other(tmp_path: Path, remote: Remote) -> None:
    other = Other("0.6", tmp_path)
    config = make_config(other.folder, "log")
    service = SyncService(config, {"shop.main": Faulty(remote.path)})
    async with service:
        refused = other.start("-m", "sqloutbox", "runservice")
        output, _ = await asyncio.to_thread(refused.communicate, timeout=30)
        assert refused.returncode == 1, output
        assert "another drain is already running" in output
    other.push(1, 0, 5)
    with other.serving():
        await until(lambda: remote.numbers(1) == list(range(5)))
        with pytest.raises(ConfigError, match="a service works on this folder already"):
            await drain(config, Faulty(remote.path))
    assert await drain(config, Faulty(remote.path)) == {"shop.main/log": 0}


# -- one process -------------------------------------------------------------------------------------------------------


async def test_threads_push_beside_the_service_in_their_own_process(tmp_path: Path, remote: Remote) -> None:
    folder = tmp_path / "queues"
    before = set(threading.enumerate())
    pushed = SqlQueue(folder)
    service = SyncService(make_config(folder, "log", **QUICK), {"shop.main": Faulty(remote.path)})

    def push(who: int) -> None:
        for n in range(0, 150, 3):
            pushed.push("log", INSERT, [who, n])
            pushed.push_many("log", [(INSERT, [who, n + 1]), (INSERT, [who, n + 2])])

    with ThreadPoolExecutor(4) as pool:
        async with running(service):
            loop = asyncio.get_running_loop()
            await asyncio.gather(*(loop.run_in_executor(pool, push, who) for who in range(4)))
            await until(lambda: pushed.waiting("log") == 0)
    assert [remote.numbers(who) for who in range(4)] == [list(range(150))] * 4
    pushed.close()
    started = set(threading.enumerate()) - before
    assert [each for each in started if each.name.startswith("pillarbox")] == []


COUNT = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1])
print(db.execute("SELECT count(*) FROM outbox_queue").fetchone()[0])
db.close()
"""


def test_looking_at_a_queue_in_the_process_that_has_it_open_loses_no_push(tmp_path: Path) -> None:
    """What closes the file here gives up this process's locks; another process would then delete the log it uses."""
    with SqlQueue(tmp_path) as pushed:
        pushed.push("log", INSERT, [1, 0])
        assert all(result.is_ok for result in verify_queues(find_queues(tmp_path)))
        assert run_python(COUNT, tmp_path / "log.db").stdout == "1\n"
        pushed.push("log", INSERT, [1, 1])
        assert run_python(COUNT, tmp_path / "log.db").stdout == "2\n"
