"""The table of Debezium's outbox event router, delivered by a relay instead.

A row is an event; delivering it deletes the row, which the router ignores. Claims, retries and deaths stand in a side
table. Ids are the order, so they should be UUIDs of version 7, as ours are.
"""

from __future__ import annotations

from typing import Any, Final

from pillarbox.layouts import debezium_tables as tables
from pillarbox.layouts.clock import utc_now
from pillarbox.layouts.layout import Counts, Delete, Feature, Layout, Side
from pillarbox.layouts.shared import JSON_PAYLOAD, header_names
from pillarbox.layouts.sidelife import SIDE_LIFE

_FIELDS: Final = {
    "id": "id",
    "type": "type",
    "aggregate_type": "aggregatetype",
    "key": "aggregateid",
    "payload": "payload",
}


def _topic(event: Any, row: Any) -> str:
    # The router's own default.
    return f"outbox.event.{event.aggregate_type}"


def debezium_layout(*optional: str) -> Layout:
    """The router's table with some of its optional columns."""
    fields = dict(_FIELDS)
    if "headers" in optional:
        fields["headers"] = "headers"
    if "timestamp" in optional:
        fields["created_at"] = "timestamp"
    return Layout(
        name="debezium",
        table=tables.TABLE,
        declare=tables.declare_with(*optional),
        rows=("id",),
        fields=fields,
        message="debezium",
        carried=header_names({**fields, "aggregate_id": "aggregateid"}) if "headers" in optional else {},
        fallbacks={"topic": _topic, "aggregate_id": lambda event, row: event.key, **JSON_PAYLOAD},
        put=lambda due: {"timestamp": utc_now()} if "timestamp" in optional else {},
        created="timestamp" if "timestamp" in optional else None,
        ready=lambda c: c.id.is_not(None),
        order_by=("id",),
        side=Side(),
        delivered=Delete(),
        counts=Counts(new=lambda c: c.id.is_not(None), **SIDE_LIFE.counts),
        features=frozenset({Feature.HOLD, Feature.LEASE, Feature.DEAD}),
        **SIDE_LIFE.options("id"),
    )
