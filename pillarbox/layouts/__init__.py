"""Layouts by name: how each table spells the life cycle of an event."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches

import sqlalchemy as sa

from pillarbox.errors import LayoutError
from pillarbox.layouts.layout import Delete, Feature, Layout, Lease, Move, Order, Update
from pillarbox.layouts.pillarbox import pillarbox_layout

__all__ = [
    "Delete",
    "Feature",
    "Layout",
    "Lease",
    "Move",
    "Order",
    "Update",
    "declare_layout",
    "get_layout",
    "layout_names",
]

_LAYOUTS: dict[str, Callable[[], Layout]] = {"pillarbox": pillarbox_layout}


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
        raise LayoutError(f"Layout: expected one of {', '.join(layout_names())}; got {layout!r}.{hint}")
    return make()


def declare_layout(
    layout: Layout, metadata: sa.MetaData, *, table: str | None = None, schema: str | None = None
) -> Mapping[str, sa.Table]:
    """Declare a layout's tables on a `MetaData`, or return those that it already has."""
    name = table or layout.table
    if schema is None and "." in name:
        schema, name = name.split(".", 1)
    if not name or len(name) > 40:
        raise LayoutError(f"Table name: expected 1 to 40 characters, got {name!r}")
    return layout.declare(metadata, name, schema)
