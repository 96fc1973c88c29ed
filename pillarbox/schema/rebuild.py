"""Mending a table in SQLite, which can add a column and little else: the table is made anew and its rows are copied.

All differences of a table that need it share one rebuild. The user's own columns, checks, indexes and triggers are
kept, and so is the highest number given out, which must never be given out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.schema import CreateTable
from sqlalchemy.types import UserDefinedType

from pillarbox.schema.compare import Difference, pair_checks
from pillarbox.schema.ddl import compile_ddl, table_ddl
from pillarbox.schema.mend import Mend, Mender, Statements
from pillarbox.schema.predicates import tokenize
from pillarbox.schema.shape import ColumnShape, IndexShape
from pillarbox.schema.sqlite import with_name


class _AsFound(UserDefinedType[Any]):
    cache_ok = True

    def __init__(self, text: str) -> None:
        self.text = text

    def get_col_spec(self, **kw: Any) -> str:
        return self.text.upper()


class SqliteMender(Mender):
    """Mends one table of a SQLite file."""

    def plan(self, differences: Sequence[Difference]) -> None:
        """Learn of all differences: one that needs a rebuild decides for the others."""
        self._is_rebuilt = any(not self._is_simple(each) for each in differences)

    def _is_simple(self, difference: Difference) -> bool:
        if difference.kind == "column":
            return self._can_add(difference.wanted)
        return difference.kind == "index" and difference.wanted.constraint is None

    def _can_add(self, column: ColumnShape) -> bool:
        if column.name in self.expected.key:
            return False
        if column.default is None:
            return column.nullable
        return [token.kind for token in tokenize(column.default)] in (["string"], ["number"])

    def mend(self, difference: Difference) -> Mend:
        if not self._is_rebuilt:
            return super().mend(difference)
        if any(column.is_generated for column in self.found.columns.values()):
            return ["-- The table has generated columns: rebuild it by hand, as SQLite cannot alter it."], []
        return self._rebuild(), self._restore()

    def drop_index(self, index: IndexShape) -> str:
        return f"DROP INDEX {self.quote(index.name)}"

    # -- a rebuild and back ---------------------------------------------------------------------------------

    def _rebuild(self) -> Statements:
        create = compile_ddl(CreateTable(self._new_table()), self.dialect)
        is_counted = any(column.numbering for column in self.expected.columns.values())
        extras = [index for index in self.found.indexes if self._is_extra(index)]
        indexes = [*list(table_ddl(self.declared, self.dialect))[1:], *map(self._index_again, extras)]
        return self._swap(create, indexes, is_counted=is_counted)

    def _restore(self) -> Statements:
        create = with_name(self.found.ddl, self.quote(self._other_name))
        indexes = [index.definition for index in self.found.indexes if index.definition]
        is_counted = any(column.numbering for column in self.found.columns.values())
        return self._swap(create, indexes, is_counted=is_counted)

    @property
    def _other_name(self) -> str:
        return f"{self.declared.name}_rebuilt"

    def _swap(self, create: str, indexes: list[str], *, is_counted: bool) -> Statements:
        names, other = self.quote_all(list(self.found.columns)), self.quote(self._other_name)
        # SQLite knows the highest number only of a table that has AUTOINCREMENT.
        keep = f"UPDATE sqlite_sequence SET name = '{self._other_name}' WHERE name = '{self.declared.name}'"
        forget = f"DELETE FROM sqlite_sequence WHERE name = '{self._other_name}'"
        was_counted = any(column.numbering for column in self.found.columns.values())
        will_be = any(column.numbering for column in self.expected.columns.values())
        return [
            create,
            f"INSERT INTO {other} ({names}) SELECT {names} FROM {self.table}",
            *([forget, keep] if is_counted and was_counted and will_be else []),
            f"DROP TABLE {self.table}",
            f"ALTER TABLE {other} RENAME TO {self.table}",
            *indexes,
            *self.found.triggers,
        ]

    def _new_table(self) -> sa.Table:
        table = self.declared.to_metadata(sa.MetaData(), name=self._other_name)
        for name, column in self.found.columns.items():
            if name not in self.expected.columns:
                is_free = column.nullable or column.default is None
                default = None if column.default is None else sa.text(column.default)
                table.append_column(
                    sa.Column(name, _AsFound(str(column.type)), nullable=is_free, server_default=default)
                )
        replaced = [other for _, other in pair_checks(self.expected, self.found)]
        for check in self.found.checks:
            is_declared = any(check.is_like(each) for each in self.expected.checks)
            if check not in replaced and not is_declared:
                table.append_constraint(sa.CheckConstraint(check.predicate, name=check.name))
        return table

    def _is_extra(self, index: IndexShape) -> bool:
        is_named = any(each.name == index.name for each in self.expected.indexes)
        return not is_named and not any(replace(each, name=index.name).is_like(index) for each in self.expected.indexes)

    def _index_again(self, index: IndexShape) -> str:
        if index.definition:
            return index.definition
        name = f"{self.declared.name}_{'_'.join(index.columns)}"
        return f"CREATE UNIQUE INDEX {self.quote(name)} ON {self.table} ({self.quote_all(index.columns)})"
