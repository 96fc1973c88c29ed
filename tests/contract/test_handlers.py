"""Handlers as sinks, on every store: what they are given, and what becomes of their events."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from pillarbox import Context, Dead, Event, Handlers, Reject, Relay, Released, Retry, RetryLater, Skip
from pillarbox.handlers import HandlerSink
from pillarbox.retry import Constant
from pillarbox.stores import Settlement
from tests.contract.stores import EVERYTHING, HOUR, Kit, attempts, event, states


@dataclass
class Placed:
    name: str


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


@pytest.fixture
async def run(kit: Kit, handlers: Handlers) -> Any:
    """Deliver one batch to a handler."""
    relays: list[Relay] = []

    async def run_once(name: str = "handle", **options: Any) -> Settlement:
        if not relays:
            store = await kit.open()
            relays.append(Relay(store, HandlerSink(handlers, name), **{"retry": Constant(HOUR), **options}))
        return await relays[0].run_once()

    yield run_once
    for relay in relays:
        await relay.sink.close()


Run = Callable[..., Any]


async def test_async_handler_is_called_with_its_typed_payload(kit: Kit, handlers: Handlers, run: Run) -> None:
    seen: list[Any] = []

    @handlers.on("placed")
    async def handle(order: Placed, context: Context) -> None:
        seen.append((order, context.type, context.attempt, context.key, context.handler))

    kit.put(event("placed", "k1"))
    assert (await run()).delivered == 1
    assert seen == [(Placed("placed"), "placed", 1, "k1", "handle")]


async def test_sync_handler_runs_in_a_thread(kit: Kit, handlers: Handlers, run: Run) -> None:
    seen: list[Any] = []

    @handlers.on("placed")
    def handle(order: dict[str, Any]) -> None:
        seen.append((order, threading.current_thread() is threading.main_thread()))

    kit.put(event("placed"))
    assert (await run()).delivered == 1
    assert seen == [({"name": "placed"}, False)]


async def test_failing_handler_is_tried_again_later(kit: Kit, handlers: Handlers, run: Run) -> None:
    calls: list[int] = []

    @handlers.on("placed")
    async def handle(context: Context) -> None:
        calls.append(context.attempt)
        if context.attempt == 1:
            raise ValueError("not yet")

    kit.put(event("placed"))
    assert (await run()).retried == 1
    assert (await run()).delivered == 0
    await kit.pass_time(2 * HOUR)
    assert (await run()).delivered == 1
    assert calls == [1, 2]


async def test_retry_later_names_its_own_delay(kit: Kit, handlers: Handlers, run: Run) -> None:
    @handlers.on("placed")
    async def handle(context: Context) -> None:
        if context.attempt == 1:
            raise RetryLater("the shop is closed", after=timedelta(minutes=5))

    kit.put(event("placed"))
    assert (await run()).retried == 1
    await kit.pass_time(timedelta(minutes=6))
    assert (await run()).delivered == 1


@pytest.mark.parametrize("how", ["raises", "returns"])
async def test_rejected_event_is_dead_at_once(kit: Kit, handlers: Handlers, run: Run, how: str) -> None:
    @handlers.on("placed")
    async def handle() -> Dead | None:
        if how == "raises":
            raise Reject("of no use")
        return Dead("of no use")

    kit.put(event("placed"))
    assert (await run()).dead == 1
    store = await kit.open()
    assert await states(store) == {"placed": "dead"}


async def test_skipped_event_is_done(kit: Kit, handlers: Handlers, run: Run) -> None:
    @handlers.on("placed")
    async def handle() -> None:
        raise Skip

    kit.put(event("placed"))
    assert (await run()).delivered == 1


async def test_payload_that_does_not_fit_is_dead_and_spares_the_others(kit: Kit, handlers: Handlers, run: Run) -> None:
    seen: list[str] = []

    @handlers.on("placed")
    async def handle(order: Placed) -> None:
        seen.append(order.name)

    kit.put(Event("placed", {"name": 7}), event("placed"), Event("placed", b"\xff", content_type="application/json"))
    settlement = await run()
    assert (settlement.delivered, settlement.dead) == (1, 2)
    assert seen == ["placed"]


async def test_events_of_a_key_wait_behind_a_failed_one(kit: Kit, handlers: Handlers, run: Run) -> None:
    seen: list[str] = []
    fails = True

    @handlers.on("a1", "a2", "b1")
    async def handle(order: Placed) -> None:
        if order.name == "a1" and fails:
            raise ValueError("not yet")
        seen.append(order.name)

    kit.put(event("a1", "a"), event("a2", "a"), event("b1", "b"))
    settlement = await run()
    assert (settlement.retried, settlement.delivered) == (1, 1)
    assert seen == ["b1"]
    fails = False
    await kit.pass_time(2 * HOUR)
    while (await run()).delivered:
        pass
    assert seen == ["b1", "a1", "a2"]


@pytest.mark.parametrize("error", [SystemExit(1), asyncio.CancelledError(), StopIteration()])
async def test_fatal_error_of_one_call_leaves_its_neighbours_result(
    kit: Kit, handlers: Handlers, run: Run, error: BaseException
) -> None:
    @handlers.on("good", "bad", "fine")
    async def handle(order: Placed) -> None:
        if order.name == "bad":
            raise error

    kit.put(event("good", "1"), event("bad", "2"), event("fine", "3"))
    settlement = await run()
    assert (settlement.delivered, settlement.retried) == (2, 1)
    store = await kit.open()
    assert await attempts(store) == {"bad": 1}


async def test_call_beyond_its_timeout_is_ended_and_tried_again(kit: Kit, handlers: Handlers, run: Run) -> None:
    ended = asyncio.Event()

    @handlers.on("placed", timeout=timedelta(milliseconds=20))
    async def handle() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    kit.put(event("placed"))
    assert (await run()).retried == 1
    assert ended.is_set()


async def test_late_result_after_a_lost_lease_changes_nothing(kit: Kit, handlers: Handlers) -> None:
    store, thief = await kit.open(), await kit.open()

    @handlers.on("placed")
    async def handle() -> None:
        await kit.pass_time(HOUR)
        stolen = await thief.claim(10, mode="lease", lease=timedelta(minutes=1))
        assert [claim.attempt for claim in stolen.claims] == [2]
        await stolen.settle([Retry("the thief's own result", timedelta(minutes=1))])

    kit.put(event("placed"))
    settlement = await Relay(store, HandlerSink(handlers, "handle"), lease=timedelta(minutes=1)).run_once()
    assert (settlement.delivered, settlement.lost) == (0, 1)
    assert await states(store) == {"placed": "waiting"}


@pytest.mark.needs("sql")  # a store in memory has a clock of its own
async def test_event_older_than_max_age_is_dead_without_a_call(kit: Kit, handlers: Handlers, run: Run) -> None:
    @handlers.on("placed", max_age=timedelta(hours=3))
    async def handle() -> None:
        raise AssertionError("called")

    kit.put(event("placed"))
    await kit.pass_time(4 * HOUR)
    assert (await run()).dead == 1


async def test_middleware_wraps_calls_from_the_outside_in(kit: Kit, handlers: Handlers, run: Run) -> None:
    seen: list[str] = []

    @handlers.use
    async def outer(context: Context, call: Any) -> object:
        seen.append(f"outer {context.type}")
        result = await call()
        seen.append("outer ends")
        return result

    @handlers.use
    async def inner(context: Context, call: Any) -> object:
        seen.append("inner")
        return await call()

    @handlers.on("placed")
    def handle() -> None:
        seen.append("handler")

    kit.put(event("placed"))
    assert (await run()).delivered == 1
    assert seen == ["outer placed", "inner", "handler", "outer ends"]


async def test_what_middleware_raises_counts(kit: Kit, handlers: Handlers, run: Run) -> None:
    @handlers.use
    async def refuse(context: Context, call: Any) -> object:
        raise Reject("not in this house")

    @handlers.on("placed")
    def handle() -> None:
        raise AssertionError("called")

    kit.put(event("placed"))
    assert (await run()).dead == 1


async def test_provided_parameters_come_from_the_hook(kit: Kit, run: Run) -> None:
    seen: list[Any] = []

    async def provide(context: Context, wanted: Any) -> dict[str, Any]:
        return {name: annotation(7) for name, annotation in wanted.items()}

    handlers = Handlers(provide=provide)

    @handlers.on("placed")
    async def handle(order: Placed, rate: float) -> None:
        seen.append((order.name, rate))

    kit.put(event("placed"))
    store = await kit.open()
    assert (await Relay(store, HandlerSink(handlers, "handle")).run_once()).delivered == 1
    assert seen == [("placed", 7.0)]


async def test_no_more_calls_run_at_once_than_allowed(kit: Kit, handlers: Handlers, run: Run) -> None:
    running = most = 0

    @handlers.on("placed", concurrency=3)
    async def handle() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    kit.put(*(event("placed") for _ in range(20)))
    done = 0
    while settled := (await run()).delivered:
        done += settled
    assert (done, most) == (20, 3)


async def test_hook_that_provides_something_else_is_told_what_was_expected(kit: Kit) -> None:
    handlers = Handlers(provide=lambda context, wanted: {"rat": 7})

    @handlers.on("placed")
    async def handle(order: Placed, rate: float) -> None: ...

    kit.put(event("placed"))
    store = await kit.open()
    assert (await Relay(store, HandlerSink(handlers, "handle"), retry=Constant(HOUR)).run_once()).retried == 1
    [record] = await store.events(EVERYTHING)
    assert "expected provide to return rate by name, got rat" in str(record.error)


async def test_released_is_no_result_of_a_call(kit: Kit, handlers: Handlers, run: Run) -> None:
    @handlers.on("placed")
    async def handle() -> Released:
        return Released()

    kit.put(event("placed"))
    assert (await run()).retried == 1


async def test_middleware_that_calls_twice_takes_no_more_places(kit: Kit, handlers: Handlers) -> None:
    running = most = 0

    @handlers.use
    async def twice(context: Context, call: Any) -> object:
        await call()
        return await call()

    @handlers.on("placed", concurrency=1)
    def handle() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        running -= 1

    kit.put(*(event("placed") for _ in range(5)))
    sink = HandlerSink(handlers, "handle")
    relay = Relay(await kit.open(), sink)
    assert (await relay.drain()).new == 0
    assert most == 1
    slot = sink.make_slot()
    await slot.take()
    assert sink._slots.locked()
    await sink.close()
