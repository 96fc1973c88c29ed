"""The words of the command line: what it prints, what it refuses and how.

The commands run in this process, which is quicker than a new one; `tests/acceptance` runs them as users do.
"""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import typer
from typer.testing import CliRunner

from pillarbox import Event
from pillarbox.cli import main
from pillarbox.cli.commands import app
from pillarbox.cli.schema import _print_drift
from pillarbox.schema import Drift
from tests.acceptance.commands import Done, Run, Table, made


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run a command in this process."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PILLARBOX_")]:
        monkeypatch.delenv(name)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level

    def call(*args: str, env: dict[str, str] | None = None) -> Done:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["pillarbox", *args])
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as caught:
                main()
        return Done(int(caught.value.code or 0), *capsys.readouterr())

    yield call
    logging.captureWarnings(False)
    logging.getLogger("pillarbox").setLevel(logging.NOTSET)
    logging.basicConfig(level=level, handlers=handlers, force=True)


@pytest.fixture
def local(tmp_path: Path, call: Run) -> Iterator[Table]:
    """A table whose commands run in this process."""
    made = Table(f"sqlite:///{tmp_path}/shop.db", tmp_path, call)
    made.create()
    yield made
    made.drop()


def test_tables_are_for_people(local: Table) -> None:
    local.kill(made(1, key="[red]k[/red]"), error="first line\nsecond line")
    status = local.run("status")
    assert re.search(r"^dead +1  given up", status.out, re.MULTILINE)
    listed = local.run("events", "list").out.splitlines()
    assert listed[0].split() == ["id", "state", "type", "key", "attempts", "age", "error"]
    assert len(listed) == 2
    assert "[red]k[/red]" in listed[1]
    assert listed[1].endswith("first line second line")
    shown = local.run("events", "show", orjson.loads(local.run("events", "list", "--json").out)[0]["id"])
    assert "state     dead (parks its key)\n" in shown.out
    assert shown.out.endswith('\n\n{\n  "number": 1\n}\n')


def test_nothing_listed_is_said_on_standard_error(local: Table) -> None:
    done = local.run("events", "list", "--type", "nothing")
    assert (done.code, done.out, done.err) == (0, "", "No events match.\n")


def test_filters_choose(local: Table) -> None:
    one = Event("a.made", {}, topic="a", key="1")
    two = Event("b.made", {}, topic="b", key="2")
    local.put(one, two)

    def chosen(*args: str) -> set[str]:
        return {record["type"] for record in local.run("events", "list", "--json", *args).json}

    assert chosen("--id", str(one.id)) == {"a.made"}
    assert chosen("--id", str(one.id), "--id", str(two.id)) == {"a.made", "b.made"}
    assert chosen("--key", "2", "--topic", "b", "--since", "1h") == {"b.made"}
    assert chosen("--type", "a.made", "--until", "1h") == set()
    assert chosen("--since", "2020-01-01", "--until", "2020-01-02T00:00:00+02:00") == set()


def test_error_text_chooses_dead_events(local: Table) -> None:
    local.kill(made(1), error="timeout of 100%")
    local.kill(made(2), error="timeout of 1000")
    done = local.run("events", "redrive", "--error", "100%", "--json")
    assert done.json["events"] == 1
    assert local.counts() == {"new": 1, "dead": 1}


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
        (["relay", "--batch-bytes", "lots"], "'--batch-bytes'"),
        (["relay", "--batchsize", "5"], "--batchsize"),
        (["relai"], "'relai'"),
    ],
)
def test_wrong_usage_exits_with_2(call: Run, args: list[str], expected: str) -> None:
    done = call(*args, env={"PILLARBOX_STORE": "sqlite:///nothing.db"})
    assert (done.code, done.out) == (2, "")
    assert expected in done.err


def test_no_store_is_wrong_usage(call: Run) -> None:
    done = call("status")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("pillarbox: No store given: use --store URL, PILLARBOX_STORE, or url under [store]")


def test_dry_run_changes_nothing(local: Table) -> None:
    local.kill(made(1))
    for action in ("redrive", "drop"):
        done = local.run("events", action, "--all", "--dry-run")
        assert (done.code, done.out) == (0, f"Would {action} 1 dead event.\n")
    assert local.counts() == {"dead": 1}
    assert local.run("audit", "--json").json == []


def test_actor_is_the_user_at_this_host_unless_given(local: Table) -> None:
    local.kill(made(1))
    local.run("events", "redrive", "--all")
    (entry,) = local.run("audit", "--json").json
    assert re.fullmatch(r"\S+@\S+", entry["actor"])


def test_traceback_only_when_asked_for(call: Run) -> None:
    args = ("status", "--store", "sqlite:///nothing.db")
    plain, detailed = call(*args), call(*args, "-vv")
    assert plain.err == (
        "pillarbox: Store sqlite:///nothing.db (outbox): there is no file 'nothing.db'. "
        "Run `pillarbox schema create` first.\n"
    )
    assert detailed.code == 1
    assert detailed.err.startswith("Traceback (most recent call last):")
    assert detailed.err.endswith(plain.err)


def test_missing_folder_is_refused(call: Run) -> None:
    done = call("schema", "create", "--store", "sqlite:///nowhere/shop.db")
    assert (done.code, done.out) == (1, "")
    assert done.err.endswith("there is no folder 'nowhere'. Create it first.\n")


def test_missing_event_is_a_failure(local: Table) -> None:
    done = local.run("events", "show", "018f0000-0000-7000-8000-000000000000")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"pillarbox: Event 018f0000-0000-7000-8000-000000000000 is not in table '{local.name}'.")


def test_unknown_key_is_refused(local: Table) -> None:
    path = local.folder / "other.toml"
    path.write_text("[relay]\nbatchsize = 5\n")
    done = local.run("relay", "--sink", "null:", "--config", str(path))
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"pillarbox: {path}, [relay]: unknown key 'batchsize'; expected batch_size, ")
    assert done.err.endswith("Did you mean 'batch_size'?\n")


def list_commands(group: Any, *path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        yield " ".join([*path, name]), command
        if hasattr(command, "commands"):
            yield from list_commands(command, *path, name)


COMMANDS = dict(list_commands(typer.main.get_command(app)))


def test_every_command_is_there() -> None:
    expected = {
        *("relay", "status", "prune", "audit", "bench", "demo", "schema", "schema sql", "schema create"),
        *("schema check", "schema diff", "partitions", "partitions ensure", "partitions drop", "partitions sql"),
        *("events", "events list", "events show", "events redrive", "events drop", "events replay", "events check"),
        "consume",
        *("handlers", "handlers list", "handlers run", "handlers backfill"),
        *("sync", "sync run", "sync init", "sync status", "sync verify", "sync skip", "sync migrate", "sync renumber"),
        *("sync schema", "sync dead", "sync dead list", "sync dead show", "sync dead replay"),
    }
    assert set(COMMANDS) == expected


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_and_option_is_explained(name: str) -> None:
    command = COMMANDS[name]
    assert re.fullmatch(r"[A-Z].*[.]", command.help.partition("\n")[0])
    assert [item.name for item in command.params if not getattr(item, "help", None)] == []


def test_help_is_printed_without_a_command(call: Run) -> None:
    done = call("--help")
    assert done.code == 0
    assert "  relay " in done.out
    assert "completion" not in done.out
    assert call("--version").out == "pillarbox 0.1.0\n"


def test_command_starts_without_what_only_servers_need() -> None:
    # What `pip install pillarbox` alone does not bring; None in its place makes an import fail.
    missing = ("greenlet", "asyncpg", "psycopg", "aiomysql", "pymysql", "aiosqlite", "alembic", "opentelemetry")
    code = f"import sys; sys.modules.update(dict.fromkeys({missing!r})); from pillarbox.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage:" in done.stdout


STEERING = "\x1b[31mred\x1b]0;title\x07\x9b2J\x85\u202egnp\u2066\r\x7f"
SEEN = "\\x1b[31mred\\x1b]0;title\\x07\\x9b2J\\x85\\u202egnp\\u2066\\r\\x7f"


def test_what_others_wrote_cannot_steer_the_terminal(local: Table) -> None:
    event = Event("order.placed", f"text {STEERING}".encode(), content_type="text/plain", key="k\u202e")
    local.kill(event, error=f"[red]no[/red]{STEERING}\nstate  delivered")
    listed = local.run("events", "list").out
    shown = local.run("events", "show", str(event.id)).out
    for page in (listed, shown):
        assert page.replace("\n", "").isprintable()
        assert "k\\u202e" in page
        assert "[red]no[/red]\\x1b[31mred" in page
    assert f"text {SEEN}" in shown
    assert not re.search(r"^state  delivered", shown, re.MULTILINE)
    answer = local.run("events", "show", str(event.id), "--json")
    assert answer.out.replace("\n", "").isprintable()
    (found,) = answer.json
    assert (found["key"], found["payload"]) == ("k\u202e", f"text {STEERING}")


def show(local: Table, payload: bytes) -> tuple[str, str]:
    """An event's payload as `events show` prints it: on the page, and with --json."""
    event = Event("made", payload, content_type="application/json")
    local.put(event)
    page = local.run("events", "show", str(event.id)).out.partition("\n\n")[2].removesuffix("\n")
    return page, local.run("events", "show", str(event.id), "--json").out


def test_event_is_shown_with_its_own_numbers(local: Table) -> None:
    payload = b'{"n":12345678901234567890123,"f":1.0000000000000000001,"m":10.00,"e":2E5,"z":-0,"l":[1]}'
    page, answer = show(local, payload)
    assert page == (
        '{\n  "n": 12345678901234567890123,\n  "f": 1.0000000000000000001,\n  "m": 10.00,\n  "e": 2E5,\n  "z": -0,\n'
        '  "l": [\n    1\n  ]\n}'
    )
    assert f'"payload": {payload.decode()}' in answer


def test_event_is_shown_as_it_is_when_its_layout_cannot_be_changed(local: Table) -> None:
    twice = '{"a":1,"a":2.00}'
    page, answer = show(local, twice.encode())
    assert page == twice
    assert f'"payload": {twice}' in answer


def test_payload_in_an_answer_cannot_steer_the_terminal_and_stays_json(local: Table) -> None:
    page, answer = show(local, '{\r\n\t"text": "a\x9b2J\u202e",\r\n"n": 1.00}'.encode())
    assert page == '{\n  "text": "a\\x9b2J\\u202e",\n  "n": 1.00\n}'
    assert answer.replace("\n", "").replace("\t", "").isprintable()
    (found,) = orjson.loads(answer)
    assert found["payload"] == {"text": "a\x9b2J\u202e", "n": 1.0}
    assert '"n": 1.00' in answer


@pytest.mark.parametrize("payload", [b"{broken", b"[NaN]", b'"\\ud800"', b"1e999"])
def test_payload_that_programs_cannot_read_is_text(local: Table, payload: bytes) -> None:
    page, answer = show(local, payload)
    assert page == payload.decode()
    assert orjson.loads(answer)[0]["payload"] == payload.decode()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgresql://u:a@SECRET@host/db", "'postgresql://u:***@host/db' has a bare '@' in its password"),
        ("postgresql://u:a@b:SECRET@h", "the url 'postgresql://u:***@h' cannot be read"),
        ("postgresql://h:bad/db", "its port must be a number up to 65535"),
        ("postgresql://[::1/db", "an IPv6 address stands in [ ]"),
        ("postgresql://h1:5432,h2:5432/db", "expected one server, got several"),
        ("mysql://h1,h2/db", "expected one server, got several"),
        ("postgresql://u@/db?host=h1&host=h2", "expected one server, got several"),
        ("sqlite://u:SECRET@h/db", "a SQLite file has no server"),
    ],
)
def test_url_that_drivers_misunderstand_is_refused_without_its_password(call: Run, url: str, expected: str) -> None:
    for command in (["status"], ["events", "list", "-vv"], ["relay", "--sink", "null:", "--drain"]):
        done = call(*command, "--store", url)
        assert done.code == 1
        assert expected in done.err
        assert "SECRET" not in done.err
        assert "defect" not in done.err


def test_former_words_for_states_are_taken_with_a_hint(local: Table) -> None:
    local.put(made(1))
    done = local.run("events", "list", "--state", "new", "--json")
    assert [each["state"] for each in done.json] == ["ready"]
    assert done.err == "hint: --state new is now called ready; the old word goes with the next release\n"
    counted = local.run("status", "--json").json
    assert (counted["ready"], counted["new"]) == (1, 1)
    assert re.search(r"^ready +1  can be claimed now$", local.run("status").out, re.MULTILINE)


def test_rows_say_whose_they_are_and_an_unknown_recipient_is_refused(local: Table, tmp_path: Path) -> None:
    (tmp_path / "pillarbox.toml").write_text(
        "[sinks.warehouse]\nurl = 'null:'\n[sinks.audit]\nurl = 'null:'\n[[routes]]\nto = ['warehouse', 'audit']\n"
    )
    assert local.run("relay", "--drain").code == 0
    event = made(1)
    local.put(event)
    with local.engine.begin() as db:
        db.exec_driver_sql(f"UPDATE {local.name} SET sink = 'warehouse'")
    assert [each["recipient"] for each in local.run("events", "list", "--json").json] == ["warehouse"]
    heading, row = local.run("events", "list").out.splitlines()
    assert heading.split()[-1] == "recipient"
    assert row.split()[-1] == "warehouse"
    assert re.search(r"^recipient +warehouse$", local.run("events", "show", str(event.id)).out, re.MULTILINE)
    assert local.run("events", "list", "--recipient", "audit").err == "No events match.\n"
    done = local.run("events", "list", "--recipient", "warehose")
    assert (done.code, done.out) == (1, "")
    assert "Recipient 'warehose': there is no sink or handler of this name; known are audit, warehouse" in done.err


def test_relay_for_a_recipient_that_nobody_knows_says_so_once(local: Table) -> None:
    done = local.run("relay", "--sink", "null:", "--drain", "--recipient", "nobody")
    assert done.code == 0
    assert (
        " WARNING Recipient 'nobody': no sink or handler of this name has rows yet; no sink or handler has rows here\n"
    ) in done.err
    # From now on it has lanes: a relay has worked for it.
    again = local.run("relay", "--sink", "null:", "--drain", "--recipient", "nobody")
    assert (again.code, "WARNING" in again.err) == (0, False)
    other = local.run("relay", "--sink", "null:", "--drain", "--recipient", "nobdy")
    assert "Recipient 'nobdy': no sink or handler of this name has rows yet; known are nobody\n" in other.err


def test_relay_for_a_recipient_with_rows_does_not_warn(local: Table) -> None:
    local.put(made(1))
    with local.engine.begin() as db:
        db.exec_driver_sql(f"UPDATE {local.name} SET sink = 'mailer'")
    done = local.run("relay", "--sink", "null:", "--drain", "--recipient", "mailer")
    assert (done.code, "WARNING" in done.err, "1 delivered" in done.err) == (0, False, True)


def test_relay_for_a_recipient_without_its_table_says_what_is_missing(call: Run, tmp_path: Path) -> None:
    args = ("relay", "--sink", "null:", "--drain", "--store", "sqlite:///nothing.db")
    assert call(*args, "--recipient", "nobody").err == call(*args).err
    (tmp_path / "nothing.db").touch()
    assert call(*args, "--recipient", "nobody").err == call(*args).err


def test_recipient_beside_routes_is_refused_by_its_option(local: Table, tmp_path: Path) -> None:
    (tmp_path / "pillarbox.toml").write_text("[sinks.aa]\nurl = 'null:'\n[[routes]]\nto = ['aa']\n")
    done = local.run("relay", "--drain", "--recipient", "bb")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("pillarbox: --recipient 'bb': the [[routes]] decide who gets a row; leave it out")


def test_unknown_state_is_answered_with_the_current_ones(call: Run) -> None:
    done = call("events", "list", "--state", "x", "--store", "sqlite:///nothing.db")
    assert done.code == 2
    assert "expected ready, leased, waiting, blocked, scheduled, delivered or dead; got 'x'" in done.err
    assert not re.search("new|retrying|held", done.err)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_no_help_says_a_where_per_is_meant(name: str) -> None:
    texts = [COMMANDS[name].help, *(getattr(item, "help", None) or "" for item in COMMANDS[name].params)]
    said = [text for text in texts if re.search(r"\b(events|payloads|rows|one) an? \w+", text, re.IGNORECASE)]
    assert said == []


def test_statements_that_mend_a_table_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    drift = Drift("outbox", "column", "a", "text", None, ("ALTER TABLE a\x1b[2J\n  ADD b\u202e",))
    _print_drift("text", drift)
    assert capsys.readouterr().out == "text\n    ALTER TABLE a\\x1b[2J\n      ADD b\\u202e;\n"


def test_value_that_is_none_of_the_choices_is_told_without_the_library_that_refused_it() -> None:
    done = CliRunner().invoke(app, ["relay", "--claim", "foo"])
    assert done.exit_code == 2
    assert "'foo' is not one of 'auto', 'hold', 'lease'" in done.stderr
    assert "Value error" not in done.stderr
