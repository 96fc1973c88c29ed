"""The statements of an action log: rows of events, the sentinel, and the key that must not be used twice. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite

from pillarbox.actions.action import Action
from pillarbox.event import uuid7
from pillarbox.layouts.action_side import UNIQUE_KEY
from pillarbox.wakeup import channel_name

MAX_ROWS: Final = 1000
"""More than these would pass the number of parameters that a driver takes."""

_STEP: Final = timedelta(microseconds=1)


def event_rows(action: Action[Any], completed_at: datetime, told: Mapping[str, str]) -> list[dict[str, Any]]:
    """One row for each event in order, or the sentinel when there is none.

    Each event is dated a microsecond after the one before, so that a reader by date has them in order. `told` names the
    columns whose values a payload also has, unless it has others of these names.
    """
    shared = {
        "namespace": action.namespace,
        "action_id": action.id,
        "action_name": action.name,
        "action_params": dict(action.params),
        "started_date": action.started_at,
        "completion_date": completed_at,
        "delivered": False,
    }
    rows = [
        {
            **shared,
            "id": event.id,
            "model_id": event.model_id,
            "model_type": event.model_type,
            "event_type": event.type,
            "payload": event.payload,
            "event_date": completed_at + number * _STEP,
        }
        for number, event in enumerate(action.events)
    ]
    for row, event in zip(rows, action.events, strict=True):
        row["payload"] = {**{name: row[column] for name, column in told.items()}, **event.payload}
    nothing = dict.fromkeys(("model_id", "model_type", "event_type", "payload"))
    return rows or [{**shared, **nothing, "id": uuid7(), "event_date": completed_at}]


def insert_rows(table: sa.Table, rows: Sequence[dict[str, Any]], dialect: str, *, notify: bool = True) -> Iterator[Any]:
    """One statement, unless the rows are too many for one; on PostgreSQL it also wakes who waits for events."""
    # Equal notifications of a transaction are one. The function returns nothing, which no driver can read.
    told = sa.cast(sa.func.pg_notify(channel_name(table), ""), sa.Text)
    is_told = notify and dialect == "postgresql" and rows[0]["event_type"] is not None
    for start in range(0, len(rows), MAX_ROWS):
        insert = sa.insert(table).values(list(rows[start : start + MAX_ROWS]))
        yield insert.returning(told) if is_told else insert


def insert_action(table: sa.Table, action: Action[Any], completed_at: datetime) -> sa.Insert:
    return sa.insert(table).values(_action_row(action, completed_at))


def reserve_key(table: sa.Table, action: Action[Any], dialect: str) -> Any:
    """Insert the action's key unless it is there; waits for whoever is inserting the same one."""
    row = _action_row(action, action.started_at)
    if dialect in ("mysql", "mariadb"):
        # Not INSERT IGNORE, which would hide every other error too.
        return mysql.insert(table).values(row).on_duplicate_key_update(action_id=table.c.action_id)
    insert = postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)
    return insert.values(row).on_conflict_do_nothing(index_elements=list(UNIQUE_KEY))


def find_key(table: sa.Table, action: Action[Any], dialect: str) -> sa.Select[Any]:
    """The id of the action that has the key."""
    c = table.c
    found = sa.select(c.action_id).where(
        c.namespace == action.namespace,
        c.action_name == action.name,
        c.idempotency_key == action.idempotency_key,
    )
    # There a plain read may see the time before the other one's commit.
    return found.with_for_update(read=True) if dialect in ("mysql", "mariadb") else found


def complete_action(table: sa.Table, action: Action[Any], completed_at: datetime) -> sa.Update:
    return sa.update(table).where(table.c.action_id == action.id).values(completion_date=completed_at)


def _action_row(action: Action[Any], completed_at: datetime) -> dict[str, Any]:
    return {
        "action_id": action.id,
        "namespace": action.namespace,
        "action_name": action.name,
        "actor": action.actor,
        "idempotency_key": action.idempotency_key,
        "completion_date": completed_at,
    }
