"""Creating a layout's tables when asked to: what is there already is looked at and left alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from pillarbox.errors import ConfigError, SchemaError
from pillarbox.layouts import Layout, get_layout
from pillarbox.schema.check import Drift, compare_tables
from pillarbox.schema.ddl import has_own_schema, run_ddl, schema_statement, table_ddl
from pillarbox.schema.namespaces import create_schema
from pillarbox.schema.rights import needs_rights
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


async def create(
    url: str | sa.URL,
    *,
    layout: str | Layout = "pillarbox",
    variant: str | None = None,
    dry_run: bool = False,
    **options: Any,
) -> list[Created]:
    """Create the tables of a layout in the database at a URL; `options` are those of `open_store`.

    Tables are made as the layout's `variant` has them, else as its first. Without one, those that are there may be of
    any variant.
    """
    chosen = get_layout(layout)
    store = open_store(url, layout=chosen if variant is None else chosen.as_variant(variant), **options)
    try:
        return await create_tables(store, dry_run=dry_run)
    finally:
        await store.close()


async def create_tables(store: SqlStore, *, dry_run: bool = False) -> list[Created]:
    """Create a store's tables that are missing.

    Raises `SchemaError`, before anything is created, when a table is not what its layout declares, when the schema is
    missing or when the user may not create tables in it.
    """
    if store.dialect == "sqlite" and not _has_file(store) and dry_run:
        return _plan_new_file(store)
    return await store.run(lambda db: _create_all(db, store, dry_run), writes=not dry_run)


def _create_all(db: sa.Connection, store: SqlStore, dry_run: bool) -> list[Created]:
    schema = store.layout.schema
    if schema is None or not has_own_schema(store.layout, store.tables):
        return _create(db, store, dry_run)
    if schema in sa.inspect(db).get_schema_names():
        return [Created(schema, ()), *_create(db, store, dry_run)]
    made = Created(schema, (schema_statement(store.dialect, schema),))
    if dry_run:
        planned = [Created(table.fullname, tuple(table_ddl(table, db.dialect))) for table in store.tables.values()]
        return [made, *planned]
    create_schema(db, schema)
    return [made, *_create(db, store, dry_run)]


def _create(db: sa.Connection, store: SqlStore, dry_run: bool) -> list[Created]:
    tables = store.tables
    drifts = compare_tables(db, store.layout, tables).drifts
    # Beside a table of another system's only ours is made; that one may have been made a little differently.
    others = {tables["outbox"].fullname} if "state" in tables else set()
    _refuse([drift for drift in drifts if drift.kind != "table" and drift.table not in others], store.layout)
    drifts = [drift for drift in drifts if drift.kind == "table"]
    made = {drift.table: drift.statements for drift in drifts}
    if made:
        with needs_rights(db, next(iter(tables.values())).schema):
            for statements in made.values() if not dry_run else ():
                run_ddl(db, statements)
    return [Created(table.fullname, made.get(table.fullname, ())) for table in tables.values()]


def _refuse(drifts: list[Drift], layout: Layout) -> None:
    if drifts:
        # Of several variants the migration is for the nearest: with one only, that one was asked for.
        variant = f" --variant {layout.variants[0].name}" if len(layout.variants) == 1 else ""
        names = sorted({drift.table for drift in drifts})
        is_one = len(names) == 1
        raise SchemaError(
            f"{'Table' if is_one else 'Tables'} {', '.join(map(repr, names))} {'exists' if is_one else 'exist'} but "
            f"{'is' if is_one else 'are'} not what the layout declares. {'. '.join(map(str, drifts))}. Run `pillarbox "
            f"schema diff{variant}` for the migration, or choose another table; nothing was changed."
        )


def _has_file(store: SqlStore) -> bool:
    path = Path(store.url.database or "")
    if not path.parent.is_dir():
        raise ConfigError(f"Store {store.name}: there is no folder {str(path.parent)!r}. Create it first.")
    return path.exists()


def _plan_new_file(store: SqlStore) -> list[Created]:
    dialect = sa.create_engine("sqlite://").dialect
    return [Created(table.fullname, tuple(table_ddl(table, dialect))) for table in store.tables.values()]
