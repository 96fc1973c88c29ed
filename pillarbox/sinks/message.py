"""An event as a message: headers, content type and body, in our own form or as a CloudEvent.

The payload's bytes are never altered, except that a structured CloudEvent wraps them. What the event says of itself
becomes headers beside its own; where the event has a header of the same name, that one wins and ours is prefixed.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Container
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any, Final, NamedTuple

import orjson

from pillarbox.codec import decode_json, is_json
from pillarbox.errors import ConfigError
from pillarbox.event import Event
from pillarbox.sinks.refused import Refused

PREFIX: Final = "pillarbox-"
# For a header of the event whose name the destination needs itself.
HEADER_PREFIX: Final = "header-"
STRUCTURED: Final = "application/cloudevents+json"
DEFAULT_SOURCE: Final = "pillarbox"

_OWN_HEADERS: Final = (
    *("correlation-id", "causation-id", "trace-id", "event-source"),
    *("schema-version", "aggregate-type", "aggregate-id"),
)
# One call for all of them: most events have none, and every event is asked.
_own_values: Final = attrgetter(
    *("correlation_id", "causation_id", "trace_id", "source"),
    *("schema_version", "aggregate_type", "aggregate_id"),
)
_NONE: Final = (None,) * len(_OWN_HEADERS)
_EXTENSIONS: Final = (
    ("partitionkey", "key"),
    ("correlationid", "correlation_id"),
    ("causationid", "causation_id"),
    ("schemaversion", "schema_version"),
)
# Attributes of CloudEvents' own tracing extension, which events carry as headers.
_TRACE: Final = ("traceparent", "tracestate")


class Message(NamedTuple):
    """What is sent for an event. `content_type` is among the headers unless the form was told to leave it out."""

    headers: dict[str, str]
    content_type: str
    body: bytes


class MessageForm:
    """How a sink writes events.

    `cloudevents` is None for our own headers, or the mode of CloudEvents 1.0: `binary` (attributes as headers, named
    with `ce_prefix`) or `structured` (one JSON document as the body). Their required source is the event's, else
    `cloudevents_source`. A destination with a field of its own for the content type takes it from the message and gets
    no header (`has_content_type_header`); where names differ only by case are the same, `folds_case`.
    """

    def __init__(
        self,
        *,
        cloudevents: str | None = None,
        cloudevents_source: str = DEFAULT_SOURCE,
        ce_prefix: str = "ce-",
        has_content_type_header: bool = True,
        folds_case: bool = False,
    ) -> None:
        if cloudevents not in (None, "binary", "structured"):
            raise ConfigError(f"cloudevents: expected binary or structured, got {cloudevents!r}")
        self._cloudevents = cloudevents
        self._source = cloudevents_source
        self._ce_prefix = ce_prefix
        self._has_content_type = has_content_type_header
        self._folds_case = folds_case

    def render(self, event: Event) -> Message:
        """Make the message; raises `Refused` when the event has no form."""
        headers = {name: write_header(name, value) for name, value in event.headers.items()} if event.headers else {}
        content_type, body = event.content_type, event.payload
        if self._cloudevents is None:
            ours = _describe(event)
        elif self._cloudevents == "binary":
            ours = {self._ce_prefix + name: value for name, value in self._attributes(event).items()}
            if not self._ce_prefix:
                headers = _make_way(headers, ours)
        else:
            content_type, body = STRUCTURED, self._wrap(event)
            ours = {}
        if self._has_content_type:
            ours["content-type"] = content_type
        if not headers:
            return Message(ours, content_type, body)
        taken = {name.lower() for name in headers} if self._folds_case else headers
        for name, value in ours.items():
            headers[name if name not in taken else find_free_name(name, taken, prefix=PREFIX)] = value
        return Message(headers, content_type, body)

    def _attributes(self, event: Event) -> dict[str, str]:
        found = {
            "specversion": "1.0",
            "id": str(event.id),
            "source": event.source or self._source,
            "type": event.type,
        }
        if event.created_at is not None:
            found["time"] = _as_time(event.created_at)
        if event.aggregate_id is not None:
            found["subject"] = event.aggregate_id
        for attribute, field in _EXTENSIONS:
            value = getattr(event, field)
            if value is not None:
                found[attribute] = value
        for name in _TRACE:
            if isinstance(event.headers.get(name), str):
                found[name] = event.headers[name]
        return found

    def _wrap(self, event: Event) -> bytes:
        document: dict[str, Any] = {**self._attributes(event), "datacontenttype": event.content_type}
        if is_json(event.content_type) and _is_json_text(event.payload):
            document["data"] = orjson.Fragment(event.payload)
        else:
            document["data_base64"] = b64encode(event.payload).decode("ascii")
        try:
            return orjson.dumps(document)
        except TypeError as error:
            raise Refused(f"Event has no form as a CloudEvent: {error}") from None


def find_free_name(name: str, taken: Container[str], *, prefix: str) -> str:
    """Prefix the name until nothing else has it."""
    while name in taken:
        name = prefix + name
    return name


def _make_way(headers: dict[str, str], ours: dict[str, str]) -> dict[str, str]:
    # Without a prefix an attribute is known by its name alone: another header of that name would forge it.
    if headers.keys().isdisjoint(ours):
        return headers
    taken = headers.keys() | ours.keys()
    return {
        (find_free_name(name, taken, prefix=HEADER_PREFIX) if name in ours else name): value
        for name, value in headers.items()
        if ours.get(name) != value
    }


def _describe(event: Event) -> dict[str, str]:
    ours = {"event-id": str(event.id), "event-type": event.type}
    if event.key is not None:
        ours["event-key"] = event.key
    values = _own_values(event)
    if values != _NONE:
        ours |= {name: str(value) for name, value in zip(_OWN_HEADERS, values, strict=True) if value is not None}
    if event.created_at is not None:
        ours["event-time"] = _as_time(event.created_at)
    return ours


def _as_time(instant: datetime) -> str:
    # Drivers return UTC as a rule, and changing a time zone costs more than writing the time.
    return (instant if instant.tzinfo is UTC else instant.astimezone(UTC)).isoformat()


def write_header(name: str, value: object) -> str:
    """A header's value as text; raises `Refused` when it has none."""
    if isinstance(value, str):
        return value
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        raise Refused(f"Header {name!r} cannot be sent: {error}") from None


def _is_json_text(payload: bytes) -> bool:
    try:
        decode_json(payload)
    except ValueError:
        return False
    return True
