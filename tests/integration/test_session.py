"""Puts into SQLAlchemy sessions: whatever a session does with its objects, it does with the events.

On SQLite and PostgreSQL, beside rows of an application's own tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    object_session,
    relationship,
    sessionmaker,
)

from pillarbox import Event, Outbox, ReceiptPending, TransactionError
from tests.servers import server_url


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = f"orders_{uuid4().hex[:8]}"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    lines: Mapped[list[Line]] = relationship(cascade="all, delete-orphan")


class Line(Base):
    __tablename__ = f"lines_{uuid4().hex[:8]}"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(sa.ForeignKey(f"{Order.__tablename__}.id"))


OUTBOX = Outbox(Base.metadata, table=f"session_{uuid4().hex[:8]}")
OTHER = Outbox(Base.metadata, table=f"other_{uuid4().hex[:8]}")


def make_engine(url: sa.URL) -> sa.Engine:
    engine = sa.create_engine(url)
    if url.get_backend_name() == "sqlite":
        # As SQLAlchemy advises: else the driver begins no transaction before a savepoint.
        sa.event.listen(engine, "connect", lambda db, _: setattr(db, "isolation_level", None))
        sa.event.listen(engine, "begin", lambda db: db.exec_driver_sql("BEGIN"))
    return engine


class Shop:
    """A database with orders and two outboxes; notes the statements on them."""

    def __init__(self, url: sa.URL) -> None:
        self.url = url
        self.engine = make_engine(url)
        Base.metadata.create_all(self.engine)
        self.sql: list[str] = []
        sa.event.listen(self.engine, "before_cursor_execute", self._note)

    def _note(self, connection: Any, cursor: Any, sql: str, *args: Any) -> None:
        self.sql.append(sql)

    def events(self, outbox: Outbox = OUTBOX) -> list[str]:
        with self.engine.connect() as db:
            return list(db.execute(sa.select(outbox.table.c.type).order_by(outbox.table.c.seq)).scalars())

    def orders(self) -> list[str]:
        with self.engine.connect() as db:
            return list(db.execute(sa.select(Order.name).order_by(Order.id)).scalars())

    @property
    def writes(self) -> list[str]:
        """The kinds of writing statements so far, and the tables they wrote to."""
        names = {Order.__tablename__: "orders", OUTBOX.table.name: "outbox", OTHER.table.name: "other"}
        found: list[str] = []
        for sql in self.sql:
            for verb in ("INSERT INTO", "UPDATE", "DELETE FROM"):
                found += (f"{verb} {name}" for table, name in names.items() if f"{verb} {table} " in sql)
        return found


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def shop_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[sa.URL]:
    if request.param == "sqlite":
        yield sa.make_url(f"sqlite:///{tmp_path_factory.mktemp('session') / 'shop.db'}")
        return
    url = sa.make_url(server_url("postgres")).set(drivername="postgresql+psycopg")
    yield url
    engine = sa.create_engine(url)
    Base.metadata.drop_all(engine)
    engine.dispose()


@pytest.fixture
def shop(shop_url: sa.URL) -> Iterator[Shop]:
    shop = Shop(shop_url)
    with shop.engine.begin() as db:
        for table in reversed(Base.metadata.sorted_tables):
            db.execute(sa.delete(table))
    shop.sql.clear()
    yield shop
    assert shop.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    shop.engine.dispose()


@pytest.fixture
def session(shop: Shop) -> Iterator[Session]:
    with Session(shop.engine) as session:
        yield session


def event(name: str, **fields: Any) -> Event:
    return Event(name, {"name": name}, **fields)


# -- when events go out --------------------------------------------------------------------------------------


def test_a_put_alone_in_a_session_is_committed(shop: Shop, session: Session) -> None:
    OUTBOX.put(session, event("a"))
    session.commit()
    assert shop.events() == ["a"]


def test_an_event_goes_out_after_the_rows_it_tells_of(shop: Shop, session: Session) -> None:
    session.add_all([Order(id=1, name="one"), Order(id=2, name="two")])
    session.commit()
    shop.sql.clear()
    one, two = session.get_one(Order, 1), session.get_one(Order, 2)
    OUTBOX.put(session, event("renamed"))
    one.name = "uno"
    session.add(Order(id=3, name="three"))
    with session.no_autoflush:
        session.delete(two)
    session.commit()
    assert shop.writes == ["UPDATE orders", "INSERT INTO orders", "DELETE FROM orders", "INSERT INTO outbox"]
    assert shop.events() == ["renamed"]


def test_several_puts_before_one_flush_are_one_insert(shop: Shop, session: Session) -> None:
    first = OUTBOX.put(session, event("a"), event("b"))
    session.add(Order(name="one"))
    empty = OUTBOX.put(session)
    second = OUTBOX.put(session, event("c"))
    session.commit()
    assert shop.writes == ["INSERT INTO orders", "INSERT INTO outbox"]
    assert shop.events() == ["a", "b", "c"]
    assert (first.new, empty.new, second.new) == (first.events, (), second.events)


def test_each_of_several_puts_has_its_own_receipt(shop: Shop, session: Session) -> None:
    there, again = event("there"), event("again", dedup_key="k")
    OUTBOX.put(session, there, again)
    session.commit()
    new = event("new")
    first = OUTBOX.put(session, new, there)
    second = OUTBOX.put(session, there, event("other", dedup_key="k"), event("last"))
    third = OUTBOX.put(session, new)
    session.commit()
    assert ([e.type for e in first.new], [e.type for e in first.existing]) == (["new"], ["there"])
    assert ([e.type for e in second.new], [e.type for e in second.existing]) == (["last"], ["there", "other"])
    assert ([e.type for e in third.new], [e.type for e in third.existing]) == ([], ["new"])
    assert shop.events() == ["there", "again", "new", "last"]


def test_each_flush_sends_what_was_put_since_the_last(shop: Shop, session: Session) -> None:
    OUTBOX.put(session, event("a"))
    session.flush()
    OUTBOX.put(session, event("b"))
    session.flush()
    session.flush()
    session.commit()
    OUTBOX.put(session, event("c"))
    session.commit()
    assert shop.events() == ["a", "b", "c"]
    assert shop.writes == ["INSERT INTO outbox"] * 3


def test_a_query_flushes_events_unless_told_not_to(shop: Shop, session: Session) -> None:
    receipt = OUTBOX.put(session, event("a"))
    with session.no_autoflush:
        session.scalars(sa.select(Order)).all()
    assert not receipt.is_known
    session.scalars(sa.select(Order)).all()
    assert shop.writes == ["INSERT INTO outbox"]
    session.rollback()
    assert shop.events() == []


def test_two_outboxes_in_one_session_get_one_insert_each(shop: Shop, session: Session) -> None:
    first, other = event("a"), event("b")
    receipt = OUTBOX.put(session, first)
    other_receipt = OTHER.put(session, other)
    OUTBOX.put(session, event("c"))
    session.commit()
    assert shop.writes == ["INSERT INTO outbox", "INSERT INTO other"]
    assert (shop.events(), shop.events(OTHER)) == (["a", "c"], ["b"])
    assert (receipt.new, other_receipt.new) == ((first,), (other,))


def test_begin_blocks_commit_events(shop: Shop) -> None:
    with Session(shop.engine) as session, session.begin():
        OUTBOX.put(session, event("a"))
    with sessionmaker(shop.engine).begin() as session:
        OUTBOX.put(session, event("b"))
        session.add(Order(name="one"))
    assert shop.events() == ["a", "b"]


def test_a_session_in_the_caller_s_connection_leaves_the_commit_to_it(shop: Shop) -> None:
    with shop.engine.connect() as connection:
        outer = connection.begin()
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            OUTBOX.put(session, event("a"))
            session.commit()
        outer.rollback()
    assert shop.events() == []


def test_bulk_operations_and_merge_go_along_with_puts(shop: Shop, session: Session) -> None:
    OUTBOX.put(session, event("a"))
    session.bulk_save_objects([Order(id=1, name="one")])
    session.execute(sa.insert(Order), [{"id": 2, "name": "two"}, {"id": 3, "name": "three"}])
    OUTBOX.put(session, event("b"))
    session.merge(Order(id=1, name="uno"))
    session.commit()
    assert (shop.orders(), shop.events()) == (["uno", "two", "three"], ["a", "b"])


# -- when they do not ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [Session.rollback, Session.close, Session.expunge_all, Session.reset])
def test_what_a_session_forgets_is_not_sent(shop: Shop, session: Session, end: Callable[[Session], None]) -> None:
    receipt = OUTBOX.put(session, event("forgotten"))
    end(session)
    session.add(Order(name="one"))
    session.commit()
    assert shop.events() == []
    OUTBOX.put(session, event("forgotten too"))
    end(session)
    OUTBOX.put(session, event("kept"))
    session.commit()
    assert shop.events() == ["kept"]
    with pytest.raises(ReceiptPending):
        receipt.new  # noqa: B018


def test_expiring_all_objects_forgets_no_event(shop: Shop, session: Session) -> None:
    OUTBOX.put(session, event("a"))
    session.expire_all()
    session.commit()
    assert shop.events() == ["a"]


def test_a_rollback_after_the_flush_leaves_no_event(shop: Shop, session: Session) -> None:
    session.add(Order(name="one"))
    OUTBOX.put(session, event("a"))
    session.flush()
    session.rollback()
    session.add(Order(name="two"))
    session.commit()
    assert (shop.orders(), shop.events()) == (["two"], [])


def test_a_failed_flush_leaves_no_event_and_a_usable_session(shop: Shop, session: Session) -> None:
    session.add(Order(name="one"))
    session.commit()
    session.add(Order(name="one"))
    ghost = OUTBOX.put(session, event("ghost"))
    with pytest.raises(sa.exc.IntegrityError):
        session.commit()
    with pytest.raises(TransactionError, match=r"call session\.rollback\(\) before putting events"):
        OUTBOX.put(session, event("too early"))
    session.rollback()
    assert not ghost.is_known
    session.add(Order(name="two"))
    session.commit()
    OUTBOX.put(session, event("a"))
    session.commit()
    assert (shop.orders(), shop.events()) == (["one", "two"], ["a"])


def test_a_rolled_back_savepoint_takes_its_events_along(shop: Shop, session: Session) -> None:
    before = OUTBOX.put(session, event("before"))
    savepoint = session.begin_nested()
    assert before.is_known  # a savepoint begins with a flush
    OUTBOX.put(session, event("unflushed"))
    savepoint.rollback()
    with session.begin_nested() as savepoint:
        session.add(Order(name="lost"))
        OUTBOX.put(session, event("flushed"))
        session.flush()
        savepoint.rollback()
    OUTBOX.put(session, event("after"))
    session.commit()
    assert (shop.orders(), shop.events()) == ([], ["before", "after"])


def test_a_failed_savepoint_leaves_the_rest(shop: Shop, session: Session) -> None:
    session.add(Order(name="one"))
    OUTBOX.put(session, event("one"))
    with suppress(sa.exc.IntegrityError), session.begin_nested():
        session.add(Order(name="one"))
        OUTBOX.put(session, event("again"))
    with session.begin_nested():
        session.add(Order(name="two"))
        OUTBOX.put(session, event("two"))
    session.commit()
    assert (shop.orders(), shop.events()) == (["one", "two"], ["one", "two"])


def test_events_of_a_committed_savepoint_go_with_the_outer_rollback(shop: Shop, session: Session) -> None:
    with session.begin_nested():
        OUTBOX.put(session, event("a"))
    session.rollback()
    assert shop.events() == []


# -- other work in the flush ---------------------------------------------------------------------------------


def test_an_orphan_that_the_flush_drops_is_no_work_but_the_event_goes(shop: Shop, session: Session) -> None:
    orphan = Line()
    order = Order(name="never added", lines=[orphan])
    session.add(orphan)
    order.lines.remove(orphan)
    OUTBOX.put(session, event("a"))
    session.commit()
    assert (shop.orders(), shop.events()) == ([], ["a"])


def test_a_listener_that_takes_all_other_work_away_does_not_take_the_event(shop: Shop, session: Session) -> None:
    @sa.event.listens_for(session, "before_flush")
    def drop(session: Session, *args: Any) -> None:
        for each in list(session.new):
            if isinstance(each, Order):
                session.expunge(each)

    session.add(Order(name="dropped"))
    OUTBOX.put(session, event("a"))
    session.commit()
    assert (shop.orders(), shop.events()) == ([], ["a"])


def test_puts_in_before_flush_go_with_that_flush(shop: Shop, session: Session) -> None:
    @sa.event.listens_for(session, "before_flush")
    def tell(session: Session, *args: Any) -> None:
        for each in session.new:
            if isinstance(each, Order):
                OUTBOX.put(session, event(f"told {each.name}"))

    session.add(Order(name="one"))
    session.flush()
    assert shop.writes == ["INSERT INTO orders", "INSERT INTO outbox"]
    session.add(Order(name="two"))
    OUTBOX.put(session, event("put"))
    session.commit()
    assert shop.events() == ["told one", "put", "told two"]


def test_puts_in_after_flush_go_with_the_next_flush_of_the_commit(shop: Shop, session: Session) -> None:
    @sa.event.listens_for(session, "after_flush")
    def tell(session: Session, *args: Any) -> None:
        if any(isinstance(each, Order) for each in session.new):
            OUTBOX.put(session, event("told"))

    session.add(Order(name="one"))
    OUTBOX.put(session, event("put"))
    session.commit()
    assert shop.events() == ["put", "told"]


def test_puts_in_mapper_events_go_with_that_flush(shop: Shop, session: Session) -> None:
    def tell(mapper: Any, connection: Any, order: Order) -> None:
        found = object_session(order)
        assert found is not None
        OUTBOX.put(found, event(f"inserted {order.name}"))

    sa.event.listen(Order, "after_insert", tell)
    try:
        session.add_all([Order(name="one"), Order(name="two")])
        session.commit()
        assert shop.events() == ["inserted one", "inserted two"]
        assert shop.writes.count("INSERT INTO outbox") == 1
        OUTBOX.put(session, event("put"))
        session.add(Order(name="three"))
        session.flush()
        session.rollback()
        session.add_all([Order(name="four"), Line()])  # the line, which comes second, has no order
        with pytest.raises(sa.exc.IntegrityError):
            session.commit()
        session.rollback()
        session.add(Order(name="five"))
        session.commit()
        assert shop.events() == ["inserted one", "inserted two", "inserted five"]
    finally:
        sa.event.remove(Order, "after_insert", tell)


def test_puts_in_before_commit_go_with_that_commit(shop: Shop, session: Session) -> None:
    @sa.event.listens_for(session, "before_commit", once=True)
    def tell(session: Session) -> None:
        OUTBOX.put(session, event("committing"))

    session.add(Order(name="one"))
    session.commit()
    assert shop.events() == ["committing"]


# -- what the application sees -------------------------------------------------------------------------------


def test_nothing_stays_behind_in_session_or_metadata(shop: Shop, session: Session) -> None:
    tables = set(Base.metadata.tables)
    mappers = set(Base.registry.mappers)
    OUTBOX.put(session, event("a"))
    assert dict(session.info) == {}
    session.flush()
    assert list(session.new) == []
    assert list(session) == []
    session.commit()
    assert dict(session.info) == {}
    assert set(Base.metadata.tables) == tables
    assert set(Base.registry.mappers) == mappers


def test_sessions_with_binds_send_to_the_outbox_s_database(shop: Shop, tmp_path: Path) -> None:
    elsewhere = sa.create_engine(f"sqlite:///{tmp_path / 'elsewhere.db'}")
    Base.metadata.create_all(elsewhere)
    with Session(binds={Order: elsewhere, OUTBOX.table: shop.engine}) as session:
        session.add(Order(name="one"))
        OUTBOX.put(session, event("a"))
        session.commit()
        assert session.scalars(sa.select(Order.name)).all() == ["one"]
    elsewhere.dispose()
    assert (shop.orders(), shop.events()) == ([], ["a"])


def test_a_session_without_a_database_for_the_outbox_says_what_to_do(shop: Shop) -> None:
    with (
        Session(binds={Order: shop.engine}) as session,
        pytest.raises(TransactionError, match=r"binds=\{outbox\.table: engine\}"),
    ):
        OUTBOX.put(session, event("a"))


def test_a_session_that_routes_writes_sends_events_where_writes_go(shop: Shop, tmp_path: Path) -> None:
    replica = sa.create_engine(f"sqlite:///{tmp_path / 'replica.db'}")
    shop_engine = shop.engine

    class Routing(Session):
        def get_bind(self, mapper: Any = None, clause: Any = None, **options: Any) -> Any:
            is_write = isinstance(clause, sa.Insert | sa.Update | sa.Delete)
            return shop_engine if self._flushing or is_write else replica

    with Routing() as session:
        put = OUTBOX.put(session, event("a"), event("b"))
        session.flush()
        assert OUTBOX.cancel(session, put.new[0].id) == 1
        session.commit()
    replica.dispose()
    assert shop.events() == ["b"]


def test_a_session_that_commits_every_statement_is_refused_at_once(shop: Shop) -> None:
    for engine in (
        shop.engine.execution_options(isolation_level="AUTOCOMMIT"),
        sa.create_engine(shop.url, isolation_level="AUTOCOMMIT"),
    ):
        with Session(engine) as session:
            session.add(Order(name="one"))
            with pytest.raises(TransactionError, match="commits every statement by itself"):
                OUTBOX.put(session, event("a"))
        engine.dispose()
    with Session(shop.engine) as session:
        session.connection(execution_options={"isolation_level": "AUTOCOMMIT"})
        OUTBOX.put(session, event("b"))
        with pytest.raises(TransactionError, match="commits every statement by itself"):
            session.flush()
    assert shop.events() == []


def test_a_session_that_must_be_begun_says_so(shop: Shop) -> None:
    with Session(shop.engine, autobegin=False) as session:
        with pytest.raises(TransactionError, match=r"call session\.begin\(\)"):
            OUTBOX.put(session, event("a"))
        with session.begin():
            OUTBOX.put(session, event("b"))
    assert shop.events() == ["b"]


@pytest.mark.parametrize("shop_url", ["postgres"], indirect=True)
def test_schema_translation_is_followed(shop: Shop) -> None:
    tenant = f"tenant_{uuid4().hex[:8]}"
    engine = shop.engine.execution_options(schema_translate_map={None: tenant})
    with shop.engine.begin() as db:
        db.execute(sa.schema.CreateSchema(tenant))
    try:
        Base.metadata.create_all(engine)
        with Session(engine) as session:
            kept, gone = event("kept"), event("gone")
            OUTBOX.put(session, kept, gone)
            session.flush()
            assert OUTBOX.cancel(session, gone.id) == 1
            session.commit()
        with shop.engine.connect() as db:
            found = db.exec_driver_sql(f"SELECT type FROM {tenant}.{OUTBOX.table.name}").scalars().all()
        assert (found, shop.events()) == (["kept"], [])
    finally:
        with shop.engine.begin() as db:
            db.execute(sa.schema.DropSchema(tenant, cascade=True))


# -- asynchronous sessions -----------------------------------------------------------------------------------


async def test_an_async_session_takes_events_by_a_plain_call(shop: Shop) -> None:
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
    engine = create_async_engine(shop.url.set(drivername=drivers[shop.url.get_backend_name()]))
    make = async_sessionmaker(engine)
    async with make.begin() as session:
        session.add(Order(name="one"))
        OUTBOX.put(session, event("a"))
    async with make() as session:
        OUTBOX.put(session, event("lost"))
        await session.rollback()
        async with session.begin_nested() as savepoint:
            OUTBOX.put(session, event("undone"))
            await session.flush()
            await savepoint.rollback()
        receipt = await OUTBOX.put_async(session, event("b"))
        assert [each.type for each in receipt.new] == ["b"]
        OUTBOX.put(session, event("c"))
        await session.commit()
    async with AsyncSession(engine) as session:
        OUTBOX.put(session, event("never flushed"))
    await engine.dispose()
    assert (shop.orders(), shop.events()) == (["one"], ["a", "b", "c"])
