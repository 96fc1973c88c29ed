"""Dead messages of a source: whole, listed and redriven like dead events, and buried once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from pillarbox import Claim
from pillarbox.errors import ConfigError, StoreUnavailable
from pillarbox.inbox import Inbox
from pillarbox.inbox.dead_letters import InboxDeadLetters
from pillarbox.sources import Letter
from pillarbox.sources.pending import Entry
from pillarbox.sources.reading import Raw, read_message
from pillarbox.stores import Filter, Record
from pillarbox.stores.sql import SqlStore
from pillarbox.stores.url import open_store
from tests.contract.inboxes import INBOXES, OMNIBOX, OWN, InboxDatabase, drain_queue, make_inboxes, message, received
from tests.contract.layouts import NOW


@pytest.fixture(scope="module")
def inboxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], InboxDatabase]]:
    with make_inboxes(tmp_path_factory) as get:
        yield get


@pytest.fixture(params=INBOXES)
def database(request: pytest.FixtureRequest, inboxes: Callable[[str], InboxDatabase]) -> InboxDatabase:
    return inboxes(request.param)


@pytest.fixture
async def dead(database: InboxDatabase) -> AsyncIterator[InboxDeadLetters]:
    made = InboxDeadLetters(database.inbox, database.url, group="billing")
    yield made
    await made.close()


@pytest.fixture
async def queue(database: InboxDatabase) -> AsyncIterator[SqlStore]:
    """The queue's tables as an operator's command opens them."""
    store = open_store(database.url, table=f"{database.table}_queue")
    yield store
    await store.close()


own_tables = pytest.mark.parametrize("database", OWN, indirect=True)
mariadb = pytest.mark.parametrize("database", ["mariadb"], indirect=True)
omnibox_tables = pytest.mark.parametrize("database", OMNIBOX, indirect=True)


def spoiled(id: str = "broker-9", **fields: Any) -> Claim:
    """A message that cannot be read: it says that it is a CloudEvent, and is none."""
    given = {
        "topic": "orders",
        "body": b"\x00\xff not json",
        "headers": {"tenant": b"acme", "odd": b"\xff\x00"},
        "content_type": "application/cloudevents+json",
        "key": "customer-7",
    }
    return Entry(read_message(Raw(id, **{**given, **fields})), None, attempts=1).claim()


def letter(claim: Claim, error: str = "It is broken") -> Letter:
    return Letter(claim, claim.defect or error, claim.row.read.raw)


async def listed(store: SqlStore) -> list[Record]:
    return list(await store.events(Filter(), state="dead"))


# -- our own dead table ------------------------------------------------------------------------------------------------


async def test_message_that_cannot_be_read_is_buried_with_its_bytes(
    database: InboxDatabase, dead: InboxDeadLetters, queue: SqlStore
) -> None:
    await dead.bury([letter(spoiled())])
    [record] = await listed(queue)
    assert record.event.payload == b"\x00\xff not json"
    assert record.error is not None
    assert record.error.startswith("Message cannot be read")
    assert (record.event.key, record.attempts, record.died_at, record.parks) == ("customer-7", 1, NOW, False)
    assert record.event.headers == {
        "tenant": "acme",
        "odd": "\\xff\\x00",
        "pillarbox-message-id": "broker-9",
        "pillarbox-message-source": "orders",
        "pillarbox-message-group": "billing",
    }
    # It was not handled: should it come again in order, it is new.
    assert database.taken() == []


@own_tables
async def test_redriven_message_is_in_the_queue(
    database: InboxDatabase, dead: InboxDeadLetters, queue: SqlStore
) -> None:
    claims = [received("a", attempt=20), spoiled(), received("b", attempt=3)]
    await dead.bury([letter(claim) for claim in claims])
    assert sorted((record.attempts, record.error) for record in await listed(queue) if record.attempts > 1) == [
        (3, "It is broken"),
        (20, "It is broken"),
    ]
    assert await queue.redrive(Filter(), actor="test") == 3
    assert {event.payload for event in await drain_queue(database)} == {
        b'{"id": "a"}',
        b"\x00\xff not json",
        b'{"id": "b"}',
    }


@own_tables
async def test_dead_message_does_not_hold_up_its_key(
    database: InboxDatabase, dead: InboxDeadLetters, queue: SqlStore
) -> None:
    from pillarbox.inbox.storing import StoreSink

    await dead.bury([letter(received("a", key="k"))])
    sink = StoreSink(database.inbox, database.url, group="billing")
    await sink.deliver([received("b", key="k")])
    await sink.close()
    assert [event.payload for event in await drain_queue(database)] == [b'{"id": "b"}']


async def test_message_is_buried_once(database: InboxDatabase, dead: InboxDeadLetters, queue: SqlStore) -> None:
    await dead.bury([letter(spoiled()), letter(spoiled())])
    await dead.bury([letter(spoiled()), letter(spoiled("broker-10"))])
    assert len(await listed(queue)) == 2
    # Redriven, it waits in the queue: it is not dead once more.
    await queue.redrive(Filter(), actor="test")
    await dead.bury([letter(spoiled())])
    assert await listed(queue) == []
    assert (await queue.counts()).new == 2


async def test_message_is_buried_once_at_the_same_moment(database: InboxDatabase, queue: SqlStore) -> None:
    buriers = [InboxDeadLetters(database.inbox, database.url, group="billing") for _ in range(3)]
    names = [f"broker-{number}" for number in range(20)]
    for _ in range(3):
        letters = [letter(spoiled(name)) for name in names]
        async with asyncio.timeout(60):
            await asyncio.gather(buriers[0].bury(letters), buriers[1].bury(letters[::-1]), buriers[2].bury(letters))
        assert len(await listed(queue)) == 20
        await queue.drop(Filter(), actor="test")
    for burier in buriers:
        await burier.close()


async def test_each_group_buries_its_own(database: InboxDatabase, dead: InboxDeadLetters, queue: SqlStore) -> None:
    other = InboxDeadLetters(database.inbox, database.url, group="shipping")
    await dead.bury([letter(spoiled())])
    await other.bury([letter(spoiled())])
    await other.close()
    groups = [record.event.headers["pillarbox-message-group"] for record in await listed(queue)]
    assert sorted(groups) == ["billing", "shipping"]


@own_tables
async def test_letter_is_refused_when_the_inbox_has_messages_of_another_group(
    database: InboxDatabase, dead: InboxDeadLetters, queue: SqlStore
) -> None:
    with database.engine.begin() as db:
        database.inbox.take(db, message("z", group="shipping"))
    with pytest.raises(ConfigError, match="has messages of group 'shipping'; consumers of group 'billing' need an"):
        await dead.bury([letter(received("a"))])
    assert await listed(queue) == []
    assert database.taken() == [("shipping", "z")]


@own_tables
async def test_text_that_no_column_holds_is_whole_in_a_header(
    database: InboxDatabase, dead: InboxDeadLetters, queue: SqlStore
) -> None:
    long, id = "t" * 300, "i" * 300
    claim = received(id, key="k" * 400, headers={"event-type": long, "note": "zero \0 inside"})
    await dead.bury([letter(claim, "e" * 100_000 + "\0")])
    [record] = await listed(queue)
    assert record.event.headers["pillarbox-whole-type"] == long
    assert record.event.headers["pillarbox-whole-key"] == "k" * 400
    assert record.event.headers["pillarbox-message-id"] == id
    assert record.event.headers["note"] == "zero \\x00 inside"
    assert (record.event.type, record.event.key) == ("t" * 255, "k" * 255)
    assert record.error == "e" * 100_000 + "\\x00"


@own_tables
async def test_payload_above_the_usual_limit_is_buried_whole(
    database: InboxDatabase, dead: InboxDeadLetters, queue: SqlStore
) -> None:
    body = b"\xff" * 3_000_000
    await dead.bury([letter(spoiled(body=body))])
    [record] = await listed(queue)
    assert record.event.payload == body


@mariadb
async def test_payload_larger_than_a_statement_is_buried_whole(
    database: InboxDatabase, dead: InboxDeadLetters, queue: SqlStore
) -> None:
    # max_allowed_packet is 16 MiB, and bytes are written as two digits each.
    body = bytes(range(256)) * 36_000
    await dead.bury([letter(received("a")), letter(spoiled(body=body)), letter(received("b"))])
    records = {record.event.payload for record in await listed(queue)}
    assert records == {b'{"id": "a"}', body, b'{"id": "b"}'}


@mariadb
async def test_payload_that_the_server_cannot_hold_is_refused_for_good(
    database: InboxDatabase, dead: InboxDeadLetters, queue: SqlStore
) -> None:
    with pytest.raises(ConfigError, match=r"payload: 16777216 bytes, .* max_allowed_packet is 16777216\. Raise"):
        await dead.bury([letter(received("a")), letter(spoiled(body=b"x" * 2**24))])
    assert await listed(queue) == []


# -- omni-box's table --------------------------------------------------------------------------------------------------


@omnibox_tables
async def test_message_that_omni_box_can_read_is_failed(
    database: InboxDatabase, dead: InboxDeadLetters, queue: SqlStore
) -> None:
    await dead.bury([letter(received("a")), letter(received("b"), "Not now, not ever")])
    await dead.bury([letter(received("a"), "Another error")])
    rows = database.run("SELECT * FROM {inbox} ORDER BY message_id")
    assert [(row["message_id"], row["status"], row["last_error"]) for row in rows] == [
        ("a", "failed", "It is broken"),
        ("b", "failed", "Not now, not ever"),
    ]
    assert {(row["attempts_made"], row["max_attempts"], row["completed_at"]) for row in rows} == {(6, 6, None)}
    assert await listed(queue) == []
    store = database.inbox.store(database.url, group="billing")
    assert len(await listed(store)) == 2
    assert await store.redrive(Filter(error="not ever"), actor="test") == 1
    await store.close()
    assert [event.payload for event in await drain_queue(database)] == [b'{"id": "b"}']


@omnibox_tables
async def test_what_omni_box_cannot_hold_goes_to_the_queue_beside_it(
    database: InboxDatabase, dead: InboxDeadLetters, queue: SqlStore
) -> None:
    claims = [received("a", b"[1]"), received("b", headers={"x": "v" * 600}), received("i" * 300)]
    await dead.bury([*(letter(claim) for claim in claims), letter(received("c"), "e" * 3000)])
    assert database.taken() == []
    assert {(record.event.payload, len(record.error or "")) for record in await listed(queue)} == {
        (b"[1]", 12),
        (b'{"id": "b"}', 12),
        (b'{"id": "' + b"i" * 300 + b'"}', 12),
        (b'{"id": "c"}', 3000),
    }


@omnibox_tables
async def test_message_that_cannot_be_read_keeps_its_bytes_although_they_are_an_object(
    database: InboxDatabase, dead: InboxDeadLetters, queue: SqlStore
) -> None:
    body = b'{"specversion":  "1.0", "n": 1.50}'
    await dead.bury([letter(spoiled(body=body, headers={}))])
    assert database.taken() == []
    assert [record.event.payload for record in await listed(queue)] == [body]


@omnibox_tables
@pytest.mark.parametrize(("odd", "shown"), [("k\ud800", "k\\ud800"), ("k\0", "k\\x00")], ids=["surrogate", "zero"])
async def test_key_that_omni_box_cannot_hold_goes_to_the_queue_beside_it(
    database: InboxDatabase, dead: InboxDeadLetters, queue: SqlStore, odd: str, shown: str
) -> None:
    await dead.bury([letter(received("a", key=odd)), letter(received("b"))])
    assert [found for _, found in database.taken()] == ["b"]
    assert [record.event.key for record in await listed(queue)] == [shown]


@omnibox_tables
async def test_handled_message_stays_completed_when_it_is_buried(
    database: InboxDatabase, dead: InboxDeadLetters
) -> None:
    with database.engine.begin() as db:
        database.inbox.take(db, message("a"))
    await dead.bury([letter(received("a"))])
    assert [row["status"] for row in database.run("SELECT status FROM {inbox}")] == ["completed"]


# -- wrong use ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("database", ["postgres", "mysql", "omnibox"], indirect=True)
async def test_database_that_is_down_buries_nothing(database: InboxDatabase) -> None:
    dead = InboxDeadLetters(database.inbox, database.url.set(port=1), group="billing")
    with pytest.raises(StoreUnavailable):
        await dead.bury([letter(received("a"))])
    await dead.bury([])
    await dead.close()


def test_inbox_without_a_queue_has_no_dead_letters() -> None:
    with pytest.raises(ConfigError, match="queue=False"):
        InboxDeadLetters(Inbox(sa.MetaData(), queue=False), "sqlite:///x.db", group="billing")
