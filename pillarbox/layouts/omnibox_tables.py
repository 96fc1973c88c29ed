"""The tables of omni-box, for PostgreSQL: outbox and inbox, plain and partitioned by the time of creation.

Columns, defaults, checks and indexes are omni-box's own, so that its workers and ours can share one table. Names of
checks and indexes follow the table's name:

    outbox_events               idx_outbox_events_…     ck_outbox_events_…
    inbox_events                idx_inbox_events_…      ck_inbox_events_…     idx_inbox_deduplication
    outbox_events_partitioned   idx_outbox_events_p_…   ck_outbox_events_p_…

Its page and its models differ a little, and both are its tables: the page has defaults, and the models have two more
indexes and another order of the partitioned tables' primary key.
`created_at` and `updated_at` default to UTC's time of day read in the session's time zone: writers set them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped

from pillarbox.errors import LayoutError
from pillarbox.layouts.clock import Timestamp, UuidText
from pillarbox.layouts.layout import Variant
from pillarbox.layouts.mixin import Mixin
from pillarbox.layouts.naming import check_identifier, find_table, index_name, named_check

OUTBOX: Final = "outbox_events"
INBOX: Final = "inbox_events"
OUTBOX_PARTITIONED: Final = "outbox_events_partitioned"
INBOX_PARTITIONED: Final = "inbox_events_partitioned"

DEDUP_COLUMNS: Final = ("message_id", "consumer_group")
DEDUP_COLUMNS_PARTITIONED: Final = (*DEDUP_COLUMNS, "created_at")

_OWN: Final = ("aggregate_type", "aggregate_id", "topic", "partition_key", *DEDUP_COLUMNS, "source")
_DIALECTS: Final = ("postgresql",)
_PARTITIONS: Final = {"postgresql_partition_by": "RANGE (created_at)"}


def _utc_now() -> sa.TextClause:
    return sa.text("timezone('UTC', now())")


def _columns(own: Sequence[sa.Column[Any]], is_partitioned: bool) -> list[sa.Column[Any]]:
    # The order and the defaults of the page.
    return [
        sa.Column("id", UuidText(), primary_key=True),
        sa.Column("event_type", sa.String(100), nullable=False),
        *own,
        sa.Column("payload", JSONB(), nullable=False),
        sa.Column("headers", JSONB(none_as_null=True)),
        sa.Column("trace_id", sa.String(64)),
        sa.Column("idempotency_key", sa.String(128)),
        sa.Column("correlation_id", sa.String(64)),
        sa.Column("causation_id", sa.String(64)),
        sa.Column("schema_version", sa.String(50)),
        sa.Column("status", sa.String(20), nullable=False, server_default="pending"),
        sa.Column("attempts_made", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("max_attempts", sa.Integer(), nullable=False, server_default=sa.text("6")),
        sa.Column("last_error", sa.String(2000)),
        sa.Column("scheduled_at", Timestamp(), nullable=False),
        sa.Column("completed_at", Timestamp()),
        sa.Column("locked_at", Timestamp()),
        sa.Column("locked_by", sa.String(255)),
        sa.Column("created_at", Timestamp(), nullable=False, primary_key=is_partitioned, server_default=_utc_now()),
        sa.Column("updated_at", Timestamp(), server_default=_utc_now()),
    ]


def outbox_columns(is_partitioned: bool = False) -> list[sa.Column[Any]]:
    own = [
        sa.Column("aggregate_type", sa.String(50), nullable=False),
        sa.Column("aggregate_id", UuidText(), nullable=False),
        sa.Column("topic", sa.String(255), nullable=False),
        sa.Column("partition_key", sa.String(255), nullable=False),
    ]
    return _columns(own, is_partitioned)


def inbox_columns(is_partitioned: bool = False) -> list[sa.Column[Any]]:
    own = [
        sa.Column("message_id", sa.String(255), nullable=False),
        sa.Column("consumer_group", sa.String(255), nullable=False),
        sa.Column("source", sa.String(255), nullable=False),
    ]
    return _columns(own, is_partitioned)


def _as_modelled(columns: list[sa.Column[Any]], is_partitioned: bool) -> list[sa.Column[Any]]:
    """The columns as the models make them: without defaults of the life cycle, their own columns last."""
    named = {column.name: column for column in columns}
    for name in ("status", "attempts_made", "max_attempts"):
        named[name].server_default = None
    first = ["created_at"] if is_partitioned else []
    own = [name for name in _OWN if name in named]
    rest = [name for name in named if name not in (*first, *own)]
    return [named[name] for name in (*first, *rest, *own)]


def _prefix(table: str, is_partitioned: bool) -> str:
    return f"{table.removesuffix('_partitioned')}_p" if is_partitioned else table


def _checks(table: str, metadata: sa.MetaData, is_partitioned: bool) -> list[sa.CheckConstraint]:
    conditions = {
        "attempts_valid": "attempts_made <= max_attempts",
        "completed_status_consistency": (
            "(status = 'completed' AND completed_at IS NOT NULL) OR (status <> 'completed' AND completed_at IS NULL)"
        ),
        "lock_consistency": (
            "(locked_at IS NULL AND locked_by IS NULL) OR (locked_at IS NOT NULL AND locked_by IS NOT NULL)"
        ),
    }
    prefix = _prefix(table, is_partitioned)
    return [
        named_check(condition, name=f"ck_{prefix}_{short}", short=short, metadata=metadata, dialects=_DIALECTS)
        for short, condition in conditions.items()
    ]


def _indexes(table: str, dedup: Sequence[str], is_partitioned: bool, is_modelled: bool = False) -> list[sa.Index]:
    # A unique index of a partitioned table must hold the column it is partitioned by.
    widened = ("created_at",) if is_partitioned else ()
    prefix = _prefix(table, is_partitioned)

    def index(suffix: str, *columns: str, where: str | None = None, unique: bool = False) -> sa.Index:
        name = index_name(f"idx_{prefix}_{suffix}", _DIALECTS)
        return sa.Index(name, *columns, unique=unique, postgresql_where=None if where is None else sa.text(where))

    indexes = [
        index(
            "pending_fetch",
            "scheduled_at",
            where="status = 'pending' AND locked_at IS NULL AND attempts_made < max_attempts",
        ),
        index("locked_at", "locked_at", where="locked_at IS NOT NULL"),
        index("completed_cleanup", "completed_at", where="status = 'completed' AND completed_at IS NOT NULL"),
        index("idempotency_key", "idempotency_key", *widened, where="idempotency_key IS NOT NULL", unique=True),
        index("created_at", "created_at"),
        index("updated_at", "updated_at"),
    ]
    if dedup:
        if is_partitioned and "created_at" not in dedup:
            raise LayoutError(
                f"Table {table!r}, __inbox_dedup_index_columns__: expected 'created_at' among the columns, as the "
                f"table is partitioned by it; got {tuple(dedup)!r}"
            )
        base = prefix if is_partitioned else table.removesuffix("_events")
        name = index_name(f"idx_{base}_deduplication", _DIALECTS)
        indexes.append(sa.Index(name, *dedup, unique=True))
        if is_modelled and is_partitioned:
            indexes.append(index("message_consumer", *DEDUP_COLUMNS))
    elif is_modelled:
        key = ("topic", "partition_key", "created_at")
        indexes.append(index("pending_key_order", *key, where="status = 'pending'"))
    return indexes


def _declare(
    metadata: sa.MetaData,
    table: str,
    schema: str | None,
    *,
    columns: list[sa.Column[Any]],
    dedup: Sequence[str] = (),
    is_partitioned: bool = False,
    is_modelled: bool = False,
) -> Mapping[str, sa.Table]:
    found = find_table(metadata, table, schema, columns)
    if found is None:
        check_identifier(table, _DIALECTS)
        items = [*_checks(table, metadata, is_partitioned), *_indexes(table, dedup, is_partitioned, is_modelled)]
        if is_modelled:
            columns = _as_modelled(columns, is_partitioned)
        options: dict[str, Any] = _PARTITIONS if is_partitioned else {}
        found = sa.Table(table, metadata, *columns, *items, schema=schema, **options)
    return {"outbox": found}


def declare_outbox(
    metadata: sa.MetaData, table: str, schema: str | None, *, is_modelled: bool = False
) -> Mapping[str, sa.Table]:
    return _declare(metadata, table, schema, columns=outbox_columns(), is_modelled=is_modelled)


def declare_inbox(
    metadata: sa.MetaData, table: str, schema: str | None, *, is_modelled: bool = False
) -> Mapping[str, sa.Table]:
    return _declare(metadata, table, schema, columns=inbox_columns(), dedup=DEDUP_COLUMNS, is_modelled=is_modelled)


def declare_outbox_partitioned(
    metadata: sa.MetaData, table: str, schema: str | None, *, is_modelled: bool = False
) -> Mapping[str, sa.Table]:
    columns = outbox_columns(True)
    return _declare(metadata, table, schema, columns=columns, is_partitioned=True, is_modelled=is_modelled)


def declare_inbox_partitioned(
    metadata: sa.MetaData, table: str, schema: str | None, *, is_modelled: bool = False
) -> Mapping[str, sa.Table]:
    return _declare(
        metadata,
        table,
        schema,
        columns=inbox_columns(True),
        dedup=DEDUP_COLUMNS_PARTITIONED,
        is_partitioned=True,
        is_modelled=is_modelled,
    )


def variants_of(declare: Callable[..., Mapping[str, sa.Table]]) -> tuple[Variant, ...]:
    """The spellings of a table that one of the functions above declares."""
    return (
        Variant("page", "the DDL of omni-box's page", declare),
        Variant("0.3.1", "`create_all` of the models of omni-box 0.3.1", partial(declare, is_modelled=True)),
    )


class _OmniboxMixin(Mixin):
    __inbox_dedup_index_columns__: ClassVar[tuple[str, ...]] = ()
    _is_partitioned: ClassVar[bool] = False

    if TYPE_CHECKING:
        __tablename__: Any
        metadata: ClassVar[sa.MetaData]
        id: Mapped[UUID]
        event_type: Mapped[str]
        payload: Mapped[Any]
        headers: Mapped[dict[str, Any] | None]
        trace_id: Mapped[str | None]
        idempotency_key: Mapped[str | None]
        correlation_id: Mapped[str | None]
        causation_id: Mapped[str | None]
        schema_version: Mapped[str | None]
        status: Mapped[str]
        attempts_made: Mapped[int]
        max_attempts: Mapped[int]
        last_error: Mapped[str | None]
        scheduled_at: Mapped[datetime]
        completed_at: Mapped[datetime | None]
        locked_at: Mapped[datetime | None]
        locked_by: Mapped[str | None]
        created_at: Mapped[datetime]
        updated_at: Mapped[datetime | None]

    @classmethod
    def _layout_args(cls, table: str) -> tuple[list[Any], dict[str, Any]]:
        check_identifier(table, _DIALECTS)
        checks = _checks(table, cls.metadata, cls._is_partitioned)
        indexes = _indexes(table, cls.__inbox_dedup_index_columns__, cls._is_partitioned)
        return [*checks, *indexes], dict(_PARTITIONS) if cls._is_partitioned else {}


class _OutboxColumns(_OmniboxMixin):
    if TYPE_CHECKING:
        aggregate_type: Mapped[str]
        aggregate_id: Mapped[UUID]
        topic: Mapped[str]
        partition_key: Mapped[str]


class _InboxColumns(_OmniboxMixin):
    if TYPE_CHECKING:
        message_id: Mapped[str]
        consumer_group: Mapped[str]
        source: Mapped[str]


class OmniboxOutboxMixin(_OutboxColumns, columns=outbox_columns()):
    """omni-box's outbox table."""

    __tablename__ = OUTBOX


class OmniboxInboxMixin(_InboxColumns, columns=inbox_columns()):
    """omni-box's inbox table; a subclass may deduplicate by other columns."""

    __tablename__ = INBOX
    __inbox_dedup_index_columns__ = DEDUP_COLUMNS


class OmniboxOutboxPartitionedMixin(_OutboxColumns, columns=outbox_columns(True)):
    """omni-box's outbox table, partitioned by `created_at`; the application makes the partitions."""

    __tablename__ = OUTBOX_PARTITIONED
    _is_partitioned = True


class OmniboxInboxPartitionedMixin(_InboxColumns, columns=inbox_columns(True)):
    """omni-box's inbox table, partitioned by `created_at`; the application makes the partitions."""

    __tablename__ = INBOX_PARTITIONED
    __inbox_dedup_index_columns__ = DEDUP_COLUMNS_PARTITIONED
    _is_partitioned = True
