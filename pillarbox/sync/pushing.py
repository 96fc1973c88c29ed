"""The statements that put rows into a queue and keep its chain: each row names the one before it in its namespace.

The newest row is found by the index, so a push costs the same however many rows wait. It is found by the statement
that inserts, so nobody can come between: in WAL mode and in any other a statement that writes reads the last commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, Final

from pillarbox.errors import QueueFull
from pillarbox.sync.state import now_text
from pillarbox.sync.tables import QUEUE

Item = tuple[str, str]
"""One statement and its encoded arguments."""


def _end(synced: int, direction: str) -> str:
    return f"(SELECT seq FROM main.{QUEUE} WHERE namespace = ?2 AND synced = {synced} ORDER BY seq {direction} LIMIT 1)"


_COLUMNS: Final = "created_at, namespace, source, tag, payload, prev_seq"
# Rows that sqloutbox marked as delivered and did not delete yet are part of the chain.
_NEWEST: Final = f"nullif(max(coalesce({_end(0, 'DESC')}, 0), coalesce({_end(1, 'DESC')}, 0)), 0)"
# Rows lie between the oldest and the newest number: they are counted only when that many could be too many.
_HAS_ROOM: Final = (
    f"coalesce({_end(0, 'DESC')} - {_end(0, 'ASC')} + 1, 0) + ?7 <= ?6"
    f" OR (SELECT count(*) FROM (SELECT 1 FROM main.{QUEUE} WHERE namespace = ?2 AND synced = 0 LIMIT ?6)) + ?7 <= ?6"
)

FIRST: Final = f"INSERT INTO main.{QUEUE} ({_COLUMNS}) VALUES (?1, ?2, ?3, ?4, ?5, {_NEWEST})"
FIRST_WITH_ROOM: Final = f"INSERT INTO main.{QUEUE} ({_COLUMNS}) SELECT ?1, ?2, ?3, ?4, ?5, {_NEWEST} WHERE {_HAS_ROOM}"
NEXT: Final = f"INSERT INTO main.{QUEUE} (seq, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)"


def next_rows(items: Sequence[Item], first: int, *, namespace: str, source: str) -> Iterator[tuple[Any, ...]]:
    """The rows behind the first of many: the write lock is held, so the numbers above it are free."""
    last = first + len(items) - 1
    sqls, payloads = zip(*items[1:], strict=True)
    return zip(
        range(first + 1, last + 1),
        repeat(now_text()),
        repeat(namespace),
        repeat(source),
        sqls,
        payloads,
        range(first, last),
    )


def insert_first(
    db: Any, sql: str, payload: str, *, namespace: str, source: str, cap: int | None, count: int = 1
) -> int:
    """Insert a row behind the newest one; raises `QueueFull` where `count` more would be above the cap."""
    given = (now_text(), namespace, source, sql, payload)
    if cap is None:
        return int(db.execute(FIRST, given).lastrowid)
    done = db.execute(FIRST_WITH_ROOM, (*given, cap, count))
    if done.rowcount != 1:
        raise QueueFull(
            f"Queue {namespace!r} may hold {cap} waiting statements and has no room for {count} more. Nothing was "
            "stored; wait until some were delivered, or raise max_waiting.",
            namespace=namespace,
            max_waiting=cap,
        )
    return int(done.lastrowid)


def insert_many(db: Any, items: Sequence[Item], *, namespace: str, source: str, cap: int | None) -> list[int]:
    """Insert rows behind the newest one, inside a transaction; returns their numbers."""
    count = len(items)
    first = insert_first(db, *items[0], namespace=namespace, source=source, cap=cap, count=count)
    if count > 1:
        # The first row took the write lock, so the numbers above its own are free.
        db.executemany(NEXT, next_rows(items, first, namespace=namespace, source=source))
    return list(range(first, first + count))
