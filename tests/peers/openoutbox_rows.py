"""A table of the Open Outbox Relay with rows that an application wrote, and what delivers them: we, or the program."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import sqlalchemy as sa

from pillarbox import Outbox
from pillarbox.config import Config, SinkConfig, StoreConfig
from tests.peers.go_relay import running_go_relay
from tests.servers import server_url

WAIT = 60.0


class Row(NamedTuple):
    id: UUID
    payload: bytes
    key: str | None = None
    headers: Mapping[str, Any] = MappingProxyType({})


class Table:
    """One table, one topic in it."""

    def __init__(self) -> None:
        self.url = server_url("postgres")
        self.name = f"openoutbox_{uuid4().hex[:10]}"
        self._engine = sa.create_engine(sa.make_url(self.url).set(drivername="postgresql+psycopg"))
        self._metadata = sa.MetaData()
        self._rows = Outbox(self._metadata, layout="openoutbox", table=self.name).table
        self._metadata.create_all(self._engine)

    def insert(self, topic: str, rows: Sequence[Row]) -> None:
        values = [
            {"event_id": row.id, "event_type": topic, "partition_key": row.key, "payload": row.payload}
            | {"headers": dict(row.headers), "created_at": sa.func.clock_timestamp()}
            for row in rows
        ]
        with self._engine.begin() as db:
            for value in values:
                db.execute(self._rows.insert().values(value))

    def count(self, *states: str) -> int:
        with self._engine.begin() as db:
            chosen = sa.select(sa.func.count()).where(self._rows.c.status.in_(states))
            return int(db.execute(chosen).scalar_one())

    def wait_until_done(self) -> None:
        deadline = time.monotonic() + WAIT
        while self.count("PENDING", "DELIVERING"):
            assert time.monotonic() < deadline, "the rows were not delivered in time"
            time.sleep(0.02)

    def config(self, url: str) -> Config:
        """Settings without a word about messages: the layout decides."""
        store = StoreConfig(url=self.url, layout="openoutbox", table=self.name)
        return Config(store=store, sink=SinkConfig(url=url))

    def deliver(self, writer: str, broker: str, url: str, folder: Path) -> None:
        """Let one of the two deliver what there is."""
        if writer == "pillarbox":
            asyncio.run(drain(self.config(url)))
            return
        with running_go_relay(folder, store=self.url, table=self.name, publisher=broker, url=url):
            self.wait_until_done()

    def drop(self) -> None:
        self._metadata.drop_all(self._engine)
        self._engine.dispose()


async def drain(config: Config) -> None:
    group = config.make_group()
    async with group:
        await group.drain()
