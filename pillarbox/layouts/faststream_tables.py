"""The tables of faststream-outbox on PostgreSQL, in the form of its 0.13 releases unless a later one is asked for.

The dead-letter table is an addition of its own: an outbox that gets one later is not altered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped

from pillarbox.layouts.layout import Variant
from pillarbox.layouts.mixin import Mixin
from pillarbox.layouts.naming import check_identifier, find_table, index_name, named_check
from pillarbox.layouts.variants import only_on

TABLE: Final = "outbox"
_DIALECTS: Final = ("postgresql",)

_Release = Literal["0.13", "0.15", "0.17"]
"""A release that changed the indexes; those after it are like it."""


def outbox_columns() -> list[sa.Column[Any]]:
    now = sa.text("now()")
    return [
        sa.Column("id", sa.BigInteger(), primary_key=True, autoincrement=True),
        sa.Column("queue", sa.String(255), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("headers", JSONB(none_as_null=True)),
        sa.Column("attempts_count", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("deliveries_count", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=now),
        sa.Column("next_attempt_at", sa.DateTime(timezone=True), nullable=False, server_default=now),
        sa.Column("first_attempt_at", sa.DateTime(timezone=True)),
        sa.Column("last_attempt_at", sa.DateTime(timezone=True)),
        sa.Column("acquired_at", sa.DateTime(timezone=True)),
        sa.Column("acquired_token", sa.Uuid()),
        sa.Column("timer_id", sa.String(255)),
    ]


def dlq_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("id", sa.BigInteger(), primary_key=True, autoincrement=True),
        sa.Column("original_id", sa.BigInteger(), nullable=False),
        sa.Column("queue", sa.String(255), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("headers", JSONB(none_as_null=True)),
        sa.Column("deliveries_count", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("failed_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.Column("failure_reason", sa.String(64), nullable=False),
        sa.Column("last_exception", sa.String()),
        sa.Column("timer_id", sa.String(255)),
    ]


def _lease_check(table: str, metadata: sa.MetaData) -> sa.CheckConstraint:
    name = f"{table}_lease_ck"
    condition = "(acquired_token IS NULL) = (acquired_at IS NULL)"
    return named_check(condition, name=name, short=name, metadata=metadata, dialects=_DIALECTS)


def _partial(table: str, suffix: str, *columns: Any, where: str, unique: bool = False) -> sa.Index:
    name = index_name(f"{table}_{suffix}", _DIALECTS)
    return only_on(sa.Index(name, *columns, unique=unique, postgresql_where=sa.text(where)), *_DIALECTS)


def _outbox_indexes(table: str, release: _Release = "0.13") -> list[sa.Index]:
    free, leased = "acquired_token IS NULL", "acquired_token IS NOT NULL"
    due = ("queue", "next_attempt_at") if release == "0.13" else ("queue", "next_attempt_at", "id")
    if release == "0.17":
        leases = _partial(table, "leased_idx", *due, where=leased)
    else:
        leases = _partial(table, "lease_idx", "queue", "acquired_at", where=leased)
    return [
        _partial(table, "pending_idx", *due, where=free),
        leases,
        _partial(table, "timer_id_uq", "queue", "timer_id", where="timer_id IS NOT NULL", unique=True),
    ]


def _dlq_indexes(table: str, c: Any) -> list[sa.Index]:
    name = index_name(f"{table}_queue_failed_idx", _DIALECTS)
    return [only_on(sa.Index(name, c["queue"], c["failed_at"]), *_DIALECTS)]


def declare_outbox(
    metadata: sa.MetaData, table: str = TABLE, schema: str | None = None, *, release: _Release = "0.13"
) -> Mapping[str, sa.Table]:
    """Declare the outbox alone."""
    outbox = find_table(metadata, table, schema, outbox_columns())
    if outbox is None:
        # The other system's wake-up channel is named after the table too.
        check_identifier(f"outbox_{table}", _DIALECTS)
        check = _lease_check(table, metadata)
        indexes = _outbox_indexes(table, release)
        outbox = sa.Table(table, metadata, *outbox_columns(), check, *indexes, schema=schema)
    return {"outbox": outbox}


def declare_with_dlq(
    metadata: sa.MetaData, table: str = TABLE, schema: str | None = None, *, release: _Release = "0.13"
) -> Mapping[str, sa.Table]:
    """Declare the outbox and its dead-letter table `…_dlq`."""
    name = f"{table}_dlq"
    indexes = _dlq_indexes(name, {"queue": "queue", "failed_at": "failed_at"})
    tables = declare_outbox(metadata, table, schema, release=release)
    dead = find_table(metadata, name, schema, dlq_columns())
    if dead is None:
        dead = sa.Table(name, metadata, *dlq_columns(), *indexes, schema=schema)
    return {**tables, "dead": dead}


def variants_of(declare: Callable[..., Mapping[str, sa.Table]]) -> tuple[Variant, ...]:
    """The spellings of the tables that one of the functions above declares."""
    return (
        Variant("0.13", "faststream-outbox 0.13 and 0.14", declare),
        Variant("0.15", "faststream-outbox 0.15 and 0.16", partial(declare, release="0.15")),
        Variant("0.17", "faststream-outbox 0.17 to 0.19", partial(declare, release="0.17")),
    )


class FastStreamOutboxMixin(Mixin, columns=outbox_columns()):
    """The outbox table."""

    if TYPE_CHECKING:
        id: Mapped[int]
        queue: Mapped[str]
        payload: Mapped[bytes]
        headers: Mapped[dict[str, Any] | None]
        attempts_count: Mapped[int]
        deliveries_count: Mapped[int]
        created_at: Mapped[datetime]
        next_attempt_at: Mapped[datetime]
        first_attempt_at: Mapped[datetime | None]
        last_attempt_at: Mapped[datetime | None]
        acquired_at: Mapped[datetime | None]
        acquired_token: Mapped[UUID | None]
        timer_id: Mapped[str | None]

    @classmethod
    def _layout_args(cls, table: str) -> tuple[list[Any], dict[str, Any]]:
        return [_lease_check(table, cls.metadata), *_outbox_indexes(table)], {}  # type: ignore[attr-defined]


class FastStreamDlqMixin(Mixin, columns=dlq_columns()):
    """The dead-letter table, named after the outbox: `…_dlq`."""

    if TYPE_CHECKING:
        id: Mapped[int]
        original_id: Mapped[int]
        queue: Mapped[str]
        payload: Mapped[bytes]
        headers: Mapped[dict[str, Any] | None]
        deliveries_count: Mapped[int]
        created_at: Mapped[datetime]
        failed_at: Mapped[datetime]
        failure_reason: Mapped[str]
        last_exception: Mapped[str | None]
        timer_id: Mapped[str | None]

    @classmethod
    def _layout_args(cls, table: str) -> tuple[list[Any], dict[str, Any]]:
        return _dlq_indexes(table, {"queue": "queue", "failed_at": "failed_at"}), {}
