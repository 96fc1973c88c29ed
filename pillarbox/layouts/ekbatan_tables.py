"""The tables of Ekbatan on PostgreSQL, MySQL and MariaDB, in a schema of their own: a database on the latter two.

    eventlog.events                what happened, one row an event, and one with no event for an action that emits none
    eventlog.event_notifications   one row an event and handler, where events are handled inside the application

`delivered` has no default: whoever inserts must say. All times are UTC in columns without a zone.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.orm import Mapped

from pillarbox.layouts.clock import json_type
from pillarbox.layouts.foreign import NativeUuid, UtcTimestamp
from pillarbox.layouts.layout import Variant
from pillarbox.layouts.mixin import Mixin
from pillarbox.layouts.naming import check_identifier, find_table, index_name
from pillarbox.layouts.side import SideMixin, declare_side, side_columns
from pillarbox.layouts.variants import only_on

SCHEMA: Final = "eventlog"
TABLE: Final = "events"
_DIALECTS: Final = ("postgresql", "mysql", "mariadb")


def _action_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("namespace", sa.String(255), nullable=False),
        sa.Column("action_id", NativeUuid(), nullable=False),
        sa.Column("action_name", sa.String(255), nullable=False),
        sa.Column("action_params", json_type(), nullable=False),
        sa.Column("started_date", UtcTimestamp(), nullable=False),
        sa.Column("completion_date", UtcTimestamp(), nullable=False),
        sa.Column("model_id", sa.String(255)),
        sa.Column("model_type", sa.String(255)),
    ]


def event_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("id", NativeUuid(), primary_key=True),
        *_action_columns(),
        sa.Column("event_type", sa.String(255)),
        sa.Column("payload", json_type()),
        sa.Column("event_date", UtcTimestamp(), nullable=False),
        sa.Column("delivered", sa.Boolean(), nullable=False),
    ]


def notification_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("id", NativeUuid(), primary_key=True),
        sa.Column("event_id", NativeUuid(), nullable=False),
        sa.Column("handler_name", sa.String(255), nullable=False),
        *_action_columns(),
        sa.Column("event_type", sa.String(255), nullable=False),
        sa.Column("payload", json_type()),
        sa.Column("event_date", UtcTimestamp(), nullable=False),
        sa.Column("state", sa.String(24), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("next_retry_at", UtcTimestamp(), nullable=False),
        sa.Column("created_date", UtcTimestamp(), nullable=False),
        sa.Column("updated_date", UtcTimestamp(), nullable=False),
    ]


def _action_index(table: str) -> sa.Index:
    return sa.Index(index_name(f"idx_{table}_action_id", _DIALECTS), "action_id")


def _variants(name: str, *columns: str, flag: str | None, where: str) -> list[sa.Index]:
    given = index_name(name, _DIALECTS)
    return [
        only_on(sa.Index(given, *columns, postgresql_where=sa.text(where)), "postgresql"),
        only_on(sa.Index(given, *([flag] if flag else ()), *columns), "mysql", "mariadb"),
    ]


def _undelivered_indexes(table: str) -> list[sa.Index]:
    where = "delivered = FALSE"
    return _variants(f"{table}_undelivered", "event_type", "event_date", flag="delivered", where=where)


def _notification_args(table: str, is_migrated: bool = False) -> list[Any]:
    where = "state IN ('PENDING', 'FAILED')"
    indexes = _variants(f"{table}_due", "next_retry_at", flag=None if is_migrated else "state", where=where)
    return [sa.UniqueConstraint("event_id", "handler_name"), *indexes]


def notifications_name(table: str) -> str:
    """The notification table of an event table: `event_notifications` of `events`, `log_notifications` of `log`."""
    stem = table.removesuffix("s") if table.endswith("events") else table
    return f"{stem}_notifications"


def events_name(table: str) -> str:
    """The event table of a notification table; any other name is that of an event table already."""
    stem = table.removesuffix("_notifications")
    return f"{stem}s" if stem != table and stem.endswith("event") else stem


def _schema_of(metadata: sa.MetaData, schema: str | None) -> str | None:
    return (metadata.schema or SCHEMA) if schema is None else (schema or None)


def _declare_events(metadata: sa.MetaData, table: str, schema: str | None) -> sa.Table:
    found = find_table(metadata, table, schema, event_columns())
    if found is not None:
        return found
    return sa.Table(table, metadata, *event_columns(), _action_index(table), schema=schema)


def declare_base(metadata: sa.MetaData, table: str = TABLE, schema: str | None = None) -> Mapping[str, sa.Table]:
    """Declare the event table, which others read, and our side table `…_state` for delivering from it.

    Where no schema is named it is the metadata's, or `eventlog`; an empty name stands for the connection's own.
    """
    check_identifier(f"{table}_state_until", _DIALECTS)
    outbox = _declare_events(metadata, table, _schema_of(metadata, schema))
    return {"outbox": outbox, "state": declare_side(outbox, NativeUuid(), dialects=_DIALECTS)}


def declare_with_handlers(
    metadata: sa.MetaData, table: str = TABLE, schema: str | None = None, *, is_migrated: bool = False
) -> Mapping[str, sa.Table]:
    """Declare the event table with the index for fan-out, and the table of notifications.

    On a `MetaData` that has the event table already, the index and the notifications are added to it. `is_migrated`:
    as the migrations of release 1.0.1 make it, whose index of due rows has no state on MySQL and MariaDB.
    """
    schema = _schema_of(metadata, schema)
    name = notifications_name(table)
    undelivered, own = _undelivered_indexes(table), _notification_args(name, is_migrated)
    outbox = _declare_events(metadata, table, schema)
    if undelivered[0].name not in {index.name for index in outbox.indexes}:
        for index in undelivered:
            outbox.append_constraint(index)
    notifications = find_table(metadata, name, schema, notification_columns())
    if notifications is None:
        notifications = sa.Table(name, metadata, *notification_columns(), *own, schema=schema)
    return {"outbox": outbox, "notifications": notifications}


def declare_notifications(
    metadata: sa.MetaData, table: str = TABLE, schema: str | None = None, *, is_migrated: bool = False
) -> Mapping[str, sa.Table]:
    """The same tables as relays of notifications see them: `outbox` is the table of notifications, beside `events`."""
    found = declare_with_handlers(metadata, events_name(table), schema, is_migrated=is_migrated)
    return {"outbox": found["notifications"], "events": found["outbox"]}


NOTIFICATION_VARIANTS: Final = (
    Variant("page", "the DDL of Ekbatan's page", declare_notifications),
    Variant(
        "1.0.1",
        "the migrations of Ekbatan 1.0.1; on PostgreSQL the same",
        partial(declare_notifications, is_migrated=True),
        better="page",
    ),
)


class _EkbatanMixin(Mixin):
    if TYPE_CHECKING:
        id: Mapped[UUID]
        namespace: Mapped[str]
        action_id: Mapped[UUID]
        action_name: Mapped[str]
        action_params: Mapped[dict[str, Any]]
        started_date: Mapped[datetime]
        completion_date: Mapped[datetime]
        model_id: Mapped[str | None]
        model_type: Mapped[str | None]
        payload: Mapped[dict[str, Any] | None]
        event_date: Mapped[datetime]

    @classmethod
    def _schema_args(cls) -> dict[str, Any]:
        metadata: sa.MetaData = cls.metadata  # type: ignore[attr-defined]
        return {"schema": metadata.schema or SCHEMA}


class EkbatanEventMixin(_EkbatanMixin, columns=event_columns()):
    """The event table, in the schema `eventlog` unless the class, its base or its metadata names another.

    `is_handled = False` in a subclass leaves out the index for fan-out, which only notifications need.
    """

    is_handled = True

    if TYPE_CHECKING:
        event_type: Mapped[str | None]
        delivered: Mapped[bool]

    @classmethod
    def _layout_args(cls, table: str) -> tuple[list[Any], dict[str, Any]]:
        indexes = [_action_index(table), *(_undelivered_indexes(table) if cls.is_handled else ())]
        return indexes, cls._schema_args()


class EkbatanNotificationMixin(_EkbatanMixin, columns=notification_columns()):
    """The table of notifications, one for each event and handler, beside the event table."""

    if TYPE_CHECKING:
        event_id: Mapped[UUID]
        handler_name: Mapped[str]
        event_type: Mapped[str]
        state: Mapped[str]
        attempts: Mapped[int]
        next_retry_at: Mapped[datetime]
        created_date: Mapped[datetime]
        updated_date: Mapped[datetime]

    @classmethod
    def _layout_args(cls, table: str) -> tuple[list[Any], dict[str, Any]]:
        return _notification_args(table), cls._schema_args()


class EkbatanStateMixin(SideMixin, columns=side_columns(NativeUuid())):
    """The side table, named after the event table: `…_state`."""

    @classmethod
    def _layout_args(cls, table: str) -> tuple[list[Any], dict[str, Any]]:
        indexes, _ = super()._layout_args(table)
        metadata: sa.MetaData = cls.metadata  # type: ignore[attr-defined]
        return indexes, {"schema": metadata.schema or SCHEMA}
