"""A layout's life cycle as statements, run on one connection inside one transaction.

Everything here is synchronous and does no waiting of its own: an asynchronous store runs it through `run_sync`, a
store with its own thread calls it there. Statements are built once, when the store is made.

Claiming keeps order per key under concurrency in two steps, each its own statement so that the second one sees
everything committed before the latch:

1. Latch lanes: lock rows of the lane table, skipping those locked by others.
2. Pick: read candidates of those lanes in order, judge each (is its key in flight, waiting after a try, or parked?),
   lock the rows that passed, skipping those locked by others. A candidate that fell out takes the later ones of its
   key in this batch with it.

A hold keeps latch and row locks until it settles; a lease writes itself into the rows and commits, and from then on
its rows exclude their keys.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.mysql import insert as mysql_insert
from sqlalchemy.sql.elements import ColumnElement

from pillarbox.event import DELIVERED, Claim, Outcome, Released
from pillarbox.layouts.clock import seconds_until
from pillarbox.layouts.layout import Delete, Layout, Move, Update
from pillarbox.stores import Mode, Settlement
from pillarbox.stores.dialect import Given, GivenRows, SameForAll, UsedColumns, delete_given, is_mysql
from pillarbox.stores.hot import Hot
from pillarbox.stores.lanes import LaneShare, build_latch
from pillarbox.stores.outcomes import freed_keys, group_outcomes
from pillarbox.stores.pick import ClaimLoader, build_pick

WAKE_LIMIT = 1000
WRITERS = "#writers"
LAPSED = "The lease lapsed: the relay that held this event died or stalled."


class Taken(NamedTuple):
    """What one claim found."""

    claims: list[Claim]
    blocked: list[tuple[Any, str]]
    """Rows that wait behind another of their key, with that key."""
    lanes: set[int]
    is_full: bool
    has_tried: bool


class _Write(NamedTuple):
    each: Hot
    given: GivenRows
    alike: Hot
    same: SameForAll


class Transitions:
    """The statements of one layout on one database, for the rows of one sink."""

    def __init__(
        self,
        layout: Layout,
        tables: Mapping[str, sa.Table],
        *,
        dialect: str,
        sink: str = "",
        retain: bool = False,
    ) -> None:
        self.layout = layout
        self.tables = tables
        self.outbox = tables["outbox"]
        self.dialect = dialect
        self.sink = sink
        self.share = LaneShare(layout.lanes)
        self._hints = is_mysql(dialect)
        self._deletes = not retain and not self._hints and isinstance(layout.delivered, Delete)
        self._row = self.outbox.c[layout.row]
        self._mine = self.outbox.c[layout.sink] == sa.bindparam("sink", sink)
        self._given = GivenRows(dialect)
        self._delivered = layout.kept if retain else layout.delivered
        self._pick = build_pick(layout, tables, dialect=dialect, sink=sink)
        self._loader = ClaimLoader(dialect)
        self._latch = build_latch(layout, tables, dialect=dialect, sink=sink)
        key = self.outbox.c[layout.order.key]
        self._due = [Hot(self._select_due(due(self.outbox.c), key)) for due in layout.due]
        self._lapsed = self._select_due(
            layout.lease.lapsed(self.outbox.c),
            *(self.outbox.c[name] for name in (layout.attempts, layout.lease.fence, layout.order.key)),
            self.outbox.c.max_attempts,
        )
        self._next_due = Hot(self._build_next_due())
        self._unblock = Hot(self._build_unblock())
        self._overtaken = {role: self._build_overtaken(tables[role]) for role in ("outbox", "dead")}
        self._writes = {
            fenced: {
                name: self._build_write(write, fenced)
                for name, write in {
                    "delivered": self._delivered,
                    "retry": layout.retry,
                    "release": layout.release,
                    "promote": layout.promote,
                    "lapse": layout.lease.lapse,
                    "block": layout.order.block,
                    "cancel": Delete(),
                    "claim": Update(layout.lease.claim),
                    "renew": Update(layout.lease.renew),
                }.items()
            }
            for fenced in (False, True)
        }

    # -- claiming ---------------------------------------------------------------------------------------------------

    def claim(
        self, db: sa.Connection, limit: int, mode: Mode, lease: timedelta, *, busy: Collection[int] = ()
    ) -> Taken:
        """Latch, pick and, for a lease, write the claims into their rows.

        `busy` lanes have rows of this relay under way: their keys are probably taken, so they come last.
        """
        seen: set[int] = set()
        claims: list[Claim] = []
        blocked: list[tuple[Any, str]] = []
        is_full = has_tried = False
        # Lanes that hold only rows which cannot be had now must not hide the others.
        while not claims and (lanes := set(self._latch(db, self.share, {*busy, *seen})) - seen):
            seen |= lanes
            depth = self.share.rows_per_lane(limit, len(lanes))
            rows = self._pick(db, sorted(lanes), depth, limit)
            is_full |= self.share.picked(limit, rows, depth)
            claims, waiting, was_tried = self._choose(rows, mode)
            blocked += waiting
            has_tried |= was_tried
        if mode == "lease" and claims:
            token = uuid4()
            seconds = lease.total_seconds()
            for claim in claims:
                claim.fence = token
            self._write(db, "claim", [Given(c.row, token, c.attempt, seconds) for c in claims])
        is_full |= bool(claims) and len(lanes) >= self.share.wanted
        return Taken(claims, blocked, lanes, is_full, has_tried)

    def _choose(self, rows: Sequence[Any], mode: Mode) -> tuple[list[Claim], list[tuple[Any, str]], bool]:
        claims: list[Claim] = []
        blocked: list[tuple[Any, str]] = []
        broken: set[str] = set()
        has_tried = False
        load = self._loader.load
        for row in rows:
            row_id, key, is_blocked, locked, attempts = row[0], row[1], row[2], row[4], row[5]
            if key is not None and key in broken:
                if is_blocked:
                    blocked.append((row_id, key))
                continue
            if is_blocked:
                blocked.append((row_id, key))
            elif locked is not None:
                if mode == "lease" or not attempts:
                    claims.append(load(row))
                    continue
                has_tried = True
            if key is not None:
                broken.add(key)
        return claims, blocked, has_tried

    def block(self, db: sa.Connection, blocked: Sequence[tuple[Any, str]]) -> int:
        """Take rows that wait behind another out of the claim index.

        The rows in front are locked first and must still be in front: whoever settles them waits for this commit and
        then sets the marked rows ready again, so that no row stays blocked behind nothing.
        """
        order = self.layout.order
        keys = sorted({key for _, key in blocked})
        fronts: set[str] = set()
        for name, front in (("outbox", order.in_flight), ("outbox", order.blocking), ("dead", order.parking)):
            table = self.tables[name]
            query = sa.select(table.c[order.key]).where(
                table.c[self.layout.sink] == self.sink, table.c[order.key].in_(keys), front(table.c)
            )
            fronts.update(db.execute(query.with_for_update(skip_locked=True)).scalars())
        rows = [row for row, key in blocked if key in fronts]
        if not rows:
            return 0
        free = sa.select(self._row).where(self._row.in_(rows), self.layout.ready(self.outbox.c))
        locked = db.execute(free.with_for_update(skip_locked=True)).scalars().all()
        return self._write(db, "block", [Given(row) for row in locked])

    # -- time -------------------------------------------------------------------------------------------------------

    def wake(self, db: sa.Connection, max_attempts: int | None, park: bool) -> int:
        """Let lapsed claims go and make rows ready whose time has come; returns how many rows moved."""
        moved = 0
        lapsed = db.execute(self._lapsed, {"limit": WAKE_LIMIT}).all()
        if lapsed:
            moved += self._let_go(db, lapsed, max_attempts, park)
        for query in self._due:
            due: Sequence[Any] = query.execute(db, {"limit": WAKE_LIMIT}).all()
            moved += self._write(db, "promote", [Given(row) for row, _ in due])
            # Those marked as blocked behind it return with it: a later one that is not marked would pass them.
            self.unblock(db, {key for _, key in due if key is not None})
        return moved

    def _let_go(self, db: sa.Connection, lapsed: Sequence[Any], max_attempts: int | None, park: bool) -> int:
        again: list[Given] = []
        last: list[Given] = []
        for row, attempts, fence, key, own_max in lapsed:
            most = own_max or max_attempts
            if most is not None and attempts >= most:
                last.append(Given(row, fence, attempts, 0.0, LAPSED, park and key is not None))
            else:
                # Rows that lapsed twice may have killed their relay together: they return at different moments, so
                # that the guilty one spends its attempts alone.
                spread = 0.0 if attempts < 2 else random.uniform(0, min(300.0, 2.0 ** min(attempts, 20)))
                again.append(Given(row, fence, attempts, spread, LAPSED))
        moved = self._write(db, "lapse", again, fenced=True)
        if last:
            moved += self.move(db, self.layout.dead, last, fenced=True)
        # Some of those marked behind them may not have to wait any more; the next claim marks the others again.
        self.unblock(db, {key for _, _, _, key, _ in lapsed if key is not None})
        return moved

    def next_due(self, db: sa.Connection) -> float | None:
        """Seconds until a row wants attention."""
        moments = [value for value in self._next_due.execute(db, {}).one() if value is not None]
        return max(0.0, float(min(moments))) if moments else None

    # -- settling ---------------------------------------------------------------------------------------------------

    def settle(
        self, db: sa.Connection, claims: Sequence[Claim], outcomes: Sequence[Outcome], *, mode: Mode, park: bool
    ) -> Settlement:
        """Write what became of the claims; a claim whose fence is gone changes nothing."""
        is_whole = self._deletes and len(outcomes) == len(claims) > 0
        if is_whole and all(outcome is DELIVERED for outcome in outcomes):
            return self._settle_delivered(db, claims, fenced=mode == "lease")
        groups = group_outcomes(claims, outcomes, park)
        fenced = mode == "lease"
        if mode == "hold":
            groups["release"] = []
        counts = {
            name: self._write(db, name, groups[name], fenced=fenced) if groups[name] else 0
            for name in ("delivered", "retry", "release")
        }
        counts["dead"] = self.move(db, self.layout.dead, groups["dead"], fenced=fenced) if groups["dead"] else 0
        # A hold takes only rows that were never tried, and nothing is ever blocked behind those.
        if fenced:
            self.unblock(db, freed_keys(claims, outcomes, park) | self._overtaken_keys(db, groups))
        lost = sum(len(rows) for rows in groups.values()) - sum(counts.values())
        return Settlement(
            counts["delivered"],
            counts["retry"],
            counts["dead"],
            sum(isinstance(outcome, Released) for outcome in outcomes) if mode == "hold" else counts["release"],
            lost,
        )

    def _settle_delivered(self, db: sa.Connection, claims: Sequence[Claim], *, fenced: bool) -> Settlement:
        """Nearly every settlement: all claims of the batch, which share a fence, are delivered and deleted."""
        write = self._writes[fenced]["delivered"]
        params = write.same.params([claim.row for claim in claims], Given(None, claims[0].fence))
        delivered = write.alike.execute(db, params).rowcount
        if fenced:
            self.unblock(db, {claim.event.key for claim in claims if claim.event.key is not None})
        return Settlement(delivered, lost=len(claims) - delivered)

    def renew(self, db: sa.Connection, claims: Sequence[Claim], lease: timedelta) -> list[Claim]:
        """Extend the claims that are still ours; returns those that are not."""
        seconds = lease.total_seconds()
        rows = [Given(claim.row, claim.fence, 0, seconds) for claim in claims]
        if self._write(db, "renew", rows, fenced=True) == len(claims):
            return []
        fence = self.outbox.c[self.layout.lease.fence]
        ours = sa.select(self._row).where(self._row.in_([claim.row for claim in claims]), fence == claims[0].fence)
        kept = set(db.execute(ours).scalars())
        return [claim for claim in claims if claim.row not in kept]

    def _overtaken_keys(self, db: sa.Connection, groups: Mapping[str, Sequence[Given]]) -> set[str]:
        """The keys of failed rows that hold up an earlier one, which came due while they were in flight."""
        keys: set[str] = set()
        failed = {"outbox": groups["retry"], "dead": [given for given in groups["dead"] if given.parks]}
        for role, rows in failed.items():
            if rows:
                query = self._overtaken[role]
                keys.update(db.execute(query, {"rows": [given.row_id for given in rows]}).scalars())
        return keys

    def unblock(self, db: sa.Connection, keys: Iterable[str]) -> None:
        """Set rows ready that waited behind these keys."""
        wanted: Any = list(keys)
        if wanted:
            listed = orjson.dumps(wanted).decode() if self.dialect == "sqlite" else wanted
            self._unblock.execute(db, {"keys": listed})

    def move(self, db: sa.Connection, move: Move, rows: Sequence[Given], *, fenced: bool) -> int:
        """Move outbox rows into another table."""
        match = self._match(self._given, fenced)
        lock = self._given_first(sa.select(self._row)).where(match(self.outbox.c)).with_for_update(of=self.outbox)
        by_row = {given.row_id: given for given in rows}
        found = db.execute(lock, self._given.params(rows)).scalars().all()
        if not found:
            return 0
        params = self._given.params([by_row[row] for row in found])
        target = self.tables[move.into]
        values = move.values(self.outbox.c, self._given.c)
        columns = [column.name for column in target.c if column.name in self.outbox.c or column.name in values]
        wanted = (_as_column(values.get(name, self.outbox.c.get(name)), name) for name in columns)
        source = self._given_first(sa.select(*wanted))
        db.execute(sa.insert(target).from_select(columns, source.where(match(self.outbox.c))), params)
        gone = delete_given(self.dialect, self.outbox, self.layout.row, match)
        return Hot(gone).execute(db, params).rowcount

    def _given_first(self, query: sa.Select[Any]) -> sa.Select[Any]:
        joined = query.select_from(self._given.table, self.outbox)
        if not self._hints:
            return joined
        return joined.prefix_with("STRAIGHT_JOIN").with_hint(self.outbox, "FORCE INDEX (PRIMARY)", self.dialect)

    # -- what applications change -----------------------------------------------------------------------------------

    def change(self, db: sa.Connection, ids: Sequence[UUID], dedup_key: str | None, given: Any) -> int:
        """Cancel events that nobody holds, or reschedule them when `given.due` is a time."""
        c = self.outbox.c
        chosen = c.id.in_(ids) if dedup_key is None else c.dedup_key == dedup_key
        free = sa.select(self._row, c[self.layout.order.key]).where(self._mine, chosen, self.layout.cancellable(c))
        rows = db.execute(free.with_for_update(skip_locked=True)).all()
        if not rows:
            return 0
        if given.due is None:
            self._write(db, "cancel", [Given(row[0]) for row in rows])
        else:
            mine = self._row.in_([row[0] for row in rows])
            change = sa.update(self.outbox).where(mine).values(self.layout.reschedule.values(c, given))
            db.execute(change.with_hint("FORCE INDEX (PRIMARY)", dialect_name=self.dialect) if self._hints else change)
        self.unblock(db, {row[1] for row in rows if row[1] is not None})
        return len(rows)

    def lock_keys(self, db: sa.Connection, keys: Sequence[str]) -> None:
        """Take locks on keys that last until the transaction ends, in one order for everybody."""
        if self.dialect == "postgresql":
            numbers = sorted({zlib.crc32(key.encode()) - 2**31 for key in keys})
            lock = sa.text("SELECT pg_advisory_xact_lock(:space, n) FROM unnest(CAST(:numbers AS INTEGER[])) AS n")
            db.execute(lock, {"space": zlib.crc32(self.outbox.fullname.encode()) - 2**31, "numbers": numbers})
        elif is_mysql(self.dialect):
            self._lock_lanes(db, sorted({zlib.crc32(key.encode()) % self.layout.lanes for key in keys}))
        # SQLite's writers come one after the other anyway.

    def _lock_lanes(self, db: sa.Connection, numbers: Sequence[int]) -> None:
        # Rows of their own in the lane table, beside those that relays latch.
        lanes = self.tables["lanes"]
        wanted = [{"sink": WRITERS, "lane": number} for number in numbers]
        db.execute(mysql_insert(lanes).values(wanted).on_duplicate_key_update(lane=lanes.c.lane))

    # -- building ---------------------------------------------------------------------------------------------------

    def _match(self, given: GivenRows, fenced: bool) -> Callable[[Any], ColumnElement[bool]]:
        row, fence = self.layout.row, self.layout.lease.fence

        def match(columns: Any) -> ColumnElement[bool]:
            same: ColumnElement[bool] = columns[row] == given.c.row_id
            return same & (columns[fence] == given.c.fence) if fenced else same

        return match

    def _build_write(self, write: Update | Delete, fenced: bool) -> _Write:
        names = {"row_id", "fence"} if fenced else {"row_id"}
        if isinstance(write, Update):
            used = UsedColumns(self._given)
            write.values(self.outbox.c, used)
            names |= used.names
        given, same = GivenRows(self.dialect, names), SameForAll(self.dialect, names)
        match = self._match(given, fenced)
        is_mine = same.is_row(self._row)
        if fenced:
            is_mine &= self.outbox.c[self.layout.lease.fence] == same.c.fence
        if isinstance(write, Delete):
            each: Any = delete_given(self.dialect, self.outbox, self.layout.row, match)
            alike: Any = sa.delete(self.outbox).where(is_mine)
        else:
            each = sa.update(self.outbox).where(match(self.outbox.c)).values(write.values(self.outbox.c, given.c))
            alike = sa.update(self.outbox).where(is_mine).values(write.values(self.outbox.c, same.c))
        return _Write(Hot(each), given, Hot(alike), same)

    def _write(self, db: sa.Connection, name: str, rows: Sequence[Given], *, fenced: bool = False) -> int:
        if not rows:
            return 0
        write = self._writes[fenced][name]
        rest = rows[0][1:]
        # MySQL and MariaDB walk the whole table for a list of numbers, and wait there for rows that others hold.
        if not is_mysql(self.dialect) and all(row[1:] == rest for row in rows):
            return write.alike.execute(db, write.same.params([row[0] for row in rows], rows[0])).rowcount
        return write.each.execute(db, write.given.params(rows)).rowcount

    def _select_due(self, condition: ColumnElement[bool], *more: Any) -> sa.Select[Any]:
        until = self.outbox.c[self.layout.until]
        query = sa.select(self._row, *more).where(self._mine, condition)
        return query.order_by(until).limit(sa.bindparam("limit")).with_for_update(skip_locked=True)

    def _build_next_due(self) -> sa.Select[Any]:
        # One index probe a state; a combined condition would read them all.
        until = self.outbox.c[self.layout.until]
        return sa.select(
            *(
                sa.select(seconds_until(sa.func.min(until)))
                .where(self._mine, condition(self.outbox.c))
                .scalar_subquery()
                for condition in self.layout.times
            )
        )

    def _build_overtaken(self, failed: sa.Table) -> sa.Select[Any]:
        layout, order, other = self.layout, self.layout.order, self.outbox.alias()
        earlier: sa.Select[Any] = sa.select(sa.literal_column("1")).where(
            other.c[layout.sink] == self.sink,
            other.c[order.key] == failed.c[order.key],
            order.blocked(other.c),
            other.c[layout.row] < failed.c[layout.row],
        )
        is_waiting = earlier.limit(1).scalar_subquery().correlate(failed).is_not(None)
        chosen = failed.c[layout.row].in_(sa.bindparam("rows", expanding=True))
        return sa.select(failed.c[order.key]).where(chosen, is_waiting)

    def _build_unblock(self) -> sa.Update:
        order, key = self.layout.order, self.outbox.c[self.layout.order.key]
        if self.dialect == "postgresql":
            return self._build_unblock_by_lookup()
        if self.dialect == "sqlite":
            chosen = key.in_(sa.text("SELECT value FROM json_each(:keys)").columns(value=sa.Text))
        else:
            chosen = key.in_(sa.bindparam("keys", expanding=True))
        values = order.unblock.values(self.outbox.c, self._given.c)
        return sa.update(self.outbox).where(self._mine, order.blocked(self.outbox.c), chosen).values(values)

    def _build_unblock_by_lookup(self) -> sa.Update:
        # Key by key: without statistics PostgreSQL takes blocked rows for few and reads them all.
        layout, order, other = self.layout, self.layout.order, self.outbox.alias()
        keys = sa.func.unnest(sa.bindparam("keys", type_=postgresql.ARRAY(sa.Text)))
        wanted = keys.table_valued(sa.column("key", sa.Text), name="wanted").render_derived()
        behind = sa.select(other.c[layout.row]).where(
            other.c[layout.sink] == self.sink, other.c[order.key] == wanted.c.key, order.blocked(other.c)
        )
        found = behind.offset(sa.literal_column("0")).lateral("behind")
        rows = sa.select(found.c[layout.row]).select_from(wanted.join(found, sa.true())).scalar_subquery()
        chosen = self._row == sa.any_(sa.func.array(rows, type_=postgresql.ARRAY(sa.BigInteger)))
        # Somebody else may have set it ready meanwhile. As a CASE, so that no index is chosen for it.
        still = sa.case((order.blocked(self.outbox.c), sa.true()), else_=sa.false())
        values = order.unblock.values(self.outbox.c, self._given.c)
        return sa.update(self.outbox).where(chosen, still).values(values)


def _as_column(value: Any, name: str) -> ColumnElement[Any]:
    element = value if isinstance(value, ColumnElement) else sa.literal(value) if value is not None else sa.null()
    return element.label(name)
