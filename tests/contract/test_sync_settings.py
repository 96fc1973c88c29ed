"""The settings of a sync service are in effect: each app's, each target's and each table's own."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pillarbox import relay as relays
from pillarbox.errors import ConfigError
from pillarbox.retry import Exponential
from pillarbox.sync import dead
from pillarbox.sync import service as services
from pillarbox.sync.config import AppConfig, SyncConfig, TableConfig, TargetConfig
from pillarbox.sync.queue import SqlQueue
from pillarbox.sync.queues import find_queues
from pillarbox.sync.rewrite import inject_outbox_seq, plan_statement
from pillarbox.sync.service import SyncService
from pillarbox.sync.source import QueueSource
from tests.contract.sqloutbox_files import GAPS
from tests.contract.sync_services import (
    ADD,
    INSERT,
    Faulty,
    Plain,
    Remote,
    drain,
    make_config,
    running,
    table_of,
    until,
)
from tests.servers import ROOT

OPEN = "INSERT INTO accounts (id, balance) VALUES (?, ?)"
STATE = "SELECT head, attempts, dead_at IS NOT NULL FROM pillarbox_sync_state"
DAYS_AGO = "UPDATE outbox_sync_log SET synced_at = datetime('now', ?)"


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(tmp_path / "remote.db")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "queues"


def push(folder: Path, *ids: int, bad: Sequence[int] = ()) -> None:
    """Push orders, some of which the remote table refuses."""
    with SqlQueue(folder) as queue:
        queue.push_many("orders", [(INSERT, [number, None if number in bad else 10]) for number in ids])


def state_of(folder: Path) -> list[tuple[Any, ...]]:
    """Head, attempts and whether it is dead; nothing until the service has been there."""
    try:
        return table_of(folder, STATE)
    except sqlite3.OperationalError:
        return []


def fail(*_: Any) -> None:
    raise ConnectionError("the line is dead")


def sizes(writer: Faulty) -> list[int]:
    """How many orders each call had that had any."""
    found = [sum("INSERT INTO orders" in sql for sql, _ in call) for call in writer.calls]
    return [size for size in found if size]


class Slow(Plain):
    """A plain writer whose INSERTs wait until somebody lets them go."""

    concurrency = 4

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.arrived: list[str] = []
        self.go = asyncio.Event()

    async def write_batch(self, stmts: Sequence[tuple[str, Sequence[Any]]]) -> list[dict[str, Any]]:
        found = [sql for sql, _ in stmts if sql.startswith("INSERT INTO") and "pillarbox" not in sql]
        if found:
            self.arrived += found
            async with asyncio.timeout(20):
                await self.go.wait()
        return await super().write_batch(stmts)


class Ordered(Plain):
    """A writer that stops at the first failure, without undoing what was before it."""

    batches = "ordered"

    async def write_batch(self, stmts: Sequence[tuple[str, Sequence[Any]]]) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = []
        for each in stmts:
            results += await super().write_batch([each])
            if not results[-1]["ok"]:
                break
        return results


# -- two apps ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def blog(tmp_path: Path) -> Remote:
    return Remote(tmp_path / "blog.db")


def two_apps(tmp_path: Path, shop: dict[str, Any], blog: dict[str, Any]) -> SyncConfig:
    """Apps shop and blog with a folder and a target each, and the table orders in both."""
    targets = [TargetConfig("main", ["orders"])]
    return SyncConfig(
        [
            AppConfig(name="shop", db_dir=tmp_path / "shop", targets=targets, **shop),
            AppConfig(name="blog", db_dir=tmp_path / "blog", targets=targets, **blog),
        ]
    )


async def test_apps_with_a_table_of_the_same_name_are_told_apart(tmp_path: Path, remote: Remote, blog: Remote) -> None:
    push(tmp_path / "shop", 1, 2, 3)
    push(tmp_path / "blog", 7)
    config = two_apps(tmp_path, {}, {})
    service = SyncService(config, {"shop.main": Faulty(remote.path), "blog.main": Faulty(blog.path)})
    async with service:
        assert await service.pending_count() == {"shop.main/orders": 3, "blog.main/orders": 1}
        assert await service.total_pending() == 4
    assert await service.drain() == {"shop.main/orders": 0, "blog.main/orders": 0}
    assert (remote.ids, blog.ids) == ([1, 2, 3], [7])


async def test_each_app_has_its_own_threshold_and_batch_size(tmp_path: Path, remote: Remote, blog: Remote) -> None:
    patient = {"table_max_wait": 3600, "flush_interval": 3600}
    config = two_apps(
        tmp_path,
        {"table_flush_threshold": 3, "batch_size": 2, **patient},
        {"table_flush_threshold": 9, "batch_size": 4, **patient},
    )
    writers = {"shop.main": Faulty(remote.path), "blog.main": Faulty(blog.path)}
    async with running(SyncService(config, writers)):
        push(tmp_path / "blog", *range(1, 9))
        await until(lambda: any("MAX(outbox_seq)" in str(call) for call in writers["blog.main"].calls))
        push(tmp_path / "shop", *range(1, 9))
        await until(lambda: remote.ids == list(range(1, 9)))
        assert blog.ids == []
        push(tmp_path / "blog", *range(9, 17))
        await until(lambda: blog.ids == list(range(1, 17)))
    assert max(sizes(writers["shop.main"])) == 2
    assert max(sizes(writers["blog.main"])) == 4


async def test_each_app_has_its_own_attempts_and_its_own_way_with_the_dead(
    tmp_path: Path, remote: Remote, blog: Remote
) -> None:
    push(tmp_path / "shop", 1, 2, 3, bad=[2])
    push(tmp_path / "blog", 1, 2, 3, bad=[2])
    config = two_apps(
        tmp_path, {"max_attempts": 1, "dead": "skip"}, {"max_attempts": 2, "dead": "park", "backoff_seconds": 0.01}
    )
    writers = {"shop.main": Faulty(remote.path), "blog.main": Faulty(blog.path)}
    async with running(SyncService(config, writers)):
        await until(lambda: remote.ids == [1, 3])
        await until(lambda: state_of(tmp_path / "blog") == [(2, 2, 1)])
    assert blog.ids == [1]
    assert table_of(tmp_path / "shop", "SELECT seq, attempts FROM outbox_dead_log") == [(2, 1)]
    assert table_of(tmp_path / "blog", "SELECT seq FROM outbox_dead_log") == []


@pytest.mark.parametrize("name", ["shop", "blog"])
async def test_service_with_two_apps_has_both_folders(tmp_path: Path, remote: Remote, blog: Remote, name: str) -> None:
    config = two_apps(tmp_path, {}, {})
    async with running(SyncService(config, {"shop.main": Faulty(remote.path), "blog.main": Faulty(blog.path)})):
        await until(lambda: all((tmp_path / each / "orders.db").exists() for each in ("shop", "blog")))
        with pytest.raises(ConfigError, match=rf"{name}/\.sqloutbox\.lock: a service works on this folder already"):
            await drain(make_config(tmp_path / name), Faulty(remote.path))
    await drain(make_config(tmp_path / name), Faulty(remote.path))


async def test_service_that_gets_one_of_its_folders_only_gives_it_back(
    tmp_path: Path, remote: Remote, blog: Remote
) -> None:
    both = SyncService(two_apps(tmp_path, {}, {}), {"shop.main": Faulty(remote.path), "blog.main": Faulty(blog.path)})
    async with SyncService(make_config(tmp_path / "shop"), {"shop.main": Faulty(remote.path)}):
        with pytest.raises(ConfigError, match="a service works on this folder already"):
            await both.open()
        assert await drain(make_config(tmp_path / "blog"), Faulty(blog.path)) == {"shop.main/orders": 0}


async def test_apps_may_share_a_folder_if_their_tables_differ(folder: Path, remote: Remote, blog: Remote) -> None:
    config = SyncConfig(
        [
            AppConfig(name="shop", db_dir=folder, targets=[TargetConfig("main", ["orders"])]),
            AppConfig(name="blog", db_dir=folder, targets=[TargetConfig("main", ["accounts"])]),
        ]
    )
    push(folder, 1)
    with SqlQueue(folder) as queue:
        queue.push("accounts", OPEN, [7, 0])
    service = SyncService(config, {"shop.main": Faulty(remote.path), "blog.main": Faulty(blog.path)})
    assert await service.drain() == {"shop.main/orders": 0, "blog.main/accounts": 0}
    assert (remote.ids, remote.run("SELECT id FROM accounts")) == ([1], [])
    assert (blog.ids, blog.run("SELECT id FROM accounts")) == ([], [(7,)])


# -- at the same time --------------------------------------------------------------------------------------------------


async def test_two_tables_of_a_target_are_under_way_at_once(folder: Path, remote: Remote) -> None:
    push(folder, 1)
    with SqlQueue(folder) as queue:
        queue.push("accounts", OPEN, [7, 0])
    writer: Any = Slow(remote.path)
    config = make_config(folder, "orders", "accounts", inject=False, table_max_wait=0)
    async with running(SyncService(config, {"shop.main": writer})):
        await until(lambda: len(writer.arrived) == 2)
        assert sorted(writer.arrived) == sorted([INSERT, OPEN])
        writer.go.set()
        await until(lambda: remote.ids == [1] and remote.run("SELECT id FROM accounts") == [(7,)])


async def test_two_targets_are_under_way_at_once(folder: Path, remote: Remote, blog: Remote) -> None:
    push(folder, 1)
    one: Any = Slow(remote.path)
    two: Any = Slow(blog.path)
    # Each waits for the other one.
    one.go = two.go = asyncio.Event()
    targets = [TargetConfig("one", ["orders"]), TargetConfig("two", ["orders"])]
    config = SyncConfig.single(folder, targets, name="shop", table_max_wait=0)
    async with running(SyncService(config, {"shop.one": one, "shop.two": two})):
        await until(lambda: one.arrived and two.arrived)
        one.go.set()
        await until(lambda: remote.ids == blog.ids == [1])


# -- when a target is down ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "most"), [("INSERT INTO", 3), ("", 10)], ids=["while-sending", "before-the-first-statement"]
)
async def test_writer_that_raises_is_tried_a_few_times_a_second(
    folder: Path, remote: Remote, part: str, most: int
) -> None:
    push(folder, 1)
    writer, tries = Faulty(remote.path), list[float]()

    def refuse(statements: Sequence[Any]) -> None:
        if not part or any(sql.startswith(f"{part} orders") for sql, _ in statements):
            tries.append(time.monotonic())
            fail()

    writer.before = refuse
    config = make_config(folder, table_max_wait=0, flush_interval=0.01, backoff_seconds=0.01)
    async with running(SyncService(config, {"shop.main": writer})):
        await until(lambda: len(tries) > 1 and time.monotonic() > tries[0] + 1)
    assert sum(each <= tries[0] + 1 for each in tries) <= most


async def test_tables_that_lost_their_target_together_come_back_one_by_one(folder: Path, remote: Remote) -> None:
    tables = [f"t{number}" for number in range(8)]
    with SqlQueue(folder) as queue:
        for table in tables:
            remote.run(f"CREATE TABLE {table} (id INTEGER)")
            queue.push(table, f"INSERT INTO {table} (id) VALUES (?)", [1])
    writer = Faulty(remote.path)
    tries: dict[str, list[float]] = {table: [] for table in tables}

    def refuse(statements: Sequence[Any]) -> None:
        for sql, _ in statements:
            if sql.startswith("INSERT INTO t"):
                tries[sql.split()[2]].append(time.monotonic())
                fail()

    writer.before = refuse
    config = make_config(folder, *tables, table_max_wait=0)
    async with running(SyncService(config, {"shop.main": writer})):
        await until(lambda: all(len(each) > 1 for each in tries.values()))
    pauses = [times[1] - times[0] for times in tries.values()]
    assert min(pauses) >= 0.5
    assert max(pauses) - min(pauses) > 0.05, "eight pauses that are drawn from half a second"


# -- what is waited for after a failure --------------------------------------------------------------------------------


async def test_pauses_double_from_the_first_to_the_cap(
    folder: Path, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "Exponential", partial(Exponential, random=lambda: 1.0))
    push(folder, 1, bad=[1])
    config = make_config(folder, backoff_seconds=50, backoff_cap_minutes=3, max_attempts=None)
    pauses = []
    for _ in range(5):
        await drain(config, Faulty(remote.path))
        ((tried, due),) = table_of(folder, "SELECT tried_at, due_at FROM pillarbox_sync_state")
        pauses.append((datetime.fromisoformat(due) - datetime.fromisoformat(tried)).total_seconds())
        table_of(folder, "UPDATE pillarbox_sync_state SET due_at = ?", datetime.now(UTC).isoformat())
    assert pauses == [50, 100, 180, 180, 180]


async def test_pause_after_a_failure_is_drawn_up_to_its_bound(folder: Path, remote: Remote) -> None:
    push(folder, 1, bad=[1])
    pauses = set()
    for _ in range(6):
        await drain(make_config(folder, backoff_seconds=1000), Faulty(remote.path))
        ((tried, due),) = table_of(folder, "SELECT tried_at, due_at FROM pillarbox_sync_state")
        pauses.add(datetime.fromisoformat(due) - datetime.fromisoformat(tried))
        table_of(folder, "UPDATE pillarbox_sync_state SET due_at = NULL, attempts = 0")
    assert len(pauses) == 6
    assert timedelta(0) <= min(pauses) <= max(pauses) <= timedelta(seconds=1000)


async def test_attempts_are_counted_on_across_restarts_until_the_row_is_dead(folder: Path, remote: Remote) -> None:
    push(folder, 1, 2, bad=[1])
    config = make_config(folder, max_attempts=3, backoff_seconds=86400)
    for expected in [(1, 1, 0), (1, 2, 0), (1, 3, 1), (1, 3, 1)]:
        assert await drain(config, Faulty(remote.path)) == {"shop.main/orders": 2}
        assert table_of(folder, STATE) == [expected]
        table_of(folder, "UPDATE pillarbox_sync_state SET due_at = NULL")
    assert remote.ids == []


# -- pruning -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pruned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the queues that were looked after, once each time; it happens often."""
    monkeypatch.setattr(relays, "HOUSEKEEPING", timedelta(milliseconds=10))
    names: list[str] = []
    prune = QueueSource.prune

    async def note(self: QueueSource, **given: Any) -> Any:
        done = await prune(self, **given)
        names.append(self.name)
        return done

    monkeypatch.setattr(QueueSource, "prune", note)
    return names


@pytest.mark.parametrize(("cleanup_every", "left"), [(1, 0), (1_000_000, 2)], ids=["often", "seldom"])
async def test_audit_log_is_pruned_every_so_many_intervals(
    folder: Path, remote: Remote, pruned: list[str], cleanup_every: int, left: int
) -> None:
    push(folder, 1, 2)
    config = make_config(folder, cleanup_every=cleanup_every, flush_interval=0.02, retain_log_days=1)
    await drain(config, Faulty(remote.path))
    async with running(SyncService(config, {"shop.main": Faulty(remote.path)})):
        await until(lambda: pruned)
        table_of(folder, DAYS_AGO, "-2 days")
        seen = len(pruned)
        await until(lambda: len(pruned) > seen + 10)
        assert table_of(folder, "SELECT count(*) FROM outbox_sync_log") == [(left,)]


async def test_audit_log_is_kept_as_the_table_says_else_the_target_else_the_app(
    folder: Path, remote: Remote, blog: Remote, pruned: list[str]
) -> None:
    remote.run("CREATE TABLE notes (id INTEGER)")
    with SqlQueue(folder) as queue:
        queue.push("orders", INSERT, [1, 10])
        queue.push("notes", "INSERT INTO notes (id) VALUES (?)", [1])
        queue.push("accounts", OPEN, [1, 0])
    targets = [
        TargetConfig("main", [TableConfig("orders", retain_log_days=2), "notes"], retain_log_days=5),
        TargetConfig("blog", ["accounts"]),
    ]
    config = SyncConfig.single(folder, targets, name="shop", retain_log_days=9)
    writers = {"shop.main": Faulty(remote.path), "shop.blog": Faulty(blog.path)}
    await SyncService(config, writers).drain()
    kept, tables = {}, ("orders", "notes", "accounts")
    for days in (1, 3, 6, 10):
        for table in tables:
            table_of(folder, DAYS_AGO, f"-{days} days", table=table)
        pruned.clear()
        async with running(SyncService(config, writers)):
            await until(lambda: len(set(pruned)) == 3)
        counts = [table_of(folder, "SELECT count(*) FROM outbox_sync_log", table=table) for table in tables]
        kept[days] = [count for ((count,),) in counts]
    assert kept == {1: [1, 1, 1], 3: [0, 1, 1], 6: [0, 0, 1], 10: [0, 0, 0]}


# -- what a target has of its own --------------------------------------------------------------------------------------


async def test_target_overrides_what_the_app_says_of_attempts_and_the_dead(
    folder: Path, remote: Remote, blog: Remote
) -> None:
    push(folder, 1, 2, 3, bad=[2])
    targets = [TargetConfig("one", ["orders"], max_attempts=1, dead="skip"), TargetConfig("two", ["orders"])]
    config = SyncConfig.single(folder, targets, name="shop", max_attempts=2, backoff_seconds=0.01, table_max_wait=0)
    async with running(SyncService(config, {"shop.one": Faulty(remote.path), "shop.two": Faulty(blog.path)})):
        await until(lambda: remote.ids == [1, 3])
        await until(lambda: state_of(folder / "targets" / "shop.two") == [(2, 2, 1)])
    assert blog.ids == [1]
    assert table_of(folder / "targets" / "shop.one", "SELECT seq, attempts FROM outbox_dead_log") == [(2, 1)]


async def test_target_without_a_limit_never_gives_a_row_up(folder: Path, remote: Remote) -> None:
    push(folder, 1, bad=[1])
    target = TargetConfig("main", ["orders"], max_attempts=False)
    config = SyncConfig.single(
        folder, [target], name="shop", max_attempts=1, backoff_seconds=0.001, backoff_cap_minutes=0.001
    )
    async with running(SyncService(config, {"shop.main": Faulty(remote.path)})):
        await until(lambda: any(attempts > 4 for _, attempts, _ in state_of(folder)))
    ((_, _, is_dead),) = state_of(folder)
    assert not is_dead


@pytest.mark.parametrize(
    ("of_app", "of_target", "most"),
    [
        ({"batch_size": 8}, {}, 8),
        ({"batch_size": 8}, {"batch_size": 3}, 3),
        ({"batch_size": 8, "max_batch_bytes": 55 * 4}, {}, 4),
        ({"batch_size": 8}, {"max_batch_bytes": 55 * 5}, 5),
        ({"batch_size": 8, "max_batch_bytes": 1}, {"max_batch_bytes": False}, 8),
    ],
)
async def test_target_overrides_the_size_of_a_batch_in_rows_and_in_bytes(
    folder: Path, remote: Remote, of_app: dict[str, Any], of_target: dict[str, Any], most: int
) -> None:
    push(folder, *range(10, 40))
    target = TargetConfig("main", ["orders"], **of_target)
    writer = Faulty(remote.path)
    await drain(SyncConfig.single(folder, [target], name="shop", **of_app), writer)
    assert max(sizes(writer)) == most


# -- what fails --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Faulty, Plain])
async def test_unique_violation_without_a_number_is_no_repeat(
    folder: Path, remote: Remote, kind: Callable[[Path], Any]
) -> None:
    remote.run("INSERT INTO orders VALUES (2, 99)")
    push(folder, 1, 2, 3)
    config = make_config(folder, inject=False, max_attempts=1)
    assert await drain(config, kind(remote.path)) == {"shop.main/orders": 2}
    assert remote.run("SELECT id, total FROM orders ORDER BY id") == [(1, 10), (2, 99)]
    ((head, error),) = table_of(folder, "SELECT head, error FROM pillarbox_sync_state WHERE dead_at IS NOT NULL")
    assert (head, "UNIQUE constraint failed: orders.id" in error) == (2, True)


@pytest.mark.parametrize("kind", [Faulty, Ordered, Plain])
@pytest.mark.parametrize("is_lost_after", [False, True], ids=["before-it-arrived", "the-answer"])
async def test_bad_row_and_a_lost_connection_in_one_batch_leave_a_table_that_mends_itself(
    folder: Path, remote: Remote, kind: Callable[[Path], Any], is_lost_after: bool
) -> None:
    push(folder, *range(1, 21), bad=[12])
    writer: Any = kind(remote.path)
    write, lost = writer.write_batch, iter([True])

    async def lose(statements: Sequence[Any]) -> Any:
        hits = "INSERT INTO orders" in str(statements) and any(12 in args or 10 in args[:1] for _, args in statements)
        is_lost = hits and next(lost, False)
        if is_lost and not is_lost_after:
            fail()
        results = await write(statements)
        if is_lost:
            fail()
        return results

    writer.write_batch = lose
    config = make_config(folder, table_max_wait=0, backoff_seconds=0.05, backoff_cap_minutes=0.001, max_attempts=None)
    service = SyncService(config, {"shop.main": writer})
    async with running(service):
        await until(lambda: remote.ids == list(range(1, 12)))
        await until(lambda: [head for head, _, _ in state_of(folder)] == [12])
        assert table_of(folder, GAPS) == []
        assert [result.problems for result in await service.verify()] == [()]
        remote.run("CREATE TABLE mended (id INTEGER PRIMARY KEY, total INTEGER, outbox_seq INTEGER DEFAULT 0)")
        remote.run("INSERT INTO mended SELECT id, total, outbox_seq FROM orders")
        remote.run("DROP TABLE orders")
        remote.run("ALTER TABLE mended RENAME TO orders")
        remote.run("CREATE UNIQUE INDEX idx_orders_outbox_seq ON orders (outbox_seq) WHERE outbox_seq <> 0")
        await until(lambda: remote.ids == list(range(1, 21)))
        await until(lambda: not table_of(folder, "SELECT 1 FROM outbox_queue"))
    assert next(lost, None) is None
    assert table_of(folder, "SELECT count(*), min(seq), max(seq) FROM outbox_sync_log") == [(20, 1, 20)]
    assert table_of(folder, "SELECT count(*) FROM outbox_dead_log") == [(0,)]


async def test_answer_lost_by_a_writer_that_is_not_transactional_repeats_no_numbered_insert(
    folder: Path, remote: Remote
) -> None:
    remote.run("CREATE TABLE lines (n INTEGER)")
    with SqlQueue(folder) as queue:
        queue.push_many("lines", [("INSERT INTO lines (n) VALUES (?)", [n]) for n in range(1, 21)])
    writer: Any = Ordered(remote.path)
    write, lost = writer.write_batch, iter([True])

    async def lose(stmts: Any) -> Any:
        results = await write(stmts)
        if len(stmts) == 8 and next(lost, False):
            fail()
        return results

    writer.write_batch = lose
    async with running(SyncService(make_config(folder, "lines", table_max_wait=0), {"shop.main": writer})):
        await until(lambda: not table_of(folder, "SELECT 1 FROM outbox_queue", table="lines"))
    assert next(lost, None) is None
    assert remote.run("SELECT n FROM lines ORDER BY rowid") == [(n,) for n in range(1, 21)]


# -- who wakes it, who looks on ----------------------------------------------------------------------------------------


async def test_push_of_another_process_wakes_the_service(folder: Path, remote: Remote) -> None:
    program = (
        "import sys; from pillarbox.sync.queue import SqlQueue; "
        "SqlQueue(sys.argv[1]).push('orders', sys.argv[2], [2, 20])"
    )
    config = make_config(folder, table_flush_threshold=1, table_max_wait=3600, flush_interval=3600)
    async with running(SyncService(config, {"shop.main": Faulty(remote.path)})):
        push(folder, 1)
        await until(lambda: remote.ids == [1] and not table_of(folder, "SELECT 1 FROM outbox_queue"))
        command = [sys.executable, "-c", program, str(folder), INSERT]
        await asyncio.to_thread(subprocess.run, command, cwd=ROOT, check=True)
        await until(lambda: remote.ids == [1, 2])


async def test_service_verifies_its_queues_with_a_backlog_while_it_sends_and_afterwards(
    folder: Path, remote: Remote
) -> None:
    push(folder, *range(1, 31))
    writer: Any = Slow(remote.path)
    service = SyncService(make_config(folder, "orders", "accounts", table_max_wait=0), {"shop.main": writer})

    async def look() -> list[tuple[Any, ...]]:
        return [
            (f"{result.target}/{result.table}", result.is_ok, result.waiting, result.logged)
            for result in await service.verify()
        ]

    expected = [("shop.main/orders", True, 30, 0), ("shop.main/accounts", True, 0, 0)]
    assert await look() == expected
    assert not (folder / "accounts.db").exists()
    async with running(service):
        await until(lambda: writer.arrived)
        assert await look() == expected
        writer.go.set()
        await until(lambda: not table_of(folder, "SELECT 1 FROM outbox_queue"))
        assert await look() == [("shop.main/orders", True, 0, 30), ("shop.main/accounts", True, 0, 0)]
    push(folder, 31, 32, 33)
    table_of(folder, "DELETE FROM outbox_queue WHERE seq = 32")
    (orders, accounts) = await service.verify()
    assert (orders.is_ok, [(gap.seq, gap.missing) for gap in orders.gaps], accounts.is_ok) == (False, [(33, 32)], True)


# -- skipping what is under way ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_bad", [False, True], ids=["delivered", "refused"])
async def test_row_that_is_skipped_while_it_is_sent_is_dead_only_if_it_was_refused(
    folder: Path, remote: Remote, is_bad: bool
) -> None:
    push(folder, 1, 2, bad=[1] if is_bad else [])
    config = make_config(folder, table_max_wait=0)
    (ref,) = find_queues(config)
    writer: Any = Slow(remote.path)
    async with running(SyncService(config, {"shop.main": writer})):
        await until(lambda: writer.arrived)
        assert dead.skip(ref).seq == 1
        assert [row.seq for row in dead.list_dead(ref)] == [1]
        writer.go.set()
        await until(lambda: not table_of(folder, "SELECT 1 FROM outbox_queue"))
    assert remote.ids == ([2] if is_bad else [1, 2])
    assert [(row.seq, row.reason) for row in dead.list_dead(ref)] == ([(1, "manual_skip")] if is_bad else [])
    assert table_of(folder, "SELECT seq FROM outbox_sync_log ORDER BY seq") == [(1,), (2,)]


async def test_row_in_the_middle_that_is_skipped_while_it_is_sent_is_no_dead_row(folder: Path, remote: Remote) -> None:
    push(folder, *range(1, 8))
    config, skipped = make_config(folder), list[int]()
    (ref,) = find_queues(config)
    writer = Faulty(remote.path)

    def skip_one(statements: Sequence[Any]) -> None:
        orders = [args[0] for sql, args in statements if sql.startswith("INSERT INTO orders")]
        if len(orders) == 4 and not skipped:
            # The queue's thread waits for the answer, so the file is free.
            skipped.append(dead.skip(ref, orders[1]).seq)

    writer.before = skip_one
    assert await drain(config, writer) == {"shop.main/orders": 0}
    assert skipped == [5]
    assert remote.ids == list(range(1, 8))
    assert dead.list_dead(ref) == []
    assert table_of(folder, "SELECT count(*) FROM outbox_sync_log") == [(7,)]


# -- what is given stays as it is --------------------------------------------------------------------------------------


def test_rewriting_a_statement_leaves_what_it_was_given() -> None:
    args, columns = [1, 10], ["id", "total"]
    for sql, expected in [(INSERT, [1, 10, 7]), (ADD, [1, 7, 10])]:
        assert inject_outbox_seq(sql, args, 7)[1] == expected
        assert args == [1, 10]
    plan = plan_statement("INSERT INTO orders VALUES (?, ?)", dialect="sqlite", inject=True, columns=columns)
    assert [plan.bind(args, seq) for seq in (7, 8)] == [[1, 10, 7], [1, 10, 8]]
    assert (args, columns) == ([1, 10], ["id", "total"])
    bound = plan_statement(ADD, dialect="sqlite", inject=True).bind(args, 7)
    assert (bound == args, bound is args) == (True, False)
