"""`pillarbox bench`: how fast put and relay are on your own database, in a table of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import sqlalchemy as sa
import typer

from pillarbox.cli.options import JsonOption, Load, open_configured_store, takes_settings
from pillarbox.cli.output import print_json, print_table, working
from pillarbox.config import Config
from pillarbox.event import Event
from pillarbox.schema import create_tables
from pillarbox.sinks.null import NullSink
from pillarbox.stores import Mode
from pillarbox.stores.sql import SqlStore

TABLE = "pillarbox_bench"
KEYS = 1000
PAYLOAD = {"order": 4711, "items": [{"sku": "A-1", "count": 2}, {"sku": "B-7", "count": 1}], "total": "9.90"}


class Measure(NamedTuple):
    """How long one step took for how many events."""

    name: str
    events: int
    seconds: float

    @property
    def rate(self) -> int:
        return round(self.events / self.seconds)


@takes_settings
def bench(
    load: Load,
    events: Annotated[
        int, typer.Option("--events", metavar="N", min=1, help="How many events each step moves.")
    ] = 10_000,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Events per transaction.")] = 500,
    as_json: JsonOption = False,
) -> None:
    """Measure put and relay on your database, in a table of its own."""
    config = load({"store.table": TABLE, "relay.batch_size": batch})
    with working("Measuring"):
        measures = asyncio.run(_measure(config, events, batch))
    if as_json:
        print_json({measure.name.replace(" ", "_"): measure.rate for measure in measures})
        return
    rows = [(measure.name, f"{measure.rate:,}", f"{measure.seconds:.2f}") for measure in measures]
    print_table([f"{events} events, {batch} a batch", "events/s", "seconds"], rows, right=["events/s", "seconds"])


async def _measure(config: Config, events: int, batch: int) -> list[Measure]:
    measures: list[Measure] = []
    async with _bench_table(config) as store:
        for mode in sorted(store.modes):
            seconds = _put(config, store, events, batch)
            if not measures:
                measures.append(Measure("put", events, seconds))
            measures.append(Measure(f"drain by {mode}", events, await _drain(config, mode)))
    return measures


_DRIVERS = {"postgresql": "postgresql+psycopg", "sqlite": "sqlite+pysqlite"}


def _put(config: Config, store: SqlStore, events: int, batch: int) -> float:
    """Put as a synchronous application does: a transaction a batch."""
    outbox = config.make_outbox(sa.MetaData())
    made = [Event("bench.made", PAYLOAD, key=f"key-{number % KEYS}") for number in range(events)]
    engine = sa.create_engine(store.url.set(drivername=_DRIVERS.get(store.dialect, "mysql+pymysql")))
    try:
        with engine.connect() as connection:
            started = time.perf_counter()
            for start in range(0, events, batch):
                with connection.begin():
                    outbox.put(connection, *made[start : start + batch])
            return time.perf_counter() - started
    finally:
        engine.dispose()


async def _drain(config: Config, mode: Mode) -> float:
    claiming = replace(config, relay=replace(config.relay, claim=mode))
    relay = claiming.make_relay(claiming.open_store(), NullSink())
    try:
        await relay.open()
        started = time.perf_counter()
        await relay.drain()
        return time.perf_counter() - started
    finally:
        await relay.close()


@asynccontextmanager
async def _bench_table(config: Config) -> AsyncIterator[SqlStore]:
    store = open_configured_store(config)
    files = _list_new_files(store)
    try:
        # Left by a run that was killed; the name is ours.
        if not files:
            await store.run(store.metadata.drop_all)
        await create_tables(store)
        try:
            yield store
        finally:
            await store.run(store.metadata.drop_all)
    finally:
        await store.close()
        for path in files:
            path.unlink(missing_ok=True)


def _list_new_files(store: SqlStore) -> list[Path]:
    path = store.url.database or ""
    if store.dialect != "sqlite" or Path(path).exists():
        return []
    return [Path(path + suffix) for suffix in ("", "-wal", "-shm")]
