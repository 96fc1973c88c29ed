"""What operators do to a store: count, list, redrive, drop, replay, prune; each action leaves an audit line."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.elements import ColumnElement

from pillarbox.codec import decode_json
from pillarbox.errors import Unsupported
from pillarbox.event import EVENT_FIELDS, LATE_HEADER
from pillarbox.layouts.clock import instant, later, now
from pillarbox.layouts.layout import Move
from pillarbox.stores import Counts, Entry, Filter, Record, State
from pillarbox.stores.counting import Counting, is_dead
from pillarbox.stores.fields import EventLoader, raw_fields
from pillarbox.stores.side import SideTransitions
from pillarbox.stores.transitions import Transitions

CHUNK = 500
# In the order in which they are asked: what is delivered is nothing else.
_STATES: dict[str, State] = {
    "delivered": "delivered",
    "dead": "dead",
    "held": "leased",
    "blocked": "blocked",
    "scheduled": "scheduled",
    "retrying": "waiting",
}

log = logging.getLogger("pillarbox.audit")


class Operations:
    """Operators' statements for one store, run inside one transaction each."""

    def __init__(self, transitions: Transitions) -> None:
        self._t = transitions
        self._layout = transitions.layout
        self._outbox = transitions.outbox
        self._audit = transitions.tables.get("audit")
        self._grave = transitions.tables[self._layout.grave.role]
        self._is_aside = self._layout.side is not None
        self._counting = Counting(transitions)
        width = 1 + len(_COLUMNS)
        self._loaders = {
            table: EventLoader(self._layout, self._outbox, transitions.dialect, width)
            for table in {self._outbox, self._grave}
        }

    def counts(self, db: sa.Connection) -> Counts:
        """How many events are in each part of their life."""
        return self._counting.counts(db)

    # -- listing ------------------------------------------------------------------------------------------------------

    def events(self, db: sa.Connection, where: Filter, state: State | None, limit: int) -> list[Record]:
        """The newest events that match, wherever they are."""
        records: list[Record] = []
        if state != "dead" or self._grave is self._outbox or self._is_aside:
            records += self._list(db, self._outbox, where, state, limit)
        if state in (None, "dead") and self._grave is not self._outbox and not self._is_aside:
            records += self._list(db, self._grave, where, None, limit)
        return sorted(records, key=_put_order, reverse=True)[:limit]

    def _list(self, db: sa.Connection, table: sa.Table, where: Filter, state: State | None, limit: int) -> list[Record]:
        is_grave = table is self._grave and table is not self._outbox
        columns = self._record_columns(table, is_grave)
        source = self._joined() if self._is_aside else table
        query = sa.select(*columns.values(), *raw_fields(self._fields_in(table), table)).select_from(source)
        query = query.where(self._t.is_mine(table), *self._conditions(table, where))
        if state is not None:
            query = query.where(columns["state"] == state)
        if self._layout.counts.delivered is None and not is_grave:
            query = query.where(self._layout.ready(table.c) if self._is_aside else sa.true())
        order = table.c[self._layout.grave.row if is_grave else self._newest_column()]
        rows = db.execute(query.order_by(order.desc(), columns["row"].desc()).limit(limit)).all()
        return [self._record(row, table) for row in rows]

    def _newest_column(self) -> str:
        return self._layout.row if self._layout.order is not None else self._layout.created or self._layout.row

    def _joined(self) -> Any:
        held, row = self._t.held, self._layout.row
        return self._outbox.outerjoin(held, held.c[row] == self._outbox.c[row])

    def _record_columns(self, table: sa.Table, is_grave: bool) -> dict[str, Any]:
        layout, grave = self._layout, self._layout.grave
        life = self._t.held.c if self._is_aside else table.c
        named = {
            "row": grave.row if is_grave else layout.row,
            "attempts": grave.attempts if is_grave else layout.attempts,
            "error": grave.error if is_grave else layout.error,
            "until_at": None if is_grave else layout.lease.at if layout.order is not None or self._is_aside else None,
            "delivered_at": None if is_grave else layout.delivered_at,
            "died_at": grave.died_at,
            "parks": "parks",
            "origin": grave.origin if is_grave else None,
        }
        found: dict[str, Any] = {"state": self._state(table, is_grave).label("record_state")}
        for name, column in named.items():
            columns = table.c if name == "row" else life
            value = columns[column] if column is not None and column in columns else sa.null()
            found[name] = (_raw(value) if name == "row" else value).label(f"record_{name}")
        return found

    def _state(self, table: sa.Table, is_grave: bool) -> Any:
        if is_grave:
            return sa.literal("dead")
        counts, life = self._layout.counts, self._t.held.c if self._is_aside else table.c
        cases = []
        for part, state in _STATES.items():
            if part == "dead":
                is_here = self._grave is (self._t.held if self._is_aside else table)
                condition = is_dead(self._layout, self._grave) if is_here else None
            else:
                predicate = getattr(counts, part)
                columns = life if part in ("held", "retrying") else table.c
                condition = None if predicate is None else predicate(columns)
            if condition is not None:
                cases.append((condition, sa.literal(state)))
        return sa.case(*cases, else_=sa.literal("ready"))

    def _fields_in(self, table: sa.Table) -> Any:
        """The layout as far as a table has its columns."""
        if table is self._outbox:
            return self._layout
        return replace(
            self._layout, fields={name: column for name, column in self._layout.fields.items() if column in table.c}
        )

    def _record(self, row: Any, table: sa.Table) -> Record:
        state, row_id, attempts, error, until_at, delivered_at, died_at, parks, origin = row[: 1 + len(_COLUMNS)]
        event, _ = self._loaders[table].load(row, row_id if origin is None else origin)
        is_buried = state == "dead"
        return Record(
            event=event,
            seq=row_id,
            state=state,
            attempts=attempts or 0,
            error=error,
            until_at=until_at,
            delivered_at=delivered_at if state == "delivered" else None,
            died_at=died_at if is_buried else None,
            parks=bool(parks) and is_buried,
        )

    # -- acting -------------------------------------------------------------------------------------------------------

    def act(
        self, db: sa.Connection, action: str, where: Filter, *, actor: str, limit: int | None, dry_run: bool
    ) -> int:
        """Redrive, drop or replay what matches, oldest first, and write down who did it."""
        if action == "replay" and (self._layout.replay is None or self._layout.counts.delivered is None):
            raise Unsupported(f"Layout {self._layout.name!r}: delivered rows are not kept, so none can be replayed")
        table = self._outbox if action == "replay" or self._is_aside else self._grave
        row = table.c[self._layout.row if action == "replay" else self._layout.grave.row]
        names = {name: table.c.get(self._layout.fields.get(name, "")) for name in ("key", "id", "dedup_key")}
        names["space"] = table.c.get(self._layout.dedup_within or "")
        wanted = [(_raw(column) if column is not None else sa.null()).label(name) for name, column in names.items()]
        query = sa.select(_raw(row).label("row_id"), *wanted).where(
            self._t.is_mine(table), *self._conditions(table, where), self._is_meant(action, table)
        )
        if self._is_aside:
            query = query.select_from(self._joined())
        returns = action == "redrive" and isinstance(self._layout.redrive, Move)
        if returns:
            query = query.where(sa.not_(self._is_live(table)))
        query = query.order_by(table.c.get(self._layout.created or "", row), row)
        if limit is not None:
            query = query.limit(limit)
        rows = db.execute(query if dry_run else query.with_for_update(skip_locked=True, of=table)).all()
        if returns:
            rows = _one_of_each(rows)
        if dry_run:
            return len(rows)
        change = {"redrive": self._redrive, "drop": self._drop, "replay": self._replay}[action]
        for start in range(0, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            change(db, [found.row_id for found in chunk])
            self._t.unblock(db, {found.key for found in chunk if found.key is not None})
        if rows:
            detail = {name: _plain(value) for name, value in asdict(where).items() if value not in (None, ())}
            self.record(db, actor, action, detail, len(rows))
        return len(rows)

    def _is_meant(self, action: str, table: sa.Table) -> ColumnElement[bool]:
        delivered = self._layout.counts.delivered
        if action == "replay" and delivered is not None:
            return delivered(table.c)
        return is_dead(self._layout, self._grave)

    def prune(self, db: sa.Connection, what: str, age: timedelta, batch: int, dry_run: bool) -> int:
        """Delete one batch of delivered or dead rows that are older than `age`."""
        layout = self._layout
        wants_dead = what == "dead"
        if not wants_dead and (layout.counts.delivered is None or layout.delivered_at is None):
            return 0
        table = self._grave if wants_dead else self._outbox
        moment = table.c[layout.grave.died_at if wants_dead else layout.delivered_at or ""]
        row = table.c[layout.grave.row if wants_dead else layout.row]
        condition = is_dead(self._layout, table) if wants_dead else self._is_meant("replay", table)
        key = table.c.get(layout.fields.get("key", ""))
        query = sa.select(_raw(row).label("row_id"), (sa.null() if key is None else key).label("key")).where(
            self._t.is_mine(table), condition, instant(moment) < later(sa.literal(-age.total_seconds()))
        )
        if dry_run:
            return db.execute(sa.select(sa.func.count()).select_from(query.subquery())).scalar_one()
        rows = db.execute(query.order_by(moment).limit(batch).with_for_update(skip_locked=True)).all()
        if rows:
            numbers = [found.row_id for found in rows]
            if wants_dead:
                self._drop(db, numbers)
                self._t.unblock(db, {found.key for found in rows if found.key is not None})
            else:
                db.execute(sa.delete(table).where(_raw(row).in_(numbers), condition))
        return len(rows)

    def record(self, db: sa.Connection, actor: str, action: str, detail: Any, events: int) -> None:
        """Write a line into the audit table, or into the log where the layout has no such table."""
        if self._audit is None:
            log.warning("%s: %s %d events of %s, %s", actor, action, events, self._outbox.fullname, detail)
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

    def _redrive(self, db: sa.Connection, rows: Sequence[Any]) -> None:
        redrive, dead, outbox = self._layout.redrive, self._grave, self._outbox
        # A partitioned table does not keep ids apart: another row of the id may be alive.
        chosen = _raw(dead.c[self._layout.grave.row]).in_(rows) & is_dead(self._layout, dead)
        fresh = redrive.values(dead.c, None)
        if not isinstance(redrive, Move):
            db.execute(sa.update(dead).where(chosen).values(fresh))
            return
        columns = [column.name for column in outbox.c if column.name in dead.c or column.name in fresh]
        # Events that others of their key have overtaken are late, and say so.
        if "parks" in dead.c:
            self._mark_late(db, dead, chosen & sa.not_(dead.c.parks) & dead.c.key.is_not(None))
        else:
            self._mark_late(db, dead, chosen)
        source = sa.select(*(_value(fresh, dead, name) for name in columns)).where(chosen)
        db.execute(sa.insert(outbox).from_select(columns, source.order_by(dead.c[self._layout.grave.row])))
        db.execute(sa.delete(dead).where(chosen))

    def _drop(self, db: sa.Connection, rows: Sequence[Any]) -> None:
        if isinstance(self._t, SideTransitions):
            self._t.drop(db, rows)
            return
        chosen = _raw(self._grave.c[self._layout.grave.row]).in_(rows)
        db.execute(sa.delete(self._grave).where(chosen, is_dead(self._layout, self._grave)))

    def _replay(self, db: sa.Connection, rows: Sequence[Any]) -> None:
        outbox, replay = self._outbox, self._layout.replay
        chosen = _raw(outbox.c[self._layout.row]).in_(rows) & self._is_meant("replay", outbox)
        self._mark_late(db, outbox, chosen)
        if replay is not None:
            db.execute(sa.update(outbox).where(chosen).values(replay.values(outbox.c, None)))

    def _mark_late(self, db: sa.Connection, table: sa.Table, chosen: ColumnElement[bool]) -> None:
        headers = self._layout.fields.get("headers")
        if headers is None or headers not in table.c:
            return
        row = table.c[self._layout.row if table is self._outbox else self._layout.grave.row]
        found = db.execute(sa.select(_raw(row), _raw(table.c[headers])).where(chosen)).all()
        late = [{"late_row": row_id, "late_headers": _late_headers(value)} for row_id, value in found]
        late = [each for each in late if each["late_headers"] is not None]
        if late:
            change = sa.update(table).where(row == sa.bindparam("late_row", type_=row.type))
            db.execute(change.values({headers: sa.bindparam("late_headers", type_=table.c[headers].type)}), late)

    # -- conditions ---------------------------------------------------------------------------------------------------

    def _is_live(self, dead: sa.Table) -> ColumnElement[bool]:
        fields, outbox = self._layout.fields, self._outbox.alias()
        same = {
            name: outbox.c[fields[name]] == dead.c[fields[name]]
            for name in ("id", "dedup_key")
            if name in fields and fields[name] in dead.c
        }
        within = self._layout.dedup_within
        if within is not None:
            same["dedup_key"] &= outbox.c[within] == dead.c[within]
        if not same:
            return sa.false()
        query = sa.exists().where(sa.or_(*same.values()))
        if self._layout.order is not None:
            query = query.where(outbox.c[self._layout.order.sink] == dead.c[self._layout.order.sink])
        return query.correlate(dead)

    def _conditions(self, table: sa.Table, where: Filter) -> list[ColumnElement[bool]]:
        layout = self._layout
        conditions: list[ColumnElement[bool]] = []
        is_grave = table is self._grave and table is not self._outbox
        life = self._t.held if self._is_aside else table
        if where.ids:
            conditions.append(self._column(table, "id").in_(where.ids))
        for name in ("key", "topic", "type"):
            value = getattr(where, name)
            if value is not None:
                conditions.append(self._column(table, name) == value)
        if where.error is not None:
            error = layout.grave.error if is_grave else layout.error
            if error is None:
                raise Unsupported(f"Layout {layout.name!r}: its table keeps no error text to look for")
            # Not LIKE, which on SQLite does not tell capitals.
            find = sa.func.strpos if self._t.dialect == "postgresql" else sa.func.instr
            conditions.append(find(life.c[error], where.error) > 0)
        moment = self._moment(table, is_grave)
        if where.since is not None:
            conditions.append(moment >= where.since)
        if where.until is not None:
            conditions.append(moment < where.until)
        return conditions

    def _column(self, table: sa.Table, name: str) -> ColumnElement[Any]:
        column = self._layout.fields.get(name)
        if column is None or column not in table.c:
            raise Unsupported(f"Layout {self._layout.name!r}: its table has no column for the event's {name}")
        return table.c[column]

    def _moment(self, table: sa.Table, is_grave: bool) -> Any:
        layout = self._layout
        if is_grave:
            return table.c[layout.grave.died_at]
        died = layout.grave.died_at
        known: list[Any] = [] if layout.created is None else [instant(table.c[layout.created])]
        if layout.delivered_at is not None and layout.counts.delivered is not None:
            known.insert(0, sa.case((layout.counts.delivered(table.c), instant(table.c[layout.delivered_at]))))
        if self._is_aside:
            known.insert(0, self._t.held.c[died])
        elif self._grave is table:
            known.insert(0, sa.case((is_dead(self._layout, table), instant(table.c[died]))))
        if not known:
            raise Unsupported(f"Layout {layout.name!r}: its table has no time to look for")
        return known[0] if len(known) == 1 else sa.func.coalesce(*known)


_COLUMNS = ("row", "attempts", "error", "until_at", "delivered_at", "died_at", "parks", "origin")
_FIELDS = len(EVENT_FIELDS)


def _put_order(record: Record) -> Any:
    created = record.event.created_at
    is_number = isinstance(record.seq, int)
    # Ids of one time are in the order of putting when they are ours.
    return (record.seq if is_number else created.timestamp() if created else 0.0, str(record.seq))


def _raw(column: Any) -> ColumnElement[Any]:
    # Without its type: one value that does not decode must not spoil the others.
    return sa.type_coerce(column, sa.types.NullType())


def _one_of_each(rows: Sequence[Any]) -> list[Any]:
    """The oldest of the rows that share an id or a dedup key: only one of them can live."""
    taken: set[Any] = set()
    chosen: list[Any] = []
    for row in rows:
        names = {str(row.id), ("dedup", row.space, row.dedup_key)} - {("dedup", row.space, None), "None"}
        if taken.isdisjoint(names):
            chosen.append(row)
            taken |= names
    return chosen


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
