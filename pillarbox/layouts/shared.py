"""What the layouts of other systems' tables have in common: literals for partial indexes, fields in headers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson
import sqlalchemy as sa
from sqlalchemy.sql import ColumnElement

from pillarbox.codec import JSON
from pillarbox.errors import InvalidEvent
from pillarbox.event import BYTES
from pillarbox.layouts.layout import Fallback

_TRAVELLING: Final = (
    *("type", "key", "aggregate_type", "aggregate_id", "schema_version", "correlation_id", "causation_id"),
    *("trace_id", "source", "max_attempts"),
)
# The escape, and no backslash before plain text: those stand in pairs. PostgreSQL also reads a name's earlier values.
_ZERO: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


def literal(value: str) -> ColumnElement[str]:
    """Text inside the statement: a bound value would not match the predicate of a partial index."""
    quoted = value.replace("'", "''")
    return sa.literal_column(f"'{quoted}'", sa.String())


def header_names(fields: Mapping[str, str], **own: str) -> dict[str, str]:
    """The headers for the event fields that a table has no column for."""
    named = {name: f"pillarbox-{name.replace('_', '-')}" for name in _TRAVELLING}
    named |= {"content_type": "content-type", **own}
    return {name: header for name, header in named.items() if name not in fields}


def from_topic(event: Any, row: Any) -> Any:
    return event.topic


def from_type(event: Any, row: Any) -> Any:
    return event.type


def always(value: Any) -> Fallback:
    return lambda event, row: value


JSON_PAYLOAD: Final[Mapping[str, Fallback]] = {"content_type": always(JSON)}
RAW_PAYLOAD: Final[Mapping[str, Fallback]] = {"content_type": always(BYTES)}


def check_object(event: Any, *, layout: str, is_empty_allowed: bool) -> None:
    """Refuse a payload that is no JSON object."""
    payload = orjson.loads(event.payload)
    if not isinstance(payload, dict) or (not payload and not is_empty_allowed):
        kind = "a JSON object" if is_empty_allowed else "a JSON object that is not empty"
        raise InvalidEvent(
            f"Event {event.type!r} ({event.id}), payload: layout {layout!r} expects {kind}, got {event.payload[:80]!r}"
        )


def has_zero(payload: bytes) -> bool:
    """Whether a JSON payload has the character U+0000 in a text, which PostgreSQL cannot hold."""
    return b"\\u0000" in payload and _ZERO.search(payload) is not None
