"""Verifying a queue finds what is lost, and nothing else, on files of the real sqloutbox."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from pillarbox.sync.dead import replay, skip, skip_lost
from pillarbox.sync.queues import QueueRef
from pillarbox.sync.state import ensure_state, raise_waiting, write_state
from pillarbox.sync.verify import Fork, Gap, VerifyResult, verify_queue, verify_queues
from tests.contract.sqloutbox_files import (
    GAPS,
    Sqloutbox,
    make_old_file,
    orders,
    queue,
    read,
    snapshot,
    sqloutbox,
    write,
)

__all__ = ["orders", "sqloutbox"]


def assert_healthy(ref: QueueRef) -> VerifyResult:
    found = verify_queue(ref)
    assert (found.problems, found.warnings, found.gaps, found.forks) == ((), (), (), ())
    assert found.is_ok
    return found


def edit_state(ref: QueueRef, **values: object) -> None:
    with closing(sqlite3.connect(ref.path)) as db, db:
        ensure_state(db, ref.namespace)
        write_state(db, ref.namespace, **values)


# -- healthy queues ----------------------------------------------------------------------------------------------------


def test_healthy_queue_is_counted(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b", "c"], ["deliver", 1], ["push_many", "d", "e"])
    found = assert_healthy(orders)
    assert (found.waiting, found.logged, found.dead, found.marked, found.orphans) == (4, 1, 0, 0, 0)
    assert (found.first, found.last, found.table, found.path) == (2, 5, "orders", orders.path)
    assert read(orders.path, GAPS) == []


def test_emptied_queue_is_healthy_and_so_is_the_next_chain(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b"], ["deliver", 2])
    found = assert_healthy(orders)
    assert (found.waiting, found.first, found.last, found.logged, found.orphans) == (0, None, None, 2, 0)
    sqloutbox.call(orders, ["push", "c", "d"])
    assert_healthy(orders)


def test_queue_without_a_file_is_healthy_and_gets_none(orders: QueueRef) -> None:
    found = assert_healthy(orders)
    assert found.notes == ("Nothing was pushed yet: there is no file.",)
    assert not orders.path.exists()


def test_numbers_that_jump_over_a_seed_are_no_gap(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b"], ["seed_sequence", 1000], ["push", "c"])
    assert [found.seq for found in assert_healthy(orders).gaps] == []
    assert read(orders.path, "SELECT seq FROM outbox_queue") == [(1,), (2,), (1001,)]


def test_rows_that_were_numbered_anew_are_no_gap(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b", "c"])
    with closing(sqlite3.connect(orders.path)) as db, db:
        assert raise_waiting(db, "orders", 500) == 3
    sqloutbox.call(orders, ["push", "d"])
    found = assert_healthy(orders)
    assert (found.first, found.last) == (501, 504)


def test_namespaces_of_one_file_do_not_disturb_each_other(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    other = queue(orders.path, "payments")
    for _ in range(3):
        sqloutbox.call(orders, ["push", "a", "b"])
        sqloutbox.call(other, ["push", "x"])
    assert [assert_healthy(ref).waiting for ref in (orders, other)] == [6, 3]
    sqloutbox.call(other, ["deliver", 2])
    assert [assert_healthy(ref).waiting for ref in (orders, other)] == [6, 1]


def test_what_release_06_moved_to_its_dead_log_is_no_gap(orders: QueueRef) -> None:
    six = Sqloutbox("0.6")
    six.call(orders, ["push", "a", "b", "c"], ["dead_letter", 2, "max_attempts"])
    found = assert_healthy(orders)
    assert (found.waiting, found.dead) == (2, 1)
    assert "1 row in the dead log" in found.notes[0]


def test_skipped_and_replayed_rows_are_no_gap(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b", "c", "d"])
    skip(orders, 3)
    skip(orders)
    assert_healthy(orders)
    replay(orders, 3)
    assert assert_healthy(orders).waiting == 3
    assert read(orders.path, GAPS) == []


def test_pruned_log_is_no_gap_where_the_rows_are_known_to_have_been_settled(
    sqloutbox: Sqloutbox, orders: QueueRef
) -> None:
    sqloutbox.call(orders, ["push", "a", "b", "c"], ["deliver", 2])
    write(orders.path, "DELETE FROM outbox_sync_log")
    assert not verify_queue(orders).is_ok
    edit_state(orders, settled=2)
    assert_healthy(orders)


def test_old_file_without_a_log_is_verified(tmp_path: Path) -> None:
    ref = queue(tmp_path / "orders.db")
    make_old_file(ref.path, (1, None), (2, 1))
    assert assert_healthy(ref).waiting == 2
    between = "SELECT 2, created_at, namespace, tag, payload, NULL, 0 FROM outbox_queue WHERE seq = 1"
    write(ref.path, "UPDATE outbox_queue SET seq = 3 WHERE seq = 2", f"INSERT INTO outbox_queue {between}")
    assert verify_queue(ref).gaps == ()
    write(ref.path, "DELETE FROM outbox_queue WHERE seq < 3")
    assert verify_queue(ref).gaps == (Gap(seq=3, missing=1, first=1),)


# -- what is lost ------------------------------------------------------------------------------------------------------


def test_removed_row_is_a_gap_until_it_is_accepted_as_lost(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b", "c"])
    write(orders.path, "DELETE FROM outbox_queue WHERE seq = 2")
    found = verify_queue(orders)
    assert (found.is_ok, found.gaps) == (False, (Gap(seq=3, missing=2, first=2),))
    assert found.problems == (
        "Row 3 names row 2 as the one before it, which neither queue, sync log nor dead log has; row 2 may be lost. "
        "Restore what is missing, or accept the loss with: pillarbox sync skip --table orders --lost 2",
    )
    assert read(orders.path, GAPS) == [(3, "orders", 2)]
    skip_lost(orders, 2)
    assert_healthy(orders)
    assert sqloutbox.call(orders, ["deliver", 2], ["push", "d"], ["verify"])[2][0]


def test_gap_is_closed_by_the_audit_log(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b", "c"])
    write(
        orders.path,
        "DELETE FROM outbox_queue WHERE seq = 2",
        "INSERT INTO outbox_sync_log VALUES (2, 'orders', datetime('now'))",
    )
    assert_healthy(orders)


def test_several_removed_rows_are_one_gap_that_says_how_many(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", *"abcdef"])
    write(orders.path, "DELETE FROM outbox_queue WHERE seq IN (3, 4)")
    found = verify_queue(orders)
    assert found.gaps == (Gap(seq=5, missing=4, first=3),)
    assert "up to 2 rows may be lost" in found.problems[0]


def test_lost_head_is_a_gap(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b", "c", "d"], ["deliver", 1])
    write(orders.path, "DELETE FROM outbox_queue WHERE seq < 4")
    assert verify_queue(orders).gaps == (Gap(seq=4, missing=3, first=2),)


def test_gap_in_a_copy_names_its_target_in_the_command(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b", "c"])
    write(orders.path, "DELETE FROM outbox_queue WHERE seq = 2")
    for target in ("shop.main", "all"):
        problem = verify_queue(replace(orders, target=target)).problems[0]
        assert problem.endswith(f"sync skip --table orders --target {target} --lost 2")


def test_fork_is_named(tmp_path: Path) -> None:
    ref = queue(tmp_path / "orders.db")
    make_old_file(ref.path, (1, None), (2, 1), (3, 1))
    found = verify_queue(ref)
    assert (found.is_ok, found.forks, found.gaps) == (False, (Fork(1, (2, 3)),), ())
    assert found.problems[0].startswith("The chain forks: rows 2, 3 all name row 1 as the one before them.")
    skip(ref, 3)
    assert_healthy(ref)


# -- what is odd, but lost nothing -------------------------------------------------------------------------------------


def test_time_that_goes_backwards_is_a_warning(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b", "c"])
    write(orders.path, "UPDATE outbox_queue SET created_at = '2020-01-01T00:00:00+00:00' WHERE seq = 2")
    found = verify_queue(orders)
    assert (found.is_ok, len(found.warnings)) == (True, 1)
    assert found.warnings[0].startswith("Time goes backwards at row 2")


def test_times_in_other_forms_are_compared_as_times(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b"])
    write(
        orders.path,
        "UPDATE outbox_queue SET created_at = '2026-01-01T12:00:00+02:00' WHERE seq = 1",
        "UPDATE outbox_queue SET created_at = '2026-01-01T10:30:00+00:00' WHERE seq = 2",
    )
    assert_healthy(orders)


def test_row_that_names_nobody_is_a_warning(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b", "c"])
    write(orders.path, "UPDATE outbox_queue SET prev_seq = NULL WHERE seq = 2")
    found = verify_queue(orders)
    assert (found.is_ok, len(found.warnings)) == (True, 1)
    assert found.warnings[0].startswith("Row 2 names no row before it")


def test_row_that_waits_and_is_in_the_log_is_a_warning(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b"])
    write(orders.path, "INSERT INTO outbox_sync_log VALUES (2, 'orders', datetime('now'))")
    (warning,) = verify_queue(orders).warnings
    assert warning.startswith("Row 2 waits, although the sync log has it")


def test_row_below_what_was_settled_is_a_warning(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b"])
    edit_state(orders, settled=1)
    (warning,) = verify_queue(orders).warnings
    assert warning == "Row 1 waits, although all rows up to 1 have left the queue before."


def test_marked_rows_and_orphans_are_notes(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b", "c"], ["mark", 1])
    write(orders.path, "INSERT INTO outbox_sync_log VALUES (999, 'orders', datetime('now'))")
    found = assert_healthy(orders)
    assert (found.marked, found.orphans, found.waiting) == (1, 1, 2)
    assert [note.split(" ", 3)[:3] for note in found.notes] == [["1", "delivered", "rows"], ["1", "entries", "of"]]


# -- files that are none -----------------------------------------------------------------------------------------------


def test_database_of_somebody_else_is_told_but_fails_nobody(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    write(path, "CREATE TABLE notes (id INTEGER)")
    found = verify_queue(queue(path, is_expected=False))
    assert found.is_ok
    assert found.warnings == (f"File {str(path)!r} is not a queue: it has no table outbox_queue.",)
    assert not verify_queue(queue(path)).is_ok


@pytest.mark.parametrize(
    "content", [b"not a database at all, but long enough to be one", b"SQLite format 3\0" + b"x" * 200]
)
def test_file_that_cannot_be_read_is_a_problem(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "orders.db"
    path.write_bytes(content)
    found = verify_queue(queue(path))
    assert not found.is_ok
    assert "cannot be used" in found.problems[0]


def test_cut_file_is_a_problem(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push_many", *(f"s{number}" for number in range(500))])
    content = orders.path.read_bytes()
    orders.path.write_bytes(content[: len(content) // 2])
    assert not verify_queue(orders).is_ok
    orders.path.write_bytes(b"")
    for ref in (orders, replace(orders, is_expected=False)):
        assert "nothing was ever stored in it, or it was cut" in verify_queue(ref).problems[0]


def test_newer_file_is_a_problem_unless_its_version_is_the_applications(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a"])
    write(orders.path, "PRAGMA user_version = 6")
    found = verify_queue(orders)
    assert (found.is_ok, "has schema version 6; expected at most 5" in found.problems[0]) == (False, True)
    assert_healthy(replace(orders, is_application_file=True))
    write(orders.path, "CREATE TABLE customers (id INTEGER)")
    assert_healthy(orders)


def test_verifying_changes_nothing(sqloutbox: Sqloutbox, orders: QueueRef) -> None:
    sqloutbox.call(orders, ["push", "a", "b", "c"], ["mark", 1])
    before = snapshot(orders.path.parent)
    for _ in range(2):
        assert_healthy(orders)
    assert snapshot(orders.path.parent) == before


def test_result_cannot_be_changed(orders: QueueRef) -> None:
    with pytest.raises(FrozenInstanceError):
        verify_queue(orders).waiting = 1  # type: ignore[misc]


def test_one_bad_queue_among_good_ones_is_found(sqloutbox: Sqloutbox, tmp_path: Path) -> None:
    refs = [queue(tmp_path / f"{name}.db") for name in ("good", "bad")]
    for ref in refs:
        sqloutbox.call(ref, ["push", "a", "b", "c"])
    write(refs[1].path, "DELETE FROM outbox_queue WHERE seq = 2")
    assert [each.is_ok for each in verify_queues(refs)] == [True, False]
