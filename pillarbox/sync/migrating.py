"""Bring a queue file of an older release to what the service needs, without a schema version of ours.

Nothing that is there is altered: a column, indexes, the sync log and our side table are added where they are missing,
and rows that a drain had delivered but not deleted go to the log. sqloutbox opens the file as before.
"""

from __future__ import annotations

import re
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pillarbox.errors import SchemaError
from pillarbox.sync.queues import Shape, describe_failure, edit_file, look, read_shape
from pillarbox.sync.state import finish_marked
from pillarbox.sync.tables import ADD_SOURCE, LOG, QUEUE, STATE, STATE_DDL, queue_ddl
from pillarbox.sync.verify import describe_fork, find_forks

Status = Literal["current", "pending", "migrated", "incompatible", "missing", "foreign"]


@dataclass(frozen=True, slots=True)
class Migration:
    """What a file lacks (`steps`, in words), or lacked if it is `migrated`; and why it is `incompatible`."""

    path: Path
    status: Status
    steps: tuple[str, ...] = ()
    problem: str | None = None


def check_migration(path: Path, *, is_application_file: bool = False) -> Migration:
    """Say what `migrate` would do; changes nothing."""
    if not path.exists():
        return Migration(path, "missing")
    try:
        return look(path, lambda db: _check(path, db, is_application_file))
    except sqlite3.Error as error:
        return Migration(path, "incompatible", problem=describe_failure(path, error))


def migrate(path: Path, *, is_application_file: bool = False) -> Migration:
    """Do what is to be done, in one transaction; a second time there is nothing left to do.

    Raises SchemaError, with the file as it was, when it is no queue, is newer than what is known, or the chain forks.
    """
    with edit_file(path, is_application_file=is_application_file) as db:
        found = _check(path, db, is_application_file)
        if found.problem is not None:
            raise SchemaError(found.problem)
        if found.status == "pending":
            _apply(db, read_shape(db))
    return Migration(path, "migrated" if found.steps else "current", found.steps)


def _check(path: Path, db: sqlite3.Connection, is_application_file: bool) -> Migration:
    shape = read_shape(db, is_application_file=is_application_file)
    if shape.is_empty or (is_application_file and not shape.has(QUEUE)):
        return Migration(path, "missing")
    problem = shape.describe_problem(path)
    if problem is not None:
        return Migration(path, "foreign" if shape.is_foreign else "incompatible", problem=problem)
    forks = find_forks(db)
    if forks:
        named = " ".join(describe_fork(fork) for fork in forks)
        advice = "Move all but one of each out of the way with `pillarbox sync skip --table NAME --seq SEQ`."
        return Migration(path, "incompatible", problem=f"File {str(path)!r}: {named} {advice}")
    steps = _list_steps(db, shape)
    return Migration(path, "pending" if steps else "current", steps)


def _list_steps(db: sqlite3.Connection, shape: Shape) -> tuple[str, ...]:
    steps = [] if shape.has(QUEUE, "source") else ["add column source"]
    steps += [f"add table {table}" for table in (LOG, STATE) if not shape.has(table)]
    steps += [f"add index {name}" for name in _missing_indexes(db)]
    (marked,) = db.execute(f"SELECT count(*) FROM {QUEUE} WHERE synced = 1").fetchone()
    return (*steps, f"move {marked} delivered rows to the sync log") if marked else tuple(steps)


def _missing_indexes(db: sqlite3.Connection) -> list[str]:
    there = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'index'")}
    found = (re.search(r"INDEX IF NOT EXISTS (\w+)", statement) for statement in queue_ddl())
    return sorted(match[1] for match in found if match is not None and match[1] not in there)


def _apply(db: sqlite3.Connection, shape: Shape) -> None:
    if not shape.has(QUEUE, "source"):
        db.execute(ADD_SOURCE)
    for statement in (*queue_ddl(), STATE_DDL):
        db.execute(statement)
    for (namespace,) in db.execute(f"SELECT DISTINCT namespace FROM {QUEUE} WHERE synced = 1").fetchall():
        finish_marked(db, namespace)
