"""What operators do to a store: count, list, redrive, drop, replay, prune; each action leaves an audit line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.elements import ColumnElement

from pillarbox.codec import decode_json
from pillarbox.event import EVENT_FIELDS, LATE_HEADER
from pillarbox.layouts.clock import later, now, seconds_until
from pillarbox.stores import Counts, Entry, Filter, Record, State
from pillarbox.stores.pick import FIRST_FIELD, ClaimLoader
from pillarbox.stores.transitions import Transitions

CHUNK = 500


class Operations:
    """Operators' statements for one store, run inside one transaction each."""

    def __init__(self, transitions: Transitions) -> None:
        self._t = transitions
        self._layout = transitions.layout
        self._tables = transitions.tables
        self._loader = ClaimLoader(transitions.dialect)

    def counts(self, db: sa.Connection) -> Counts:
        """Count every part of the life cycle in one pass over the table."""
        outbox, dead, wanted = self._tables["outbox"], self._tables["dead"], self._layout.counts
        names = ("new", "retrying", "held", "scheduled", "blocked", "delivered")
        columns = [
            sa.func.count(sa.case((getattr(wanted, name)(outbox.c), sa.literal_column("1")))).label(name)
            for name in names
        ]
        oldest = sa.func.min(sa.case((sa.not_(wanted.delivered(outbox.c)), outbox.c.created_at)))
        row = db.execute(sa.select(*columns, seconds_until(oldest)).where(self._mine(outbox))).one()
        buried = db.execute(sa.select(sa.func.count()).select_from(dead).where(self._mine(dead))).scalar_one()
        age = None if row[-1] is None else timedelta(seconds=max(0.0, -float(row[-1])))
        counted: dict[str, int] = dict(zip(names, row, strict=False))
        return Counts(**counted, dead=buried, oldest_pending=age)

    def events(self, db: sa.Connection, where: Filter, state: State | None, limit: int) -> list[Record]:
        """The newest events that match, from the outbox and the dead table."""
        records: list[Record] = []
        if state != "dead":
            records += self._list(db, "outbox", where, state, limit)
        if state in (None, "dead"):
            records += self._list(db, "dead", where, None, limit)
        return sorted(records, key=lambda record: record.seq, reverse=True)[:limit]

    def act(
        self, db: sa.Connection, action: str, where: Filter, *, actor: str, limit: int | None, dry_run: bool
    ) -> int:
        """Redrive, drop or replay what matches, oldest first, and write down who did it."""
        role = "outbox" if action == "replay" else "dead"
        table = self._tables[role]
        query = sa.select(table.c.seq, table.c.key, _raw(table.c.id).label("id"), table.c.dedup_key).where(
            self._mine(table), *self._conditions(table, where, role)
        )
        if action == "replay":
            query = query.where(self._layout.counts.delivered(table.c))
        if action == "redrive":
            query = query.where(sa.not_(self._is_live(table)))
        query = query.order_by(table.c.seq)
        if limit is not None:
            query = query.limit(limit)
        rows = db.execute(query if dry_run else query.with_for_update(skip_locked=True)).all()
        if action == "redrive":
            rows = _one_of_each(rows)
        if dry_run:
            return len(rows)
        change = {"redrive": self._redrive, "drop": self._drop, "replay": self._replay}[action]
        for start in range(0, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            change(db, [row.seq for row in chunk])
            self._t.unblock(db, {row.key for row in chunk if row.key is not None})
        if rows:
            detail = {name: _plain(value) for name, value in asdict(where).items() if value not in (None, ())}
            self.record(db, actor, action, detail, len(rows))
        return len(rows)

    def prune(self, db: sa.Connection, role: str, age: timedelta, batch: int, dry_run: bool) -> int:
        """Delete one batch of delivered or dead rows that are older than `age`."""
        table = self._tables[role]
        moment = table.c.delivered_at if role == "outbox" else table.c.died_at
        old: list[ColumnElement[bool]] = [moment < later(sa.literal(-age.total_seconds()))]
        if role == "outbox":
            old.append(self._layout.counts.delivered(table.c))
        query = sa.select(table.c.seq, table.c.key).where(self._mine(table), *old)
        if dry_run:
            return db.execute(sa.select(sa.func.count()).select_from(query.subquery())).scalar_one()
        rows = db.execute(query.order_by(moment).limit(batch).with_for_update(skip_locked=True)).all()
        if rows:
            db.execute(sa.delete(table).where(table.c.seq.in_([row.seq for row in rows])))
            if role == "dead":
                self._t.unblock(db, {row.key for row in rows if row.key is not None})
        return len(rows)

    def record(self, db: sa.Connection, actor: str, action: str, detail: Any, events: int) -> None:
        """Write a line into the audit table."""
        db.execute(
            sa.insert(self._tables["audit"]).values(
                at=now(), actor=actor[:255], action=action, detail=detail, events=events
            )
        )

    def entries(self, db: sa.Connection, limit: int) -> list[Entry]:
        audit = self._tables["audit"]
        rows = db.execute(sa.select(audit).order_by(audit.c.number.desc()).limit(limit))
        return [Entry(row.at, row.actor, row.action, row.detail, row.events) for row in rows]

    # -- one action each --------------------------------------------------------------------------------------------

    def _redrive(self, db: sa.Connection, rows: Sequence[int]) -> None:
        dead, outbox = self._tables["dead"], self._tables["outbox"]
        chosen = dead.c.seq.in_(rows)
        fresh = self._layout.redrive.values(dead.c, None)
        columns = [column.name for column in outbox.c if column.name in dead.c or column.name in fresh]
        # Events that others of their key have overtaken are late, and say so.
        self._mark_late(db, dead, chosen & sa.not_(dead.c.parks) & dead.c.key.is_not(None))
        source = sa.select(*(_value(fresh, dead, name) for name in columns)).where(chosen).order_by(dead.c.seq)
        db.execute(sa.insert(outbox).from_select(columns, source))
        db.execute(sa.delete(dead).where(chosen))

    def _drop(self, db: sa.Connection, rows: Sequence[int]) -> None:
        dead = self._tables["dead"]
        db.execute(sa.delete(dead).where(dead.c.seq.in_(rows)))

    def _replay(self, db: sa.Connection, rows: Sequence[int]) -> None:
        outbox = self._tables["outbox"]
        chosen = outbox.c.seq.in_(rows)
        self._mark_late(db, outbox, chosen)
        db.execute(sa.update(outbox).where(chosen).values(self._layout.replay.values(outbox.c, None)))

    def _mark_late(self, db: sa.Connection, table: sa.Table, chosen: ColumnElement[bool]) -> None:
        found = db.execute(sa.select(table.c.seq, _raw(table.c.headers)).where(chosen)).all()
        late = [{"late_seq": seq, "late_headers": _late_headers(headers)} for seq, headers in found]
        late = [each for each in late if each["late_headers"] is not None]
        if late:
            change = sa.update(table).where(table.c.seq == sa.bindparam("late_seq", type_=sa.BigInteger))
            db.execute(change.values(headers=sa.bindparam("late_headers")), late)

    # -- conditions -------------------------------------------------------------------------------------------------

    def _mine(self, table: sa.Table) -> ColumnElement[bool]:
        return table.c[self._layout.sink] == self._t.sink

    def _is_live(self, dead: sa.Table) -> ColumnElement[bool]:
        outbox = self._tables["outbox"].alias()
        return (
            sa.exists()
            .where(
                outbox.c.sink == dead.c.sink,
                (outbox.c.id == dead.c.id) | (outbox.c.dedup_key == dead.c.dedup_key),
            )
            .correlate(dead)
        )

    def _conditions(self, table: sa.Table, where: Filter, role: str) -> list[ColumnElement[bool]]:
        conditions: list[ColumnElement[bool]] = []
        if where.ids:
            conditions.append(table.c.id.in_(where.ids))
        for name in ("key", "topic", "type"):
            value = getattr(where, name)
            if value is not None:
                conditions.append(table.c[name] == value)
        if where.error is not None:
            # Not LIKE, which on SQLite does not tell capitals.
            find = sa.func.strpos if self._t.dialect == "postgresql" else sa.func.instr
            conditions.append(find(table.c.error, where.error) > 0)
        moment = table.c.died_at if role == "dead" else sa.func.coalesce(table.c.delivered_at, table.c.created_at)
        if where.since is not None:
            conditions.append(moment >= where.since)
        if where.until is not None:
            conditions.append(moment < where.until)
        return conditions

    def _list(self, db: sa.Connection, role: str, where: Filter, state: State | None, limit: int) -> list[Record]:
        table, fields = self._tables[role], self._layout.fields
        # In the shape of a pick: a row that does not make an event is shown as far as it can be read.
        event = [_raw(table.c[fields[name]]) if name in fields else sa.null() for name in EVENT_FIELDS]
        own = ("died_at", "parks") if role == "dead" else ("state", "until_at", "delivered_at")
        query = sa.select(
            *(table.c.seq, sa.null(), sa.null(), sa.null(), table.c.seq, table.c.attempts),
            *(column.label(f"field_{number}") for number, column in enumerate(event)),
            *(table.c.error, *(table.c[name] for name in own)),
        ).where(self._mine(table), *self._conditions(table, where, role))
        if state is not None:
            query = query.where(table.c.state == sa.literal_column(str(STATES.index(state))))
        rows = db.execute(query.order_by(table.c.seq.desc()).limit(limit)).all()
        return [self._record(row, role) for row in rows]

    def _record(self, row: Any, role: str) -> Record:
        event = self._loader.load(row[: FIRST_FIELD + len(EVENT_FIELDS)]).event
        common = {"event": event, "seq": row[0], "attempts": row.attempts, "error": row.error}
        if role == "dead":
            return Record(**common, state="dead", died_at=row.died_at, parks=row.parks)
        return Record(**common, state=STATES[row.state], until_at=row.until_at, delivered_at=row.delivered_at)


STATES: tuple[State, ...] = ("ready", "leased", "waiting", "blocked", "scheduled", "delivered")


def _raw(column: Any) -> ColumnElement[Any]:
    # Without its type: one value that does not decode must not spoil the others.
    return sa.type_coerce(column, sa.types.NullType())


def _one_of_each(rows: Sequence[Any]) -> list[Any]:
    """The oldest of the rows that share an id or a dedup key: only one of them can live."""
    taken: set[Any] = set()
    chosen: list[Any] = []
    for row in rows:
        names = {str(row.id), ("dedup", row.dedup_key)} - {("dedup", None)}
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
