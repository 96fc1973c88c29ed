"""A queue file as the source of a relay: its rows in strict order, one batch at a time.

Only one service works on a folder, so a claim writes nothing: it reads the first rows and checks their chain. A crash
before settlement leaves them where they are, and they are sent again; the writer's side knows what it has. Settlement
is one transaction: delivered rows go into the audit log and out of the queue. A row that failed is remembered beside
the queue; until it is due nothing is claimed, then it alone.

A batch is claimed when enough rows wait or the oldest has waited long enough; a flush takes all that is there then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

from pillarbox.errors import SinkUnavailable, StoreUnavailable, Unsupported
from pillarbox.event import Claim, Outcome
from pillarbox.retry import describe_error
from pillarbox.stores import Counts, Effect, Joins, Mode, Pruned, Settlement
from pillarbox.sync.arguments import decode_arguments
from pillarbox.sync.flushing import Flush, Gate
from pillarbox.sync.settling import (
    News,
    Queued,
    count_rows,
    delete_entries,
    find_old_entries,
    has_rows,
    make_event,
    newest_number,
    pass_dead_head,
    settle_rows,
)
from pillarbox.sync.state import (
    NO_HEAD,
    QueueState,
    find_gap,
    parse_time,
    transaction,
    write_state,
)
from pillarbox.sync.tables import QUEUE
from pillarbox.sync.threaded import ThreadedQueue

log = logging.getLogger("pillarbox.sync")

T = TypeVar("T")
LEASE: Final = timedelta(minutes=1)
_FIRST_LOOK: Final = 0.005
_LONGEST_LOOK: Final = 0.1
_STUCK_LOOK: Final = 0.5


class QueueSource(ThreadedQueue):
    """The rows of one namespace of a queue file.

    `prepare` is awaited before the first claim, and again until it succeeds: it makes the destination ready and may
    number the waiting rows anew. `drains` lets every claim take what is there, whatever the thresholds.
    """

    modes: frozenset[Mode] = frozenset({"lease"})
    joins: frozenset[Joins] = frozenset()
    in_flight = 1
    keeps_order = True
    is_notified = True
    tells_dead = True
    """Whether dead rows are reported here, by their numbers."""

    def __init__(
        self,
        path: Path,
        namespace: str,
        *,
        name: str | None = None,
        flush: Flush | None = None,
        prepare: Callable[[], Awaitable[None]] | None = None,
        retention: timedelta | None = None,
        prune_every: timedelta = timedelta(minutes=8),
        is_application_file: bool = False,
    ) -> None:
        super().__init__(
            path, namespace, name=name or f"{path.name}/{namespace}", is_application_file=is_application_file
        )
        self.drains = False
        self.problem: str | None = None
        """Why the table waits for an operator, if it does."""
        self.retention = retention
        self.flush = flush or Flush()
        self._gate = Gate(namespace)
        self.prepare = prepare
        self.decodes = True
        """Whether the arguments are read; a copy is made without."""
        self.notes_sent = False
        """Whether the file notes what is sent, for destinations that keep no mark."""
        self._preparing = asyncio.Lock()
        self._prune_every = prune_every.total_seconds()
        self._pruned_at = float("-inf")
        self._seen: object = None
        self._durable_to = 0
        self._failing: int | None = None
        self._unsettled: tuple[Sequence[Claim], Sequence[Outcome], bool, int] | None = None
        self._is_stuck = False
        self._look_pause = _FIRST_LOOK

    @property
    def lease(self) -> timedelta:
        return LEASE

    @property
    def options(self) -> str:
        """The options of the command line that choose this queue."""
        chosen = f"--table {self.namespace}"
        if not self.decodes:
            return f"{chosen} --target all"
        folder = self.path.parent.parent.name
        is_copy = folder == "targets" or folder.endswith(".targets")
        return f"{chosen} --target {self.path.parent.name}" if is_copy else chosen

    # -- claiming ----------------------------------------------------------------------------------------------------

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
    ) -> QueueBatch:
        # How much a batch weighs is bounded by the setting of the queue, `batch_bytes` of its `flush`.
        await self._get_ready()
        self._pushed.clear()
        return await self._run(self._claim_here, limit, park)

    async def _get_ready(self) -> None:
        async with self._preparing:
            if self.prepare is None or self._is_prepared:
                return
            try:
                await self.prepare()
            except Exception as error:
                known = isinstance(error, StoreUnavailable | SinkUnavailable)
                reason = str(error) if known else describe_error(error)
                self.note_outage(reason)
                raise StoreUnavailable(f"Queue {self.name}: {reason}") from error
            self._is_prepared = True
            self.note_outage(None)

    def _claim_here(self, limit: int, park: bool) -> QueueBatch:
        self._check_file()
        if self._unsettled is not None:
            self._settle_here(*self._unsettled)
        db = self._file
        # What changes after this look is seen by the next one.
        self._seen = self._signature()
        self._gate.flush = self.flush
        self._gate.due = None
        with transaction(db, "BEGIN"):
            state = self._state_here()
            has_head = state.head is not None and has_rows(db, self.namespace, state.head - 1, state.head)
            rows = self._look(state, limit + 1) if has_head or state.head is None else []
            newest = newest_number(db, self.namespace)
        if state.head is not None and not has_head:
            self._forget_head()
            return self._claim_here(limit, park)
        if state.dead_at is not None and not park:
            self._pass_dead_head()
            return self._claim_here(limit, park)
        rows, more = rows[:limit], len(rows) > limit
        claims = [self._make_claim(row, state) for row in rows]
        claims, is_cut = self._cut(claims)
        if claims and claims[-1].row > self._durable_to:
            self._make_durable(newest)
        if claims:
            self._look_pause = _FIRST_LOOK
        return QueueBatch(self, claims, is_full=more or is_cut, generation=self.generation)

    def _forget_numbers(self) -> None:
        self._gate.forget()
        self._durable_to = 0

    def _forget_head(self) -> None:
        # Somebody has taken the row that we waited behind out of the queue.
        with transaction(self._file) as db:
            write_state(db, self.namespace, **NO_HEAD)
        self._failing = self.problem = None

    def _look(self, state: QueueState, limit: int) -> list[Any]:
        """The rows that may be sent now, none while something has to be waited for."""
        db = self._file
        self._is_stuck = state.head is not None
        if state.dead_at is not None:
            self._tell(f"row {state.head} is dead and the table waits behind it: {state.error}")
            return []
        if state.head is not None:
            limit = 1
            if state.due_at is not None and state.due_at > datetime.now(UTC):
                self._gate.due = time.monotonic() + (state.due_at - datetime.now(UTC)).total_seconds()
                return []
        rows = self._read(limit)
        if not rows or (state.head is None and not self._gate.opens(db, rows[0], drains=self.drains)):
            return []
        gap = find_gap(db, [(row[0], row[4]) for row in rows], settled=state.settled)
        if gap is None:
            self.problem = None
            return rows
        position, lost = gap
        if position == 0:
            self._is_stuck = True
            self._tell(
                f"row {lost}, the one before row {rows[0][0]}, is missing. Nothing is sent until it is back, or given "
                f"up with: pillarbox sync skip {self.options} --lost {lost}"
            )
        return rows[:position]

    def _read(self, limit: int) -> list[Any]:
        return self._file.execute(
            f"SELECT seq, created_at, tag, payload, prev_seq, source FROM {QUEUE} "
            "WHERE namespace = ? AND synced = 0 ORDER BY seq LIMIT ?",
            (self.namespace, limit),
        ).fetchall()

    def _make_claim(self, row: Any, state: QueueState) -> Claim:
        seq, created, sql, payload, _, source = row
        attempt = state.attempts + 1 if state.head == seq else 1
        defect, args = None, []
        try:
            args = decode_arguments(payload) if self.decodes else []
        except ValueError as error:
            defect = f"The arguments of row {seq} cannot be read: {error}"
        event = make_event(self.namespace, seq, sql, payload, source, parse_time(created))
        return Claim(seq, event, attempt, defect=defect, extra={"queued": Queued(args, created)})

    def _cut(self, claims: list[Claim]) -> tuple[list[Claim], bool]:
        """Let a batch end before a row that cannot be read, which then stands alone, and within its bytes."""
        budget, size = self.flush.batch_bytes, 0
        for position, claim in enumerate(claims):
            if claim.defect is not None:
                return (claims[:position] or claims[:1]), len(claims) > 1
            size += len(claim.event.payload) + len(claim.event.topic)
            if budget is not None and size > budget and position > 0:
                return claims[:position], True
        return claims, False

    def _make_durable(self, newest: int) -> None:
        """Have the disk take what was pushed before it is sent.

        A row that a power failure takes back would leave its number to another one, which the destination has then.
        """
        if self.notes_sent:
            with transaction(self._file) as db:
                write_state(db, self.namespace, sent=newest)
        self._durable_to = newest
        try:
            file = os.open(f"{self.path}-wal", os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def _pass_dead_head(self) -> None:
        with transaction(self._file) as db:
            news = pass_dead_head(db, self.namespace)
        self._report(news)

    def _tell(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            log.error("Queue %s: %s", self.name, problem)

    # -- settling ----------------------------------------------------------------------------------------------------

    async def settle(
        self, claims: Sequence[Claim], outcomes: Sequence[Outcome], *, park: bool, generation: int
    ) -> Settlement:
        return await self._run(self._settle_here, claims, outcomes, park, generation)

    def _settle_here(
        self, claims: Sequence[Claim], outcomes: Sequence[Outcome], park: bool, generation: int
    ) -> Settlement:
        # Kept until it is done: what was delivered must not be sent again because the disk was full.
        self._unsettled = (claims, outcomes, park, generation)
        self._check_file()
        if generation != self.generation:
            self._unsettled = None
            return Settlement(lost=len(claims))
        with transaction(self._file) as db:
            settlement, news = settle_rows(db, self.namespace, claims, outcomes, park=park)
        self._unsettled = None
        if news.has_moved:
            self._outage = None
        self._report(news)
        return settlement

    def _report(self, news: News | None) -> None:
        """Say once that a table waits behind a row, and once that it goes on."""
        if news is None:
            return
        if news.has_moved and self._failing is not None:
            log.info("Queue %s: row %d has left the queue, the table goes on.", self.name, self._failing)
            self._failing = self.problem = None
        if news.undone:
            rows = ", ".join(map(str, news.undone))
            log.warning(
                "Queue %s: row %s was delivered while it was being skipped; it is no dead row.", self.name, rows
            )
        if news.buried is not None:
            log.error("Queue %s: row %d is in the dead log, the table goes on: %s", self.name, news.buried, news.error)
        if news.failed is not None and news.failed != self._failing:
            self._failing = news.failed
            log.warning("Queue %s: row %d failed, the table waits behind it: %s", self.name, news.failed, news.error)

    # -- waiting -----------------------------------------------------------------------------------------------------

    async def next_due(self) -> timedelta | None:
        """How long until the row that failed is due, or the oldest one has waited long enough."""
        due = self._gate.due
        return None if due is None else timedelta(seconds=max(0.0, due - time.monotonic()))

    async def wait(self, timeout: timedelta) -> bool:
        """Sleep until something was pushed, by this process or another one.

        The pauses between two looks grow while nothing can be claimed: a busy file must not keep us busy as well.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        longest = _STUCK_LOOK if self._is_stuck else _LONGEST_LOOK
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            await asyncio.sleep(min(self._look_pause, left))
            self._look_pause = min(longest, self._look_pause * 1.5)
            if self._pushed.is_set() or self._signature() != self._seen:
                return True

    def _signature(self) -> object:
        """What a commit changes about the files, as seen without opening them."""
        found = []
        for path in (self.path, self.path.with_name(f"{self.path.name}-wal")):
            try:
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size))
            except OSError:
                found.append((0, 0))
        return found

    # -- looking and pruning -----------------------------------------------------------------------------------------

    async def counts(self) -> Counts:
        return await self._run(lambda: count_rows(self._file, self.namespace))

    async def prune(self, *, delivered_age: timedelta) -> Pruned:
        """Delete old entries of the audit log, now and then; never one that a waiting row's chain needs."""
        if time.monotonic() - self._pruned_at < self._prune_every:
            return Pruned()
        self._pruned_at = time.monotonic()
        count, above = 0, 0
        while True:
            old, above = await self._run(self._find_old_here, delivered_age, above)
            count += await self._run(delete_entries, self._file, old) if old else 0
            if not above:
                return Pruned(delivered=count)

    def _find_old_here(self, age: timedelta, above: int) -> tuple[list[int], int]:
        return find_old_entries(self._file, self.namespace, age, above=above)


class QueueBatch:
    """Rows that are being sent."""

    mode: Mode = "lease"
    has_tried = False

    def __init__(self, source: QueueSource, claims: Sequence[Claim], *, is_full: bool, generation: int) -> None:
        self._source = source
        self._generation = generation
        self.claims = claims
        self.is_full = is_full

    async def settle(
        self, outcomes: Sequence[Outcome], *, park: bool = True, effect: Effect | None = None
    ) -> Settlement:
        if effect is not None:
            raise Unsupported(f"Queue {self._source.name}: a queue file has no transaction that an effect could join")
        return await self._source.settle(self.claims, outcomes, park=park, generation=self._generation)

    async def settle_one(self, claim: Claim, effect: Effect, *, session: Joins | None = None) -> bool:
        raise Unsupported(f"Queue {self._source.name}: a queue file has no transaction that an effect could join")

    async def renew(self, lease: timedelta) -> Sequence[Claim]:
        return ()

    async def abandon(self) -> None:
        """Nothing was written when they were claimed."""
