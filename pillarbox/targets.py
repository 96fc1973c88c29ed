"""What a put can go through: telling sessions and connections apart, refusing those that cannot take it."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session

from pillarbox.errors import TransactionError

SYNC_TARGETS = "a SQLAlchemy Session, AsyncSession or Connection, or a psycopg, sqlite3 or PyMySQL connection"
ASYNC_TARGETS = "a SQLAlchemy AsyncConnection or AsyncSession, or an asyncpg, psycopg async or aiosqlite connection"


def session_of(target: Any) -> Session | None:
    """The session behind a session, an asynchronous one or a scoped one."""
    if isinstance(target, Session):
        return target
    if isinstance(target, scoped_session) or is_async(target, "async_scoped_session"):
        target = target()
    if is_async(target, "AsyncSession"):
        target = target.sync_session
    return target if isinstance(target, Session) else None


def is_async(target: object, *names: str) -> bool:
    """Whether an object is one of SQLAlchemy's asynchronous sessions and connections, or one of these."""
    return is_async_class(type(target), *names)


def is_async_class(kind: type, *names: str) -> bool:
    """Whether a class is, or comes from, one of SQLAlchemy's asynchronous ones."""
    # By name: SQLAlchemy's asyncio package needs greenlet, which a synchronous application may not have.
    wanted = names or ("AsyncConnection", "AsyncSession", "async_scoped_session")
    return any(
        base.__name__ in wanted and base.__module__.startswith("sqlalchemy.ext.asyncio") for base in kind.__mro__
    )


def check_connection(connection: sa.Connection | None) -> None:
    """Refuse a connection that cannot take an event with the caller's changes; asks the database nothing."""
    if connection is None or connection.closed:
        raise TransactionError("This connection is closed or was never opened; use an open one.")
    transaction = connection.get_nested_transaction() or connection.get_transaction()
    if connection.invalidated or (transaction is not None and not transaction.is_active):
        raise TransactionError("This connection's transaction has ended or failed; begin another one.")
    if commits_alone(connection) or _is_driver_autocommit(connection):
        raise autocommit_error("connection")


def commits_alone(bind: sa.Engine | sa.Connection) -> bool:
    """Whether SQLAlchemy was told to let every statement commit."""
    level = bind.get_execution_options().get("isolation_level")
    return (level or getattr(bind.dialect, "_on_connect_isolation_level", None)) == "AUTOCOMMIT"


def has_two_phases(connection: sa.Connection) -> bool:
    """Whether the transaction will be prepared first: PostgreSQL refuses that to one that has notified somebody."""
    return isinstance(connection.get_transaction(), sa.TwoPhaseTransaction)


def _is_driver_autocommit(connection: sa.Connection) -> bool:
    # SQLite's driver is in autocommit mode wherever transactions are begun by hand, as SQLAlchemy advises.
    detect = getattr(connection.dialect, "detect_autocommit_setting", None)
    if detect is None or connection.dialect.name == "sqlite":
        return False
    return bool(detect(connection.connection.dbapi_connection))


def autocommit_error(what: str) -> TransactionError:
    return TransactionError(
        f"This {what} commits every statement by itself, so an event would not share the fate of your "
        "changes; use another isolation level than AUTOCOMMIT."
    )


def refuse_lock(verb: str, target: object, lock_key: bool) -> bool:
    """A driver's own connection takes no `lock_key`."""
    if lock_key:
        kind = type(target).__name__
        raise TypeError(f"{verb}: lock_key needs a SQLAlchemy session or connection; got {kind}")
    return False


def wrong_target(verb: str, target: object, expected: str, other: str, others: str) -> TypeError:
    kind = f"{type(target).__module__}.{type(target).__qualname__}"
    return TypeError(f"{verb}: expected {expected}; got {kind}. For {others} use {other}().")
