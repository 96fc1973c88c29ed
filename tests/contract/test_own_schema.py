"""A layout whose tables are in a schema of their own creates it with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from pillarbox import LayoutError
from pillarbox.layouts import get_layout
from pillarbox.schema import create_tables, ddl
from pillarbox.stores.url import open_store
from tests.servers import ServerName, server_url

SERVERS: tuple[ServerName, ...] = ("postgres", "mariadb", "mysql")


@pytest.mark.parametrize("server", SERVERS)
async def test_schema_of_the_layout_is_created_with_its_tables(server: ServerName) -> None:
    schema = f"own_{uuid4().hex[:8]}"
    layout = replace(get_layout("ekbatan"), schema=schema)
    store = open_store(server_url(server), layout=layout)
    names = [schema, f"{schema}.events", f"{schema}.events_state"]
    try:
        planned = await create_tables(store, dry_run=True)
        assert [(each.table, each.is_new) for each in planned] == [(name, True) for name in names]
        assert [each.is_new for each in await create_tables(store)] == [True, True, True]
        assert [each.is_new for each in await create_tables(store)] == [False, False, False]
    finally:
        kind = "SCHEMA" if server == "postgres" else "DATABASE"
        cascade = " CASCADE" if server == "postgres" else ""
        await store.run(lambda db: _drop(db, f"DROP {kind} IF EXISTS {schema}{cascade}"))
        await store.close()


def _drop(db: sa.Connection, statement: str) -> Any:
    return db.exec_driver_sql(statement)


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        ("postgresql", "CREATE SCHEMA IF NOT EXISTS eventlog;\n\n"),
        ("mysql", "CREATE DATABASE IF NOT EXISTS eventlog;\n\n"),
    ],
)
def test_ddl_begins_with_the_schema(dialect: str, expected: str) -> None:
    assert ddl("ekbatan", dialect).startswith(f"{expected}CREATE TABLE eventlog.events (")
    assert "CREATE SCHEMA" not in ddl("ekbatan", dialect, schema="mine")


def test_ddl_for_a_database_that_the_layout_does_not_have_is_refused() -> None:
    with pytest.raises(LayoutError, match="Layout 'sqloutbox': its table exists on sqlite; got 'postgresql'"):
        ddl("sqloutbox", "postgresql")
