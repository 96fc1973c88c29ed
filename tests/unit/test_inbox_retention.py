"""Whether an inbox remembers messages for as long as they may come again."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest

from pillarbox import ByException, Constant, Exponential, Linear, NoRetry, RetryPolicy
from pillarbox.inbox import check_window, longest_redelivery, warn_window

NO_LEASE = timedelta(0)
SECOND = timedelta(seconds=1)
WEEK = timedelta(days=7)


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [
        (NoRetry(), 0),
        (Constant(10 * SECOND, max_attempts=4), 30),
        (Linear(SECOND, 2 * SECOND, max_attempts=4), 1 + 3 + 5),
        (Exponential(SECOND, 2, cap=8 * SECOND, max_attempts=6, jitter=False), 1 + 2 + 4 + 8 + 8),
        # The longest delay counts, not one that was drawn.
        (Exponential(SECOND, 2, cap=8 * SECOND, max_attempts=6, random=lambda: 0.0), 1 + 2 + 4 + 8 + 8),
        (Constant(SECOND, max_attempts=1_000_000), 999_999),
        (Constant(10 * SECOND, max_attempts=None, max_age=60 * SECOND), 70),
        (Constant(10 * SECOND, max_attempts=3, max_age=60 * SECOND), 20),
        (Constant(10 * SECOND, max_attempts=100, max_age=60 * SECOND), 70),
        (ByException({ValueError: Constant(SECOND, max_attempts=3)}, Constant(5 * SECOND, max_attempts=3)), 10),
        (ByException({ValueError: Constant(9 * SECOND, max_attempts=3)}, None), 18),
    ],
)
def test_redelivery_ends_after_all_delays(policy: RetryPolicy, seconds: int) -> None:
    assert longest_redelivery(policy, lease=NO_LEASE) == timedelta(seconds=seconds)


def test_each_try_may_take_a_lease() -> None:
    assert longest_redelivery(Constant(10 * SECOND, max_attempts=4), lease=30 * SECOND) == timedelta(seconds=150)


@pytest.mark.parametrize(
    "policy",
    [
        Constant(SECOND, max_attempts=None),
        ByException({ValueError: Constant(SECOND, max_attempts=None)}, NoRetry()),
        ByException({ValueError: NoRetry()}, Constant(SECOND, max_attempts=None)),
    ],
)
def test_policy_without_an_end_has_none(policy: RetryPolicy) -> None:
    assert longest_redelivery(policy) is None


def test_window_that_is_long_enough_is_no_problem() -> None:
    assert check_window(WEEK, WEEK) is None
    assert check_window(WEEK, timedelta(hours=1)) is None


def test_warning_names_both_durations() -> None:
    problem = check_window(timedelta(hours=12), timedelta(days=2, minutes=30))
    assert problem is not None
    assert "remembers messages for 12h, but the outbox may deliver them again for 2d30m" in problem


def test_warning_says_that_there_is_no_end() -> None:
    problem = check_window(WEEK, None)
    assert problem is not None
    assert "remembers messages for 7d, but the outbox's retry policy has no end" in problem


def test_warning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="pillarbox.inbox"):
        assert warn_window(WEEK, Constant(SECOND, max_attempts=3)) is None
        assert caplog.records == []
        problem = warn_window(timedelta(seconds=5), Constant(10 * SECOND, max_attempts=2), lease=SECOND, name="seen")
    assert problem is not None
    assert "5s" in problem
    assert "12s" in problem
    assert [record.getMessage() for record in caplog.records] == [f"Inbox seen: {problem}"]
