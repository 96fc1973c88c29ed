"""Pillarbox's own tables, as Core tables and as mixins.

outbox           the events that are to be delivered, and those kept there after that
outbox_dead      dead letters
outbox_lanes     latches for claiming
outbox_audit     what operators did
outbox_history   delivered events by the month in which they were; only with `is_partitioned`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.orm import Mapped
from sqlalchemy.schema import conv

from pillarbox.errors import LayoutError
from pillarbox.event import LIMITS
from pillarbox.layouts.clock import (
    Timestamp,
    UuidText,
    json_type,
    long_text_type,
    payload_type,
    sequence_type,
    text_type,
)
from pillarbox.layouts.mixin import Mixin

LANES: Final = 64
"""Part of the schema: a table made with another number must be read and written with it."""

_PARTITIONS: Final[dict[str, Any]] = {"postgresql_partition_by": "RANGE (delivered_at)"}


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


def history_columns() -> list[sa.Column[Any]]:
    # The key for deduplication goes with the delivery: only live events have one.
    event = [column for column in _event_columns() if column.name != "dedup_key"]
    return [
        sa.Column("seq", sa.BigInteger(), primary_key=True, autoincrement=False),
        *event,
        # A key of a partitioned table must hold the column it is partitioned by.
        sa.Column("delivered_at", Timestamp(), primary_key=True),
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


def _history_indexes(table: str, c: Any) -> list[sa.Index]:
    return [
        # Not unique: an id that was put again is delivered again.
        sa.Index(f"{table}_id", c["id"], c["sink"]),
        # Finds the rows of a time, and counts without reading them.
        sa.Index(f"{table}_delivered", c["sink"], c["delivered_at"]),
    ]


def _find_tables(
    metadata: sa.MetaData, table: str, schema: str | None, roles: Sequence[str]
) -> Mapping[str, sa.Table] | None:
    prefix = f"{schema or metadata.schema}." if schema or metadata.schema else ""
    names = {"outbox": table, **{role: f"{table}_{role}" for role in roles}}
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


def declare_with(
    lanes: int, *, is_partitioned: bool = False
) -> Callable[[sa.MetaData, str, str | None], Mapping[str, sa.Table]]:
    """A declaration of the tables for a number of lanes, with a partitioned one for delivered events or without."""
    roles = ("dead", "lanes", "audit", *(["history"] if is_partitioned else []))

    def declare(metadata: sa.MetaData, table: str, schema: str | None) -> Mapping[str, sa.Table]:
        found = _find_tables(metadata, table, schema, roles)
        if found is not None:
            return found
        options: dict[str, Any] = {"schema": schema, "sqlite_autoincrement": True}
        outbox = sa.Table(table, metadata, *outbox_columns(), *_outbox_constraints(table, lanes), **options)
        dead = sa.Table(f"{table}_dead", metadata, *dead_columns(), schema=schema)
        _outbox_indexes(table, outbox.c)
        _dead_indexes(dead.name, dead.c)
        tables = {
            "outbox": outbox,
            "dead": dead,
            "lanes": sa.Table(f"{table}_lanes", metadata, *lanes_columns(), schema=schema),
            "audit": sa.Table(f"{table}_audit", metadata, *audit_columns(), **options),
        }
        if is_partitioned:
            history = sa.Table(f"{table}_history", metadata, *history_columns(), schema=schema, **_PARTITIONS)
            _history_indexes(history.name, history.c)
            tables["history"] = history
        return tables

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
        dedup_key: Mapped[str | None]
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
        dedup_key: Mapped[str | None]
        died_at: Mapped[datetime]
        parks: Mapped[bool]

    @classmethod
    def _layout_args(cls, table: str) -> tuple[list[Any], dict[str, Any]]:
        return _dead_indexes(table, {column.name: column.name for column in dead_columns()}), {}


class HistoryMixin(_EventMixin, columns=history_columns()):
    """The delivered events by month, named after the outbox: `…_history`. For the layout `pillarbox-partitioned`."""

    if TYPE_CHECKING:
        delivered_at: Mapped[datetime]

    @classmethod
    def _layout_args(cls, table: str) -> tuple[list[Any], dict[str, Any]]:
        return _history_indexes(table, {column.name: column.name for column in history_columns()}), dict(_PARTITIONS)


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
