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
from sqlalchemy.sql.elements import ColumnElement

from pillarbox.codec import decode_json
from pillarbox.event import BYTES, EVENT_FIELDS, NO_HEADERS, Claim, Event, Loader, compile_loader, load_event
from pillarbox.layouts.clock import UuidText
from pillarbox.layouts.foreign import NativeUuid
from pillarbox.layouts.layout import Layout

UNREADABLE = (ValueError, TypeError, AttributeError)
FIRST_FIELD = 6
"""Where the event's fields start in the rows of a pick."""


def raw_fields(layout: Layout, table: Any) -> list[ColumnElement[Any]]:
    """The columns of an event in the order of its fields, NULL where the table has none; then the layout's extra."""
    fields = [
        _raw(table.c[layout.fields[name]], name in ("payload", "headers")).label(f"field_{name}")
        if name in layout.fields
        else sa.null().label(f"field_{name}")
        for name in EVENT_FIELDS
    ]
    extra = [table.c[name] for name in layout.extra if name in table.c]
    return [*fields, *(_raw(column, True).label(f"extra_{column.name}") for column in extra)]


def _raw(column: Any, may_be_document: bool) -> ColumnElement[Any]:
    # JSON as the database's own text: a payload goes on as it is, and a driver takes headers apart more slowly.
    is_document = may_be_document and isinstance(column.type, sa.JSON)
    plain: ColumnElement[Any] = sa.cast(column, sa.Text) if is_document else sa.type_coerce(column, sa.types.NullType())
    return plain


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
            return Claim(row_id, self._read(row, row_id), attempts + 1)
        except UNREADABLE:
            event, defect = self._events.load(row, row_id)
            return Claim(row_id, event, attempts + 1, defect=f"Row {row_id}: {defect}")

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
        if name in layout.fields and not (is_postgres and getattr(table.c[layout.fields[name]].type, "timezone", True)):
            decoders[name] = _decode_time
    payload = table.c[layout.fields["payload"]].type if "payload" in layout.fields else None
    # SQLite's columns hold whatever was written into them.
    if not isinstance(payload, sa.LargeBinary) or dialect == "sqlite":
        decoders["payload"] = _text_to_bytes
    for name in ("aggregate_id", "correlation_id", "causation_id", "key"):
        if name in layout.fields and not isinstance(table.c[layout.fields[name]].type, sa.String):
            decoders[name] = str
    return decoders


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
    moment: datetime = value
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


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
