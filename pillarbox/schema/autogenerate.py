"""What Alembic's autogenerate sees of our tables: each as it is on the database at hand.

Alembic finds this module by its entry point; an env.py needs the `target_metadata` and nothing else. Before the
comparison a table of ours is replaced by a copy with types of SQLAlchemy's own and the indexes and options of this
database only, so that a migration imports nothing of Pillarbox. Partitions are no tables to drop; a missing schema is
made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.engine import Dialect

from pillarbox.layouts.plain import is_own, plain_type
from pillarbox.layouts.variants import has_choice, indexes_on

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext
    from alembic.operations.ops import UpgradeOps
    from alembic.runtime.plugins import Plugin

_PARTITIONS = sa.text("""
    SELECT n.nspname, c.relname, rn.nspname, r.relname
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_class r ON r.oid = pg_partition_root(c.oid) JOIN pg_namespace rn ON rn.oid = r.relnamespace
    WHERE c.relispartition
""")


def setup(plugin: Plugin) -> None:
    """Called by Alembic when it is imported, and not whole yet: what is used of it is imported when it is called."""
    from alembic.util import DispatchPriority

    # Whatever is returned but STOP lets the others go on.
    first, last = DispatchPriority.FIRST, DispatchPriority.LAST
    plugin.add_autogenerate_comparator(prepare, "schema", "pillarbox", priority=first)  # type: ignore[arg-type]
    plugin.add_autogenerate_comparator(finish, "schema", "pillarbox.lines", priority=last)  # type: ignore[arg-type]


def prepare(context: AutogenContext, changes: UpgradeOps, schemas: set[str | None]) -> None:
    """Put copies in the place of our tables, before Alembic compares."""
    own = {table.key for table in context.sorted_tables if is_ours(table)}
    if not own:
        return
    _replace_tables(context, own)
    tables = [table for table in context.sorted_tables if table.key in own]
    wanted = [table for table in tables if context.run_object_filters(table, table.name, "table", False, None)]
    _add_schemas(context, changes, schemas, wanted)
    _leave_partitions(context, tables)


def finish(context: AutogenContext, changes: UpgradeOps, schemas: set[str | None]) -> None:
    """Have the indexes of our tables written over several lines, after Alembic compared."""
    from pillarbox.schema.operations import write_in_lines

    given = _declared(context)
    copies = [table for table in context.sorted_tables if not any(table.metadata is each for each in given)]
    write_in_lines(changes, {(table.schema, table.name) for table in copies})


def is_ours(table: sa.Table) -> bool:
    """Whether a table has columns or indexes that are not the same on every database, by our declaration."""
    return any(is_own(column.type) for column in table.columns) or any(map(has_choice, table.indexes))


# -- copies ------------------------------------------------------------------------------------------------------------


def _replace_tables(context: AutogenContext, own: set[str]) -> None:
    copies: dict[str, sa.Table] = {}
    for metadata in _declared(context):
        if own & metadata.tables.keys():
            # All of them: a table of ours may have a foreign key to another one.
            # Without a schema of its own: a table that says it has none would get that one.
            apart = sa.MetaData(naming_convention=metadata.naming_convention)
            tables = metadata.sorted_tables
            copies |= {table.key: table.to_metadata(apart, referred_schema_fn=_keep_schema) for table in tables}
    for table in context.sorted_tables:
        if table.key in own:
            _make_plain(table, copies[table.key], context.dialect)
    context.sorted_tables = [copies[each.key] if each.key in own else each for each in context.sorted_tables]
    context.table_key_to_table = {
        key: copies[key] if key in own else table for key, table in context.table_key_to_table.items()
    }


def _keep_schema(table: sa.Table, to: str | None, key: sa.ForeignKeyConstraint, referred: str | None) -> str | None:
    return key.referred_table.schema


def _declared(context: AutogenContext) -> list[sa.MetaData]:
    given = context.metadata if isinstance(context.metadata, Iterable) else [context.metadata]
    return [metadata for metadata in given if metadata is not None]


def _make_plain(table: sa.Table, made: sa.Table, dialect: Dialect) -> None:
    for column in made.columns:
        column.type = plain_type(column.type, dialect)
        if column.identity is not None and not dialect.supports_identity_columns:
            column.identity = column.server_default = None
    wanted = [_describe(index) for index in indexes_on(table, dialect.name)]
    made.indexes.intersection_update([index for index in made.indexes if _describe(index) in wanted])
    for item in (made, *made.indexes):
        _drop_options(item, dialect)


def _describe(index: sa.Index) -> tuple[object, ...]:
    options = sorted((name, str(value)) for name, value in index.kwargs.items())
    return index.name, index.unique, [str(each) for each in index.expressions], options


def _drop_options(item: Any, dialect: Dialect) -> None:
    for name in [name for name, value in item.kwargs.items() if value is None or not _is_for(name, dialect)]:
        del item.dialect_kwargs[name]


def _is_for(option: str, dialect: Dialect) -> bool:
    return option.startswith(f"{dialect.name}_")


# -- schemas and partitions --------------------------------------------------------------------------------------------


def _add_schemas(
    context: AutogenContext, changes: UpgradeOps, schemas: set[str | None], tables: list[sa.Table]
) -> None:
    """Alembic looks into the default schema only, unless it is told to, and then takes our tables for missing."""
    # A module of Alembic's must not be imported before it is whole.
    from pillarbox.schema.operations import MakeSchema

    named = {table.schema for table in tables if table.schema} - {context.dialect.default_schema_name} - schemas
    there = set(context.inspector.get_schema_names()) if named else set()
    for schema in sorted(named - there):
        changes.ops.insert(0, MakeSchema(schema, context.dialect.name))
    added = {schema for schema in named & there if context.run_name_filters(schema, "schema", {})}
    schemas |= added
    # Other tables there are not this application's.
    declared = {(table.schema, table.name) for table in context.sorted_tables}
    _filter_tables(context, lambda schema, name: schema not in added or (schema, name) in declared)


def _leave_partitions(context: AutogenContext, tables: list[sa.Table]) -> None:
    if context.dialect.name != "postgresql" or context.connection is None:
        return
    default = context.dialect.default_schema_name
    ours = {(table.schema or default, table.name) for table in tables}
    found = context.connection.execute(_PARTITIONS).all()
    partitions = {(schema, name) for schema, name, *root in found if tuple(root) in ours}
    _filter_tables(context, lambda schema, name: (schema or default, name) not in partitions)


def _filter_tables(context: AutogenContext, is_wanted: Callable[[str | None, str | None], bool]) -> None:
    def include(name: str | None, kind: str, parents: Any) -> bool:
        return kind != "table" or is_wanted(parents["schema_name"], name)

    context._name_filters.append(include)
