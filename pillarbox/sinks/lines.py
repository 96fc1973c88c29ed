"""Events as JSON lines: what the file and stdout sinks write.

A line is one JSON object and ends with a newline; nothing inside it contains one. A reader skips a line that
does not parse: a process that was killed while writing leaves a torn one.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from pillarbox.codec import decode_json, is_json
from pillarbox.event import DELIVERED, Claim, Dead, Delivered, Outcome
from pillarbox.sinks.order import release_successors

_CONTEXT: Final = (
    "dedup_key",
    "aggregate_type",
    "aggregate_id",
    "schema_version",
    "correlation_id",
    "causation_id",
    "trace_id",
    "source",
    "max_attempts",
)


def encode_lines(claims: Sequence[Claim]) -> tuple[bytes, list[Outcome]]:
    """Return the lines to write, and the outcomes that hold once they are written.

    An event that has no line is dead, and the later events of its key are not among the lines.
    """
    lines: list[bytes] = []
    outcomes: list[Outcome] = []
    for claim in claims:
        try:
            lines.append(encode_line(claim))
            outcomes.append(DELIVERED)
        except TypeError as error:
            lines.append(b"")
            outcomes.append(Dead(f"The event cannot be written as a JSON line: {error}"))
    outcomes = release_successors(claims, outcomes)
    written = (line for line, outcome in zip(lines, outcomes, strict=True) if isinstance(outcome, Delivered))
    return b"".join(written), outcomes


def encode_line(claim: Claim) -> bytes:
    """Encode a claim as one line; raises `TypeError` when a header loaded from a row has no JSON form."""
    event = claim.event
    line: dict[str, Any] = {"id": event.id, "type": event.type, "topic": event.topic, "key": event.key}
    if is_json(event.content_type) and _is_valid_json(event.payload):
        # Outside of strings a newline is only layout, inside it is always escaped: so the bytes stay as
        # they were put, digits and all.
        line["payload"] = orjson.Fragment(event.payload.replace(b"\n", b" ").replace(b"\r", b" "))
    else:
        line["payload_base64"] = b64encode(event.payload).decode("ascii")
    line["content_type"] = event.content_type
    line["headers"] = dict(event.headers)
    line["attempt"] = claim.attempt
    for name in ("created_at", "due_at"):
        instant: datetime | None = getattr(event, name)
        if instant is not None:
            line[name] = instant.astimezone(UTC).isoformat()
    for name in _CONTEXT:
        value = getattr(event, name)
        if value is not None:
            line[name] = value
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _is_valid_json(payload: bytes) -> bool:
    try:
        decode_json(payload)
    except ValueError:
        return False
    return True
