"""Handlers that take a session: what they write and the settlement of their event are one transaction."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pillarbox import Dead, Event, Handlers, Relay, Retry, Skip, Unsupported
from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.handlers import HandlerSink
from pillarbox.handlers.dispatch import DispatchSink
from pillarbox.retry import Constant
from pillarbox.stores import Settlement
from tests.contract.stores import HOUR, SqlKit, attempts, event, states, until

pytestmark = pytest.mark.needs("sql")


class Ledger:
    """A table of the application's, in the outbox's database."""

    def __init__(self, kit: SqlKit) -> None:
        self.engine = kit.database.engine
        self.table = sa.Table(
            f"ledger_{uuid4().hex[:12]}", sa.MetaData(), sa.Column("entry", sa.String(64), primary_key=True)
        )

    def write(self, entry: str) -> Any:
        return sa.insert(self.table).values(entry=entry)

    @property
    def entries(self) -> list[str]:
        with self.engine.connect() as db:
            return list(db.scalars(sa.select(self.table.c.entry).order_by(self.table.c.entry)))


@pytest.fixture
def ledger(kit: SqlKit) -> Iterator[Ledger]:
    made = Ledger(kit)
    made.table.create(made.engine)
    yield made
    made.table.drop(made.engine)


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


async def run_once(kit: SqlKit, handlers: Handlers, name: str = "handle", **options: Any) -> Settlement:
    relay = Relay(await kit.open(), HandlerSink(handlers, name), retry=Constant(HOUR), **options)
    try:
        return await relay.run_once()
    finally:
        await relay.sink.close()


# -- both kinds of sessions ------------------------------------------------------------------------------------------


@pytest.fixture(params=["sync", pytest.param("async", marks=pytest.mark.needs("server"))])
def kind(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


def register(handlers: Handlers, kind: str, work: Any, *types: str, **options: Any) -> None:
    """Register a handler of this kind that does the work with its session, which is a list of statements or steps."""
    if kind == "async":

        @handlers.on(*types, name="handle", **options)
        async def handle_async(order: dict[str, Any], session: AsyncSession) -> Any:
            return await session.run_sync(lambda plain: work(order, plain))

    else:

        @handlers.on(*types, name="handle", **options)
        def handle(order: dict[str, Any], session: Session) -> Any:
            return work(order, session)


async def test_what_a_handler_writes_commits_with_the_settlement(
    kit: SqlKit, ledger: Ledger, handlers: Handlers, kind: str
) -> None:
    register(handlers, kind, lambda order, session: session.execute(ledger.write(order["name"])) and None, "a", "b")
    kit.put(event("a"), event("b"))
    assert (await run_once(kit, handlers)).delivered == 2
    assert ledger.entries == ["a", "b"]
    assert await states(await kit.open()) == {}


async def test_error_undoes_what_the_handler_wrote(kit: SqlKit, ledger: Ledger, handlers: Handlers, kind: str) -> None:
    def work(order: dict[str, Any], session: Session) -> None:
        session.execute(ledger.write(order["name"]))
        if order["name"] == "bad":
            raise ValueError("after all not")

    register(handlers, kind, work, "good", "bad")
    kit.put(event("good"), event("bad"))
    settlement = await run_once(kit, handlers)
    assert (settlement.delivered, settlement.retried) == (1, 1)
    assert ledger.entries == ["good"]
    assert await attempts(await kit.open()) == {"bad": 1}


@pytest.mark.parametrize("result", [Retry("not now"), Dead("never")], ids=["retry", "dead"])
async def test_result_that_is_no_success_undoes_what_was_written(
    kit: SqlKit, ledger: Ledger, handlers: Handlers, kind: str, result: Any
) -> None:
    def work(order: dict[str, Any], session: Session) -> Any:
        session.execute(ledger.write("a"))
        return result

    register(handlers, kind, work, "a")
    kit.put(event("a"))
    settlement = await run_once(kit, handlers)
    assert (settlement.delivered, settlement.retried + settlement.dead) == (0, 1)
    assert ledger.entries == []


async def test_skip_undoes_what_was_written_and_settles(
    kit: SqlKit, ledger: Ledger, handlers: Handlers, kind: str
) -> None:
    def work(order: dict[str, Any], session: Session) -> None:
        session.execute(ledger.write("a"))
        raise Skip

    register(handlers, kind, work, "a")
    kit.put(event("a"))
    assert (await run_once(kit, handlers)).delivered == 1
    assert ledger.entries == []


async def test_constraint_violation_is_the_events_own_failure(
    kit: SqlKit, ledger: Ledger, handlers: Handlers, kind: str
) -> None:
    register(handlers, kind, lambda order, session: session.execute(ledger.write("same")) and None, "a", "b")
    kit.put(event("a", "k"), event("b", "k"))
    settlement = await run_once(kit, handlers)
    assert (settlement.delivered, settlement.retried) == (1, 1)
    assert ledger.entries == ["same"]


async def test_event_put_by_a_handler_commits_with_it(
    kit: SqlKit, ledger: Ledger, handlers: Handlers, kind: str
) -> None:
    def work(order: dict[str, Any], session: Session) -> None:
        kit.database.outbox.put(session, Event(f"after {order['name']}", {}))
        if order["name"] == "bad":
            session.flush()
            raise ValueError("after all not")

    register(handlers, kind, work, "good", "bad")
    kit.put(event("good"), event("bad"))
    await run_once(kit, handlers)
    assert await states(await kit.open()) == {"after good": "ready", "bad": "waiting"}


async def test_commit_and_rollback_of_the_handlers_own_end_no_more_than_a_savepoint(
    kit: SqlKit, ledger: Ledger, handlers: Handlers, kind: str
) -> None:
    def work(order: dict[str, Any], session: Session) -> None:
        session.execute(ledger.write(f"{order['name']} kept"))
        session.commit()
        session.execute(ledger.write(f"{order['name']} undone"))
        session.rollback()
        if order["name"] == "bad":
            raise ValueError("after all not")

    register(handlers, kind, work, "good", "bad")
    kit.put(event("good"), event("bad"))
    await run_once(kit, handlers)
    assert ledger.entries == ["good kept"]


@pytest.mark.needs("server")
async def test_lease_lost_while_the_handler_ran_undoes_what_it_wrote(
    kit: SqlKit, ledger: Ledger, handlers: Handlers
) -> None:
    thief = await kit.open()

    @handlers.on("a")
    async def handle(session: AsyncSession) -> None:
        await session.execute(ledger.write("late"))
        await kit.pass_time(HOUR)
        stolen = await thief.claim(10, mode="lease", lease=timedelta(minutes=1))
        assert len(stolen.claims) == 1
        await stolen.settle([Retry("the thief's own result", timedelta(minutes=1))])

    kit.put(event("a"))
    settlement = await run_once(kit, handlers, lease=timedelta(minutes=1))
    assert (settlement.delivered, settlement.lost) == (0, 1)
    assert ledger.entries == []
    assert await states(await kit.open()) == {"a": "waiting"}


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.needs("server")
async def test_plain_handler_that_blocks_blocks_nobody_else(kit: SqlKit, ledger: Ledger, handlers: Handlers) -> None:
    may_end = threading.Event()
    has_begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    @handlers.on("a")
    def handle(session: Session) -> None:
        session.execute(ledger.write("before"))
        loop.call_soon_threadsafe(has_begun.set)
        assert may_end.wait(10)
        session.execute(ledger.write("then"))

    kit.put(event("a"))
    running = asyncio.create_task(run_once(kit, handlers))
    await asyncio.wait_for(has_begun.wait(), 10)
    may_end.set()  # only a loop that is not blocked gets here
    assert (await running).delivered == 1
    assert ledger.entries == ["before", "then"]


@pytest.mark.needs("server")
async def test_plain_handler_beyond_its_timeout_is_left_behind_and_undone_when_it_ends(
    kit: SqlKit, ledger: Ledger, handlers: Handlers
) -> None:
    may_go_on = threading.Event()
    running: list[threading.Thread] = []

    @handlers.on("a", timeout=timedelta(milliseconds=100))
    def handle(session: Session) -> None:
        running.append(threading.current_thread())
        session.execute(ledger.write("before"))
        assert may_go_on.wait(10)
        session.execute(ledger.write("late"))

    kit.put(event("a"))
    store = await kit.open()
    relay = Relay(store, HandlerSink(handlers, "handle"), retry=Constant(HOUR))
    assert (await relay.run_once()).retried == 1
    assert await states(store) == {"a": "waiting"}
    may_go_on.set()
    await store.close()
    await asyncio.to_thread(running[0].join, 10)
    assert not running[0].is_alive()
    assert ledger.entries == []
    assert await attempts(await kit.open()) == {"a": 1}


async def test_time_beyond_the_timeout_undoes_what_the_handler_wrote(
    kit: SqlKit, ledger: Ledger, handlers: Handlers, kind: str
) -> None:
    pause = threading.Event()

    def work(order: dict[str, Any], session: Session) -> None:
        session.execute(ledger.write("late"))
        pause.wait(0.1)

    register(handlers, kind, work, "a", timeout=timedelta(milliseconds=20))
    kit.put(event("a"))
    # An async handler that blocks the loop cannot be ended, but for the next thing it awaits.
    assert (await run_once(kit, handlers)).retried == 1
    assert ledger.entries == []


@pytest.mark.needs("server")
async def test_claims_are_renewed_while_a_handler_with_a_session_runs(
    kit: SqlKit, ledger: Ledger, handlers: Handlers
) -> None:
    table = kit.database.outbox.table

    def leases() -> list[Any]:
        with kit.database.engine.connect() as db:
            return list(db.scalars(sa.select(table.c.until_at)))

    both = asyncio.Barrier(2)

    @handlers.on("a", "b")
    async def handle(session: AsyncSession) -> None:
        await session.execute(ledger.write(uuid4().hex))
        await both.wait()
        first = leases()
        assert len(first) == 2

        async def is_renewed() -> bool:
            return all(now > then for now, then in zip(leases(), first, strict=True))

        await until(is_renewed)
        # Neither settles its event before the other has looked.
        await both.wait()

    kit.put(event("a"), event("b"))
    assert (await run_once(kit, handlers, lease=timedelta(seconds=1))).delivered == 2


@pytest.mark.needs("server")
async def test_stopped_relay_undoes_what_a_handler_under_way_wrote(
    kit: SqlKit, ledger: Ledger, handlers: Handlers
) -> None:
    has_begun = asyncio.Event()

    @handlers.on("a")
    async def handle(session: AsyncSession) -> None:
        await session.execute(ledger.write("half"))
        has_begun.set()
        await asyncio.Event().wait()

    kit.put(event("a"))
    relay = Relay(await kit.open(), HandlerSink(handlers, "handle"), stop_timeout=timedelta(milliseconds=10))
    running = asyncio.create_task(relay.run())
    await asyncio.wait_for(has_begun.wait(), 10)
    relay.stop()
    await asyncio.wait_for(running, 10)
    assert ledger.entries == []
    assert await states(await kit.open()) == {"a": "ready"}
    assert await attempts(await kit.open()) == {"a": 0}


# -- the database ------------------------------------------------------------------------------------------------------


@pytest.mark.needs("server")
async def test_connection_that_is_lost_again_and_again_is_the_events_own_failure(
    kit: SqlKit, ledger: Ledger, handlers: Handlers, kind: str
) -> None:
    is_postgres = kit.database.backend == "postgresql"
    own = "SELECT pg_backend_pid()" if is_postgres else "SELECT CONNECTION_ID()"

    def work(order: dict[str, Any], session: Session) -> None:
        session.execute(ledger.write("lost"))
        number = session.scalar(sa.text(own))
        with kit.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
            db.exec_driver_sql(f"SELECT pg_terminate_backend({number})" if is_postgres else f"KILL {number}")
        session.execute(ledger.write("too late"))

    register(handlers, kind, work, "a")
    kit.put(event("a"))
    store = await kit.open()
    for _ in range(2):
        relay = Relay(store, HandlerSink(handlers, "handle"), retry=Constant(HOUR))
        with pytest.raises(SinkUnavailable, match="the connection was lost"):
            await relay.drain()
        await relay.sink.close()
        assert await attempts(store) == {"a": 0}
    assert (await run_once(kit, handlers)).retried == 1
    assert ledger.entries == []
    assert await attempts(store) == {"a": 1}


@pytest.mark.needs("server")
async def test_join_that_cannot_connect_is_not_the_events_fault_and_keeps_no_place(
    kit: SqlKit, ledger: Ledger, handlers: Handlers, kind: str
) -> None:
    def work(order: dict[str, Any], session: Session) -> None:
        session.execute(ledger.write(order["name"]))

    register(handlers, kind, work, "a", concurrency=1)
    kit.put(event("a"))
    store = await kit.open()
    sink = HandlerSink(handlers, "handle")
    relay = Relay(store, sink)
    with patch.object(store, "_join", side_effect=ConnectionRefusedError("nobody there")):
        with pytest.raises(SinkUnavailable, match="nobody there"):
            await relay.drain()
        assert await attempts(store) == {"a": 0}
    assert (await Relay(store, sink).run_once()).delivered == 1
    await sink.close()
    assert ledger.entries == ["a"]


@pytest.mark.needs("direct connection")
async def test_constraint_that_fails_at_the_commit_is_the_events_own_failure(
    kit: SqlKit, handlers: Handlers, kind: str
) -> None:
    name = f"deferred_{uuid4().hex[:12]}"
    with kit.database.engine.begin() as db:
        db.exec_driver_sql(f"CREATE TABLE {name} (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")

    def work(order: dict[str, Any], session: Session) -> None:
        session.execute(sa.text(f"INSERT INTO {name} VALUES (1)"))
        if order["name"] == "bad":
            session.execute(sa.text(f"INSERT INTO {name} VALUES (1)"))

    register(handlers, kind, work, "bad", "good")
    kit.put(event("bad"), event("good"))
    settlement = await run_once(kit, handlers)
    with kit.database.engine.begin() as db:
        assert db.exec_driver_sql(f"SELECT count(*) FROM {name}").scalar_one() == 1
        db.exec_driver_sql(f"DROP TABLE {name}")
    assert (settlement.delivered, settlement.retried) == (1, 1)


@pytest.mark.needs("direct connection")
async def test_conflict_that_never_ends_is_the_events_own_failure(kit: SqlKit, handlers: Handlers, kind: str) -> None:
    calls: list[str] = []

    def work(order: dict[str, Any], session: Session) -> None:
        calls.append(order["name"])
        session.execute(sa.text("DO $$ BEGIN RAISE EXCEPTION 'busy' USING ERRCODE = '40001'; END $$"))

    register(handlers, kind, work, "a", concurrency=1)
    kit.put(event("a"))
    relay = Relay(await kit.open(), HandlerSink(handlers, "handle"), retry=Constant(HOUR))
    assert (await relay.run_once()).retried == 1
    assert len(calls) == 5
    # Each call took a place and gave it back once.
    sink = relay.sink
    assert isinstance(sink, HandlerSink)
    slot = sink.make_slot()
    await asyncio.wait_for(slot.take(), 10)
    assert sink._slots.locked()
    await sink.close()


@pytest.mark.needs("server")
async def test_event_that_was_settled_is_not_handled_again_when_a_neighbour_cannot_be(
    kit: SqlKit, ledger: Ledger, handlers: Handlers
) -> None:
    calls: list[str] = []

    @handlers.on("a", "b", concurrency=1)
    async def handle(order: dict[str, Any], session: AsyncSession) -> None:
        calls.append(order["name"])
        await session.execute(ledger.write(f"{order['name']} {len(calls)}"))

    kit.put(event("a"), event("b"))
    store = await kit.open()
    join, joins = store.join, count()

    async def refuse_the_second(*args: Any, **options: Any) -> Any:
        if next(joins) == 1:
            raise ConfigError("the password was changed")
        return await join(*args, **options)

    relay = Relay(store, HandlerSink(handlers, "handle"), batch_size=2)
    with patch.object(store, "join", refuse_the_second):
        relay._size = 2
        await relay.run_once()
    assert len(calls) == 1
    await relay.sink.close()


@pytest.mark.needs("server")
async def test_handlers_that_deadlock_are_run_again(kit: SqlKit, ledger: Ledger, handlers: Handlers) -> None:
    with ledger.engine.begin() as db:
        db.execute(sa.insert(ledger.table), [{"entry": "x"}, {"entry": "y"}])
    both = asyncio.Barrier(2)
    calls: list[str] = []

    async def lock(session: AsyncSession, entry: str) -> None:
        await session.execute(sa.select(ledger.table).where(ledger.table.c.entry == entry).with_for_update())

    @handlers.on("xy", "yx")
    async def handle(order: dict[str, Any], session: AsyncSession) -> None:
        first, second = order["name"]
        calls.append(order["name"])
        await lock(session, first)
        if len(calls) <= 2:
            await both.wait()
        await lock(session, second)
        await session.execute(ledger.write(order["name"]))

    kit.put(event("xy"), event("yx"))
    relay = Relay(await kit.open(), HandlerSink(handlers, "handle"), batch_size=2)
    relay._size = 2
    assert (await relay.run_once()).delivered == 2
    assert len(calls) == 3
    assert ledger.entries == ["x", "xy", "y", "yx"]


@pytest.mark.needs("server")
async def test_handler_may_be_idle_in_its_transaction_longer_than_a_hold(kit: SqlKit, handlers: Handlers) -> None:
    is_postgres = kit.database.backend == "postgresql"
    show = "SHOW idle_in_transaction_session_timeout" if is_postgres else "SELECT @@session.wait_timeout"
    seen: list[Any] = []

    @handlers.on("a")
    async def handle(session: AsyncSession) -> None:
        seen.append(await session.scalar(sa.text(show)))

    kit.put(event("a"))
    assert (await run_once(kit, handlers)).delivered == 1
    assert seen[0] in ("1h", "0", 3601)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.needs("untyped columns")
async def test_async_session_on_sqlite_is_refused_before_anything_is_claimed(kit: SqlKit, handlers: Handlers) -> None:
    @handlers.on("a")
    async def handle(session: AsyncSession) -> None: ...

    kit.put(event("a"))
    with pytest.raises(Unsupported, match="make the handler a plain function with a Session"):
        await run_once(kit, handlers)
    assert await states(await kit.open()) == {"a": "ready"}


async def test_timeout_longer_than_a_transaction_may_be_open_is_refused(kit: SqlKit, handlers: Handlers) -> None:
    @handlers.on("a", timeout=timedelta(hours=2))
    def handle(session: Session) -> None: ...

    with pytest.raises(Unsupported, match="expected at most 1h"):
        await run_once(kit, handlers)


# -- several handlers in one transaction -----------------------------------------------------------------------------


async def dispatch(kit: SqlKit, handlers: Handlers, **options: Any) -> Settlement:
    relay = Relay(await kit.open(), DispatchSink(handlers, **options), retry=Constant(HOUR))
    try:
        return await relay.run_once()
    finally:
        await relay.sink.close()


async def test_all_handlers_of_a_type_run_in_one_transaction(kit: SqlKit, ledger: Ledger, handlers: Handlers) -> None:
    @handlers.on("a", "b")
    def first(order: dict[str, Any], session: Session) -> None:
        session.execute(ledger.write(f"first {order['name']}"))

    @handlers.on("a", "b")
    def second(order: dict[str, Any], session: Session) -> None:
        session.execute(ledger.write(f"second {order['name']}"))
        if order["name"] == "b":
            raise ValueError("not b")

    kit.put(event("a"), event("b"))
    settlement = await dispatch(kit, handlers)
    assert (settlement.delivered, settlement.retried) == (1, 1)
    assert ledger.entries == ["first a", "second a"]


@pytest.mark.needs("server")
async def test_who_waits_for_a_place_among_a_handlers_calls_holds_no_row(
    kit: SqlKit, ledger: Ledger, handlers: Handlers
) -> None:
    with ledger.engine.begin() as db:
        db.execute(ledger.write("row"))
    is_first_done = asyncio.Event()
    lock = sa.select(ledger.table).with_for_update()

    @handlers.on("x")
    async def first(session: AsyncSession) -> None:
        await session.execute(lock)
        is_first_done.set()

    @handlers.on("x", "y", concurrency=1)
    async def second(order: dict[str, Any], session: AsyncSession) -> None:
        if order["name"] == "y":
            with suppress(TimeoutError):
                await asyncio.wait_for(is_first_done.wait(), 0.5)
            await session.execute(lock)

    kit.put(event("y"), event("x"))
    relay = Relay(await kit.open(), DispatchSink(handlers), batch_size=2)
    relay._size = 2
    assert (await asyncio.wait_for(relay.run_once(), 20)).delivered == 2
    await relay.sink.close()


@pytest.mark.parametrize(("unmatched", "expected"), [("dead", (0, 1)), ("skip", (1, 0))])
async def test_event_without_a_handler_is_dead_unless_it_may_be_skipped(
    kit: SqlKit, handlers: Handlers, unmatched: str, expected: tuple[int, int]
) -> None:
    @handlers.on("a")
    def handle() -> None: ...

    kit.put(event("b"))
    settlement = await dispatch(kit, handlers, unmatched=unmatched)
    assert (settlement.delivered, settlement.dead) == expected
