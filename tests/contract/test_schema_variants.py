"""Other systems spell one table in several ways: each passes the check and is made when asked for; the rest is drift.

The statements are those systems' tables in our words: as omni-box 0.3.1's models, the Open Outbox Relay's first file,
Ekbatan's migrations for MySQL and MariaDB and the releases of faststream-outbox leave them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from pillarbox.cli.commands import app
from pillarbox.errors import LayoutError, SchemaError
from pillarbox.layouts import declare_layout, get_layout, layout_names
from pillarbox.schema import check_schema, compare_schema, create, ddl
from tests.contract.drifts import DATABASES, DIALECTS, own_engine
from tests.contract.sync_queue_kit import make_file
from tests.servers import ROOT

EVENT = """
    id UUID NOT NULL, event_type VARCHAR(100) NOT NULL, payload JSONB NOT NULL, headers JSONB, trace_id VARCHAR(64),
    idempotency_key VARCHAR(128), correlation_id VARCHAR(64), causation_id VARCHAR(64), schema_version VARCHAR(50),
    status VARCHAR(20) NOT NULL, attempts_made INTEGER NOT NULL, max_attempts INTEGER NOT NULL,
    last_error VARCHAR(2000), scheduled_at TIMESTAMPTZ NOT NULL, completed_at TIMESTAMPTZ, locked_at TIMESTAMPTZ,
    locked_by VARCHAR(255), updated_at TIMESTAMPTZ DEFAULT timezone('UTC', now()),
    CHECK (attempts_made <= max_attempts),
    CHECK ((status = 'completed' AND completed_at IS NOT NULL) OR (status != 'completed' AND completed_at IS NULL)),
    CHECK ((locked_at IS NULL AND locked_by IS NULL) OR (locked_at IS NOT NULL AND locked_by IS NOT NULL))
"""
CREATED = "created_at TIMESTAMPTZ DEFAULT timezone('UTC', now()) NOT NULL"
OUTBOX = "aggregate_type VARCHAR(50) NOT NULL, aggregate_id UUID NOT NULL, topic VARCHAR(255) NOT NULL, " + (
    "partition_key VARCHAR(255) NOT NULL"
)
INBOX = "message_id VARCHAR(255) NOT NULL, consumer_group VARCHAR(255) NOT NULL, source VARCHAR(255) NOT NULL"
PENDING = "status = 'pending' AND locked_at IS NULL AND attempts_made < max_attempts"


def omnibox_table(table: str, own: str, *indexes: str, is_partitioned: bool = False) -> list[str]:
    key, by = ("created_at, id", " PARTITION BY RANGE (created_at)") if is_partitioned else ("id", "")
    widened = ", created_at" if is_partitioned else ""
    return [
        f"CREATE TABLE {table} ({CREATED}, {EVENT}, {own}, PRIMARY KEY ({key})){by}",
        f"CREATE INDEX a_pending ON {table} (scheduled_at) WHERE {PENDING}",
        f"CREATE INDEX a_locked ON {table} (locked_at) WHERE locked_at IS NOT NULL",
        f"CREATE INDEX a_cleanup ON {table} (completed_at) WHERE status = 'completed' AND completed_at IS NOT NULL",
        f"CREATE UNIQUE INDEX a_key ON {table} (idempotency_key{widened}) WHERE idempotency_key IS NOT NULL",
        f"CREATE INDEX a_created ON {table} (created_at)",
        f"CREATE INDEX a_updated ON {table} (updated_at)",
        *(each.format(table) for each in indexes),
    ]


ORDERED = "CREATE INDEX a_order ON {} (topic, partition_key, created_at) WHERE status = 'pending'"
OMNIBOX = {
    "omnibox": omnibox_table("outbox_events", OUTBOX, ORDERED),
    "omnibox-inbox": omnibox_table(
        "inbox_events", INBOX, "CREATE UNIQUE INDEX a_dedup ON {} (message_id, consumer_group)"
    ),
    "omnibox-partitioned": omnibox_table("outbox_events_partitioned", OUTBOX, ORDERED, is_partitioned=True),
    "omnibox-inbox-partitioned": omnibox_table(
        "inbox_events_partitioned",
        INBOX,
        "CREATE UNIQUE INDEX a_dedup ON {} (message_id, consumer_group, created_at)",
        "CREATE INDEX a_message ON {} (message_id, consumer_group)",
        is_partitioned=True,
    ),
}
ADDED = {
    "omnibox": ["idx_outbox_events_pending_key_order"],
    "omnibox-inbox": [],
    "omnibox-partitioned": ["idx_outbox_events_p_pending_key_order"],
    "omnibox-inbox-partitioned": ["idx_inbox_events_p_message_consumer"],
}
OPEN_OUTBOX = [
    """CREATE TABLE openoutbox_events (
        event_id UUID PRIMARY KEY, event_type TEXT NOT NULL, partition_key TEXT, payload BYTEA NOT NULL,
        headers JSONB NOT NULL DEFAULT '{}', status TEXT NOT NULL DEFAULT 'PENDING', attempts INT NOT NULL DEFAULT 0,
        last_error TEXT, available_at TIMESTAMPTZ NOT NULL DEFAULT NOW(), locked_by TEXT, locked_at TIMESTAMPTZ,
        delivered_at TIMESTAMPTZ, created_at TIMESTAMPTZ NOT NULL DEFAULT NOW(),
        updated_at TIMESTAMPTZ NOT NULL DEFAULT NOW(),
        CONSTRAINT check_valid_status CHECK (status IN ('PENDING', 'DELIVERING', 'DELIVERED', 'DEAD')))""",
    "CREATE INDEX a_queue ON openoutbox_events (available_at, created_at) WHERE status = 'PENDING'",
    "CREATE INDEX a_stuck ON openoutbox_events (locked_at) WHERE status = 'DELIVERING'",
    "CREATE INDEX a_count ON openoutbox_events (status) INCLUDE (attempts) WHERE status = 'PENDING'",
    "CREATE INDEX a_lag ON openoutbox_events (status, created_at) WHERE status = 'PENDING'",
]


@pytest.fixture
def postgres() -> Iterator[sa.Engine]:
    with own_engine("postgres") as engine:
        yield engine


def execute(engine: sa.Engine, *statements: str) -> None:
    with engine.begin() as db:
        for statement in statements:
            db.exec_driver_sql(statement)


# -- omni-box ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", OMNIBOX)
async def test_tables_of_omnibox_models_are_right_as_they_are(layout: str, postgres: sa.Engine) -> None:
    execute(postgres, *OMNIBOX[layout])
    found = await compare_schema(postgres, layout)
    assert (found.variant, found.drifts, found.hints) == ("0.3.1", [], [])


@pytest.mark.parametrize("layout", OMNIBOX)
async def test_tables_of_the_page_are_right_and_lack_what_the_models_have(layout: str, postgres: sa.Engine) -> None:
    tables = declare_layout(get_layout(layout), sa.MetaData())
    tables["outbox"].metadata.create_all(postgres)
    found = await compare_schema(postgres, layout)
    assert (found.variant, found.drifts, found.hints) == ("page", [], [])
    drifts = await check_schema(postgres, layout, variant="0.3.1")
    assert [drift.name for drift in drifts if drift.kind == "index"] == ADDED[layout]
    assert [drift.name for drift in drifts if drift.kind == "default"] == ["status", "attempts_made", "max_attempts"]
    keys = [(drift.expected, drift.found) for drift in drifts if drift.kind == "primary key"]
    assert keys == ([("(created_at, id)", "(id, created_at)")] if "partitioned" in layout else [])


@pytest.mark.parametrize("layout", OMNIBOX)
async def test_anything_else_is_drift_from_the_nearest(layout: str, postgres: sa.Engine) -> None:
    table = get_layout(layout).table
    execute(postgres, *OMNIBOX[layout], f"ALTER TABLE {table} ALTER attempts_made SET DEFAULT 0", "DROP INDEX a_locked")
    found = await compare_schema(postgres, layout)
    assert found.variant == "0.3.1"
    assert {(drift.kind, drift.name.split("_")[-1]) for drift in found.drifts} == {("default", "made"), ("index", "at")}


# -- the others --------------------------------------------------------------------------------------------------------


async def test_openoutbox_without_its_maintenance_is_right_with_a_hint(postgres: sa.Engine) -> None:
    execute(postgres, *OPEN_OUTBOX)
    found = await compare_schema(postgres, "openoutbox")
    assert (found.variant, found.drifts) == ("open-outbox.sql", [])
    assert [hint.name for hint in found.hints] == ["idx_openoutbox_prune_dead", "idx_openoutbox_prune_delivered"]
    execute(postgres, *(statement for hint in found.hints for statement in hint.statements))
    whole = await compare_schema(postgres, "openoutbox")
    assert (whole.variant, whole.drifts, whole.hints) == ("maintenance.sql", [], [])
    execute(postgres, "DROP INDEX a_stuck")
    assert [drift.name for drift in await check_schema(postgres, "openoutbox")] == ["idx_openoutbox_stuck_leases"]


async def test_openoutbox_must_have_its_maintenance_where_it_was_asked_for(postgres: sa.Engine) -> None:
    execute(postgres, *OPEN_OUTBOX)
    drifts = await check_schema(postgres, "openoutbox", variant="maintenance.sql")
    assert [drift.name for drift in drifts] == ["idx_openoutbox_prune_dead", "idx_openoutbox_prune_delivered"]
    assert (await compare_schema(postgres, "openoutbox", variant="open-outbox.sql")).hints == []


async def test_hint_is_given_only_where_nothing_is_wrong() -> None:
    """On SQLite the statements of a hint would make the table anew, to mend what is wrong."""
    made = ddl("openoutbox", "sqlite", variant="open-outbox.sql")
    assert "last_error TEXT" in made
    with own_engine("sqlite") as engine:
        execute(engine, *filter(str.strip, made.replace("last_error TEXT", "last_error VARCHAR(10)").split(";\n")))
        found = await compare_schema(engine, "openoutbox")
        assert (found.variant, [drift.name for drift in found.drifts]) == ("open-outbox.sql", ["last_error"])
        assert found.hints == []
        execute(engine, *(each for each in found.drifts[0].statements if not each.startswith("--")))
        found = await compare_schema(engine, "openoutbox")
        assert found.drifts == []
        assert [hint.name for hint in found.hints] == ["idx_openoutbox_prune_dead", "idx_openoutbox_prune_delivered"]
        assert not any("DROP TABLE" in statement for hint in found.hints for statement in hint.statements)


SIDE_TABLE = "events_state"
"""Ours, which no other system makes."""


def run_ekbatans_migration(engine: sa.Engine, name: str) -> str:
    """Make Ekbatan's tables; returns the schema, which is a database on MySQL and MariaDB."""
    schema = "eventlog" if name == "postgresql" else str(engine.url.database)
    text = (ROOT / f"tests/peers/ekbatan/{name}.sql").read_text().replace(":eventlog", schema)
    made = [f"CREATE SCHEMA {schema}"] if name == "postgresql" else []
    execute(engine, *made, *filter(str.strip, text.split(";")))
    return schema


@pytest.mark.parametrize("name", ["mariadb", "mysql"])
async def test_ekbatans_migrations_are_right_with_a_hint(name: str) -> None:
    with own_engine(name) as engine:
        schema = run_ekbatans_migration(engine, name)
        assert [drift.name for drift in await check_schema(engine, "ekbatan", schema=schema)] == [SIDE_TABLE]
        found = await compare_schema(engine, "ekbatan-notifications", schema=schema)
        assert (found.variant, found.drifts) == ("1.0.1", [])
        assert [hint.expected for hint in found.hints] == ["(state, next_retry_at)"]
        due = "INDEX event_notifications_due ON event_notifications"
        execute(engine, f"DROP {due}", f"CREATE {due} (state, next_retry_at)")
        found = await compare_schema(engine, "ekbatan-notifications", schema=schema)
        assert (found.variant, found.drifts, found.hints) == ("page", [], [])
        execute(engine, f"DROP {due}")
        (drift,) = await check_schema(engine, "ekbatan-notifications", schema=schema)
        assert drift.name == "event_notifications_due"


async def test_ekbatans_migration_for_postgresql_is_right(postgres: sa.Engine) -> None:
    schema = run_ekbatans_migration(postgres, "postgresql")
    assert [drift.name for drift in await check_schema(postgres, "ekbatan", schema=schema)] == [SIDE_TABLE]
    found = await compare_schema(postgres, "ekbatan-notifications", schema=schema)
    assert (found.variant, found.drifts, found.hints) == ("page", [], [])


@pytest.mark.parametrize("layout", ["faststream", "faststream-dlq"])
async def test_indexes_of_later_faststream_releases_are_right(layout: str, postgres: sa.Engine) -> None:
    declare_layout(get_layout(layout), sa.MetaData())["outbox"].metadata.create_all(postgres)
    assert (await compare_schema(postgres, layout)).variant == "0.13"
    execute(
        postgres,
        "DROP INDEX outbox_pending_idx",
        "CREATE INDEX outbox_pending_idx ON outbox (queue, next_attempt_at, id) WHERE acquired_token IS NULL",
    )
    found = await compare_schema(postgres, layout)
    assert (found.variant, found.drifts, found.hints) == ("0.15", [], [])
    execute(
        postgres,
        "DROP INDEX outbox_lease_idx",
        "CREATE INDEX outbox_leased_idx ON outbox (queue, next_attempt_at, id) WHERE acquired_token IS NOT NULL",
    )
    found = await compare_schema(postgres, layout)
    assert (found.variant, found.drifts, found.hints) == ("0.17", [], [])


@pytest.mark.parametrize("release", ["0.4", "0.6"])
async def test_files_of_sqloutbox_are_right_but_for_our_side_table(release: str, tmp_path: Path) -> None:
    path = tmp_path / "queue.db"
    make_file(f"sqloutbox-{release}", path)
    assert [str(drift) for drift in await check_schema(f"sqlite:///{path}", "sqloutbox")] == [
        "Table 'outbox_queue_state': expected a table; found none"
    ]


# -- making them -------------------------------------------------------------------------------------------------------

VARIANTS = [
    (layout, variant.name, name)
    for layout in layout_names()
    for variant in get_layout(layout).variants
    for name in DATABASES
    if DIALECTS[name] in get_layout(layout).databases
]


@pytest.mark.parametrize(("layout", "variant", "name"), VARIANTS)
async def test_each_variant_is_made_when_asked_for(layout: str, variant: str, name: str, tmp_path: Path) -> None:
    with own_engine(name) as engine:
        url = engine.url.set(drivername=engine.url.get_backend_name())
        if name == "sqlite":
            url = sa.make_url(f"sqlite:///{tmp_path / 'made.db'}")
        place: dict[str, Any] = {"schema": url.database} if layout.startswith("ekbatan") and name != "postgres" else {}
        made = await create(url, layout=layout, variant=variant, **place)
        assert all(each.is_new for each in made)
        assert await check_schema(url, layout, variant=variant, **place) == []
        assert not any(each.is_new for each in await create(url, layout=layout, variant=variant, **place))
        # Whoever does not ask takes what is there.
        found = await compare_schema(url, layout, **place)
        assert found.drifts == []
        assert not any(each.is_new for each in await create(url, layout=layout, **place))


async def test_another_variant_than_the_one_asked_for_is_refused(postgres: sa.Engine) -> None:
    execute(postgres, *OMNIBOX["omnibox"])
    url = postgres.url.set(drivername="postgresql")
    with pytest.raises(SchemaError, match="'outbox_events' exists but is not what the layout declares") as refused:
        await create(url, layout="omnibox", variant="page")
    # The other command finds something only when it is asked for the same.
    assert "Run `pillarbox schema diff --variant page` for the migration" in str(refused.value)
    execute(postgres, "ALTER TABLE outbox_events ALTER topic DROP NOT NULL")
    with pytest.raises(SchemaError, match="Run `pillarbox schema diff` for the migration"):
        await create(url, layout="omnibox")


def test_unknown_variants_are_refused() -> None:
    with pytest.raises(LayoutError) as refused:
        ddl("omnibox", "postgresql", variant="0.3")
    assert str(refused.value) == (
        "Layout 'omnibox': expected variant page (the DDL of omni-box's page), 0.3.1 (`create_all` of the models of "
        "omni-box 0.3.1); got '0.3'"
    )
    with pytest.raises(LayoutError, match=r"^Layout 'debezium': it has no variants; got 'page'$"):
        ddl("debezium", "postgresql", variant="page")


# -- the command -------------------------------------------------------------------------------------------------------


def test_command_says_which_variant_it_found(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / f'{uuid4().hex}.db'}"
    store = ["--store", url, "--layout", "openoutbox"]

    def run(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["schema", *arguments, *store])
        assert result.exit_code == code, result.output
        return result.stdout

    assert "prune" not in run("sql", "--variant", "open-outbox.sql")
    assert run("create", "--variant", "open-outbox.sql") == "openoutbox_events: created\n"
    assert run("check") == (
        "The tables are as layout 'openoutbox' declares them, variant 'open-outbox.sql'.\n"
        "Hint: Table 'openoutbox_events', index 'idx_openoutbox_prune_dead': expected (updated_at) where "
        "status = 'DEAD'; found none\n"
        "    CREATE INDEX idx_openoutbox_prune_dead ON openoutbox_events (updated_at) WHERE status = 'DEAD';\n"
        "Hint: Table 'openoutbox_events', index 'idx_openoutbox_prune_delivered': expected (delivered_at) where "
        "status = 'DELIVERED'; found none\n"
        "    CREATE INDEX idx_openoutbox_prune_delivered ON openoutbox_events (delivered_at) WHERE "
        "status = 'DELIVERED';\n"
    )
    found = json.loads(run("check", "--json"))
    assert (found["layout"], found["variant"], found["drifts"]) == ("openoutbox", "open-outbox.sql", [])
    assert [hint["name"] for hint in found["hints"]] == ["idx_openoutbox_prune_dead", "idx_openoutbox_prune_delivered"]
    assert run("diff") == ""
    assert "CREATE INDEX idx_openoutbox_prune_dead" in run("diff", "--variant", "maintenance.sql")
    asked = run("check", "--variant", "maintenance.sql", code=1)
    assert asked.startswith("Table 'openoutbox_events', index 'idx_openoutbox_prune_dead': expected")
    assert asked.endswith("Compared with layout 'openoutbox', variant 'maintenance.sql'.\n")
