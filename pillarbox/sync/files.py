"""One namespace of a queue file: statements are pushed, read in order, and confirmed when they were delivered.

A push is one statement that commits by itself; whoever gets a number back has a row on disk. The tables and the chain
of `prev_seq` are those of sqloutbox 0.4, which may push into the same file and read it at the same time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from pillarbox.durations import parse_duration
from pillarbox.errors import ConfigError, QueueError
from pillarbox.sync import sharing
from pillarbox.sync.opening import LOCK_TIMEOUT, Durability, open_connection
from pillarbox.sync.pushing import Item, insert_first, insert_many
from pillarbox.sync.state import find_missing, now_text, raise_counter, read_state
from pillarbox.sync.tables import LOG, QUEUE

__all__ = ["QueueFile", "QueueRow", "open_connection", "subscribe"]

log = logging.getLogger("pillarbox.sync")

_CHOSEN: Final = f"FROM {QUEUE} WHERE namespace = ? AND seq IN (SELECT value FROM json_each(?))"
_ROWS: Final = (
    f"SELECT seq, created_at, namespace, source, tag, payload, prev_seq FROM {QUEUE} "
    "WHERE namespace = ? AND synced = 0 ORDER BY seq LIMIT ?"
)


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A waiting row as it is stored: the time is text, the arguments are JSON."""

    seq: int
    created_at: str
    namespace: str
    source: str
    sql: str
    payload: str
    prev_seq: int | None


class QueueFile:
    """A namespace of a queue file, which is created with its folder when it is not there.

    Threads may share it, and processes may share the file. `max_waiting` is the most rows that may wait;
    `lock_timeout` is how long a push waits for the file's lock. With durability "normal" a commit survives the death
    of the process, and may be lost with those after it when the machine loses power; "full" syncs each commit. What
    cannot be stored raises `QueueError`.

    `is_application_file` says that the file is the application's own database: the queue's tables are added to it,
    and its journal mode stays. With `journal=None` that of a queue file stays, too.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        namespace: str,
        *,
        durability: Durability = "normal",
        lock_timeout: timedelta = LOCK_TIMEOUT,
        max_waiting: int | None = None,
        is_application_file: bool = False,
        journal: Literal["wal"] | None = "wal",
    ) -> None:
        check_options(durability, max_waiting)
        if not namespace:
            raise QueueError(f"Queue file {os.fspath(path)!r}: expected a namespace of one character or more")
        self.path = os.path.realpath(path)
        self.namespace = namespace
        self.max_waiting = max_waiting
        self.lock_timeout = parse_duration(lock_timeout, what="lock_timeout")
        self._shared = sharing.join(
            self.path,
            is_application_file=is_application_file,
            journal=journal,
            durability=durability,
            timeout=self.lock_timeout,
        )
        self._leave = weakref.finalize(self, sharing.abandon, self._shared)

    def close(self) -> None:
        """Cease to use the file; its last user in this process closes it."""
        if self._leave.detach() is not None:
            sharing.leave(self._shared)

    # -- pushing -------------------------------------------------------------------------------------------------------

    def push(self, sql: str, payload: str, *, source: str = "") -> int:
        """Store a statement with its encoded arguments; returns its number when it is committed."""
        shared = self._shared
        db = self._take()
        try:
            seq = insert_first(db, sql, payload, namespace=self.namespace, source=source, cap=self.max_waiting)
        except (sqlite3.Error, UnicodeEncodeError) as error:
            raise shared.fail(error, self.lock_timeout) from error
        finally:
            shared.give()
        if _listeners:
            notify(self.path)
        return seq

    def push_many(self, items: Sequence[Item], *, source: str = "") -> list[int]:
        """Store statements in one transaction, all of them or none; returns their numbers in order."""
        if not items:
            return []
        with self._transaction() as db:
            seqs = insert_many(db, items, namespace=self.namespace, source=source, cap=self.max_waiting)
        if _listeners:
            notify(self.path)
        return seqs

    # -- reading and confirming ----------------------------------------------------------------------------------------

    def waiting(self) -> int:
        """How many rows wait."""
        ((count,),) = self._read(f"SELECT count(*) FROM {QUEUE} WHERE namespace = ? AND synced = 0", self.namespace)
        return int(count)

    def rows(self, limit: int | None = None) -> list[QueueRow]:
        """The rows that wait, in order."""
        found = self._read(_ROWS, self.namespace, -1 if limit is None else limit)
        return [QueueRow(*row) for row in found]

    def confirm(self, seqs: Iterable[int]) -> int:
        """Take delivered rows out of the queue and note them in the log; returns how many there were.

        Numbers that are not there, or another namespace's, are left alone.
        """
        chosen = (self.namespace, json.dumps(list(seqs)))
        with self._transaction() as db:
            noted = f"INSERT OR IGNORE INTO {LOG} (seq, namespace, synced_at) SELECT seq, namespace, ?"
            db.execute(f"{noted} {_CHOSEN}", (now_text(), *chosen))
            return db.execute(f"DELETE {_CHOSEN}", chosen).rowcount

    def prune(self, *, delivered_age: timedelta) -> int:
        """Forget deliveries older than this, except those that a row of the queue names as its predecessor."""
        limit = (datetime.now(UTC) - delivered_age).isoformat()
        named = f"SELECT prev_seq FROM {QUEUE} WHERE prev_seq IS NOT NULL"
        sql = f"DELETE FROM {LOG} WHERE namespace = ? AND synced_at < ? AND seq NOT IN ({named})"
        with self._transaction() as db:
            return db.execute(sql, (self.namespace, limit)).rowcount

    def seed(self, minimum: int) -> bool:
        """Let the next number be above `minimum`; false when it is anyway."""
        with self._transaction() as db:
            return minimum > 0 and raise_counter(db, minimum)

    def check_chain(self, rows: Sequence[QueueRow]) -> list[int]:
        """The predecessors of these rows that are lost: neither waiting nor delivered, dead or settled."""
        asked = {row.prev_seq for row in rows if row.prev_seq is not None} - {row.seq for row in rows}
        if not asked:
            return []
        with self._transaction("BEGIN") as db:
            state = read_state(db, self.namespace)
            return find_missing(db, asked, settled=0 if state is None else state.settled)

    # -- the connection ------------------------------------------------------------------------------------------------

    def _take(self) -> sqlite3.Connection:
        if not self._leave.alive:
            raise QueueError(f"Queue file {self.path!r} was closed here. Nothing was stored; open it again.")
        return self._shared.take(self.lock_timeout)

    @contextlib.contextmanager
    def _transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        shared = self._shared
        db = self._take()
        try:
            db.execute(begin)
            yield db
            db.execute("COMMIT")
        except (sqlite3.Error, UnicodeEncodeError) as error:
            raise shared.fail(error, self.lock_timeout) from error
        except BaseException:
            shared.roll_back()
            raise
        finally:
            shared.give()

    def _read(self, sql: str, *given: Any) -> list[Any]:
        db = self._take()
        try:
            return db.execute(sql, given).fetchall()
        except sqlite3.Error as error:
            raise self._shared.fail(error, self.lock_timeout) from error
        finally:
            self._shared.give()


def check_options(durability: str, max_waiting: int | None) -> None:
    """Refuse settings that no queue can have."""
    if durability not in ("normal", "full"):
        raise ConfigError(f"durability: expected 'normal' or 'full', got {durability!r}")
    if max_waiting is not None and (isinstance(max_waiting, bool) or max_waiting < 1):
        raise ConfigError(f"max_waiting: expected a number above zero or None, got {max_waiting!r}")


# -- telling who waits for a push --------------------------------------------------------------------------------------

_listeners: dict[str, tuple[Callable[[], None], ...]] = {}


def subscribe(path: str | os.PathLike[str], callback: Callable[[], None]) -> Callable[[], None]:
    """Have a function called after each push of this process into a file; returns what ends it.

    It is called by whichever thread pushed and must only wake somebody: the row is stored whatever it raises.
    """
    place = os.path.realpath(path)
    with _changing:
        _listeners[place] = (*_listeners.get(place, ()), callback)

    def unsubscribe() -> None:
        with _changing:
            left = tuple(each for each in _listeners.get(place, ()) if each is not callback)
            if left:
                _listeners[place] = left
            else:
                _listeners.pop(place, None)

    return unsubscribe


def notify(path: str) -> None:
    """Call those who wait for pushes into a file."""
    for callback in _listeners.get(path, ()):
        try:
            callback()
        except Exception:
            log.exception("A function that waits for pushes into %s failed.", path)


_changing = sharing.RenewedLock()
if hasattr(os, "register_at_fork"):
    # Who listened in the parent does not live in the child.
    os.register_at_fork(after_in_child=_listeners.clear)
