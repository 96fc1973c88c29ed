"""The circuit breaker of one destination: closed, open for a pause, then probing until an answer comes.

    closed --failed--> open --pause over--> probing --succeeded--> closed
                         ^                     |
                         +-------failed--------+   with a longer pause

It does no waiting of its own: the relay asks `wait()` and sleeps. Deliveries that were already running when
it opened belong to the same outage: their failures do not double the pause and their successes do not end it;
only a probe does.
"""

from __future__ import annotations

import logging
import random as randomness
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

from pillarbox.durations import format_duration, grow
from pillarbox.errors import ConfigError

logger = logging.getLogger(__name__)

BreakerState = Literal["closed", "open", "probing"]


class Breaker:
    """Pauses a destination that is down and lets a probe through after each pause.

    The pause doubles from `first` to `cap`; up to half of it is taken off at random, so that relays which
    lost the same destination do not come back to it together.
    """

    def __init__(
        self,
        name: str,
        *,
        first: timedelta = timedelta(seconds=1),
        cap: timedelta = timedelta(seconds=30),
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = randomness.random,
    ) -> None:
        if not timedelta(0) < first <= cap:
            raise ConfigError(
                f"Breaker {name!r}: expected a first pause above zero and a cap not below it; got {first!r} and {cap!r}"
            )
        self.name = name
        self._first = first
        self._cap = cap
        self._clock = clock
        self._random = random
        self._failures = 0
        self._opened_at = 0.0
        self._probes_at = 0.0
        self._logged: BreakerState = "closed"

    @property
    def state(self) -> BreakerState:
        """Where the breaker stands now."""
        if not self._failures:
            state: BreakerState = "closed"
        else:
            state = "open" if self._clock() < self._probes_at else "probing"
        if state == "probing" and self._logged == "open":
            logger.debug("Sink %r: the pause is over, probing.", self.name)
            self._logged = state
        return state

    @property
    def is_open(self) -> bool:
        """Whether nothing may be sent now."""
        return self.state == "open"

    @property
    def is_probing(self) -> bool:
        """Whether one delivery may go, to see if the destination is back."""
        return self.state == "probing"

    def wait(self) -> float:
        """Return the seconds left until something may be sent: zero unless open."""
        return max(0.0, self._probes_at - self._clock()) if self.is_open else 0.0

    def failed(self, after: timedelta | None = None, *, reason: str = "") -> timedelta:
        """Note that the destination is down and return the pause that is left.

        `after` is what the destination itself asked for: the pause is never shorter than that.
        """
        was, now = self.state, self._clock()
        if was != "open":
            self._failures += 1
            bound = grow(self._first, factor=2, steps=self._failures - 1, cap=self._cap)
            self._probes_at = now + bound.total_seconds() * (1 + self._random()) / 2
        if after is not None:
            self._probes_at = max(self._probes_at, now + after.total_seconds())
        left = timedelta(seconds=self._probes_at - now)
        why = reason or "no reason given"
        if was == "closed":
            self._opened_at = now
            logger.warning("Sink %r is down, paused for %s: %s", self.name, _round(left), why)
        elif was == "probing":
            logger.debug("Sink %r is still down, paused for %s: %s", self.name, _round(left), why)
        self._logged = "open"
        return left

    def succeeded(self) -> None:
        """Note an answer from the destination: closes the breaker unless its pause is still running."""
        if self.state != "probing":
            return
        self._failures = 0
        self._logged = "closed"
        outage = timedelta(seconds=self._clock() - self._opened_at)
        logger.info("Sink %r is back after %s.", self.name, _round(outage))


def _round(duration: timedelta) -> str:
    return format_duration(timedelta(milliseconds=round(duration / timedelta(milliseconds=1))))
