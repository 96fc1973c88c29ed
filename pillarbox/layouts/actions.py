"""An action log of our own, in the form of Ekbatan's: the same columns and the same life, on every database."""

from __future__ import annotations

from pillarbox.layouts import actions_tables as tables
from pillarbox.layouts.ekbatan import make_log_layout, make_notifications_layout
from pillarbox.layouts.layout import Layout


def actions_layout() -> Layout:
    return make_log_layout(name="actions", table=tables.TABLE, declare=tables.declare)


def actions_notifications_layout() -> Layout:
    return make_notifications_layout(
        name="actions-notifications", table=tables.TABLE, declare=tables.declare_with_handlers
    )
