"""The command line as its users meet it: a process with exit code, standard output and standard error."""

import os
import pty
import re
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO

import orjson
import pytest
import sqlalchemy as sa

from pillarbox import Event
from pillarbox.event import DELIVERED
from tests.acceptance.commands import COUNTED, TIMEOUT, Run, Table, finish, made
from tests.acceptance.commands import run as run_command
from tests.acceptance.launcher import Launcher
from tests.servers import server_url


@pytest.fixture
def run(launcher: Launcher, tmp_path: Path) -> Run:
    """Run a command in an empty folder until it ends."""
    return partial(run_command, launcher, cwd=tmp_path)


@pytest.fixture
def table(tmp_path: Path, run: Run) -> Iterator[Table]:
    """A table in a SQLite file, for what does not depend on the database."""
    made = Table(f"sqlite:///{tmp_path}/shop.db", tmp_path, run)
    yield made.create()
    made.drop()


@pytest.fixture(params=["sqlite", "postgres", "mariadb", "mysql"])
def each(request: pytest.FixtureRequest, tmp_path: Path, run: Run) -> Iterator[Table]:
    """A table that is not created yet, in each database."""
    name = request.param
    made = Table(f"sqlite:///{tmp_path}/shop.db" if name == "sqlite" else server_url(name), tmp_path, run)
    yield made
    made.drop()


def read_until(stream: IO[str] | None, text: str) -> str:
    """Read lines until one contains a text."""
    assert stream is not None
    lines = []
    for line in stream:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"{text!r} never came: {lines}")


# -- every database ----------------------------------------------------------------------------------------


def test_from_schema_to_delivery(each: Table) -> None:
    created = each.run("schema", "create")
    assert (created.code, created.err) == (0, "")
    tables = [each.name, f"{each.name}_dead", f"{each.name}_lanes", f"{each.name}_audit"]
    assert created.out.splitlines() == [f"{name}: created" for name in tables]
    again = each.run("schema", "create")
    assert (again.code, again.out.splitlines()) == (0, [f"{name}: exists" for name in tables])

    events = [made(1, key="a"), made(2, key="a"), made(3)]
    each.put(*events, made(4, delay=timedelta(hours=1)))
    status = each.run("status", "--json")
    assert (status.code, status.json["table"], status.err) == (0, each.name, "")
    assert {name: status.json[name] for name in COUNTED if status.json[name]} == {"new": 3, "scheduled": 1}
    assert 0 <= status.json["oldest_pending_seconds"] < 60

    drained = each.run("relay", "--sink", "stdout:", "--drain")
    assert drained.code == 0
    assert {event["id"] for event in drained.events} == {str(event.id) for event in events}
    assert [event["payload"] for event in drained.events if event["key"] == "a"] == [
        {"number": 1},
        {"number": 2},
    ]
    assert drained.err.endswith("Drained: 3 delivered, 0 to retry, 0 dead. Remaining: 1 scheduled.\n")
    assert each.counts() == {"scheduled": 1}


def test_dead_events_are_listed_shown_redriven_and_dropped(each: Table) -> None:
    each.create()
    first, second = made(1, key="a", headers={"tenant": "x"}), Event("order.lost", b"\xff", topic="lost")
    each.kill(first, second)
    each.put(made(3, key="a"))

    listed = each.run("events", "list", "--state", "dead", "--json")
    assert listed.code == 0
    assert [record["id"] for record in listed.json] == [str(second.id), str(first.id)]
    (shown,) = each.run("events", "show", str(first.id), "--json").json
    assert shown["state"] == "dead"
    assert shown["error"] == "no such customer"
    assert shown["attempts"] == 1
    assert shown["parks"] is True
    assert shown["payload"] == {"number": 1}
    assert shown["headers"] == {"tenant": "x"}

    redriven = each.run("events", "redrive", "--key", "a", "--actor", "ann", "--json")
    assert redriven.json == {"action": "redrive", "matched": 1, "events": 1, "dry_run": False}
    dropped = each.run("events", "drop", "--topic", "lost", "--yes", "--actor", "bob")
    assert (dropped.code, dropped.out) == (0, "Dropped 1 of 1 dead event.\n")
    audit = each.run("audit", "--json").json
    assert [(entry["actor"], entry["action"], entry["events"]) for entry in audit] == [
        ("bob", "drop", 1),
        ("ann", "redrive", 1),
    ]
    drained = each.run("relay", "--sink", "stdout:", "--drain")
    assert [event["payload"] for event in drained.events] == [{"number": 1}, {"number": 3}]
    assert each.counts() == {}


def test_kept_events_are_replayed_and_pruned(each: Table) -> None:
    each.create()
    each.put(*[made(number) for number in range(5)])
    each.relay(lambda event: DELIVERED, retention=timedelta(days=1))
    assert each.counts() == {"delivered": 5}

    would = each.run("events", "replay", "--type", "order.made", "--dry-run")
    assert (would.code, would.out) == (0, "Would replay 5 delivered events.\n")
    replayed = each.run("events", "replay", "--all", "--limit", "3", "--rate", "1000/s", "--json")
    assert replayed.json == {"action": "replay", "matched": 3, "events": 3, "dry_run": False}
    assert each.counts() == {"new": 3, "delivered": 2}

    young = each.run("prune", "--delivered-age", "1h", "--dead-age", "1h", "--json")
    assert young.json == {"delivered": 0, "dead": 0, "dry_run": False}
    would = each.run("prune", "--delivered-age", "0s", "--dry-run")
    assert (would.code, would.out) == (0, "Would delete 2 delivered and 0 dead events.\n")
    assert each.run("prune", "--delivered-age", "0s").out == "Deleted 2 delivered and 0 dead events.\n"
    assert each.counts() == {"new": 3}


def test_printed_schema_runs_as_it_is(each: Table) -> None:
    dialect = "mariadb" if each.is_mariadb else each.engine.dialect.name
    text = each.run("schema", "sql", "--dialect", dialect).out
    with each.engine.begin() as connection:
        for statement in text.split(";\n")[:-1]:
            connection.exec_driver_sql(statement)
    assert each.run("schema", "create", "--json").json[0]["existed"] is True
    assert each.counts() == {}


def test_missing_table_says_what_to_run(each: Table) -> None:
    if each.engine.dialect.name == "sqlite":
        with closing(sqlite3.connect(each.folder / "shop.db")) as db:
            db.execute("CREATE TABLE other (id INTEGER)")
    for command in (["status"], ["relay", "--sink", "null:", "--drain"]):
        done = each.run(*command)
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith("pillarbox: Store ")
        assert each.name in done.err
        assert "Run `pillarbox schema create` or your migration first." in done.err
        assert "Traceback" not in done.err


def test_table_that_lacks_columns_is_refused(each: Table) -> None:
    with each.engine.begin() as connection:
        connection.exec_driver_sql(f"CREATE TABLE {each.name}_lanes (lane SMALLINT)")
    done = each.run("schema", "create")
    assert (done.code, done.out) == (1, "")
    name = f"{each.name}_lanes"
    assert done.err.startswith(f"pillarbox: Table '{name}' exists but is not what the layout declares.")
    assert f"Table '{name}', column 'sink': expected " in done.err
    assert done.err.endswith("schema diff` for the migration, or choose another table; nothing was changed.\n")
    with each.engine.connect() as connection:
        assert not sa.inspect(connection).has_table(each.name)


def test_missing_schema_is_refused(each: Table, run: Run) -> None:
    done = run("schema", "create", "--store", each.url, "--table", f"nowhere.{each.name}")
    assert (done.code, done.out) == (1, "")
    expected = "SQLite has no schemas" if each.engine.dialect.name == "sqlite" else "There is no "
    assert expected in done.err
    assert "'nowhere'" in done.err


def test_bench_measures_and_leaves_nothing(each: Table) -> None:
    done = each.run("bench", "--events", "50", "--batch", "20", "--json")
    assert done.code == 0
    modes = {"drain_by_lease"} if each.engine.dialect.name == "sqlite" else {"drain_by_hold", "drain_by_lease"}
    assert set(done.json) == {"put", *modes}
    assert all(rate > 0 for rate in done.json.values())
    with each.engine.connect() as connection:
        assert not sa.inspect(connection).has_table("pillarbox_bench")


# -- signals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_stops_the_relay_with_nothing_held(table: Table, number: signal.Signals) -> None:
    process = table.start("relay", "--sink", "stdout:")
    started = read_until(process.stderr, "Relaying")
    assert f"table {table.name}, sink stdout:, claim by lease" in started
    table.put(made(1))
    read_until(process.stdout, '"number":1')
    process.send_signal(number)
    done = finish(process)
    assert done.code == 0
    assert done.err.splitlines()[-1].endswith("Stopped: 1 delivered, 0 to retry, 0 dead.")
    assert table.counts() == {}


def test_events_of_a_stuck_destination_are_given_back(table: Table) -> None:
    events = [Event("large", {"text": "x" * 10_000}) for _ in range(50)]
    table.put(*events)
    # Nobody reads: the pipe is full before all events are written.
    process = table.start("relay", "--sink", "stdout:", "--stop-timeout", "100ms")
    read_until(process.stderr, "Relaying")
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT) == 0
    done = finish(process)
    assert "held" not in table.counts()
    rest = table.run("relay", "--sink", "stdout:", "--drain")
    delivered = re.findall(r'"id":"([0-9a-f-]{36})"', done.out + rest.out)
    assert set(delivered) == {str(event.id) for event in events}


def signal_until_it_ends(process: subprocess.Popen[str]) -> None:
    for _ in range(100):
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            return
    raise AssertionError("the process does not end")


def test_signal_sent_twice_at_once_is_one(table: Table) -> None:
    process = table.start("relay", "--sink", "null:")
    read_until(process.stderr, "Relaying")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert finish(process).code == 0


def test_second_signal_ends_at_once(table: Table) -> None:
    table.put(Event("large", {"text": "x" * 500_000}))
    process = table.start("relay", "--sink", "stdout:")
    assert process.stdout is not None
    # The delivery is under way when its first letter has come, and cannot end because nobody reads the rest.
    process.stdout.read(1)
    process.send_signal(signal.SIGTERM)
    read_until(process.stderr, "SIGTERM")
    # Soon after the first it is taken for an echo: signal until it counts.
    signal_until_it_ends(process)
    assert process.returncode == 143
    assert "ended at once" in finish(process).err


# -- standard output and standard error --------------------------------------------------------------------


def test_events_do_not_mix_with_the_summary(table: Table) -> None:
    table.put(made(1))
    done = table.run("relay", "--sink", "stdout:", "--drain", "--json")
    assert [event["payload"] for event in done.events] == [{"number": 1}]
    summary = orjson.loads(done.err[done.err.index("{") :])
    assert summary["delivered"] == 1
    assert summary["remaining"]["new"] == 0


def test_summary_as_json_goes_to_standard_output(table: Table) -> None:
    table.put(made(1), made(2, delay=timedelta(hours=1)))
    done = table.run("relay", "--sink", "null:", "--drain", "--json", "-q")
    assert done.err == ""
    assert done.json == {
        "delivered": 1,
        "retried": 0,
        "dead": 0,
        "released": 0,
        "lost": 0,
        "dropped": 0,
        "remaining": {
            "ready": 0,
            "waiting": 0,
            "leased": 0,
            "new": 0,
            "retrying": 0,
            "held": 0,
            "scheduled": 1,
            "blocked": 0,
            "delivered": 0,
            "dead": 0,
            "oldest_pending_seconds": done.json["remaining"]["oldest_pending_seconds"],
        },
    }


def test_status_asks_the_destinations_and_fails_when_one_is_down(table: Table, tmp_path: Path) -> None:
    (tmp_path / "pillarbox.toml").write_text(
        '[sinks.near]\nurl = "null:"\n[sinks.far]\nurl = "redis://127.0.0.1:1"\n[[routes]]\nto = ["near", "far"]\n'
    )
    assert table.run("status").code == 0
    told = table.run("status", "--check")
    assert told.code == 1
    assert "near: up" in told.out.splitlines()
    assert re.search(r"^far: Sink far: .*Connect call failed", told.out, re.MULTILINE)
    assert table.run("status", "--check", "--json").json["destinations"]["near"] == "up"
    (tmp_path / "pillarbox.toml").write_text('[sink]\nurl = "null:"\n')
    assert table.run("status", "--check").code == 0


def test_one_process_delivers_from_several_stores_and_counts_what_it_drops(run: Run, tmp_path: Path) -> None:
    stores = [Table(f"sqlite:///{tmp_path}/{name}.db", tmp_path, run).create() for name in ("shop", "bank")]
    (tmp_path / "pillarbox.toml").write_text(
        "".join(
            f'[stores.{name}]\nurl = "{store.url}"\ntable = "{store.name}"\n'
            for name, store in zip(("shop", "bank"), stores, strict=True)
        )
        + '[sinks.all]\nurl = "file:all.jsonl"\n[sinks.shops]\nurl = "file:shops.jsonl"\n'
        + '[[routes]]\nstore = "shop"\ntype = "order.*"\nto = ["all", "shops"]\n'
        + '[[routes]]\nstore = "bank"\ntype = "order.*"\nto = "all"\n[routing]\nunmatched = "drop"\n'
    )
    for number, store in enumerate(stores):
        store.put(made(number), Event("other", {}))
    done = run("relay", "--drain", "--json")
    assert done.code == 0
    assert (done.json["delivered"], done.json["dropped"], done.json["remaining"]["new"]) == (3, 2, 0)
    assert "3 delivered, 0 to retry, 0 dead, 2 dropped without a route." in done.err
    everything, shops = (
        sorted(
            orjson.loads(line)["payload"]["number"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()
        )
        for name in ("all", "shops")
    )
    assert (everything, shops) == ([0, 1], [0])
    for store in stores:
        store.drop()


@pytest.mark.parametrize(("answer", "code", "left"), [("n", 1, {"dead": 1}), ("y", 0, {})])
def test_drop_asks_on_a_terminal(table: Table, answer: str, code: int, left: dict[str, int]) -> None:
    table.kill(made(1))
    terminal, stdin = pty.openpty()
    try:
        os.write(terminal, f"{answer}\n".encode())
        done = finish(table.start("events", "drop", "--all", stdin=stdin))
    finally:
        os.close(terminal)
        os.close(stdin)
    assert done.code == code
    assert "Delete 1 dead event for good?" in done.err
    assert table.counts() == left


# -- what goes wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["postgresql://me:s3cret@127.0.0.1:1/shop", "mysql://me:s3cret@127.0.0.1:1/shop"])
@pytest.mark.parametrize("command", [["status"], ["relay", "--sink", "null:", "--drain"], ["schema", "create"]])
def test_missing_server_is_one_line_and_a_hint(run: Run, url: str, command: list[str]) -> None:
    done = run(*command, "--store", url)
    assert (done.code, done.out) == (1, "")
    first, second = done.err.splitlines()
    assert first.startswith(f"pillarbox: Store {url.replace('s3cret', '***')} (outbox): ")
    assert second.startswith("hint: is the database up")


def test_destination_that_is_down_fails_a_drain(table: Table) -> None:
    table.put(made(1))
    done = table.run("relay", "--sink", "file:/nowhere/out.jsonl", "--drain", "-q")
    assert (done.code, done.out) == (1, "")
    first, second = done.err.splitlines()
    assert first.startswith("pillarbox: Sink 'file:/nowhere/out.jsonl': ")
    assert "/nowhere" in first
    assert second == "hint: the events stay in the outbox; run again when the destination is back"
    assert table.counts() == {"new": 1}


@pytest.mark.parametrize("routed", [False, True], ids=["sink", "route"])
def test_file_sink_in_a_missing_folder_is_told_at_the_start(table: Table, routed: bool) -> None:
    """Also when there is nothing to send: a folder does not come back by itself, as a broker does."""
    if routed:
        settings = '[sinks.out]\nurl = "file:missing/out.jsonl"\n[[routes]]\nto = "out"\n'
        (table.folder / "pillarbox.toml").write_text(settings)
    done = table.run("relay", *([] if routed else ["--sink", "file:missing/out.jsonl"]), "-q")
    assert (done.code, done.out) == (1, "")
    assert f"the folder {str(table.folder / 'missing')!r} does not exist; create it" in done.err.splitlines()[0]


# -- settings ----------------------------------------------------------------------------------------------


def test_settings_come_from_the_file_in_this_folder(table: Table, run: Run) -> None:
    table.put(made(1))
    (table.folder / ".env").write_text(f"TABLE={table.name}\n")
    (table.folder / "pillarbox.toml").write_text(
        f'[store]\nurl = "{table.url}"\ntable = "${{TABLE}}"\n[sink]\nurl = "stdout:"\n'
    )
    assert len(run("relay", "--drain").events) == 1
    assert run("status", env={"PILLARBOX_TABLE": "other"}).code == 1
