"""A rate limit before a sink: a bucket of `burst` tokens that fills at `rate` a second, one token an event.

A batch is delivered in parts as tokens come in, so a slow destination gets a steady stream instead of one batch and a
long silence. All batches of a relay share the bucket. A batch that would take too long is given back in part: what was
delivered is settled, the rest is claimed again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.event import RELEASED, Claim, Delivered, Outcome
from pillarbox.sinks import SinkLike
from pillarbox.sinks.order import Deliver, deliver_rest
from pillarbox.sinks.wrapper import SinkWrapper

# A call that is cancelled forgets what it delivered, and that is delivered again. A relay that stops cancels after 10 s
# (its `stop_timeout`) and a hold after 5 s: a call ends well before both, with time left for its last part.
LONGEST_CALL = timedelta(seconds=3)


class Bucket:
    """Tokens that come in with time; whoever asks first is served first."""

    def __init__(
        self,
        rate: float,
        burst: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.clock = clock
        self._sleep = sleep
        self._rate = rate
        self._burst = burst
        self._tokens = float(burst)
        self._filled_at = clock()
        self._asking = 0
        self._turn = asyncio.Lock()

    async def take(self, wanted: int, *, until: float | None = None) -> int:
        """Wait for at least one token and take up to `wanted`; none, at once, if the wait would last beyond `until`."""
        missing = self._asking + 1 - self._fill()
        if until is not None and self._filled_at + max(0.0, missing / self._rate) > until:
            return 0
        self._asking += 1
        try:
            async with self._turn:
                missing = 1 - self._fill()
                if missing > 0:
                    await self._sleep(missing / self._rate)
                    self._fill()
                # A clock that was read a hair too early leaves a little less than the one that was waited for.
                taken = max(1, min(wanted, int(self._tokens)))
                self._tokens -= taken
                return taken
        finally:
            self._asking -= 1

    def give_back(self, tokens: int) -> None:
        """Return tokens that were taken and not needed."""
        self._tokens = min(self._burst, self._tokens + tokens)

    def _fill(self) -> float:
        now = self.clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
        return self._tokens


class LimitedSink(SinkWrapper):
    """Delivers to another sink, `rate` events a second and at most `burst` at once (a second's worth by default).

    A call lasts about `LONGEST_CALL`, or until its first part is delivered; what is left of the batch is released.
    """

    def __init__(self, sink: SinkLike, *, rate: Any, burst: Any = None) -> None:
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1e9:
            raise ConfigError(f"Sink {sink.name!r} rate: expected a number of events a second above zero, got {rate!r}")
        if burst is not None and (isinstance(burst, bool) or not isinstance(burst, int) or burst < 1):
            raise ConfigError(f"Sink {sink.name!r} burst: expected a whole number of 1 or more, got {burst!r}")
        super().__init__(sink)
        # It waits for tokens, and rows must not stay locked meanwhile.
        self.is_quick = False
        self._bucket = Bucket(rate, max(1, int(rate)) if burst is None else burst)

    async def pass_on(self, claims: Sequence[Claim], deliver: Deliver) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        stopped: set[str] = set()
        ends_at = self._bucket.clock() + LONGEST_CALL.total_seconds()
        while len(outcomes) < len(claims):
            left = len(claims) - len(outcomes)
            # The first part is waited for however long it takes: a call that delivers nothing would only be repeated.
            count = await self._bucket.take(left, until=ends_at if outcomes else None)
            if count == 0:
                return [*outcomes, *[RELEASED] * left]
            part = claims[len(outcomes) : len(outcomes) + count]
            # A key that failed in an earlier part is not tried further.
            decided = [RELEASED if claim.event.key in stopped else None for claim in part]
            self._bucket.give_back(len(part) - decided.count(None))
            try:
                found = await deliver_rest(deliver, part, decided)
            except SinkUnavailable as outage:
                outcomes += outage.outcomes or ()
                outage.outcomes = [*outcomes, *[RELEASED] * (len(claims) - len(outcomes))]
                raise
            outcomes += found
            for claim, outcome in zip(part, found, strict=True):
                if claim.event.key is not None and not isinstance(outcome, Delivered):
                    stopped.add(claim.event.key)
        return outcomes
