"""What an application may still change after a put: cancelling and rescheduling, on every database.

And the lock on a key, where writers run side by side.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from pillarbox import Event, InvalidEvent, Retry, Store, TransactionError
from tests.contract.put_targets import DATABASES, Database, GetDatabase, make_databases

FUTURE = datetime(2031, 1, 2, 3, 4, 5, tzinfo=UTC)
SERVERS = ("postgres", "mariadb", "mysql")


@pytest.fixture(scope="module")
def change_databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GetDatabase]:
    with make_databases(tmp_path_factory) as get:
        yield get


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest, change_databases: GetDatabase) -> Database:
    return change_databases(request.param)


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, change_databases: GetDatabase) -> Database:
    return change_databases(request.param)


def put(database: Database, *events: Event) -> None:
    with database.engine.begin() as db:
        database.outbox.put(db, *events)


def event(name: str, **fields: Any) -> Event:
    return Event(name, {}, **fields)


def set_state(database: Database, event: Event, state: int) -> None:
    database.run(f"UPDATE {{table}} SET state = {state} WHERE type = '{event.type}'")


def states(database: Database) -> dict[str, int]:
    return {row["type"]: row["state"] for row in database.rows()}


# -- cancelling ----------------------------------------------------------------------------------------------


def test_cancelled_events_are_gone_with_the_commit(database: Database) -> None:
    first, second, third = event("a"), event("b", due_at=FUTURE), event("c")
    put(database, first, second, third)
    with database.engine.connect() as db:
        assert database.outbox.cancel(db, first.id, second.id, uuid4()) == 2
        assert len(database.rows()) == 3
        db.commit()
    assert states(database) == {"c": 0}


def test_a_rolled_back_cancel_changes_nothing(database: Database) -> None:
    kept = event("a")
    put(database, kept)
    with database.engine.connect() as db:
        assert database.outbox.cancel(db, kept.id) == 1
        db.rollback()
    assert states(database) == {"a": 0}


def test_an_event_is_cancelled_by_its_dedup_key(database: Database) -> None:
    put(database, event("a", dedup_key="one"), event("b", dedup_key="two"))
    with database.engine.begin() as db:
        assert database.outbox.cancel(db, dedup_key="two") == 1
        assert database.outbox.cancel(db, dedup_key="three") == 0
    assert states(database) == {"a": 0}


@pytest.mark.parametrize("state", [1, 5], ids=["leased", "delivered"])
def test_what_is_leased_or_delivered_is_not_touched(database: Database, state: int) -> None:
    taken, free = event("taken", dedup_key="k"), event("free")
    put(database, taken, free)
    set_state(database, taken, state)
    with database.engine.begin() as db:
        assert database.outbox.cancel(db, taken.id, free.id) == 1
        assert database.outbox.cancel(db, dedup_key="k") == 0
        assert database.outbox.reschedule(db, taken.id, due_at=FUTURE) == 0
    assert states(database) == {"taken": state}


def test_what_a_relay_has_locked_is_not_touched_and_not_waited_for(server: Database) -> None:
    locked, free = event("locked"), event("free")
    put(server, locked, free)
    table = server.outbox.table
    with server.engine.connect() as relay, server.engine.begin() as db:
        relay.execute(sa.select(table.c.seq).where(table.c.id == locked.id).with_for_update())
        assert server.outbox.cancel(db, locked.id, free.id) == 1
        assert server.outbox.reschedule(db, locked.id, due_at=FUTURE) == 0
        relay.rollback()
    assert states(server) == {"locked": 0}


# -- rescheduling --------------------------------------------------------------------------------------------


def test_a_rescheduled_event_has_its_new_time(database: Database) -> None:
    ready, scheduled, other = event("ready"), event("scheduled", delay=timedelta(hours=1)), event("other")
    put(database, ready, scheduled, other)
    with database.engine.begin() as db:
        assert database.outbox.reschedule(db, ready.id, scheduled.id, uuid4(), due_at=FUTURE) == 2
    found = {row["type"]: (row["state"], row["due_at"], row["until_at"]) for row in database.rows()}
    assert found == {"ready": (4, FUTURE, FUTURE), "scheduled": (4, FUTURE, FUTURE), "other": (0, None, None)}


def test_an_event_is_rescheduled_by_its_dedup_key(database: Database) -> None:
    put(database, event("a", dedup_key="one"), event("b", dedup_key="two"))
    with database.engine.begin() as db:
        assert database.outbox.reschedule(db, dedup_key="two", due_at=FUTURE) == 1
    assert states(database) == {"a": 0, "b": 4}


@asynccontextmanager
async def open_store(database: Database) -> AsyncIterator[Store]:
    store = database.outbox.store(database.url)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def claim(store: Store) -> Any:
    # A lane is left to other relays now and then: an empty claim may have looked elsewhere.
    for _ in range(20):
        batch = await store.claim(10, mode="lease", lease=timedelta(minutes=1))
        if batch.claims:
            break
    return batch


def names(batch: Any) -> list[str]:
    return [claim.event.type for claim in batch.claims]


async def test_a_tried_event_blocks_its_key_until_it_is_cancelled(database: Database) -> None:
    front, successor = event("front", key="k"), event("successor", key="k")
    put(database, front)
    async with open_store(database) as store:
        batch = await claim(store)
        assert names(batch) == ["front"]
        await batch.settle([Retry("not yet", after=timedelta(hours=1))])
        put(database, successor)
        assert names(await claim(store)) == []
        with database.engine.begin() as db:
            assert database.outbox.reschedule(db, front.id, due_at=FUTURE) == 1
        assert states(database)["front"] == 2
        assert names(await claim(store)) == []
        with database.engine.begin() as db:
            assert database.outbox.cancel(db, front.id) == 1
        assert names(await claim(store)) == ["successor"]


async def test_an_event_that_was_never_tried_blocks_nobody_when_rescheduled(database: Database) -> None:
    first, second = event("first", key="k"), event("second", key="k")
    put(database, first, second)
    with database.engine.begin() as db:
        assert database.outbox.reschedule(db, first.id, due_at=FUTURE) == 1
    async with open_store(database) as store:
        assert names(await claim(store)) == ["second"]


# -- through what --------------------------------------------------------------------------------------------


def test_sessions_cancel_what_they_have_just_put(database: Database) -> None:
    for session in (Session(database.engine), scoped_session(sessionmaker(database.engine))):
        first, second = event("first"), event("second")
        database.outbox.put(session, first, second)
        assert database.outbox.cancel(session, first.id) == 1
        assert database.outbox.reschedule(session, second.id, due_at=FUTURE) == 1
        session.commit()
        session.close()
        assert states(database) == {"second": 4}
        database.empty()


async def test_asynchronous_sessions_and_connections_change_events(database: Database) -> None:
    drivers = {"postgresql": "asyncpg", "mysql": "aiomysql", "sqlite": "aiosqlite"}
    url = database.url.set(drivername=f"{database.backend}+{drivers[database.backend]}")
    engine = create_async_engine(url)
    outbox = database.outbox
    scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 0)
    for target in (AsyncSession(engine), scoped, await engine.connect()):
        first, second = event("first"), event("second")
        await outbox.put_async(target, first, second)
        assert await outbox.cancel_async(target, first.id) == 1
        assert await outbox.reschedule_async(target, second.id, due_at=FUTURE) == 1
        await target.commit()
        await target.close()
        assert states(database) == {"second": 4}
        database.empty()
    await engine.dispose()


def test_what_is_wrong_is_said_before_any_sql(database: Database) -> None:
    outbox, some = database.outbox, uuid4()
    sql: list[Any] = []
    engine = sa.create_engine(database.engine.url)
    sa.event.listen(engine, "before_cursor_execute", lambda *args: sql.append(args[2]))
    with engine.connect() as db:
        sql.clear()
        with pytest.raises(TypeError, match=r"cancel: expected event ids or a dedup_key"):
            outbox.cancel(db)
        with pytest.raises(TypeError, match=r"one of the two"):
            outbox.cancel(db, some, dedup_key="k")
        with pytest.raises(TypeError, match=r"expected event ids as uuid\.UUID, got 'abc'"):
            outbox.cancel(db, "abc")  # type: ignore[arg-type]
        with pytest.raises(InvalidEvent, match=r"reschedule: expected an aware datetime, got datetime"):
            outbox.reschedule(db, some, due_at=datetime(2031, 1, 1))  # noqa: DTZ001
        with pytest.raises(TypeError, match=r"For an AsyncSession or AsyncConnection use cancel_async\(\)"):
            outbox.cancel(engine, some)  # type: ignore[arg-type]
    with pytest.raises(TransactionError, match="closed"):
        outbox.cancel(db, some)
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db,
        pytest.raises(TransactionError, match="commits every statement"),
    ):
        outbox.cancel(db, some)
    assert sql == []
    engine.dispose()


async def test_each_method_names_the_other(database: Database) -> None:
    outbox, some = database.outbox, uuid4()
    async_session = AsyncSession()
    with pytest.raises(TypeError, match=r"use reschedule_async\(\)"):
        outbox.reschedule(async_session, some, due_at=FUTURE)  # type: ignore[arg-type]
    with (
        Session(database.engine) as session,
        pytest.raises(TypeError, match=r"For a Session or Connection use cancel\(\)"),
    ):
        await outbox.cancel_async(session, some)  # type: ignore[arg-type]
    await async_session.close()


# -- locking keys --------------------------------------------------------------------------------------------


async def test_writers_of_one_key_wait_for_each_other(server: Database) -> None:
    with Session(server.engine) as first, Session(server.engine) as second:
        server.outbox.put(first, event("first", key="k"), lock_key=True)
        first.flush()

        def put_second() -> None:
            server.outbox.put(second, event("second", key="k"), lock_key=True)
            second.commit()

        waiting = asyncio.create_task(asyncio.to_thread(put_second))
        await server.wait_until_blocked()
        assert not waiting.done()
        server.outbox.put(first, event("third", key="k"), lock_key=True)
        first.commit()
        await waiting
    assert [row["type"] for row in server.rows()] == ["first", "third", "second"]


def test_writers_of_other_keys_do_not_wait(server: Database) -> None:
    # Lanes 42 and 35: keys of one lane would wait for each other on MySQL and MariaDB.
    with server.engine.connect() as first, server.engine.connect() as second:
        for lock in (1, 2):  # the second time the rows that are locked are there already
            server.outbox.put(first, event(f"a{lock}", key="alpha"), lock_key=True)
            server.outbox.put(second, event(f"b{lock}", key="beta"), lock_key=True)
            second.commit()
            first.commit()
    assert len(server.rows()) == 4


def test_a_driver_s_own_connection_takes_no_key_lock(change_databases: GetDatabase) -> None:
    database = change_databases("sqlite")
    connection = database.engine.raw_connection()
    with pytest.raises(TypeError, match=r"put: lock_key needs a SQLAlchemy session or connection"):
        database.outbox.put(connection.dbapi_connection, event("a", key="k"), lock_key=True)
    connection.close()


def test_sqlite_takes_the_option_because_its_writers_wait_anyway(change_databases: GetDatabase) -> None:
    database = change_databases("sqlite")
    with database.engine.begin() as db:
        database.outbox.put(db, event("a", key="k"), lock_key=True)
    assert states(database) == {"a": 0}
