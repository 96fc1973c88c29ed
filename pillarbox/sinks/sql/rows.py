"""One row an event in one table, in the form that the table's own columns have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, Final
from uuid import UUID

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects import mysql, postgresql

from pillarbox.errors import ConfigError
from pillarbox.event import Event
from pillarbox.sinks.refused import Refused
from pillarbox.sinks.sql.tables import declare_events
from pillarbox.values import Given, check_known, read_text

FIELDS: Final = (
    *("id", "type", "topic", "key", "payload", "content_type", "headers"),
    *("aggregate_type", "aggregate_id", "schema_version"),
    *("correlation_id", "causation_id", "trace_id", "source", "created_at"),
)
_BINARY: Final = (sa.LargeBinary, sa.BINARY, sa.VARBINARY, mysql.TINYBLOB, mysql.MEDIUMBLOB, mysql.LONGBLOB)
Encode = Callable[[Any], Any]


class MissingTable(Exception):
    """The table is not there; the message names it."""


class UnfitTable(Exception):
    """The table cannot take the events; the message says why, and what to do."""


class RowWriter:
    """Inserts events into `table`; `columns` says which fields go where, all under their own names if None."""

    def __init__(self, table: str, *, schema: str | None, columns: Mapping[str, str] | None, what: str) -> None:
        for field, column in (columns or {}).items():
            check_known(field, FIELDS, f"{what} columns", kind="field")
            read_text(Given(column, f"{what} columns.{field}"))
        if columns is not None and not columns:
            raise ConfigError(f"{what} columns: expected at least one field of the event and its column")
        self.name = table
        self.schema = schema
        self._columns = dict(columns or {field: field for field in FIELDS})
        self._is_own = columns is None
        self._get = attrgetter(*self._columns) if len(self._columns) > 1 else _get_one(next(iter(self._columns)))
        self._encoders: list[tuple[int, Encode]] = []
        self._insert: Any = None
        self._is_array = False

    def declare(self, dialect: str) -> sa.Table | None:
        """The table for `create`, or None when its columns are the user's own."""
        return declare_events(self.name, schema=self.schema, dialect=dialect) if self._is_own else None

    def look(self, db: sa.Connection) -> None:
        """Read the table's columns and choose the form of each field; raises `MissingTable`, `UnfitTable`."""
        try:
            found = {each["name"]: each["type"] for each in sa.inspect(db).get_columns(self.name, schema=self.schema)}
        except sa.exc.NoSuchTableError:
            if self._is_own:
                raise MissingTable(f"there is no table {self.name!r}") from None
            raise UnfitTable(
                f"there is no table {self.name!r}. Make it: the option create makes none for columns of your own"
            ) from None
        missing = [column for column in self._columns.values() if column not in found]
        if missing:
            raise UnfitTable(f"table {self.name!r} has no column {missing[0]!r}. Add it, or name another in columns")
        dialect = db.dialect.name
        unknown = [column for column in self._columns.values() if isinstance(found[column], sa.types.NullType)]
        if unknown and dialect == "postgresql":
            # Text must be cast to it by its name; other databases take text for any column.
            raise UnfitTable(
                f"column {unknown[0]!r} of table {self.name!r} has a type that SQLAlchemy does not know. Name another "
                "in columns, or write rows with statements"
            )
        types = [found[column] for column in self._columns.values()]
        encoders = [_choose_encoder(field, type_, dialect) for field, type_ in zip(self._columns, types, strict=True)]
        self._encoders = [(index, encode) for index, encode in enumerate(encoders) if encode is not None]
        target = sa.table(self.name, *map(sa.column, self._columns.values()), schema=self.schema)
        self._is_array = dialect == "postgresql"
        if self._is_array:
            self._insert = _insert_arrays(target, list(self._columns), types)
        else:
            self._insert = sa.insert(target).values([sa.bindparam(f"c{n}") for n in range(len(types))])

    def prepare(self, event: Event) -> tuple[Any, ...]:
        """The values of an event's row; raises `Refused` when they have no form."""
        values: tuple[Any, ...] = self._get(event)
        changed = list(values)
        for index, encode in self._encoders:
            if changed[index] is not None:
                changed[index] = encode(changed[index])
        return tuple(changed)

    def write(self, db: sa.Connection, rows: Sequence[tuple[Any, ...]]) -> None:
        """Insert the rows in their order, in one round trip."""
        if self._is_array:
            first, *others = zip(*rows, strict=True)
            # The server pads a short array with nulls: what no event has costs nothing.
            arrays = [first, *(() if column.count(None) == len(column) else column for column in others)]
            db.execute(self._insert, {f"c{n}": list(column) for n, column in enumerate(arrays)})
        else:
            db.execute(self._insert, [{f"c{n}": value for n, value in enumerate(row)} for row in rows])


def _get_one(field: str) -> Callable[[Event], tuple[Any]]:
    get = attrgetter(field)
    return lambda event: (get(event),)


def _insert_arrays(target: sa.TableClause, fields: list[str], types: list[Any]) -> sa.Insert:
    sent = [_array_type(field, type_) for field, type_ in zip(fields, types, strict=True)]
    arrays = [sa.bindparam(f"c{n}", type_=postgresql.ARRAY(type_)) for n, type_ in enumerate(sent)]
    names = [f"c{n}" for n in range(len(types))]
    unnested = sa.func.unnest(*arrays).table_valued(*names, with_ordinality="n", name="u").render_derived()
    # Text fits any column of texts, which checks its length; whatever else a column is, the server reads it from text.
    values = [
        sa.cast(unnested.c[name], type_)
        if isinstance(form, sa.Text) and not _is_plain_text(type_)
        else unnested.c[name]
        for name, form, type_ in zip(names, sent, types, strict=True)
    ]
    return sa.insert(target).from_select(list(target.c), sa.select(*values).order_by(unnested.c.n))


def _is_plain_text(type_: Any) -> bool:
    return isinstance(type_, sa.String) and not isinstance(type_, sa.Enum)


def _array_type(field: str, type_: Any) -> Any:
    if isinstance(type_, sa.LargeBinary):
        return postgresql.BYTEA()
    if isinstance(type_, sa.Uuid) and field == "id":
        return postgresql.UUID(as_uuid=True)
    if isinstance(type_, sa.DateTime) and field == "created_at":
        return sa.TIMESTAMP(timezone=type_.timezone)
    return sa.Text()


def _choose_encoder(field: str, type_: Any, dialect: str) -> Encode | None:
    is_binary = isinstance(type_, _BINARY)
    if field == "payload":
        return None if is_binary else _decode_payload
    if field == "headers":
        return (lambda value: _encode_headers(value).encode()) if is_binary else _encode_headers
    if field == "id":
        if is_binary:
            return _id_bytes
        return None if dialect == "postgresql" and isinstance(type_, sa.Uuid) else str
    if field == "created_at":
        if not isinstance(type_, sa.DateTime):
            return _iso_time
        return _aware_time if dialect == "postgresql" and type_.timezone else encode_time(dialect)
    return str.encode if is_binary else None


def _decode_payload(payload: bytes) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as error:
        raise Refused(f"The payload is no UTF-8 text, which its column takes: {error}") from None


def _encode_headers(headers: Mapping[str, Any]) -> str:
    if not headers:
        return "{}"
    try:
        return orjson.dumps(dict(headers)).decode()
    except TypeError as error:
        raise Refused(f"Headers cannot be written as JSON: {error}") from None


encode_headers = _encode_headers


def _id_bytes(value: UUID) -> bytes:
    return value.bytes


def _iso_time(value: datetime) -> str:
    return value.astimezone(UTC).isoformat()


def _aware_time(value: datetime) -> datetime:
    return value.astimezone(UTC)


def encode_time(dialect: str) -> Encode:
    """How an instant is given to a column without a time zone: as UTC."""
    if dialect == "sqlite":
        return _iso_time
    return lambda value: value.astimezone(UTC).replace(tzinfo=None)
