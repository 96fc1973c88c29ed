"""What differs between the databases when a batch of values goes into one statement.

A batch of outcomes travels as one set of arrays (PostgreSQL) or one JSON document (the others) and is unnested in the
statement, so that there is never a statement a row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
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


class _Kind(NamedTuple):
    type: Any
    postgres: str
    mysql: str


_KINDS = {
    "row_id": _Kind(sa.BigInteger(), "BIGINT", "BIGINT"),
    "fence": _Kind(UuidText(), "UUID", "CHAR(36) CHARACTER SET ascii COLLATE ascii_bin"),
    "attempt": _Kind(sa.Integer(), "INTEGER", "INT"),
    "delay": _Kind(sa.Float(), "DOUBLE PRECISION", "DOUBLE"),
    "error": _Kind(sa.Text(), "TEXT", "LONGTEXT"),
    "parks": _Kind(sa.Boolean(), "BOOLEAN", "TINYINT"),
}


def is_mysql(dialect: str) -> bool:
    return dialect in ("mysql", "mariadb")


class GivenRows:
    """A batch as a table to join with; of its columns only those that a statement reads are sent."""

    def __init__(self, dialect: str, names: Collection[str] = Given._fields) -> None:
        self._is_postgres = dialect == "postgresql"
        self._indexes = [index for index, name in enumerate(Given._fields) if name in names]
        self.names = [Given._fields[index] for index in self._indexes]
        build = self._unnest if self._is_postgres else self._json_table if is_mysql(dialect) else self._json_each
        columns = {name: _KINDS[name].type for name in self.names}
        self.table = sa.text(build()).columns(**columns).subquery("given")

    @property
    def c(self) -> Any:
        return self.table.c

    def params(self, rows: Sequence[Given]) -> dict[str, Any]:
        """The statement's parameters for a batch, named so that they cannot meet a column's name."""
        if self._is_postgres:
            return {
                f"g_{name}": [row[index] for row in rows] for index, name in zip(self._indexes, self.names, strict=True)
            }
        wanted = [[row[index] for index in self._indexes] for row in rows]
        return {"g_rows": orjson.dumps(wanted).decode()}

    def _unnest(self) -> str:
        arrays = ", ".join(f"CAST(:g_{name} AS {_KINDS[name].postgres}[])" for name in self.names)
        return f"SELECT * FROM unnest({arrays}) AS g({', '.join(self.names)})"

    def _json_table(self) -> str:
        columns = ", ".join(f"{name} {_KINDS[name].mysql} PATH '$[{index}]'" for index, name in enumerate(self.names))
        return f"SELECT * FROM JSON_TABLE(:g_rows, '$[*]' COLUMNS ({columns})) AS g"

    def _json_each(self) -> str:
        columns = ", ".join(f"json_extract(value, '$[{index}]') AS {name}" for index, name in enumerate(self.names))
        return f"SELECT {columns} FROM json_each(:g_rows)"


class SameForAll:
    """A batch whose rows differ in nothing but their number: the numbers as a list, the rest as plain parameters.

    Most batches are such; the database then need not join them with anything.
    """

    def __init__(self, dialect: str, names: Collection[str]) -> None:
        self._dialect = dialect
        self._names = [name for name in names if name != "row_id"]
        self.c = SimpleNamespace(**{name: sa.bindparam(f"g_{name}", type_=_KINDS[name].type) for name in self._names})

    def is_row(self, column: ColumnElement[Any]) -> ColumnElement[bool]:
        """Whether a row is one of the batch's."""
        if self._dialect == "postgresql":
            return column == sa.any_(sa.bindparam("g_row_id", type_=postgresql.ARRAY(sa.BigInteger)))
        if self._dialect == "sqlite":
            return column.in_(sa.text("SELECT value FROM json_each(:g_row_id)").columns(value=sa.BigInteger))
        return column.in_(sa.bindparam("g_row_id", expanding=True))

    def params(self, numbers: Sequence[Any], first: Given) -> dict[str, Any]:
        """The statement's parameters: the rows' numbers, and one of the rows for what they share."""
        listed: Any = orjson.dumps(numbers).decode() if self._dialect == "sqlite" else numbers
        return {"g_row_id": listed, **{f"g_{name}": getattr(first, name) for name in self._names}}


class UsedColumns:
    """Hands out the columns of a given batch and remembers which were asked for."""

    def __init__(self, given: GivenRows) -> None:
        self._given = given
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return self._given.c[name]


def delete_given(dialect: str, table: sa.Table, row: str, match: Callable[[Any], ColumnElement[bool]]) -> sa.Delete:
    """Delete the rows of a table that match the given ones."""
    if dialect == "sqlite":  # SQLite has no DELETE ... USING
        other = table.alias("matched")
        return sa.delete(table).where(table.c[row].in_(sa.select(other.c[row]).where(match(other.c))))
    return sa.delete(table).where(match(table.c))
