"""One connection a queue file and process, shared by all its queues and threads under a lock.

It is closed before a fork and opened again afterwards on either side, because SQLite's connections do not survive one.
A file that was removed or replaced is noticed at the next use: writing on would fill a file that nobody reads.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sqlite3
import threading
import time
import weakref
from collections import deque
from datetime import timedelta
from typing import Literal

from pillarbox.errors import QueueError
from pillarbox.sync.opening import Durability, explain, is_broken, open_connection

log = logging.getLogger("pillarbox.sync")


class SharedConnection:
    """A file's connection; `take` it, use `db`, `give` it back. Its strictest user decides the durability."""

    def __init__(self, path: str, is_application_file: bool, journal: Literal["wal"] | None) -> None:
        self.path = path
        self.users = 0
        self.db: sqlite3.Connection | None = None
        self._is_application_file = is_application_file
        self._journal = journal
        self._durability: Durability = "normal"
        self._lock = threading.Lock()
        self._identity: tuple[int, int] | None = None
        self._busy = timedelta(0)
        self._is_closed = False

    def take(self, timeout: timedelta) -> sqlite3.Connection:
        """Wait for the connection; the time spent here counts against what is waited for the file's lock."""
        left = timeout
        if not self._lock.acquire(blocking=False):
            left = self._wait(timeout)
        try:
            db = self.db
            if db is None or self._identity != _identify(self.path):
                db = self._open(left)
            if left is not self._busy and left != self._busy:
                db.execute(f"PRAGMA busy_timeout = {left // timedelta(milliseconds=1)}").fetchall()
                self._busy = left
        except BaseException:
            self._lock.release()
            raise
        return db

    def _wait(self, timeout: timedelta) -> timedelta:
        started = time.monotonic()
        if not self._lock.acquire(timeout=timeout.total_seconds()):
            busy = sqlite3.OperationalError("another thread of this process waits for it or writes to it")
            busy.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise explain(busy, self.path, timeout)
        waited = timedelta(seconds=time.monotonic() - started)
        # Threads that take turns do not change the setting for a few milliseconds.
        return timeout if waited < timeout / 10 else max(timeout - waited, timedelta(0))

    def give(self) -> None:
        self._lock.release()

    def fail(self, error: Exception, timeout: timedelta) -> QueueError:
        """What to raise for an error that came while the connection was taken; leaves no transaction open."""
        self.roll_back()
        if is_broken(error):
            self.disconnect()
        return explain(error, self.path, timeout)

    def roll_back(self) -> None:
        if self.db is not None and self.db.in_transaction:
            self.db.execute("ROLLBACK")

    def admit(self, durability: Durability, timeout: timedelta) -> None:
        """Open the file for one more user, who may want its commits synced."""
        self.take(timeout)
        try:
            if durability == "full" and self._durability != "full":
                self._durability = "full"
                self._open(timeout)
        finally:
            self.give()

    def close(self) -> None:
        """Close the connection for good, after whoever uses it now."""
        with self._lock:
            self._is_closed = True
            self.disconnect()

    def disconnect(self) -> None:
        if self.db is not None:
            db, self.db = self.db, None
            db.close()

    def disconnect_if_free(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self.disconnect()
            finally:
                self.give()

    def pause(self) -> None:
        """Keep everybody out, with the file closed, until `give`."""
        self._lock.acquire()
        self.disconnect()

    def _open(self, timeout: timedelta) -> sqlite3.Connection:
        if self._is_closed:
            raise QueueError(
                f"Queue file {self.path!r} was closed by its last user. Nothing was stored; open it again."
            )
        if self.db is not None and self._identity != _identify(self.path):
            log.warning("Queue file %s was removed or replaced; using the one that is there now.", self.path)
        self.disconnect()
        self.db = open_connection(
            self.path,
            is_application_file=self._is_application_file,
            durability=self._durability,
            lock_timeout=timeout,
            journal=self._journal,
        )
        self._identity = _identify(self.path)
        self._busy = timeout
        return self.db


def _identify(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_dev


_registry = threading.RLock()
_shared: dict[str, SharedConnection] = {}
_closing: set[SharedConnection] = set()
# The collector runs in the middle of anything, so a finalizer takes no lock: it only says who is gone.
_abandoned: deque[SharedConnection] = deque()


def join(
    path: str,
    *,
    is_application_file: bool,
    journal: Literal["wal"] | None,
    durability: Durability,
    timeout: timedelta,
) -> SharedConnection:
    """Become a user of a file's connection; `leave` it when done."""
    _reap()
    with _registry:
        shared = _shared.setdefault(path, SharedConnection(path, is_application_file, journal))
        shared.users += 1
    try:
        shared.admit(durability, timeout)
    except BaseException:
        leave(shared)
        raise
    return shared


def leave(shared: SharedConnection) -> None:
    """Cease to use a connection; the last one closes it, after whoever uses it now."""
    with _registry:
        shared.users -= 1
        is_last = not shared.users and _shared.get(shared.path) is shared
        if is_last:
            del _shared[shared.path]
            _closing.add(shared)
    if is_last:
        shared.close()
        with _registry:
            _closing.discard(shared)
    _reap()


def abandon(shared: SharedConnection) -> None:
    """Cease to use a connection, from a finalizer: the next who joins or leaves one closes it."""
    _abandoned.append(shared)


def _reap() -> None:
    with contextlib.suppress(IndexError):
        while True:
            leave(_abandoned.popleft())


# -- forks and the end of the process ----------------------------------------------------------------------------------


class RenewedLock:
    """A lock that is free in the child of a fork: the thread that held it does not live there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[threading.Lock] = []
        _renewed.add(self)

    def __enter__(self) -> None:
        lock = self._lock
        lock.acquire()
        self._held.append(lock)

    def __exit__(self, *_: object) -> None:
        self._held.pop().release()

    def renew(self) -> None:
        self._lock = threading.Lock()


_renewed: weakref.WeakSet[RenewedLock] = weakref.WeakSet()


def _before_fork() -> None:
    _registry.acquire()
    for shared in (*_shared.values(), *_closing):
        shared.pause()


def _after_fork() -> None:
    for shared in (*_shared.values(), *_closing):
        shared.give()
    _registry.release()


def _after_fork_in_child() -> None:
    for lock in _renewed:
        lock.renew()
    _after_fork()
    _closing.clear()
    _reap()


def _at_exit() -> None:
    # A connection that is closed takes its WAL file away. A push that comes later still opens it again.
    for shared in list(_shared.values()):
        shared.disconnect_if_free()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
