"""Event, Claim and Outcome: the nouns everything else passes around.

An `Event` is checked when it is made, so that what reaches SQL is known to fit; a row read back from a table
is loaded without those checks, because another system may have written it.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

from pillarbox.codec import JSON, encode_json, is_json
from pillarbox.errors import InvalidEvent
from pillarbox.errortext import clean_error

BYTES: Final = "application/octet-stream"
LATE_HEADER: Final = "pillarbox-late"
NO_HEADERS: Final[Mapping[str, Any]] = MappingProxyType({})

# Columns of our own table have these lengths; another system's table may be narrower and says so itself.
LIMITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "type": 255,
        "topic": 255,
        "key": 255,
        "content_type": 127,
        "dedup_key": 255,
        "aggregate_type": 255,
        "aggregate_id": 255,
        "schema_version": 50,
        "correlation_id": 255,
        "causation_id": 255,
        "trace_id": 64,
        "source": 255,
    }
)
MAX_DELAY: Final = timedelta(days=3650)


@dataclass(frozen=True, slots=True, init=False, eq=False)
class Event:
    """The fact an application puts: immutable, checked, its payload already bytes.

    `payload` is bytes (with a `content_type`) or any object with a JSON form. `topic` is the type unless
    given. Events of one `key` are delivered in the order they were put; without a key there is no order to
    keep. `due_at` or `delay` hold it back; `dedup_key` allows one live event; `max_attempts` overrides the
    relay's policy.
    """

    id: UUID
    type: str
    topic: str
    key: str | None
    payload: bytes
    content_type: str
    headers: Mapping[str, Any]
    due_at: datetime | None
    delay: timedelta | None
    dedup_key: str | None
    aggregate_type: str | None
    aggregate_id: str | None
    schema_version: str | None
    correlation_id: str | None
    causation_id: str | None
    trace_id: str | None
    source: str | None
    max_attempts: int | None
    created_at: datetime | None = field(compare=False)

    def __init__(
        self,
        type: str,
        payload: object,
        *,
        topic: str | None = None,
        key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        id: UUID | None = None,
        content_type: str | None = None,
        due_at: datetime | None = None,
        delay: timedelta | None = None,
        dedup_key: str | None = None,
        aggregate_type: str | None = None,
        aggregate_id: str | UUID | int | None = None,
        schema_version: str | int | None = None,
        correlation_id: str | UUID | None = None,
        causation_id: str | UUID | None = None,
        trace_id: str | None = None,
        source: str | None = None,
        max_attempts: int | None = None,
    ) -> None:
        body, content_type = _encode_payload(payload, content_type)
        _check_times(due_at, delay)
        put = object.__setattr__
        put(self, "id", uuid7() if id is None else _check_id(id))
        put(self, "type", _check_text("type", type))
        put(self, "topic", self.type if topic is None else _check_text("topic", topic))
        put(self, "key", None if key is None else _check_text("key", key))
        put(self, "payload", body)
        put(self, "content_type", _check_text("content_type", content_type))
        put(self, "headers", _check_headers(headers))
        put(self, "due_at", None if due_at is None else due_at.astimezone(UTC))
        put(self, "delay", delay)
        put(self, "dedup_key", _check_optional("dedup_key", dedup_key))
        put(self, "aggregate_type", _check_optional("aggregate_type", aggregate_type))
        put(self, "aggregate_id", _check_optional("aggregate_id", aggregate_id))
        put(self, "schema_version", _check_optional("schema_version", schema_version))
        put(self, "correlation_id", _check_optional("correlation_id", correlation_id))
        put(self, "causation_id", _check_optional("causation_id", causation_id))
        put(self, "trace_id", _check_optional("trace_id", trace_id))
        put(self, "source", _check_optional("source", source))
        put(self, "max_attempts", _check_attempts(max_attempts))
        put(self, "created_at", None)

    def replace(self, **changes: Any) -> Event:
        """Return this event with other fields; what is not given stays, id and time included.

        The changes are checked as those of a new event. A new payload gets its content type unless one is given.
        """
        names = [name for name in EVENT_FIELDS if name != "created_at"]
        for name in changes:
            if name not in names:
                raise TypeError(f"Event.replace: expected {', '.join(names)}; got {name!r}")
        checked = Event(**{"type": self.type, "payload": b"", **changes})
        changed = {*changes, "content_type"} if "payload" in changes else {*changes}
        # What stays is not checked again: a row of another system may hold what we would refuse.
        return load_event(*(getattr(checked if name in changed else self, name) for name in EVENT_FIELDS))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Event) and all(
            getattr(self, name) == getattr(other, name) for name in EVENT_FIELDS if name != "created_at"
        )

    def __hash__(self) -> int:
        return hash(self.id)

    def __reduce__(self) -> tuple[Callable[..., Event], tuple[Any, ...]]:
        # A read-only mapping cannot be pickled or deep-copied; a dict can.
        values = {name: getattr(self, name) for name in EVENT_FIELDS}
        return _restore_event, tuple({**values, "headers": dict(self.headers)}.values())


EVENT_FIELDS: Final = tuple(Event.__dataclass_fields__)


class _Draft:
    """An event while it is loaded: plain assignment costs a third of going round a frozen class."""

    __slots__ = EVENT_FIELDS


def compile_loader(
    *,
    offset: int = 0,
    decoders: Mapping[str, Callable[[Any], Any]] | None = None,
    restore: Callable[[Any], None] | None = None,
    fallbacks: Mapping[str, Callable[[Any, Any], Any]] | None = None,
) -> Loader:
    """Make a function that loads an event, without checks, from a row of column values and the row's identity.

    The values stand in the order of `EVENT_FIELDS` from `offset` on; a decoder is called for its field's value unless
    that is None. Then `restore` may change an event that has headers, and each of `fallbacks` gives a field that is
    still None. Relays load every event they deliver, so there is no loop over the fields.
    """
    names: dict[str, Any] = {"Draft": _Draft, "Event": Event, "no_headers": NO_HEADERS, "restore": restore}
    lines = ["def load(row, row_id=None):", "    event = Draft()"]
    for index, name in enumerate(EVENT_FIELDS, start=offset):
        value = f"row[{index}]"
        if decoders and name in decoders:
            names[f"decode_{name}"] = decoders[name]
            default = "no_headers" if name == "headers" else "None"
            lines.append(f"    value = {value}")
            value = f"{default} if value is None else decode_{name}(value)"
        lines.append(f"    event.{name} = {value}")
    if restore is not None:
        lines += ["    if event.headers:", "        restore(event)"]
    for name, fallback in (fallbacks or {}).items():
        names[f"fall_back_{name}"] = fallback
        lines += [f"    if event.{name} is None:", f"        event.{name} = fall_back_{name}(event, row_id)"]
    exec("\n".join([*lines, "    event.__class__ = Event", "    return event"]), names)
    loader: Loader = names["load"]
    return loader


Loader = Callable[..., Event]
_load = compile_loader()


def load_event(*values: Any) -> Event:
    """Make an event from trusted values in the order of `EVENT_FIELDS`, without checks."""
    return _load(values)


def reload_event(event: Event, **changes: Any) -> Event:
    """The event with other fields, without the checks of `Event.replace`: it may hold what we would refuse."""
    return _load([changes[name] if name in changes else getattr(event, name) for name in EVENT_FIELDS])


def _restore_event(*values: Any) -> Event:
    fields = dict(zip(EVENT_FIELDS, values, strict=True))
    return load_event(*{**fields, "headers": MappingProxyType(fields["headers"])}.values())


@dataclass(slots=True)
class Claim:
    """An event held by one relay.

    `row` identifies the row to the store that made the claim, `fence` is the value the claim wrote into it
    (None when a lock holds the row), `attempt` counts from 1 and includes this one. `defect` says why the
    row's columns do not make an event; `event` is then what can be read of it, and no sink gets it. `extra` has the
    columns by name that the layout loads besides the event.
    """

    row: Any
    event: Event
    attempt: int
    fence: Any = None
    expires_at: datetime | None = None
    defect: str | None = None
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Delivered:
    """The destination acknowledged the event."""


@dataclass(frozen=True, slots=True)
class Retry:
    """This message failed and may succeed later; without `after` the retry policy decides when.

    Whatever was given as the error becomes text that every database can store. `after` may be a number of seconds; it
    is kept between zero and ten years.
    """

    error: str
    after: timedelta | None = None
    cause: BaseException | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "error", clean_error(self.error))
        object.__setattr__(self, "after", check_after("Retry", self.after))


@dataclass(frozen=True, slots=True)
class Dead:
    """This message can never be delivered; the error becomes text that every database can store."""

    error: str
    cause: BaseException | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "error", clean_error(self.error))


@dataclass(frozen=True, slots=True)
class Released:
    """Not tried; attempts stay as they were."""


Outcome = Delivered | Retry | Dead | Released
DELIVERED: Final = Delivered()
RELEASED: Final = Released()

_uuid7_lock = threading.Lock()
_uuid7_last = 0


def uuid7() -> UUID:
    """Make a UUIDv7 that sorts after every earlier one of this process (standard library: from 3.14)."""
    global _uuid7_last
    # 48 bits of milliseconds, then 12 bits of their fraction: about a quarter of a microsecond a step.
    nanoseconds = time.time_ns()
    stamp = (nanoseconds // 1_000_000) << 12 | (nanoseconds % 1_000_000) * 4096 // 1_000_000
    with _uuid7_lock:
        stamp = _uuid7_last = max(stamp, _uuid7_last + 1)
    random = int.from_bytes(os.urandom(8)) & 0x3FFF_FFFF_FFFF_FFFF
    return UUID(int=(stamp >> 12) << 80 | 0x7 << 76 | (stamp & 0xFFF) << 64 | 0b10 << 62 | random)


def _encode_payload(payload: object, content_type: str | None) -> tuple[bytes, str]:
    if isinstance(payload, bytes):
        return payload, BYTES if content_type is None else content_type
    if isinstance(payload, bytearray | memoryview):
        return bytes(payload), BYTES if content_type is None else content_type
    if content_type is None:
        return encode_json(payload), JSON
    if not is_json(_check_text("content_type", content_type)):
        raise InvalidEvent(
            f"Event payload: {type(payload).__name__} is encoded as JSON, which content_type "
            f"{content_type!r} is not; expected bytes or a JSON content type"
        )
    return encode_json(payload), content_type


def _check_id(value: object) -> UUID:
    if not isinstance(value, UUID):
        raise InvalidEvent(f"Event id: expected a uuid.UUID, got {value!r}")
    # A subclass from a database driver would not compare and pickle as the plain type does.
    return value if type(value) is UUID else UUID(int=value.int)


def _check_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidEvent(f"Event {name}: expected text, got {value!r}")
    if not value:
        raise InvalidEvent(f"Event {name}: expected text, got an empty string")
    if len(value) > LIMITS[name]:
        raise InvalidEvent(f"Event {name}: {len(value)} characters, at most {LIMITS[name]} fit; got {value[:40]!r}…")
    if not value.isprintable():
        _refuse_control_characters(f"Event {name}", value)
    return value


def _check_optional(name: str, value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, UUID) or (isinstance(value, int) and not isinstance(value, bool)):
        value = str(value)
    return _check_text(name, value)


def _refuse_control_characters(what: str, value: str) -> None:
    for character in value:
        if ord(character) < 32 or 0x7F <= ord(character) < 0xA0 or 0xD800 <= ord(character) < 0xE000:
            raise InvalidEvent(f"{what}: control character {character!r} in {value[:80]!r}; remove it")


def _check_headers(headers: object) -> Mapping[str, Any]:
    if headers is None:
        return NO_HEADERS
    if not isinstance(headers, Mapping):
        raise InvalidEvent(f"Event headers: expected a mapping of names to values, got {headers!r}")
    checked: dict[str, Any] = {}
    for name, value in headers.items():
        if not isinstance(name, str) or not name:
            raise InvalidEvent(f"Event headers: expected a name, got {name!r}")
        _refuse_control_characters("Event header name", name)
        if isinstance(value, str):
            _refuse_control_characters(f"Event header {name!r}", value)
        elif not isinstance(value, bool | int | float | None):
            raise InvalidEvent(f"Event header {name!r}: expected text, a number, a boolean or None, got {value!r}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise InvalidEvent(f"Event header {name!r}: expected a finite number, got {value!r}")
        elif isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise InvalidEvent(f"Event header {name!r}: expected a number of at most 64 bits, got {value!r}")
        checked[name] = value
    return MappingProxyType(checked) if checked else NO_HEADERS


def check_after(what: str, after: object) -> timedelta | None:
    """The delay that an outcome asks for, between zero and `MAX_DELAY`; a number is one of seconds."""
    if after is None:
        return None
    if isinstance(after, int | float) and not isinstance(after, bool) and after == after:
        after = timedelta(seconds=max(0.0, min(after, MAX_DELAY.total_seconds())))
    if not isinstance(after, timedelta):
        raise TypeError(f"{what} after: expected a timedelta or a number of seconds, got {after!r}")
    return max(timedelta(0), min(after, MAX_DELAY))


def _check_times(due_at: datetime | None, delay: timedelta | None) -> None:
    if due_at is not None and delay is not None:
        raise InvalidEvent(f"Event: give due_at or delay, not both; got due_at={due_at!r} and delay={delay!r}")
    if due_at is not None:
        if not isinstance(due_at, datetime):
            raise InvalidEvent(f"Event due_at: expected an aware datetime, got {due_at!r}")
        if due_at.utcoffset() is None:
            raise InvalidEvent(f"Event due_at: {due_at!r} has no time zone; expected an aware datetime")
        try:
            due_at.astimezone(UTC)
        except OverflowError as error:
            raise InvalidEvent(f"Event due_at: {due_at!r} has no form in UTC; expected a year up to 9999") from error
    if delay is not None:
        if not isinstance(delay, timedelta):
            raise InvalidEvent(f"Event delay: expected a timedelta, got {delay!r}")
        if not timedelta(0) <= delay <= MAX_DELAY:
            raise InvalidEvent(f"Event delay: expected between 0 and {MAX_DELAY.days} days, got {delay!r}")


def _check_attempts(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1_000_000:
        raise InvalidEvent(f"Event max_attempts: expected a whole number from 1 to 1000000, got {value!r}")
    return value
