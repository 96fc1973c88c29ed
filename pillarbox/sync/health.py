"""How a queue is doing: what waits, what holds it up, what died. Read-only, and cheap however much waits."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from pillarbox.sync.queues import QueueRef, Shape, describe_failure, look, read_shape
from pillarbox.sync.state import QueueState, find_missing, parse_time, read_state
from pillarbox.sync.tables import DEAD, LOG, QUEUE

State = Literal["ok", "empty", "retrying", "blocked", "dead", "gap", "foreign", "unreadable", "missing"]

RETRY_COLUMNS: Final = ("attempts", "last_attempt_at", "last_error", "last_error_class")
"""What release 0.6 keeps in the queue itself."""


@dataclass(frozen=True, slots=True)
class QueueHealth:
    """What an operator sees of a queue.

    `state`: "ok" rows wait for their turn; "empty"; "retrying" the head failed and is tried again at `due_at`;
    "blocked" no row is to blame, but nothing could be sent when the service last tried, because the target was down or
    not ready for it; "dead" the head was given up and the table waits behind it; "gap" the row before the head is lost;
    "foreign", "unreadable", "missing" the file is no queue, cannot be read, is not there. `error` says why.
    `dead` counts the dead log. `size` is that of the file and what SQLite has not yet written into it.
    """

    target: str
    table: str
    path: Path
    namespace: str
    state: State
    waiting: int = 0
    oldest_at: datetime | None = None
    head: int | None = None
    attempts: int = 0
    tried_at: datetime | None = None
    due_at: datetime | None = None
    error: str | None = None
    error_class: str | None = None
    dead: int = 0
    settled: int = 0
    max_pending: int | None = None
    size: int = 0

    @property
    def age(self) -> timedelta | None:
        """How long the oldest row has waited."""
        return None if self.oldest_at is None else max(timedelta(0), datetime.now(UTC) - self.oldest_at)

    @property
    def capacity(self) -> float | None:
        """How full the queue is, in percent of its cap; None without one."""
        return None if not self.max_pending else round(100 * self.waiting / self.max_pending, 1)


@dataclass(frozen=True, slots=True)
class WaitingRow:
    """A waiting row, and what is known of its tries, by us or by release 0.6."""

    seq: int
    prev_seq: int | None
    created_at: datetime | None
    attempts: int
    tried_at: datetime | None
    error: str | None
    error_class: str | None


def read_health(ref: QueueRef) -> QueueHealth:
    """Look at one queue; whatever is wrong with its file is in the answer."""
    nothing = QueueHealth(ref.target, ref.table, ref.path, ref.namespace, "missing", max_pending=ref.max_pending)
    if not ref.path.exists():
        return nothing
    nothing = replace(nothing, size=_measure(ref.path))
    try:
        return look(ref.path, partial(_read, nothing, ref))
    except sqlite3.Error as error:
        return replace(nothing, state="unreadable", error=describe_failure(ref.path, error))


def _read(nothing: QueueHealth, ref: QueueRef, db: sqlite3.Connection) -> QueueHealth:
    shape = read_shape(db, is_application_file=ref.is_application_file)
    if ref.is_unused(shape):
        return nothing
    problem = shape.describe_problem(nothing.path)
    if problem is not None:
        return replace(nothing, state="unreadable" if shape.is_newer else "foreign", error=problem)
    namespace = nothing.namespace
    state = read_state(db, namespace)
    head = read_row(db, namespace, shape=shape, state=state)
    (waiting,) = db.execute(f"SELECT count(*) FROM {QUEUE} WHERE namespace = ? AND synced = 0", (namespace,)).fetchone()
    found = replace(
        nothing,
        waiting=waiting,
        dead=count_rows(db, shape, DEAD, namespace),
        settled=0 if state is None else state.settled,
    )
    if head is None:
        # Nothing is held up, but what is pushed next would be.
        return replace(found, state="empty", error=None if state is None else state.outage)
    return _describe_head(db, found, head, shape, state)


def _describe_head(
    db: sqlite3.Connection, found: QueueHealth, head: WaitingRow, shape: Shape, state: QueueState | None
) -> QueueHealth:
    found = replace(
        found,
        oldest_at=head.created_at,
        head=head.seq,
        attempts=head.attempts,
        tried_at=head.tried_at,
        error=head.error,
        error_class=head.error_class,
    )
    if is_lost(db, shape, head.prev_seq, settled=found.settled):
        lost = f"Row {head.prev_seq}, the one before row {head.seq}, is lost."
        return replace(found, state="gap", error=lost, error_class=None)
    failed = state if state is not None and state.head == head.seq else None
    if failed is not None and failed.dead_at is not None:
        return replace(found, state="dead")
    found = replace(found, due_at=None if failed is None else failed.due_at)
    if state is not None and state.outage is not None:
        return replace(found, state="blocked", error=state.outage, error_class=None)
    if head.attempts:
        return replace(found, state="retrying")
    return replace(found, state="ok")


def read_row(
    db: sqlite3.Connection, namespace: str, *, shape: Shape, state: QueueState | None, seq: int | None = None
) -> WaitingRow | None:
    """A waiting row, the first unless another is named; its tries as we noted them, or else as release 0.6 did."""
    tries = ", ".join(RETRY_COLUMNS) if shape.has(QUEUE, *RETRY_COLUMNS) else "0, NULL, NULL, NULL"
    row: Any = db.execute(
        f"SELECT seq, prev_seq, created_at, {tries} FROM {QUEUE} "
        "WHERE namespace = ? AND synced = 0 AND seq >= ? ORDER BY seq LIMIT 1",
        (namespace, seq or 0),
    ).fetchone()
    if row is None or (seq is not None and row[0] != seq):
        return None
    number, prev, created, attempts, tried, error, error_class = row
    if state is not None and state.head == number:
        known = (state.attempts, state.tried_at, state.error, state.error_class)
    else:
        known = (attempts, parse_time(tried), error, error_class)
    return WaitingRow(number, prev, parse_time(created), *known)


def is_lost(db: sqlite3.Connection, shape: Shape, seq: int | None, *, settled: int) -> bool:
    """Whether a row that another one names as its predecessor is nowhere."""
    if seq is None:
        return False
    if not shape.has(LOG):
        # A file that was never drained: only the queue can have it.
        return db.execute(f"SELECT 1 FROM {QUEUE} WHERE seq = ?", (seq,)).fetchone() is None
    return bool(find_missing(db, [seq], settled=settled))


def count_rows(db: sqlite3.Connection, shape: Shape, table: str, namespace: str) -> int:
    """How many rows of a namespace a table has; none when it is not there."""
    if not shape.has(table):
        return 0
    (count,) = db.execute(f"SELECT count(*) FROM {table} WHERE namespace = ?", (namespace,)).fetchone()
    return int(count)


def _measure(path: Path) -> int:
    parts = (path, path.with_name(f"{path.name}-wal"))
    sizes = []
    for part in parts:
        try:
            sizes.append(part.stat().st_size)
        except OSError:
            continue
    return sum(sizes)
