"""Our partitioned tables as PostgreSQL describes them, against what is written here by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Session

from pillarbox import Event, LayoutError, Outbox, Relay
from pillarbox.config import Config, StoreConfig
from pillarbox.layouts import declare_layout, get_layout
from pillarbox.layouts.pillarbox import AuditMixin, DeadMixin, HistoryMixin, LanesMixin, OutboxMixin, pillarbox_layout
from pillarbox.schema import check_tables
from pillarbox.schema.partitions import ensure_partitions
from pillarbox.sinks.memory import MemorySink
from tests.contract.catalog import Catalog, empty_database, read_catalog, read_tables
from tests.servers import server_url

LAYOUT = "pillarbox-partitioned"

HISTORY = Catalog(
    columns=(
        ("seq", "bigint", False, None),
        ("id", "uuid", False, None),
        ("sink", "character varying(100)", False, "''::character varying"),
        ("lane", "smallint", False, None),
        ("type", "character varying(255)", False, None),
        ("topic", "character varying(255)", False, None),
        ("key", "character varying(255)", True, None),
        ("content_type", "character varying(127)", False, None),
        ("aggregate_type", "character varying(255)", True, None),
        ("aggregate_id", "character varying(255)", True, None),
        ("schema_version", "character varying(50)", True, None),
        ("correlation_id", "character varying(255)", True, None),
        ("causation_id", "character varying(255)", True, None),
        ("trace_id", "character varying(64)", True, None),
        ("source", "character varying(255)", True, None),
        ("payload", "bytea", False, None),
        ("headers", "jsonb", True, None),
        ("due_at", "timestamp with time zone", True, None),
        ("max_attempts", "integer", True, None),
        ("created_at", "timestamp with time zone", False, None),
        ("attempts", "integer", False, "0"),
        ("error", "text", True, None),
        ("delivered_at", "timestamp with time zone", False, None),
    ),
    key=("seq", "delivered_at"),
    indexes=(
        (
            "outbox_history_delivered",
            "CREATE INDEX outbox_history_delivered ON ONLY outbox_history USING btree (sink, delivered_at)",
        ),
        ("outbox_history_id", "CREATE INDEX outbox_history_id ON ONLY outbox_history USING btree (id, sink)"),
    ),
    checks=(),
    partition="RANGE (delivered_at)",
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    with empty_database("postgresql", tmp_path) as made:
        yield made


def make_base() -> Any:
    class Base(DeclarativeBase):
        pass

    return Base


def make_models(base: Any, name: str = "outbox") -> dict[str, Any]:
    mixins = {"outbox": OutboxMixin, "dead": DeadMixin, "lanes": LanesMixin, "audit": AuditMixin}
    made = {}
    for role, mixin in {**mixins, "history": HistoryMixin}.items():
        table = name if role == "outbox" else f"{name}_{role}"
        made[role] = type(table.title(), (mixin, base), {"__tablename__": table, "__module__": __name__})
    return made


@pytest.mark.parametrize("is_mapped", [False, True], ids=["core", "mapped"])
def test_history_is_what_is_written_here(engine: sa.Engine, is_mapped: bool) -> None:
    metadata = sa.MetaData()
    if is_mapped:
        base = make_base()
        Outbox.from_models(**make_models(base), layout=LAYOUT)
        metadata = base.metadata
    else:
        Outbox(metadata, LAYOUT)
    metadata.create_all(engine)
    assert read_catalog(engine, "outbox_history") == HISTORY


def test_other_tables_are_those_of_the_plain_layout(tmp_path: Path) -> None:
    found = []
    for layout in ("pillarbox", LAYOUT):
        with empty_database("postgresql", tmp_path) as engine:
            declare_layout(get_layout(layout), metadata := sa.MetaData())
            metadata.create_all(engine)
            found.append(read_tables(engine))
    plain, partitioned = found
    assert sorted(set(partitioned) - set(plain)) == ["outbox_history"]
    assert {name: partitioned[name] for name in plain} == plain


def test_check_finds_nothing_with_partitions_and_sees_what_is_missing(engine: sa.Engine) -> None:
    tables = declare_layout(get_layout(LAYOUT), metadata := sa.MetaData())
    metadata.create_all(engine)
    with engine.begin() as db:
        ensure_partitions(db, "outbox_history")
        assert check_tables(db, tables.values()) == []
        db.exec_driver_sql("DROP INDEX outbox_history_delivered")
        assert [drift.name for drift in check_tables(db, tables.values())] == ["outbox_history_delivered"]


async def test_mapped_history_is_filled_by_a_relay(engine: sa.Engine) -> None:
    base = make_base()
    models = make_models(base, "messages")
    outbox = Outbox.from_models(**models, layout=LAYOUT)
    base.metadata.create_all(engine)
    with engine.begin() as db:
        ensure_partitions(db, "messages_history")
        schema = db.exec_driver_sql("SELECT current_schema()").scalar_one()
        outbox.put(db, Event("order.placed", {"n": 1}, key="7"))
    store = Outbox(sa.MetaData(), LAYOUT, table="messages", schema=schema).store(server_url("postgres"))
    async with Relay(store, MemorySink()) as relay:
        await relay.drain()
    with Session(engine) as session:
        assert session.scalars(sa.select(models["outbox"])).all() == []
        [row] = session.scalars(sa.select(models["history"])).all()
        assert (row.type, row.key, row.payload, row.attempts) == ("order.placed", "7", b'{"n":1}', 1)


def test_model_of_the_history_belongs_to_the_partitioned_layout() -> None:
    models = make_models(make_base())
    with pytest.raises(LayoutError, match=r"'pillarbox': .* got dead=…, lanes=…, audit=…, history=…"):
        Outbox.from_models(**models)
    del models["history"]
    with pytest.raises(LayoutError, match=r"'pillarbox-partitioned': .*audit=…, history=…; got dead"):
        Outbox.from_models(**models, layout=LAYOUT)


def test_lanes_of_the_settings_go_with_the_partitioned_form() -> None:
    layout = Config(store=StoreConfig(layout=LAYOUT, lanes=16)).get_layout()
    assert (layout.name, layout.keyed.lanes, layout.history is not None) == (LAYOUT, 16, True)
    assert pillarbox_layout(16).history is None
