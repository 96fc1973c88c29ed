"""Names that a layout derives from its table's name.

Index names are the layout's own: code and people look them up, so no naming convention of a `MetaData` changes them.
Names of checks keep to a `ck` convention where there is one. A name that a database would cut or refuse is refused
when the table is declared: two names that a server cut to the same length are one name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.schema import conv

from pillarbox.errors import LayoutError

POSTGRES_BYTES: Final = 63
MYSQL_CHARACTERS: Final = 64

ALL_DIALECTS: Final = ("postgresql", "mysql", "mariadb", "sqlite")
_PRODUCT_OF: Final = MappingProxyType({"postgresql": "PostgreSQL", "mysql": "MySQL", "mariadb": "MariaDB"})


def check_identifier(name: str, dialects: Iterable[str]) -> str:
    """Return the name, or raise `LayoutError` when one of these databases has no room for it."""
    for dialect in dialects:
        if dialect == "postgresql":
            length, limit, unit = len(name.encode()), POSTGRES_BYTES, "bytes"
        elif dialect in ("mysql", "mariadb"):
            length, limit, unit = len(name), MYSQL_CHARACTERS, "characters"
        else:
            continue
        if length > limit:
            raise LayoutError(
                f"Identifier {name!r}: expected at most {limit} {unit}, as {_PRODUCT_OF[dialect]} takes no more; "
                f"got {length}. Give the table a shorter name."
            )
    return name


def index_name(name: str, dialects: Iterable[str]) -> conv:
    """The name of an index, which stays as it is under any naming convention."""
    return conv(check_identifier(name, dialects))


def named_check(
    condition: str, *, name: str, short: str, metadata: sa.MetaData, dialects: Iterable[str]
) -> sa.CheckConstraint:
    """A check called `name`, or what the metadata's `ck` convention makes of the `short` name.

    A convention that does not use `%(constraint_name)s` has no say over a check that has a name.
    """
    dialects = tuple(dialects)
    is_renamed = "%(constraint_name)s" in _find_convention(metadata.naming_convention)
    check = sa.CheckConstraint(condition, name=short if is_renamed else conv(check_identifier(name, dialects)))

    def check_name(constraint: sa.CheckConstraint, parent: Any) -> None:
        check_identifier(str(constraint.name), dialects)

    # The convention names a check when it joins its table.
    sa.event.listen(check, "after_parent_attach", check_name)
    return check


def _find_convention(conventions: Mapping[Any, Any]) -> str:
    for key in ("ck", *sa.CheckConstraint.__mro__):
        if key in conventions:
            return str(conventions[key])
    return ""


def find_table(
    metadata: sa.MetaData, table: str, schema: str | None, columns: Iterable[sa.Column[Any]]
) -> sa.Table | None:
    """The table of this name that the metadata already has, when it has at least these columns."""
    schema = schema or metadata.schema
    fullname = f"{schema}.{table}" if schema else table
    found = metadata.tables.get(fullname)
    if found is None:
        return None
    missing = [column.name for column in columns if column.name not in found.c]
    if missing:
        raise LayoutError(
            f"Table {fullname!r}: the metadata has a table of this name that lacks {', '.join(missing)}; name the "
            "outbox otherwise"
        )
    return found
