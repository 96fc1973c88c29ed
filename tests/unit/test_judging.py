"""How failures are cleaned and told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarbox.event import Claim, Dead, Event, Retry
from pillarbox.judging import Failures

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=50)


@given(ANY_TEXT)
def test_any_error_text_can_be_written_by_any_database(text: str) -> None:
    for outcome in (Dead(text), Retry(text)):
        outcome.error.encode()
        assert "\0" not in outcome.error


@pytest.mark.parametrize(
    "after", ["5s", True, [], float("nan"), object()], ids=["text", "bool", "list", "nan", "object"]
)
def test_delay_that_is_none_is_refused_where_it_is_made(after: Any) -> None:
    with pytest.raises(TypeError, match="Retry after: expected a timedelta or a number of seconds, got"):
        Retry("busy", after)


def fail(text: str) -> Retry:
    try:
        raise ValueError(text)
    except ValueError as error:
        return Retry(f"ValueError: {text}", cause=error)


def test_first_failure_of_a_kind_is_told_with_its_traceback_and_the_rest_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures, claim = Failures(), Claim(1, Event("placed", {}), 1)
    with caplog.at_level(logging.WARNING, logger="pillarbox.relay"):
        for number in range(100):
            failures.note("orders", [claim], [fail(f"no order {number}")])
        failures.note("orders", [claim], [Dead("Sink 'orders': 404")])
        failures.note("orders", [claim], [Retry("Sink 'orders': 503 after 17 ms")])
        failures.note("orders", [claim], [Retry("Sink 'orders': 503 after 18 ms")])
    told = [record.getMessage() for record in caplog.records]
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, False, False]
    assert told[0] == f"Sink orders: event {claim.event.id} failed and is tried again: ValueError: no order 0"
    assert "10 failures" in told[1]
    assert "100 failures" in told[2]
    assert told[3] == f"Sink orders: event {claim.event.id} failed and is tried again: 503 after 17 ms"
