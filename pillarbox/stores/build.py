"""Which statements a layout needs, by what its table can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from pillarbox.layouts.layout import Layout
from pillarbox.stores.keyed import KeyedTransitions
from pillarbox.stores.scan import ScanTransitions
from pillarbox.stores.side import SideTransitions
from pillarbox.stores.transitions import Transitions


def build_transitions(layout: Layout, tables: Mapping[str, sa.Table], **options: Any) -> Transitions:
    """The statements of a layout on a database."""
    if layout.order is not None:
        return KeyedTransitions(layout, tables, **options)
    return (ScanTransitions if layout.side is None else SideTransitions)(layout, tables, **options)
