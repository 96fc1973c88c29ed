"""The history of an event type for a handler that came later than others: notifications for events long fanned out.

A fan-out marks an event as delivered for the handlers that it knows, so a new handler of a type that others handle
hears of new events only. A backfill writes the notifications that are missing; it changes no event.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.sql.elements import ColumnElement

from pillarbox.durations import format_duration
from pillarbox.errors import ConfigError, Unsupported
from pillarbox.handlers.registry import Handler
from pillarbox.layouts.exact import is_one_of
from pillarbox.notifications.fan_out import Notify
from pillarbox.stores.sql import SqlStore

BATCH: Final = 1000


async def backfill(
    store: SqlStore,
    handler: Handler,
    *,
    since: datetime,
    until: datetime | None = None,
    namespace: str,
    again: bool = False,
    dry_run: bool = False,
    batch: int = BATCH,
) -> int:
    """Notify a handler of the events of its types that were fanned out without it; returns how many.

    `store` is one of layout `actions-notifications` or `ekbatan-notifications`. Events count by their own time, from
    `since` on and before `until`, and come in its order; undelivered ones are left to the fan-out. What the handler was
    told before, also under a former name, it is not told again, so a backfill may be repeated. Each batch is a
    transaction of its own. Run it when every node knows the handler: one that does not may still fan out events
    without it.

    Pruned notifications are forgotten: their events are told again. So a `since` from before the store's retention is
    refused, unless `again` says that the handler is new or may be called twice.
    """
    if "events" not in store.tables:
        raise Unsupported(
            f"Store {store.name}: layout {store.layout.name!r} keeps no log of events to backfill from; expected "
            "actions-notifications or ekbatan-notifications"
        )
    _check_time(since, "since")
    if until is not None and _check_time(until, "until") <= since:
        raise ConfigError(f"Backfill: expected until to be after since; got {until.isoformat()}")
    if not again:
        _check_kept(store, handler, since)
    missing = _Missing(store, handler, namespace=namespace, since=since, until=until)
    if dry_run:
        return await store.run(missing.count, writes=False)
    written, last = 0, None
    while True:
        last, count = await store.run(lambda db, after=last: missing.write(db, after, batch))  # type: ignore[misc]
        written += count
        if count < batch:
            return written


class _Missing:
    """The events that a handler was not told of, in the order of their dates."""

    def __init__(
        self, store: SqlStore, handler: Handler, *, namespace: str, since: datetime, until: datetime | None
    ) -> None:
        self._events, self._notifications = store.tables["events"], store.tables["outbox"]
        self._handler = handler
        self._notify = Notify(self._events, self._notifications, store.layout)
        c = self._events.c
        # Without an end there is none: the dates are of the application's clock, which may be ahead of any other.
        ended = [] if until is None else [c.event_date < until]
        self._where = sa.and_(
            c.delivered == sa.true(),
            is_one_of(c.event_type, handler.types),
            is_one_of(c.namespace, [namespace]),
            c.event_date >= since,
            *ended,
            sa.not_(self._is_told()),
        )

    def _is_told(self) -> ColumnElement[bool]:
        told = self._notifications.alias("told")
        names = (self._handler.name, *self._handler.aliases)
        return sa.exists().where(told.c.event_id == self._events.c.id, is_one_of(told.c.handler_name, names))

    def count(self, db: sa.Connection) -> int:
        return int(db.execute(sa.select(sa.func.count()).select_from(self._events).where(self._where)).scalar_one())

    def write(self, db: sa.Connection, after: Any, limit: int) -> tuple[Any, int]:
        """Write the notifications of the next events; returns the last of them and how many they were."""
        # As the driver gives them, which go back as they are.
        date, row = (sa.type_coerce(self._events.c[name], sa.types.NullType()) for name in ("event_date", "id"))
        query = sa.select(date, row).where(self._where).order_by(date, row).limit(limit)
        if after is not None:
            query = query.where(date >= after[0], sa.or_(date > after[0], row > after[1]))
        rows = [tuple(found) for found in db.execute(query)]
        self._notify(db, [(each, self._handler.name) for _, each in rows])
        return (rows[-1] if rows else after), len(rows)


def _check_kept(store: SqlStore, handler: Handler, since: datetime) -> None:
    if store.retention is not None and datetime.now(UTC) - since > store.retention:
        raise ConfigError(
            f"Backfill of handler {handler.name!r}: since is {since.isoformat(timespec='seconds')}, longer ago "
            f"than the retention of {format_duration(store.retention)}. Notifications handled before that are pruned, "
            "and their events would be told again. Give a later since, or again=True (--again) if the handler is new "
            "or may be called twice."
        )


def _check_time(moment: object, what: str) -> datetime:
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise ConfigError(f"Backfill {what}: expected an aware datetime, got {moment!r}")
    return moment
