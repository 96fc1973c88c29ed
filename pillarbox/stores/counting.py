"""Counting a table's events by the parts of their life."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.elements import ColumnElement

from pillarbox.layouts.clock import instant, seconds_until
from pillarbox.layouts.layout import Layout
from pillarbox.stores import Counts
from pillarbox.stores.transitions import Transitions

_OLDEST = timedelta(days=365_000).total_seconds()
_PARTS = ("new", "retrying", "held", "scheduled", "blocked", "delivered")


def is_dead(layout: Layout, table: sa.Table) -> ColumnElement[bool]:
    """Which rows of the table that keeps the dead ones are dead."""
    where = layout.grave.where
    return sa.true() if where is None else where(table.c)


def _age(seconds: Any) -> timedelta | None:
    # A time may be infinite, and a duration may not.
    return None if seconds is None else timedelta(seconds=max(0.0, min(-float(seconds), _OLDEST)))


class Counting:
    """The statements that count, for one store."""

    def __init__(self, transitions: Transitions) -> None:
        self._t = transitions
        self._layout = transitions.layout
        self._outbox = transitions.outbox
        self._grave = transitions.tables[self._layout.grave.role]
        self._is_aside = self._layout.side is not None

    def counts(self, db: sa.Connection) -> Counts:
        """Count every part of the life cycle, each by an index where the table has one for it."""
        if self._layout.order is not None:
            return self._count_in_one_pass(db)
        counted = {name: self._count_part(name) for name in _PARTS}
        dead = self._count(self._grave, is_dead(self._layout, self._grave))
        columns = [query.label(name) for name, query in {**counted, "dead": dead, "age": self._oldest()}.items()]
        row = db.execute(sa.select(*columns)).one()._mapping
        return Counts(**{name: row[name] for name in (*_PARTS, "dead")}, oldest_pending=_age(row["age"]))

    def _count_in_one_pass(self, db: sa.Connection) -> Counts:
        """Our own table has no index that only counts would use."""
        outbox, wanted = self._outbox, self._layout.counts
        columns = [
            sa.func.count(sa.case((getattr(wanted, name)(outbox.c), sa.literal_column("1")))).label(name)
            for name in _PARTS
        ]
        is_pending = sa.or_(*(part(outbox.c) for part in self._pending_parts()))
        oldest = sa.func.min(sa.case((is_pending, outbox.c[self._layout.created or ""])))
        row = db.execute(sa.select(*columns, seconds_until(oldest)).where(self._t.is_mine(outbox))).one()
        dead = db.execute(sa.select(self._count(self._grave, is_dead(self._layout, self._grave)))).scalar_one()
        counted: dict[str, int] = dict(zip(_PARTS, row, strict=False))
        if self._layout.history is not None:
            history = self._count(self._t.tables[self._layout.history.role], sa.true())
            counted["delivered"] += db.execute(sa.select(history)).scalar_one()
        return Counts(**counted, dead=dead, oldest_pending=_age(row[-1]))

    def _count_part(self, name: str) -> Any:
        condition = getattr(self._layout.counts, name)
        if condition is None:
            return sa.literal_column("0")
        if self._is_aside and name in ("retrying", "held"):
            return self._count(self._t.held, condition(self._t.held.c))
        where = condition(self._outbox.c)
        if self._is_aside and name == "new":
            where &= sa.not_(self._has_entry())
        return self._count(self._outbox, where)

    def _count(self, table: sa.Table, where: ColumnElement[bool]) -> Any:
        query = sa.select(sa.func.count()).select_from(table).where(self._t.is_mine(table), where)
        return query.scalar_subquery()

    def _oldest(self) -> Any:
        layout, c = self._layout, self._outbox.c
        if layout.created is None:
            return sa.null()
        is_mine = self._t.is_mine(self._outbox)
        if self._is_aside:
            is_mine &= sa.not_(self._has_entry(is_dead(layout, self._grave)))
        ages = [
            sa.select(sa.func.min(c[layout.created])).where(is_mine, part(c)).scalar_subquery()
            for part in self._pending_parts()
        ]
        first = ages[0] if len(ages) == 1 else self._least(ages)
        return seconds_until(instant(c[layout.created], first))

    def _pending_parts(self) -> list[Any]:
        counts = self._layout.counts
        parts = (counts.new, counts.retrying, counts.held, counts.scheduled, counts.blocked)
        return [counts.new] if self._is_aside else [part for part in parts if part is not None]

    def _least(self, values: Sequence[Any]) -> Any:
        # LEAST of a NULL is NULL on MySQL and SQLite: the smallest of a list of rows is not.
        listed = sa.union_all(*(sa.select(value.label("moment")) for value in values)).subquery()
        return sa.select(sa.func.min(listed.c.moment)).scalar_subquery()

    def _has_entry(self, *where: ColumnElement[bool]) -> ColumnElement[bool]:
        held, row = self._t.held, self._layout.row
        found: sa.Select[Any] = sa.select(sa.literal_column("1")).where(held.c[row] == self._outbox.c[row], *where)
        return sa.exists(found.correlate(self._outbox))
