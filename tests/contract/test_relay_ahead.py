"""Claiming ahead, on every store: two claims beside each other in a backlog, and never anything lost by it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from pillarbox import Claim, Hook, Outcome, Relay, SchemaError, Settlement, SinkUnavailable, StoreUnavailable
from pillarbox.breaker import Breaker
from pillarbox.sinks.memory import MemorySink
from pillarbox.stores import Batch, Store
from tests.contract.stores import Kit, event, states, until
from tests.contract.test_relay import run_until


class Watch(Hook):
    """Stands before a store's `claim`, counts what is under way, and may make a claim wait or fail."""

    def __init__(self, store: Store) -> None:
        self._claim = store.claim
        self.claiming = self.most_claiming = 0
        self.batches = self.most_batches = 0
        self.limits: list[int] = []
        self.limits_beside: set[int] = set()
        self.error: Exception | None = None
        self.has_failed = False
        self.is_beside = asyncio.Event()
        self.settles_first = False
        """Whether a claim waits for the batches under way: else the machine decides whether there is one beside it."""
        self.has_settled = asyncio.Event()
        self.shuts_gate = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def claim(self, limit: int, **options: Any) -> Batch:
        self.limits.append(limit)
        self.claiming += 1
        self.most_claiming = max(self.most_claiming, self.claiming)
        self.most_batches = max(self.most_batches, self.claiming + self.batches)
        is_second = self.claiming == 2
        if is_second:
            self.limits_beside.add(limit)
            if self.shuts_gate:
                self.gate.clear()
        try:
            await asyncio.sleep(0)  # both claims have begun before one ends
            if is_second:
                self.is_beside.set()
            if is_second and self.error is not None:
                error, self.error, self.has_failed = self.error, None, True
                raise error
            while self.settles_first and self.batches and not is_second:
                self.has_settled.clear()
                await self.has_settled.wait()
            await self.gate.wait()
            return await self._claim(limit, **options)
        finally:
            self.claiming -= 1

    def claimed(self, batch: Batch) -> None:
        self.batches += 1

    def settled(self, batch: Batch, outcomes: Sequence[Outcome], settlement: Settlement) -> None:
        self.batches -= 1
        self.has_settled.set()


@pytest.fixture
def watch(store: Store) -> Any:
    watch = Watch(store)
    store.claim = watch.claim  # type: ignore[method-assign]
    yield watch
    del store.claim  # the class's own again


def put_backlog(kit: Kit, count: int = 60) -> None:
    kit.put(*[event(f"e{number}") for number in range(count)])


@pytest.mark.parametrize("settles_first", [False, True])
async def test_two_claims_run_beside_each_other_and_no_more_is_under_way_than_asked_for(
    kit: Kit, store: Store, watch: Watch, settles_first: bool
) -> None:
    watch.settles_first = settles_first
    put_backlog(kit)
    sink = MemorySink()
    await Relay(store, sink, batch_size=2, in_flight=3, hook=watch).drain()
    assert sorted(claim.event.type for claim in sink.claims) == sorted(f"e{number}" for number in range(60))
    assert watch.most_claiming <= 2
    assert watch.most_batches <= 3
    if settles_first:
        assert (watch.most_claiming, watch.most_batches) == (2, 3)


async def test_one_batch_at_a_time_means_one_claim_at_a_time(kit: Kit, store: Store, watch: Watch) -> None:
    put_backlog(kit, 10)
    await Relay(store, MemorySink(), batch_size=2, in_flight=1, hook=watch).drain()
    assert (watch.most_claiming, watch.most_batches) == (1, 1)


async def test_nothing_is_claimed_ahead_before_a_relay_has_started_carefully(
    kit: Kit, store: Store, watch: Watch
) -> None:
    watch.settles_first = True
    put_backlog(kit, 120)
    await Relay(store, MemorySink(), batch_size=8, in_flight=3, hook=watch).drain()
    assert watch.limits[0] == 1
    assert watch.limits_beside == {8}


async def test_a_look_into_an_empty_outbox_is_one_claim(kit: Kit, store: Store, watch: Watch) -> None:
    relay = Relay(store, MemorySink(), batch_size=2, in_flight=3)
    looks = 0
    idle = relay._idle

    async def count() -> None:
        nonlocal looks
        looks += 1
        await idle()

    relay._idle = count  # type: ignore[method-assign]
    await run_until(relay, lambda: looks >= 3)
    assert len(watch.limits) in (looks, looks + 1)  # the stop may come between a claim and its look
    assert watch.most_claiming == 1


async def test_stop_gives_back_what_is_being_claimed_ahead(kit: Kit, store: Store, watch: Watch) -> None:
    put_backlog(kit)
    sink = MemorySink()
    relay = Relay(store, sink, batch_size=2, in_flight=3, hook=watch)
    watch.shuts_gate = True
    running = asyncio.create_task(relay.run())
    await watch.is_beside.wait()
    relay.stop()
    watch.gate.set()
    await running
    left = await states(store)
    assert (len(left), set(left.values())) == (60 - len(sink.claims), {"ready"})
    assert len((await store.claim(100, mode="lease", lease=timedelta(seconds=30))).claims) == len(left)
    assert watch.batches == 0


@pytest.mark.parametrize("error", [StoreUnavailable("restarting"), SchemaError("no such column")])
async def test_drain_reports_a_claim_ahead_that_fails(kit: Kit, store: Store, watch: Watch, error: Exception) -> None:
    put_backlog(kit)
    sink = MemorySink()
    watch.error = error
    with pytest.raises(type(error), match=str(error)):
        await Relay(store, sink, batch_size=2, in_flight=3, hook=watch).drain()
    left = await states(store)
    assert (len(left), set(left.values())) == (60 - len(sink.claims), {"ready"})
    assert len((await store.claim(100, mode="lease", lease=timedelta(seconds=30))).claims) == len(left)
    assert watch.batches == 0


async def test_run_goes_on_after_a_claim_ahead_that_failed(kit: Kit, store: Store, watch: Watch) -> None:
    put_backlog(kit)
    sink = MemorySink()
    watch.error = StoreUnavailable("restarting")
    await run_until(Relay(store, sink, batch_size=2, in_flight=3, hook=watch), lambda: len(sink.claims) == 60)
    assert watch.has_failed
    assert await states(store) == {}


class FallingSink(MemorySink):
    """Goes down once, when a claim has been made beside another."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self.was_down = False

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        if self._watch.is_beside.is_set() and not self.was_down:
            self.was_down = True
            raise SinkUnavailable("down")
        return await super().deliver(claims)


async def test_a_destination_that_is_down_holds_nothing_claimed_ahead_and_is_probed_with_one_event(
    kit: Kit, store: Store, watch: Watch
) -> None:
    put_backlog(kit)
    watch.settles_first = True
    sink = FallingSink(watch)
    now = 0.0
    breaker = Breaker("memory", first=timedelta(milliseconds=100), clock=lambda: now)
    relay = Relay(store, sink, batch_size=4, in_flight=3, hook=watch, breaker=breaker)
    running = asyncio.create_task(relay.run())

    async def is_paused() -> bool:
        return sink.was_down and set((await states(store)).values()) == {"ready"} and watch.claiming == 0

    async def is_over() -> bool:
        return len(sink.claims) == 60

    await until(is_paused)
    assert not relay._ahead
    claims_before = len(watch.limits)
    now = 1.0
    await until(is_over)
    relay.stop()
    await running
    assert watch.limits[claims_before] == 1
    assert await states(store) == {}


async def test_claim_ahead_is_given_back_when_the_destination_turns_out_to_be_down(kit: Kit, store: Store) -> None:
    put_backlog(kit, 4)
    relay = Relay(store, MemorySink(), batch_size=4, in_flight=3)
    await relay.open()
    relay._ahead.start(relay._claim(is_prefetch=False))
    relay.breaker.failed(timedelta(hours=1))
    running = asyncio.create_task(relay._loop(drains=False))

    async def is_given_back() -> bool:
        return not relay._ahead and list((await states(store)).values()) == ["ready"] * 4

    await until(is_given_back)
    relay.stop()
    await running


async def test_claim_that_found_nothing_because_of_the_one_beside_it_does_not_end_a_drain(
    kit: Kit, store: Store, watch: Watch
) -> None:
    put_backlog(kit, 1)
    sink = MemorySink()
    relay = Relay(store, sink, batch_size=1, in_flight=3)
    await relay.open()
    relay._is_backlog = True
    ahead = asyncio.Event()
    claim = watch._claim

    async def take_the_second_first(limit: int, **options: Any) -> Batch:
        if not ahead.is_set() and not watch.is_beside.is_set():
            watch.is_beside.set()
            await ahead.wait()
            return await claim(limit, **options)
        batch = await claim(limit, **options)
        ahead.set()
        return batch

    store.claim = take_the_second_first  # type: ignore[method-assign]
    await relay._loop(drains=True)
    assert [each.event.type for each in sink.claims] == ["e0"]
    assert await states(store) == {}
