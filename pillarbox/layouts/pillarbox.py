"""Pillarbox's own layout.

    put ─► ready ─► (held or leased) ─► deleted, or delivered when rows are retained
             ▲            │
             │            ├─► waiting ──┐  a failed try, until its time; blocks the later events of its key
             ├────────────┼─────────────┘
             │            └─► the dead table; parks its key, or lets it pass
             ├── scheduled   put with a time; blocks nobody
             └── blocked     behind an event of its key that is leased, waiting or parked

Only ready rows are in the claim index, so that rows which wait for whatever reason cost a claim nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.orm import Mapped
from sqlalchemy.schema import conv
from sqlalchemy.sql import ColumnElement

from pillarbox.errors import LayoutError
from pillarbox.event import EVENT_FIELDS, LIMITS
from pillarbox.layouts.clock import (
    Timestamp,
    UuidText,
    json_type,
    later,
    long_text_type,
    now,
    payload_type,
    sequence_type,
    text_type,
)
from pillarbox.layouts.layout import Counts, Delete, Feature, Grave, Layout, Lease, Move, Order, Update, Wait
from pillarbox.layouts.mixin import Mixin

LANES: Final = 64
"""Part of the schema: a table made with another number must be read and written with it."""

# Written into the statements as literals: a bound value would not match the predicate of a partial index.
READY: Final = sa.literal_column("0", sa.SmallInteger)
LEASED: Final = sa.literal_column("1", sa.SmallInteger)
WAITING: Final = sa.literal_column("2", sa.SmallInteger)
BLOCKED: Final = sa.literal_column("3", sa.SmallInteger)
SCHEDULED: Final = sa.literal_column("4", sa.SmallInteger)
DELIVERED: Final = sa.literal_column("5", sa.SmallInteger)

STATE_NAMES: Final = ("ready", "leased", "waiting", "blocked", "scheduled", "delivered")

_COLUMN_OF: Final = MappingProxyType({name: name for name in EVENT_FIELDS if name != "delay"})


def _event_columns() -> list[sa.Column[Any]]:
    text = {name: text_type(length) for name, length in LIMITS.items()}
    required = ("type", "topic", "content_type")
    return [
        sa.Column("id", UuidText(), nullable=False),
        sa.Column("sink", text_type(100), nullable=False, server_default=sa.text("''")),
        sa.Column("lane", sa.SmallInteger(), nullable=False),
        *(sa.Column(name, type_, nullable=name not in required) for name, type_ in text.items()),
        sa.Column("payload", payload_type(), nullable=False),
        sa.Column("headers", json_type()),
        sa.Column("due_at", Timestamp()),
        sa.Column("max_attempts", sa.Integer()),
        sa.Column("created_at", Timestamp(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default="0"),
        sa.Column("error", long_text_type()),
    ]


def outbox_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("seq", sequence_type(), sa.Identity(always=False, cache=1), primary_key=True, autoincrement=True),
        *_event_columns(),
        sa.Column("state", sa.SmallInteger(), nullable=False, server_default="0"),
        sa.Column("until_at", Timestamp()),
        sa.Column("token", UuidText()),
        sa.Column("delivered_at", Timestamp()),
    ]


def dead_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("seq", sa.BigInteger(), primary_key=True, autoincrement=False),
        *_event_columns(),
        sa.Column("died_at", Timestamp(), nullable=False),
        sa.Column("parks", sa.Boolean(), nullable=False),
    ]


def lanes_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("sink", text_type(100), primary_key=True),
        sa.Column("lane", sa.SmallInteger(), primary_key=True, autoincrement=False),
    ]


def audit_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("number", sequence_type(), sa.Identity(always=False), primary_key=True, autoincrement=True),
        sa.Column("at", Timestamp(), nullable=False),
        sa.Column("actor", text_type(255), nullable=False),
        sa.Column("action", text_type(50), nullable=False),
        sa.Column("detail", json_type()),
        sa.Column("events", sa.Integer(), nullable=False),
    ]


def _partial(condition: str) -> dict[str, Any]:
    return {"postgresql_where": sa.text(condition), "sqlite_where": sa.text(condition)}


def _outbox_constraints(table: str, lanes: int = LANES) -> list[sa.CheckConstraint]:
    # A writer that counts more lanes than the table was made with must fail, not write where nobody reads.
    # MySQL wants the name to be unique in the database: it follows the table under any naming convention.
    return [sa.CheckConstraint(f"lane >= 0 AND lane < {lanes}", name=conv(f"{table}_lane"))]


def _outbox_indexes(table: str, c: Any) -> list[sa.Index]:
    # MySQL and MariaDB ignore the conditions; the state among the columns does their work there. PostgreSQL does not
    # look up a column whose value the condition already says, so that column must not stand before another one.
    return [
        sa.Index(f"{table}_id", c["id"], c["sink"], unique=True),
        sa.Index(f"{table}_dedup", c["dedup_key"], c["sink"], unique=True, **_partial("dedup_key IS NOT NULL")),
        sa.Index(f"{table}_ready", c["sink"], c["lane"], c["state"], c["seq"], **_partial("state = 0")),
        sa.Index(
            f"{table}_key",
            *(c["sink"], c["key"], c["state"], c["seq"]),
            **_partial("key IS NOT NULL AND state IN (1, 2, 3)"),
        ),
        # Not by state: a planner that thinks no row is leased would then look up keys here, row by row.
        sa.Index(f"{table}_until", c["sink"], c["state"], c["until_at"], **_partial("until_at IS NOT NULL")),
        sa.Index(f"{table}_delivered", c["delivered_at"], **_partial("state = 5")),
    ]


def _dead_indexes(table: str, c: Any) -> list[sa.Index]:
    return [
        # Not unique: an id that was put again may die again.
        sa.Index(f"{table}_id", c["id"], c["sink"]),
        sa.Index(f"{table}_key", c["sink"], c["key"], c["parks"], **_partial("key IS NOT NULL")),
        sa.Index(f"{table}_died", c["died_at"]),
    ]


def _find_tables(metadata: sa.MetaData, table: str, schema: str | None) -> Mapping[str, sa.Table] | None:
    prefix = f"{schema or metadata.schema}." if schema or metadata.schema else ""
    names = {"outbox": table, "dead": f"{table}_dead", "lanes": f"{table}_lanes", "audit": f"{table}_audit"}
    found = {role: metadata.tables.get(f"{prefix}{name}") for role, name in names.items()}
    if found["outbox"] is None:
        return None
    tables = {role: each for role, each in found.items() if each is not None}
    columns = {column.name for column in outbox_columns()}
    if len(tables) < len(names) or not columns.issubset(tables["outbox"].c.keys()):
        raise LayoutError(
            f"Table {prefix + table!r}: the metadata has a table of this name that is not an outbox; name the "
            "outbox otherwise"
        )
    return tables


def declare_with(lanes: int) -> Callable[[sa.MetaData, str, str | None], Mapping[str, sa.Table]]:
    """A declaration of the tables for a number of lanes."""

    def declare(metadata: sa.MetaData, table: str, schema: str | None) -> Mapping[str, sa.Table]:
        found = _find_tables(metadata, table, schema)
        if found is not None:
            return found
        options: dict[str, Any] = {"schema": schema, "sqlite_autoincrement": True}
        outbox = sa.Table(table, metadata, *outbox_columns(), *_outbox_constraints(table, lanes), **options)
        dead = sa.Table(f"{table}_dead", metadata, *dead_columns(), schema=schema)
        _outbox_indexes(table, outbox.c)
        _dead_indexes(dead.name, dead.c)
        return {
            "outbox": outbox,
            "dead": dead,
            "lanes": sa.Table(f"{table}_lanes", metadata, *lanes_columns(), schema=schema),
            "audit": sa.Table(f"{table}_audit", metadata, *audit_columns(), **options),
        }

    return declare


class _EventMixin(Mixin):
    if TYPE_CHECKING:
        seq: Mapped[int]
        id: Mapped[UUID]
        sink: Mapped[str]
        lane: Mapped[int]
        type: Mapped[str]
        topic: Mapped[str]
        key: Mapped[str | None]
        content_type: Mapped[str]
        dedup_key: Mapped[str | None]
        aggregate_type: Mapped[str | None]
        aggregate_id: Mapped[str | None]
        schema_version: Mapped[str | None]
        correlation_id: Mapped[str | None]
        causation_id: Mapped[str | None]
        trace_id: Mapped[str | None]
        source: Mapped[str | None]
        payload: Mapped[bytes]
        headers: Mapped[dict[str, Any] | None]
        due_at: Mapped[datetime | None]
        max_attempts: Mapped[int | None]
        created_at: Mapped[datetime]
        attempts: Mapped[int]
        error: Mapped[str | None]


class OutboxMixin(_EventMixin, columns=outbox_columns()):
    """The outbox table."""

    if TYPE_CHECKING:
        state: Mapped[int]
        until_at: Mapped[datetime | None]
        token: Mapped[UUID | None]
        delivered_at: Mapped[datetime | None]

    @classmethod
    def _layout_args(cls, table: str) -> tuple[list[Any], dict[str, Any]]:
        names = {column.name: column.name for column in outbox_columns()}
        return [*_outbox_constraints(table), *_outbox_indexes(table, names)], {"sqlite_autoincrement": True}


class DeadMixin(_EventMixin, columns=dead_columns()):
    """The dead-letter table, named after the outbox: `…_dead`."""

    if TYPE_CHECKING:
        died_at: Mapped[datetime]
        parks: Mapped[bool]

    @classmethod
    def _layout_args(cls, table: str) -> tuple[list[Any], dict[str, Any]]:
        return _dead_indexes(table, {column.name: column.name for column in dead_columns()}), {}


class LanesMixin(Mixin, columns=lanes_columns()):
    """The latches for claiming, named after the outbox: `…_lanes`."""

    if TYPE_CHECKING:
        sink: Mapped[str]
        lane: Mapped[int]


class AuditMixin(Mixin, columns=audit_columns()):
    """What operators did, named after the outbox: `…_audit`."""

    if TYPE_CHECKING:
        number: Mapped[int]
        at: Mapped[datetime]
        actor: Mapped[str]
        action: Mapped[str]
        detail: Mapped[Any]
        events: Mapped[int]

    @classmethod
    def _layout_args(cls, table: str) -> tuple[list[Any], dict[str, Any]]:
        return [], {"sqlite_autoincrement": True}


# SQLite uses a partial index only where the query repeats its condition.
def _is_keyed(c: Any) -> ColumnElement[bool]:
    keyed: ColumnElement[bool] = c.key.is_not(None) & c.state.in_([LEASED, WAITING, BLOCKED])
    return keyed


def _is_timed(c: Any) -> ColumnElement[bool]:
    timed: ColumnElement[bool] = c.until_at.is_not(None)
    return timed


def _put(due: ColumnElement[Any] | None) -> dict[str, Any]:
    if due is None:
        return {"state": READY, "until_at": None, "due_at": None, "created_at": now()}
    is_later = due > now()
    return {
        "state": sa.case((is_later, SCHEDULED), else_=READY),
        "until_at": sa.case((is_later, due)),
        "due_at": due,
        "created_at": now(),
    }


def _free(**values: Any) -> dict[str, Any]:
    return {"token": None, "until_at": None, **values}


def pillarbox_layout(lanes: int = LANES) -> Layout:
    """The layout for tables made with this number of lanes."""
    return Layout(
        name="pillarbox",
        table="outbox",
        declare=declare_with(lanes),
        rows=("seq",),
        fields=_COLUMN_OF,
        put=_put,
        attempts="attempts",
        is_counted_at_claim=True,
        created="created_at",
        error="error",
        delivered_at="delivered_at",
        ready=lambda c: c.state == READY,
        order_by=("seq",),
        waits=(
            Wait("until_at", lambda c: (c.state == LEASED) & _is_timed(c)),
            Wait("until_at", lambda c: (c.state == WAITING) & _is_timed(c)),
            Wait("until_at", lambda c: (c.state == SCHEDULED) & _is_timed(c)),
        ),
        lease=Lease(
            fence="token",
            at="until_at",
            claim=lambda c, given: {
                "state": LEASED,
                "token": given.fence,
                "until_at": later(given.delay),
                "attempts": given.attempt,
            },
            renew=lambda c, given: {"until_at": later(given.delay)},
            lapsed=lambda c, seconds: (c.state == LEASED) & _is_timed(c) & (c.until_at <= now()),
            lapse=Update(
                lambda c, given: {
                    "state": WAITING,
                    "token": None,
                    "until_at": later(given.delay),
                    "error": given.error,
                }
            ),
        ),
        order=Order(
            key="key",
            sink="sink",
            lane="lane",
            lanes=lanes,
            due=(
                lambda c: (c.state == WAITING) & _is_timed(c) & (c.until_at <= now()),
                lambda c: (c.state == SCHEDULED) & _is_timed(c) & (c.until_at <= now()),
            ),
            promote=Update(lambda c, given: _free(state=READY)),
            in_flight=lambda c: (c.state == LEASED) & _is_keyed(c),
            blocking=lambda c: (c.state == WAITING) & _is_keyed(c),
            parking=lambda c: c.parks & c.key.is_not(None),
            blocked=lambda c: (c.state == BLOCKED) & _is_keyed(c),
            block=Update(lambda c, given: {"state": BLOCKED}),
            unblock=Update(lambda c, given: {"state": READY}),
        ),
        delivered=Delete(),
        # The key for deduplication goes with the delivery: only live events have one.
        kept=Update(
            lambda c, given: _free(state=DELIVERED, delivered_at=now(), attempts=given.attempt, dedup_key=None)
        ),
        retry=Update(
            lambda c, given: {
                "state": WAITING,
                "token": None,
                "until_at": later(given.delay),
                "attempts": given.attempt,
                "error": given.error,
            }
        ),
        dead=Move(
            "dead",
            lambda c, given: {
                "died_at": now(),
                "parks": given.parks,
                "attempts": given.attempt,
                "error": given.error,
            },
        ),
        grave=Grave("dead", "seq", "died_at", "error", "attempts"),
        release=Update(lambda c, given: _free(state=READY, attempts=given.attempt - 1)),
        redrive=Move("outbox", lambda c, given: {"state": READY, "attempts": 0, "error": None}),
        replay=Update(lambda c, given: _free(state=READY, attempts=0, delivered_at=None)),
        cancellable=lambda c: c.state.in_([READY, WAITING, BLOCKED, SCHEDULED]),
        # A row that waits after a try goes on blocking its key.
        reschedule=Update(
            lambda c, given: {
                "state": sa.case((c.state == WAITING, WAITING), else_=SCHEDULED),
                "until_at": given.due,
                "due_at": given.due,
            }
        ),
        counts=Counts(
            new=lambda c: (c.state == READY) & (c.attempts == 0),
            retrying=lambda c: (c.state == WAITING) | ((c.state == READY) & (c.attempts > 0)),
            held=lambda c: c.state == LEASED,
            scheduled=lambda c: c.state == SCHEDULED,
            blocked=lambda c: c.state == BLOCKED,
            delivered=lambda c: c.state == DELIVERED,
        ),
        features=frozenset(Feature),
    )
