"""Which records of a change-data-capture stream are events of an action log.

Only the insert of a row is news: the fan-out's flips of `delivered` are updates, and pruning deletes. Operations are
allowed by name, so that one which Debezium invents later is an error rather than an event twice or a loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pillarbox.errors import InvalidChange

Kind = Literal["event", "skip"]

_EVENTS: Final = frozenset({"c", "r"})
"""Create, and read by a snapshot."""
_OTHERS: Final = frozenset({"u", "d", "t", "m"})
"""Update, delete, truncate, and PostgreSQL's logical messages."""
_COLUMNS: Final = frozenset(
    {
        *("id", "namespace", "action_id", "action_name", "action_params", "started_date", "completion_date"),
        *("model_id", "model_type", "event_type", "payload", "event_date", "delivered"),
    }
)
_HOUSEKEEPING: Final = (
    frozenset({"ts_ms"}),  # a heartbeat
    frozenset({"status", "id"}),  # where a transaction begins or ends
    frozenset({"databaseName", "ddl"}),  # a change of the schema
    frozenset({"databaseName", "tableChanges"}),
)


def classify_change(record: Mapping[str, Any] | None, *, table: str | None = None) -> Kind:
    """Say whether the value of a Debezium record is an event of an action log, or nothing to act upon.

    Takes the decoded value: an envelope, with or without its `schema`, or a row that was unwrapped from one, and None
    for a tombstone. The insert of a row that has an event, live or read by a snapshot, is an `event`. Updates, deletes,
    truncations, tombstones, heartbeats and rows of actions without events are to `skip`. An unwrapped row that carries
    no `__op` or `op` is an event while its `delivered` is false. Anything else raises `InvalidChange`, and so does a
    row of another table than `table`, or of one with other columns.
    """
    if record is None:
        return "skip"
    value = _unwrap_schema(record)
    if value is None:
        return "skip"
    if "action_id" in value or "__deleted" in value:
        return _classify_row(value)
    if "op" in value:
        return _classify_envelope(value, table)
    if any(names <= value.keys() if len(names) > 1 else names == value.keys() for names in _HOUSEKEEPING):
        return "skip"
    raise InvalidChange(f"Change record: expected an envelope with 'op', or a row of an action log; got {_show(value)}")


def _unwrap_schema(record: object) -> Mapping[str, Any] | None:
    if not isinstance(record, Mapping):
        raise InvalidChange(f"Change record: expected a decoded JSON object or None, got {_show(record)}")
    if record.keys() != {"schema", "payload"}:
        return record
    payload = record["payload"]
    if payload is not None and not isinstance(payload, Mapping):
        raise InvalidChange(f"Change record: expected an object as its payload, got {_show(payload)}")
    return payload


def _classify_envelope(value: Mapping[str, Any], table: str | None) -> Kind:
    source = value.get("source")
    found = source.get("table") if isinstance(source, Mapping) else None
    if table is not None and found is not None and found != table:
        raise InvalidChange(f"Change record: expected one of table {table!r}, got one of {found!r}")
    is_event = _is_event(value["op"])
    after = value.get("after")
    if after is not None:
        _check_row(after)
    if not is_event:
        return "skip"
    if after is None:
        raise InvalidChange(f"Change record: its op is {value['op']!r}, but it has no row in 'after'")
    return _judge(after)


def _classify_row(row: Mapping[str, Any]) -> Kind:
    if str(row.get("__deleted")).lower() == "true":
        return "skip"
    op = row.get("__op", row.get("op"))
    if op is not None and not _is_event(op):
        return "skip"
    _check_row(row)
    # MySQL's booleans are numbers. A row that says nothing of its operation was inserted before it was delivered.
    if op is None and _is_delivered(row):
        return "skip"
    return _judge(row)


def _is_delivered(row: Mapping[str, Any]) -> bool:
    found = row["delivered"]
    if found not in (False, True):
        raise InvalidChange(f"Change record: expected a boolean or 0 or 1 for 'delivered', got {found!r}")
    return bool(found)


def _is_event(op: object) -> bool:
    if op in _EVENTS:
        return True
    if op in _OTHERS:
        return False
    raise InvalidChange(f"Change record: expected op {', '.join(sorted(_EVENTS | _OTHERS))}; got {op!r}")


def _check_row(row: object) -> None:
    if not isinstance(row, Mapping):
        raise InvalidChange(f"Change record: expected a row as an object, got {_show(row)}")
    missing = sorted(_COLUMNS - row.keys())
    if missing:
        raise InvalidChange(
            f"Change record: expected a row of an action log, this one lacks {', '.join(missing)}: {_show(row)}. Let "
            "the connector read the log's table only, with all its columns."
        )


def _judge(row: Mapping[str, Any]) -> Kind:
    if row["event_type"] is None:
        return "skip"
    if row["payload"] is None:
        raise InvalidChange(f"Change record: event {row['id']!r} of type {row['event_type']!r} has no payload")
    return "event"


def _show(value: object) -> str:
    text = repr(dict(value) if isinstance(value, Mapping) else value)
    return text if len(text) <= 200 else f"{text[:200]}…"
