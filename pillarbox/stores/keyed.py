"""Claiming from a table that keeps order per key.

Order holds under concurrency because a claim takes two steps, each its own statement so that the second one sees
everything committed before the latch:

1. Latch lanes: lock rows of the lane table, skipping those locked by others.
2. Pick: read candidates of those lanes in order, judge each (is its key in flight, waiting after a try, or parked?),
   lock the rows that passed, skipping those locked by others. A candidate that fell out takes the later ones of its
   key in this batch with it.

A hold keeps latch and row locks until it settles; a lease writes itself into the rows and commits, and from then on
its rows exclude their keys.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.mysql import insert as mysql_insert
from sqlalchemy.sql.elements import ColumnElement

from pillarbox.event import Claim, Outcome
from pillarbox.layouts.layout import Delete, Layout, Update
from pillarbox.stores import Mode
from pillarbox.stores.dialect import Given, is_mysql
from pillarbox.stores.fields import FIRST_FIELD, ClaimLoader
from pillarbox.stores.hot import Hot
from pillarbox.stores.lanes import LaneShare, build_latch
from pillarbox.stores.outcomes import freed_keys
from pillarbox.stores.pick import build_pick
from pillarbox.stores.refusals import write_apart
from pillarbox.stores.transitions import WAKE_LIMIT, Taken, Transitions
from pillarbox.stores.weighing import Scale

WRITERS = "#writers"


class KeyedTransitions(Transitions):
    """The statements of a layout that keeps order per key."""

    def __init__(self, layout: Layout, tables: Mapping[str, sa.Table], **options: Any) -> None:
        self._order = layout.keyed
        super().__init__(layout, tables, **options)
        dialect, sink = self.dialect, self.sink
        self.share = LaneShare(self._order.lanes)
        self._pick = build_pick(layout, tables, dialect=dialect, sink=sink)
        self._loader = ClaimLoader(layout, self.outbox, dialect)
        self.scale = Scale(layout, self.outbox, dialect, FIRST_FIELD, as_given=self._as_given)
        self._latch = build_latch(layout, tables, dialect=dialect, sink=sink)
        self._due = [self._select_due(due(self.outbox.c)) for due in self._order.due]
        self._unblock = Hot(self._build_unblock())
        self._overtaken = {role: self._build_overtaken(tables[role]) for role in ("outbox", "dead")}

    def _updates(self) -> dict[str, Update | Delete]:
        return {**super()._updates(), "promote": self._order.promote, "block": self._order.block}

    def is_mine(self, table: sa.Table) -> ColumnElement[bool]:
        return table.c[self._order.sink] == sa.bindparam("sink", self.sink)

    # -- claiming -----------------------------------------------------------------------------------------------------

    def claim(
        self, db: sa.Connection, limit: int, mode: Mode, lease: timedelta, *, busy: Collection[int] = ()
    ) -> Taken:
        """Latch, pick and, for a lease, write the claims into their rows.

        The keys of `busy` lanes are probably taken, so those lanes come last.
        """
        seen: set[int] = set()
        claims: list[Claim] = []
        blocked: list[tuple[Any, str]] = []
        is_full = has_tried = False
        limit = self.scale.narrow(limit)
        # Lanes that hold only rows which cannot be had now must not hide the others.
        while not claims and (lanes := set(self._latch(db, self.share, {*busy, *seen})) - seen):
            seen |= lanes
            depth = self.share.rows_per_lane(limit, len(lanes))
            # What nobody can claim must not hide the others.
            more = len(self._unclaimable)
            rows = self._pick(db, sorted(lanes), depth + more, limit + more, self.scale.light(limit))
            is_full |= self.share.picked(limit, rows, depth)
            chosen, waiting, was_tried = self._choose(rows, mode)
            chosen = chosen[:limit] if more else chosen
            chosen, is_cut = self.scale.cut(db, chosen)
            claims = list(map(self._loader.load, chosen))
            is_full |= is_cut
            blocked += waiting
            has_tried |= was_tried
        if mode == "lease" and claims:
            token = uuid4()
            seconds = lease.total_seconds()
            for claim in claims:
                claim.fence = token
            self._write_claims(db, [Given(c.row, token, c.attempt, seconds) for c in claims])
        is_full |= bool(claims) and len(lanes) >= self.share.wanted
        return Taken(claims, blocked, lanes, is_full, has_tried)

    def _choose(self, rows: Sequence[Any], mode: Mode) -> tuple[Sequence[Any], list[tuple[Any, str]], bool]:
        chosen: list[Any] = []
        blocked: list[tuple[Any, str]] = []
        broken: set[str] = set()
        has_tried = False
        for row in rows:
            row_id, key, is_blocked, locked, attempts = row[0], row[1], row[2], row[4], row[5]
            if type(key) is not str:
                # A blob: its row dies when nothing of the same key is in flight.
                key = None
                if is_blocked:
                    continue
            if key is not None and key in broken:
                if is_blocked:
                    blocked.append((row_id, key))
                continue
            if is_blocked:
                blocked.append((row_id, key))
            elif locked is not None and row_id not in self._unclaimable:
                if mode == "lease" or not attempts:
                    chosen.append(row)
                    continue
                has_tried = True
            if key is not None:
                broken.add(key)
        return chosen, blocked, has_tried

    def block(self, db: sa.Connection, blocked: Sequence[tuple[Any, str]]) -> int:
        """Take rows that wait behind another out of the claim index.

        The rows in front are locked first and must still be in front: whoever settles them waits for this commit and
        then sets the marked rows ready again, so that no row stays blocked behind nothing. A row in flight may be a
        later one: an event that comes due meanwhile waits for it, and is set ready again whatever becomes of it. Of the
        others only an earlier row counts.
        """
        order, row_name = self._order, self.layout.row
        keys = sorted({key for _, key in blocked})
        first: dict[str, Any] = {}
        anywhere: set[str] = set()
        for name, front in (("outbox", order.in_flight), ("outbox", order.blocking), ("dead", order.parking)):
            table = self.tables[name]
            query = sa.select(table.c[order.key], table.c[row_name]).where(
                table.c[order.sink] == self.sink, table.c[order.key].in_(keys), front(table.c)
            )
            for key, number in db.execute(query.with_for_update(skip_locked=True)):
                if front is order.in_flight:
                    anywhere.add(key)
                first[key] = min(number, first.get(key, number))
        rows = [row for row, key in blocked if key in anywhere or (key in first and first[key] < row)]
        if not rows:
            return 0
        free = sa.select(self._row).where(self._row.in_(rows), self.layout.ready(self.outbox.c))
        locked = db.execute(free.with_for_update(skip_locked=True)).scalars().all()
        return self._write(db, "block", [Given(row) for row in locked])

    # -- time and settlement ------------------------------------------------------------------------------------------

    def wake(self, db: sa.Connection, max_attempts: int | None, park: bool) -> int:
        # Some of those marked behind lapsed rows may not have to wait any more; the next claim marks the others again.
        moved = self._let_lapsed_go(db, max_attempts, park)
        for find, lock in self._due:
            due = self._lock_due(db, find, lock)
            given = [Given(row, parks=park and key is not None) for row, key in due]
            promoted, refused = write_apart(db, lambda rows: self._write(db, "promote", rows), given)
            moved += promoted + self._bury_refused(db, [], refused)
            # Those marked as blocked behind it return with it: a later one that is not marked would pass them.
            self.unblock(db, {key for _, key in due if key is not None})
        return moved

    def _lock_due(self, db: sa.Connection, find: Hot, lock: sa.Select[Any]) -> list[tuple[Any, str | None]]:
        """Lock the rows whose time has come, and none of them past an earlier one of its key.

        What somebody else has locked may be about to become ready: until that is committed, the later rows of its key
        wait with it.
        """
        found: Sequence[Any] = find.execute(db, {"limit": WAKE_LIMIT}).all()
        if not found:
            return []
        locked = {row for row, is_due in db.execute(lock, {"rows": [row for row, _ in found]}) if is_due}
        passed: dict[str, Any] = {}
        for row, key in found:
            if key is not None and row not in locked:
                passed[key] = min(row, passed.get(key, row))
        return [(row, key) for row, key in found if row in locked and (key not in passed or row < passed[key])]

    def _settled(
        self,
        db: sa.Connection,
        claims: Sequence[Claim],
        outcomes: Sequence[Outcome],
        groups: Mapping[str, Sequence[Given]],
        park: bool,
    ) -> None:
        # Only for leases: a hold takes rows that were never tried, and nothing is ever blocked behind those.
        self.unblock(db, freed_keys(claims, outcomes, park) | self._overtaken_keys(db, groups))

    def _overtaken_keys(self, db: sa.Connection, groups: Mapping[str, Sequence[Given]]) -> set[str]:
        """The keys of failed rows that hold up an earlier one, which came due while they were in flight."""
        keys: set[str] = set()
        failed = {"outbox": groups["retry"], "dead": [given for given in groups["dead"] if given.parks]}
        for role, rows in failed.items():
            if rows:
                query = self._overtaken[role]
                keys.update(db.execute(query, {"rows": [given.row_id for given in rows]}).scalars())
        return keys

    def unblock(self, db: sa.Connection, keys: Iterable[Any]) -> None:
        # A key may be a blob where columns have no types; nothing is ever marked behind one.
        wanted: Any = [key for key in keys if isinstance(key, str)]
        if wanted:
            listed = orjson.dumps(wanted).decode() if self.dialect == "sqlite" else wanted
            self._unblock.execute(db, {"keys": listed})

    def _changed(self, db: sa.Connection, rows: Sequence[Any]) -> None:
        self.unblock(db, {row[1] for row in rows if row[1] is not None})

    def lock_keys(self, db: sa.Connection, keys: Sequence[str]) -> None:
        if self.dialect == "postgresql":
            numbers = sorted({zlib.crc32(key.encode()) - 2**31 for key in keys})
            lock = sa.text("SELECT pg_advisory_xact_lock(:space, n) FROM unnest(CAST(:numbers AS INTEGER[])) AS n")
            db.execute(lock, {"space": zlib.crc32(self.outbox.fullname.encode()) - 2**31, "numbers": numbers})
        elif is_mysql(self.dialect):
            self._lock_lanes(db, sorted({zlib.crc32(key.encode()) % self._order.lanes for key in keys}))
        # SQLite's writers come one after the other anyway.

    def _lock_lanes(self, db: sa.Connection, numbers: Sequence[int]) -> None:
        # Rows of their own in the lane table, beside those that relays latch.
        lanes = self.tables["lanes"]
        wanted = [{"sink": WRITERS, "lane": number} for number in numbers]
        db.execute(mysql_insert(lanes).values(wanted).on_duplicate_key_update(lane=lanes.c.lane))

    # -- building -----------------------------------------------------------------------------------------------------

    def _select_due(self, condition: ColumnElement[bool]) -> tuple[Hot, sa.Select[Any]]:
        """The rows whose time has come, and a lock on those of them that can be had, saying which are still such."""
        until = self.outbox.c[self.layout.lease.at]
        find = sa.select(self._row, self.outbox.c[self._order.key]).where(self.is_mine(self.outbox), condition)
        # By number as well: of events that are due at one moment, the limit must not cut off the first.
        find = find.order_by(until, self._row).limit(sa.bindparam("limit"))
        if self.dialect == "postgresql":
            given = self._row == sa.any_(sa.bindparam("rows", type_=postgresql.ARRAY(self._row.type)))
        else:
            given = self._row.in_(sa.bindparam("rows", expanding=True))
        # By number alone: a condition on the time would tempt a planner to read all rows that are due.
        lock = sa.select(self._row, condition.label("is_due")).where(given)
        for name in ("mysql", "mariadb"):
            lock = lock.with_hint(self.outbox, "FORCE INDEX (PRIMARY)", name)
        return Hot(find), lock.with_for_update(skip_locked=True)

    def _build_overtaken(self, failed: sa.Table) -> sa.Select[Any]:
        layout, order, other = self.layout, self._order, self.outbox.alias()
        earlier: sa.Select[Any] = sa.select(sa.literal_column("1")).where(
            other.c[order.sink] == self.sink,
            other.c[order.key] == failed.c[order.key],
            order.blocked(other.c),
            other.c[layout.row] < failed.c[layout.row],
        )
        is_waiting = earlier.limit(1).scalar_subquery().correlate(failed).is_not(None)
        chosen = failed.c[layout.row].in_(sa.bindparam("rows", expanding=True))
        return sa.select(failed.c[order.key]).where(chosen, is_waiting)

    def _build_unblock(self) -> sa.Update:
        order, key = self._order, self.outbox.c[self._order.key]
        if self.dialect == "postgresql":
            return self._build_unblock_by_lookup()
        if self.dialect == "sqlite":
            chosen = key.in_(sa.text("SELECT value FROM json_each(:keys)").columns(value=sa.Text))
        else:
            chosen = key.in_(sa.bindparam("keys", expanding=True))
        values = order.unblock.values(self.outbox.c, self._given.c)
        blocked = order.blocked(self.outbox.c)
        return sa.update(self.outbox).where(self.is_mine(self.outbox), blocked, chosen).values(values)

    def _build_unblock_by_lookup(self) -> sa.Update:
        # Key by key: without statistics PostgreSQL takes blocked rows for few and reads them all.
        layout, order, other = self.layout, self._order, self.outbox.alias()
        keys = sa.func.unnest(sa.bindparam("keys", type_=postgresql.ARRAY(sa.Text)))
        wanted = keys.table_valued(sa.column("key", sa.Text), name="wanted").render_derived()
        behind = sa.select(other.c[layout.row]).where(
            other.c[order.sink] == self.sink, other.c[order.key] == wanted.c.key, order.blocked(other.c)
        )
        found = behind.offset(sa.literal_column("0")).lateral("behind")
        rows = sa.select(found.c[layout.row]).select_from(wanted.join(found, sa.true())).scalar_subquery()
        chosen = self._row == sa.any_(sa.func.array(rows, type_=postgresql.ARRAY(sa.BigInteger)))
        # Somebody else may have set it ready meanwhile. As a CASE, so that no index is chosen for it.
        still = sa.case((order.blocked(self.outbox.c), sa.true()), else_=sa.false())
        values = order.unblock.values(self.outbox.c, self._given.c)
        return sa.update(self.outbox).where(chosen, still).values(values)
