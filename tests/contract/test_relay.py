"""The relay on every store: one loop, whatever is under it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from pillarbox import (
    Claim,
    ConfigError,
    Constant,
    Dead,
    Hook,
    NoRetry,
    Outcome,
    Relay,
    Retry,
    Settlement,
    SinkUnavailable,
    StoreUnavailable,
    Unsupported,
)
from pillarbox import relay as relay_module
from pillarbox.breaker import Breaker
from pillarbox.event import DELIVERED
from pillarbox.sinks.memory import MemorySink
from pillarbox.stores import Batch, Effect, Filter, Store
from tests.contract.stores import HOUR, Kit, SqlKit, event, events, states, until

SECOND = timedelta(seconds=1)
SOON = Constant(timedelta(milliseconds=1), max_attempts=3)


def types(sink: MemorySink) -> str:
    return " ".join(claim.event.type for claim in sink.claims)


def has_type(*names: str) -> Any:
    return lambda candidate: candidate.type in names


def quick_breaker() -> Breaker:
    return Breaker("memory", first=timedelta(milliseconds=1), cap=timedelta(milliseconds=2))


class Recorder(Hook):
    """Notes what the relay reports."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, int]] = []
        self.lost_claims: list[Claim] = []
        self.settlements = Settlement()
        self.settled_once = asyncio.Event()

    def claimed(self, batch: Batch) -> None:
        self.batches.append((batch.mode, len(batch.claims)))

    def settled(self, batch: Batch, outcomes: Sequence[Outcome], settlement: Settlement) -> None:
        self.settlements += settlement
        self.settled_once.set()

    def lost(self, claims: Sequence[Claim]) -> None:
        self.lost_claims.extend(claims)


async def run_until(relay: Relay, condition: Any, *, seconds: float = 20) -> None:
    """Run a relay until a condition holds, then stop it the ordinary way."""
    running = asyncio.create_task(relay.run())

    async def holds() -> bool:
        return running.done() or condition()

    try:
        await until(holds, seconds=seconds)
    finally:
        relay.stop()
        await running


# -- delivering ------------------------------------------------------------------------------------------------------


async def test_run_once_delivers_one_batch_and_settles_it(kit: Kit, store: Store) -> None:
    kit.put(*events("a b c"))
    sink = MemorySink()
    relay = Relay(store, sink, batch_size=2)
    assert await relay.run_once() == Settlement(delivered=2)
    assert await relay.run_once() == Settlement(delivered=1)
    assert await relay.run_once() == Settlement()
    assert types(sink) == "a b c"
    assert await states(store) == {}


async def test_drain_delivers_everything_and_says_what_remains(kit: Kit, store: Store) -> None:
    kit.put(*[event(f"e{number}", f"k{number % 7}") for number in range(300)], event("late", delay=HOUR))
    sink = MemorySink()
    counts = await Relay(store, sink, batch_size=50).drain()
    assert len(sink.claims) == 300
    assert (counts.new, counts.held, counts.scheduled) == (0, 0, 1)


async def test_drain_pauses_before_what_somebody_else_has_locked(
    kit: Kit, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(kit, SqlKit) or kit.database.backend == "sqlite":
        pytest.skip("a row cannot be locked by itself here")
    locked = event("locked", delay=HOUR)
    kit.put(locked)
    await kit.pass_time(2 * HOUR)
    sink = MemorySink()
    looks: list[float] = []
    ask = store.next_due

    async def noted() -> timedelta | None:
        looks.append(time.monotonic())
        return await ask()

    monkeypatch.setattr(store, "next_due", noted)

    async def has_looked() -> bool:
        return len(looks) >= 5

    with kit.lock(locked):
        draining = asyncio.create_task(Relay(store, sink).drain())
        await until(has_looked)
    await draining
    assert types(sink) == "locked"
    # 20, 40, 80 and 160 milliseconds: a busy machine takes longer, a loop without a pause far less.
    assert looks[4] - looks[0] >= 0.3


async def test_each_key_arrives_in_order_through_several_batches(kit: Kit, store: Store) -> None:
    kit.put(*[event(f"e{number}", f"k{number % 3}") for number in range(200)])
    sink = MemorySink()
    await Relay(store, sink, batch_size=16, in_flight=3).drain()
    for key in ("k0", "k1", "k2"):
        numbers = [int(claim.event.type[1:]) for claim in sink.claims if claim.event.key == key]
        assert numbers == sorted(numbers)
    assert len(sink.claims) == 200


async def test_run_delivers_what_comes_later(kit: Kit, store: Store) -> None:
    sink = MemorySink()
    relay = Relay(store, sink)
    running = asyncio.create_task(relay.run())
    try:
        for number in range(3):
            kit.put(event(f"e{number}"))

            async def arrived(count: int = number + 1) -> bool:
                return len(sink.claims) == count

            await until(arrived)
    finally:
        relay.stop()
        await running
    assert types(sink) == "e0 e1 e2"


@pytest.mark.needs("wakes")
async def test_an_idle_relay_is_woken_long_before_its_next_look(kit: Kit, store: Store) -> None:
    sink = MemorySink()
    relay = Relay(store, sink, poll=timedelta(minutes=10))
    relay._pause = timedelta(minutes=10)
    await relay.open()
    idle = asyncio.Event()
    look = relay._idle

    async def notice() -> None:
        idle.set()
        await look()

    relay._idle = notice  # type: ignore[method-assign]
    running = asyncio.create_task(relay.run())
    await idle.wait()
    kit.put(event("a"))

    async def arrived() -> bool:
        return bool(sink.claims)

    await until(arrived, seconds=5)
    relay.stop()
    await running


@pytest.mark.needs("sql")
async def test_an_idle_relay_sleeps_until_the_next_event_is_due(kit: Kit, store: Store) -> None:
    kit.put(event("later", delay=timedelta(milliseconds=700)))
    sink = MemorySink()
    relay = Relay(store, sink, poll=timedelta(minutes=10))
    relay._pause = timedelta(minutes=10)
    await run_until(relay, lambda: sink.claims, seconds=10)
    assert types(sink) == "later"


# -- failing ---------------------------------------------------------------------------------------------------------


async def test_failed_event_is_tried_again_and_its_key_waits(kit: Kit, store: Store) -> None:
    kit.put(*events("a b c", "k"), event("x", "other"))
    sink = MemorySink()
    sink.fail(has_type("b"), Retry("no"))
    relay = Relay(store, sink, retry=Constant(HOUR, max_attempts=5))
    await relay.drain()
    assert types(sink) == "a x" or types(sink) == "x a"
    await kit.pass_time(2 * HOUR)
    await relay.drain()
    assert [claim.event.type for claim in sink.claims if claim.event.key == "k"] == ["a", "b", "c"]
    assert next(claim.attempt for claim in sink.claims if claim.event.type == "b") == 2


async def test_event_that_fails_too_often_is_dead_and_parks_its_key(kit: Kit, store: Store) -> None:
    kit.put(*events("a b", "k"))
    sink = MemorySink()
    sink.fail(has_type("a"), Retry("no"), times=None)
    relay = Relay(store, sink, retry=SOON)

    async def is_dead() -> bool:
        await relay.drain()
        return (await store.counts()).dead == 1

    await _pass_until(kit, is_dead)
    [record] = await store.events(Filter(), state="dead")
    assert (record.event.type, record.attempts, record.error, record.parks) == ("a", 3, "no", True)
    assert types(sink) == ""


async def _pass_until(kit: Kit, condition: Any) -> None:
    for _ in range(10):
        if await condition():
            return
        await kit.pass_time(SECOND)
    raise AssertionError("it never came true")


async def test_relay_says_which_events_died_and_why(kit: Kit, store: Store, caplog: pytest.LogCaptureFixture) -> None:
    bad = events(" ".join(["a"] * 100))
    kit.put(*bad, event("b"))
    sink = MemorySink("far")
    sink.fail(has_type("a"), Dead("no way"), times=None)
    await Relay(store, sink).drain()
    told = [
        re.fullmatch(
            r"Sink far: event (\S+) is dead(?: \(and (\d+) more of this batch\))?: no way", record.getMessage()
        )
        for record in caplog.records
        if record.levelno >= logging.WARNING
    ]
    assert {found[1] for found in told if found} <= {str(event.id) for event in bad}
    assert sum(1 + int(found[2] or 0) for found in told if found) == 100
    assert len(told) == sum(any(each.event.type == "a" for each in batch) for batch in sink.batches)


async def test_dead_event_lets_its_key_pass_when_told_to(kit: Kit, store: Store) -> None:
    kit.put(*events("a b", "k"))
    sink = MemorySink()
    sink.fail(has_type("a"), Dead("never"))
    await Relay(store, sink, dead="skip").drain()
    assert types(sink) == "b"


async def test_the_rows_own_limit_of_attempts_wins(kit: Kit, store: Store) -> None:
    kit.put(event("a", max_attempts=1))
    sink = MemorySink()
    sink.fail(has_type("a"), Retry("no"))
    await Relay(store, sink).drain()
    assert await states(store) == {"a": "dead"}


async def test_no_retry_makes_the_first_failure_the_last(kit: Kit, store: Store) -> None:
    kit.put(event("a"))
    sink = MemorySink()
    sink.fail(has_type("a"), Retry("no"))
    assert await Relay(store, sink, retry=NoRetry()).run_once() == Settlement(dead=1)


async def test_a_sink_may_say_itself_when_to_try_again(kit: Kit, store: Store) -> None:
    kit.put(event("a"))
    sink = MemorySink()
    sink.fail(has_type("a"), Retry("busy", after=2 * HOUR))
    await Relay(store, sink).run_once()
    due = await store.next_due()
    assert due is not None
    assert timedelta(minutes=119) < due <= 2 * HOUR


async def test_destination_that_is_down_costs_no_attempt(kit: Kit, store: Store) -> None:
    kit.put(*events("a b", "k"))
    sink = MemorySink()
    sink.go_down()
    relay = Relay(store, sink, breaker=quick_breaker())
    with pytest.raises(SinkUnavailable):
        await relay.drain()
    assert (await store.counts()).new == 2
    sink.come_back()
    await run_until(relay, lambda: len(sink.claims) == 2)
    assert [claim.attempt for claim in sink.claims] == [1, 1]


async def test_a_relay_waits_for_a_destination_and_goes_on(kit: Kit, store: Store) -> None:
    kit.put(*events("a b c", "k"))
    sink = MemorySink()
    sink.go_down()
    breaker = Breaker("memory", first=timedelta(milliseconds=5), cap=timedelta(milliseconds=10))
    relay = Relay(store, sink, breaker=breaker)
    running = asyncio.create_task(relay.run())

    async def paused() -> bool:
        return breaker.state != "closed"

    await until(paused)
    sink.come_back()

    async def arrived() -> bool:
        return len(sink.claims) == 3

    await until(arrived)
    relay.stop()
    await running
    assert types(sink) == "a b c"
    assert breaker.state == "closed"


class OverBreaker(Breaker):
    """Its pause is over between the question whether it is open and the question for how long."""

    is_asked = False

    @property
    def is_open(self) -> bool:
        first, self.is_asked = not self.is_asked, True
        return first

    def wait(self) -> float:
        return 0.0


async def test_a_pause_that_is_over_when_it_is_waited_for_ends(kit: Kit, store: Store) -> None:
    kit.put(event("a"))
    sink = MemorySink()
    await run_until(Relay(store, sink, breaker=OverBreaker("memory")), lambda: sink.claims, seconds=10)
    assert types(sink) == "a"


async def test_what_was_delivered_before_the_destination_went_down_is_not_sent_again(kit: Kit, store: Store) -> None:
    kit.put(*events("a b c"))
    sink = MemorySink()
    sink.go_down_at(has_type("c"))
    relay = Relay(store, sink, breaker=quick_breaker())
    assert await relay.run_once() == Settlement(delivered=2, released=1)
    sink.come_back()
    await run_until(relay, lambda: len(sink.claims) == 3)
    assert sorted(claim.event.type for claim in sink.claims) == ["a", "b", "c"]


class BrokenSink(MemorySink):
    """Raises on a batch that contains a bad event, as a defect in a sink would."""

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        if any(claim.event.type == "bad" for claim in claims):
            raise RuntimeError("cannot encode")
        return await super().deliver(claims)


async def test_a_sink_that_breaks_on_one_event_delivers_the_others(kit: Kit, store: Store) -> None:
    kit.put(event("a", "k"), event("bad", "k"), event("b", "k"), event("c", "other"))
    sink = BrokenSink()
    settlement = await Relay(store, sink, retry=Constant(HOUR)).run_once()
    assert settlement == Settlement(delivered=2, retried=1, released=1)
    [failed] = [record for record in await store.events(Filter()) if record.event.type == "bad"]
    text, *calls = (failed.error or "").splitlines()
    assert text == "RuntimeError: cannot encode"
    assert calls[-1] == '    raise RuntimeError("cannot encode")'


class LateSink(MemorySink):
    """Lets its client's timeout out."""

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        raise TimeoutError("no answer in time")


async def test_a_timeout_of_the_sink_counts_against_the_event(kit: Kit, store: Store) -> None:
    kit.put(event("a"))
    assert await Relay(store, LateSink(), retry=Constant(HOUR)).run_once() == Settlement(retried=1)
    [failed] = await store.events(Filter())
    assert failed.attempts == 1
    assert (failed.error or "").splitlines()[0] == "TimeoutError: no answer in time"


class UnopenedSink(MemorySink):
    async def open(self) -> None:
        raise ValueError("bad certificate")


async def test_a_sink_that_cannot_be_opened_is_a_destination_that_is_down(kit: Kit, store: Store) -> None:
    kit.put(event("a"))
    with pytest.raises(SinkUnavailable, match="could not be opened: ValueError: bad certificate"):
        await Relay(store, UnopenedSink()).drain()
    assert (await store.counts()).new == 1


async def test_run_once_takes_events_that_were_tried_before(kit: Kit, store: Store) -> None:
    kit.put(event("a"))
    sink = MemorySink()
    sink.fail(has_type("a"), Retry("no"))
    relay = Relay(store, sink, retry=Constant(HOUR))
    assert await relay.run_once() == Settlement(retried=1)
    await kit.pass_time(2 * HOUR)
    assert await relay.run_once() == Settlement(delivered=1)


async def test_event_that_dies_by_a_lapsed_lease_lets_its_key_pass_when_told_to(kit: Kit, store: Store) -> None:
    kit.put(event("a", "k", max_attempts=1), event("b", "k"))
    await store.claim(1, mode="lease", lease=SECOND)
    await kit.pass_time(HOUR)
    sink = MemorySink()
    await Relay(store, sink, dead="skip").drain()
    assert types(sink) == "b"
    assert await states(store) == {"a": "dead"}


class ForgetfulSink(MemorySink):
    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        return [DELIVERED]


async def test_a_sink_that_forgets_outcomes_settles_nothing_by_mistake(kit: Kit, store: Store) -> None:
    kit.put(*events("a b c"))
    settlement = await Relay(store, ForgetfulSink()).run_once()
    # One by one it answers for each.
    assert settlement == Settlement(delivered=3)


# -- starting, stopping, holding -------------------------------------------------------------------------------------


async def test_a_relay_starts_with_few_events_by_lease(kit: Kit, store: Store) -> None:
    kit.put(*[event(f"e{number}") for number in range(40)])
    recorder = Recorder()
    await Relay(store, MemorySink(), batch_size=8, in_flight=1, hook=recorder).drain()
    last = "hold" if "hold" in store.modes else "lease"
    assert recorder.batches[:4] == [("lease", 1), ("lease", 2), ("lease", 4), (last, 8)]


async def test_stop_waits_for_what_is_under_way(kit: Kit, store: Store) -> None:
    kit.put(event("a"))
    sink = MemorySink()
    sink.block()
    relay = Relay(store, sink)
    running = asyncio.create_task(relay.run())
    await sink.until_blocked()
    relay.stop()
    sink.unblock()
    await running
    assert types(sink) == "a"
    assert await states(store) == {}


async def test_stop_gives_back_what_takes_too_long(kit: Kit, store: Store) -> None:
    kit.put(event("a"))
    sink = MemorySink(is_quick=False)
    sink.block()
    relay = Relay(store, sink, stop_timeout=timedelta(milliseconds=20))
    running = asyncio.create_task(relay.run())
    await sink.until_blocked()
    relay.stop()
    await running
    [record] = await store.events(Filter())
    assert (record.state, record.attempts) == ("ready", 0)


async def test_a_slow_hold_is_given_up_for_a_lease(
    kit: Kit, hold_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "HOLD_TIMEOUT", timedelta(milliseconds=20))
    kit.put(event("a"))
    sink = MemorySink()
    sink.block()
    recorder = Recorder()
    relay = Relay(hold_store, sink, hook=recorder)
    assert await relay.run_once() == Settlement(released=1)
    sink.unblock()
    assert await relay.run_once() == Settlement(delivered=1)
    assert recorder.batches == [("hold", 1), ("lease", 1)]


@pytest.mark.needs("sql")
async def test_a_lease_is_renewed_while_its_delivery_runs(kit: Kit, store: Store) -> None:
    kit.put(event("a"))
    sink = MemorySink(is_quick=False)
    sink.block()
    relay = Relay(store, sink, lease=SECOND)
    running = asyncio.create_task(relay.run_once())
    await sink.until_blocked()
    [before] = await store.events(Filter())

    async def is_renewed() -> bool:
        [now] = await store.events(Filter())
        return now.until_at is not None and before.until_at is not None and now.until_at > before.until_at

    await until(is_renewed)
    sink.unblock()
    assert await running == Settlement(delivered=1)


async def test_lost_lease_changes_nothing_and_is_reported(kit: Kit, store: Store) -> None:
    kit.put(event("a"))
    sink = MemorySink(is_quick=False)
    sink.block()
    relay = Relay(store, sink)
    running = asyncio.create_task(relay.run_once())
    await sink.until_blocked()
    await kit.pass_time(HOUR)
    other = MemorySink(is_quick=False)
    assert await Relay(await kit.open(), other).run_once() == Settlement(delivered=1)
    sink.unblock()
    assert await running == Settlement(lost=1)


async def test_hold_is_refused_where_it_would_last_too_long(kit: Kit, store: Store) -> None:
    relay = Relay(store, MemorySink(is_quick=False), claim="hold")
    with pytest.raises(Unsupported, match=r"claim by lease|cannot claim by hold"):
        await relay.open()


# After the fifth failure more than a second has passed.
@pytest.mark.parametrize(("lease", "count"), [(None, 2), (timedelta(seconds=1), 5)], ids=["long lease", "short lease"])
async def test_settling_is_tried_again_for_a_while(
    kit: Kit, store: Store, caplog: pytest.LogCaptureFixture, lease: timedelta | None, count: int
) -> None:
    kit.put(event("a"))
    relay = Relay(store, MemorySink(is_quick=False), lease=lease)
    await relay.open()
    batch = await relay._claim(is_prefetch=False)
    settle, failures = batch.settle, iter([*[True] * count, False])

    async def flaky(outcomes: Sequence[Outcome], *, park: bool = True, effect: Effect | None = None) -> Settlement:
        if next(failures):
            raise StoreUnavailable("gone for a moment")
        return await settle(outcomes, park=park, effect=effect)

    batch.settle = flaky  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "pillarbox"):
        assert await relay._deliver(batch) == Settlement(delivered=1)
    assert caplog.messages == ["Could not settle 1 event yet, trying again: gone for a moment"]


async def test_a_store_that_is_down_is_waited_for(kit: Kit, store: Store) -> None:
    kit.put(event("a"))
    sink = MemorySink()
    relay = Relay(store, sink)
    claim, failures = store.claim, iter([True, True])

    async def flaky(*args: Any, **options: Any) -> Any:
        if next(failures, False):
            raise StoreUnavailable("restarting")
        return await claim(*args, **options)

    store.claim = flaky  # type: ignore[method-assign]
    try:
        await run_until(relay, lambda: sink.claims)
    finally:
        del store.claim  # the class's own again
    assert types(sink) == "a"


async def test_retained_rows_are_pruned_when_their_time_is_over(kit: Kit) -> None:
    store = await kit.open(retention=HOUR)
    kit.put(event("old"))
    sink = MemorySink()
    await Relay(store, sink).drain()
    await kit.pass_time(2 * HOUR)
    kit.put(event("new"))
    await run_until(Relay(store, sink), lambda: len(sink.claims) == 2)
    assert await states(store) == {"new": "delivered"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "positive batch_size"),
        ({"in_flight": 0}, "positive batch_size and in_flight"),
        ({"lease": timedelta(0)}, "lease of at least a second"),
        ({"claim": "grab"}, "'grab'"),
        ({"dead": "bury"}, "'bury'"),
        ({"poll": timedelta(0)}, "poll above zero"),
    ],
)
async def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    from pillarbox.testing import MemoryStore

    with pytest.raises(ConfigError, match=message):
        Relay(MemoryStore(), MemorySink(), **options)
