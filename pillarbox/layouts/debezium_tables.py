"""The table that Debezium's outbox event router reads by default, and our side table for what it cannot hold.

The router sees inserts only and takes an update for a mistake: a row is written once and deleted, never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.orm import Mapped

from pillarbox.errors import LayoutError
from pillarbox.layouts.clock import UuidText, json_type, long_text_type, text_type
from pillarbox.layouts.foreign import UtcTimestamp
from pillarbox.layouts.mixin import Mixin
from pillarbox.layouts.naming import ALL_DIALECTS, check_identifier, find_table
from pillarbox.layouts.side import SideMixin, declare_side, side_columns

TABLE: Final = "outbox"

_OPTIONAL: Final[Mapping[str, Callable[[], sa.types.TypeEngine[Any]]]] = MappingProxyType(
    {
        # Without a zone: the router refuses a plain number, as it lacks a unit, and a time with a zone, which is text.
        "timestamp": UtcTimestamp,
        "version": sa.Integer,
        "headers": json_type,
        "tracingspancontext": long_text_type,
    }
)
OPTIONAL: Final = tuple(_OPTIONAL)
"""Columns that the router reads, or places into headers, when it is configured to."""


def outbox_columns(*optional: str) -> list[sa.Column[Any]]:
    """The default five columns, then the chosen ones of `OPTIONAL`."""
    for name in optional:
        if name not in _OPTIONAL:
            raise LayoutError(f"Debezium column: expected one of {', '.join(OPTIONAL)}; got {name!r}")
    return [
        sa.Column("id", UuidText(), primary_key=True),
        sa.Column("aggregatetype", text_type(255), nullable=False),
        sa.Column("aggregateid", text_type(255), nullable=False),
        sa.Column("type", text_type(255), nullable=False),
        sa.Column("payload", json_type()),
        *(sa.Column(name, _OPTIONAL[name]()) for name in optional),
    ]


def declare_with(*optional: str) -> Callable[[sa.MetaData, str, str | None], Mapping[str, sa.Table]]:
    """A declaration of the tables with some of the `OPTIONAL` columns."""
    outbox_columns(*optional)

    def declare(metadata: sa.MetaData, table: str = TABLE, schema: str | None = None) -> Mapping[str, sa.Table]:
        check_identifier(f"{table}_state_until", ALL_DIALECTS)
        outbox = find_table(metadata, table, schema, outbox_columns(*optional))
        if outbox is None:
            outbox = sa.Table(table, metadata, *outbox_columns(*optional), schema=schema)
        return {"outbox": outbox, "state": declare_side(outbox, UuidText())}

    return declare


def declare(metadata: sa.MetaData, table: str = TABLE, schema: str | None = None) -> Mapping[str, sa.Table]:
    """Declare the router's default table and its side table `…_state`."""
    return declare_with()(metadata, table, schema)


class DebeziumOutboxMixin(Mixin, columns=outbox_columns()):
    """The router's table with its default columns; a subclass adds others."""

    if TYPE_CHECKING:
        id: Mapped[UUID]
        aggregatetype: Mapped[str]
        aggregateid: Mapped[str]
        type: Mapped[str]
        payload: Mapped[Any]


class DebeziumStateMixin(SideMixin, columns=side_columns(UuidText())):
    """The side table, named after the outbox: `…_state`."""
