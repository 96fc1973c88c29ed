"""Claims at odd moments: copied by a sink, cancelled when they are done, renewed while their delivery ends."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from pillarbox import Claim, Event, Outbox, Outcome, Relay, SinkWrapper, StoreUnavailable, silence
from pillarbox.event import DELIVERED
from pillarbox.sinks.memory import MemorySink
from pillarbox.stores import Batch, Settlement, Store, server
from pillarbox.stores.server import AsyncSqlStore
from pillarbox.stores.sql import LOOK_AGAIN
from pillarbox.stores.sqlite import SqliteStore
from tests.contract.stores import HOUR, Kit, SqlKit, claim, event, names, until

SECOND = timedelta(seconds=1)


class NotingSink(MemorySink):
    """Writes a row with each event, in the transaction that settles it."""

    def __init__(self, table: sa.Table) -> None:
        super().__init__(is_quick=False)
        self._table = table

    async def deliver_in(self, batch: Any, claims: Sequence[Claim]) -> Sequence[Outcome]:
        for each in claims:
            note = sa.insert(self._table).values(name=each.event.type)
            await batch.settle_one(each, lambda db, note=note: db.execute(note))
        return [DELIVERED] * len(claims)


class CopyingSink(SinkWrapper):
    """Passes on a copy of each claim, which is gone when the next one is made."""

    async def pass_on(self, claims: Sequence[Claim], deliver: Any) -> Sequence[Outcome]:
        return [outcome for each in claims for outcome in await deliver([replace(each)])]


@pytest.mark.needs("sql")
async def test_copies_of_claims_are_each_settled_with_their_effect(kit: SqlKit, store: Store) -> None:
    notes = sa.Table(f"{kit.database.table}_notes", sa.MetaData(), sa.Column("name", sa.String(20)))
    notes.create(kit.database.engine)
    try:
        wanted = [f"e{number}" for number in range(30)]
        kit.put(*(event(name) for name in wanted))
        relay = Relay(store, CopyingSink(NotingSink(notes)))
        await relay.drain()
        assert relay.total == Settlement(delivered=30)
        with kit.database.engine.connect() as db:
            assert sorted(db.execute(sa.select(notes.c.name)).scalars()) == sorted(wanted)
    finally:
        notes.drop(kit.database.engine)


@pytest.mark.needs("sql")
async def test_event_that_comes_due_under_load_does_not_wait_for_one_due_much_later(kit: SqlKit, store: Store) -> None:
    """A relay that always finds something never asks again when the next event is due."""
    kit.put(event("much later", delay=HOUR))
    assert await store.next_due() is not None
    kit.put(event("now", delay=timedelta(milliseconds=1)))

    async def is_claimed() -> bool:
        return names(await claim(store)) == "now"

    await until(is_claimed, seconds=20 * LOOK_AGAIN)


@pytest.mark.needs("server")
async def test_hold_that_is_cancelled_when_it_is_done_returns_its_connection(
    kit: SqlKit, store: AsyncSqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.put(event("a"))
    await claim(store, 0)
    wait_for = silence.wait_for

    async def wait_and_be_cancelled(work: Any, give_up: Any, seconds: float) -> Any:
        await wait_for(work, lambda: None, seconds)
        give_up()
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(server, "wait_for", wait_and_be_cancelled)
        with pytest.raises(asyncio.CancelledError):
            await store._hold(10)
    # Before a pooler connections are made for each use.
    assert kit.is_pooled or store._engine.sync_engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    assert names(await claim(store)) == "a"


class SlowRenewal:
    """A batch whose renewal takes until it is let go, and is then counted."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.renewed = 0

    async def renew(self, lease: timedelta) -> Sequence[Claim]:
        self.has_begun.set()
        await self.may_end.wait()
        lost = await self._batch.renew(lease)
        self.renewed += 1
        return lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)


async def test_delivery_that_ends_during_a_renewal_waits_for_it(kit: Kit, store: Store) -> None:
    """Where the fence moves with the lease, a renewal that was cut off would lose what was delivered."""
    kit.put(event("a"))
    sink = MemorySink(is_quick=False)
    sink.block()
    relay = Relay(store, sink, lease=SECOND)
    await relay.open()
    batch: Any = SlowRenewal(await claim(store, lease=HOUR))
    delivering = asyncio.create_task(relay._deliver(batch))
    await batch.has_begun.wait()
    sink.unblock()
    await until(lambda: _has(sink))
    batch.may_end.set()
    assert await delivering == Settlement(delivered=1)
    assert batch.renewed == 1


async def _has(sink: MemorySink) -> bool:
    return bool(sink.claims)


async def test_closing_does_not_wait_for_a_lock_on_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = sa.MetaData()
    outbox = Outbox(metadata)
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}", poolclass=sa.NullPool)
    metadata.create_all(engine)
    with engine.begin() as db:
        outbox.put(db, Event("a", {}))
    store = outbox.store(f"sqlite:///{tmp_path / 'shop.db'}")
    assert isinstance(store, SqliteStore)
    await store.open()
    waits = threading.Event()
    begin = store._begin

    def begin_and_tell(connection: sa.Connection, statement: str) -> None:
        waits.set()
        begin(connection, statement)

    monkeypatch.setattr(store, "_begin", begin_and_tell)
    with closing(sqlite3.connect(tmp_path / "shop.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        claiming = asyncio.create_task(claim(store))
        assert await asyncio.to_thread(waits.wait, 60)
        # It would wait for half a minute.
        async with asyncio.timeout(15):
            await store.close()
            with pytest.raises(StoreUnavailable, match="it was closed"):
                await claiming
    assert not any(thread.name.startswith("pillarbox-sqlite") for thread in threading.enumerate())
