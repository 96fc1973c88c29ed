"""The tables of an action log of our own: the columns of Ekbatan's, on every database and in no schema of their own.

    action_events                what happened, one row an event, and one with no event for an action that emits none
    action_event_notifications   one row an event and handler, where events are handled inside the application
    action_events_actions        who did an action, and under which key, where the application says so

Text compares byte by byte: two handlers whose names differ in a letter's case are two. Rows without an event are in no
index but that of the actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.orm import Mapped

from pillarbox.layouts import ekbatan_tables as ekbatan
from pillarbox.layouts.action_side import declare_actions
from pillarbox.layouts.clock import text_type
from pillarbox.layouts.foreign import NativeUuid
from pillarbox.layouts.mixin import Mixin
from pillarbox.layouts.naming import ALL_DIALECTS, check_identifier, find_table, index_name
from pillarbox.layouts.side import SideMixin, declare_side, side_columns
from pillarbox.layouts.variants import only_on

TABLE: Final = "action_events"


def event_columns() -> list[sa.Column[Any]]:
    return _exact(ekbatan.event_columns())


def notification_columns() -> list[sa.Column[Any]]:
    return _exact(ekbatan.notification_columns())


def _exact(columns: list[sa.Column[Any]]) -> list[sa.Column[Any]]:
    for column in columns:
        if isinstance(column.type, sa.String) and column.type.length is not None:
            column.type = text_type(column.type.length)
    return columns


def _variants(name: str, columns: tuple[str, ...], *, where: str, whole: tuple[str, ...]) -> list[sa.Index]:
    given = index_name(name, ALL_DIALECTS)
    # SQLite proves that an index has the rows of a query word by word, and SQLAlchemy says 0 for FALSE there.
    conditions: dict[str, Any] = {
        "postgresql_where": sa.text(where),
        "sqlite_where": sa.text(where.replace("FALSE", "0")),
    }
    return [
        only_on(sa.Index(given, *columns, **conditions), "postgresql", "sqlite"),
        only_on(sa.Index(given, *whole), "mysql", "mariadb"),
    ]


def _event_indexes(table: str) -> list[sa.Index]:
    columns, where = ("event_type", "event_date"), "delivered = FALSE AND event_type IS NOT NULL"
    return [
        sa.Index(index_name(f"{table}_action", ALL_DIALECTS), "action_id"),
        *_variants(f"{table}_undelivered", columns, where=where, whole=("delivered", *columns)),
    ]


def _notification_args(table: str) -> list[Any]:
    columns, where = ("handler_name", "next_retry_at"), "state IN ('PENDING', 'FAILED')"
    whole = ("handler_name", "state", "next_retry_at")
    return [
        sa.UniqueConstraint("event_id", "handler_name"),
        *_variants(f"{table}_due", columns, where=where, whole=whole),
    ]


def _declare_events(metadata: sa.MetaData, table: str, schema: str | None) -> sa.Table:
    found = find_table(metadata, table, schema, event_columns())
    if found is not None:
        return found
    return sa.Table(table, metadata, *event_columns(), *_event_indexes(table), schema=schema)


def declare(metadata: sa.MetaData, table: str = TABLE, schema: str | None = None) -> Mapping[str, sa.Table]:
    """Declare the event table, which others may read, and its side tables.

    `…_state` is for delivering from it, `…_actions` for the actors and idempotency keys of actions.
    """
    check_identifier(f"{table}_state_until", ALL_DIALECTS)
    outbox = _declare_events(metadata, table, schema)
    return {"outbox": outbox, "state": declare_side(outbox, NativeUuid()), "actions": declare_actions(outbox)}


def declare_with_handlers(
    metadata: sa.MetaData, table: str = TABLE, schema: str | None = None
) -> Mapping[str, sa.Table]:
    """Declare the table of notifications, that of the events they tell of and its `…_actions`.

    Either of the first two may be named.
    """
    events = ekbatan.events_name(table)
    name = ekbatan.notifications_name(events)
    own = _notification_args(name)
    log = _declare_events(metadata, events, schema)
    notifications = find_table(metadata, name, schema, notification_columns())
    if notifications is None:
        notifications = sa.Table(name, metadata, *notification_columns(), *own, schema=schema)
    return {"outbox": notifications, "events": log, "actions": declare_actions(log)}


class _ActionMixin(Mixin):
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


class ActionEventMixin(_ActionMixin, columns=event_columns()):
    """The event table of the action log."""

    __tablename__ = TABLE

    if TYPE_CHECKING:
        event_type: Mapped[str | None]
        delivered: Mapped[bool]

    @classmethod
    def _layout_args(cls, table: str) -> tuple[list[Any], dict[str, Any]]:
        return [*_event_indexes(table)], {}


class ActionNotificationMixin(_ActionMixin, columns=notification_columns()):
    """The table of notifications, one for each event and handler, beside the event table."""

    __tablename__ = ekbatan.notifications_name(TABLE)

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
        return _notification_args(table), {}


class ActionStateMixin(SideMixin, columns=side_columns(NativeUuid())):
    """The side table, named after the event table: `…_state`."""

    __tablename__ = f"{TABLE}_state"
