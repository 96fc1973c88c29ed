"""A hundred events, of which one ends in a way that no table can store as it is: the others are handled once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from pillarbox import Event, Handlers, Reject, Relay, RetryLater
from pillarbox.errortext import without_calls
from pillarbox.event import Dead, Retry
from pillarbox.handlers import HandlerSink
from pillarbox.retry import Constant
from pillarbox.sinks import Sink
from pillarbox.sinks.callable import CallableSink
from pillarbox.stores import Store
from tests.contract.stores import EVERYTHING, HOUR, Kit, until

pytestmark = pytest.mark.needs("sql")

EVENTS = 100
CULPRIT = 50
Odd = Callable[[], Any]


def throw(error: Exception) -> Any:
    raise error


# What is returned or raised, the state it leads to, and the error that is kept.
OUTCOMES: dict[str, tuple[Odd, str, str]] = {
    "dead of a zero": (lambda: Dead("bad \0 byte"), "dead", "bad  byte"),
    "dead of half a pair": (lambda: Dead("bad \ud83d text"), "dead", "bad \ufffd text"),
    "dead of no text": (lambda: Dead(5), "dead", "5"),  # type: ignore[arg-type]
    "retry of a zero": (lambda: Retry("bad \0 byte"), "waiting", "bad  byte"),
    "retry of half a pair": (lambda: Retry("bad \ud83d text"), "waiting", "bad \ufffd text"),
    "retry of no text": (lambda: Retry(b"\xff"), "waiting", "b'\\xff'"),  # type: ignore[arg-type]
    "exception with a zero": (lambda: throw(ValueError("bad \0 byte")), "waiting", "ValueError: bad  byte"),
    "exception with half a pair": (lambda: throw(ValueError("bad \ud83d")), "waiting", "ValueError: bad \ufffd"),
    "retry after words": (
        lambda: Retry("busy", after="soon"),  # type: ignore[arg-type]
        "waiting",
        "TypeError: Retry after: expected a timedelta or a number of seconds, got 'soon'",
    ),
}
VERDICTS: dict[str, tuple[Odd, str, str]] = {
    "reject with a zero": (lambda: throw(Reject("bad \0 byte")), "dead", "bad  byte"),
    "reject with half a pair": (lambda: throw(Reject("bad \ud83d")), "dead", "bad \ufffd"),
    "reject with no text": (lambda: throw(Reject(5)), "dead", "5"),
    "retry later with a zero": (lambda: throw(RetryLater("bad \0 byte")), "waiting", "bad  byte"),
}
DELAYS: dict[str, tuple[Any, timedelta, timedelta]] = {
    "for ever": (timedelta.max, timedelta(days=3600), timedelta(days=3651)),
    "a number": (7200.0, HOUR, 3 * HOUR),
}
WAYS = ("function", "handler")


def make_sink(way: str, handle: Callable[[int], Any]) -> Sink:
    """A function that gets the numbers of events, as a sink or as a handler of one."""
    if way == "function":
        return CallableSink(lambda event: handle(json.loads(event.payload)["number"]))
    handlers = Handlers()

    @handlers.on("placed")
    def called(order: dict[str, int]) -> Any:
        return handle(order["number"])

    return HandlerSink(handlers, "called")


async def relay_with(kit: Kit, store: Store, way: str, odd: Odd) -> Any:
    """Run a relay until every event has its end or waits; returns what the culprit became."""
    seen: Counter[int] = Counter()

    def handle(number: int) -> Any:
        seen[number] += 1
        return odd() if number == CULPRIT else None

    kit.put(*(Event("placed", {"number": number}) for number in range(EVENTS)))
    relay = Relay(store, make_sink(way, handle), retry=Constant(HOUR))
    running = asyncio.create_task(relay.run())

    async def is_over() -> bool:
        counts = await store.counts()
        return running.done() or (counts.new, counts.held, counts.retrying + counts.dead) == (0, 0, 1)

    await until(is_over, seconds=60)
    assert not running.done()
    [record] = await store.events(EVERYTHING)
    relay.stop()
    await running
    await relay.close()
    assert seen == dict.fromkeys(range(EVENTS), 1)
    assert json.loads(record.event.payload) == {"number": CULPRIT}
    return record


@pytest.mark.parametrize(
    ("way", "odd"),
    [(way, name) for way in WAYS for name in OUTCOMES] + [("handler", name) for name in VERDICTS],
    ids=lambda value: value.replace(" ", "-"),
)
async def test_good_events_beside_an_odd_outcome_are_handled_once(kit: Kit, store: Store, way: str, odd: str) -> None:
    make, state, error = {**OUTCOMES, **VERDICTS}[odd]
    record = await relay_with(kit, store, way, make)
    assert (record.state, without_calls(record.error or ""), record.attempts) == (state, error, 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("which", DELAYS, ids=lambda value: value.replace(" ", "-"))
async def test_good_events_beside_an_odd_delay_are_handled_once(kit: Kit, store: Store, way: str, which: str) -> None:
    after, least, most = DELAYS[which]
    begun = kit.now()
    record = await relay_with(kit, store, way, lambda: Retry("busy", after))
    assert (record.state, record.error, record.attempts) == ("waiting", "busy", 1)
    assert begun + least < record.until_at < kit.now() + most
