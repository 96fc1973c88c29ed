"""What a database's error says of a batch: whose fault it is, and whether to try again.

The databases' own codes decide (SQLSTATE, MySQL's numbers, SQLite's names); the driver's exception class only where
there is none. An error that nobody knows counts as an outage: nothing may be lost for a reason not understood.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

import sqlalchemy as sa


class Kind(Enum):
    BAD = "bad"
    """This event can never be written."""
    LATER = "later"
    """This event may be written once something else is there."""
    CONFLICT = "conflict"
    """The transaction was undone for another's sake and would succeed when run again."""
    WRONG = "wrong"
    """The destination or a statement is not what was configured; no event is to blame."""
    DOWN = "down"
    """The database cannot take anything now."""


# By prefix, the longest one first: a class of SQLSTATEs has two characters.
_POSTGRES: Final = {
    "23503": Kind.LATER,
    "55P03": Kind.CONFLICT,
    # A batch too slow for the server's statement_timeout: half of it may be quick enough.
    "57014": Kind.LATER,
    "25001": Kind.WRONG,
    "25006": Kind.DOWN,
    **dict.fromkeys(("08", "28", "3D", "53", "57", "58", "XX"), Kind.DOWN),
    "54": Kind.BAD,
    "21": Kind.BAD,
    "22": Kind.BAD,
    "23": Kind.BAD,
    "44": Kind.BAD,
    "P0": Kind.BAD,
    "40": Kind.CONFLICT,
    "42": Kind.WRONG,
    "3F": Kind.WRONG,
    "26": Kind.WRONG,
    "0A": Kind.WRONG,
}
_MYSQL: Final = {
    **dict.fromkeys((1216, 1217, 1451, 1452), Kind.LATER),
    **dict.fromkeys((1020, 1205, 1213, 3572), Kind.CONFLICT),
    # Duplicate, null, check (MySQL, MariaDB), too long, out of range, truncated, wrong values, JSON, division, SIGNAL.
    **dict.fromkeys((1062, 1048, 1586, 3819, 4025, 1406, 1264, 1265, 1292, 1366, 1367, 1411, 1690), Kind.BAD),
    **dict.fromkeys((3140, 3141, 3144, 3146, 3156, 3903, 4038, 1365, 1441, 1644, 1153, 1301, 4078), Kind.BAD),
    # Table, column, function, syntax, count of columns, no default, rights, database, partition.
    **dict.fromkeys((1146, 1054, 1305, 1064, 1136, 1364, 1142, 1143, 1370, 1044, 1049, 1047, 1235, 1526), Kind.WRONG),
    # There already, not there to drop, ambiguous, twice, from itself, misplaced, wrong number of columns.
    **dict.fromkeys((1050, 1051, 1060, 1061, 1091, 1052, 1066, 1110, 1072, 1093, 1111, 1222, 1241), Kind.WRONG),
    # Connections, memory, disk, shutdown, rights to log in, read-only servers, sessions that were ended.
    **dict.fromkeys((1040, 1203, 1226, 1021, 1037, 1041, 1114, 1030, 1053, 1317, 1045, 1129, 1130), Kind.DOWN),
    **dict.fromkeys((1290, 1792, 1836, 1927, 4031), Kind.DOWN),
}
_SQLITE: Final = {
    "SQLITE_CONSTRAINT_FOREIGNKEY": Kind.LATER,
    "SQLITE_CONSTRAINT": Kind.BAD,
    "SQLITE_MISMATCH": Kind.BAD,
    "SQLITE_TOOBIG": Kind.BAD,
    "SQLITE_BUSY": Kind.CONFLICT,
    "SQLITE_LOCKED": Kind.CONFLICT,
    "SQLITE_ERROR": Kind.WRONG,
    "SQLITE_RANGE": Kind.WRONG,
    **dict.fromkeys(("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_READONLY"), Kind.DOWN),
    **dict.fromkeys(("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_NOMEM", "SQLITE_PROTOCOL", "SQLITE_PERM"), Kind.DOWN),
}
_CLASSES: Final = (
    ((sa.exc.DataError, sa.exc.IntegrityError), Kind.BAD),
    ((sa.exc.ProgrammingError, sa.exc.NotSupportedError), Kind.WRONG),
)


def judge(error: BaseException) -> Kind | None:
    """Say what an error means; None when it is no error of a database or its connection."""
    if isinstance(error, OverflowError | UnicodeError):
        return Kind.BAD  # a driver could not write a value: too large a number, half a surrogate pair
    if isinstance(error, OSError | TimeoutError):
        return Kind.DOWN
    cause = _origin(error)
    number = cause.args[0] if cause.args else None
    if isinstance(number, int) and number in _MYSQL:
        return _MYSQL[number]
    state = getattr(cause, "sqlstate", None)
    if isinstance(state, str) and not isinstance(number, int):
        return Kind.WRONG if _has_no_partition(cause) else judge_code(state) or Kind.DOWN
    if not isinstance(error, sa.exc.DBAPIError | sa.exc.TimeoutError):
        return None
    name = getattr(cause, "sqlite_errorname", None)
    if isinstance(name, str):
        if "malformed JSON" in str(cause):
            return Kind.BAD
        return judge_code(name) or Kind.DOWN
    if getattr(error, "connection_invalidated", False):
        return Kind.DOWN
    return next((kind for classes, kind in _CLASSES if isinstance(error, classes)), Kind.DOWN)


def judge_code(code: str | int) -> Kind | None:
    """Say what a database's own code means: a SQLSTATE, MySQL's number or SQLite's name; None when it is unknown."""
    if isinstance(code, int):
        return _MYSQL.get(code)
    kinds = _SQLITE if code.startswith("SQLITE_") else _POSTGRES
    return next((kinds[prefix] for prefix in sorted(kinds, key=len, reverse=True) if code.startswith(prefix)), None)


def is_duplicate(error: sa.exc.DBAPIError) -> bool:
    """Whether MySQL or MariaDB refused a row because its unique key is there."""
    return bool(error.orig is not None and error.orig.args and error.orig.args[0] == 1062)


def is_missing(error: BaseException) -> bool:
    """Whether a table or a schema is not there."""
    cause = _origin(error)
    number = cause.args[0] if cause.args else None
    return getattr(cause, "sqlstate", None) in ("42P01", "3F000") or number == 1146 or "no such table" in str(cause)


def describe(error: BaseException) -> str:
    """The database's own words, without the statement and its values."""
    cause = _origin(error)
    if len(cause.args) == 2 and isinstance(cause.args[0], int) and not isinstance(cause, OSError):
        reason = cause.__cause__  # why a connection failed
        return f"{cause.args[1]} ({cause.args[0]})" + (f": {reason}" if reason is not None else "")
    return str(cause).strip().partition("\n")[0] or type(cause).__name__


def _origin(error: BaseException) -> Any:
    cause = getattr(error, "orig", None) or error
    # SQLAlchemy puts the name of asyncpg's class before its message.
    inner = getattr(cause, "__cause__", None)
    return inner if hasattr(inner, "sqlstate") else cause


def _has_no_partition(cause: Any) -> bool:
    """Whether PostgreSQL found no partition for a row: it says so as of a check of the table, but names none."""
    if cause.sqlstate != "23514":
        return False
    diagnosed = getattr(cause, "diag", cause)
    # A trigger that raises the same code names no table either.
    return getattr(diagnosed, "constraint_name", None) is None and getattr(diagnosed, "table_name", None) is not None
