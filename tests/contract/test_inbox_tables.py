"""The inbox's tables: declared, migrated, checked, mapped; forgetting old messages; what omni-box does beside us."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session

from pillarbox import Outbox
from pillarbox.errors import ConfigError, LayoutError, TransactionError, Unsupported
from pillarbox.inbox import Inbox
from pillarbox.layouts.inbox_tables import InboxMixin
from pillarbox.layouts.omnibox_tables import OmniboxInboxMixin
from pillarbox.schema import check_schema, create
from tests.contract.catalog import empty_database, read_tables
from tests.contract.inboxes import (
    ASYNC_DRIVERS,
    INBOXES,
    OMNIBOX,
    OWN,
    SYNC_DRIVERS,
    Consumer,
    InboxDatabase,
    make_inboxes,
    message,
)
from tests.servers import ROOT


@pytest.fixture(scope="module")
def inboxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], InboxDatabase]]:
    with make_inboxes(tmp_path_factory) as get:
        yield get


@pytest.fixture(params=INBOXES)
def database(request: pytest.FixtureRequest, inboxes: Callable[[str], InboxDatabase]) -> InboxDatabase:
    return inboxes(request.param)


own_tables = pytest.mark.parametrize("database", OWN, indirect=True)
omnibox_tables = pytest.mark.parametrize("database", OMNIBOX, indirect=True)
partitioned = pytest.mark.parametrize("database", OMNIBOX[1:], indirect=True)
servers = pytest.mark.parametrize("database", [name for name in INBOXES if name != "sqlite"], indirect=True)


# -- declaring ---------------------------------------------------------------------------------------------------------


def test_inbox_is_declared_with_its_queue() -> None:
    metadata = sa.MetaData()
    inbox = Inbox(metadata)
    names = {"inbox", "inbox_queue", "inbox_queue_dead", "inbox_queue_lanes", "inbox_queue_audit"}
    assert set(metadata.tables) == names
    assert [column.name for column in inbox.table.primary_key] == ["consumer_group", "message_id"]
    assert inbox.retention == timedelta(days=7)
    # Declared twice, it is the same one.
    assert Inbox(metadata).table is inbox.table


def test_inbox_is_declared_alone() -> None:
    metadata = sa.MetaData()
    Inbox(metadata, table="shop.seen", retention="12h", queue=False)
    assert set(metadata.tables) == {"shop.seen"}


@pytest.mark.parametrize(
    ("layout", "table"), [("omnibox", "inbox_events"), ("omnibox-partitioned", "inbox_events_partitioned")]
)
def test_omni_box_s_inbox_is_declared_with_a_queue_beside_it(layout: str, table: str) -> None:
    metadata = sa.MetaData()
    assert Inbox(metadata, layout).table.name == table
    assert {table, f"{table}_queue", f"{table}_queue_dead"} < set(metadata.tables)


def test_wrong_declarations_are_refused() -> None:
    with pytest.raises(Unsupported, match="Inbox layout: expected pillarbox, omnibox or omnibox-partitioned; got"):
        Inbox(sa.MetaData(), "faststream")
    with pytest.raises(TypeError, match=r"expected a sqlalchemy\.MetaData"):
        Inbox("metadata")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Inbox retention"):
        Inbox(sa.MetaData(), retention=7)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="that of a queue"):
        Inbox(sa.MetaData(), table="inbox_queue")
    with pytest.raises(LayoutError, match="1 to 40 characters"):
        Inbox(sa.MetaData(), table="i" * 41)
    for layout in ("faststream", "pillarbox-partitioned"):
        with pytest.raises(
            LayoutError, match=f"'inbox' queue: expected an outbox of layout 'pillarbox', got .*{layout}"
        ):
            Inbox(sa.MetaData(), queue=Outbox(sa.MetaData(), layout))
    metadata = sa.MetaData()
    sa.Table("inbox", metadata, sa.Column("id", sa.Integer, primary_key=True))
    with pytest.raises(LayoutError, match="lacks consumer_group"):
        Inbox(metadata)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_omni_box_s_inbox_is_refused_elsewhere_than_on_postgresql(database: InboxDatabase) -> None:
    inbox = Inbox(sa.MetaData(), "omnibox")
    with database.engine.connect() as db, pytest.raises(LayoutError, match="its table exists on postgresql"):
        inbox.take(db, message())


def test_table_has_these_columns_on_postgresql(tmp_path: Path) -> None:
    metadata = sa.MetaData()
    Inbox(metadata, queue=False)
    with empty_database("postgresql", tmp_path) as engine:
        metadata.create_all(engine)
        found = read_tables(engine)["inbox"]
    assert found.columns == (
        ("consumer_group", "character varying(255)", False, None),
        ("message_id", "character varying(255)", False, None),
        ("source", "character varying(255)", False, None),
        ("type", "character varying(255)", False, None),
        ("taken_at", "timestamp with time zone", False, None),
        ("token", "uuid", True, None),
    )
    assert found.key == ("consumer_group", "message_id")
    assert [name for name, _ in found.indexes] == ["inbox_taken"]


# -- mapped classes ----------------------------------------------------------------------------------------------------


def test_mapped_class_is_an_inbox(tmp_path: Path) -> None:
    class Base(DeclarativeBase):
        pass

    class Seen(InboxMixin, Base):
        __tablename__ = "seen"
        note: Mapped[str | None]

    inbox = Inbox.from_models(Seen, retention="1d")
    assert set(Base.metadata.tables) == {f"seen{end}" for end in ("", "_queue", *QUEUE_PARTS)}
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'orm.db'}")
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        assert inbox.take(session, message())
        assert not inbox.take(session, message())
        [seen] = session.scalars(sa.select(Seen))
        assert (seen.message_id, seen.consumer_group, seen.note) == ("m-1", "billing", None)
    engine.dispose()


QUEUE_PARTS = ("_queue_dead", "_queue_lanes", "_queue_audit")


def test_mapped_class_without_the_layout_s_columns_is_refused() -> None:
    class Base(DeclarativeBase):
        pass

    class Seen(InboxMixin, Base):
        __tablename__ = "seen"

    class Events(OmniboxInboxMixin, Base):
        __tablename__ = "in_events"

    assert Inbox.from_models(Events, layout="omnibox", queue=False).table is Events.__table__
    with pytest.raises(LayoutError, match="Model 'Seen': its table lacks the layout's attempts_made"):
        Inbox.from_models(Seen, layout="omnibox")
    with pytest.raises(LayoutError, match="Model 'Events': its table lacks the layout's in_events_taken"):
        Inbox.from_models(Events)


# -- schema commands ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["postgres", "mariadb", "mysql", "sqlite"])
async def test_schema_is_created_and_checked_by_the_layout_s_name(
    name: str, inboxes: Callable[[str], InboxDatabase], tmp_path: Path
) -> None:
    url = sa.make_url(f"sqlite:///{tmp_path / 'made.db'}") if name == "sqlite" else inboxes(name).url
    table = f"in_{uuid4().hex[:10]}"
    names = {f"{table}{end}" for end in ("", "_queue", *QUEUE_PARTS)}
    metadata = sa.MetaData()
    Inbox(metadata, table=table)
    engine = sa.create_engine(inboxes(name).engine.url if name != "sqlite" else url)
    try:
        made = await create(url, layout="inbox", table=table)
        assert {each.table for each in made} == names
        assert all(each.is_new for each in made)
        assert await check_schema(url, "inbox", table=table) == []
        assert await check_schema(url, "inbox", table=f"{table}_queue") == []
        with engine.begin() as db:
            db.exec_driver_sql(f"DROP INDEX {table}_taken" + (f" ON {table}" if name in ("mariadb", "mysql") else ""))
        [drift] = await check_schema(url, "inbox", table=table)
        assert (drift.table, drift.kind, drift.name) == (table, "index", f"{table}_taken")
    finally:
        metadata.drop_all(engine)
        engine.dispose()


@omnibox_tables
async def test_declared_omni_box_tables_pass_the_check(database: InboxDatabase) -> None:
    layout = "omnibox-inbox" if database.name == "omnibox" else "omnibox-inbox-partitioned"
    assert await check_schema(database.url, layout, table=database.table) == []


def test_commands_know_the_inbox(tmp_path: Path) -> None:
    store = ["--store", f"sqlite:///{tmp_path / 'shop.db'}", "--layout", "inbox"]

    def run(*args: str) -> str:
        command = [sys.executable, "-m", "pillarbox", *args]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    assert "inbox: created" in run("schema", "create", *store)
    assert run("schema", "check", *store) == "The tables are as layout 'inbox' declares them.\n"
    assert "CREATE TABLE inbox (" in run("schema", "sql", *store)
    assert "inbox_queue" in run("status", *store)


# -- forgetting --------------------------------------------------------------------------------------------------------


def grow_old(database: InboxDatabase, condition: str, days: int) -> None:
    moment = "taken_at" if database.is_own else "completed_at"
    database.run(f"UPDATE {{inbox}} SET {moment} = {database.ago(days * 86400)} WHERE {condition}")


def take(database: InboxDatabase, *ids: str) -> list[bool]:
    with database.engine.begin() as db:
        return database.inbox.take_many(db, [message(each) for each in ids])


@pytest.mark.parametrize("kind", ["engine", "async-engine"])
async def test_messages_older_than_the_retention_are_forgotten_in_batches(database: InboxDatabase, kind: str) -> None:
    take(database, *(f"old-{number}" for number in range(7)), "new-1", "new-2")
    grow_old(database, "message_id LIKE 'old%'", 8)
    grow_old(database, "message_id = 'new-1'", 6)
    commits: list[Any] = []

    def note(connection: sa.Connection) -> None:
        commits.append(connection)

    if kind == "engine":
        sa.event.listen(database.engine, "commit", note)
        assert database.inbox.prune(database.engine, batch=3) == 7
        sa.event.remove(database.engine, "commit", note)
    else:
        driver = f"{database.backend}+{ASYNC_DRIVERS[database.backend]}"
        engine = create_async_engine(database.url.set(drivername=driver))
        sa.event.listen(engine.sync_engine, "commit", note)
        assert await database.inbox.prune_async(engine, batch=3) == 7
        await engine.dispose()
    assert len(commits) == 3
    assert [found for _, found in database.taken()] == ["new-1", "new-2"]
    assert take(database, "old-1", "new-1") == [True, False]


async def test_age_can_be_given(database: InboxDatabase) -> None:
    take(database, "a", "b")
    grow_old(database, "message_id = 'a'", 2)
    assert database.inbox.prune(database.engine) == 0
    assert database.inbox.prune(database.engine, age="1d") == 1
    assert [found for _, found in database.taken()] == ["b"]


@servers
async def test_row_that_another_has_locked_is_left_for_later(database: InboxDatabase) -> None:
    take(database, "a", "b")
    grow_old(database, "1 = 1", 8)
    with database.engine.connect() as db:
        row = "consumer_group = 'billing' AND message_id = 'a'"
        db.execute(sa.text(f"SELECT 1 FROM {database.table} WHERE {row} FOR UPDATE"))
        assert await asyncio.to_thread(database.inbox.prune, database.engine) == 1
        db.rollback()
    assert [found for _, found in database.taken()] == ["a"]


@pytest.mark.parametrize("batch", [0, -1])
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_batch_of_nothing_is_refused(database: InboxDatabase, batch: int) -> None:
    with pytest.raises(ConfigError, match="Inbox batch: expected a whole number of 1 or more"):
        database.inbox.prune(database.engine, batch=batch)
    engine = create_async_engine(database.url.set(drivername="sqlite+aiosqlite"))
    with pytest.raises(ConfigError, match="Inbox batch"):
        await database.inbox.prune_async(engine, batch=batch)
    await engine.dispose()


@pytest.mark.parametrize("kind", ["engine", "async-engine"])
@pytest.mark.parametrize("database", ["mariadb", "mysql"], indirect=True)
async def test_take_waits_for_no_prune(database: InboxDatabase, kind: str) -> None:
    """On engines with the level that these databases have by default, REPEATABLE READ."""
    take(database, "a", "c")
    grow_old(database, "1 = 1", 8)
    taken: list[list[bool]] = []

    def take_meanwhile(connection: sa.Connection) -> None:
        with database.engine.begin() as db:
            db.exec_driver_sql("SET innodb_lock_wait_timeout = 1")
            taken.append(database.inbox.take_many(db, [message("b"), message("d")]))

    driver = f"{database.backend}+{(ASYNC_DRIVERS if kind == 'async-engine' else SYNC_DRIVERS)[database.backend]}"
    make: Any = create_async_engine if kind == "async-engine" else sa.create_engine
    engine = make(database.url.set(drivername=driver))
    sa.event.listen(engine.sync_engine if kind == "async-engine" else engine, "commit", take_meanwhile)
    if kind == "async-engine":
        assert await database.inbox.prune_async(engine) == 2
        await engine.dispose()
    else:
        assert database.inbox.prune(engine) == 2
        engine.dispose()
    assert taken == [[True, True]]


@omnibox_tables
async def test_rows_that_are_not_completed_are_not_forgotten(database: InboxDatabase) -> None:
    with database.engine.begin() as db:
        database.inbox.write(db, [message("waiting")], status="pending")
        database.inbox.write(db, [message("handled")])
    database.run("UPDATE {inbox} SET created_at = created_at, updated_at = now() - interval '99 days'")
    grow_old(database, "status = 'completed'", 99)
    assert database.inbox.prune(database.engine) == 1
    assert [found for _, found in database.taken()] == ["waiting"]


# -- beside others -----------------------------------------------------------------------------------------------------


@partitioned
async def test_take_waits_for_the_lock_of_omni_box(database: InboxDatabase) -> None:
    lock = sa.text("SELECT pg_advisory_xact_lock(hashtext('m-1'), hashtext('billing'))")
    row = sa.text(
        f"INSERT INTO {database.table} (id, event_type, message_id, consumer_group, source, payload, scheduled_at,"
        " created_at) VALUES (gen_random_uuid(), 'order.placed', 'm-1', 'billing', 'orders', '{\"n\": 1}', now(),"
        " now())"
    )
    consumer = Consumer(database, "async-connection")
    try:
        with database.engine.connect() as omni_box:
            omni_box.execute(lock)
            taking = asyncio.create_task(consumer.take(message()))
            await database.wait_until_blocked()
            omni_box.execute(row)
            omni_box.commit()
        assert await taking == [False]
    finally:
        await consumer.close()


@partitioned
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_partitioned_inbox_refuses_a_snapshot_that_stands_still(database: InboxDatabase, level: str) -> None:
    consumer = Consumer(database, isolation_level=level)
    try:
        with pytest.raises(TransactionError, match=f"This transaction is {level}"):
            await consumer.take(message())
    finally:
        await consumer.close()


@pytest.mark.parametrize("database", ["postgres", "omnibox"], indirect=True)
async def test_schema_of_the_connection_is_taken(database: InboxDatabase) -> None:
    schema = f"tenant_{uuid4().hex[:8]}"
    inbox = Inbox(sa.MetaData(), database.inbox.layout.name, table="mine", schema="tenant", queue=False)
    with database.engine.connect() as db:
        db.execution_options(schema_translate_map={"tenant": schema})
        db.exec_driver_sql(f"CREATE SCHEMA {schema}")
        inbox.table.create(db)
        assert inbox.take_many(db, [message("a"), message("a")]) == [True, False]
        assert db.exec_driver_sql(f"SELECT message_id FROM {schema}.mine").scalars().all() == ["a"]
        db.rollback()


# -- a process that dies -----------------------------------------------------------------------------------------------

TAKER = """
import sys
import sqlalchemy as sa
from pillarbox.inbox import Inbox, Message

url, layout, table = sys.argv[1:]
inbox = Inbox(sa.MetaData(), layout, table=table)
with sa.create_engine(url).connect() as db:
    assert inbox.take(db, Message("m-1", "billing", "order.placed", {"n": 1}, source="orders"))
    print("taken", flush=True)
    sys.stdin.read()
    db.commit()
"""


def kill_taker(database: InboxDatabase) -> None:
    """Kill a process between its take and its commit."""
    url = database.engine.url.render_as_string(hide_password=False)
    command = [sys.executable, "-c", TAKER, url, database.inbox.layout.name, database.table]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "taken\n"
        finally:
            process.kill()
        assert process.wait(10) == -signal.SIGKILL


async def test_process_killed_before_its_commit_has_taken_nothing(database: InboxDatabase) -> None:
    await asyncio.to_thread(kill_taker, database)
    assert database.taken() == []
    consumer = Consumer(database, "async-connection")
    async with asyncio.timeout(30):
        assert await consumer.take(message()) == [True]
    await consumer.commit()
    await consumer.close()
    assert database.taken() == [("billing", "m-1")]
