"""Pick: read the candidates of latched lanes, judge them, lock those that passed, and load them as claims.

Each row of a pick is (row, key, is_blocked, lane, locked row or None, attempts, event fields …), in order. The
judgements are scalar sub-selects with LIMIT 1: a planner cannot turn those into a scan of the whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from types import MappingProxyType
from typing import Any
from uuid import UUID, SafeUUID

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.sql.elements import ColumnElement

from pillarbox.codec import decode_json
from pillarbox.event import BYTES, EVENT_FIELDS, NO_HEADERS, Claim, Event, compile_loader, load_event
from pillarbox.layouts.layout import Layout
from pillarbox.stores.dialect import is_mysql
from pillarbox.stores.hot import Hot

Pick = Callable[[sa.Connection, Sequence[int], int, int], Sequence[Any]]
FIRST_FIELD = 6


def build_pick(layout: Layout, tables: Mapping[str, sa.Table], *, dialect: str, sink: str) -> Pick:
    """The pick for a database: `pick(connection, lanes, rows a lane, rows in all)`."""
    if dialect == "postgresql":
        return _build_postgres(layout, tables, sink)
    return _build_mysql(layout, tables, sink) if is_mysql(dialect) else _build_sqlite(layout, tables, sink)


def raw_fields(layout: Layout, table: Any) -> list[ColumnElement[Any]]:
    # Raw values: one that does not decode must spoil its own row only.
    return [
        sa.type_coerce(table.c[layout.fields[name]], sa.types.NullType()).label(f"field_{name}")
        if name in layout.fields
        else sa.null().label(f"field_{name}")
        for name in EVENT_FIELDS
    ]


def _is_blocked(layout: Layout, tables: Mapping[str, sa.Table], sink: str, row: Any, key: Any) -> ColumnElement[bool]:
    order = layout.order

    def first(name: str, condition: Any, *, earlier: bool) -> Any:
        table = tables[name].alias()
        query: sa.Select[Any] = sa.select(sa.literal_column("1")).where(
            table.c[layout.sink] == sink, table.c[order.key] == key, condition(table.c)
        )
        if earlier:
            query = query.where(table.c[layout.row] < row)
        return query.limit(1).scalar_subquery()

    found = sa.func.coalesce(
        first("outbox", order.in_flight, earlier=False),
        first("outbox", order.blocking, earlier=True),
        first("dead", order.parking, earlier=True),
    )
    return sa.case((key.is_(None), sa.false()), else_=found.is_not(None))


def _build_postgres(layout: Layout, tables: Mapping[str, sa.Table], sink: str) -> Pick:
    outbox = tables["outbox"]
    row, key, lane = outbox.c[layout.row], outbox.c[layout.order.key], outbox.c[layout.lane]
    lanes = (
        sa.func.unnest(sa.bindparam("lanes", type_=postgresql.ARRAY(sa.SmallInteger)))
        .table_valued(sa.column("lane", sa.SmallInteger), name="latched")
        .render_derived()
    )
    head = (
        sa.select(row.label("row"), key.label("key"), lane.label("lane"))
        .where(outbox.c[layout.sink] == sink, lane == lanes.c.lane, layout.ready(outbox.c))
        .order_by(row)
        .limit(sa.bindparam("depth", type_=sa.Integer))
        .lateral("head")
    )
    candidates = (
        sa.select(head.c.row, head.c.key, head.c.lane)
        .select_from(lanes.join(head, sa.true()))
        .order_by(head.c.row)
        .limit(sa.bindparam("limit", type_=sa.Integer))
        .cte("candidates")
        .prefix_with("MATERIALIZED")
    )
    blocked = _is_blocked(layout, tables, sink, candidates.c.row, candidates.c.key)
    judged = (
        sa.select(candidates.c.row, candidates.c.key, candidates.c.lane, blocked.label("is_blocked"))
        .cte("judged")
        .prefix_with("MATERIALIZED")
    )
    passed = sa.select(judged.c.row).where(sa.not_(judged.c.is_blocked)).scalar_subquery()
    # By an array of row numbers alone: with stale statistics a condition on the state would tempt the planner to read
    # all ready rows. Whether the row is still ready is looked at after it is locked.
    locked = (
        sa.select(
            row.label("row"),
            outbox.c[layout.attempts].label("attempts"),
            *raw_fields(layout, outbox),
            layout.ready(outbox.c).label("is_ready"),
        )
        .where(row == sa.any_(sa.func.array(passed, type_=postgresql.ARRAY(sa.BigInteger))))
        .with_for_update(skip_locked=True)
        .subquery("locked")
    )
    # In the list of columns, where the planner cannot push it down into the locking part.
    taken = sa.case((locked.c.is_ready, locked.c.row)).label("taken")
    query = (
        sa.select(judged.c.row, judged.c.key, judged.c.is_blocked, judged.c.lane, taken, *list(locked.c)[1:-1])
        .select_from(judged.outerjoin(locked, judged.c.row == locked.c.row))
        .order_by(judged.c.row)
    )

    statement = Hot(query)

    def pick(db: sa.Connection, lanes: Sequence[int], depth: int, limit: int) -> Sequence[Any]:
        return statement.fetch(db, {"lanes": list(lanes), "depth": depth, "limit": limit})

    return pick


def _heads(layout: Layout, outbox: sa.Table, sink: str, columns: Sequence[Any], count: int) -> sa.CompoundSelect[Any]:
    """The first rows of each lane. Neither MariaDB nor SQLite has LATERAL: one branch a lane."""

    def head(number: int) -> sa.Select[Any]:
        lane = outbox.c[layout.lane] == sa.bindparam(f"lane_{number}")
        query = sa.select(*columns).where(outbox.c[layout.sink] == sink, lane, layout.ready(outbox.c))
        first = query.order_by(outbox.c[layout.row]).limit(sa.bindparam("depth"))
        return sa.select(first.subquery(f"head_{number}"))

    return sa.union_all(*(head(number) for number in range(count)))


def _build_mysql(layout: Layout, tables: Mapping[str, sa.Table], sink: str) -> Pick:
    outbox = tables["outbox"]
    row, key, lane = outbox.c[layout.row], outbox.c[layout.order.key], outbox.c[layout.lane]
    columns = [row.label("row"), key.label("key"), lane.label("lane")]
    statements: dict[int, Hot] = {}

    def judge(count: int) -> Hot:
        heads = _heads(layout, outbox, sink, columns, count).subquery("heads")
        ordered = sa.select(heads.c.row, heads.c.key, heads.c.lane).order_by(heads.c.row)
        found = ordered.limit(sa.bindparam("limit")).subquery("candidates").c
        blocked = _is_blocked(layout, tables, sink, found.row, found.key).label("is_blocked")
        return Hot(sa.select(found.row, found.key, blocked, found.lane).order_by(found.row))

    fields = [row, outbox.c[layout.attempts], *raw_fields(layout, outbox)]
    wanted = sa.select(*fields).where(row.in_(sa.bindparam("rows", expanding=True)), layout.ready(outbox.c))
    for name in ("mysql", "mariadb"):
        wanted = wanted.with_hint(outbox, "FORCE INDEX (PRIMARY)", name)
    wanted = wanted.with_for_update(skip_locked=True)
    nothing = (None,) * len(fields)

    def pick(db: sa.Connection, lanes: Sequence[int], depth: int, limit: int) -> Sequence[Any]:
        count = len(lanes)
        if count not in statements:
            statements[count] = judge(count)
        candidates = statements[count].fetch(db, _lane_params(lanes, depth, limit))
        passed = [found[0] for found in candidates if not found[2]]
        locked = {found[0]: found for found in db.execute(wanted, {"rows": passed})} if passed else {}
        return [(*found, *locked.get(found[0], nothing)) for found in candidates]

    return pick


def _build_sqlite(layout: Layout, tables: Mapping[str, sa.Table], sink: str) -> Pick:
    """One statement without locks: the writer is alone."""
    outbox = tables["outbox"]
    row, key = outbox.c[layout.row], outbox.c[layout.order.key]
    columns = [row.label("row"), outbox.c[layout.lane].label("lane")]
    statements: dict[int, Hot] = {}

    def build(count: int) -> Hot:
        # Materialized, or SQLite merges the branches pair by pair to have them in order.
        heads = _heads(layout, outbox, sink, columns, count).cte("heads").prefix_with("MATERIALIZED")
        ordered = sa.select(heads.c.row, heads.c.lane).order_by(heads.c.row)
        found = ordered.limit(sa.bindparam("limit")).subquery("candidates")
        blocked = _is_blocked(layout, tables, sink, found.c.row, key)
        fields = [row, outbox.c[layout.attempts], *raw_fields(layout, outbox)]
        query = sa.select(found.c.row, key.label("key"), blocked.label("is_blocked"), found.c.lane, *fields)
        return Hot(query.join_from(found, outbox, row == found.c.row))

    def pick(db: sa.Connection, lanes: Sequence[int], depth: int, limit: int) -> Sequence[Any]:
        count = len(lanes)
        if count not in statements:
            statements[count] = build(count)
        found = statements[count].fetch(db, _lane_params(lanes, depth, limit))
        return sorted(found, key=itemgetter(0))

    return pick


def _lane_params(lanes: Sequence[int], depth: int, limit: int) -> dict[str, int]:
    return {**{f"lane_{number}": lane for number, lane in enumerate(lanes)}, "depth": depth, "limit": limit}


def _decode_headers(value: Any) -> Mapping[str, Any]:
    headers = decode_json(value) if isinstance(value, str | bytes) else value
    if not headers:
        return NO_HEADERS
    if not isinstance(headers, dict):
        raise ValueError(f"headers are not a JSON object: {value!r}")
    return MappingProxyType(headers)


def _decode_time(value: Any) -> datetime:
    if isinstance(value, str):  # SQLite
        return datetime.fromisoformat(value + "+00:00")
    moment: datetime = value
    return moment.replace(tzinfo=UTC)


_set_int = UUID.__dict__["int"].__set__
_set_is_safe = UUID.__dict__["is_safe"].__set__


def _plain_uuid(value: UUID) -> UUID:
    # asyncpg has a class of its own, which encoders and pickles of the standard one do not know.
    if type(value) is UUID:
        return value
    # The constructor would check a number that another UUID vouches for, which costs as much as the rest of the event.
    plain = object.__new__(UUID)
    _set_int(plain, value.int)
    _set_is_safe(plain, SafeUUID.unknown)
    return plain


UNREADABLE = (ValueError, TypeError, AttributeError)


class EventLoader:
    """Makes events from rows whose raw event fields start at an offset."""

    def __init__(self, dialect: str, offset: int) -> None:
        decoders: dict[str, Callable[[Any], Any]] = {"headers": _decode_headers, "id": _plain_uuid}
        if dialect != "postgresql":
            decoders |= {"id": UUID, "due_at": _decode_time, "created_at": _decode_time}
        self.read = compile_loader(offset=offset, decoders=decoders)
        self._offset = offset

    def load(self, row: Sequence[Any]) -> tuple[Event, str | None]:
        """The event, or what can be read of it and why that is not all."""
        try:
            return self.read(row), None
        except UNREADABLE as error:
            return load_event(*_salvage(row[self._offset :])), str(error)


class ClaimLoader:
    """Makes claims from the rows of a pick."""

    def __init__(self, dialect: str) -> None:
        self._events = EventLoader(dialect, FIRST_FIELD)
        self._read = self._events.read

    def load(self, row: Sequence[Any]) -> Claim:
        """A claim for a picked row; a row that does not decode makes a claim that says so."""
        try:
            return Claim(row[4], self._read(row), row[5] + 1)
        except UNREADABLE:
            event, defect = self._events.load(row)
            return Claim(row[4], event, row[5] + 1, defect=f"Row {row[4]}: {defect}")


def _salvage(values: Sequence[Any]) -> list[Any]:
    good = dict(zip(EVENT_FIELDS, values, strict=True))
    return [
        *(UUID(int=0), str(good["type"]), str(good["topic"]), good["key"], bytes(good["payload"] or b""), BYTES),
        *(NO_HEADERS, *(None for _ in EVENT_FIELDS[7:])),
    ]
