"""The side table of an action log, as each database's catalog shows it and as schema tools see it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from pillarbox.actions import ActionLog
from pillarbox.errors import LayoutError
from pillarbox.schema import check_tables
from tests.contract.catalog import DIALECTS, empty_database, read_catalog

_NAMES = ("namespace", "action_name", "actor", "idempotency_key")
_TYPES = {
    "postgresql": ("uuid", "character varying(255)", "timestamp without time zone"),
    "mysql": ("char(36) ascii_general_ci", "varchar(255) utf8mb4_0900_bin", "datetime(6)"),
    "mariadb": ("uuid", "varchar(255) utf8mb4_nopad_bin", "datetime(6)"),
    "sqlite": ("CHAR(36)", "VARCHAR(255)", "DATETIME"),
}
_UNIQUE = {
    "postgresql": "CREATE UNIQUE INDEX {name} ON {table} USING btree (namespace, action_name, idempotency_key)",
    "mysql": "UNIQUE (namespace, action_name, idempotency_key)",
    "mariadb": "UNIQUE (namespace, action_name, idempotency_key)",
    "sqlite": "CREATE UNIQUE INDEX {name} ON {table} (namespace, action_name, idempotency_key)",
}


@pytest.fixture(params=DIALECTS)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[sa.Engine]:
    with empty_database(request.param, tmp_path) as made:
        yield made


def dialect_of(engine: sa.Engine) -> str:
    return "mariadb" if getattr(engine.dialect, "is_mariadb", False) else engine.dialect.name


def make_log(engine: sa.Engine, **options: Any) -> ActionLog:
    log = ActionLog(sa.MetaData(), namespace="shop", **options)
    log.table.metadata.create_all(engine)
    return log


def test_side_table_is_what_its_layout_says(engine: sa.Engine) -> None:
    make_log(engine)
    found = read_catalog(engine, "action_events_actions")
    dialect = dialect_of(engine)
    uuid, text, moment = _TYPES[dialect]
    assert found.columns == (
        ("action_id", uuid, False, None),
        *((name, text, name in ("actor", "idempotency_key"), None) for name in _NAMES),
        ("completion_date", moment, False, None),
    )
    assert found.key == ("action_id",)
    name = "action_events_actions_key"
    assert found.indexes == ((name, _UNIQUE[dialect].format(name=name, table="action_events_actions")),)


@pytest.mark.parametrize("handled", [True, False], ids=["handled", "not handled"])
def test_schema_tools_find_no_difference(engine: sa.Engine, handled: bool) -> None:
    log = make_log(engine, handled=handled)
    with engine.connect() as db:
        assert check_tables(db, log.tables.values()) == []
        assert compare_metadata(MigrationContext.configure(db), log.table.metadata) == []


def test_schema_tools_find_a_missing_side_table(engine: sa.Engine) -> None:
    log = make_log(engine)
    log.tables["actions"].drop(engine)
    with engine.connect() as db:
        [drift] = check_tables(db, log.tables.values())
    assert (drift.kind, drift.table) == ("table", "action_events_actions")


def test_name_that_a_database_would_cut_is_refused() -> None:
    with pytest.raises(LayoutError, match="at most"):
        ActionLog(sa.MetaData(), namespace="shop", table="é" * 30)
