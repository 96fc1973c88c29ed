"""Rows that could not be delivered: the dead log, and the dead head behind which a table waits.

Replaying and skipping are one transaction each, so they may be done while programs push and the service sends. A row
that leaves its place always leaves its number in the sync log, which keeps the chain of the row behind it whole.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from pillarbox.errors import PillarboxError, SchemaError
from pillarbox.sync.arguments import decode_arguments
from pillarbox.sync.health import RETRY_COLUMNS, read_row
from pillarbox.sync.queues import QueueRef, Shape, describe_failure, edit, look, read_shape
from pillarbox.sync.state import (
    NO_HEAD,
    QueueState,
    bury,
    ensure_state,
    find_missing,
    log_number,
    now_text,
    parse_time,
    read_state,
    write_state,
)
from pillarbox.sync.tables import DEAD, LOG, QUEUE

MANUAL: Final = "manual_skip"
"""The reason of a row that an operator skipped, as release 0.6 writes it."""

_COLUMNS: Final = (
    "seq, tag, payload, prev_seq, source, attempts, last_error, last_error_class, dead_lettered_at, reason"
)


@dataclass(frozen=True, slots=True)
class DeadRow:
    """A row that was given up. A parked one is still the first of its queue, and the others wait behind it."""

    target: str
    table: str
    path: Path
    namespace: str
    seq: int
    sql: str
    payload: str
    prev_seq: int | None
    source: str
    attempts: int
    error: str | None
    error_class: str | None
    dead_at: datetime | None
    reason: str
    is_parked: bool = False

    @property
    def arguments(self) -> Any:
        """The statement's arguments, or their text if they cannot be read."""
        try:
            return decode_arguments(self.payload)
        except ValueError:
            return self.payload


@dataclass(frozen=True, slots=True)
class Replayed:
    """A row that is to be delivered after all: in its old place, or at the end of the queue with a new number."""

    seq: int
    new_seq: int

    @property
    def is_in_place(self) -> bool:
        return self.seq == self.new_seq


# -- looking -----------------------------------------------------------------------------------------------------------


def list_dead(ref: QueueRef) -> list[DeadRow]:
    """The parked head, if there is one, and the rows of the dead log, by number."""
    if not ref.path.exists():
        return []
    try:
        return look(ref.path, partial(_list, ref))
    except sqlite3.Error as error:
        raise PillarboxError(describe_failure(ref.path, error)) from error


def get_dead(ref: QueueRef, seq: int) -> DeadRow:
    """One dead row; it is an error when there is none with this number."""
    for row in list_dead(ref):
        if row.seq == seq:
            return row
    raise _unknown(ref, seq)


def _list(ref: QueueRef, db: sqlite3.Connection) -> list[DeadRow]:
    shape = read_shape(db, is_application_file=ref.is_application_file)
    if ref.is_unused(shape):
        return []
    problem = shape.describe_problem(ref.path)
    if problem is not None:
        if shape.is_foreign and not ref.is_expected:
            return []
        raise SchemaError(problem)
    rows = [] if not shape.has(DEAD) else [_load(ref, row) for row in _read_log(db, ref.namespace)]
    parked = _read_parked(ref, db, read_state(db, ref.namespace))
    return sorted([*parked, *rows], key=lambda row: row.seq)


def _read_log(db: sqlite3.Connection, namespace: str, seq: int | None = None) -> list[Any]:
    one = "" if seq is None else "AND seq = ?"
    given = (namespace,) if seq is None else (namespace, seq)
    return db.execute(f"SELECT {_COLUMNS} FROM {DEAD} WHERE namespace = ? {one} ORDER BY seq", given).fetchall()


def _load(ref: QueueRef, row: Sequence[Any]) -> DeadRow:
    seq, sql, payload, prev, source, attempts, error, error_class, died, reason = row
    facts = (seq, sql, payload, prev, source or "", attempts, error, error_class, parse_time(died), reason)
    return DeadRow(ref.target, ref.table, ref.path, ref.namespace, *facts)


def _read_parked(ref: QueueRef, db: sqlite3.Connection, state: QueueState | None) -> list[DeadRow]:
    if state is None or state.dead_at is None:
        return []
    row = db.execute(
        f"SELECT seq, tag, payload, prev_seq, source FROM {QUEUE} WHERE namespace = ? AND seq = ? AND synced = 0",
        (ref.namespace, state.head),
    ).fetchone()
    if row is None:
        return []
    tries = (state.attempts, state.error, state.error_class, state.dead_at.isoformat(), "parked")
    return [replace(_load(ref, (*row, *tries)), is_parked=True)]


def _unknown(ref: QueueRef, seq: int) -> PillarboxError:
    return PillarboxError(
        f"Row {seq} of queue {str(ref)!r} is not dead: it is neither in the dead log nor a head that the queue waits "
        "behind. `pillarbox sync dead list` has those that are."
    )


# -- replaying ---------------------------------------------------------------------------------------------------------


def replay(ref: QueueRef, seq: int) -> Replayed:
    """Have a row delivered after all.

    The head that its queue waits behind, dead or between two tries, is due now, in its place, with all its attempts. A
    row of the dead log goes to the end of the queue, with a new number, and out of the dead log.
    """
    with edit(ref) as db:
        shape = read_shape(db)
        state = read_state(db, ref.namespace)
        if state is not None and state.head == seq and _is_waiting(db, ref.namespace, seq):
            return _replay_head(db, ref, seq, shape)
        found = _read_log(db, ref.namespace, seq) if shape.has(DEAD) else []
        if not found:
            raise _unknown(ref, seq)
        return _replay_row(db, _load(ref, found[0]))


def replay_all(ref: QueueRef) -> list[Replayed]:
    """Have all dead rows of a queue delivered after all, those of the dead log in the order of their numbers."""
    if not list_dead(ref):
        return []
    with edit(ref) as db:
        shape = read_shape(db)
        parked = _read_parked(ref, db, read_state(db, ref.namespace))
        done = [_replay_head(db, ref, row.seq, shape) for row in parked]
        rows = _read_log(db, ref.namespace) if shape.has(DEAD) else []
        return done + [_replay_row(db, _load(ref, row)) for row in rows]


def _replay_head(db: sqlite3.Connection, ref: QueueRef, seq: int, shape: Shape) -> Replayed:
    # Not the error: what was wrong is still worth seeing until the next try.
    write_state(db, ref.namespace, attempts=0, due_at=None, dead_at=None)
    if shape.has(QUEUE, *RETRY_COLUMNS):
        db.execute(f"UPDATE {QUEUE} SET attempts = 0, last_attempt_at = NULL WHERE seq = ?", (seq,))
    return Replayed(seq, seq)


def _replay_row(db: sqlite3.Connection, row: DeadRow) -> Replayed:
    inserted = db.execute(
        f"INSERT INTO {QUEUE} (created_at, namespace, source, tag, payload, prev_seq) VALUES (?, ?, ?, ?, ?, ?)",
        (now_text(), row.namespace, row.source, row.sql, row.payload, _find_tail(db, row.namespace)),
    )
    db.execute(f"DELETE FROM {DEAD} WHERE namespace = ? AND seq = ?", (row.namespace, row.seq))
    # Release 0.6 notes a dead number in its dead log only; the row behind it must find it somewhere.
    log_number(db, row.namespace, row.seq)
    assert inserted.lastrowid is not None
    return Replayed(row.seq, inserted.lastrowid)


def _find_tail(db: sqlite3.Connection, namespace: str) -> int | None:
    # One step into the index for each value of `synced`: it stands before `seq` there.
    (tail,) = db.execute(
        f"SELECT max(seq) FROM (SELECT max(seq) AS seq FROM {QUEUE} WHERE namespace = :name AND synced = 0 "
        f"UNION ALL SELECT max(seq) FROM {QUEUE} WHERE namespace = :name AND synced = 1)",
        {"name": namespace},
    ).fetchone()
    return None if tail is None else int(tail)


# -- skipping ----------------------------------------------------------------------------------------------------------


def skip(ref: QueueRef, seq: int | None = None, *, only_failed: bool = False) -> DeadRow:
    """Move a waiting row, the first unless another is named, to the dead log, from where it can be replayed.

    With `only_failed` it is an error when that row has not failed: the one that did may have been delivered meanwhile.
    """
    with edit(ref) as db:
        shape = read_shape(db)
        state = ensure_state(db, ref.namespace)
        head = read_row(db, ref.namespace, shape=shape, state=state)
        if head is None:
            raise PillarboxError(f"Nothing waits in queue {str(ref)!r}: there is no row to skip.")
        chosen = head if seq is None else read_row(db, ref.namespace, shape=shape, state=state, seq=seq)
        if chosen is None:
            raise PillarboxError(f"Row {seq} of queue {str(ref)!r} does not wait: {_place(db, ref, seq or 0)}")
        if only_failed and not chosen.attempts and chosen.error is None:
            raise PillarboxError(
                f"Row {chosen.seq} of queue {str(ref)!r} has not failed: it does not hold the table up. To skip it all "
                f"the same, name it: --seq {chosen.seq}."
            )
        bury(
            db,
            ref.namespace,
            chosen.seq,
            attempts=chosen.attempts,
            error=chosen.error,
            error_class=chosen.error_class,
            reason=MANUAL,
        )
        if chosen.seq == head.seq:
            write_state(db, ref.namespace, settled=max(state.settled, head.seq))
        if state.head == chosen.seq:
            write_state(db, ref.namespace, **NO_HEAD)
        return _load(ref, _read_log(db, ref.namespace, chosen.seq)[0])


def skip_lost(ref: QueueRef, seq: int) -> None:
    """Accept that a row is lost: its number goes into the sync log, and the row behind it is delivered again.

    It is an error when the row is not lost, or when no waiting row needs it.
    """
    with edit(ref) as db:
        state = ensure_state(db, ref.namespace)
        if not find_missing(db, [seq], settled=state.settled):
            raise PillarboxError(f"Row {seq} of queue {str(ref)!r} is not lost: {_place(db, ref, seq)}")
        successor = db.execute(
            f"SELECT seq FROM {QUEUE} WHERE namespace = ? AND prev_seq = ? AND synced = 0", (ref.namespace, seq)
        ).fetchone()
        if successor is None:
            raise PillarboxError(
                f"No waiting row of queue {str(ref)!r} names row {seq} as the one before it: nothing waits for it. "
                "`pillarbox sync verify` names the numbers that are missing."
            )
        log_number(db, ref.namespace, seq)
        if state.head == successor[0] and state.dead_at is None:
            write_state(db, ref.namespace, due_at=None)


def _place(db: sqlite3.Connection, ref: QueueRef, seq: int) -> str:
    shape = read_shape(db)
    places = {QUEUE: "it is in the queue.", DEAD: "it is in the dead log.", LOG: "it was delivered or skipped before."}
    for table, words in places.items():
        if shape.has(table):
            found = db.execute(f"SELECT namespace FROM {table} WHERE seq = ? LIMIT 1", (seq,)).fetchone()
            if found is not None:
                return words if found[0] == ref.namespace else f"it is one of namespace {found[0]!r} of the same file."
    return "no row has this number."


def _is_waiting(db: sqlite3.Connection, namespace: str, seq: int) -> bool:
    found = db.execute(f"SELECT 1 FROM {QUEUE} WHERE namespace = ? AND seq = ? AND synced = 0", (namespace, seq))
    return found.fetchone() is not None
