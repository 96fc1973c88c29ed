"""Consumers: every message of a broker has its effect once, in order per key, and what cannot be handled is kept."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pillarbox import Constant, Context, Event, Handlers, Reject
from pillarbox.errors import ConfigError
from pillarbox.inbox import Inbox
from pillarbox.inbox.consuming import consumer_relays
from pillarbox.relay import Relay
from pillarbox.sources.url import open_source
from pillarbox.stores import Filter
from tests.contract.consumers import (
    LATER,
    MODES,
    QUICKEST,
    ConsumerDatabase,
    Service,
    consumers_on,
    every_broker,
    every_database,
    every_way,
    make_databases,
    on_one,
    servers,
)
from tests.contract.inboxes import message
from tests.contract.sources import GROUP, OTHER, SourceKit, source_kit, until, until_told

__all__ = ["source_kit"]


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ConsumerDatabase]]:
    with make_databases(tmp_path_factory) as get:
        yield get


@pytest.fixture
def database(request: pytest.FixtureRequest, databases: Callable[[str], ConsumerDatabase]) -> ConsumerDatabase:
    return databases(request.param)


@pytest.fixture
def service(kit: SourceKit, database: ConsumerDatabase, mode: str) -> Service:
    return Service(kit, database, is_stored=mode == "stored-first")


def record_orders(service: Service) -> None:
    """The plainest handler: one row for each order."""

    @service.handlers.on("order")
    def record(order: dict[str, Any], session: Session) -> None:
        service.write(session, order)


# -- once ------------------------------------------------------------------------------------------------------------


@every_way
async def test_message_sent_twice_is_handled_once(service: Service) -> None:
    record_orders(service)
    await service.send("a", "b", "a")
    async with service.consuming():
        await service.done("a", "b")
        await service.send("b", "c", "a")
        await service.done("a", "b", "c")
    assert service.database.taken() == [(GROUP, "a"), (GROUP, "b"), (GROUP, "c")]


@servers
async def test_handler_with_an_asynchronous_session_writes_once(service: Service) -> None:
    @service.handlers.on("order")
    async def record(order: dict[str, Any], session: AsyncSession) -> None:
        await session.execute(sa.insert(service.database.ledger).values(name=order["name"]))

    await service.send("a", "b", "a")
    async with service.consuming():
        await service.done("a", "b")


@on_one
async def test_handler_without_a_session_is_not_called_for_a_repeat(service: Service) -> None:
    @service.handlers.on("order")
    def record(order: dict[str, Any]) -> None:
        service.calls.append(order["name"])

    await service.send("a", "a", "b", "a")
    async with service.consuming():
        await until(lambda: len(service.calls) == 2)
        await service.done()
    assert sorted(service.calls) == ["a", "b"]


@on_one
async def test_all_handlers_of_a_type_have_their_effect_once(service: Service) -> None:
    @service.handlers.on("order")
    def record(order: dict[str, Any], session: Session) -> None:
        service.write(session, {"name": f"{order['name']} recorded"})

    @service.handlers.on("order")
    def bill(order: dict[str, Any], session: Session, context: Context) -> None:
        service.write(session, {"name": f"{order['name']} billed"})
        service.calls.append(order["name"])
        if len(service.calls) == 1:
            raise RuntimeError("no bill yet")

    await service.send("a")
    async with service.consuming():
        await service.done("a recorded", "a billed")
    assert service.calls == ["a", "a"]


@every_way
async def test_duplicates_at_the_same_moment_have_one_effect(service: Service) -> None:
    """Two consumers read the whole place, as two groups of the broker, and take for one group of the inbox."""
    kit, database = service.kit, service.database
    has_begun = threading.Event()

    @service.handlers.on("order")
    def record(order: dict[str, Any], session: Session) -> None:
        service.write(session, order)
        if order["name"] == "a" and not has_begun.is_set():
            has_begun.set()
            if not service.is_stored:
                asyncio.run(database.wait_until_blocked())

    def open_other(letters: Any) -> Any:
        return open_source(kit.url, group=OTHER, dead=letters, **kit.options)

    await service.send("a", *(f"{number}" for number in range(30)))
    async with service.consuming(), service.consuming(source=open_other):
        await service.done("a", *(f"{number}" for number in range(30)))
        await until_told(lambda: kit.remaining(OTHER), 0)
        assert len(database.effects()) == 31


# -- errors ----------------------------------------------------------------------------------------------------------


@every_way
async def test_message_is_tried_again_after_an_error_and_has_its_effect_once(service: Service) -> None:
    attempts: list[int] = []

    @service.handlers.on("order")
    def record(order: dict[str, Any], session: Session, context: Context) -> None:
        service.write(session, order)
        attempts.append(context.attempt)
        if len(attempts) < 3:
            raise RuntimeError("the printer is out of paper")

    await service.send("a")
    async with service.consuming():
        await service.done("a")
    assert attempts == [1, 2, 3]
    assert await service.wait_for_dead(0) == []


@every_database
async def test_error_after_writing_leaves_no_effect_and_no_message(service: Service) -> None:
    called = threading.Event()

    @service.handlers.on("order")
    def record(order: dict[str, Any], session: Session) -> None:
        service.write(session, order)
        session.flush()
        called.set()
        raise RuntimeError("too late")

    await service.send("a")
    async with service.consuming(retry=LATER) as consumer:
        failing = consumer.relays["record" if service.is_stored else f"source {GROUP}"]
        await until(called.is_set)
        async with asyncio.timeout(20):
            while not (await failing.store.counts()).retrying:
                await asyncio.sleep(0.02)
        assert service.database.effects() == []
        # Stored first it was taken for good, and waits in the queue.
        assert service.database.taken() == ([(GROUP, "a")] if service.is_stored else [])
    record_again = Service(service.kit, service.database, is_stored=service.is_stored)
    record_orders(record_again)
    if service.is_stored:
        service.database.run("UPDATE {queue} SET until_at = NULL, state = 0")
    async with record_again.consuming():
        await record_again.done("a")


@on_one
async def test_handler_has_a_retry_policy_of_its_own(service: Service) -> None:
    attempts: list[int] = []

    @service.handlers.on("order", retry=Constant(timedelta(milliseconds=20), max_attempts=2))
    def record(order: dict[str, Any], session: Session, context: Context) -> None:
        attempts.append(context.attempt)
        raise RuntimeError("never")

    await service.send("a")
    async with service.consuming(retry=LATER):
        [letter] = await service.wait_for_dead(died_of_handler="record")
    assert (letter.attempts, (letter.error or "").splitlines()[0]) == (2, "RuntimeError: never")
    assert attempts == [1, 2]


@servers
async def test_connection_lost_in_a_handler_is_no_failure_of_the_message(service: Service) -> None:
    database = service.database
    own, end = {
        "postgresql": ("SELECT pg_backend_pid()", "SELECT pg_terminate_backend(:number)"),
        "mysql": ("SELECT CONNECTION_ID()", "KILL :number"),
    }[database.backend]
    attempts: list[int] = []

    @service.handlers.on("order")
    def record(order: dict[str, Any], session: Session, context: Context) -> None:
        service.write(session, order)
        attempts.append(context.attempt)
        if len(attempts) == 1:
            database.run(end, number=session.execute(sa.text(own)).scalar_one())
            session.execute(sa.text(own))

    await service.send("a")
    async with service.consuming(retry=LATER):
        await service.done("a")
        assert await service.wait_for_dead(0) == []
    assert attempts == [1, 1]


@every_way
async def test_rejected_message_is_dead_with_its_bytes_and_handled_when_it_is_redriven(service: Service) -> None:
    is_known = threading.Event()

    @service.handlers.on("order")
    def record(order: dict[str, Any], session: Session) -> None:
        service.write(session, order)
        if not is_known.is_set():
            raise Reject("no such customer")

    body = b'{"name":  "a", "total": 12.50}'
    await service.send_raw(body, id="a", key="customer-7", **{"event-type": "order", "tenant": "acme"})
    async with service.consuming():
        [letter] = await service.wait_for_dead(died_of_handler="record")
        assert letter.event.payload == body
        assert (letter.event.type, letter.event.key, letter.error) == ("order", "customer-7", "no such customer")
        assert letter.event.headers["tenant"] == "acme"
        assert service.database.effects() == []
        await until_told(service.kit.remaining, 0)
        is_known.set()
        await service.redrive(died_of_handler="record")
        await service.done("a")
        assert await service.wait_for_dead(0) == []
        # What was redriven is done as well: it is known when it comes once more.
        await service.send("a", "b")
        await service.done("a", "b")


@every_way
async def test_message_that_cannot_be_read_is_dead_and_those_behind_it_go_on(service: Service) -> None:
    record_orders(service)
    await service.send("a", key="k")
    await service.send_raw(
        b"\x00\xff no json", id="x", key="k", **{"content-type": "application/cloudevents+json", "tenant": "acme"}
    )
    await service.send("b", key="k")
    async with service.consuming():
        await service.done("a", "b")
        [record] = await service.wait_for_dead()
    assert record.event.payload == b"\x00\xff no json"
    assert record.error is not None
    assert record.error.startswith("Message cannot be read: ")
    assert record.event.headers["tenant"] == "acme"
    assert service.database.effects() == ["a", "b"]


@on_one
async def test_payload_of_the_wrong_form_is_dead_and_those_behind_it_go_on(service: Service) -> None:
    record_orders(service)
    await service.send("a", key="k")
    await service.send_raw(b"{broken", id="x", key="k", **{"event-type": "order"})
    await service.send("b", key="k")
    async with service.consuming():
        [record] = await service.wait_for_dead(died_of_handler="record")
        assert record.event.payload == b"{broken"
        if service.is_stored:
            # In the queue a dead event parks its key.
            async with service.operator(died_of_handler="record") as store:
                await store.drop(Filter(), actor="test")
        await service.done("a", "b")
    assert service.database.effects() == ["a", "b"]


@every_broker
async def test_message_without_a_handler_is_dead(service: Service) -> None:
    record_orders(service)
    await service.send("a", type="refund")
    await service.send("b")
    async with service.consuming():
        await service.done("b")
        [record] = await service.wait_for_dead()
    assert (record.event.type, record.event.payload) == ("refund", b'{"name": "a"}')
    assert "refund" in str(record.error)


@on_one
async def test_message_without_a_handler_is_skipped_when_asked_for(service: Service) -> None:
    record_orders(service)
    await service.send("a", type="refund")
    await service.send("b")
    async with service.consuming(unmatched="skip"):
        await service.done("b")
    assert await service.wait_for_dead(0) == []
    assert service.database.taken() == [(GROUP, "a"), (GROUP, "b")]


# -- with the transaction --------------------------------------------------------------------------------------------


@every_database
async def test_events_of_a_handler_commit_with_it(service: Service) -> None:
    database = service.database
    seen: list[list[str]] = []

    @service.handlers.on("order")
    def record(order: dict[str, Any], session: Session) -> None:
        seen.append(database.put())
        service.write(session, order)
        database.outbox.put(session, Event("order.recorded", order))
        session.flush()
        if len(seen) == 1:
            raise RuntimeError("not this time")

    await service.send("a")
    async with service.consuming():
        await service.done("a")
    assert seen == [[], []]
    assert database.put() == ["order.recorded"]


# -- order -----------------------------------------------------------------------------------------------------------


@every_way
async def test_messages_of_a_key_wait_for_a_failing_one_and_those_of_others_do_not(service: Service) -> None:
    @service.handlers.on("order")
    def record(order: dict[str, Any], session: Session) -> None:
        # The other key is through before this one goes on.
        if order["name"] == "k2" and "l3" not in service.database.effects():
            raise RuntimeError("not yet")
        service.write(session, order)

    await service.send("k1", "k2", key="k")
    await service.send("l1", "l2", key="l")
    await service.send("k3", "k4", key="k")
    await service.send("l3", key="l")
    async with service.consuming():
        await service.done("k1", "k2", "k3", "k4", "l1", "l2", "l3")
    effects = service.database.effects()
    assert [name for name in effects if name[0] == "k"] == ["k1", "k2", "k3", "k4"]
    assert [name for name in effects if name[0] == "l"] == ["l1", "l2", "l3"]
    assert effects.index("l3") < effects.index("k2")


# -- stopping --------------------------------------------------------------------------------------------------------


@every_way
async def test_stop_in_the_middle_loses_nothing_and_repeats_no_effect(service: Service) -> None:
    """Each consumer is stopped while handlers run; they end, and the next consumer goes on behind them."""
    names = [f"{number}" for number in range(60)]
    reached, limits = threading.Event(), [5, 20, 40]

    @service.handlers.on("order")
    def record(order: dict[str, Any], session: Session) -> None:
        service.write(session, order)
        service.calls.append(order["name"])
        if limits and len(service.calls) >= limits[0]:
            reached.set()

    for number, name in enumerate(names):
        await service.send(name, key=f"key-{number % 5}")
    while limits:
        async with service.consuming():
            await until(reached.is_set, within=service.kit.patience + 20)
        del limits[0]
        reached.clear()
    async with service.consuming():
        await service.done(*names)
    for key in range(5):
        own = [name for name in service.database.effects() if int(name) % 5 == key]
        assert own == names[key::5]
    # Stopped in order nothing was called twice.
    assert sorted(service.calls, key=int) == names


@every_database
async def test_stop_that_cannot_wait_for_a_handler_undoes_it(service: Service) -> None:
    begun, may_end = threading.Event(), threading.Event()

    @service.handlers.on("order")
    def record(order: dict[str, Any], session: Session) -> None:
        service.write(session, order)
        session.flush()
        if not begun.is_set():
            begun.set()
            assert may_end.wait(20)

    hasty = partial(Relay, stop_timeout=timedelta(milliseconds=50))
    await service.send("a")
    async with service.consuming(make_relay=hasty) as consumer:
        await until(begun.is_set)
        consumer.stop()
        # A thread cannot be ended: it is waited for, long after the time to stop.
        asyncio.get_running_loop().call_later(0.5, may_end.set)
    assert may_end.is_set()
    assert service.database.effects() == []
    async with service.consuming():
        await service.done("a", within=service.kit.patience + 40)


# -- wrong use -------------------------------------------------------------------------------------------------------


@every_database
async def test_consumer_refuses_an_inbox_with_messages_of_another_group(service: Service) -> None:
    record_orders(service)
    with service.database.engine.begin() as db:
        service.database.inbox.take(db, message("z", group=OTHER))
    await service.send("a")
    consumer = service.make_consumer()
    why = f"it has messages of group '{OTHER}'; consumers of group '{GROUP}' need an inbox of their own"
    for start in (consumer.run, consumer.open, consumer.drain):
        async with asyncio.timeout(20):
            with pytest.raises(ConfigError, match=why):
                await start()
    await consumer.close()
    assert service.database.taken() == [(OTHER, "z")]
    assert service.database.effects() == []


@consumers_on((QUICKEST, "postgres"), modes=MODES[:1])
async def test_consumer_ends_when_its_inbox_gets_messages_of_another_group(service: Service) -> None:
    @service.handlers.on("order")
    def record(order: dict[str, Any], session: Session) -> None:
        with service.database.engine.begin() as db:
            service.database.inbox.take(db, message("z", group=OTHER))
        raise Reject("wrong as such")

    await service.send("a")
    consumer = service.make_consumer()
    async with asyncio.timeout(20):
        with pytest.raises(ConfigError, match=f"it has messages of group '{OTHER}'"):
            await consumer.run()
    await consumer.close()
    assert await service.wait_for_dead(0) == []
    assert service.kit.remaining() == 1


async def test_handler_with_the_name_of_another_relay_is_refused() -> None:
    handlers = Handlers()
    handlers.on("order", name=f"source {GROUP}")(lambda order: None)
    with pytest.raises(ConfigError, match=f"'source {GROUP}' twice"):
        consumer_relays(
            "nats://127.0.0.1:1", handlers, inbox=Inbox(sa.MetaData()), url="sqlite:///x.db", group=GROUP, stream="x"
        )
