"""A sink that keeps events in a list and fails on request: what tests put in a destination's place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from pillarbox.errors import SinkUnavailable
from pillarbox.event import DELIVERED, RELEASED, Claim, Delivered, Event, Outcome
from pillarbox.sinks import Sink


@dataclass(slots=True)
class _Fault:
    predicate: Callable[[Event], bool]
    outcome: Outcome
    times: int | None


class MemorySink(Sink):
    """Keeps what it is given; can fail chosen events, be down, and hold deliveries back.

    `claims` are the delivered claims in order, `batches` every batch it was given, whatever became of it.
    """

    def __init__(self, name: str = "memory:", *, is_quick: bool = True) -> None:
        self.name = name
        self.is_quick = is_quick
        self.claims: list[Claim] = []
        self.batches: list[list[Claim]] = []
        self.is_connected = False
        self._faults: list[_Fault] = []
        self._down: SinkUnavailable | None = None
        self._goes_down_at: Callable[[Event], bool] | None = None
        self._gate = asyncio.Event()
        self._gate.set()
        self._arrived = asyncio.Event()

    @property
    def events(self) -> list[Event]:
        """The delivered events in order, one that came twice twice."""
        return [claim.event for claim in self.claims]

    def fail(self, predicate: Callable[[Event], bool], outcome: Outcome, *, times: int | None = 1) -> None:
        """Answer the next `times` matching events (all when None) with `outcome`; the oldest rule wins."""
        self._faults.append(_Fault(predicate, outcome, times))

    def go_down(self, message: str = "", *, after: timedelta | None = None) -> None:
        """Raise `SinkUnavailable` for everything until `come_back`."""
        self._down = SinkUnavailable(message or f"Sink {self.name!r}: told to be down", after=after)

    def go_down_at(self, predicate: Callable[[Event], bool]) -> None:
        """Go down in the middle of a batch, when the first event that matches arrives."""
        self._goes_down_at = predicate

    def come_back(self) -> None:
        """Take events again."""
        self._down = self._goes_down_at = None

    def block(self) -> None:
        """Hold every delivery back until `unblock`."""
        self._gate.clear()
        self._arrived.clear()

    def unblock(self) -> None:
        """Let the deliveries go on that `block` holds back."""
        self._gate.set()

    async def until_blocked(self) -> None:
        """Wait until a delivery stands at the gate that `block` closed."""
        await self._arrived.wait()

    async def open(self) -> None:
        await self.check()
        self.is_connected = True

    async def check(self) -> None:
        if self._down is not None:
            raise SinkUnavailable(str(self._down), after=self._down.after)

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        self.batches.append(list(claims))
        if not self._gate.is_set():
            self._arrived.set()
            await self._gate.wait()
        await self.check()
        outcomes: list[Outcome] = [RELEASED] * len(claims)
        stopped: set[str] = set()
        for position, claim in enumerate(claims):
            event = claim.event
            if event.key in stopped:
                continue
            if self._goes_down_at is not None and self._goes_down_at(event):
                self.go_down()
                raise SinkUnavailable(str(self._down), outcomes=outcomes)
            outcomes[position] = self._answer(event)
            if isinstance(outcomes[position], Delivered):
                self.claims.append(claim)
            elif event.key is not None:
                stopped.add(event.key)
        return outcomes

    async def close(self) -> None:
        self.is_connected = False

    def _answer(self, event: Event) -> Outcome:
        for fault in self._faults:
            if fault.times == 0 or not fault.predicate(event):
                continue
            if fault.times is not None:
                fault.times -= 1
            return fault.outcome
        return DELIVERED
