"""sqloutbox's queue file (SQLite, the tables of release 0.4): statements to be replayed elsewhere, in strict order.

A delivered row goes into the log of what was synced and out of the queue, in one transaction. A row that failed holds
up the later ones of its namespace in the same batch, and from then on every later one of the file. The queue's chain is
written by whoever pushes, so events are not put here.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID, uuid5

import sqlalchemy as sa

from pillarbox.layouts import sqloutbox_tables as tables
from pillarbox.layouts.layout import Counts, Feature, Layout, Move, Side
from pillarbox.layouts.shared import JSON_PAYLOAD, from_topic
from pillarbox.layouts.sidelife import SIDE_LIFE

_IDS: Final = UUID("0e9f7e0e-9a5f-5a38-8d5c-3a4d0a3c7b21")
_FIELDS: Final = {
    "topic": "tag",
    "key": "namespace",
    "payload": "payload",
    "source": "source",
    "created_at": "created_at",
}


def _id_of_row(event: Any, row: Any) -> UUID:
    return uuid5(_IDS, f"{event.key}/{row}")


def _is_waiting(c: Any) -> Any:
    return c.synced == sa.literal_column("0")


def sqloutbox_layout() -> Layout:
    return Layout(
        name="sqloutbox",
        table=tables.TABLE,
        databases=frozenset({"sqlite"}),
        declare=tables.declare,
        rows=("seq",),
        fields=_FIELDS,
        fallbacks={"id": _id_of_row, "type": from_topic, **JSON_PAYLOAD},
        put=None,
        created="created_at",
        ready=_is_waiting,
        order_by=("seq",),
        side=Side(is_serial=True),
        delivered=Move("log", lambda c, given: {"synced_at": sa.func.datetime("now")}),
        counts=Counts(new=_is_waiting, **SIDE_LIFE.counts),
        features=frozenset({Feature.LEASE, Feature.ORDER, Feature.DEAD}),
        **SIDE_LIFE.options("seq"),
    )
