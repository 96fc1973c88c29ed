"""No command shows a part of a password: every command that takes a url, with urls that are hard to read.

Nobody listens on port 1: what can be read is refused there. The secret's letters stand in no message of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import typer

from pillarbox import Event, Outbox
from pillarbox.cli.commands import app
from pillarbox.sync.queue import SqlQueue
from tests.acceptance import commands
from tests.acceptance.commands import Done
from tests.acceptance.launcher import Launcher

SECRET = "QXZJVKWQ"
EVENT = "018f3f5e-0000-7000-8000-000000000000"
APPLICATION = """
from pillarbox.handlers import Handlers
handlers = Handlers()
@handlers.on("made", name="count")
def count(event): pass
"""

# What each command needs besides a store.
COMMANDS = {
    "relay": "--drain --sink null:",
    "consume": "--source redis://127.0.0.1:1?streams=orders --group shop --handlers shop:handlers",
    "status": "--check",
    "prune": "--dead-age 1d",
    "audit": "",
    "bench": "--events 1",
    "events list": "",
    "events show": EVENT,
    "events redrive": "--all",
    "events drop": "--all --yes",
    "events replay": "--all",
    "events check": "",
    "handlers list": "--handlers shop:handlers",
    "handlers run": "--drain --handlers shop:handlers",
    "handlers backfill": "count --since 1d --handlers shop:handlers --layout actions --namespace shop",
    "schema sql": "",
    "schema create": "",
    "schema check": "",
    "schema diff": "",
    "partitions ensure": "--layout omnibox-partitioned",
    "partitions drop": "--layout omnibox-partitioned --keep 2",
    "partitions sql": "--layout omnibox-partitioned --keep 2",
}
READ_NO_STORE = {"handlers list", "partitions sql"}
CONNECT_TO_NONE = {*READ_NO_STORE, "schema sql"}

UNREADABLE_STORES = [
    "postgresql://ann:a@{}@127.0.0.1:1/shop",
    "postgresql://ann:a@b:{}@127.0.0.1:1/shop",
    "postgresql://ann:{}@127.0.0.1:bad/shop",
    "postgresql://ann:{}@[::1/shop",
    "postgresql://ann:{}@127.0.0.1:1,127.0.0.1:2/shop",
    "postgresql://ann:{}@/shop?host=127.0.0.1:1&host=127.0.0.1:2",
]
STORES = [
    "postgresql://ann:p%40{}@127.0.0.1:1/shop",
    "postgresql://ann@127.0.0.1:1/shop?password={}",
    "postgresql://127.0.0.1:1/shop?sslpassword={}&token={}",
]

SINKS = ["kafka", "nats", "amqp", "redis", "mqtt", "https", "postgresql", "libsql"]
SOURCES = {"kafka": "topics=a", "nats": "stream=a", "amqp": "queue=a", "redis": "streams=a"}
PLACES = [
    "{}://ann:{}@127.0.0.1:bad",
    "{}://ann:{}@[::1",
    "{}://ann:a@b:{}@127.0.0.1:bad",
    "{}://ann:{}@127.0.0.1:bad,127.0.0.1:1",
    "{}://127.0.0.1:1/?password={}&token={}",
    "{}://ann:p%40{}@127.0.0.1:1",
    "{}://ann:a@{}@127.0.0.1:1",
]
REMOTES = ["postgresql", "mysql", "libsql", "https"]
SYNC = """
[app.shop]
db_dir = "."
table_max_wait = 0
[app.shop.db.main]
tables = ["orders"]
connection = {{ url = "{}" }}
"""
MISPLACED = [
    "status {}",
    "{}",
    "events {}",
    "events show {}",
    "events list --since {}",
    "events list --state={}",
    "status --config {}",
    "relay --batch-size {}",
    "handlers list --handlers {}",
    "sync status --db-dir {}",
    "sync run --config={}",
]

Run = Callable[..., Done]


@pytest.fixture
def run(launcher: Launcher, tmp_path: Path) -> Run:
    (tmp_path / "shop.py").write_text(APPLICATION)
    return lambda *args, **options: commands.run(launcher, *args, cwd=tmp_path, **options)


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A store in which an event waits."""
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    outbox = Outbox(sa.MetaData())
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    outbox.table.metadata.create_all(engine)
    with engine.begin() as db:
        outbox.put(db, Event("made", {}))
    return url


def check(done: Done, *, codes: tuple[int, ...] = (1, 2)) -> None:
    said = done.out + done.err
    assert done.code in codes, said
    shown = [part for part in (SECRET[at : at + 4] for at in range(len(SECRET) - 3)) if part.lower() in said.lower()]
    assert (shown, "this is a defect" in said, "Traceback" in said) == ([], False, False), said


def fill(form: str, *first: str) -> str:
    return form.format(*first, *[SECRET] * form.count("{}"))


def walk(command: Any, *path: str) -> Iterator[tuple[str, Any]]:
    for name, each in getattr(command, "commands", {}).items():
        yield from walk(each, *path, name)
    if not hasattr(command, "commands"):
        yield " ".join(path), command


def test_every_command_with_a_store_is_tried() -> None:
    found = dict(walk(typer.main.get_command(app)))
    assert {name for name, each in found.items() if any("--store" in p.opts for p in each.params)} == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_shows_a_secret_of_its_stores_url(run: Run, command: str) -> None:
    args = [*command.split(), *COMMANDS[command].split(), "--store"]
    for form in UNREADABLE_STORES:
        done = run(*args, fill(form))
        check(done, codes=(0,) if command in READ_NO_STORE else (1,))
        if ("," in form or "&host=" in form) and command not in READ_NO_STORE:
            assert "expected one server, got several" in done.err
            assert "Give one address that leads to the primary: a DNS name, a proxy or a pooler" in done.err
    # A consumer waits until its database is back.
    for form in STORES if command != "consume" else ():
        check(run(*args, fill(form)), codes=(0,) if command in CONNECT_TO_NONE else (1,))


@pytest.mark.parametrize("scheme", SINKS)
def test_no_relay_shows_a_secret_of_its_sinks_url(run: Run, store: str, scheme: str) -> None:
    for form in PLACES:
        check(run("relay", "--drain", "--store", store, "--sink", fill(form, scheme)), codes=(1,))


@pytest.mark.parametrize("scheme", SOURCES)
def test_no_consumer_shows_a_secret_of_its_sources_url(run: Run, store: str, scheme: str) -> None:
    for form in PLACES:
        url = fill(form, scheme)
        # Of a broker that is down a consumer waits: what it says then is about the inbox, which is not there.
        url += ("&" if "?" in url else "?") + SOURCES[scheme]
        args = ("--group", "shop", "--handlers", "shop:handlers", "--layout", "inbox", "--table", "nowhere")
        check(run("consume", "--store", store, "--source", url, *args), codes=(1,))


@pytest.mark.parametrize("scheme", REMOTES)
def test_no_sync_command_shows_a_secret_of_its_targets_url(run: Run, tmp_path: Path, scheme: str) -> None:
    for form in PLACES:
        (tmp_path / "outbox.toml").write_text(SYNC.format(fill(form, scheme)))
        SqlQueue(tmp_path).push("orders", "INSERT INTO orders (id) VALUES (?)", [1])
        check(run("sync", "run", "--drain"), codes=(1,))
        for command in ("status", "verify", "schema", "dead list"):
            check(run("sync", *command.split()), codes=(0, 1))


@pytest.mark.parametrize("form", MISPLACED)
@pytest.mark.parametrize("url", ["postgresql://ann:a@{}@127.0.0.1:1/shop", "https://127.0.0.1:1/services/T000/{}"])
def test_no_command_repeats_a_secret_that_stands_where_none_belongs(run: Run, form: str, url: str) -> None:
    check(run(*form.format(fill(url)).split()))


def test_an_interpreter_of_its_own_shows_no_secret_either(tmp_path: Path) -> None:
    for args in (["status", "--store", fill(UNREADABLE_STORES[0])], ["status", fill(STORES[0])]):
        check(commands.finish(commands.start(*args, cwd=tmp_path)))
