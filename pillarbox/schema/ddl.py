"""The DDL of a layout's tables, as text that its own shell runs. Nothing here talks to a database."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.schema import CreateIndex, CreateTable

from pillarbox.errors import ConfigError
from pillarbox.layouts import Layout, check_database, declare_layout, get_layout
from pillarbox.layouts.variants import indexes_on


def _make_mariadb() -> Dialect:
    return mysql.dialect(is_mariadb=True)


DIALECTS: Final[Mapping[str, Callable[[], Dialect]]] = MappingProxyType(
    {
        "postgresql": postgresql.dialect,
        "mysql": mysql.dialect,
        "mariadb": _make_mariadb,
        "sqlite": sqlite.dialect,
    }
)


def ddl(
    layout: str | Layout,
    dialect: str,
    table: str | None = None,
    schema: str | None = None,
    *,
    variant: str | None = None,
) -> str:
    """Return the statements that create a layout's tables and indexes, each ended by a semicolon."""
    make = DIALECTS.get(dialect)
    if make is None:
        near = get_close_matches(dialect, DIALECTS, n=1)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"Dialect: expected {', '.join(DIALECTS)}; got {dialect!r}{hint}")
    chosen = get_layout(layout)
    if variant is not None:
        chosen = chosen.as_variant(variant)
    check_database(chosen, dialect)
    tables = declare_layout(chosen, sa.MetaData(), table=table, schema=schema)
    compiled = make()
    statements = [text for each in tables.values() for text in table_ddl(each, compiled)]
    if has_own_schema(chosen, tables):
        statements.insert(0, schema_statement(dialect, chosen.schema or ""))
    return "".join(f"{text};\n\n" for text in statements).rstrip("\n") + "\n"


def has_own_schema(layout: Layout, tables: Mapping[str, sa.Table]) -> bool:
    """Whether the tables are in the schema that belongs to their layout, which is then created with them."""
    return layout.schema is not None and tables["outbox"].schema == layout.schema


def schema_statement(dialect: str, schema: str) -> str:
    """The statement that creates a schema, or on MySQL and MariaDB a database, unless it is there."""
    kind = "SCHEMA" if dialect == "postgresql" else "DATABASE"
    return f"CREATE {kind} IF NOT EXISTS {quote_name(dialect, schema)}"


def quote_name(dialect: str, name: str) -> str:
    """A name as a database with schemas writes it."""
    make = DIALECTS.get(dialect)
    if make is None or dialect == "sqlite":
        raise ConfigError(f"Dialect: expected postgresql, mysql, mariadb; got {dialect!r}")
    return make().identifier_preparer.quote(name)


def table_ddl(table: sa.Table, dialect: Dialect) -> Iterator[str]:
    """The statements that create one table and then its indexes."""
    yield compile_ddl(CreateTable(table), dialect)
    for index in indexes_on(table, dialect.name):
        yield compile_ddl(CreateIndex(index), dialect)


def compile_ddl(statement: CreateTable | CreateIndex, dialect: Dialect) -> str:
    """One statement as text that is fit to print."""
    text = undouble(str(statement.compile(dialect=dialect)).strip(), dialect)
    # The compiler indents by tabs and leaves blanks at the ends of lines.
    return "\n".join(line.rstrip().replace("\t", "    ") for line in text.splitlines())


def undouble(text: str, dialect: Dialect) -> str:
    """A compiled text with single percent signs, which drivers that take %s for a parameter want doubled."""
    is_doubled = getattr(dialect.identifier_preparer, "_double_percents", False)
    return text.replace("%%", "%") if is_doubled else text


def run_ddl(db: sa.Connection, statements: Iterable[str]) -> None:
    """Execute statements as they are printed: neither a percent sign nor a colon is a parameter."""
    for statement in statements:
        db.execute(sa.DDL(statement.replace("%", "%%")))  # type: ignore[no-untyped-call]
