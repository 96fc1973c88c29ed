"""Events to one INSERT: the statement and its parameters for a database and a driver's way of writing parameters.

PostgreSQL takes arrays and unnests them; the others take one VALUES list, whose row is compiled once and repeated as
text, because compiling a thousand rows costs more than running them. Nothing here talks to a database.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.engine import Dialect

from pillarbox.event import Event
from pillarbox.layouts import Layout
from pillarbox.layouts.clock import Timestamp, later
from pillarbox.wakeup import channel_name

MAX_ROWS = 1000
MAX_BYTES = 8 * 1024 * 1024

# What travels with every event; the life cycle's columns come from the layout.
_CARRIED = (
    *("id", "type", "topic", "key", "payload", "content_type", "headers", "dedup_key", "aggregate_type"),
    *("aggregate_id", "schema_version", "correlation_id", "causation_id", "trace_id", "source", "max_attempts"),
)
_ARRAYS = {"id": "UUID", "payload": "BYTEA", "max_attempts": "INTEGER", "lane": "SMALLINT"}


class Prepared(NamedTuple):
    """A statement ready for a driver; it returns the ids of the new rows unless `lookup` must be asked for them."""

    sql: str
    params: Any
    lookup: tuple[str, Any] | None = None


class Insertion:
    """Builds the statements that put events into one table, for one dialect and parameter style."""

    def __init__(self, layout: Layout, table: sa.Table, dialect: Dialect, *, sink: str = "", notify: bool = True) -> None:
        self._layout = layout
        self._table = table
        self._dialect = dialect if dialect.name == "postgresql" else _positional(dialect)
        self._sink = sink
        self._fields = [name for name in _CARRIED if name in layout.fields]
        self._is_postgres = dialect.name == "postgresql"
        if self._is_postgres:
            self._compiled = self._compile(self._build_unnest(notify))
        else:
            self._rows = {kind: self._compile_row(due) for kind, due in _DUE.items()}
            self._head = self._rows[None][0]
        self._keeps_uuid = dialect.driver in ("asyncpg", "psycopg", "psycopg_async")

    def prepare(self, events: Sequence[Event], headers: Sequence[Mapping[str, Any]]) -> Iterator[Prepared]:
        """Statements for these events in order: one, unless they are too many or too large for one."""
        start = size = 0
        for index, event in enumerate(events):
            if index > start and (index - start >= MAX_ROWS or size + len(event.payload) > MAX_BYTES):
                yield self._prepare(events[start:index], headers[start:index])
                start, size = index, 0
            size += len(event.payload)
        yield self._prepare(events[start:], headers[start:])

    def _prepare(self, events: Sequence[Event], headers: Sequence[Mapping[str, Any]]) -> Prepared:
        if self._is_postgres:
            return Prepared(self._compiled.sql, self._compiled.bind(self._columns(events, headers)))
        return self._values(events, headers)

    # -- PostgreSQL -------------------------------------------------------------------------------------------------

    def _build_unnest(self, notify: bool) -> sa.Select[Any]:
        names = [*self._fields, "lane", "due_at", "delay"]
        kinds = {**_ARRAYS, "due_at": "TIMESTAMP WITH TIME ZONE", "delay": "DOUBLE PRECISION"}
        arrays = ", ".join(f"CAST(:{name} AS {kinds.get(name, 'TEXT')}[])" for name in names)
        quoted = ", ".join(f'"{name}"' for name in names)
        given = sa.text(f"SELECT * FROM unnest({arrays}) AS g({quoted})").columns(*(sa.column(name) for name in names))
        g = given.subquery("given").c
        columns: dict[str, Any] = {self._layout.fields[name]: g[name] for name in self._fields}
        columns[self._layout.fields["headers"]] = sa.cast(g.headers, postgresql.JSONB)
        columns |= {self._layout.sink: sa.literal_column(_quote(self._sink)), self._layout.lane: g.lane}
        due = sa.func.coalesce(g.due_at, later(g.delay), type_=Timestamp())
        columns |= self._layout.put(due)
        source = sa.select(*(_element(value).label(name) for name, value in columns.items()))
        row_id = self._table.c[self._layout.fields["id"]]
        put = (
            postgresql.insert(self._table)
            .from_select(list(columns), source)
            .on_conflict_do_nothing()
            .returning(row_id)
            .cte("put")
        )
        if not notify:
            return sa.select(put.c[row_id.name])
        channel = sa.literal_column(_quote(channel_name(self._table)))
        told = sa.cast(sa.func.pg_notify(channel, sa.literal_column("''")), sa.Text)
        first = sa.func.row_number().over() == sa.literal_column("1")
        return sa.select(put.c[row_id.name], sa.case((first, told)))

    def _columns(self, events: Sequence[Event], headers: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        columns = {name: [getattr(event, name) for event in events] for name in self._fields}
        columns["headers"] = [_encode_headers(each) for each in headers]
        columns["lane"] = [lane_of(event, self._layout.lanes) for event in events]
        columns["due_at"] = [event.due_at for event in events]
        columns["delay"] = [None if event.delay is None else event.delay.total_seconds() for event in events]
        if not self._keeps_uuid:
            columns["id"] = [str(value) for value in columns["id"]]
        return columns

    # -- the others -------------------------------------------------------------------------------------------------

    def _compile_row(self, due: Any) -> tuple[str, _Compiled]:
        columns: dict[str, Any] = {self._layout.fields[name]: sa.bindparam(f"p_{name}") for name in self._fields}
        columns |= {self._layout.sink: sa.bindparam("p_sink"), self._layout.lane: sa.bindparam("p_lane")}
        columns |= self._layout.put(due)
        if self._dialect.name != "sqlite":
            columns[self._layout.lease.fence] = sa.bindparam("p_fence")
        insert = sa.insert(self._table).values({name: _element(value) for name, value in columns.items()})
        compiled = self._compile(insert)
        head, _, row = compiled.sql.partition(" VALUES ")
        return head, compiled._replace(sql=row)

    def _values(self, events: Sequence[Event], headers: Sequence[Mapping[str, Any]]) -> Prepared:
        rows: list[str] = []
        params: list[Any] = []
        fence = str(uuid4())
        for event, extra in zip(events, headers, strict=True):
            kind = "due_at" if event.due_at is not None else "delay" if event.delay is not None else None
            values: dict[str, Any] = {f"p_{name}": getattr(event, name) for name in self._fields}
            values["p_id"] = str(event.id)
            values["p_headers"] = _encode_headers(extra)
            values["p_sink"] = self._sink
            values["p_lane"] = lane_of(event, self._layout.lanes)
            values["p_fence"] = fence
            if kind == "due_at":
                values["p_due"] = _utc_text(event.due_at)
            elif event.delay is not None:
                values["p_due"] = event.delay.total_seconds()
            compiled = self._rows[kind][1]
            rows.append(compiled.sql)
            params.extend(compiled.bind(values))
        sql = f"{self._head} VALUES {', '.join(rows)}"
        row_id = self._name(self._layout.fields["id"])
        if self._dialect.name == "sqlite":
            return Prepared(f"{sql} ON CONFLICT DO NOTHING RETURNING {row_id}", tuple(params))
        # INSERT IGNORE would also hide values that do not fit; the fence tells whose row it is.
        lane = self._name(self._layout.lane)
        mark = "?" if self._dialect.paramstyle == "qmark" else "%s"
        mine = f"{self._name(self._layout.lease.fence)} = {mark}"
        marks = ", ".join([mark] * len(events))
        lookup = f"SELECT {row_id} FROM {self._full_name()} WHERE {mine} AND {row_id} IN ({marks})"
        ids = (fence, *(str(event.id) for event in events))
        return Prepared(f"{sql} ON DUPLICATE KEY UPDATE {lane} = {lane}", tuple(params), (lookup, ids))

    # -- common -----------------------------------------------------------------------------------------------------

    def _name(self, column: str) -> str:
        return self._dialect.identifier_preparer.quote(column)

    def _full_name(self) -> str:
        return self._dialect.identifier_preparer.format_table(self._table)

    def _compile(self, statement: Any) -> _Compiled:
        compiled = statement.compile(dialect=self._dialect)
        names = None if compiled.positiontup is None else tuple(compiled.positiontup)
        return _Compiled(compiled.string, names, dict(compiled.params))


class _Compiled(NamedTuple):
    sql: str
    names: tuple[str, ...] | None
    constants: dict[str, Any]

    def bind(self, values: Mapping[str, Any]) -> Any:
        if self.names is None:
            return {**self.constants, **values}
        constants = self.constants
        return tuple(values[name] if name in values else constants[name] for name in self.names)


_DUE: dict[str | None, Any] = {
    None: None,
    "due_at": sa.bindparam("p_due", type_=Timestamp()),
    "delay": later(sa.bindparam("p_due", type_=sa.Float())),
}

DIALECTS: dict[str, Any] = {
    "asyncpg": postgresql.asyncpg.dialect,  # type: ignore[attr-defined]
    "psycopg": postgresql.psycopg.dialect,  # type: ignore[attr-defined]
    "psycopg2": postgresql.psycopg2.dialect,  # type: ignore[attr-defined]
    "sqlite3": sqlite.dialect,
    "aiosqlite": sqlite.dialect,
    "pymysql": mysql.pymysql.dialect,  # type: ignore[attr-defined]
}


def lane_of(event: Event, lanes: int) -> int:
    """The lane of an event: its key's, so that a key is always claimed under one latch."""
    return zlib.crc32(event.id.bytes if event.key is None else event.key.encode()) % lanes


def _positional(dialect: Dialect) -> Dialect:
    # A VALUES list of many rows repeats its parameters, so they cannot go by name.
    style = "qmark" if dialect.paramstyle == "qmark" else "format"
    positional: Dialect = type(dialect)(paramstyle=style)  # type: ignore[call-arg]
    return positional


def _encode_headers(headers: Mapping[str, Any]) -> str | None:
    return orjson.dumps(dict(headers)).decode() if headers else None


def _utc_text(moment: datetime | None) -> str:
    assert moment is not None
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _element(value: Any) -> Any:
    return sa.null() if value is None else value


def as_ids(rows: Sequence[Any]) -> set[UUID]:
    """The ids in a statement's result."""
    return {row[0] if isinstance(row[0], UUID) else UUID(str(row[0])) for row in rows}
