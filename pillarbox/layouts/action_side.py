"""Our side table of an action log: who did an action, and under which key it must not be done again.

The log's own table has no columns for these. `…_actions` has a row only for actions that were given an actor or an
idempotency key, written in the action's transaction.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from pillarbox.layouts.clock import text_type
from pillarbox.layouts.foreign import NativeUuid, UtcTimestamp
from pillarbox.layouts.naming import ALL_DIALECTS, check_identifier, find_table, index_name

UNIQUE_KEY = ("namespace", "action_name", "idempotency_key")


def action_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("action_id", NativeUuid(), primary_key=True),
        sa.Column("namespace", text_type(255), nullable=False),
        sa.Column("action_name", text_type(255), nullable=False),
        sa.Column("actor", text_type(255)),
        sa.Column("idempotency_key", text_type(255)),
        sa.Column("completion_date", UtcTimestamp(), nullable=False),
    ]


def actions_name(events: str) -> str:
    """The side table of an event table: `events_actions` of `events`."""
    return check_identifier(f"{events}_actions", ALL_DIALECTS)


def declare_actions(events: sa.Table) -> sa.Table:
    """Declare the side table beside an event table, or return the one that the metadata already has."""
    name = actions_name(events.name)
    found = find_table(events.metadata, name, events.schema, action_columns())
    if found is not None:
        return found
    unique = sa.Index(index_name(f"{name}_key", ALL_DIALECTS), *UNIQUE_KEY, unique=True)
    return sa.Table(name, events.metadata, *action_columns(), unique, schema=events.schema)
