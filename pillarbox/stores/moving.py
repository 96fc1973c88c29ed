"""Moving rows of a batch into another table of the layout.

PostgreSQL does it in one statement. The others lock the rows, copy them and delete them, which is one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.elements import ColumnElement

from pillarbox.layouts.layout import Move
from pillarbox.stores.dialect import Given, GivenRows, delete_given, is_mysql
from pillarbox.stores.hot import Hot

Match = Callable[[Any], ColumnElement[bool]]
"""Whether a row of the table is the given one, from the table's columns."""


class Mover:
    """The statements of one `Move` for the rows of one table."""

    def __init__(
        self, move: Move, source: sa.Table, target: sa.Table, *, dialect: str, rows: Sequence[str], given: GivenRows
    ) -> None:
        self._source = source
        self._target = target
        self._dialect = dialect
        self._rows = rows
        self._given = given
        values = move.values(source.c, given.c)
        names = [column.name for column in target.c if column.name in source.c or column.name in values]
        self._names = [name for name in names if name in values or not _is_generated(target.c[name])]
        self._columns = [_as_column(values.get(name, source.c.get(name)), name) for name in self._names]

    def build(self, match: Match) -> Callable[[sa.Connection, Sequence[Given]], int]:
        """A function that moves the rows which match and returns how many they were."""
        return self._build_whole(match) if self._dialect == "postgresql" else self._build_steps(match)

    def _build_whole(self, match: Match) -> Callable[[sa.Connection, Sequence[Given]], int]:
        gone = sa.delete(self._source).where(match(self._source.c)).returning(*self._columns).cte("gone")
        moved = Hot(sa.insert(self._target).from_select(self._names, sa.select(*gone.c)))
        return lambda db, rows: moved.execute(db, self._given.params(rows)).rowcount

    def _build_steps(self, match: Match) -> Callable[[sa.Connection, Sequence[Given]], int]:
        # As the driver gives them: what goes back as a parameter need not be anything else.
        plain = sa.types.NullType()
        identity: list[Any] = [sa.type_coerce(self._source.c[name], plain).label(name) for name in self._rows]
        is_given = match(self._source.c)
        found: sa.Select[Any] = sa.select(*identity)
        lock = self._given_first(found).where(is_given).with_for_update(of=self._source)
        copied = self._given_first(sa.select(*self._columns)).where(is_given)
        copy = sa.insert(self._target).from_select(self._names, copied)
        remove = Hot(delete_given(self._dialect, self._source, self._rows[0], match))
        is_single = len(self._rows) == 1

        def run(db: sa.Connection, rows: Sequence[Given]) -> int:
            by_row = {given.row_id: given for given in rows}
            locked = db.execute(lock, self._given.params(rows)).all()
            if not locked:
                return 0
            params = self._given.params([by_row[row[0] if is_single else tuple(row)] for row in locked])
            db.execute(copy, params)
            return remove.execute(db, params).rowcount

        return run

    def _given_first(self, query: sa.Select[Any]) -> sa.Select[Any]:
        joined = query.select_from(self._given.table, self._source)
        if not is_mysql(self._dialect):
            return joined
        return joined.prefix_with("STRAIGHT_JOIN").with_hint(self._source, "FORCE INDEX (PRIMARY)", self._dialect)


def has_no_partition(error: sa.exc.DBAPIError) -> bool:
    """Whether PostgreSQL found no partition for a row."""
    return getattr(error.orig, "sqlstate", None) == "23514"


def _is_generated(column: sa.Column[Any]) -> bool:
    return column.autoincrement is True or column.identity is not None


def _as_column(value: Any, name: str) -> ColumnElement[Any]:
    element = value if isinstance(value, ColumnElement) else sa.literal(value) if value is not None else sa.null()
    return element.label(name)
