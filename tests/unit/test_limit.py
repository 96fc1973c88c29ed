"""The rate limit, and functions that change events on their way."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest.mock import ANY

import pytest

from pillarbox import CallableSink, Claim, ConfigError, Dead, Event, Relay, Retry, SinkUnavailable, open_sink
from pillarbox.errors import Unsupported
from pillarbox.event import DELIVERED, RELEASED
from pillarbox.sinks import Sink
from pillarbox.sinks.limit import Bucket, LimitedSink
from pillarbox.sinks.memory import MemorySink
from pillarbox.sinks.transform import TransformSink
from pillarbox.stores import Counts
from pillarbox.stores.memory import MemoryStore


class Time:
    """A clock whose sleepers do not wait: it jumps to when they want to wake."""

    def __init__(self) -> None:
        self.now = 100.0
        self.stopped_at = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


@pytest.fixture
def clock() -> Time:
    return Time()


def claim(name: str, key: str | None = None) -> Claim:
    return Claim(row=name, event=Event(name, {"n": name}, key=key), attempt=1)


def limited(sink: Sink, clock: Time, *, rate: float, burst: int) -> LimitedSink:
    made = LimitedSink(sink, rate=rate, burst=burst)
    made._bucket = Bucket(rate, burst, clock=clock, sleep=clock.sleep)
    return made


def names(sink: MemorySink) -> list[str]:
    return [event.type for event in sink.events]


async def test_a_burst_goes_at_once_and_the_rest_at_the_rate(clock):
    sink = MemorySink()
    outcomes = await limited(sink, clock, rate=10, burst=5).deliver([claim(str(n)) for n in range(25)])
    assert outcomes == [DELIVERED] * 25
    assert names(sink) == [str(n) for n in range(25)]
    assert clock.now == pytest.approx(102.0)  # 20 events beyond the burst, 10 a second


async def test_batches_share_the_rate(clock):
    sink = limited(MemorySink(), clock, rate=10, burst=1)
    await asyncio.gather(*(sink.deliver([claim("a"), claim("b")]) for _ in range(3)))
    assert clock.now == pytest.approx(100.5)


async def test_rate_below_one_a_second_is_possible(clock):
    await limited(MemorySink(), clock, rate=0.5, burst=1).deliver([claim("a"), claim("b")])
    assert clock.now == pytest.approx(102.0)


def test_burst_is_a_second_of_the_rate_unless_given():
    assert [LimitedSink(MemorySink(), rate=rate)._bucket._burst for rate in (0.5, 7.5)] == [1, 7]


async def test_key_that_failed_in_an_earlier_part_is_not_tried_further(clock):
    sink = MemorySink()
    sink.fail(lambda event: event.type == "k1", Dead("no"), times=None)
    batch = [claim("k1", "k"), claim("k2", "k"), claim("j1", "j"), claim("-"), claim("k3", "k")]
    outcomes = await limited(sink, clock, rate=10, burst=1).deliver(batch)
    assert outcomes == [Dead("no"), RELEASED, DELIVERED, DELIVERED, RELEASED]
    assert names(sink) == ["j1", "-"]


async def test_outage_keeps_what_earlier_parts_won(clock):
    sink = MemorySink()
    sink.go_down_at(lambda event: event.type == "c")
    with pytest.raises(SinkUnavailable) as outage:
        await limited(sink, clock, rate=10, burst=2).deliver([claim(name) for name in "abcde"])
    assert outage.value.outcomes == [DELIVERED, DELIVERED, RELEASED, RELEASED, RELEASED]


async def test_a_long_batch_is_given_back_in_part(clock):
    sink = MemorySink()
    outcomes = await limited(sink, clock, rate=8, burst=4).deliver([claim(str(n)) for n in range(500)])
    assert outcomes == [DELIVERED] * 28 + [RELEASED] * 472  # 4 at once, then 3 seconds of 8 a second
    assert names(sink) == [str(n) for n in range(28)]
    assert clock.now == 103.0


async def test_a_call_does_not_wait_for_a_token_that_comes_too_late(clock):
    sink = limited(MemorySink(), clock, rate=0.1, burst=1)
    assert await sink.deliver([claim("a"), claim("b")]) == [DELIVERED, RELEASED]
    assert clock.now == 100.0


async def test_a_call_waits_for_its_first_token_however_long_that_takes(clock):
    sink = limited(MemorySink(), clock, rate=0.1, burst=1)
    await sink.deliver([claim("a")])
    assert await sink.deliver([claim("b"), claim("c")]) == [DELIVERED, RELEASED]
    assert clock.now == pytest.approx(110.0)


async def test_a_slow_destination_counts_towards_the_length_of_a_call(clock):
    async def take_two_seconds(event: Event) -> None:
        clock.now += 2

    sink = limited(CallableSink(take_two_seconds), clock, rate=1000, burst=1)
    assert await sink.deliver([claim(name) for name in "abcd"]) == [DELIVERED, DELIVERED, RELEASED, RELEASED]


async def test_calls_that_stand_in_line_count_those_before_them(clock):
    sink = limited(MemorySink(), clock, rate=1, burst=1)
    await sink.deliver([claim("takes the burst")])
    outcomes = await asyncio.gather(*(sink.deliver([claim("a"), claim("b")]) for _ in range(4)))
    # When the first call wants a second token, the next three are spoken for: its own would come after 5 seconds.
    assert outcomes == [[DELIVERED, RELEASED]] * 4
    assert clock.now == pytest.approx(104.0)


async def test_a_cancelled_call_does_not_stay_in_line(clock):
    sink = limited(MemorySink(), clock, rate=0.5, burst=1)
    await sink.deliver([claim("a")])
    waiting = [asyncio.create_task(sink.deliver([claim("b")])) for _ in range(2)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await sink.deliver([claim("c"), claim("d")]) == [DELIVERED, DELIVERED]


async def test_rate_holds_over_several_calls(clock):
    came_at: list[float] = []

    async def note(event: Event) -> None:
        came_at.append(clock.now)

    sink = limited(CallableSink(note), clock, rate=8, burst=4)
    batch = [claim(str(n)) for n in range(100)]
    while batch:
        outcomes = await sink.deliver(batch)
        batch = [claim for claim, outcome in zip(batch, outcomes, strict=True) if outcome == RELEASED]
    assert came_at == [100.0] * 4 + [100 + n / 8 for n in range(1, 97)]


async def test_each_claim_is_looked_at_a_few_times_however_many_parts_there_are(clock):
    looks = 0

    class Watched(list[Claim]):
        def __iter__(self) -> Iterator[Claim]:
            nonlocal looks
            for found in super().__iter__():
                looks += 1
                yield found

    batch = Watched(claim(str(n)) for n in range(200))
    assert await limited(MemorySink(), clock, rate=1000, burst=1).deliver(batch) == [DELIVERED] * 200
    assert looks <= 200


@pytest.mark.parametrize("in_flight", [1, 2])
async def test_relay_delivers_what_was_given_back_once_and_in_order(clock, in_flight):
    store = MemoryStore()
    events = [Event(f"{n}", {}, key=f"k{n % 7}") for n in range(300)] + [Event(f"-{n}", {}) for n in range(100)]
    store.put(*events)
    sink = MemorySink()
    relay = Relay(store, limited(sink, clock, rate=8, burst=4), batch_size=100, in_flight=in_flight)
    async with relay:
        remains = await relay.drain()
    assert relay.mode == "lease"
    assert remains == Counts()
    assert sorted(names(sink)) == sorted(event.type for event in events)
    assert {claim.attempt for claim in sink.claims} == {1}
    for key in {event.key for event in events} - {None}:
        assert [event.type for event in sink.events if event.key == key] == [e.type for e in events if e.key == key]
    assert clock.now == pytest.approx(100 + (400 - 4) / 8)


async def test_relay_that_stops_ends_soon_and_settles_what_it_delivered(clock):
    store = MemoryStore()
    store.put(*(Event(str(n), {}) for n in range(500)))
    came: list[str] = []

    async def note(event: Event) -> None:
        came.append(event.type)
        if len(came) == 100:
            relay.stop()
            clock.stopped_at = clock.now

    async with Relay(store, limited(CallableSink(note), clock, rate=8, burst=4), in_flight=1) as relay:
        await relay.run()
    assert clock.now - clock.stopped_at <= 3
    assert len(set(came)) == len(came)
    assert await store.counts() == Counts(new=500 - len(came), oldest_pending=ANY)


async def test_limited_sink_is_never_held():
    assert MemorySink().is_quick
    sink = LimitedSink(MemorySink(), rate=1)
    assert not sink.is_quick
    assert not TransformSink(sink, mask).is_quick
    with pytest.raises(Unsupported, match="too slow to hold rows locked meanwhile"):
        await Relay(MemoryStore(), sink, claim="hold").open()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0}, "rate: expected a number of events a second above zero, got 0"),
        ({"rate": "fast"}, "rate: expected a number of events a second above zero, got 'fast'"),
        ({"rate": 5, "burst": 0}, "burst: expected a whole number of 1 or more, got 0"),
        ({"burst": 5}, "burst: give rate as well"),
        ({"transform": "nowhere"}, "transform: expected module:function, got 'nowhere'"),
        ({"transform": "no.such:thing"}, "transform: module 'no.such' cannot be imported"),
        ({"transform": "json:nothing"}, "transform: 'json' has no function 'nothing'"),
        ({"transform": 5}, "transform: expected a function of an event, got 5"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        open_sink("null:", **options)


def test_every_sink_takes_them_in_its_url():
    assert isinstance(open_sink("null:?rate=5&burst=2"), LimitedSink)
    assert isinstance(open_sink("null:?transform=tests.unit.test_limit:mask"), TransformSink)


# -- transform ---------------------------------------------------------------------------------------------------------


def mask(event: Event) -> Event | None:
    if event.type == "secret":
        return None
    return event.replace(payload={"masked": True}, topic="masked")


async def test_sink_gets_what_the_function_returns():
    sink = MemorySink()
    sent = claim("order", "k")
    assert await TransformSink(sink, mask).deliver([sent]) == [DELIVERED]
    (event,) = sink.events
    assert (event.id, event.type, event.key) == (sent.event.id, "order", "k")
    assert (event.topic, event.payload) == ("masked", b'{"masked":true}')
    assert sent.event.payload == b'{"n":"order"}'


async def test_function_may_be_async():
    async def later(event: Event) -> Event:
        await asyncio.sleep(0)
        return event.replace(topic="later")

    sink = MemorySink()
    await TransformSink(sink, later).deliver([claim("a")])
    assert [event.topic for event in sink.events] == ["later"]


async def test_sink_with_an_async_function_is_not_quick():
    async def look_up(event: Event, place: str = "") -> Event:
        return event

    class LookUp:
        async def __call__(self, event: Event) -> Event:
            return event

    assert TransformSink(MemorySink(), mask).is_quick
    for function in (look_up, functools.partial(look_up, place="x"), LookUp()):
        assert not TransformSink(MemorySink(), function).is_quick


async def test_event_that_is_left_out_counts_as_delivered_and_is_counted(caplog):
    caplog.set_level(logging.INFO, "pillarbox.relay")
    sink = MemorySink()
    changed = TransformSink(sink, mask)
    batch = [claim("a"), claim("secret"), claim("b"), claim("secret")]
    assert await changed.deliver(batch) == [DELIVERED] * 4
    assert await changed.deliver([claim("c")]) == [DELIVERED]
    assert names(sink) == ["a", "b", "c"]
    assert changed.left_out == 2
    assert caplog.messages == ["Sink memory:: left out 2 events, as its transform says."]


async def test_event_is_not_counted_as_left_out_before_its_turn():
    sink = MemorySink()
    sink.fail(lambda event: event.type == "a", Retry("no"))
    changed = TransformSink(sink, mask)
    assert await changed.deliver([claim("a", "k"), claim("secret", "k")]) == [Retry("no"), RELEASED]
    assert changed.left_out == 0


async def test_failure_of_the_function_is_that_events_own_and_stops_its_key():
    def fail(event: Event) -> Event:
        if event.type == "k2":
            raise ValueError("cannot read it")
        return event.replace(key="one for all")

    sink = MemorySink()
    batch = [claim("k1", "k"), claim("k2", "k"), claim("k3", "k"), claim("j1", "j")]
    outcomes = await TransformSink(sink, fail).deliver(batch)
    failed = outcomes[1]
    assert isinstance(failed, Retry)
    text, *calls = failed.error.splitlines()
    assert text == "The transform failed: ValueError: cannot read it"
    assert calls[-1] == '    raise ValueError("cannot read it")'
    assert outcomes == [DELIVERED, failed, RELEASED, DELIVERED]
    assert names(sink) == ["k1", "j1"]


async def test_something_else_than_an_event_is_a_failure():
    wrong: Any = lambda event: "text"  # noqa: E731
    outcomes = await TransformSink(MemorySink(), wrong).deliver([claim("a")])
    assert outcomes == [Retry("The transform returned 'text'; expected an Event or None")]


async def test_outage_behind_the_function_is_passed_on():
    sink = MemorySink()
    sink.go_down_at(lambda event: event.type == "b")
    changed = TransformSink(sink, mask)
    with pytest.raises(SinkUnavailable) as outage:
        await changed.deliver([claim("a"), claim("secret"), claim("b", "k"), claim("secret", "k")])
    assert outage.value.outcomes == [DELIVERED, DELIVERED, RELEASED, RELEASED]
    assert changed.left_out == 1  # the second one comes again with the event before it


def by_first_letter(event: Event) -> Event:
    """Gives `x1` the key x; `-1` gets none."""
    return event.replace(key=None if event.type[0] == "-" else event.type[0])


class Destination:
    """Takes what comes in parallel; an event whose name has more letters takes longer."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.sink = CallableSink(self.take, concurrency=8)

    async def take(self, event: Event) -> None:
        for _ in range(10 * len(event.type)):
            await asyncio.sleep(0)
        if "fails" in event.type:
            raise ValueError("no")
        if "down" in event.type:
            raise SinkUnavailable("down")
        self.came.append(event.type)


@pytest.mark.parametrize("batch", [["x slow", "y"], ["- slow", "-"], ["x slow", "-", "x"], ["- slow", "x"]])
async def test_events_of_one_key_stay_in_order_whatever_keys_they_get(batch):
    destination = Destination()
    changed = TransformSink(destination.sink, by_first_letter)
    assert await changed.deliver([claim(name, "k") for name in batch]) == [DELIVERED] * len(batch)
    assert destination.came == batch


async def test_keys_are_sent_in_one_batch_where_the_sink_keeps_their_order():
    sink = MemorySink()
    changed = TransformSink(sink, by_first_letter)
    batch = [claim("x1", "k"), claim("y1", "j"), claim("-1"), claim("-2"), claim("x2", "k"), claim("x3", "i")]
    await changed.deliver([*batch, claim("y2", "j"), claim("-3", "h"), claim("z"), claim("a")])
    assert len(sink.batches) == 1


async def test_only_what_must_wait_is_sent_later():
    sink = MemorySink()
    changed = TransformSink(sink, by_first_letter)
    await changed.deliver([claim(name, name[-1]) for name in ("x1", "y1", "x2", "y1", "-2", "z1", "z3")])
    sent = [[claim.event.type for claim in batch] for batch in sink.batches]
    assert sent == [["x1", "x2", "z3"], ["y1", "y1", "-2"], ["z1"]]


async def test_event_behind_one_that_failed_is_not_sent_under_another_key():
    destination = Destination()
    changed = TransformSink(destination.sink, by_first_letter)
    batch = [claim("x fails", "k"), claim("y", "k"), claim("z", "k"), claim("x", "j"), claim("y", "j")]
    outcomes = await changed.deliver(batch)
    assert isinstance(outcomes[0], Retry)
    # The sink below stops the key that two keys have in common, and with it the second of them.
    assert outcomes[1:] == [RELEASED] * 4
    assert await changed.deliver(batch[3:]) == [DELIVERED] * 2
    assert destination.came == ["x", "y"]


async def test_outage_in_a_later_step_keeps_what_the_earlier_ones_won():
    destination = Destination()
    changed = TransformSink(destination.sink, by_first_letter)
    with pytest.raises(SinkUnavailable) as outage:
        await changed.deliver([claim("x", "k"), claim("y down", "k"), claim("z", "k"), claim("a")])
    assert outage.value.outcomes == [DELIVERED, RELEASED, RELEASED, DELIVERED]
    assert sorted(destination.came) == ["a", "x"]


async def test_what_is_not_sent_step_by_step_in_time_is_given_back(clock):
    sink = MemorySink()
    changed = TransformSink(limited(sink, clock, rate=1, burst=1), by_first_letter)
    changed._clock = clock
    outcomes = await changed.deliver([claim(f"-{n}", "k") for n in range(10)])
    assert outcomes == [DELIVERED] * 5 + [RELEASED] * 5  # at 100, 101, … and the one begun at 103
    assert names(sink) == ["-0", "-1", "-2", "-3", "-4"]


def test_replace_keeps_the_rest_and_checks_the_changes():
    event = Event("a", {"n": 1}, key="k", headers={"h": 1}, delay=timedelta(seconds=5))
    changed = event.replace(key=None, headers={"h": 2})
    assert (changed.id, changed.payload, changed.delay) == (event.id, event.payload, event.delay)
    assert (changed.key, dict(changed.headers)) == (None, {"h": 2})
    assert event.replace(payload=b"raw").content_type == "application/octet-stream"
    with pytest.raises(ValueError, match="Event topic: expected text, got an empty string"):
        event.replace(topic="")
    with pytest.raises(TypeError, match="got 'tpoic'"):
        event.replace(tpoic="x")
