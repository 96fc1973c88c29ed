"""What `pillarbox sync init` writes runs as it is: as TOML with the command line, and as Python."""

import asyncio
import json
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from pillarbox.errors import ConfigError
from pillarbox.sync.config import AppConfig, SyncConfig, TargetConfig
from pillarbox.sync.queue import SqlQueue
from pillarbox.sync.scaffold import write_scaffold
from pillarbox.sync.service import SyncService
from pillarbox.sync.toml import load_sync_config
from tests.acceptance.commands import Done, run
from tests.acceptance.launcher import Launcher, clean_env
from tests.acceptance.processes import SLACK, until

INSERT = "INSERT INTO events (id, name) VALUES (?, ?)"
MADE = ["outbox.toml", "sync_config.py", "run_sync.py", "logging.json", "data/.gitignore", "remote.db"]

Command = Callable[..., Done]
Python = Callable[..., tuple[subprocess.Popen[bytes], Path]]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder that nothing is in: a service may be started anywhere."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    return folder


@pytest.fixture
def command(launcher: Launcher, elsewhere: Path) -> Command:
    def command(*args: str) -> Done:
        return run(launcher, *args, cwd=elsewhere)

    return command


@pytest.fixture
def python(elsewhere: Path) -> Iterator[Python]:
    """Start a script as a user does, with its errors in a file; what still runs is ended with the test."""
    with ExitStack() as stack:

        def python(*args: str | Path) -> tuple[subprocess.Popen[bytes], Path]:
            err = elsewhere / "err"
            with err.open("wb") as file:
                process = subprocess.Popen([sys.executable, *args], cwd=elsewhere, env=clean_env(), stderr=file)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process, err

        yield python


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_scaffold(tmp_path / "sync")
    return tmp_path / "sync"


def push(folder: Path, *names: str) -> None:
    with SqlQueue(folder / "data") as queue:
        queue.push_many("events", [(INSERT, [number, name]) for number, name in enumerate(names, start=1)])


def remote_rows(folder: Path) -> list[Any]:
    with closing(sqlite3.connect(folder / "remote.db")) as connection:
        return connection.execute("SELECT id, name FROM events ORDER BY id").fetchall()


def waiting(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "data/events.db")) as connection:
        return int(connection.execute("SELECT count(*) FROM outbox_queue").fetchone()[0])


# -- what is written ---------------------------------------------------------------------------------------


def test_everything_that_was_made_is_returned(tmp_path: Path) -> None:
    folder = tmp_path / "a/b"
    assert write_scaffold(folder) == [folder / name for name in MADE]
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == set(MADE)


@pytest.mark.parametrize("name", ["outbox.toml", "sync_config.py", "run_sync.py"])
def test_a_configuration_that_is_there_is_not_overwritten_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError) as caught:
        write_scaffold(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / name}: it is there already and is not overwritten. Choose another folder"
    )
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_a_link_to_nowhere_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "outbox.toml").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is there already"):
        write_scaffold(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_what_the_service_does_not_own_is_kept(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("logging.json", "data/.gitignore", "remote.db"):
        (tmp_path / name).write_text("mine")
    assert write_scaffold(tmp_path) == [tmp_path / name for name in MADE[:3]]
    assert {(tmp_path / name).read_text() for name in ("logging.json", "data/.gitignore", "remote.db")} == {"mine"}


@pytest.mark.parametrize("name", ["sync", "sync/data"])
def test_a_file_where_a_folder_must_be_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match="expected a folder, but it is a file"):
        write_scaffold(tmp_path / "sync")


def test_what_is_commented_out_is_the_default(folder: Path) -> None:
    path = folder / "outbox.toml"
    plain = load_sync_config(path, {})
    app, table, rest = path.read_text().partition("[app.app.db.main]")
    app = re.sub(r"(?m)^# (?!db_file)(\w+ = )", r"\1", app)
    given = set(re.findall(r"(?m)^(\w+) = ", app))
    assert given == {item.name for item in fields(AppConfig)} - {"name", "targets", "db_file"}
    path.write_text(app + table + re.sub(r"(?m)^# (inject_outbox_seq|batches|dialect)( = )", r"\1\2", rest))
    spelled = load_sync_config(path, {})
    target = replace(plain.targets[0], batches="atomic", dialect="sqlite")
    assert spelled.apps == (replace(plain.apps[0], targets=(target,)),)


def test_the_commented_url_of_turso_makes_a_writer(folder: Path) -> None:
    path = folder / "outbox.toml"
    text = path.read_text().replace('\nurl = "sqlite', '\n# url = "sqlite')
    path.write_text(re.sub(r'(?m)^# (url = "libsql|auth_token)', r"\1", text))
    config = load_sync_config(path, {"TURSO_HOST": "shop.turso.io", "TURSO_TOKEN": "hunter22"})
    assert type(config.make_writers()["app.main"]).__name__ == "LibsqlWriter"
    assert config.targets[0].connection["auth_token"] == "hunter22"


# -- that it runs ------------------------------------------------------------------------------------------


def test_the_toml_runs(folder: Path, command: Command) -> None:
    with SqlQueue.from_toml(folder / "outbox.toml") as queue:
        queue.push_many("events", [(INSERT, [1, "first"]), (INSERT, [2, "second"])])
    done = command("sync", "run", "--config", str(folder / "outbox.toml"), "--drain")
    assert (done.code, remote_rows(folder), waiting(folder)) == (0, [(1, "first"), (2, "second")], 0), done.err


def test_the_command_scaffolds_once(tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "made"
    assert command("sync", "init", str(folder)).code == 0
    assert (folder / "outbox.toml").exists()
    again = command("sync", "init", str(folder))
    assert again.code == 1
    assert f"{folder / 'outbox.toml'}: it is there already" in again.err


def test_a_run_without_a_configuration_ends_with_1(command: Command) -> None:
    done = command("sync", "run", "--drain")
    assert (done.code, "'outbox.toml'" in done.err) == (1, True), done.err


def test_the_python_configuration_drains(folder: Path, python: Python) -> None:
    push(folder, "first", "second")
    process, err = python(folder / "run_sync.py", "--drain")
    assert process.wait(SLACK) == 0, err.read_text()
    assert (remote_rows(folder), waiting(folder)) == ([(1, "first"), (2, "second")], 0)
    assert "INFO pillarbox.sync: Target app.main" in err.read_text()


def test_a_drain_that_leaves_something_ends_with_1(folder: Path, python: Python) -> None:
    push(folder, "first")
    with SqlQueue(folder / "data") as queue:
        queue.push("events", INSERT, [1, "a second one of that id"])
    process, err = python(folder / "run_sync.py", "--drain")
    assert process.wait(SLACK) == 1, err.read_text()
    assert (remote_rows(folder), waiting(folder)) == ([(1, "first")], 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_python_configuration_runs_until_a_signal(folder: Path, python: Python, number: signal.Signals) -> None:
    process, err = python(folder / "run_sync.py")
    until(lambda: "Target app.main" in err.read_text(), "the service's start")
    push(folder, *[f"event {n}" for n in range(20)])
    until(lambda: len(remote_rows(folder)) == 20, "the statements")
    process.send_signal(number)
    assert process.wait(SLACK) == 0, err.read_text()
    assert waiting(folder) == 0


def test_a_class_of_the_folder_writes_for_the_toml(folder: Path, command: Command) -> None:
    path = folder / "outbox.toml"
    connection = f"path = {json.dumps(str(folder / 'remote.db'))}"
    text = path.read_text().replace('# writer_class = "sync_config:', 'writer_class = "sync_config:')
    path.write_text(text.replace('url = "sqlite:///remote.db"', connection, 1))
    push(folder, "first")
    done = command("sync", "run", "--config", str(path), "--drain")
    assert (done.code, remote_rows(folder)) == (0, [(1, "first")]), done.err


def test_the_example_writer_undoes_a_failed_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    target = TargetConfig(
        "main",
        ("events",),
        writer_class="sync_config:ExampleWriter",
        connection={"path": str(folder / "remote.db")},
    )
    writer = SyncConfig.single(folder / "data", [target]).make_writers()["main"]
    statements = [(INSERT, [1, "a"]), (INSERT, [1, "b"]), (INSERT, [2, "c"])]
    assert asyncio.run(writer.write_batch(statements)) == [
        {"ok": True, "rows_affected": 1},
        {"ok": False, "error": "UNIQUE constraint failed: events.id"},
    ]
    assert remote_rows(folder) == []


def test_the_configuration_embeds(folder: Path) -> None:
    push(folder, "first")
    service = SyncService(load_sync_config(folder / "outbox.toml", {}))
    assert set(asyncio.run(service.drain()).values()) == {0}
    assert remote_rows(folder) == [(1, "first")]
