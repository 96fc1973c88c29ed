"""Messages that are stored first: once, in one transaction a batch, and delivered from the queue like any event."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import Handlers, Outbox
from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.event import DELIVERED, RELEASED, Dead
from pillarbox.inbox import Inbox
from pillarbox.inbox.dead_letters import InboxDeadLetters
from pillarbox.inbox.storing import StoreSink
from pillarbox.inbox.taking import TakingSink
from pillarbox.sources import Letter
from tests.contract.inboxes import (
    ASYNC_DRIVERS,
    INBOXES,
    OMNIBOX,
    OWN,
    InboxDatabase,
    drain_queue,
    make_inboxes,
    message,
    received,
)
from tests.contract.layouts import NOW

ORDER = "0192f3c4-5d6e-7f80-9a1b-2c3d4e5f6071"


@pytest.fixture(scope="module")
def inboxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], InboxDatabase]]:
    with make_inboxes(tmp_path_factory) as get:
        yield get


@pytest.fixture(params=INBOXES)
def database(request: pytest.FixtureRequest, inboxes: Callable[[str], InboxDatabase]) -> InboxDatabase:
    return inboxes(request.param)


@pytest.fixture
async def sink(database: InboxDatabase) -> AsyncIterator[StoreSink]:
    made = StoreSink(database.inbox, database.url, group="billing")
    await made.open()
    yield made
    await made.close()


own_tables = pytest.mark.parametrize("database", OWN, indirect=True)
omnibox_tables = pytest.mark.parametrize("database", OMNIBOX, indirect=True)
postgres = pytest.mark.parametrize("database", ["postgres"], indirect=True)


def stored(database: InboxDatabase) -> int:
    table = "{queue}" if database.is_own else "{inbox}"
    return int(database.run(f"SELECT count(*) AS n FROM {table}")[0]["n"])


# -- what is stored ----------------------------------------------------------------------------------------------------


async def test_stored_messages_are_delivered_from_the_queue(database: InboxDatabase, sink: StoreSink) -> None:
    assert await sink.deliver([received("a"), received("b"), received("c")]) == [DELIVERED] * 3
    assert [found for _, found in database.taken()] == ["a", "b", "c"]
    assert sorted(event.payload for event in await drain_queue(database)) == [
        b'{"id": "a"}',
        b'{"id": "b"}',
        b'{"id": "c"}',
    ]


@own_tables
async def test_stored_message_keeps_all_that_it_says(database: InboxDatabase, sink: StoreSink) -> None:
    sent = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)
    claim = received(
        ORDER,
        b"\x00\xff raw",
        key="customer-7",
        content_type="application/x-thing",
        headers={"event-type": "order.placed", "tenant": "acme", "correlation-id": "c-1", "event-source": "shop"},
        sent_at=sent,
    )
    assert await sink.deliver([claim]) == [DELIVERED]
    [event] = await drain_queue(database)
    assert event.id == UUID(ORDER)
    assert (event.type, event.topic, event.key) == ("order.placed", "orders", "customer-7")
    assert (event.payload, event.content_type) == (b"\x00\xff raw", "application/x-thing")
    assert (event.correlation_id, event.source) == ("c-1", "shop")
    assert event.headers == {
        "tenant": "acme",
        "pillarbox-message-group": "billing",
        "pillarbox-message-source": "orders",
        "pillarbox-message-time": "2026-03-01T12:30:00+00:00",
    }


@own_tables
async def test_id_that_is_no_uuid_is_kept_in_a_header(database: InboxDatabase, sink: StoreSink) -> None:
    await sink.deliver([received("orders/0/17")])
    [event] = await drain_queue(database)
    assert event.headers["pillarbox-message-id"] == "orders/0/17"
    assert [found for _, found in database.taken()] == ["orders/0/17"]


@omnibox_tables
async def test_stored_row_is_pending_with_the_message_in_its_columns(database: InboxDatabase, sink: StoreSink) -> None:
    claim = received(
        ORDER,
        key="customer-7",
        headers={"event-type": "order.placed", "tenant": "acme", "trace-id": "t-1", "schema-version": "2"},
    )
    assert await sink.deliver([claim]) == [DELIVERED]
    [row] = database.run("SELECT * FROM {inbox}")
    expected: dict[str, Any] = {
        "event_type": "order.placed",
        "message_id": ORDER,
        "consumer_group": "billing",
        "source": "orders",
        "payload": {"id": ORDER},
        "headers": {
            "tenant": "acme",
            "pillarbox-key": "customer-7",
            "pillarbox-topic": "orders",
            "pillarbox-message-id": ORDER,
        },
        "trace_id": "t-1",
        "schema_version": "2",
        "idempotency_key": None,
        "status": "pending",
        "attempts_made": 0,
        "max_attempts": 6,
        "last_error": None,
        "scheduled_at": NOW,
        "completed_at": None,
        "locked_at": None,
        "locked_by": None,
        "created_at": NOW,
        "updated_at": NOW,
    }
    assert {name: row[name] for name in expected} == expected
    [event] = await drain_queue(database)
    assert (event.type, event.topic, event.key, event.source) == ("order.placed", "orders", "customer-7", "orders")
    [row] = database.run("SELECT status, completed_at FROM {inbox}")
    assert (row["status"], row["completed_at"]) == ("completed", NOW)


@omnibox_tables
async def test_taken_row_is_completed(database: InboxDatabase) -> None:
    with database.engine.begin() as db:
        db.exec_driver_sql("SET LOCAL TIME ZONE 'America/New_York'")
        assert database.inbox.take(db, message())
    [row] = database.run("SELECT * FROM {inbox}")
    assert (row["status"], row["completed_at"], row["attempts_made"]) == ("completed", NOW, 0)
    assert (row["created_at"], row["updated_at"], row["scheduled_at"]) == (NOW, NOW, NOW)
    assert await drain_queue(database) == []


@omnibox_tables
async def test_store_has_the_messages_of_one_group(database: InboxDatabase, sink: StoreSink) -> None:
    other = StoreSink(database.inbox, database.url, group="shipping")
    await sink.deliver([received("a")])
    await other.deliver([received("a"), received("b")])
    await other.close()
    assert len(await drain_queue(database, "shipping")) == 2
    assert len(await drain_queue(database, "billing")) == 1
    with pytest.raises(ConfigError, match="expected group"):
        database.inbox.store(database.url)


@omnibox_tables
async def test_json_that_does_not_say_so_is_stored(database: InboxDatabase, sink: StoreSink) -> None:
    claim = received("a", b'{"n": 1}', content_type=None)
    assert await sink.deliver([claim]) == [DELIVERED]
    [event] = await drain_queue(database)
    assert (event.payload, event.content_type) == (b'{"n": 1}', "application/json")


# -- once --------------------------------------------------------------------------------------------------------------


async def test_repeat_is_delivered_and_not_stored_again(database: InboxDatabase, sink: StoreSink) -> None:
    assert await sink.deliver([received("a"), received("b"), received("a")]) == [DELIVERED] * 3
    assert await sink.deliver([received("b"), received("c")]) == [DELIVERED] * 2
    assert stored(database) == 3


async def test_message_that_was_taken_by_a_handler_is_not_stored(database: InboxDatabase, sink: StoreSink) -> None:
    with database.engine.begin() as db:
        database.inbox.take(db, message("a"))
    assert await sink.deliver([received("a")]) == [DELIVERED]
    assert await drain_queue(database) == []


# A trigger of SQLite can only refuse a row.
@pytest.mark.parametrize("database", [name for name in INBOXES if name != "sqlite"], indirect=True)
async def test_message_is_not_stored_when_its_batch_fails(database: InboxDatabase, sink: StoreSink) -> None:
    what = "INSERT ON {queue}" if database.is_own else "INSERT ON {inbox}"
    name = f"stop_{database.table}"
    if database.backend == "postgresql":
        database.run(
            f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION USING ERRCODE = "
            "'53100', MESSAGE = 'the disk is full'; END$$"
        )
        database.run(f"CREATE TRIGGER {name} AFTER {what} FOR EACH ROW EXECUTE FUNCTION {name}()")
    else:
        signal = "SIGNAL SQLSTATE '99999' SET MYSQL_ERRNO = 1114, MESSAGE_TEXT = 'the table is full'"
        database.run(f"CREATE TRIGGER {name} AFTER {what} FOR EACH ROW {signal}")
    try:
        with pytest.raises(SinkUnavailable, match="is full"):
            await sink.deliver([received("a"), received("b")])
        assert database.taken() == []
    finally:
        if database.backend == "postgresql":
            database.run(f"DROP FUNCTION {name} CASCADE")
        else:
            database.run(f"DROP TRIGGER {name}")
    assert await sink.deliver([received("a"), received("b")]) == [DELIVERED] * 2
    assert stored(database) == 2


OTHERS = "'billing'; consumers of group 'shipping' need an inbox of their own"


@own_tables
async def test_message_is_not_stored_beside_those_of_another_group(database: InboxDatabase, sink: StoreSink) -> None:
    other = StoreSink(database.inbox, database.url, group="shipping")
    await sink.deliver([received("a")])
    await drain_queue(database)
    # No message is to blame: they stay where they are.
    with pytest.raises(SinkUnavailable, match=f"it has messages of group {OTHERS}") as caught:
        await other.deliver([received("b"), received("a")])
    assert caught.value.outcomes == [RELEASED, RELEASED]
    with pytest.raises(SinkUnavailable, match=OTHERS):
        await other.open()
    await other.close()
    assert database.taken() == [("billing", "a")]
    assert stored(database) == 0


@own_tables
async def test_two_inboxes_cannot_share_a_queue(database: InboxDatabase, sink: StoreSink) -> None:
    metadata = sa.MetaData()
    queue = Outbox(metadata, table=f"{database.table}_queue")
    other = StoreSink(Inbox(metadata, table=f"{database.table}_2", queue=queue), database.url, group="shipping")
    metadata.create_all(database.engine)
    try:
        await sink.deliver([received("a")])
        with pytest.raises(SinkUnavailable, match=f"its queue '{database.table}_queue' has messages of group {OTHERS}"):
            await other.deliver([received("a")])
        with pytest.raises(SinkUnavailable, match=OTHERS):
            await other.open()
    finally:
        await other.close()
        database.run(f"DROP TABLE {database.table}_2")


@own_tables
async def test_letter_of_another_group_keeps_it_out(database: InboxDatabase) -> None:
    letters = InboxDeadLetters(database.inbox, database.url, group="billing")
    broken = received("x" * 300)
    await letters.bury([Letter(broken, "It is broken", broken.row.read.raw)])
    await letters.close()
    assert database.taken() == []
    other = StoreSink(database.inbox, database.url, group="shipping")
    with pytest.raises(SinkUnavailable, match=OTHERS):
        await other.open()
    await other.close()


@omnibox_tables
async def test_groups_share_omni_box_s_table(database: InboxDatabase, sink: StoreSink) -> None:
    await sink.deliver([received("a")])
    other = StoreSink(database.inbox, database.url, group="shipping")
    await other.open()
    assert await other.deliver([received("a")]) == [DELIVERED]
    await other.close()
    assert database.taken() == [("billing", "a"), ("shipping", "a")]


@own_tables
async def test_message_forgotten_while_it_is_queued_is_a_repeat(database: InboxDatabase, sink: StoreSink) -> None:
    await sink.deliver([received("a")])
    database.run("DELETE FROM {inbox}")
    assert await sink.deliver([received("a"), received("b")]) == [DELIVERED] * 2
    assert stored(database) == 2


# -- what cannot be stored ---------------------------------------------------------------------------------------------


async def test_message_that_is_too_large_is_dead_and_the_others_are_stored(database: InboxDatabase) -> None:
    sink = StoreSink(database.inbox, database.url, group="billing", max_payload=100)
    large = b'{"x": "' + b"x" * 100 + b'"}'
    outcomes = await sink.deliver([received("a"), received("b", large), received("c")])
    await sink.close()
    assert outcomes == [
        DELIVERED,
        Dead("Message 'b': its payload has 109 bytes, at most 100 are allowed. Raise max_payload to store it."),
        DELIVERED,
    ]
    assert [found for _, found in database.taken()] == ["a", "c"]


async def test_later_messages_of_a_dead_one_s_key_are_released(database: InboxDatabase, sink: StoreSink) -> None:
    claims = [
        received("a", key="k"),
        received("x" * 256, key="k"),
        received("b", key="k"),
        received("c", key="other"),
    ]
    first, second, third, fourth = await sink.deliver(claims)
    assert (first, third, fourth) == (DELIVERED, RELEASED, DELIVERED)
    assert isinstance(second, Dead)
    assert "256 characters, at most 255 fit" in second.error


@own_tables
@pytest.mark.parametrize(("name", "field"), [("event-type", "type"), ("event-key", "key"), ("trace-id", "trace_id")])
async def test_text_that_no_column_holds_is_dead(
    database: InboxDatabase, sink: StoreSink, name: str, field: str
) -> None:
    outcome, other = await sink.deliver([received("a", headers={name: "t" * 300}), received("b")])
    assert isinstance(outcome, Dead)
    assert f"{field}: expected at most" in outcome.error
    assert other == DELIVERED
    assert stored(database) == 1


@postgres
async def test_what_only_the_database_finds_out_is_dead(database: InboxDatabase, sink: StoreSink) -> None:
    bad = received("b", headers={"note": "zero \0 inside"})
    outcomes = await sink.deliver([received("a"), bad, received("c"), received("d")])
    assert [outcome == DELIVERED for outcome in outcomes] == [True, False, True, True]
    assert isinstance(outcomes[1], Dead)
    assert [found for _, found in database.taken()] == ["a", "c", "d"]
    assert stored(database) == 3


@omnibox_tables
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"[1]", "expects a JSON object"),
        (b"{}", "expects a JSON object that is not empty"),
        (b"no json", "it holds JSON"),
        (b'{"a": "\\u0000"}', "without zero characters"),
    ],
)
async def test_payload_that_omni_box_cannot_read_is_dead(
    database: InboxDatabase, sink: StoreSink, body: bytes, reason: str
) -> None:
    outcome, other = await sink.deliver([received("a", body), received("b", b'{"a": "\\\\u0000"}')])
    assert isinstance(outcome, Dead)
    assert reason in outcome.error
    assert other == DELIVERED


# -- the database ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["engine", "async-engine"])
async def test_engine_of_the_user_is_used_and_left_open(database: InboxDatabase, kind: str) -> None:
    engine: Any = database.engine
    if kind == "async-engine":
        engine = create_async_engine(
            database.url.set(drivername=f"{database.backend}+{ASYNC_DRIVERS[database.backend]}")
        )
    sink = StoreSink(database.inbox, engine, group="billing")
    await sink.open()
    assert await sink.deliver([received("a"), received("b", b'{"x": "\xc3\xa4"}')]) == [DELIVERED] * 2
    assert await sink.deliver([received("a")]) == [DELIVERED]
    await sink.close()
    assert stored(database) == 2
    if kind == "async-engine":
        async with engine.connect() as db:
            assert (await db.execute(sa.text("SELECT 1"))).scalar_one() == 1
        await engine.dispose()


@pytest.mark.parametrize("database", ["postgres", "mysql", "omnibox"], indirect=True)
async def test_database_that_is_down_blames_no_message(database: InboxDatabase) -> None:
    for where in (database.url.set(port=1), sa.create_engine(database.engine.url.set(port=1))):
        sink = StoreSink(database.inbox, where, group="billing")
        with pytest.raises(SinkUnavailable) as caught:
            await sink.deliver([received("a"), received("b")])
        assert caught.value.outcomes == [RELEASED, RELEASED]
        with pytest.raises(SinkUnavailable):
            await sink.open()
        await sink.close()


@pytest.mark.parametrize("database", ["postgres", "mysql", "sqlite"], indirect=True)
async def test_missing_table_is_said_when_the_sink_opens(database: InboxDatabase) -> None:
    inbox = Inbox(sa.MetaData(), table="no_such_inbox")
    sink = StoreSink(inbox, database.url, group="billing")
    with pytest.raises(SinkUnavailable, match="no_such_inbox"):
        await sink.open()
    await sink.close()


def test_inbox_without_a_queue_stores_nothing() -> None:
    inbox = Inbox(sa.MetaData(), queue=False)
    with pytest.raises(ConfigError, match="queue=False"):
        StoreSink(inbox, "sqlite:///x.db", group="billing")


@pytest.mark.parametrize(
    "group", ["", None, "g" * 256, "g\0", "g\ud800"], ids=["empty", "none", "long", "zero", "half"]
)
def test_name_that_no_row_holds_is_no_group(group: Any) -> None:
    inbox, handlers = Inbox(sa.MetaData()), Handlers()
    handlers.on("order", name="record")(lambda order: None)
    with pytest.raises(ConfigError, match="expected group, the name of a consumer group of at most 255 characters"):
        StoreSink(inbox, "sqlite:///x.db", group=group)
    with pytest.raises(ConfigError, match="expected group"):
        TakingSink(inbox, "sqlite:///x.db", handlers, group=group)
    with pytest.raises(ConfigError, match="expected group"):
        InboxDeadLetters(inbox, "sqlite:///x.db", group=group)


async def test_old_messages_are_forgotten_by_the_way(database: InboxDatabase, sink: StoreSink) -> None:
    await sink.deliver([received("a"), received("b")])
    await drain_queue(database)
    moment = "taken_at" if database.is_own else "completed_at"
    database.run(f"UPDATE {{inbox}} SET {moment} = {database.ago(8 * 86400)} WHERE message_id = 'a'")
    later = StoreSink(database.inbox, database.url, group="billing")
    await later.deliver([received("c")])
    await later.close()
    assert [found for _, found in database.taken()] == ["b", "c"]


@postgres
@pytest.mark.parametrize("is_stored", [False, True], ids=["at-once", "stored-first"])
async def test_forgetting_that_fails_is_no_failure_of_messages(
    database: InboxDatabase, is_stored: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with database.engine.begin() as db:
        database.inbox.take(db, message("old"))
    database.run(f"UPDATE {{inbox}} SET taken_at = {database.ago(8 * 86400)}")
    name = f"keep_{database.table}"
    database.run(
        f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION USING ERRCODE = "
        "'42501', MESSAGE = 'permission denied'; END$$"
    )
    database.run(f"CREATE TRIGGER {name} BEFORE DELETE ON {{inbox}} FOR EACH ROW EXECUTE FUNCTION {name}()")
    handlers = Handlers()
    handlers.on("orders", name="record")(lambda order: None)
    sink: Any = (
        StoreSink(database.inbox, database.url, group="billing")
        if is_stored
        else TakingSink(database.inbox, database.url, handlers, group="billing")
    )
    try:
        assert await sink.deliver([received("a")]) == [DELIVERED]
        assert await sink.deliver([received("b")]) == [DELIVERED]
    finally:
        await sink.close()
        database.run(f"DROP FUNCTION {name} CASCADE")
    assert [found for _, found in database.taken()] == ["a", "b", "old"]
    # Once an hour is enough.
    assert len([record for record in caplog.records if "Could not forget" in record.message]) == 1
