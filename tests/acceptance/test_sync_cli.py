"""`pillarbox sync` as operators use it: the real command line, on files of the real sqloutbox and of our own queue."""

from __future__ import annotations

import shlex
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pillarbox.sync.queue import SqlQueue
from pillarbox.sync.state import ensure_state, write_state
from tests.acceptance import commands
from tests.acceptance.commands import Done
from tests.acceptance.launcher import Command, Launcher
from tests.acceptance.processes import until
from tests.contract.sqloutbox_files import Sqloutbox, make_old_file, queue, snapshot, write
from tests.servers import ROOT

INSERT = "INSERT INTO orders (id, total) VALUES (?, ?)"
# Neither the class nor the variable is there: whoever only looks needs neither.
WITHOUT_SECRETS = """
[app.shop]
db_dir = "data"
max_pending = 10
[app.shop.db.main]
writer_class = "nowhere.to:BeFound"
tables = ["orders", "payments"]
[app.shop.db.main.connection]
token = "${NO_SUCH_VARIABLE}"
[app.shop.db.archive]
writer_class = "nowhere.to:BeFound"
tables = ["payments"]
"""
SERVICE = """
[app.shop]
db_dir = "data"
table_max_wait = 0
backoff_seconds = {backoff}
max_attempts = {attempts}
[app.shop.db.main]
tables = ["orders"]
[app.shop.db.main.connection]
url = "sqlite:///remote.db"
"""

Run = Callable[..., Done]


@pytest.fixture
def run(launcher: Launcher, tmp_path: Path) -> Run:
    """Run `pillarbox sync …` in a folder of its own until it ends."""

    def run_here(*args: str, env: dict[str, str] | None = None) -> Done:
        return commands.run(launcher, "sync", *args, cwd=tmp_path, env=env)

    return run_here


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The folder with the queue files, whose settings name secrets that are not there."""
    (tmp_path / "outbox.toml").write_text(WITHOUT_SECRETS)
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


@pytest.fixture
def sqloutbox() -> Sqloutbox:
    return Sqloutbox("0.4")


def lose(path: Path, seq: int) -> None:
    write(path, f"DELETE FROM outbox_queue WHERE seq = {seq}")


def park(path: Path, seq: int) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        ensure_state(db, path.stem)
        write_state(db, path.stem, head=seq, attempts=10, error="no such column", dead_at="2026-01-31T12:00:00+00:00")


def test_looking_at_queues_needs_none_of_what_the_service_needs() -> None:
    program = "import sys, pillarbox.cli; print(sorted({'sqlglot', 'httpx', 'psycopg', 'aiomysql'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# -- which queues ------------------------------------------------------------------------------------------------------

LOOKING = (("status",), ("verify",), ("dead", "list"), ("migrate", "--check"))


@pytest.mark.parametrize("command", LOOKING, ids=" ".join)
def test_folder_without_queues_is_no_error(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    done = run(*command, "--db-dir", ".", "--table", "orders")
    assert (done.code, done.out) == (0, "")
    assert done.err in ("There are no queue files here.\n", "Nothing is dead.\n")


@pytest.mark.parametrize("command", [*LOOKING, ("skip",), ("run",), ("schema",)], ids=" ".join)
def test_without_settings_or_folder_the_error_says_what_to_give(run: Run, command: tuple[str, ...]) -> None:
    done = run(*command)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("pillarbox: There is no settings file 'outbox.toml': give --config FILE")


def test_settings_and_folder_together_are_a_usage_error(run: Run) -> None:
    done = run("status", "-c", "outbox.toml", "-d", ".")
    assert (done.code, "Both --config and --db-dir are given" in done.err) == (2, True)


def test_table_of_several_queues_must_be_chosen_and_the_choices_are_listed(
    run: Run, data: Path, sqloutbox: Sqloutbox
) -> None:
    sqloutbox.call(queue(data / "payments.db"), ["push", "a", "b"])
    done = run("skip", "--table", "payments")
    assert done.code == 2
    for choice in ("--table payments --target shop.main", "--table payments --target shop.archive"):
        assert choice in done.err
    done = run("skip", "--table", "payments", "--target", "all", "--seq", "1", "--json")
    assert (done.code, done.json["seq"], done.json["target"]) == (0, 1, "all")
    done = run("status", "--table", "payment")
    assert (done.code, "There is no table 'payment' here; there is: orders, payments." in done.err) == (1, True)


# -- status and verify -------------------------------------------------------------------------------------------------


def test_status_needs_no_secret_and_shows_every_queue(run: Run, data: Path, sqloutbox: Sqloutbox) -> None:
    sqloutbox.call(queue(data / "orders.db"), ["push", "a", "b", "c"])
    park(data / "orders.db", 1)
    done = run("status", "--json")
    assert done.code == 0
    assert [(each["target"], each["table"], each["state"], each["waiting"]) for each in done.json] == [
        ("shop.main", "orders", "dead", 3),
        ("all", "payments", "missing", 0),
        ("shop.main", "payments", "missing", 0),
        ("shop.archive", "payments", "missing", 0),
    ]
    assert {key: done.json[0][key] for key in ("head", "attempts", "error", "capacity_percent", "path")} == {
        "head": 1,
        "attempts": 10,
        "error": "no such column",
        "capacity_percent": 30.0,
        "path": "data/orders.db",
    }
    shown = run("status").out.splitlines()
    assert shown[0].split()[:5] == ["target", "table", "state", "waiting", "full"]
    assert shown[1].split()[:5] == ["shop.main", "orders", "dead", "3", "30%"]


def test_verify_fails_for_a_gap_and_says_how_to_mend_it(run: Run, data: Path, sqloutbox: Sqloutbox) -> None:
    path = data / "orders.db"
    sqloutbox.call(queue(path), ["push", "a", "b", "c"])
    done = run("verify")
    assert (done.code, done.out.splitlines()[0]) == (
        0,
        "ok      shop.main/orders: 3 waiting (rows 1 to 3), 0 in the sync log, 0 dead",
    )
    lose(path, 2)
    before = snapshot(data)
    done = run("verify")
    assert (done.code, done.out.splitlines()[0][:24]) == (1, "FAILED  shop.main/orders")
    command = "pillarbox sync skip --table orders --target shop.main --lost 2"
    assert command in done.out
    found = run("verify", "--json")
    assert (found.code, found.json["is_ok"]) == (1, False)
    assert found.json["queues"][0]["gaps"] == [{"seq": 3, "missing": 2, "first": 2}]
    assert snapshot(data) == before
    assert (
        run(*command.split()[2:]).out == "shop.main/orders: row 2 is accepted as lost; the queue goes on behind it.\n"
    )
    assert run("verify").code == 0


def test_stranger_in_the_folder_is_reported_and_breaks_nothing(run: Run, data: Path, sqloutbox: Sqloutbox) -> None:
    sqloutbox.call(queue(data / "orders.db"), ["push", "a"])
    write(data / "notes.db", "CREATE TABLE notes (id INTEGER)")
    (data / "broken.db").write_bytes(b"this was never a database" * 10)
    states = {each["table"]: each["state"] for each in run("status", "--db-dir", "data", "--json").json}
    assert states == {"broken": "unreadable", "notes": "foreign", "orders": "ok"}
    assert run("verify", "--db-dir", "data").code == 1
    (data / "broken.db").unlink()
    done = run("verify", "--db-dir", "data")
    assert (done.code, "'data/notes.db' is not a queue" in done.out) == (0, True)


# -- dead and skip -----------------------------------------------------------------------------------------------------


def test_skipped_row_is_listed_shown_and_replayed(run: Run, data: Path, sqloutbox: Sqloutbox) -> None:
    sqloutbox.call(queue(data / "orders.db"), ["push", INSERT, "b", "c"])
    park(data / "orders.db", 1)
    done = run("skip", "--table", "orders")
    assert (done.code, done.out) == (
        0,
        "shop.main/orders: row 1 is in the dead log; `pillarbox sync dead replay 1` brings it back.\n",
    )
    assert run("skip", "--table", "orders", "--seq", "3").code == 0
    (first, second) = run("dead", "list", "--json").json
    assert (first["seq"], first["reason"], first["is_parked"], second["seq"]) == (1, "manual_skip", False, 3)
    assert run("dead", "list").out.splitlines()[1].split()[:4] == ["shop.main", "orders", "1", "manual_skip"]
    page = run("dead", "show", "1")
    assert (page.code, page.out.splitlines()[-1]) == (0, INSERT)
    assert {line.split("  ")[0] for line in page.out.splitlines()} >= {"target", "reason", "attempts", "arguments"}
    shown = run("dead", "show", "1", "--json").json
    assert (shown["sql"], shown["arguments"]) == (INSERT, [1])
    done = run("dead", "replay", "1")
    assert (done.code, done.out) == (0, "shop.main/orders: row 1 is at the end of its queue, as row 4.\n")
    assert [each["new_seq"] for each in run("dead", "replay", "--all", "--json").json] == [5]
    assert run("dead", "list", "--json").json == []


def test_file_that_cannot_be_read_hides_no_dead_row_of_the_others(run: Run, data: Path, sqloutbox: Sqloutbox) -> None:
    sqloutbox.call(queue(data / "orders.db"), ["push", "a", "b"])
    assert run("skip", "--table", "orders", "--seq", "1").code == 0
    (data / "broken.db").write_bytes(b"this was never a database" * 10)
    done = run("dead", "list", "-d", "data", "--json")
    assert (done.code, [each["seq"] for each in done.json]) == (1, [1])
    assert "File 'data/broken.db' cannot be used" in done.err
    assert run("dead", "replay", "1", "-d", "data").code == 0


def test_parked_row_is_due_again_in_its_place(run: Run, data: Path, sqloutbox: Sqloutbox) -> None:
    sqloutbox.call(queue(data / "orders.db"), ["push", "a", "b"])
    park(data / "orders.db", 1)
    assert [(each["seq"], each["is_parked"]) for each in run("dead", "list", "--json").json] == [(1, True)]
    assert run("dead", "replay", "1").out == "shop.main/orders: row 1 is due now, in its place.\n"
    assert [each["state"] for each in run("status", "--table", "orders", "--json").json] == ["ok"]


@pytest.mark.parametrize(
    ("args", "code", "reason"),
    [
        (("dead", "show", "7", "--table", "orders"), 1, "Row 7 of queue 'shop.main/orders' is not dead"),
        (("dead", "replay", "7", "--table", "orders"), 1, "Row 7 of queue 'shop.main/orders' is not dead"),
        (("dead", "replay"), 2, "give the numbers of dead rows, or --all"),
        (("skip", "--table", "orders"), 1, "Row 1 of queue 'shop.main/orders' has not failed"),
        (("skip", "--table", "orders", "--seq", "7"), 1, "does not wait: no row has this number"),
        (("skip", "--table", "orders", "--lost", "1"), 1, "is not lost: it is in the queue"),
        (("skip", "--seq", "1", "--lost", "1"), 2, "Both --seq and --lost are given"),
        (
            ("skip",),
            2,
            "No table is given: choose a queue with --table: --table orders --target shop.main (data/orders",
        ),
        (("skip", "--target", "shop.main", "--lost", "1"), 2, "No table is given"),
        (("skip", "-d", "data/orders.db"), 2, "No table is given: choose a queue with --table: --table orders"),
        (("renumber", "-d", "data"), 2, "No table is given: choose a queue with --table: --table orders"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_row_that_is_not_what_was_meant_is_a_clear_error(
    run: Run, data: Path, sqloutbox: Sqloutbox, args: tuple[str, ...], code: int, reason: str
) -> None:
    sqloutbox.call(queue(data / "orders.db"), ["push", "a"])
    before = snapshot(data)
    done = run(*args)
    assert (done.code, done.out) == (code, "")
    assert reason in done.err
    assert snapshot(data) == before


# -- migrate, schema, init ---------------------------------------------------------------------------------------------


def test_migrate_checks_migrates_and_has_nothing_left_to_do(run: Run, data: Path) -> None:
    path = data / "orders.db"
    make_old_file(path, (1, None), (2, 1))
    before = snapshot(data)
    done = run("migrate", "--check")
    assert (done.code, done.out.splitlines()[0][:47]) == (1, "pending       data/orders.db: add column source")
    assert snapshot(data) == before
    assert run("migrate").code == 0
    assert [run("migrate", *options).code for options in ([], ["--check"])] == [0, 0]
    assert run("migrate", "--json").json[0] == {
        "path": "data/orders.db",
        "status": "current",
        "steps": [],
        "problem": None,
    }


def test_migrate_refuses_what_it_cannot_do(run: Run, data: Path, sqloutbox: Sqloutbox) -> None:
    make_old_file(data / "orders.db", (1, None), (2, 1), (3, 1))
    done = run("migrate", "--check", "-d", "data")
    assert (done.code, "rows 2, 3 all name row 1" in done.out) == (2, True)
    assert run("migrate", "-d", "data").code == 1
    sqloutbox.call(queue(data / "payments.db"), ["push", "a"])
    write(data / "payments.db", "PRAGMA user_version = 6")
    (data / "orders.db").unlink()
    done = run("migrate", "--check", "-d", "data")
    assert (done.code, "has schema version 6" in done.out) == (2, True)
    write(data / "payments.db", "PRAGMA user_version = 5")
    write(data / "notes.db", "CREATE TABLE notes (id INTEGER)")
    assert run("migrate", "-d", "data").code == 0


def test_schema_is_printed_for_each_target(run: Run, tmp_path: Path) -> None:
    (tmp_path / "outbox.toml").write_text(SERVICE.format(backoff=1, attempts=10))
    done = run("schema")
    assert (done.code, done.out.splitlines()[0]) == (0, "-- shop.main: 3 statements")
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute("CREATE TABLE orders (id INTEGER)")
        db.executescript(done.out)
        assert [row[1] for row in db.execute("PRAGMA table_info(orders)")] == ["id", "outbox_seq"]
        assert db.execute("SELECT count(*) FROM pillarbox_sync_marks").fetchall() == [(0,)]
    assert run("schema", "--drop").out == "-- shop.main: 0 statements\n"
    done = run("schema", "--target", "shop.none")
    assert (done.code, "There is no target 'shop.none'; there is: shop.main." in done.err) == (1, True)


def test_init_writes_a_service_that_runs_and_overwrites_nothing(run: Run, tmp_path: Path) -> None:
    done = run("init")
    assert (done.code, done.out.splitlines()[-1]) == (0, "Next: pillarbox sync run --config outbox/outbox.toml")
    with SqlQueue(tmp_path / "outbox" / "data") as pushes:
        pushes.push("events", "INSERT INTO events (id, name) VALUES (?, ?)", [1, "first"])
    assert run("run", "--drain", "-c", "outbox/outbox.toml").code == 0
    assert rows(tmp_path / "outbox" / "remote.db", "SELECT id, name FROM events") == [(1, "first")]
    before = snapshot(tmp_path / "outbox")
    done = run("init")
    assert (done.code, "is not overwritten" in done.err) == (1, True)
    assert snapshot(tmp_path / "outbox") == before


# -- run ---------------------------------------------------------------------------------------------------------------


def rows(path: Path, sql: str = "SELECT id FROM orders ORDER BY rowid") -> list[Any]:
    with closing(sqlite3.connect(path, timeout=30)) as db:
        return db.execute(sql).fetchall()


class Service:
    """A service of its own: its folder, what is pushed to it, and the process."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher = launcher
        self.folder = folder
        self.remote = folder / "remote.db"
        self.log_file = folder / "sync.log"
        self.processes: list[Command] = []
        write(self.remote, "CREATE TABLE orders (id INTEGER PRIMARY KEY, total INTEGER NOT NULL)")
        self.configure()

    def configure(self, *, backoff: float = 0.05, attempts: int | str = "false") -> None:
        (self.folder / "outbox.toml").write_text(SERVICE.format(backoff=backoff, attempts=attempts))

    def push(self, *ids: int, total: int | None = 5) -> None:
        with SqlQueue(self.folder / "data") as pushes:
            pushes.push_many("orders", [(INSERT, [number, total]) for number in ids])

    def start(self, *options: str, env: dict[str, str] | None = None) -> Command:
        started = self._launcher.start(
            *("sync", "run", *options), cwd=self.folder, out=self.log_file, err=self.log_file, env=env or {}
        )
        self.processes.append(started)
        return started

    @property
    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    def wait_for_log(self, text: str) -> None:
        until(lambda: text in self.log, f"{text!r} in the log")

    def wait_for(self, *ids: int) -> None:
        until(lambda: rows(self.remote) == [(number,) for number in ids], f"orders {ids} at the remote side")


@pytest.fixture
def service(launcher: Launcher, tmp_path: Path) -> Iterator[Service]:
    made = Service(launcher, tmp_path)
    yield made
    for each in made.processes:
        each.kill()
        each.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_service_sends_what_is_pushed_until_a_signal_stops_it(service: Service, number: signal.Signals) -> None:
    service.push(1, 2)
    process = service.start()
    service.wait_for(1, 2)
    service.push(3)
    service.wait_for(1, 2, 3)
    process.send_signal(number)
    assert process.wait(30) == 0
    assert "Stopped: 3 delivered, 0 to retry, 0 dead." in service.log


def test_second_service_on_the_folder_exits_with_1(service: Service) -> None:
    service.push(1)
    service.start()
    service.wait_for(1)
    second = service.start()
    assert second.wait(30) == 1
    assert "a service works on this folder already" in service.log


def test_drain_sends_everything_and_exits(service: Service, run: Run) -> None:
    service.push(*range(1, 1201))
    done = run("run", "--drain", "--json")
    assert (done.code, done.json["delivered"], done.json["stuck"]) == (0, 1200, [])
    assert rows(service.remote) == [(number,) for number in range(1, 1201)]


def test_drain_of_a_queue_that_is_stuck_fails_and_names_it(service: Service, run: Run) -> None:
    service.configure(backoff=60)
    service.push(1)
    service.push(2, total=None)
    service.push(3)
    done = run("run", "--drain")
    assert done.code == 1
    assert "These queues are not drained: shop.main/orders (retrying: NOT NULL constraint failed" in done.err
    assert rows(service.remote) == [(1,)]


def test_queue_from_a_backup_is_renumbered_when_the_service_has_stopped(service: Service, run: Run) -> None:
    path = service.folder / "data" / "orders.db"
    service.push(1)
    assert run("run", "--drain").code == 0
    service.push(2)
    backup = path.read_bytes()
    assert run("run", "--drain").code == 0
    path.write_bytes(backup)
    service.push(3)
    done = run("run", "--drain")
    assert (done.code, "pillarbox sync renumber --table orders" in done.err) == (1, True)
    write(service.remote, "DELETE FROM orders WHERE id = 2")
    process = service.start()
    service.wait_for_log("pillarbox sync renumber --table orders")
    assert run("renumber", "--table", "orders").code == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    done = run("renumber", "--table", "orders")
    assert (done.code, done.out) == (0, "shop.main/orders: 2 rows will go out under new numbers.\n")
    assert run("run", "--drain").code == 0
    assert rows(service.remote) == [(1,), (2,), (3,)]


def test_drain_to_a_database_that_is_down_fails_and_status_says_so(service: Service, run: Run) -> None:
    text = (service.folder / "outbox.toml").read_text()
    (service.folder / "outbox.toml").write_text(text.replace("sqlite:///remote.db", "postgresql://127.0.0.1:1/none"))
    service.push(1)
    done = run("run", "--drain", "--json")
    assert (done.code, done.json["delivered"], done.json["stuck"]) == (1, 0, ["shop.main/orders"])
    assert "These queues are not drained: shop.main/orders (blocked: " in done.err
    assert (done.err.count("cannot be reached"), "hint:" in done.err) == (1, False)
    (found,) = run("status", "--json").json
    assert (found["state"], found["waiting"], found["attempts"]) == ("blocked", 1, 0)
    assert "127.0.0.1" in found["error"]
    shown = run("status").out.splitlines()[1]
    assert (shown.split()[:3], "cannot be reached" in shown) == (["shop.main", "orders", "blocked"], True)


def test_drain_to_a_table_that_is_missing_says_so_and_nothing_else(service: Service, run: Run) -> None:
    write(service.remote, "ALTER TABLE orders RENAME TO old")
    service.push(1)
    done = run("run", "--drain", "-q")
    lines = done.err.splitlines()
    assert (done.code, len(lines)) == (1, 1)
    assert "shop.main/orders (blocked: Target shop.main: there is no table 'orders'" in lines[0]
    write(service.remote, "ALTER TABLE old RENAME TO orders")
    assert run("run", "--drain", "-q").code == 0
    (found,) = run("status", "--json").json
    assert (found["state"], found["error"]) == ("empty", None)


def test_service_that_cannot_start_exits_with_1(service: Service, run: Run) -> None:
    text = (service.folder / "outbox.toml").read_text()
    (service.folder / "outbox.toml").write_text(
        text.replace("tables =", 'writer_class = "nowhere.to:BeFound"\ntables =')
    )
    done = run("run")
    assert (done.code, "nowhere" in done.err) == (1, True)


def test_signal_has_the_queues_verified_while_the_service_runs(service: Service) -> None:
    service.push(1)
    process = service.start()
    service.wait_for(1)
    process.send_signal(signal.SIGUSR1)
    service.wait_for_log("Verified: shop.main/orders: ok (0 waiting, 0 dead)")
    service.push(2)
    service.wait_for(1, 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_level_of_the_log_is_taken_from_the_environment(service: Service, run: Run) -> None:
    assert "INFO Draining" in run("run", "--drain").err
    assert run("run", "--drain", env={"LOG_LEVEL": "warning"}).err == ""
    assert "INFO Draining" in run("run", "--drain", "-v", env={"LOG_LEVEL": "warning"}).err
    done = run("run", "--drain", env={"LOG_LEVEL": "loud"})
    assert (done.code, "LOG_LEVEL: expected one of VERBOSE, DEBUG" in done.err) == (1, True)


def test_dead_head_is_replayed_in_its_place_while_the_service_runs(service: Service, run: Run) -> None:
    service.configure(attempts=2)
    write(service.remote, "INSERT INTO orders (id, total) VALUES (2, 7)")
    service.push(1, 2, 3)
    process = service.start()
    until(lambda: run("status", "--json").json[0]["state"] == "dead", "the head to be dead")
    assert rows(service.remote, "SELECT id, total FROM orders ORDER BY id") == [(1, 5), (2, 7)]
    write(service.remote, "DELETE FROM orders WHERE id = 2")
    assert run("dead", "replay", "2").code == 0
    service.wait_for(1, 2, 3)
    assert run("verify").code == 0
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_dead_row_is_told_by_its_number(service: Service, run: Run) -> None:
    service.configure(attempts=1)
    service.push(1)
    service.push(2, total=None)
    done = run("run", "--drain")
    assert (done.code, "row 2 is dead" in done.err) == (1, True)
    assert "event 0000" not in done.err


def test_head_that_is_skipped_while_the_service_runs_lets_the_others_go_on(service: Service, run: Run) -> None:
    service.push(1)
    service.push(2, total=None)
    service.push(3)
    process = service.start()
    until(lambda: run("status", "--json").json[0]["state"] == "retrying", "the head to fail")
    assert run("skip", "--table", "orders").code == 0
    service.wait_for(1, 3)
    assert [each["seq"] for each in run("dead", "list", "--json").json] == [2]
    assert run("verify").code == 0
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_stuck_queue_is_told_once_and_so_is_its_recovery(service: Service, run: Run) -> None:
    write(service.remote, "INSERT INTO orders (id, total) VALUES (2, 7)")
    service.push(1, 2, 3)
    process = service.start()
    until(lambda: run("status", "--json").json[0]["attempts"] > 3, "several tries")
    write(service.remote, "DELETE FROM orders WHERE id = 2")
    service.wait_for(1, 2, 3)
    service.wait_for_log("the table goes on")
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert service.log.count("the table waits behind it") == 1
    assert service.log.count("the table goes on") == 1


# -- settings that cannot be used --------------------------------------------------------------------------------------


def one_line(done: Done) -> str:
    """The only line of an error, after the name of the command."""
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)
    return done.err.removeprefix("pillarbox: ")


@pytest.mark.parametrize("command", [("run",), ("run", "--drain")], ids=" ".join)
def test_variable_that_is_missing_is_named(service: Service, run: Run, command: tuple[str, ...]) -> None:
    text = (service.folder / "outbox.toml").read_text()
    (service.folder / "outbox.toml").write_text(text.replace("sqlite:///remote.db", "${SHOP_URL}"))
    error = one_line(run(*command))
    assert error.startswith("outbox.toml, [app.shop.db.main.connection] url: ")
    assert "SHOP_URL" in error
    service.push(1)
    assert run(*command[:1], "--drain", env={"SHOP_URL": "sqlite:///remote.db"}).code == 0
    assert rows(service.remote) == [(1,)]


@pytest.mark.parametrize("command", [("run",), ("status",), ("verify",), ("skip", "--table", "orders")], ids=" ".join)
def test_settings_that_are_no_toml_are_told_with_their_line(
    service: Service, run: Run, command: tuple[str, ...]
) -> None:
    (service.folder / "outbox.toml").write_text('[app.shop]\ndb_dir = "data\n')
    error = one_line(run(*command))
    assert error.startswith("outbox.toml: not valid TOML: ")
    assert "line 2" in error


def test_doppler_that_fails_stops_the_service_and_shows_no_token(service: Service, run: Run) -> None:
    service.push(1)
    # Nobody listens there: the way to Doppler is cut.
    cut = dict.fromkeys(("https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:1") | {"no_proxy": "", "NO_PROXY": ""}
    error = one_line(run("run", "--drain", env={"DOPPLER_TOKEN": "dp.st.main.secret-part", **cut}))
    assert error.startswith("Doppler, token dp.st.ma***: the secrets cannot be fetched: it cannot be reached")
    assert "secret-part" not in error
    assert rows(service.remote) == []
    # Whoever only looks does not ask it.
    assert run("status", env={"DOPPLER_TOKEN": "dp.st.main.secret-part", **cut}).code == 0


# -- the command that the log gives ------------------------------------------------------------------------------------

TWO_TARGETS = """
[app.shop]
{place}
table_max_wait = 0
[app.shop.db.main]
tables = ["orders"]
connection = {{ url = "sqlite:///remote.db" }}
[app.shop.db.archive]
tables = ["orders"]
connection = {{ url = "sqlite:///archive.db" }}
"""


def given_command(service: Service) -> list[str]:
    """What the log says is to be typed, without the name of the program."""
    service.wait_for_log("given up with: pillarbox sync ")
    (line,) = [line for line in service.log.splitlines() if "given up with: pillarbox sync " in line]
    return shlex.split(line.partition("given up with: pillarbox sync ")[2])


def test_command_that_the_log_gives_for_a_gap_closes_it(service: Service, run: Run) -> None:
    service.push(1, 2, 3)
    lose(service.folder / "data" / "orders.db", 2)
    service.start()
    command = given_command(service)
    assert command[-2:] == ["--lost", "2"]
    assert run(*command).code == 0
    service.wait_for(1, 3)


@pytest.mark.parametrize("place", ['db_dir = "data"', 'db_file = "app.db"'])
@pytest.mark.parametrize("where", ["shared", "copy"])
def test_command_that_the_log_gives_for_a_gap_closes_it_for_a_table_with_two_targets(
    service: Service, run: Run, place: str, where: str
) -> None:
    archive = service.folder / "archive.db"
    write(archive, "CREATE TABLE orders (id INTEGER PRIMARY KEY, total INTEGER NOT NULL)")
    (service.folder / "outbox.toml").write_text(TWO_TARGETS.format(place=place))
    is_own = place.startswith("db_file")
    path = service.folder / ("app.db" if is_own else "data/orders.db")
    with SqlQueue(file=path) if is_own else SqlQueue(path.parent) as pushes:
        pushes.push_many("orders", [(INSERT, [number, 5]) for number in (1, 2, 3)])
    if where == "copy":
        write(archive, "ALTER TABLE orders RENAME TO hidden")
        assert run("run", "--drain").code == 1
        write(archive, "ALTER TABLE hidden RENAME TO orders")
        path = service.folder / ("app.db.targets" if is_own else "data/targets") / "shop.archive" / "orders.db"
    lose(path, 2)
    service.start()
    command = given_command(service)
    assert command[command.index("--target") + 1] == ("shop.archive" if where == "copy" else "all")
    assert run(*command).code == 0
    until(lambda: rows(archive) == [(1,), (3,)], "what is left at the second target")
    service.wait_for(*((1, 2, 3) if where == "copy" else (1, 3)))
    assert run("verify").code == 0
