"""A table for several targets: each gets every row once, whatever becomes of the files and the settings."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqloutbox

from pillarbox.errors import ConfigError, SinkUnavailable, StoreUnavailable
from pillarbox.hooks import Hook
from pillarbox.sync import copies
from pillarbox.sync.config import SyncConfig, TableConfig, TargetConfig
from pillarbox.sync.opening import open_connection
from pillarbox.sync.queue import SqlQueue
from pillarbox.sync.queues import choose_queues, find_queues
from pillarbox.sync.renumbering import renumber
from pillarbox.sync.service import SyncService
from tests.contract.sync_services import ADD, INSERT, Faulty, Remote, running, until

DOWN = (SinkUnavailable, StoreUnavailable)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "queues"


class Targets:
    """Remote databases by short name, each with an account of balance 0."""

    def __init__(self, place: Path, folder: Path) -> None:
        self.folder = folder
        self.remotes = {name: Remote(place / f"{name}.db") for name in ("one", "two", "three")}
        for remote in self.remotes.values():
            remote.run("INSERT INTO accounts VALUES (1, 0)")

    def config(self, *names: str, table: str | TableConfig = "accounts", **tuning: Any) -> SyncConfig:
        return SyncConfig.single(self.folder, [TargetConfig(name, [table]) for name in names], name="shop", **tuning)

    def writers(self, **given: Any) -> dict[str, Any]:
        return {f"shop.{name}": given.get(name) or Faulty(each.path) for name, each in self.remotes.items()}

    async def drain(self, *names: str, table: str = "accounts", **writers: Any) -> dict[str, int]:
        return await SyncService(self.config(*names, table=table), self.writers(**writers)).drain()

    def balances(self, *names: str) -> list[int]:
        return [self.remotes[name].run("SELECT balance FROM accounts")[0][0] for name in names]

    def down(self, name: str, *, after: bool = False, only: str = "") -> Faulty:
        """A writer that loses the line before, or after, calls that have these words."""
        writer = Faulty(self.remotes[name].path)

        def fail(statements: Sequence[Any]) -> None:
            if only in str(statements):
                raise ConnectionError("the line is dead")

        setattr(writer, "after" if after else "before", fail)
        return writer


@pytest.fixture
def targets(tmp_path: Path, folder: Path) -> Targets:
    return Targets(tmp_path, folder)


def push(folder: Path, count: int = 1, amount: int = 1) -> None:
    with SqlQueue(folder) as queue:
        queue.push_many("accounts", [(ADD, [amount, 1])] * count)


def ask(path: Path, sql: str, *given: Any) -> list[Any]:
    with closing(sqlite3.connect(path)) as db, db:
        return db.execute(sql, given).fetchall()


def list_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.db"))


def save(folder: Path, table: str = "accounts") -> None:
    with closing(sqlite3.connect(folder / f"{table}.db")) as db, closing(sqlite3.connect(folder / "saved")) as saved:
        db.backup(saved)


def remove(folder: Path, table: str = "accounts") -> None:
    for end in ("", "-wal", "-shm"):
        (folder / f"{table}.db{end}").unlink(missing_ok=True)


def restore(folder: Path, table: str = "accounts") -> None:
    remove(folder, table)
    (folder / "saved").rename(folder / f"{table}.db")


# -- the shared file is another one ------------------------------------------------------------------------------------


async def test_rows_of_a_new_shared_file_are_copied_whatever_their_numbers(folder: Path, targets: Targets) -> None:
    push(folder, 30)
    await targets.drain("one", "two")
    remove(folder)
    push(folder, 10)
    await targets.drain("one", "two")
    assert targets.balances("one", "two") == [40, 40]


async def test_restored_shared_file_is_refused_until_somebody_decides(folder: Path, targets: Targets) -> None:
    push(folder, 5)
    await targets.drain("one", "two")
    save(folder)
    push(folder, 10)
    await targets.drain("one", "two")
    restore(folder)
    # Numbers 6 to 8 again, of other rows.
    push(folder, 3, amount=100)
    told = r"up to number 15 were copied before.*comes from a backup.*renumber --table accounts --target all"
    with pytest.raises(DOWN, match=told):
        await targets.drain("one", "two")
    assert targets.balances("one", "two") == [15, 15]
    assert ask(folder / "accounts.db", "SELECT count(*) FROM outbox_queue") == [(3,)]
    (ref,) = choose_queues(find_queues(targets.config("one", "two")), target="all", table="accounts")
    assert renumber(ref) == 3
    await targets.drain("one", "two")
    assert targets.balances("one", "two") == [315, 315]


async def test_restored_shared_file_is_refused_though_its_numbers_have_caught_up(
    folder: Path, targets: Targets
) -> None:
    push(folder, 5)
    await targets.drain("one", "two")
    save(folder)
    push(folder, 10)
    await targets.drain("one", "two")
    restore(folder)
    push(folder, 20, amount=100)
    with pytest.raises(DOWN, match="comes from a backup"):
        await targets.drain("one", "two")
    assert targets.balances("one", "two") == [15, 15]


async def test_rows_that_were_copied_and_not_settled_are_known(folder: Path, targets: Targets) -> None:
    push(folder, 20)
    blocked = folder / "targets" / "shop.two"
    blocked.parent.mkdir()
    blocked.write_text("")
    with pytest.raises(DOWN):
        await targets.drain("one", "two")
    # As it is when the service dies after the last copy and before the rows leave the shared file.
    save(folder)
    blocked.unlink()
    await targets.drain("one", "two")
    restore(folder)
    assert await targets.drain("one", "two") == {"shop.one/accounts": 0, "shop.two/accounts": 0, "shop/accounts": 0}
    assert targets.balances("one", "two") == [20, 20]


async def test_copy_is_on_the_disk_before_the_row_leaves_the_shared_file(
    folder: Path, targets: Targets, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, int] = {}

    def watch(path: Path, **options: Any) -> sqlite3.Connection:
        db = open_connection(path, **options)
        (seen[str(path.relative_to(folder))],) = db.execute("PRAGMA synchronous").fetchone()
        return db

    monkeypatch.setattr(copies, "open_connection", watch)
    push(folder)
    await targets.drain("one", "two")
    full = 2
    assert seen == {
        "accounts.db": full,
        "targets/shop.one/accounts.db": full,
        "targets/shop.two/accounts.db": full,
    }


# -- targets and tables that are gone ----------------------------------------------------------------------------------


async def test_rows_for_a_target_that_was_renamed_are_not_forgotten(folder: Path, targets: Targets) -> None:
    push(folder, 7)
    with pytest.raises(DOWN, match="the line is dead"):
        await targets.drain("one", "two", two=targets.down("two"))
    told = r"targets/shop.two/accounts.db \(7 for shop.two/accounts\).*rename its folder .*targets/shop.two'"
    with pytest.raises(ConfigError, match=told):
        await targets.drain("one", "three")
    stray = find_queues(targets.config("one", "three"))[-1]
    assert (str(stray), stray.is_expected) == ("shop.two/accounts", False)
    (folder / "targets" / "shop.two").rename(folder / "targets" / "shop.three")
    await targets.drain("one", "three")
    assert targets.balances("one", "three") == [7, 7]


async def test_refused_service_lets_go_of_its_folder(folder: Path, targets: Targets) -> None:
    push(folder)
    with pytest.raises(DOWN):
        await targets.drain("one", "two", two=targets.down("two"))
    service = SyncService(targets.config("one"), targets.writers())
    with pytest.raises(ConfigError, match="not configured any more"):
        await service.open()
    await targets.drain("one", "two")
    assert targets.balances("one", "two") == [1, 1]


async def test_copy_in_which_nothing_waits_is_no_reason_to_refuse(folder: Path, targets: Targets) -> None:
    push(folder)
    await targets.drain("one", "two")
    config = targets.config("one")
    assert [str(ref) for ref in find_queues(config)] == ["all/accounts", "shop.one/accounts"]
    push(folder)
    await targets.drain("one")
    assert targets.balances("one", "two") == [2, 1]


async def test_copy_that_cannot_be_read_is_told_and_stops_nobody(
    folder: Path, targets: Targets, caplog: pytest.LogCaptureFixture
) -> None:
    push(folder)
    broken = folder / "targets" / "shop.old" / "accounts.db"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"no database " * 100)
    await targets.drain("one")
    assert f"{str(broken)!r} cannot be used" in caplog.text
    assert targets.balances("one") == [1]


async def test_table_that_nobody_takes_is_told_at_the_start(
    folder: Path, targets: Targets, caplog: pytest.LogCaptureFixture
) -> None:
    with SqlQueue(folder) as queue:
        queue.push("acounts", ADD, [1, 1])
    (folder / "notes.db").write_text("no database")
    (folder / "empty.db").write_bytes(b"")
    (folder / "folder.db").mkdir()
    ask(folder / "other.db", "CREATE TABLE outbox_queue (id INTEGER)")
    with caplog.at_level(logging.WARNING, "pillarbox.sync"):
        await targets.drain("one")
    assert [each.getMessage() for each in caplog.records if "goes to no target" in each.getMessage()] == [
        f"{folder / 'acounts.db'}: 1 statements wait for table 'acounts', which goes to no target, and are not sent. "
        "Add it to the tables of a target; if its name was mistyped, push them again and delete the file."
    ]


# -- from one target to two --------------------------------------------------------------------------------------------


async def test_row_in_doubt_is_applied_once_when_a_second_target_comes(folder: Path, targets: Targets) -> None:
    push(folder, amount=10)
    with pytest.raises(DOWN, match="the line is dead"):
        await targets.drain("one", one=targets.down("one", after=True, only="balance"))
    assert targets.balances("one") == [10]
    await targets.drain("one", "two")
    assert targets.balances("one", "two") == [10, 10]
    push(folder)
    assert await targets.drain("one", "two") == {"shop.one/accounts": 0, "shop.two/accounts": 0, "shop/accounts": 0}
    assert targets.balances("one", "two") == [11, 11]


async def test_numbers_go_on_where_they_were_when_a_second_target_comes(folder: Path, targets: Targets) -> None:
    push(folder, 5)
    await targets.drain("one")
    await targets.drain("one", "two")
    push(folder)
    await targets.drain("one", "two")
    assert targets.balances("one", "two") == [6, 1]


async def test_service_that_dies_while_it_hands_a_queue_over_repeats_nothing(folder: Path, targets: Targets) -> None:
    push(folder, amount=10)
    with pytest.raises(DOWN):
        await targets.drain("one", one=targets.down("one", after=True, only="balance"))
    push(folder, 3)
    save(folder)
    with pytest.raises(DOWN):
        await targets.drain("one", "two", one=targets.down("one"), two=targets.down("two"))
    shutil.rmtree(folder / "targets" / "shop.two")
    # The copy is there, the shared file is as it was.
    restore(folder)
    await targets.drain("one", "two")
    assert targets.balances("one", "two") == [13, 13]
    files = list_files(folder)
    assert len({ask(each, "SELECT queue_id FROM pillarbox_sync_state")[0] for each in files}) == len(files) == 3


async def test_row_that_one_target_refuses_keeps_the_new_one_not_waiting(folder: Path, targets: Targets) -> None:
    with SqlQueue(folder) as queue:
        queue.push_many("orders", [(INSERT, [1, 1]), (INSERT, [2, None]), (INSERT, [3, 1])])
    one, two = targets.remotes["one"], targets.remotes["two"]
    config = targets.config("one", table="orders", max_attempts=1)
    await SyncService(config, targets.writers()).drain()
    two.run("DROP TABLE orders")
    two.run("CREATE TABLE orders (id INTEGER PRIMARY KEY, total INTEGER)")
    both = targets.config("one", "two", table="orders", max_attempts=1)
    remains = await SyncService(both, targets.writers()).drain()
    assert remains == {"shop.one/orders": 2, "shop.two/orders": 0, "shop/orders": 0}
    assert (one.ids, two.ids) == ([1], [2, 3])
    state = "SELECT head, attempts, dead_at IS NOT NULL FROM pillarbox_sync_state"
    assert ask(folder / "targets" / "shop.one" / "orders.db", state) == [(2, 1, 1)]
    assert ask(folder / "orders.db", state) == [(None, 0, 0)]
    chain = "SELECT seq, prev_seq FROM outbox_queue ORDER BY seq"
    assert ask(folder / "targets" / "shop.one" / "orders.db", chain) == [(2, None), (3, 2)]


def leave_half_drained(folder: Path, remote: Remote) -> None:
    """What sqloutbox leaves when it dies: 1 is delivered and noted, 2 is delivered, 3 is not."""
    remote.run("ALTER TABLE orders ADD COLUMN outbox_seq INTEGER NOT NULL DEFAULT 0")
    remote.run("CREATE UNIQUE INDEX idx_orders_outbox_seq ON orders (outbox_seq) WHERE outbox_seq != 0")
    remote.run("INSERT INTO orders VALUES (11, 0, 1), (12, 0, 2)")
    folder.mkdir()
    outbox = sqloutbox.Outbox(folder / "orders.db", "orders")
    outbox.enqueue_batch([(INSERT, f"[{10 + n}, 0]".encode()) for n in (1, 2, 3)])
    outbox.mark_synced([1])
    outbox.delete_synced([1])


async def test_what_sqloutbox_may_have_delivered_is_still_known_when_a_second_target_comes(
    folder: Path, targets: Targets
) -> None:
    one, two = targets.remotes["one"], targets.remotes["two"]
    leave_half_drained(folder, one)
    with pytest.raises(DOWN):
        await targets.drain("one", table="orders", one=targets.down("one", only="INSERT INTO orders"))
    remains = await targets.drain("one", "two", table="orders")
    assert remains == {"shop.one/orders": 0, "shop.two/orders": 0, "shop/orders": 0}
    assert (one.ids, two.ids) == ([11, 12, 13], [12, 13])


async def test_what_sqloutbox_delivered_between_two_runs_is_known_when_a_second_target_comes(
    folder: Path, targets: Targets
) -> None:
    one, two = targets.remotes["one"], targets.remotes["two"]
    with SqlQueue(folder) as queue:
        queue.push_many("orders", [(INSERT, [n, 0]) for n in (1, 2)])
        await targets.drain("one", table="orders")
        queue.push_many("orders", [(INSERT, [n, 0]) for n in (3, 4, 5)])
    # It has delivered 3 and 4, but died before it noted 4.
    one.run("INSERT INTO orders (id, total, outbox_seq) VALUES (3, 0, 3), (4, 0, 4)")
    outbox = sqloutbox.Outbox(folder / "orders.db", "orders")
    outbox.mark_synced([3])
    outbox.delete_synced([3])
    remains = await targets.drain("one", "two", table="orders")
    assert remains == {"shop.one/orders": 0, "shop.two/orders": 0, "shop/orders": 0}
    assert (one.ids, two.ids) == ([1, 2, 3, 4, 5], [4, 5])


async def test_half_drained_file_of_sqloutbox_is_first_taken_up_for_one_target(folder: Path, targets: Targets) -> None:
    one, two = targets.remotes["one"], targets.remotes["two"]
    leave_half_drained(folder, one)
    with pytest.raises(DOWN, match=r"drained by sqloutbox.*shop.one, shop.two.*once with that target alone"):
        await targets.drain("one", "two", table="orders")
    assert (one.ids, two.ids) == ([11, 12], [])
    shutil.rmtree(folder / "targets")
    await targets.drain("one", table="orders")
    await targets.drain("one", "two", table="orders")
    assert (one.ids, two.ids) == ([11, 12, 13], [])
    with SqlQueue(folder) as queue:
        queue.push("orders", INSERT, [14, 0])
    await targets.drain("one", "two", table="orders")
    assert (one.ids, two.ids) == ([11, 12, 13, 14], [14])


async def test_lost_row_holds_both_targets_up_once_and_none_for_good(folder: Path, targets: Targets) -> None:
    push(folder, 5)
    with pytest.raises(DOWN):
        await targets.drain("one", one=targets.down("one", only="balance"))
    ask(folder / "accounts.db", "DELETE FROM outbox_queue WHERE seq = 3")
    await targets.drain("one", "two")
    assert targets.balances("one", "two") == [2, 2]
    ask(folder / "accounts.db", "INSERT INTO outbox_sync_log VALUES (3, 'accounts', '2026-01-31T12:00:00+00:00')")
    await targets.drain("one", "two")
    assert targets.balances("one", "two") == [4, 4]


async def test_target_that_joins_two_others_changes_nothing_for_them(folder: Path, targets: Targets) -> None:
    push(folder, 20)
    blocked = folder / "targets" / "shop.two"
    blocked.parent.mkdir()
    blocked.write_text("")
    # The first copy has taken row 1, which is in the shared file still.
    with pytest.raises(DOWN):
        await targets.drain("one", "two")
    blocked.unlink()
    (folder / "targets" / "shop.one").rename(folder / "aside")
    with pytest.raises(DOWN):
        await targets.drain("three", three=targets.down("three", after=True, only="balance"))
    (folder / "aside").rename(folder / "targets" / "shop.one")
    await targets.drain("one", "two", "three")
    assert targets.balances("one", "two", "three") == [20, 20, 20]


async def test_application_database_is_handed_over_as_well(tmp_path: Path, targets: Targets) -> None:
    file = tmp_path / "app.db"
    ask(file, "CREATE TABLE customers (id INTEGER PRIMARY KEY)")

    def config(*names: str) -> SyncConfig:
        listed = [TargetConfig(name, ["accounts"]) for name in names]
        return SyncConfig.single(None, listed, name="shop", db_file=file)

    service = SyncService(config("one"), targets.writers())
    assert await service.pending_count() == {"shop.one/accounts": 0}
    with SqlQueue(file=file) as queue:
        queue.push("accounts", ADD, [10, 1])
        queue.push("acounts", ADD, [1, 1])
    assert await service.pending_count() == {"shop.one/accounts": 1}
    lost = targets.writers(one=targets.down("one", after=True, only="balance"))
    with pytest.raises(DOWN):
        await SyncService(config("one"), lost).drain()
    await SyncService(config("one", "two"), targets.writers()).drain()
    assert targets.balances("one", "two") == [10, 10]
    assert ask(file, "PRAGMA journal_mode") == [("delete",)]
    assert [(str(ref), ref.is_expected) for ref in find_queues(config("one", "two"))] == [
        ("all/accounts", True),
        ("shop.one/accounts", True),
        ("shop.two/accounts", True),
        ("acounts", False),
    ]


# -- each for itself ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", ["no list", b"\xff\xfe"], ids=["text", "bytes"])
async def test_unreadable_row_is_judged_by_each_target(folder: Path, targets: Targets, payload: str | bytes) -> None:
    push(folder, 3)
    ask(folder / "accounts.db", "UPDATE outbox_queue SET payload = ? WHERE seq = 2", payload)
    listed = [TargetConfig("one", ["accounts"], dead="skip"), TargetConfig("two", ["accounts"], dead="park")]
    config = SyncConfig.single(folder, listed, name="shop")
    remains = await SyncService(config, targets.writers()).drain()
    assert remains == {"shop.one/accounts": 0, "shop.two/accounts": 2, "shop/accounts": 0}
    assert targets.balances("one", "two") == [2, 1]
    copy = folder / "targets" / "shop.one" / "accounts.db"
    assert ask(copy, "SELECT payload, reason FROM outbox_dead_log") == [(payload, "undecodable")]


async def test_copy_has_the_time_at_which_its_row_was_pushed(folder: Path, targets: Targets) -> None:
    push(folder)
    ask(folder / "accounts.db", "UPDATE outbox_queue SET created_at = '2026-01-31 12:00:00'")
    with pytest.raises(DOWN):
        await targets.drain("one", "two", two=targets.down("two"))
    copy = folder / "targets" / "shop.two" / "accounts.db"
    assert ask(copy, "SELECT created_at FROM outbox_queue") == [("2026-01-31 12:00:00",)]


async def test_copy_goes_on_while_the_shared_file_cannot_be_read(folder: Path, targets: Targets) -> None:
    push(folder, 4)
    with pytest.raises(DOWN):
        await targets.drain("one", "two", two=targets.down("two"))
    remove(folder)
    (folder / "accounts.db").write_bytes(b"no database " * 100)
    with pytest.raises(DOWN, match="not a database"):
        await targets.drain("one", "two")
    assert targets.balances("one", "two") == [4, 4]


async def test_shared_audit_log_is_kept_as_long_as_any_target_says(folder: Path, targets: Targets) -> None:
    listed = [
        TargetConfig("one", [TableConfig("accounts", retain_log_days=30)]),
        TargetConfig("two", ["accounts"], retain_log_days=2),
    ]
    config = SyncConfig.single(folder, listed, name="shop", retain_log_days=1)
    push(folder, 3)
    await SyncService(config, targets.writers()).drain()
    file = folder / "accounts.db"
    for seq, days in ((1, 40), (2, 8)):
        old = (datetime.now(UTC) - timedelta(days=days)).isoformat()
        ask(file, "UPDATE outbox_sync_log SET synced_at = ? WHERE seq = ?", old, seq)
    async with running(SyncService(config, targets.writers())):
        await until(lambda: (1,) not in ask(file, "SELECT seq FROM outbox_sync_log"))
    assert ask(file, "SELECT seq FROM outbox_sync_log ORDER BY seq") == [(2,), (3,)]


# -- looking at a service ----------------------------------------------------------------------------------------------


async def test_counting_makes_no_file_and_leaves_no_thread(folder: Path, targets: Targets) -> None:
    service = SyncService(targets.config("one", "two"), targets.writers())
    nothing = {"shop.one/accounts": 0, "shop.two/accounts": 0, "shop/accounts": 0}
    assert await service.pending_count() == nothing
    assert list_files(folder) == []
    push(folder, 3)
    assert await service.pending_count() == {**nothing, "shop/accounts": 3}
    assert await service.total_pending() == 3
    assert [each.name for each in threading.enumerate() if each.name.startswith("pillarbox-queue")] == []


async def test_counting_a_file_that_is_no_queue_says_so(folder: Path, targets: Targets) -> None:
    os.mkdir(folder)
    ask(folder / "accounts.db", "CREATE TABLE notes (id INTEGER)")
    service = SyncService(targets.config("one"), targets.writers())
    with pytest.raises(StoreUnavailable, match=r"Queue shop.one/accounts: .*is not a queue"):
        await service.pending_count()


async def test_outage_is_remembered_and_the_services_hook_hears_of_it(folder: Path, targets: Targets) -> None:
    paused: list[tuple[str, str]] = []

    class Recording(Hook):
        def paused(self, sink: str, reason: str) -> None:
            paused.append((sink, reason))

    push(folder)
    writers = targets.writers(one=targets.down("one", only="balance"))
    with pytest.raises(DOWN):
        await SyncService(targets.config("one"), writers, hook=Recording()).drain()
    assert [(sink, "the line is dead" in reason) for sink, reason in paused] == [("shop.one", True)]
    ((outage,),) = ask(folder / "accounts.db", "SELECT outage FROM pillarbox_sync_state")
    assert "the line is dead" in outage
