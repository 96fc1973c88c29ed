"""What RabbitMQ delivers, as a message: headers as text, and the properties that say what headers of ours would say."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any, Final

import orjson
from aiormq.abc import DeliveredMessage

from pillarbox.event import uuid7
from pillarbox.sources.rabbitmq_damage import DAMAGE
from pillarbox.sources.reading import STRUCTURED, Raw, Read, read_message

CE_PREFIX: Final = "cloudevents:"
DELIVERY_COUNT: Final = "x-delivery-count"
STREAM_OFFSET: Final = "x-stream-offset"
# A property and the header of ours that it stands for.
_PROPERTIES: Final = {
    "message_type": "event-type",
    "correlation_id": "correlation-id",
    "app_id": "event-source",
    "content_encoding": "content-encoding",
    "reply_to": "reply-to",
}
_NO_ID: Final = (
    "The message has no id: neither a header event-id, nor a CloudEvent's id, nor the property message_id. Without one "
    "it cannot be told from another message with the same content. Let the sender set one, or give the option id_from"
)


class MessageReader:
    """Reads the messages of one queue.

    `id_from` says where the id of a message comes from that has none: `body`, a hash of its content, or `header:NAME`.
    `has_routing_keys` makes the routing key the key of an event that has none.
    """

    def __init__(self, queue: str, *, id_from: str | None, has_routing_keys: bool) -> None:
        self._queue = queue
        self._id_from = id_from
        self._has_routing_keys = has_routing_keys

    def read(self, message: DeliveredMessage) -> Read:
        properties = message.header.properties
        table: dict[str, Any] = properties.headers or {}
        headers = {name: _as_text(value) for name, value in table.items() if name != DELIVERY_COUNT}
        if not _describes_itself(headers, properties.content_type):
            for name, header in _PROPERTIES.items():
                if value := getattr(properties, name):
                    headers.setdefault(header, value)
        found = properties.message_id or self._make_id(headers, message.body)
        topic = message.routing_key or self._queue
        raw = Raw(
            id=found or str(uuid7()),
            topic=topic,
            body=message.body,
            headers=headers,
            key=topic if self._has_routing_keys else None,
            content_type=properties.content_type or None,
            sent_at=properties.timestamp,
            is_named_by_sender=found is not None,
        )
        read = read_message(raw, ce_prefix=CE_PREFIX)
        if DAMAGE in table:
            return replace(read, defect=f"Message cannot be read: its properties are damaged: {table[DAMAGE]}")
        return replace(read, defect=read.defect or _NO_ID) if found is None and read.id == raw.id else read

    def _make_id(self, headers: dict[str, str | bytes | None], body: bytes) -> str | None:
        if self._id_from is None:
            return None
        if self._id_from == "body":
            return sha256(body).hexdigest()
        value = headers.get(self._id_from.removeprefix("header:"))
        return value.decode(errors="replace") if isinstance(value, bytes) else value or None


def count_deliveries(message: DeliveredMessage) -> int:
    """How often the message was delivered before: quorum queues count, others only know whether it was."""
    count = (message.header.properties.headers or {}).get(DELIVERY_COUNT)
    if isinstance(count, int):
        return count
    return 1 if message.redelivered else 0


def is_of_a_stream(message: DeliveredMessage) -> bool:
    return STREAM_OFFSET in (message.header.properties.headers or {})


def _describes_itself(headers: dict[str, str | bytes | None], content_type: str | None) -> bool:
    """Whether the event is described by headers of ours or as a CloudEvent: properties only repeat parts of it then."""
    names = {name.lower() for name in headers}
    is_structured = content_type is not None and content_type.partition(";")[0].strip().lower() == STRUCTURED
    return is_structured or "event-id" in names or f"{CE_PREFIX}id" in names


def _as_text(value: Any) -> str | bytes | None:
    if value is None or isinstance(value, str | bytes):
        return value
    return orjson.dumps(value, default=str).decode()
