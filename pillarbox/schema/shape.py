"""What a table looks like: one picture for the declaration and for what a database has, so that they compare.

A type is its bare name and its arguments in the server's spelling; expressions keep the text they were found with and
are compared by `canonical`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Dialect

from pillarbox.layouts.variants import indexes_on
from pillarbox.schema.ddl import compile_ddl, undouble
from pillarbox.schema.predicates import canonical, readable

SAME_TYPE: Final[Mapping[str, Mapping[str, str]]] = {
    "postgresql": {
        "varchar": "character varying",
        "char": "character",
        "int": "integer",
        "int2": "smallint",
        "int4": "integer",
        "int8": "bigint",
        "float": "double precision",
        "float8": "double precision",
        "decimal": "numeric",
        "bool": "boolean",
        "timestamptz": "timestamp with time zone",
        "timestamp": "timestamp without time zone",
        "time": "time without time zone",
        "serial": "integer",
        "bigserial": "bigint",
        "smallserial": "smallint",
    },
    "mysql": {"integer": "int", "bool": "tinyint", "boolean": "tinyint", "numeric": "decimal", "real": "double"},
    "sqlite": {},
}


@dataclass(frozen=True)
class TypeShape:
    """A column's type; `collation` is None where the declaration leaves it to the database."""

    name: str
    arguments: str = ""
    collation: str | None = None

    def __str__(self) -> str:
        # PostgreSQL puts them in the middle: timestamp(3) with time zone.
        first, _, rest = self.name.partition(" ")
        if self.arguments and first in ("timestamp", "time"):
            return f"{first}{self.arguments} {rest}".rstrip()
        return f"{self.name}{self.arguments}"


@dataclass(frozen=True)
class ColumnShape:
    """A column; `numbering` is how it numbers its rows, if it does."""

    name: str
    type: TypeShape
    nullable: bool
    default: str | None = None
    numbering: str | None = None
    """`by default`, `always` or `serial` on PostgreSQL, `auto_increment` or `autoincrement` elsewhere."""
    cache: int | None = None
    sequence: str | None = None
    is_generated: bool = False
    definition: str = ""
    """The column as a statement writes it."""


@dataclass(frozen=True)
class IndexShape:
    """An index; `columns` and `where` are in one form for all spellings."""

    name: str
    columns: tuple[str, ...]
    is_unique: bool = False
    where: str | None = None
    include: tuple[str, ...] = ()
    method: str = "btree"
    is_valid: bool = True
    constraint: str | None = None
    """The definition of the unique constraint that the index belongs to."""
    definition: str = ""

    def is_like(self, other: IndexShape) -> bool:
        return self._compared() == other._compared()

    def _compared(self) -> tuple[Any, ...]:
        where = None if self.where is None else canonical(self.where)
        columns = tuple(map(canonical_column, self.columns))
        return columns, self.is_unique, where, frozenset(self.include), self.method, self.is_valid

    def __str__(self) -> str:
        parts = ["unique " if self.is_unique else "", "" if self.method == "btree" else f"using {self.method} "]
        text = "".join(parts) + f"({', '.join(self.columns)})"
        if self.include:
            text += f" include ({', '.join(self.include)})"
        if self.where is not None:
            text += f" where {readable(self.where)}"
        return text if self.is_valid else f"{text}, invalid"


@dataclass(frozen=True)
class CheckShape:
    """A check constraint; `is_inline` when it is part of its column, as in MariaDB."""

    name: str | None
    predicate: str
    is_inline: bool = False
    is_enforced: bool = True

    def is_like(self, other: CheckShape) -> bool:
        return self.is_enforced == other.is_enforced and canonical(self.predicate) == canonical(other.predicate)

    def __str__(self) -> str:
        text = readable(self.predicate)
        return text if self.is_enforced else f"{text}, not enforced"


@dataclass(frozen=True)
class TableShape:
    """A table; `ddl` and `triggers` are SQLite's own texts, which a rebuild needs."""

    columns: Mapping[str, ColumnShape]
    key: tuple[str, ...]
    indexes: Sequence[IndexShape]
    checks: Sequence[CheckShape]
    key_name: str | None = None
    partition: str | None = None
    partition_columns: frozenset[str] = frozenset()
    options: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    ddl: str = ""
    triggers: tuple[str, ...] = ()


def family_of(dialect: Dialect) -> str:
    """The database's kind, with MariaDB counted as MySQL."""
    return "mysql" if dialect.name == "mariadb" else dialect.name


def parse_type(text: str, dialect: Dialect) -> TypeShape:
    """A type as a server prints it or as a declaration is compiled."""
    family = family_of(dialect)
    collation = re.search(r"\bCOLLATE\s+[\"`]?([\w.-]+)", text, re.IGNORECASE)
    bare = re.sub(r"\s+(CHARACTER SET|COLLATE)\s+\S+", "", text, flags=re.IGNORECASE).strip().lower()
    arguments = re.search(r"\(([^)]*)\)", bare)
    name = " ".join(re.sub(r"\([^)]*\)", " ", bare).split())
    given = "(" + ",".join(part.strip() for part in arguments[1].split(",")) + ")" if arguments else ""
    shape = TypeShape(SAME_TYPE[family].get(name, name), given, collation[1].lower() if collation else None)
    return _without_defaults(shape, family, is_mariadb=bool(getattr(dialect, "is_mariadb", False)))


def _without_defaults(shape: TypeShape, family: str, *, is_mariadb: bool) -> TypeShape:
    if family == "mysql":
        if shape.name in ("tinyint", "smallint", "mediumint", "int", "bigint"):
            return replace(shape, arguments="")  # only how wide it is shown
        if is_mariadb and shape.name == "json":
            return TypeShape("longtext")
        if shape.name == "decimal" and not shape.arguments:
            return replace(shape, arguments="(10,0)")
    unbounded = {"postgresql": "character varying", "sqlite": "varchar"}.get(family)
    if shape.name == unbounded and not shape.arguments:
        return replace(shape, name="text")
    return shape


def canonical_column(text: str) -> str:
    """An index's column in one form; the direction is kept when it is not the usual one."""
    match = re.fullmatch(r"(?is)(.*?)(\s+asc|\s+desc)?(\s+nulls\s+(?:first|last))?", text.strip())
    assert match is not None
    is_descending = (match[2] or "").strip().lower() == "desc"
    return canonical(match[1]) + (" desc" if is_descending else "")


# -- the declaration ----------------------------------------------------------------------------------------


def declared_shape(table: sa.Table, dialect: Dialect) -> TableShape:
    """The picture of a declared table on a database."""
    return TableShape(
        columns={column.name: _declared_column(column, dialect) for column in table.columns},
        key=tuple(column.name for column in table.primary_key.columns),
        indexes=[*_declared_indexes(table, dialect), *_declared_uniques(table)],
        checks=_declared_checks(table, dialect),
        partition=_option(table, "postgresql", "partition_by") if dialect.name == "postgresql" else None,
    )


def _option(item: Any, dialect: str, name: str) -> Any:
    return item.dialect_options[dialect].get(name)


def _declared_column(column: sa.Column[Any], dialect: Dialect) -> ColumnShape:
    compiler: Any = dialect.ddl_compiler(dialect, None)  # type: ignore[arg-type]
    type_ = dialect.type_compiler_instance.process(column.type, type_expression=column)
    numbering = _numbering(column, dialect)
    cache = column.identity.cache if column.identity is not None else None
    default = compiler.get_column_default_string(column) if column.identity is None else None
    return ColumnShape(
        name=column.name,
        type=parse_type(type_, dialect),
        nullable=bool(column.nullable),
        default=None if default is None else undouble(str(default), dialect),
        numbering=numbering,
        cache=(cache or 1) if numbering and dialect.name == "postgresql" else None,
        is_generated=column.computed is not None,
        definition=undouble(str(compiler.get_column_specification(column)).strip(), dialect),
    )


def _numbering(column: sa.Column[Any], dialect: Dialect) -> str | None:
    if dialect.name == "postgresql" and column.identity is not None:
        return "always" if column.identity.always else "by default"
    if column is not column.table._autoincrement_column:
        return None
    if dialect.name == "postgresql":
        return "serial" if column.server_default is None else None
    if dialect.name == "sqlite":
        return "autoincrement" if _option(column.table, "sqlite", "autoincrement") else None
    return "auto_increment"


def _declared_indexes(table: sa.Table, dialect: Dialect) -> list[IndexShape]:
    return [_declared_index(index, dialect) for index in indexes_on(table, dialect.name)]


def _declared_index(index: sa.Index, dialect: Dialect) -> IndexShape:
    where = _option(index, dialect.name, "where") if dialect.name in ("postgresql", "sqlite") else None
    include = _option(index, "postgresql", "include") if dialect.name == "postgresql" else None
    method = _option(index, "postgresql", "using") if dialect.name == "postgresql" else None
    lengths = _option(index, "mysql", "length") if family_of(dialect) == "mysql" else None
    return IndexShape(
        name=str(index.name),
        columns=tuple(_index_column(each, lengths, dialect) for each in index.expressions),
        is_unique=bool(index.unique),
        where=None if where is None else _compile(where, dialect),
        include=tuple(each if isinstance(each, str) else each.name for each in include or ()),
        method=str(method or "btree").lower(),
        definition=compile_ddl(sa.schema.CreateIndex(index), dialect),
    )


def _index_column(expression: Any, lengths: Any, dialect: Dialect) -> str:
    if isinstance(expression, sa.Column):
        length = lengths.get(expression.name) if isinstance(lengths, Mapping) else lengths
        return f"{expression.name}({length})" if length else expression.name
    return _compile(expression, dialect)


def _compile(expression: Any, dialect: Dialect) -> str:
    clause = sa.text(expression) if isinstance(expression, str) else expression
    compiler: Any = dialect.ddl_compiler(dialect, None)  # type: ignore[arg-type]
    text = str(compiler.sql_compiler.process(clause, include_table=False, literal_binds=True))
    return undouble(text, dialect)


def name_of(constraint: sa.Constraint) -> str | None:
    """A constraint's name; what stands for none under a naming convention is no text."""
    return str(constraint.name) if isinstance(constraint.name, str) else None


def _declared_uniques(table: sa.Table) -> list[IndexShape]:
    found = [each for each in table.constraints if isinstance(each, sa.UniqueConstraint)]
    shapes = []
    for each in sorted(found, key=lambda unique: str(unique.name)):
        columns = tuple(column.name for column in each.columns)
        name = name_of(each) or f"{table.name}_{'_'.join(columns)}_key"
        shapes.append(IndexShape(name=name, columns=columns, is_unique=True, constraint="unique"))
    return shapes


def _declared_checks(table: sa.Table, dialect: Dialect) -> list[CheckShape]:
    # The checks of a Boolean or an Enum are there or not, as the dialect has native types.
    found = [
        each
        for each in table.constraints
        if isinstance(each, sa.CheckConstraint) and not getattr(each, "_type_bound", False)
    ]
    return [
        CheckShape(name_of(each), _compile(each.sqltext, dialect))
        for each in sorted(found, key=lambda check: str(check.name))
    ]
