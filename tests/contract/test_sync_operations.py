"""What operators do with queue files of the real sqloutbox: look, skip, replay, migrate; also while it pushes."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pillarbox.errors import PillarboxError, SchemaError
from pillarbox.sync import queues
from pillarbox.sync.config import AppConfig, SyncConfig, TargetConfig
from pillarbox.sync.dead import Replayed, get_dead, list_dead, replay, replay_all, skip, skip_lost
from pillarbox.sync.health import QueueHealth, read_health
from pillarbox.sync.migrating import Migration, check_migration, migrate
from pillarbox.sync.queues import QueueRef, choose_queues, find_queues
from pillarbox.sync.state import ensure_state, write_state
from pillarbox.sync.verify import verify_queue
from tests.contract.sqloutbox_files import (
    Sqloutbox,
    chain,
    make_old_file,
    orders,
    queue,
    read,
    snapshot,
    sqloutbox,
    write,
)

__all__ = ["orders", "sqloutbox"]

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
DEAD_LOG = "SELECT seq, tag, attempts, last_error, last_error_class, reason FROM outbox_dead_log ORDER BY seq"
LOG = "SELECT seq FROM outbox_sync_log ORDER BY seq"


def edit_state(ref: QueueRef, **values: object) -> None:
    with closing(sqlite3.connect(ref.path)) as db, db:
        ensure_state(db, ref.namespace)
        write_state(db, ref.namespace, **values)


def park(ref: QueueRef, seq: int) -> None:
    edit_state(
        ref, head=seq, attempts=10, tried_at=NOW, error="no such column", error_class="DETERMINISTIC", dead_at=NOW
    )


def state_of(ref: QueueRef) -> tuple[object, ...]:
    (row,) = read(ref.path, "SELECT settled, head, attempts, due_at, error, dead_at FROM pillarbox_sync_state")
    return tuple(row)


# -- which queues there are --------------------------------------------------------------------------------------------


def names(refs: list[QueueRef], folder: Path) -> list[tuple[str, str, str]]:
    return [(ref.target, ref.table, str(ref.path.relative_to(folder))) for ref in refs]


def test_every_table_of_a_configuration_has_a_queue_and_a_copy_for_each_of_several_targets(tmp_path: Path) -> None:
    main, archive = TargetConfig("main", ["orders", "payments"]), TargetConfig("archive", ["payments"])
    config = SyncConfig([AppConfig(name="shop", db_dir=tmp_path / "data", targets=[main, archive], max_pending=40)])
    assert names(find_queues(config), tmp_path) == [
        ("shop.main", "orders", "data/orders.db"),
        ("all", "payments", "data/payments.db"),
        ("shop.main", "payments", "data/targets/shop.main/payments.db"),
        ("shop.archive", "payments", "data/targets/shop.archive/payments.db"),
    ]
    assert [ref.max_pending for ref in find_queues(config)] == [40, 40, None, None]


def test_tables_of_one_file_are_its_namespaces(tmp_path: Path) -> None:
    targets = [TargetConfig("main", ["orders", "payments"]), TargetConfig("archive", ["payments"])]
    found = find_queues(SyncConfig([AppConfig(name="shop", db_file=tmp_path / "app.db", targets=targets)]))
    assert names(found, tmp_path) == [
        ("shop.main", "orders", "app.db"),
        ("all", "payments", "app.db"),
        ("shop.main", "payments", "app.db.targets/shop.main/payments.db"),
        ("shop.archive", "payments", "app.db.targets/shop.archive/payments.db"),
    ]
    assert [ref.is_application_file for ref in found] == [True, True, False, False]


def test_copy_that_is_left_of_a_second_target_is_still_a_queue(tmp_path: Path) -> None:
    config = SyncConfig.single(tmp_path, [TargetConfig("main", ["orders"])], name="shop")
    assert len(find_queues(config)) == 1
    copy = tmp_path / "targets" / "shop.main" / "orders.db"
    copy.parent.mkdir(parents=True)
    copy.touch()
    assert [ref.target for ref in find_queues(config)] == ["all", "shop.main"]


def test_rows_that_go_nowhere_are_listed_beside_what_is_configured(sqloutbox: Sqloutbox, tmp_path: Path) -> None:
    config = SyncConfig.single(tmp_path, [TargetConfig("main", ["orders"])], name="shop")
    for target in ("shop.old", "shop.done"):
        (tmp_path / "targets" / target).mkdir(parents=True)
        sqloutbox.call(queue(tmp_path / "targets" / target / "orders.db"), ["push", "a"])
    sqloutbox.call(queue(tmp_path / "targets" / "shop.done" / "orders.db"), ["deliver", 1])
    sqloutbox.call(queue(tmp_path / "odrers.db"), ["push", "a"])
    sqloutbox.call(queue(tmp_path / "sent.db"), ["push", "a", "b"], ["deliver", 1], ["mark", 1])
    sqloutbox.call(queue(tmp_path / "orders.db", "other"), ["push", "a"])
    write(tmp_path / "notes.db", "CREATE TABLE notes (id INTEGER)")
    (tmp_path / "text.db").write_text("no database")
    found = find_queues(config)
    assert names(found, tmp_path) == [
        ("shop.main", "orders", "orders.db"),
        ("", "odrers", "odrers.db"),
        ("", "other", "orders.db"),
        ("shop.old", "orders", "targets/shop.old/orders.db"),
    ]
    assert [ref.is_expected for ref in found] == [True, False, False, False]


def test_folder_is_searched_for_files_namespaces_and_copies(sqloutbox: Sqloutbox, tmp_path: Path) -> None:
    sqloutbox.call(queue(tmp_path / "shared.db", "one"), ["push", "a"])
    sqloutbox.call(queue(tmp_path / "shared.db", "two"), ["push", "a"], ["deliver", 1])
    sqloutbox.call(queue(tmp_path / "empty.db"), ["fetch"])
    copies = tmp_path / "targets" / "shop.main"
    (tmp_path / "folder.db").mkdir()
    copies.mkdir(parents=True)
    sqloutbox.call(queue(copies / "one.db"), ["push", "a"])
    write(tmp_path / "notes.db", "CREATE TABLE notes (id INTEGER)")
    assert names(find_queues(tmp_path), tmp_path) == [
        ("", "empty", "empty.db"),
        ("", "notes", "notes.db"),
        ("", "one", "shared.db"),
        ("", "two", "shared.db"),
        ("shop.main", "one", "targets/shop.main/one.db"),
    ]
    assert names(find_queues(tmp_path / "shared.db"), tmp_path) == [("", "one", "shared.db"), ("", "two", "shared.db")]
    with pytest.raises(PillarboxError, match="does not exist"):
        find_queues(tmp_path / "nowhere")


def test_name_that_nobody_has_is_an_error_that_lists_the_names(tmp_path: Path) -> None:
    refs = [queue(tmp_path / f"{name}.db") for name in ("orders", "payments")]
    assert choose_queues(refs, target=None, table="orders") == refs[:1]
    with pytest.raises(PillarboxError, match="There is no table 'order' here; there is: orders, payments"):
        choose_queues(refs, target=None, table="order")
    with pytest.raises(PillarboxError, match=r"There is no target 'shop\.main' here; there is: none"):
        choose_queues(refs, target="shop.main", table=None)


# -- health ------------------------------------------------------------------------------------------------------------


def test_waiting_rows_are_counted_and_the_oldest_is_known(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    before = datetime.now(UTC)
    sqloutbox.call(orders, ["push", "a", "b", "c", "d"], ["deliver", 1], ["mark", 1])
    health = read_health(replace(orders, max_pending=8))
    assert (health.state, health.waiting, health.head, health.capacity) == ("ok", 2, 3, 25.0)
    assert (health.attempts, health.error, health.dead, health.settled) == (0, None, 0, 0)
    assert health.oldest_at is not None
    assert before <= health.oldest_at <= datetime.now(UTC)
    assert health.age is not None
    assert timedelta(0) <= health.age < MINUTE
    assert health.size >= orders.path.stat().st_size > 0


def test_queue_without_waiting_rows_is_empty(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a"], ["deliver", 1])
    health = read_health(orders)
    assert (health.state, health.waiting, health.head, health.age, health.capacity) == ("empty", 0, None, None, None)


def test_head_that_failed_is_retrying_until_it_is_dead(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b"])
    edit_state(orders, head=1, attempts=3, tried_at=NOW, due_at=NOW + MINUTE, error="locked", error_class="TRANSIENT")
    health = read_health(orders)
    assert (health.state, health.head, health.attempts) == ("retrying", 1, 3)
    assert (health.tried_at, health.due_at, health.error, health.error_class) == (
        NOW,
        NOW + MINUTE,
        "locked",
        "TRANSIENT",
    )
    edit_state(orders, dead_at=NOW)
    assert read_health(orders).state == "dead"
    sqloutbox.call(orders, ["deliver", 1])
    health = read_health(orders)
    assert (health.state, health.head, health.attempts, health.error) == ("ok", 2, 0, None)


def test_outage_is_why_a_queue_is_blocked_unless_something_else_holds_it(
    sqloutbox: Sqloutbox, orders: QueueRef
) -> None:
    sqloutbox.call(orders, ["push", "a", "b"])
    edit_state(orders, outage="it is down")
    health = read_health(orders)
    assert (health.state, health.head, health.attempts, health.error) == ("blocked", 1, 0, "it is down")
    edit_state(orders, head=1, attempts=3, due_at=NOW, error="locked", error_class="TRANSIENT")
    health = read_health(orders)
    assert (health.state, health.attempts, health.due_at) == ("blocked", 3, NOW)
    assert (health.error, health.error_class) == ("it is down", None)
    edit_state(orders, dead_at=NOW)
    assert (read_health(orders).state, read_health(orders).error) == ("dead", "locked")
    sqloutbox.call(orders, ["deliver", 2])
    assert (read_health(orders).state, read_health(orders).error) == ("empty", "it is down")


def test_tries_that_release_06_noted_are_seen(orders: QueueRef) -> None:
    six = Sqloutbox("0.6")
    six.call(orders, ["push", "a", "b"], ["record_attempt", 1, "no such table", "DETERMINISTIC"])
    # What we noted of another row is not about this one.
    edit_state(orders, head=7, attempts=9, due_at=NOW)
    health = read_health(orders)
    assert (health.state, health.attempts, health.error, health.due_at) == ("retrying", 1, "no such table", None)
    assert (health.error_class, health.tried_at is not None) == ("DETERMINISTIC", True)


def test_lost_predecessor_of_the_head_is_a_gap(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b"])
    write(orders.path, "DELETE FROM outbox_queue WHERE seq = 1")
    health = read_health(orders)
    assert (health.state, health.error) == ("gap", "Row 1, the one before row 2, is lost.")
    edit_state(orders, settled=1)
    health = read_health(orders)
    assert (health.state, health.settled) == ("ok", 1)


def test_file_that_is_no_queue_is_said_to_be_what_it_is(tmp_path: Path) -> None:
    foreign, broken, newer = (tmp_path / f"{name}.db" for name in ("foreign", "broken", "newer"))
    write(foreign, "CREATE TABLE notes (id INTEGER)")
    broken.write_bytes(b"this was never a database" * 10)
    make_old_file(newer, (1, None))
    write(newer, "PRAGMA user_version = 6")
    states = {path.stem: read_health(queue(path)).state for path in (foreign, broken, newer, tmp_path / "none.db")}
    assert states == {"foreign": "foreign", "broken": "unreadable", "newer": "unreadable", "none": "missing"}


def test_applications_database_without_queue_tables_is_an_unused_queue(tmp_path: Path) -> None:
    write(tmp_path / "app.db", "CREATE TABLE customers (id INTEGER)", "PRAGMA user_version = 12")
    ref = queue(tmp_path / "app.db", "orders", is_application_file=True)
    assert (read_health(ref).state, verify_queue(ref).is_ok, list_dead(ref)) == ("missing", True, [])
    assert check_migration(ref.path, is_application_file=True) == Migration(ref.path, "missing")


def test_locked_file_is_said_to_be_locked(
    sqloutbox: Sqloutbox, orders: QueueRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "_PATIENCE", 0.05)
    sqloutbox.call(orders, ["push", "a"])
    with closing(sqlite3.connect(orders.path, isolation_level=None)) as db:
        db.execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()
        db.execute("BEGIN EXCLUSIVE")
        db.execute("UPDATE outbox_queue SET tag = 'b'")
        health = read_health(orders)
        assert (health.state, "is locked by another program" in (health.error or "")) == ("unreadable", True)
        with pytest.raises(PillarboxError, match="is locked by another program"):
            skip(orders)


def test_looking_changes_nothing_and_leaves_nothing(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b"], ["mark", 1])
    before = snapshot(orders.path.parent)
    assert set(before) == {"orders.db"}
    looks = (read_health, verify_queue, list_dead)
    for look in looks:
        look(orders)
    check_migration(orders.path)
    find_queues(orders.path.parent)
    assert snapshot(orders.path.parent) == before


def test_what_another_connection_has_just_committed_is_seen(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a"])
    with closing(sqlite3.connect(orders.path)) as db:
        for count in (2, 3):
            db.execute(
                "INSERT INTO outbox_queue (created_at, namespace, tag, payload) VALUES ('', 'orders', 's', '[]')"
            )
            db.commit()
            assert read_health(orders).waiting == count


def test_looking_leaves_the_locks_of_this_program_alone(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a"])
    wal = orders.path.with_name(f"{orders.path.name}-wal")
    with closing(sqlite3.connect(orders.path, isolation_level=None)) as db:
        assert db.execute("SELECT count(*) FROM outbox_queue").fetchone() == (1,)
        read_health(orders)
        # The other program ends: it would take the WAL away if it believed to be the last one.
        sqloutbox.call(orders, ["push", "b"])
        assert wal.exists()
        db.execute("UPDATE outbox_queue SET tag = 'c'")
    assert read(orders.path, "SELECT tag FROM outbox_queue") == [("c",), ("c",)]


def test_file_that_changes_while_it_is_read_is_read_again(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a"])
    counts = []

    def count(db: sqlite3.Connection) -> int:
        (found,) = db.execute("SELECT count(*) FROM outbox_queue").fetchone()
        counts.append(found)
        if len(counts) == 1:
            sqloutbox.call(orders, ["push", "b"])
        return int(found)

    assert queues.look(orders.path, count) == 2
    assert counts == [1, 2]


# -- skipping ----------------------------------------------------------------------------------------------------------


def test_skipped_head_is_in_the_dead_log_and_the_next_row_is_the_head(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b", "c"])
    park(orders, 1)
    row = skip(orders)
    assert (row.seq, row.sql, row.arguments, row.reason, row.is_parked) == (1, "a", [1], "manual_skip", False)
    assert read(orders.path, DEAD_LOG) == [(1, "a", 10, "no such column", "DETERMINISTIC", "manual_skip")]
    assert (chain(orders.path), read(orders.path, LOG)) == ([(2, 1, "b"), (3, 2, "c")], [(1,)])
    assert state_of(orders) == (1, None, 0, None, None, None)
    assert read_health(orders).state == "ok"
    assert sqloutbox.call(orders, ["verify"], ["push", "d"], ["fetch"]) == [
        [True, []],
        [4],
        [[2, "b"], [3, "c"], [4, "d"]],
    ]


def test_skipped_row_in_the_middle_leaves_the_chain_whole(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b", "c"])
    edit_state(orders, head=1, attempts=2, error="locked")
    assert skip(orders, 2).seq == 2
    assert read(orders.path, DEAD_LOG) == [(2, "b", 0, None, None, "manual_skip")]
    assert state_of(orders) == (0, 1, 2, None, "locked", None)
    assert verify_queue(orders).is_ok
    assert chain(orders.path) == [(1, None, "a"), (3, 2, "c")]


def test_skipped_tail_leaves_the_next_push_to_follow(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b"])
    skip(orders, 2)
    assert sqloutbox.call(orders, ["push", "c"], ["verify"]) == [[3], [True, []]]
    assert chain(orders.path) == [(1, None, "a"), (3, 1, "c")]


def test_skipping_takes_along_what_release_06_noted(orders: QueueRef) -> None:
    six = Sqloutbox("0.6")
    tries = [["record_attempt", seq, error, "DETERMINISTIC"] for seq, error in ((1, "no table"), (2, "no column"))]
    six.call(orders, ["push", "a", "b", "c"], *tries)
    skip(orders, 2)
    skip(orders)
    assert read(orders.path, DEAD_LOG) == [
        (1, "a", 1, "no table", "DETERMINISTIC", "manual_skip"),
        (2, "b", 1, "no column", "DETERMINISTIC", "manual_skip"),
    ]
    assert six.call(orders, ["replay", 1], ["fetch"]) == [4, [[3, "c"], [4, "a"]]]


def test_row_that_does_not_wait_cannot_be_skipped(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    with pytest.raises(PillarboxError, match=r"There is no file .*orders\.db': nothing was pushed"):
        skip(orders)
    sqloutbox.call(orders, ["push", "a", "b"], ["deliver", 1])
    with pytest.raises(
        PillarboxError, match="Row 1 of queue 'orders' does not wait: it was delivered or skipped before"
    ):
        skip(orders, 1)
    with pytest.raises(PillarboxError, match="Row 9 of queue 'orders' does not wait: no row has this number"):
        skip(orders, 9)
    sqloutbox.call(orders, ["deliver", 1])
    with pytest.raises(PillarboxError, match="Nothing waits in queue 'orders'"):
        skip(orders)


def test_lost_row_is_skipped_only_if_it_is_lost_and_missed(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b", "c", "d", "e"], ["deliver", 1])
    skip(orders)
    write(orders.path, "DELETE FROM outbox_queue WHERE seq = 4")
    for seq, reason in {
        1: "Row 1 of queue 'orders' is not lost: it was delivered",
        2: "Row 2 of queue 'orders' is not lost: it is in the dead log",
        3: "Row 3 of queue 'orders' is not lost: it is in the queue",
        9: "No waiting row of queue 'orders' names row 9",
    }.items():
        with pytest.raises(PillarboxError, match=reason):
            skip_lost(orders, seq)
    assert not verify_queue(orders).is_ok
    skip_lost(orders, 4)
    assert verify_queue(orders).is_ok
    assert read(orders.path, LOG) == [(1,), (2,), (4,)]
    # The release itself asks for an unbroken row of neighbours within a batch, so the rows go one by one.
    assert sqloutbox.call(orders, ["deliver", 1], ["fetch"], ["verify"])[1:] == [[[5, "e"]], [True, []]]


# -- replaying ---------------------------------------------------------------------------------------------------------


def test_replayed_row_goes_to_the_end_with_a_new_number_and_out_of_the_dead_log(
    sqloutbox: Sqloutbox, orders: QueueRef
) -> None:
    sqloutbox.call(orders, ["push", "a", "b", "c"])
    skip(orders)
    assert replay(orders, 1) == Replayed(1, 4)
    assert chain(orders.path) == [(2, 1, "b"), (3, 2, "c"), (4, 3, "a")]
    assert read(orders.path, "SELECT source, payload, synced FROM outbox_queue WHERE seq = 4") == [
        ("Neighbour", "[1]", 0)
    ]
    assert list_dead(orders) == []
    assert sqloutbox.call(orders, ["verify"], ["push", "d"], ["verify"]) == [[True, []], [5], [True, []]]
    with pytest.raises(PillarboxError, match="Row 1 of queue 'orders' is not dead"):
        replay(orders, 1)


def test_replay_into_an_empty_queue_begins_a_chain(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a"])
    skip(orders)
    assert replay(orders, 1) == Replayed(1, 2)
    assert chain(orders.path) == [(2, None, "a")]


def test_what_release_06_gave_up_is_listed_shown_and_replayed(orders: QueueRef) -> None:
    six = Sqloutbox("0.6")
    six.call(
        orders, ["push", "a", "b", "c"], ["record_attempt", 1, "bad", "UNKNOWN"], ["dead_letter", 1, "max_attempts"]
    )
    (row,) = list_dead(orders)
    assert (row.seq, row.sql, row.arguments, row.attempts, row.error) == (1, "a", [1], 1, "bad")
    assert (row.error_class, row.reason, row.source, row.is_parked) == ("UNKNOWN", "max_attempts", "Neighbour", False)
    assert get_dead(orders, 1) == row
    assert replay(orders, 1) == Replayed(1, 4)
    # Row 2 still names row 1 as the one before it.
    assert verify_queue(orders).is_ok
    assert six.call(orders, ["verify"]) == [[True, []]]


def test_parked_head_is_listed_and_due_again_in_its_place(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b"])
    park(orders, 1)
    (row,) = list_dead(orders)
    assert (row.seq, row.sql, row.attempts, row.error, row.dead_at) == (1, "a", 10, "no such column", NOW)
    assert (row.is_parked, row.reason, row.prev_seq) == (True, "parked", None)
    replayed = replay(orders, 1)
    assert (replayed, replayed.is_in_place) == (Replayed(1, 1), True)
    assert state_of(orders) == (0, 1, 0, None, "no such column", None)
    assert chain(orders.path) == [(1, None, "a"), (2, 1, "b")]
    assert (list_dead(orders), read_health(orders).state) == ([], "ok")


def test_head_between_two_tries_is_due_at_once(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b"])
    edit_state(orders, head=1, attempts=3, due_at=NOW + MINUTE, error="locked")
    assert replay(orders, 1) == Replayed(1, 1)
    assert state_of(orders) == (0, 1, 0, None, "locked", None)
    with pytest.raises(PillarboxError, match="Row 2 of queue 'orders' is not dead"):
        replay(orders, 2)


def test_all_dead_rows_are_replayed_in_order(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", *"abcde"])
    skip(orders, 2)
    skip(orders)
    park(orders, 3)
    assert [row.seq for row in list_dead(orders)] == [1, 2, 3]
    assert replay_all(orders) == [Replayed(3, 3), Replayed(1, 6), Replayed(2, 7)]
    assert [tag for _, _, tag in chain(orders.path)] == ["c", "d", "e", "a", "b"]
    assert (replay_all(orders), verify_queue(orders).is_ok) == ([], True)


@pytest.mark.parametrize(
    ("table", "change"),
    [("outbox_dead_log", "INSERT"), ("outbox_sync_log", "INSERT"), ("outbox_queue", "DELETE")],
)
def test_skip_that_fails_half_way_changes_nothing(
    sqloutbox: Sqloutbox, orders: QueueRef, table: str, change: str
) -> None:
    sqloutbox.call(orders, ["push", "a", "b"])
    edit_state(orders, settled=0)
    write(orders.path, f"CREATE TRIGGER stop BEFORE {change} ON {table} BEGIN SELECT RAISE(ABORT, 'no disk'); END")
    with pytest.raises(PillarboxError, match="cannot be used: no disk"):
        skip(orders)
    write(orders.path, "DROP TRIGGER stop")
    assert (chain(orders.path), read(orders.path, DEAD_LOG), read(orders.path, LOG)) == (
        [(1, None, "a"), (2, 1, "b")],
        [],
        [],
    )


@pytest.mark.parametrize(("table", "change"), [("outbox_queue", "INSERT"), ("outbox_dead_log", "DELETE")])
def test_replay_that_fails_half_way_changes_nothing(
    sqloutbox: Sqloutbox, orders: QueueRef, table: str, change: str
) -> None:
    sqloutbox.call(orders, ["push", "a", "b"])
    skip(orders)
    write(orders.path, f"CREATE TRIGGER stop BEFORE {change} ON {table} BEGIN SELECT RAISE(ABORT, 'no disk'); END")
    with pytest.raises(PillarboxError, match="cannot be used: no disk"):
        replay(orders, 1)
    write(orders.path, "DROP TRIGGER stop")
    assert (chain(orders.path), [row.seq for row in list_dead(orders)]) == ([(2, 1, "b")], [1])


def test_skipping_and_replaying_while_sqloutbox_pushes_loses_nothing(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b", "c"])
    rounds = 0
    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(sqloutbox.call, orders, ["push", *(f"s{number}" for number in range(400))])
        # Not without end: SQLite's lock is not fair, and the release drops what it cannot push within five seconds.
        while not pushing.done() and rounds < 50:
            seq = skip(orders).seq
            assert replay(orders, seq).new_seq > seq
            rounds += 1
    assert None not in pushing.result()[0]
    assert rounds > 0
    tags = sorted(tag for _, _, tag in chain(orders.path))
    assert tags == sorted(["a", "b", "c", *(f"s{number}" for number in range(400))])
    found = verify_queue(orders)
    assert (found.problems, found.warnings) == ((), ())


# -- migrating ---------------------------------------------------------------------------------------------------------


def version(path: Path) -> int:
    ((found,),) = read(path, "PRAGMA user_version")
    return int(found)


def test_old_file_gets_what_the_service_needs_and_sqloutbox_goes_on_with_it(
    sqloutbox: Sqloutbox, orders: QueueRef
) -> None:
    make_old_file(orders.path, (1, None), (2, 1))
    steps = (
        "add column source",
        "add table outbox_sync_log",
        "add table pillarbox_sync_state",
        "add index idx_outbox_prev",
        "add index idx_outbox_prev_unique",
        "add index idx_outbox_worker",
        "add index idx_sync_log",
    )
    before = snapshot(orders.path.parent)
    assert check_migration(orders.path) == Migration(orders.path, "pending", steps)
    assert snapshot(orders.path.parent) == before
    assert migrate(orders.path) == Migration(orders.path, "migrated", steps)
    assert check_migration(orders.path) == Migration(orders.path, "current")
    assert migrate(orders.path) == Migration(orders.path, "current")
    assert version(orders.path) == 0
    assert sqloutbox.call(orders, ["push", "s3"], ["verify"], ["fetch"]) == [
        [3],
        [True, []],
        [[1, "s1"], [2, "s2"], [3, "s3"]],
    ]


def test_file_of_a_release_gets_our_table_and_keeps_its_version(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a"])
    before = version(orders.path)
    assert migrate(orders.path) == Migration(orders.path, "migrated", ("add table pillarbox_sync_state",))
    assert (version(orders.path), before) == ((before, 5) if sqloutbox.release == "0.6" else (before, 0))
    assert chain(orders.path) == [(1, None, "a")]


def test_rows_that_were_delivered_and_not_deleted_are_finished(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b", "c"], ["mark", 2])
    assert "move 2 delivered rows to the sync log" in check_migration(orders.path).steps
    migrate(orders.path)
    assert (chain(orders.path), read(orders.path, LOG)) == ([(3, 2, "c")], [(1,), (2,)])
    assert verify_queue(orders).is_ok


def test_forked_chain_is_refused_until_it_is_mended(orders: QueueRef) -> None:
    make_old_file(orders.path, (1, None), (2, 1), (3, 1), (4, 3))
    found = check_migration(orders.path)
    assert (found.status, "rows 2, 3 all name row 1" in (found.problem or "")) == ("incompatible", True)
    before = snapshot(orders.path.parent)
    with pytest.raises(SchemaError, match="rows 2, 3 all name row 1 as the one before them"):
        migrate(orders.path)
    assert snapshot(orders.path.parent) == before
    skip(orders, 2)
    assert migrate(orders.path).status == "migrated"
    assert verify_queue(orders).is_ok
    assert replay(orders, 2) == Replayed(2, 5)


def test_newer_and_foreign_files_are_refused(sqloutbox: Sqloutbox, orders: QueueRef, tmp_path: Path) -> None:
    sqloutbox.call(orders, ["push", "a"])
    write(orders.path, "PRAGMA user_version = 6")
    assert check_migration(orders.path).status == "incompatible"
    with pytest.raises(SchemaError, match="has schema version 6; expected at most 5"):
        migrate(orders.path)
    write(tmp_path / "notes.db", "CREATE TABLE notes (id INTEGER)")
    assert check_migration(tmp_path / "notes.db").status == "foreign"
    with pytest.raises(SchemaError, match="is not a queue: it has no table outbox_queue"):
        migrate(tmp_path / "notes.db")
    assert check_migration(tmp_path / "none.db").status == "missing"


def test_health_cannot_be_changed(orders: QueueRef) -> None:
    health: QueueHealth = read_health(orders)
    with pytest.raises(AttributeError):
        health.waiting = 1  # type: ignore[misc]
