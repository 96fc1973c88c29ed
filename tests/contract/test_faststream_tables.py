"""The tables of faststream-outbox as PostgreSQL's catalog shows them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import produce_migrations
from alembic.migration import MigrationContext
from sqlalchemy.orm import DeclarativeBase, mapped_column

from pillarbox.errors import LayoutError
from pillarbox.layouts.faststream_tables import (
    FastStreamDlqMixin,
    FastStreamOutboxMixin,
    declare_outbox,
    declare_with_dlq,
)
from tests.contract.catalog import Catalog, empty_database, new_schema, read_catalog, read_tables

ZONED = "timestamp with time zone"
OUTBOX = Catalog(
    columns=(
        ("id", "bigint", False, "nextval('outbox_id_seq'::regclass)"),
        ("queue", "character varying(255)", False, None),
        ("payload", "bytea", False, None),
        ("headers", "jsonb", True, None),
        ("attempts_count", "bigint", False, "'0'::bigint"),
        ("deliveries_count", "bigint", False, "'0'::bigint"),
        ("created_at", ZONED, False, "now()"),
        ("next_attempt_at", ZONED, False, "now()"),
        ("first_attempt_at", ZONED, True, None),
        ("last_attempt_at", ZONED, True, None),
        ("acquired_at", ZONED, True, None),
        ("acquired_token", "uuid", True, None),
        ("timer_id", "character varying(255)", True, None),
    ),
    key=("id",),
    indexes=(
        (
            "outbox_lease_idx",
            "CREATE INDEX outbox_lease_idx ON outbox USING btree (queue, acquired_at) "
            "WHERE (acquired_token IS NOT NULL)",
        ),
        (
            "outbox_pending_idx",
            "CREATE INDEX outbox_pending_idx ON outbox USING btree (queue, next_attempt_at) "
            "WHERE (acquired_token IS NULL)",
        ),
        (
            "outbox_timer_id_uq",
            "CREATE UNIQUE INDEX outbox_timer_id_uq ON outbox USING btree (queue, timer_id) "
            "WHERE (timer_id IS NOT NULL)",
        ),
    ),
    checks=(("outbox_lease_ck", "CHECK (((acquired_token IS NULL) = (acquired_at IS NULL)))"),),
)
DLQ = Catalog(
    columns=(
        ("id", "bigint", False, "nextval('outbox_dlq_id_seq'::regclass)"),
        ("original_id", "bigint", False, None),
        ("queue", "character varying(255)", False, None),
        ("payload", "bytea", False, None),
        ("headers", "jsonb", True, None),
        ("deliveries_count", "bigint", False, None),
        ("created_at", ZONED, False, None),
        ("failed_at", ZONED, False, "now()"),
        ("failure_reason", "character varying(64)", False, None),
        ("last_exception", "character varying", True, None),
        ("timer_id", "character varying(255)", True, None),
    ),
    key=("id",),
    indexes=(
        (
            "outbox_dlq_queue_failed_idx",
            "CREATE INDEX outbox_dlq_queue_failed_idx ON outbox_dlq USING btree (queue, failed_at)",
        ),
    ),
    checks=(),
)
THEIRS = (
    "CREATE TABLE outbox (id BIGSERIAL PRIMARY KEY, queue VARCHAR(255) NOT NULL, payload BYTEA NOT NULL, "
    "headers JSONB, attempts_count BIGINT DEFAULT '0' NOT NULL, deliveries_count BIGINT DEFAULT '0' NOT NULL, "
    "created_at TIMESTAMPTZ DEFAULT now() NOT NULL, next_attempt_at TIMESTAMPTZ DEFAULT now() NOT NULL, "
    "first_attempt_at TIMESTAMPTZ, last_attempt_at TIMESTAMPTZ, acquired_at TIMESTAMPTZ, acquired_token UUID, "
    "timer_id VARCHAR(255), "
    "CONSTRAINT outbox_lease_ck CHECK ((acquired_token IS NULL) = (acquired_at IS NULL)))",
    "CREATE INDEX outbox_lease_idx ON outbox (queue, acquired_at) WHERE acquired_token IS NOT NULL",
    "CREATE INDEX outbox_pending_idx ON outbox (queue, next_attempt_at) WHERE acquired_token IS NULL",
    "CREATE UNIQUE INDEX outbox_timer_id_uq ON outbox (queue, timer_id) WHERE timer_id IS NOT NULL",
    "CREATE TABLE outbox_dlq (id BIGSERIAL PRIMARY KEY, original_id BIGINT NOT NULL, queue VARCHAR(255) NOT NULL, "
    "payload BYTEA NOT NULL, headers JSONB, deliveries_count BIGINT NOT NULL, created_at TIMESTAMPTZ NOT NULL, "
    "failed_at TIMESTAMPTZ DEFAULT now() NOT NULL, failure_reason VARCHAR(64) NOT NULL, last_exception VARCHAR, "
    "timer_id VARCHAR(255))",
    "CREATE INDEX outbox_dlq_queue_failed_idx ON outbox_dlq (queue, failed_at)",
)
CONVENTION = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "pk": "pk_%(table_name)s",
}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    with empty_database("postgresql", tmp_path) as engine:
        yield engine


def rename(catalog: Catalog, old: str, new: str) -> Catalog:
    """The same table under another name."""
    return Catalog(
        tuple((name, type_, null, default and default.replace(old, new)) for name, type_, null, default in catalog[0]),
        catalog.key,
        tuple((name.replace(old, new), text.replace(old, new)) for name, text in catalog.indexes),
        tuple((name.replace(old, new), text) for name, text in catalog.checks),
    )


def make_base(**options: Any) -> Any:
    class Base(DeclarativeBase):
        metadata = sa.MetaData(**options)

    return Base


def names_of(table: sa.Table) -> set[str]:
    checks = {str(each.name) for each in table.constraints if isinstance(each, sa.CheckConstraint)}
    return checks | {str(index.name) for index in table.indexes}


def test_the_live_tables_are_those_of_the_page(engine: sa.Engine) -> None:
    metadata = sa.MetaData()
    tables = declare_with_dlq(metadata, "outbox", None)
    assert {role: table.name for role, table in tables.items()} == {"outbox": "outbox", "dead": "outbox_dlq"}
    metadata.create_all(engine)
    assert read_tables(engine) == {"outbox": OUTBOX, "outbox_dlq": DLQ}


def test_their_own_statements_make_the_same_tables(engine: sa.Engine) -> None:
    with engine.begin() as db:
        for statement in THEIRS:
            db.exec_driver_sql(statement)
    assert read_tables(engine) == {"outbox": OUTBOX, "outbox_dlq": DLQ}


def test_the_outbox_stands_alone(engine: sa.Engine) -> None:
    metadata = sa.MetaData()
    assert list(declare_outbox(metadata, "outbox", None)) == ["outbox"]
    metadata.create_all(engine)
    assert read_tables(engine) == {"outbox": OUTBOX}


def test_all_names_follow_the_table_into_another_schema(engine: sa.Engine) -> None:
    metadata = sa.MetaData()
    with new_schema(engine) as schema:
        declare_with_dlq(metadata, "jobs", schema)
        metadata.create_all(engine)
        for table, expected in {"jobs": OUTBOX, "jobs_dlq": DLQ}.items():
            found = read_catalog(engine, table, schema)
            (id_, *others), (sequence, *same) = found.columns, rename(expected, "outbox", "jobs").columns
            assert id_[3] == str(sequence[3]).replace("'jobs", f"'{schema}.jobs")
            assert others == same
            assert found[1:] == rename(expected, "outbox", "jobs")[1:]


def test_a_half_set_lease_is_refused_by_the_database(engine: sa.Engine) -> None:
    metadata = sa.MetaData()
    outbox = declare_outbox(metadata, "outbox", None)["outbox"]
    metadata.create_all(engine)
    with engine.begin() as db, pytest.raises(sa.exc.IntegrityError, match="outbox_lease_ck"):
        db.execute(outbox.insert().values(queue="q", payload=b"", acquired_at=sa.func.now()))


def test_absent_headers_are_null_and_not_a_json_null(engine: sa.Engine) -> None:
    metadata = sa.MetaData()
    outbox = declare_outbox(metadata, "outbox", None)["outbox"]
    metadata.create_all(engine)
    with engine.begin() as db:
        db.execute(outbox.insert().values(queue="q", payload=b"", headers=None))
        assert db.execute(sa.select(outbox.c.headers.is_(sa.null()))).scalar_one() is True


@pytest.mark.parametrize("declare", [declare_outbox, declare_with_dlq])
def test_declared_again_the_tables_are_the_same_objects(declare: Any) -> None:
    metadata = sa.MetaData()
    first = declare(metadata, "outbox", None)
    second = declare(metadata, "outbox", None)
    assert list(first) == list(second)
    assert all(first[role] is second[role] for role in first)
    assert len(second["outbox"].indexes) == 3


def test_a_table_of_another_kind_is_refused() -> None:
    metadata = sa.MetaData()
    sa.Table("outbox", metadata, sa.Column("id", sa.BigInteger(), primary_key=True))
    with pytest.raises(LayoutError, match=r"'outbox': .* lacks queue, payload, "):
        declare_outbox(metadata, "outbox", None)


def test_a_convention_renames_the_check_and_no_index(engine: sa.Engine) -> None:
    metadata = sa.MetaData(naming_convention=CONVENTION)
    declare_with_dlq(metadata, "outbox", None)
    metadata.create_all(engine)
    found = read_tables(engine)
    assert found["outbox"].checks == (("ck_outbox_outbox_lease_ck", OUTBOX.checks[0][1]),)
    assert found["outbox"].indexes == OUTBOX.indexes
    assert found["outbox_dlq"].indexes == DLQ.indexes


@pytest.mark.parametrize(
    ("declare", "fits", "longest"), [(declare_outbox, 51, "_pending_idx"), (declare_with_dlq, 42, "_queue_failed_idx")]
)
def test_a_name_too_long_for_an_index_is_refused(declare: Any, fits: int, longest: str) -> None:
    declare(sa.MetaData(), "o" * fits, None)
    metadata = sa.MetaData()
    with pytest.raises(LayoutError, match=longest):
        declare(metadata, "o" * (fits + 1), None)
    assert not metadata.tables


def test_bytes_count_and_not_characters() -> None:
    with pytest.raises(LayoutError, match="63 bytes"):
        declare_outbox(sa.MetaData(), "ö" * 26, None)


def test_mapped_classes_make_the_same_tables(engine: sa.Engine) -> None:
    base = make_base()
    type("Outbox", (FastStreamOutboxMixin, base), {"__tablename__": "outbox", "__module__": __name__})
    type("Dlq", (FastStreamDlqMixin, base), {"__tablename__": "outbox_dlq", "__module__": __name__})
    base.metadata.create_all(engine)
    assert read_tables(engine) == {"outbox": OUTBOX, "outbox_dlq": DLQ}
    assert declare_with_dlq(base.metadata, "outbox", None)["outbox"] is base.metadata.tables["outbox"]


@pytest.mark.parametrize("convention", [None, CONVENTION], ids=["plain", "convention"])
def test_a_mapped_class_renames_the_table_and_adds_columns(convention: Any) -> None:
    class Jobs(FastStreamOutboxMixin, make_base(naming_convention=convention)):  # type: ignore[misc]
        __tablename__ = "jobs"
        tenant = mapped_column(sa.String(20))
        __table_args__ = (sa.Index("jobs_tenant", "tenant"),)

    check = "ck_jobs_jobs_lease_ck" if convention else "jobs_lease_ck"
    assert names_of(Jobs.__table__) == {"jobs_pending_idx", "jobs_lease_idx", "jobs_timer_id_uq", "jobs_tenant", check}
    assert set(Jobs.__table__.c.keys()) == {"tenant", *(column[0] for column in OUTBOX.columns)}


def test_a_mapped_class_with_too_long_a_name_is_refused() -> None:
    with pytest.raises(LayoutError, match="_queue_failed_idx"):
        type("Dlq", (FastStreamDlqMixin, make_base()), {"__tablename__": "o" * 47, "__module__": __name__})


def test_a_dlq_added_later_alters_nothing(engine: sa.Engine) -> None:
    before = sa.MetaData()
    declare_outbox(before, "outbox", None)
    before.create_all(engine)
    metadata = sa.MetaData()
    declare_outbox(metadata, "outbox", None)
    declare_with_dlq(metadata, "outbox", None)
    with engine.begin() as db:
        options = {"compare_type": True, "compare_server_default": True, "target_metadata": metadata}
        changes = produce_migrations(MigrationContext.configure(db, opts=options), metadata).upgrade_ops
    assert changes is not None
    assert [(kind, item.name) for kind, item in changes.as_diffs()] == [
        ("add_table", "outbox_dlq"),
        ("add_index", "outbox_dlq_queue_failed_idx"),
    ]
