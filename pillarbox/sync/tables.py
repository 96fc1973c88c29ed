"""The tables of a queue file: those of sqloutbox 0.4, the dead log of 0.6, and one side table of ours.

A file never gets a schema version from us, so both releases of sqloutbox go on opening it. What we remember of a
namespace is one row beside its queue: strict order means that there is never more than one row that failed.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from pillarbox.layouts import sqloutbox_tables as layout

QUEUE: Final = layout.TABLE
LOG: Final = "outbox_sync_log"
DEAD: Final = "outbox_dead_log"
STATE: Final = "pillarbox_sync_state"
NEEDED: Final = frozenset({"seq", "created_at", "namespace", "tag", "payload", "prev_seq", "synced"})
"""The columns that a queue of any release has."""
ADD_SOURCE: Final = f"ALTER TABLE {QUEUE} ADD COLUMN source TEXT NOT NULL DEFAULT ''"
NEWEST_VERSION: Final = layout.SCHEMA_VERSION
"""The highest `user_version` that is known: release 0.6 writes it."""

_DIALECT: Final = sqlite.dialect()


def queue_ddl() -> tuple[str, ...]:
    """The statements that make the tables of a 0.4 file where they are missing."""
    tables = layout.declare(sa.MetaData())
    return tuple(text for name in ("outbox", "log") for text in _create(tables[name]))


def dead_ddl() -> str:
    """The statement that makes the dead log where it is missing."""
    return _create(layout.declare_retrying(sa.MetaData())["dead"])[0]


STATE_DDL: Final = f"""
CREATE TABLE IF NOT EXISTS {STATE} (
    namespace TEXT PRIMARY KEY,
    queue_id TEXT NOT NULL,
    settled INTEGER NOT NULL DEFAULT 0,
    seeded_for TEXT,
    ceiling INTEGER NOT NULL DEFAULT 0,
    origin INTEGER NOT NULL DEFAULT 0,
    origin_queue TEXT,
    origin_digest TEXT,
    sessions TEXT NOT NULL DEFAULT '',
    sent INTEGER NOT NULL DEFAULT 0,
    outage TEXT,
    head INTEGER,
    attempts INTEGER NOT NULL DEFAULT 0,
    tried_at TEXT,
    due_at TEXT,
    error TEXT,
    error_class TEXT,
    dead_at TEXT
)
"""


def _create(table: sa.Table) -> list[str]:
    parts: list[sa.schema.ExecutableDDLElement] = [CreateTable(table, if_not_exists=True)]
    parts += [CreateIndex(each, if_not_exists=True) for each in table.indexes]
    return [str(part.compile(dialect=_DIALECT)) for part in parts]
