"""Taking up a queue for a target: what is there leaves the queue, what waits gets numbers that are free there.

The numbers of a queue mean something at a target from its first delivery on. A queue that nobody ever drained is
numbered anew above the target's maximum. One that sqloutbox drained keeps its numbers, and those up to the maximum may
be there already. One of ours has a mark at the target, which says up to which number its statements are there.
"""

from __future__ import annotations

import sqlite3

from pillarbox.sync.settling import has_rows, log_rows
from pillarbox.sync.state import (
    NO_HEAD,
    QueueState,
    digest_row,
    ensure_state,
    is_untouched,
    raise_counter,
    raise_waiting,
    write_state,
)
from pillarbox.sync.tables import LOG, QUEUE


def recognizes(db: sqlite3.Connection, namespace: str, applied: int, token: str) -> bool:
    """Whether a mark is one that this queue left, and not a copy of its file or an older or younger state of it."""
    state = ensure_state(db, namespace)
    if applied <= state.settled:
        return True
    session, _, rest = token.partition(".")
    if session not in state.sessions.split():
        return False
    row = db.execute(
        f"SELECT created_at, tag, payload FROM {QUEUE} WHERE namespace = ? AND seq = ?", (namespace, applied)
    ).fetchone()
    if row is not None:
        return digest_row(*row) == rest.rpartition(".")[2]
    # An operator may have skipped it since.
    logged = db.execute(f"SELECT 1 FROM {LOG} WHERE namespace = ? AND seq = ?", (namespace, applied))
    return logged.fetchone() is not None


def sign(db: sqlite3.Connection, namespace: str, session: str) -> None:
    """Note the signature of a run beside those of earlier ones."""
    known = ensure_state(db, namespace).sessions.split()
    write_state(db, namespace, sessions=" ".join(dict.fromkeys([session, *known])))


def adopt(
    db: sqlite3.Connection,
    namespace: str,
    target: str,
    *,
    maximum: int | None,
    applied: int | None,
    session: str,
    sent: int | None = None,
) -> int:
    """Take up a queue for a target; returns how many rows got new numbers.

    `maximum` is the highest number in the target's table, None where statements carry none. `applied` is up to which
    number the target has this queue's statements, None when it does not know the queue; `sent` is up to which it may
    have them, if that is known better than the file does.
    """
    state = ensure_state(db, namespace)
    if applied is not None and has_rows(db, namespace, 0, applied):
        log_rows(db, namespace, 0, applied)
    sent = state.sent if sent is None else sent
    raised = 0 if maximum is None else _seed(db, namespace, target, state, maximum, applied=applied, sent=sent)
    head = NO_HEAD if raised and state.head is not None else {}
    write_state(db, namespace, sessions=session, sent=sent, seeded_for=target, **head)
    return raised


def _seed(
    db: sqlite3.Connection,
    namespace: str,
    target: str,
    state: QueueState,
    maximum: int,
    *,
    applied: int | None,
    sent: int,
) -> int:
    if applied is not None and not _has_been_drained_by_others(db, namespace, max(applied, state.settled)):
        # What is above the mark is not there: it may be numbered anew, whoever used its numbers meanwhile.
        return _raise_above(db, namespace, maximum, floor=max(applied, state.ceiling))
    if applied is None and state.seeded_for == target:
        ceiling = max(state.ceiling, sent)
        write_state(db, namespace, ceiling=ceiling)
        return _raise_above(db, namespace, maximum, floor=ceiling)
    if applied is None and (state.seeded_for is not None or is_untouched(db, namespace)):
        return _raise_above(db, namespace, maximum, floor=0)
    # sqloutbox has drained it: what waits up to the maximum may be there already.
    write_state(db, namespace, ceiling=max(state.ceiling, maximum))
    raise_counter(db, maximum)
    return 0


def _has_been_drained_by_others(db: sqlite3.Connection, namespace: str, settled: int) -> bool:
    where = f"FROM {LOG} WHERE namespace = ? AND seq > ? LIMIT 1"
    return db.execute(f"SELECT 1 {where}", (namespace, settled)).fetchone() is not None


def _raise_above(db: sqlite3.Connection, namespace: str, maximum: int, *, floor: int) -> int:
    if has_rows(db, namespace, floor, maximum):
        return raise_waiting(db, namespace, maximum, above=floor)
    raise_counter(db, maximum)
    return 0
