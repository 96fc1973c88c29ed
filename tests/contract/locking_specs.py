"""The tables of omni-box and the Open Outbox Relay, whose claims are an owner and a time, at every step of life."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from tests.contract.layouts import IN_AN_HOUR, LAPSED, NOW, OWNER, Row, Spec, partition_months, register

# -- omni-box ----------------------------------------------------------------------------------------------------------


def _omnibox(**changed: Any) -> Mapping[str, Row]:
    pending = {
        "status": "pending",
        "attempts_made": 0,
        "max_attempts": 6,
        "last_error": None,
        "scheduled_at": NOW,
        "completed_at": None,
        "locked_at": None,
        "locked_by": None,
        "created_at": NOW,
        "updated_at": NOW,
    }
    return {"outbox": {**pending, **changed}}


OMNIBOX_STEPS: Mapping[str, Mapping[str, Row | None]] = {
    "put": _omnibox(),
    "scheduled": _omnibox(scheduled_at=IN_AN_HOUR),
    "leased": _omnibox(locked_at=NOW, locked_by=OWNER),
    "delivered": _omnibox(status="completed", completed_at=NOW),
    "waiting": _omnibox(attempts_made=1, last_error="503 from the destination", scheduled_at=IN_AN_HOUR),
    "dead": _omnibox(status="failed", attempts_made=6, last_error="400: no such order"),
    "released": _omnibox(),
    "leased again": _omnibox(attempts_made=1, last_error=LAPSED, locked_at=NOW, locked_by=OWNER),
    "buried": _omnibox(status="failed", attempts_made=1, max_attempts=1, last_error=LAPSED),
    "redriven": _omnibox(),
    "replayed": _omnibox(),
    "rescheduled": _omnibox(scheduled_at=IN_AN_HOUR),
}

_OMNIBOX_COMMON: dict[str, Any] = {
    "databases": ("postgresql",),
    "steps": OMNIBOX_STEPS,
    "find": {"outbox": "id = :id"},
    "touched": {"outbox": ("updated_at",)},
    "ends": {"outbox": ("completed_at", "updated_at")},
    "lapse": "UPDATE {outbox} SET locked_at = {ago} WHERE id = :id",
    "lease": timedelta(seconds=300),
    "last_try": "UPDATE {outbox} SET max_attempts = 1 WHERE id = :id",
}
_OMNIBOX_FEATURES = frozenset(
    {"hold", "lease", "schedule", "retention", "cancel", "replay", "shared lease", "parallel"}
)


_PARTITION = partition_months("outbox")
_OMNIBOX_INSERT = (
    "INSERT INTO {outbox} (id, event_type, aggregate_type, aggregate_id, topic, partition_key, payload, scheduled_at, "
    "created_at, updated_at) VALUES (:id, :name, 'order', 'c0ffee00-0000-4000-8000-000000000001', 'orders', 'o-1', "
    "CAST(:payload AS jsonb), now(), now(), now())"
)
_OMNIBOX_INBOX_INSERT = (
    "INSERT INTO {outbox} (id, event_type, message_id, consumer_group, source, payload, scheduled_at, created_at, "
    "updated_at) VALUES (:id, :name, gen_random_uuid()::text, 'billing', 'shop', CAST(:payload AS jsonb), now(), "
    "now(), now())"
)


def _omnibox_fields() -> Mapping[str, Any]:
    return {"key": "o-1", "aggregate_type": "order", "aggregate_id": "c0ffee00-0000-4000-8000-000000000001"}


OMNIBOX = (
    Spec(
        layout="omnibox",
        insert=_OMNIBOX_INSERT,
        fields=_omnibox_fields,
        features=_OMNIBOX_FEATURES | {"put"},
        **_OMNIBOX_COMMON,
    ),
    Spec(
        layout="omnibox-partitioned",
        insert=_OMNIBOX_INSERT,
        fields=_omnibox_fields,
        prepare=_PARTITION,
        features=_OMNIBOX_FEATURES | {"put"},
        **_OMNIBOX_COMMON,
    ),
    Spec(layout="omnibox-inbox", insert=_OMNIBOX_INBOX_INSERT, features=_OMNIBOX_FEATURES, **_OMNIBOX_COMMON),
    Spec(
        layout="omnibox-inbox-partitioned",
        insert=_OMNIBOX_INBOX_INSERT,
        prepare=_PARTITION,
        features=_OMNIBOX_FEATURES,
        **_OMNIBOX_COMMON,
    ),
)


# -- the Open Outbox Relay ---------------------------------------------------------------------------------------------


def _openoutbox(**changed: Any) -> Mapping[str, Row]:
    pending = {
        "status": "PENDING",
        "attempts": 0,
        "last_error": None,
        "available_at": NOW,
        "locked_by": None,
        "locked_at": None,
        "delivered_at": None,
        "created_at": NOW,
        "updated_at": NOW,
    }
    return {"outbox": {**pending, **changed}}


OPENOUTBOX_STEPS: Mapping[str, Mapping[str, Row | None]] = {
    "put": _openoutbox(),
    "scheduled": _openoutbox(available_at=IN_AN_HOUR),
    "leased": _openoutbox(status="DELIVERING", locked_at=NOW, locked_by=OWNER),
    "delivered": _openoutbox(status="DELIVERED", delivered_at=NOW),
    "waiting": _openoutbox(attempts=1, last_error="503 from the destination", available_at=IN_AN_HOUR),
    "dead": _openoutbox(status="DEAD", attempts=1, last_error="400: no such order"),
    "released": _openoutbox(),
    "leased again": _openoutbox(status="DELIVERING", attempts=1, last_error=LAPSED, locked_at=NOW, locked_by=OWNER),
    "buried": _openoutbox(status="DEAD", attempts=1, last_error=LAPSED),
    "redriven": _openoutbox(),
    "replayed": _openoutbox(),
    "rescheduled": _openoutbox(available_at=IN_AN_HOUR),
}

OPENOUTBOX = (
    Spec(
        layout="openoutbox",
        databases=("postgresql", "mariadb", "mysql", "sqlite"),
        steps=OPENOUTBOX_STEPS,
        find={"outbox": "event_id = :id"},
        touched={"outbox": ("updated_at",)},
        ends={"outbox": ("delivered_at", "updated_at")},
        lapse="UPDATE {outbox} SET locked_at = {ago} WHERE event_id = :id",
        lease=timedelta(minutes=3),
        insert="INSERT INTO {outbox} (event_id, event_type, payload) VALUES (:id, :name, :payload)",
        features=frozenset(
            {"hold", "lease", "put", "schedule", "retention", "cancel", "replay", "shared lease", "parallel"}
        ),
    ),
)


def register_locking_specs() -> None:
    """Add these layouts to the suite of layouts."""
    register(*OMNIBOX, *OPENOUTBOX)
