"""Creating a layout's tables when asked to: what is there already is looked at and left alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from pillarbox.errors import ConfigError, SchemaError
from pillarbox.schema.ddl import table_ddl
from pillarbox.stores.sql import SqlStore
from pillarbox.stores.url import open_store


@dataclass(frozen=True, slots=True)
class Created:
    """What became of one table: `statements` are those that made it, none when it was there."""

    table: str
    statements: tuple[str, ...]

    @property
    def is_new(self) -> bool:
        return bool(self.statements)


async def create(url: str | sa.URL, *, dry_run: bool = False, **options: Any) -> list[Created]:
    """Create the tables of a layout in the database at a URL; `options` are those of `open_store`."""
    store = open_store(url, **options)
    try:
        return await create_tables(store, dry_run=dry_run)
    finally:
        await store.close()


async def create_tables(store: SqlStore, *, dry_run: bool = False) -> list[Created]:
    """Create a store's tables that are missing.

    Raises `SchemaError`, before anything is created, when a table lacks columns or the schema is missing.
    """
    if store.dialect == "sqlite" and not _has_file(store) and dry_run:
        return _plan_new_file(store)
    return await store.run(lambda db: _create(db, store.tables, dry_run), writes=not dry_run)


def _create(db: sa.Connection, tables: Mapping[str, sa.Table], dry_run: bool) -> list[Created]:
    inspector = sa.inspect(db)
    _check_schema(inspector, next(iter(tables.values())).schema, db)
    existing = {table.fullname for table in tables.values() if inspector.has_table(table.name, schema=table.schema)}
    for table in tables.values():
        if table.fullname in existing:
            _check_columns(inspector, table, db)
    created = []
    for table in tables.values():
        statements = () if table.fullname in existing else tuple(table_ddl(table, db.dialect))
        if not dry_run:
            for statement in statements:
                db.exec_driver_sql(statement.replace("%", "%%"))
        created.append(Created(table.fullname, statements))
    return created


def _check_schema(inspector: sa.Inspector, schema: str | None, db: sa.Connection) -> None:
    if schema is None:
        return
    if db.dialect.name == "sqlite":
        raise SchemaError(f"Schema {schema!r}: SQLite has no schemas; name the table alone")
    if schema not in inspector.get_schema_names():
        kind = "schema" if db.dialect.name == "postgresql" else "database"
        raise SchemaError(
            f"There is no {kind} {schema!r}. Create it first: CREATE {kind.upper()} {schema}; "
            "Pillarbox creates tables only."
        )


def _check_columns(inspector: sa.Inspector, table: sa.Table, db: sa.Connection) -> None:
    found = {column["name"] for column in inspector.get_columns(table.name, schema=table.schema)}
    missing = [column for column in table.columns if column.name not in found]
    if missing:
        listed = ", ".join(f"{column.name!r} ({_type_name(column, db)})" for column in missing)
        one = len(missing) == 1
        raise SchemaError(
            f"Table {table.fullname!r} exists but lacks column{'' if one else 's'} {listed}. "
            f"Add {'it' if one else 'them'} by a migration, or choose another table; nothing was changed."
        )


def _type_name(column: sa.Column[Any], db: sa.Connection) -> str:
    return column.type.compile(dialect=db.dialect).lower()


def _has_file(store: SqlStore) -> bool:
    path = Path(store.url.database or "")
    if not path.parent.is_dir():
        raise ConfigError(f"Store {store.name}: there is no folder {str(path.parent)!r}. Create it first.")
    return path.exists()


def _plan_new_file(store: SqlStore) -> list[Created]:
    dialect = sa.create_engine("sqlite://").dialect
    return [Created(table.fullname, tuple(table_ddl(table, dialect))) for table in store.tables.values()]
