"""Whose inbox it is: consumers drive its queue, where a row does not say for whom it is, so it has one group.

Messages that applications take themselves are kept apart by their group; omni-box's rows are, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import sqlalchemy as sa

from pillarbox.errors import ConfigError
from pillarbox.inbox.inbox import Inbox
from pillarbox.inbox.message import GROUP_HEADER

_LOOKED_AT: Final = 1000


def check_alone(inbox: Inbox, db: sa.Connection, group: str) -> None:
    """Refuse an inbox of ours that has messages of another group, or the first rows of whose queue are another's."""
    check_taken(inbox, db, group)
    if not inbox.is_own or inbox.queue is None:
        return
    for table in (inbox.queue.table, inbox.queue.tables["dead"]):
        rows = db.execute(sa.select(table.c.headers).order_by(table.c.seq).limit(_LOOKED_AT))
        check_queued(inbox, rows, group)


def check_taken(inbox: Inbox, db: sa.Connection, group: str) -> None:
    """Refuse an inbox of ours that has messages of another group; quick enough for every batch."""
    if not inbox.is_own:
        return
    taken = inbox.table.c.consumer_group
    # Each for itself: SQLite looks into an index for one of them, and for both together reads the whole table.
    ends = sa.select(*(sa.select(end(taken)).scalar_subquery() for end in (sa.func.min, sa.func.max)))
    for other in db.execute(ends).one():
        if other not in (None, group):
            raise ConfigError(_explain(inbox, f"it has messages of group {other!r}", group))


def check_queued(inbox: Inbox, rows: Iterable[Any], group: str) -> None:
    """Refuse rows of the queue that say by their headers that they are another group's."""
    for row in rows:
        other = (row.headers or {}).get(GROUP_HEADER, group)
        if other != group:
            queue = inbox.need_queue().table.fullname
            raise ConfigError(_explain(inbox, f"its queue {queue!r} has messages of group {other!r}", group))


def _explain(inbox: Inbox, found: str, group: str) -> str:
    return (
        f"Inbox {inbox.table.fullname!r}: {found}; consumers of group {group!r} need an inbox of their own. Declare "
        "one: Inbox(…, table=…), or `--table` and `pillarbox schema create`."
    )
