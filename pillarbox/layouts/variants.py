"""Indexes that one database has and another has not.

PostgreSQL and SQLite leave rows out of an index by a condition; MySQL and MariaDB cannot, and want the column of the
condition first instead. Both forms are declared under one name, each for its databases: creating tables picks by
itself, and whoever reads `Table.indexes` asks `indexes_on`.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

_KEY = "pillarbox_dialects"


def only_on(index: sa.Index, *dialects: str) -> sa.Index:
    """Let an index exist on these databases only."""

    def is_wanted(ddl: Any, target: Any, bind: Any, tables: Any = None, state: Any = None, **kw: Any) -> bool:
        return kw["dialect"].name in dialects

    index.info[_KEY] = dialects
    return index.ddl_if(callable_=is_wanted)


def has_choice(index: sa.Index) -> bool:
    """Whether an index exists on some databases only."""
    return _KEY in index.info


def indexes_on(table: sa.Table, dialect: str) -> list[sa.Index]:
    """The indexes that a table has on a database, by name."""
    wanted = [index for index in table.indexes if dialect in index.info.get(_KEY, (dialect,))]
    return sorted(wanted, key=lambda index: str(index.name))
