"""Writing down which messages were taken, in the caller's transaction: the statements for our own inbox table.

The primary key decides: who inserts a message second waits for the first one's commit or rollback. Messages go in the
order of their keys, so that two batches with the same messages wait for each other in one direction only. Nothing here
begins or ends a transaction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final
from uuid import uuid4

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.engine import Dialect

from pillarbox.inbox.message import Message
from pillarbox.layouts.clock import now
from pillarbox.stores.dialect import is_mysql
from pillarbox.stores.hot import Hot

MAX_ROWS: Final = 5000

Key = tuple[str, str]
"""A message's group and id."""

_GIVEN: Final = ("consumer_group", "message_id", "source", "type")


class Takes(ABC):
    """The statements of one inbox table for one dialect and parameter style."""

    def take(self, db: sa.Connection, messages: Sequence[Message]) -> list[bool]:
        """Write messages down; says of each whether it is new. Of equal ones in a batch the first is."""
        keys = [(message.group, message.id) for message in messages]
        # From the end, so that of equal ones the first stays.
        first = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))
        ordered = sorted(first)
        is_new = [False] * len(keys)
        for start in range(0, len(ordered), MAX_ROWS):
            wanted = ordered[start : start + MAX_ROWS]
            new = self._insert(db, [messages[first[key]] for key in wanted])
            for key in wanted if new is None else new:
                is_new[first[key]] = True
        return is_new

    @abstractmethod
    def _insert(self, db: sa.Connection, messages: Sequence[Message]) -> Sequence[Key] | None:
        """Write messages with different keys, in order; returns the keys that were new, None when all were."""


def takes_for(table: sa.Table, dialect: Dialect) -> Takes:
    """The statements as the database of a connection takes them."""
    # Without the table's own defaults: what a take does not name is the database's to fill.
    plain = sa.table(table.name, *(sa.column(c.name, c.type) for c in table.c), schema=table.schema)
    if dialect.name == "postgresql":
        return _PostgresTakes(plain)
    return _MysqlTakes(plain, dialect) if is_mysql(dialect.name) else _SqliteTakes(plain)


def _row(message: Message) -> tuple[str, str, str, str]:
    return message.group, message.id, message.source, message.event.type


class _PostgresTakes(Takes):
    """One array a column, or one value where all messages have the same; nothing but values for one message.

    The keys come back only when some were not new.
    """

    def __init__(self, table: sa.TableClause) -> None:
        self._table = table
        self._key = [table.c.consumer_group, table.c.message_id]
        values = {name: sa.bindparam(f"g_{name}", type_=sa.Text()) for name in _GIVEN}
        one = postgresql.insert(table).values({**values, "taken_at": now()})
        one = one.on_conflict_do_nothing(index_elements=self._key)
        self._one = Hot(one.returning(sa.literal_column("1")))
        self._many: dict[tuple[str, ...], Hot] = {}

    def _insert(self, db: sa.Connection, messages: Sequence[Message]) -> Sequence[Key] | None:
        if len(messages) == 1:
            params = {f"g_{name}": value for name, value in zip(_GIVEN, _row(messages[0]), strict=True)}
            return None if self._one.fetch(db, params) else []
        columns = dict(zip(_GIVEN, zip(*map(_row, messages), strict=True), strict=True))
        same = [name for name, values in columns.items() if values.count(values[0]) == len(values)]
        listed = tuple(name for name in _GIVEN if name not in same or name == "message_id")
        if listed not in self._many:
            self._many[listed] = Hot(self._build(listed))
        arrays = {f"g_{name}": list(values) if name in listed else values[0] for name, values in columns.items()}
        [(count, groups, ids)] = self._many[listed].fetch(db, arrays)
        return None if count == len(messages) else list(zip(groups or (), ids or (), strict=True))

    def _build(self, listed: Sequence[str]) -> sa.Select[Any]:
        arrays = {name: sa.bindparam(f"g_{name}", type_=postgresql.ARRAY(sa.Text())) for name in listed}
        given = sa.func.unnest(*arrays.values()).table_valued(*listed, name="given").render_derived().c
        values = [
            given[name] if name in listed else sa.cast(sa.bindparam(f"g_{name}", type_=sa.Text()), sa.Text)
            for name in _GIVEN
        ]
        insert = postgresql.insert(self._table).from_select([*_GIVEN, "taken_at"], sa.select(*values, now()))
        put = insert.on_conflict_do_nothing(index_elements=self._key).returning(*self._key).cte("put")
        count = sa.func.count()
        is_short = count < sa.func.cardinality(arrays["message_id"])
        found = [sa.case((is_short, sa.func.array_agg(sa.cast(put.c[column.name], sa.Text)))) for column in self._key]
        return sa.select(count, *found).select_from(put)


def list_given(table: sa.FromClause, names: Sequence[str], dialect: Dialect) -> sa.Subquery:
    """Values for columns of a table as rows, from a JSON document `g_rows`, for MySQL and MariaDB."""
    c = table.c
    kinds = [f"{name} {c[name].type.compile(dialect=dialect)} PATH '$[{at}]'" for at, name in enumerate(names)]
    listed = f"SELECT * FROM JSON_TABLE(:g_rows, '$[*]' COLUMNS ({', '.join(kinds)})) AS g"
    return sa.text(listed).columns(**{name: c[name].type for name in names}).subquery("given")


class _MysqlTakes(Takes):
    """MySQL and MariaDB do not say which rows of an INSERT are new: a token in them does.

    INSERT IGNORE would also hide a row that a check or a trigger refuses. When a transaction is rolled back while two
    or more wait for its message, InnoDB ends all but one of these as deadlocked: run again, they find a repeat.
    """

    def __init__(self, table: sa.TableClause, dialect: Dialect) -> None:
        c = table.c
        given = list_given(table, _GIVEN, dialect)
        token = sa.bindparam("g_token", type_=sa.String())
        source = sa.select(*(given.c[name] for name in _GIVEN), now(), token)
        insert = mysql.insert(table).from_select([*_GIVEN, "taken_at", "token"], source)
        self._put = Hot(insert.on_duplicate_key_update(token=c.token))
        key = (c.consumer_group == given.c.consumer_group) & (c.message_id == given.c.message_id)
        mine = sa.select(c.consumer_group, c.message_id).select_from(given, table).where(key, c.token == token)
        self._mine = Hot(mine.prefix_with("STRAIGHT_JOIN"))

    def _insert(self, db: sa.Connection, messages: Sequence[Message]) -> Sequence[Key] | None:
        rows = orjson.dumps([_row(message) for message in messages]).decode()
        params = {"g_rows": rows, "g_token": str(uuid4())}
        self._put.execute(db, params).close()
        mine = self._mine.fetch(db, params)
        return None if len(mine) == len(messages) else [(group, message_id) for group, message_id in mine]


class _SqliteTakes(Takes):
    """One JSON document with all messages."""

    def __init__(self, table: sa.TableClause) -> None:
        c = table.c
        columns = ", ".join(f"json_extract(value, '$[{at}]') AS {name}" for at, name in enumerate(_GIVEN))
        listed = sa.text(f"SELECT {columns} FROM json_each(:g_rows)")
        given = listed.columns(**{name: c[name].type for name in _GIVEN}).subquery("given")
        # Without a condition SQLite takes the ON of the conflict for that of a join.
        source = sa.select(*(given.c[name] for name in _GIVEN), now()).where(sa.text("1 = 1"))
        key = [c.consumer_group, c.message_id]
        insert = sqlite.insert(table).from_select([*_GIVEN, "taken_at"], source)
        self._put = Hot(insert.on_conflict_do_nothing(index_elements=key).returning(*key))

    def _insert(self, db: sa.Connection, messages: Sequence[Message]) -> Sequence[Key] | None:
        rows = orjson.dumps([_row(message) for message in messages]).decode()
        new = self._put.fetch(db, {"g_rows": rows})
        return None if len(new) == len(messages) else [(group, message_id) for group, message_id in new]
