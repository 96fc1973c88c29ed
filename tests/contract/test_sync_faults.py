"""The sync service when files, targets and writers do what they should not."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import time
import traceback
from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pillarbox.errors import SinkUnavailable, StoreUnavailable
from pillarbox.sync import source as sources
from pillarbox.sync.config import SyncConfig, TargetConfig
from pillarbox.sync.queue import SqlQueue
from pillarbox.sync.service import SyncService
from pillarbox.sync.settling import settle_rows
from pillarbox.sync.source import QueueSource
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

APPEND = "INSERT INTO lines (n) VALUES (?)"


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    found = Remote(tmp_path / "remote.db")
    found.run("CREATE TABLE lines (n INTEGER)")
    found.run("INSERT INTO accounts VALUES (1, 0)")
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "queues"


def lines(remote: Remote) -> list[int]:
    return [row[0] for row in remote.run("SELECT n FROM lines ORDER BY rowid")]


def back_up(folder: Path, table: str) -> None:
    with closing(sqlite3.connect(folder / f"{table}.db")) as db, closing(sqlite3.connect(folder / "saved")) as saved:
        db.backup(saved)


def restore(folder: Path, table: str) -> None:
    for ending in ("", "-wal", "-shm"):
        (folder / f"{table}.db{ending}").unlink(missing_ok=True)
    (folder / "saved").rename(folder / f"{table}.db")


class Wayward(Plain):
    """A plain writer that can be told to answer otherwise."""

    answer: Any = None

    async def write_batch(self, stmts: Sequence[tuple[str, Sequence[Any]]]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] | None = None if self.answer is None else self.answer(stmts)
        return await super().write_batch(stmts) if found is None else found


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [15, 60])
async def test_backup_made_while_the_service_ran_loses_no_later_push(folder: Path, remote: Remote, count: int) -> None:
    queue = SqlQueue(folder)
    service = SyncService(make_config(folder, "lines", table_max_wait=0), {"shop.main": Faulty(remote.path)})
    async with running(service):
        queue.push_many("lines", [(APPEND, [n]) for n in range(10)])
        await until(lambda: len(lines(remote)) == 10 and queue.waiting("lines") == 0)
        back_up(folder, "lines")
        queue.push_many("lines", [(APPEND, [n]) for n in range(10, 40)])
        await until(lambda: len(lines(remote)) == 40 and queue.waiting("lines") == 0)
    queue.close()
    restore(folder, "lines")
    SqlQueue(folder).push_many("lines", [(APPEND, [n]) for n in range(100, 100 + count)])
    with pytest.raises(StoreUnavailable, match="it is a copy, or comes from a backup"):
        await drain(make_config(folder, "lines"), Faulty(remote.path))
    assert SqlQueue(folder).waiting("lines") == count


async def test_file_that_is_replaced_while_the_service_runs_is_noticed(folder: Path, remote: Remote) -> None:
    queue = SqlQueue(folder)
    config = make_config(folder, "lines", table_max_wait=0, flush_interval=0.2)
    async with running(SyncService(config, {"shop.main": Faulty(remote.path)})):
        queue.push("lines", APPEND, [1])
        await until(lambda: lines(remote) == [1] and queue.waiting("lines") == 0)
        for ending in ("", "-wal", "-shm"):
            os.unlink(folder / f"lines.db{ending}")
        queue.push("lines", APPEND, [2])
        await until(lambda: lines(remote) == [1, 2])
    assert table_of(folder, "SELECT count(*) FROM outbox_queue", table="lines") == [(0,)]


async def test_delivered_rows_are_settled_before_anything_else_is_sent(
    folder: Path, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    SqlQueue(folder).push_many("accounts", [(ADD, [1, 1])] * 5)
    settle, failures = settle_rows, iter(range(12))

    def refuse(*given: Any, **named: Any) -> Any:
        if next(failures, None) is not None:
            raise sqlite3.OperationalError("database or disk is full")
        return settle(*given, **named)

    monkeypatch.setattr(sources, "settle_rows", refuse)
    monkeypatch.setattr(sources, "LEASE", timedelta(seconds=1))
    config = make_config(folder, "accounts", inject=False, table_max_wait=0)
    async with running(SyncService(config, {"shop.main": Plain(remote.path)})):
        await until(lambda: not table_of(folder, "SELECT 1 FROM outbox_queue", table="accounts"))
    assert remote.run("SELECT balance FROM accounts") == [(5,)]


async def test_dead_row_that_somebody_took_out_does_not_block(folder: Path, remote: Remote) -> None:
    SqlQueue(folder).push_many("orders", [(INSERT, [1, None]), (INSERT, [2, 20])])
    assert await drain(make_config(folder, max_attempts=1), Faulty(remote.path)) == {"shop.main/orders": 2}
    table_of(folder, "DELETE FROM outbox_queue WHERE seq = 1")
    table_of(folder, "INSERT INTO outbox_sync_log VALUES (1, 'orders', datetime('now'))")
    assert await drain(make_config(folder), Faulty(remote.path)) == {"shop.main/orders": 0}
    assert remote.ids == [2]


async def test_service_can_drain_again_after_another_one(folder: Path, remote: Remote) -> None:
    queue, config = SqlQueue(folder), make_config(folder, "lines")
    first = SyncService(config, {"shop.main": Faulty(remote.path)})
    for number, service in enumerate([first, SyncService(config, {"shop.main": Faulty(remote.path)}), first]):
        queue.push("lines", APPEND, [number])
        assert await service.drain() == {"shop.main/lines": 0}
    assert lines(remote) == [0, 1, 2]


# -- targets -----------------------------------------------------------------------------------------------------------


async def test_target_that_goes_down_while_columns_are_read_spends_no_attempt(folder: Path, remote: Remote) -> None:
    SqlQueue(folder).push("orders", "INSERT INTO orders VALUES (?, ?)", [1, 10])
    writer, asked = Faulty(remote.path), 0

    def refuse(statements: Sequence[Any]) -> None:
        nonlocal asked
        asked += "pragma_table_info" in str(statements) and "orders" in str(statements)
        if 2 <= asked <= 4:
            raise ConnectionError("the line is dead")

    writer.before = refuse
    config = make_config(folder, max_attempts=1, dead="skip", table_max_wait=0)
    async with running(SyncService(config, {"shop.main": writer})):
        await until(lambda: remote.ids == [1])
    assert asked > 2
    assert table_of(folder, "SELECT count(*) FROM outbox_dead_log") == [(0,)]


async def test_outage_is_noted_in_the_file_until_it_is_over(folder: Path, remote: Remote) -> None:
    SqlQueue(folder).push("orders", INSERT, [1, 10])
    writer = Faulty(remote.path)

    def refuse(statements: Sequence[Any]) -> None:
        raise ConnectionError("the line is dead")

    writer.before = refuse
    is_there = "SELECT 1 FROM sqlite_master WHERE name = 'pillarbox_sync_state'"
    noted = "SELECT outage FROM pillarbox_sync_state"
    async with running(SyncService(make_config(folder, table_max_wait=0), {"shop.main": writer})):
        await until(lambda: table_of(folder, is_there))
        await until(lambda: "the line is dead" in str(table_of(folder, noted)))
        writer.before = lambda statements: None
        await until(lambda: remote.ids == [1])
        await until(lambda: table_of(folder, noted) == [(None,)])


@pytest.mark.parametrize("rows", [[{"max": "five"}], [["five"]], "five", [None]], ids=str)
async def test_odd_answer_of_one_target_stops_no_other(folder: Path, tmp_path: Path, remote: Remote, rows: Any) -> None:
    other = Remote(tmp_path / "other.db")
    queue = SqlQueue(folder)
    queue.push("orders", INSERT, [1, 10])
    queue.push("accounts", "INSERT INTO accounts (id, balance) VALUES (?, ?)", [7, 0])
    odd = Wayward(remote.path)
    odd.answer = lambda stmts: [{"ok": True, "rows": rows}] if "MAX(outbox_seq)" in stmts[0][0] else None
    targets = [TargetConfig("odd", ["orders"]), TargetConfig("good", ["accounts"])]
    config = SyncConfig.single(folder, targets, name="shop", table_max_wait=0)
    async with running(SyncService(config, {"shop.odd": odd, "shop.good": Faulty(other.path)})):
        await until(lambda: other.run("SELECT id FROM accounts") == [(7,)])
    assert queue.waiting("orders") == 1


# -- writers without a mark --------------------------------------------------------------------------------------------


async def test_plain_writer_that_goes_down_in_a_batch_repeats_nothing_that_it_answered_for(
    folder: Path, remote: Remote
) -> None:
    SqlQueue(folder).push_many("accounts", [(ADD, [1, 1])] * 20)
    writer, sent = Wayward(remote.path), 0

    def go_down(stmts: Any) -> Any:
        nonlocal sent
        sent += "UPDATE accounts" in stmts[0][0]
        return [{"ok": False, "error": "maintenance", "kind": "down"}] if sent in (5, 6) else None

    writer.answer = go_down
    async with running(SyncService(make_config(folder, "accounts", table_max_wait=0), {"shop.main": writer})):
        await until(lambda: not table_of(folder, "SELECT 1 FROM outbox_queue", table="accounts"))
    assert remote.run("SELECT balance FROM accounts") == [(20,)]


async def test_plain_writers_of_two_queues_lose_no_row_to_the_others_numbers(
    folder: Path, remote: Remote, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    SqlQueue(folder).push("lines", APPEND, [1])
    await drain(make_config(folder, "lines"), Plain(remote.path))
    SqlQueue(other).push_many("lines", [(APPEND, [n]) for n in (11, 12)])
    await drain(make_config(other, "lines"), Plain(remote.path))
    service = SyncService(make_config(folder, "lines", table_max_wait=0), {"shop.main": Plain(remote.path)})
    async with running(service):
        SqlQueue(folder).push_many("lines", [(APPEND, [n]) for n in (2, 3)])
        await until(lambda: len(lines(remote)) == 5)
        SqlQueue(other).push("lines", APPEND, [13])
        await drain(make_config(other, "lines"), Plain(remote.path))
        SqlQueue(folder).push("lines", APPEND, [4])
        await until(lambda: len(lines(remote)) == 7)
    assert sorted(lines(remote)) == [1, 2, 3, 4, 11, 12, 13]
    numbers = [row[0] for row in remote.run("SELECT outbox_seq FROM lines")]
    assert len(set(numbers)) == 7


async def test_row_in_doubt_is_not_sent_again_when_the_writer_becomes_transactional(
    folder: Path, remote: Remote
) -> None:
    SqlQueue(folder).push_many("lines", [(APPEND, [n]) for n in (1, 2, 3)])
    writer, calls = Plain(remote.path), 0
    write = writer.write_batch

    async def lose(stmts: Any) -> Any:
        nonlocal calls
        results = await write(stmts)
        calls += "INSERT INTO lines" in stmts[0][0]
        if calls == 2:
            raise ConnectionError("the answer is lost")
        return results

    writer.write_batch = lose  # type: ignore[method-assign]
    with pytest.raises(SinkUnavailable, match="the answer is lost"):
        await drain(make_config(folder, "lines"), writer)
    assert lines(remote) == [1, 2]
    await drain(make_config(folder, "lines"), Faulty(remote.path))
    assert lines(remote) == [1, 2, 3]


# -- idle --------------------------------------------------------------------------------------------------------------


async def test_pushes_behind_a_dead_row_keep_nobody_busy(
    folder: Path, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = SqlQueue(folder)
    queue.push("orders", INSERT, [1, None])
    await drain(make_config(folder, max_attempts=1), Faulty(remote.path))
    claims = 0
    claim = QueueSource._claim_here

    def count(self: QueueSource, *given: Any) -> Any:
        nonlocal claims
        claims += 1
        return claim(self, *given)

    monkeypatch.setattr(QueueSource, "_claim_here", count)
    async with running(SyncService(make_config(folder, max_attempts=1), {"shop.main": Faulty(remote.path)})):
        await until(lambda: claims > 0)
        started = time.monotonic()
        for number in range(2, 400):
            queue.push("orders", INSERT, [number, 1])
            await asyncio.sleep(0)
        seconds = time.monotonic() - started
    # The pauses between two looks grow to half a second, however long the pushes take.
    assert claims < 40 + 2 * seconds
    shutil.rmtree(folder)


async def test_side_table_of_an_older_release_gets_its_columns(folder: Path, remote: Remote) -> None:
    SqlQueue(folder).push("orders", INSERT, [1, 10])
    table_of(
        folder,
        "CREATE TABLE pillarbox_sync_state (namespace TEXT PRIMARY KEY, queue_id TEXT NOT NULL, "
        "settled INTEGER NOT NULL DEFAULT 0)",
    )
    table_of(folder, "INSERT INTO pillarbox_sync_state (namespace, queue_id) VALUES ('orders', 'older')")
    assert await drain(make_config(folder), Faulty(remote.path)) == {"shop.main/orders": 0}
    assert table_of(folder, "SELECT queue_id, settled, attempts FROM pillarbox_sync_state") == [("older", 1, 0)]


async def test_secrets_of_the_connection_stay_out_of_what_a_writer_says(
    folder: Path, remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    SqlQueue(folder).push("orders", INSERT, [1, 10])
    writer = Wayward(remote.path)

    def tell(stmts: Any) -> Any:
        if "INSERT INTO orders" in stmts[0][0]:
            return [{"ok": False, "error": "POST refused for t0ps3cret"}]
        return None

    writer.answer = tell
    target = TargetConfig("main", ["orders"], connection={"db_token": "t0ps3cret"})
    config = SyncConfig.single(folder, [target], name="shop", max_attempts=1)
    await SyncService(config, {"shop.main": writer}).drain()
    assert table_of(folder, "SELECT error FROM pillarbox_sync_state") == [("POST refused for ***",)]

    def leak(stmts: Any) -> Any:
        raise ConnectionError("https://db?token=t0ps3cret")

    writer.answer = leak
    table_of(folder, "UPDATE pillarbox_sync_state SET head = NULL, dead_at = NULL, due_at = NULL")
    with pytest.raises(StoreUnavailable) as caught:
        await SyncService(config, {"shop.main": writer}).drain()
    assert "t0ps3cret" not in "".join(traceback.format_exception(caught.value)) + caplog.text
    assert "https://db?token=***" in str(caught.value)
