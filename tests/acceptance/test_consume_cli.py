"""`pillarbox consume` as its users meet it: a process between a real broker and an inbox, ended by signals."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from pillarbox import ConfigError, Inbox
from pillarbox.sources import Letter
from pillarbox.sources.url import open_source
from tests.acceptance.commands import Done, Run, end, finish, start
from tests.acceptance.commands import run as run_command
from tests.acceptance.docs_pages import read_sections
from tests.acceptance.launcher import Launcher
from tests.acceptance.processes import until
from tests.contract.kit_kafka import make_topic
from tests.contract.kit_redis import Wire
from tests.contract.source_kit_kafka import produce
from tests.servers import ROOT, server_url

# The ledger is a table in the database of the inbox: what is there was committed with its message.
REGISTRY = """
import time
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

from pillarbox import Context, Handlers, Reject

handlers = Handlers()
ledger = sa.table("{ledger}", sa.column("name"))


@handlers.on("order.placed")
def enter(order: dict, context: Context, session: Session) -> None:
    if order["number"] == 13:
        raise Reject("thirteen is nobody's number")
    Path("called").touch()
    while Path("wait").exists():
        time.sleep(0.01)
    session.execute(sa.insert(ledger).values(name=f"{{context.message_id}} {{order['number']}}"))
"""
DRIVERS = {"postgresql": "postgresql+psycopg", "sqlite": "sqlite+pysqlite"}


class Shop:
    """An inbox and a ledger, a place at a broker, and a folder with a registry of handlers."""

    def __init__(self, broker: str, database: str, folder: Path, run: Run) -> None:
        self.broker = broker
        self.folder = folder
        self._run = run
        self.place = f"consume-{uuid4().hex[:10]}"
        self.source_url = server_url("kafka" if broker == "kafka" else "redis")
        self.store_url = f"sqlite:///{folder}/stock.db" if database == "sqlite" else server_url("postgres")
        parsed = sa.make_url(self.store_url)
        self.engine = sa.create_engine(parsed.set(drivername=DRIVERS[parsed.get_backend_name()]))
        self.metadata = sa.MetaData()
        self.table = f"in_{uuid4().hex[:10]}"
        Inbox(self.metadata, table=self.table)
        self.ledger = sa.Table(f"{self.table}_ledger", self.metadata, sa.Column("name", sa.String(100)))
        self.metadata.create_all(self.engine)
        (folder / "stock.py").write_text(REGISTRY.format(ledger=self.ledger.name))
        if broker == "kafka":
            make_topic(self.source_url, self.place, partitions=2)
        self._processes: list[subprocess.Popen[str]] = []

    @property
    def source(self) -> str:
        place = f"topics={self.place}" if self.broker == "kafka" else f"streams={self.place}"
        return f"{self.source_url}?{place}"

    @property
    def options(self) -> list[str]:
        where = ["--store", self.store_url, "--table", self.table, "--source", self.source]
        return [*where, "--group", "stock", "--handlers", "stock:handlers"]

    def send(self, *numbers: int, kind: str = "order.placed", body: bytes | None = None) -> None:
        """Send orders as a stranger does who knows our headers; the id of each is its number."""
        for number in numbers:
            headers = {"event-id": f"order-{number}", "event-type": kind, "content-type": "application/json"}
            payload = b'{"number": %d}' % number if body is None else body
            if self.broker == "kafka":
                produce(self.source_url, self.place, payload, headers=dict(headers))
            else:
                words = [word for each in {**headers, "payload": payload.decode()}.items() for word in each]
                with Wire(self.source_url) as wire:
                    wire.call("XADD", self.place, "*", *words)

    def start(self, *args: str, options: Sequence[str] | None = None, **more: Any) -> subprocess.Popen[str]:
        process = start("consume", *args, *(self.options if options is None else options), cwd=self.folder, **more)
        self._processes.append(process)
        return process

    def consume(self, count: int, *args: str, options: Sequence[str] | None = None) -> Done:
        """Consume until the ledger has so many entries, then end by SIGTERM."""
        process = self.start(*args, options=options)
        until(lambda: len(self.effects) >= count or process.poll() is not None)
        process.send_signal(signal.SIGTERM)
        return finish(process)

    def run(self, *args: str, **options: Any) -> Done:
        return self._run(*args, "--store", self.store_url, "--table", self.table, "--layout", "inbox", **options)

    @property
    def effects(self) -> list[str]:
        with self.engine.connect() as db:
            return sorted(db.execute(sa.select(self.ledger.c.name)).scalars())

    @property
    def dead(self) -> int:
        with self.engine.connect() as db:
            buried = self.metadata.tables[f"{self.table}_queue_dead"]
            return db.execute(sa.select(sa.func.count()).select_from(buried)).scalar_one()

    def drop(self) -> None:
        for process in self._processes:
            end(process)
        self.metadata.drop_all(self.engine)
        self.engine.dispose()


@pytest.fixture
def run(launcher: Launcher, tmp_path: Path) -> Run:
    return partial(run_command, launcher, cwd=tmp_path)


@pytest.fixture
def shop(tmp_path: Path, run: Run) -> Iterator[Shop]:
    """Redis and SQLite, for what depends on neither."""
    made = Shop("redis", "sqlite", tmp_path, run)
    yield made
    made.drop()


EACH = [(broker, database) for broker in ("redis", "kafka") for database in ("sqlite", "postgres")]


@pytest.fixture(params=EACH, ids=lambda each: "-".join(each))
def each(request: pytest.FixtureRequest, tmp_path: Path, run: Run) -> Iterator[Shop]:
    broker, database = request.param
    made = Shop(broker, database, tmp_path, run)
    yield made
    made.drop()


# -- consuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["--at-once", "--stored"])
def test_message_that_comes_again_is_handled_once_also_by_the_next_process(each: Shop, mode: str) -> None:
    each.send(1, 2, 1)
    first = each.consume(2, mode)
    assert (first.code, each.effects) == (0, ["order-1 1", "order-2 2"]), first.err
    assert "Stopped: " in first.err
    each.send(2, 3)
    second = each.consume(3, mode)
    assert (second.code, each.effects) == (0, ["order-1 1", "order-2 2", "order-3 3"]), second.err


def test_terminated_consumer_finishes_what_is_under_way(each: Shop) -> None:
    (each.folder / "wait").touch()
    process = each.start("--json")
    each.send(1)
    until((each.folder / "called").exists)
    process.send_signal(signal.SIGTERM)
    (each.folder / "wait").unlink()
    done = finish(process)
    assert (done.code, each.effects) == (0, ["order-1 1"]), done.err
    assert "SIGTERM: finishing what is under way" in done.err
    assert "Stopped: 1 delivered, 0 to retry, 0 dead." in done.err
    assert done.json["delivered"] == 1


def test_killed_consumer_leaves_no_half_of_a_message(each: Shop) -> None:
    (each.folder / "wait").touch()
    process = each.start(options=[*each.options, *_short_lease(each)])
    each.send(1)
    until((each.folder / "called").exists)
    end(process)
    assert each.effects == []
    (each.folder / "wait").unlink()
    done = each.consume(1, options=[*each.options, *_short_lease(each)])
    assert (done.code, each.effects) == (0, ["order-1 1"]), done.err


def _short_lease(shop: Shop) -> list[str]:
    lasts = "session=6s" if shop.broker == "kafka" else "lease=1s"
    return ["--source", f"{shop.source}&{lasts}"]


@pytest.mark.parametrize("mode", ["--at-once", "--stored"])
def test_dead_message_is_listed_and_handled_when_it_is_redriven(shop: Shop, mode: str) -> None:
    shop.send(13, 4)
    process = shop.start(mode)
    until(lambda: (shop.effects and shop.dead) or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert (done.code, shop.effects) == (0, ["order-4 4"]), done.err
    (dead,) = shop.run("events", "list", "--state", "dead", "--json").json
    assert dead["error"] == "thirteen is nobody's number"
    shop.run("events", "redrive", "--all")
    registry = shop.folder / "stock.py"
    registry.write_text(registry.read_text().replace("== 13", "== 14"))
    done = shop.consume(2, mode)
    assert (done.code, shop.effects) == (0, ["order-13 13", "order-4 4"]), done.err


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_may_stand_in_the_file(shop: Shop) -> None:
    (shop.folder / "pillarbox.toml").write_text(
        f"""
        [store]
        url = "sqlite:///stock.db"
        table = "{shop.table}"

        [source]
        url = "{shop.source_url}"
        streams = ["{shop.place}"]
        group = "stock"
        stored = true
        unmatched = "skip"

        [handlers]
        registry = "stock:handlers"
        """
    )
    shop.send(9, kind="order.lost")
    shop.send(1)
    done = shop.consume(1, "--json", options=[])
    assert (done.code, shop.effects) == (0, ["order-1 1"]), done.err
    assert "group stock, stored first" in done.err
    # One that is handled at once counts as delivered.
    assert done.json["dropped"] == 1
    assert shop.run("events", "list", "--json").json == []


def test_inbox_that_forgets_too_early_is_warned_of_at_the_start(shop: Shop) -> None:
    (shop.folder / "pillarbox.toml").write_text(
        '[source]\nremember = "1h"\n[retry]\nkind = "exponential"\nmax_age = "3d"\nmax_attempts = 900'
    )
    shop.send(1)
    done = shop.consume(1)
    assert done.code == 0
    assert f"Inbox {shop.table}: The inbox remembers messages for 1h, but the outbox may deliver them again" in done.err


def test_passwords_are_not_in_the_log(shop: Shop) -> None:
    secret = "pillarbox"
    assert f":{secret}@" in shop.source_url
    shop.send(1)
    done = shop.consume(1, "-vv")
    assert done.code == 0
    assert "redis://pillarbox:***@" in done.err
    assert f":{secret}@" not in done.err + done.out


# -- what is refused ---------------------------------------------------------------------------------------------------

STORE = ("--store", "sqlite:///stock.db")
GROUP = ("--group", "stock")
HANDLERS = ("--handlers", "stock:handlers")
REDIS = ("--source", "redis://127.0.0.1:1?streams=x")


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([*STORE, *GROUP, *HANDLERS], 2, "No source given: use --source URL, PILLARBOX_SOURCE, or url under [source]."),
        ([*STORE, *REDIS, *HANDLERS], 2, "No consumer group given: use --group NAME"),
        ([*STORE, *REDIS, *GROUP], 2, "No handlers given: use --handlers MODULE:NAME"),
        ([*REDIS, *GROUP, *HANDLERS], 2, "No store given: use --store URL"),
        ([*STORE, *REDIS, *GROUP, "--handlers", "stock:nothing"], 1, "module 'stock' has no 'nothing'"),
        (
            [*STORE, *GROUP, *HANDLERS, "--source", "redsi://127.0.0.1:1?streams=x"],
            1,
            "expected a url with scheme kafka, redis, rediss, nats, tls, amqp or amqps; got "
            "'redsi://127.0.0.1:1?streams=x'. Did you mean 'redis'?",
        ),
        (
            [*STORE, *GROUP, *HANDLERS, "--source", "redis://127.0.0.1:1?strems=x"],
            1,
            "unknown option 'strems'; scheme 'redis' takes the options streams, prefetch, start, create, consumer, "
            "lease, delete, timeout. Did you mean 'streams'?",
        ),
        ([*STORE, *GROUP, *HANDLERS, "--source", "redis://127.0.0.1:1"], 1, "expected the option streams"),
        ([*STORE, *GROUP, *HANDLERS, *REDIS, "--layout", "faststream"], 1, "Inbox layout: expected pillarbox, omnibox"),
        ([*STORE, *GROUP, *HANDLERS, *REDIS, "--frist"], 2, "No such option"),
    ],
    ids=["source", "group", "handlers", "store", "registry", "scheme", "option", "place", "layout", "usage"],
)
def test_bad_option_is_one_clear_line(shop: Shop, run: Run, args: list[str], code: int, message: str) -> None:
    done = run("consume", *args)
    assert message in done.err
    assert done.code == code
    assert "Traceback" not in done.err
    if code == 1:
        assert len(done.err.strip().splitlines()) == 1


def test_missing_tables_are_named(shop: Shop) -> None:
    shop.metadata.drop_all(shop.engine)
    done = finish(shop.start())
    assert done.code == 1
    assert shop.table in done.err
    assert "Traceback" not in done.err


# -- the page ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "heading"),
    [
        ("kafka://broker", "Kafka"),
        ("nats://nats", "NATS JetStream"),
        ("amqp://rabbit", "RabbitMQ"),
        ("rediss://redis", "Redis Streams"),
    ],
)
def test_every_option_of_a_source_is_on_its_page_and_no_other(url: str, heading: str) -> None:
    with pytest.raises(ConfigError, match="takes the options") as refused:
        open_source(url, group="stock", dead=Nobody(), nonsense=1)
    [listed] = re.findall(r"takes the options ([a-z_, ]+)", str(refused.value))
    table = read_sections(ROOT / "docs" / "consume-from-a-broker.md")[heading]
    rows = re.findall(r"^\| (`[a-z_…`, ]+) \|", table, flags=re.MULTILINE)
    described = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert described == set(listed.split(", "))


class Nobody:
    async def bury(self, letters: Sequence[Letter]) -> None:
        raise AssertionError("nothing is dead here")

    async def close(self) -> None: ...
