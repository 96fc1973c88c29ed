"""An event as a table wants it: what is checked before any SQL, which column or header takes each field.

Pillarbox's own table has a column for everything. Others have not: what they have no column for travels in the
headers, and an event that they could not hold is refused with the column's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any
from uuid import UUID

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from pillarbox.codec import JSON, is_json
from pillarbox.errors import InvalidEvent, Unsupported
from pillarbox.event import EVENT_FIELDS, Event
from pillarbox.layouts.layout import Feature, Layout

_NOT_STORED = frozenset({"headers", "delay", "created_at"})


class Encoder:
    """Checks events for one table and says how each of their fields is written."""

    def __init__(self, layout: Layout, table: sa.Table, *, is_message: bool = False) -> None:
        """`is_message`: events are messages that came, whose headers may have been written by a relay of ours."""
        self._layout = layout
        self._is_message = is_message
        self._columns = {name: table.c[column] for name, column in layout.fields.items()}
        self.has_document = isinstance(self._columns["payload"].type, sa.JSON)
        """Whether the payload's column takes JSON only."""
        self._has_own_table = layout.order is not None
        supplied = set() if layout.put is None else set(layout.put(None))
        self._required = [
            (name, column)
            for name, column in self._columns.items()
            if not column.nullable
            and column.server_default is None
            and name not in layout.absent
            and column.name not in supplied
        ]
        self._lengths = [
            (name, column, column.type.length)
            for name, column in self._columns.items()
            if isinstance(column.type, sa.String) and column.type.length and name not in ("id", "payload")
        ]
        self._uuids = [
            (name, column)
            for name, column in self._columns.items()
            if name in ("aggregate_id", "correlation_id", "causation_id", "key") and _is_uuid(column)
        ]
        self._homeless = [
            name
            for name in EVENT_FIELDS
            if name not in layout.fields and name not in layout.carried and name not in _NOT_STORED
        ]
        if Feature.SCHEDULE in layout.features:
            self._homeless = [name for name in self._homeless if name != "due_at"]
        self._has_headers = "headers" in layout.fields
        self._is_null_allowed = "headers" not in layout.absent

    def check(self, event: Event) -> None:
        """Refuse an event that the table could not hold, or that its other readers could not read."""
        if self._has_own_table:
            return
        if self._layout.put is None:
            raise Unsupported(f"Layout {self._layout.name!r}: its rows are written by its own system, not by a put")
        for name, column in self._required:
            if getattr(event, name) is None:
                raise self._refuse(event, column, f"the event has no {name}. Give it one: Event(…, {name}=…)")
        for name, column, length in self._lengths:
            value = getattr(event, name)
            if isinstance(value, str) and len(value) > length:
                why = f"at most {length} characters fit, the event's {name} has {len(value)}"
                raise self._refuse(event, column, why)
        for name, column in self._uuids:
            self._check_uuid(event, name, column)
        if self.has_document:
            self._check_document(event)
        self._check_homeless(event)
        if event.headers and not self._has_headers:
            raise self._homeless_error(event, "headers")
        if event.delay is not None and Feature.SCHEDULE not in self._layout.features:
            raise self._homeless_error(event, "delay")
        if self._layout.has_text_headers:
            self._check_headers(event)
        if self._layout.check is not None:
            self._layout.check(event)
        own = self._own_headers(event) if self._has_headers else {}
        if self._layout.refuse_headers is not None and (wrong := self._layout.refuse_headers(own)) is not None:
            raise InvalidEvent(f"Event {event.type!r} ({event.id}): layout {self._layout.name!r} {wrong}")

    def headers(self, events: Sequence[Event], trace: Mapping[str, str]) -> list[str | None]:
        """Each event's headers as JSON: its own, the trace it is put in, and the fields that travel in them."""
        if not self._layout.carried:
            alone = orjson.dumps(trace).decode() if trace else None
            return [alone if not event.headers else _encode(event.headers, trace) for event in events]
        if "headers" not in self._layout.fields:
            return [None for _ in events]
        texts = [self._encode_fitting(event, trace) for event in events]
        return [None if text == "{}" and self._is_null_allowed else text for text in texts]

    def getter(self, name: str) -> Callable[[Event], Any]:
        """How a field's value is read for its column."""
        if name == "payload" and self._layout.told:
            return self._telling_text
        if name == "payload" and not isinstance(self._columns["payload"].type, sa.LargeBinary):
            return _payload_text
        if name in self._layout.absent:
            default = self._layout.absent[name]
            get = attrgetter(name)
            return lambda event: default if get(event) is None else get(event)
        return attrgetter(name)

    def is_document(self, name: str) -> bool:
        return isinstance(self._columns[name].type, sa.JSON)

    def is_uuid(self, name: str) -> bool:
        return _is_uuid(self._columns[name])

    def _telling_text(self, event: Event) -> str:
        text, found = event.payload.decode().lstrip(), orjson.loads(event.payload)
        told = {name: getattr(event, field) for name, field in self._layout.told.items() if name not in found}
        missing = orjson.dumps({name: value for name, value in told.items() if value is not None}).decode()
        if missing == "{}":
            return text
        # Spliced, so that the numbers of the rest keep all their digits.
        return f"{missing[:-1]}{',' if found else ''}{text[1:]}"

    def _own_headers(self, event: Event) -> dict[str, Any]:
        return {**event.headers, **self._carry(event)}

    def _encode_fitting(self, event: Event, trace: Mapping[str, str]) -> str:
        own = self._own_headers(event)
        refuse = self._layout.refuse_headers
        if trace and refuse is not None and refuse({**trace, **own}) is not None:
            # An event is not refused for the trace that it happens to be put in.
            trace = {}
        return _encode(own, trace)

    def _carry(self, event: Event) -> dict[str, str]:
        carried: dict[str, str] = {}
        for name, header in self._layout.carried.items():
            value = getattr(event, name)
            fallback = self._layout.fallbacks.get(name)
            is_told = value is None or (name != "id" and fallback is not None and fallback(event, None) == value)
            # Also where it is not needed: whoever reads the row takes the header for the field.
            is_same = value is not None and event.headers.get(header) == str(value)
            if header in event.headers and not is_same and not (is_told and self._is_message):
                raise InvalidEvent(
                    f"Event {event.type!r} ({event.id}): layout {self._layout.name!r} needs the header {header!r} "
                    f"for the event's {name}; name yours otherwise, or give it as {name}"
                )
            if not is_told:
                carried[header] = str(value)
        return carried

    def _check_uuid(self, event: Event, name: str, column: sa.Column[Any]) -> None:
        value = getattr(event, name)
        try:
            if value is not None:
                UUID(value)
        except ValueError as error:
            raise self._refuse(event, column, f"expected a UUID for the event's {name}, got {value!r}") from error

    def _check_document(self, event: Event) -> None:
        column = self._columns["payload"]
        if not is_json(event.content_type):
            raise self._refuse(event, column, f"it holds JSON, the event's content type is {event.content_type!r}")
        try:
            orjson.loads(event.payload)
        except ValueError as error:
            raise self._refuse(event, column, f"it holds JSON, which the payload is not: {error}") from error

    def _check_homeless(self, event: Event) -> None:
        for name in self._homeless:
            value = getattr(event, name)
            if name == "content_type" and (value == JSON or not self.has_document):
                continue
            fallback = self._layout.fallbacks.get(name)
            if value is None or (fallback is not None and fallback(event, None) == value):
                continue
            # A topic that the event did not bring is its type.
            if name == "topic" and value == event.type:
                continue
            raise self._homeless_error(event, name)

    def _homeless_error(self, event: Event, name: str) -> Unsupported:
        return Unsupported(
            f"Event {event.type!r} ({event.id}): layout {self._layout.name!r} has no place for the event's {name}; "
            "leave it out"
        )

    def _check_headers(self, event: Event) -> None:
        for name, value in event.headers.items():
            if not isinstance(value, str):
                raise InvalidEvent(
                    f"Event {event.type!r} ({event.id}), header {name!r}: layout {self._layout.name!r} takes text for "
                    f"headers only, got {value!r}"
                )

    def _refuse(self, event: Event, column: sa.Column[Any], why: str) -> InvalidEvent:
        place = f"column {column.name!r} of {column.table.fullname!r}"
        return InvalidEvent(f"Event {event.type!r} ({event.id}), {place}: {why}")


def _is_uuid(column: sa.Column[Any]) -> bool:
    return column.type.compile(dialect=postgresql.dialect()) == "UUID"  # type: ignore[no-untyped-call]


def _payload_text(event: Event) -> str:
    return event.payload.decode()


def _encode(headers: Mapping[str, Any], trace: Mapping[str, str]) -> str:
    # A trace state belongs to its parent: the two are never taken from different traces.
    if trace and not any(name.lower() == "traceparent" for name in headers):
        return orjson.dumps({**trace, **headers}).decode()
    return orjson.dumps(dict(headers)).decode()
