"""Events from rows: which columns are read, and how their values become an event's fields.

Values are read as the driver gives them: one that does not decode must spoil its own row only. What a table has no
column for is taken from the headers in which it travels, or from the layout's fallbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any
from uuid import UUID, SafeUUID

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.elements import ColumnElement
from sqlalchemy.sql.functions import FunctionElement

from pillarbox.codec import decode_json
from pillarbox.event import BYTES, EVENT_FIELDS, LIMITS, NO_HEADERS, Claim, Event, Loader, compile_loader, load_event
from pillarbox.layouts.clock import UuidText
from pillarbox.layouts.foreign import NativeUuid
from pillarbox.layouts.layout import Layout
from pillarbox.stores.dialect import is_time

UNREADABLE = (ValueError, TypeError, AttributeError, OverflowError)
MOST_TRIES = 2**31 - 1
"""What the attempts of every layout can count to."""
FIRST_FIELD = 6
"""Where the event's fields start in the rows of a pick."""


def raw_fields(layout: Layout, table: Any) -> list[ColumnElement[Any]]:
    """The columns of an event in the order of its fields, NULL where the table has none; then the layout's extra."""
    fields = [raw_field(layout, table, name).label(f"field_{name}") for name in EVENT_FIELDS]
    extra = [table.c[name] for name in layout.extra if name in table.c]
    return [*fields, *(as_read(column, may_be_document=True).label(f"extra_{column.name}") for column in extra)]


def raw_field(layout: Layout, table: Any, name: str) -> ColumnElement[Any]:
    if name not in layout.fields:
        return sa.null()
    return as_read(table.c[layout.fields[name]], may_be_document=name in ("payload", "headers"))


def claimed_fields(layout: Layout, table: Any) -> list[ColumnElement[Any]]:
    """The same for a claim: NULL for a payload of more than `light` bytes; see `weighing`."""
    fields = raw_fields(layout, table)
    if "payload" in layout.fields:
        payload = raw_field(layout, table, "payload")
        is_light = weight(payload) <= sa.bindparam("light", type_=sa.BigInteger)
        fields[EVENT_FIELDS.index("payload")] = sa.case((is_light, payload)).label("field_payload")
    return fields


class weight(FunctionElement[int]):  # noqa: N801 - reads as the SQL function it stands for
    """The bytes of a value. The databases know them without reading a large one."""

    inherit_cache = True
    type = sa.BigInteger()
    name = "weight"


@compiles(weight)
def _weight(element: weight, compiler: Any, **kw: Any) -> str:
    return f"octet_length({compiler.process(element.clauses, **kw)})"


@compiles(weight, "sqlite")
def _weight_in_sqlite(element: weight, compiler: Any, **kw: Any) -> str:
    # The length of text is counted in characters there; that of a blob is known without reading it.
    value = compiler.process(element.clauses, **kw)
    return f"CASE typeof({value}) WHEN 'blob' THEN length({value}) ELSE length(CAST({value} AS BLOB)) END"


class readable(FunctionElement[Any]):  # noqa: N801 - reads as the SQL function it stands for
    """A time as its driver can read it: one of PostgreSQL before Christ, after the year 9999 or infinite is `_BEYOND`.

    The driver would fail on the whole result otherwise, and with it every row beside the odd one.
    """

    inherit_cache = True
    type = sa.types.NullType()
    name = "readable"


@compiles(readable)
def _readable(element: readable, compiler: Any, **kw: Any) -> str:
    return str(compiler.process(element.clauses, **kw)).removeprefix("(").removesuffix(")")


@compiles(readable, "postgresql")
def _readable_in_postgres(element: readable, compiler: Any, **kw: Any) -> str:
    time = compiler.process(element.clauses, **kw)
    is_readable = f"{time} >= '0001-01-01 00:00:00+00' AND {time} < '9999-12-30 00:00:00+00'"
    return f"CASE WHEN {is_readable} THEN {time} WHEN {time} IS NOT NULL THEN '9999-12-31 00:00:00+00' END"


_BEYOND = datetime(9999, 12, 30, tzinfo=UTC)


def read_time(value: Any) -> datetime | None:
    """A time as a listing shows it; None for one that cannot be read."""
    try:
        return None if value is None else _decode_time(value)
    except UNREADABLE:
        return None


def count_tries(attempts: Any) -> int:
    """The attempts of a row; text in their column is none, and nothing counts further than a column does."""
    return min(attempts, MOST_TRIES) if type(attempts) is int else 0


def as_read(column: Any, *, may_be_document: bool = False) -> ColumnElement[Any]:
    """A column as its driver gives it: a time as it can read it, a document as the database's own text."""
    plain: ColumnElement[Any] = sa.type_coerce(column, sa.types.NullType())
    if is_time(column.type):
        return readable(plain)
    # A payload goes on as it is, and a driver takes headers apart more slowly, or fails on the whole result.
    return sa.cast(column, sa.Text) if may_be_document and isinstance(column.type, sa.JSON) else plain


class EventLoader:
    """Makes events from rows whose raw event fields start at an offset."""

    def __init__(self, layout: Layout, table: sa.Table, dialect: str, offset: int) -> None:
        self._layout = layout
        self._offset = offset
        self._decoders = _decoders(layout, table, dialect)
        self._field_of = {header: name for name, header in layout.carried.items()}
        self.read: Loader = compile_loader(
            offset=offset,
            decoders=self._decoders,
            restore=self._restore if layout.carried else None,
            fallbacks=layout.fallbacks,
        )

    def load(self, row: Sequence[Any], row_id: Any) -> tuple[Event, str | None]:
        """The event, or what can be read of it and why that is not all."""
        try:
            return self.read(row, row_id), None
        except UNREADABLE as error:
            return load_event(*self._salvage(row[self._offset : self._offset + len(EVENT_FIELDS)])), str(error)

    def _restore(self, event: Any) -> None:
        """Take the fields that travel in the headers out of them."""
        fields = self._field_of
        headers = event.headers
        rest: dict[str, Any] = {}
        for header, value in headers.items():
            name = fields.get(header)
            if name is None:
                rest[header] = value
            else:
                setattr(event, name, value if type(value) is str and name not in _PARSED else _from_header(name, value))
        if len(rest) < len(headers):
            event.headers = MappingProxyType(rest) if rest else NO_HEADERS

    def _salvage(self, values: Sequence[Any]) -> list[Any]:
        good = dict(zip(EVENT_FIELDS, values, strict=True))
        for name, value in good.items():
            try:
                good[name] = self._decoders[name](value) if name in self._decoders and value is not None else value
            except UNREADABLE:
                good[name] = None
        payload = values[EVENT_FIELDS.index("payload")]
        for name in ("type", "topic", "key"):
            if isinstance(good[name], bytes):
                good[name] = None if name == "key" else good[name].decode(errors="backslashreplace")
        topic = str(good["topic"] or good["type"])
        return [
            good["id"] if isinstance(good["id"], UUID) else UUID(int=0),
            str(good["type"] or topic),
            *(topic, good["key"], payload if isinstance(payload, bytes) else str(payload or "").encode(), BYTES),
            *(NO_HEADERS, *(None for _ in EVENT_FIELDS[7:])),
        ]


class ClaimLoader:
    """Makes claims from the rows of a pick."""

    def __init__(self, layout: Layout, table: sa.Table, dialect: str, offset: int = FIRST_FIELD) -> None:
        self._events = EventLoader(layout, table, dialect, offset)
        self._read = self._events.read
        self._extra = [
            (name, index, _decoder_of(table.c[name].type, dialect))
            for index, name in enumerate(layout.extra, start=offset + len(EVENT_FIELDS))
        ]
        self.make: Callable[[Sequence[Any], Any, int], Claim] = self._make_more if layout.extra else self._make

    def load(self, row: Sequence[Any]) -> Claim:
        """A claim for a picked row; a row that does not decode makes a claim that says so."""
        return self.make(row, row[4], row[5])

    def _make(self, row: Sequence[Any], row_id: Any, attempts: int) -> Claim:
        try:
            if type(attempts) is not int or attempts >= MOST_TRIES:
                raise ValueError(f"expected a number of attempts below {MOST_TRIES}, got {attempts!r}")
            return Claim(row_id, self._read(row, row_id), attempts + 1)
        except UNREADABLE as error:
            event, defect = self._events.load(row, row_id)
            tries = min(count_tries(attempts) + 1, MOST_TRIES)
            return Claim(row_id, event, tries, defect=f"Row {row_id}: {defect or error}")

    def _make_more(self, row: Sequence[Any], row_id: Any, attempts: int) -> Claim:
        claim = self._make(row, row_id, attempts)
        extra: dict[str, Any] = {}
        for name, index, decode in self._extra:
            value = row[index]
            try:
                extra[name] = value if value is None or decode is None else decode(value)
            except UNREADABLE as error:
                claim.defect = claim.defect or f"Row {row_id}, column {name!r}: {error}"
        claim.extra = extra
        return claim


def _decoder_of(type: Any, dialect: str) -> Callable[[Any], Any] | None:
    """How a column's value as the driver gives it is read, by the column's type; None: it is taken as it is."""
    if isinstance(type, sa.JSON):
        return decode_json
    kind = getattr(type, "impl", type)
    if isinstance(kind, sa.DateTime):
        return _decode_time
    if isinstance(type, NativeUuid | UuidText):
        return _plain_uuid if dialect == "postgresql" else _read_uuid
    return None


def _decoders(layout: Layout, table: sa.Table, dialect: str) -> dict[str, Callable[[Any], Any]]:
    is_postgres = dialect == "postgresql"
    decoders: dict[str, Callable[[Any], Any]] = {"headers": _decode_headers}
    if "id" in layout.fields:
        decoders["id"] = _plain_uuid if is_postgres else _read_uuid
    for name in ("due_at", "created_at"):
        if name in layout.fields:
            decoders[name] = _decode_time
    payload = table.c[layout.fields["payload"]].type if "payload" in layout.fields else None
    # SQLite's columns hold whatever was written into them.
    if not isinstance(payload, sa.LargeBinary) or dialect == "sqlite":
        decoders["payload"] = _text_to_bytes
    if dialect == "sqlite":
        decoders |= {name: _check_text for name in layout.fields if name in LIMITS}
        decoders |= {"max_attempts": _check_number} if "max_attempts" in layout.fields else {}
    for name in ("aggregate_id", "correlation_id", "causation_id", "key"):
        if name in layout.fields and not isinstance(table.c[layout.fields[name]].type, sa.String):
            decoders[name] = str
    return decoders


def _check_text(value: Any) -> str:
    # Text that is not UTF-8 arrives as bytes, and a column without a type may hold a blob.
    if type(value) is str:
        return value
    raise ValueError(f"expected text, got {value!r}")


def _check_number(value: Any) -> int:
    if type(value) is int:
        return value
    raise ValueError(f"expected a number, got {value!r}")


def _text_to_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def _decode_headers(value: Any) -> Mapping[str, Any]:
    try:
        headers = decode_json(value) if isinstance(value, (str, bytes)) else value
    except ValueError as error:
        raise ValueError(f"headers are not a JSON object: {value!r}") from error
    if not headers:
        return NO_HEADERS
    if not isinstance(headers, dict):
        raise ValueError(f"headers are not a JSON object: {value!r}")
    return MappingProxyType(headers)


def _decode_time(value: Any) -> datetime:
    if isinstance(value, str):  # SQLite
        value = datetime.fromisoformat(value)
    moment: datetime = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    if moment >= _BEYOND:
        raise ValueError("expected a time of the years 1 to 9999, got one beyond them")
    return moment


def _read_uuid(value: Any) -> UUID:
    return value if isinstance(value, UUID) else UUID(value)


_UNKNOWN = SafeUUID.unknown
_set_int = UUID.__dict__["int"].__set__
_set_is_safe = UUID.__dict__["is_safe"].__set__


def _plain_uuid(value: UUID) -> UUID:
    # asyncpg has a class of its own, which encoders and pickles of the standard one do not know.
    if type(value) is UUID:
        return value
    # The constructor would check a number that another UUID vouches for, which costs as much as the rest of the event.
    plain = object.__new__(UUID)
    _set_int(plain, value.int)
    _set_is_safe(plain, _UNKNOWN)
    return plain


_PARSED = frozenset({"id", "max_attempts"})


def _from_header(name: str, value: Any) -> Any:
    if name == "id":
        return _parse_uuid(str(value))
    return int(value) if name == "max_attempts" else str(value)


def _parse_uuid(text: str) -> UUID:
    digits = text.replace("-", "")
    if len(text) != 36 or len(digits) != 32:
        return UUID(text)
    plain = object.__new__(UUID)
    _set_int(plain, int(digits, 16))
    _set_is_safe(plain, _UNKNOWN)
    return plain
