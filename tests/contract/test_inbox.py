"""Taking messages: once by id and group, with the fate of the caller's transaction, whoever else takes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from pillarbox.codec import JSON
from pillarbox.errors import InvalidEvent, TransactionError
from pillarbox.event import EVENT_FIELDS, load_event
from pillarbox.inbox import Message
from tests.contract.inboxes import INBOXES, KINDS, OWN, Consumer, InboxDatabase, make_inboxes, message
from tests.contract.layouts import as_instant

Open = Callable[..., Consumer]


@pytest.fixture(scope="module")
def inboxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], InboxDatabase]]:
    with make_inboxes(tmp_path_factory) as get:
        yield get


@pytest.fixture(params=INBOXES)
def database(request: pytest.FixtureRequest, inboxes: Callable[[str], InboxDatabase]) -> InboxDatabase:
    return inboxes(request.param)


@pytest.fixture
async def consumers(database: InboxDatabase) -> AsyncIterator[Open]:
    made: list[Consumer] = []

    def make(kind: str = "connection", **options: Any) -> Consumer:
        made.append(Consumer(database, kind, **options))
        return made[-1]

    yield make
    for consumer in made:
        await consumer.close()


each_kind = pytest.mark.parametrize("kind", KINDS)
each_face = pytest.mark.parametrize("kind", ["connection", "async-connection"])
own_tables = pytest.mark.parametrize("database", OWN, indirect=True)
postgres = pytest.mark.parametrize("database", ["postgres", "omnibox", "omnibox-partitioned"], indirect=True)


# -- once --------------------------------------------------------------------------------------------------------------


@each_kind
async def test_first_take_is_new_and_the_second_is_a_repeat(
    database: InboxDatabase, consumers: Open, kind: str
) -> None:
    consumer = consumers(kind)
    assert await consumer.take_one(message()) is True
    assert await consumer.take_one(message()) is False
    await consumer.commit()
    assert await consumer.take_one(message()) is False
    await consumer.commit()
    assert database.taken() == [("billing", "m-1")]


async def test_each_group_takes_a_message_once(database: InboxDatabase, consumers: Open) -> None:
    consumer = consumers()
    assert await consumer.take(message(group="billing"), message(group="shipping")) == [True, True]
    assert await consumer.take(message(group="shipping"), message(group="billing")) == [False, False]
    await consumer.commit()
    assert database.taken() == [("billing", "m-1"), ("shipping", "m-1")]


async def test_ids_that_look_alike_are_different_messages(database: InboxDatabase, consumers: Open) -> None:
    # omni-box strips ids, and so does who shares its table.
    blank = [] if database.name.startswith("omnibox") else ["a "]
    ids = ["a", "A", *blank, "ä", "a\u0308", "ß", "ss", "1", "01", "é" * 255, "'); --", '"[]\\']
    consumer = consumers()
    assert await consumer.take(*(message(each, payload={"n": 1}) for each in ids)) == [True] * len(ids)
    await consumer.commit()
    assert {found for _, found in database.taken()} == set(ids)


async def test_of_equal_messages_in_a_batch_the_first_is_new(database: InboxDatabase, consumers: Open) -> None:
    consumer = consumers()
    await consumer.take(message("c"))
    batch = [message(each) for each in ("b", "a", "b", "c", "a", "d")]
    assert await consumer.take(*batch) == [True, True, False, False, False, True]
    await consumer.commit()
    assert [found for _, found in database.taken()] == ["a", "b", "c", "d"]


async def test_empty_batch_takes_nothing(database: InboxDatabase, consumers: Open) -> None:
    consumer = consumers()
    assert await consumer.take() == []
    assert database.taken() == []


async def test_batch_goes_with_a_bounded_number_of_statements(database: InboxDatabase, consumers: Open) -> None:
    consumer = consumers()
    sent: list[str] = []
    sa.event.listen(consumer.engine, "before_cursor_execute", lambda *args: sent.append(args[2]))
    assert await consumer.take(*(message(f"m-{n}") for n in range(500))) == [True] * 500
    await consumer.rollback()
    # MySQL and MariaDB are asked which rows are new, a partitioned table is locked first.
    expected = 1 if database.name in ("postgres", "sqlite", "omnibox") else 2
    assert len([sql for sql in sent if sql != "BEGIN"]) == expected


# -- with the caller's transaction -----------------------------------------------------------------------------------


@each_kind
async def test_rollback_forgets_the_message(database: InboxDatabase, consumers: Open, kind: str) -> None:
    consumer = consumers(kind)
    assert await consumer.take_one(message())
    await consumer.rollback()
    assert database.taken() == []
    assert await consumer.take_one(message())
    await consumer.commit()
    assert database.taken() == [("billing", "m-1")]


async def test_take_commits_nothing_by_itself(database: InboxDatabase, consumers: Open) -> None:
    consumer = consumers()
    await consumer.take(message())
    assert database.taken() == []
    await consumer.rollback()


@each_kind
async def test_rolled_back_savepoint_forgets_the_message(database: InboxDatabase, consumers: Open, kind: str) -> None:
    consumer = consumers(kind)
    await consumer.take(message("before"))
    assert await consumer.take_in_savepoint([message("m")], commits=False) == [True]
    assert await consumer.take_in_savepoint([message("m"), message("before")], commits=True) == [True, False]
    await consumer.commit()
    assert [found for _, found in database.taken()] == ["before", "m"]


@each_kind
async def test_repeat_does_not_abort_the_transaction(database: InboxDatabase, consumers: Open, kind: str) -> None:
    first, second = consumers(), consumers(kind)
    await first.take(message())
    await first.commit()
    assert await second.take(message(), message("m-2")) == [False, True]
    await second.execute("SELECT 1")
    await second.commit()
    assert [found for _, found in database.taken()] == ["m-1", "m-2"]


@pytest.mark.parametrize("kind", ["session", "connection", "async-session", "async-connection"])
async def test_target_that_commits_by_itself_is_refused(database: InboxDatabase, consumers: Open, kind: str) -> None:
    consumer = consumers(kind, isolation_level="AUTOCOMMIT")
    with pytest.raises(TransactionError, match="AUTOCOMMIT"):
        await consumer.take(message())
    assert database.taken() == []


@postgres
@each_face
async def test_failed_transaction_is_refused_in_our_words(database: InboxDatabase, consumers: Open, kind: str) -> None:
    consumer = consumers(kind)
    with pytest.raises(sa.exc.DBAPIError):
        await consumer.execute("SELECT no_such_column")
    with pytest.raises(TransactionError, match="roll it back first"):
        await consumer.take(message())
    await consumer.rollback()


# -- at the same moment ----------------------------------------------------------------------------------------------


@each_face
async def test_second_waits_for_the_first_and_is_a_repeat_after_its_commit(
    database: InboxDatabase, consumers: Open, kind: str
) -> None:
    first, second = consumers(kind), consumers(kind)
    assert await first.take_one(message())
    taking = asyncio.create_task(second.take_one(message()))
    await database.wait_until_blocked()
    await first.commit()
    assert await taking is False
    await second.execute("SELECT 1")
    await second.commit()
    assert database.taken() == [("billing", "m-1")]


@each_face
async def test_second_waits_for_the_first_and_is_new_after_its_rollback(
    database: InboxDatabase, consumers: Open, kind: str
) -> None:
    first, second = consumers(kind), consumers(kind)
    assert await first.take_one(message())
    taking = asyncio.create_task(second.take_one(message()))
    await database.wait_until_blocked()
    await first.rollback()
    assert await taking is True
    await second.commit()
    assert database.taken() == [("billing", "m-1")]


@pytest.mark.parametrize("database", [name for name in INBOXES if name != "sqlite"], indirect=True)
@each_face
async def test_different_messages_do_not_wait_for_each_other(
    database: InboxDatabase, consumers: Open, kind: str
) -> None:
    first, second = consumers(kind), consumers(kind)
    assert await first.take(message("b"), message("d")) == [True, True]
    async with asyncio.timeout(10):
        assert await second.take(message("a"), message("c"), message("e")) == [True, True, True]
    await second.commit()
    await first.commit()
    assert len(database.taken()) == 5


@pytest.mark.parametrize("level", ["READ COMMITTED", None], ids=["read-committed", "default"])
async def test_overlapping_batches_do_not_deadlock(database: InboxDatabase, consumers: Open, level: str | None) -> None:
    options = {} if level is None or database.backend == "sqlite" else {"isolation_level": level}
    takers = [consumers("async-connection", **options) for _ in range(2 if database.backend == "sqlite" else 4)]

    async def work(number: int, taker: Consumer) -> list[str]:
        mine: list[str] = []
        for turn in range(10):
            names = [f"{turn:02}-{n:02}" for n in range(number * 5, number * 5 + 25)]
            # Everybody has the messages in another order.
            names = names[::-1] if number % 2 else names
            found = await taker.take(*(message(name) for name in names))
            mine += [name for name, is_new in zip(names, found, strict=True) if is_new]
            await taker.commit()
        return mine

    async with asyncio.timeout(60):
        found = await asyncio.gather(*(work(number, taker) for number, taker in enumerate(takers)))
    everything = sorted(name for each in found for name in each)
    assert len(everything) == len(set(everything)), "a message was new for two"
    assert everything == [each for _, each in database.taken()]


# -- what is written -------------------------------------------------------------------------------------------------


@own_tables
@each_face
async def test_row_says_source_type_and_when(database: InboxDatabase, consumers: Open, kind: str) -> None:
    consumer = consumers(kind)
    await consumer.take(message())
    await consumer.commit()
    [row] = database.run("SELECT * FROM {inbox}")
    assert (row["source"], row["type"]) == ("orders", "order.placed")
    # The consumer's session is in India.
    assert abs(as_instant(row["taken_at"]) - datetime.now(UTC)) < timedelta(minutes=1)


# -- wrong use -------------------------------------------------------------------------------------------------------


async def test_what_is_no_message_is_refused(database: InboxDatabase) -> None:
    with database.engine.connect() as db:
        with pytest.raises(TypeError, match="expected Message objects, got 'm-1'"):
            database.inbox.take(db, "m-1")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="for one there is take"):
            database.inbox.take_many(db, message())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"take: expected a SQLAlchemy Session or Connection; got builtins\.str"):
        database.inbox.take("session", message())
    with pytest.raises(TypeError, match="take_async: expected a SQLAlchemy AsyncSession"):
        await database.inbox.take_async(database.engine, message())


@pytest.mark.parametrize("type", ["t" * 256, "a\0b", "a\ud800"])
async def test_type_that_the_table_cannot_hold_is_refused(database: InboxDatabase, type: str) -> None:
    values: dict[str, Any] = dict.fromkeys(EVENT_FIELDS)
    values |= {"id": uuid4(), "type": type, "topic": "t", "payload": b"{}", "content_type": JSON, "headers": {}}
    unchecked = Message("m-1", "billing", event=load_event(*values.values()))
    with database.engine.connect() as db, pytest.raises(InvalidEvent, match="Message 'm-1', type: expected at most"):
        database.inbox.take(db, unchecked)


@own_tables
async def test_row_that_the_database_refuses_is_no_repeat(database: InboxDatabase, consumers: Open) -> None:
    if database.backend == "sqlite":
        database.run(
            "CREATE TRIGGER refuse_{inbox} BEFORE INSERT ON {inbox} WHEN NEW.source = 'bad' "
            "BEGIN SELECT RAISE(ABORT, 'refused'); END"
        )
    else:
        database.run("ALTER TABLE {inbox} ADD CONSTRAINT {inbox}_good CHECK (source <> 'bad')")
    consumer = consumers()
    try:
        with pytest.raises((IntegrityError, sa.exc.OperationalError)):
            await consumer.take(message(source="bad"))
    finally:
        await consumer.rollback()
        if database.backend == "sqlite":
            database.run("DROP TRIGGER refuse_{inbox}")
        else:
            database.run("ALTER TABLE {inbox} DROP CONSTRAINT {inbox}_good")
