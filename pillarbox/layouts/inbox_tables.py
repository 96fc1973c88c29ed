"""Pillarbox's own inbox, as Core tables and as a mixin.

inbox          the messages that were taken, one row each and consumer group
inbox_queue    messages that are stored first and handled later: an outbox table with all that belongs to one

The layout `inbox` is that of the queue, with the inbox beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.orm import Mapped

from pillarbox.layouts.clock import Timestamp, UuidText, text_type
from pillarbox.layouts.layout import Layout
from pillarbox.layouts.mixin import Mixin
from pillarbox.layouts.naming import find_table
from pillarbox.layouts.pillarbox import pillarbox_layout

INBOX: Final = "inbox"
QUEUE: Final = "_queue"
"""What the name of the queue has after that of the inbox."""


def inbox_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("consumer_group", text_type(255), primary_key=True),
        sa.Column("message_id", text_type(255), primary_key=True),
        sa.Column("source", text_type(255), nullable=False),
        sa.Column("type", text_type(255), nullable=False),
        sa.Column("taken_at", Timestamp(), nullable=False),
        # Whose take wrote the row, where a database does not say which rows of an INSERT are new.
        sa.Column("token", UuidText()),
    ]


def _inbox_indexes(table: str, c: Any) -> list[sa.Index]:
    return [sa.Index(f"{table}_taken", c["taken_at"])]


def declare_inbox(metadata: sa.MetaData, table: str, schema: str | None) -> sa.Table:
    """Declare the table of taken messages alone, or return the one that the metadata has."""
    found = find_table(metadata, table, schema, inbox_columns())
    if found is None:
        found = sa.Table(table, metadata, *inbox_columns(), schema=schema)
        _inbox_indexes(table, found.c)
    return found


def inbox_name(table: str) -> str:
    """The name of the inbox from its own or from that of its queue."""
    return table.removesuffix(QUEUE) or table


def inbox_layout() -> Layout:
    own = pillarbox_layout()

    def declare(metadata: sa.MetaData, table: str, schema: str | None) -> Mapping[str, sa.Table]:
        name = inbox_name(table)
        queue = own.declare(metadata, f"{name}{QUEUE}", schema)
        return {**queue, "inbox": declare_inbox(metadata, name, schema)}

    return replace(own, name="inbox", table=INBOX, declare=declare)


class InboxMixin(Mixin, columns=inbox_columns()):
    """The table of taken messages."""

    __tablename__ = INBOX

    if TYPE_CHECKING:
        consumer_group: Mapped[str]
        message_id: Mapped[str]
        source: Mapped[str]
        type: Mapped[str]
        taken_at: Mapped[datetime]
        token: Mapped[UUID | None]

    @classmethod
    def _layout_args(cls, table: str) -> tuple[list[Any], dict[str, Any]]:
        return _inbox_indexes(table, {column.name: column.name for column in inbox_columns()}), {}
