"""The obligations of the Sink port, one test each, over every sink."""

from __future__ import annotations

import asyncio

import pytest

from pillarbox.errors import SinkUnavailable
from pillarbox.event import (
    DELIVERED,
    RELEASED,
)
from tests.contract.sinks import FAILED, claim, every_sink, sink_kit, sinks_that

__all__ = ["sink_kit"]


@every_sink
async def test_each_claim_gets_its_outcome(kit):
    assert list(await kit.sink.deliver([claim("a"), claim("b", "k"), claim("c", "k")])) == [DELIVERED] * 3


@every_sink
async def test_empty_batch_gets_no_outcome(kit):
    assert list(await kit.sink.deliver([])) == []


@every_sink
async def test_sink_says_what_it_is(kit):
    assert isinstance(kit.sink.name, str)
    assert kit.sink.name
    assert isinstance(kit.sink.is_quick, bool)


@sinks_that("refuses")
async def test_outcomes_come_in_the_order_of_the_claims(kit):
    outcomes = await kit.sink.deliver([claim("a"), kit.refused("b"), claim("c"), kit.refused("d"), claim("e")])
    assert [isinstance(outcome, FAILED) for outcome in outcomes] == [False, True, False, True, False]


@sinks_that("arrives")
async def test_delivered_event_is_at_the_destination(kit):
    await kit.sink.open()
    assert await kit.sink.deliver([claim("a"), claim("b")]) == [DELIVERED, DELIVERED]
    assert sorted(kit.arrived()) == ["a", "b"]


@sinks_that("takes once")
async def test_event_delivered_again_is_delivered_without_arriving_again(kit):
    again, once = claim("a", "k"), claim("b", "k")
    assert await kit.sink.deliver([again]) == [DELIVERED]
    assert await kit.sink.deliver([again, once]) == [DELIVERED, DELIVERED]
    assert kit.arrived() == ["a", "b"]


@sinks_that("arrives", unless="takes once")
async def test_event_delivered_again_arrives_again(kit):
    again = claim("a")
    assert await kit.sink.deliver([again]) == [DELIVERED]
    assert await kit.sink.deliver([again]) == [DELIVERED]
    assert kit.arrived() == ["a", "a"]


@sinks_that("arrives")
async def test_events_of_one_key_arrive_in_order(kit):
    await kit.sink.deliver([claim(f"{n:02}{key}", key) for n in range(20) for key in "xyz"])
    await kit.sink.deliver([claim(f"{n:02}{key}", key) for n in range(20, 40) for key in "xyz"])
    found = kit.arrived()
    for key in "xyz":
        assert [name for name in found if name.endswith(key)] == [f"{n:02}{key}" for n in range(40)]


@sinks_that("refuses")
async def test_after_a_failure_later_events_of_that_key_are_released_and_never_arrive(kit):
    batch = [claim("k1", "k"), kit.refused("k2", "k"), claim("k3", "k"), claim("k4", "k"), claim("j1", "j")]
    outcomes = await kit.sink.deliver(batch)
    assert isinstance(outcomes[1], FAILED)
    assert [outcomes[0], *outcomes[2:]] == [DELIVERED, RELEASED, RELEASED, DELIVERED]
    assert sorted(kit.arrived()) == ["j1", "k1"]


@sinks_that("refuses")
async def test_failure_of_an_event_without_a_key_holds_nobody_back(kit):
    outcomes = await kit.sink.deliver([kit.refused("a"), claim("b"), claim("c")])
    assert isinstance(outcomes[0], FAILED)
    assert outcomes[1:] == [DELIVERED, DELIVERED]
    assert sorted(kit.arrived()) == ["b", "c"]


@sinks_that("refuses")
async def test_answer_about_one_message_is_its_outcome_with_the_reason(kit):
    (outcome,) = await kit.sink.deliver([kit.refused("a")])
    assert isinstance(outcome, FAILED)
    assert outcome.error
    assert await kit.sink.deliver([claim("b")]) == [DELIVERED]


@sinks_that("goes down")
async def test_destination_that_is_down_raises_and_blames_no_message(kit):
    kit.go_down()
    with pytest.raises(SinkUnavailable) as outage:
        await kit.sink.deliver([claim("a", "k"), claim("b", "k"), claim("c")])
    assert str(outage.value)
    assert outage.value.outcomes in (None, [RELEASED] * 3)
    kit.come_back()
    assert kit.arrived() == []


@sinks_that("goes down")
async def test_destination_that_is_back_takes_events_again(kit):
    await kit.sink.deliver([claim("before")])
    assert kit.arrived() == ["before"]
    kit.go_down()
    with pytest.raises(SinkUnavailable):
        await kit.sink.deliver([claim("a")])
    kit.come_back()
    assert await kit.sink.deliver([claim("a")]) == [DELIVERED]
    assert kit.arrived() == ["before", "a"]


@sinks_that("is checked", "goes down")
async def test_open_and_check_raise_while_the_destination_is_down(kit):
    await kit.sink.open()
    await kit.sink.check()
    kit.go_down()
    with pytest.raises(SinkUnavailable):
        await kit.sink.check()
    with pytest.raises(SinkUnavailable):
        await kit.sink.open()
    kit.come_back()
    await kit.sink.open()
    await kit.sink.check()


@sinks_that("goes down midway")
async def test_outcomes_won_before_an_outage_are_not_lost(kit):
    kit.go_down_at("k3")
    batch = [claim("k1", "k"), claim("k2", "k"), claim("k3", "k"), claim("k4", "k")]
    with pytest.raises(SinkUnavailable) as outage:
        await kit.sink.deliver(batch)
    assert outage.value.outcomes == [DELIVERED, DELIVERED, RELEASED, RELEASED]
    assert kit.arrived() == ["k1", "k2"]


@sinks_that("arrives")
async def test_deliver_may_be_called_while_earlier_calls_run(kit):
    batches = [[claim(f"{n}{key}", key) for n in range(5)] for key in "abcdefgh"]
    results = await asyncio.gather(*(kit.sink.deliver(batch) for batch in batches))
    assert list(results) == [[DELIVERED] * 5] * 8
    found = kit.arrived()
    for key in "abcdefgh":
        assert [name for name in found if name.endswith(key)] == [f"{n}{key}" for n in range(5)]


@sinks_that("blocks")
async def test_slow_destination_does_not_stop_the_event_loop(kit):
    kit.block()
    delivery = asyncio.create_task(kit.sink.deliver([claim("a")]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not delivery.done()
    kit.unblock()
    assert await delivery == [DELIVERED]


@sinks_that("blocks")
async def test_cancellation_is_passed_on_and_nothing_arrives_after_it(kit):
    kit.block()
    delivery = asyncio.create_task(kit.sink.deliver([claim("a", "k")]))
    await asyncio.sleep(0)
    delivery.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivery
    kit.unblock()
    assert await kit.sink.deliver([claim("b", "k")]) == [DELIVERED]
    assert kit.arrived() == ["b"]


@every_sink
async def test_close_may_come_first_and_twice(kit):
    await kit.sink.close()
    await kit.sink.open()
    await kit.sink.deliver([claim("a")])
    await kit.sink.close()
    await kit.sink.close()


@sinks_that("arrives")
async def test_everything_is_there_after_close(kit):
    await kit.sink.deliver([claim(f"{n}") for n in range(50)])
    await kit.sink.close()
    assert sorted(kit.arrived()) == sorted(str(n) for n in range(50))
