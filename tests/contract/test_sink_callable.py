"""What the sink of a Python function promises beyond the port, and order in a batch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.errortext import describe_failure
from pillarbox.event import (
    DELIVERED,
    RELEASED,
    Claim,
    Dead,
    Event,
    Outcome,
    Retry,
)
from pillarbox.sinks.callable import CallableSink
from pillarbox.sinks.order import group_by_key, release_successors
from tests.contract.sinks import claim

# CallableSink


async def outcome_of(function: Callable[..., Any], **options: Any) -> Outcome:
    sink = CallableSink(function, **options)
    (outcome,) = await sink.deliver([claim("a")])
    await sink.close()
    return outcome


async def test_function_may_be_sync_and_runs_in_a_thread_with_the_callers_context():
    tenant: ContextVar[str] = ContextVar("tenant")
    tenant.set("a")
    found: list[tuple[str, str, bool]] = []

    def handle(event: Event) -> None:
        found.append((event.topic, tenant.get(), threading.current_thread() is threading.main_thread()))

    assert await outcome_of(handle) == DELIVERED
    assert found == [("a", "a", False)]


def taking_event(event):
    return Dead(type(event).__name__)


def taking_claim(claim: Claim):
    return Dead(type(claim).__name__)


def taking_quoted_claim(claim: Claim, other: Unknown = None):  # type: ignore[name-defined]  # noqa: F821
    return Dead(type(claim).__name__)


class TakingClaim:
    async def __call__(self, claim: Claim):
        return Dead(type(claim).__name__)

    def method(self, claim: Claim):
        return Dead(type(claim).__name__)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (taking_event, "Event"),
        (lambda event: Dead(type(event).__name__), "Event"),
        (taking_claim, "Claim"),
        (taking_quoted_claim, "Claim"),
        (TakingClaim(), "Claim"),
        (TakingClaim().method, "Claim"),
        (partial(taking_claim), "Claim"),
    ],
    ids=[
        "bare",
        "lambda",
        "annotated",
        "annotated with names unknown at run time",
        "object",
        "method",
        "partial",
    ],
)
async def test_function_gets_the_claim_when_its_parameter_is_annotated_so(function, expected):
    assert await outcome_of(function) == Dead(expected)


@pytest.mark.parametrize(
    "outcome", [DELIVERED, RELEASED, Retry("later", timedelta(seconds=5)), Dead("never")], ids=repr
)
async def test_function_may_return_an_outcome(outcome: Outcome):
    async def handle(event: Event) -> Outcome:
        return outcome

    assert await outcome_of(handle) == outcome


async def test_function_may_hand_back_a_coroutine():
    async def handle(event: Event) -> Outcome:
        return Dead(event.topic)

    assert await outcome_of(lambda event: handle(event)) == Dead("a")


@pytest.mark.parametrize("result", [False, 0, "", [DELIVERED]])
async def test_function_that_returns_anything_else_has_not_delivered(result):
    outcome = await outcome_of(lambda event: result, name="orders")
    text = f"TypeError: Sink 'orders': expected None or an outcome from its function, got {result!r}"
    assert outcome == Retry(text)


async def test_function_that_raises_is_retried_with_the_exception():
    error = ValueError("bad\0 amount")

    async def handle(event: Event) -> None:
        raise error

    outcome = await outcome_of(handle)
    assert isinstance(outcome, Retry)
    text, *calls = outcome.error.splitlines()
    assert text == "ValueError: bad amount"
    line = handle.__code__.co_firstlineno + 1
    assert calls == [f'  File "{__file__}", line {line}, in handle', "    raise error"]
    assert outcome.cause is error


def test_calls_of_a_function_that_failed_deep_down_are_the_last_ones():
    def descend(depth: int) -> None:
        if depth == 0:
            raise ValueError("x" * 1900)
        go_on(depth - 1)

    def go_on(depth: int) -> None:
        descend(depth)

    with pytest.raises(ValueError, match="xxx") as raised:
        descend(30)
    text, *calls = describe_failure(raised.value).splitlines()
    assert text == "ValueError: " + "x" * 1900
    assert len([each for each in calls if each.startswith("  File ")]) == 6
    assert 'raise ValueError("x" * 1900)' in calls[-1]


def test_failure_without_calls_says_what_failed():
    assert describe_failure(KeyError("amount")) == "KeyError: 'amount'"


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (StopIteration("x"), "RuntimeError: function raised StopIteration"),
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError("mine"), "CancelledError: mine"),
        (TimeoutError("its own"), "TimeoutError: its own"),
        (ValueError("y" * 3000), "ValueError: " + "y" * 1987 + "…"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
async def test_no_exception_of_a_function_ends_the_relay(is_async, error, text):
    def fail(event: Event) -> None:
        raise error

    async def fail_async(event: Event) -> None:
        raise error

    if is_async and isinstance(error, StopIteration):
        text = "RuntimeError: coroutine raised StopIteration"
    outcome = await outcome_of(fail_async if is_async else fail)
    assert isinstance(outcome, Retry)
    assert outcome.error.splitlines()[0] == text


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
async def test_keys_run_in_parallel_up_to_the_concurrency(is_async):
    running, most = 0, 0
    lock = threading.Lock()
    # Nobody goes on before three run at the same time.
    barrier, meeting = threading.Barrier(3, timeout=10), asyncio.Barrier(3)

    def count(step: int) -> None:
        nonlocal running, most
        with lock:
            running += step
            most = max(most, running)

    def handle(event: Event) -> None:
        count(1)
        barrier.wait()
        count(-1)

    async def handle_async(event: Event) -> None:
        count(1)
        await meeting.wait()
        count(-1)

    sink = CallableSink(handle_async if is_async else handle, concurrency=3)
    batches = [[claim(f"{n}", f"{n}") for n in range(5)], [claim(f"{n}") for n in range(4)]]
    results = await asyncio.gather(*(sink.deliver(batch) for batch in batches))
    assert list(results) == [[DELIVERED] * 5, [DELIVERED] * 4]
    assert most == 3
    await sink.close()


async def test_events_of_one_key_never_run_at_the_same_time():
    running: set[str | None] = set()

    async def handle(event: Event) -> None:
        assert event.key not in running
        running.add(event.key)
        for _ in range(3):
            await asyncio.sleep(0)
        running.remove(event.key)

    batch = [claim(f"{key}{n}", key) for n in range(5) for key in "abc"]
    assert await CallableSink(handle).deliver(batch) == [DELIVERED] * 15


async def test_calls_that_run_when_the_destination_goes_down_keep_their_outcomes():
    started, down = asyncio.Event(), asyncio.Event()

    async def handle(event: Event) -> None:
        if event.topic == "slow":
            started.set()
            await down.wait()
        elif event.topic == "down":
            await started.wait()
            down.set()
            raise SinkUnavailable("refused", after=timedelta(seconds=9))

    sink = CallableSink(handle, concurrency=2)
    with pytest.raises(SinkUnavailable, match=r"^refused$") as outage:
        await sink.deliver([claim("slow", "k"), claim("down"), claim("next", "k"), claim("later")])
    assert outage.value.outcomes == [DELIVERED, RELEASED, RELEASED, RELEASED]
    assert outage.value.after == timedelta(seconds=9)


async def test_async_function_is_cancelled_at_its_timeout():
    cancelled: list[str] = []

    async def handle(event: Event) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(event.topic)
            raise

    outcome = await outcome_of(handle, timeout=timedelta(milliseconds=5), name="orders")
    assert outcome == Retry("TimeoutError: Sink 'orders': no answer within 5ms")
    assert cancelled == ["a"]


async def test_sync_function_past_its_timeout_is_retried_but_keeps_its_place_until_it_ends():
    go_on = threading.Event()
    sink = CallableSink(
        lambda event: go_on.wait() and None, concurrency=1, timeout=timedelta(milliseconds=5), name="orders"
    )
    assert await sink.deliver([claim("a")]) == [Retry("TimeoutError: Sink 'orders': no answer within 5ms")]
    second = asyncio.create_task(sink.deliver([claim("b")]))
    # Ten times the timeout: it does not count while the second call waits for a place.
    await asyncio.wait([second], timeout=0.05)
    assert not second.done()
    go_on.set()
    assert await second == [DELIVERED]
    await sink.close()


async def test_cancellation_waits_for_a_sync_function_and_starts_no_other():
    started, go_on, seen = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def handle(event: Event) -> None:
        loop.call_soon_threadsafe(started.set)
        go_on.wait()
        seen.append(event.topic)

    sink = CallableSink(handle)
    delivery = asyncio.create_task(sink.deliver([claim("a", "k"), claim("b", "k")]))
    await started.wait()
    delivery.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not delivery.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await delivery
    assert seen == ["a"]
    await sink.close()


async def test_second_cancellation_does_not_wait_for_a_sync_function():
    started, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def handle(event: Event) -> None:
        loop.call_soon_threadsafe(started.set)
        go_on.wait()

    sink = CallableSink(handle)
    delivery = asyncio.create_task(sink.deliver([claim("a")]))
    await started.wait()
    delivery.cancel()
    await asyncio.sleep(0)
    delivery.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivery
    assert not go_on.is_set()
    go_on.set()
    await sink.close()


async def test_function_that_swallows_a_cancellation_does_not_stop_it():
    started, seen = asyncio.Event(), []

    async def handle(event: Event) -> None:
        seen.append(event.topic)
        started.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    delivery = asyncio.create_task(CallableSink(handle).deliver([claim("a", "k"), claim("b", "k")]))
    await started.wait()
    delivery.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivery
    assert seen == ["a"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: CallableSink(lambda: None, name="x"),
            r"Sink 'x': expected a function .* got one that takes \(\)",
        ),
        (
            lambda: CallableSink(lambda a, b: None, name="x"),
            r"Sink 'x': expected a function .* takes \(a, b\)",
        ),
        (
            lambda: CallableSink(print, name="x", concurrency=0),
            "Sink 'x' concurrency: expected a whole number",
        ),
        (
            lambda: CallableSink(print, name="x", timeout=timedelta(0)),
            "Sink 'x' timeout: expected a timedelta above zero",
        ),
    ],
)
def test_callable_sink_refuses_what_it_cannot_call(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_callable_sink_is_named_for_its_function():
    assert CallableSink(taking_event).name.endswith(".taking_event")


# Order in a batch


def test_claims_are_grouped_by_key_in_batch_order():
    batch = [claim("a", "x"), claim("b"), claim("c", "y"), claim("d", "x"), claim("e")]
    assert group_by_key(batch) == [[0, 3], [1], [2], [4]]


def test_everything_after_an_undelivered_claim_of_its_key_is_released():
    batch = [
        claim("1", "x"),
        claim("2", "y"),
        claim("3", "x"),
        claim("4", "x"),
        claim("5", "y"),
        claim("6"),
        claim("7"),
    ]
    outcomes: list[Outcome] = [DELIVERED, RELEASED, Retry("no"), DELIVERED, Dead("no"), Dead("no"), DELIVERED]
    expected = [DELIVERED, RELEASED, Retry("no"), RELEASED, RELEASED, Dead("no"), DELIVERED]
    assert release_successors(batch, outcomes) == expected


def test_wrong_number_of_outcomes_is_refused():
    with pytest.raises(ValueError, match="Expected one outcome for each of 2 claims, got 1"):
        release_successors([claim("a"), claim("b")], [DELIVERED])
