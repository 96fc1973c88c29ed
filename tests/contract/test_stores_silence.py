"""A database whose connections say nothing any more, while new ones work: delivery goes on, and nothing is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from pillarbox import Event, Relay, StoreUnavailable
from pillarbox.event import DELIVERED
from pillarbox.silence import Patience, let_go
from pillarbox.sinks.memory import MemorySink
from pillarbox.stores import server
from pillarbox.stores.sql import SqlStore
from tests.contract.stores import SqlKit, claim, event, until
from tests.freezing import HANG, FreezingProxy, freezing_before

pytestmark = pytest.mark.needs("server")

IN_TIME = 15.0
"""Within how many seconds delivery goes on with default settings: what the documentation promises."""
SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)


@pytest.fixture
def proxy(kit: SqlKit) -> Iterator[FreezingProxy]:
    with freezing_before(kit.database.url.render_as_string(hide_password=False)) as proxy:
        yield proxy


@asynccontextmanager
async def opened(kit: SqlKit, proxy: FreezingProxy, **options: Any) -> AsyncIterator[SqlStore]:
    store = kit.make(sa.make_url(proxy.url), **options)
    try:
        await store.open()
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def running(store: SqlStore, sink: MemorySink, **options: Any) -> AsyncIterator[Relay]:
    relay = Relay(store, sink, **options)
    run = asyncio.create_task(relay.run())
    try:
        yield relay
    finally:
        relay.stop()
        await run


async def arrives(sink: MemorySink, *events: Event, seconds: float = IN_TIME) -> None:
    async def has_all() -> bool:
        return {each.id for each in events} <= {claim.event.id for claim in sink.claims}

    await until(has_all, seconds=seconds)


def outages(caplog: pytest.LogCaptureFixture) -> int:
    return sum("The store is down" in record.message for record in caplog.records)


async def test_an_idle_relay_goes_on_after_its_connections_froze(
    kit: SqlKit, proxy: FreezingProxy, caplog: pytest.LogCaptureFixture
) -> None:
    sink, first, second = MemorySink(), event("first"), event("second", "k")
    with caplog.at_level(logging.INFO, "pillarbox"):
        async with opened(kit, proxy) as store, running(store, sink):
            kit.put(first)
            await arrives(sink, first)
            # Not at any time: a pool may replace an idle connection that froze without having asked it anything.
            proxy.freeze_at(b"COMMIT")
            assert await asyncio.to_thread(proxy.has_frozen.wait, HANG)
            kit.put(second)
            await arrives(sink, second)
    assert outages(caplog) == 1
    assert "did not answer within 8 s; the connection is given up" in caplog.text


@pytest.mark.parametrize("word", [b"UPDATE", b"DELETE", b"COMMIT"])
async def test_a_relay_goes_on_after_a_statement_without_an_answer(
    kit: SqlKit, proxy: FreezingProxy, word: bytes
) -> None:
    sink, put = MemorySink(), [event(f"event{number}", f"key{number}") for number in range(50)]
    async with opened(kit, proxy, statement_timeout=2 * SECOND) as store:
        proxy.freeze_at(word)
        # A claim whose answer was lost lapses by itself: that takes its lease.
        async with running(store, sink, lease=SECOND):
            kit.put(*put)
            await arrives(sink, *put, seconds=HANG)
            await until(lambda: is_empty(kit), seconds=HANG)


async def is_empty(kit: SqlKit) -> bool:
    with kit.database.engine.connect() as db:
        return not db.execute(kit.database.outbox.table.select()).first()


async def test_a_held_batch_whose_connection_froze_is_delivered_again(kit: SqlKit, proxy: FreezingProxy) -> None:
    kit.put(event("held"))
    async with opened(kit, proxy) as store:
        batch = await claim(store, mode="hold")
        assert len(batch.claims) == 1
        proxy.freeze()
        with pytest.raises(StoreUnavailable, match="did not answer within 8 s"):
            await batch.settle([DELIVERED])

        async def is_claimed() -> bool:
            again = await claim(store)
            return bool(again.claims)

        # The server ends a transaction that is idle for six seconds.
        await until(is_claimed, seconds=HANG)


async def test_a_frozen_store_closes(kit: SqlKit, proxy: FreezingProxy) -> None:
    async with asyncio.timeout(HANG), opened(kit, proxy, statement_timeout=HOUR) as store:
        await store.counts()
        frozen = proxy.freeze(also_new=True)
        # Before a pooler a store keeps no connection that it does not use.
        assert frozen > 0 or kit.is_pooled


async def test_stop_ends_a_relay_whose_database_is_silent(kit: SqlKit, proxy: FreezingProxy) -> None:
    sink, first = MemorySink(), event("first")
    # Only the relay's own bound ends it: waiting for a statement's would be a hang.
    async with opened(kit, proxy, statement_timeout=HOUR) as store:
        relay = Relay(store, sink, stop_timeout=SECOND)
        run = asyncio.create_task(relay.run())
        kit.put(first)
        await arrives(sink, first)
        # While it asks: a relay that pauses, or one whose answer is lost, asks nothing more on its own.
        proxy.freeze_at(b"COMMIT", also_new=True)
        kit.put(event("second"))
        assert await asyncio.to_thread(proxy.has_frozen.wait, HANG)
        relay.stop()
        async with asyncio.timeout(HANG):
            await run
            await relay.close()


async def test_a_statement_over_its_bound_is_given_up_and_has_twice_the_time_next(
    kit: SqlKit, proxy: FreezingProxy
) -> None:
    sleep = {"postgresql": "SELECT pg_sleep(1.5)", "mysql": "SELECT SLEEP(1.5)"}[kit.database.backend]
    async with opened(kit, proxy, statement_timeout=SECOND) as store:
        with pytest.raises(StoreUnavailable, match="did not answer within 1 s"):
            await store.run_soon(lambda db: db.exec_driver_sql(sleep).all())
        await store.run_soon(lambda db: db.exec_driver_sql(sleep).all())
        # Long work has a bound of its own.
        await store.run(lambda db: db.exec_driver_sql(sleep).all())


async def test_a_statement_that_is_cancelled_leaves_no_dead_connection_in_the_pool(
    kit: SqlKit, proxy: FreezingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst moment is after the commit: then returning the connection asks the server nothing."""
    reached, gate = asyncio.Event(), asyncio.Event()

    async def hesitate(connection: AsyncConnection) -> None:
        reached.set()
        await gate.wait()
        await let_go(connection)

    async with opened(kit, proxy) as store:
        monkeypatch.setattr(server, "let_go", hesitate)
        asking = asyncio.create_task(store.run_soon(one))
        await reached.wait()
        asking.cancel()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert await store.run_soon(one) == 1


def one(db: sa.Connection) -> Any:
    return db.exec_driver_sql("SELECT 1").scalar_one()


def test_patience_doubles_once_for_what_was_silent_together_and_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    patience = Patience(timedelta(seconds=8))
    patience.overran(990.0)
    patience.overran(990.0)
    assert patience.seconds == 16
    patience.overran(now)
    assert patience.seconds == 32
    # Quick answers beside a slow statement do not take back the time that it needs.
    patience.answered(now)
    assert patience.seconds == 32
    now += 8 * 32 + 1
    for _ in range(3):
        patience.answered(now)
    assert patience.seconds == 8
