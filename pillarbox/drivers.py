"""Running a prepared insertion on whatever connection the application has.

Each driver is known by the module of its connection class, so that none needs to be installed. A connection that
would commit every statement by itself is refused: an event must commit with the change that it tells of.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pillarbox.errors import TransactionError
from pillarbox.insertion import Prepared, as_ids

SYNC = ("psycopg", "psycopg2", "sqlite3", "pymysql")
ASYNC = ("asyncpg", "psycopg", "aiosqlite")


def driver_of(connection: object) -> tuple[str, bool] | None:
    """The driver of a raw connection and whether it is asynchronous; None when it is not one."""
    for base in type(connection).__mro__:
        module, name = base.__module__.partition(".")[0], base.__name__
        if module == "asyncpg" and name in ("Connection", "PoolConnectionProxy"):
            return "asyncpg", True
        if module == "psycopg" and name in ("Connection", "AsyncConnection"):
            return "psycopg", name == "AsyncConnection"
        if module == "psycopg2" and name == "connection":
            return "psycopg2", False
        if module in ("sqlite3", "_sqlite3") and name == "Connection":
            return "sqlite3", False
        if module == "aiosqlite" and name == "Connection":
            return "aiosqlite", True
        if module == "pymysql" and name == "Connection":
            return "pymysql", False
    return None


def run(driver: str, connection: Any, prepared: Sequence[Prepared]) -> set[Any]:
    """Run the statements in the caller's transaction; returns the ids of the rows that are new."""
    _CHECKS[driver](connection)
    new: set[Any] = set()
    cursor = connection.cursor()
    try:
        for statement in prepared:
            cursor.execute(statement.sql, statement.params)
            if statement.lookup is not None:
                cursor.execute(*statement.lookup)
            new |= as_ids(cursor.fetchall())
    finally:
        cursor.close()
    return new


async def run_async(driver: str, connection: Any, prepared: Sequence[Prepared]) -> set[Any]:
    """The same for asynchronous drivers."""
    _CHECKS[driver](connection)
    new: set[Any] = set()
    fetch = _FETCHES[driver]
    for statement in prepared:
        new |= as_ids(await fetch(connection, statement))
    return new


async def _fetch_asyncpg(connection: Any, statement: Prepared) -> Sequence[Any]:
    rows: Sequence[Any] = await connection.fetch(statement.sql, *statement.params)
    return rows


async def _fetch_cursor(connection: Any, statement: Prepared) -> Sequence[Any]:
    cursor = await connection.execute(statement.sql, statement.params)
    try:
        rows: Sequence[Any] = await cursor.fetchall()
        return rows
    finally:
        await cursor.close()


_FETCHES: dict[str, Callable[[Any, Prepared], Awaitable[Sequence[Any]]]] = {
    "asyncpg": _fetch_asyncpg,
    "psycopg": _fetch_cursor,
    "aiosqlite": _fetch_cursor,
}


def _refuse(driver: str, hint: str) -> TransactionError:
    return TransactionError(
        f"This {driver} connection has no open transaction and would commit the event on its own. {hint}"
    )


def _check_asyncpg(connection: Any) -> None:
    if connection.is_closed():
        raise TransactionError("This asyncpg connection is closed; put events through an open one.")
    if not connection.is_in_transaction():
        raise _refuse("asyncpg", "Put inside `async with connection.transaction():`.")


def _check_psycopg(connection: Any) -> None:
    if connection.closed:
        raise TransactionError("This psycopg connection is closed; put events through an open one.")
    status = connection.info.transaction_status.name
    if status == "INERROR":
        raise TransactionError("This psycopg connection's transaction has failed; roll it back before putting events.")
    if connection.autocommit and status == "IDLE":
        raise _refuse("psycopg", "Put inside `with connection.transaction():`.")


def _check_psycopg2(connection: Any) -> None:
    if connection.closed:
        raise TransactionError("This psycopg2 connection is closed; put events through an open one.")
    status = connection.get_transaction_status()
    if status == 3:
        raise TransactionError("This psycopg2 connection's transaction has failed; roll it back before putting events.")
    if connection.autocommit and status == 0:
        raise _refuse("psycopg2", "Set `connection.autocommit = False`.")


def _check_sqlite(connection: Any) -> None:
    try:
        is_open, level = connection.in_transaction, connection.isolation_level
        autocommit = getattr(connection, "autocommit", -1)  # from Python 3.12 on
        connection.total_changes  # noqa: B018 - raises when the connection is closed
    except (sqlite3.ProgrammingError, ValueError) as error:
        raise TransactionError("This SQLite connection is closed; put events through an open one.") from error
    if not is_open and (autocommit is True or (autocommit == -1 and level is None)):
        raise _refuse("SQLite", "Execute BEGIN first.")


def _check_pymysql(connection: Any) -> None:
    if not connection.open:
        raise TransactionError("This PyMySQL connection is closed; put events through an open one.")
    is_in_transaction = bool(connection.server_status & 1)
    if connection.get_autocommit() and not is_in_transaction:
        raise _refuse("PyMySQL", "Call `connection.begin()` first.")


_CHECKS: dict[str, Callable[[Any], None]] = {
    "asyncpg": _check_asyncpg,
    "psycopg": _check_psycopg,
    "psycopg2": _check_psycopg2,
    "sqlite3": _check_sqlite,
    "aiosqlite": _check_sqlite,
    "pymysql": _check_pymysql,
}
