"""The table of Debezium's outbox event router and our side table, as each database's catalog shows them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from alembic.autogenerate import produce_migrations
from alembic.migration import MigrationContext
from sqlalchemy.orm import DeclarativeBase, mapped_column

from pillarbox.errors import LayoutError
from pillarbox.layouts.debezium_tables import (
    OPTIONAL,
    DebeziumOutboxMixin,
    DebeziumStateMixin,
    declare,
    declare_with,
)
from tests.contract.catalog import DIALECTS, Catalog, empty_database, new_schema, read_tables

OUTBOX = {
    "postgresql": (
        ("id", "uuid", False, None),
        ("aggregatetype", "character varying(255)", False, None),
        ("aggregateid", "character varying(255)", False, None),
        ("type", "character varying(255)", False, None),
        ("payload", "jsonb", True, None),
    ),
    "mysql": (
        ("id", "char(36) ascii_bin", False, None),
        ("aggregatetype", "varchar(255) utf8mb4_0900_bin", False, None),
        ("aggregateid", "varchar(255) utf8mb4_0900_bin", False, None),
        ("type", "varchar(255) utf8mb4_0900_bin", False, None),
        ("payload", "json", True, None),
    ),
    "mariadb": (
        ("id", "char(36) ascii_bin", False, None),
        ("aggregatetype", "varchar(255) utf8mb4_nopad_bin", False, None),
        ("aggregateid", "varchar(255) utf8mb4_nopad_bin", False, None),
        ("type", "varchar(255) utf8mb4_nopad_bin", False, None),
        ("payload", "longtext utf8mb4_bin", True, None),
    ),
    "sqlite": (
        ("id", "CHAR(36)", False, None),
        ("aggregatetype", "VARCHAR(255)", False, None),
        ("aggregateid", "VARCHAR(255)", False, None),
        ("type", "VARCHAR(255)", False, None),
        ("payload", "JSON", True, None),
    ),
}
ADDED = {
    "postgresql": ("timestamp without time zone", "integer", "jsonb", "text"),
    "mysql": ("datetime(6)", "int", "json", "longtext utf8mb4_bin"),
    "mariadb": ("datetime(6)", "int(11)", "longtext utf8mb4_bin", "longtext utf8mb4_bin"),
    "sqlite": ("DATETIME", "INTEGER", "JSON", "TEXT"),
}
STATE = {
    "postgresql": (
        ("id", "uuid", False, None),
        ("attempts", "integer", False, "0"),
        ("state", "smallint", False, None),
        ("token", "uuid", True, None),
        ("until_at", "timestamp with time zone", True, None),
        ("error", "text", True, None),
        ("died_at", "timestamp with time zone", True, None),
    ),
    "mysql": (
        ("id", "char(36) ascii_bin", False, None),
        ("attempts", "int", False, "0"),
        ("state", "smallint", False, None),
        ("token", "char(36) ascii_bin", True, None),
        ("until_at", "datetime(6)", True, None),
        ("error", "longtext utf8mb4_bin", True, None),
        ("died_at", "datetime(6)", True, None),
    ),
    "mariadb": (
        ("id", "char(36) ascii_bin", False, None),
        ("attempts", "int(11)", False, "0"),
        ("state", "smallint(6)", False, None),
        ("token", "char(36) ascii_bin", True, None),
        ("until_at", "datetime(6)", True, None),
        ("error", "longtext utf8mb4_bin", True, None),
        ("died_at", "datetime(6)", True, None),
    ),
    "sqlite": (
        ("id", "CHAR(36)", False, None),
        ("attempts", "INTEGER", False, "0"),
        ("state", "SMALLINT", False, None),
        ("token", "CHAR(36)", True, None),
        ("until_at", "DATETIME", True, None),
        ("error", "TEXT", True, None),
        ("died_at", "DATETIME", True, None),
    ),
}
UNTIL = {
    "postgresql": "CREATE INDEX outbox_state_until ON outbox_state USING btree (state, until_at)",
    "mysql": "(state, until_at)",
    "mariadb": "(state, until_at)",
    "sqlite": "CREATE INDEX outbox_state_until ON outbox_state (state, until_at)",
}


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(dialect: str, tmp_path: Path) -> Iterator[sa.Engine]:
    with empty_database(dialect, tmp_path) as engine:
        yield engine


def expect(dialect: str, optional: tuple[str, ...] = ()) -> dict[str, Catalog]:
    types = dict(zip(OPTIONAL, ADDED[dialect], strict=True))
    checked = ["payload", *(name for name in optional if name == "headers")] if dialect == "mariadb" else []
    return {
        "outbox": Catalog(
            (*OUTBOX[dialect], *((name, types[name], True, None) for name in optional)),
            ("id",),
            (),
            tuple((name, f"json_valid(`{name}`)") for name in sorted(checked)),
        ),
        "outbox_state": Catalog(STATE[dialect], ("id",), (("outbox_state_until", UNTIL[dialect]),), ()),
    }


def make_base(**options: Any) -> Any:
    class Base(DeclarativeBase):
        metadata = sa.MetaData(**options)

    return Base


def find_changes(engine: sa.Engine, metadata: sa.MetaData) -> list[Any]:
    with engine.begin() as db:
        options = {"compare_type": True, "compare_server_default": True, "target_metadata": metadata}
        changes = produce_migrations(MigrationContext.configure(db, opts=options), metadata).upgrade_ops
    assert changes is not None
    return list(changes.as_diffs())


def test_the_live_tables_are_the_router_s_defaults_and_our_side_table(engine: sa.Engine, dialect: str) -> None:
    metadata = sa.MetaData()
    tables = declare(metadata, "outbox", None)
    assert {role: table.name for role, table in tables.items()} == {"outbox": "outbox", "state": "outbox_state"}
    metadata.create_all(engine)
    assert read_tables(engine) == expect(dialect)


@pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)
def test_the_router_s_documented_table_is_the_same(engine: sa.Engine) -> None:
    with engine.begin() as db:
        db.exec_driver_sql(
            "CREATE TABLE outbox (id uuid NOT NULL PRIMARY KEY, aggregatetype character varying(255) NOT NULL, "
            "aggregateid character varying(255) NOT NULL, type character varying(255) NOT NULL, payload jsonb)"
        )
    assert read_tables(engine) == {"outbox": expect("postgresql")["outbox"]}


def test_every_optional_column_has_its_type(engine: sa.Engine, dialect: str) -> None:
    metadata = sa.MetaData()
    declare_with(*OPTIONAL)(metadata, "outbox", None)
    metadata.create_all(engine)
    assert OPTIONAL == ("timestamp", "version", "headers", "tracingspancontext")
    assert read_tables(engine) == expect(dialect, OPTIONAL)


@pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)
def test_optional_columns_are_chosen_one_by_one(engine: sa.Engine) -> None:
    metadata = sa.MetaData()
    declare_with("headers", "version")(metadata, "outbox", None)
    metadata.create_all(engine)
    assert read_tables(engine) == expect("postgresql", ("headers", "version"))


def test_a_column_that_the_router_does_not_know_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"expected one of timestamp, version, .*; got 'timestmp'"):
        declare_with("timestmp")


def test_a_declared_table_that_lacks_an_optional_column_is_refused() -> None:
    metadata = sa.MetaData()
    declare(metadata, "outbox", None)
    with pytest.raises(LayoutError, match="lacks headers"):
        declare_with("headers")(metadata, "outbox", None)


def test_declared_again_the_tables_are_the_same_objects() -> None:
    metadata = sa.MetaData()
    first, second = declare(metadata, "outbox", None), declare(metadata, "outbox", None)
    assert all(first[role] is second[role] for role in ("outbox", "state"))
    assert len(second["state"].indexes) == 1


def test_text_and_keys_of_any_script_are_kept_apart(engine: sa.Engine) -> None:
    metadata = sa.MetaData()
    outbox = declare_with("timestamp")(metadata, "outbox", None)["outbox"]
    metadata.create_all(engine)
    at = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
    with engine.begin() as db:
        for key in ("a", "A", "заказ"):
            db.execute(outbox.insert().values(id=uuid4(), aggregatetype="t", aggregateid=key, type="T", timestamp=at))
        found = db.execute(sa.select(outbox.c.timestamp).where(outbox.c.aggregateid == "a")).scalars().all()
        assert found == [at]
        assert db.execute(sa.select(sa.func.count()).where(outbox.c.payload.is_(sa.null()))).scalar_one() == 3


@pytest.mark.parametrize("dialect", ["postgresql", "mysql", "mariadb"], indirect=True)
def test_names_follow_the_table_into_another_schema(engine: sa.Engine) -> None:
    metadata = sa.MetaData(naming_convention={"ix": "ix_%(column_0_label)s", "pk": "pk_%(table_name)s"})
    with new_schema(engine) as schema:
        declare(metadata, "outboxevent", schema)
        metadata.create_all(engine)
        found = read_tables(engine, schema)
        metadata.drop_all(engine)
    assert {name: [index for index, _ in each.indexes] for name, each in found.items()} == {
        "outboxevent": [],
        "outboxevent_state": ["outboxevent_state_until"],
    }


def test_a_name_too_long_for_an_index_is_refused_and_nothing_is_declared() -> None:
    metadata = sa.MetaData()
    with pytest.raises(LayoutError, match="_state_until"):
        declare(metadata, "o" * 52, None)
    assert not metadata.tables
    declare(metadata, "o" * 51, None)


def test_mapped_classes_make_the_same_tables(engine: sa.Engine, dialect: str) -> None:
    base = make_base()
    type("Outbox", (DebeziumOutboxMixin, base), {"__tablename__": "outbox", "__module__": __name__})
    type("State", (DebeziumStateMixin, base), {"__tablename__": "outbox_state", "__module__": __name__})
    base.metadata.create_all(engine)
    assert read_tables(engine) == expect(dialect)
    assert declare(base.metadata, "outbox", None)["state"] is base.metadata.tables["outbox_state"]


def test_a_mapped_class_renames_the_table_and_adds_columns() -> None:
    class Message(DebeziumOutboxMixin, make_base()):  # type: ignore[misc]
        __tablename__ = "message"
        __table_args__ = (sa.Index("message_tenant", "tenant"),)
        tenant = mapped_column(sa.String(20))

    assert set(Message.__table__.c.keys()) == {"id", "aggregatetype", "aggregateid", "type", "payload", "tenant"}
    assert {index.name for index in Message.__table__.indexes} == {"message_tenant"}


def test_the_side_table_is_added_to_a_live_router_table(engine: sa.Engine) -> None:
    before, metadata = sa.MetaData(), sa.MetaData()
    before_tables = declare(before, "outbox", None)
    before.create_all(engine, tables=[before_tables["outbox"]])
    declare(metadata, "outbox", None)
    assert [(kind, item.name) for kind, item in find_changes(engine, metadata)] == [
        ("add_table", "outbox_state"),
        ("add_index", "outbox_state_until"),
    ]
