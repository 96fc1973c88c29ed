"""A store in memory: the twin of the real ones for tests, with a clock that a test can move.

It keeps the obligations of the Store port in plain Python, on one event loop: what the databases do with row
locks is a field of a row here, and a transaction is a list of rows not yet added.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from pillarbox.errors import StoreUnavailable, Unsupported
from pillarbox.event import (
    EVENT_FIELDS,
    LATE_HEADER,
    RELEASED,
    Claim,
    Dead,
    Delivered,
    Event,
    Outcome,
    Retry,
    load_event,
)
from pillarbox.stores import Counts, Effect, Entry, Filter, Joins, Mode, Pruned, Record, Settlement, State

_SHOWN = tuple(Record.__dataclass_fields__)
LAPSED = "The lease lapsed: the relay that held this event died or stalled."


@dataclass(slots=True, eq=False)
class _Row:
    seq: int
    event: Event
    put_at: datetime
    state: State = "ready"
    attempts: int = 0
    error: str | None = None
    until_at: datetime | None = None
    fence: UUID | None = None
    holder: MemoryBatch | None = None
    delivered_at: datetime | None = None
    died_at: datetime | None = None
    parks: bool = False

    @property
    def names(self) -> set[object]:
        return {name for name in (self.event.id, self.event.dedup_key) if name is not None}

    def enter(self, state: State, until_at: datetime | None = None) -> None:
        self.state, self.until_at, self.fence, self.holder = state, until_at, None, None

    def change_event(self, **fields: Any) -> None:
        values = {name: getattr(self.event, name) for name in EVENT_FIELDS}
        self.event = load_event(*{**values, **fields}.values())

    def begin_again(self, *, is_late: bool) -> None:
        if is_late:
            self.change_event(headers=MappingProxyType({**self.event.headers, LATE_HEADER: "true"}))
        self.enter("ready")
        self.attempts, self.error, self.delivered_at, self.died_at, self.parks = 0, None, None, None, False


class MemoryReceipt(NamedTuple):
    """Which events of one put were new; the others' id or dedup key was there already."""

    new: tuple[Event, ...]
    existing: tuple[Event, ...]


class MemoryBatch:
    """Claims of a `MemoryStore`."""

    def __init__(self, store: MemoryStore, mode: Mode) -> None:
        self._store = store
        self._is_settled = False
        self.claims: list[Claim] = []
        self.mode: Mode = mode
        self.is_full = False
        self.has_tried = False

    async def settle(
        self, outcomes: Sequence[Outcome], *, park: bool = True, effect: Effect | None = None
    ) -> Settlement:
        if effect is not None:
            raise Unsupported(f"Store {self._store.name}: there is no transaction that an effect could join")
        if self.mode == "hold" and self._is_settled:
            raise StoreUnavailable(f"Store {self._store.name}: this batch was settled or abandoned before")
        settlement = self._store.settle(self, outcomes, park=park)
        self._is_settled = True
        return settlement

    async def settle_one(self, claim: Claim, effect: Effect, *, session: Joins | None = None) -> bool:
        raise Unsupported(f"Store {self._store.name}: there is no transaction that an effect could join")

    async def renew(self, lease: timedelta) -> Sequence[Claim]:
        return [] if self.mode == "hold" else self._store.renew(self, lease)

    async def abandon(self) -> None:
        if self.mode == "lease" or not self._is_settled:
            await self.settle([RELEASED] * len(self.claims))


@dataclass(eq=False)
class MemoryStore:
    """An outbox in memory.

    `put`, `transaction` and `cancel` are the application's side, the rest is the Store port. `clock` returns
    the time as an aware datetime; `retention` keeps delivered events, as on the real stores.
    """

    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    retention: timedelta | None = None
    name: str = "memory:"
    modes: frozenset[Mode] = frozenset({"hold", "lease"})
    joins: frozenset[Joins] = frozenset()
    in_flight = 2
    lease = timedelta(seconds=30)
    keeps_order = True
    _rows: dict[int, _Row] = field(default_factory=dict, init=False, repr=False)
    _audit: list[Entry] = field(default_factory=list, init=False, repr=False)
    _last_seq: int = field(default=0, init=False, repr=False)
    _woken: asyncio.Event = field(default_factory=asyncio.Event, init=False, repr=False)

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def put(self, *events: Event) -> MemoryReceipt:
        """Put events in a transaction of their own."""
        with self.transaction() as put:
            return put(*events)

    @contextmanager
    def transaction(self) -> Iterator[Callable[..., MemoryReceipt]]:
        """Give a `put` whose events commit when the block ends, and are forgotten when it raises."""
        rows: list[_Row] = []

        def put(*events: Event) -> MemoryReceipt:
            made = _one_of_each(map(self._make_row, events), self._taken(*rows))
            rows.extend(made)
            new = {row.event.id for row in made}
            existing = tuple(event for event in events if event.id not in new)
            return MemoryReceipt(tuple(event for event in events if event.id in new), existing)

        yield put
        self._rows |= {row.seq: row for row in _one_of_each(rows, self._taken())}
        self._woken.set()

    def cancel(self, *ids: UUID) -> int:
        """Delete events that nobody holds; returns how many were still there to cancel."""
        free = self._select("ready", "waiting", "blocked", "scheduled")
        return self._remove([row for row in free if row.event.id in ids and row.holder is None])

    def _make_row(self, event: Event) -> _Row:
        # The number is drawn now, as a database draws it before the commit.
        self._last_seq += 1
        now = self.clock()
        due_at = event.due_at if event.delay is None else now + event.delay
        row = _Row(self._last_seq, event, now)
        row.change_event(due_at=due_at, delay=None, created_at=now)
        if due_at is not None and due_at > now:
            row.enter("scheduled", due_at)
        return row

    def _taken(self, *others: _Row) -> set[object]:
        live = [*others, *(row for row in self._rows.values() if row.state != "dead")]
        return {name for row in live for name in row.names}

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
    ) -> MemoryBatch:
        if mode not in self.modes:
            raise Unsupported(f"Store {self.name}: cannot claim by {mode}, only by {', '.join(self.modes)}")
        self._wake(max_attempts, park)
        batch, token = MemoryBatch(self, mode), uuid4()
        in_flight, first = self._fronts()
        broken: set[str | None] = set()
        left = math.inf if max_bytes is None else max_bytes
        for row in self._select("ready"):
            if row.holder is not None or row.event.key in broken:
                continue
            if row.event.key in in_flight or first.get(row.event.key, row.seq) < row.seq:
                row.state = "ready" if is_prefetch else "blocked"
            elif mode == "hold" and row.attempts:
                batch.has_tried = True
                broken |= {row.event.key} - {None}
            elif batch.claims and len(row.event.payload) > left:
                # Nothing lighter passes it, or it might wait for ever.
                batch.is_full, left = True, -1
            elif len(batch.claims) < limit:
                left -= len(row.event.payload)
                batch.claims.append(self._take(row, batch, lease, token))
        batch.is_full |= len(batch.claims) == limit
        return batch

    def _fronts(self) -> tuple[set[str | None], dict[str | None, int]]:
        """The keys that are in flight, and the first row of each key that the later ones wait for."""
        keyed = [row for row in self._select() if row.event.key is not None]
        first: dict[str | None, int] = {}
        for row in keyed:
            if row.state == "waiting" or row.parks:
                first.setdefault(row.event.key, row.seq)
        return {row.event.key for row in keyed if row.state == "leased" or row.holder}, first

    def _take(self, row: _Row, batch: MemoryBatch, lease: timedelta, token: UUID) -> Claim:
        claim = Claim(row.seq, row.event, row.attempts + 1)
        if batch.mode == "hold":
            row.holder = batch
        else:
            row.enter("leased", self.clock() + lease)
            row.attempts = claim.attempt
            row.fence, claim.fence, claim.expires_at = token, token, row.until_at
        return claim

    def _wake(self, max_attempts: int | None, park: bool) -> None:
        now = self.clock()
        lapsed = self._past("leased", now)
        for row in lapsed:
            most = row.event.max_attempts or max_attempts
            if most is not None and row.attempts >= most:
                self._bury(row, LAPSED, parks=park)
            else:
                # As on the real stores: rows that lapsed twice return at different moments.
                longest = min(300.0, 2.0 ** min(row.attempts, 20)) if row.attempts > 1 else 0.0
                row.enter("waiting", now + timedelta(seconds=random.uniform(0, longest)))
                row.error = LAPSED
        for row in (due := [*self._past("waiting", now), *self._past("scheduled", now)]):
            row.enter("ready")
        self._unblock([*lapsed, *due])

    def _past(self, state: State, now: datetime) -> list[_Row]:
        return [row for row in self._select(state) if row.until_at is not None and row.until_at <= now]

    def settle(self, batch: MemoryBatch, outcomes: Sequence[Outcome], *, park: bool) -> Settlement:
        """Write what became of a batch; a claim whose row is no longer its own changes nothing."""
        settlement = Settlement()
        for claim, outcome in list(zip(batch.claims, outcomes, strict=True)):
            row = self._own(batch, claim)
            settlement += Settlement(lost=1) if row is None else self._settle_row(row, claim, outcome, park)
        self._unblock(batch.claims)
        return settlement

    def _settle_row(self, row: _Row, claim: Claim, outcome: Outcome, park: bool) -> Settlement:
        row.attempts = claim.attempt
        match outcome:
            case Delivered():
                row.enter("delivered")
                row.delivered_at = self.clock()
                row.change_event(dedup_key=None)
                if self.retention is None:
                    del self._rows[row.seq]
                return Settlement(delivered=1)
            case Retry(error=error, after=after):
                row.enter("waiting", self.clock() + (after or timedelta(0)))
                row.error = error
                return Settlement(retried=1)
            case Dead(error=error):
                self._bury(row, error, parks=park)
                return Settlement(dead=1)
        row.enter("ready")
        row.attempts -= 1
        return Settlement(released=1)

    def renew(self, batch: MemoryBatch, lease: timedelta) -> list[Claim]:
        """Extend the claims that are still the batch's own; returns the others."""
        own = [claim for claim in batch.claims if self._own(batch, claim)]
        for claim in own:
            self._rows[claim.row].until_at = claim.expires_at = self.clock() + lease
        return [claim for claim in batch.claims if claim not in own]

    def _own(self, batch: MemoryBatch, claim: Claim) -> _Row | None:
        row = self._rows.get(claim.row)
        return row if row and (row.holder is batch or (row.fence and row.fence == claim.fence)) else None

    def _bury(self, row: _Row, error: str, *, parks: bool) -> None:
        row.enter("dead")
        row.error, row.died_at, row.parks = error, self.clock(), parks and row.event.key is not None

    def _unblock(self, freed: Iterable[Claim | _Row]) -> None:
        keys = {each.event.key for each in freed}
        for row in self._select("blocked"):
            if row.event.key in keys:
                row.enter("ready")
        self._woken.set()

    def _remove(self, rows: Sequence[_Row]) -> int:
        for row in rows:
            del self._rows[row.seq]
        self._unblock(rows)
        return len(rows)

    async def next_due(self) -> timedelta | None:
        moments = [row.until_at for row in self._rows.values() if row.until_at is not None]
        return max(timedelta(0), min(moments) - self.clock()) if moments else None

    async def wait(self, timeout: timedelta) -> bool:
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                await self._woken.wait()
        except TimeoutError:
            return False
        self._woken.clear()
        return True

    async def counts(self) -> Counts:
        pending = [row.put_at for row in self._rows.values() if row.state not in ("delivered", "dead")]
        return Counts(
            new=sum(row.attempts == 0 for row in self._select("ready")),
            retrying=len(self._select("waiting")) + sum(row.attempts > 0 for row in self._select("ready")),
            held=len(self._select("leased")),
            scheduled=len(self._select("scheduled")),
            blocked=len(self._select("blocked")),
            delivered=len(self._select("delivered")),
            dead=len(self._select("dead")),
            oldest_pending=self.clock() - min(pending) if pending else None,
        )

    async def events(self, where: Filter, *, state: State | None = None, limit: int = 50) -> Sequence[Record]:
        rows = self._select(*([state] if state else []), where=where)
        return [Record(**{name: getattr(row, name) for name in _SHOWN}) for row in rows[::-1][:limit]]

    async def redrive(self, where: Filter, *, actor: str, **options: Any) -> int:
        rows = _one_of_each(self._select("dead", where=where), self._taken())
        return self._act("redrive", rows, where, actor, **options)

    async def drop(self, where: Filter, *, actor: str, **options: Any) -> int:
        return self._act("drop", self._select("dead", where=where), where, actor, **options)

    async def replay(self, where: Filter, *, actor: str, **options: Any) -> int:
        return self._act("replay", self._select("delivered", where=where), where, actor, **options)

    def _act(
        self,
        action: str,
        rows: list[_Row],
        where: Filter,
        actor: str,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> int:
        rows = rows[:limit]
        if rows and not dry_run:
            for row in rows if action != "drop" else ():
                row.begin_again(is_late=action == "replay" or (row.event.key is not None and not row.parks))
            self._unblock(rows) if action != "drop" else self._remove(rows)
            given = {name: value for name, value in asdict(where).items() if value not in (None, ())}
            detail = {k: list(map(str, v)) if k == "ids" else str(v) for k, v in given.items()}
            self._audit.append(Entry(self.clock(), actor, action, detail, len(rows)))
        return len(rows)

    async def prune(
        self,
        *,
        delivered_age: timedelta | None = None,
        dead_age: timedelta | None = None,
        actor: str | None = None,
        dry_run: bool = False,
        batch: int = 1000,
    ) -> Pruned:
        delivered = self._select("delivered", where=self._before(delivered_age))
        dead = self._select("dead", where=self._before(dead_age))
        rows = [] if dry_run else [*delivered, *dead]
        if self._remove(rows) and actor is not None:
            detail = {"delivered_age": str(delivered_age), "dead_age": str(dead_age)}
            self._audit.append(Entry(self.clock(), actor, "prune", detail, len(rows)))
        return Pruned(len(delivered), len(dead))

    def _before(self, age: timedelta | None) -> Filter:
        return Filter(until=datetime.min.replace(tzinfo=UTC) if age is None else self.clock() - age)

    async def audit(self, limit: int = 50) -> Sequence[Entry]:
        return self._audit[::-1][:limit]

    def _select(self, *states: State, where: Filter | None = None) -> list[_Row]:
        rows = [row for _, row in sorted(self._rows.items()) if not states or row.state in states]
        return rows if where is None else [row for row in rows if _matches(row, where)]


def _one_of_each(rows: Iterable[_Row], taken: set[object]) -> list[_Row]:
    # Of rows that share an id or a dedup key only the first can live.
    chosen: list[_Row] = []
    for row in rows:
        if taken.isdisjoint(row.names):
            taken |= row.names
            chosen.append(row)
    return chosen


def _matches(row: _Row, where: Filter) -> bool:
    event, moment = row.event, row.died_at or row.delivered_at or row.put_at
    return (
        (not where.ids or event.id in where.ids)
        and where.key in (None, event.key)
        and where.topic in (None, event.topic)
        and where.type in (None, event.type)
        and (where.error is None or where.error in (row.error or ""))
        and (where.since is None or moment >= where.since)
        and (where.until is None or moment < where.until)
    )
