"""A message as a consumer takes it: whose it is, where it came from, and the event in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID, uuid5

from pillarbox.errors import InvalidEvent
from pillarbox.event import Event

MAX_LENGTH: Final = 255
# Ids of messages that are not UUIDs become one under this name, the same every time.
NAMESPACE: Final = UUID("6d1c1e9e-5b0f-4d55-9d0c-0a6a8b3f2f61")

# The headers in which a stored message keeps what its row has no column for.
ID_HEADER: Final = "pillarbox-message-id"
SOURCE_HEADER: Final = "pillarbox-message-source"
GROUP_HEADER: Final = "pillarbox-message-group"
TIME_HEADER: Final = "pillarbox-message-time"


@dataclass(frozen=True, slots=True, init=False)
class Message:
    """A message for one consumer group. It is known by its id within the group: taken once, however often it comes.

    `source` says where it came from: a topic, a queue, a system. The rest is the event's: type, payload, headers, key
    and times. An id that is no UUID keeps its text here, and the event gets a UUID made of it.
    """

    id: str
    group: str
    source: str
    event: Event

    def __init__(
        self,
        id: str | UUID,
        group: str,
        type: str | None = None,
        payload: object = None,
        *,
        source: str = "",
        headers: Mapping[str, Any] | None = None,
        event: Event | None = None,
        **fields: Any,
    ) -> None:
        put = object.__setattr__
        text = str(id)
        # Nearly every message has nothing odd in it, and this is asked of each.
        if not (_is_plain(text) and _is_plain(group) and (source == "" or _is_plain(source))):
            _check("id", text)
            _check("group", group)
            _check("source", source, may_be_empty=True)
        put(self, "id", text)
        put(self, "group", group)
        put(self, "source", source)
        if event is None:
            if type is None:
                raise InvalidEvent(f"Message {id!r}: expected a type and a payload, or an event")
            event = Event(type, payload, headers=headers, id=make_event_id(self.id), **fields)
        elif type is not None or payload is not None or headers or fields:
            raise InvalidEvent(f"Message {id!r}: expected a type and a payload, or an event; got both")
        put(self, "event", event)

    @property
    def type(self) -> str:
        return self.event.type

    @property
    def payload(self) -> bytes:
        return self.event.payload

    @property
    def headers(self) -> Mapping[str, Any]:
        return self.event.headers

    @property
    def sent_at(self) -> datetime | None:
        """When its event was put, if the message says so."""
        return self.event.created_at


def make_event_id(text: str) -> UUID:
    """The id of the event in a message of this id."""
    try:
        return UUID(text)
    except ValueError:
        return uuid5(NAMESPACE, text)


def _is_plain(text: str) -> bool:
    return type(text) is str and 0 < len(text) <= MAX_LENGTH and text.isprintable()


def _check(name: str, value: object, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or may_be_empty):
        raise InvalidEvent(f"Message {name}: expected text, got {value!r}")
    if len(value) > MAX_LENGTH:
        raise InvalidEvent(f"Message {name}: {len(value)} characters, at most {MAX_LENGTH} fit; got {value[:40]!r}…")
    if not is_writable(value):
        raise InvalidEvent(f"Message {name}: zero and surrogate characters have no place in it; got {value!r}")
    return value


def is_writable(text: str) -> bool:
    """Whether a text has a form in UTF-8, and no zero in it."""
    if text.isprintable():
        return True
    if "\0" in text:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
