"""The tables of a sqloutbox file as SQLite shows them, for the files of releases 0.4 and 0.6."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import produce_migrations
from alembic.migration import MigrationContext

from pillarbox.errors import LayoutError
from pillarbox.layouts.sqloutbox_tables import declare, declare_retrying

# Columns as (name, type, is required, default, place in the key), indexes as (name, is unique, columns).
QUEUE = [
    ("seq", "INTEGER", 0, None, 1),
    ("created_at", "TEXT", 1, None, 0),
    ("namespace", "TEXT", 1, None, 0),
    ("source", "TEXT", 1, "''", 0),
    ("tag", "TEXT", 1, None, 0),
    ("payload", "TEXT", 1, None, 0),
    ("prev_seq", "INTEGER", 0, None, 0),
    ("synced", "INTEGER", 1, "0", 0),
]
RETRIES = [
    ("attempts", "INTEGER", 1, "0", 0),
    ("last_attempt_at", "TEXT", 0, None, 0),
    ("last_error", "TEXT", 0, None, 0),
    ("last_error_class", "TEXT", 0, None, 0),
]
QUEUE_INDEXES = [
    ("idx_outbox_prev", 1, ["prev_seq"]),
    ("idx_outbox_prev_unique", 1, ["prev_seq"]),
    ("idx_outbox_worker", 0, ["namespace", "synced", "seq"]),
    ("sqlite_autoindex_outbox_queue_1", 1, ["prev_seq"]),
]
LOG = [
    ("seq", "INTEGER", 0, None, 1),
    ("namespace", "TEXT", 1, None, 0),
    ("synced_at", "TEXT", 1, None, 0),
]
LOG_INDEXES = [("idx_sync_log", 0, ["namespace", "seq"])]
STATE = [
    ("seq", "INTEGER", 1, None, 1),
    ("attempts", "INTEGER", 1, "0", 0),
    ("state", "SMALLINT", 1, None, 0),
    ("token", "CHAR(36)", 0, None, 0),
    ("until_at", "DATETIME", 0, None, 0),
    ("error", "TEXT", 0, None, 0),
    ("died_at", "DATETIME", 0, None, 0),
]
DEAD = [
    ("seq", "INTEGER", 1, None, 2),
    ("namespace", "TEXT", 1, None, 1),
    ("tag", "TEXT", 1, None, 0),
    ("payload", "TEXT", 1, None, 0),
    ("prev_seq", "INTEGER", 0, None, 0),
    ("source", "TEXT", 0, None, 0),
    ("attempts", "INTEGER", 1, None, 0),
    ("last_error", "TEXT", 0, None, 0),
    ("last_error_class", "TEXT", 0, None, 0),
    ("dead_lettered_at", "TEXT", 1, None, 0),
    ("reason", "TEXT", 1, None, 0),
]
MARKS = [("namespace", "TEXT", 1, None, 1), ("hwm", "INTEGER", 1, None, 0)]

OLD_FILE = {
    "outbox_queue": (QUEUE, QUEUE_INDEXES, True),
    "outbox_sync_log": (LOG, LOG_INDEXES, False),
}
NEW_FILE = {
    "outbox_dead_log": (DEAD, [("sqlite_autoindex_outbox_dead_log_1", 1, ["namespace", "seq"])], False),
    "outbox_hwm": (MARKS, [("sqlite_autoindex_outbox_hwm_1", 1, ["namespace"])], False),
    "outbox_queue": ([*QUEUE, *RETRIES], QUEUE_INDEXES, True),
    "outbox_sync_log": (LOG, LOG_INDEXES, False),
}
SIDE = {"outbox_queue_state": (STATE, [("outbox_queue_state_until", 0, ["state", "until_at"])], False)}

THEIRS = """
    CREATE TABLE outbox_queue (seq INTEGER PRIMARY KEY AUTOINCREMENT, created_at TEXT NOT NULL,
        namespace TEXT NOT NULL, source TEXT NOT NULL DEFAULT '', tag TEXT NOT NULL, payload TEXT NOT NULL,
        prev_seq INTEGER UNIQUE, synced INTEGER NOT NULL DEFAULT 0);
    CREATE TABLE outbox_sync_log (seq INTEGER PRIMARY KEY, namespace TEXT NOT NULL, synced_at TEXT NOT NULL);
    CREATE INDEX idx_outbox_worker ON outbox_queue (namespace, synced, seq);
    CREATE UNIQUE INDEX idx_outbox_prev ON outbox_queue (prev_seq);
    CREATE UNIQUE INDEX idx_outbox_prev_unique ON outbox_queue (prev_seq);
    CREATE INDEX idx_sync_log ON outbox_sync_log (namespace, seq);
"""
THEIR_UPGRADE = """
    ALTER TABLE outbox_queue ADD COLUMN attempts INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE outbox_queue ADD COLUMN last_attempt_at TEXT;
    ALTER TABLE outbox_queue ADD COLUMN last_error TEXT;
    ALTER TABLE outbox_queue ADD COLUMN last_error_class TEXT;
    CREATE TABLE outbox_dead_log (seq INTEGER NOT NULL, namespace TEXT NOT NULL, tag TEXT NOT NULL,
        payload TEXT NOT NULL, prev_seq INTEGER, source TEXT, attempts INTEGER NOT NULL, last_error TEXT,
        last_error_class TEXT, dead_lettered_at TEXT NOT NULL, reason TEXT NOT NULL,
        PRIMARY KEY (namespace, seq));
    CREATE TABLE outbox_hwm (namespace TEXT NOT NULL PRIMARY KEY, hwm INTEGER NOT NULL);
"""

Declare = Callable[[sa.MetaData, str, str | None], Any]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "orders.db"


def read_file(path: Path) -> dict[str, Any]:
    """Each table's columns and indexes, and whether its numbers are never given twice."""
    with closing(sqlite3.connect(path)) as db:
        tables = db.execute(
            "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY name"
        ).fetchall()
        found = {}
        for table, text in tables:
            columns = [tuple(row[1:]) for row in db.execute(f"PRAGMA table_info({table})")]
            indexes = sorted(
                (name, unique, [row[2] for row in db.execute(f"PRAGMA index_info({name})")])
                for _, name, unique, *_ in db.execute(f"PRAGMA index_list({table})")
            )
            found[table] = (columns, indexes, "AUTOINCREMENT" in text)
        return found


def make_file(path: Path, declare: Declare, table: str = "outbox_queue", **options: Any) -> dict[str, str]:
    engine = sa.create_engine(f"sqlite:///{path}")
    metadata = sa.MetaData(**options)
    tables = declare(metadata, table, None)
    metadata.create_all(engine)
    engine.dispose()
    return {role: each.name for role, each in tables.items()}


def test_a_file_of_release_0_4_has_these_tables_and_our_side_table(path: Path) -> None:
    assert make_file(path, declare) == {
        "outbox": "outbox_queue",
        "log": "outbox_sync_log",
        "state": "outbox_queue_state",
    }
    assert read_file(path) == {**OLD_FILE, **SIDE}


def test_a_file_of_release_0_6_has_these_tables(path: Path) -> None:
    assert make_file(path, declare_retrying) == {
        "outbox": "outbox_queue",
        "log": "outbox_sync_log",
        "dead": "outbox_dead_log",
        "marks": "outbox_hwm",
    }
    assert read_file(path) == NEW_FILE


@pytest.mark.parametrize(("script", "expected"), [(THEIRS, OLD_FILE), (THEIRS + THEIR_UPGRADE, NEW_FILE)])
def test_their_own_statements_make_the_same_tables(path: Path, script: str, expected: Any) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript(script)
    assert read_file(path) == expected


@pytest.mark.parametrize("declare", [declare, declare_retrying])
def test_numbers_are_never_given_twice_and_stay_in_their_column(path: Path, declare: Declare) -> None:
    make_file(path, declare)
    with closing(sqlite3.connect(path)) as db:
        insert = "INSERT INTO outbox_queue (created_at, namespace, tag, payload) VALUES ('2026', 'orders', 'x', '[]')"
        db.execute(insert)
        db.execute("DELETE FROM outbox_queue")
        db.execute(insert)
        assert db.execute("SELECT rowid, seq, source, synced FROM outbox_queue").fetchall() == [(2, 2, "", 0)]
        db.execute("INSERT INTO outbox_sync_log (seq, namespace, synced_at) VALUES (7, 'orders', '2026')")
        assert db.execute("SELECT rowid FROM outbox_sync_log").fetchall() == [(7,)]


@pytest.mark.parametrize("declare", [declare, declare_retrying])
def test_declared_again_the_tables_are_the_same_objects(declare: Declare) -> None:
    metadata = sa.MetaData()
    first, second = declare(metadata, "outbox_queue", None), declare(metadata, "outbox_queue", None)
    assert all(first[role] is second[role] for role in first)
    assert len(second["outbox"].indexes) == 3


def test_an_older_queue_on_the_metadata_is_not_taken_for_a_newer_one() -> None:
    metadata = sa.MetaData()
    declare(metadata, "outbox_queue", None)
    with pytest.raises(LayoutError, match="lacks attempts, last_attempt_at"):
        declare_retrying(metadata, "outbox_queue", None)


def test_two_queues_share_a_file_under_any_naming_convention(path: Path) -> None:
    convention = {"ix": "ix_%(column_0_label)s", "uq": "uq_%(table_name)s_%(column_0_name)s", "pk": "pk_%(table_name)s"}
    make_file(path, declare, naming_convention=convention)
    make_file(path, declare, "shop_queue", naming_convention=convention)
    found = read_file(path)
    assert {name: [index for index, *_ in each[1] if "auto" not in index] for name, each in found.items()} == {
        "outbox_queue": ["idx_outbox_prev", "idx_outbox_prev_unique", "idx_outbox_worker"],
        "outbox_queue_state": ["outbox_queue_state_until"],
        "outbox_sync_log": ["idx_sync_log"],
        "shop_queue": ["idx_shop_prev", "idx_shop_prev_unique", "idx_shop_worker"],
        "shop_queue_state": ["shop_queue_state_until"],
        "shop_sync_log": ["idx_shop_sync_log"],
    }


def test_the_side_table_is_added_to_a_live_file(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.executescript(THEIRS)
    metadata = sa.MetaData()
    declare(metadata, "outbox_queue", None)
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as db:
        options = {"compare_type": True, "compare_server_default": True, "target_metadata": metadata}
        changes = produce_migrations(MigrationContext.configure(db, opts=options), metadata).upgrade_ops
    engine.dispose()
    assert changes is not None
    assert [(kind, item.name) for kind, item in changes.as_diffs()] == [
        ("add_table", "outbox_queue_state"),
        ("add_index", "outbox_queue_state_until"),
    ]
