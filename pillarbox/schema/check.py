"""Drift: what a database has otherwise than its layout declares. The check reads catalogs and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.engine import Dialect

from pillarbox.errors import Unsupported
from pillarbox.layouts import Layout, Variant, check_database, declare_layout, get_layout
from pillarbox.schema import mysql, postgres, sqlite
from pillarbox.schema.autovacuum import compare_settings
from pillarbox.schema.compare import Difference, compare
from pillarbox.schema.mend import Mender, MySqlMender, PostgresMender, create_table
from pillarbox.schema.rebuild import SqliteMender
from pillarbox.schema.shape import declared_shape, family_of
from pillarbox.stores.sql import SqlStore
from pillarbox.stores.url import open_store

_READERS: Mapping[str, Any] = {"postgresql": postgres, "mysql": mysql, "sqlite": sqlite}
_MENDERS: Mapping[str, type[Mender]] = {
    "postgresql": PostgresMender,
    "mysql": MySqlMender,
    "sqlite": SqliteMender,
}

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine


@dataclass(frozen=True)
class Drift:
    """One difference between a declared table and the live one.

    `expected` or `found` is None for what must not be or is not there. `statements` mend it, `undo` brings it back;
    a statement that begins with `--` says why there is none. Differences that only one change can mend, such as
    those of one column in MySQL or of one table in SQLite, have the same statements.
    """

    table: str
    kind: str
    name: str
    expected: str | None
    found: str | None
    statements: tuple[str, ...]
    undo: tuple[str, ...] = field(repr=False, compare=False, default=())

    @property
    def statement(self) -> str:
        """The statements as one text for the database's own shell."""
        return "\n".join(text if text.startswith("--") else f"{text};" for text in self.statements)

    def __str__(self) -> str:
        place = f"Table {self.table!r}" if self.kind == "table" else f"Table {self.table!r}, {self.kind} {self.name!r}"
        return f"{place}: expected {self.expected or 'none'}; found {self.found or 'none'}"


@dataclass(frozen=True)
class Comparison:
    """What a database has of a layout's tables.

    `variant` is the spelling that they come nearest to, None where the layout has one only; `drifts` differ from it.
    `hints` are indexes of another variant that are worth having; tables that lack them are right all the same.
    """

    variant: str | None
    drifts: list[Drift]
    hints: list[Drift]


async def check_schema(
    database: str | sa.URL | sa.Engine | AsyncEngine,
    layout: str | Layout = "pillarbox",
    *,
    table: str | None = None,
    schema: str | None = None,
    variant: str | None = None,
    autovacuum: bool = False,
) -> list[Drift]:
    """Compare a database with a layout's tables and return every difference.

    Tables may be as any variant of the layout has them, or only as `variant` does. Raises `SchemaError` when the
    schema does not exist or may not be used. With `autovacuum` the outbox table's vacuum settings are looked at too,
    on PostgreSQL. A synchronous engine is used in the caller's thread.
    """
    found = await compare_schema(database, layout, table=table, schema=schema, variant=variant, autovacuum=autovacuum)
    return found.drifts


async def compare_schema(
    database: str | sa.URL | sa.Engine | AsyncEngine,
    layout: str | Layout = "pillarbox",
    *,
    table: str | None = None,
    schema: str | None = None,
    variant: str | None = None,
    autovacuum: bool = False,
) -> Comparison:
    """As `check_schema`, and say which variant the tables are and what would be worth having."""
    chosen = get_layout(layout)
    if variant is not None:
        chosen = chosen.as_variant(variant)
    if isinstance(database, str | sa.URL):
        store = open_store(database, layout=chosen, table=table, schema=schema)
        try:
            return await compare_store(store, autovacuum=autovacuum)
        finally:
            await store.close()
    check_database(chosen, database.dialect.name)
    tables = declare_layout(chosen, sa.MetaData(), table=table, schema=schema)
    if isinstance(database, sa.Engine):
        with database.connect() as connection:
            return compare_tables(connection, chosen, tables, autovacuum=autovacuum)
    async with database.connect() as async_connection:
        return await async_connection.run_sync(lambda db: compare_tables(db, chosen, tables, autovacuum=autovacuum))


async def check_store(store: SqlStore, *, autovacuum: bool = False) -> list[Drift]:
    """`check_schema` for the tables of a store."""
    return (await compare_store(store, autovacuum=autovacuum)).drifts


async def compare_store(store: SqlStore, *, autovacuum: bool = False) -> Comparison:
    """`compare_schema` for the tables of a store."""
    if store.dialect == "sqlite" and not _has_file(store):
        # Connecting would make the file.
        dialect = sa.create_engine("sqlite://").dialect
        variant = next((variant.name for variant in store.layout.variants), None)
        return Comparison(variant, [_missing(table, dialect) for table in store.tables.values()], [])
    work = partial(compare_tables, layout=store.layout, tables=store.tables, autovacuum=autovacuum)
    return await store.run(work, writes=False)


def _has_file(store: SqlStore) -> bool:
    return Path(store.url.database or "").exists()


def compare_tables(
    db: sa.Connection, layout: Layout, tables: Mapping[str, sa.Table], *, autovacuum: bool = False
) -> Comparison:
    """Compare a layout's tables with those that a connection sees, in the variant that they come nearest to."""
    vacuumed = [tables["outbox"]] if autovacuum else ()
    if not layout.variants:
        return Comparison(None, check_tables(db, tables.values(), autovacuum=vacuumed), [])
    drifts = {
        variant.name: check_tables(db, _declare_variant(variant, tables).values(), autovacuum=vacuumed)
        for variant in layout.variants
    }
    # The first of those that differ least: a table that is not there is made in the layout's own spelling.
    nearest = min(layout.variants, key=lambda variant: len(drifts[variant.name]))
    # Only where nothing is wrong: beside a drift their statements would mend that as well.
    better = drifts.get(nearest.better or "", []) if not drifts[nearest.name] else []
    hints = [drift for drift in better if drift.kind == "index"]
    return Comparison(nearest.name, drifts[nearest.name], hints)


def _declare_variant(variant: Variant, tables: Mapping[str, sa.Table]) -> Mapping[str, sa.Table]:
    outbox = tables["outbox"]
    return variant.declare(sa.MetaData(), outbox.name, outbox.schema)


def check_tables(
    connection: sa.Connection, tables: Iterable[sa.Table], *, autovacuum: Iterable[sa.Table] = ()
) -> list[Drift]:
    """Compare declared tables with those that a connection sees; `autovacuum` names those that need its settings."""
    family = family_of(connection.dialect)
    if family not in _READERS:
        raise Unsupported(f"Schema check: expected postgresql, mysql, mariadb or sqlite; got {family!r}")
    drifts: list[Drift] = []
    listed = list(tables)
    for schema in sorted({table.schema for table in listed}, key=str):
        _READERS[family].check_access(connection, schema)
    for table in listed:
        drifts += _check_table(connection, table, family)
    for table in autovacuum:
        for difference, statements, undo in compare_settings(connection, table):
            drifts.append(_drift(table, difference, statements, undo))
    return drifts


def _check_table(db: sa.Connection, table: sa.Table, family: str) -> Iterator[Drift]:
    found = _READERS[family].read_table(db, table)
    if found is None:
        yield _missing(table, db.dialect)
        return
    expected = declared_shape(table, db.dialect)
    differences = list(compare(expected, found))
    mender = _MENDERS[family](table, db.dialect, expected, found)
    mender.plan(differences)
    for difference in differences:
        yield _drift(table, difference, *mender.mend(difference))


def _drift(table: sa.Table, difference: Difference, statements: list[str], undo: list[str]) -> Drift:
    kind, name, expected, found, *_ = difference
    return Drift(table.fullname, kind, name, expected, found, tuple(statements), tuple(undo))


def _missing(table: sa.Table, dialect: Dialect) -> Drift:
    # A server that hides tables does not say whether one is there.
    found = "none that this user may see" if family_of(dialect) == "mysql" else None
    difference = Difference("table", table.name, "a table", found)
    return _drift(table, difference, *create_table(table, dialect))
