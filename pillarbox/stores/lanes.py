"""Lanes: the latches for claiming.

A lane is a row of the lane table, and a key belongs to one lane. Whoever claims locks some lanes first, skipping those
that others have locked, so that no two claims ever look at the same key at the same time. Several lanes are latched in
one statement: one by one, claims would be an order of magnitude slower.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from pillarbox.layouts.layout import Layout
from pillarbox.stores.dialect import is_mysql
from pillarbox.stores.hot import Hot


@dataclass
class LaneShare:
    """How many lanes to latch: grows while lanes are free, halves when others hold them.

    Starting at half of the lanes leaves room for a second relay at once; `depth` is how many rows to read from each
    lane, and follows the backlog's shape: a few hot lanes want many rows each, many even lanes want few.
    """

    lanes: int
    wanted: int = field(init=False)
    depth: int = 0

    def __post_init__(self) -> None:
        self.wanted = max(1, self.lanes // 2)

    def latched(self, got: int, wanted: int) -> None:
        if got < wanted:
            self.wanted = max(4, got, self.wanted // 2)
        else:
            self.wanted = min(max(4, self.lanes // 2), self.wanted + 1)

    def rows_per_lane(self, limit: int, lanes: int) -> int:
        # A quarter more than an even share: lanes are never quite even.
        return min(limit, max(self.depth, -(-5 * limit // (4 * lanes))))

    def picked(self, limit: int, rows: Sequence[Any], depth: int) -> bool:
        """Learn from a pick; returns whether more rows are waiting."""
        if len(rows) >= limit:
            self.depth //= 2
            return True
        deepest = max(Counter(row[3] for row in rows).values(), default=0)
        if deepest >= depth:
            self.depth = min(limit, depth * 2)
            return True
        return False


Latch = Callable[[sa.Connection, LaneShare, Collection[int]], list[int]]


def build_latch(layout: Layout, tables: Mapping[str, sa.Table], *, dialect: str, sink: str) -> Latch:
    """The latch for a database: `latch(connection, share, busy)` returns the lanes it got, which all have work."""
    outbox, lanes = tables["outbox"], tables["lanes"]
    work = (
        sa.select(outbox.c[layout.row])
        .where(outbox.c[layout.keyed.sink] == sink, layout.ready(outbox.c), outbox.c[layout.keyed.lane] == lanes.c.lane)
        .limit(1)
        .scalar_subquery()
        .correlate(lanes)
    )
    with_work = sa.select(lanes.c.lane).where(lanes.c.sink == sink, work.is_not(None))
    if dialect == "postgresql":
        return _latch_in_one(with_work, lanes)
    if is_mysql(dialect):
        return _latch_in_two(with_work, lanes, sink)
    found = Hot(with_work)
    # SQLite's write lock is the latch, for all lanes at once.
    return lambda db, share, busy: list(found.execute(db, {}).scalars())


def _latch_in_one(with_work: sa.Select[Any], lanes: sa.Table) -> Latch:
    is_busy = lanes.c.lane == sa.any_(sa.bindparam("busy", type_=postgresql.ARRAY(sa.SmallInteger)))
    ordered = with_work.order_by(is_busy, sa.func.random()).limit(sa.bindparam("wanted"))
    statement = Hot(ordered.with_for_update(skip_locked=True))

    def latch(db: sa.Connection, share: LaneShare, busy: Collection[int]) -> list[int]:
        wanted = share.wanted
        got = list(statement.execute(db, {"wanted": wanted, "busy": list(busy)}).scalars())
        # Fewer than wanted: others hold lanes, or few lanes have work; a smaller share is right for both.
        share.latched(len(got), wanted)
        return got

    return latch


def _latch_in_two(with_work: sa.Select[Any], lanes: sa.Table, sink: str) -> Latch:
    # MySQL and MariaDB lock every row that they sort: choose first, then lock what was chosen.
    found = Hot(with_work)
    chosen = lanes.c.lane.in_(sa.bindparam("lanes", expanding=True))
    lock = sa.select(lanes.c.lane).where(lanes.c.sink == sink, chosen).with_for_update(skip_locked=True)

    def latch(db: sa.Connection, share: LaneShare, busy: Collection[int]) -> list[int]:
        offered = list(found.execute(db, {}).scalars())
        random.shuffle(offered)
        offered.sort(key=lambda lane: lane in busy)
        wanted = offered[: share.wanted]
        if not wanted:
            return []
        got = list(db.execute(lock, {"lanes": wanted}).scalars())
        share.latched(len(got), len(wanted))
        return got

    return latch
