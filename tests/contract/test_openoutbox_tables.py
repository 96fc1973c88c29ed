"""The Open Outbox Relay's table as each database describes it; on PostgreSQL against its published schema."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, declarative_base, mapped_column

from pillarbox.errors import LayoutError
from pillarbox.layouts.naming import check_identifier
from pillarbox.layouts.openoutbox_tables import OpenOutboxMixin, declare
from pillarbox.layouts.variants import indexes_on
from tests.contract.catalog import DIALECTS, Catalog, empty_database, new_schema, read_catalog, read_tables

TABLE = "openoutbox_events"
SUFFIXES = ("metrics_count", "metrics_lag", "processing_queue", "prune_dead", "prune_delivered", "stuck_leases")
TIME = "timestamp with time zone"
SQLITE_NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now') || '000'"

PUBLISHED = Catalog(
    columns=(
        ("event_id", "uuid", False, None),
        ("event_type", "text", False, None),
        ("partition_key", "text", True, None),
        ("payload", "bytea", False, None),
        ("headers", "jsonb", False, "'{}'::jsonb"),
        ("status", "text", False, "'PENDING'::text"),
        ("attempts", "integer", False, "0"),
        ("last_error", "text", True, None),
        ("available_at", TIME, False, "now()"),
        ("locked_by", "text", True, None),
        ("locked_at", TIME, True, None),
        ("delivered_at", TIME, True, None),
        ("created_at", TIME, False, "now()"),
        ("updated_at", TIME, False, "now()"),
    ),
    key=("event_id",),
    indexes=(
        (
            "idx_openoutbox_metrics_count",
            "CREATE INDEX idx_openoutbox_metrics_count ON openoutbox_events USING btree (status) INCLUDE (attempts) "
            "WHERE (status = 'PENDING'::text)",
        ),
        (
            "idx_openoutbox_metrics_lag",
            "CREATE INDEX idx_openoutbox_metrics_lag ON openoutbox_events USING btree (status, created_at) "
            "WHERE (status = 'PENDING'::text)",
        ),
        (
            "idx_openoutbox_processing_queue",
            "CREATE INDEX idx_openoutbox_processing_queue ON openoutbox_events USING btree "
            "(available_at, created_at) WHERE (status = 'PENDING'::text)",
        ),
        (
            "idx_openoutbox_prune_dead",
            "CREATE INDEX idx_openoutbox_prune_dead ON openoutbox_events USING btree (updated_at) "
            "WHERE (status = 'DEAD'::text)",
        ),
        (
            "idx_openoutbox_prune_delivered",
            "CREATE INDEX idx_openoutbox_prune_delivered ON openoutbox_events USING btree (delivered_at) "
            "WHERE (status = 'DELIVERED'::text)",
        ),
        (
            "idx_openoutbox_stuck_leases",
            "CREATE INDEX idx_openoutbox_stuck_leases ON openoutbox_events USING btree (locked_at) "
            "WHERE (status = 'DELIVERING'::text)",
        ),
    ),
    checks=(
        (
            "check_valid_status",
            "CHECK ((status = ANY (ARRAY['PENDING'::text, 'DELIVERING'::text, 'DELIVERED'::text, 'DEAD'::text])))",
        ),
    ),
)

PUBLISHED_DDL = (
    "CREATE TABLE {schema}.openoutbox_events (event_id UUID PRIMARY KEY, event_type TEXT NOT NULL, partition_key TEXT, "
    "payload BYTEA NOT NULL, headers JSONB NOT NULL DEFAULT '{{}}', status TEXT NOT NULL DEFAULT 'PENDING', "
    "attempts INT NOT NULL DEFAULT 0, last_error TEXT, available_at TIMESTAMPTZ NOT NULL DEFAULT NOW(), "
    "locked_by TEXT, locked_at TIMESTAMPTZ, delivered_at TIMESTAMPTZ, "
    "created_at TIMESTAMPTZ NOT NULL DEFAULT NOW(), updated_at TIMESTAMPTZ NOT NULL DEFAULT NOW(), "
    "CONSTRAINT check_valid_status CHECK (status IN ('PENDING', 'DELIVERING', 'DELIVERED', 'DEAD')))",
    "CREATE INDEX idx_openoutbox_processing_queue ON {schema}.openoutbox_events (available_at ASC, created_at ASC) "
    "WHERE status = 'PENDING'",
    "CREATE INDEX idx_openoutbox_stuck_leases ON {schema}.openoutbox_events (locked_at ASC) "
    "WHERE status = 'DELIVERING'",
    "CREATE INDEX idx_openoutbox_metrics_count ON {schema}.openoutbox_events (status) INCLUDE (attempts) "
    "WHERE status = 'PENDING'",
    "CREATE INDEX idx_openoutbox_metrics_lag ON {schema}.openoutbox_events (status, created_at ASC) "
    "WHERE status = 'PENDING'",
    "CREATE INDEX idx_openoutbox_prune_delivered ON {schema}.openoutbox_events (delivered_at) "
    "WHERE status = 'DELIVERED'",
    "CREATE INDEX idx_openoutbox_prune_dead ON {schema}.openoutbox_events (updated_at) WHERE status = 'DEAD'",
)


def mysql_catalog(
    collation: str, integer: str, json: str, pending: str, checks: tuple[tuple[str, str], ...]
) -> Catalog:
    return Catalog(
        columns=(
            ("event_id", "char(36) ascii_bin", False, None),
            ("event_type", f"varchar(255) {collation}", False, None),
            ("partition_key", f"varchar(255) {collation}", True, None),
            ("payload", "longblob", False, None),
            ("headers", json, False, "json_object()"),
            ("status", f"varchar(20) {collation}", False, pending),
            ("attempts", integer, False, "0"),
            ("last_error", "longtext utf8mb4_bin", True, None),
            ("available_at", "datetime(6)", False, "utc_timestamp(6)"),
            ("locked_by", f"varchar(255) {collation}", True, None),
            ("locked_at", "datetime(6)", True, None),
            ("delivered_at", "datetime(6)", True, None),
            ("created_at", "datetime(6)", False, "utc_timestamp(6)"),
            ("updated_at", "datetime(6)", False, "utc_timestamp(6)"),
        ),
        key=("event_id",),
        indexes=(
            ("idx_openoutbox_metrics_count", "(status, attempts)"),
            ("idx_openoutbox_metrics_lag", "(status, created_at)"),
            ("idx_openoutbox_processing_queue", "(status, available_at, created_at)"),
            ("idx_openoutbox_prune_dead", "(status, updated_at)"),
            ("idx_openoutbox_prune_delivered", "(status, delivered_at)"),
            ("idx_openoutbox_stuck_leases", "(status, locked_at)"),
        ),
        checks=checks,
    )


EXPECTED = {
    "postgresql": PUBLISHED,
    "mysql": mysql_catalog(
        *("utf8mb4_0900_bin", "int", "json", "PENDING"),
        checks=(
            (
                "check_valid_status",
                r"(`status` in (_utf8mb4\'PENDING\',_utf8mb4\'DELIVERING\',_utf8mb4\'DELIVERED\',_utf8mb4\'DEAD\'))",
            ),
        ),
    ),
    "mariadb": mysql_catalog(
        *("utf8mb4_nopad_bin", "int(11)", "longtext utf8mb4_bin", "'PENDING'"),
        checks=(
            ("check_valid_status", "`status` in ('PENDING','DELIVERING','DELIVERED','DEAD')"),
            # The server's own: JSON is text that is checked.
            ("headers", "json_valid(`headers`)"),
        ),
    ),
    "sqlite": Catalog(
        columns=(
            ("event_id", "CHAR(36)", False, None),
            ("event_type", "TEXT", False, None),
            ("partition_key", "TEXT", True, None),
            ("payload", "BLOB", False, None),
            ("headers", "JSON", False, "'{}'"),
            ("status", "TEXT", False, "'PENDING'"),
            ("attempts", "INTEGER", False, "0"),
            ("last_error", "TEXT", True, None),
            ("available_at", "DATETIME", False, SQLITE_NOW),
            ("locked_by", "TEXT", True, None),
            ("locked_at", "DATETIME", True, None),
            ("delivered_at", "DATETIME", True, None),
            ("created_at", "DATETIME", False, SQLITE_NOW),
            ("updated_at", "DATETIME", False, SQLITE_NOW),
        ),
        key=("event_id",),
        indexes=(
            (
                "idx_openoutbox_metrics_count",
                "CREATE INDEX idx_openoutbox_metrics_count ON openoutbox_events (status) WHERE status = 'PENDING'",
            ),
            (
                "idx_openoutbox_metrics_lag",
                "CREATE INDEX idx_openoutbox_metrics_lag ON openoutbox_events (status, created_at) "
                "WHERE status = 'PENDING'",
            ),
            (
                "idx_openoutbox_processing_queue",
                "CREATE INDEX idx_openoutbox_processing_queue ON openoutbox_events (available_at, created_at) "
                "WHERE status = 'PENDING'",
            ),
            (
                "idx_openoutbox_prune_dead",
                "CREATE INDEX idx_openoutbox_prune_dead ON openoutbox_events (updated_at) WHERE status = 'DEAD'",
            ),
            (
                "idx_openoutbox_prune_delivered",
                "CREATE INDEX idx_openoutbox_prune_delivered ON openoutbox_events (delivered_at) "
                "WHERE status = 'DELIVERED'",
            ),
            (
                "idx_openoutbox_stuck_leases",
                "CREATE INDEX idx_openoutbox_stuck_leases ON openoutbox_events (locked_at) WHERE status = 'DELIVERING'",
            ),
        ),
        checks=(("check_valid_status", "status IN ('PENDING', 'DELIVERING', 'DELIVERED', 'DEAD')"),),
    ),
}


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(dialect: str, tmp_path: Path) -> Iterator[sa.Engine]:
    with empty_database(dialect, tmp_path) as engine:
        yield engine


on_postgres = pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)
on_servers = pytest.mark.parametrize("dialect", ["postgresql", "mysql", "mariadb"], indirect=True)
on_mysql = pytest.mark.parametrize("dialect", ["mysql", "mariadb"], indirect=True)


def make_base(**options: Any) -> Any:
    class Base(DeclarativeBase):
        metadata = sa.MetaData(**options)

    return Base


def map_outbox(base: Any, table: str, schema: str | None) -> Any:
    model: Any = type("Events", (OpenOutboxMixin, base), {"__tablename__": table, "__table_args__": {"schema": schema}})
    return {"outbox": model.__table__}


# -- the live catalog ----------------------------------------------------------------------------------------


def test_declared_table_is_the_expected_one(engine: sa.Engine, dialect: str) -> None:
    metadata = sa.MetaData()
    assert list(declare(metadata, TABLE, None)) == ["outbox"]
    metadata.create_all(engine)
    found = read_catalog(engine, TABLE)
    expected = EXPECTED[dialect]
    assert found.columns == expected.columns
    assert found.indexes == expected.indexes
    assert found.checks == expected.checks
    assert found == expected


@on_postgres
def test_published_ddl_makes_the_same_table(engine: sa.Engine) -> None:
    metadata = sa.MetaData()
    declare(metadata, TABLE, None)
    metadata.create_all(engine)
    with new_schema(engine) as schema:
        with engine.begin() as db:
            for statement in PUBLISHED_DDL:
                db.exec_driver_sql(statement.format(schema=schema))
        assert read_catalog(engine, TABLE, schema) == read_catalog(engine, TABLE)


@pytest.mark.parametrize("is_first", [True, False], ids=["mixin first", "base first"])
def test_mapped_class_makes_the_same_table(engine: sa.Engine, dialect: str, is_first: bool) -> None:
    base = make_base()
    type("Events", (OpenOutboxMixin, base) if is_first else (base, OpenOutboxMixin), {})
    base.metadata.create_all(engine)
    assert read_catalog(engine, TABLE) == EXPECTED[dialect]


def test_mapped_class_may_rename_and_extend(engine: sa.Engine, dialect: str) -> None:
    base = make_base()

    class Events(OpenOutboxMixin, base):  # type: ignore[misc, valid-type]
        __tablename__ = "shop_events"
        __table_args__ = (sa.Index("by_tenant", "tenant"),)
        tenant: Mapped[str] = mapped_column(sa.String(20), server_default="none")

    base.metadata.create_all(engine)
    found = read_catalog(engine, "shop_events")
    assert set(found.columns) > set(EXPECTED[dialect].columns)
    assert {name for name, _ in found.indexes} == {"by_tenant", *(f"idx_shop_{suffix}" for suffix in SUFFIXES)}


# -- defaults and values -------------------------------------------------------------------------------------


def test_defaults_fill_a_row_of_the_application(engine: sa.Engine, dialect: str) -> None:
    base = make_base()
    model: Any = type("Events", (OpenOutboxMixin, base), {})
    base.metadata.create_all(engine)
    event_id = uuid4()
    with Session(engine) as session:
        if dialect != "sqlite":
            zone = "SET TIME ZONE 'Asia/Karachi'" if dialect == "postgresql" else "SET time_zone = '+05:00'"
            session.execute(sa.text(zone))
        before = datetime.now(UTC)
        session.execute(sa.insert(model).values(event_id=event_id, event_type="paid", payload=b"\x00\xff"))
        row = session.scalars(sa.select(model)).one()
        assert (row.event_id, row.event_type, row.payload) == (event_id, "paid", b"\x00\xff")
        assert (row.status, row.attempts, row.headers, row.partition_key) == ("PENDING", 0, {}, None)
        for at in (row.available_at, row.created_at, row.updated_at):
            assert abs(at - before) < timedelta(minutes=1)


def test_default_times_compare_with_given_ones(engine: sa.Engine) -> None:
    metadata = sa.MetaData()
    table = declare(metadata, TABLE, None)["outbox"]
    metadata.create_all(engine)
    with engine.begin() as db:
        db.execute(sa.insert(table).values(event_id=UUID(int=1), event_type="a", payload=b""))
        for number, hours in ((2, -1), (3, 1)):
            at = datetime.now(UTC) + timedelta(hours=hours)
            db.execute(sa.insert(table).values(event_id=UUID(int=number), event_type="a", payload=b"", available_at=at))
        ids = db.execute(sa.select(table.c.event_id).order_by(table.c.available_at)).scalars().all()
    assert [each.int for each in ids] == [2, 1, 3]


def test_a_status_that_is_none_is_refused_by_the_database(engine: sa.Engine) -> None:
    metadata = sa.MetaData()
    table = declare(metadata, TABLE, None)["outbox"]
    metadata.create_all(engine)
    with engine.connect() as db, pytest.raises(sa.exc.DBAPIError, match="check_valid_status"):
        db.execute(sa.insert(table).values(event_id=uuid4(), event_type="a", payload=b"", status="pending"))


def test_keys_and_payloads_are_taken_as_they_are(engine: sa.Engine) -> None:
    metadata = sa.MetaData()
    table = declare(metadata, TABLE, None)["outbox"]
    metadata.create_all(engine)
    given = {"event_id": uuid4(), "event_type": "a", "payload": b"x" * 70_000, "partition_key": "\U0001f4e6" * 255}
    with engine.begin() as db:
        db.execute(sa.insert(table).values(given))
        [row] = db.execute(sa.select(table)).mappings().all()
        assert {name: row[name] for name in given} == given
        for other in ("a ", "A"):
            assert db.execute(sa.select(table).where(table.c.event_type == other)).all() == []


# -- other names ---------------------------------------------------------------------------------------------


@on_servers
@pytest.mark.parametrize("make", [declare, map_outbox], ids=["core", "mapped"])
@pytest.mark.parametrize(("table", "prefix"), [("shop_events", "shop"), ("ledger", "ledger")])
def test_names_follow_the_table_in_another_schema(engine: sa.Engine, make: Any, table: str, prefix: str) -> None:
    base = make_base()
    with new_schema(engine) as schema:
        declared = make(base if make is map_outbox else base.metadata, table, schema)["outbox"]
        base.metadata.create_all(engine)
        found = read_catalog(engine, table, schema)
    assert declared.fullname == f"{schema}.{table}"
    assert [name for name, _ in found.indexes] == [f"idx_{prefix}_{suffix}" for suffix in SUFFIXES]
    assert f"check_{prefix}_valid_status" in dict(found.checks)


def test_two_tables_share_a_database(engine: sa.Engine) -> None:
    metadata = sa.MetaData()
    for table in (TABLE, "shop_events", "ledger"):
        declare(metadata, table, None)
    metadata.create_all(engine)
    assert set(read_tables(engine)) == {TABLE, "shop_events", "ledger"}


@pytest.mark.parametrize("make", [declare, map_outbox], ids=["core", "mapped"])
@pytest.mark.parametrize(
    ("convention", "check"),
    [
        ({}, "check_valid_status"),
        ({"ck": "ck_%(table_name)s_%(constraint_name)s"}, "ck_openoutbox_events_valid_status"),
        ({"ck": "ck_%(table_name)s"}, "check_valid_status"),
        ({"ix": "ix_%(constraint_name)s", "uq": "uq_%(column_0_name)s", "pk": "pk"}, "check_valid_status"),
    ],
    ids=["none", "usual", "without the name", "for others"],
)
def test_a_naming_convention_renames_the_check_and_nothing_else(
    make: Any, convention: dict[str, str], check: str
) -> None:
    base = make_base(naming_convention=convention)
    table = make(base if make is map_outbox else base.metadata, TABLE, None)["outbox"]
    assert {str(index.name) for index in table.indexes} == {f"idx_openoutbox_{suffix}" for suffix in SUFFIXES}
    assert [str(each.name) for each in table.constraints if isinstance(each, sa.CheckConstraint)] == [check]


@pytest.mark.parametrize("make", [declare, map_outbox], ids=["core", "mapped"])
@pytest.mark.parametrize(
    ("table", "derived", "length"),
    [
        ("a" * 43 + "_events", f"idx_{'a' * 43}_processing_queue", 64),
        ("é" * 22 + "_events", f"idx_{'é' * 22}_processing_queue", 65),
        ("a" * 64, "a" * 64, 64),
    ],
    ids=["ascii", "two bytes", "the table itself"],
)
def test_a_name_that_a_server_would_cut_is_refused(make: Any, table: str, derived: str, length: int) -> None:
    base = make_base()
    target = base if make is map_outbox else base.metadata
    with pytest.raises(LayoutError) as caught:
        make(target, table, None)
    assert str(caught.value) == (
        f"Identifier {derived!r}: expected at most 63 bytes, as PostgreSQL takes no more; got {length}. "
        "Give the table a shorter name."
    )
    assert not base.metadata.tables


@pytest.mark.parametrize(
    ("name", "dialect", "message"),
    [
        ("é" * 32, "postgresql", "63 bytes, as PostgreSQL takes no more; got 64"),
        ("é" * 65, "mysql", "64 characters, as MySQL takes no more; got 65"),
        ("a" * 65, "mariadb", "64 characters, as MariaDB takes no more; got 65"),
    ],
)
def test_each_database_has_its_own_limit(name: str, dialect: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check_identifier(name, ["sqlite", dialect])
    assert check_identifier(name[:-1], [dialect]) == name[:-1]
    assert check_identifier(name, ["sqlite"]) == name


def test_the_longest_names_reach_the_database_whole(engine: sa.Engine) -> None:
    metadata = sa.MetaData()
    for base in ("a" * 42, "é" * 21):
        declare(metadata, f"{base}_events", None)
    metadata.create_all(engine)
    for base in ("a" * 42, "é" * 21):
        found = read_catalog(engine, f"{base}_events")
        assert [name for name, _ in found.indexes] == [f"idx_{base}_{suffix}" for suffix in SUFFIXES]


# -- declaring -----------------------------------------------------------------------------------------------


def test_declaring_twice_returns_the_same_table() -> None:
    base = make_base(schema="shop")
    first = declare(base.metadata, TABLE, None)["outbox"]
    assert declare(base.metadata, TABLE, None)["outbox"] is first
    assert declare(base.metadata, TABLE, "shop")["outbox"] is first
    mapped = map_outbox(base, "other_events", "shop")["outbox"]
    assert declare(base.metadata, "other_events", None)["outbox"] is mapped


def test_another_table_of_the_name_is_refused() -> None:
    metadata = sa.MetaData()
    sa.Table("events", metadata, sa.Column("event_id", sa.Integer, primary_key=True))
    with pytest.raises(LayoutError, match=r"'events': the metadata has a table of this name that lacks event_type, "):
        declare(metadata, "events", None)


@pytest.mark.parametrize("kind", ["dataclass", "function"])
def test_other_kinds_of_bases_take_the_mixin(kind: str) -> None:
    class AsDataclass(MappedAsDataclass, DeclarativeBase):
        pass

    base: Any = AsDataclass if kind == "dataclass" else declarative_base()
    model: Any = type("Events", (OpenOutboxMixin, base), {})
    assert model.__table__.name == TABLE


def test_indexes_of_a_database_are_told_from_those_of_others() -> None:
    metadata = sa.MetaData()
    table = declare(metadata, TABLE, None)["outbox"]
    plain = sa.Index("by_type", table.c.event_type)
    for dialect, columns in (("sqlite", ["locked_at"]), ("mariadb", ["status", "locked_at"])):
        found = indexes_on(table, dialect)
        assert [str(index.name) for index in found] == ["by_type", *(f"idx_openoutbox_{suffix}" for suffix in SUFFIXES)]
        assert [column.name for column in found[-1].columns] == columns
        assert plain in found
    assert len(table.indexes) == 13


@on_mysql
def test_a_claim_reads_the_queue_by_its_index(engine: sa.Engine) -> None:
    metadata = sa.MetaData()
    table = declare(metadata, TABLE, None)["outbox"]
    metadata.create_all(engine)
    with engine.begin() as db:
        rows = [{"event_id": uuid4(), "status": "DELIVERED" if number % 50 else "PENDING"} for number in range(2000)]
        db.execute(sa.insert(table).values(event_type="a", payload=b""), rows)
    with engine.begin() as db:
        db.exec_driver_sql(f"ANALYZE TABLE {TABLE}").all()
        query = (
            f"EXPLAIN FORMAT=TRADITIONAL SELECT event_id FROM {TABLE} WHERE status = 'PENDING' "
            "AND available_at <= UTC_TIMESTAMP(6) ORDER BY available_at, created_at LIMIT 10"
        )
        plan = db.execute(sa.text(query)).mappings().one()
    assert plan["key"] == "idx_openoutbox_processing_queue"
    assert "filesort" not in (plan["Extra"] or "")
