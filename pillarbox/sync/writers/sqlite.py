"""Writing to a SQLite file, in a thread of its own, since the driver blocks.

A batch takes the write lock first and waits for it in small steps, so that a call that is cancelled ends. The file
keeps its journal mode. A file that was replaced at its path is opened anew: what is written to the old one is lost.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, Literal, TypeVar
from urllib.parse import unquote, urlsplit

from pillarbox.durations import format_duration
from pillarbox.errors import ConfigError
from pillarbox.sinks.sql.failures import Kind, describe, judge_code
from pillarbox.sinks.threads import finish
from pillarbox.sync.writers import Statement
from pillarbox.sync.writers.shared import (
    TIMEOUT,
    Failed,
    Lost,
    Result,
    Session,
    Transactions,
    check_arguments,
    check_statement,
    read_address,
    read_timeout,
)
from pillarbox.values import Read, read_switch

T = TypeVar("T")

GLANCE: Final = 0.05
STEPS: Final = 10_000
"""After how many of SQLite's instructions a statement looks whether it was given up."""
_READERS: Final[dict[str, Read]] = {"timeout": read_timeout, "foreign_keys": read_switch, "create": read_switch}
# The lock may be waited for as long as a transaction may take, so that it is this wait that ends first.
_ROOM: Final = timedelta(seconds=5)


class SqliteWriter:
    """Writes to one SQLite file, a batch a transaction. Url: `sqlite:///path`, with four slashes from the root.

    `foreign_keys` is whether they are enforced (they are), `create` whether a missing file is made (it is not).
    `timeout`, a duration or a number of seconds, is how long the file may be locked by others.
    """

    batches: Literal["atomic"] = "atomic"
    dialect: Literal["sqlite"] = "sqlite"
    concurrency = 1

    def __init__(
        self,
        url: str,
        *,
        timeout: timedelta | float | str | None = None,
        foreign_keys: bool | None = None,
        create: bool | None = None,
    ) -> None:
        own = {"timeout": timeout, "foreign_keys": foreign_keys, "create": create}
        address = read_address(url, own, _READERS)
        parts = urlsplit(address.url)
        self._path = unquote(parts.path.removeprefix("/"))
        if parts.netloc or not self._path or self._path == ":memory:":
            raise ConfigError(f"Writer {address.name!r}: expected the path of a SQLite file, e.g. sqlite:///shop.db")
        self._timeout: timedelta = address.options.get("timeout", TIMEOUT)
        self._keys = bool(address.options.get("foreign_keys", True))
        self._creates = bool(address.options.get("create", False))
        self._transactions = Transactions(address.name, self._connect, connections=1, timeout=self._timeout + _ROOM)

    async def write_batch(self, statements: Sequence[Statement]) -> Sequence[Mapping[str, Any]]:
        """Run all statements in one transaction, or none: then the last result is the failure.

        Raises `SinkUnavailable` when the file cannot be opened or written to, or stays locked.
        """
        return await self._transactions.write(statements, _prepare)

    async def close(self) -> None:
        await self._transactions.close()

    async def _connect(self) -> Session:
        session = _SqliteSession(self._path, timeout=self._timeout)
        try:
            await session.open(keys=self._keys, creates=self._creates)
        except BaseException:
            await session.close()
            raise
        return session


@lru_cache(maxsize=4096)
def _check_binds(sql: str, count: int) -> None:
    check_statement(sql, "sqlite", arguments=count)


def _prepare(sql: str, args: Sequence[Any]) -> Statement:
    _check_binds(sql, len(args))
    return sql, check_arguments(args)


class _SqliteSession:
    def __init__(self, path: str, *, timeout: timedelta) -> None:
        self._path = path
        self._timeout = timeout
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pillarbox-sync-writer")
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._stop = threading.Event()

    async def open(self, *, keys: bool, creates: bool) -> None:
        await self._in_thread(lambda: self._open_here(keys=keys, creates=creates))

    async def run(self, statements: Sequence[Statement], *, is_reading: bool) -> list[Result]:
        return await self._in_thread(lambda: self._run_here(statements, is_reading))

    async def commit(self, count: int) -> None:
        await self._in_thread(lambda: self._commit_here(count))

    async def rollback(self) -> None:
        await self._in_thread(self._rollback_here)

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, _close_here, connection)
        self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await finish(asyncio.get_running_loop().run_in_executor(self._thread, work), self.cut)

    async def interrupt(self) -> None:
        self.cut()

    def cut(self) -> None:
        self._stop.set()
        if self._connection is not None:
            self._connection.interrupt()

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _open_here(self, *, keys: bool, creates: bool) -> None:
        if not creates and not os.path.exists(self._path):
            raise Lost(f"there is no file {self._path!r}; create=true makes it")
        try:
            self._connection = sqlite3.connect(
                self._path, timeout=GLANCE, isolation_level=None, check_same_thread=False
            )
            # An interrupt ends only what is running: a statement that begins just after it would run on.
            self._connection.set_progress_handler(self._stop.is_set, STEPS)
            self._connection.execute(f"PRAGMA foreign_keys = {'ON' if keys else 'OFF'}")
            self._file = _identify(self._path)
        except sqlite3.Error as error:
            raise Lost(_describe(error)) from error

    def _run_here(self, statements: Sequence[Statement], is_reading: bool) -> list[Result]:
        assert self._connection is not None
        if _identify(self._path) != self._file:
            raise Lost(f"the file {self._path!r} is not the one that was opened")
        results: list[Result] = []
        try:
            if not is_reading:
                self._patiently("BEGIN IMMEDIATE")
            cursor = self._connection.cursor()
            for sql, args in statements:
                cursor.execute(sql, args)
                results.append(_read_result(cursor))
        except (sqlite3.Error, sqlite3.Warning, OverflowError) as error:
            raise self._judge(error, len(results)) from error
        return results

    def _commit_here(self, count: int) -> None:
        try:
            # Readers of a file without WAL can hold up a commit.
            self._patiently("COMMIT")
        except sqlite3.Error as error:
            # A deferred foreign key. The last statement is blamed; when it was another, the try without it tells.
            failed = self._judge(error, count - 1)
            if isinstance(failed, Failed) and failed.kind not in (Kind.BAD, Kind.LATER):
                raise Lost(str(failed)) from error
            raise failed from error

    def _rollback_here(self) -> None:
        assert self._connection is not None
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise Lost(_describe(error)) from error

    def _patiently(self, statement: str) -> None:
        assert self._connection is not None
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not self._stop.is_set():
            try:
                self._connection.execute(statement)
                return
            except sqlite3.OperationalError as error:
                if not getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY"):
                    raise
                if time.monotonic() > deadline:
                    text = f"the file was locked by another for {format_duration(self._timeout)}"
                    raise Failed(0, Kind.DOWN, text) from error
        raise Lost("it was given up")

    def _judge(self, error: Exception, index: int) -> Failed | Lost:
        name = getattr(error, "sqlite_errorname", None)
        if name is None:
            return Failed(index, Kind.BAD, describe(error))  # the driver itself refused, for instance a number
        if name == "SQLITE_INTERRUPT":
            return Lost(_describe(error))
        return Failed(index, judge_code(name), _describe(error))


def _close_here(connection: sqlite3.Connection) -> None:
    connection.set_progress_handler(None, 0)
    # By hand: a cursor that somebody's traceback keeps would keep the transaction open, and with it the file locked.
    with suppress(sqlite3.Error):
        connection.rollback()
    connection.close()


def _identify(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _describe(error: Exception) -> str:
    return f"{describe(error)} ({getattr(error, 'sqlite_errorname', type(error).__name__)})"


def _read_result(cursor: sqlite3.Cursor) -> Result:
    if cursor.description is None:
        return {"ok": True, "rows_affected": max(0, cursor.rowcount)}
    return {"ok": True, "rows": [list(row) for row in cursor.fetchall()]}
