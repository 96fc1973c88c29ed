"""An event as an operator sees it: as a line, as a page, and as JSON."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson

from pillarbox.cli.output import format_age, format_time
from pillarbox.cli.terminal import show_line
from pillarbox.codec import is_json
from pillarbox.errortext import without_calls
from pillarbox.event import Event
from pillarbox.stores import Record

ERROR_WIDTH = 60

_CONTEXT = (
    *("dedup_key", "aggregate_type", "aggregate_id", "schema_version", "correlation_id", "causation_id"),
    *("trace_id", "source", "max_attempts"),
)


HEADINGS = ("id", "state", "type", "key", "attempts", "age", "error")


def summarize_record(record: Record) -> tuple[object, ...]:
    """The cells of one line of `events list`."""
    event: Event = record.event
    error = " ".join(without_calls(record.error or "").split())
    short = error if len(error) <= ERROR_WIDTH else error[: ERROR_WIDTH - 1] + "…"
    age = None if event.created_at is None else max(timedelta(0), datetime.now(UTC) - event.created_at)
    return (event.id, record.state, event.type, event.key, record.attempts, format_age(age), short)


def record_to_json(recipient: str, record: Record, *, with_payload: bool = False) -> dict[str, Any]:
    """Everything about an event; its payload as it was put if it is JSON, else as text, or in base64."""
    event: Event = record.event
    values: dict[str, Any] = {
        "id": str(event.id),
        "seq": record.seq,
        "state": record.state,
        "recipient": recipient or None,
        "type": event.type,
        "topic": event.topic,
        "key": event.key,
        "attempts": record.attempts,
        "error": record.error,
        "created_at": event.created_at,
        "due_at": event.due_at,
        "until_at": record.until_at,
        "delivered_at": record.delivered_at,
        "died_at": record.died_at,
        "parks": record.parks,
        **{name: getattr(event, name) for name in _CONTEXT},
        "headers": dict(event.headers),
        "content_type": event.content_type,
        "size": len(event.payload),
    }
    return {**values, **_decode_payload(event)} if with_payload else values


def describe_record(recipient: str, record: Record) -> str:
    """A page about one event: what it has, then its error, headers and payload."""
    event: Event = record.event
    facts: dict[str, object] = {
        "id": event.id,
        "seq": record.seq,
        "state": f"{record.state} (parks its key)" if record.parks and event.key else record.state,
        "recipient": recipient,
        "type": event.type,
        "topic": event.topic,
        "key": event.key,
        "attempts": record.attempts,
        "put": format_time(event.created_at),
        "due": format_time(event.due_at),
        _UNTIL.get(record.state, "until"): format_time(record.until_at),
        "delivered": format_time(record.delivered_at),
        "died": format_time(record.died_at),
        **{name.replace("_", " "): getattr(event, name) for name in _CONTEXT},
        "headers": _pretty(dict(event.headers)) if event.headers else None,
        "error": record.error,
        "payload": f"{len(event.payload)} bytes, {event.content_type}",
    }
    known = {name: value for name, value in facts.items() if value not in (None, "")}
    width = max(map(len, known))
    lines = [f"{name:<{width}}  {_indent(name, str(value))}" for name, value in known.items()]
    return "\n".join([*lines, "", _show_payload(event)])


def _indent(name: str, value: str) -> str:
    # A text of the event's cannot pass for a line of ours.
    return value.replace("\n", "\n  ") if name in ("headers", "error") else show_line(value)


def _show_payload(event: Event) -> str:
    try:
        text = event.payload.decode()
    except UnicodeDecodeError:
        return f"base64: {_encode_base64(event)}"
    return _lay_out(text) if is_json(event.content_type) else text


_UNTIL = {"leased": "lease ends", "waiting": "next try", "scheduled": "due"}


def _decode_payload(event: Event) -> dict[str, Any]:
    if is_json(event.content_type):
        try:
            orjson.loads(event.payload)
        except orjson.JSONDecodeError:
            pass
        else:
            # As it was put, digits and all. A carriage return can only be layout, and is no printable one.
            return {"payload": orjson.Fragment(event.payload.replace(b"\r", b" "))}
    try:
        return {"payload": event.payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": _encode_base64(event)}


def _encode_base64(event: Event) -> str:
    return base64.b64encode(event.payload).decode()


def _lay_out(text: str) -> str:
    """The JSON with a line per value and its own numbers; as it is when that would change it."""
    try:
        return _pretty(_READER.decode(text))
    except (ValueError, TypeError, RecursionError):
        return text


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    read = dict(pairs)
    if len(read) < len(pairs):
        raise ValueError("a name is there twice")
    return read


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_READER = json.JSONDecoder(
    parse_int=orjson.Fragment,
    parse_float=orjson.Fragment,
    parse_constant=_refuse_constant,
    object_pairs_hook=_read_object,
)


def _pretty(value: object) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode()
