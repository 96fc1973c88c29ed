"""Events in transactions that are prepared first and committed later, on every server that has such."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from pillarbox import Event, Outbox
from tests.private import private_server
from tests.servers import server_url


@pytest.fixture(scope="module")
def postgres() -> Any:
    """A server of its own: by default PostgreSQL prepares no transactions."""
    server = private_server("postgres")
    engine = sa.create_engine(sa.make_url(server.url).set(drivername="postgresql+psycopg"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
        db.exec_driver_sql("ALTER SYSTEM SET max_prepared_transactions = 10")
    engine.dispose()
    server.kill()
    server.start()
    return sa.make_url(server.url).set(drivername="postgresql+psycopg")


@pytest.fixture(params=["postgres", "mysql", "mariadb"])
def engine(request: pytest.FixtureRequest) -> Iterator[sa.Engine]:
    if request.param == "postgres":
        url = request.getfixturevalue("postgres")
    else:
        url = sa.make_url(server_url(request.param)).set(drivername="mysql+pymysql")
    made = sa.create_engine(url)
    yield made
    made.dispose()


@pytest.fixture
def outbox(engine: sa.Engine) -> Iterator[Outbox]:
    made = Outbox(sa.MetaData(), table=f"phases_{uuid4().hex[:8]}")
    made.table.metadata.create_all(engine)
    yield made
    made.table.metadata.drop_all(engine)


def types(engine: sa.Engine, outbox: Outbox) -> list[str]:
    with engine.connect() as db:
        return list(db.scalars(sa.select(outbox.table.c.type).order_by(outbox.table.c.seq)))


def test_session_with_two_phases_takes_events(engine: sa.Engine, outbox: Outbox) -> None:
    for events in ([Event("one", {})], [Event("two", {}), Event("three", {}, key="k")]):
        with Session(engine, twophase=True) as session:
            outbox.put(session, *events)
            session.prepare()
            session.commit()
    assert types(engine, outbox) == ["one", "two", "three"]


def test_connection_with_two_phases_takes_events_in_a_savepoint(engine: sa.Engine, outbox: Outbox) -> None:
    with engine.connect() as db:
        transaction = db.begin_twophase()
        with db.begin_nested():
            outbox.put(db, Event("one", {}))
        transaction.prepare()
        transaction.commit()
    assert types(engine, outbox) == ["one"]


def test_prepared_transaction_that_is_rolled_back_leaves_no_event(engine: sa.Engine, outbox: Outbox) -> None:
    with engine.connect() as db:
        transaction = db.begin_twophase()
        outbox.put(db, Event("one", {}))
        transaction.prepare()
        transaction.rollback()
    assert types(engine, outbox) == []


def test_event_is_cancelled_and_rescheduled_in_two_phases(engine: sa.Engine, outbox: Outbox) -> None:
    first, second = Event("one", {}), Event("two", {})
    with engine.begin() as db:
        outbox.put(db, first, second)
    with Session(engine, twophase=True) as session:
        assert outbox.cancel(session, first.id) == 1
        assert outbox.reschedule(session, second.id, due_at=datetime(2100, 1, 1, tzinfo=UTC)) == 1
        session.prepare()
        session.commit()
    assert types(engine, outbox) == ["two"]


def test_same_outbox_notifies_where_it_can(outbox: Outbox, engine: sa.Engine) -> None:
    if engine.dialect.name != "postgresql":
        pytest.skip("only PostgreSQL notifies")
    with engine.connect() as listening:
        listening.exec_driver_sql(f'LISTEN "pillarbox.{outbox.table.name}"')
        listening.commit()
        with Session(engine, twophase=True) as session:
            outbox.put(session, Event("one", {}))
            session.commit()
        with Session(engine) as session:
            outbox.put(session, Event("two", {}))
            session.commit()
        own: Any = listening.connection.dbapi_connection
        assert len(list(own.notifies(timeout=5, stop_after=1))) == 1
