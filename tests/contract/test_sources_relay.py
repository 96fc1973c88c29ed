"""Sources with a relay behind them: failures, slow handlers, consumers that come and go, kills and outages."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest

from pillarbox import Relay
from pillarbox.errors import StoreUnavailable
from pillarbox.event import Claim, Event
from pillarbox.retry import Constant
from pillarbox.sinks.callable import CallableSink
from tests.contract.sources import (
    GROUP,
    assert_order,
    claim,
    every_source,
    name_of,
    names_of,
    number_names,
    settle,
    source_kit,
    sources_that,
    take,
    take_names,
    until,
    until_told,
)
from tests.servers import ROOT

__all__ = ["source_kit"]

KEYS = 20


def send_numbers(kit: Any, count: int, *, start: int = 0) -> None:
    """Send numbers, each with the key it has modulo KEYS, in order."""
    kit.send_pairs([(f"key-{number % KEYS}", f"{number}") for number in range(start, start + count)])


@asynccontextmanager
async def running(source: Any, handle: Callable[..., Any], **options: Any):
    """A relay at work; stopped in order when the block ends."""
    given = {"poll": timedelta(milliseconds=100), "retry": Constant(timedelta(milliseconds=20)), **options}
    async with Relay(source, CallableSink(handle, concurrency=8), **given) as relay:
        task = asyncio.create_task(relay.run())
        try:
            yield relay
        finally:
            relay.stop()
            await task


@every_source
async def test_failures_lose_nothing_and_keep_the_order_of_keys(kit):
    send_numbers(kit, 600)
    tried: Counter[str] = Counter()
    handled: list[str] = []

    async def handle(event: Event) -> None:
        name = name_of(event)
        tried[name] += 1
        if int(name) % 25 == 0 and tried[name] == 1:
            raise ValueError("once")
        await asyncio.sleep(0)
        handled.append(name)

    source = kit.make_source()
    async with running(source, handle, batch_size=50):
        await until(lambda: len(set(handled)) == 600, within=60)
        await until_told(kit.remaining, 0)
    assert sorted(handled, key=int) == number_names(600)
    assert {name for name, times in tried.items() if times == 2} == {f"{number}" for number in range(0, 600, 25)}
    assert_order(handled, keys=KEYS)


@every_source
async def test_message_that_cannot_be_read_is_buried_and_its_neighbours_are_handled(kit):
    broken = b'{"specversion": "1.0", "id"'
    kit.send_named("before")
    kit.send(broken, headers={"content-type": "application/cloudevents+json"})
    kit.send_named("after")
    handled: list[str] = []
    async with running(kit.make_source(), lambda event: handled.append(name_of(event))):
        await until_told(kit.remaining, 0)
    assert sorted(handled) == ["after", "before"]
    (letter,) = kit.letters.letters
    assert letter.raw.body == broken
    assert letter.error.startswith("Message cannot be read: ")


@every_source
async def test_message_that_fails_too_often_is_buried_and_its_key_goes_on(kit):
    kit.send_named("bad", "good", key="k")
    attempts: list[int] = []
    handled: list[str] = []

    async def handle(claim: Claim) -> None:
        name = name_of(claim.event)
        if name == "bad":
            attempts.append(claim.attempt)
            raise ValueError("never")
        handled.append(name)

    retry = Constant(timedelta(milliseconds=10), max_attempts=3)
    async with running(kit.make_source(), handle, retry=retry):
        await until_told(kit.remaining, 0)
    assert handled == ["good"]
    assert attempts == [1, 2, 3]
    (letter,) = kit.letters.letters
    assert letter.error.splitlines()[0] == "ValueError: never"


@every_source
async def test_stopping_finishes_what_is_under_way_and_gives_back_the_rest(kit):
    send_numbers(kit, 200)
    started: list[str] = []
    ended: list[str] = []
    gate = asyncio.Event()

    async def handle(event: Event) -> None:
        started.append(name_of(event))
        await gate.wait()
        ended.append(name_of(event))

    source = kit.make_source()
    async with asyncio.timeout(60), running(source, handle, batch_size=20, stop_timeout=timedelta(hours=1)) as relay:
        await until(lambda: started)
        relay.stop()
        gate.set()
    assert started == ended
    others: list[str] = []
    async with running(kit.make_source(), lambda event: others.append(name_of(event))):
        await until(lambda: {*ended, *others} == set(number_names(200)), within=kit.patience)
        await until_told(kit.remaining, 0)
    if not kit.keeps_one_offset:
        assert not set(ended) & set(others)


@every_source
async def test_handler_slower_than_any_lease_keeps_its_message(kit):
    source, other = [await kit.open_source(**kit.slow_options) for _ in range(2)]
    await kit.until_balanced([source, other])
    kit.send_named("slow")
    # Whichever of the two has the message, the other must not get it.
    owners = [source, other]
    await until(lambda: any(len(each.pending) for each in owners))
    owner = next(each for each in owners if len(each.pending))
    idle = next(each for each in owners if each is not owner)
    batch = await claim(owner)
    limit = time.monotonic() + kit.slow
    while time.monotonic() < limit:
        assert (await claim(idle)).claims == []
        await idle.wait(timedelta(milliseconds=100))
    assert (await settle([batch])).delivered == 1
    await until_told(kit.remaining, 0)


# -- several consumers -----------------------------------------------------------------------------------------------


@every_source
async def test_consumers_that_come_and_go_lose_nothing(kit):
    send_numbers(kit, 300)
    handled: list[str] = []
    by: dict[str, set[str]] = {"one": set(), "two": set()}

    def make_handler(consumer: str) -> Callable[[Event], Any]:
        async def handle(event: Event) -> None:
            await asyncio.sleep(0.01)
            handled.append(name_of(event))
            by[consumer].add(name_of(event))

        return handle

    one, two = kit.make_source(prefetch=20), kit.make_source(prefetch=20)
    async with running(one, make_handler("one"), batch_size=5):
        await until(lambda: len(handled) > 50)
        async with running(two, make_handler("two"), batch_size=5):
            await kit.until_balanced([one, two])
            send_numbers(kit, 300, start=300)
            await until(lambda: len(by["two"]) > 50, within=30)
        # The second has gone in the middle of it: the first gets the rest.
        await until(lambda: set(handled) == set(number_names(600)), within=60)
        await until_told(kit.remaining, 0)
    if one.keeps_order:
        assert_order(handled, keys=KEYS)


@every_source
async def test_late_result_of_what_was_taken_away_changes_nothing(kit):
    kit.send_named("a")
    first = await kit.open_source()
    (batch,) = await take(first, 1)
    await kit.take_away(first)
    second = await kit.open_source()
    again = await take(second, 1, within=kit.patience)
    assert names_of(again) == ["a"]
    assert (await settle([batch])).lost == 1
    assert await asyncio.to_thread(kit.remaining) == 1
    assert (await settle(again)).delivered == 1
    await until_told(kit.remaining, 0)


class Worker:
    """A consumer process; what it has handled stands in a file."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, kit: Any, out: Any, *, pause: float) -> Worker:
        options = {"prefetch": 50, **kit.options}
        order = {"url": kit.url, "group": kit.named(GROUP), "options": options, "out": str(out), "pause": pause}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.contract.source_worker", json.dumps(order)),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        async with asyncio.timeout(60):
            assert await process.stdout.readline() == b"ready\n"
        return cls(process)

    async def end(self, how: signal.Signals) -> int:
        self._process.send_signal(how)
        async with asyncio.timeout(30):
            await self._process.communicate()
        assert self._process.returncode is not None
        return self._process.returncode


@every_source
async def test_consumers_killed_in_the_middle_lose_nothing(kit, tmp_path):
    send_numbers(kit, 200)
    out = tmp_path / "handled"

    def handled() -> list[str]:
        return out.read_text().split() if out.exists() else []

    first = await Worker.start(kit, out, pause=0.02)
    second = await Worker.start(kit, out, pause=0.02)
    await until(lambda: len(handled()) > 30, within=30)
    assert await first.end(signal.SIGKILL) == -signal.SIGKILL
    third = await Worker.start(kit, out, pause=0)
    await until(lambda: set(handled()) == set(number_names(200)), within=60)
    await until_told(kit.remaining, 0, within=30)
    assert await second.end(signal.SIGTERM) == 0
    assert await third.end(signal.SIGTERM) == 0
    # Of what was handled twice there is no more than the killed one had at hand, and what its offset lay behind.
    assert len(handled()) <= 200 + kit.repeats


# -- outages ---------------------------------------------------------------------------------------------------------


@sources_that("goes down")
async def test_broker_killed_in_the_middle_loses_nothing(kit):
    send_numbers(kit, 300)
    handled: list[str] = []

    async def handle(event: Event) -> None:
        await asyncio.sleep(0.002)
        handled.append(name_of(event))

    async with running(kit.make_source(prefetch=50), handle, batch_size=10):
        await until(lambda: len(handled) > 60, within=30)
        await asyncio.to_thread(kit.go_down)
        await asyncio.to_thread(kit.come_back)
        await until(lambda: set(handled) == set(number_names(300)), within=60)
        await asyncio.to_thread(send_numbers, kit, 100, start=300)
        await until(lambda: set(handled) == set(number_names(400)), within=60)
        await until_told(kit.remaining, 0, within=30)


async def claim_for_ever(source: Any) -> None:
    async with asyncio.timeout(30):
        while True:
            await claim(source)
            await source.wait(timedelta(milliseconds=100))


@sources_that("goes down")
async def test_broker_that_is_down_is_told_and_does_not_hinder_closing(kit):
    kit.send_named("a")
    source = await kit.open_source(timeout="2s")
    batches = await take(source, 1)
    await asyncio.to_thread(kit.go_down)
    # A source that has heard of it already has lost what was at hand; another learns it now.
    with suppress(StoreUnavailable):
        assert (await settle(batches)).lost == 1
    with pytest.raises(StoreUnavailable) as told:
        await claim_for_ever(source)
    assert "pillarbox:pillarbox" not in str(told.value)
    async with asyncio.timeout(60):
        await source.close()
    fresh = kit.make_source(timeout="2s")
    with pytest.raises(StoreUnavailable):
        await fresh.open()
    await asyncio.to_thread(kit.come_back)
    await fresh.open()
    assert await take_names(fresh, 1, within=kit.patience) == ["a"]
    await until_told(kit.remaining, 0)
