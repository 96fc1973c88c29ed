"""The caller's own SQLite transaction as a place to push into: which connections can take a row, and which cannot."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any

import sqlalchemy as sa

from pillarbox.errors import QueueError, TransactionError
from pillarbox.sync.opening import explain
from pillarbox.sync.tables import QUEUE
from pillarbox.targets import check_connection, is_async, session_of

_TARGETS = "a sqlite3.Connection, or a SQLAlchemy Connection or Session on SQLite"


class JoinedConnection:
    """The caller's connection, with the two methods of a cursor; nothing here commits."""

    def __init__(self, target: Any, path: str) -> None:
        self._path = path
        self._connection: sa.Connection | None = None
        if isinstance(target, sqlite3.Connection):
            self._driver: Any = target
        else:
            self._connection = _connection_of(target)
        self._check_file()

    @contextlib.contextmanager
    def pushing(self) -> Iterator[None]:
        """Push all or nothing into a transaction that the caller ends; one that was begun here ends if that fails."""
        began = self._begin()
        self.execute("SAVEPOINT pillarbox_push")
        try:
            yield
        except BaseException:
            # SQLite may have ended the whole transaction by itself, for instance when the disk is full.
            if self._driver.in_transaction:
                for sql in ["ROLLBACK"] if began else ["ROLLBACK TO pillarbox_push", "RELEASE pillarbox_push"]:
                    self.execute(sql)
            raise
        self.execute("RELEASE pillarbox_push")

    def _begin(self) -> bool:
        driver = self._driver
        mode = getattr(driver, "autocommit", None)  # new in Python 3.12; a number stands for the older way
        if not isinstance(mode, bool) and driver.isolation_level is not None:
            self._refuse_savepoint()
        if driver.in_transaction:
            return False
        if mode is True or (not isinstance(mode, bool) and driver.isolation_level is None):
            raise TransactionError(
                f"This connection to {self._path!r} has no open transaction and commits every statement by itself, "
                "so the pushed row would not share the fate of your changes. Execute BEGIN first."
            )
        self.execute("BEGIN")
        return True

    def _refuse_savepoint(self) -> None:
        # Nothing tells a savepoint that SQLite took for the transaction from one within a transaction.
        if self._connection is not None and self._connection.in_nested_transaction():
            raise TransactionError(
                f"This connection to {self._path!r} is inside begin_nested(), and its driver begins a transaction at "
                "the first change only: a savepoint outside of one commits by itself, so the pushed row could outlive "
                "the rollback of your transaction. Push outside of begin_nested(), or let SQLAlchemy begin: set the "
                'driver\'s isolation_level to None on the event "connect" and execute BEGIN on "begin", as in '
                "https://docs.sqlalchemy.org/en/20/dialects/sqlite.html."
            )

    def execute(self, sql: str, given: tuple[Any, ...] = ()) -> Any:
        try:
            if self._connection is not None:
                return self._connection.exec_driver_sql(sql, given)
            return self._cursor().execute(sql, given)
        except (sqlite3.Error, UnicodeEncodeError, sa.exc.DBAPIError) as error:
            raise self._explain(error) from error

    def executemany(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        try:
            if self._connection is not None:
                self._connection.exec_driver_sql(sql, list(rows))
            else:
                self._cursor().executemany(sql, rows)
        except (sqlite3.Error, UnicodeEncodeError, sa.exc.DBAPIError) as error:
            raise self._explain(error) from error

    def query(self, sql: str) -> list[Any]:
        """Execute a statement and return its rows, if it has any."""
        done = self.execute(sql)
        return list(done) if getattr(done, "returns_rows", True) else []

    def _cursor(self) -> sqlite3.Cursor:
        cursor: sqlite3.Cursor = self._driver.cursor()
        cursor.row_factory = None
        return cursor

    def _check_file(self) -> None:
        found = [row[2] for row in self.query("PRAGMA database_list") if row[1] in ("main", b"main")]
        file = os.fsdecode(found[0] or "") if found else ""
        if not file or os.path.realpath(file) != self._path:
            raise TransactionError(
                f"This connection's database is {file or 'in memory'!r}; the queue lives in {self._path!r}. Expected a "
                "connection to that file: name the application's database in SqlQueue(file=…)."
            )
        if self._connection is not None:
            # Known only now: the first statement is what connects, and what begins where that is done by hand.
            self._driver = self._connection.connection.driver_connection

    def _explain(self, error: Exception) -> QueueError:
        cause = getattr(error, "orig", error)
        if "no such table" in str(cause):
            return QueueError(
                f"{self._path!r} has no table {QUEUE!r}. Nothing was stored; make the queue's tables once with "
                "create_in(connection)."
            )
        return explain(cause, self._path, None)


def _connection_of(target: Any) -> sa.Connection:
    if is_async(target):
        raise TypeError(
            f"push_in: expected {_TARGETS}; got {type(target).__name__}. Use `await session.run_sync(lambda each: "
            "queue.push_in(each, …))`, and the same with a connection."
        )
    session = session_of(target)
    connection = target if session is None else session.connection()
    if not isinstance(connection, sa.Connection):
        kind = f"{type(target).__module__}.{type(target).__qualname__}"
        raise TypeError(f"push_in: expected {_TARGETS}; got {kind}")
    if connection.dialect.name != "sqlite":
        raise TransactionError(
            f"push_in: expected a connection to SQLite, where the queue lives; got one to {connection.dialect.name}. "
            "Push with push(), which is not part of that database's transaction."
        )
    check_connection(connection)
    return connection
