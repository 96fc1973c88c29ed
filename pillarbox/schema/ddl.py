"""The DDL of a layout's tables, as text that its own shell runs. Nothing here talks to a database."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.schema import CreateIndex, CreateTable

from pillarbox.errors import ConfigError
from pillarbox.layouts import Layout, declare_layout, get_layout


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


def ddl(layout: str | Layout, dialect: str, table: str | None = None, schema: str | None = None) -> str:
    """Return the statements that create a layout's tables and indexes, each ended by a semicolon."""
    make = DIALECTS.get(dialect)
    if make is None:
        near = get_close_matches(dialect, DIALECTS, n=1)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"Dialect: expected {', '.join(DIALECTS)}; got {dialect!r}{hint}")
    tables = declare_layout(get_layout(layout), sa.MetaData(), table=table, schema=schema)
    compiled = make()
    statements = [text for each in tables.values() for text in table_ddl(each, compiled)]
    return "".join(f"{text};\n\n" for text in statements).rstrip("\n") + "\n"


def table_ddl(table: sa.Table, dialect: Dialect) -> Iterator[str]:
    """The statements that create one table and then its indexes."""
    yield _compile(CreateTable(table), dialect)
    for index in sorted(table.indexes, key=lambda index: str(index.name)):
        yield _compile(CreateIndex(index), dialect)


def _compile(statement: CreateTable | CreateIndex, dialect: Dialect) -> str:
    text = str(statement.compile(dialect=dialect)).strip()
    # The compiler indents by tabs and leaves blanks at the ends of lines.
    return "\n".join(line.rstrip().replace("\t", "    ") for line in text.splitlines())
