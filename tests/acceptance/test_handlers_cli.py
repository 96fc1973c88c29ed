"""`pillarbox handlers` as its users meet it: a registry in the current folder, and an action log or an outbox."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from pillarbox import Event, Handlers, Outbox
from pillarbox.cli.handlers import _make_group
from pillarbox.config import Config, HandlersConfig, RelayConfig, StoreConfig
from pillarbox.hooks import Hook
from tests.acceptance.commands import Done, Run, end, finish, start
from tests.acceptance.commands import run as run_command
from tests.acceptance.launcher import Launcher
from tests.acceptance.processes import until
from tests.servers import server_url

REGISTRY = """
import time
from datetime import timedelta
from pathlib import Path

from pillarbox import Context, Handlers

handlers = Handlers()
empty = Handlers()
other = "no registry"


def note(name: str, context: Context) -> None:
    with open("calls.txt", "a") as file:
        file.write(f"{name} {context.type}\\n")


@handlers.on("Deposited", name="mailer", aliases=["mail-paid"], timeout=timedelta(seconds=30))
def mail(context: Context) -> None:
    note("mailer", context)
    while Path("wait").exists():
        time.sleep(0.01)


@handlers.on("Deposited", "Withdrawn", name="ledger", max_age=timedelta(days=2), concurrency=4)
def enter(context: Context) -> None:
    note("ledger", context)
"""
DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "sqlite": "sqlite+pysqlite"}


class Shop:
    """An outbox of one layout in a folder with a registry."""

    def __init__(self, url: str, folder: Path, run: Run, layout: str) -> None:
        self.folder = folder
        self.layout = layout
        self._run = run
        parsed = sa.make_url(url)
        self.engine = sa.create_engine(parsed.set(drivername=DRIVERS[parsed.get_backend_name()]))
        self.metadata = sa.MetaData()
        self.name = f"h_{uuid4().hex[:10]}"
        self.outbox = Outbox(self.metadata, layout, table=self.name)
        if layout == "actions":
            Outbox(self.metadata, "actions-notifications", table=self.name)
        self.metadata.create_all(self.engine)
        self.options = ["--store", url, "--layout", layout, "--table", self.name, "--handlers", "shop_events:handlers"]
        if layout == "actions":
            self.options += ["--namespace", "shop"]

    def put(self, *types: str, source: str = "shop") -> None:
        fields: dict[str, Any] = {"source": source, "correlation_id": uuid4(), "key": "w-1", "aggregate_type": "Wallet"}
        with self.engine.begin() as db:
            self.outbox.put(db, *(Event(type, {"n": 1}, **fields) for type in types))

    def run(self, *args: str) -> Done:
        return self._run("handlers", *args, *self.options)

    @property
    def calls(self) -> list[str]:
        file = self.folder / "calls.txt"
        return sorted(file.read_text().splitlines()) if file.exists() else []

    def drop(self) -> None:
        self.metadata.drop_all(self.engine)
        self.engine.dispose()


@pytest.fixture
def run(launcher: Launcher, tmp_path: Path) -> Run:
    (tmp_path / "shop_events.py").write_text(REGISTRY)
    return partial(run_command, launcher, cwd=tmp_path)


@contextmanager
def opened(url: str, folder: Path, run: Run, layout: str) -> Iterator[Shop]:
    made = Shop(url, folder, run, layout)
    try:
        yield made
    finally:
        made.drop()


@pytest.fixture
def shop(tmp_path: Path, run: Run) -> Iterator[Shop]:
    """An action log in a SQLite file, for what does not depend on the database."""
    with opened(f"sqlite:///{tmp_path}/shop.db", tmp_path, run, "actions") as made:
        yield made


EACH = [(layout, database) for layout in ("actions", "pillarbox") for database in ("sqlite", "postgres", "mysql")]


@pytest.fixture(params=EACH, ids=lambda each: "-".join(each))
def each(request: pytest.FixtureRequest, tmp_path: Path, run: Run) -> Iterator[Shop]:
    layout, database = request.param
    url = f"sqlite:///{tmp_path}/shop.db" if database == "sqlite" else server_url(database)
    with opened(url, tmp_path, run, layout) as made:
        yield made


# -- run ---------------------------------------------------------------------------------------------------------------


def test_drain_calls_every_handler_once_and_says_what_remains(each: Shop) -> None:
    each.put("Deposited", "Withdrawn")
    done = each.run("run", "--drain", "--json")
    assert (done.code, each.calls) == (0, ["ledger Deposited", "ledger Withdrawn", "mailer Deposited"]), done.err
    assert done.json["delivered"] == 3
    assert done.json["remaining"]["new"] == 0
    assert "Drained: 3 delivered, 0 to retry, 0 dead" in done.err


def test_terminated_run_finishes_what_is_under_way(each: Shop) -> None:
    (each.folder / "wait").touch()
    process = start("handlers", "run", *each.options, cwd=each.folder)
    try:
        each.put("Deposited")
        until(lambda: each.calls == ["ledger Deposited", "mailer Deposited"])
        process.send_signal(signal.SIGTERM)
        (each.folder / "wait").unlink()
        done = finish(process)
    finally:
        end(process)
    assert done.code == 0, done.err
    assert "SIGTERM: finishing what is under way" in done.err
    assert "Stopped: 2 delivered" in done.err
    assert each.run("run", "--drain").code == 0
    assert each.calls == ["ledger Deposited", "mailer Deposited"]


def test_settings_may_stand_in_the_file(shop: Shop) -> None:
    shop.put("Deposited")
    shop.put("Deposited", source="bank")
    (shop.folder / "pillarbox.toml").write_text(
        f"""
        [store]
        url = "sqlite:///shop.db"
        layout = "actions"
        table = "{shop.name}"

        [handlers]
        registry = "shop_events:handlers"
        namespace = "bank"
        """
    )
    assert shop._run("handlers", "run", "--drain").code == 0
    assert shop.calls == ["ledger Deposited", "mailer Deposited"]


# -- list --------------------------------------------------------------------------------------------------------------


def test_list_shows_names_types_and_limits(run: Run) -> None:
    done = run("handlers", "list", "--handlers", "shop_events:handlers")
    assert done.out.splitlines() == [
        "name    types                 former names  at once  timeout  max age",
        "mailer  Deposited             mail-paid          16  30s",
        "ledger  Deposited, Withdrawn                      4           2d",
    ]
    assert run("handlers", "list", "--handlers", "shop_events:handlers", "--json").json[0] == {
        "name": "mailer",
        "types": ["Deposited"],
        "aliases": ["mail-paid"],
        "concurrency": 16,
        "timeout_seconds": 30.0,
        "max_age_seconds": None,
    }


# -- backfill ----------------------------------------------------------------------------------------------------------


def test_backfill_gives_a_new_handler_the_history(shop: Shop) -> None:
    old = (shop.folder / "shop_events.py").read_text()
    (shop.folder / "shop_events.py").write_text(old.split("@handlers.on(", 2)[0] + _only_mailer(old))
    shop.put("Deposited", "Deposited")
    assert shop.run("run", "--drain").code == 0
    (shop.folder / "shop_events.py").write_text(old)
    assert shop.run("backfill", "ledger", "--since", "7d", "--dry-run").out == (
        "Would notify handler 'ledger' of 2 events.\n"
    )
    today = datetime.now(UTC).date().isoformat()
    assert shop.run("backfill", "ledger", "--since", today).out == "Notified handler 'ledger' of 2 events.\n"
    again = shop.run("backfill", "ledger", "--since", "7d", "--json").json
    assert again == {"handler": "ledger", "events": 0, "dry_run": False}
    assert shop.run("run", "--drain").code == 0
    assert shop.calls == [*["ledger Deposited"] * 2, *["mailer Deposited"] * 2]


def test_backfill_beyond_the_retention_needs_to_be_asked_for(shop: Shop) -> None:
    (shop.folder / "pillarbox.toml").write_text('[relay]\nretention = "1d"\n')
    shop.put("Deposited", "Deposited")
    assert shop.run("run", "--drain").code == 0
    with shop.engine.begin() as db:
        db.execute(sa.text(f"DELETE FROM {shop.name}_notifications"))
    refused = shop.run("backfill", "mailer", "--since", "7d")
    assert (refused.code, refused.out) == (1, "")
    assert "longer ago than the retention of 1d" in refused.err
    assert "--again" in refused.err
    assert shop.run("backfill", "mailer", "--since", "7d", "--again").out == "Notified handler 'mailer' of 2 events.\n"


def _only_mailer(text: str) -> str:
    return "@handlers.on(" + text.split("@handlers.on(")[1]


# -- tables ------------------------------------------------------------------------------------------------------------


def test_missing_notifications_are_made_by_the_command_that_the_error_names(run: Run, tmp_path: Path) -> None:
    store = ["--store", f"sqlite:///{tmp_path}/new.db"]
    options = [*store, "--handlers", "shop_events:handlers", "--namespace", "shop", "--layout", "actions"]
    assert run("schema", "create", *store, "--layout", "actions").code == 0
    done = run("handlers", "run", "--drain", *options)
    command = "schema create --layout actions-notifications"
    assert (done.code, f"Run `pillarbox {command}` or your migration first." in done.err) == (1, True), done.err
    assert run(*command.split(), *store).code == 0
    assert run("handlers", "run", "--drain", *options).code == 0
    engine = sa.create_engine(f"sqlite:///{tmp_path}/new.db")
    assert "action_events_actions" in sa.inspect(engine).get_table_names()
    engine.dispose()


# -- settings ----------------------------------------------------------------------------------------------------------


def test_handlers_have_as_many_batches_in_flight_as_the_settings_say_and_the_fan_out_one() -> None:
    config = Config(
        store=StoreConfig(url="sqlite:///never-opened.db", layout="actions"),
        relay=RelayConfig(in_flight=7),
        handlers=HandlersConfig(namespace="shop"),
    )
    handlers = Handlers()
    handlers.on("Deposited", name="mailer")(lambda: None)
    group = _make_group(config, handlers, Hook())
    assert {name: relay._in_flight for name, relay in group.relays.items()} == {"fan-out": 1, "mailer": 7}


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["backfill", "nobody", "--since", "7d"], 1, "there is no handler 'nobody'; registered are mailer, ledger"),
        (["backfill", "ledger", "--since", "soon"], 2, "expected a time such as 2026-01-31T12:00"),
        (["backfill", "ledger", "--since", "1d", "--until", "2d"], 1, "expected until to be after since"),
        (["backfill", "ledger"], 2, "Missing option '--since'"),
        (["run", "--handlers", "shop_events"], 2, "expected a module and a name in it, such as shop.events:handlers"),
        (["run", "--handlers", "nowhere:handlers"], 1, "there is no module 'nowhere' in the current folder"),
        (["run", "--handlers", "shop_events:missing"], 1, "module 'shop_events' has no 'missing'"),
        (["run", "--handlers", "shop_events:other"], 1, "expected a Handlers object, got str"),
        (["run", "--handlers", "shop_events:empty"], 1, "no handler is registered"),
        (["run", "--handlers", "broken:handlers"], 1, "its module cannot be imported: ZeroDivisionError"),
        (["run", "--layout", "openoutbox"], 1, "expected a store of layout pillarbox, actions or ekbatan"),
        (["backfill", "ledger", "--since", "7d", "--layout", "pillarbox"], 1, "expected layout actions or ekbatan"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_mistakes_are_told_in_one_line(shop: Shop, args: list[str], code: int, message: str) -> None:
    (shop.folder / "broken.py").write_text("1 / 0\n")
    # The last of two values counts.
    done = shop._run("handlers", args[0], *shop.options, *args[1:])
    assert (done.code, message in " ".join(done.err.split())) == (code, True), done.err
    assert "Traceback" not in done.err


def test_run_without_handlers_or_namespace_says_what_to_give(shop: Shop) -> None:
    done = shop._run("handlers", "run")
    assert (done.code, "No handlers given: use --handlers MODULE:NAME" in done.err) == (2, True)
    done = shop._run("handlers", "run", *shop.options[:-2])
    assert (done.code, "No namespace given: use --namespace NAME" in done.err) == (2, True)
