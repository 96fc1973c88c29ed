"""What the sources on brokers share: a receiver that keeps a bounded number of messages at hand, and their batches."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Final

from pillarbox.errors import ConfigError, StoreUnavailable, Unsupported
from pillarbox.event import RELEASED, Claim, Dead, Delivered, Outcome, Retry
from pillarbox.sources import DeadLetters, Letter
from pillarbox.sources.pending import Entry, Pending
from pillarbox.stores import Counts, Effect, Mode, Settlement

log = logging.getLogger("pillarbox.source")

PREFETCH: Final = 1000
LEASE: Final = timedelta(seconds=30)
_RECEIVE: Final = 0.5


class BrokerBatch:
    """Messages that are being handled."""

    mode: Mode = "lease"
    has_tried = False

    def __init__(self, source: BrokerSource, entries: Sequence[Entry], *, is_full: bool) -> None:
        self._source = source
        self.claims: Sequence[Claim] = [entry.claim() for entry in entries]
        self.is_full = is_full
        self._is_settled = False

    async def settle(
        self, outcomes: Sequence[Outcome], *, park: bool = True, effect: Effect | None = None
    ) -> Settlement:
        if effect is not None:
            raise Unsupported(f"Source {self._source.name}: a broker has no transaction that an effect could join")
        settlement = await self._source.settle(self.claims, outcomes)
        self._is_settled = True
        return settlement

    async def settle_one(self, claim: Claim, effect: Effect) -> bool:
        raise Unsupported(f"Source {self._source.name}: a broker has no transaction that an effect could join")

    async def renew(self, lease: timedelta) -> Sequence[Claim]:
        return await self._source.renew(self.claims)

    async def abandon(self) -> None:
        if not self._is_settled:
            self._is_settled = True
            self._source.give_back(self.claims)


class BrokerSource(ABC):
    """A consumer group's membership as a source. A subclass talks to its broker.

    `prefetch` bounds how many messages are at hand, also while the first of them keeps failing. `dead` is where the
    dead letters go.
    """

    modes: frozenset[Mode] = frozenset({"lease"})
    in_flight = 2
    keeps_order = True

    def __init__(self, name: str, *, dead: DeadLetters, prefetch: int = PREFETCH) -> None:
        if isinstance(prefetch, bool) or prefetch < 1:
            raise ConfigError(f"Source {name!r} prefetch: expected a whole number of 1 or more, got {prefetch!r}")
        self.name = name
        self._dead = dead
        self._prefetch = prefetch
        self.pending = Pending(time.monotonic)
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._receiver: asyncio.Task[None] | None = None

    @property
    def lease(self) -> timedelta:
        return LEASE

    # -- what a subclass does ----------------------------------------------------------------------------------------

    @abstractmethod
    async def _connect(self) -> None:
        """Join the group; raises `StoreUnavailable` when the broker cannot be reached, `ConfigError` if it refuses."""

    @abstractmethod
    async def _disconnect(self) -> None:
        """Leave the group. What was not acknowledged comes again, to whoever is left."""

    @abstractmethod
    async def _receive(self, most: int, timeout: float) -> Sequence[Entry]:
        """Up to so many messages, none when none came in time. Raises `StoreUnavailable` on a lost connection."""

    @abstractmethod
    async def _acknowledge(self, entries: Sequence[Entry]) -> None:
        """Tell the broker that these are done. Raises `StoreUnavailable` when they will come again."""

    async def _extend(self, entries: Sequence[Entry]) -> None:
        """Tell the broker that these are being worked on."""

    # -- what the relay does -----------------------------------------------------------------------------------------

    async def open(self) -> None:
        if self._receiver is None:
            await self._connect()
            self._receiver = asyncio.create_task(self._receive_all(), name=f"pillarbox-source-{self.name}")

    async def close(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        receiver.cancel()
        with suppress(asyncio.CancelledError, StoreUnavailable):
            await receiver
        self.pending.lose(self.pending)
        await self._disconnect()

    async def claim(
        self,
        limit: int,
        *,
        mode: Mode,
        lease: timedelta,
        max_attempts: int | None = None,
        park: bool = True,
        is_prefetch: bool = False,
    ) -> BrokerBatch:
        await self._look_after_receiver()
        entries, is_full = self.pending.claim(limit)
        return BrokerBatch(self, entries, is_full=is_full)

    async def next_due(self) -> timedelta | None:
        seconds = self.pending.next_due()
        return None if seconds is None else timedelta(seconds=seconds)

    async def wait(self, timeout: timedelta) -> bool:
        self._arrived.clear()
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                await self._arrived.wait()
        except TimeoutError:
            return False
        return True

    async def counts(self) -> Counts:
        """What is at hand here; what waits at the broker is the broker's to count."""
        states = [entry.state for entry in self.pending]
        return Counts(new=states.count("ready"), retrying=states.count("waiting"), held=states.count("taken"))

    # -- what batches do ---------------------------------------------------------------------------------------------

    async def settle(self, claims: Sequence[Claim], outcomes: Sequence[Outcome]) -> Settlement:
        """Bury the dead, acknowledge what is done, and keep the rest for later."""
        pairs = list(zip(claims, outcomes, strict=True))
        ours = [(claim, outcome) for claim, outcome in pairs if not claim.row.is_lost]
        letters = [Letter(claim, outcome.error) for claim, outcome in ours if isinstance(outcome, Dead)]
        if letters:
            await self._dead.bury(letters)
        done = [claim.row for claim, outcome in ours if isinstance(outcome, Delivered | Dead)]
        await self._acknowledge([entry for entry in done if not entry.is_lost])
        retried = released = 0
        for claim, outcome in ours:
            if isinstance(outcome, Retry):
                self.pending.delay(claim.row, outcome.after or timedelta(0))
                retried += 1
            elif outcome is RELEASED:
                self.pending.give_back(claim.row)
                released += 1
        for entry in done:
            self.pending.finish(entry)
        self._arrived.set()
        self._room.set()
        return Settlement(len(done) - len(letters), retried, len(letters), released, len(pairs) - len(ours))

    def give_back(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            if not claim.row.is_lost and claim.row.state == "taken":
                self.pending.give_back(claim.row)
        self._arrived.set()

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        ours = [claim.row for claim in claims if not claim.row.is_lost]
        if ours:
            await self._extend(ours)
        return [claim for claim in claims if claim.row.is_lost]

    # -- receiving ---------------------------------------------------------------------------------------------------

    async def _look_after_receiver(self) -> None:
        """Connect again after the connection was lost: what was at hand then comes again."""
        if self._receiver is not None and not self._receiver.done():
            return
        receiver, self._receiver = self._receiver, None
        if receiver is not None and not receiver.cancelled() and (error := receiver.exception()) is not None:
            log.info("Source %s: connecting again: %s", self.name, error)
            if not isinstance(error, StoreUnavailable):
                raise error
        self.pending.lose(self.pending)
        with suppress(StoreUnavailable):
            await self._disconnect()
        await self.open()

    async def _receive_all(self) -> None:
        while True:
            room = self._prefetch - len(self.pending)
            if room <= 0:
                self._room.clear()
                await self._idle()
                continue
            entries = await self._receive(room, _RECEIVE)
            if entries:
                self.pending.add(entries)
                self._arrived.set()

    async def _idle(self) -> None:
        """Wait for room. A subclass whose client must be heard of meanwhile sees to that."""
        await self._room.wait()
