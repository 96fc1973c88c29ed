"""A queue file under threads, processes, forks, kills and full disks, and shared with the real sqloutbox."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from pillarbox.errors import QueueError
from pillarbox.sync import sharing
from pillarbox.sync.files import QueueFile, open_connection, subscribe
from pillarbox.sync.queue import SqlQueue
from tests.contract.sync_queue_kit import assert_whole, links, neighbour, run_python, sql
from tests.servers import ROOT

SQL = "INSERT INTO orders (id) VALUES (?)"

# Pushes singly and in batches, and prints each number as soon as it has it.
PUSHER = """
import sys
from pillarbox.sync.queue import SqlQueue
queue = SqlQueue(sys.argv[1])
for number in range(int(sys.argv[2])):
    if number % 10:
        print(queue.push("orders", "INSERT INTO orders (id) VALUES (?)", [number]), flush=True)
    else:
        statements = [("INSERT INTO orders (id) VALUES (?)", [number])] * 3
        print(*queue.push_many("orders", statements), sep="\\n", flush=True)
"""


def start_pusher(folder: Path, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", PUSHER, str(folder), str(count)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [None, 4000], ids=["unbounded", "capped"])
def test_eight_threads_store_every_push_in_one_chain(tmp_path: Path, cap: int | None) -> None:
    with SqlQueue(tmp_path, max_waiting=cap) as queue, ThreadPoolExecutor(8) as pool:

        def push(worker: int) -> list[int]:
            return [queue.push("orders", SQL, [worker, number]) for number in range(500)]

        answers = list(pool.map(push, range(8)))
        rows = queue.queue_file("orders").rows()
    assert sorted(seq for each in answers for seq in each) == list(range(1, 4001))
    assert all(each == sorted(each) for each in answers)
    assert_whole(tmp_path / "orders.db", range(1, 4001))
    stored = {row.seq: row.payload for row in rows}
    assert all(stored[each[500 - 1]] == f"[{worker},499]" for worker, each in enumerate(answers))
    assert [row.created_at for row in rows] == sorted(row.created_at for row in rows)


def test_threads_that_push_batches_of_two_namespaces_do_not_mix_chains(tmp_path: Path) -> None:
    with SqlQueue(file=tmp_path / "all.db") as queue, ThreadPoolExecutor(4) as pool:

        def push(table: str) -> list[int]:
            return [seq for _ in range(50) for seq in queue.push_many(table, [(SQL, [1])] * 4)]

        tables = ["orders", "payments"] * 2
        answers = list(pool.map(push, tables))
    for name in ("orders", "payments"):
        mine = [seq for table, each in zip(tables, answers, strict=True) if table == name for seq in each]
        assert len(mine) == 400
        assert_whole(tmp_path / "all.db", mine, name)


def test_thread_that_waits_for_another_raises_in_time(tmp_path: Path) -> None:
    file = QueueFile(tmp_path / "orders.db", "orders", lock_timeout=timedelta(milliseconds=100))
    errors: list[str] = []

    def push() -> None:
        try:
            file.push(SQL, "[]")
        except QueueError as error:
            errors.append(str(error))

    with sql(file.path) as execute:
        execute("BEGIN IMMEDIATE")
        threads = [threading.Thread(target=push) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        execute("ROLLBACK")
    assert len(errors) == 6
    assert all("is locked by" in error and "for 100ms" in error for error in errors)
    assert file.push(SQL, "[]") == 1
    file.close()


def test_time_in_which_another_thread_waits_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = QueueFile(tmp_path / "orders.db", "orders", lock_timeout=timedelta(seconds=60))
    times, waits = iter([1000.0, 1045.0]), threading.Event()

    def tell_time() -> float:
        waits.set()
        return next(times)

    monkeypatch.setattr(sharing, "time", SimpleNamespace(monotonic=tell_time))
    with ThreadPoolExecutor(1) as pool:
        with file._shared._lock:
            behind = pool.submit(file.push, SQL, "[]")
            assert waits.wait(60)
        assert behind.result() == 1
    assert file._shared.db is not None
    # Of 60 seconds it has waited 45 for the other thread.
    assert file._shared.db.execute("PRAGMA busy_timeout").fetchall() == [(15_000,)]
    file.close()


def test_connections_that_make_a_file_at_once_wait_for_each_other(tmp_path: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        for number in range(20):
            start = threading.Barrier(6)

            def open_file(path: Path, start: threading.Barrier = start) -> None:
                start.wait(10)
                open_connection(path).close()

            list(pool.map(open_file, [tmp_path / f"{number}.db"] * 6))


# -- processes ---------------------------------------------------------------------------------------------------------


def test_four_processes_that_make_and_fill_a_file_at_once_store_every_push(tmp_path: Path) -> None:
    pushers = [start_pusher(tmp_path, 200) for _ in range(4)]
    answers = [[int(line) for line in pusher.communicate(timeout=100)[0].split()] for pusher in pushers]
    assert [pusher.returncode for pusher in pushers] == [0, 0, 0, 0]
    assert [len(each) for each in answers] == [240] * 4
    assert all(each == sorted(each) for each in answers)
    assert_whole(tmp_path / "orders.db", [seq for each in answers for seq in each])


@pytest.mark.parametrize("after", [1, 100, 300])
def test_killed_process_loses_no_push_that_was_answered(tmp_path: Path, after: int) -> None:
    pusher = start_pusher(tmp_path, 1_000_000)
    assert pusher.stdout is not None
    answered = [int(pusher.stdout.readline()) for _ in range(after)]
    pusher.send_signal(signal.SIGKILL)
    # A number that was cut off by the kill is no answer.
    lines = pusher.stdout.read().split("\n")[:-1]
    answered += [int(line) for line in lines]
    pusher.stdout.close()
    assert pusher.wait(10) == -signal.SIGKILL
    stored = [seq for seq, _ in links(tmp_path / "orders.db")]
    assert set(stored) >= set(answered)
    assert len(stored) <= len(answered) + 3
    with SqlQueue(tmp_path) as queue:
        later = queue.push("orders", SQL, [0])
    assert_whole(tmp_path / "orders.db", [*stored, later])


FORKER = """
import os, sys, threading
from pillarbox.sync.files import QueueFile, subscribe
from pillarbox.sync.queue import SqlQueue
queue = SqlQueue(sys.argv[1])
woken = []
subscribe(queue.queue_file("orders").path, lambda: woken.append(os.getpid()))
queue.push("orders", "DELETE", [])
# Threads push while the process forks: the child must not inherit their lock.
stop = threading.Event()
def push():
    while not stop.is_set():
        queue.push("orders", "DELETE", [])
threads = [threading.Thread(target=push) for _ in range(3)]
for thread in threads:
    thread.start()
children = []
for _ in range(5):
    child = os.fork()
    if child == 0:
        assert queue.queue_file("orders")._shared.db is None
        del woken[:]
        for _ in range(20):
            queue.push("orders", "DELETE", [])
        assert woken == []
        if len(children) % 2:
            sys.exit(0)
        os._exit(0)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
stop.set()
for thread in threads:
    thread.join()
queue.push("orders", "DELETE", [])
assert codes == [0] * 5, codes
assert set(woken) == {os.getpid()}
"""


def test_forked_processes_go_on_with_connections_of_their_own(tmp_path: Path) -> None:
    done = run_python(FORKER, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    seqs = [seq for seq, _ in links(tmp_path / "orders.db")]
    assert len(seqs) > 100
    assert_whole(tmp_path / "orders.db", seqs)
    with sql(tmp_path / "orders.db") as execute:
        assert execute("PRAGMA integrity_check") == [("ok",)]


FILLER = """
import resource, sys
from pillarbox.errors import QueueError
from pillarbox.sync.queue import SqlQueue
queue = SqlQueue(sys.argv[1])
assert queue.push("orders", "DELETE", []) == 1
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
count = 1
for _ in range(500):
    try:
        queue.push("orders", "DELETE", ["x" * 2000])
    except QueueError as error:
        assert "orders.db' cannot" in str(error), error
        break
    count += 1
else:
    raise SystemExit("the file never was full")
try:
    queue.push_many("orders", [("DELETE", ["x" * 2000])] * 200)
except QueueError as error:
    assert "orders.db' cannot" in str(error), error
else:
    raise SystemExit("the file was not full")
assert queue.waiting("orders") == count
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert queue.push("orders", "DELETE", ["x" * 2000])
queue.push_many("orders", [("DELETE", ["x" * 2000])] * 200)
assert queue.waiting("orders") == count + 201
"""


def test_file_that_may_not_grow_raises_and_goes_on_when_it_may(tmp_path: Path) -> None:
    done = run_python(FILLER, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert_whole(tmp_path / "orders.db", [seq for seq, _ in links(tmp_path / "orders.db")])


def test_idle_queue_holds_up_no_checkpoint(tmp_path: Path) -> None:
    file = QueueFile(tmp_path / "orders.db", "orders")
    file.push_many([(SQL, "[]")] * 100)
    file.push(SQL, "[]")
    file.rows()
    file.check_chain(file.rows()[50:])
    with sql(file.path) as execute:
        assert execute("PRAGMA wal_checkpoint(TRUNCATE)") == [(0, 0, 0)]
    file.close()


# -- beside the real sqloutbox -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", ["0.4", "0.6"])
@pytest.mark.parametrize("is_ours_first", [True, False], ids=["our file", "their file"])
def test_both_systems_push_by_turns_into_one_chain(tmp_path: Path, release: str, is_ours_first: bool) -> None:
    path = tmp_path / "orders.db"
    first = QueueFile(path, "orders") if is_ours_first else None
    seqs: list[int] = [] if first is None else [first.push(SQL, "[0]", source="Shop")]
    with neighbour(release, path) as theirs:
        file = first or QueueFile(path, "orders")
        for _ in range(3):
            seqs += [theirs.call("enqueue", SQL, "[1]"), file.push(SQL, "[2]", source="Shop")]
            seqs += theirs.call("enqueue_batch", [[SQL, "[3]"], [SQL, "[4]"]])
            seqs += file.push_many([(SQL, "[5]"), (SQL, "[6]")], source="Shop")
        assert seqs == list(range(1, len(seqs) + 1))
        assert_whole(path, seqs)
        assert theirs.call("verify") == [True, []]
        assert file.check_chain(file.rows()) == []
        ours = [[row.seq, row.sql, row.payload, row.prev_seq, row.source] for row in file.rows()]
        assert theirs.call("fetch") == ours
        assert {row[4] for row in ours} == {"Shop", "Neighbour"}
        # Each takes away what the other pushed, and the chain stays whole for both.
        theirs.call("confirm", seqs[:7])
        assert file.confirm(seqs[7:10]) == 3
        assert (file.waiting(), theirs.call("pending_count")) == (len(seqs) - 10, len(seqs) - 10)
        assert theirs.call("verify") == [True, []]
        assert file.check_chain(file.rows()) == []
        # Theirs seeds, ours goes on above it, and the other way round.
        assert theirs.call("seed_sequence", 1000) is True
        assert file.push_many([(SQL, "[]")] * 2) == [1001, 1002]
        assert file.seed(2000) is True
        assert theirs.call("enqueue", SQL, "[]") == 2001
        assert theirs.call("verify") == [True, []]
        assert file.check_chain(file.rows()) == []
        file.close()


def test_row_that_the_newer_release_buried_is_no_gap(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    with neighbour("0.6", path) as theirs:
        file = QueueFile(path, "orders")
        file.push_many([(SQL, "[]")] * 3)
        assert theirs.call("dead_letter", 3, "manual_skip") is True
        assert theirs.call("dead_letter", 1, "manual_skip") is True
        assert file.push_many([(SQL, "[]")] * 2) == [4, 5]
        assert links(path) == [(2, 1), (4, 2), (5, 4)]
        assert file.check_chain(file.rows()) == []
        assert theirs.call("verify") == [True, []]
        file.close()


def test_file_that_the_newer_release_migrates_while_it_is_open_takes_pushes(tmp_path: Path) -> None:
    path = tmp_path / "orders.db"
    file = QueueFile(path, "orders")
    assert file.push(SQL, "[]") == 1
    with neighbour("0.6", path) as theirs:
        assert theirs.call("enqueue", SQL, "[]") == 2
        assert file.push(SQL, "[]") == 3
    with sql(path) as execute:
        assert execute("PRAGMA user_version") == [(5,)]
    assert_whole(path, [1, 2, 3])
    file.close()


@pytest.mark.parametrize("release", ["0.4", "0.6"])
def test_both_systems_push_at_the_same_time(tmp_path: Path, release: str) -> None:
    path = tmp_path / "orders.db"
    woken: list[int] = []
    end = subscribe(path, lambda: woken.append(1))
    with neighbour(release, path) as theirs, SqlQueue(tmp_path) as queue, ThreadPoolExecutor(3) as pool:
        ours = [pool.submit(lambda: [queue.push("orders", SQL, [1]) for _ in range(200)]) for _ in range(2)]
        seqs = [theirs.call("enqueue", SQL, "[2]") for _ in range(200)]
        seqs += [seq for each in ours for seq in each.result(60)]
        assert theirs.call("verify") == [True, []]
    end()
    assert len(woken) == 400
    assert_whole(path, seqs)
