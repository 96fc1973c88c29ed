"""Pick: read the candidates of latched lanes, judge them, lock those that passed, and load them as claims.

Each row of a pick is (row, key, is_blocked, lane, locked row or None, attempts, event fields …), in order. The
judgements are scalar sub-selects with LIMIT 1: a planner cannot turn those into a scan of the whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.sql.elements import ColumnElement

from pillarbox.layouts.layout import Front, Layout
from pillarbox.stores.dialect import is_mysql
from pillarbox.stores.fields import claimed_fields
from pillarbox.stores.hot import Hot

Pick = Callable[[sa.Connection, Sequence[int], int, int, int], Sequence[Any]]


def build_pick(layout: Layout, tables: Mapping[str, sa.Table], *, dialect: str, sink: str) -> Pick:
    """The pick for a database: `pick(connection, lanes, rows a lane, rows in all, bytes of a light payload)`."""
    if dialect == "postgresql":
        return _build_postgres(layout, tables, sink)
    return _build_mysql(layout, tables, sink) if is_mysql(dialect) else _build_sqlite(layout, tables, sink)


def _is_blocked(
    layout: Layout, tables: Mapping[str, sa.Table], sink: str, row: Any, key: Any, *, by_key: bool = False
) -> ColumnElement[bool]:
    """Whether a row waits behind another of its key.

    `by_key` asks for a range of one state, in order: to a planner that knows a table as empty all indexes are alike,
    and only that of keys saves it a sort. An order by a column that is equal to something would be no order to it.
    """
    order = layout.keyed

    def first(name: str, front: Front, *, earlier: bool) -> Any:
        table = tables[name].alias()
        is_before = table.c[layout.row] < row
        of_key: sa.Select[Any] = sa.select(sa.literal_column("1")).where(
            table.c[order.sink] == sink, table.c[order.key] == key
        )
        if not by_key:
            return of_key.where(front(table.c), *([is_before] if earlier else [])).limit(1).scalar_subquery()
        # As a CASE, so that no index is chosen for it.
        condition = [sa.case((is_before, sa.true()), else_=sa.false())] if earlier else []
        found = of_key.where(front.as_range(table.c), *condition)
        # The dead's index of keys ends with that column.
        wanted = [table.c[front.column], *([table.c[layout.row]] if name == "outbox" else [])]
        return found.order_by(*wanted).limit(1).scalar_subquery()

    found = sa.func.coalesce(
        first("outbox", order.in_flight, earlier=False),
        first("outbox", order.blocking, earlier=True),
        first("dead", order.parking, earlier=True),
    )
    return sa.case((key.is_(None), sa.false()), else_=found.is_not(None))


def _build_postgres(layout: Layout, tables: Mapping[str, sa.Table], sink: str) -> Pick:
    outbox = tables["outbox"]
    row, key, lane = outbox.c[layout.row], outbox.c[layout.keyed.key], outbox.c[layout.keyed.lane]
    lanes = (
        sa.func.unnest(sa.bindparam("lanes", type_=postgresql.ARRAY(sa.SmallInteger)))
        .table_valued(sa.column("lane", sa.SmallInteger), name="latched")
        .render_derived()
    )
    head = (
        sa.select(row.label("row"), key.label("key"), lane.label("lane"))
        .where(outbox.c[layout.keyed.sink] == sink, lane == lanes.c.lane, layout.ready(outbox.c))
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
    blocked = _is_blocked(layout, tables, sink, candidates.c.row, candidates.c.key, by_key=True)
    judged = (
        sa.select(candidates.c.row, candidates.c.key, candidates.c.lane, blocked.label("is_blocked"))
        .cte("judged")
        .prefix_with("MATERIALIZED")
    )
    passed = sa.select(judged.c.row).where(sa.not_(judged.c.is_blocked)).scalar_subquery()
    # By an array of row numbers alone: with stale statistics a condition on the state would tempt the planner to read
    # all ready rows. Whether the row is still ready is looked at after it is locked. Materialized and not joined with
    # the judged rows: a planner that expects a few of them would lock once for each.
    locked = (
        sa.select(
            *(row.label("row"), key.label("key"), lane.label("lane"), layout.ready(outbox.c).label("is_ready")),
            *(outbox.c.attempts.label("attempts"), *claimed_fields(layout, outbox)),
        )
        .where(row == sa.any_(sa.func.array(passed, type_=postgresql.ARRAY(sa.BigInteger))))
        .with_for_update(skip_locked=True)
        .cte("locked")
        .prefix_with("MATERIALIZED")
    )
    taken = sa.case((locked.c.is_ready, locked.c.row)).label("taken")
    got = sa.select(
        locked.c.row, locked.c.key, sa.false().label("is_blocked"), locked.c.lane, taken, *list(locked.c)[4:]
    )
    is_left = judged.c.is_blocked | judged.c.row.not_in(sa.select(locked.c.row))
    nothing = (sa.null() for _ in range(len(got.selected_columns) - 4))
    left = sa.select(judged.c.row, judged.c.key, judged.c.is_blocked, judged.c.lane, *nothing).where(is_left)
    query = sa.union_all(got, left).order_by("row")

    statement = Hot(query)

    def pick(db: sa.Connection, lanes: Sequence[int], depth: int, limit: int, light: int) -> Sequence[Any]:
        return statement.fetch(db, {"lanes": list(lanes), "depth": depth, "limit": limit, "light": light})

    return pick


def _heads(layout: Layout, outbox: sa.Table, sink: str, columns: Sequence[Any], count: int) -> sa.CompoundSelect[Any]:
    """The first rows of each lane. Neither MariaDB nor SQLite has LATERAL: one branch a lane."""

    def head(number: int) -> sa.Select[Any]:
        lane = outbox.c[layout.keyed.lane] == sa.bindparam(f"lane_{number}")
        query = sa.select(*columns).where(outbox.c[layout.keyed.sink] == sink, lane, layout.ready(outbox.c))
        first = query.order_by(outbox.c[layout.row]).limit(sa.bindparam("depth"))
        return sa.select(first.subquery(f"head_{number}"))

    return sa.union_all(*(head(number) for number in range(count)))


def _build_mysql(layout: Layout, tables: Mapping[str, sa.Table], sink: str) -> Pick:
    outbox = tables["outbox"]
    row, key, lane = outbox.c[layout.row], outbox.c[layout.keyed.key], outbox.c[layout.keyed.lane]
    columns = [row.label("row"), key.label("key"), lane.label("lane")]
    statements: dict[int, Hot] = {}

    def judge(count: int) -> Hot:
        heads = _heads(layout, outbox, sink, columns, count).subquery("heads")
        ordered = sa.select(heads.c.row, heads.c.key, heads.c.lane).order_by(heads.c.row)
        found = ordered.limit(sa.bindparam("limit")).subquery("candidates").c
        blocked = _is_blocked(layout, tables, sink, found.row, found.key).label("is_blocked")
        return Hot(sa.select(found.row, found.key, blocked, found.lane).order_by(found.row))

    fields = [row, outbox.c.attempts, *claimed_fields(layout, outbox)]
    wanted = sa.select(*fields).where(row.in_(sa.bindparam("rows", expanding=True)), layout.ready(outbox.c))
    for name in ("mysql", "mariadb"):
        wanted = wanted.with_hint(outbox, "FORCE INDEX (PRIMARY)", name)
    wanted = wanted.with_for_update(skip_locked=True)
    nothing = (None,) * len(fields)

    def pick(db: sa.Connection, lanes: Sequence[int], depth: int, limit: int, light: int) -> Sequence[Any]:
        count = len(lanes)
        if count not in statements:
            statements[count] = judge(count)
        candidates = statements[count].fetch(db, _lane_params(lanes, depth, limit))
        passed = [found[0] for found in candidates if not found[2]]
        locked = {found[0]: found for found in db.execute(wanted, {"rows": passed, "light": light})} if passed else {}
        return [(*found, *locked.get(found[0], nothing)) for found in candidates]

    return pick


def _build_sqlite(layout: Layout, tables: Mapping[str, sa.Table], sink: str) -> Pick:
    """One statement without locks: the writer is alone."""
    outbox = tables["outbox"]
    row, key = outbox.c[layout.row], outbox.c[layout.keyed.key]
    columns = [row.label("row"), outbox.c[layout.keyed.lane].label("lane")]
    statements: dict[int, Hot] = {}

    def build(count: int) -> Hot:
        # Materialized, or SQLite merges the branches pair by pair to have them in order.
        heads = _heads(layout, outbox, sink, columns, count).cte("heads").prefix_with("MATERIALIZED")
        ordered = sa.select(heads.c.row, heads.c.lane).order_by(heads.c.row)
        found = ordered.limit(sa.bindparam("limit")).subquery("candidates")
        blocked = _is_blocked(layout, tables, sink, found.c.row, key)
        fields = [row, outbox.c.attempts, *claimed_fields(layout, outbox)]
        query = sa.select(found.c.row, key.label("key"), blocked.label("is_blocked"), found.c.lane, *fields)
        return Hot(query.join_from(found, outbox, row == found.c.row))

    def pick(db: sa.Connection, lanes: Sequence[int], depth: int, limit: int, light: int) -> Sequence[Any]:
        count = len(lanes)
        if count not in statements:
            statements[count] = build(count)
        found = statements[count].fetch(db, {**_lane_params(lanes, depth, limit), "light": light})
        return sorted(found, key=itemgetter(0))

    return pick


def _lane_params(lanes: Sequence[int], depth: int, limit: int) -> dict[str, int]:
    return {**{f"lane_{number}": lane for number, lane in enumerate(lanes)}, "depth": depth, "limit": limit}
