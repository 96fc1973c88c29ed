"""Taking delivered rows that stayed in the outbox into the partitions of its history.

Rows stay there when their month had no partition as they were delivered, and when the outbox kept them itself before.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from pillarbox.errors import Unsupported
from pillarbox.layouts.layout import Layout
from pillarbox.schema.partitions import LOCK_TIMEOUT, find_partitioned, list_partitions, work_on


def gather_delivered(
    db: sa.Connection,
    layout: Layout,
    tables: Mapping[str, sa.Table],
    *,
    limit: int = 1000,
    lock_timeout: timedelta = LOCK_TIMEOUT,
) -> int:
    """Move at most `limit` rows for which there is a partition by now; return how many they were.

    Runs in the caller's transaction, which must be READ COMMITTED. Rows that others have locked are left for another
    time, so that any number of processes may do this at once.
    """
    if layout.history is None:
        raise Unsupported(f"Layout {layout.name!r}: it has no table of its own for delivered rows")
    history = tables[layout.history.role]
    move, moved = _build_move(layout, tables["outbox"], history), 0
    with work_on(db, history.fullname, lock_timeout):
        parent = find_partitioned(db, history.name, schema=history.schema)
        for partition in list_partitions(db, parent):
            if partition.since is not None and partition.until is not None and moved < limit:
                span = {"since": partition.since, "until": partition.until, "most": limit - moved}
                # Nobody needs the count of an INSERT, thinks SQLAlchemy.
                moved += db.execute(move, span, execution_options={"preserve_rowcount": True}).rowcount
    return moved


def _build_move(layout: Layout, outbox: sa.Table, history: sa.Table) -> Any:
    row, moment = outbox.c[layout.row], outbox.c[layout.delivered_at or ""]
    is_delivered = sa.true() if layout.counts.delivered is None else layout.counts.delivered(outbox.c)
    found = sa.select(row).where(
        is_delivered, moment >= sa.bindparam("since"), moment < sa.bindparam("until", type_=moment.type)
    )
    chosen = found.order_by(moment).limit(sa.bindparam("most")).with_for_update(skip_locked=True).scalar_subquery()
    names = [column.name for column in history.c if column.name in outbox.c]
    # As an array, which is read once: a join might look the rows up, and lock others, more than once.
    is_chosen = row == sa.any_(sa.func.array(chosen, type_=postgresql.ARRAY(row.type)))
    gone = sa.delete(outbox).where(is_chosen).returning(*(outbox.c[name] for name in names)).cte("gone")
    return sa.insert(history).from_select(names, sa.select(*gone.c))
