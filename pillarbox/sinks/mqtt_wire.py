"""MQTT 5 packets, as far as a publisher needs them: bytes in, bytes out, no connection.

Texts are checked before they are sent: a server may close the connection over one that the standard forbids or
discourages, and then every message under way would pay for it.
"""

from __future__ import annotations

import re
import struct
from functools import lru_cache
from typing import Any, Final, NamedTuple

from pillarbox.sinks.refused import Refused

CONNACK, PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP, PINGRESP, DISCONNECT = 2, 3, 4, 5, 6, 7, 13, 14
PING: Final = b"\xc0\x00"
GOODBYE: Final = b"\xe0\x00"
LARGEST: Final = 268_435_455

_LONGEST_TEXT: Final = 65_535
_PAIR: Final = struct.Struct("!H")
_BAD_TEXT: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef"
    + "".join(chr(plane << 16 | end) for plane in range(17) for end in (0xFFFE, 0xFFFF))
    + "]"
)
_WILDCARD: Final = re.compile("[+#]")

EXPIRY, CONTENT_TYPE, REASON, USER_PROPERTY = 0x02, 0x03, 0x1F, 0x26
RECEIVE_MAXIMUM, MAXIMUM_QOS, RETAIN_AVAILABLE, MAXIMUM_PACKET, SERVER_KEEPALIVE = 0x21, 0x24, 0x25, 0x27, 0x13
# What follows each property's number in an answer: a whole number of so many bytes, a text, or bytes.
_NUMBERS: Final = {0x11: 4, 0x13: 2, 0x21: 2, 0x22: 2, 0x24: 1, 0x25: 1, 0x27: 4, 0x28: 1, 0x29: 1, 0x2A: 1}
_TEXTS: Final = frozenset({0x12, 0x15, 0x16, 0x1A, 0x1C, 0x1F})

NO_SUBSCRIBERS: Final = 0x10
REASONS: Final = {
    0x00: "success",
    0x10: "no matching subscribers",
    0x80: "unspecified error",
    0x81: "malformed packet",
    0x82: "protocol error",
    0x83: "implementation specific error",
    0x84: "unsupported protocol version",
    0x85: "client identifier not valid",
    0x86: "bad user name or password",
    0x87: "not authorized",
    0x88: "server unavailable",
    0x89: "server busy",
    0x8A: "banned",
    0x8B: "server shutting down",
    0x8C: "bad authentication method",
    0x8D: "keep alive timeout",
    0x8E: "session taken over: another client has the same client id",
    0x90: "topic name invalid",
    0x91: "packet identifier in use",
    0x92: "packet identifier not found",
    0x93: "receive maximum exceeded",
    0x94: "topic alias invalid",
    0x95: "packet too large",
    0x96: "message rate too high",
    0x97: "quota exceeded",
    0x98: "administrative action",
    0x99: "payload format invalid",
    0x9A: "retain not supported",
    0x9B: "QoS not supported",
    0x9C: "use another server",
    0x9D: "server moved",
    0x9F: "connection rate exceeded",
}
# Reasons that lie in the message. What else is no success may pass.
MESSAGE_FAULTS: Final = frozenset({0x87, 0x90, 0x95, 0x99})


class Malformed(Exception):
    """The server sent what is not MQTT 5."""


class Answer(NamedTuple):
    """A reason code with what the server said to it; numbers are the properties that have a number as value."""

    code: int
    text: str = ""
    numbers: dict[int, int] = {}  # noqa: RUF012 - never changed

    def __str__(self) -> str:
        said = f": {self.text}" if self.text else ""
        return f"{REASONS.get(self.code, 'unknown reason')} (0x{self.code:02x}){said}"


# -- what we send ----------------------------------------------------------------------------------------------------


def encode_connect(client_id: str, user: str | None, password: str | None, *, keepalive: int) -> bytes:
    """Ask for a new session that ends with the connection."""
    flags = 0x02 | (0x80 if user is not None else 0) | (0x40 if password is not None else 0)
    parts = [b"\x00\x04MQTT\x05", bytes([flags]), _PAIR.pack(keepalive), b"\x00", _encode_text(client_id)]
    parts += [_encode_text(each) for each in (user, password) if each is not None]
    return _encode_packet(0x10, b"".join(parts))


@lru_cache(4096)
def encode_topic(topic: str) -> bytes:
    if not topic or _WILDCARD.search(topic):
        raise Refused(f"Topic {topic!r} cannot be published to: expected a name without the wildcards '+' and '#'")
    return _encode_text(topic, "Topic")


@lru_cache(256)
def encode_content_type(content_type: str) -> bytes:
    return bytes([CONTENT_TYPE]) + _encode_text(content_type, "Content type")


def encode_expiry(seconds: int) -> bytes:
    return bytes([EXPIRY]) + seconds.to_bytes(4, "big")


def encode_user_property(name: str, value: str) -> bytes:
    if value.isascii() and value.isprintable() and len(value) <= _LONGEST_TEXT:
        return _encode_name(name) + _PAIR.pack(len(value)) + value.encode("ascii")
    return _encode_name(name) + _encode_text(value, "Header", name)


@lru_cache(4096)
def _encode_name(name: str) -> bytes:
    return bytes([USER_PROPERTY]) + _encode_text(name, "Header's name")


def encode_publish(flags: int, topic: bytes, properties: bytes, payload: bytes) -> tuple[bytes, bytes]:
    """Return what goes before and after the packet's identifier."""
    tail = b"".join((_encode_length(len(properties)), properties, payload))
    remaining = len(topic) + 2 + len(tail)
    if remaining > LARGEST:
        raise Refused(f"Message of {remaining} bytes is too large: MQTT packets have {LARGEST} bytes at most")
    return bytes([PUBLISH << 4 | flags]) + _encode_length(remaining) + topic, tail


def encode_release(mid: int) -> bytes:
    return b"\x62\x02" + _PAIR.pack(mid)


def _encode_packet(first: int, rest: bytes) -> bytes:
    return bytes([first]) + _encode_length(len(rest)) + rest


def _encode_length(length: int) -> bytes:
    if length < 128:
        return bytes((length,))
    out = bytearray()
    while length > 127:
        out.append(length & 127 | 128)
        length >>= 7
    out.append(length)
    return bytes(out)


def _encode_text(text: str, what: str = "Text", name: str | None = None) -> bytes:
    named = what if name is None else f"{what} {name!r}"
    if not (text.isascii() and text.isprintable()) and (bad := _BAD_TEXT.search(text)):
        raise Refused(f"{named} cannot be sent: it has the character {bad[0]!a}, which MQTT texts must not have")
    encoded = text.encode()
    if len(encoded) > _LONGEST_TEXT:
        raise Refused(f"{named} is too large: it has {len(encoded)} bytes, MQTT texts {_LONGEST_TEXT} at most")
    return _PAIR.pack(len(encoded)) + encoded


# -- what we read ----------------------------------------------------------------------------------------------------


def split_packet(buffer: bytearray, start: int) -> tuple[int, int] | None:
    """Return where the body of the packet at `start` begins and ends, or None while it is not all there."""
    length = shift = 0
    for position in range(start + 1, start + 5):
        if position >= len(buffer):
            return None
        length |= (buffer[position] & 127) << shift
        shift += 7
        if buffer[position] < 128:
            end = position + 1 + length
            return (position + 1, end) if end <= len(buffer) else None
    raise Malformed("a packet's length has more than four bytes")


def decode_answer(body: bytes, start: int) -> Answer:
    """Read a reason code and its properties, both of which may be left out at the end of a packet."""
    if len(body) <= start:
        return Answer(0)
    if len(body) == start + 1:
        return Answer(body[start])
    try:
        found = _decode_properties(body, start + 1)
        return Answer(body[start], found.pop(REASON, ""), found)
    except (IndexError, struct.error, UnicodeDecodeError):
        raise Malformed(f"an answer cannot be read: {body[:100]!r}") from None


def _decode_properties(body: bytes, start: int) -> dict[int, Any]:
    length, at = _decode_length(body, start)
    end = at + length
    found: dict[int, Any] = {}
    while at < end:
        number, at = body[at], at + 1
        if number in _NUMBERS:
            size = _NUMBERS[number]
            found[number] = int.from_bytes(body[at : at + size], "big")
            at += size
            continue
        if number != USER_PROPERTY and number not in _TEXTS:
            raise Malformed(f"an answer has the unknown property 0x{number:02x}")
        for _ in range(2 if number == USER_PROPERTY else 1):
            (size,) = _PAIR.unpack_from(body, at)
            if number == REASON:
                found[REASON] = body[at + 2 : at + 2 + size].decode()
            at += 2 + size
    return found


def _decode_length(body: bytes, at: int) -> tuple[int, int]:
    length = shift = 0
    while True:
        byte, at = body[at], at + 1
        length |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return length, at
