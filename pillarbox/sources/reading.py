"""From a broker's message back to the event in it: our own headers, another outbox's, CloudEvents, or none.

What a stranger sent has none of them: the broker's own id, topic and key do then. A message that cannot be read at all
gives an event with its bytes as they are, and the reason.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from json import JSONDecoder
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

import orjson

from pillarbox.codec import JSON, is_json
from pillarbox.event import BYTES, EVENT_FIELDS, LIMITS, Event, load_event
from pillarbox.inbox.message import MAX_LENGTH, make_event_id

STRUCTURED: Final = "application/cloudevents+json"
# What our sinks put before a header of theirs whose name the event has taken.
_PREFIX: Final = "pillarbox-"
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
OPENOUTBOX_ID: Final = "x-event-id"
OPENOUTBOX_KEY: Final = "x-partition-key"
_OPENOUTBOX: Final = {OPENOUTBOX_KEY: "key"}
# What a table has no column for travels so; nobody else writes these.
_CARRIED: Final = {"pillarbox-id": "id", "pillarbox-type": "type", "pillarbox-key": "key"}
_OMNIBOX: Final = {
    "event_id": "id",
    "event_type": "type",
    "schema_version": "schema_version",
    "trace_id": "trace_id",
    "correlation_id": "correlation_id",
    "causation_id": "causation_id",
}
# The outbox event router's own default.
_DEBEZIUM_TOPIC: Final = "outbox.event."
_CLOUD: Final = {
    "type": "type",
    "source": "source",
    "subject": "aggregate_id",
    "partitionkey": "key",
    "correlationid": "correlation_id",
    "causationid": "causation_id",
    "schemaversion": "schema_version",
}
_CLOUD_OTHER: Final = frozenset({"specversion", "id", "time", "datacontenttype", "data", "data_base64"})


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
    is_named_by_sender: bool = False
    """Whether the id is one that the sender gave it, rather than its place in the broker."""


@dataclass(frozen=True, slots=True)
class Read:
    """The message's id, its event, why it cannot be read if it cannot, and the message as it came."""

    id: str
    event: Event
    defect: str | None = None
    raw: Raw | None = None


def read_message(raw: Raw, *, ce_prefix: str = "ce-") -> Read:
    """Read a message; never raises."""
    try:
        return _read(raw, ce_prefix)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        fields = {"type": raw.topic[: LIMITS["type"]] or "?", "content_type": raw.content_type or BYTES}
        headers = {
            name: value.decode(errors="backslashreplace") if isinstance(value, bytes) else value
            for name, value in raw.headers.items()
        }
        event = _load(raw, raw.id, fields, headers, raw.body, None)
        return Read(raw.id, event, f"Message cannot be read: {error}", raw)


def _read(raw: Raw, ce_prefix: str) -> Read:
    headers = {name: _as_text(name, value) for name, value in raw.headers.items()}
    named = {name.lower(): name for name in headers}
    content_type = raw.content_type
    if content_type is None:
        content_type = _take(headers, named, "content-type")
    if content_type is not None and content_type.partition(";")[0].strip().lower() == STRUCTURED:
        return _read_structured(raw, headers)
    prefix = ce_prefix.lower()
    if f"{prefix}specversion" in named and f"{prefix}id" in named:
        return _read_binary(raw, headers, named, prefix, content_type)
    return _read_own(raw, headers, named, content_type)


def _read_own(raw: Raw, headers: dict[str, str | None], named: dict[str, str], content_type: str | None) -> Read:
    own_id = _take(headers, named, "event-id")
    others = {} if own_id is not None else _take_others(raw, headers, named)
    message_id = own_id or others.pop("id", None) or raw.id
    time = _take(headers, named, "event-time")
    found = {field: _take(headers, named, name) for name, field in _OWN.items()}
    fields = others | {field: value for field, value in found.items() if value is not None}
    fields["content_type"] = content_type or BYTES
    return Read(message_id, _load(raw, message_id, fields, headers, raw.body, time), raw=raw)


def _take_others(raw: Raw, headers: dict[str, str | None], named: dict[str, str]) -> dict[str, str]:
    """Take out what the publisher of another outbox wrote, where its names are surely its own.

    An id that is not the message's would make another message a repeat of it, so a name alone is not enough: it must be
    a UUID, and the sender must not have named the message otherwise.
    """

    def is_id(name: str) -> bool:
        return not raw.is_named_by_sender and is_uuid(headers.get(named.get(name, "")))

    wanted = dict(_CARRIED)
    if is_id(OPENOUTBOX_ID):
        wanted |= {OPENOUTBOX_ID: "id", **_OPENOUTBOX}
    elif OPENOUTBOX_KEY in named:
        wanted |= _OPENOUTBOX
    elif is_id("event_id") and "event_type" in named:
        wanted |= _OMNIBOX
    elif raw.topic.startswith(_DEBEZIUM_TOPIC) and is_id("id"):
        wanted |= {"id": "id"}
    if not is_id("pillarbox-id"):
        del wanted["pillarbox-id"]
    found = {field: headers.pop(named[name], None) for name, field in wanted.items() if name in named}
    return {field: value for field, value in found.items() if value}


def is_uuid(text: str | None) -> bool:
    """Whether a text is that of a UUID."""
    try:
        return text is not None and bool(UUID(text))
    except ValueError:
        return False


def _read_binary(
    raw: Raw, headers: dict[str, str | None], named: dict[str, str], prefix: str, content_type: str | None
) -> Read:
    # Only the names that are there: an attribute is whatever begins with the prefix.
    names = [name for name in named if name.startswith(prefix)]
    attributes = {name[len(prefix) :]: _take(headers, named, name) for name in names}
    return _from_cloud(raw, attributes, headers, raw.body, content_type)


def _read_structured(raw: Raw, headers: dict[str, str | None]) -> Read:
    document = orjson.loads(raw.body)
    if not isinstance(document, dict) or "id" not in document:
        raise ValueError("expected a CloudEvent, an object with an id")
    content_type = document.get("datacontenttype", JSON)
    if not isinstance(content_type, str):
        raise ValueError(f"expected datacontenttype to be text, got {content_type!r}")
    if "data_base64" in document:
        body = b64decode(document["data_base64"], validate=True)
    elif isinstance(document.get("data"), str) and not is_json(content_type):
        body = document["data"].encode()
    elif "data" in document:
        body = _cut_out(raw.body.decode(), "data").encode()
    else:
        body = b""
    return _from_cloud(raw, document, headers, body, content_type)


def _from_cloud(
    raw: Raw,
    attributes: Mapping[str, Any],
    headers: dict[str, str | None],
    body: bytes,
    content_type: str | None,
) -> Read:
    fields = {field: str(attributes[name]) for name, field in _CLOUD.items() if attributes.get(name) is not None}
    fields["content_type"] = content_type or BYTES
    extensions = {
        name: value if isinstance(value, str | int | float | None) else orjson.dumps(value).decode()
        for name, value in attributes.items()
        if name not in _CLOUD and name not in _CLOUD_OTHER
    }
    message_id = _name_cloud(attributes["id"], fields.get("source"))
    event = _load(raw, message_id, fields, {**extensions, **headers}, body, attributes.get("time"))
    return Read(message_id, event, raw=raw)


def _name_cloud(event_id: Any, source: str | None) -> str:
    """A CloudEvent's id is its own within its source only, unless it is a UUID."""
    if not isinstance(event_id, str) or not event_id:
        raise ValueError(f"expected the CloudEvent's id to be text, got {event_id!r}")
    try:
        UUID(event_id)
    except ValueError:
        # A source is a URI reference, in which there is no space.
        name = event_id if source is None else f"{source} {event_id}"
        return name if len(name) <= MAX_LENGTH else sha256(name.encode()).hexdigest()
    return event_id


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


def _take(headers: dict[str, str | None], named: dict[str, str], name: str) -> str | None:
    """Take out the header that our sink wrote: of those that differ by the prefix alone, the one with most of it."""
    while _PREFIX + name in named:
        name = _PREFIX + name
    return headers.pop(named[name], None) if name in named else None


def _cut_out(document: str, member: str) -> str:
    """The text of one member of a JSON object, as it stands there: parsing it and writing it again changes numbers."""
    parse = JSONDecoder().raw_decode
    found = ""
    position = _skip(document, document.index("{") + 1)
    while document[position] != "}":
        name, position = parse(document, position)
        start = _skip(document, _skip(document, position) + 1)
        _, position = parse(document, start)
        if name == member:
            found = document[start:position]
        position = _skip(document, position)
        if document[position] == ",":
            position = _skip(document, position + 1)
    return found


def _skip(text: str, position: int) -> int:
    while text[position] in " \t\r\n":
        position += 1
    return position


def _as_text(name: str, value: str | bytes | None) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise ValueError(f"header {name!r} is no text: {value!r}")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"header {name!r} is no text: {error}") from None


def _as_time(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
