"""What operators do to a store: count, list, redrive, drop, replay, prune; each action leaves an audit line."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.elements import ColumnElement

from pillarbox.codec import decode_json
from pillarbox.errors import Unsupported
from pillarbox.event import LATE_HEADER
from pillarbox.layouts.clock import instant, later, now
from pillarbox.layouts.layout import Move
from pillarbox.stores import Counts, Entry, Filter, Record, State
from pillarbox.stores.counting import Counting, is_dead
from pillarbox.stores.fields import as_read
from pillarbox.stores.listing import Listing
from pillarbox.stores.places import Place, Places, raw
from pillarbox.stores.side import SideTransitions
from pillarbox.stores.transitions import Transitions
from pillarbox.wording import say_count

CHUNK = 500

log = logging.getLogger("pillarbox.audit")


class Operations:
    """Operators' statements for one store, run inside one transaction each."""

    def __init__(self, transitions: Transitions) -> None:
        self._t = transitions
        self._layout = transitions.layout
        self._outbox = transitions.outbox
        self._audit = transitions.tables.get("audit")
        self._places = Places(transitions)
        self._grave = self._places.grave_table
        self._counting = Counting(transitions)
        self._listing = Listing(transitions, self._places)

    def counts(self, db: sa.Connection) -> Counts:
        """How many events are in each part of their life."""
        self._plan_freely(db)
        return self._counting.counts(db)

    def events(self, db: sa.Connection, where: Filter, state: State | None, limit: int) -> list[Record]:
        """The newest events that match, wherever they are."""
        self._plan_freely(db)
        return self._listing.events(db, where, state, limit)

    def _plan_freely(self, db: sa.Connection) -> None:
        """Let PostgreSQL plan this transaction's statements anew and as it likes: they may have no index to go by."""
        if self._t.dialect == "postgresql":
            ways = ("enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "enable_mergejoin")
            wanted = {**dict.fromkeys(ways, "on"), "plan_cache_mode": "force_custom_plan"}
            db.execute(sa.select(*(sa.func.set_config(name, value, True) for name, value in wanted.items())))

    # -- acting -------------------------------------------------------------------------------------------------------

    def act(
        self, db: sa.Connection, action: str, where: Filter, *, actor: str, limit: int | None, dry_run: bool
    ) -> int:
        """Redrive, drop or replay what matches, oldest first, and write down who did it."""
        self._plan_freely(db)
        is_replay = action == "replay"
        places = self._places.delivered if is_replay else [self._places.grave or self._places.outbox]
        if is_replay and (self._layout.replay is None or not places):
            raise Unsupported(f"Layout {self._layout.name!r}: delivered rows are not kept, so none can be replayed")
        found = [
            (place, row)
            for place in places
            for row in self._find(db, action, place, where, limit, is_locked=not dry_run)
        ]
        if len(places) > 1:
            found = sorted(found, key=lambda each: (_sortable(each[1].created), each[1].row_id))[:limit]
        found = _one_of_each(found) if any(self._way_back(action, place) for place in places) else found
        if dry_run:
            return len(found)
        change = {"redrive": self._redrive, "drop": self._drop, "replay": self._replay}[action]
        for place in places:
            rows = [row for each, row in found if each is place]
            for start in range(0, len(rows), CHUNK):
                chunk = rows[start : start + CHUNK]
                change(db, place, [row.row_id for row in chunk])
                self._t.unblock(db, {row.key for row in chunk if row.key is not None})
        if found:
            detail = {name: _plain(value) for name, value in asdict(where).items() if value not in (None, ())}
            self.record(db, actor, action, detail, len(found))
        return len(found)

    def _find(
        self, db: sa.Connection, action: str, place: Place, where: Filter, limit: int | None, *, is_locked: bool
    ) -> Sequence[Any]:
        """The rows of a place that an action is meant for, oldest first."""
        layout, table, is_aside = self._layout, place.table, self._places.is_aside
        row = table.c[place.row if action == "replay" else layout.grave.row]
        created = table.c.get(layout.created or "", row)
        names = {name: table.c.get(layout.fields.get(name, "")) for name in ("key", "id", "dedup_key")}
        names["space"] = table.c.get(layout.dedup_within or "")
        wanted = [(raw(column) if column is not None else sa.null()).label(name) for name, column in names.items()]
        query = sa.select(raw(row).label("row_id"), as_read(created).label("created"), *wanted).where(
            self._t.is_mine(table), *self._places.conditions(place, where), self._is_meant(action, place)
        )
        if is_aside:
            query = query.select_from(self._places.join_side())
        if self._way_back(action, place) is not None:
            query = query.where(sa.not_(self._is_live(table)))
        query = query.order_by(created, row)
        if limit is not None:
            query = query.limit(limit)
        return db.execute(query.with_for_update(skip_locked=True, of=table) if is_locked else query).all()

    def _is_meant(self, action: str, place: Place) -> ColumnElement[bool]:
        delivered = self._layout.counts.delivered
        if place is self._places.history:
            return sa.true()
        if action == "replay" and delivered is not None:
            return delivered(place.table.c)
        return is_dead(self._layout, self._grave)

    def _way_back(self, action: str, place: Place) -> Move | None:
        """How the rows of a place return to the outbox, where they are not there already."""
        redrive, history = self._layout.redrive, self._layout.history
        if action == "replay":
            return history.replay if history is not None and place is self._places.history else None
        return redrive if action == "redrive" and isinstance(redrive, Move) else None

    def prune(self, db: sa.Connection, what: str, age: timedelta, batch: int, dry_run: bool) -> int:
        """Delete one batch of delivered or dead rows that are older than `age`."""
        if what == "dead":
            return self._prune_dead(db, age, batch, dry_run)
        pruned = 0
        for place in self._places.delivered:
            if place.delivered_at is None or (pruned >= batch and not dry_run):
                continue
            table, row, moment = place.table, place.table.c[place.row], place.table.c[place.delivered_at]
            is_old = self._is_meant("replay", place) & _is_before(moment, age)
            if dry_run:
                pruned += self._count(db, table, is_old)
                continue
            rows = self._find_old(db, table, row, moment, is_old, batch - pruned)
            if rows:
                db.execute(sa.delete(table).where(raw(row).in_([found.row_id for found in rows]), is_old))
            pruned += len(rows)
        return pruned

    def _prune_dead(self, db: sa.Connection, age: timedelta, batch: int, dry_run: bool) -> int:
        table, grave = self._grave, self._layout.grave
        row, moment = table.c[grave.row], table.c[grave.died_at]
        is_old = is_dead(self._layout, table) & _is_before(moment, age)
        if dry_run:
            return self._count(db, table, is_old)
        rows = self._find_old(db, table, row, moment, is_old, batch)
        if rows:
            self._drop(db, None, [found.row_id for found in rows])
            self._t.unblock(db, {found.key for found in rows if found.key is not None})
        return len(rows)

    def _find_old(
        self, db: sa.Connection, table: sa.Table, row: Any, moment: Any, is_old: ColumnElement[bool], limit: int
    ) -> Sequence[Any]:
        key = table.c.get(self._layout.fields.get("key", ""))
        found = sa.select(raw(row).label("row_id"), (sa.null() if key is None else key).label("key"))
        query = found.where(self._t.is_mine(table), is_old).order_by(moment).limit(limit)
        return db.execute(query.with_for_update(skip_locked=True)).all()

    def _count(self, db: sa.Connection, table: sa.Table, condition: ColumnElement[bool]) -> int:
        query = sa.select(sa.func.count()).select_from(table).where(self._t.is_mine(table), condition)
        return db.execute(query).scalar_one()

    def record(self, db: sa.Connection, actor: str, action: str, detail: Any, events: int) -> None:
        """Write a line into the audit table, or into the log where the layout has no such table."""
        if self._audit is None:
            said = say_count(events, "event")
            log.warning("%s: %s %s of %s, %s", actor, action, said, self._outbox.fullname, detail)
            return
        line = {"at": now(), "actor": actor[:255], "action": action, "detail": detail, "events": events}
        db.execute(sa.insert(self._audit).values(line))

    def entries(self, db: sa.Connection, limit: int) -> list[Entry]:
        audit = self._audit
        if audit is None:
            raise Unsupported(f"Layout {self._layout.name!r}: it has no audit table; actions are in the relay's log")
        rows = db.execute(sa.select(audit).order_by(audit.c.number.desc()).limit(limit))
        return [Entry(row.at, row.actor, row.action, row.detail, row.events) for row in rows]

    # -- one action each ----------------------------------------------------------------------------------------------

    def _redrive(self, db: sa.Connection, place: Place, rows: Sequence[Any]) -> None:
        redrive, dead = self._layout.redrive, self._grave
        # A partitioned table does not keep ids apart: another row of the id may be alive.
        chosen = raw(dead.c[self._layout.grave.row]).in_(rows) & is_dead(self._layout, dead)
        if not isinstance(redrive, Move):
            db.execute(sa.update(dead).where(chosen).values(redrive.values(dead.c, None)))
            return
        # Events that others of their key have overtaken are late, and say so.
        is_late = sa.not_(dead.c.parks) & dead.c.key.is_not(None) if "parks" in dead.c else sa.true()
        self._mark_late(db, place, chosen & is_late)
        self._return(db, place, redrive, chosen)

    def _return(self, db: sa.Connection, place: Place, way: Move, chosen: ColumnElement[bool]) -> None:
        """Move rows of another table back into the outbox."""
        outbox, table = self._outbox, place.table
        fresh = way.values(table.c, None)
        columns = [column.name for column in outbox.c if column.name in table.c or column.name in fresh]
        source = sa.select(*(_value(fresh, table, name) for name in columns)).where(chosen)
        db.execute(sa.insert(outbox).from_select(columns, source.order_by(table.c[place.row])))
        db.execute(sa.delete(table).where(chosen))

    def _drop(self, db: sa.Connection, place: Place | None, rows: Sequence[Any]) -> None:
        if isinstance(self._t, SideTransitions):
            self._t.drop(db, rows)
            return
        chosen = raw(self._grave.c[self._layout.grave.row]).in_(rows)
        db.execute(sa.delete(self._grave).where(chosen, is_dead(self._layout, self._grave)))

    def _replay(self, db: sa.Connection, place: Place, rows: Sequence[Any]) -> None:
        table, replay = place.table, self._layout.replay
        chosen = raw(table.c[place.row]).in_(rows) & self._is_meant("replay", place)
        self._mark_late(db, place, chosen)
        way = self._way_back("replay", place)
        if way is not None:
            self._return(db, place, way, chosen)
        elif replay is not None:
            db.execute(sa.update(table).where(chosen).values(replay.values(table.c, None)))

    def _mark_late(self, db: sa.Connection, place: Place, chosen: ColumnElement[bool]) -> None:
        headers, table = self._layout.fields.get("headers"), place.table
        if headers is None or headers not in table.c:
            return
        row = table.c[place.row]
        written = as_read(table.c[headers], may_be_document=True)
        found = db.execute(sa.select(raw(row), written).where(chosen)).all()
        late = [{"late_row": row_id, "late_headers": _late_headers(value)} for row_id, value in found]
        late = [each for each in late if each["late_headers"] is not None]
        if (refuse := self._layout.refuse_headers) is not None:
            # A row that the other system cannot read stops its workers, which is worse than one that does not say so.
            late = [each for each in late if refuse(each["late_headers"]) is None]
        if late:
            change = sa.update(table).where(row == sa.bindparam("late_row", type_=row.type))
            db.execute(change.values({headers: sa.bindparam("late_headers", type_=table.c[headers].type)}), late)

    # -- conditions ---------------------------------------------------------------------------------------------------

    def _is_live(self, table: sa.Table) -> ColumnElement[bool]:
        """Whether an event of another table is in the outbox too: it was put again."""
        fields, outbox = self._layout.fields, self._outbox.alias()
        same = {
            name: outbox.c[fields[name]] == table.c[fields[name]]
            for name in ("id", "dedup_key")
            if name in fields and fields[name] in table.c
        }
        within = self._layout.dedup_within
        if within is not None:
            same["dedup_key"] &= outbox.c[within] == table.c[within]
        if not same:
            return sa.false()
        query = sa.exists().where(sa.or_(*same.values()))
        if self._layout.order is not None:
            query = query.where(outbox.c[self._layout.order.sink] == table.c[self._layout.order.sink])
        return query.correlate(table)


def _one_of_each(found: Sequence[tuple[Place, Any]]) -> list[tuple[Place, Any]]:
    """The oldest of the rows that share an id or a dedup key: only one of them can live."""
    taken: set[Any] = set()
    chosen: list[tuple[Place, Any]] = []
    for place, row in found:
        names = {str(row.id), ("dedup", row.space, row.dedup_key)} - {("dedup", row.space, None), "None"}
        if taken.isdisjoint(names):
            chosen.append((place, row))
            taken |= names
    return chosen


def _is_before(moment: Any, age: timedelta) -> ColumnElement[bool]:
    condition: ColumnElement[bool] = instant(moment) < later(sa.literal(-age.total_seconds()))
    return condition


def _late_headers(value: Any) -> dict[str, Any] | None:
    """The headers with the late one added; None when they cannot be read."""
    try:
        headers = decode_json(value) if isinstance(value, str | bytes) else value
    except ValueError:
        return None
    return {**(headers or {}), LATE_HEADER: "true"} if isinstance(headers, dict | None) else None


def _value(fresh: Any, table: sa.Table, name: str) -> ColumnElement[Any]:
    if name not in fresh:
        return table.c[name]
    value = fresh[name]
    element: ColumnElement[Any] = value if isinstance(value, ColumnElement) else sa.literal(value)
    return (element if value is not None else sa.null()).label(name)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [str(item) for item in value]
    if not isinstance(value, str | int | float | bool):
        return str(value)
    return value


def _sortable(created: Any) -> tuple[float, str]:
    # Times as a driver gives them; one that it could not read is text.
    return (created, "") if isinstance(created, int | float) else (0.0, str(created))
