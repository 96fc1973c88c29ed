"""The fan-out: one notification for each event and handler, in the transaction that marks the event as delivered.

A notification is a full copy of its event's row, made inside the database, so that handlers need nothing else and the
log may be pruned. One that is there already stays as it is: an event is unique within a handler. Crash before the
transaction commits, and the events are still undelivered; after it, their notifications are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite

from pillarbox.event import DELIVERED, RELEASED, Claim, Delivered, Outcome, uuid7
from pillarbox.handlers.registry import Handlers
from pillarbox.layouts.clock import utc_now
from pillarbox.layouts.layout import Layout
from pillarbox.sinks import Sink, refuse_alone
from pillarbox.stores import Effect
from pillarbox.stores.dialect import is_mysql
from pillarbox.wakeup import channel_name

_GIVEN: Final = ("id", "event_id", "handler_name")
_NEW: Final[Mapping[str, Any]] = {
    "state": sa.literal_column("'PENDING'"),
    "attempts": sa.literal_column("0"),
    "next_retry_at": utc_now(),
    "created_date": utc_now(),
    "updated_date": utc_now(),
}


class NotificationFanOut(Sink):
    """The sink that gives each event of a log to the handlers of its type, as notifications beside it."""

    is_quick: bool = True

    def __init__(self, tables: Mapping[str, sa.Table], layout: Layout, handlers: Handlers) -> None:
        self.name = "fan-out"
        self._notify = Notify(tables["outbox"], tables["notifications"], layout)
        self._names = {type: [handler.name for handler in found] for type, found in handlers.types.items()}

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        raise refuse_alone(self)

    async def deliver_in(self, batch: Any, claims: Sequence[Claim]) -> Sequence[Outcome]:
        return [DELIVERED if claim.event.type in self._names else RELEASED for claim in claims]

    def effect(self, claims: Sequence[Claim], outcomes: Sequence[Outcome]) -> Effect:
        """What must commit with the settlement: the notifications."""
        wanted = [
            (claim.row, name)
            for claim, outcome in zip(claims, outcomes, strict=True)
            if isinstance(outcome, Delivered)
            for name in self._names[claim.event.type]
        ]

        def write(db: sa.Connection) -> None:
            self._notify(db, wanted)

        return write


class Notify:
    """Writes notifications for events of a log, those that are not there yet, and wakes whoever waits for them."""

    def __init__(self, events: sa.Table, notifications: sa.Table, layout: Layout) -> None:
        self._events = events
        self._notifications = notifications
        self._channel = channel_name(notifications, layout)
        self._statements: dict[str, Any] = {}

    def __call__(self, db: sa.Connection, wanted: Sequence[tuple[Any, str]]) -> None:
        """Write one notification for each row of an event, as the driver gave it, and name of a handler."""
        if not wanted:
            return
        dialect = db.dialect.name
        if dialect not in self._statements:
            self._statements[dialect] = build_notify(self._events, self._notifications, dialect)
        rows = [(uuid7(), event, name) for event, name in wanted]
        db.execute(self._statements[dialect], give_rows(rows, dialect))
        if dialect == "postgresql":
            db.execute(sa.select(sa.cast(sa.func.pg_notify(self._channel, ""), sa.Text)))


def build_notify(events: sa.Table, notifications: sa.Table, dialect: str) -> Any:
    """The statement that copies events for handlers; what is there already stays as it is."""
    given = _build_given(dialect)
    copied = [column.name for column in notifications.c if column.name in events.c and column.name not in _GIVEN]
    source: Any = sa.select(
        *(given.c[name] for name in _GIVEN),
        *(events.c[name] for name in copied),
        *(value.label(name) for name, value in _NEW.items()),
    ).where(events.c.id == given.c.event_id)
    for name in ("mysql", "mariadb"):
        # The given rows first and the table's by their key, or a small table is walked from its start.
        source = source.prefix_with("STRAIGHT_JOIN", dialect=name)
    insert = {"postgresql": postgresql.insert, "sqlite": sqlite.insert}.get(dialect, mysql.insert)(notifications)
    statement: Any = insert.from_select([*_GIVEN, *copied, *_NEW], source)
    if is_mysql(dialect):
        # Not IGNORE, which would also swallow errors of other kinds.
        return statement.on_duplicate_key_update({"handler_name": notifications.c.handler_name})
    return statement.on_conflict_do_nothing(index_elements=["event_id", "handler_name"])


def give_rows(rows: Sequence[tuple[UUID, Any, str]], dialect: str) -> dict[str, Any]:
    """The statement's parameters."""
    if dialect == "postgresql":
        ids, events, names = zip(*rows, strict=True)
        return {"n_ids": list(ids), "n_events": list(events), "n_names": list(names)}
    return {"n_rows": orjson.dumps(rows, default=str).decode()}


def _build_given(dialect: str) -> Any:
    if dialect == "postgresql":
        arrays = "CAST(:n_ids AS UUID[]), CAST(:n_events AS UUID[]), CAST(:n_names AS TEXT[])"
        text = f"SELECT * FROM unnest({arrays}) AS g({', '.join(_GIVEN)})"
    elif is_mysql(dialect):
        uuid, name = "CHAR(36) CHARACTER SET ascii", "VARCHAR(255) CHARACTER SET utf8mb4"
        columns = f"id {uuid} PATH '$[0]', event_id {uuid} PATH '$[1]', handler_name {name} PATH '$[2]'"
        text = f"SELECT * FROM JSON_TABLE(:n_rows, '$[*]' COLUMNS ({columns})) AS g"
    else:
        columns = ", ".join(f"json_extract(value, '$[{index}]') AS {name}" for index, name in enumerate(_GIVEN))
        text = f"SELECT {columns} FROM json_each(:n_rows)"
    return sa.text(text).columns(*(sa.column(name) for name in _GIVEN)).subquery("given")
