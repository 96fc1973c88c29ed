"""The numbers of a queue: seeding above the remote maximum, the chain, and one queue for several targets."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqloutbox

from pillarbox.errors import SinkUnavailable, StoreUnavailable
from pillarbox.sync.config import SyncConfig, TargetConfig
from pillarbox.sync.queue import SqlQueue
from pillarbox.sync.queues import find_queues
from pillarbox.sync.renumbering import renumber
from pillarbox.sync.service import SyncService
from tests.contract.sqloutbox_files import GAPS
from tests.contract.sync_services import ADD, INSERT, Faulty, Remote, drain, make_config, running, table_of, until

CHAIN = "SELECT seq, prev_seq FROM outbox_queue ORDER BY seq"
SKIP = "INSERT OR IGNORE INTO outbox_sync_log (seq, namespace, synced_at) VALUES (?, 'orders', datetime('now'))"


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(tmp_path / "remote.db")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "queues"


def fill(remote: Remote, highest: int) -> None:
    """Rows that another host delivered once."""
    remote.run("ALTER TABLE orders ADD COLUMN outbox_seq INTEGER NOT NULL DEFAULT 0")
    remote.run("CREATE UNIQUE INDEX idx_orders_outbox_seq ON orders (outbox_seq) WHERE outbox_seq != 0")
    for seq in range(1, highest + 1):
        remote.run("INSERT INTO orders VALUES (?, 0, ?)", 1000 + seq, seq)


# -- seeding -----------------------------------------------------------------------------------------------------------


async def test_rows_of_a_new_host_are_numbered_above_the_remote_maximum(folder: Path, remote: Remote) -> None:
    fill(remote, 50)
    queue = SqlQueue(folder)
    queue.push_many("orders", [(INSERT, [n, 1]) for n in (1, 2, 3)])
    await drain(make_config(folder), Faulty(remote.path))
    assert remote.run("SELECT id, outbox_seq FROM orders WHERE id < 1000") == [(1, 51), (2, 52), (3, 53)]
    assert queue.push("orders", INSERT, [4, 1]) == 54
    queue.push_many("orders", [(INSERT, [n, 1]) for n in (5, 6)])
    assert table_of(folder, CHAIN) == [(54, None), (55, 54), (56, 55)]
    assert await drain(make_config(folder), Faulty(remote.path)) == {"shop.main/orders": 0}


async def test_batch_pushed_while_rows_are_renumbered_does_not_block(folder: Path, remote: Remote) -> None:
    fill(remote, 50)
    queue = SqlQueue(folder)
    queue.push_many("orders", [(INSERT, [n, 1]) for n in (1, 2)])
    writer = Faulty(remote.path)
    pushed: list[int] = []

    def push_too(statements: Sequence[Any]) -> None:
        if "MAX(outbox_seq)" in str(statements) and not pushed:
            pushed.extend(queue.push_many("orders", [(INSERT, [n, 1]) for n in (3, 4)]))

    writer.after = push_too
    assert await drain(make_config(folder), writer) == {"shop.main/orders": 0}
    assert pushed == [3, 4]
    assert remote.run("SELECT id, outbox_seq FROM orders WHERE id < 1000") == [(1, 51), (2, 52), (3, 53), (4, 54)]


async def test_table_waits_while_the_maximum_cannot_be_read_and_pushes_go_on(folder: Path, remote: Remote) -> None:
    fill(remote, 50)
    queue = SqlQueue(folder)
    queue.push("orders", INSERT, [1, 1])
    writer = Faulty(remote.path)

    def refuse(statements: Sequence[Any]) -> None:
        if "MAX(outbox_seq)" in str(statements):
            raise ConnectionError("the line is dead")

    writer.before = refuse
    with pytest.raises(StoreUnavailable, match=r"the highest outbox_seq of orders .*the line is dead"):
        await drain(make_config(folder), writer)
    assert queue.push("orders", INSERT, [2, 1]) == 2
    assert table_of(folder, CHAIN) == [(1, None), (2, 1)]
    async with running(SyncService(make_config(folder, table_max_wait=0), {"shop.main": writer})):
        queue.push("orders", INSERT, [3, 1])
        writer.before = lambda statements: None
        await until(lambda: remote.run("SELECT outbox_seq FROM orders WHERE id < 1000") == [(51,), (52,), (53,)])


async def test_table_without_injection_is_not_seeded(folder: Path, remote: Remote) -> None:
    fill(remote, 50)
    SqlQueue(folder).push("orders", INSERT, [1, 1])
    writer = Faulty(remote.path)
    await drain(make_config(folder, inject=False), writer)
    assert not any("MAX(outbox_seq)" in str(call) for call in writer.calls)
    assert table_of(folder, "SELECT seq FROM outbox_sync_log") == [(1,)]


async def test_row_that_sqloutbox_delivered_without_noting_it_is_not_applied_again(
    folder: Path, remote: Remote
) -> None:
    fill(remote, 2)
    os.mkdir(folder)
    outbox = sqloutbox.Outbox(folder / "orders.db", "orders")
    seqs = outbox.enqueue_batch([(INSERT, f"[{1000 + n}, 0]".encode()) for n in (1, 2, 3)])
    assert seqs == [1, 2, 3]
    outbox.mark_synced([1])
    outbox.delete_synced([1])
    # Number 2 is there, but the service died before it could say so; 3 is new.
    assert await drain(make_config(folder), Faulty(remote.path)) == {"shop.main/orders": 0}
    assert remote.run("SELECT id, outbox_seq FROM orders") == [(1001, 1), (1002, 2), (1003, 3)]


async def test_rows_that_sqloutbox_had_marked_only_are_not_sent(folder: Path, remote: Remote) -> None:
    os.mkdir(folder)
    outbox = sqloutbox.Outbox(folder / "orders.db", "orders")
    outbox.enqueue_batch([(INSERT, f"[{n}, 0]".encode()) for n in (1, 2)])
    outbox.mark_synced([1])
    assert await drain(make_config(folder), Faulty(remote.path)) == {"shop.main/orders": 0}
    assert remote.ids == [2]
    assert table_of(folder, "SELECT seq FROM outbox_sync_log ORDER BY seq") == [(1,), (2,)]


async def test_file_from_a_backup_sends_nothing_until_somebody_decides(folder: Path, remote: Remote) -> None:
    queue = SqlQueue(folder)
    queue.push("orders", INSERT, [1, 1])
    await drain(make_config(folder), Faulty(remote.path))
    with closing(sqlite3.connect(folder / "orders.db")) as db, closing(sqlite3.connect(folder / "saved")) as saved:
        db.backup(saved)
    queue.push_many("orders", [(INSERT, [n, 1]) for n in (2, 3)])
    await drain(make_config(folder), Faulty(remote.path))
    queue.close()
    for name in ("orders.db", "orders.db-wal", "orders.db-shm"):
        (folder / name).unlink(missing_ok=True)
    (folder / "saved").rename(folder / "orders.db")
    SqlQueue(folder).push("orders", INSERT, [4, 1])
    with pytest.raises(StoreUnavailable, match=r"up to number 3, but .*up to 1 only.*renumber"):
        await drain(make_config(folder), Faulty(remote.path))
    assert remote.ids == [1, 2, 3]


async def test_copy_of_a_queue_file_that_is_used_elsewhere_loses_nothing_silently(
    folder: Path, remote: Remote, tmp_path: Path
) -> None:
    queue = SqlQueue(folder)
    queue.push("orders", INSERT, [1, 1])
    await drain(make_config(folder), Faulty(remote.path))
    queue.close()
    twin = tmp_path / "twin"
    shutil.copytree(folder, twin)
    SqlQueue(twin).push_many("orders", [(INSERT, [n, 1]) for n in (11, 12, 13)])
    async with running(SyncService(make_config(twin, table_max_wait=0), {"shop.main": Faulty(remote.path)})):
        await until(lambda: remote.ids == [1, 11, 12, 13])
        SqlQueue(folder).push_many("orders", [(INSERT, [n, 1]) for n in range(21, 31)])
        with pytest.raises(StoreUnavailable, match=r"up to number 4, but this file delivered them up to 1 only"):
            await drain(make_config(folder), Faulty(remote.path))
    (ref,) = find_queues(make_config(folder))
    assert renumber(ref) == 10
    assert await drain(make_config(folder), Faulty(remote.path)) == {"shop.main/orders": 0}
    assert remote.ids == [1, 11, 12, 13, *range(21, 31)]
    assert remote.run("SELECT min(outbox_seq), max(outbox_seq) FROM orders WHERE id > 20") == [(12, 21)]


async def test_copy_that_moves_the_mark_under_a_running_service_stops_it(
    folder: Path, remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    queue = SqlQueue(folder)
    queue.push("orders", INSERT, [1, 1])
    await drain(make_config(folder), Faulty(remote.path))
    queue.close()
    async with running(SyncService(make_config(folder, table_max_wait=0), {"shop.main": Faulty(remote.path)})):
        SqlQueue(folder).push("orders", INSERT, [2, 1])
        await until(lambda: remote.ids == [1, 2])
        remote.run("UPDATE pillarbox_sync_marks SET applied = 9, token = 'somebody.1'")
        SqlQueue(folder).push("orders", INSERT, [3, 1])
        await until(lambda: "it is a copy, or comes from a backup" in caplog.text)
    assert remote.ids == [1, 2]
    assert table_of(folder, "SELECT count(*) FROM outbox_queue") == [(1,)]


async def test_number_that_another_queue_has_used_is_passed_over(folder: Path, remote: Remote, tmp_path: Path) -> None:
    SqlQueue(folder).push("orders", INSERT, [1, 1])
    other = tmp_path / "other"
    await drain(make_config(folder), Faulty(remote.path))
    SqlQueue(other).push("orders", INSERT, [2, 1])
    await drain(make_config(other), Faulty(remote.path))
    assert remote.run("SELECT id, outbox_seq FROM orders") == [(1, 1), (2, 2)]
    SqlQueue(folder).push("orders", INSERT, [3, 1])
    assert await drain(make_config(folder, max_attempts=1), Faulty(remote.path)) == {"shop.main/orders": 0}
    assert remote.run("SELECT id, outbox_seq FROM orders WHERE id = 3") == [(3, 3)]


# -- the chain ---------------------------------------------------------------------------------------------------------


async def test_gap_blocks_its_table_alone_and_says_how_to_mend_it(
    folder: Path, remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    queue = SqlQueue(folder)
    queue.push_many("orders", [(INSERT, [n, 1]) for n in (1, 2, 3, 4)])
    queue.push("accounts", "INSERT INTO accounts (id, balance) VALUES (?, ?)", [1, 0])
    table_of(folder, "DELETE FROM outbox_queue WHERE seq = 3")
    config = make_config(folder, "orders", "accounts")
    with caplog.at_level(logging.ERROR, "pillarbox.sync"):
        assert await drain(config, Faulty(remote.path)) == {"shop.main/orders": 1, "shop.main/accounts": 0}
    assert remote.ids == [1, 2]
    assert "pillarbox sync skip --table orders --lost 3" in caplog.text
    assert table_of(folder, GAPS) == [(4, "orders", 3)]
    table_of(folder, SKIP, 3)
    assert await drain(config, Faulty(remote.path)) == {"shop.main/orders": 0, "shop.main/accounts": 0}
    assert remote.ids == [1, 2, 4]


async def test_first_row_that_was_lost_is_noticed(folder: Path, remote: Remote) -> None:
    SqlQueue(folder).push_many("orders", [(INSERT, [n, 1]) for n in (1, 2)])
    table_of(folder, "DELETE FROM outbox_queue WHERE seq = 1")
    assert await drain(make_config(folder), Faulty(remote.path)) == {"shop.main/orders": 1}
    assert remote.ids == []


async def test_pruned_audit_log_is_no_gap(folder: Path, remote: Remote) -> None:
    queue = SqlQueue(folder)
    queue.push_many("orders", [(INSERT, [1, 1]), (INSERT, [2, None]), (INSERT, [3, 1])])
    config = make_config(folder, backoff_seconds=3600)
    assert await drain(config, Faulty(remote.path)) == {"shop.main/orders": 2}
    table_of(folder, "DELETE FROM outbox_sync_log")
    remote.run("DROP TABLE orders")
    remote.run("CREATE TABLE orders (id INTEGER PRIMARY KEY, total INTEGER)")
    table_of(folder, "UPDATE pillarbox_sync_state SET due_at = NULL")
    assert await drain(config, Faulty(remote.path)) == {"shop.main/orders": 0}
    assert remote.ids == [2, 3]


async def test_pruning_keeps_what_a_waiting_row_needs_and_what_is_recent(folder: Path, remote: Remote) -> None:
    queue = SqlQueue(folder)
    queue.push_many("orders", [(INSERT, [n, 1]) for n in (1, 2, 3)])
    queue.push("orders", INSERT, [4, None])
    config = make_config(folder, backoff_seconds=3600, retain_log_days=7)
    await drain(config, Faulty(remote.path))
    old = (datetime.now(UTC) - timedelta(days=8)).isoformat()
    table_of(folder, "UPDATE outbox_sync_log SET synced_at = ? WHERE seq IN (1, 3)", old)
    table_of(folder, "UPDATE outbox_sync_log SET synced_at = datetime('now', '-6 days') WHERE seq = 2")
    async with running(SyncService(config, {"shop.main": Faulty(remote.path)})):
        await until(lambda: table_of(folder, "SELECT seq FROM outbox_sync_log ORDER BY seq") == [(2,), (3,)])
    assert table_of(folder, GAPS) == []


# -- one table for two targets -----------------------------------------------------------------------------------------


def two_targets(folder: Path, **tuning: Any) -> SyncConfig:
    targets = [TargetConfig("one", ["accounts"]), TargetConfig("two", ["accounts"])]
    return SyncConfig.single(folder, targets, name="shop", **tuning)


async def test_table_for_two_targets_has_progress_of_its_own_for_each(folder: Path, tmp_path: Path) -> None:
    one, two = Remote(tmp_path / "one.db"), Remote(tmp_path / "two.db")
    for each in (one, two):
        each.run("INSERT INTO accounts VALUES (1, 0)")
    queue = SqlQueue(folder)
    queue.push_many("accounts", [(ADD, [1, 1])] * 20)
    down = Faulty(two.path)
    down.before = lambda statements: (_ for _ in ()).throw(ConnectionError("the line is dead"))
    with pytest.raises((SinkUnavailable, StoreUnavailable), match="the line is dead"):
        await SyncService(two_targets(folder), {"shop.one": Faulty(one.path), "shop.two": down}).drain()
    assert one.run("SELECT balance FROM accounts") == [(20,)]
    assert two.run("SELECT balance FROM accounts") == [(0,)]
    queue.push_many("accounts", [(ADD, [1, 1])] * 5)
    writers = {"shop.one": Faulty(one.path), "shop.two": Faulty(two.path)}
    remains = await SyncService(two_targets(folder), writers).drain()
    assert remains == {"shop.one/accounts": 0, "shop.two/accounts": 0, "shop/accounts": 0}
    assert one.run("SELECT balance FROM accounts") == two.run("SELECT balance FROM accounts") == [(25,)]


async def test_copying_that_was_cut_off_between_two_copies_repeats_nothing(folder: Path, tmp_path: Path) -> None:
    one, two = Remote(tmp_path / "one.db"), Remote(tmp_path / "two.db")
    for each in (one, two):
        each.run("INSERT INTO accounts VALUES (1, 0)")
    SqlQueue(folder).push_many("accounts", [(ADD, [1, 1])] * 20)
    writers = {"shop.one": Faulty(one.path), "shop.two": Faulty(two.path)}
    # The second copy's folder cannot be made: the first copy has taken the rows, the queue still has them too.
    (folder / "targets").mkdir()
    (folder / "targets" / "shop.two").write_text("")
    with pytest.raises((SinkUnavailable, StoreUnavailable)):
        await SyncService(two_targets(folder), writers).drain()
    assert table_of(folder, "SELECT count(*) FROM outbox_queue", table="accounts") == [(20,)]
    (folder / "targets" / "shop.two").unlink()
    await SyncService(two_targets(folder), writers).drain()
    assert one.run("SELECT balance FROM accounts") == two.run("SELECT balance FROM accounts") == [(20,)]


async def test_target_that_is_left_goes_on_from_its_copy(folder: Path, tmp_path: Path) -> None:
    one, two = Remote(tmp_path / "one.db"), Remote(tmp_path / "two.db")
    for each in (one, two):
        each.run("INSERT INTO accounts VALUES (1, 0)")
    queue = SqlQueue(folder)
    queue.push("accounts", ADD, [1, 1])
    down = Faulty(two.path)
    down.before = lambda statements: (_ for _ in ()).throw(ConnectionError("the line is dead"))
    with pytest.raises((SinkUnavailable, StoreUnavailable)):
        await SyncService(two_targets(folder), {"shop.one": Faulty(one.path), "shop.two": down}).drain()
    queue.push("accounts", "UPDATE accounts SET balance = balance * 10")
    config = SyncConfig.single(folder, [TargetConfig("two", ["accounts"])], name="shop")
    await SyncService(config, {"shop.two": Faulty(two.path)}).drain()
    assert two.run("SELECT balance FROM accounts") == [(10,)]
    assert one.run("SELECT balance FROM accounts") == [(1,)]
