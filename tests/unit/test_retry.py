from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarbox.errors import ConfigError
from pillarbox.retry import (
    ByException,
    Constant,
    Exponential,
    Failure,
    Linear,
    NoRetry,
    RetryPolicy,
    describe_error,
    parse_policy,
)

SECOND = timedelta(seconds=1)
LIMITED = [Exponential(max_attempts=3), Linear(max_attempts=3), Constant(max_attempts=3)]
AGED = [Exponential(max_age=SECOND), Linear(max_age=SECOND), Constant(max_age=SECOND)]
UNLIMITED = [
    Exponential(max_attempts=None),
    Exponential(factor=1, max_attempts=None),
    Exponential(factor=1e300, max_attempts=None),
    Linear(max_attempts=None),
    Linear(step=timedelta(days=3000), cap=timedelta(days=3650), max_attempts=None),
    Constant(max_attempts=None),
    ByException({}, default=Exponential(max_attempts=None)),
]


def kind_of(policy: object) -> str:
    return type(policy).__name__


def delays(policy: RetryPolicy, attempts: range) -> list[float | None]:
    found = [policy.next_delay(Failure(attempt)) for attempt in attempts]
    return [None if delay is None else delay.total_seconds() for delay in found]


def test_exponential_doubles_up_to_its_cap():
    policy = Exponential(SECOND, cap=timedelta(seconds=20), jitter=False)
    assert delays(policy, range(1, 8)) == [1, 2, 4, 8, 16, 20, 20]


def test_exponential_takes_another_factor():
    assert delays(Exponential(SECOND, 1.5, jitter=False), range(1, 4)) == [1, 1.5, 2.25]


def test_default_policy_gives_up_at_the_twentieth_failure():
    policy = Exponential(jitter=False)
    assert delays(policy, range(18, 22)) == [300, 300, None, None]


@pytest.mark.parametrize(("drawn", "expected"), [(0.0, 0), (0.25, 1), (0.5, 2), (0.999, 3.996)])
def test_full_jitter_draws_between_zero_and_the_bound(drawn, expected):
    assert delays(Exponential(SECOND, random=lambda: drawn), range(3, 4)) == [expected]


def test_jitter_is_on_for_exponential_and_can_be_asked_for_elsewhere():
    assert Exponential().jitter
    assert delays(Linear(jitter=True, random=lambda: 0.5), range(2, 3)) == [1]
    assert delays(Constant(SECOND, jitter=True, random=lambda: 0.5), range(2, 3)) == [0.5]


def test_linear_adds_a_step_up_to_its_cap():
    policy = Linear(SECOND, timedelta(seconds=3), cap=timedelta(seconds=9))
    assert delays(policy, range(1, 6)) == [1, 4, 7, 9, 9]


def test_constant_stays_the_same():
    assert delays(Constant(timedelta(seconds=5), max_attempts=4), range(1, 6)) == [5, 5, 5, None, None]


def test_no_retry_gives_up_at_once_whatever_the_row_says():
    assert NoRetry().max_attempts == 1
    assert NoRetry().next_delay(Failure(1, max_attempts=50)) is None


@pytest.mark.parametrize("policy", LIMITED, ids=kind_of)
def test_last_attempt_gives_up(policy):
    assert policy.next_delay(Failure(2)) is not None
    assert policy.next_delay(Failure(3)) is None


@pytest.mark.parametrize("policy", LIMITED, ids=kind_of)
def test_row_overrides_max_attempts_in_both_directions(policy):
    assert policy.next_delay(Failure(3, max_attempts=4)) is not None
    assert policy.next_delay(Failure(4, max_attempts=4)) is None
    assert policy.next_delay(Failure(1, max_attempts=1)) is None


@pytest.mark.parametrize("policy", AGED, ids=kind_of)
def test_old_event_is_given_up(policy):
    assert policy.next_delay(Failure(1, age=timedelta(milliseconds=999))) is not None
    assert policy.next_delay(Failure(1, age=SECOND)) is None
    assert policy.next_delay(Failure(1, age=None)) is not None


@pytest.mark.parametrize("policy", UNLIMITED, ids=repr)
def test_attempt_number_of_a_billion_is_fine(policy):
    delay = policy.next_delay(Failure(10**9))
    assert delay is not None
    assert timedelta(0) <= delay <= timedelta(days=3650)


@given(attempt=st.integers(min_value=-3) | st.just(10**400), policy=st.sampled_from(UNLIMITED))
def test_no_attempt_number_overflows(attempt, policy):
    assert timedelta(0) <= policy.next_delay(Failure(attempt)) <= timedelta(days=3650)


class Timeout(OSError):
    pass


class SlowTimeout(Timeout):
    pass


def test_most_specific_exception_class_wins():
    policy = ByException(
        {OSError: Constant(SECOND * 9), Timeout: Constant(SECOND * 2), ValueError: None},
        default=Constant(SECOND * 5),
    )
    causes = [SlowTimeout(), Timeout(), PermissionError(), UnicodeError(), KeyError(), None]
    waits = [policy.next_delay(Failure(1, cause=cause)) for cause in causes]
    assert waits == [SECOND * 2, SECOND * 2, SECOND * 9, None, SECOND * 5, SECOND * 5]


def test_exception_is_found_by_the_name_of_its_defining_module():
    policy = ByException({f"{__name__}.Timeout": None}, default=Constant())
    assert policy.next_delay(Failure(1, cause=SlowTimeout())) is None
    assert policy.next_delay(Failure(1, cause=OSError())) is not None


def test_exception_is_found_by_the_name_it_is_exported_under():
    # asyncio.TimeoutError is the builtin one; json.JSONDecodeError is defined in json.decoder.
    import json

    policy = ByException({"json.JSONDecodeError": None}, default=Constant())
    assert policy.next_delay(Failure(1, cause=json.JSONDecodeError("no", "", 0))) is None
    assert policy.next_delay(Failure(1, cause=ValueError())) is not None


def test_builtin_exception_needs_no_module():
    policy = ByException({"ValueError": None}, default=Constant())
    assert policy.next_delay(Failure(1, cause=UnicodeError())) is None


def test_rows_limit_reaches_the_chosen_policy():
    policy = ByException({ValueError: Constant(max_attempts=9)}, default=Constant())
    assert policy.next_delay(Failure(2, cause=ValueError(), max_attempts=2)) is None


def test_by_exception_shows_the_most_attempts_of_its_members():
    assert ByException({OSError: Constant(max_attempts=7), ValueError: None}, default=NoRetry()).max_attempts == 7
    assert ByException({ValueError: None}, default=None).max_attempts == 1
    assert ByException({OSError: Constant(max_attempts=None)}, default=Constant()).max_attempts is None


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Exponential, {"first": timedelta(0)}, "Exponential first: expected above zero"),
        (Exponential, {"first": "1s"}, "Exponential first: expected a timedelta, got '1s'"),
        (Exponential, {"factor": 0.5}, "Exponential factor: expected a number of 1 or more, got 0.5"),
        (Exponential, {"factor": float("nan")}, "Exponential factor: .* got nan"),
        (Exponential, {"factor": float("inf")}, "Exponential factor: .* got inf"),
        (Exponential, {"factor": True}, "Exponential factor: .* got True"),
        (Exponential, {"cap": SECOND / 2}, "Exponential cap: expected at least the first delay"),
        (Exponential, {"cap": timedelta(days=4000)}, "Exponential cap: .* at most 3650 days"),
        (Exponential, {"max_attempts": 0}, "Exponential max_attempts: .* from 1 to 1000000"),
        (Constant, {"max_attempts": True}, "Constant max_attempts: .* got True"),
        (Constant, {"max_attempts": 2.0}, "Constant max_attempts: .* got 2.0"),
        (Constant, {"max_age": timedelta(0)}, "Constant max_age: expected a timedelta above zero"),
        (Constant, {"jitter": "no"}, "Constant jitter: expected true or false, got 'no'"),
        (Constant, {"delay": -SECOND}, "Constant delay: expected above zero"),
        (Linear, {"step": timedelta(0)}, "Linear step: expected above zero"),
        (
            ByException,
            {"policies": {int: None}},
            "ByException: expected an exception class .* got <class 'int'>",
        ),
        (ByException, {"policies": {"Nonsense": None}}, "ByException: expected .* got 'Nonsense'"),
        (
            ByException,
            {"policies": {OSError: 5}},
            "ByException .*OSError.*: expected a retry policy .* got 5",
        ),
    ],
)
def test_nonsense_is_refused_with_its_value(kind, options, message):
    more = {"default": None} if kind is ByException else {}
    with pytest.raises(ConfigError, match=message):
        kind(**options, **more)


def test_policy_is_read_from_configuration():
    policy = parse_policy(
        {
            "kind": "exponential",
            "first": "500ms",
            "factor": 3,
            "cap": "1h",
            "max_attempts": 8,
            "max_age": "2d",
            "jitter": False,
        }
    )
    assert policy == Exponential(
        timedelta(milliseconds=500),
        3,
        cap=timedelta(hours=1),
        max_attempts=8,
        max_age=timedelta(days=2),
        jitter=False,
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("none", NoRetry()),
        ({"kind": "none"}, NoRetry()),
        ("exponential", Exponential()),
        ({"kind": "linear", "step": "2s"}, Linear(step=timedelta(seconds=2))),
        (
            {"kind": "constant", "delay": "1m", "max_attempts": "unlimited"},
            Constant(SECOND * 60, max_attempts=None),
        ),
    ],
)
def test_every_kind_is_read(value, expected):
    assert parse_policy(value) == expected


def test_policy_by_exception_is_read():
    policy = parse_policy(
        {
            "kind": "by_exception",
            "exceptions": {"ValueError": "none", "builtins.OSError": {"kind": "constant", "delay": "3s"}},
            "default": {"kind": "constant", "delay": "4s"},
        }
    )
    causes = [ValueError(), TimeoutError(), KeyError()]
    assert [policy.next_delay(Failure(1, cause=cause)) for cause in causes] == [None, SECOND * 3, SECOND * 4]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "exponental",
            "^orders retry: expected kind exponential, linear, constant, none or by_exception; "
            r"got 'exponental' \(did you mean 'exponential'\?\)$",
        ),
        ({}, "got None$"),
        ({"kind": []}, r"got \[\]$"),
        (7, "^orders retry: expected a kind such as 'exponential', or a table with a kind; got 7$"),
        (
            {"kind": "constant", "dely": "1s"},
            "^orders retry: unknown option 'dely' of kind 'constant'; "
            r"expected delay, max_attempts, max_age or jitter \(did you mean 'delay'\?\)$",
        ),
        ({"kind": "none", "max_attempts": 3}, "unknown option 'max_attempts' of kind 'none'; expected none$"),
        ({"kind": "constant", "random": 4}, "unknown option 'random'"),
        ({"kind": "constant", "delay": 5}, "^orders retry delay: expected a duration with its unit"),
        ({"kind": "constant", "max_attempts": 0}, "^orders retry: Constant max_attempts: .* got 0$"),
        (
            {"kind": "by_exception", "exceptions": ["a"]},
            r"^orders retry exceptions: expected a table .* \['a'\]$",
        ),
        ({"kind": "by_exception", "exceptions": {"a.B": "nnoe"}}, "^orders retry for 'a.B': expected kind"),
    ],
)
def test_bad_configuration_is_refused(value, message):
    with pytest.raises(ConfigError, match=message):
        parse_policy(value, what="orders retry")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad amount"), "ValueError: bad amount"),
        (ValueError(), "ValueError"),
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError("a\0b"), "ValueError: ab"),
        (ValueError("half \ud83d"), "ValueError: half \ufffd"),
        (ValueError("whole \ud83d\ude00"), "ValueError: whole \U0001f600"),
        (Unspeakable(), "Unspeakable: its message cannot be read (RuntimeError)"),
    ],
)
def test_error_text_names_the_type_and_can_be_stored(error, text):
    assert describe_error(error) == text


def test_error_text_is_cut_to_2000_characters():
    text = describe_error(ValueError("\U0001f600" * 5000))
    assert text == "ValueError: " + "\U0001f600" * 1987 + "…"
    assert len(text) == 2000


@given(st.text(st.characters(), max_size=3000))
def test_error_text_always_fits_utf8_and_the_column(message):
    text = describe_error(ValueError(message))
    assert len(text.encode().decode()) <= 2000
    assert "\0" not in text
