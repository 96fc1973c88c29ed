"""Messages as frames of AMQP 0-9-1: what a publisher writes, for many messages at a time.

Own code because the codec of the client library (pamqp) cuts header names at 128 bytes without an error, and takes
five times as long. Whatever does not fit the protocol's fields is refused here: the server would end the connection.
"""

from __future__ import annotations

from typing import Final

from pillarbox.event import Event
from pillarbox.sinks.message import Message
from pillarbox.sinks.refused import Refused

SHORT: Final = 255
"""The most bytes of a name or a property."""

_METHOD, _HEADER, _BODY, _END = b"\x01", b"\x02", b"\x03", b"\xce"
_PUBLISH: Final = b"\x00\x3c\x00\x28\x00\x00"
_BASIC: Final = b"\x00\x3c\x00\x00"
_FRAME: Final = 8
"""A frame's bytes beside its content."""

# A property's bit in the header's flags; the properties follow in the order of their bits, from the highest.
_CONTENT_TYPE, _HEADERS, _DELIVERY_MODE, _CORRELATION = 1 << 15, 1 << 13, 1 << 12, 1 << 10
_MESSAGE_ID, _TIMESTAMP, _TYPE, _APP_ID = 1 << 7, 1 << 6, 1 << 5, 1 << 3
_KEPT: Final = 5_000


class Encoder:
    """Writes messages for the channel of that number on a connection that takes frames of `frame_max` bytes."""

    def __init__(self, channel: int, *, frame_max: int, is_mandatory: bool, is_persistent: bool) -> None:
        self._channel = channel.to_bytes(2, "big")
        self._content_max = (frame_max or 131_072) - _FRAME
        self._options = b"\x01" if is_mandatory else b"\x00"
        self._delivery_mode = b"\x02" if is_persistent else b"\x01"
        self._methods: dict[tuple[str, str], bytes] = {}
        self._names: dict[str, bytes] = {}

    def encode(self, event: Event, message: Message, *, exchange: str, routing_key: str) -> bytes:
        """Return the frames of one message; raises `Refused` when it has no form in AMQP."""
        try:
            method = self._methods.get((exchange, routing_key)) or self._method(exchange, routing_key)
            header = self._header(event, message)
        except UnicodeEncodeError as error:
            raise Refused(f"Text that is no UTF-8 cannot be sent: {error}") from None
        if len(header) > self._content_max:
            raise Refused(
                f"Headers and properties of {len(header)} bytes cannot be sent: the server's frames hold "
                f"{self._content_max}"
            )
        channel, body = self._channel, message.body
        frames = [method, _HEADER, channel, len(header).to_bytes(4, "big"), header, _END]
        for start in range(0, len(body), self._content_max):
            part = body if len(body) <= self._content_max else body[start : start + self._content_max]
            frames += (_BODY, channel, len(part).to_bytes(4, "big"), part, _END)
        return b"".join(frames)

    def _method(self, exchange: str, routing_key: str) -> bytes:
        names = _short("Exchange", exchange) + _short("Routing key", routing_key)
        content = _PUBLISH + names + self._options
        frame = _METHOD + self._channel + len(content).to_bytes(4, "big") + content + _END
        if len(self._methods) >= _KEPT:
            self._methods.clear()
        self._methods[exchange, routing_key] = frame
        return frame

    def _header(self, event: Event, message: Message) -> bytes:
        flags = _HEADERS | _DELIVERY_MODE | _MESSAGE_ID
        properties = [self._table(message.headers), self._delivery_mode]
        if message.content_type:
            flags |= _CONTENT_TYPE
            properties.insert(0, _short("Content type", message.content_type))
        if event.correlation_id and (correlation := _property(event.correlation_id)):
            flags |= _CORRELATION
            properties.append(correlation)
        properties.append(_short("Id", str(event.id)))
        if event.created_at is not None and (seconds := int(event.created_at.timestamp())) >= 0:
            flags |= _TIMESTAMP
            properties.append(seconds.to_bytes(8, "big"))
        if type_ := _property(event.type):
            flags |= _TYPE
            properties.append(type_)
        if event.source and (source := _property(event.source)):
            flags |= _APP_ID
            properties.append(source)
        return b"".join((_BASIC, len(message.body).to_bytes(8, "big"), flags.to_bytes(2, "big"), *properties))

    def _table(self, headers: dict[str, str]) -> bytes:
        fields: list[bytes] = []
        for name, value in headers.items():
            text = value.encode()
            fields += (self._names.get(name) or self._name(name), len(text).to_bytes(4, "big"), text)
        table = b"".join(fields)
        return len(table).to_bytes(4, "big") + table

    def _name(self, name: str) -> bytes:
        encoded = _short("Header name", name) + b"S"
        if len(self._names) >= _KEPT:
            self._names.clear()
        self._names[name] = encoded
        return encoded


def _short(what: str, text: str) -> bytes:
    encoded = text.encode()
    if len(encoded) > SHORT:
        raise Refused(f"{what} {text!r} cannot be sent: expected at most {SHORT} bytes, got {len(encoded)}")
    return len(encoded).to_bytes(1, "big") + encoded


def _property(text: str) -> bytes | None:
    # A header has the whole text as well, so one that is too long for the property is left out there.
    encoded = text.encode()
    return len(encoded).to_bytes(1, "big") + encoded if 0 < len(encoded) <= SHORT else None
