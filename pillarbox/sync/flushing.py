"""When a table's rows are sent: at once when enough of them wait, else when the oldest has waited long enough."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pillarbox.sync.settling import newest_number
from pillarbox.sync.state import parse_time
from pillarbox.sync.tables import QUEUE


@dataclass(frozen=True, slots=True)
class Flush:
    """When a table's rows are sent: so many wait, or the oldest has waited so long. `batch_bytes` bounds a batch."""

    threshold: int = 15
    max_wait: timedelta = timedelta(seconds=6)
    batch_bytes: int | None = None


class Gate:
    """Decides for one namespace; `due` is when it will open by itself, on the clock of `time.monotonic`."""

    def __init__(self, namespace: str) -> None:
        self.flush = Flush()
        self.due: float | None = None
        self._namespace = namespace
        self._open_to = 0
        self._oldest: tuple[int, float] = (0, 0.0)

    def forget(self) -> None:
        """The rows have other numbers now."""
        self._open_to = 0
        self._oldest = (0, 0.0)

    def opens(self, db: sqlite3.Connection, first: Any, *, drains: bool) -> bool:
        """Whether the rows from this one on may be sent; a flush takes all that wait when it begins."""
        seq = first[0]
        if drains or seq <= self._open_to:
            return True
        left = self.flush.max_wait.total_seconds() - self._waited(seq, first[1])
        if left > 0 and not self._has_enough(db):
            self.due = time.monotonic() + left
            return False
        self._open_to = newest_number(db, self._namespace)
        return True

    def _waited(self, seq: int, created_at: str) -> float:
        now = time.monotonic()
        if self._oldest[0] != seq:
            self._oldest = (seq, now)
        created = parse_time(created_at)
        # By the clock on the wall as well as by ours: a clock that was set back must not keep a row here.
        by_wall = 0.0 if created is None else (datetime.now(UTC) - created).total_seconds()
        return max(now - self._oldest[1], by_wall)

    def _has_enough(self, db: sqlite3.Connection) -> bool:
        enough = db.execute(
            f"SELECT 1 FROM {QUEUE} WHERE namespace = ? AND synced = 0 ORDER BY seq LIMIT 1 OFFSET ?",
            (self._namespace, max(0, self.flush.threshold - 1)),
        )
        return enough.fetchone() is not None
