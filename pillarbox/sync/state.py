"""What a queue file remembers of a namespace besides its rows: progress, the row that failed, the numbers in use.

Every function works inside the caller's transaction on a `sqlite3` connection and commits nothing by itself.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final, cast
from uuid import uuid4

from pillarbox.sync.tables import DEAD, LOG, QUEUE, STATE, STATE_DDL, dead_ddl

_BINDS_AT_ONCE: Final = 500


@dataclass(frozen=True, slots=True)
class QueueState:
    """One namespace's row of the side table.

    `settled` is the highest number that left the queue in order, `head` the row that failed last. Numbers up to
    `ceiling` may have been delivered by sqloutbox without its noting it. `origin` is, in a copy made for one target,
    the last number that was copied, `origin_queue` and `origin_digest` are the queue it came from and that row's
    `digest_row`. `sessions` are the last two runs, by what they sign marks with. `sent` is up to which number rows may
    have been sent, `outage` why nothing can be sent now though no row is to blame.
    """

    queue_id: str
    settled: int
    seeded_for: str | None
    ceiling: int
    origin: int
    origin_queue: str | None
    origin_digest: str | None
    sessions: str
    sent: int
    outage: str | None
    head: int | None
    attempts: int
    tried_at: datetime | None
    due_at: datetime | None
    error: str | None
    error_class: str | None
    dead_at: datetime | None


_COLUMNS: Final = tuple(each.name for each in fields(QueueState))


def digest_row(created_at: str, sql: str, payload: object) -> str:
    """What tells a row from another one that has its number: eight hexadecimal digits."""
    content = payload.encode("utf-8", "surrogatepass") if isinstance(payload, str) else bytes(cast(bytes, payload))
    text = f"{created_at}\n{sql}\n".encode("utf-8", "surrogatepass")
    return sha256(text + content).hexdigest()[:8]


def now_text() -> str:
    """The time as sqloutbox writes it."""
    return datetime.now(UTC).isoformat()


def parse_time(text: str | None) -> datetime | None:
    """A time as we, sqloutbox or SQLite's own functions write it; None for what is none."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


@contextmanager
def transaction(db: sqlite3.Connection, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
    """One transaction on a connection whose driver begins none by itself."""
    db.execute(begin)
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def has_table(db: sqlite3.Connection, name: str) -> bool:
    return db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (name,)).fetchone() is not None


def read_state(db: sqlite3.Connection, namespace: str) -> QueueState | None:
    """What is remembered of a namespace; None in a file that only sqloutbox, or nobody, has drained."""
    if not has_table(db, STATE):
        return None
    return load_state(db, namespace)


def load_state(db: sqlite3.Connection, namespace: str) -> QueueState | None:
    """The same in a file that is known to have the side table."""
    found = db.execute(f"SELECT {', '.join(_COLUMNS)} FROM {STATE} WHERE namespace = ?", (namespace,)).fetchone()
    if found is None:
        return None
    row = dict(zip(_COLUMNS, found, strict=True))
    times = {name: parse_time(row[name]) for name in ("tried_at", "due_at", "dead_at")}
    return QueueState(**{**row, **times})


def ensure_state(db: sqlite3.Connection, namespace: str) -> QueueState:
    """Make the side table and the namespace's row where they are missing."""
    if not has_table(db, STATE):
        db.execute(STATE_DDL)
    elif len(db.execute(f"PRAGMA table_info({STATE})").fetchall()) != len(_COLUMNS) + 1:
        _add_columns(db)
    if not has_table(db, DEAD):
        db.execute(dead_ddl())
    db.execute(f"INSERT OR IGNORE INTO {STATE} (namespace, queue_id) VALUES (?, ?)", (namespace, str(uuid4())))
    state = load_state(db, namespace)
    assert state is not None
    return state


def _add_columns(db: sqlite3.Connection) -> None:
    """Give a side table that an older release made the columns that it lacks."""
    wanted = re.findall(r"^ {4}(\w+) (.+?),?$", STATE_DDL, re.MULTILINE)
    there = {row[1] for row in db.execute(f"PRAGMA table_info({STATE})")}
    for name, declared in wanted:
        if name not in there:
            db.execute(f"ALTER TABLE {STATE} ADD COLUMN {name} {declared}")


def write_state(db: sqlite3.Connection, namespace: str, **values: Any) -> None:
    """Change columns of the namespace's row; a datetime is written as text."""
    texts = {name: value.isoformat() if isinstance(value, datetime) else value for name, value in values.items()}
    changes = ", ".join(f"{name} = ?" for name in texts)
    db.execute(f"UPDATE {STATE} SET {changes} WHERE namespace = ?", (*texts.values(), namespace))


NO_HEAD: Final = {
    "head": None,
    "attempts": 0,
    "tried_at": None,
    "due_at": None,
    "error": None,
    "error_class": None,
    "dead_at": None,
    "outage": None,
}
"""What `write_state` is given when no row has failed any more."""


def finish_marked(db: sqlite3.Connection, namespace: str) -> int:
    """Move rows to the log that sqloutbox had marked as delivered when it died before it deleted them."""
    given = (namespace,)
    db.execute(
        f"INSERT OR IGNORE INTO {LOG} (seq, namespace, synced_at) "
        f"SELECT seq, namespace, '{now_text()}' FROM {QUEUE} WHERE namespace = ? AND synced = 1",
        given,
    )
    return db.execute(f"DELETE FROM {QUEUE} WHERE namespace = ? AND synced = 1", given).rowcount


def bury(
    db: sqlite3.Connection,
    namespace: str,
    seq: int,
    *,
    attempts: int,
    error: str | None,
    error_class: str | None,
    reason: str,
) -> bool:
    """Move a waiting row to the dead log; its number also goes to the log, so that its successor's chain is whole."""
    found = db.execute(
        f"INSERT OR REPLACE INTO {DEAD} (seq, namespace, tag, payload, prev_seq, source, attempts, last_error, "
        "last_error_class, dead_lettered_at, reason) "
        f"SELECT seq, namespace, tag, payload, prev_seq, source, ?, ?, ?, ?, ? FROM {QUEUE} "
        "WHERE namespace = ? AND seq = ? AND synced = 0",
        (attempts, error, error_class, now_text(), reason, namespace, seq),
    ).rowcount
    if found != 1:
        return False
    log_number(db, namespace, seq)
    db.execute(f"DELETE FROM {QUEUE} WHERE namespace = ? AND seq = ?", (namespace, seq))
    return True


def log_number(db: sqlite3.Connection, namespace: str, seq: int) -> None:
    """Note in the audit log that a number has left the queue."""
    db.execute(
        f"INSERT OR IGNORE INTO {LOG} (seq, namespace, synced_at) VALUES (?, ?, ?)", (seq, namespace, now_text())
    )


def find_missing(db: sqlite3.Connection, seqs: Iterable[int], *, settled: int = 0) -> list[int]:
    """Those of the numbers that are neither in the queue nor delivered, dead or below what was settled."""
    asked = sorted({seq for seq in seqs if seq > settled})
    known: set[int] = set()
    tables = [name for name in (QUEUE, LOG, DEAD) if name != DEAD or has_table(db, DEAD)]
    for start in range(0, len(asked), _BINDS_AT_ONCE):
        part = asked[start : start + _BINDS_AT_ONCE]
        binds = ", ".join("?" * len(part))
        for table in tables:
            # The queue's and the log's numbers are the file's, whatever the namespace; so is the page's query.
            found = db.execute(f"SELECT seq FROM {table} WHERE seq IN ({binds})", part)
            known.update(seq for (seq,) in found)
    return [seq for seq in asked if seq not in known]


def find_gap(
    db: sqlite3.Connection, links: Sequence[tuple[int, int | None]], *, settled: int
) -> tuple[int, int] | None:
    """Where the chain of waiting rows, given as (seq, prev_seq) in order, is broken: position and missing number."""
    asked: dict[int, int] = {}
    before: int | None = None
    for position, (seq, prev) in enumerate(links):
        if prev is not None and prev != before:
            asked.setdefault(prev, position)
        before = seq
    missing = find_missing(db, asked, settled=settled) if asked else []
    if not missing:
        return None
    seq = min(missing, key=lambda each: asked[each])
    return asked[seq], seq


def highest_number(db: sqlite3.Connection) -> int:
    """The highest number that the file ever gave."""
    row = db.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (QUEUE,)).fetchone()
    (waiting,) = db.execute(f"SELECT max(seq) FROM {QUEUE}").fetchone()
    return max(0 if row is None else row[0], waiting or 0)


def raise_counter(db: sqlite3.Connection, minimum: int) -> bool:
    """Let the next number be above a minimum; false when it is anyway."""
    row = db.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (QUEUE,)).fetchone()
    # The counter itself must say so: the rows that have higher numbers will be gone one day.
    if row is not None and row[0] >= minimum:
        return False
    if db.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = ?", (minimum, QUEUE)).rowcount == 0:
        db.execute("INSERT INTO sqlite_sequence (name, seq) VALUES (?, ?)", (QUEUE, minimum))
    return True


def is_untouched(db: sqlite3.Connection, namespace: str) -> bool:
    """Whether nothing of a namespace was ever delivered, so that its numbers mean nothing to anybody yet."""
    state = load_state(db, namespace)
    if state is not None and state.settled:
        return False
    for table in (LOG, DEAD):
        if db.execute(f"SELECT 1 FROM {table} WHERE namespace = ? LIMIT 1", (namespace,)).fetchone():
            return False
    columns = [row[1] for row in db.execute(f"PRAGMA table_info({QUEUE})")]
    if "attempts" in columns:
        # Release 0.6 has sent it before, and noted that it failed.
        tried = db.execute(f"SELECT 1 FROM {QUEUE} WHERE namespace = ? AND attempts > 0 LIMIT 1", (namespace,))
        if tried.fetchone() is not None:
            return False
    first = db.execute(
        f"SELECT seq, prev_seq FROM {QUEUE} WHERE namespace = ? ORDER BY seq LIMIT 1", (namespace,)
    ).fetchone()
    # An audit log that was pruned leaves no trace but the first row's link to what went before it.
    return first is None or first[1] is None


def raise_waiting(db: sqlite3.Connection, namespace: str, maximum: int, *, above: int = 0) -> int:
    """Number the waiting rows anew above a maximum and above all numbers of the file, the chain kept; how many.

    Rows up to `above` keep their numbers.
    """
    rows = f"FROM {QUEUE} WHERE namespace = ? AND synced = 0 AND seq > ?"
    given = (namespace, above)
    first, last, count = db.execute(f"SELECT min(seq), max(seq), count(*) {rows}", given).fetchone()
    if not count:
        raise_counter(db, maximum)
        return 0
    # So far that no new number is an old one: numbers and links are unique at every moment of the update.
    shift = max(maximum, highest_number(db)) + 1 - first
    db.execute(
        f"UPDATE {QUEUE} SET prev_seq = prev_seq + ? WHERE namespace = ? AND synced = 0 AND seq > ? "
        f"AND prev_seq IN (SELECT seq {rows})",
        (shift, *given, *given),
    )
    db.execute(f"UPDATE {QUEUE} SET seq = seq + ? WHERE namespace = ? AND synced = 0 AND seq > ?", (shift, *given))
    raise_counter(db, last + shift)
    return int(count)
