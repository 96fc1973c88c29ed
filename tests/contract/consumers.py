"""Consumers under contract: a place at a real broker, an inbox in a database, and a ledger that handlers write to.

Messages are sent as a stranger sends them, who knows our headers; what became of them is read with plain SQL.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from pillarbox import Constant, Handlers, Outbox
from pillarbox.group import RelayGroup
from pillarbox.inbox.consuming import consumer_relays
from pillarbox.stores import Filter, Record
from pillarbox.stores.sql import SqlStore
from pillarbox.stores.url import open_store
from tests.contract.inboxes import InboxDatabase
from tests.contract.sources import GROUP, SourceKit, until_told

BROKERS = ("kafka", "nats", "rabbitmq", "redis")
OTHER_DATABASES = ("mariadb", "mysql", "sqlite")
QUICKEST = "redis"
"""The broker on which the databases are compared."""
MODES = ("at-once", "stored-first")
SOON = Constant(timedelta(milliseconds=50), max_attempts=20)
LATER = Constant(timedelta(hours=1), max_attempts=20)


class ConsumerDatabase(InboxDatabase):
    """The inbox, a ledger with a row for each effect in the order of their commits, and an outbox of the service."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        self.ledger = declare_ledger(self.metadata, f"ledger_{uuid4().hex[:10]}")
        self.outbox = Outbox(self.metadata, table=f"out_{uuid4().hex[:10]}")
        self.metadata.create_all(self.engine)

    def effects(self) -> list[str]:
        """The names of all effects, in order."""
        with self.engine.connect() as db:
            return list(db.execute(sa.select(self.ledger.c.name).order_by(self.ledger.c.place)).scalars())

    def put(self) -> list[str]:
        """The types of the events in the service's outbox."""
        with self.engine.connect() as db:
            return list(db.execute(sa.select(self.outbox.table.c.type).order_by(self.outbox.table.c.seq)).scalars())

    def waiting(self) -> int:
        """How many messages are stored and not handled yet."""
        left = int(self.run("SELECT count(*) AS n FROM {queue}")[0]["n"])
        if not self.is_own:
            left += int(self.run("SELECT count(*) AS n FROM {inbox} WHERE status = 'pending'")[0]["n"])
        return left

    def lapse(self) -> None:
        """Let the leases in the queue end now."""
        if self.is_own:
            self.run(f"UPDATE {{queue}} SET until_at = {self.ago(1)} WHERE state = 1")
        else:
            self.run(f"UPDATE {{inbox}} SET locked_at = {self.ago(86_400)} WHERE locked_at IS NOT NULL")


def declare_ledger(metadata: sa.MetaData, name: str) -> sa.Table:
    return sa.Table(
        name,
        metadata,
        sa.Column("place", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("name", sa.String(100), nullable=False),
    )


@contextmanager
def make_databases(folders: pytest.TempPathFactory) -> Iterator[Callable[[str], ConsumerDatabase]]:
    """The databases that a test module asks for, each with tables of its own."""
    made: dict[str, ConsumerDatabase] = {}

    def get(name: str) -> ConsumerDatabase:
        if name not in made:
            made[name] = ConsumerDatabase(name, folders.mktemp("consumers"))
        made[name].empty()
        return made[name]

    yield get
    for database in made.values():
        database.drop()


class Service:
    """A service that consumes: its consumers, and what a test wants to know of them."""

    def __init__(self, kit: SourceKit, database: ConsumerDatabase, *, is_stored: bool) -> None:
        self.kit = kit
        self.database = database
        self.is_stored = is_stored
        self.handlers = Handlers()
        self.calls: list[str] = []

    def write(self, session: Any, order: dict[str, Any]) -> None:
        """The effect of a message: a row of the ledger."""
        session.execute(sa.insert(self.database.ledger).values(name=order["name"]))

    # -- consumers ---------------------------------------------------------------------------------------------------

    def make_consumer(self, **options: Any) -> RelayGroup:
        source = options.pop("source", self.kit.url)
        place = self.kit.options if source is self.kit.url else {}
        given: dict[str, Any] = {"group": GROUP, "stored": self.is_stored, "retry": SOON, **place, **options}
        handlers = given.pop("handlers", self.handlers)
        database = self.database
        return consumer_relays(source, handlers, inbox=database.inbox, url=database.url, **given)

    @asynccontextmanager
    async def consuming(self, **options: Any) -> AsyncIterator[RelayGroup]:
        """A consumer that runs until the end of the block, and is then stopped in order."""
        consumer = self.make_consumer(**options)
        running = asyncio.create_task(consumer.run())
        try:
            yield consumer
        finally:
            consumer.stop()
            async with asyncio.timeout(30):
                await running
                await consumer.close()

    # -- messages ----------------------------------------------------------------------------------------------------

    async def send(self, *names: str, id: str | None = None, key: str | None = None, type: str = "order") -> None:
        """Send messages in order; each has its name for an id unless one is given."""
        for name in names:
            body = json.dumps({"name": name}).encode()
            await self.send_raw(body, id=id or name, key=key, **{"event-type": type})

    async def send_raw(self, body: bytes, *, id: str, key: str | None = None, **headers: str) -> None:
        lines: dict[str, str | bytes] = {"event-id": id, "content-type": "application/json", **headers}
        await asyncio.to_thread(self.kit.send, body, key=key, headers=lines)

    # -- what became of them -----------------------------------------------------------------------------------------

    async def done(self, *names: str, within: float = 40.0) -> None:
        """Wait until the broker was told of every message and none is stored; then these are the effects."""
        await until_told(lambda: sorted(self.database.effects()), sorted(names), within=within)
        await until_told(self.kit.remaining, 0, within=within)
        await until_told(self.database.waiting, 0, within=within)
        assert sorted(self.database.effects()) == sorted(names)

    @asynccontextmanager
    async def operator(self, *, died_of_handler: str | None = None) -> AsyncIterator[SqlStore]:
        """The queue with its dead letters, as an operator's command opens it.

        What a handler gave up is dead under its name where messages are stored first.
        """
        sink = died_of_handler if died_of_handler is not None and self.is_stored else ""
        store = open_store(self.database.url, table=f"{self.database.table}_queue", sink=sink)
        yield store
        await store.close()

    async def wait_for_dead(self, count: int = 1, **options: Any) -> list[Record]:
        """Wait until so many messages are dead."""
        table = f"{self.database.table}_queue_dead"
        await until_told(lambda: self.database.run(f"SELECT count(*) AS n FROM {table}")[0]["n"], count)
        async with self.operator(**options) as store:
            return list(await store.events(Filter(), state="dead"))

    async def redrive(self, **options: Any) -> None:
        async with self.operator(**options) as store:
            assert await store.redrive(Filter(), actor="test") == 1


# -- on which brokers and databases a test runs ----------------------------------------------------------------------


def consumers_on(
    *pairs: tuple[str, str], needs: frozenset[str] = frozenset(), modes: tuple[str, ...] = MODES
) -> pytest.MarkDecorator:
    """Run a test on these brokers and databases, in both modes."""
    chosen = [
        pytest.param((broker, needs), database, mode, id=f"{broker}-{database}-{mode}")
        for broker, database in pairs
        for mode in modes
    ]
    return pytest.mark.parametrize(("kit", "database", "mode"), chosen, indirect=["kit", "database"])


_brokers = [(broker, "postgres") for broker in BROKERS]
_databases = [(QUICKEST, database) for database in OTHER_DATABASES]

every_broker = consumers_on(*_brokers)
every_database = consumers_on((QUICKEST, "postgres"), *_databases)
every_way = consumers_on(*_brokers, *_databases)
servers = consumers_on(*((QUICKEST, database) for database in ("postgres", "mariadb", "mysql")))
on_one = consumers_on((QUICKEST, "postgres"))
