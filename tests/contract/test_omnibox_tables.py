"""omni-box's tables as PostgreSQL describes them, against its published schema."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, declarative_base, mapped_column

from pillarbox.errors import LayoutError
from pillarbox.layouts.omnibox_tables import (
    OmniboxInboxMixin,
    OmniboxInboxPartitionedMixin,
    OmniboxOutboxMixin,
    OmniboxOutboxPartitionedMixin,
    declare_inbox,
    declare_inbox_partitioned,
    declare_outbox,
    declare_outbox_partitioned,
)
from tests.contract.catalog import Catalog, empty_database, new_schema, read_catalog

OUTBOX, INBOX = "outbox_events", "inbox_events"
OUTBOX_P, INBOX_P = "outbox_events_partitioned", "inbox_events_partitioned"
DECLARE = {
    OUTBOX: declare_outbox,
    INBOX: declare_inbox,
    OUTBOX_P: declare_outbox_partitioned,
    INBOX_P: declare_inbox_partitioned,
}
MIXINS: Mapping[str, Any] = {
    OUTBOX: OmniboxOutboxMixin,
    INBOX: OmniboxInboxMixin,
    OUTBOX_P: OmniboxOutboxPartitionedMixin,
    INBOX_P: OmniboxInboxPartitionedMixin,
}
each_table = pytest.mark.parametrize("table", DECLARE)

# -- the published schema ------------------------------------------------------------------------------------

# name: type as published; type, is nullable and default as the server prints them
FIRST_COLUMNS = {
    "id": ("UUID", "uuid", False, None),
    "event_type": ("VARCHAR(100) NOT NULL", "character varying(100)", False, None),
}
OTHER_COLUMNS = {
    "payload": ("JSONB NOT NULL", "jsonb", False, None),
    "headers": ("JSONB", "jsonb", True, None),
    "trace_id": ("VARCHAR(64)", "character varying(64)", True, None),
    "idempotency_key": ("VARCHAR(128)", "character varying(128)", True, None),
    "correlation_id": ("VARCHAR(64)", "character varying(64)", True, None),
    "causation_id": ("VARCHAR(64)", "character varying(64)", True, None),
    "schema_version": ("VARCHAR(50)", "character varying(50)", True, None),
    "status": (
        "VARCHAR(20) NOT NULL DEFAULT 'pending'",
        "character varying(20)",
        False,
        "'pending'::character varying",
    ),
    "attempts_made": ("INTEGER NOT NULL DEFAULT 0", "integer", False, "0"),
    "max_attempts": ("INTEGER NOT NULL DEFAULT 6", "integer", False, "6"),
    "last_error": ("VARCHAR(2000)", "character varying(2000)", True, None),
    "scheduled_at": ("TIMESTAMPTZ NOT NULL", "timestamp with time zone", False, None),
    "completed_at": ("TIMESTAMPTZ", "timestamp with time zone", True, None),
    "locked_at": ("TIMESTAMPTZ", "timestamp with time zone", True, None),
    "locked_by": ("VARCHAR(255)", "character varying(255)", True, None),
    "created_at": (
        "TIMESTAMPTZ NOT NULL DEFAULT timezone('UTC', now())",
        "timestamp with time zone",
        False,
        "timezone('UTC'::text, now())",
    ),
    "updated_at": (
        "TIMESTAMPTZ DEFAULT timezone('UTC', now())",
        "timestamp with time zone",
        True,
        "timezone('UTC'::text, now())",
    ),
}
OUTBOX_COLUMNS = {
    "aggregate_type": ("VARCHAR(50) NOT NULL", "character varying(50)", False, None),
    "aggregate_id": ("UUID NOT NULL", "uuid", False, None),
    "topic": ("VARCHAR(255) NOT NULL", "character varying(255)", False, None),
    "partition_key": ("VARCHAR(255) NOT NULL", "character varying(255)", False, None),
}
INBOX_COLUMNS = {
    "message_id": ("VARCHAR(255) NOT NULL", "character varying(255)", False, None),
    "consumer_group": ("VARCHAR(255) NOT NULL", "character varying(255)", False, None),
    "source": ("VARCHAR(255) NOT NULL", "character varying(255)", False, None),
}
CHECKS = {
    "attempts_valid": ("attempts_made <= max_attempts", "CHECK ((attempts_made <= max_attempts))"),
    "completed_status_consistency": (
        "(status = 'completed' AND completed_at IS NOT NULL) OR (status <> 'completed' AND completed_at IS NULL)",
        "CHECK (((((status)::text = 'completed'::text) AND (completed_at IS NOT NULL)) OR "
        "(((status)::text <> 'completed'::text) AND (completed_at IS NULL))))",
    ),
    "lock_consistency": (
        "(locked_at IS NULL AND locked_by IS NULL) OR (locked_at IS NOT NULL AND locked_by IS NOT NULL)",
        "CHECK ((((locked_at IS NULL) AND (locked_by IS NULL)) OR "
        "((locked_at IS NOT NULL) AND (locked_by IS NOT NULL))))",
    ),
}
# name, uniqueness, columns, condition as published, condition as the server prints it
INDEXES = {
    "completed_cleanup": (
        *("", "completed_at", "status = 'completed' AND completed_at IS NOT NULL"),
        "(((status)::text = 'completed'::text) AND (completed_at IS NOT NULL))",
    ),
    "created_at": ("", "created_at", "", ""),
    "idempotency_key": (
        *("UNIQUE ", "idempotency_key", "idempotency_key IS NOT NULL"),
        "(idempotency_key IS NOT NULL)",
    ),
    "locked_at": ("", "locked_at", "locked_at IS NOT NULL", "(locked_at IS NOT NULL)"),
    "pending_fetch": (
        *("", "scheduled_at", "status = 'pending' AND locked_at IS NULL AND attempts_made < max_attempts"),
        "(((status)::text = 'pending'::text) AND (locked_at IS NULL) AND (attempts_made < max_attempts))",
    ),
    "updated_at": ("", "updated_at", "", ""),
}
# prefix of names, the deduplication index and its columns
NAMES = {
    OUTBOX: ("outbox_events", None, ""),
    INBOX: ("inbox_events", "idx_inbox_deduplication", "message_id, consumer_group"),
    OUTBOX_P: ("outbox_events_p", None, ""),
    INBOX_P: ("inbox_events_p", "idx_inbox_events_p_deduplication", "message_id, consumer_group, created_at"),
}


def columns_of(table: str) -> dict[str, Any]:
    own = OUTBOX_COLUMNS if table.startswith("outbox") else INBOX_COLUMNS
    return {**FIRST_COLUMNS, **own, **OTHER_COLUMNS}


def indexes_of(table: str) -> list[tuple[str, str, str, str, str]]:
    prefix, dedup, dedup_columns = NAMES[table]
    listed = [(f"idx_{prefix}_{name}", *index) for name, index in INDEXES.items()]
    if table.endswith("_partitioned"):
        key = f"idx_{prefix}_idempotency_key"
        listed = [
            (each[0], each[1], f"{each[2]}, created_at", *each[3:]) if each[0] == key else each for each in listed
        ]
    if dedup:
        listed.append((dedup, "UNIQUE ", dedup_columns, "", ""))
    return sorted(listed)


def published_catalog(table: str) -> Catalog:
    is_partitioned = table.endswith("_partitioned")
    only = "ONLY " if is_partitioned else ""
    return Catalog(
        columns=tuple((name, *column[1:]) for name, column in columns_of(table).items()),
        key=("id", "created_at") if is_partitioned else ("id",),
        indexes=tuple(
            (
                name,
                f"CREATE {unique}INDEX {name} ON {only}{table} USING btree ({columns})"
                + (f" WHERE {printed}" if printed else ""),
            )
            for name, unique, columns, _, printed in indexes_of(table)
        ),
        checks=tuple((f"ck_{NAMES[table][0]}_{name}", printed) for name, (_, printed) in CHECKS.items()),
        partition="RANGE (created_at)" if is_partitioned else None,
    )


def published_ddl(table: str, schema: str) -> list[str]:
    is_partitioned = table.endswith("_partitioned")
    lines = [f"{name} {column[0]}" for name, column in columns_of(table).items()]
    lines.append("PRIMARY KEY (id, created_at)" if is_partitioned else "PRIMARY KEY (id)")
    lines += [f"CONSTRAINT ck_{NAMES[table][0]}_{name} CHECK ({text})" for name, (text, _) in CHECKS.items()]
    partition = " PARTITION BY RANGE (created_at)" if is_partitioned else ""
    return [
        f"CREATE TABLE {schema}.{table} ({', '.join(lines)}){partition}",
        *(
            f"CREATE {unique}INDEX {name} ON {schema}.{table} ({columns})" + (f" WHERE {where}" if where else "")
            for name, unique, columns, where, _ in indexes_of(table)
        ),
    ]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    with empty_database("postgresql", tmp_path) as engine:
        yield engine


def make_base(**options: Any) -> Any:
    class Base(DeclarativeBase):
        metadata = sa.MetaData(**options)

    return Base


def map_outbox(base: Any, table: str, schema: str | None) -> Any:
    return type("Events", (OmniboxOutboxMixin, base), {"__tablename__": table})


def names_of(table: sa.Table) -> tuple[set[str], set[str]]:
    checks = {str(each.name) for each in table.constraints if isinstance(each, sa.CheckConstraint)}
    return {str(index.name) for index in table.indexes}, checks


# -- the live catalog ----------------------------------------------------------------------------------------


@each_table
def test_declared_table_is_the_published_one(engine: sa.Engine, table: str) -> None:
    metadata = sa.MetaData()
    assert list(DECLARE[table](metadata, table, None)) == ["outbox"]
    metadata.create_all(engine)
    found = read_catalog(engine, table)
    expected = published_catalog(table)
    assert found.columns == expected.columns
    assert found.indexes == expected.indexes
    assert found.checks == expected.checks
    assert found == expected


@each_table
def test_published_ddl_makes_the_same_table(engine: sa.Engine, table: str) -> None:
    metadata = sa.MetaData()
    DECLARE[table](metadata, table, None)
    metadata.create_all(engine)
    with new_schema(engine) as schema:
        with engine.begin() as db:
            for statement in published_ddl(table, schema):
                db.exec_driver_sql(statement)
        assert read_catalog(engine, table, schema) == read_catalog(engine, table)


@each_table
@pytest.mark.parametrize("is_first", [True, False], ids=["mixin first", "base first"])
def test_mapped_class_makes_the_same_table(engine: sa.Engine, table: str, is_first: bool) -> None:
    base = make_base()
    type("Events", (MIXINS[table], base) if is_first else (base, MIXINS[table]), {})
    base.metadata.create_all(engine)
    assert read_catalog(engine, table) == published_catalog(table)


def test_longest_published_index_and_check_are_written_out() -> None:
    # The expectation is put together from parts; these two are as published, letter by letter.
    catalog = published_catalog(INBOX)
    assert dict(catalog.indexes)["idx_inbox_events_pending_fetch"] == (
        "CREATE INDEX idx_inbox_events_pending_fetch ON inbox_events USING btree (scheduled_at) WHERE "
        "(((status)::text = 'pending'::text) AND (locked_at IS NULL) AND (attempts_made < max_attempts))"
    )
    assert [name for name, _ in catalog.indexes] == [
        "idx_inbox_deduplication",
        "idx_inbox_events_completed_cleanup",
        "idx_inbox_events_created_at",
        "idx_inbox_events_idempotency_key",
        "idx_inbox_events_locked_at",
        "idx_inbox_events_pending_fetch",
        "idx_inbox_events_updated_at",
    ]


# -- other names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declare", "table", "prefix", "dedup"),
    [
        (declare_outbox, "shop_outbox", "shop_outbox", None),
        (declare_inbox, "shop_events", "shop_events", "idx_shop_deduplication"),
        (declare_inbox, "arrivals", "arrivals", "idx_arrivals_deduplication"),
        (declare_outbox_partitioned, "shop_events_partitioned", "shop_events_p", None),
        (declare_inbox_partitioned, "arrivals", "arrivals_p", "idx_arrivals_p_deduplication"),
    ],
    ids=["outbox", "inbox of events", "inbox", "outbox partitioned", "inbox partitioned"],
)
def test_names_follow_the_table_in_another_schema(
    engine: sa.Engine, declare: Any, table: str, prefix: str, dedup: str | None
) -> None:
    indexes = {f"idx_{prefix}_{name}" for name in INDEXES} | ({dedup} if dedup else set())
    checks = {f"ck_{prefix}_{name}" for name in CHECKS}
    with new_schema(engine) as schema:
        metadata = sa.MetaData()
        declared = declare(metadata, table, schema)["outbox"]
        metadata.create_all(engine)
        found = read_catalog(engine, table, schema)
    assert declared.fullname == f"{schema}.{table}"
    assert {name for name, _ in found.indexes} == indexes
    assert {name for name, _ in found.checks} == checks


def test_tables_of_all_kinds_and_names_share_a_schema(engine: sa.Engine) -> None:
    metadata = sa.MetaData()
    for table, declare in DECLARE.items():
        declare(metadata, table, None)
        declare(metadata, f"other_{table}", None)
    metadata.create_all(engine)
    assert set(sa.inspect(engine).get_table_names()) == {*DECLARE, *(f"other_{table}" for table in DECLARE)}


@each_table
@pytest.mark.parametrize("is_mapped", [False, True], ids=["core", "mapped"])
@pytest.mark.parametrize(
    ("convention", "pattern"),
    [
        ({}, "ck_{prefix}_{name}"),
        ({"ck": "ck_%(table_name)s_%(constraint_name)s"}, "ck_{table}_{name}"),
        ({sa.CheckConstraint: "%(constraint_name)s_of_%(table_name)s"}, "{name}_of_{table}"),
        ({"ck": "ck_%(table_name)s"}, "ck_{prefix}_{name}"),
        ({"ix": "ix_%(constraint_name)s", "uq": "uq_%(column_0_name)s", "pk": "pk"}, "ck_{prefix}_{name}"),
    ],
    ids=["none", "usual", "by class", "without the name", "for others"],
)
def test_a_naming_convention_renames_checks_and_nothing_else(
    table: str, is_mapped: bool, convention: dict[Any, str], pattern: str
) -> None:
    base = make_base(naming_convention=convention)
    if is_mapped:
        model: Any = type("Events", (MIXINS[table], base), {})
        declared = model.__table__
    else:
        declared = DECLARE[table](base.metadata, table, None)["outbox"]
    indexes, checks = names_of(declared)
    assert indexes == {name for name, *_ in indexes_of(table)}
    assert checks == {pattern.format(prefix=NAMES[table][0], table=table, name=name) for name in CHECKS}


@pytest.mark.parametrize(
    ("table", "derived", "length"),
    [
        # 31 characters are the most; the check's name needs 32 more.
        ("a" * 32, f"ck_{'a' * 32}_completed_status_consistency", 64),
        ("a" * 15 + "\u00e9" * 8 + "a", f"ck_{'a' * 15 + 'é' * 8 + 'a'}_completed_status_consistency", 64),
        ("\U0001f4e6" * 10, f"ck_{chr(0x1F4E6) * 10}_completed_status_consistency", 72),
    ],
    ids=["ascii", "two bytes", "four bytes"],
)
@pytest.mark.parametrize("is_mapped", [False, True], ids=["core", "mapped"])
def test_a_name_that_the_server_would_cut_is_refused(table: str, derived: str, length: int, is_mapped: bool) -> None:
    base = make_base()
    declare = map_outbox if is_mapped else declare_outbox
    with pytest.raises(LayoutError) as caught:
        declare(base if is_mapped else base.metadata, table, None)
    assert str(caught.value) == (
        f"Identifier {derived!r}: expected at most 63 bytes, as PostgreSQL takes no more; got {length}. "
        "Give the table a shorter name."
    )
    assert not base.metadata.tables


def test_a_name_that_a_convention_makes_too_long_is_refused() -> None:
    metadata = sa.MetaData(naming_convention={"ck": "check_constraint_%(table_name)s_%(constraint_name)s"})
    with pytest.raises(LayoutError, match=r"'check_constraint_shop_outbox_events_of_\w+': expected at most 63 bytes"):
        declare_outbox(metadata, "shop_outbox_events_of_2026", None)
    assert not metadata.tables


def test_the_longest_names_reach_the_database_whole(engine: sa.Engine) -> None:
    metadata = sa.MetaData()
    longest = "a" * 15 + "é" * 8
    tables = [declare_outbox(metadata, name, None)["outbox"] for name in ("a" * 31, longest)]
    metadata.create_all(engine)
    for table in tables:
        found = read_catalog(engine, table.name)
        assert ({name for name, _ in found.indexes}, {name for name, _ in found.checks}) == names_of(table)


# -- declaring -----------------------------------------------------------------------------------------------


@each_table
def test_declaring_twice_returns_the_same_table(table: str) -> None:
    metadata = sa.MetaData(schema="shop")
    first = DECLARE[table](metadata, table, None)["outbox"]
    assert DECLARE[table](metadata, table, None)["outbox"] is first
    assert DECLARE[table](metadata, table, "shop")["outbox"] is first
    assert DECLARE[table](metadata, table, "other")["outbox"] is not first


def test_a_mapped_class_is_found_by_its_table() -> None:
    base = make_base()
    model: Any = type("Events", (OmniboxOutboxMixin, base), {})
    assert declare_outbox(base.metadata, OUTBOX, None)["outbox"] is model.__table__


def test_another_table_of_the_name_is_refused() -> None:
    metadata = sa.MetaData()
    declare_outbox(metadata, "events", None)
    with pytest.raises(LayoutError, match=r"'events'.* lacks message_id, consumer_group, source; name the outbox"):
        declare_inbox(metadata, "events", None)


def test_mapped_class_may_rename_and_extend(engine: sa.Engine) -> None:
    base = make_base()

    class Events(OmniboxOutboxMixin, base):  # type: ignore[misc, valid-type]
        __tablename__ = "shop_events"
        __table_args__ = (sa.Index("by_tenant", "tenant"), {"comment": "ours"})
        tenant: Mapped[str] = mapped_column(sa.String(20), server_default="none")

    base.metadata.create_all(engine)
    found = read_catalog(engine, "shop_events")
    published = published_catalog(OUTBOX)
    extra = ("tenant", "character varying(20)", False, "'none'::character varying")
    assert sorted(found.columns) == sorted((*published.columns, extra))
    assert {name for name, _ in found.indexes} == {"by_tenant", *(f"idx_shop_events_{name}" for name in INDEXES)}
    assert [printed for _, printed in found.checks] == [printed for _, printed in published.checks]


@pytest.mark.parametrize("kind", ["dataclass", "function"])
def test_other_kinds_of_bases_take_the_mixins(kind: str) -> None:
    class AsDataclass(MappedAsDataclass, DeclarativeBase):
        pass

    base: Any = AsDataclass if kind == "dataclass" else declarative_base()
    for table, mixin in MIXINS.items():
        declared: Any = type(f"Events_{table}", (mixin, base), {})
        assert declared.__table__.name == table


def test_columns_for_deduplication_are_those_of_the_class(engine: sa.Engine) -> None:
    base = make_base()

    class Arrivals(OmniboxInboxPartitionedMixin, base):  # type: ignore[misc, valid-type]
        __inbox_dedup_index_columns__ = ("source", "message_id", "created_at")

    assert OmniboxInboxMixin.__inbox_dedup_index_columns__ == ("message_id", "consumer_group")
    widened = ("message_id", "consumer_group", "created_at")
    assert OmniboxInboxPartitionedMixin.__inbox_dedup_index_columns__ == widened
    base.metadata.create_all(engine)
    assert dict(read_catalog(engine, INBOX_P).indexes)["idx_inbox_events_p_deduplication"] == (
        "CREATE UNIQUE INDEX idx_inbox_events_p_deduplication ON ONLY inbox_events_partitioned USING btree "
        "(source, message_id, created_at)"
    )


def test_a_partitioned_inbox_that_could_not_be_created_is_refused() -> None:
    base = make_base()
    with pytest.raises(LayoutError, match=r"expected 'created_at' among .*; got \('message_id',\)"):
        type("Arrivals", (OmniboxInboxPartitionedMixin, base), {"__inbox_dedup_index_columns__": ("message_id",)})


def test_rows_go_through_the_mapped_class(engine: sa.Engine) -> None:
    base = make_base()
    model: Any = type("Arrivals", (OmniboxInboxPartitionedMixin, base), {})
    base.metadata.create_all(engine)
    with Session(engine) as session:
        session.execute(sa.text(f"CREATE TABLE {INBOX_P}_rest PARTITION OF {INBOX_P} DEFAULT"))
        given = {"event_type": "paid", "message_id": "m", "consumer_group": "g", "source": "s", "payload": {"n": 1}}
        session.execute(sa.insert(model).values(id=sa.func.gen_random_uuid(), scheduled_at=sa.func.now(), **given))
        row = session.scalars(sa.select(model)).one()
        assert (row.status, row.attempts_made, row.max_attempts, row.headers) == ("pending", 0, 6, None)
        assert row.payload == {"n": 1}
        assert row.created_at == row.scheduled_at  # the server runs in UTC
