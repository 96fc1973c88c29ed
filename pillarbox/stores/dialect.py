"""What differs between the databases when a batch of values goes into one statement.

A batch of outcomes travels as one set of arrays (PostgreSQL) or one JSON document (the others) and is unnested in the
statement, so that there is never a statement a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import orjson
import sqlalchemy as sa
from sqlalchemy.sql.elements import ColumnElement

from pillarbox.layouts.clock import UuidText


class Given(NamedTuple):
    """One row's part of a batch, as settlements see it."""

    row_id: Any
    fence: Any = None
    attempt: int = 0
    delay: float = 0.0
    error: str | None = None
    parks: bool = False


_TYPES: dict[str, Any] = {
    "row_id": sa.BigInteger(),
    "fence": UuidText(),
    "attempt": sa.Integer(),
    "delay": sa.Float(),
    "error": sa.Text(),
    "parks": sa.Boolean(),
}

_POSTGRES = (
    "SELECT * FROM unnest(CAST(:g_row_id AS BIGINT[]), CAST(:g_fence AS UUID[]), CAST(:g_attempt AS INTEGER[]),"
    " CAST(:g_delay AS DOUBLE PRECISION[]), CAST(:g_error AS TEXT[]), CAST(:g_parks AS BOOLEAN[]))"
    " AS g(row_id, fence, attempt, delay, error, parks)"
)
_MYSQL = (
    "SELECT * FROM JSON_TABLE(:g_rows, '$[*]' COLUMNS (row_id BIGINT PATH '$[0]',"
    " fence CHAR(36) CHARACTER SET ascii COLLATE ascii_bin PATH '$[1]', attempt INT PATH '$[2]',"
    " delay DOUBLE PATH '$[3]', error LONGTEXT PATH '$[4]', parks TINYINT PATH '$[5]')) AS g"
)
_SQLITE = "SELECT " + ", ".join(
    f"json_extract(value, '$[{index}]') AS {name}" for index, name in enumerate(_TYPES)
) + " FROM json_each(:g_rows)"


# Named so that they cannot meet a column's name.
_BINDS = tuple(f"g_{name}" for name in Given._fields)


def is_mysql(dialect: str) -> bool:
    return dialect in ("mysql", "mariadb")


def given_rows(dialect: str) -> sa.Subquery:
    """The given batch as a table to join with."""
    text = _POSTGRES if dialect == "postgresql" else _MYSQL if is_mysql(dialect) else _SQLITE
    return sa.text(text).columns(**_TYPES).subquery("given")


def given_params(dialect: str, rows: Sequence[Given]) -> dict[str, Any]:
    """The statement's parameters for a batch."""
    if dialect == "postgresql":
        return dict(zip(_BINDS, map(list, zip(*rows, strict=True)), strict=True))
    return {"g_rows": orjson.dumps([tuple(row) for row in rows]).decode()}


def delete_given(
    dialect: str, table: sa.Table, row: str, given: sa.Subquery, match: Callable[[Any], ColumnElement[bool]]
) -> sa.Delete:
    """Delete the rows of a table that match the given ones."""
    if dialect == "sqlite":  # SQLite has no DELETE ... USING
        other = table.alias("matched")
        return sa.delete(table).where(table.c[row].in_(sa.select(other.c[row]).where(match(other.c))))
    return sa.delete(table).where(match(table.c))
