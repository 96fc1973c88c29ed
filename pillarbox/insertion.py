"""Events to one INSERT: the statement and its parameters for a database and a driver's parameter style.

PostgreSQL takes arrays and unnests them; the others take one VALUES list, whose row is compiled once and
repeated as text, because compiling a thousand rows costs more than running them. Nothing here does I/O.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.sql import ColumnElement

from pillarbox.encoding import Encoder
from pillarbox.event import Event
from pillarbox.layouts import Layout
from pillarbox.layouts.clock import Timestamp, later, row_now
from pillarbox.wakeup import channel_name

MAX_ROWS = 1000
MAX_BYTES = 8 * 1024 * 1024
# MariaDB refuses statements above 16 MB by default, and drivers write bytes as hexadecimal digits.
_MAX_MYSQL_BYTES = MAX_BYTES // 2 - 256 * 1024
_MAX_SQLITE_PARAMS = 32_000
_MAX_SQLITE_TEXT = 900_000


class Prepared(NamedTuple):
    """A statement ready for a driver; `lookup`, if there is one, must be asked for the result."""

    sql: str
    params: Any
    ids: Sequence[UUID]
    lookup: tuple[str, Any] | None = None
    is_counted: bool = False
    """Whether the result is one row, with the new ids only when some of the events are not among them."""
    lock: tuple[str, Any] | None = None
    """Must be run first, for its locks."""
    before: tuple[str, Any] | None = None
    """Must be asked first, and then is the result: the ids that are there already."""
    left_out: Sequence[int] = ()
    """The positions of events that were not sent because an earlier one has their dedup key."""

    def existing(self, rows: Sequence[Any]) -> list[int]:
        """The positions of the events that were not written, from the rows of the result."""
        if self.before is not None:
            found = {_as_uuid(row[0]) for row in rows}
            return [position for position, event_id in enumerate(self.ids) if event_id in found]
        if self.is_counted:
            if rows[0][0] is None:
                return list(self.left_out)
            rows = [(row_id,) for row_id in rows[0][0]]
        elif len(rows) == len(self.ids):
            return []
        new = {_as_uuid(row[0]) for row in rows}
        positions: list[int] = []
        for position, event_id in enumerate(self.ids):
            # Of two events with one id the first was written.
            if event_id in new:
                new.remove(event_id)
            else:
                positions.append(position)
        return positions


def insertion_for(
    layout: Layout, table: sa.Table, dialect: Dialect, *, sink: str = "", notify: bool = True
) -> Insertion:
    """The insertion into a table as its database takes it."""
    chosen = _ArrayInsertion if dialect.name == "postgresql" else _ValuesInsertion
    return chosen(layout, table, dialect, sink=sink, notify=notify)


class Insertion(ABC):
    """Builds the statements that put events into one table, for one dialect and parameter style."""

    def __init__(self, layout: Layout, table: sa.Table, dialect: Dialect, *, sink: str, notify: bool) -> None:
        self._layout = layout
        self._encoder = Encoder(layout, table)
        # Without the table's own defaults: what a put does not name is the database's to fill.
        self._table = sa.table(table.name, *(sa.column(c.name, c.type) for c in table.c), schema=table.schema)
        self._channel = channel_name(table, layout)
        self._dialect = dialect
        self._sink = sink
        self._notify = notify
        self._max_rows = MAX_ROWS
        self._max_bytes = MAX_BYTES

    def prepare(self, events: Sequence[Event], headers: Sequence[str | None]) -> Iterator[Prepared]:
        """Statements for these events in order: one, unless they are too many or too large for one."""
        start = size = 0
        for index, (event, text) in enumerate(zip(events, headers, strict=True)):
            bytes_ = len(event.payload) + (0 if text is None else len(text))
            if index > start and (index - start >= self._max_rows or size + bytes_ > self._max_bytes):
                yield self._prepare(events[start:index], headers[start:index])
                start, size = index, 0
            size += bytes_
        yield self._prepare(events[start:], headers[start:])

    @abstractmethod
    def _prepare(self, events: Sequence[Event], headers: Sequence[str | None]) -> Prepared: ...

    def _lanes(self, events: Sequence[Event]) -> list[int]:
        crc32, lanes = zlib.crc32, self._layout.keyed.lanes
        return [crc32(event.id.bytes if event.key is None else event.key.encode()) % lanes for event in events]


class _ArrayInsertion(Insertion):
    """PostgreSQL: one array a column, or plain values for one event.

    Columns that no event of the statement uses stay out of it.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        fields, read = self._layout.fields, self._encoder.getter
        required = {name for name in self._layout.absent if name in fields and name != "headers"}
        self._always = [(name, read(name)) for name in (*_ALWAYS, *required) if name in fields or name == "id"]
        # A table whose rows always have a due time takes one whether the event brings it or not.
        self._groups = [
            [
                (name, _read_delay if name == "delay" else read(name))
                for name in group
                if (name in fields or name in ("due_at", "delay")) and name not in required
            ]
            for group in _OPTIONAL_GROUPS
        ]
        self._has_lanes = self._layout.order is not None
        self._is_locked = self._layout.is_locked_at_put
        self._locking: _Compiled | None = None
        self._statements: dict[tuple[str, ...], _Compiled] = {}
        self._singles: dict[tuple[str, ...], _Compiled] = {}
        self._keeps_uuid = self._dialect.driver in ("asyncpg", "psycopg", "psycopg_async")
        self._is_binary = self._dialect.driver in ("psycopg", "psycopg_async")

    def _prepare(self, events: Sequence[Event], headers: Sequence[str | None]) -> Prepared:
        if self._is_locked:
            ids = [event.id for event in events]
            kept = _first_of_each(events)
            if len(kept) < len(ids):
                sent = self._prepare_many([events[index] for index in kept], [headers[index] for index in kept])
                return sent._replace(ids=ids, left_out=sorted(set(range(len(ids))) - set(kept)))
        return self._prepare_one(events[0], headers[0]) if len(events) == 1 else self._prepare_many(events, headers)

    def _prepare_many(self, events: Sequence[Event], headers: Sequence[str | None]) -> Prepared:
        ids = [event.id for event in events]
        arrays: dict[str, Sequence[Any]] = {name: list(map(get, events)) for name, get in self._always}
        arrays["id"] = ids if self._keeps_uuid else list(map(str, ids))
        if self._has_lanes:
            arrays["lane"] = self._lanes(events)
        for group in self._groups:
            found = {name: headers if name == "headers" else list(map(get, events)) for name, get in group}
            if any(values.count(None) < len(ids) for values in found.values()):
                arrays |= found
        statement = self._statement(tuple(arrays), is_single=False)
        return Prepared(statement.sql, statement.bind(arrays), ids, is_counted=True, lock=self._lock(events))

    def _prepare_one(self, event: Event, headers: str | None) -> Prepared:
        values: dict[str, Any] = {name: get(event) for name, get in self._always}
        values["id"] = event.id if self._keeps_uuid else str(event.id)
        if self._has_lanes:
            [values["lane"]] = self._lanes([event])
        for group in self._groups:
            found = {name: headers if name == "headers" else get(event) for name, get in group}
            if any(value is not None for value in found.values()):
                values |= found
        statement = self._statement(tuple(values), is_single=True)
        return Prepared(statement.sql, statement.bind(values), [event.id], lock=self._lock([event]))

    def _lock(self, events: Sequence[Event]) -> tuple[str, Any] | None:
        """Locks on ids and dedup keys until the transaction ends, in one order for everybody."""
        if not self._is_locked:
            return None
        names = {f"id {event.id}" for event in events} | {f"key {e.dedup_key}" for e in events if e.dedup_key}
        if self._locking is None:
            listed = sa.func.unnest(sa.bindparam("names", type_=postgresql.ARRAY(sa.Text)))
            given = listed.table_valued(sa.column("name", sa.Text), name="listed").render_derived()
            space: ColumnElement[int] = sa.literal_column(str(zlib.crc32(self._channel.encode())))
            number = sa.func.hashtextextended(given.c.name, space)
            self._locking = _compile(sa.select(sa.func.pg_advisory_xact_lock(number)), self._dialect)
        return self._locking.sql, self._locking.bind({"names": sorted(names)})

    def _statement(self, names: tuple[str, ...], *, is_single: bool) -> _Compiled:
        statements = self._singles if is_single else self._statements
        statement = statements.get(names)
        if statement is None:
            statement = statements[names] = self._compile(names, is_single)
        return statement

    def _compile(self, names: Sequence[str], is_single: bool) -> _Compiled:
        compiled = _compile(self._build(names, is_single), self._dialect)
        if not self._is_binary:
            return compiled
        # As text psycopg takes twice as long for ids and bytes.
        sql = compiled.sql
        for name in names:
            sql = sql.replace(f"%({name})s", f"%({name})b")
        return compiled._replace(sql=sql)

    def _build(self, names: Sequence[str], is_single: bool) -> Any:
        layout = self._layout
        kinds = {name: self._kind(name) for name in names}
        given = _given(kinds, is_single).columns(*(sa.column(name) for name in names)).subquery("given").c
        columns: dict[str, Any] = {
            layout.fields[name]: self._convert(name, given[name]) for name in names if name in layout.fields
        }
        if self._has_lanes:
            columns |= {layout.keyed.sink: sa.literal_column(_quote(self._sink)), layout.keyed.lane: given.lane}
        due = None
        if "due_at" in names:
            # Where a row always has a due time, events of the statement that bring none are due now.
            else_now = () if "due_at" in layout.fields else (row_now(),)
            due = sa.func.coalesce(given.due_at, later(given.delay), *else_now, type_=Timestamp())
        columns |= layout.put(due) if layout.put is not None else {}
        source = sa.select(*(_element(value).label(name) for name, value in columns.items()))
        if self._is_locked:
            source = source.where(sa.not_(self._is_there(given, names)))
        insert = postgresql.insert(self._table).from_select(list(columns), source).on_conflict_do_nothing()
        row_id = self._returned_id().label("put_id")
        channel: ColumnElement[str] = sa.literal_column(_quote(self._channel))
        message: Any = sa.literal_column("''")
        if layout.channel is not None:
            message = self._table.c[layout.fields["topic"]]
        if is_single:  # a row that returns says it all
            return insert.returning(_tell(channel, message) if self._notify else row_id)
        put = insert.returning(row_id, message.label("message")).cte("put")
        count = sa.func.count()
        # The ids go back only when some of them were there before.
        missing = count < sa.func.cardinality(sa.text("CAST(:id AS UUID[])"))
        found = sa.func.coalesce(sa.func.array_agg(sa.cast(put.c.put_id, sa.Text)), sa.text("CAST('{}' AS TEXT[])"))
        result: list[Any] = [sa.case((missing, found))]
        if self._notify:
            # A transaction's equal messages are one; the others are told one by one.
            told = _tell(channel, message) if layout.channel is None else sa.func.max(_tell(channel, put.c.message))
            result.append(sa.case((count > sa.literal_column("0"), told)) if layout.channel is None else told)
        return sa.select(*result).select_from(put)

    def _is_there(self, given: Any, names: Sequence[str]) -> ColumnElement[bool]:
        other = self._table.alias("other")
        same = [other.c[self._layout.fields[name]] == given[name] for name in ("id", "dedup_key") if name in names]
        return sa.exists(sa.select(sa.literal_column("1")).where(sa.or_(*same)))

    def _kind(self, name: str) -> str:
        if name == "payload":
            is_text = not isinstance(self._table.c[self._layout.fields["payload"]].type, sa.LargeBinary)
            return "TEXT" if is_text else "BYTEA"
        return _TYPES.get(name, "TEXT")

    def _convert(self, name: str, value: Any) -> Any:
        if name == "headers" or (name in self._layout.fields and self._encoder.is_document(name)):
            return sa.cast(value, postgresql.JSONB)
        return sa.cast(value, postgresql.UUID) if name != "id" and self._encoder.is_uuid(name) else value

    def _returned_id(self) -> Any:
        fields, c = self._layout.fields, self._table.c
        if "id" in fields:
            return c[fields["id"]]
        # It travels in the headers.
        header: ColumnElement[str] = sa.literal_column(_quote(self._layout.carried["id"]))
        return sa.cast(c[fields["headers"]].op("->>")(header), postgresql.UUID)


def _tell(channel: ColumnElement[str], message: Any) -> ColumnElement[str]:
    # The function returns nothing, which no driver can read.
    return sa.cast(sa.func.pg_notify(channel, message), sa.Text)


def _given(kinds: Mapping[str, str], is_single: bool) -> sa.TextClause:
    if is_single:
        return sa.text("SELECT " + ", ".join(f'CAST(:{name} AS {kind}) AS "{name}"' for name, kind in kinds.items()))
    arrays = ", ".join(f"CAST(:{name} AS {kind}[])" for name, kind in kinds.items())
    quoted = ", ".join(f'"{name}"' for name in kinds)
    return sa.text(f"SELECT * FROM unnest({arrays}) AS g({quoted})")


class _ValuesInsertion(Insertion):
    """MySQL, MariaDB and SQLite: one VALUES list, with a row's text chosen by its kind of due time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._dialect = _positional(self._dialect)
        self._is_sqlite = self._dialect.name == "sqlite"
        self._has_lanes = self._layout.order is not None
        self._is_binary = isinstance(self._table.c[self._layout.fields["payload"]].type, sa.LargeBinary)
        # aiomysql cannot write bytes into a statement with the PyMySQL of today.
        self._is_hex = self._dialect.driver == "aiomysql" and self._is_binary
        # The fields whose stored form is not the event's own come after the others, see `_row`.
        self._plain = [name for name in _CARRIED if name in self._layout.fields]
        readers = [self._encoder.getter(name) for name in self._plain]
        is_plain = len(self._plain) > 1 and not self._layout.absent
        self._get: Callable[[Event], tuple[Any, ...]] = (
            attrgetter(*self._plain) if is_plain else lambda event: tuple(read(event) for read in readers)
        )
        self._read_payload = self._encoder.getter("payload")
        self._kinds = {kind: self._compile_row(due) for kind, due in _DUE.items()}
        if self._is_sqlite:
            longest = max(len(kind.sql) for kind in self._kinds.values()) + 2
            most = max(kind.params for kind in self._kinds.values())
            self._max_rows = min(MAX_ROWS, _MAX_SQLITE_PARAMS // most, _MAX_SQLITE_TEXT // longest)
        else:
            self._max_bytes = _MAX_MYSQL_BYTES
        row_id = self._quote(self._layout.fields["id"])
        # INSERT IGNORE would also hide values that do not fit; the fence tells whose row it is.
        self._tail = (
            f" ON CONFLICT DO NOTHING RETURNING {row_id}"
            if self._is_sqlite
            else f" ON DUPLICATE KEY UPDATE {row_id} = {row_id}"
        )
        self._mark = "?" if self._dialect.paramstyle == "qmark" else "%s"
        table = self._dialect.identifier_preparer.format_table(self._table)
        fence = f"{self._quote(self._layout.lease.fence)} = {self._mark} AND " if self._has_lanes else ""
        self._lookup = f"SELECT {row_id} FROM {table} WHERE {fence}{row_id} IN "

    def _prepare(self, events: Sequence[Event], headers: Sequence[str | None]) -> Prepared:
        fence = str(uuid4())
        ids = [event.id for event in events]
        texts = list(map(str, ids))
        rows: list[str] = []
        params: list[Any] = []
        lanes = self._lanes(events) if self._has_lanes else [0] * len(events)
        absent = self._layout.absent.get("headers")
        for event, row_id, lane, text in zip(events, texts, lanes, headers, strict=True):
            kind: str | None = None
            due: str | float | None = None
            if event.due_at is not None:
                kind, due = "due_at", _utc_text(event.due_at)
            elif event.delay is not None:
                kind, due = "delay", event.delay.total_seconds()
            row = self._kinds[kind]
            rows.append(row.sql)
            payload = event.payload.hex() if self._is_hex else self._read_payload(event)
            listed = absent if text is None else text
            params += row.pick((*self._get(event), payload, row_id, listed, self._sink, lane, fence, due))
        sql = f"{self._kinds[None].head} VALUES {', '.join(rows)}{self._tail}"
        if self._is_sqlite:
            return Prepared(sql, tuple(params), ids)
        lookup = f"{self._lookup}({', '.join([self._mark] * len(ids))})"
        if self._has_lanes:
            return Prepared(sql, tuple(params), ids, (lookup, (fence, *texts)))
        return Prepared(sql, tuple(params), ids, before=(lookup, tuple(texts)))

    def _compile_row(self, due: Any) -> _Row:
        layout = self._layout
        names = [*self._plain, "payload", "id", "headers", "sink", "lane", "fence", "due"]
        columns: dict[str, Any] = {
            layout.fields[name]: sa.bindparam(f"p_{name}") for name in names if name in layout.fields
        }
        if self._is_hex:
            columns[layout.fields["payload"]] = sa.func.unhex(sa.bindparam("p_payload"))
        if self._has_lanes:
            columns |= {layout.keyed.sink: sa.bindparam("p_sink"), layout.keyed.lane: sa.bindparam("p_lane")}
        columns |= layout.put(due) if layout.put is not None else {}
        if not self._is_sqlite and self._has_lanes:
            columns[layout.lease.fence] = sa.bindparam("p_fence")
        insert = sa.insert(self._table).values({name: _element(value) for name, value in columns.items()})
        compiled = _compile(insert, self._dialect)
        head, _, row = compiled.sql.partition(" VALUES ")
        places = [names.index(name.removeprefix("p_")) for name in compiled.names or ()]
        return _Row(head, row, len(places), itemgetter(*places))

    def _quote(self, column: str) -> str:
        return self._dialect.identifier_preparer.quote(column)


class _Row(NamedTuple):
    head: str
    sql: str
    params: int
    pick: Callable[[tuple[Any, ...]], tuple[Any, ...]]


class _Compiled(NamedTuple):
    sql: str
    names: tuple[str, ...] | None

    def bind(self, values: Mapping[str, Any]) -> Any:
        return values if self.names is None else tuple(values[name] for name in self.names)


def _compile(statement: Any, dialect: Dialect) -> _Compiled:
    compiled = statement.compile(dialect=dialect)
    names = None if compiled.positiontup is None else tuple(compiled.positiontup)
    return _Compiled(compiled.string, names)


# What travels with every event as it is; the life cycle's columns come from the layout.
_CARRIED = (
    *("type", "topic", "key", "content_type", "dedup_key", "aggregate_type", "aggregate_id"),
    *("schema_version", "correlation_id", "causation_id", "trace_id", "source", "max_attempts"),
)
_ALWAYS = ("id", "type", "topic", "key", "payload", "content_type")
# Together, so that there are few statements to prepare.
_OPTIONAL_GROUPS = (
    ("headers",),
    ("dedup_key",),
    ("due_at", "delay"),
    (
        *("aggregate_type", "aggregate_id", "schema_version", "correlation_id", "causation_id"),
        *("trace_id", "source", "max_attempts"),
    ),
)


def _read_delay(event: Event) -> float | None:
    return None if event.delay is None else event.delay.total_seconds()


_TYPES = {
    "id": "UUID",
    "payload": "BYTEA",
    "max_attempts": "INTEGER",
    "lane": "SMALLINT",
    "due_at": "TIMESTAMP WITH TIME ZONE",
    "delay": "DOUBLE PRECISION",
}

_DUE: dict[str | None, Any] = {
    None: None,
    "due_at": sa.bindparam("p_due", type_=Timestamp()),
    "delay": later(sa.bindparam("p_due", type_=sa.Float())),
}

_DIALECTS: dict[str, Any] = {
    "asyncpg": postgresql.asyncpg.dialect,
    "psycopg": postgresql.psycopg.dialect,
    "psycopg2": postgresql.psycopg2.dialect,
    "sqlite3": sqlite.dialect,
    "aiosqlite": sqlite.dialect,
    "pymysql": mysql.pymysql.dialect,
}


@cache
def dialect_of(driver: str) -> Dialect:
    """SQLAlchemy's dialect for a driver that is used without SQLAlchemy."""
    dialect: Dialect = _DIALECTS[driver]()
    return dialect


def _first_of_each(events: Sequence[Event]) -> list[int]:
    """The positions of events whose dedup key no earlier one has: the rows of one statement do not see each other."""
    seen: set[str] = set()
    kept: list[int] = []
    for index, event in enumerate(events):
        if event.dedup_key is None or event.dedup_key not in seen:
            kept.append(index)
        if event.dedup_key is not None:
            seen.add(event.dedup_key)
    return kept


def _positional(dialect: Dialect) -> Dialect:
    # A VALUES list of many rows repeats its parameters, so they cannot go by name.
    style = "qmark" if dialect.paramstyle == "qmark" else "format"
    positional: Dialect = type(dialect)(paramstyle=style)  # type: ignore[call-arg]
    return positional


def _utc_text(moment: datetime) -> str:
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(" ", "microseconds")


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _element(value: Any) -> Any:
    if value is None:
        return sa.null()
    if isinstance(value, str):
        return sa.literal_column(_quote(value))
    return sa.literal_column(str(value)) if isinstance(value, int) else value


def _as_uuid(value: Any) -> UUID:
    return value if isinstance(value, UUID) else UUID(value.decode() if isinstance(value, bytes) else value)
