"""What differs between the databases when a batch of values goes into one statement.

A batch of outcomes travels as one set of arrays (PostgreSQL) or one JSON document (the others) and is unnested in the
statement, so that there is never a statement a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.sql.elements import ColumnElement

# At most seven bytes each as they are sent, so less than a quarter of MariaDB's limit.
_MOST_TEXT = 500_000


class Given(NamedTuple):
    """One row's part of a batch, as settlements see it."""

    row_id: Any
    fence: Any = None
    attempt: int = 0
    delay: float = 0.0
    error: str | None = None
    parks: bool = False


def in_parts(rows: Sequence[Given]) -> Iterator[Sequence[Given]]:
    """The rows in parts whose errors fit into one statement: MySQL and MariaDB hang up on one that is too long."""
    start = weight = 0
    for index, row in enumerate(rows):
        weight += len(row.error or "")
        if weight > _MOST_TEXT and index > start:
            yield rows[start:index]
            start, weight = index, len(row.error or "")
    yield rows[start:]


class Kind(NamedTuple):
    """How a value of a batch is typed: in SQLAlchemy, in an array of PostgreSQL, in MySQL's JSON_TABLE."""

    type: Any
    postgres: str
    mysql: str
    is_text: bool = False
    """Whether PostgreSQL gives and takes it as text: a time may be one that its driver cannot read."""


_COMMON = {
    "attempt": Kind(sa.Integer(), "INTEGER", "INT"),
    "delay": Kind(sa.Float(), "DOUBLE PRECISION", "DOUBLE"),
    "error": Kind(sa.Text(), "TEXT", "LONGTEXT"),
    "parks": Kind(sa.Boolean(), "BOOLEAN", "TINYINT"),
}


class Kinds:
    """The kinds of a batch's values for one table: its rows' identity and their fence are as its columns are."""

    def __init__(self, table: sa.Table, rows: Sequence[str], fence: str, *, is_raw: bool = False) -> None:
        self.row_names = tuple("row_id" if index == 0 else f"row_id_{index}" for index in range(len(rows)))
        columns = zip(self.row_names, (table.c[row] for row in rows), strict=True)
        self._kinds = {name: _kind_of(column)._replace(is_text=is_time(column.type)) for name, column in columns}
        kind = _kind_of(table.c[fence])
        # A fence that was read from its row goes back as the driver gave it.
        self._kinds["fence"] = kind._replace(type=sa.types.NullType()) if is_raw else kind
        self.rows = tuple(rows)

    def __getitem__(self, name: str) -> Kind:
        return self._kinds[name] if name in self._kinds else _COMMON[name]

    def getters(self, names: Collection[str]) -> dict[str, Callable[[Given], Any]]:
        """How each wanted value is read from a `Given`; a row of several columns gives several values."""
        wanted: dict[str, Callable[[Given], Any]] = {}
        for name in Given._fields:
            if name == "row_id" and len(self.row_names) > 1:
                wanted |= {part: _read_part(index) for index, part in enumerate(self.row_names)}
            elif name in names:
                wanted[name] = attrgetter(name)
        return wanted


def _read_part(index: int) -> Callable[[Given], Any]:
    return lambda given: given.row_id[index]


def _kind_of(column: ColumnElement[Any]) -> Kind:
    in_mysql = column.type.compile(dialect=mysql.dialect())
    # A JSON_TABLE has no column of type UUID, and text of one collation does not compare with that of another unless it
    # is ASCII, as ids and fences are.
    in_mysql = re.sub(r"CHARACTER SET utf8mb4 COLLATE \w+", "CHARACTER SET ascii COLLATE ascii_bin", in_mysql)
    in_postgres = column.type.compile(dialect=postgresql.dialect())  # type: ignore[no-untyped-call]
    return Kind(column.type, in_postgres, in_mysql.replace("UUID", "CHAR(36)"))


def is_time(type: Any) -> bool:
    """Whether a column of this type holds instants."""
    return isinstance(getattr(type, "impl", type), sa.DateTime)


def is_any(column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
    """Whether a column is one of a parameter's values, which go to PostgreSQL's driver as they came from it."""
    values = sa.bindparam(name, type_=sa.types.NullType())
    return column == sa.any_(sa.cast(values, postgresql.ARRAY(column.type)))


def is_mysql(dialect: str) -> bool:
    return dialect in ("mysql", "mariadb")


class GivenRows:
    """A batch as a table to join with; of its columns only those that a statement reads are sent."""

    def __init__(self, dialect: str, kinds: Kinds, names: Collection[str] = Given._fields) -> None:
        self._is_postgres = dialect == "postgresql"
        self._kinds = kinds
        self._getters = kinds.getters(names)
        self.names = list(self._getters)
        build = self._unnest if self._is_postgres else self._json_table if is_mysql(dialect) else self._json_each
        columns = {name: kinds[name].type for name in self.names}
        self.table = sa.text(build()).columns(**columns).subquery("given")

    @property
    def c(self) -> Any:
        return self.table.c

    def is_row(self, columns: Any) -> ColumnElement[bool]:
        """Whether a row of the table is the given one."""
        pairs = zip(self._kinds.rows, self._kinds.row_names, strict=True)
        return sa.and_(*(columns[row] == self.c[name] for row, name in pairs))

    def params(self, rows: Sequence[Given]) -> dict[str, Any]:
        """The statement's parameters for a batch, named so that they cannot meet a column's name."""
        if self._is_postgres:
            return {f"g_{name}": [get(row) for row in rows] for name, get in self._getters.items()}
        wanted = [[get(row) for get in self._getters.values()] for row in rows]
        return {"g_rows": orjson.dumps(wanted, default=_plain, option=orjson.OPT_PASSTHROUGH_DATETIME).decode()}

    def _unnest(self) -> str:
        arrays = ", ".join(map(self._array, self.names))
        return f"SELECT * FROM unnest({arrays}) AS g({', '.join(self.names)})"

    def _array(self, name: str) -> str:
        kind = self._kinds[name]
        given = f"CAST(:g_{name} AS TEXT[])" if kind.is_text else f":g_{name}"
        return f"CAST({given} AS {kind.postgres}[])"

    def _json_table(self) -> str:
        columns = ", ".join(
            f"{name} {self._kinds[name].mysql} PATH '$[{index}]'" for index, name in enumerate(self.names)
        )
        return f"SELECT * FROM JSON_TABLE(:g_rows, '$[*]' COLUMNS ({columns})) AS g"

    def _json_each(self) -> str:
        columns = ", ".join(f"json_extract(value, '$[{index}]') AS {name}" for index, name in enumerate(self.names))
        return f"SELECT {columns} FROM json_each(:g_rows)"


def _plain(value: Any) -> str:
    if isinstance(value, datetime):
        moment = value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value
        return moment.isoformat(" ", "microseconds")
    return str(value)


class SameForAll:
    """A batch whose rows differ in nothing but their number: the numbers as a list, the rest as plain parameters.

    Most batches are such; the database then need not join them with anything.
    """

    def __init__(self, dialect: str, kinds: Kinds, names: Collection[str]) -> None:
        self._dialect = dialect
        self._kinds = kinds
        self._names = [name for name in names if name not in kinds.row_names]
        self.c = SimpleNamespace(**{name: sa.bindparam(f"g_{name}", type_=kinds[name].type) for name in self._names})

    @property
    def is_possible(self) -> bool:
        return len(self._kinds.row_names) == 1

    def is_row(self, column: ColumnElement[Any]) -> ColumnElement[bool]:
        """Whether a row is one of the batch's."""
        if self._dialect == "postgresql":
            return is_any(column, "g_row_id")
        if self._dialect == "sqlite":
            return column.in_(sa.text("SELECT value FROM json_each(:g_row_id)").columns(value=column.type))
        return column.in_(sa.bindparam("g_row_id", expanding=True))

    def params(self, numbers: Sequence[Any], first: Given) -> dict[str, Any]:
        """The statement's parameters: the rows' numbers, and one of the rows for what they share."""
        listed: Any = orjson.dumps(numbers, default=_plain).decode() if self._dialect == "sqlite" else numbers
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
