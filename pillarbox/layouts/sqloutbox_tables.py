"""The tables of a sqloutbox file, which are SQLite's: as release 0.4 makes them, and as 0.6 does.

A 0.4 file has nowhere to keep attempts and errors, so it gets our side table. The names of a file are fixed; another
name serves those who keep several queues in one file, with the other names following it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import sqlalchemy as sa

from pillarbox.layouts.naming import find_table, index_name
from pillarbox.layouts.side import declare_side

TABLE: Final = "outbox_queue"
SCHEMA_VERSION: Final = 5
"""What release 0.6 expects in `PRAGMA user_version`."""

_DIALECTS: Final = ("sqlite",)


def queue_columns() -> list[sa.Column[Any]]:
    """The queue of a 0.4 file."""
    return [
        # The release leaves NOT NULL out here, and SQLite tells the difference.
        sa.Column("seq", sa.Integer(), primary_key=True, nullable=True),
        sa.Column("created_at", sa.Text(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False, server_default=sa.text("''")),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("prev_seq", sa.Integer()),
        sa.Column("synced", sa.Integer(), nullable=False, server_default=sa.text("0")),
    ]


def retry_columns() -> list[sa.Column[Any]]:
    """What the queue of a 0.6 file has in addition."""
    return [
        sa.Column("attempts", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("last_attempt_at", sa.Text()),
        sa.Column("last_error", sa.Text()),
        sa.Column("last_error_class", sa.Text()),
    ]


def log_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("seq", sa.Integer(), primary_key=True, nullable=True, autoincrement=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("synced_at", sa.Text(), nullable=False),
    ]


def dead_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("seq", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("prev_seq", sa.Integer()),
        sa.Column("source", sa.Text()),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("last_error", sa.Text()),
        sa.Column("last_error_class", sa.Text()),
        sa.Column("dead_lettered_at", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
    ]


def mark_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("namespace", sa.Text(), primary_key=True),
        sa.Column("hwm", sa.Integer(), nullable=False),
    ]


def declare(metadata: sa.MetaData, table: str = TABLE, schema: str | None = None) -> Mapping[str, sa.Table]:
    """Declare the tables of a 0.4 file: `outbox`, the `log` of what was delivered, and our side table `state`."""
    tables = _declare_queue(metadata, table, schema, queue_columns())
    return {**tables, "state": declare_side(tables["outbox"], sa.Integer(), key="seq", dialects=_DIALECTS)}


def declare_retrying(metadata: sa.MetaData, table: str = TABLE, schema: str | None = None) -> Mapping[str, sa.Table]:
    """Declare the tables of a 0.6 file: `outbox`, `log`, `dead` and the `marks` of the highest numbers given."""
    stem = table.removesuffix("_queue")
    tables = _declare_queue(metadata, table, schema, [*queue_columns(), *retry_columns()])
    dead = find_table(metadata, f"{stem}_dead_log", schema, dead_columns())
    if dead is None:
        key = sa.PrimaryKeyConstraint("namespace", "seq")
        dead = sa.Table(f"{stem}_dead_log", metadata, *dead_columns(), key, schema=schema)
    marks = find_table(metadata, f"{stem}_hwm", schema, mark_columns())
    if marks is None:
        marks = sa.Table(f"{stem}_hwm", metadata, *mark_columns(), schema=schema)
    return {**tables, "dead": dead, "marks": marks}


def _declare_queue(
    metadata: sa.MetaData, table: str, schema: str | None, columns: list[sa.Column[Any]]
) -> dict[str, sa.Table]:
    stem = table.removesuffix("_queue")
    outbox = find_table(metadata, table, schema, columns)
    if outbox is None:
        # The release makes the predecessor unique three times over: by the column and by two indexes.
        unique = sa.UniqueConstraint("prev_seq")
        outbox = sa.Table(table, metadata, *columns, unique, schema=schema, sqlite_autoincrement=True)
        c = outbox.c
        sa.Index(index_name(f"idx_{stem}_worker", _DIALECTS), c.namespace, c.synced, c.seq)
        sa.Index(index_name(f"idx_{stem}_prev", _DIALECTS), c.prev_seq, unique=True)
        sa.Index(index_name(f"idx_{stem}_prev_unique", _DIALECTS), c.prev_seq, unique=True)
    log = find_table(metadata, f"{stem}_sync_log", schema, log_columns())
    if log is None:
        log = sa.Table(f"{stem}_sync_log", metadata, *log_columns(), schema=schema)
        name = "idx_sync_log" if table == TABLE else f"idx_{stem}_sync_log"
        sa.Index(index_name(name, _DIALECTS), log.c.namespace, log.c.seq)
    return {"outbox": outbox, "log": log}
