"""The tables that events of a store are in: the outbox, that of the dead ones, and that of the delivered ones.

The dead may be in the outbox table itself, or be told by an entry in a side table; then there is no place of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.elements import ColumnElement

from pillarbox.errors import Unsupported
from pillarbox.layouts.clock import instant
from pillarbox.stores import Filter, State
from pillarbox.stores.counting import is_dead
from pillarbox.stores.transitions import Transitions


@dataclass(frozen=True, eq=False)
class Place:
    """A table, and how it calls what an operator asks for."""

    table: sa.Table
    row: str
    newest: str
    """The column by which its newest events are found."""
    state: State | None = None
    """What all of its events are; None: their columns say it."""
    attempts: str | None = None
    error: str | None = None
    until_at: str | None = None
    delivered_at: str | None = None
    died_at: str | None = None
    origin: str | None = None


class Places:
    """Where a store's events are, and how they are looked for there."""

    def __init__(self, transitions: Transitions) -> None:
        self._t = transitions
        layout = self._layout = transitions.layout
        tables, grave, history = transitions.tables, layout.grave, layout.history
        self.is_aside = layout.side is not None
        self.grave_table = tables[grave.role]
        self.outbox = Place(
            transitions.outbox,
            layout.row,
            layout.row if layout.order is not None else layout.created or layout.row,
            attempts=layout.attempts,
            error=layout.error,
            until_at=layout.lease.at if layout.order is not None or self.is_aside else None,
            delivered_at=layout.delivered_at,
            died_at=grave.died_at,
        )
        self.grave: Place | None = None
        if self.grave_table is not transitions.outbox and not self.is_aside:
            self.grave = Place(
                self.grave_table,
                grave.row,
                grave.row,
                state="dead",
                attempts=grave.attempts,
                error=grave.error,
                died_at=grave.died_at,
                origin=grave.origin,
            )
        self.history: Place | None = None
        if history is not None:
            self.history = Place(
                tables[history.role],
                history.row,
                history.row,
                state="delivered",
                attempts=layout.attempts,
                error=layout.error,
                delivered_at=history.delivered_at,
            )

    @property
    def all(self) -> list[Place]:
        return [place for place in (self.outbox, self.grave, self.history) if place is not None]

    @property
    def delivered(self) -> list[Place]:
        """Where delivered events are kept."""
        is_kept = self._layout.counts.delivered is not None
        return [place for place in (self.history, self.outbox if is_kept else None) if place is not None]

    def conditions(self, place: Place, where: Filter) -> list[ColumnElement[bool]]:
        """A filter as conditions on the rows of a place."""
        conditions: list[ColumnElement[bool]] = []
        if where.ids:
            conditions.append(self._column(place, "id").in_(where.ids))
        for name in ("key", "topic", "type"):
            value = getattr(where, name)
            if value is not None:
                conditions.append(self._column(place, name) == value)
        if where.error is not None:
            life = self._t.held if self.is_aside else place.table
            if place.error is None:
                raise Unsupported(f"Layout {self._layout.name!r}: its table keeps no error text to look for")
            # Not LIKE, which on SQLite does not tell capitals.
            find = sa.func.strpos if self._t.dialect == "postgresql" else sa.func.instr
            conditions.append(find(life.c[place.error], where.error) > 0)
        moment = self._moment(place)
        if where.since is not None:
            conditions.append(moment >= where.since)
        if where.until is not None:
            conditions.append(moment < where.until)
        return conditions

    def _column(self, place: Place, name: str) -> ColumnElement[Any]:
        column = self._layout.fields.get(name)
        if column is None or column not in place.table.c:
            raise Unsupported(f"Layout {self._layout.name!r}: its table has no column for the event's {name}")
        return place.table.c[column]

    def _moment(self, place: Place) -> Any:
        """When an event of a place died or was delivered, else when it was put."""
        layout, table = self._layout, place.table
        # As it is: a partition is left out by a condition on the column itself.
        if place.state is not None:
            return table.c[place.died_at or place.delivered_at or ""]
        died = layout.grave.died_at
        known: list[Any] = [] if layout.created is None else [instant(table.c[layout.created])]
        if layout.delivered_at is not None and layout.counts.delivered is not None:
            known.insert(0, sa.case((layout.counts.delivered(table.c), instant(table.c[layout.delivered_at]))))
        if self.is_aside:
            known.insert(0, self._t.held.c[died])
        elif self.grave_table is table:
            known.insert(0, sa.case((is_dead(layout, table), instant(table.c[died]))))
        if not known:
            raise Unsupported(f"Layout {layout.name!r}: its table has no time to look for")
        return known[0] if len(known) == 1 else sa.func.coalesce(*known)

    def join_side(self) -> Any:
        """The outbox with what the side table says of its rows."""
        held, row = self._t.held, self._layout.row
        return self.outbox.table.outerjoin(held, held.c[row] == self.outbox.table.c[row])


def raw(column: Any) -> ColumnElement[Any]:
    """A column without its type: one value that does not decode must not spoil the others."""
    return sa.type_coerce(column, sa.types.NullType())
