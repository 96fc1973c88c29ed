"""Notifications of puts on PostgreSQL: one for each transaction that has news."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from uuid import uuid4

import asyncpg
import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from pillarbox import Event, Outbox
from tests.servers import server_url

METADATA = sa.MetaData()
TABLE = f"notify_{uuid4().hex[:8]}"
OUTBOX = Outbox(METADATA, table=TABLE)


@pytest.fixture(scope="module")
def engine() -> Iterator[sa.Engine]:
    url = sa.make_url(server_url("postgres")).set(drivername="postgresql+psycopg")
    engine = sa.create_engine(url)
    METADATA.create_all(engine)
    yield engine
    METADATA.drop_all(engine)
    engine.dispose()


class Ear:
    """Hears what a relay would hear."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._heard: list[str] = []

    async def listen(self) -> None:
        await self._connection.add_listener(f"pillarbox.{TABLE}", lambda *args: self._heard.append(str(args[3])))

    async def heard(self) -> int:
        """How many notifications came since the last time; one of our own closes the count."""
        mark = uuid4().hex
        await self._connection.execute("SELECT pg_notify($1, $2)", f"pillarbox.{TABLE}", mark)
        # The server hands its notifications over before it answers the next statement.
        await self._connection.execute("SELECT 1")
        count = self._heard.index(mark)
        self._heard.clear()
        return count


@pytest.fixture
async def ear(engine: sa.Engine) -> AsyncIterator[Ear]:
    connection = await asyncpg.connect(server_url("postgres"))
    ear = Ear(connection)
    await ear.listen()
    yield ear
    await connection.close()


def make_events(count: int) -> list[Event]:
    return [Event("event", {"number": number}) for number in range(count)]


async def test_a_transaction_notifies_once_however_much_it_puts(engine: sa.Engine, ear: Ear) -> None:
    with Session(engine) as session:
        OUTBOX.put(session, *make_events(1000))
        session.flush()
        OUTBOX.put(session, *make_events(2))
        session.flush()
        assert await ear.heard() == 0
        session.commit()
        assert await ear.heard() == 1
        OUTBOX.put(session, *make_events(1))
        session.commit()
    assert await ear.heard() == 1


async def test_a_rollback_notifies_nobody(engine: sa.Engine, ear: Ear) -> None:
    with engine.connect() as db:
        OUTBOX.put(db, *make_events(3))
        db.rollback()
    assert await ear.heard() == 0


@pytest.mark.parametrize("count", [1, 2])
async def test_events_that_were_there_are_no_news(engine: sa.Engine, ear: Ear, count: int) -> None:
    events = make_events(count)
    for expected in (1, 0):
        with engine.begin() as db:
            OUTBOX.put(db, *events)
        assert await ear.heard() == expected


async def test_an_outbox_without_notify_is_silent(engine: sa.Engine, ear: Ear) -> None:
    silent = Outbox(sa.MetaData(), table=TABLE, notify=False)
    event, *others = make_events(3)
    with engine.begin() as db:
        assert silent.put(db, event).new == (event,)
        assert silent.put(db, event, *others).existing == (event,)
        assert silent.cancel(db, event.id) == 1
    assert await ear.heard() == 0


async def test_raw_connections_notify_too(ear: Ear, engine: sa.Engine) -> None:
    connection = await asyncpg.connect(server_url("postgres"))
    async with connection.transaction():
        await OUTBOX.put_async(connection, *make_events(5))
    await connection.close()
    assert await ear.heard() == 1


async def test_a_changed_time_wakes_relays_that_sleep_until_the_old_one(engine: sa.Engine, ear: Ear) -> None:
    event = Event("later", {}, due_at=datetime(2031, 1, 1, tzinfo=UTC))
    with engine.begin() as db:
        OUTBOX.put(db, event)
    assert await ear.heard() == 1
    with engine.begin() as db:
        assert OUTBOX.reschedule(db, event.id, due_at=datetime(2021, 1, 1, tzinfo=UTC)) == 1
    assert await ear.heard() == 1
    with engine.begin() as db:
        assert OUTBOX.cancel(db, uuid4()) == 0
    assert await ear.heard() == 0
