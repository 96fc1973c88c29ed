"""The rate limit, and functions that change events on their way."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest

from pillarbox import Claim, ConfigError, Dead, Event, Retry, SinkUnavailable, open_sink
from pillarbox.event import DELIVERED, RELEASED
from pillarbox.sinks.limit import LimitedSink
from pillarbox.sinks.memory import MemorySink
from pillarbox.sinks.transform import TransformSink


class Time:
    """A clock whose sleepers do not wait: it jumps to when they want to wake."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock():
    made = Time()
    with patch("pillarbox.sinks.limit.asyncio.sleep", made.sleep):
        yield made


def claim(name: str, key: str | None = None) -> Claim:
    return Claim(row=name, event=Event(name, {"n": name}, key=key), attempt=1)


def limited(sink: MemorySink, clock: Time, **options) -> LimitedSink:
    made = LimitedSink(sink, **options)
    made._bucket._clock = clock
    made._bucket._filled_at = clock()
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
    await limited(MemorySink(), clock, rate=0.5).deliver([claim("a"), claim("b"), claim("c")])
    assert clock.now == pytest.approx(104.0)


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


async def test_limited_sink_is_not_quick():
    assert MemorySink().is_quick
    assert not LimitedSink(MemorySink(), rate=1).is_quick


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


async def test_event_that_is_left_out_counts_as_delivered_and_is_counted():
    sink = MemorySink()
    changed = TransformSink(sink, mask)
    assert await changed.deliver([claim("a"), claim("secret"), claim("b")]) == [DELIVERED] * 3
    assert names(sink) == ["a", "b"]
    assert changed.left_out == 1


async def test_failure_of_the_function_is_that_events_own_and_stops_its_key():
    def fail(event: Event) -> Event:
        if event.type == "k2":
            raise ValueError("cannot read it")
        return event.replace(key="one for all")

    sink = MemorySink()
    batch = [claim("k1", "k"), claim("k2", "k"), claim("k3", "k"), claim("j1", "j")]
    outcomes = await TransformSink(sink, fail).deliver(batch)
    failed = Retry("The transform failed: ValueError: cannot read it")
    assert outcomes == [DELIVERED, failed, RELEASED, DELIVERED]
    assert names(sink) == ["k1", "j1"]


async def test_something_else_than_an_event_is_a_failure():
    wrong: Any = lambda event: "text"  # noqa: E731
    outcomes = await TransformSink(MemorySink(), wrong).deliver([claim("a")])
    assert outcomes == [Retry("The transform returned 'text'; expected an Event or None")]


async def test_outage_behind_the_function_is_passed_on():
    sink = MemorySink()
    sink.go_down_at(lambda event: event.type == "b")
    with pytest.raises(SinkUnavailable) as outage:
        await TransformSink(sink, mask).deliver([claim("a"), claim("secret"), claim("b")])
    assert outage.value.outcomes == [DELIVERED, DELIVERED, RELEASED]


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
