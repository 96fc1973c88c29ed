"""Listing a store's events, wherever they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from pillarbox.stores import Filter, Record, State
from pillarbox.stores.counting import is_dead
from pillarbox.stores.fields import EventLoader, count_tries, raw_fields, read_time, readable
from pillarbox.stores.places import Place, Places, raw
from pillarbox.stores.transitions import Transitions

# In the order in which they are asked: what is delivered is nothing else.
_STATES: dict[str, State] = {
    "delivered": "delivered",
    "dead": "dead",
    "held": "leased",
    "blocked": "blocked",
    "scheduled": "scheduled",
    "retrying": "waiting",
}
_TIMES = ("until_at", "delivered_at", "died_at")
_COLUMNS = ("row", "attempts", "error", "until_at", "delivered_at", "died_at", "parks", "origin")


class Listing:
    """The statements that list, for one store."""

    def __init__(self, transitions: Transitions, places: Places) -> None:
        self._t = transitions
        self._layout = transitions.layout
        self._places = places
        # The columns of an event are alike in all tables, or missing.
        self._loader = EventLoader(self._layout, transitions.outbox, transitions.dialect, 1 + len(_COLUMNS))

    def events(self, db: sa.Connection, where: Filter, state: State | None, limit: int) -> list[Record]:
        """The newest events that match, wherever they are."""
        records: list[Record] = []
        for place in self._places.all:
            is_elsewhere = place is self._places.outbox and state == "dead" and self._places.grave is not None
            if not is_elsewhere and (state is None or place.state in (None, state)):
                records += self._list(db, place, where, state, limit)
        return sorted(records, key=_put_order, reverse=True)[:limit]

    def _list(self, db: sa.Connection, place: Place, where: Filter, state: State | None, limit: int) -> list[Record]:
        table, is_aside = place.table, self._places.is_aside
        columns = self._record_columns(place)
        source = self._places.join_side() if is_aside else table
        query = sa.select(*columns.values(), *raw_fields(self._fields_in(table), table)).select_from(source)
        query = query.where(self._t.is_mine(table), *self._places.conditions(place, where))
        if state is not None and place.state is None:
            query = query.where(columns["state"] == state)
        if self._layout.counts.delivered is None and is_aside:
            query = query.where(self._layout.ready(table.c))
        rows = db.execute(query.order_by(table.c[place.newest].desc(), columns["row"].desc()).limit(limit)).all()
        return [self._record(row) for row in rows]

    def _record_columns(self, place: Place) -> dict[str, Any]:
        life = self._t.held.c if self._places.is_aside else place.table.c
        found: dict[str, Any] = {"state": self._state(place).label("record_state")}
        for name in _COLUMNS:
            column = name if name == "parks" else getattr(place, name)
            columns = place.table.c if name == "row" else life
            value: Any = columns[column] if column is not None and column in columns else sa.null()
            if name in _TIMES:
                value = readable(raw(value))
            found[name] = (raw(value) if name in ("row", "attempts") else value).label(f"record_{name}")
        return found

    def _state(self, place: Place) -> Any:
        if place.state is not None:
            return sa.literal(place.state)
        table, grave = place.table, self._places.grave_table
        counts, life = self._layout.counts, self._t.held.c if self._places.is_aside else table.c
        cases = []
        for part, state in _STATES.items():
            if part == "dead":
                is_here = grave is (self._t.held if self._places.is_aside else table)
                condition = is_dead(self._layout, grave) if is_here else None
            else:
                predicate = getattr(counts, part)
                columns = life if part in ("held", "retrying") else table.c
                condition = None if predicate is None else predicate(columns)
            if condition is not None:
                cases.append((condition, sa.literal(state)))
        return sa.case(*cases, else_=sa.literal("ready"))

    def _fields_in(self, table: sa.Table) -> Any:
        """The layout as far as a table has its columns."""
        if table is self._t.outbox:
            return self._layout
        return replace(
            self._layout, fields={name: column for name, column in self._layout.fields.items() if column in table.c}
        )

    def _record(self, row: Any) -> Record:
        state, row_id, attempts, error, until_at, delivered_at, died_at, parks, origin = row[: 1 + len(_COLUMNS)]
        event, _ = self._loader.load(row, row_id if origin is None else origin)
        until_at, delivered_at, died_at = map(read_time, (until_at, delivered_at, died_at))
        is_buried = state == "dead"
        return Record(
            event=event,
            seq=row_id,
            state=state,
            attempts=count_tries(attempts),
            error=error if error is None or isinstance(error, str) else repr(error),
            until_at=until_at,
            delivered_at=delivered_at if state == "delivered" else None,
            died_at=died_at if is_buried else None,
            parks=bool(parks) and is_buried,
        )


def _put_order(record: Record) -> Any:
    created = record.event.created_at
    is_number = isinstance(record.seq, int)
    # Ids of one time are in the order of putting when they are ours.
    return (record.seq if is_number else created.timestamp() if created else 0.0, str(record.seq))
