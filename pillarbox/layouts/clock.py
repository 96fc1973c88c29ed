"""The database's clock, and the column types every layout shares.

`now()` is the start of the running statement, never of the transaction: a transaction that holds rows may be seconds
old. Timestamps are UTC: with a zone on PostgreSQL, without on the others, where the column type adds it back.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

from pillarbox.layouts.plain import OwnType


class Timestamp(OwnType, TypeDecorator[datetime]):
    """An aware UTC datetime on every database, to the microsecond."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def plain(self, dialect: Dialect) -> TypeEngine[Any]:
        return mysql.DATETIME(fsp=6) if dialect.name in ("mysql", "mariadb") else sa.DateTime(timezone=True)

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(self.plain(dialect))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None or dialect.name == "postgresql":
            return value
        return value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value if value is None or value.tzinfo else value.replace(tzinfo=UTC)


class UuidText(OwnType, TypeDecorator[UUID]):
    """A UUID: native on PostgreSQL, 36 characters elsewhere, so that people can read it."""

    impl = sa.CHAR(36)
    cache_ok = True

    def plain(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "postgresql":
            return postgresql.UUID(as_uuid=True)
        if dialect.name in ("mysql", "mariadb"):
            return mysql.CHAR(36, charset="ascii", collation="ascii_bin")
        return sa.CHAR(36)

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(self.plain(dialect))

    def process_bind_param(self, value: UUID | None, dialect: Dialect) -> Any:
        return value if value is None or dialect.name == "postgresql" else str(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> UUID | None:
        return value if value is None or isinstance(value, UUID) else UUID(value)


class ExactVarchar(OwnType, mysql.VARCHAR):
    """VARCHAR that compares byte by byte: the default takes 'a' and 'A' for one key, utf8mb4_bin 'a' and 'a '."""

    def plain(self, dialect: Any) -> TypeEngine[Any]:
        collation = "utf8mb4_nopad_bin" if dialect.is_mariadb else "utf8mb4_0900_bin"
        return mysql.VARCHAR(self.length, charset="utf8mb4", collation=collation)


@compiles(ExactVarchar, "mysql", "mariadb")
def _exact_varchar(type_: ExactVarchar, compiler: Any, **kw: Any) -> str:
    return str(compiler.process(type_.plain(compiler.dialect), **kw))


def text_type(length: int) -> TypeEngine[str]:
    """Text that compares byte by byte on every database."""
    return sa.String(length).with_variant(ExactVarchar(length), "mysql", "mariadb")


def long_text_type() -> TypeEngine[str]:
    return sa.Text().with_variant(mysql.LONGTEXT(charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb")


def payload_type() -> TypeEngine[bytes]:
    # LargeBinary alone is a BLOB of 64 KB there.
    return sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")


def json_type() -> TypeEngine[Any]:
    return sa.JSON(none_as_null=True).with_variant(postgresql.JSONB(none_as_null=True), "postgresql")


def sequence_type() -> TypeEngine[int]:
    # Only INTEGER PRIMARY KEY is SQLite's row number.
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


class now(FunctionElement[datetime]):  # noqa: N801 - reads as the SQL function it stands for
    """The start of the running statement, by the database's clock."""

    inherit_cache = True
    type = Timestamp()
    name = "now"


class row_now(FunctionElement[datetime]):  # noqa: N801
    """`now()`, and on PostgreSQL a little later for each row of a statement: the rows of one put tell their order."""

    inherit_cache = True
    type = Timestamp()
    name = "row_now"


class later(FunctionElement[datetime]):  # noqa: N801
    """`now()` plus a number of seconds."""

    inherit_cache = True
    type = Timestamp()
    name = "later"


class seconds_until(FunctionElement[float]):  # noqa: N801
    """How many seconds from `now()` to an instant; negative when it has passed."""

    inherit_cache = True
    type = sa.Float()
    name = "seconds_until"


class utc_now(FunctionElement[datetime]):  # noqa: N801
    """`now()` for a column without a time zone."""

    inherit_cache = True
    type = sa.DateTime()
    name = "utc_now"


class utc_later(FunctionElement[datetime]):  # noqa: N801
    """`later()` for a column without a time zone."""

    inherit_cache = True
    type = sa.DateTime()
    name = "utc_later"


class as_instant(FunctionElement[datetime]):  # noqa: N801
    """The instant that a column without a time zone means."""

    inherit_cache = True
    type = Timestamp()
    name = "as_instant"


def instant(column: Any, value: Any = None) -> Any:
    """A column's instant, or that of a value made from it, whether it has a time zone or not."""
    moment = column if value is None else value
    return moment if getattr(column.type, "timezone", True) else as_instant(moment)


@compiles(utc_now)
def _utc_now(element: utc_now, compiler: SQLCompiler, **kw: Any) -> str:
    return compiler.process(now(), **kw)


@compiles(utc_now, "postgresql")
def _utc_now_postgres(element: utc_now, compiler: SQLCompiler, **kw: Any) -> str:
    return "(statement_timestamp() AT TIME ZONE 'UTC')"


@compiles(utc_later)
def _utc_later(element: utc_later, compiler: SQLCompiler, **kw: Any) -> str:
    return compiler.process(later(*element.clauses), **kw)


@compiles(utc_later, "postgresql")
def _utc_later_postgres(element: utc_later, compiler: SQLCompiler, **kw: Any) -> str:
    return f"({compiler.process(later(*element.clauses), **kw)} AT TIME ZONE 'UTC')"


@compiles(as_instant)
def _as_instant(element: as_instant, compiler: SQLCompiler, **kw: Any) -> str:
    return compiler.process(element.clauses, **kw)


@compiles(as_instant, "postgresql")
def _as_instant_postgres(element: as_instant, compiler: SQLCompiler, **kw: Any) -> str:
    return f"({compiler.process(element.clauses, **kw)} AT TIME ZONE 'UTC')"


@compiles(now, "postgresql")
def _now_postgres(element: now, compiler: SQLCompiler, **kw: Any) -> str:
    return "statement_timestamp()"


@compiles(row_now)
def _row_now(element: row_now, compiler: SQLCompiler, **kw: Any) -> str:
    return compiler.process(now(), **kw)


@compiles(row_now, "postgresql")
def _row_now_postgres(element: row_now, compiler: SQLCompiler, **kw: Any) -> str:
    return "clock_timestamp()"


@compiles(now, "mysql")
@compiles(now, "mariadb")
def _now_mysql(element: now, compiler: SQLCompiler, **kw: Any) -> str:
    return "UTC_TIMESTAMP(6)"


@compiles(now, "sqlite")
def _now_sqlite(element: now, compiler: SQLCompiler, **kw: Any) -> str:
    # The same text form in which SQLAlchemy stores a datetime, so that instants compare as text.
    return "(strftime('%Y-%m-%d %H:%M:%f', 'now') || '000')"


@compiles(later, "postgresql")
def _later_postgres(element: later, compiler: SQLCompiler, **kw: Any) -> str:
    seconds = compiler.process(element.clauses, **kw)
    return f"(statement_timestamp() + CAST({seconds} AS DOUBLE PRECISION) * INTERVAL '1 second')"


@compiles(later, "mysql")
@compiles(later, "mariadb")
def _later_mysql(element: later, compiler: SQLCompiler, **kw: Any) -> str:
    seconds = compiler.process(element.clauses, **kw)
    return f"(UTC_TIMESTAMP(6) + INTERVAL CAST(({seconds}) * 1000000 AS SIGNED) MICROSECOND)"


@compiles(later, "sqlite")
def _later_sqlite(element: later, compiler: SQLCompiler, **kw: Any) -> str:
    seconds = compiler.process(element.clauses, **kw)
    return f"(strftime('%Y-%m-%d %H:%M:%f', 'now', ({seconds}) || ' seconds') || '000')"


@compiles(seconds_until, "postgresql")
def _until_postgres(element: seconds_until, compiler: SQLCompiler, **kw: Any) -> str:
    # Not of their difference: there is none of an infinite time.
    time = compiler.process(element.clauses, **kw)
    return f"CAST(EXTRACT(EPOCH FROM {time}) - EXTRACT(EPOCH FROM statement_timestamp()) AS FLOAT8)"


@compiles(seconds_until, "mysql")
@compiles(seconds_until, "mariadb")
def _until_mysql(element: seconds_until, compiler: SQLCompiler, **kw: Any) -> str:
    return f"(TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), {compiler.process(element.clauses, **kw)}) / 1e6)"


@compiles(seconds_until, "sqlite")
def _until_sqlite(element: seconds_until, compiler: SQLCompiler, **kw: Any) -> str:
    # A Julian day is exact to some 40 microseconds, SQLite's clock to a millisecond.
    return f"ROUND((julianday({compiler.process(element.clauses, **kw)}) - julianday('now')) * 86400.0, 3)"
