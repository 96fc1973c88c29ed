"""What the sources on brokers share: a receiver that keeps a bounded number of messages at hand, and their batches.

The receiver is a task that asks for messages while there is room for them. When the connection is lost it ends; the
next claim connects again, or says that the broker is down. Where connecting succeeds and receiving fails at once, again
and again, the pauses in between grow. A second task tells brokers that want to hear it that everything at hand is still
being worked on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from datetime import timedelta
from typing import Any, Final

from pillarbox.errors import ConfigError, StoreUnavailable, Unsupported
from pillarbox.event import Claim, Dead, Delivered, Outcome, Released, Retry
from pillarbox.sources import DeadLetters, Letter
from pillarbox.sources.pending import Entry, Pending
from pillarbox.stores import Counts, Effect, Joins, Mode, Settlement

log = logging.getLogger("pillarbox.source")

PREFETCH: Final = 1000
LEASE: Final = timedelta(seconds=30)
_RECEIVE: Final = 0.5
# A receiver that lived for so many seconds, or received anything, was at work; the pauses after those that were not.
_AT_WORK: Final = 5.0
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0


class BrokerBatch:
    """Messages that are being handled."""

    mode: Mode = "lease"
    has_tried = False

    def __init__(self, source: BrokerSource, claims: Sequence[Claim], *, is_full: bool) -> None:
        self._source = source
        self.claims = claims
        self.is_full = is_full

    async def settle(
        self, outcomes: Sequence[Outcome], *, park: bool = True, effect: Effect | None = None
    ) -> Settlement:
        """Settle; after a failure it may be called again, and goes on where it stopped."""
        if effect is not None:
            raise Unsupported(f"Source {self._source.name}: a broker has no transaction that an effect could join")
        return await self._source.settle(self.claims, outcomes)

    async def settle_one(self, claim: Claim, effect: Effect, *, session: Joins | None = None) -> bool:
        raise Unsupported(f"Source {self._source.name}: a broker has no transaction that an effect could join")

    async def renew(self, lease: timedelta) -> Sequence[Claim]:
        return await self._source.renew(self.claims)

    async def abandon(self) -> None:
        self._source.give_back(self.claims)


class Pauses:
    """When to connect again: at once after a receiver that was at work, later and later after those that were not."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_at = 0.0
        self._failures = 0
        self._until = 0.0

    @property
    def is_over(self) -> bool:
        return self._clock() >= self._until

    def start(self) -> None:
        self._started_at = self._clock()

    def note_work(self) -> None:
        self._failures = 0

    def note_end(self) -> None:
        now = self._clock()
        if now - self._started_at >= _AT_WORK:
            self._failures = 0
        # The first time may be chance, and connecting again may help.
        if self._failures:
            self._until = now + min(_FIRST_PAUSE * 2 ** (self._failures - 1), _LONGEST_PAUSE)
        self._failures = min(self._failures + 1, 10)


class BrokerSource(ABC):
    """A consumer group's membership as a source. A subclass talks to its broker.

    `prefetch` bounds how many messages are at hand, also while the first of them keeps failing. `dead` is where the
    dead letters go.
    """

    modes: frozenset[Mode] = frozenset({"lease"})
    joins: frozenset[Joins] = frozenset()
    in_flight = 2
    keeps_order = True
    counts_attempts = False
    """Whether the broker remembers how often a message was tried, so that one that kills its consumers is found."""

    def __init__(self, name: str, *, dead: DeadLetters, prefetch: int = PREFETCH) -> None:
        if prefetch < 1:
            raise ConfigError(f"Source {name!r} prefetch: expected a whole number of 1 or more, got {prefetch!r}")
        self.name = name
        self._dead = dead
        self._prefetch = prefetch
        self.pending = Pending(time.monotonic)
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._opening = asyncio.Lock()
        self._is_open = False
        self._was_connected = False
        self._pauses = Pauses(time.monotonic)
        self._receiver: asyncio.Task[None] | None = None
        self._extender: asyncio.Task[None] | None = None

    @property
    def lease(self) -> timedelta:
        return LEASE

    # -- what a subclass does ----------------------------------------------------------------------------------------

    @abstractmethod
    async def _connect(self) -> None:
        """Join the group; raises `StoreUnavailable` when the broker cannot be reached, `ConfigError` if it refuses.

        Called again after an outage: what `pending` still has then must be acknowledgeable, or be lost before.
        """

    @abstractmethod
    async def _disconnect(self) -> None:
        """Leave the group, if it was joined. What was not acknowledged comes again, to whoever is left."""

    @abstractmethod
    async def _receive(self, most: int, timeout: float) -> Sequence[Entry]:
        """Up to so many messages, none when none came in time. Raises `StoreUnavailable` on a lost connection."""

    @abstractmethod
    async def _acknowledge(self, entries: Sequence[Entry]) -> None:
        """Tell the broker that these are done. Raises `StoreUnavailable` when they will come again.

        Entries that turn out to be somebody else's are lost (`self.lose`), and nothing is raised for them.
        """

    async def _begin(self, entries: Sequence[Entry]) -> None:  # noqa: B027 -- most brokers need not hear of it
        """Tell the broker that these are tried once more, if it keeps count; raises `StoreUnavailable`."""

    async def _extend(self, entries: Sequence[Entry]) -> None:  # noqa: B027 -- nor of this
        """Tell the broker that these are still at hand; called for all of them every third of `extend_within`."""

    extend_within: timedelta | None = None
    """After which time the broker gives a message to somebody else unless it hears of it; None when it never does."""

    async def _reconnect(self) -> None:
        """Connect again after the connection was lost: by default all that was at hand comes again."""
        self.lose(self.pending)
        await self._disconnect()
        await self._connect()

    def _refusal(self, text: str) -> ConfigError | StoreUnavailable:
        # What was there once may come back; a source that never ran is told at once.
        return StoreUnavailable(text) if self._was_connected else ConfigError(text)

    def lose(self, entries: Iterable[Entry]) -> None:
        """Forget entries that somebody else gets, or that come again."""
        self.pending.lose(entries)
        self._room.set()

    # -- what the relay does -----------------------------------------------------------------------------------------

    async def open(self) -> None:
        async with self._opening:
            if not self._is_open:
                await self._connect()
                self._is_open = self._was_connected = True
                self._start()

    async def close(self) -> None:
        async with self._opening:
            self._is_open = False
            tasks = [task for task in (self._receiver, self._extender) if task is not None]
            self._receiver = self._extender = None
            for task in tasks:
                task.cancel()
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(error, Exception) and not isinstance(error, StoreUnavailable):
                    log.error("Source %s: receiving had failed: %s", self.name, error)
            self.lose(self.pending)
            try:
                await self._disconnect()
            finally:
                await self._dead.close()

    async def claim(
        self,
        limit: int,
        *,
        mode: Mode,
        lease: timedelta,
        max_attempts: int | None = None,
        park: bool = True,
        is_prefetch: bool = False,
        max_bytes: int | None = None,
    ) -> BrokerBatch:
        await self._look_after_receiver()
        # Before looking: what arrives from now on wakes whoever waits after this.
        self._arrived.clear()
        entries, is_full = self.pending.claim(limit, max_bytes)
        claims = [entry.claim() for entry in entries]
        try:
            if entries:
                await self._begin(entries)
        except BaseException:
            self.give_back(claims)
            raise
        if self.counts_attempts:
            for claim in claims:
                _bury_killer(claim, max_attempts)
        return BrokerBatch(self, claims, is_full=is_full)

    async def next_due(self) -> timedelta | None:
        seconds = self.pending.next_due()
        return None if seconds is None else timedelta(seconds=seconds)

    async def wait(self, timeout: timedelta) -> bool:
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
        """Acknowledge what is done, bury the dead and acknowledge them, and keep the rest for later."""
        pairs = [(claim, outcome) for claim, outcome in zip(claims, outcomes, strict=True) if _is_ours(claim)]
        delivered = [claim.row for claim, outcome in pairs if isinstance(outcome, Delivered)]
        dead = [(claim, outcome.error) for claim, outcome in pairs if isinstance(outcome, Dead)]
        await self._finish(delivered)
        await self._bury([(claim, error) for claim, error in dead if not claim.row.is_buried])
        await self._finish([claim.row for claim, _ in dead])
        # Last, because from here on they may be claimed again, and a settlement that failed is called again.
        kept = [(claim, outcome) for claim, outcome in pairs if not claim.row.is_lost]
        retried = [(claim.row, outcome) for claim, outcome in kept if isinstance(outcome, Retry)]
        released = [claim.row for claim, outcome in kept if isinstance(outcome, Released)]
        for entry, outcome in retried:
            self.pending.delay(entry, outcome.after or timedelta(0))
        for entry in released:
            self.pending.give_back(entry)
        if claims:
            self._arrived.set()
        done = sum(not entry.is_lost for entry in delivered)
        buried = sum(not claim.row.is_lost for claim, _ in dead)
        lost = len(claims) - done - buried - len(retried) - len(released)
        return Settlement(done, len(retried), buried, len(released), lost)

    def give_back(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            if _is_ours(claim) and claim.row.state == "taken":
                self.pending.give_back(claim.row)
                self._arrived.set()

    async def renew(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """The claims that are lost; the others are extended with everything else at hand."""
        return [claim for claim in claims if not _is_ours(claim)]

    async def _finish(self, entries: Sequence[Entry]) -> None:
        todo = [entry for entry in entries if not entry.is_lost and entry.state != "done"]
        if todo:
            await self._acknowledge(todo)
        for entry in todo:
            if not entry.is_lost:
                self.pending.finish(entry)
        self._room.set()

    async def _bury(self, dead: Sequence[tuple[Claim, str]]) -> None:
        if dead:
            await self._dead.bury([Letter(claim, error, claim.row.read.raw) for claim, error in dead])
            for claim, _ in dead:
                claim.row.is_buried = True

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._pauses.start()
        self._receiver = self._watch(self._receive_all(), "receiver")
        if self.extend_within is not None and (self._extender is None or self._extender.done()):
            self._extender = self._watch(self._extend_all(self.extend_within / 3), "extender")

    def _watch(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"pillarbox-source-{what}")
        # Whoever waits for messages then hears of an error at once.
        task.add_done_callback(lambda _: self._arrived.set())
        return task

    async def _look_after_receiver(self) -> None:
        """Connect again after the connection was lost, or raise what else ended the receiver."""
        if self._receiver is not None and not self._receiver.done():
            return
        async with self._opening:
            if not self._is_open:
                raise StoreUnavailable(f"Source {self.name}: it is closed; open it before claiming")
            receiver = self._receiver
            if receiver is not None and not receiver.done():
                return
            error = None if receiver is None or receiver.cancelled() else receiver.exception()
            if error is not None and not isinstance(error, StoreUnavailable):
                self._receiver = None
                raise error
            if error is not None and not self._pauses.is_over:
                raise StoreUnavailable(str(error)) from error
            await self._reconnect()
            self._start()
            log.info("Source %s: connected again%s", self.name, "" if error is None else f", after: {error}")

    async def _receive_all(self) -> None:
        try:
            await self._receive_on()
        except StoreUnavailable:
            self._pauses.note_end()
            raise

    async def _receive_on(self) -> None:
        while True:
            room = self._prefetch - len(self.pending)
            if room <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            entries = await self._receive(room, _RECEIVE)
            if entries:
                self._pauses.note_work()
                self.pending.add(entries)
                self._arrived.set()

    async def _extend_all(self, every: timedelta) -> None:
        while True:
            await asyncio.sleep(every.total_seconds())
            try:
                if len(self.pending):
                    await self._extend(list(self.pending))
            except StoreUnavailable as error:
                log.debug("Source %s: could not extend what is at hand: %s", self.name, error)
            except Exception:
                # Whatever it was, without this task everything at hand would go to others.
                log.exception("Source %s: could not extend what is at hand; trying again in %s", self.name, every)


def _is_ours(claim: Claim) -> bool:
    entry: Entry = claim.row
    return not entry.is_lost and entry.turn == claim.fence


def _bury_killer(claim: Claim, max_attempts: int | None) -> None:
    limit = max_attempts if claim.event.max_attempts is None else claim.event.max_attempts
    if limit is not None and claim.attempt > limit and claim.defect is None:
        claim.defect = f"Not settled after {claim.attempt - 1} attempts: whoever made the last one ended in the middle"
