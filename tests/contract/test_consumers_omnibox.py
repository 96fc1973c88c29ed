"""Consumers on omni-box's inbox tables: what its rows say at each step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy.orm import Session

from pillarbox import Reject
from pillarbox.stores import Filter
from tests.contract.consumers import LATER, MODES, QUICKEST, ConsumerDatabase, Service, consumers_on, make_databases
from tests.contract.inboxes import OMNIBOX
from tests.contract.sources import GROUP, SourceKit, source_kit, until_told

__all__ = ["source_kit"]

AT_ONCE, STORED = MODES
each_table = consumers_on(*((QUICKEST, name) for name in OMNIBOX))
each_table_at_once = consumers_on(*((QUICKEST, name) for name in OMNIBOX), modes=(AT_ONCE,))
each_table_stored = consumers_on(*((QUICKEST, name) for name in OMNIBOX), modes=(STORED,))


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ConsumerDatabase]]:
    with make_databases(tmp_path_factory) as get:
        yield get


@pytest.fixture
def database(request: pytest.FixtureRequest, databases: Callable[[str], ConsumerDatabase]) -> ConsumerDatabase:
    return databases(request.param)


@pytest.fixture
def service(kit: SourceKit, database: ConsumerDatabase, mode: str) -> Service:
    return Service(kit, database, is_stored=mode == STORED)


def read_rows(service: Service) -> list[tuple[str, str, int, bool]]:
    """Id, status, failed attempts, and whether the row says when it was completed."""
    rows = service.database.run("SELECT * FROM {inbox} ORDER BY message_id")
    return [(row["message_id"], row["status"], row["attempts_made"], row["completed_at"] is not None) for row in rows]


@each_table
async def test_row_of_a_handled_message_is_completed(service: Service) -> None:
    @service.handlers.on("order")
    def record(order: dict[str, Any], session: Session) -> None:
        service.write(session, order)

    await service.send("a", "b", "a")
    async with service.consuming():
        await service.done("a", "b")
    assert read_rows(service) == [("a", "completed", 0, True), ("b", "completed", 0, True)]


@each_table_at_once
async def test_handler_that_fails_leaves_no_row(service: Service) -> None:
    calls: list[int] = []

    @service.handlers.on("order")
    def record(order: dict[str, Any], session: Session) -> None:
        calls.append(len(read_rows(service)))
        service.write(session, order)
        if len(calls) == 1:
            raise RuntimeError("not this time")

    await service.send("a")
    async with service.consuming():
        await service.done("a")
    assert calls == [0, 0]
    assert read_rows(service) == [("a", "completed", 0, True)]


@each_table_stored
async def test_stored_row_is_pending_until_its_handlers_are_done(service: Service) -> None:
    @service.handlers.on("order")
    def record(order: dict[str, Any], session: Session) -> None:
        service.write(session, order)
        raise RuntimeError("not this time")

    await service.send("a")
    async with service.consuming(retry=LATER):
        await until_told(lambda: read_rows(service), [("a", "pending", 1, False)])
    assert service.database.effects() == []
    service.database.run(f"UPDATE {{inbox}} SET scheduled_at = {service.database.ago(1)}")
    again = Service(service.kit, service.database, is_stored=True)

    @again.handlers.on("order")
    def record_again(order: dict[str, Any], session: Session) -> None:
        again.write(session, order)

    async with again.consuming():
        await again.done("a")
    assert read_rows(service) == [("a", "completed", 1, True)]


@each_table
async def test_rejected_message_is_failed_and_handled_when_it_is_redriven(service: Service) -> None:
    is_known = threading.Event()

    @service.handlers.on("order")
    def record(order: dict[str, Any], session: Session) -> None:
        service.write(session, order)
        if not is_known.is_set():
            raise Reject("no such customer")

    await service.send("a")
    async with service.consuming():
        await until_told(lambda: [(row[0], row[1]) for row in read_rows(service)], [("a", "failed")])
        await until_told(service.kit.remaining, 0)
        is_known.set()
        store = service.database.inbox.store(service.database.url, group=GROUP)
        [record_] = await store.events(Filter(), state="dead")
        assert record_.error == "no such customer"
        assert await store.redrive(Filter(), actor="test") == 1
        await store.close()
        await service.done("a")
        await service.send("a", "b")
        await service.done("a", "b")


@each_table
async def test_message_that_the_table_cannot_hold_is_handled_when_it_is_redriven(service: Service) -> None:
    """Its payload is no object: it waits as a dead letter beside the table."""

    @service.handlers.on("order")
    def record(order: list[str], session: Session) -> None:
        service.write(session, {"name": order[0]})

    await service.send_raw(b'["a"]', id="a", **{"event-type": "order"})
    async with service.consuming():
        [letter] = await service.wait_for_dead()
        assert letter.event.payload == b'["a"]'
        await until_told(service.kit.remaining, 0)
        await service.redrive()
        await service.done("a")
