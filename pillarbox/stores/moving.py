"""Moving rows of a batch into another table of the layout.

PostgreSQL does it in one statement. The others lock the rows, copy them and delete them, which is one transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.elements import ColumnElement

from pillarbox.layouts.layout import Move
from pillarbox.stores.dialect import Given, GivenRows, SameForAll, delete_given, is_mysql
from pillarbox.stores.hot import Hot

Run = Callable[[sa.Connection, Sequence[Given]], int]
Match = Callable[[Any], ColumnElement[bool]]
"""Whether a row of the table is the given one, from the table's columns."""


class Mover:
    """The statements of one `Move` for the rows of one table; with `fence`, the column that must be as given."""

    def __init__(
        self, move: Move, source: sa.Table, target: sa.Table, *, dialect: str, rows: Sequence[str], fence: str | None
    ) -> None:
        self._move = move
        self._source = source
        self._target = target
        self._dialect = dialect
        self._rows = rows
        self._fence = fence

    def build(self, given: GivenRows, same: SameForAll) -> Run:
        """A function that moves those of the given rows which are there, and returns how many they were."""
        if self._dialect == "postgresql":
            return self._build_whole(given, same)
        return self._build_steps(given)

    def _build_whole(self, given: GivenRows, same: SameForAll) -> Run:
        c = self._source.c
        each = Hot(self._move_where(given.is_row(c), given.c))
        if not same.is_possible:
            return lambda db, rows: each.execute(db, given.params(rows)).rowcount
        alike = Hot(self._move_where(same.is_row(c[self._rows[0]]), same.c))

        def run(db: sa.Connection, rows: Sequence[Given]) -> int:
            rest = rows[0][1:]
            # Looked up by their numbers: a join may read the whole of a table that is not much larger than a batch.
            if all(row[1:] == rest for row in rows):
                return alike.execute(db, same.params([row.row_id for row in rows], rows[0])).rowcount
            return each.execute(db, given.params(rows)).rowcount

        return run

    def _move_where(self, is_given: ColumnElement[bool], given: Any) -> sa.Insert:
        columns = self._columns(given)
        gone = sa.delete(self._source).where(self._check(is_given, given)).returning(*columns.values()).cte("gone")
        return sa.insert(self._target).from_select(list(columns), sa.select(*gone.c))

    def _check(self, is_given: ColumnElement[bool], given: Any) -> ColumnElement[bool]:
        return is_given if self._fence is None else is_given & (self._source.c[self._fence] == given.fence)

    def _columns(self, given: Any) -> dict[str, ColumnElement[Any]]:
        """What goes into each column of the other table."""
        source, target = self._source, self._target
        values = self._move.values(source.c, given)
        names = [column.name for column in target.c if column.name in source.c or column.name in values]
        names = [name for name in names if name in values or not _is_generated(target.c[name])]
        return {name: _as_column(values.get(name, source.c.get(name)), name) for name in names}

    def _build_steps(self, given: GivenRows) -> Run:
        # As the driver gives them: what goes back as a parameter need not be anything else.
        plain = sa.types.NullType()
        identity: list[Any] = [sa.type_coerce(self._source.c[name], plain).label(name) for name in self._rows]
        is_given = self._match(given)(self._source.c)
        found: sa.Select[Any] = sa.select(*identity)
        lock = self._given_first(found, given).where(is_given).with_for_update(of=self._source)
        columns = self._columns(given.c)
        copied = self._given_first(sa.select(*columns.values()), given).where(is_given)
        copy = sa.insert(self._target).from_select(list(columns), copied)
        remove = Hot(delete_given(self._dialect, self._source, self._rows[0], self._match(given)))
        is_single = len(self._rows) == 1

        def run(db: sa.Connection, rows: Sequence[Given]) -> int:
            by_row = {row.row_id: row for row in rows}
            locked = db.execute(lock, given.params(rows)).all()
            if not locked:
                return 0
            params = given.params([by_row[row[0] if is_single else tuple(row)] for row in locked])
            db.execute(copy, params)
            return remove.execute(db, params).rowcount

        return run

    def _match(self, given: GivenRows) -> Match:
        fence = self._fence
        if fence is None:
            return given.is_row
        return lambda columns: given.is_row(columns) & (columns[fence] == given.c.fence)

    def _given_first(self, query: sa.Select[Any], given: GivenRows) -> sa.Select[Any]:
        joined = query.select_from(given.table, self._source)
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
