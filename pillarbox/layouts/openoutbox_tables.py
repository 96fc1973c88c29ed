"""The table of the Open Outbox Relay.

On PostgreSQL it is the relay's own table, with the indexes for claiming, for its figures and for pruning. Elsewhere it
keeps the same contract with the types of the database: text that is compared or limited becomes VARCHAR on MySQL and
MariaDB, and a partial index becomes a full one that begins with the status. Names of indexes follow the table's name:
`openoutbox_events` gives `idx_openoutbox_…`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Final
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import Mapped
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

from pillarbox.layouts.clock import (
    ExactVarchar,
    Timestamp,
    UuidText,
    json_type,
    long_text_type,
    now,
    payload_type,
)
from pillarbox.layouts.layout import Variant
from pillarbox.layouts.mixin import Mixin
from pillarbox.layouts.naming import ALL_DIALECTS, check_identifier, find_table, index_name, named_check
from pillarbox.layouts.variants import only_on

TABLE: Final = "openoutbox_events"

_STATUSES: Final = "status IN ('PENDING', 'DELIVERING', 'DELIVERED', 'DEAD')"

_Spec = tuple[str, tuple[str, ...], str]
"""An index: the name, its columns after a condition, and the status that the condition asks for."""

_INDEXES: Final[tuple[_Spec, ...]] = (
    ("processing_queue", ("available_at", "created_at"), "PENDING"),
    ("stuck_leases", ("locked_at",), "DELIVERING"),
    ("metrics_count", ("status",), "PENDING"),
    ("metrics_lag", ("status", "created_at"), "PENDING"),
)
# Only pruning needs these; the relay's own files have them apart.
_PRUNE_INDEXES: Final[tuple[_Spec, ...]] = (
    ("prune_delivered", ("delivered_at",), "DELIVERED"),
    ("prune_dead", ("updated_at",), "DEAD"),
)


class _put_time(FunctionElement[datetime]):  # noqa: N801 - reads as a SQL function
    """The default of a time: PostgreSQL's is the start of the transaction."""

    inherit_cache = True
    type = Timestamp()


@compiles(_put_time)
def _put_time_elsewhere(element: _put_time, compiler: SQLCompiler, **kw: Any) -> str:
    return compiler.process(now(), **kw)


@compiles(_put_time, "postgresql")
def _put_time_postgres(element: _put_time, compiler: SQLCompiler, **kw: Any) -> str:
    return "now()"


@compiles(_put_time, "mysql")
@compiles(_put_time, "mariadb")
def _put_time_mysql(element: _put_time, compiler: SQLCompiler, **kw: Any) -> str:
    # CURRENT_TIMESTAMP, the only default that needs no parentheses, is in the session's time zone.
    return f"({compiler.process(now(), **kw)})"


class _no_headers(FunctionElement[Any]):  # noqa: N801
    """The default of the headers: an empty object."""

    inherit_cache = True
    type = sa.JSON()


@compiles(_no_headers)
def _no_headers_literal(element: _no_headers, compiler: SQLCompiler, **kw: Any) -> str:
    return "'{}'"


@compiles(_no_headers, "mysql")
@compiles(_no_headers, "mariadb")
def _no_headers_mysql(element: _no_headers, compiler: SQLCompiler, **kw: Any) -> str:
    # MySQL has no literal default for JSON.
    return "(json_object())"


def _text(length: int) -> TypeEngine[str]:
    # MySQL and MariaDB index no TEXT and give it no default.
    return sa.Text().with_variant(ExactVarchar(length), "mysql", "mariadb")


def outbox_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("event_id", UuidText(), primary_key=True),
        sa.Column("event_type", _text(255), nullable=False),
        sa.Column("partition_key", _text(255)),
        sa.Column("payload", payload_type(), nullable=False),
        sa.Column("headers", json_type(), nullable=False, server_default=_no_headers()),
        sa.Column("status", _text(20), nullable=False, server_default="PENDING"),
        sa.Column("attempts", sa.Integer(), nullable=False, server_default=sa.text("0")),
        sa.Column("last_error", long_text_type()),
        sa.Column("available_at", Timestamp(), nullable=False, server_default=_put_time()),
        sa.Column("locked_by", _text(255)),
        sa.Column("locked_at", Timestamp()),
        sa.Column("delivered_at", Timestamp()),
        sa.Column("created_at", Timestamp(), nullable=False, server_default=_put_time()),
        sa.Column("updated_at", Timestamp(), nullable=False, server_default=_put_time()),
    ]


def _items(table: str, metadata: sa.MetaData, specs: Sequence[_Spec] = (*_INDEXES, *_PRUNE_INDEXES)) -> list[Any]:
    check_identifier(table, ALL_DIALECTS)
    base = table.removesuffix("_events")
    # MySQL wants the name of a check to be unique in the database.
    name = "check_valid_status" if table == TABLE else f"check_{base}_valid_status"
    check = named_check(_STATUSES, name=name, short="valid_status", metadata=metadata, dialects=ALL_DIALECTS)
    return [check, *(index for spec in specs for index in _variants(base, *spec))]


def _variants(base: str, suffix: str, columns: tuple[str, ...], status: str) -> tuple[sa.Index, sa.Index]:
    name = index_name(f"idx_{base}_{suffix}", ALL_DIALECTS)
    condition = sa.text(f"status = '{status}'")
    included = ("attempts",) if suffix == "metrics_count" else ()
    partial: dict[str, Any] = {"postgresql_where": condition, "sqlite_where": condition}
    if included:
        partial["postgresql_include"] = list(included)
    full = ("status", *(column for column in columns if column != "status"), *included)
    return (
        only_on(sa.Index(name, *columns, **partial), "postgresql", "sqlite"),
        only_on(sa.Index(name, *full), "mysql", "mariadb"),
    )


def declare(metadata: sa.MetaData, table: str, schema: str | None) -> Mapping[str, sa.Table]:
    return _declare(metadata, table, schema, (*_INDEXES, *_PRUNE_INDEXES))


def declare_without_maintenance(metadata: sa.MetaData, table: str, schema: str | None) -> Mapping[str, sa.Table]:
    return _declare(metadata, table, schema, _INDEXES)


def _declare(metadata: sa.MetaData, table: str, schema: str | None, specs: Sequence[_Spec]) -> Mapping[str, sa.Table]:
    columns = outbox_columns()
    found = find_table(metadata, table, schema, columns)
    if found is None:
        found = sa.Table(table, metadata, *columns, *_items(table, metadata, specs), schema=schema)
    return {"outbox": found}


VARIANTS: Final = (
    Variant("maintenance.sql", "the relay's `open-outbox.sql`, then its `maintenance.sql`", declare),
    Variant("open-outbox.sql", "`open-outbox.sql` alone", declare_without_maintenance, better="maintenance.sql"),
)


class OpenOutboxMixin(Mixin, columns=outbox_columns()):
    """The Open Outbox Relay's table."""

    __tablename__ = TABLE

    if TYPE_CHECKING:
        metadata: ClassVar[sa.MetaData]
        event_id: Mapped[UUID]
        event_type: Mapped[str]
        partition_key: Mapped[str | None]
        payload: Mapped[bytes]
        headers: Mapped[dict[str, Any]]
        status: Mapped[str]
        attempts: Mapped[int]
        last_error: Mapped[str | None]
        available_at: Mapped[datetime]
        locked_by: Mapped[str | None]
        locked_at: Mapped[datetime | None]
        delivered_at: Mapped[datetime | None]
        created_at: Mapped[datetime]
        updated_at: Mapped[datetime]

    @classmethod
    def _layout_args(cls, table: str) -> tuple[list[Any], dict[str, Any]]:
        return _items(table, cls.metadata), {}
