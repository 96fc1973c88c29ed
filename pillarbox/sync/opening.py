"""Opening a queue file: what is created, what is completed, what is refused, and how SQLite's errors are told.

A file of its own gets the tables of sqloutbox 0.4 and WAL mode. The application's own database keeps its journal mode
and its `user_version`, which are not ours to read or to set; only the queue's tables are added.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, Literal

from pillarbox.durations import format_duration
from pillarbox.errors import QueueError
from pillarbox.sync.tables import ADD_SOURCE, LOG, NEEDED, NEWEST_VERSION, QUEUE, queue_ddl

Durability = Literal["normal", "full"]
Execute = Callable[[str], Sequence[Any]]

LOCK_TIMEOUT: Final = timedelta(seconds=5)

_INDEXES: Final = ("idx_outbox_worker", "idx_outbox_prev", "idx_outbox_prev_unique", "idx_sync_log")
_COMPLETE: Final = frozenset({QUEUE, LOG, *_INDEXES})
_PAUSE: Final = 0.005


def open_connection(
    path: str | os.PathLike[str],
    *,
    is_application_file: bool = False,
    durability: Durability = "normal",
    lock_timeout: timedelta = LOCK_TIMEOUT,
    journal: Literal["wal"] | None = "wal",
) -> sqlite3.Connection:
    """Open a queue file, and create or complete it where something is missing; raises `QueueError`.

    The connection commits each statement by itself and may be used by one thread at a time. Files of an unknown
    kind and of a newer version are refused and stay as they are.
    """
    place = os.fspath(path)
    make_folder(os.path.dirname(place))
    deadline = time.monotonic() + lock_timeout.total_seconds()
    with explained(place, lock_timeout):
        while True:
            try:
                return _open(place, is_application_file, durability == "full", lock_timeout, journal)
            except sqlite3.OperationalError as error:
                # Several processes that make one file at once: SQLite does not wait for the change to WAL.
                if not _is_busy(error) or time.monotonic() >= deadline:
                    raise
                time.sleep(_PAUSE)


def make_folder(folder: str) -> None:
    try:
        os.makedirs(folder or ".", exist_ok=True)
    except OSError as error:
        raise QueueError(
            f"The folder {folder!r} for queue files cannot be made: {error.strerror}. Nothing was stored; "
            "check the path and its rights."
        ) from error


def _open(
    path: str, is_application_file: bool, is_full: bool, lock_timeout: timedelta, journal: str | None
) -> sqlite3.Connection:
    seconds = lock_timeout.total_seconds()
    db = sqlite3.connect(path, timeout=seconds, isolation_level=None, check_same_thread=False)

    def execute(sql: str) -> Sequence[Any]:
        return db.execute(sql).fetchall()

    try:
        names = {name for (name,) in execute("SELECT name FROM main.sqlite_master")}
        is_new = not names
        if not is_application_file:
            _refuse_foreign(db, path, names)
        _missing(execute, path)
        if journal is not None and (is_new or not is_application_file):
            execute(f"PRAGMA journal_mode = {journal}")
        complete_tables(execute, path, begins=True)
        ((mode,),) = execute("PRAGMA journal_mode")
        # Outside WAL a commit that is not synced can damage the file when the power fails.
        execute(f"PRAGMA synchronous = {'FULL' if is_full or mode != 'wal' else 'NORMAL'}")
    except BaseException:
        db.close()
        raise
    return db


def _refuse_foreign(db: sqlite3.Connection, path: str, names: set[str]) -> None:
    if names and QUEUE not in names:
        found = ", ".join(sorted(names)[:5])
        raise QueueError(
            f"{path!r} is a SQLite database without the table {QUEUE!r} (it has {found}); expected a queue file. "
            "Nothing was changed; choose another folder, or name it as the application's database: "
            "SqlQueue(file=…) or `db_file`."
        )
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > NEWEST_VERSION:
        raise QueueError(
            f"Queue file {path!r} has schema version {version}; this release knows versions up to {NEWEST_VERSION}. "
            "Nothing was changed; update Pillarbox."
        )


def complete_tables(execute: Execute, path: str, *, begins: bool) -> None:
    """Make what is missing of a queue's tables, in a transaction of its own where `begins`, else in the caller's."""
    if not _missing(execute, path):
        return
    if begins:
        execute("BEGIN IMMEDIATE")
    try:
        for sql in _missing(execute, path):
            execute(sql)
        if begins:
            execute("COMMIT")
    except BaseException as error:
        if begins:
            # SQLite may have rolled back by itself, for instance when the disk is full.
            with contextlib.suppress(sqlite3.Error):
                execute("ROLLBACK")
        if isinstance(error, sqlite3.IntegrityError):
            raise _forked(execute, path) from error
        raise


def _missing(execute: Execute, path: str) -> list[str]:
    names = {row[0] for row in execute("SELECT name FROM main.sqlite_master")}
    columns = {row[1] for row in execute(f"PRAGMA main.table_info({QUEUE})")}
    if columns and not columns >= NEEDED:
        raise QueueError(
            f"The table {QUEUE!r} of {path!r} lacks {', '.join(sorted(NEEDED - columns))}; expected the table of a "
            "queue file. Nothing was changed; choose another file."
        )
    added = [ADD_SOURCE] if columns and "source" not in columns else []
    return [*queue_ddl(), *added] if added or not names >= _COMPLETE else []


def _forked(execute: Execute, path: str) -> QueueError:
    found = execute(
        f"SELECT prev_seq, count(*) FROM main.{QUEUE} WHERE prev_seq IS NOT NULL GROUP BY prev_seq HAVING count(*) > 1"
    )
    forks = ", ".join(f"{prev} ({count} rows)" for prev, count in found)
    return QueueError(
        f"The chain of queue file {path!r} is forked: several rows name one predecessor, prev_seq {forks}. Expected "
        "one row for each. Nothing was stored; see which with `pillarbox sync verify`, and take one of them out with "
        "`pillarbox sync skip --table NAME --seq NUMBER`."
    )


def _is_busy(error: sqlite3.Error) -> bool:
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _code(error: BaseException) -> int:
    # The lower byte is the primary code. Errors of the driver itself have none.
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


@contextlib.contextmanager
def explained(path: str, lock_timeout: timedelta = LOCK_TIMEOUT) -> Iterator[None]:
    """Raise SQLite's errors as `QueueError`."""
    try:
        yield
    except (sqlite3.Error, UnicodeEncodeError) as error:
        raise explain(error, path, lock_timeout) from error


def explain(error: Exception, path: str, lock_timeout: timedelta | None) -> QueueError:
    """What an error of SQLite means for a push; without a time, on a connection of the caller's."""
    hints = {
        sqlite3.SQLITE_BUSY: _explain_busy(error, lock_timeout),
        sqlite3.SQLITE_FULL: f"cannot grow: {error}. Nothing was stored; make room on the disk and push again.",
        sqlite3.SQLITE_IOERR: f"cannot be written: {error}. The push failed; check the disk, its room and its limits.",
        sqlite3.SQLITE_CORRUPT: f"is damaged: {error}. Nothing was stored; stop its programs and restore it, or save "
        "its rows with `sqlite3 FILE .recover`.",
        sqlite3.SQLITE_NOTADB: f"is not a SQLite database: {error}. Nothing was changed; choose another folder or move "
        "the file away.",
        sqlite3.SQLITE_READONLY: f"cannot be written: {error}. Nothing was stored; check the rights of the file and "
        "its folder.",
        sqlite3.SQLITE_CANTOPEN: f"cannot be opened: {error}. Nothing was stored; check the path and its rights.",
    }
    code = _code(error)
    hints[sqlite3.SQLITE_LOCKED] = hints[sqlite3.SQLITE_BUSY]
    hints[sqlite3.SQLITE_PERM] = hints[sqlite3.SQLITE_CANTOPEN]
    return QueueError(f"Queue file {path!r} {hints.get(code, f'refused the statement: {error}. Nothing was stored.')}")


def _explain_busy(error: Exception, lock_timeout: timedelta | None) -> str:
    if lock_timeout is not None:
        return (
            f"is locked by another connection, and was for {format_duration(lock_timeout)} ({error}). Nothing was "
            "stored; end the transaction that holds it, use push_in if it is your own, or raise lock_timeout."
        )
    if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_BUSY_SNAPSHOT:
        return (
            f"was changed by another connection after your transaction first read it ({error}), so it can no longer be "
            "written to in this one. Nothing was stored; roll back, and start with BEGIN IMMEDIATE what reads before "
            "it pushes."
        )
    return (
        f"is locked by another connection ({error}). Nothing was stored; end the transaction that holds it, or raise "
        "the timeout of your connection."
    )


def is_broken(error: BaseException) -> bool:
    """Whether a connection may be of no more use after this error."""
    return _code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_IOERR)
