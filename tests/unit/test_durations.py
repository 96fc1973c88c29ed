from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarbox.durations import format_duration, grow, parse_duration
from pillarbox.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30s", timedelta(seconds=30)),
        ("1500ms", timedelta(milliseconds=1500)),
        ("5m", timedelta(minutes=5)),
        ("2h", timedelta(hours=2)),
        ("7d", timedelta(days=7)),
        ("1h30m", timedelta(minutes=90)),
        ("1h 30m", timedelta(minutes=90)),
        (" 10s ", timedelta(seconds=10)),
        ("250us", timedelta(microseconds=250)),
        ("0s", timedelta(0)),
        ("90m", timedelta(minutes=90)),
        ("1d2h3m4s5ms6us", timedelta(days=1, hours=2, minutes=3, seconds=4, milliseconds=5, microseconds=6)),
    ],
)
def test_text_is_read(text, expected):
    assert parse_duration(text) == expected


def test_timedelta_is_kept():
    assert parse_duration(timedelta(seconds=3)) == timedelta(seconds=3)


@pytest.mark.parametrize("value", [30, 1.5, 0])
def test_bare_number_is_refused_because_it_has_no_unit(value):
    with pytest.raises(ConfigError, match=r"^lease: expected a duration with its unit, such as '30s'; got the number "):
        parse_duration(value, what="lease")


@pytest.mark.parametrize(
    "value",
    [
        "",
        "s",
        "30",
        "-5s",
        "1.5h",
        "5 s",
        "30m1h",
        "5S",
        "5sec",
        "1h30",
        "٣s",
        None,
        True,
        b"5s",
        "9" * 5000 + "s",
    ],
)
def test_anything_else_is_refused_with_its_value(value):
    with pytest.raises(ConfigError) as refusal:
        parse_duration(value)
    assert "such as '30s' or '1h30m'; got " in str(refusal.value)
    assert repr(value) in str(refusal.value)


def test_duration_beyond_a_timedelta_is_refused():
    with pytest.raises(ConfigError, match="less than a billion days, got '1000000000d'"):
        parse_duration("1000000000d")


def test_negative_timedelta_is_refused():
    with pytest.raises(ConfigError, match="zero or more"):
        parse_duration(timedelta(seconds=-1))


@pytest.mark.parametrize(
    ("duration", "expected"),
    [
        (timedelta(0), "0s"),
        (timedelta(minutes=90), "1h30m"),
        (timedelta(milliseconds=1500), "1s500ms"),
        (timedelta(days=400), "400d"),
        (timedelta(microseconds=7), "7us"),
        (timedelta(seconds=-90), "-1m30s"),
    ],
)
def test_duration_is_written(duration, expected):
    assert format_duration(duration) == expected


@given(st.timedeltas(min_value=timedelta(0)))
def test_written_duration_reads_back_the_same(duration):
    assert parse_duration(format_duration(duration)) == duration


def test_growth_doubles_up_to_the_cap():
    second, cap = timedelta(seconds=1), timedelta(seconds=10)
    grown = [grow(second, factor=2, steps=steps, cap=cap) for steps in range(6)]
    assert [delay.total_seconds() for delay in grown] == [1, 2, 4, 8, 10, 10]


@given(
    st.timedeltas(min_value=timedelta(microseconds=1), max_value=timedelta(days=3650)),
    st.floats(min_value=1, max_value=1e300),
    st.integers(min_value=-5) | st.just(10**400),
)
def test_growth_never_overflows_and_stays_between_first_and_cap(first, factor, steps):
    cap = timedelta(days=3650)
    assert first <= grow(first, factor=factor, steps=steps, cap=cap) <= cap
