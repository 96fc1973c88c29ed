"""Queue files as operators find them: made and used by the real sqloutbox, release 0.4 or 0.6."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pillarbox.sync.queues import QueueRef
from tests.contract.sync_queue_kit import Neighbour, make_file, neighbour, sql

PAYLOAD = "[1]"
# The page's query for gaps.
GAPS = (
    "SELECT q.seq, q.namespace, q.prev_seq FROM outbox_queue q WHERE q.prev_seq IS NOT NULL "
    "AND NOT EXISTS (SELECT 1 FROM outbox_queue WHERE seq = q.prev_seq) "
    "AND NOT EXISTS (SELECT 1 FROM outbox_sync_log WHERE seq = q.prev_seq)"
)


class Sqloutbox:
    """One release, called on files."""

    def __init__(self, release: str) -> None:
        self.release = release

    def call(self, ref: QueueRef, *calls: Sequence[Any]) -> list[Any]:
        """Call methods of an `Outbox`, or ours: push, push_many, mark, deliver, fetch, verify; returns the answers."""
        with neighbour(self.release, ref.path, ref.namespace) as other:
            return [_call(other, *each) for each in calls]


def _call(other: Neighbour, verb: str, *given: Any) -> Any:
    if verb == "push":
        return [other.call("enqueue", tag, PAYLOAD) for tag in given]
    if verb == "push_many":
        return other.call("enqueue_batch", [(tag, PAYLOAD) for tag in given])
    if verb in ("mark", "deliver"):
        seqs = [row[0] for row in other.call("fetch")[: given[0]]]
        return other.call("mark_synced" if verb == "mark" else "confirm", seqs)
    if verb == "fetch":
        return [row[:2] for row in other.call("fetch")]
    return other.call(verb, *given)


def queue(path: Path, namespace: str | None = None, **options: Any) -> QueueRef:
    table = namespace or path.stem
    return QueueRef("", table, path, table, **options)


def read(path: Path, text: str, *given: Any) -> list[Any]:
    with sql(path) as execute:
        return execute(text, *given)


def write(path: Path, *statements: str) -> None:
    with sql(path) as execute:
        for text in statements:
            execute(text)


def chain(path: Path) -> list[Any]:
    """The rows of a file: number, predecessor, statement."""
    return read(path, "SELECT seq, prev_seq, tag FROM outbox_queue ORDER BY seq")


def make_old_file(path: Path, *rows: tuple[int, int | None]) -> None:
    """A file of the first releases; `rows` are numbers with their predecessors."""
    make_file("oldest", path)
    with closing(sqlite3.connect(path)) as db, db:
        db.executemany(
            "INSERT INTO outbox_queue (seq, created_at, namespace, tag, payload, prev_seq) "
            "VALUES (?, '2026-01-01T00:00:00+00:00', 'orders', 's' || ?1, '[]', ?)",
            rows,
        )


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder, with its content and when it was changed."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.fixture(params=["0.4", "0.6"], ids=lambda release: f"sqloutbox-{release}")
def sqloutbox(request: pytest.FixtureRequest) -> Sqloutbox:
    return Sqloutbox(request.param)


@pytest.fixture
def orders(tmp_path: Path) -> QueueRef:
    """A queue that has no file yet."""
    return queue(tmp_path / "orders.db")
