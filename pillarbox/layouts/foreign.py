"""Column types that tables of other systems need, as their databases spell them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.types import TypeDecorator, TypeEngine

from pillarbox.layouts.plain import OwnType


class UtcTimestamp(OwnType, TypeDecorator[datetime]):
    """An aware UTC datetime in a column without a zone, to the microsecond.

    PostgreSQL's own clock has a zone: write `now() AT TIME ZONE 'UTC'` into such a column, as an assignment would
    turn it into the session's zone.
    """

    impl = sa.DateTime(timezone=False)
    cache_ok = True

    def plain(self, dialect: Dialect) -> TypeEngine[Any]:
        return mysql.DATETIME(fsp=6) if dialect.name in ("mysql", "mariadb") else sa.DateTime(timezone=False)

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(self.plain(dialect))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        # What the driver read from such a column goes back as it is: it has no zone and is UTC.
        return value if value is None or value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value if value is None else value.replace(tzinfo=UTC)


class _ServerUuid(mysql.CHAR):
    """UUID on MariaDB, ASCII text on MySQL, which has no such type."""


@compiles(_ServerUuid, "mysql", "mariadb")
def _server_uuid(type_: _ServerUuid, compiler: Any, **kw: Any) -> str:
    return "UUID" if compiler.dialect.is_mariadb else "CHAR(36) CHARACTER SET ascii"


class NativeUuid(OwnType, TypeDecorator[UUID]):
    """A UUID in the type that the database has for it; 36 characters where it has none."""

    impl = sa.CHAR(36)
    cache_ok = True

    def plain(self, dialect: Any) -> TypeEngine[Any]:
        if dialect.name == "postgresql":
            return postgresql.UUID(as_uuid=True)
        if dialect.name in ("mysql", "mariadb"):
            return sa.UUID() if dialect.is_mariadb else mysql.CHAR(36, charset="ascii")
        return sa.CHAR(36)

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "postgresql":
            return dialect.type_descriptor(postgresql.UUID(as_uuid=True))
        if dialect.name in ("mysql", "mariadb"):
            return dialect.type_descriptor(_ServerUuid(36))
        return dialect.type_descriptor(sa.CHAR(36))

    def process_bind_param(self, value: UUID | None, dialect: Dialect) -> Any:
        return value if value is None or dialect.name == "postgresql" else str(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> UUID | None:
        return value if value is None or isinstance(value, UUID) else UUID(value)
