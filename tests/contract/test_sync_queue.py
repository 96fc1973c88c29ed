"""A queue file's promises, on files of every origin: new, sqloutbox's, very old, or the application's own database."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pillarbox.errors import QueueError, QueueFull
from pillarbox.sync.files import QueueFile, QueueRow, subscribe
from pillarbox.sync.pushing import FIRST, FIRST_WITH_ROOM
from tests.contract.sync_queue_kit import APPLICATION, KINDS, assert_whole, links, make_file, sql

SQL = "INSERT INTO orders (id, note) VALUES (?, ?)"
Opener = Callable[..., QueueFile]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opener(kind: str, tmp_path: Path) -> Iterator[Opener]:
    path = tmp_path / "orders.db"
    make_file(kind, path)
    opened: list[QueueFile] = []

    def open_file(namespace: str = "orders", **options: Any) -> QueueFile:
        opened.append(QueueFile(path, namespace, is_application_file=kind == APPLICATION, **options))
        return opened[-1]

    yield open_file
    for each in opened:
        each.close()


@pytest.fixture
def file(opener: Opener) -> QueueFile:
    return opener()


def push(file: QueueFile, count: int) -> list[int]:
    return [file.push(SQL, f"[{number}]") for number in range(count)]


def many(count: int, start: int = 0) -> list[tuple[str, str]]:
    return [(SQL, f"[{number}]") for number in range(start, start + count)]


def bury(file: QueueFile, seq: int) -> None:
    """Move a row to the dead log, as the other system does."""
    with sql(file.path) as execute:
        execute("CREATE TABLE IF NOT EXISTS outbox_dead_log (seq INTEGER, namespace TEXT)")
        execute(
            "INSERT INTO outbox_dead_log (seq, namespace) VALUES (?, 'orders')" if not _is_06(execute) else _BURY, seq
        )
        execute("DELETE FROM outbox_queue WHERE seq = ?", seq)


_BURY = (
    "INSERT INTO outbox_dead_log (seq, namespace, tag, payload, attempts, dead_lettered_at, reason) "
    "SELECT seq, namespace, tag, payload, 1, '2026-01-01', 'manual_skip' FROM outbox_queue WHERE seq = ?"
)


def _is_06(execute: Callable[..., list[Any]]) -> bool:
    return len(execute("PRAGMA table_info(outbox_dead_log)")) > 2


# -- the file ----------------------------------------------------------------------------------------------------------


def test_opening_makes_what_is_missing_and_changes_nothing_else(file: QueueFile, kind: str) -> None:
    with sql(file.path) as execute:
        names = {name for (name,) in execute("SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'")}
        columns = {row[1] for row in execute("PRAGMA table_info(outbox_queue)")}
        ((version,),), ((mode,),) = execute("PRAGMA user_version"), execute("PRAGMA journal_mode")
    indexes = {"idx_outbox_worker", "idx_outbox_prev", "idx_outbox_prev_unique", "idx_sync_log"}
    assert names >= {"outbox_queue", "outbox_sync_log", *indexes}
    assert columns >= {"seq", "created_at", "namespace", "source", "tag", "payload", "prev_seq", "synced"}
    assert version == {"sqloutbox-0.6": 5, APPLICATION: 77}.get(kind, 0)
    assert mode == ("delete" if kind == APPLICATION else "wal")
    if kind == "new":
        assert names == {"outbox_queue", "outbox_sync_log", *indexes}


@pytest.mark.parametrize("what", ["INDEX idx_outbox_worker", "INDEX idx_sync_log", "TABLE outbox_sync_log"])
def test_part_that_was_dropped_is_made_again(tmp_path: Path, what: str) -> None:
    path = tmp_path / "orders.db"
    QueueFile(path, "orders").close()
    with sql(path) as execute:
        whole = execute("SELECT name FROM sqlite_master ORDER BY name")
        execute(f"DROP {what}")
        QueueFile(path, "orders").close()
        assert execute("SELECT name FROM sqlite_master ORDER BY name") == whole


def test_new_file_gets_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "orders.db"
    file = QueueFile(path, "orders")
    assert (file.push(SQL, "[]"), path.exists()) == (1, True)
    file.close()


def test_application_file_that_is_new_gets_wal(tmp_path: Path) -> None:
    file = QueueFile(tmp_path / "one.db", "orders", is_application_file=True)
    with sql(file.path) as execute:
        assert execute("PRAGMA journal_mode") == [("wal",)]
    file.close()


def test_journal_mode_stays_when_asked(tmp_path: Path) -> None:
    file = QueueFile(tmp_path / "orders.db", "orders", journal=None)
    assert file.push(SQL, "[]") == 1
    with sql(file.path) as execute:
        assert execute("PRAGMA journal_mode") == [("delete",)]
    file.close()


@pytest.mark.parametrize(
    ("durability", "mode", "level"), [("normal", "wal", 1), ("full", "wal", 2), ("normal", None, 2)], ids=repr
)
def test_commits_are_synced_as_asked(tmp_path: Path, durability: Any, mode: Any, level: int) -> None:
    file = QueueFile(tmp_path / "orders.db", "orders", durability=durability, journal=mode)
    assert file._read("PRAGMA synchronous") == [(level,)]
    file.close()


def test_strictest_user_of_a_file_decides_the_durability(tmp_path: Path) -> None:
    lax = QueueFile(tmp_path / "orders.db", "orders")
    strict = QueueFile(tmp_path / "orders.db", "orders", durability="full")
    assert lax._read("PRAGMA synchronous") == [(2,)]
    for each in (lax, strict):
        each.close()


def test_users_of_a_file_share_a_connection_which_the_last_one_closes(tmp_path: Path) -> None:
    one, two = QueueFile(tmp_path / "orders.db", "orders"), QueueFile(tmp_path / "." / "orders.db", "other")
    assert one._shared is two._shared
    one.close()
    one.close()
    with pytest.raises(QueueError, match="was closed here"):
        one.push(SQL, "[]")
    assert two.push(SQL, "[]") == 1
    assert (tmp_path / "orders.db-wal").exists()
    two.close()
    assert not (tmp_path / "orders.db-wal").exists()
    with pytest.raises(QueueError, match="was closed"):
        two.push(SQL, "[]")


def test_forgotten_file_is_closed_with_the_next_that_is_opened_or_closed(tmp_path: Path) -> None:
    QueueFile(tmp_path / "orders.db", "orders").push(SQL, "[]")
    other = QueueFile(tmp_path / "customers.db", "customers")
    assert not (tmp_path / "orders.db-wal").exists()
    QueueFile(tmp_path / "orders.db", "orders").push(SQL, "[]")
    other.close()
    assert not (tmp_path / "orders.db-wal").exists()


# -- pushing -----------------------------------------------------------------------------------------------------------


def test_pushes_get_rising_numbers_and_name_the_row_before(file: QueueFile) -> None:
    assert push(file, 3) == [1, 2, 3]
    assert links(file.path) == [(1, None), (2, 1), (3, 2)]


def test_row_holds_what_was_pushed(file: QueueFile) -> None:
    before = datetime.now(UTC)
    file.push(SQL, '[1,"grüße \\u0000"]', source="Shop")
    (row,) = file.rows()
    assert row == QueueRow(1, row.created_at, "orders", "Shop", SQL, '[1,"grüße \\u0000"]', None)
    assert before <= datetime.fromisoformat(row.created_at) <= datetime.now(UTC)
    assert row.created_at.endswith("+00:00")


def test_row_cannot_be_changed(file: QueueFile) -> None:
    file.push(SQL, "[]")
    with pytest.raises(dataclasses.FrozenInstanceError):
        file.rows()[0].seq = 5  # type: ignore[misc]


def test_many_are_chained_behind_what_waits(file: QueueFile) -> None:
    push(file, 1)
    assert file.push_many(many(3), source="Shop") == [2, 3, 4]
    assert file.push(SQL, "[]") == 5
    assert file.push_many(many(1)) == [6]
    assert_whole(file.path, range(1, 7))
    assert [row.payload for row in file.rows()[1:4]] == ["[0]", "[1]", "[2]"]
    assert {row.source for row in file.rows()[1:4]} == {"Shop"}


def test_many_are_stored_together_or_not_at_all(file: QueueFile) -> None:
    push(file, 1)
    with pytest.raises(QueueError, match="refused the statement"):
        file.push_many([*many(2), (SQL, None)])  # type: ignore[list-item]
    assert links(file.path) == [(1, None)]
    assert file.push_many(many(2)) == [2, 3]


def test_no_statements_are_no_push(file: QueueFile) -> None:
    assert file.push_many([]) == []
    assert file.waiting() == 0


def test_namespaces_of_one_file_have_chains_of_their_own(opener: Opener) -> None:
    one, two = opener("orders"), opener("payments")
    assert one.push_many(many(2)) == [1, 2]
    assert two.push_many(many(2)) == [3, 4]
    assert one.push_many(many(2)) == [5, 6]
    assert (two.push(SQL, "[]"), one.push(SQL, "[]")) == (7, 8)
    assert_whole(one.path, [1, 2, 5, 6, 8])
    assert_whole(one.path, [3, 4, 7], "payments")
    assert (one.waiting(), two.waiting()) == (5, 3)
    assert [row.seq for row in two.rows()] == [3, 4, 7]


def test_row_that_was_marked_as_delivered_is_still_the_predecessor(file: QueueFile) -> None:
    push(file, 2)
    with sql(file.path) as execute:
        execute("UPDATE outbox_queue SET synced = 1")
    assert (file.waiting(), file.rows()) == (0, [])
    assert (file.push(SQL, "[]"), file.push_many(many(2))) == (3, [4, 5])
    assert_whole(file.path, range(1, 6))


def test_chain_goes_on_after_the_last_row_died(file: QueueFile) -> None:
    push(file, 3)
    bury(file, 3)
    assert file.push_many(many(3)) == [4, 5, 6]
    assert links(file.path) == [(1, None), (2, 1), (4, 2), (5, 4), (6, 5)]
    assert file.check_chain(file.rows()) == []


@pytest.mark.parametrize("options", [{}, {"max_waiting": 10**6}], ids=["unbounded", "capped"])
@pytest.mark.parametrize("is_analyzed", [False, True], ids=["fresh", "analyzed"])
def test_push_reads_the_index_at_its_ends_only(opener: Opener, options: dict[str, int], is_analyzed: bool) -> None:
    file, other = opener(**options), opener("payments")
    for each in (file, other):
        each.push_many(many(500))
    statement, given = (FIRST, 5) if not options else (FIRST_WITH_ROOM, 7)
    with sql(file.path) as execute:
        if is_analyzed:
            execute("ANALYZE")
        plan = [row[3] for row in execute(f"EXPLAIN QUERY PLAN {statement}", *["orders"] * given)]
    looked = [line for line in plan if "outbox_queue" in line]
    ends = "SEARCH main.outbox_queue USING COVERING INDEX idx_outbox_worker (namespace=? AND synced=?)"
    assert set(looked) == {ends}
    assert not [line for line in plan if "TEMP B-TREE" in line]


# -- a cap -------------------------------------------------------------------------------------------------------------


def test_push_above_the_cap_is_refused_and_stores_nothing(opener: Opener) -> None:
    file = opener(max_waiting=3)
    push(file, 3)
    with pytest.raises(QueueFull, match="Queue 'orders' may hold 3 waiting statements") as caught:
        file.push(SQL, "[]")
    assert (caught.value.namespace, caught.value.max_waiting) == ("orders", 3)
    assert file.confirm([1]) == 1
    assert file.push(SQL, "[]") == 4
    assert_rows(file, [2, 3, 4])


def assert_rows(file: QueueFile, seqs: list[int]) -> None:
    assert [row.seq for row in file.rows()] == seqs


def test_many_above_the_cap_are_refused_together(opener: Opener) -> None:
    file = opener(max_waiting=4)
    push(file, 2)
    with pytest.raises(QueueFull, match="no room for 3 more"):
        file.push_many(many(3))
    assert_rows(file, [1, 2])
    assert file.push_many(many(2)) == [3, 4]


def test_cap_counts_rows_and_not_numbers(opener: Opener) -> None:
    file, other = opener(max_waiting=3), opener("payments")
    push(file, 1)
    push(other, 10)
    push(file, 1)
    assert file.seed(1000)
    assert file.push(SQL, "[]") == 1001
    with pytest.raises(QueueFull):
        file.push(SQL, "[]")
    with sql(file.path) as execute:
        execute("UPDATE outbox_queue SET synced = 1 WHERE seq = 1")
    assert file.push(SQL, "[]") == 1002


# -- reading and confirming --------------------------------------------------------------------------------------------


def test_rows_are_read_in_order_up_to_a_limit(file: QueueFile) -> None:
    push(file, 5)
    assert [row.seq for row in file.rows(3)] == [1, 2, 3]
    assert [row.seq for row in file.rows()] == [1, 2, 3, 4, 5]
    assert file.rows(0) == []


def test_confirmed_rows_leave_the_queue_for_the_log(file: QueueFile) -> None:
    push(file, 3)
    assert file.confirm([1, 2]) == 2
    assert_rows(file, [3])
    assert file.waiting() == 1
    assert file.confirm([1, 2, 99]) == 0
    with sql(file.path) as execute:
        assert execute("SELECT seq, namespace FROM outbox_sync_log ORDER BY seq") == [(1, "orders"), (2, "orders")]


def test_rows_of_another_namespace_are_not_confirmed(opener: Opener) -> None:
    one, two = opener("orders"), opener("payments")
    (seq,) = push(two, 1)
    assert one.confirm([seq]) == 0
    assert two.waiting() == 1


def test_full_cycle_empties_the_queue_and_the_next_chain_begins_anew(file: QueueFile) -> None:
    file.push_many(many(2500))
    assert file.confirm([row.seq for row in file.rows()]) == 2500
    assert file.waiting() == 0
    assert file.push_many(many(2)) == [2501, 2502]
    assert links(file.path) == [(2501, None), (2502, 2501)]
    assert file.check_chain(file.rows()) == []


def test_prune_forgets_old_deliveries_but_no_predecessor_of_a_waiting_row(file: QueueFile) -> None:
    push(file, 4)
    file.confirm([1, 2])
    with sql(file.path) as execute:
        execute("UPDATE outbox_sync_log SET synced_at = ?", (datetime.now(UTC) - timedelta(days=8)).isoformat())
    file.confirm([3])
    assert file.prune(delivered_age=timedelta(days=9)) == 0
    assert file.prune(delivered_age=timedelta(days=7)) == 2
    assert file.prune(delivered_age=timedelta(0)) == 0
    with sql(file.path) as execute:
        assert execute("SELECT seq FROM outbox_sync_log") == [(3,)]
    assert file.check_chain(file.rows()) == []


# -- the chain ---------------------------------------------------------------------------------------------------------


def test_whole_chain_misses_nothing(file: QueueFile) -> None:
    assert file.check_chain([]) == []
    push(file, 4)
    assert file.check_chain(file.rows()) == []
    assert file.check_chain(file.rows()[2:]) == []


def test_lost_row_is_missed_until_the_log_explains_it(file: QueueFile) -> None:
    push(file, 4)
    with sql(file.path) as execute:
        execute("DELETE FROM outbox_queue WHERE seq = 2")
        assert file.check_chain(file.rows()) == [2]
        execute("INSERT INTO outbox_sync_log (seq, namespace, synced_at) VALUES (2, 'orders', datetime('now'))")
    assert file.check_chain(file.rows()) == []


def test_dead_row_in_the_middle_is_no_gap(file: QueueFile) -> None:
    push(file, 4)
    bury(file, 2)
    assert file.check_chain(file.rows()) == []


def test_seeded_numbers_begin_above_the_minimum_with_the_chain_whole(file: QueueFile) -> None:
    assert file.seed(0) is False
    assert file.seed(100) is True
    assert file.seed(100) is False
    assert file.seed(50) is False
    assert file.push(SQL, "[]") == 101
    assert file.seed(500) is True
    assert file.push_many(many(3)) == [501, 502, 503]
    assert file.push(SQL, "[]") == 504
    assert_whole(file.path, [101, 501, 502, 503, 504])
    assert file.check_chain(file.rows()) == []


# -- files that cannot take a push -------------------------------------------------------------------------------------


def test_locked_file_raises_in_time_and_names_it(opener: Opener) -> None:
    file = opener(lock_timeout=timedelta(milliseconds=30))
    with sql(file.path) as execute:
        execute("BEGIN IMMEDIATE")
        for call in (lambda: file.push(SQL, "[]"), lambda: file.push_many(many(2))):
            with pytest.raises(QueueError, match="is locked by another connection, and was for 30ms") as caught:
                call()
            assert file.path in str(caught.value)
        execute("ROLLBACK")
    assert file.push(SQL, "[]") == 1


def test_full_file_raises_and_takes_the_next_push_when_there_is_room(file: QueueFile) -> None:
    with sql(file.path) as execute:
        ((pages,),) = execute("PRAGMA page_count")
    file._read(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(QueueError, match=r"cannot grow: .*full\. Nothing was stored"):
        file.push(SQL, "x" * 100_000)
    with pytest.raises(QueueError, match="Nothing was stored"):
        file.push_many([(SQL, "x" * 100_000)] * 3)
    file._read("PRAGMA max_page_count = 1000000")
    assert file.waiting() == 0
    assert file.push(SQL, "[]") == 1


def test_damaged_file_raises(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    file = QueueFile(path, "orders")
    file.push_many(many(5000))
    file.close()
    size = path.stat().st_size
    with path.open("r+b") as raw:
        raw.seek(4096)
        raw.write(b"\xff" * (size - 4096))
    with pytest.raises(QueueError, match="is damaged: database disk image is malformed") as caught:
        QueueFile(path, "orders").push(SQL, "[]")
    assert str(path) in str(caught.value)
    assert path.stat().st_size == size


@pytest.mark.parametrize(
    ("statements", "problem"),
    [
        (["CREATE TABLE customers (id INTEGER)"], "without the table 'outbox_queue' (it has customers)"),
        (
            ["CREATE TABLE outbox_queue (id INTEGER)"],
            "lacks created_at, namespace, payload, prev_seq, seq, synced, tag",
        ),
        (["CREATE TABLE outbox_queue (id INTEGER)", "PRAGMA user_version = 6"], "has schema version 6"),
    ],
    ids=["other tables", "other queue", "newer"],
)
def test_foreign_file_is_refused_and_left_as_it_was(tmp_path: Path, statements: list[str], problem: str) -> None:
    path = tmp_path / "orders.db"
    with sql(path) as execute:
        for statement in statements:
            execute(statement)
    before = path.read_bytes()
    with pytest.raises(QueueError) as caught:
        QueueFile(path, "orders")
    assert problem in str(caught.value)
    assert repr(str(path)) in str(caught.value)
    assert path.read_bytes() == before


def test_file_that_is_no_database_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    path.write_bytes(b"a letter to a friend " * 100)
    with pytest.raises(QueueError, match="is not a SQLite database"):
        QueueFile(path, "orders")
    assert path.read_bytes() == b"a letter to a friend " * 100


def test_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    with pytest.raises(QueueError, match=r"The folder '.*data' for queue files cannot be made"):
        QueueFile(tmp_path / "data" / "orders.db", "orders")
    (tmp_path / "orders.db").mkdir()
    with pytest.raises(QueueError, match=r"orders.db' cannot be opened"):
        QueueFile(tmp_path / "orders.db", "orders")


def test_forked_chain_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    make_file("oldest", path)
    with sql(path) as execute:
        for _ in range(2):
            execute(
                "INSERT INTO outbox_queue (created_at, namespace, tag, payload, prev_seq) VALUES ('', 'o', '', '', 7)"
            )
    with pytest.raises(QueueError, match=r"forked: several rows name one predecessor, prev_seq 7 \(2 rows\)"):
        QueueFile(path, "orders")


def test_failed_push_leaves_no_transaction_open(file: QueueFile) -> None:
    for call in (lambda: file.push("\ud800", "[]"), lambda: file.push_many([(SQL, "[]"), (SQL, "\ud800")])):
        with pytest.raises(QueueError, match="surrogates"):
            call()
        db = file._shared.db
        assert db is not None
        assert not db.in_transaction
    assert links(file.path) == []


def test_removed_file_is_noticed_at_the_next_push(file: QueueFile, caplog: pytest.LogCaptureFixture) -> None:
    push(file, 2)
    for each in Path(file.path).parent.glob("orders.db*"):
        each.unlink()
    assert file.push(SQL, "[]") == 1
    assert links(file.path) == [(1, None)]
    assert "was removed or replaced" in caplog.text


# -- waking -----------------------------------------------------------------------------------------------------------


def test_push_wakes_who_listens_to_that_file(file: QueueFile, tmp_path: Path) -> None:
    seen: list[int] = []
    (tmp_path / "link.db").symlink_to(file.path)
    ends = [subscribe(tmp_path / "link.db", lambda: seen.append(file.waiting())) for _ in range(2)]
    deaf = subscribe(tmp_path / "other.db", lambda: seen.append(-1))
    file.push(SQL, "[]")
    file.push_many(many(2))
    assert seen == [1, 1, 3, 3]
    ends[0]()
    file.push(SQL, "[]")
    assert seen[4:] == [4]
    for end in (ends[0], ends[1], deaf):
        end()
    file.push(SQL, "[]")
    assert len(seen) == 5


def test_listener_that_fails_does_not_fail_the_push(file: QueueFile, caplog: pytest.LogCaptureFixture) -> None:
    end = subscribe(file.path, lambda: 1 / 0)  # type: ignore[arg-type]
    assert file.push(SQL, "[]") == 1
    end()
    assert "ZeroDivisionError" in caplog.text
