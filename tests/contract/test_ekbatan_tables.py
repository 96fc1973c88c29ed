"""The tables of Ekbatan as each database's catalog shows them, and creating their schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from alembic.autogenerate import produce_migrations
from alembic.migration import MigrationContext
from sqlalchemy.orm import DeclarativeBase, mapped_column

from pillarbox.errors import ConfigError, LayoutError, SchemaError
from pillarbox.layouts.ekbatan_tables import (
    EkbatanEventMixin,
    EkbatanNotificationMixin,
    EkbatanStateMixin,
    declare_base,
    declare_with_handlers,
)
from pillarbox.layouts.variants import indexes_on
from pillarbox.schema.namespaces import create_schema, missing_grant, schema_statement
from tests.contract.catalog import DRIVERS, SERVERS, Catalog, empty_database, new_schema, read_catalog, read_tables
from tests.servers import server_url

DIALECTS = ("postgresql", "mysql", "mariadb")

# What each database reports for a type of the page; `…` stands for the collation that a database has by default.
REPORTED = {
    "postgresql": {
        "uuid": "uuid",
        "json": "jsonb",
        "time": "timestamp without time zone",
        "text": "character varying(255)",
        "state": "character varying(24)",
        "flag": "boolean",
        "int": "integer",
    },
    "mysql": {
        "uuid": "char(36) ascii_general_ci",
        "json": "json",
        "time": "datetime(6)",
        "text": "varchar(255) …",
        "state": "varchar(24) …",
        "flag": "tinyint(1)",
        "int": "int",
    },
    "mariadb": {
        "uuid": "uuid",
        "json": "longtext utf8mb4_bin",
        "time": "datetime(6)",
        "text": "varchar(255) …",
        "state": "varchar(24) …",
        "flag": "tinyint(1)",
        "int": "int(11)",
    },
}
ACTION = (
    ("namespace", "text", False, None),
    ("action_id", "uuid", False, None),
    ("action_name", "text", False, None),
    ("action_params", "json", False, None),
    ("started_date", "time", False, None),
    ("completion_date", "time", False, None),
    ("model_id", "text", True, None),
    ("model_type", "text", True, None),
)
EVENTS = (
    ("id", "uuid", False, None),
    *ACTION,
    ("event_type", "text", True, None),
    ("payload", "json", True, None),
    ("event_date", "time", False, None),
    ("delivered", "flag", False, None),
)
NOTIFICATIONS = (
    ("id", "uuid", False, None),
    ("event_id", "uuid", False, None),
    ("handler_name", "text", False, None),
    *ACTION,
    ("event_type", "text", False, None),
    ("payload", "json", True, None),
    ("event_date", "time", False, None),
    ("state", "state", False, None),
    ("attempts", "int", False, "0"),
    ("next_retry_at", "time", False, None),
    ("created_date", "time", False, None),
    ("updated_date", "time", False, None),
)
POSTGRES_INDEXES = {
    "base": (("idx_events_action_id", "CREATE INDEX idx_events_action_id ON events USING btree (action_id)"),),
    "events": (
        (
            "events_undelivered",
            "CREATE INDEX events_undelivered ON events USING btree (event_type, event_date) WHERE (delivered = false)",
        ),
        ("idx_events_action_id", "CREATE INDEX idx_events_action_id ON events USING btree (action_id)"),
    ),
    "notifications": (
        (
            "event_notifications_due",
            "CREATE INDEX event_notifications_due ON event_notifications USING btree (next_retry_at) WHERE "
            "((state)::text = ANY ((ARRAY['PENDING'::character varying, 'FAILED'::character varying])::text[]))",
        ),
        (
            "event_notifications_event_id_handler_name_key",
            "CREATE UNIQUE INDEX event_notifications_event_id_handler_name_key ON event_notifications "
            "USING btree (event_id, handler_name)",
        ),
    ),
}
OTHER_INDEXES = {
    "base": (("idx_events_action_id", "(action_id)"),),
    "events": (
        ("events_undelivered", "(delivered, event_type, event_date)"),
        ("idx_events_action_id", "(action_id)"),
    ),
    "notifications": (
        ("event_id", "UNIQUE (event_id, handler_name)"),
        ("event_notifications_due", "(state, next_retry_at)"),
    ),
}
JSON_CHECKS = (("action_params", "json_valid(`action_params`)"), ("payload", "json_valid(`payload`)"))
SIDE = {
    "postgresql": Catalog(
        columns=(
            ("id", "uuid", False, None),
            ("attempts", "integer", False, "0"),
            ("state", "smallint", False, None),
            ("token", "uuid", True, None),
            ("until_at", "timestamp with time zone", True, None),
            ("error", "text", True, None),
            ("died_at", "timestamp with time zone", True, None),
        ),
        key=("id",),
        indexes=(
            (
                "events_state_until",
                "CREATE INDEX events_state_until ON events_state USING btree (state, until_at)",
            ),
        ),
        checks=(),
    ),
    "mysql": Catalog(
        columns=(
            ("id", "char(36) ascii_general_ci", False, None),
            ("attempts", "int", False, "0"),
            ("state", "smallint", False, None),
            ("token", "char(36) ascii_bin", True, None),
            ("until_at", "datetime(6)", True, None),
            ("error", "longtext utf8mb4_bin", True, None),
            ("died_at", "datetime(6)", True, None),
        ),
        key=("id",),
        indexes=(("events_state_until", "(state, until_at)"),),
        checks=(),
    ),
    "mariadb": Catalog(
        columns=(
            ("id", "uuid", False, None),
            ("attempts", "int(11)", False, "0"),
            ("state", "smallint(6)", False, None),
            ("token", "char(36) ascii_bin", True, None),
            ("until_at", "datetime(6)", True, None),
            ("error", "longtext utf8mb4_bin", True, None),
            ("died_at", "datetime(6)", True, None),
        ),
        key=("id",),
        indexes=(("events_state_until", "(state, until_at)"),),
        checks=(),
    ),
}

THEIR_TYPES = {
    "postgresql": {"uuid": "UUID", "json": "JSONB", "time": "TIMESTAMP"},
    "mysql": {"uuid": "CHAR(36) CHARACTER SET ascii", "json": "JSON", "time": "DATETIME(6)"},
    "mariadb": {"uuid": "UUID", "json": "JSON", "time": "DATETIME(6)"},
}
THEIR_ACTION = (
    "namespace VARCHAR(255) NOT NULL, action_id {uuid} NOT NULL, action_name VARCHAR(255) NOT NULL, "
    "action_params {json} NOT NULL, started_date {time} NOT NULL, completion_date {time} NOT NULL, "
    "model_id VARCHAR(255), model_type VARCHAR(255), "
)
THEIR_TABLES = (
    "CREATE TABLE events (id {uuid} PRIMARY KEY, " + THEIR_ACTION + "event_type VARCHAR(255), payload {json}, "
    "event_date {time} NOT NULL, delivered BOOLEAN NOT NULL)",
    "CREATE INDEX idx_events_action_id ON events (action_id)",
    "CREATE TABLE event_notifications (id {uuid} PRIMARY KEY, event_id {uuid} NOT NULL, "
    "handler_name VARCHAR(255) NOT NULL, " + THEIR_ACTION + "event_type VARCHAR(255) NOT NULL, payload {json}, "
    "event_date {time} NOT NULL, state VARCHAR(24) NOT NULL, attempts INT NOT NULL DEFAULT 0, "
    "next_retry_at {time} NOT NULL, created_date {time} NOT NULL, updated_date {time} NOT NULL, "
    "UNIQUE (event_id, handler_name))",
)
THEIR_INDEXES = {
    "postgresql": (
        "CREATE INDEX events_undelivered ON events (event_type, event_date) WHERE delivered = FALSE",
        "CREATE INDEX event_notifications_due ON event_notifications (next_retry_at) "
        "WHERE state IN ('PENDING', 'FAILED')",
    ),
    "mysql": (
        "CREATE INDEX events_undelivered ON events (delivered, event_type, event_date)",
        "CREATE INDEX event_notifications_due ON event_notifications (state, next_retry_at)",
    ),
}
THEIR_INDEXES["mariadb"] = THEIR_INDEXES["mysql"]


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(dialect: str, tmp_path: Path) -> Iterator[sa.Engine]:
    with empty_database(dialect, tmp_path) as engine:
        yield engine


def expect(engine: sa.Engine, dialect: str, columns: Any, indexes: str) -> Catalog:
    collation = ""
    if dialect != "postgresql":
        with engine.connect() as db:
            collation = db.exec_driver_sql("SELECT @@collation_database").scalar_one()
    reported = {name: type_.replace("…", collation) for name, type_ in REPORTED[dialect].items()}
    return Catalog(
        tuple((name, reported[type_], nullable, default) for name, type_, nullable, default in columns),
        ("id",),
        (POSTGRES_INDEXES if dialect == "postgresql" else OTHER_INDEXES)[indexes],
        JSON_CHECKS if dialect == "mariadb" else (),
    )


def make_base(**options: Any) -> Any:
    class Base(DeclarativeBase):
        metadata = sa.MetaData(**options)

    return Base


# -- the tables ----------------------------------------------------------------------------------------------


def test_the_base_tables_are_those_of_the_page(engine: sa.Engine, dialect: str) -> None:
    metadata = sa.MetaData()
    assert list(declare_base(metadata, "events", "")) == ["outbox", "state"]
    metadata.create_all(engine)
    assert read_tables(engine) == {
        "events": expect(engine, dialect, EVENTS, "base"),
        "events_state": SIDE[dialect],
    }


def test_the_tables_with_handlers_are_those_of_the_page(engine: sa.Engine, dialect: str) -> None:
    metadata = sa.MetaData()
    assert list(declare_with_handlers(metadata, "events", "")) == ["outbox", "notifications"]
    metadata.create_all(engine)
    assert read_tables(engine) == {
        "events": expect(engine, dialect, EVENTS, "events"),
        "event_notifications": expect(engine, dialect, NOTIFICATIONS, "notifications"),
    }


def test_their_own_statements_make_the_same_tables(engine: sa.Engine, dialect: str) -> None:
    with engine.begin() as db:
        for statement in (*THEIR_TABLES, *THEIR_INDEXES[dialect]):
            db.exec_driver_sql(statement.format(**THEIR_TYPES[dialect]))
    assert read_tables(engine) == {
        "events": expect(engine, dialect, EVENTS, "events"),
        "event_notifications": expect(engine, dialect, NOTIFICATIONS, "notifications"),
    }


def test_handlers_come_to_a_declared_base(engine: sa.Engine, dialect: str) -> None:
    metadata = sa.MetaData()
    outbox = declare_base(metadata, "events", "")["outbox"]
    for _ in range(2):
        tables = declare_with_handlers(metadata, "events", "")
        assert tables["outbox"] is outbox
        assert tables["notifications"] is metadata.tables["event_notifications"]
        assert len(indexes_on(outbox, dialect)) == 2
    metadata.create_all(engine)
    assert read_catalog(engine, "events") == expect(engine, dialect, EVENTS, "events")


def test_names_follow_the_table_into_another_schema(engine: sa.Engine, dialect: str) -> None:
    metadata = sa.MetaData()
    with new_schema(engine) as schema:
        declare_base(metadata, "shop_events", schema)
        declare_with_handlers(metadata, "shop_events", schema)
        metadata.create_all(engine)
        found = read_tables(engine, schema)
        metadata.drop_all(engine)
    assert {name: [index for index, _ in each.indexes] for name, each in found.items()} == {
        "shop_events": ["idx_shop_events_action_id", "shop_events_undelivered"],
        "shop_events_state": ["shop_events_state_until"],
        "shop_event_notifications": [
            *(["event_id"] if dialect != "postgresql" else []),
            "shop_event_notifications_due",
            *(["shop_event_notifications_event_id_handler_name_key"] if dialect == "postgresql" else []),
        ],
    }


def test_the_schema_is_eventlog_unless_one_is_named() -> None:
    assert declare_base(sa.MetaData(), "events", None)["state"].fullname == "eventlog.events_state"
    assert declare_base(sa.MetaData(schema="log"), "events", None)["outbox"].fullname == "log.events"
    assert declare_with_handlers(sa.MetaData(), "log", "mine")["notifications"].fullname == "mine.log_notifications"


def test_delivered_must_be_said(engine: sa.Engine) -> None:
    metadata = sa.MetaData()
    events = declare_base(metadata, "events", "")["outbox"]
    metadata.create_all(engine)
    at = datetime(2026, 1, 2, 3, 4, 5, 678901, timezone(timedelta(hours=2)))
    row = {"id": uuid4(), "namespace": "shop", "action_id": uuid4(), "action_name": "Pay", "action_params": {"a": 1}}
    row |= {"started_date": at, "completion_date": at, "event_date": at}
    with engine.begin() as db, pytest.raises((sa.exc.IntegrityError, sa.exc.OperationalError), match="delivered"):
        db.execute(events.insert().values(**row))
    with engine.begin() as db:
        db.execute(events.insert().values(**row, delivered=False))
        [found] = db.execute(sa.select(events)).mappings().all()
    assert found["started_date"] == datetime(2026, 1, 2, 1, 4, 5, 678901, UTC)
    assert (found["id"], found["action_params"], found["delivered"]) == (row["id"], {"a": 1}, False)
    assert isinstance(found["action_id"], UUID)
    assert found["payload"] is None


def test_a_naming_convention_leaves_the_indexes_alone() -> None:
    convention = {"ix": "ix_%(column_0_label)s", "uq": "uq_%(table_name)s_%(column_0_name)s", "pk": "pk_%(table_name)s"}
    metadata = sa.MetaData(naming_convention=convention)
    tables = {**declare_base(metadata), **declare_with_handlers(metadata)}
    assert {str(index.name) for table in tables.values() for index in table.indexes} == {
        "idx_events_action_id",
        "events_undelivered",
        "events_state_until",
        "event_notifications_due",
    }


def test_a_name_too_long_for_an_index_is_refused_and_nothing_is_declared() -> None:
    metadata = sa.MetaData()
    with pytest.raises(LayoutError, match=r"'idx_e+_action_id': .* at most 63 bytes"):
        declare_base(metadata, "e" * 50, None)
    with pytest.raises(LayoutError, match=r"_notifications_due'"):
        declare_with_handlers(metadata, "e" * 48, None)
    assert not metadata.tables


def test_mapped_classes_make_the_same_tables(engine: sa.Engine, dialect: str) -> None:
    with new_schema(engine) as schema:
        base = make_base(schema=schema)
        kinds = {
            "events": EkbatanEventMixin,
            "event_notifications": EkbatanNotificationMixin,
            "events_state": EkbatanStateMixin,
        }
        for name, mixin in kinds.items():
            type(name.title(), (mixin, base), {"__tablename__": name, "__module__": __name__})
        base.metadata.create_all(engine)
        found = read_tables(engine, schema)
        base.metadata.drop_all(engine)
        assert declare_base(base.metadata)["state"] is base.metadata.tables[f"{schema}.events_state"]
    assert found == {
        "events": expect(engine, dialect, EVENTS, "events"),
        "event_notifications": expect(engine, dialect, NOTIFICATIONS, "notifications"),
        "events_state": SIDE[dialect],
    }


def test_a_mapped_class_renames_the_table_and_adds_columns() -> None:
    class Journal(EkbatanEventMixin, make_base()):  # type: ignore[misc]
        __tablename__ = "journal"
        __table_args__ = (sa.Index("journal_tenant", "tenant"), {"schema": "log"})
        is_handled = False
        tenant = mapped_column(sa.String(20))

    class Events(EkbatanEventMixin, make_base()):  # type: ignore[misc]
        __tablename__ = "events"

    assert Journal.__table__.fullname == "log.journal"
    assert {index.name for index in Journal.__table__.indexes} == {"idx_journal_action_id", "journal_tenant"}
    assert Events.__table__.fullname == "eventlog.events"
    assert {index.name for index in Events.__table__.indexes} == {"idx_events_action_id", "events_undelivered"}


def test_handlers_added_later_alter_no_column(engine: sa.Engine) -> None:
    before, metadata = sa.MetaData(), sa.MetaData()
    declare_base(before, "events", "")
    before.create_all(engine)
    declare_base(metadata, "events", "")
    declare_with_handlers(metadata, "events", "")
    with engine.begin() as db:
        options = {"compare_type": True, "compare_server_default": True, "target_metadata": metadata}
        changes = produce_migrations(MigrationContext.configure(db, opts=options), metadata).upgrade_ops
    assert changes is not None
    assert sorted((kind, item.name) for kind, item in changes.as_diffs()) == [
        ("add_index", "event_notifications_due"),
        ("add_index", "events_undelivered"),
        ("add_table", "event_notifications"),
    ]


# -- the schema ----------------------------------------------------------------------------------------------


def test_statements_for_the_schema() -> None:
    assert schema_statement("postgresql", "eventlog") == "CREATE SCHEMA IF NOT EXISTS eventlog"
    assert schema_statement("mysql", "eventlog") == "CREATE DATABASE IF NOT EXISTS eventlog"
    assert schema_statement("mariadb", "event-log") == "CREATE DATABASE IF NOT EXISTS `event-log`"
    with pytest.raises(ConfigError, match="expected postgresql, mysql, mariadb; got 'sqlite'"):
        schema_statement("sqlite", "eventlog")


def test_grants_name_the_user_and_the_schema() -> None:
    assert missing_grant("postgresql", "app", "eventlog", database="shop") == "GRANT CREATE ON DATABASE shop TO app"
    assert missing_grant("postgresql", "App", "eventlog") == 'GRANT USAGE, CREATE ON SCHEMA eventlog TO "App"'
    rights = "GRANT CREATE, INDEX, SELECT, INSERT, UPDATE, DELETE ON"
    assert missing_grant("mysql", "app@%", "eventlog") == f"{rights} `eventlog`.* TO 'app'@'%'"
    assert missing_grant("mariadb", "o'b@10.0.0.1", "e_log") == f"{rights} `e\\_log`.* TO 'o''b'@'10.0.0.1'"


def test_sqlite_has_no_schema_to_create() -> None:
    with sa.create_engine("sqlite://").connect() as db, pytest.raises(SchemaError, match="SQLite has no schemas"):
        create_schema(db, "eventlog")


class Restricted:
    """A user without rights, the server's administrator, and the name of a schema that is not there."""

    def __init__(self, dialect: str) -> None:
        url = sa.make_url(server_url(SERVERS[dialect]))
        url = url.set(drivername=DRIVERS[url.get_backend_name()])
        self.is_postgres = dialect == "postgresql"
        self.name, self.schema = f"pb_user_{uuid4().hex[:8]}", f"pb_log_{uuid4().hex[:8]}"
        self.database = url.database
        self.admin = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.pool.NullPool)
        own = url.set(username=self.name, password="secret", database=url.database if self.is_postgres else "")
        self.engine = sa.create_engine(own, poolclass=sa.pool.NullPool)

    def run(self, *statements: str) -> None:
        with self.admin.connect() as db:
            for statement in statements:
                db.exec_driver_sql(statement.replace("%", "%%"))

    def create(self) -> bool:
        with self.engine.begin() as db:
            return create_schema(db, self.schema)


@contextmanager
def restricted_user(dialect: str) -> Iterator[Restricted]:
    user = Restricted(dialect)
    if user.is_postgres:
        user.run(f"CREATE ROLE {user.name} LOGIN PASSWORD 'secret'")
        undo = [f"DROP SCHEMA IF EXISTS {user.schema} CASCADE", f"DROP OWNED BY {user.name}", f"DROP ROLE {user.name}"]
    else:
        user.run(f"CREATE USER '{user.name}'@'%' IDENTIFIED BY 'secret'")
        undo = [f"DROP DATABASE IF EXISTS {user.schema}", f"DROP USER '{user.name}'@'%'"]
    try:
        yield user
    finally:
        user.run(*undo)


def find_grant(error: SchemaError) -> str:
    match = re.search(r"Let an administrator run: (GRANT .*);$", str(error))
    assert match is not None
    return match[1]


def test_a_user_who_may_not_create_the_schema_is_told_the_grant(dialect: str) -> None:
    with restricted_user(dialect) as user:
        with pytest.raises(SchemaError) as caught:
            user.create()
        if dialect == "postgresql":
            assert str(caught.value) == (
                f"User '{user.name}' may not create schema '{user.schema}'. Let an administrator run: "
                f"GRANT CREATE ON DATABASE {user.database} TO {user.name};"
            )
        else:
            schema = user.schema.replace("_", "\\_")
            assert str(caught.value) == (
                f"User '{user.name}@%' may not create database '{user.schema}'. Let an administrator run: "
                f"GRANT CREATE, INDEX, SELECT, INSERT, UPDATE, DELETE ON `{schema}`.* TO '{user.name}'@'%';"
            )
        user.run(find_grant(caught.value))
        assert user.create() is True
        assert user.create() is False
        metadata = sa.MetaData()
        declare_base(metadata, "events", user.schema)
        declare_with_handlers(metadata, "events", user.schema)
        metadata.create_all(user.engine)
        with user.engine.begin() as db:
            for table in metadata.tables.values():
                db.execute(table.delete())


def test_a_user_who_may_not_use_a_schema_that_is_there_is_told_the_grant(dialect: str) -> None:
    with restricted_user(dialect) as user:
        user.run(schema_statement("postgresql" if user.is_postgres else "mysql", user.schema))
        with pytest.raises(SchemaError, match=f"may not create .*'{user.schema}'") as caught:
            user.create()
        user.run(find_grant(caught.value))
        user.create()
        metadata = sa.MetaData()
        declare_with_handlers(metadata, "events", user.schema)
        metadata.create_all(user.engine)
