"""From a broker's message back to the event in it: our own headers, CloudEvents in both modes, or neither.

What a stranger sent has none of them: the broker's own id, topic and key do then. A message that cannot be read at all
gives an event with its bytes as they are, and the reason.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final

import orjson

from pillarbox.codec import JSON
from pillarbox.event import BYTES, EVENT_FIELDS, LIMITS, Event, load_event
from pillarbox.inbox.message import make_event_id

STRUCTURED: Final = "application/cloudevents+json"
_OWN: Final = {
    "event-type": "type",
    "event-key": "key",
    "correlation-id": "correlation_id",
    "causation-id": "causation_id",
    "trace-id": "trace_id",
    "event-source": "source",
    "schema-version": "schema_version",
    "aggregate-type": "aggregate_type",
    "aggregate-id": "aggregate_id",
}
_CLOUD: Final = {
    "type": "type",
    "source": "source",
    "subject": "aggregate_id",
    "partitionkey": "key",
    "correlationid": "correlation_id",
    "causationid": "causation_id",
    "schemaversion": "schema_version",
}
_CLOUD_OTHER: Final = frozenset({"specversion", "id", "time", "datacontenttype", "data", "data_base64", "dataschema"})


@dataclass(slots=True)
class Raw:
    """What a broker handed over. `id` is the broker's own name for it, the same when it comes again."""

    id: str
    topic: str
    body: bytes
    headers: Mapping[str, str | bytes | None] = field(default_factory=dict)
    key: str | None = None
    content_type: str | None = None
    sent_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """The message's id, its event, and why it cannot be read if it cannot."""

    id: str
    event: Event
    defect: str | None = None


def read_message(raw: Raw, *, ce_prefix: str = "ce-") -> Read:
    """Read a message; never raises."""
    try:
        return _read(raw, ce_prefix)
    except (ValueError, TypeError) as error:
        fields = {"type": raw.topic[: LIMITS["type"]] or "?", "content_type": BYTES}
        return Read(raw.id, _load(raw, raw.id, fields, {}, raw.body, None), f"Message cannot be read: {error}")


def _read(raw: Raw, ce_prefix: str) -> Read:
    headers = {name: _as_text(name, value) for name, value in raw.headers.items() if value is not None}
    named = {name.lower(): name for name in headers}
    content_type = raw.content_type or headers.get(named.get("content-type", ""))
    if content_type is not None and content_type.partition(";")[0].strip() == STRUCTURED:
        return _read_structured(raw, headers)
    if f"{ce_prefix}specversion" in named and f"{ce_prefix}id" in named:
        return _read_binary(raw, headers, ce_prefix, content_type)
    return _read_own(raw, headers, content_type)


def _read_own(raw: Raw, headers: dict[str, str], content_type: str | None) -> Read:
    def take(name: str) -> str | None:
        # Where the event had a header of that name, ours has a prefix and the event's stays.
        return headers.pop(f"pillarbox-{name}", None) or headers.pop(name, None)

    message_id = take("event-id") or raw.id
    time = take("event-time")
    fields = {field: value for name, field in _OWN.items() if (value := take(name)) is not None}
    take("content-type")
    fields["content_type"] = content_type or BYTES
    return Read(message_id, _load(raw, message_id, fields, headers, raw.body, time))


def _read_binary(raw: Raw, headers: dict[str, str], prefix: str, content_type: str | None) -> Read:
    attributes = {name[len(prefix) :]: value for name, value in headers.items() if name.lower().startswith(prefix)}
    others = {
        name: value
        for name, value in headers.items()
        if not name.lower().startswith(prefix) and name.lower() != "content-type"
    }
    return _from_cloud(raw, attributes, others, raw.body, content_type)


def _read_structured(raw: Raw, headers: dict[str, str]) -> Read:
    document = orjson.loads(raw.body)
    if not isinstance(document, dict) or "id" not in document:
        raise ValueError("expected a CloudEvent, an object with an id")
    content_type = document.get("datacontenttype", JSON)
    if "data_base64" in document:
        body = b64decode(document["data_base64"], validate=True)
    else:
        data = document.get("data")
        body = data.encode() if isinstance(data, str) and "json" not in content_type else orjson.dumps(data)
    others = {name: value for name, value in headers.items() if name.lower() != "content-type"}
    return _from_cloud(raw, document, others, body, content_type)


def _from_cloud(
    raw: Raw, attributes: Mapping[str, Any], headers: dict[str, str], body: bytes, content_type: str | None
) -> Read:
    fields = {field: str(attributes[name]) for name, field in _CLOUD.items() if attributes.get(name) is not None}
    fields["content_type"] = content_type or BYTES
    extensions = {name: value for name, value in attributes.items() if name not in _CLOUD and name not in _CLOUD_OTHER}
    message_id = str(attributes["id"])
    return Read(message_id, _load(raw, message_id, fields, {**extensions, **headers}, body, attributes.get("time")))


def _load(
    raw: Raw, message_id: str, fields: Mapping[str, Any], headers: Mapping[str, Any], body: bytes, time: str | None
) -> Event:
    values: dict[str, Any] = dict.fromkeys(EVENT_FIELDS)
    values |= fields
    values["id"] = make_event_id(message_id)
    values["topic"] = raw.topic
    values["type"] = fields.get("type") or raw.topic
    values["key"] = fields.get("key") or raw.key
    values["payload"] = body
    values["headers"] = MappingProxyType(dict(headers))
    values["created_at"] = _as_time(time) if time is not None else raw.sent_at
    return load_event(*values.values())


def _as_text(name: str, value: str | bytes) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"header {name!r} is no text: {error}") from None


def _as_time(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
