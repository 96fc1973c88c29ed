"""What settling a batch writes into a queue file, inside the caller's transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import orjson

from pillarbox.codec import JSON
from pillarbox.event import NO_HEADERS, Claim, Dead, Delivered, Event, Outcome, Retry, load_event
from pillarbox.stores import Counts, Settlement
from pillarbox.sync.state import NO_HEAD, bury, load_state, now_text, parse_time, write_state
from pillarbox.sync.tables import DEAD, LOG, QUEUE

PRUNED_AT_ONCE: Final = 2000
_REASONS: Final = {"UNREADABLE": "undecodable", "UNSUPPORTED": "unsupported_stmt"}


@dataclass(slots=True)
class Queued:
    """What a claim carries besides its event: the statement's arguments, and what kind of error the sink met."""

    args: list[Any]
    created_at: str
    error_class: str | None = None


def queued_of(claim: Claim) -> Queued:
    queued: Queued = (claim.extra or {})["queued"]
    return queued


@dataclass(frozen=True, slots=True)
class News:
    """What a settlement means for the table: whether it moved on, which row it waits behind, which one it passed."""

    has_moved: bool = False
    failed: int | None = None
    buried: int | None = None
    undone: tuple[int, ...] = ()
    """Rows that were skipped while they were being delivered."""
    error: str = ""


def settle_rows(
    db: sqlite3.Connection, namespace: str, claims: Sequence[Claim], outcomes: Sequence[Outcome], *, park: bool
) -> tuple[Settlement, News]:
    """Log and delete what was delivered, and remember the first failure; what stands behind it was not tried."""
    count = next((n for n, outcome in enumerate(outcomes) if type(outcome) is not Delivered), len(outcomes))
    gone = log_rows(db, namespace, claims[0].row, claims[count - 1].row) if count else 0
    undone = _take_back(db, namespace, [claim.row for claim in claims[:count]]) if gone < count else ()
    gone += len(undone)
    settlement = Settlement(delivered=gone, lost=count - gone, released=max(0, len(claims) - count - 1))
    news = News(has_moved=count > 0, undone=undone)
    if count < len(claims):
        failed, news = _settle_failed(db, namespace, claims[count], outcomes[count], news, park=park)
        settlement += failed
    return settlement, news


def _take_back(db: sqlite3.Connection, namespace: str, seqs: Sequence[int]) -> tuple[int, ...]:
    # A row that was skipped under way has been delivered after all: to replay it would deliver it again.
    given = (namespace, orjson.dumps(seqs).decode())
    where = "WHERE namespace = ? AND reason = 'manual_skip' AND seq IN (SELECT value FROM json_each(?))"
    found = tuple(seq for (seq,) in db.execute(f"SELECT seq FROM {DEAD} {where}", given))
    db.execute(f"DELETE FROM {DEAD} {where}", given)
    return found


def log_rows(db: sqlite3.Connection, namespace: str, first: int, last: int) -> int:
    """Move delivered rows into the audit log; how many there were."""
    where, given = "WHERE namespace = ? AND seq BETWEEN ? AND ? AND synced = 0", (namespace, first, last)
    db.execute(
        f"INSERT OR IGNORE INTO {LOG} (seq, namespace, synced_at) SELECT seq, namespace, '{now_text()}' "
        f"FROM {QUEUE} {where}",
        given,
    )
    gone = db.execute(f"DELETE FROM {QUEUE} {where}", given).rowcount
    write_state(db, namespace, settled=last, **NO_HEAD)
    return gone


def newest_number(db: sqlite3.Connection, namespace: str) -> int:
    """The number of the row that was pushed last, of those that wait."""
    where = "WHERE namespace = ? AND synced = 0 ORDER BY seq DESC LIMIT 1"
    row = db.execute(f"SELECT seq FROM {QUEUE} {where}", (namespace,)).fetchone()
    return 0 if row is None else int(row[0])


def has_rows(db: sqlite3.Connection, namespace: str, above: int, last: int) -> bool:
    """Whether rows wait whose numbers are above one and not above another."""
    where = "WHERE namespace = ? AND synced = 0 AND seq > ? AND seq <= ?"
    return db.execute(f"SELECT 1 FROM {QUEUE} {where} LIMIT 1", (namespace, above, last)).fetchone() is not None


def _settle_failed(
    db: sqlite3.Connection, namespace: str, claim: Claim, outcome: Outcome, news: News, *, park: bool
) -> tuple[Settlement, News]:
    if not isinstance(outcome, Retry | Dead):
        return Settlement(released=1), news
    seq, error = claim.row, outcome.error
    if not db.execute(f"SELECT 1 FROM {QUEUE} WHERE seq = ? AND synced = 0", (seq,)).fetchone():
        return Settlement(lost=1), news
    error_class = "UNREADABLE" if claim.defect is not None else queued_of(claim).error_class
    if isinstance(outcome, Dead) and not park:
        _pass(db, namespace, seq, attempts=claim.attempt, error=error, error_class=error_class)
        return Settlement(dead=1), replace(news, has_moved=True, buried=seq, error=error)
    now = datetime.now(UTC)
    is_dead = isinstance(outcome, Dead)
    write_state(
        db,
        namespace,
        head=seq,
        attempts=claim.attempt,
        tried_at=now,
        due_at=None if isinstance(outcome, Dead) else now + (outcome.after or timedelta(0)),
        error=error,
        error_class=error_class,
        dead_at=now if is_dead else None,
    )
    told = replace(news, failed=seq, error=error)
    return (Settlement(dead=1) if is_dead else Settlement(retried=1)), told


def pass_dead_head(db: sqlite3.Connection, namespace: str) -> News | None:
    """Move a dead row that the table waits behind to the dead log: now the table is to go on."""
    state = load_state(db, namespace)
    if state is None or state.dead_at is None or state.head is None:
        return None
    error = state.error or ""
    _pass(db, namespace, state.head, attempts=state.attempts, error=error, error_class=state.error_class)
    return News(has_moved=True, buried=state.head, error=error)


def _pass(
    db: sqlite3.Connection, namespace: str, seq: int, *, attempts: int, error: str, error_class: str | None
) -> None:
    reason = _REASONS.get(error_class or "", "max_attempts")
    bury(db, namespace, seq, attempts=attempts, error=error, error_class=error_class, reason=reason)
    write_state(db, namespace, settled=seq, **NO_HEAD)


# -- looking and pruning ---------------------------------------------------------------------------------------------


def count_rows(db: sqlite3.Connection, namespace: str) -> Counts:
    """How many rows wait, and how old the oldest is."""
    state = load_state(db, namespace)
    waiting, oldest = db.execute(
        f"SELECT count(*), min(created_at) FROM {QUEUE} WHERE namespace = ? AND synced = 0", (namespace,)
    ).fetchone()
    has_head = waiting > 0 and state is not None and state.head is not None
    dead = int(has_head and state is not None and state.dead_at is not None)
    retrying = int(has_head) - dead
    created = parse_time(oldest)
    age = None if created is None else max(timedelta(0), datetime.now(UTC) - created)
    return Counts(new=waiting - retrying - dead, retrying=retrying, dead=dead, oldest_pending=age)


def find_old_entries(db: sqlite3.Connection, namespace: str, age: timedelta, *, above: int) -> tuple[list[int], int]:
    """Entries of the audit log that may be deleted, from a number on; and where to look next, 0 at the end.

    Entries that a waiting row's chain needs stay.
    """
    # Times are compared in one form: sqloutbox writes a T between day and hour, SQLite's own function a blank.
    before = (datetime.now(UTC) - age).strftime("%Y-%m-%d %H:%M:%S")
    rows = db.execute(
        f"SELECT seq, replace(substr(synced_at, 1, 19), 'T', ' ') < ?, "
        f"EXISTS (SELECT 1 FROM {QUEUE} WHERE prev_seq = log.seq) "
        f"FROM {LOG} AS log WHERE namespace = ? AND seq > ? ORDER BY seq LIMIT ?",
        (before, namespace, above, PRUNED_AT_ONCE),
    ).fetchall()
    old = [seq for seq, is_old, is_needed in rows if is_old and not is_needed]
    # Entries are written in order: where a whole part is young, the rest is younger.
    is_over = len(rows) < PRUNED_AT_ONCE or not any(is_old for _, is_old, _ in rows)
    return old, 0 if is_over else rows[-1][0]


def delete_entries(db: sqlite3.Connection, seqs: Sequence[int]) -> int:
    """Delete entries of the audit log."""
    given = (orjson.dumps(seqs).decode(),)
    return db.execute(f"DELETE FROM {LOG} WHERE seq IN (SELECT value FROM json_each(?))", given).rowcount


def make_event(
    namespace: str, seq: int, sql: str, payload: Any, source: str | None, created_at: datetime | None
) -> Event:
    """The event of a row, as relays and hooks see it."""
    content = payload.encode("utf-8", "surrogatepass") if isinstance(payload, str) else bytes(payload)
    return load_event(
        UUID(int=seq), sql, sql, namespace, content, JSON, NO_HEADERS, *[None] * 9, source or None, None, created_at
    )
