"""Layouts by name: how each table spells the life cycle of an event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches

import sqlalchemy as sa

from pillarbox.errors import LayoutError
from pillarbox.layouts.actions import actions_layout, actions_notifications_layout
from pillarbox.layouts.debezium import debezium_layout
from pillarbox.layouts.ekbatan import ekbatan_layout, ekbatan_notifications_layout
from pillarbox.layouts.faststream import faststream_dlq_layout, faststream_layout
from pillarbox.layouts.inbox_tables import inbox_layout
from pillarbox.layouts.layout import Delete, Feature, Layout, Lease, Move, Order, Update, Variant
from pillarbox.layouts.omnibox import (
    omnibox_inbox_layout,
    omnibox_inbox_partitioned_layout,
    omnibox_layout,
    omnibox_partitioned_layout,
)
from pillarbox.layouts.openoutbox import openoutbox_layout
from pillarbox.layouts.pillarbox import pillarbox_layout, pillarbox_partitioned_layout
from pillarbox.layouts.sqloutbox import sqloutbox_layout
from pillarbox.urls import mask_url

__all__ = [
    "Delete",
    "Feature",
    "Layout",
    "Lease",
    "Move",
    "Order",
    "Update",
    "Variant",
    "check_database",
    "declare_layout",
    "get_layout",
    "layout_names",
]

_LAYOUTS: dict[str, Callable[[], Layout]] = {
    "actions": actions_layout,
    "actions-notifications": actions_notifications_layout,
    "debezium": debezium_layout,
    "ekbatan": ekbatan_layout,
    "ekbatan-notifications": ekbatan_notifications_layout,
    "faststream": faststream_layout,
    "faststream-dlq": faststream_dlq_layout,
    "inbox": inbox_layout,
    "omnibox": omnibox_layout,
    "omnibox-inbox": omnibox_inbox_layout,
    "omnibox-inbox-partitioned": omnibox_inbox_partitioned_layout,
    "omnibox-partitioned": omnibox_partitioned_layout,
    "openoutbox": openoutbox_layout,
    "pillarbox": pillarbox_layout,
    "pillarbox-partitioned": pillarbox_partitioned_layout,
    "sqloutbox": sqloutbox_layout,
}


def layout_names() -> list[str]:
    return sorted(_LAYOUTS)


def get_layout(layout: str | Layout) -> Layout:
    """A layout by its name, or the object itself."""
    if isinstance(layout, Layout):
        return layout
    make = _LAYOUTS.get(layout)
    if make is None:
        near = get_close_matches(str(layout), _LAYOUTS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise LayoutError(f"Layout: expected one of {', '.join(layout_names())}; got {mask_url(layout)!r}.{hint}")
    return make()


def check_database(layout: Layout, database: str) -> None:
    """Refuse a layout whose table does not exist on a database."""
    alike = {"mysql", "mariadb"} if database in ("mysql", "mariadb") else {database}
    if alike.isdisjoint(layout.databases):
        raise LayoutError(
            f"Layout {layout.name!r}: its table exists on {', '.join(sorted(layout.databases))}; got {database!r}"
        )


def declare_layout(
    layout: Layout, metadata: sa.MetaData, *, table: str | None = None, schema: str | None = None
) -> Mapping[str, sa.Table]:
    """Declare a layout's tables on a `MetaData`, or return those that it already has."""
    name = layout.table if table is None else table
    if schema is None and "." in name:
        schema, name = name.split(".", 1)
    if not name or len(name) > 40:
        raise LayoutError(f"Table name: expected 1 to 40 characters, got {name!r}")
    return layout.declare(metadata, name, schema or layout.schema)
