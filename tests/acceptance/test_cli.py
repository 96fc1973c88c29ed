"""The command line as its users meet it: a process with exit code, standard output and standard error."""

import asyncio
import os
import pty
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import orjson
import pytest
import sqlalchemy as sa
import typer

from pillarbox import CallableSink, Dead, Event, Outbox, Outcome, Relay, open_store
from pillarbox.cli import app
from pillarbox.event import DELIVERED
from tests.servers import server_url

TIMEOUT = 60
COUNTED = ("new", "retrying", "held", "scheduled", "blocked", "delivered", "dead")


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return orjson.loads(self.out)

    @property
    def events(self) -> list[Any]:
        return [orjson.loads(line) for line in self.out.splitlines()]


def start(*args: str, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("PILLARBOX_")}
    env |= {"COLUMNS": "200", **options.pop("env", {})}
    command = [sys.executable, "-m", "pillarbox", *args]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, cwd=cwd, env=env, text=True, **pipes)


def finish(process: subprocess.Popen[str]) -> Done:
    out, err = process.communicate(timeout=TIMEOUT)
    return Done(process.returncode, out, err)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Done]:
    """Run a command in an empty folder until it ends."""
    return lambda *args, **options: finish(start(*args, cwd=tmp_path, **options))


class Table:
    """An outbox table of one's own, and the commands on it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.name = f"cli_{uuid4().hex[:12]}"
        self.folder = folder
        driver = {"postgresql:": "postgresql+psycopg:", "mysql:": "mysql+pymysql:"}
        scheme, rest = url.split("//", 1)
        self.engine = sa.create_engine(f"{driver.get(scheme, scheme)}//{rest}")
        self.outbox = Outbox(sa.MetaData(), table=self.name)

    def start(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        return start(*args, "--store", self.url, "--table", self.name, cwd=self.folder, **options)

    def run(self, *args: str, **options: Any) -> Done:
        return finish(self.start(*args, **options))

    def create(self) -> "Table":
        self.outbox.table.metadata.create_all(self.engine)
        return self

    def put(self, *events: Event) -> None:
        with self.engine.begin() as connection:
            self.outbox.put(connection, *events)

    def relay(self, handle: Callable[[Event], Outcome], retention: timedelta | None = None) -> None:
        """Drain the table in this process."""

        async def drain() -> None:
            store = open_store(self.url, table=self.name, retention=retention)
            async with Relay(store, CallableSink(handle)) as relay:
                await relay.drain()

        asyncio.run(drain())

    def kill(self, *events: Event, error: str = "no such customer") -> None:
        """Put events and let them die."""
        self.put(*events)
        self.relay(lambda event: Dead(error))

    def counts(self) -> dict[str, int]:
        status = self.run("status", "--json").json
        return {name: status[name] for name in COUNTED if status[name]}

    def drop(self) -> None:
        self.outbox.table.metadata.drop_all(self.engine)
        self.engine.dispose()


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    """A table in a SQLite file, for what does not depend on the database."""
    made = Table(f"sqlite:///{tmp_path}/shop.db", tmp_path)
    yield made.create()
    made.drop()


@pytest.fixture(params=["sqlite", "postgres", "mariadb", "mysql"])
def each(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Table]:
    """A table that is not created yet, in each database."""
    name = request.param
    made = Table(f"sqlite:///{tmp_path}/shop.db" if name == "sqlite" else server_url(name), tmp_path)
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


def made(number: int, *, key: str | None = None, **options: Any) -> Event:
    return Event("order.made", {"number": number}, key=key, **options)


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
    text = each.run("schema", "sql").out
    with each.engine.begin() as connection:
        for statement in text.split(";\n")[:-1]:
            connection.exec_driver_sql(statement)
    assert each.run("schema", "create", "--json").json[0]["existed"] is True
    assert each.counts() == {}


def test_missing_table_says_what_to_run(each: Table) -> None:
    if each.engine.dialect.name == "sqlite":
        sqlite3.connect(each.folder / "shop.db").close()
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
    assert done.err == (
        f"pillarbox: Table '{each.name}_lanes' exists but lacks column 'sink' (varchar(100)). "
        "Add it by a migration, or choose another table; nothing was changed.\n"
    )
    with each.engine.connect() as connection:
        assert not sa.inspect(connection).has_table(each.name)


def test_missing_schema_is_refused(each: Table) -> None:
    done = finish(
        start("schema", "create", "--store", each.url, "--table", f"nowhere.{each.name}", cwd=each.folder)
    )
    assert (done.code, done.out) == (1, "")
    expected = "SQLite has no schemas" if each.engine.dialect.name == "sqlite" else "There is no "
    assert expected in done.err
    assert "'nowhere'" in done.err


def test_bench_measures_and_leaves_nothing(each: Table) -> None:
    done = each.run("bench", "--events", "50", "--batch", "20", "--json")
    assert done.code == 0
    modes = (
        {"drain_by_lease"} if each.engine.dialect.name == "sqlite" else {"drain_by_hold", "drain_by_lease"}
    )
    assert set(done.json) == {"put", *modes}
    assert all(rate > 0 for rate in done.json.values())
    with each.engine.connect() as connection:
        assert not sa.inspect(connection).has_table("pillarbox_bench")


# -- signals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
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


def test_second_signal_ends_at_once(table: Table) -> None:
    table.put(*[Event("large", {"text": "x" * 10_000}) for _ in range(50)])
    process = table.start("relay", "--sink", "stdout:", "--batch-size", "50")
    assert process.stdout is not None
    # The first batch is under way when its first event has come, and cannot end because nobody reads the rest.
    process.stdout.read(1)
    process.send_signal(signal.SIGTERM)
    read_until(process.stderr, "SIGTERM")
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT) == 143


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
        "remaining": {
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


def test_tables_are_for_people(table: Table) -> None:
    table.kill(made(1, key="[red]k[/red]"), error="first line\nsecond line")
    status = table.run("status")
    assert re.search(r"^dead +1  given up", status.out, re.MULTILINE)
    listed = table.run("events", "list").out.splitlines()
    assert listed[0].split() == ["seq", "id", "state", "type", "key", "attempts", "put", "error"]
    assert len(listed) == 2
    assert "[red]k[/red]" in listed[1]
    assert listed[1].endswith("first line second line")
    shown = table.run("events", "show", orjson.loads(table.run("events", "list", "--json").out)[0]["id"])
    assert "state     dead (parks its key)\n" in shown.out
    assert shown.out.endswith('\n\n{\n  "number": 1\n}\n')


def test_nothing_listed_is_said_on_standard_error(table: Table) -> None:
    done = table.run("events", "list", "--type", "nothing")
    assert (done.code, done.out, done.err) == (0, "", "No events match.\n")


# -- choosing events ---------------------------------------------------------------------------------------


def test_filters_choose(table: Table) -> None:
    one = Event("a.made", {}, topic="a", key="1")
    two = Event("b.made", {}, topic="b", key="2")
    table.put(one, two)

    def chosen(*args: str) -> set[str]:
        return {record["type"] for record in table.run("events", "list", "--json", *args).json}

    assert chosen("--id", str(one.id)) == {"a.made"}
    assert chosen("--id", str(one.id), "--id", str(two.id)) == {"a.made", "b.made"}
    assert chosen("--key", "2", "--topic", "b", "--since", "1h") == {"b.made"}
    assert chosen("--type", "a.made", "--until", "1h") == set()
    assert chosen("--since", "2020-01-01", "--until", "2020-01-02T00:00:00+02:00") == set()


def test_error_text_chooses_dead_events(table: Table) -> None:
    table.kill(made(1), error="timeout of 100%")
    table.kill(made(2), error="timeout of 1000")
    done = table.run("events", "redrive", "--error", "100%", "--json")
    assert done.json["events"] == 1
    assert table.counts() == {"new": 1, "dead": 1}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["events", "redrive"], "No events chosen"),
        (["events", "drop"], "No events chosen"),
        (["events", "replay"], "No events chosen"),
        (["events", "redrive", "--all", "--key", "a"], "give one or the other"),
        (["events", "drop", "--all"], "without a terminal to ask on, give --yes"),
        (["prune"], "give --delivered-age, --dead-age or both"),
        (["relay"], "No sink given: use --sink URL"),
        (["events", "redrive", "--all", "--rate", "fast"], "such as 100/s"),
        (["events", "list", "--since", "yesterday"], "or how long ago, such as 2h; got 'yesterday'"),
        (["events", "list", "--state", "lost"], "'lost'"),
        (["events", "show", "not-an-id"], "'not-an-id'"),
        (["relay", "--lease", "30"], "'--lease'"),
        (["relay", "--batch-size", "0"], "'--batch-size'"),
        (["relay", "--batchsize", "5"], "--batchsize"),
        (["relai"], "'relai'"),
    ],
)
def test_wrong_usage_exits_with_2(table: Table, args: list[str], expected: str) -> None:
    done = table.run(*args)
    assert (done.code, done.out) == (2, "")
    assert expected in done.err
    assert "Traceback" not in done.err


def test_no_store_is_wrong_usage(run: Callable[..., Done]) -> None:
    done = run("status")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(
        "pillarbox: No store given: use --store URL, PILLARBOX_STORE, or url under [store]"
    )


@pytest.mark.parametrize(("answer", "code", "left"), [("n", 1, {"dead": 1}), ("y", 0, {})])
def test_drop_asks_on_a_terminal(table: Table, answer: str, code: int, left: dict[str, int]) -> None:
    table.kill(made(1))
    terminal, stdin = pty.openpty()
    try:
        os.write(terminal, f"{answer}\n".encode())
        done = table.run("events", "drop", "--all", stdin=stdin)
    finally:
        os.close(terminal)
        os.close(stdin)
    assert done.code == code
    assert "Delete 1 dead event for good?" in done.err
    assert table.counts() == left


def test_dry_run_changes_nothing(table: Table) -> None:
    table.kill(made(1))
    for action in ("redrive", "drop"):
        done = table.run("events", action, "--all", "--dry-run")
        assert (done.code, done.out) == (0, f"Would {action} 1 dead event.\n")
    assert table.counts() == {"dead": 1}
    assert table.run("audit", "--json").json == []


def test_actor_is_the_user_at_this_host_unless_given(table: Table) -> None:
    table.kill(made(1))
    table.run("events", "redrive", "--all")
    (entry,) = table.run("audit", "--json").json
    assert re.fullmatch(r"\S+@\S+", entry["actor"])


# -- what goes wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["postgresql://me:s3cret@127.0.0.1:1/shop", "mysql://me:s3cret@127.0.0.1:1/shop"]
)
@pytest.mark.parametrize(
    "command", [["status"], ["relay", "--sink", "null:", "--drain"], ["schema", "create"]]
)
def test_missing_server_is_one_line_and_a_hint(
    run: Callable[..., Done], url: str, command: list[str]
) -> None:
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


def test_traceback_only_when_asked_for(run: Callable[..., Done]) -> None:
    args = ("status", "--store", "sqlite:///nothing.db")
    plain, detailed = run(*args), run(*args, "-vv")
    assert plain.err == (
        "pillarbox: Store sqlite:///nothing.db (outbox): there is no file 'nothing.db'. "
        "Run `pillarbox schema create` first.\n"
    )
    assert detailed.code == 1
    assert detailed.err.startswith("Traceback (most recent call last):")
    assert detailed.err.endswith(plain.err)


def test_missing_folder_is_refused(run: Callable[..., Done]) -> None:
    done = run("schema", "create", "--store", "sqlite:///nowhere/shop.db")
    assert (done.code, done.out) == (1, "")
    assert done.err.endswith("there is no folder 'nowhere'. Create it first.\n")


def test_missing_event_is_a_failure(table: Table) -> None:
    done = table.run("events", "show", "018f0000-0000-7000-8000-000000000000")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(
        f"pillarbox: Event 018f0000-0000-7000-8000-000000000000 is not in table '{table.name}'."
    )


# -- settings ----------------------------------------------------------------------------------------------


def test_settings_come_from_the_file_in_this_folder(table: Table, run: Callable[..., Done]) -> None:
    table.put(made(1))
    (table.folder / ".env").write_text(f"TABLE={table.name}\n")
    (table.folder / "pillarbox.toml").write_text(
        f'[store]\nurl = "{table.url}"\ntable = "${{TABLE}}"\n[sink]\nurl = "stdout:"\n'
    )
    assert len(run("relay", "--drain").events) == 1
    assert run("status", env={"PILLARBOX_TABLE": "other"}).code == 1


def test_unknown_key_is_refused(table: Table) -> None:
    path = table.folder / "other.toml"
    path.write_text("[relay]\nbatchsize = 5\n")
    done = table.run("relay", "--sink", "null:", "--config", str(path))
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"pillarbox: {path}, [relay]: unknown key 'batchsize'; expected batch_size, ")
    assert done.err.endswith("Did you mean 'batch_size'?\n")


# -- help --------------------------------------------------------------------------------------------------


def list_commands(group: Any, *path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield " ".join([*path, name]), command
        if hasattr(command, "commands"):
            yield from list_commands(command, *path, name)


COMMANDS = dict(list_commands(typer.main.get_command(app)))


def test_every_command_is_there() -> None:
    expected = {
        *("relay", "status", "prune", "audit", "bench", "schema", "schema sql", "schema create"),
        *("events", "events list", "events show", "events redrive", "events drop", "events replay"),
    }
    assert set(COMMANDS) - {"demo"} == expected


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_and_option_is_explained(name: str) -> None:
    command = COMMANDS[name]
    assert re.fullmatch(r"[A-Z].*[.]", command.help.partition("\n")[0])
    assert [item.name for item in command.params if not getattr(item, "help", None)] == []


def test_help_is_printed_without_a_command(run: Callable[..., Done]) -> None:
    done = run("--help")
    assert done.code == 0
    assert "  relay " in done.out
    assert "completion" not in done.out
    assert run("--version").out == "pillarbox 0.1.0\n"
