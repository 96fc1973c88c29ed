"""Transactions that the database undid while their session can go on.

MySQL and MariaDB answer a deadlock by rolling the whole transaction back, but to SQLAlchemy it is as good as before: a
block that catches the error would commit what comes after it, and only that.
"""

from __future__ import annotations

from typing import Final
from weakref import WeakSet

import sqlalchemy as sa
from sqlalchemy import event as sa_event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError

from pillarbox.actions.conflicts import DatabaseConflict
from pillarbox.errors import TransactionError

# PostgreSQL: serialization failure, deadlock. MySQL and MariaDB: deadlock, row changed since it was read.
_STATES: Final = ("40001", "40P01")
_NUMBERS: Final = (1213, 1020)
_TIMEOUT: Final = 1205

_undone: Final[WeakSet[sa.RootTransaction]] = WeakSet()
_timed_out: Final[WeakSet[sa.RootTransaction]] = WeakSet()


def is_undone(error: DBAPIError) -> bool:
    """Whether the database undid the transaction at once; a lock that did not come in time is not meant."""
    return getattr(error.orig, "sqlstate", None) in _STATES or _read_number(error.orig) in _NUMBERS


def check_undone(name: str, db: sa.Connection) -> None:
    """Refuse to go on in a transaction whose changes so far are gone."""
    transaction = db.get_transaction()
    if transaction in _undone or (transaction in _timed_out and _ends_at_timeout(db)):
        # The cause lets a function be run again.
        raise TransactionError(
            f"Action {name!r}: the database undid this transaction after a deadlock or another conflict, and the error "
            "was caught, so what was changed before it is gone. Let such errors pass, and run the whole transaction "
            "again."
        ) from DatabaseConflict("the transaction was undone")


def _ends_at_timeout(db: sa.Connection) -> bool:
    # Without this setting of the server only the statement that waited is undone.
    return bool(db.exec_driver_sql("SELECT @@innodb_rollback_on_timeout").scalar_one())


def _read_number(error: BaseException | None) -> object:
    return error.args[0] if error is not None and error.args else None


@sa_event.listens_for(sa.Engine, "handle_error")
def _note_undone(context: ExceptionContext) -> None:
    if context.connection is None or context.dialect.name not in ("mysql", "mariadb"):
        return
    number, transaction = _read_number(context.original_exception), context.connection.get_transaction()
    if transaction is not None and number in _NUMBERS:
        _undone.add(transaction)
    elif transaction is not None and number == _TIMEOUT:
        _timed_out.add(transaction)
