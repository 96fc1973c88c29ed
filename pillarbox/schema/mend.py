"""The statements that mend a difference and those that bring it back, for each database.

A statement that begins with `--` says why there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Dialect
from sqlalchemy.schema import CreateIndex

from pillarbox.layouts.variants import indexes_on
from pillarbox.schema.compare import COLUMN_KINDS, Difference, has_same_default, has_same_numbering
from pillarbox.schema.ddl import compile_ddl, table_ddl
from pillarbox.schema.shape import CheckShape, ColumnShape, IndexShape, TableShape, TypeShape, name_of

Statements = list[str]
Mend = tuple[Statements, Statements]
"""What mends, and what undoes it."""


class Mender:
    """Mends one table. What a database does in its own way is a method of its subclass."""

    def __init__(self, table: sa.Table, dialect: Dialect, expected: TableShape, found: TableShape) -> None:
        self.declared = table
        self.dialect = dialect
        self.expected = expected
        self.found = found
        self.table = dialect.identifier_preparer.format_table(table)

    def quote(self, name: str) -> str:
        return str(self.dialect.identifier_preparer.quote(name))

    def quote_all(self, names: Sequence[str]) -> str:
        return ", ".join(map(self.quote, names))

    def alter(self, change: str) -> str:
        return f"ALTER TABLE {self.table} {change}"

    def plan(self, differences: Sequence[Difference]) -> None:
        """Learn of all differences before the first is mended."""

    def mend(self, difference: Difference) -> Mend:
        """The statements for one difference; those of one column are the same for all its differences."""
        wanted, present = difference.wanted, difference.present
        if difference.kind in COLUMN_KINDS:
            return self.change_column(present, wanted), self.change_column(wanted, present)
        match difference.kind:
            case "column":
                return self.add_column(wanted)
            case "foreign column":
                return self.free_column(present)
            case "primary key":
                return self.change_key()
            case "check":
                return self.change_check(wanted, present)
            case "index":
                return self.change_index(wanted, present)
            case "cache":
                sequence = present.sequence
                return (
                    [f"ALTER SEQUENCE {sequence} CACHE {wanted.cache}"],
                    [f"ALTER SEQUENCE {sequence} CACHE {present.cache}"],
                )
        why = "A table that is there cannot be partitioned. Make a partitioned one, copy the rows and swap the names."
        return [f"-- {why}"], []

    # -- the parts ------------------------------------------------------------------------------------------

    def change_column(self, before: ColumnShape, after: ColumnShape) -> Statements:
        raise NotImplementedError

    def drop_check(self, check: CheckShape) -> Statements:
        return [self.alter(f"DROP CONSTRAINT {self.quote(self.check_name(check))}")]

    def drop_index(self, index: IndexShape) -> str:
        raise NotImplementedError

    def add_column(self, column: ColumnShape) -> Mend:
        add = self.alter(f"ADD COLUMN {column.definition}")
        return [add], [self.alter(f"DROP COLUMN {self.quote(column.name)}")]

    def free_column(self, column: ColumnShape) -> Mend:
        if column.name in self.found.key:
            return [f"-- Column {column.name!r} is in the primary key. Only you know what it is for."], []
        free = self.make_nullable(column)
        return self.change_column(column, free), self.change_column(free, column)

    def make_nullable(self, column: ColumnShape) -> ColumnShape:
        return replace(column, nullable=True, definition=column.definition.replace(" NOT NULL", " NULL", 1))

    def change_key(self) -> Mend:
        key = self.widen(self.expected.key)
        name = name_of(self.declared.primary_key) or f"{self.declared.name}_pkey"
        drop_found = [f"DROP CONSTRAINT {self.quote(self.found.key_name)}"] if self.found.key_name else []
        add_found = [self._key(self.found.key_name, self.found.key)] if self.found.key_name else []
        mend = self.alter(", ".join([*drop_found, self._key(name, key)]))
        return [mend], [self.alter(", ".join([f"DROP CONSTRAINT {self.quote(name)}", *add_found]))]

    def _key(self, name: str | None, columns: Sequence[str]) -> str:
        return f"ADD CONSTRAINT {self.quote(str(name))} PRIMARY KEY ({self.quote_all(columns)})"

    def widen(self, columns: Sequence[str]) -> list[str]:
        """The columns of a unique key, with the partition key that a partitioned table wants in it."""
        own = {name.lower() for name in columns}
        names = [name for name in self.found.columns if name.lower() in self.found.partition_columns - own]
        return [*columns, *names]

    def change_check(self, wanted: CheckShape, present: CheckShape | None) -> Mend:
        if present is None:
            return [self.add_check(wanted)], self.drop_check(wanted)
        return (
            [*self.drop_check(present), self.add_check(wanted)],
            [*self.drop_check(wanted), self.add_check(present)],
        )

    def check_name(self, check: CheckShape) -> str:
        return check.name or f"{self.declared.name}_check"

    def add_check(self, check: CheckShape) -> str:
        enforced = "" if check.is_enforced else " NOT ENFORCED"
        return self.alter(f"ADD CONSTRAINT {self.quote(self.check_name(check))} CHECK ({check.predicate}){enforced}")

    def change_index(self, wanted: IndexShape, present: IndexShape | None) -> Mend:
        if present is None:
            return [self.create_index(wanted)], [self.drop_index(wanted)]
        return (
            [self.drop_index(present), self.create_index(wanted)],
            [self.drop_index(wanted), self.restore_index(present)],
        )

    def create_index(self, index: IndexShape) -> str:
        if index.constraint is not None:
            columns = self.quote_all(self.widen(index.columns))
            return self.alter(f"ADD CONSTRAINT {self.quote(index.name)} UNIQUE ({columns})")
        added = self.widen(index.columns)[len(index.columns) :]
        if not index.is_unique or not added:
            return index.definition
        return self._widen_index(index.name, added)

    def _widen_index(self, name: str, added: Sequence[str]) -> str:
        own = next(each for each in indexes_on(self.declared, self.dialect.name) if each.name == name)
        copy = self.declared.to_metadata(sa.MetaData())
        parts = [copy.c[each.name] if isinstance(each, sa.Column) else each for each in own.expressions]
        options: dict[str, Any] = dict(own.dialect_kwargs)
        wider = sa.Index(name, *parts, *(copy.c[each] for each in added), unique=True, **options)
        return compile_ddl(CreateIndex(wider), self.dialect)

    def restore_index(self, index: IndexShape) -> str:
        return index.definition


class PostgresMender(Mender):
    def change_column(self, before: ColumnShape, after: ColumnShape) -> Statements:
        column = f"ALTER COLUMN {self.quote(after.name)}"
        is_retyped = str(before.type) != str(after.type)
        if is_retyped and after.name in self.found.partition_columns:
            return [f"-- Column {after.name!r} is the partition key: PostgreSQL cannot change its type."]
        is_redefaulted = not has_same_default(before, after)
        changes = []
        if before.default is not None and (is_retyped or after.default is None):
            changes.append(f"{column} DROP DEFAULT")
        if is_retyped:
            changes.append(f"{column} TYPE {after.type} USING {self._convert(after.name, before.type, after.type)}")
        if after.default is not None and (is_retyped or is_redefaulted):
            changes.append(f"{column} SET DEFAULT {after.default}")
        numbering = [] if has_same_numbering(after, before) else self._renumber(before, after)
        nullability = []
        if before.nullable != after.nullable:
            nullability.append(f"{column} {'DROP' if after.nullable else 'SET'} NOT NULL")
        statements = list(map(self.alter, changes))
        # A column that numbers its rows is NOT NULL as long as it does.
        if after.nullable:
            return [*statements, *numbering, *map(self.alter, nullability)]
        return [*statements, *map(self.alter, nullability), *numbering]

    def _convert(self, name: str, before: TypeShape, after: TypeShape) -> str:
        column = self.quote(name)
        names = {before.name, after.name}
        if names == {"timestamp with time zone", "timestamp without time zone"}:
            return f"{column} AT TIME ZONE 'UTC'"
        if names == {"bytea", "text"}:
            return f"{'convert_to' if after.name == 'bytea' else 'convert_from'}({column}, 'UTF8')"
        if "boolean" in names and names & {"smallint", "integer", "bigint"}:
            return f"{column}::integer::{after}"
        if names <= {"smallint", "integer", "bigint", "numeric", "double precision", "real"}:
            return f"{column}::{after}"
        return f"{column}::text::{after}"

    def _renumber(self, before: ColumnShape, after: ColumnShape) -> Statements:
        column = f"ALTER COLUMN {self.quote(after.name)}"
        how = {"by default": "BY DEFAULT", "always": "ALWAYS"}.get(after.numbering or "")
        if how and before.numbering in ("by default", "always"):
            return [self.alter(f"{column} SET GENERATED {how}")]
        statements = self._stop_numbering(before)
        sequence = f"{self.declared.name}_{after.name}_seq"
        if how:
            statements.append(self.alter(f"{column} ADD GENERATED {how} AS IDENTITY (CACHE {after.cache or 1})"))
        elif after.numbering == "serial":
            owned = f"{self.table}.{self.quote(after.name)}"
            statements += [
                f"CREATE SEQUENCE {self._beside(sequence)} OWNED BY {owned}",
                self.alter(f"{column} SET DEFAULT nextval('{self._beside(sequence)}')"),
            ]
        if after.numbering is not None:
            name = self.quote(after.name)
            found = f"pg_get_serial_sequence('{self.table}', '{after.name}')"
            statements.append(f"SELECT setval({found}, COALESCE(MAX({name}), 0) + 1, false) FROM {self.table}")
        return statements

    def _stop_numbering(self, column: ColumnShape) -> Statements:
        name = self.quote(column.name)
        if column.numbering == "serial":
            sequence = column.sequence or self._beside(f"{self.declared.name}_{column.name}_seq")
            return [self.alter(f"ALTER COLUMN {name} DROP DEFAULT"), f"DROP SEQUENCE {sequence}"]
        return [] if column.numbering is None else [self.alter(f"ALTER COLUMN {name} DROP IDENTITY")]

    def _beside(self, name: str) -> str:
        schema = self.declared.schema
        return self.quote(name) if schema is None else f"{self.quote(schema)}.{self.quote(name)}"

    def drop_index(self, index: IndexShape) -> str:
        if index.constraint is not None:
            return self.alter(f"DROP CONSTRAINT {self.quote(index.name)}")
        return f"DROP INDEX {self._beside(index.name)}"

    def restore_index(self, index: IndexShape) -> str:
        if index.constraint is None:
            return index.definition
        return self.alter(f"ADD CONSTRAINT {self.quote(index.name)} {index.constraint}")


class MySqlMender(Mender):
    def change_column(self, before: ColumnShape, after: ColumnShape) -> Statements:
        return [self.alter(f"MODIFY COLUMN {after.definition}")]

    def add_column(self, column: ColumnShape) -> Mend:
        # A column that numbers its rows must be a key from the start.
        return self.change_key() if column.numbering else super().add_column(column)

    def change_key(self) -> Mend:
        numbered = [
            column
            for column in self.expected.columns.values()
            if column.numbering and column.name not in self.found.columns
        ]
        had = ["DROP PRIMARY KEY"] if self.found.key else []
        again = [f"ADD PRIMARY KEY ({self.quote_all(self.found.key)})"] if self.found.key else []
        added = [f"ADD COLUMN {column.definition}" for column in numbered]
        dropped = [f"DROP COLUMN {self.quote(column.name)}" for column in numbered]
        key = f"ADD PRIMARY KEY ({self.quote_all(self.widen(self.expected.key))})"
        return [self.alter(", ".join([*had, *added, key]))], [
            self.alter(", ".join(["DROP PRIMARY KEY", *dropped, *again]))
        ]

    def change_check(self, wanted: CheckShape, present: CheckShape | None) -> Mend:
        if present is None or not present.is_inline:
            return super().change_check(wanted, present)
        # A check that is part of its column goes and comes with the column's definition.
        column = self.found.columns[str(present.name)].definition
        return (
            [self.alter(f"MODIFY COLUMN {column}"), self.add_check(wanted)],
            [*self.drop_check(wanted), self.alter(f"MODIFY COLUMN {column} CHECK ({present.predicate})")],
        )

    def drop_index(self, index: IndexShape) -> str:
        return f"DROP INDEX {self.quote(index.name)} ON {self.table}"


def create_table(table: sa.Table, dialect: Dialect) -> Mend:
    """The statements for a table that is missing."""
    return list(table_ddl(table, dialect)), [f"DROP TABLE {dialect.identifier_preparer.format_table(table)}"]
