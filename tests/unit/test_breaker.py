from __future__ import annotations

import logging
from datetime import timedelta

import pytest

from pillarbox.breaker import Breaker
from pillarbox.errors import ConfigError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    # A draw of 1.0 takes nothing off a pause.
    return Breaker("orders", clock=clock, random=lambda: 1.0)


def test_new_breaker_is_closed(breaker):
    assert breaker.state == "closed"
    assert not breaker.is_open
    assert not breaker.is_probing
    assert breaker.wait() == 0


def test_failure_opens_for_the_first_pause(breaker, clock):
    assert breaker.failed() == timedelta(seconds=1)
    assert breaker.is_open
    assert breaker.wait() == 1
    clock.now += 0.75
    assert breaker.wait() == 0.25


def test_probe_may_go_when_the_pause_is_over(breaker, clock):
    breaker.failed()
    clock.now += 1
    assert breaker.is_probing
    assert not breaker.is_open
    assert breaker.wait() == 0


def test_failed_probes_double_the_pause_up_to_the_cap(breaker, clock):
    pauses = []
    for _ in range(8):
        pauses.append(breaker.failed().total_seconds())
        clock.now += breaker.wait()
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]


def test_successful_probe_closes_and_forgets_the_outage(breaker, clock):
    for _ in range(4):
        breaker.failed()
        clock.now += breaker.wait()
    breaker.succeeded()
    assert breaker.state == "closed"
    assert breaker.failed() == timedelta(seconds=1)


def test_failures_of_deliveries_already_running_do_not_double_the_pause(breaker, clock):
    breaker.failed()
    clock.now += 0.5
    assert breaker.failed() == timedelta(seconds=0.5)
    clock.now += 0.5
    assert breaker.failed() == timedelta(seconds=2)


def test_late_success_of_a_delivery_already_running_does_not_end_the_pause(breaker, clock):
    breaker.failed()
    breaker.succeeded()
    assert breaker.is_open
    clock.now += 1
    breaker.succeeded()
    assert breaker.state == "closed"


def test_destination_that_asks_for_a_longer_pause_gets_it(breaker):
    assert breaker.failed(timedelta(minutes=2)) == timedelta(minutes=2)
    assert breaker.wait() == 120


def test_destination_that_asks_for_less_does_not_shorten_the_pause(breaker):
    assert breaker.failed(timedelta(milliseconds=1)) == timedelta(seconds=1)


def test_open_breaker_is_extended_by_what_the_destination_asks_for(breaker):
    breaker.failed()
    assert breaker.failed(timedelta(seconds=7)) == timedelta(seconds=7)
    assert breaker.wait() == 7


@pytest.mark.parametrize(("drawn", "pause"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
def test_jitter_takes_off_up_to_half_of_the_pause(clock, drawn, pause):
    breaker = Breaker("orders", clock=clock, random=lambda: drawn)
    assert breaker.failed().total_seconds() == pause


def test_outage_of_many_probes_does_not_overflow(clock):
    breaker = Breaker("orders", clock=clock, random=lambda: 1.0)
    for _ in range(5000):
        pause = breaker.failed()
        clock.now += breaker.wait()
    assert pause == timedelta(seconds=30)


def test_log_has_one_line_a_change_of_state(breaker, clock, caplog):
    caplog.set_level(logging.INFO, logger="pillarbox.breaker")
    breaker.succeeded()
    for _ in range(3):
        breaker.failed(reason="connection refused")
        breaker.failed(reason="connection refused")
        breaker.wait()
        clock.now += breaker.wait()
        breaker.wait()
    breaker.succeeded()
    breaker.succeeded()
    assert caplog.messages == [
        "Sink 'orders' is down, paused for 1s: connection refused",
        "Sink 'orders' is back after 7s.",
    ]


def test_probes_are_logged_once_each_for_who_asks(breaker, clock, caplog):
    caplog.set_level(logging.DEBUG, logger="pillarbox.breaker")
    breaker.failed()
    clock.now += 1
    for _ in range(5):
        breaker.wait()
    breaker.failed()
    assert caplog.messages == [
        "Sink 'orders' is down, paused for 1s: no reason given",
        "Sink 'orders': the pause is over, probing.",
        "Sink 'orders' is still down, paused for 2s: no reason given",
    ]


def test_cap_below_the_first_pause_is_refused():
    with pytest.raises(ConfigError, match="Breaker 'orders': expected a first pause above zero and a cap not below it"):
        Breaker("orders", first=timedelta(minutes=1))
