"""A side table of ours for tables of other systems that cannot hold a row's life cycle.

A row without an entry has never been tried. `…_state` is keyed by the row's own key and has no foreign key to it: the
other system deletes its rows as it likes.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.orm import Mapped
from sqlalchemy.types import TypeEngine

from pillarbox.layouts.clock import Timestamp, UuidText, long_text_type
from pillarbox.layouts.mixin import Mixin
from pillarbox.layouts.naming import ALL_DIALECTS, check_identifier, find_table, index_name

LEASED: Final = 1
WAITING: Final = 2
DEAD: Final = 3


def side_columns(id_type: TypeEngine[Any], *, key: str = "id") -> list[sa.Column[Any]]:
    """The side table's columns; the key has the name and the type that it has in the row's own table."""
    return [
        sa.Column(key, id_type, primary_key=True, autoincrement=False),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("state", sa.SmallInteger(), nullable=False),
        sa.Column("token", UuidText()),
        sa.Column("until_at", Timestamp()),
        sa.Column("error", long_text_type()),
        sa.Column("died_at", Timestamp()),
    ]


def side_indexes(side: str, c: Any, *, dialects: Iterable[str] = ALL_DIALECTS) -> list[sa.Index]:
    """The indexes of a side table of this name."""
    return [sa.Index(index_name(f"{side}_until", dialects), c["state"], c["until_at"])]


def declare_side(
    outbox: sa.Table, id_type: TypeEngine[Any], *, key: str = "id", dialects: Iterable[str] = ALL_DIALECTS
) -> sa.Table:
    """Declare the side table of an outbox beside it, or return the one that the metadata already has."""
    name = check_identifier(f"{outbox.name}_state", dialects)
    found = find_table(outbox.metadata, name, outbox.schema, side_columns(id_type, key=key))
    if found is not None:
        return found
    side = sa.Table(name, outbox.metadata, *side_columns(id_type, key=key), schema=outbox.schema)
    side_indexes(name, side.c, dialects=dialects)
    return side


class SideMixin(Mixin):
    """The side table, named after the outbox: `…_state`."""

    if TYPE_CHECKING:
        id: Mapped[UUID]
        attempts: Mapped[int]
        state: Mapped[int]
        token: Mapped[UUID | None]
        until_at: Mapped[datetime | None]
        error: Mapped[str | None]
        died_at: Mapped[datetime | None]

    @classmethod
    def _layout_args(cls, table: str) -> tuple[list[Any], dict[str, Any]]:
        return [*side_indexes(table, {"state": "state", "until_at": "until_at"})], {}
