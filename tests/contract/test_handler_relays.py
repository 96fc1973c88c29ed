"""An outbox with handlers only: every handler of a type gets each event once, with progress of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy.orm import Session

from pillarbox import ConfigError, Event, Handlers, Relay, RelayGroup, SinkUnavailable, Unsupported, handler_relays
from pillarbox.retry import Constant, NoRetry
from pillarbox.stores.sql import SqlStore
from pillarbox.testing import MemoryStore
from tests.contract.stores import HOUR, SqlKit, event, states, until

pytestmark = pytest.mark.needs("sql")


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


@pytest.fixture
async def make_group(kit: SqlKit, handlers: Handlers) -> AsyncIterator[Any]:
    made: list[RelayGroup] = []

    def make(**options: Any) -> RelayGroup:
        made.append(handler_relays(lambda sink: kit.make(sink=sink), handlers, **options))
        return made[-1]

    yield make
    for group in made:
        await group.close()


async def waiting(kit: SqlKit, sink: str) -> dict[str, str]:
    """The states of the events that wait for a handler."""
    store = kit.make(sink=sink)
    try:
        await store.open()
        return await states(store)
    finally:
        await store.close()


async def test_every_handler_of_a_type_gets_each_event_once(kit: SqlKit, handlers: Handlers, make_group: Any) -> None:
    seen: list[tuple[str, str]] = []

    @handlers.on("a", "b")
    async def first(order: dict[str, Any]) -> None:
        seen.append(("first", order["name"]))

    @handlers.on("b")
    async def second(order: dict[str, Any]) -> None:
        seen.append(("second", order["name"]))

    kit.put(event("a"), event("b"))
    await make_group().drain()
    assert sorted(seen) == [("first", "a"), ("first", "b"), ("second", "b")]
    assert await waiting(kit, "first") == await waiting(kit, "second") == {}


async def test_failing_handler_does_not_repeat_its_neighbour(kit: SqlKit, handlers: Handlers, make_group: Any) -> None:
    seen: list[str] = []

    @handlers.on("a", retry=Constant(HOUR))
    async def failing() -> None:
        seen.append("failing")
        raise ValueError("not yet")

    @handlers.on("a")
    async def good() -> None:
        seen.append("good")

    kit.put(event("a"))
    await make_group().drain()
    await make_group().drain()
    assert sorted(seen) == ["failing", "good"]
    assert await waiting(kit, "failing") == {"a": "waiting"}


async def test_slow_handler_does_not_delay_another(kit: SqlKit, handlers: Handlers, make_group: Any) -> None:
    may_end = asyncio.Event()
    seen: list[str] = []

    @handlers.on("a", concurrency=1)
    async def slow() -> None:
        await may_end.wait()
        seen.append("slow")

    @handlers.on("a")
    async def quick() -> None:
        seen.append("quick")

    kit.put(*(event("a") for _ in range(5)))
    group = make_group()
    running = asyncio.create_task(group.run())

    async def are_quick_ones_done() -> bool:
        return seen == ["quick"] * 5

    await until(are_quick_ones_done)
    may_end.set()

    async def are_all_done() -> bool:
        return seen.count("slow") == 5

    await until(are_all_done)
    group.stop()
    await running


async def test_handler_has_its_own_retry_policy(kit: SqlKit, handlers: Handlers, make_group: Any) -> None:
    @handlers.on("a", retry=NoRetry())
    async def never() -> None:
        raise ValueError("no")

    @handlers.on("a")
    async def later() -> None:
        raise ValueError("not yet")

    kit.put(event("a"))
    await make_group(retry=Constant(timedelta(hours=1))).drain()
    assert await waiting(kit, "never") == {"a": "dead"}
    assert await waiting(kit, "later") == {"a": "waiting"}


@pytest.mark.parametrize(("unmatched", "expected"), [("dead", {"b": "dead"}), ("drop", {})])
async def test_event_without_a_handler_is_dead_unless_it_may_be_dropped(
    kit: SqlKit, handlers: Handlers, make_group: Any, unmatched: str, expected: dict[str, str]
) -> None:
    @handlers.on("a")
    async def handle() -> None: ...

    kit.put(event("b"))
    await make_group(unmatched=unmatched).drain()
    assert await waiting(kit, "") == expected


async def test_rows_under_a_former_name_are_handled_under_the_new_one(
    kit: SqlKit, handlers: Handlers, make_group: Any
) -> None:
    old = Handlers()

    @old.on("a", name="old-name")
    async def before() -> None:
        raise ValueError("not yet")

    kit.put(event("a"))
    group = handler_relays(lambda sink: kit.make(sink=sink), old)
    await group.relays["fan-out"].drain()
    await group.close()
    seen: list[Any] = []

    @handlers.on("a", name="new-name", aliases=["old-name"])
    async def after(order: dict[str, Any]) -> None:
        seen.append(order["name"])

    await make_group().drain()
    assert seen == ["a"]
    kit.put(event("a"))
    await make_group().relays["fan-out"].drain()
    assert await waiting(kit, "old-name") == {}
    assert await waiting(kit, "new-name") == {"a": "ready"}


async def test_type_with_pattern_characters_matches_itself_alone(
    kit: SqlKit, handlers: Handlers, make_group: Any
) -> None:
    seen: list[str] = []

    @handlers.on("a[b]?")
    async def handle(event: Event) -> None:
        seen.append(event.type)

    kit.put(event("a[b]?"), event("ab1"))
    await make_group(unmatched="drop").drain()
    assert seen == ["a[b]?"]


async def test_order_per_key_holds_for_each_handler(kit: SqlKit, handlers: Handlers, make_group: Any) -> None:
    seen: dict[str, list[int]] = {"one": [], "two": []}

    @handlers.on("n", retry=Constant(timedelta(milliseconds=5), max_attempts=None))
    async def one(order: dict[str, Any]) -> None:
        if order["n"] % 5 == 0 and seen["two"].count(order["n"]) == 0:
            raise ValueError("after the other")
        seen["one"].append(order["n"])

    @handlers.on("n")
    async def two(order: dict[str, Any]) -> None:
        seen["two"].append(order["n"])

    kit.put(*(Event("n", {"n": number}, key="k") for number in range(20)))
    group = make_group()
    running = asyncio.create_task(group.run())

    async def are_all_done() -> bool:
        return len(seen["one"]) == len(seen["two"]) == 20

    await until(are_all_done, seconds=30)
    group.stop()
    await running
    assert seen["one"] == seen["two"] == list(range(20))


def test_group_has_a_relay_for_each_handler(kit: SqlKit, handlers: Handlers, make_group: Any) -> None:
    @handlers.on("a", name="mail", aliases=["post"])
    async def handle() -> None: ...

    group = make_group()
    assert sorted(group.relays) == ["fan-out", "mail", "post"]
    assert all(isinstance(relay.store, SqlStore) for relay in group.relays.values())


async def test_drain_follows_events_that_handlers_put(kit: SqlKit, handlers: Handlers, make_group: Any) -> None:
    seen: list[str] = []

    @handlers.on("a")
    def first(session: Session) -> None:
        seen.append("a")
        kit.database.outbox.put(session, event("b"))

    @handlers.on("b")
    def second(session: Session) -> None:
        seen.append("b")
        kit.database.outbox.put(session, event("c"))

    @handlers.on("c")
    def third() -> None:
        seen.append("c")

    kit.put(event("a"))
    await make_group().drain()
    assert seen == ["a", "b", "c"]


def test_handler_registered_after_the_relays_were_made_is_refused(
    kit: SqlKit, handlers: Handlers, make_group: Any
) -> None:
    @handlers.on("a")
    async def first() -> None: ...

    make_group()
    with pytest.raises(ConfigError, match="'late': this registry is run by relays already"):

        @handlers.on("a")
        async def late() -> None: ...


async def test_outbox_and_url_do_instead_of_a_function(kit: SqlKit, handlers: Handlers) -> None:
    seen: list[str] = []

    @handlers.on("a")
    async def handle(order: dict[str, Any]) -> None:
        seen.append(order["name"])

    kit.put(event("a"))
    async with handler_relays(kit.database.outbox, handlers, url=kit.database.url) as group:
        await group.drain()
    assert seen == ["a"]
    with pytest.raises(ConfigError, match="expected url"):
        handler_relays(kit.database.outbox, handlers)


async def test_drain_follows_events_although_a_handler_is_down(
    kit: SqlKit, handlers: Handlers, make_group: Any
) -> None:
    seen: list[str] = []

    @handlers.on("a")
    def chain(session: Session) -> None:
        kit.database.outbox.put(session, event("b"))

    @handlers.on("a")
    async def down() -> None:
        raise SinkUnavailable("closed for today")

    @handlers.on("b")
    def last() -> None:
        seen.append("b")

    kit.put(event("a"))
    with pytest.raises(SinkUnavailable, match="closed for today"):
        await make_group().drain()
    assert seen == ["b"]


def test_options_of_the_relays_maker_count(kit: SqlKit, handlers: Handlers, make_group: Any) -> None:
    @handlers.on("a")
    async def handle() -> None: ...

    group = make_group(make_relay=partial(Relay, retry=NoRetry()))
    assert [relay._retry for relay in group.relays.values()] == [NoRetry(), NoRetry()]


@pytest.mark.parametrize("store", [MemoryStore(), lambda sink: MemoryStore()], ids=["store", "function"])
def test_store_without_rows_for_each_handler_is_refused(store):
    handlers = Handlers()
    handlers.on("order.placed", name="handle")(lambda order: None)
    with pytest.raises(Unsupported, match=r"got a? ?MemoryStore\. .*give one handler a relay"):
        handler_relays(store, handlers)
