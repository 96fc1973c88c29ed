"""Which change records of an action log's table are events."""

from __future__ import annotations

from typing import Any

import pytest

from pillarbox.actions import classify_change
from pillarbox.errors import InvalidChange

ROW = {
    "id": "01a1e115-f0c5-76c2-926d-204b6e3d11d7",
    "namespace": "shop",
    "action_id": "01a1e115-f0c5-76c2-926d-204b6e3d11d8",
    "action_name": "wallet.deposit",
    "action_params": '{"amount": 5}',
    "started_date": 1774785600000000,
    "completion_date": 1774785600000000,
    "model_id": "41",
    "model_type": "Wallet",
    "event_type": "Deposited",
    "payload": '{"amount": 5}',
    "event_date": 1774785600000000,
    "delivered": False,
}
FLIPPED = {**ROW, "delivered": True}
SENTINEL = {**ROW, "model_id": None, "model_type": None, "event_type": None, "payload": None}
SOURCE = {"connector": "postgresql", "schema": "public", "table": "action_events"}


def envelope(op: str, after: Any, before: Any = None, **more: Any) -> dict[str, Any]:
    return {"before": before, "after": after, "source": SOURCE, "op": op, "ts_ms": 1774785600000, **more}


def in_schema(payload: Any) -> dict[str, Any]:
    return {"schema": {"type": "struct", "fields": []}, "payload": payload}


@pytest.mark.parametrize("wrap", [lambda value: value, in_schema], ids=["bare", "with schema"])
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (envelope("c", ROW), "event"),
        (envelope("r", ROW), "event"),
        (envelope("r", FLIPPED), "event"),
        (envelope("c", ROW, transaction={"id": "7"}), "event"),
        (envelope("u", FLIPPED, ROW), "skip"),
        (envelope("u", ROW, FLIPPED), "skip"),
        (envelope("d", None, ROW), "skip"),
        (envelope("d", None, {"id": ROW["id"]}), "skip"),
        (envelope("t", None), "skip"),
        ({"op": "m", "message": {"prefix": "p"}, "source": SOURCE}, "skip"),
        (envelope("c", SENTINEL), "skip"),
        (envelope("r", SENTINEL), "skip"),
        (None, "skip"),
        ({**ROW, "__op": "c"}, "event"),
        ({**ROW, "__op": "r"}, "event"),
        ({**FLIPPED, "__op": "r"}, "event"),
        ({**ROW, "op": "c"}, "event"),
        ({**FLIPPED, "__op": "u"}, "skip"),
        ({**ROW, "__op": "u"}, "skip"),
        ({**ROW, "__op": "d"}, "skip"),
        ({**ROW, "__op": "d", "__deleted": "true"}, "skip"),
        ({"id": ROW["id"], "__deleted": "true"}, "skip"),
        ({**ROW, "__deleted": "false", "__op": "c"}, "event"),
        ({**SENTINEL, "__op": "c"}, "skip"),
        (ROW, "event"),
        ({**ROW, "delivered": 0}, "event"),
        (FLIPPED, "skip"),
        ({**ROW, "delivered": 1}, "skip"),
        (SENTINEL, "skip"),
        ({"ts_ms": 1774785600000}, "skip"),
        ({"status": "BEGIN", "id": "571", "event_count": None}, "skip"),
        ({"source": {}, "databaseName": "shop", "ddl": "ALTER TABLE …"}, "skip"),
    ],
)
def test_record_is_an_event_or_nothing(wrap: Any, value: Any, kind: str) -> None:
    assert classify_change(wrap(value)) == kind


def test_null_record_is_a_tombstone() -> None:
    assert classify_change(None) == "skip"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (envelope("x", ROW), "expected op c, d, m, r, t, u; got 'x'"),
        (envelope(None, ROW), "got None"),  # type: ignore[arg-type]
        ({**ROW, "__op": "x"}, "got 'x'"),
        (envelope("c", None), "its op is 'c', but it has no row in 'after'"),
        (envelope("c", "text"), "expected a row as an object, got 'text'"),
        (envelope("c", {"id": 1, "balance": 5}), "this one lacks action_id, action_name"),
        (envelope("u", {"id": 1, "balance": 5}), "expected a row of an action log"),
        (envelope("c", {name: ROW[name] for name in ROW if name != "delivered"}), "lacks delivered"),
        (envelope("c", {**ROW, "payload": None}), "of type 'Deposited' has no payload"),
        ({**ROW, "payload": None, "__op": "c"}, "has no payload"),
        ({**ROW, "delivered": None}, "expected a boolean or 0 or 1 for 'delivered', got None"),
        ({**ROW, "delivered": "f"}, "got 'f'"),
        ({"id": 1, "balance": 5}, "expected an envelope with 'op', or a row of an action log"),
        ({}, "got {}"),
        ([envelope("c", ROW)], "expected a decoded JSON object or None"),
        ("text", "expected a decoded JSON object or None, got 'text'"),
        (b"{}", "expected a decoded JSON object"),
        (in_schema("text"), "expected an object as its payload, got 'text'"),
    ],
)
def test_anything_else_is_an_error(value: Any, reason: str) -> None:
    with pytest.raises(InvalidChange, match=reason):
        classify_change(value)


def test_record_of_another_table_is_an_error_where_the_table_is_named() -> None:
    assert classify_change(envelope("c", ROW), table="action_events") == "event"
    with pytest.raises(InvalidChange, match="expected one of table 'events', got one of 'action_events'"):
        classify_change(envelope("d", None), table="events")
