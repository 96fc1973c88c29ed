"""The event log as the source of a fan-out.

It takes undelivered events of the handled types and of one namespace. Rows without an event, of other types or of
others' namespaces stay as they are: they are news for whoever handles them later.

Rows are held by their locks for the moment of one settlement, which flips `delivered`, the only column that ever
changes: nothing is written at a claim, and every node can do it at once. SQLite has no row locks. There a claim keeps
nobody off, and whoever comes second finds the flag flipped and gives up with everything it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from pillarbox.codec import JSON
from pillarbox.layouts.exact import is_one_of
from pillarbox.layouts.layout import Counts, Feature, Grave, Layout, Lease, Predicate, Scope, Update
from pillarbox.layouts.shared import always, from_type
from pillarbox.stores import Batch, Mode
from pillarbox.stores import Counts as Counted
from pillarbox.stores.sql import SqlStore


def log_layout(notifications: Layout, *, namespace: str, types: Sequence[str], dialect: str) -> Layout:
    """The event log beside the notifications as a fan-out sees it."""

    def is_open(c: Any) -> Any:
        is_ours = is_one_of(c.event_type, types) & is_one_of(c.namespace, [namespace])
        return (c.delivered == sa.false()) & c.event_type.is_not(None) & is_ours

    def declare(metadata: sa.MetaData, table: str, schema: str | None) -> dict[str, sa.Table]:
        found = notifications.declare(metadata, table, schema)
        return {"outbox": found["events"], "notifications": found["outbox"]}

    # The first rows of each type by the index, which has the type before the date. SQLite sorts: it locks no rows.
    has_heads = dialect != "sqlite"
    unchanged = Update(lambda c, given: {"delivered": sa.false()})
    return Layout(
        name=f"{notifications.name}-fan-out",
        table=notifications.table,
        schema=notifications.schema,
        databases=notifications.databases,
        declare=declare,
        rows=("id",),
        # Whatever else a row has is copied inside the database, readable or not.
        fields={"type": "event_type"},
        fallbacks={"id": _read_id, "topic": from_type, "payload": always(b""), "content_type": always(JSON)},
        put=None,
        attempts=None,
        created="event_date",
        ready=is_open,
        order_by=("event_date", "id"),
        scope=Scope("event_type", is_open) if has_heads else None,
        waits=(),
        lease=Lease(
            fence="delivered",
            at="event_date",
            token="wrote",
            claim=unchanged.values,
            renew=unchanged.values,
            lapsed=None,
            lapse=unchanged,
        ),
        delivered=Update(lambda c, given: {"delivered": sa.true()}),
        retry=unchanged,
        dead=unchanged,
        release=unchanged,
        redrive=unchanged,
        grave=Grave("outbox", "id", "event_date", where=lambda c: sa.false()),
        counts=Counts(new=is_open),
        features=frozenset({Feature.HOLD, Feature.LEASE}),
    )


def limit_layout(layout: Layout, where: Predicate) -> Layout:
    """A layout for those rows of its table that also meet a condition."""

    def both(own: Predicate) -> Predicate:
        return lambda c: own(c) & where(c)

    def both_if(own: Predicate | None) -> Predicate | None:
        return None if own is None else both(own)

    counts: dict[str, Any] = {each.name: both_if(getattr(layout.counts, each.name)) for each in fields(Counts)}
    return replace(
        layout,
        ready=both(layout.ready),
        waits=tuple(replace(wait, where=both(wait.where)) for wait in layout.waits),
        counts=Counts(**counts),
        grave=replace(layout.grave, where=both_if(layout.grave.where)),
    )


def _read_id(event: Any, row: Any) -> UUID:
    try:
        return row if isinstance(row, UUID) else UUID(str(row))
    except ValueError:
        # The notification will say so: here nobody looks at it.
        return UUID(int=0)


class LogSource:
    """Claims from the event log, always by hold where there are row locks.

    A relay that starts carefully asks for leases, because what it delivers may kill it. Here nothing is delivered.
    """

    def __init__(self, store: SqlStore) -> None:
        self.store = store
        self.name = store.name
        self._mode: Mode = "lease" if store.dialect == "sqlite" else "hold"
        self.modes: frozenset[Mode] = frozenset({self._mode})
        self.joins: frozenset[Any] = frozenset()
        # One batch after the other: notifications of a later one must not be written first.
        self.in_flight = 1
        self.retention = None

    @property
    def lease(self) -> timedelta:
        return self.store.lease

    @property
    def keeps_order(self) -> bool:
        return False

    @property
    def is_notified(self) -> bool:
        return bool(getattr(self.store, "is_notified", False))

    async def open(self) -> None:
        await self.store.open()
        # Also behind a pooler: these transactions wait for nobody.
        self.store.modes = self.modes

    async def close(self) -> None:
        await self.store.close()

    async def claim(self, limit: int, *, mode: Mode, lease: timedelta, **options: Any) -> Batch:
        batch: Batch = await self.store.claim(limit, mode=self._mode, lease=lease, **options)
        return batch

    async def next_due(self) -> timedelta | None:
        return None

    async def wait(self, timeout: timedelta) -> bool:
        return await self.store.wait(timeout)

    async def counts(self) -> Counted:
        return await self.store.counts()
