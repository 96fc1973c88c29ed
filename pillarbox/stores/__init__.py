"""Where claims come from: the Store port, and the store for a database URL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal, Protocol
from uuid import UUID

from pillarbox.event import Claim, Outcome

# Whoever joins a transaction may be idle in it for so long; a lost host's is ended then.
JOIN_DEADLINE: Final = timedelta(hours=1)

Joins = Literal["sync", "async"]
Mode = Literal["hold", "lease"]
Effect = Callable[[Any], None]
"""What is to commit together with a settlement: called with the database connection of that transaction."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """What a settlement changed. `lost` claims had lapsed and belong to somebody else: they were left alone."""

    delivered: int = 0
    retried: int = 0
    dead: int = 0
    released: int = 0
    lost: int = 0

    def __add__(self, other: Settlement) -> Settlement:
        return Settlement(
            self.delivered + other.delivered,
            self.retried + other.retried,
            self.dead + other.dead,
            self.released + other.released,
            self.lost + other.lost,
        )


class Batch(Protocol):
    """The claims of one call, to be settled once.

    - `settle` takes one outcome a claim, in order, with every `Retry` carrying its delay; what it writes is one
      transaction. A claim whose fence is no longer in its row changes nothing and is counted as lost. An `effect`
      commits with it; when a claim is lost there is neither effect nor settlement, and what is still ours is released.
    - `settle_one` runs an effect and settles one claim as delivered in the same transaction, before the others: false
      when the claim was lost, and then the effect is undone. An error of the effect undoes it and passes; the claim is
      still to be settled. A claim settled so is left alone by what comes later. After a conflict with other
      transactions the effect runs again. Where the database has both, `session` says whether its driver is to be a
      plain or an asynchronous one; with a plain one the effect runs in a thread. A held batch has one transaction for
      all its claims and cannot do this.
    - `renew` extends the claims that are still ours and returns the others; a held batch has nothing to renew.
    - `abandon` gives every claim back untried; it may be called after a failed `settle` and never raises for a lost
      connection, because then the database gives them back by itself.
    """

    @property
    def claims(self) -> Sequence[Claim]: ...

    @property
    def mode(self) -> Mode: ...

    @property
    def is_full(self) -> bool:
        """Whether more was waiting than was asked for."""

    @property
    def has_tried(self) -> bool:
        """Whether rows were left because a hold takes no row that was tried before; a lease takes them."""

    async def settle(
        self, outcomes: Sequence[Outcome], *, park: bool = True, effect: Effect | None = None
    ) -> Settlement: ...

    async def settle_one(self, claim: Claim, effect: Effect, *, session: Joins | None = None) -> bool: ...

    async def renew(self, lease: timedelta) -> Sequence[Claim]: ...

    async def abandon(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Counts:
    """How many events are in each part of their life, and how old the oldest undelivered one is."""

    new: int = 0
    retrying: int = 0
    held: int = 0
    scheduled: int = 0
    blocked: int = 0
    delivered: int = 0
    dead: int = 0
    oldest_pending: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Filter:
    """Which events an operator means; what is not given does not restrict.

    `error` is a part of the error's text; `since` and `until` bound when a dead event died, when a delivered one was
    delivered, and when any other was put.
    """

    ids: Sequence[UUID] = ()
    key: str | None = None
    topic: str | None = None
    type: str | None = None
    error: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    @property
    def is_empty(self) -> bool:
        return self == Filter()


State = Literal["ready", "leased", "waiting", "blocked", "scheduled", "delivered", "dead"]


@dataclass(frozen=True, slots=True)
class Record:
    """One stored event as an operator sees it."""

    event: Any
    seq: Any
    """The row's number, or what else identifies it."""
    state: State
    attempts: int
    error: str | None
    until_at: datetime | None = None
    delivered_at: datetime | None = None
    died_at: datetime | None = None
    parks: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the audit table."""

    at: datetime
    actor: str
    action: str
    detail: Any
    events: int


@dataclass(frozen=True, slots=True)
class Pruned:
    """How many rows a prune deleted, or would delete."""

    delivered: int = 0
    dead: int = 0


class Store(Protocol):
    """A layout run on a database.

    An implementer's obligations:
    - A committed event is claimed; one that was rolled back, is not due, or is held by somebody else is not.
    - Rows of one key are claimed in order, and never while an earlier one is held, waits after a try or is parked;
      also when several relays claim at once. One claim may take several rows of a key.
    - A lease counts its attempt when it is claimed, a hold when it fails. A lapsed lease is claimed again with its
      attempt counted, or is dead when none is left.
    - Settling is fenced; the database's clock decides.
    - What the database refuses for the moment raises `StoreUnavailable`; nothing is half done.
    """

    @property
    def name(self) -> str: ...

    @property
    def modes(self) -> frozenset[Mode]:
        """The ways of claiming that layout, database and connection allow."""

    @property
    def in_flight(self) -> int:
        """How many batches under way at once pay off."""

    @property
    def joins(self) -> frozenset[Joins]:
        """What kinds of sessions can be made on the transaction of `Batch.settle_one`; none without such a thing."""

    @property
    def lease(self) -> timedelta:
        """How long a claim lasts unless the relay says otherwise."""

    @property
    def keeps_order(self) -> bool:
        """Whether events of one key are delivered in order, whatever fails and however many relays there are."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...

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
    ) -> Batch:
        """Claim up to `limit` events.

        `max_attempts` buries rows whose lease lapsed on their last attempt, `park` says whether they park their key. A
        prefetch, made while other batches of this relay are under way, leaves rows that wait behind them where they
        are. The payloads weigh at most `max_bytes` together, unless one alone weighs more: it comes alone. What comes
        after them waits for the next claim, and the batch is full. No more is loaded into memory than that and a
        quarter.
        """

    async def next_due(self) -> timedelta | None:
        """How long until a scheduled, waiting or leased row wants attention; None when there is none."""

    async def wait(self, timeout: timedelta) -> bool:
        """Sleep until events may be ready or the time is over; true when woken."""

    async def counts(self) -> Counts: ...

    async def events(self, where: Filter, *, state: State | None = None, limit: int = 50) -> Sequence[Record]: ...

    async def redrive(self, where: Filter, *, actor: str, limit: int | None = None, dry_run: bool = False) -> int:
        """Return dead events to the outbox under their old sequence number, oldest first."""

    async def drop(self, where: Filter, *, actor: str, limit: int | None = None, dry_run: bool = False) -> int:
        """Delete dead events for good."""

    async def replay(self, where: Filter, *, actor: str, limit: int | None = None, dry_run: bool = False) -> int:
        """Deliver retained events again."""

    async def prune(
        self,
        *,
        delivered_age: timedelta | None = None,
        dead_age: timedelta | None = None,
        actor: str | None = None,
        dry_run: bool = False,
        batch: int = 1000,
    ) -> Pruned:
        """Delete delivered and dead rows older than given, in bounded batches; pending rows never."""

    async def audit(self, limit: int = 50) -> Sequence[Entry]: ...
