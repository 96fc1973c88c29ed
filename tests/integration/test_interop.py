"""The other systems themselves on one table with us: either writes, either delivers, both at once."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import faststream_outbox
import pytest
import sqlalchemy as sa
import sqloutbox
from faststream_outbox.annotations import OutboxMessage
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine

from pillarbox import Event, Outbox, Relay, Retry
from pillarbox.event import DELIVERED, Dead
from pillarbox.schema.check import check_schema
from pillarbox.sinks.callable import CallableSink
from pillarbox.sinks.memory import MemorySink
from pillarbox.stores import Filter, Settlement
from pillarbox.stores.sql import SqlStore
from tests.servers import server_url

LEASE = timedelta(seconds=60)
HOUR = timedelta(hours=1)
EVERYTHING = Filter()


class Shared:
    """One table with its dead letters, declared by both sides."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.name = f"interop_{uuid4().hex[:10]}"
        self.ours = sa.MetaData()
        self.outbox = Outbox(self.ours, "faststream-dlq", table=self.name)
        self.theirs = sa.MetaData()
        self.table = faststream_outbox.make_outbox_table(self.theirs, table_name=self.name)
        self.dlq = faststream_outbox.make_dlq_table(self.theirs, table_name=f"{self.name}_dlq")
        self._stores: list[SqlStore] = []

    def broker(self, **options: Any) -> Any:
        return faststream_outbox.OutboxBroker(self.engine, outbox_table=self.table, dlq_table=self.dlq, **options)

    async def publish(self, *bodies: Any, **options: Any) -> list[Any]:
        """What the other side's application does: rows in its own transaction."""
        async with AsyncSession(self.engine) as session, session.begin():
            broker = self.broker()
            return [await broker.publish(body, session=session, **{"queue": "orders", **options}) for body in bodies]

    async def put(self, *events: Event) -> Any:
        async with self.engine.begin() as db:
            return await self.outbox.put_async(db, *events)

    async def open(self, **options: Any) -> SqlStore:
        store = self.outbox.store(server_url("postgres"), **options)
        await store.open()
        self._stores.append(store)
        return store

    async def rows(self, table: sa.Table | None = None) -> list[Any]:
        async with self.engine.connect() as db:
            found = await db.execute(sa.select(self.table if table is None else table).order_by(sa.text("id")))
            return list(found.all())

    async def execute(self, sql: str) -> None:
        async with self.engine.begin() as db:
            await db.exec_driver_sql(sql.format(outbox=self.name, dlq=f"{self.name}_dlq"))

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection]:
        async with self.engine.connect() as db:
            yield db

    async def close(self) -> None:
        for store in self._stores:
            await store.close()


@pytest.fixture(params=["made by them", "made by us"])
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[Shared]:
    """An empty table, made by either side."""
    engine = create_async_engine(sa.make_url(server_url("postgres")).set(drivername="postgresql+asyncpg"))
    made = Shared(engine)
    metadata = made.theirs if request.param == "made by them" else made.ours
    async with engine.begin() as db:
        await db.run_sync(metadata.create_all)
    try:
        yield made
    finally:
        await made.close()
        async with engine.begin() as db:
            await db.run_sync(made.ours.drop_all)
        await engine.dispose()


async def drain(store: SqlStore, sink: Any, **options: Any) -> None:
    async with Relay(store, sink, **options) as relay:
        await relay.drain()


@asynccontextmanager
async def subscribed(shared: Shared, handler: Callable[[Any, Any], Any], **options: Any) -> AsyncIterator[None]:
    """A subscriber of theirs at work; the handler is given the body and the message."""
    broker = shared.broker(logger=None)
    quick = {"min_fetch_interval": 0.01, "max_fetch_interval": 0.05}

    @broker.subscriber("orders", **{**quick, **options})
    async def handle(body: Any, message: OutboxMessage) -> None:
        await handler(body, message)

    async with broker:
        yield


# -- the tables --------------------------------------------------------------------------------------------------------


async def test_both_sides_find_the_tables_right_whoever_made_them(shared: Shared) -> None:
    await shared.broker().validate_schema()
    await faststream_outbox.OutboxBroker(shared.engine, outbox_table=shared.table).validate_schema()
    assert await check_schema(shared.engine, "faststream-dlq", table=shared.name) == []
    assert await check_schema(shared.engine, "faststream", table=shared.name) == []


async def test_both_sides_find_a_lost_index(shared: Shared) -> None:
    await shared.execute("DROP INDEX {outbox}_pending_idx")
    with pytest.raises(RuntimeError, match="pending_idx"):
        await shared.broker().validate_schema()
    drifts = await check_schema(shared.engine, "faststream", table=shared.name)
    assert [(drift.kind, drift.name) for drift in drifts] == [("index", f"{shared.name}_pending_idx")]


# -- they write, we deliver --------------------------------------------------------------------------------------------


async def test_what_they_publish_is_relayed_with_its_headers(shared: Shared) -> None:
    await shared.publish({"n": 1}, headers={"tenant": "acme"}, correlation_id="c-1")
    await shared.publish(b"raw", queue="blobs")
    await shared.publish("text", queue="texts")
    sink = MemorySink()
    await drain(await shared.open(), sink)
    events = {event.topic: event for event in sink.events}
    placed = events["orders"]
    assert (placed.type, placed.payload, placed.content_type) == ("orders", b'{"n":1}', "application/json")
    assert (dict(placed.headers), placed.correlation_id) == ({"tenant": "acme"}, "c-1")
    assert (events["blobs"].payload, events["blobs"].content_type) == (b"raw", "application/octet-stream")
    assert (events["texts"].payload, events["texts"].content_type) == (b"text", "text/plain")
    assert await shared.rows() == []


async def test_every_body_of_their_batch_is_relayed(shared: Shared) -> None:
    async with AsyncSession(shared.engine) as session, session.begin():
        await shared.broker().publish_batch(None, {"n": 1}, {"n": 2}, queue="orders", session=session)
    sink = MemorySink()
    await drain(await shared.open(), sink)
    assert sorted(event.payload for event in sink.events) == [b"", b'{"n":1}', b'{"n":2}']


async def test_their_row_is_not_relayed_before_its_commit_or_its_time(shared: Shared) -> None:
    store = await shared.open()
    async with AsyncSession(shared.engine) as session:
        await shared.broker().publish({"n": 1}, queue="orders", session=session)
        assert (await store.claim(10, mode="lease", lease=LEASE)).claims == []
        await session.rollback()
    await shared.publish({"n": 2}, activate_in=HOUR)
    assert (await store.claim(10, mode="lease", lease=LEASE)).claims == []
    counts = await store.counts()
    assert (counts.new, counts.scheduled) == (0, 1)


async def test_retries_of_theirs_count_for_us_and_ours_for_them(shared: Shared) -> None:
    [row] = await shared.publish({"n": 1})
    store = await shared.open()
    client = shared.broker().client
    async with shared.connection() as db:
        [held] = await client.fetch(db, ["orders"], limit=10, lease_ttl_seconds=60)
        async with db.begin():
            now = held.created_at
            assert await client.mark_pending_with_lease(
                *(db, row, held.acquired_token),
                delay_seconds=0,
                attempts_count=1,
                first_attempt_at=now,
                last_attempt_at=now,
            )
        batch = await store.claim(10, mode="lease", lease=LEASE)
        assert [claim.attempt for claim in batch.claims] == [2]
        await batch.settle([Retry("503", timedelta(0))])
        [held] = await client.fetch(db, ["orders"], limit=10, lease_ttl_seconds=60)
    assert (held.attempts_count, held.deliveries_count, held.first_attempt_at) == (2, 3, now)


# -- we write, they deliver --------------------------------------------------------------------------------------------


async def test_what_we_put_reaches_their_subscriber(shared: Shared) -> None:
    event = Event("order.placed", {"n": 1}, topic="orders", key="o-1", headers={"tenant": "acme"}, correlation_id="c-1")
    received: asyncio.Queue[Any] = asyncio.Queue()

    async def handle(body: Any, message: Any) -> None:
        await received.put((body, dict(message.headers), message.correlation_id, message.content_type))

    async with subscribed(shared, handle):
        await shared.put(event)
        body, headers, correlation_id, content_type = await asyncio.wait_for(received.get(), 20)
    assert (body, correlation_id, content_type) == ({"n": 1}, "c-1", "application/json")
    assert headers == {
        "tenant": "acme",
        "pillarbox-id": str(event.id),
        "pillarbox-type": "order.placed",
        "pillarbox-key": "o-1",
        "content-type": "application/json",
        "correlation_id": "c-1",
    }
    assert await shared.rows() == []


async def test_what_their_handler_refuses_is_a_dead_event_for_us(shared: Shared) -> None:
    event = Event("order.placed", {"n": 1}, topic="orders")
    await shared.put(event)
    refused = asyncio.Event()

    async def handle(body: Any, message: Any) -> None:
        refused.set()
        raise ValueError("no such order")

    async with subscribed(shared, handle, retry_strategy=faststream_outbox.NoRetry()):
        await asyncio.wait_for(refused.wait(), 20)
    store = await shared.open()
    [record] = await store.events(EVERYTHING, state="dead")
    assert (record.event.id, record.event.type, record.attempts) == (event.id, "order.placed", 1)
    assert record.error is not None
    assert "no such order" in record.error
    assert await store.redrive(Filter(error="no such order"), actor="ann") == 1
    sink = MemorySink()
    await drain(store, sink)
    assert [each.id for each in sink.events] == [event.id]


async def test_dead_event_of_ours_is_a_dead_letter_of_theirs(shared: Shared) -> None:
    [row] = await shared.publish({"n": 1}, timer_id="once")
    store = await shared.open()
    await (await store.claim(10, mode="lease", lease=LEASE)).settle([Dead("400: no such order")])
    [letter] = await shared.rows(shared.dlq)
    assert (letter.original_id, letter.queue, letter.payload, letter.timer_id) == (row, "orders", b'{"n":1}', "once")
    assert (letter.failure_reason, letter.last_exception) == ("retry_terminal", "400: no such order")


# -- timers ------------------------------------------------------------------------------------------------------------


async def test_timer_of_either_side_is_known_to_the_other(shared: Shared) -> None:
    assert await shared.publish({"n": 1}, timer_id="theirs", activate_in=HOUR) != [None]
    late = Event("late", {}, topic="orders", dedup_key="theirs")
    assert (await shared.put(late)).existing == (late,)
    ours = Event("ours", {}, topic="orders", dedup_key="ours", delay=HOUR)
    assert (await shared.put(ours)).new == (ours,)
    assert await shared.publish({"n": 2}, timer_id="ours") == [None]
    async with AsyncSession(shared.engine) as session, session.begin():
        assert await shared.broker().cancel_timer(queue="orders", timer_id="ours", session=session)
    async with shared.engine.begin() as db:
        assert await shared.outbox.cancel_async(db, dedup_key="theirs", topic="orders") == 1
    assert await shared.rows() == []


# -- leases ------------------------------------------------------------------------------------------------------------


async def test_neither_side_takes_what_the_other_holds(shared: Shared) -> None:
    await shared.publish({"n": 1}, {"n": 2})
    store = await shared.open()
    client = shared.broker().client
    ours = await store.claim(1, mode="lease", lease=LEASE)
    async with shared.connection() as db:
        theirs = await client.fetch(db, ["orders"], limit=10, lease_ttl_seconds=60)
        assert [ours.claims[0].event.payload, theirs[0].payload] == [b'{"n":1}', b'{"n":2}']
        assert len(theirs) == 1
        assert (await store.claim(10, mode="lease", lease=LEASE)).claims == []
        assert (await store.claim(10, mode="hold", lease=LEASE)).claims == []
        assert await client.fetch(db, ["orders"], limit=10, lease_ttl_seconds=60) == []
        async with db.begin():
            assert not await client.delete_with_lease(db, ours.claims[0].row, theirs[0].acquired_token)
            assert await client.delete_with_lease(db, theirs[0].id, theirs[0].acquired_token)
    assert await ours.settle([DELIVERED]) == Settlement(delivered=1)
    assert await shared.rows() == []


async def test_late_write_of_either_side_changes_nothing_after_the_other_took_over(shared: Shared) -> None:
    await shared.publish({"n": 1})
    store = await shared.open()
    client = shared.broker().client
    ours = await store.claim(10, mode="lease", lease=LEASE)
    await shared.execute("UPDATE {outbox} SET acquired_at = now() - interval '61 s'")
    async with shared.connection() as db:
        [theirs] = await client.fetch(db, ["orders"], limit=10, lease_ttl_seconds=60)
        assert await ours.settle([DELIVERED]) == Settlement(lost=1)
        assert [claim.row for claim in await ours.renew(LEASE)] == [theirs.id]
        await shared.execute("UPDATE {outbox} SET acquired_at = now() - interval '61 s'")
        store._look_at = 0.0
        again = await store.claim(10, mode="lease", lease=LEASE)
        assert [claim.row for claim in again.claims] == [theirs.id]
        async with db.begin():
            assert not await client.delete_with_lease(db, theirs.id, theirs.acquired_token)
    assert await again.settle([DELIVERED]) == Settlement(delivered=1)


async def test_parked_row_is_never_fetched_by_them(shared: Shared) -> None:
    await shared.publish({"n": 1})
    store = Outbox(sa.MetaData(), "faststream", table=shared.name).store(server_url("postgres"))
    await store.open()
    try:
        await (await store.claim(10, mode="lease", lease=LEASE)).settle([Dead("400")])
        assert (await store.counts()).dead == 1
    finally:
        await store.close()
    async with shared.connection() as db:
        assert await shared.broker().client.fetch(db, ["orders"], limit=10, lease_ttl_seconds=60) == []
    assert len(await shared.rows()) == 1


@pytest.mark.parametrize("mode", ["hold", "lease"])
async def test_both_deliver_from_one_table_and_no_row_twice(shared: Shared, mode: Any) -> None:
    await shared.put(*(Event("order.placed", {"n": number}, topic="orders") for number in range(0, 400, 2)))
    await shared.publish(*({"n": number} for number in range(1, 400, 2)))
    by_them: Counter[int] = Counter()
    by_us: Counter[int] = Counter()
    theirs_began, ours_began = asyncio.Event(), asyncio.Event()

    async def handle(body: Any, message: Any) -> None:
        by_them[body["n"]] += 1
        theirs_began.set()
        # Neither side empties the table before the other has begun.
        await ours_began.wait()

    class Sink(MemorySink):
        async def deliver(self, claims: Any) -> Any:
            ours_began.set()
            await theirs_began.wait()
            by_us.update(int(claim.event.payload[5:-1]) for claim in claims)
            return [DELIVERED] * len(claims)

    store = await shared.open()
    async with (
        subscribed(shared, handle, max_workers=4, fetch_batch_size=10),
        Relay(store, Sink(), batch_size=10, claim=mode) as relay,
    ):
        running = asyncio.ensure_future(relay.run())
        async with asyncio.timeout(60):
            while await shared.rows():
                await asyncio.sleep(0.05)
        relay.stop()
        await running
    assert by_us + by_them == dict.fromkeys(range(400), 1)
    assert len(by_us) > 0
    assert len(by_them) > 0


# -- sqloutbox ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Any]:
    """A queue file of theirs, with our side table beside it."""
    made = sqloutbox.Outbox(tmp_path / "orders.db", "orders")
    metadata = sa.MetaData()
    Outbox(metadata, "sqloutbox")
    engine = sa.create_engine(f"sqlite:///{made.db_path}")
    metadata.create_all(engine)
    engine.dispose()
    yield made
    made._write_conn.close()


def open_queue(queue: Any) -> SqlStore:
    return Outbox(sa.MetaData(), "sqloutbox").store(f"sqlite:///{queue.db_path}")


async def test_their_file_is_what_we_declare(queue: Any) -> None:
    assert await check_schema(f"sqlite:///{queue.db_path}", "sqloutbox") == []


async def test_file_is_drained_in_order_while_they_push(queue: Any) -> None:
    pushed: list[int | None] = []

    def push() -> None:
        writer = sqloutbox.Outbox(queue.db_path, "orders")
        for number in range(100):
            pushed.append(writer.enqueue("INSERT INTO orders VALUES (?)", b"[%d]" % number, source="tests"))
        pushed.extend(writer.enqueue_batch([("INSERT INTO orders VALUES (?)", b"[%d]" % n) for n in range(100, 150)]))
        writer._write_conn.close()

    got: list[bytes] = []
    everything = asyncio.Event()

    async def take(event: Event) -> None:
        got.append(event.payload)
        if len(got) == 150:
            everything.set()

    thread = threading.Thread(target=push)
    async with Relay(open_queue(queue), CallableSink(take, concurrency=1), batch_size=16) as relay:
        running = asyncio.ensure_future(relay.run())
        thread.start()
        await asyncio.wait_for(everything.wait(), 60)
        relay.stop()
        await running
    await asyncio.to_thread(thread.join)
    assert None not in pushed
    assert got == [b"[%d]" % number for number in range(150)]
    reopened = sqloutbox.Outbox(queue.db_path, "orders")
    try:
        assert (reopened.pending_count(), reopened.fetch_unsynced(10)) == (0, [])
        assert sqloutbox.verify_outbox(reopened).ok
        last = reopened.enqueue("INSERT INTO orders VALUES (?)", b"[150]")
        assert last == 151
    finally:
        reopened._write_conn.close()


async def test_they_go_on_where_we_stopped(queue: Any) -> None:
    seqs = queue.enqueue_batch([("tag", b"[%d]" % number) for number in range(6)])
    store = open_queue(queue)
    await store.open()
    try:
        batch = await store.claim(2, mode="lease", lease=LEASE)
        await batch.settle([DELIVERED, DELIVERED])
        # A dead event that is dropped leaves no gap in their chain.
        await (await store.claim(1, mode="lease", lease=LEASE)).settle([Dead("400")])
        assert await store.drop(EVERYTHING, actor="ann") == 1
    finally:
        await store.close()
    rows = queue.fetch_unsynced(10)
    assert [row.seq for row in rows] == seqs[3:]
    assert queue.verify_chain(rows) == (True, [])
    assert sqloutbox.verify_outbox(queue).ok
    queue.mark_synced([row.seq for row in rows])
    queue.delete_synced([row.seq for row in rows])
    assert queue.pending_count() == 0
    assert sqloutbox.verify_outbox(queue).ok
