"""Claiming from a table that has no columns for claims: they stand in a side table of ours.

A row without an entry there has never been tried. A claim locks rows of the table, then reads their entries in a
statement of its own: the lock alone does not show an entry that another relay committed after the first statement
began. A hold needs no entry until something fails.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.sql.elements import ColumnElement

from pillarbox.event import DELIVERED, Claim, Outcome, Released
from pillarbox.layouts.clock import now
from pillarbox.layouts.layout import Delete, Layout, Move, Update
from pillarbox.layouts.side import LEASED, WAITING
from pillarbox.stores import Mode, Settlement
from pillarbox.stores.dialect import Given, GivenRows, is_any, is_mysql
from pillarbox.stores.fields import ClaimLoader, claimed_fields
from pillarbox.stores.hot import Hot
from pillarbox.stores.outcomes import group_outcomes
from pillarbox.stores.transitions import WAKE_LIMIT, Taken, Transitions
from pillarbox.stores.weighing import Scale

NO_ENTRY = (0, True)
"""A row without an entry was never tried and may be claimed."""


class SideTransitions(Transitions):
    """The statements of a layout with a side table."""

    def __init__(self, layout: Layout, tables: Mapping[str, sa.Table], **options: Any) -> None:
        super().__init__(layout, tables, **options)
        self._find = Hot(self._build_find())
        self._find_entries = Hot(self._build_entries())
        self._loader = ClaimLoader(layout, self.outbox, self.dialect, 2)
        self.scale = Scale(layout, self.outbox, self.dialect, 2, as_given=self._as_given)
        delivered = self._delivered
        # A row that moves is copied first and then deleted.
        self._copied = self._build_copy(delivered) if isinstance(delivered, Move) else None
        self._gone = self._build_gone()
        self._main = {
            "delivered": self._build_write(self.outbox, Delete() if isinstance(delivered, Move) else delivered, False),
            "cancel": self._build_write(self.outbox, Delete(), False),
        }
        self._enter = {
            name: self._build_enter(values)
            for name, values in {
                "claim": layout.lease.claim,
                "retry": layout.retry.values,
                "dead": layout.dead.values,
            }.items()
        }

    def _updates(self) -> dict[str, Update | Delete]:
        updates = super()._updates()
        return {name: write for name, write in updates.items() if name not in ("delivered", "cancel")} | {
            "leave": Delete()
        }

    # -- claiming -----------------------------------------------------------------------------------------------------

    def claim(
        self, db: sa.Connection, limit: int, mode: Mode, lease: timedelta, *, busy: Collection[int] = ()
    ) -> Taken:
        # What nobody can claim must not hide the others.
        limit = self.scale.narrow(limit) + len(self._unclaimable)
        rows = self._find.fetch(db, {"limit": limit, "light": self.scale.light(limit)})
        named = self._leave_out(rows)
        entries = self._entries(db, [row[0] for row in named])
        chosen: list[Any] = []
        has_tried = False
        for row in named:
            _, is_free = entries.get(row[0], NO_ENTRY)
            if is_free and (mode == "lease" or row[0] not in entries):
                chosen.append(row)
            elif self.layout.side is not None and self.layout.side.is_serial:
                has_tried |= is_free
                break
            else:
                has_tried |= is_free
        kept, is_cut = self.scale.cut(db, chosen)
        claims = [self._loader.make(row, row[0], entries.get(row[0], NO_ENTRY)[0]) for row in kept]
        if mode == "lease" and claims:
            token = uuid4()
            for claim in claims:
                claim.fence = token
            seconds = lease.total_seconds()
            self._write_claims(db, [Given(claim.row, token, claim.attempt, seconds) for claim in claims])
        return Taken(claims, is_full=is_cut or len(rows) >= limit, has_tried=has_tried)

    def _entries(self, db: sa.Connection, rows: Sequence[Any]) -> dict[Any, tuple[int, bool]]:
        """The attempts of rows that have an entry, and whether they may be claimed again."""
        if not rows:
            return {}
        found = self._find_entries.fetch(db, {"entries": list(rows)})
        return {row[0]: (row[1], bool(row[2])) for row in found}

    def _write_claim(self, db: sa.Connection, rows: Sequence[Given]) -> int:
        return self._put_entries(db, "claim", rows)

    def _put_entries(self, db: sa.Connection, name: str, rows: Sequence[Given]) -> int:
        if not rows:
            return 0
        self._write(db, "leave", rows)
        statement, given = self._enter[name]
        db.execute(statement, given.params(rows))
        return len(rows)

    def wake(self, db: sa.Connection, max_attempts: int | None, park: bool) -> int:
        # Whoever else delivers or deletes rows knows nothing of their entries, which would be due for ever.
        gone = [Given(row[0]) for row in db.execute(self._gone, {"limit": WAKE_LIMIT})]
        return self._write(db, "leave", gone) + self._let_lapsed_go(db, max_attempts, park)

    # -- settling -----------------------------------------------------------------------------------------------------

    def settle(
        self, db: sa.Connection, claims: Sequence[Claim], outcomes: Sequence[Outcome], *, mode: Mode, park: bool
    ) -> Settlement:
        if mode == "hold" and claims and all(outcome is DELIVERED for outcome in outcomes):
            self._deliver(db, [Given(claim.row) for claim in claims])
            return Settlement(len(claims))
        groups = group_outcomes(claims, outcomes, park, longest=self.layout.longest_delay)
        lost = 0
        if mode == "lease":
            ours = self._ours(db, claims) if claims else set()
            kept = {name: [given for given in rows if given.row_id in ours] for name, rows in groups.items()}
            lost = sum(map(len, groups.values())) - sum(map(len, kept.values()))
            groups = kept
            tried = [given for given in groups["release"] if given.attempt > 1]
            fresh = [given for given in groups["release"] if given.attempt <= 1]
            released = self._write(db, "release", tried) + self._write(db, "leave", fresh)
        else:
            released = sum(isinstance(outcome, Released) for outcome in outcomes)
        if groups["delivered"]:
            self._deliver(db, groups["delivered"])
            if mode == "lease":
                self._write(db, "leave", groups["delivered"])
        for name in ("retry", "dead"):
            self._put_entries(db, name, groups[name])
        return Settlement(len(groups["delivered"]), len(groups["retry"]), len(groups["dead"]), released, lost)

    def _deliver(self, db: sa.Connection, rows: Sequence[Given]) -> None:
        if self._copied is not None:
            db.execute(self._copied, self._given.params(rows))
        self._write_main(db, "delivered", rows)

    def _write_main(self, db: sa.Connection, name: str, rows: Sequence[Given]) -> None:
        write = self._main[name]
        if is_mysql(self.dialect):
            write.each.execute(db, write.given.params(rows))
        else:
            write.alike.execute(db, write.same.params([row.row_id for row in rows], rows[0]))

    def drop(self, db: sa.Connection, rows: Sequence[Any]) -> None:
        """Delete dead rows and their entries; where delivered rows are logged these are, so that no gap is found."""
        given = [Given(row) for row in rows]
        if self._copied is not None:
            db.execute(self._copied, self._given.params(given))
        self._write_main(db, "cancel", given)
        self._write(db, "leave", given)

    # -- building -----------------------------------------------------------------------------------------------------

    def _is_due(self, entry: Any) -> ColumnElement[bool]:
        is_due: ColumnElement[bool] = (entry.state == sa.literal_column(str(WAITING))) & (entry.until_at <= now())
        return is_due

    def _build_find(self) -> sa.Select[Any]:
        layout, main, entry = self.layout, self.outbox, self.held.alias("entry")
        row = main.c[layout.row]
        is_busy = sa.or_(entry.c.state != sa.literal_column(str(WAITING)), entry.c.until_at > now())
        busy: sa.Select[Any] = sa.select(sa.literal_column("1")).where(entry.c[layout.row] == row, is_busy)
        conditions = [layout.ready(main.c), _has_none(busy.correlate(main))]
        if layout.side is not None and layout.side.is_serial:
            earlier = self.held.alias("earlier")
            is_stuck = sa.or_(earlier.c.state != sa.literal_column(str(WAITING)), earlier.c.until_at > now())
            before: sa.Select[Any] = sa.select(sa.literal_column("1")).where(earlier.c[layout.row] < row, is_stuck)
            conditions.append(_has_none(before.correlate(main)))
        identity = sa.type_coerce(row, sa.types.NullType()).label("row_id")
        query = sa.select(identity, sa.null().label("unused"), *claimed_fields(layout, main)).where(*conditions)
        ordered = query.order_by(*(main.c[name] for name in layout.order_by)).limit(sa.bindparam("limit"))
        return ordered.with_for_update(skip_locked=True, of=main)

    def _build_entries(self) -> sa.Select[Any]:
        c, row = self.held.c, self.held.c[self.layout.row]
        is_free = sa.case((self._is_due(c), sa.true()), else_=sa.false())
        if self.dialect == "postgresql":
            chosen = is_any(row, "entries")
        else:
            chosen = sa.type_coerce(row, sa.types.NullType()).in_(sa.bindparam("entries", expanding=True))
        return sa.select(*self._identity(), c.attempts, is_free.label("is_free")).where(chosen)

    def _build_copy(self, move: Move) -> sa.Insert:
        target, main, given = self.tables[move.into], self.outbox, self._given
        values = move.values(main.c, given.c)
        columns = [column.name for column in target.c if column.name in main.c or column.name in values]
        wanted = (_as_element(values[name] if name in values else main.c[name]).label(name) for name in columns)
        rows = sa.select(*wanted).where(main.c[self.layout.row] == given.c.row_id)
        # Somebody may have logged a row by hand already.
        return sa.insert(target).prefix_with("OR IGNORE", dialect="sqlite").from_select(columns, rows)

    def _build_gone(self) -> sa.Select[Any]:
        layout, main, entry = self.layout, self.outbox, self.held
        row: sa.Select[Any] = sa.select(sa.literal_column("1")).where(
            main.c[layout.row] == entry.c[layout.row], layout.ready(main.c)
        )
        # The states one by one: all but the dead ones would be no range of an index.
        is_live = entry.c.state.in_([sa.literal_column(str(state)) for state in (LEASED, WAITING)])
        is_over = is_live & (entry.c.until_at <= now())
        found = sa.select(*self._identity()).where(is_over, _has_none(row.correlate(entry)))
        return found.limit(sa.bindparam("limit"))

    def _build_enter(self, values: Any) -> tuple[sa.Insert, GivenRows]:
        given = self._given
        columns = {self.layout.row: given.c.row_id, **values(self.held.c, given.c)}
        source = sa.select(*(_as_element(value).label(name) for name, value in columns.items()))
        return sa.insert(self.held).from_select(list(columns), source), given


def _has_none(query: sa.Select[Any]) -> ColumnElement[bool]:
    # NOT EXISTS would be a join, and a planner may go about it by reading the whole of the other table for each row.
    return query.limit(1).scalar_subquery().is_(None)


def _as_element(value: Any) -> ColumnElement[Any]:
    return value if isinstance(value, ColumnElement) else sa.null() if value is None else sa.literal(value)
