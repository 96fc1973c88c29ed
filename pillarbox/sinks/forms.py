"""Messages as other outbox systems' own publishers write them, so that consumers notice no switch of the relay.

Each form is a function from an event to its message. Fields of the event that the system's table has no column for
travelled in the row's headers, and its publisher passes those on: they are written back under the same names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from itertools import chain
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import orjson

from pillarbox.codec import JSON
from pillarbox.errors import ConfigError
from pillarbox.event import BYTES, Event
from pillarbox.sinks.message import DEFAULT_SOURCE, PREFIX, Message, MessageForm, write_header
from pillarbox.sinks.refused import Refused
from pillarbox.values import Read, one_of, read_text, show

FormName = Literal["pillarbox", "cloudevents", "openoutbox", "omnibox", "faststream", "debezium"]
Render = Callable[[Event], Message]
"""Makes an event's message; raises `Refused` when it has none."""

FORMS: Final[Mapping[str, frozenset[str]]] = {
    "pillarbox": frozenset({"kafka", "nats", "rabbitmq", "redis", "mqtt", "http"}),
    "cloudevents": frozenset({"kafka", "nats", "rabbitmq", "redis", "mqtt", "http"}),
    "openoutbox": frozenset({"kafka", "nats", "redis"}),
    "omnibox": frozenset({"kafka"}),
    "faststream": frozenset({"kafka", "nats", "rabbitmq", "redis"}),
    "debezium": frozenset({"kafka"}),
}
"""The forms, and the brokers that each has messages for."""

FORM_OPTIONS: Final[dict[str, Read]] = {
    "message": read_text,  # which there are for its broker is known where the sink is made
    "cloudevents": one_of("binary", "structured"),
    "cloudevents_source": read_text,
}
_BROKERS: Final = {
    "kafka": "kafka",
    "nats": "nats",
    "tls": "nats",
    "amqp": "rabbitmq",
    "amqps": "rabbitmq",
    "redis": "redis",
    "rediss": "redis",
    "mqtt": "mqtt",
    "mqtts": "mqtt",
    "http": "http",
    "https": "http",
}
FASTSTREAM_FIELD: Final = "__data__"
"""The one field of a stream's entry in which FastStream writes to Redis."""
# Fields that neither table has a column for.
_TRAVELLING: Final = ("aggregate_type", "aggregate_id", "schema_version", "causation_id")
_MADE_FROM_ROW: Final = 5
_ENVELOPE: Final = b"\x89BIN\x0d\x0a\x1a\x0a"
"""What the messages that FastStream writes to Redis begin with."""


class Form(NamedTuple):
    """The form that was chosen for a sink, None for its own default, and what to say of it at the start."""

    name: str | None = None
    note: str = ""


def choose_form(url: str, options: Mapping[str, Any], *, own: str) -> Form:
    """Choose the form of a table's own publisher, which is `own`, for a sink that names none."""
    if own == "pillarbox":
        return Form()
    try:
        parts = urlsplit(url)
    except ValueError:
        return Form()  # whoever opens the sink says what is wrong with the url
    broker = _BROKERS.get(parts.scheme)
    given = {**({} if broker == "http" else dict(parse_qsl(parts.query))), **options}
    if broker is None or not given.keys().isdisjoint(("message", "cloudevents")):
        return Form()
    place = "redis channels" if broker == "redis" and given.get("mode") == "pubsub" else broker
    if broker not in FORMS[own] or (place != broker and own == "openoutbox"):
        return Form(None, f"messages as pillarbox, because {own} has no form for {place}")
    return Form(own, f"messages as {own}, the form of the table's own publisher")


def make_form(
    message: str | None,
    *,
    broker: str,
    sink: str,
    cloudevents: str | None = None,
    cloudevents_source: str = DEFAULT_SOURCE,
    **options: Any,
) -> Render:
    """Return the form of that name for a broker; `options` are those of `MessageForm`."""
    if message is None:
        message = "pillarbox" if cloudevents is None else "cloudevents"
    if message not in FORMS or broker not in FORMS[message]:
        known = [name for name, brokers in FORMS.items() if broker in brokers]
        close = get_close_matches(message, known, n=1)
        hint = f". Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"Sink {sink!r} message: expected {_list(known)} for {broker}; got {show(message)}{hint}")
    if message == "cloudevents":
        form = MessageForm(cloudevents=cloudevents or "binary", cloudevents_source=cloudevents_source, **options)
        return form.render
    given = {"cloudevents": cloudevents is not None, "cloudevents_source": cloudevents_source != DEFAULT_SOURCE}
    for option, is_given in given.items():
        if is_given:
            raise ConfigError(f"Sink {sink!r} {option}: it is for message cloudevents, got {message!r}")
    return MessageForm(**options).render if message == "pillarbox" else _FOREIGN[message, broker]


def form_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options that choose a form."""
    return {name: value for name, value in options.items() if name in FORM_OPTIONS}


def _list(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"


# -- Open Outbox Relay -------------------------------------------------------------------------------------------------


def _row_of_openoutbox(event: Event) -> dict[str, str]:
    # Its publisher reads a header that is null as an empty text.
    headers = {name: "" if value is None else write_header(name, value) for name, value in event.headers.items()}
    if event.type != event.topic:
        headers["pillarbox-type"] = event.type
    headers |= _carry(event, (*_TRAVELLING, "correlation_id", "trace_id", "source", "max_attempts"))
    if event.content_type != BYTES:
        headers["content-type"] = event.content_type
    return headers


def _openoutbox_kafka(event: Event) -> Message:
    return _make({**_row_of_openoutbox(event), "X-Event-ID": str(event.id)}, event)


def _openoutbox_nats(event: Event) -> Message:
    headers = {name: _as_line(value) for name, value in _row_of_openoutbox(event).items()}
    if event.key:
        headers["X-Partition-Key"] = _as_line(event.key)
    return _make(headers, event)


def _openoutbox_redis(event: Event) -> Message:
    fields = {"id": str(event.id)}
    if event.key:
        fields["partition_key"] = event.key
    fields |= {f"h:{name}": value for name, value in _row_of_openoutbox(event).items()}
    return _make(fields, event)


def _as_line(value: str) -> str:
    # As Go's library writes a header.
    return value.replace("\n", " ").replace("\r", " ").strip(" \t")


# -- omni-box ----------------------------------------------------------------------------------------------------------


def _omnibox_kafka(event: Event) -> Message:
    headers = {name: write_header(name, value) for name, value in event.headers.items()}
    headers |= _carry(event, ("source",))
    if event.content_type != JSON:
        headers["content-type"] = event.content_type
    headers |= {"event_id": str(event.id), "event_type": event.type}
    told = {
        "schema_version": event.schema_version,
        "trace_id": event.trace_id,
        "correlation_id": event.correlation_id,
        "causation_id": event.causation_id,
    }
    headers |= {name: value for name, value in told.items() if value}
    return Message(headers, event.content_type, _write_again(event.payload))


def _write_again(payload: bytes) -> bytes:
    """The JSON without blanks, as omni-box writes what it has read; what it could not write stays as it is."""
    try:
        return orjson.dumps(json.loads(payload))
    except (TypeError, ValueError, RecursionError):
        return payload


# -- Debezium's outbox event router ------------------------------------------------------------------------------------


def _debezium_kafka(event: Event) -> Message:
    # Its connector adds headers about its own run, `__debezium.context.…`, which there is none of here.
    headers = {name: write_header(name, value) for name, value in event.headers.items()}
    return _make({**headers, "id": str(event.id)}, event)


# -- faststream-outbox -------------------------------------------------------------------------------------------------


def _describe_to_faststream(event: Event) -> dict[str, str]:
    # It makes one up for a row that has none; the event's id stays the same when it is sent again.
    return {"correlation_id": event.correlation_id or str(event.id)}


def _row_of_faststream(event: Event) -> dict[str, str]:
    headers = {name: write_header(name, value) for name, value in event.headers.items()}
    # The id of an event that FastStream put is made from its row, and no header of it.
    if event.id.version != _MADE_FROM_ROW:
        headers["pillarbox-id"] = str(event.id)
    if event.type != event.topic:
        headers["pillarbox-type"] = event.type
    return headers | _carry(event, ("key", *_TRAVELLING, "trace_id", "source", "max_attempts"))


def _faststream(event: Event) -> Message:
    content_type = "" if event.content_type == BYTES else event.content_type
    headers = {"content-type": content_type, **_describe_to_faststream(event), **_row_of_faststream(event)}
    return Message(headers, content_type, event.payload)


def _faststream_rabbitmq(event: Event) -> Message:
    message = _faststream(event)
    if not message.content_type:
        del message.headers["content-type"]
    return message


def _faststream_redis(event: Event) -> Message:
    """One text of bytes: a mark, a version, where headers and body begin, the headers by their lengths, the body."""
    headers = _describe_to_faststream(event)
    if event.content_type != BYTES:
        headers["content-type"] = event.content_type
    headers |= _row_of_faststream(event)
    table = len(headers).to_bytes(2, "big")
    for each in chain.from_iterable(headers.items()):
        text = _encode(each)
        table += len(text).to_bytes(2, "big") + text
    start = len(_ENVELOPE) + 10
    places = start.to_bytes(4, "big") + (start + len(table)).to_bytes(4, "big")
    return Message({}, event.content_type, b"".join((_ENVELOPE, b"\x00\x01", places, table, event.payload)))


def _encode(text: str) -> bytes:
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise Refused(f"Text that has no form in UTF-8: {error}") from None
    if len(encoded) > 0xFFFF:
        raise Refused(f"Header of {len(encoded)} bytes: FastStream's messages to Redis hold 65535 at most")
    return encoded


def _make(headers: dict[str, str], event: Event) -> Message:
    return Message(headers, event.content_type, event.payload)


def _carry(event: Event, names: Iterable[str]) -> dict[str, str]:
    found = {name: getattr(event, name) for name in names}
    return {PREFIX + name.replace("_", "-"): str(value) for name, value in found.items() if value is not None}


_FOREIGN: Final[Mapping[tuple[str, str], Render]] = {
    ("openoutbox", "kafka"): _openoutbox_kafka,
    ("openoutbox", "nats"): _openoutbox_nats,
    ("openoutbox", "redis"): _openoutbox_redis,
    ("omnibox", "kafka"): _omnibox_kafka,
    ("debezium", "kafka"): _debezium_kafka,
    ("faststream", "kafka"): _faststream,
    ("faststream", "nats"): _faststream,
    ("faststream", "rabbitmq"): _faststream_rabbitmq,
    ("faststream", "redis"): _faststream_redis,
}
