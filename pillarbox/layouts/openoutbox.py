"""The Open Outbox Relay's table.

    put ─► PENDING ─► (held, or DELIVERING with locked_by and locked_at) ─► DELIVERED
              ▲                    │
              └── available_at ────┤ a failed try, attempts + 1
                                   └─► DEAD

`event_type` is the topic. A lapsed lease, also one without a time, counts an attempt. Order is that of the times, as
far as one relay keeps it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from pillarbox.layouts import openoutbox_tables as tables
from pillarbox.layouts.clock import later, now, row_now
from pillarbox.layouts.layout import Counts, Feature, Grave, Layout, Lease, Update, Wait
from pillarbox.layouts.shared import RAW_PAYLOAD, from_topic, header_names, literal

LEASE: Final = timedelta(minutes=3)

_FIELDS: Final = {
    "id": "event_id",
    "topic": "event_type",
    "key": "partition_key",
    "payload": "payload",
    "headers": "headers",
    "created_at": "created_at",
}

_PENDING: Final = literal("PENDING")
_DELIVERING: Final = literal("DELIVERING")
_DELIVERED: Final = literal("DELIVERED")
_DEAD: Final = literal("DEAD")


def _unlocked(status: str, **values: Any) -> dict[str, Any]:
    return {"status": status, **values, "locked_by": None, "locked_at": None, "updated_at": now()}


def _put(due: Any) -> dict[str, Any]:
    return {
        "status": "PENDING",
        "attempts": 0,
        "available_at": row_now() if due is None else due,
        "created_at": now(),
        "updated_at": now(),
    }


def openoutbox_layout() -> Layout:
    return Layout(
        name="openoutbox",
        table=tables.TABLE,
        declare=tables.declare,
        variants=tables.VARIANTS,
        rows=("event_id",),
        fields=_FIELDS,
        message="openoutbox",
        carried=header_names(_FIELDS),
        fallbacks={"type": from_topic, **RAW_PAYLOAD},
        absent={"headers": "{}"},
        has_text_headers=True,
        put=_put,
        attempts="attempts",
        created="created_at",
        error="last_error",
        delivered_at="delivered_at",
        ready=lambda c: (c.status == _PENDING) & (c.available_at <= now()),
        order_by=("available_at", "created_at", "event_id"),
        indexed=("available_at", "created_at"),
        waits=(
            Wait("available_at", lambda c: (c.status == _PENDING) & (c.available_at > now())),
            Wait("locked_at", lambda c: c.status == _DELIVERING, plus_lease=True),
            # A claim without a time has lapsed; any past moment says so.
            Wait("created_at", lambda c: (c.status == _DELIVERING) & c.locked_at.is_(None)),
        ),
        lease=Lease(
            fence="locked_by",
            at="locked_at",
            token="owner",
            length=LEASE,
            claim=lambda c, given: {
                "status": "DELIVERING",
                "locked_by": given.fence,
                "locked_at": now(),
                "updated_at": now(),
            },
            renew=lambda c, given: {"locked_at": now(), "updated_at": now()},
            lapsed=lambda c, seconds: (
                (c.status == _DELIVERING) & (c.locked_at.is_(None) | (c.locked_at <= later(-seconds)))
            ),
            lapse=Update(
                lambda c, given: _unlocked(
                    "PENDING", attempts=given.attempt, available_at=later(given.delay), last_error=given.error
                )
            ),
        ),
        delivered=Update(lambda c, given: _unlocked("DELIVERED", delivered_at=now())),
        retry=Update(
            lambda c, given: _unlocked(
                "PENDING", attempts=given.attempt, available_at=later(given.delay), last_error=given.error
            )
        ),
        dead=Update(lambda c, given: _unlocked("DEAD", attempts=given.attempt, last_error=given.error)),
        grave=Grave("outbox", "event_id", "updated_at", "last_error", "attempts", lambda c: c.status == _DEAD),
        release=Update(lambda c, given: _unlocked("PENDING")),
        redrive=Update(lambda c, given: _unlocked("PENDING", attempts=0, available_at=now(), last_error=None)),
        replay=Update(lambda c, given: _unlocked("PENDING", attempts=0, available_at=now(), delivered_at=None)),
        cancellable=lambda c: c.status == _PENDING,
        reschedule=Update(lambda c, given: {"available_at": given.due, "updated_at": now()}),
        counts=Counts(
            new=lambda c: (c.status == _PENDING) & (c.attempts == 0) & (c.available_at <= now()),
            retrying=lambda c: (c.status == _PENDING) & (c.attempts > 0),
            held=lambda c: c.status == _DELIVERING,
            scheduled=lambda c: (c.status == _PENDING) & (c.attempts == 0) & (c.available_at > now()),
            delivered=lambda c: c.status == _DELIVERED,
        ),
        features=frozenset({Feature.HOLD, Feature.LEASE, Feature.SCHEDULE, Feature.DEAD, Feature.RETENTION}),
    )
