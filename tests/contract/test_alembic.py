"""Alembic's autogenerate on every declaration and database: the migration it writes makes the whole of the tables,
and after that it finds nothing to change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa
from alembic.autogenerate import produce_migrations, render_python_code
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.operations.ops import UpgradeOps
from sqlalchemy.dialects import mysql, postgresql

import pillarbox.layouts.clock
from pillarbox.layouts import (
    debezium_tables,
    declare_layout,
    ekbatan_tables,
    faststream_tables,
    get_layout,
    omnibox_tables,
    openoutbox_tables,
    sqloutbox_tables,
)
from pillarbox.layouts.variants import keep_indexes
from tests.contract.catalog import DIALECTS, empty_database, read_tables


class Declaration(NamedTuple):
    """One way to put tables on a `MetaData`, and the databases it is for."""

    name: str
    declare: Callable[[sa.MetaData], Any]
    dialects: tuple[str, ...] = DIALECTS


DECLARATIONS = [
    Declaration("pillarbox", lambda metadata: declare_layout(get_layout("pillarbox"), metadata)),
    Declaration(
        "pillarbox partitioned",
        lambda metadata: declare_layout(get_layout("pillarbox-partitioned"), metadata),
        ("postgresql",),
    ),
    Declaration(
        "omnibox outbox",
        lambda metadata: omnibox_tables.declare_outbox(metadata, omnibox_tables.OUTBOX, None),
        ("postgresql",),
    ),
    Declaration(
        "omnibox inbox",
        lambda metadata: omnibox_tables.declare_inbox(metadata, omnibox_tables.INBOX, None),
        ("postgresql",),
    ),
    Declaration(
        "omnibox outbox partitioned",
        lambda metadata: omnibox_tables.declare_outbox_partitioned(metadata, omnibox_tables.OUTBOX_PARTITIONED, None),
        ("postgresql",),
    ),
    Declaration(
        "omnibox inbox partitioned",
        lambda metadata: omnibox_tables.declare_inbox_partitioned(metadata, omnibox_tables.INBOX_PARTITIONED, None),
        ("postgresql",),
    ),
    Declaration("openoutbox", lambda metadata: openoutbox_tables.declare(metadata, openoutbox_tables.TABLE, None)),
    Declaration("faststream outbox", faststream_tables.declare_outbox, ("postgresql",)),
    Declaration("faststream outbox and dlq", faststream_tables.declare_with_dlq, ("postgresql",)),
    Declaration(
        "ekbatan",
        lambda metadata: ekbatan_tables.declare_base(metadata, ekbatan_tables.TABLE, ""),
        ("postgresql", "mysql", "mariadb"),
    ),
    Declaration(
        "ekbatan with handlers",
        lambda metadata: ekbatan_tables.declare_with_handlers(metadata, ekbatan_tables.TABLE, ""),
        ("postgresql", "mysql", "mariadb"),
    ),
    Declaration("debezium", debezium_tables.declare),
    Declaration(
        "debezium with optional columns",
        lambda metadata: debezium_tables.declare_with(*debezium_tables.OPTIONAL)(metadata, debezium_tables.TABLE, None),
    ),
    Declaration("sqloutbox 0.4", sqloutbox_tables.declare, ("sqlite",)),
    Declaration("sqloutbox 0.6", sqloutbox_tables.declare_retrying, ("sqlite",)),
]

CONVENTION = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


def ignore_identity(
    context: MigrationContext, found: Any, column: Any, was: Any, default: Any, text: Any
) -> bool | None:
    return False if isinstance(default, sa.Identity) else None


def configure(connection: sa.Connection, metadata: sa.MetaData) -> MigrationContext:
    # Alembic compares an Identity also on databases that have none, where SQLAlchemy leaves it out of the DDL. On
    # PostgreSQL, which has it, Alembic takes no function here: it reads `.arg` of the reflected Identity first.
    has_identity = connection.dialect.supports_identity_columns
    options = {
        "compare_type": True,
        "compare_server_default": True if has_identity else ignore_identity,
        "target_metadata": metadata,
    }
    return MigrationContext.configure(connection, opts=options)


def find_changes(context: MigrationContext, metadata: sa.MetaData) -> UpgradeOps:
    changes = produce_migrations(context, metadata).upgrade_ops
    assert changes is not None
    return changes


def run_migration(context: MigrationContext, changes: UpgradeOps) -> None:
    """Run the text that `alembic revision --autogenerate` writes into a migration."""
    text = render_python_code(changes, migration_context=context)
    # Alembic writes the imports of dialects itself; that of pillarbox is a line in the user's script.py.mako.
    names = {"sa": sa, "op": Operations(context), "mysql": mysql, "postgresql": postgresql, "pillarbox": pillarbox}
    exec("if True:\n    " + text.strip(), names)


@pytest.mark.parametrize("convention", [None, CONVENTION], ids=["plain", "convention"])
@pytest.mark.parametrize(
    ("declaration", "dialect"),
    [
        pytest.param(declaration, dialect, id=f"{declaration.name}-{dialect}")
        for declaration in DECLARATIONS
        for dialect in declaration.dialects
    ],
)
def test_autogenerate_makes_the_whole_and_then_finds_nothing(
    declaration: Declaration, dialect: str, convention: Any, tmp_path: Path
) -> None:
    metadata = sa.MetaData(naming_convention=convention)
    declaration.declare(metadata)
    with empty_database(dialect, tmp_path) as engine:
        metadata.create_all(engine)
        expected = read_tables(engine)
    assert set(expected) == set(metadata.tables)
    assert all(each.columns and each.key for each in expected.values())

    # Alembic does not evaluate `ddl_if`: it takes every index of the metadata for one of this database.
    keep_indexes(metadata, dialect)
    with empty_database(dialect, tmp_path) as engine:
        with engine.begin() as connection:
            context = configure(connection, metadata)
            run_migration(context, find_changes(context, metadata))
        assert read_tables(engine) == expected
        with engine.begin() as connection:
            context = configure(connection, metadata)
            assert find_changes(context, metadata).as_diffs() == []
