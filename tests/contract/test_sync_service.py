"""The sync service: what was pushed arrives in order and once, whatever fails on the way."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pillarbox.errors import ConfigError, SinkUnavailable, StoreUnavailable
from pillarbox.sync.config import SyncConfig, TargetConfig
from pillarbox.sync.queue import SqlQueue
from pillarbox.sync.service import SyncService
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


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(tmp_path / "remote.db")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "queues"


def fail(*_: Any) -> None:
    raise ConnectionError("the line is dead")


# -- what arrives ------------------------------------------------------------------------------------------------------


async def test_pushed_statements_arrive_in_order_with_their_numbers(folder: Path, remote: Remote) -> None:
    queue = SqlQueue(folder)
    queue.push_many("orders", [(INSERT, [n, n * 10]) for n in range(1, 41)])
    assert await drain(make_config(folder), Faulty(remote.path)) == {"shop.main/orders": 0}
    assert remote.run("SELECT id, total, outbox_seq FROM orders ORDER BY rowid") == [
        (n, n * 10, n) for n in range(1, 41)
    ]
    assert table_of(folder, "SELECT count(*), max(seq) FROM outbox_sync_log") == [(40, 40)]
    assert queue.waiting("orders") == 0


async def test_nothing_is_injected_where_it_is_switched_off(folder: Path, remote: Remote) -> None:
    SqlQueue(folder).push("orders", INSERT, [1, 10])
    await drain(make_config(folder, inject=False), Faulty(remote.path))
    assert remote.ids == [1]
    assert remote.columns("orders") == ["id", "total"]


async def test_only_named_tables_are_injected(folder: Path, remote: Remote) -> None:
    queue = SqlQueue(folder)
    queue.push("orders", INSERT, [1, 10])
    queue.push("accounts", "INSERT INTO accounts VALUES (?, ?)", [1, 0])
    await drain(make_config(folder, "orders", "accounts", inject=frozenset({"orders"})), Faulty(remote.path))
    assert remote.columns("orders") == ["id", "total", "outbox_seq"]
    assert remote.columns("accounts") == ["id", "balance"]
    assert remote.run("SELECT * FROM accounts") == [(1, 0)]


async def test_two_targets_each_get_their_own_tables(folder: Path, tmp_path: Path) -> None:
    first, second = Remote(tmp_path / "first.db"), Remote(tmp_path / "second.db")
    queue = SqlQueue(folder)
    queue.push("orders", INSERT, [1, 10])
    queue.push("accounts", "INSERT INTO accounts VALUES (?, ?)", [7, 0])
    targets = [TargetConfig("one", ["orders"]), TargetConfig("two", ["accounts"])]
    config = SyncConfig.single(folder, targets, name="shop")
    writers = {"shop.one": Faulty(first.path), "shop.two": Faulty(second.path)}
    await SyncService(config, writers).drain()
    assert (first.ids, first.run("SELECT id FROM accounts")) == ([1], [])
    assert (second.ids, second.run("SELECT id FROM accounts")) == ([], [(7,)])


async def test_writer_for_every_target_is_asked_for(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no writer for target 'shop.main'"):
        SyncService(make_config(folder), {})


# -- once --------------------------------------------------------------------------------------------------------------


async def test_lost_answer_after_the_commit_applies_nothing_twice(folder: Path, remote: Remote) -> None:
    remote.run("INSERT INTO accounts VALUES (1, 0)")
    SqlQueue(folder).push_many("accounts", [(ADD, [5, 1])] * 30)
    writer = Faulty(remote.path)
    lost = iter([True, False, True])

    def drop_answer(statements: Sequence[Any]) -> None:
        if "UPDATE accounts" in str(statements) and next(lost, False):
            fail()

    writer.after = drop_answer
    service = SyncService(make_config(folder, "accounts"), {"shop.main": writer})
    async with running(service):
        await until(lambda: not table_of(folder, "SELECT 1 FROM outbox_queue", table="accounts"))
    assert remote.run("SELECT balance FROM accounts") == [(150,)]


async def test_second_service_knows_what_the_first_had_applied(folder: Path, remote: Remote) -> None:
    remote.run("INSERT INTO accounts VALUES (1, 0)")
    SqlQueue(folder).push_many("accounts", [(ADD, [5, 1])] * 3)
    writer = Faulty(remote.path)
    writer.after = lambda statements: fail() if "UPDATE accounts" in str(statements) else None
    with pytest.raises(SinkUnavailable, match="the line is dead"):
        await drain(make_config(folder, "accounts"), writer)
    assert remote.run("SELECT balance FROM accounts") == [(5,)]
    await drain(make_config(folder, "accounts"), Faulty(remote.path))
    assert remote.run("SELECT balance FROM accounts") == [(15,)]


async def test_update_of_several_rows_arrives(folder: Path, remote: Remote) -> None:
    queue = SqlQueue(folder)
    queue.push_many("orders", [(INSERT, [n, 1]) for n in (1, 2, 3)])
    queue.push("orders", "UPDATE orders SET total = total + 1")
    queue.push("orders", "DELETE FROM orders WHERE id > ?", [2])
    await drain(make_config(folder), Faulty(remote.path))
    assert remote.run("SELECT id, total FROM orders") == [(1, 2), (2, 2)]


async def test_plain_writer_gets_one_statement_a_call_and_a_warning_is_logged(
    folder: Path, remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    SqlQueue(folder).push_many("orders", [(INSERT, [n, 1]) for n in (1, 2, 3)])
    writer = Plain(remote.path)
    with caplog.at_level(logging.WARNING, "pillarbox.sync"):
        await drain(make_config(folder), writer)
    assert remote.ids == [1, 2, 3]
    assert {len(call) for call in writer.calls} == {1}
    assert "may be applied again" in caplog.text


async def test_plain_writer_repeating_an_insert_changes_nothing_and_hides_nothing(folder: Path, remote: Remote) -> None:
    queue = SqlQueue(folder)
    queue.push("orders", INSERT, [1, 10])
    await drain(make_config(folder), Plain(remote.path))
    # As after a crash before the confirmation: the row is back in the queue.
    table_of(folder, "INSERT INTO outbox_queue SELECT 1, '2026-01-01', 'orders', '', ?, '[1, 10]', NULL, 0", INSERT)
    table_of(folder, "UPDATE pillarbox_sync_state SET settled = 0")
    queue.push("orders", INSERT, [1, 99])
    assert await drain(make_config(folder, max_attempts=1), Plain(remote.path)) == {"shop.main/orders": 1}
    assert remote.run("SELECT id, total FROM orders") == [(1, 10)]
    ((error,),) = table_of(folder, "SELECT error FROM pillarbox_sync_state")
    assert "UNIQUE constraint failed: orders.id" in error


# -- what fails --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "args", "reason"),
    [
        (INSERT, [1, 5], "UNIQUE constraint failed: orders.id"),
        (INSERT, [2, None], "NOT NULL constraint failed: orders.total"),
        ("INSERT INTO orders (id, price) VALUES (?, ?)", [2, 5], "no column named price"),
    ],
)
@pytest.mark.parametrize("kind", [Faulty, Plain])
async def test_violations_surface_and_hold_the_table(
    folder: Path, remote: Remote, sql: str, args: list[Any], reason: str, kind: type[Any]
) -> None:
    queue = SqlQueue(folder)
    queue.push("orders", INSERT, [1, 10])
    queue.push("orders", sql, args)
    queue.push("orders", INSERT, [3, 30])
    queue.push("accounts", "INSERT INTO accounts (id, balance) VALUES (?, ?)", [1, 0])
    config = make_config(folder, "orders", "accounts", max_attempts=2, backoff_seconds=86400)
    assert await drain(config, kind(remote.path)) == {"shop.main/orders": 2, "shop.main/accounts": 0}
    assert remote.ids == [1]
    assert remote.run("SELECT id FROM accounts") == [(1,)]
    ((head, attempts, error),) = table_of(folder, "SELECT head, attempts, error FROM pillarbox_sync_state")
    assert (head, attempts) == (2, 1)
    assert reason in error


async def test_failed_row_waits_for_its_time_and_then_goes_first(folder: Path, remote: Remote) -> None:
    queue = SqlQueue(folder)
    queue.push_many("orders", [(INSERT, [1, None]), (INSERT, [2, 20])])
    config = make_config(folder, backoff_seconds=3600)
    writer = Faulty(remote.path)
    assert await drain(config, writer) == {"shop.main/orders": 2}
    again = Faulty(remote.path)
    assert await drain(config, again) == {"shop.main/orders": 2}, "it is not due yet"
    assert not any("INSERT INTO orders" in str(call) for call in again.calls)
    remote.run("DROP TABLE orders")
    remote.run("CREATE TABLE orders (id INTEGER PRIMARY KEY, total INTEGER)")
    table_of(folder, "UPDATE pillarbox_sync_state SET due_at = ?", datetime.now(UTC).isoformat())
    assert await drain(config, Faulty(remote.path)) == {"shop.main/orders": 0}
    assert remote.ids == [1, 2]
    assert table_of(folder, "SELECT head, attempts, error FROM pillarbox_sync_state") == [(None, 0, None)]


async def test_table_waits_behind_its_dead_row_by_default(folder: Path, remote: Remote) -> None:
    SqlQueue(folder).push_many("orders", [(INSERT, [1, None]), (INSERT, [2, 20])])
    assert await drain(make_config(folder, max_attempts=1), Faulty(remote.path)) == {"shop.main/orders": 2}
    assert remote.ids == []
    ((dead_at,),) = table_of(folder, "SELECT dead_at FROM pillarbox_sync_state")
    assert dead_at is not None


async def test_table_goes_on_past_its_dead_row_where_that_is_the_policy(folder: Path, remote: Remote) -> None:
    queue = SqlQueue(folder)
    queue.push_many("orders", [(INSERT, [1, 10]), (INSERT, [2, None]), (INSERT, [3, 30])])
    config = make_config(folder, max_attempts=1, dead="skip")
    assert await drain(config, Faulty(remote.path)) == {"shop.main/orders": 0}
    assert remote.ids == [1, 3]
    dead = table_of(folder, "SELECT seq, prev_seq, attempts, reason, last_error FROM outbox_dead_log")
    assert [row[:4] for row in dead] == [(2, 1, 1, "max_attempts")]
    assert "NOT NULL" in dead[0][4]
    queue.push("orders", INSERT, [4, 40])
    assert table_of(folder, GAPS) == []
    assert await drain(config, Faulty(remote.path)) == {"shop.main/orders": 0}
    assert remote.ids == [1, 3, 4]


async def test_dead_row_is_passed_when_the_policy_changes(folder: Path, remote: Remote) -> None:
    SqlQueue(folder).push_many("orders", [(INSERT, [1, None]), (INSERT, [2, 20])])
    await drain(make_config(folder, max_attempts=1), Faulty(remote.path))
    assert await drain(make_config(folder, max_attempts=1, dead="skip"), Faulty(remote.path)) == {"shop.main/orders": 0}
    assert remote.ids == [2]
    assert table_of(folder, "SELECT seq FROM outbox_dead_log") == [(1,)]


@pytest.mark.parametrize(
    ("sql", "payload", "reason"),
    [
        (INSERT, "{not json", "undecodable"),
        (INSERT, '{"id": 1}', "undecodable"),
        ("COMMIT", "[]", "unsupported_stmt"),
        (INSERT, "[1]", "unsupported_stmt"),
    ],
)
async def test_row_that_can_never_be_sent_is_dead_at_once(
    folder: Path, remote: Remote, sql: str, payload: str, reason: str
) -> None:
    queue = SqlQueue(folder)
    queue.push("orders", INSERT, [1, 10])
    table_of(folder, "INSERT INTO outbox_queue SELECT 2, '2026-01-01', 'orders', '', ?, ?, 1, 0", sql, payload)
    queue.push("orders", INSERT, [3, 30])
    await drain(make_config(folder, dead="skip"), Faulty(remote.path))
    assert remote.ids == [1, 3]
    assert table_of(folder, "SELECT seq, attempts, reason FROM outbox_dead_log") == [(2, 1, reason)]


async def test_raising_writer_spends_no_attempts_and_is_tried_again(folder: Path, remote: Remote) -> None:
    SqlQueue(folder).push("orders", INSERT, [1, 10])
    writer = Faulty(remote.path)
    failures = iter(range(3))
    writer.before = lambda statements: (
        fail() if INSERT[:18] in str(statements) and next(failures, None) is not None else None
    )
    service = SyncService(make_config(folder, max_attempts=1, table_max_wait=0), {"shop.main": writer})
    async with running(service):
        await until(lambda: remote.ids == [1])
    assert next(failures, None) is None


async def test_target_that_is_down_keeps_no_other_waiting(folder: Path, tmp_path: Path) -> None:
    good, bad = Remote(tmp_path / "good.db"), Remote(tmp_path / "bad.db")
    queue = SqlQueue(folder)
    queue.push("orders", INSERT, [1, 10])
    queue.push("accounts", "INSERT INTO accounts (id, balance) VALUES (?, ?)", [7, 0])
    targets = [TargetConfig("bad", ["orders"]), TargetConfig("good", ["accounts"])]
    broken = Faulty(bad.path)
    broken.before = fail
    writers = {"shop.bad": broken, "shop.good": Faulty(good.path)}
    with pytest.raises(StoreUnavailable, match="the line is dead"):
        await SyncService(SyncConfig.single(folder, targets, name="shop"), writers).drain()
    assert good.run("SELECT id FROM accounts") == [(7,)]
    assert queue.waiting("orders") == 1


# -- when --------------------------------------------------------------------------------------------------------------


async def test_few_rows_wait_for_their_time_and_enough_rows_go_at_once(folder: Path, remote: Remote) -> None:
    queue = SqlQueue(folder)
    config = make_config(folder, table_flush_threshold=5, table_max_wait=3600, flush_interval=3600)
    service = SyncService(config, {"shop.main": Faulty(remote.path)})
    (source,) = service._sources.values()
    async with running(service):
        queue.push_many("orders", [(INSERT, [n, 1]) for n in range(4)])
        await until(lambda: source._gate.due is not None)
        assert remote.ids == []
        queue.push("orders", INSERT, [4, 1])
        await until(lambda: remote.ids == [0, 1, 2, 3, 4])
    assert remote.ids == [0, 1, 2, 3, 4]


async def test_oldest_row_waits_no_longer_than_its_maximum(folder: Path, remote: Remote) -> None:
    config = make_config(folder, table_flush_threshold=1000, table_max_wait=0.5, flush_interval=3600)
    async with running(SyncService(config, {"shop.main": Faulty(remote.path)})):
        SqlQueue(folder).push("orders", INSERT, [1, 1])
        await until(lambda: remote.ids == [1])


async def test_row_from_the_future_waits_no_longer_either(folder: Path, remote: Remote) -> None:
    SqlQueue(folder).push("orders", INSERT, [1, 1])
    table_of(folder, "UPDATE outbox_queue SET created_at = ?", (datetime.now(UTC) + timedelta(days=9)).isoformat())
    config = make_config(folder, table_flush_threshold=1000, table_max_wait=0.5, flush_interval=0.2)
    async with running(SyncService(config, {"shop.main": Faulty(remote.path)})):
        await until(lambda: remote.ids == [1])


async def test_backlog_is_drained_without_pauses(folder: Path, remote: Remote) -> None:
    SqlQueue(folder).push_many("orders", [(INSERT, [n, 1]) for n in range(3000)])
    config = make_config(folder, batch_size=100, flush_interval=3600, table_max_wait=3600)
    async with running(SyncService(config, {"shop.main": Faulty(remote.path)})):
        await until(lambda: remote.run("SELECT count(*) FROM orders") == [(3000,)])


async def test_batch_stays_within_its_bytes_but_has_at_least_a_row(folder: Path, remote: Remote) -> None:
    SqlQueue(folder).push_many("orders", [(INSERT, [n, 1]) for n in range(20)])
    writer = Faulty(remote.path)
    assert await drain(make_config(folder, max_batch_bytes=110), writer) == {"shop.main/orders": 0}
    sizes = [sum("INSERT INTO orders" in sql for sql, _ in call) for call in writer.calls]
    assert max(sizes) == 2
    SqlQueue(folder).push_many("orders", [(INSERT, [n, 1]) for n in range(20, 23)])
    assert await drain(make_config(folder, max_batch_bytes=1), Faulty(remote.path)) == {"shop.main/orders": 0}


# -- one service -------------------------------------------------------------------------------------------------------


async def test_second_service_on_a_folder_is_refused(folder: Path, remote: Remote) -> None:
    config = make_config(folder)
    async with running(SyncService(config, {"shop.main": Faulty(remote.path)})):
        await until(lambda: (folder / "orders.db").exists())
        with pytest.raises(ConfigError, match="a service works on this folder already"):
            await drain(config, Faulty(remote.path))
    await drain(config, Faulty(remote.path))


async def test_unreadable_file_stops_its_own_table_only(folder: Path, remote: Remote) -> None:
    os.mkdir(folder)
    (folder / "orders.db").write_bytes(b"this is no database at all" * 100)
    SqlQueue(folder).push("accounts", "INSERT INTO accounts (id, balance) VALUES (?, ?)", [7, 0])
    config = make_config(folder, "orders", "accounts", table_max_wait=0)
    async with running(SyncService(config, {"shop.main": Faulty(remote.path)})):
        await until(lambda: remote.run("SELECT id FROM accounts") == [(7,)])
    assert (folder / "orders.db").read_bytes().startswith(b"this is no database")


async def test_service_counts_what_waits_by_target_and_table(folder: Path, remote: Remote) -> None:
    SqlQueue(folder).push_many("orders", [(INSERT, [n, 1]) for n in range(3)])
    service = SyncService(make_config(folder, "orders", "accounts"), {"shop.main": Faulty(remote.path)})
    try:
        assert await service.pending_count() == {"shop.main/orders": 3, "shop.main/accounts": 0}
        assert await service.total_pending() == 3
    finally:
        await service.close()


async def test_column_added_to_the_remote_table_meanwhile_is_noticed(folder: Path, remote: Remote) -> None:
    queue = SqlQueue(folder)
    queue.push("orders", "INSERT INTO orders VALUES (?, ?)", [1, 10])
    service = SyncService(make_config(folder, table_max_wait=0, dead="skip"), {"shop.main": Faulty(remote.path)})
    async with running(service):
        await until(lambda: remote.ids == [1])
        remote.run("ALTER TABLE orders ADD COLUMN note TEXT")
        queue.push("orders", "INSERT INTO orders VALUES (?, ?, ?)", [2, 20, "new"])
        await until(lambda: remote.ids == [1, 2])
    assert remote.run("SELECT id, total, note, outbox_seq FROM orders WHERE id = 2") == [(2, 20, "new", 2)]


async def test_constraint_that_only_the_commit_finds_blames_its_own_row(folder: Path, remote: Remote) -> None:
    remote.run("DROP TABLE orders")
    remote.run(
        "CREATE TABLE orders (id INTEGER PRIMARY KEY, total INTEGER, "
        "parent INTEGER REFERENCES orders (id) DEFERRABLE INITIALLY DEFERRED)"
    )
    insert = "INSERT INTO orders (id, total, parent) VALUES (?, ?, ?)"
    rows = [[n, n, 9999 if n == 707 else None] for n in range(1, 1001)]
    SqlQueue(folder).push_many("orders", [(insert, row) for row in rows])
    writer = Faulty(remote.path)
    remains = await drain(make_config(folder, max_attempts=1, batch_size=500), writer)
    assert remains == {"shop.main/orders": 294}
    assert remote.run("SELECT count(*), max(id) FROM orders") == [(706, 706)]
    assert table_of(folder, "SELECT head FROM pillarbox_sync_state") == [(707,)]
    # Half of the rest each time, not one less.
    assert sum("INSERT INTO orders" in str(call) for call in writer.calls) < 80
