"""Running a prepared insertion on a driver's own connection, without SQLAlchemy.

Each driver is known by the module of its connection class, so that none needs to be installed. A connection
that would commit every statement by itself is refused: an event must commit with the change that it tells of.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from pillarbox.errors import TransactionError
from pillarbox.insertion import Prepared

FAILED_TRANSACTION = "25P02"


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


def check(driver: str, connection: Any) -> None:
    """Refuse a connection that is closed, has failed or would commit by itself; asks the database nothing."""
    _CHECKS[driver](connection)


def run(driver: str, connection: Any, statements: Iterable[Prepared]) -> list[int]:
    """Run the statements in the caller's transaction; returns the positions of events that were there."""
    existing: list[int] = []
    start = 0
    cursor = _CURSORS[driver](connection)
    try:
        for statement in statements:
            known = None
            if statement.lock is not None:
                cursor.execute(*statement.lock)
            if statement.before is not None:
                cursor.execute(*statement.before)
                known = cursor.fetchall()
            cursor.execute(statement.sql, statement.params)
            if statement.lookup is not None:
                cursor.execute(*statement.lookup)
            rows = cursor.fetchall() if known is None else known
            existing += (start + position for position in statement.existing(rows))
            start += len(statement.ids)
    except Exception as error:
        raise_failed_transaction(error)
        raise
    finally:
        cursor.close()
    return existing


async def run_async(driver: str, connection: Any, statements: Iterable[Prepared]) -> list[int]:
    """`run` for asynchronous drivers."""
    existing: list[int] = []
    start = 0
    try:
        for statement in statements:
            rows = await _FETCHES[driver](connection, statement)
            existing += (start + position for position in statement.existing(rows))
            start += len(statement.ids)
    except Exception as error:
        raise_failed_transaction(error)
        raise
    return existing


def raise_failed_transaction(error: BaseException) -> None:
    """Say in our words that PostgreSQL refuses whatever comes after an error; do nothing for other errors."""
    if FAILED_TRANSACTION in (getattr(error, "sqlstate", None), getattr(error, "pgcode", None)):
        raise TransactionError(
            "This transaction has failed before and PostgreSQL takes nothing more in it; roll it back first."
        ) from error


# Rows must be tuples, whatever kind of row the application has chosen for its connection.


def _psycopg_cursor(connection: Any) -> Any:
    from psycopg.rows import tuple_row

    return connection.cursor(row_factory=tuple_row)


def _psycopg2_cursor(connection: Any) -> Any:
    from psycopg2.extensions import cursor  # type: ignore[import-untyped, unused-ignore]

    return connection.cursor(cursor_factory=cursor)


def _sqlite_cursor(connection: Any) -> Any:
    cursor = connection.cursor()
    cursor.row_factory = None
    return cursor


def _pymysql_cursor(connection: Any) -> Any:
    from pymysql.cursors import Cursor

    return connection.cursor(Cursor)


_CURSORS: dict[str, Callable[[Any], Any]] = {
    "psycopg": _psycopg_cursor,
    "psycopg2": _psycopg2_cursor,
    "sqlite3": _sqlite_cursor,
    "pymysql": _pymysql_cursor,
}


async def _fetch_asyncpg(connection: Any, statement: Prepared) -> Sequence[Any]:
    if statement.lock is not None:
        await connection.fetch(statement.lock[0], *statement.lock[1])
    rows: Sequence[Any] = await connection.fetch(statement.sql, *statement.params)
    return rows


async def _fetch_psycopg(connection: Any, statement: Prepared) -> Sequence[Any]:
    async with _psycopg_cursor(connection) as cursor:
        if statement.lock is not None:
            await cursor.execute(*statement.lock)
        await cursor.execute(statement.sql, statement.params)
        rows: Sequence[Any] = await cursor.fetchall()
    return rows


async def _fetch_aiosqlite(connection: Any, statement: Prepared) -> Sequence[Any]:
    async with connection.cursor() as cursor:
        cursor.row_factory = None
        await cursor.execute(statement.sql, statement.params)
        rows: Sequence[Any] = await cursor.fetchall()
    return rows


_FETCHES: dict[str, Callable[[Any, Prepared], Awaitable[Sequence[Any]]]] = {
    "asyncpg": _fetch_asyncpg,
    "psycopg": _fetch_psycopg,
    "aiosqlite": _fetch_aiosqlite,
}


def _closed(driver: str) -> TransactionError:
    return TransactionError(f"This {driver} connection is closed; put events through an open one.")


def _failed(driver: str) -> TransactionError:
    return TransactionError(f"This {driver} connection's transaction has failed; roll it back first.")


def _alone(driver: str, hint: str) -> TransactionError:
    return TransactionError(
        f"This {driver} connection has no open transaction and would commit the event on its own. {hint}"
    )


def _check_asyncpg(connection: Any) -> None:
    from asyncpg.exceptions import InterfaceError

    try:
        is_closed = connection.is_closed()
    except InterfaceError as error:  # a pool's proxy whose connection was released
        raise _closed("asyncpg") from error
    if is_closed:
        raise _closed("asyncpg")
    if not connection.is_in_transaction():
        raise _alone("asyncpg", "Put inside `async with connection.transaction():`.")


def _check_psycopg(connection: Any) -> None:
    if connection.closed:
        raise _closed("psycopg")
    status = connection.info.transaction_status.name
    if status == "INERROR":
        raise _failed("psycopg")
    if connection.autocommit and status == "IDLE":
        raise _alone("psycopg", "Put inside `with connection.transaction():`.")


def _check_psycopg2(connection: Any) -> None:
    if connection.closed:
        raise _closed("psycopg2")
    status = connection.get_transaction_status()
    if status == 3:
        raise _failed("psycopg2")
    if connection.autocommit and status == 0:
        raise _alone("psycopg2", "Set `connection.autocommit = False`.")


def _check_sqlite(connection: Any) -> None:
    try:
        own = getattr(connection, "_conn", connection)  # aiosqlite's connection wraps the standard library's
        own.total_changes  # noqa: B018 - raises when the connection is closed
    except (sqlite3.ProgrammingError, ValueError) as error:
        raise _closed("SQLite") from error
    if own.in_transaction:
        return
    autocommit = getattr(own, "autocommit", -1)  # from Python 3.12 on; -1 leaves it to isolation_level
    if autocommit is True or (autocommit == -1 and own.isolation_level is None):
        raise _alone("SQLite", "Execute BEGIN first.")


def _check_pymysql(connection: Any) -> None:
    if not connection.open:
        raise _closed("PyMySQL")
    is_in_transaction = bool(connection.server_status & 1)
    if connection.get_autocommit() and not is_in_transaction:
        raise _alone("PyMySQL", "Call `connection.begin()` first.")


_CHECKS: dict[str, Callable[[Any], None]] = {
    "asyncpg": _check_asyncpg,
    "psycopg": _check_psycopg,
    "psycopg2": _check_psycopg2,
    "sqlite3": _check_sqlite,
    "aiosqlite": _check_sqlite,
    "pymysql": _check_pymysql,
}
