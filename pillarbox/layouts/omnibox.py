"""omni-box's tables: outbox and inbox, plain and partitioned (PostgreSQL).

    put ─► pending ─► (held, or locked_at and locked_by) ─► completed
              ▲                    │
              └── scheduled_at ────┤ a failed try, attempts_made + 1
                                   └─► failed, attempts_made = max_attempts

A row's own `max_attempts` rules. A lapsed lock counts an attempt, so that a row whose worker dies on the last one is
failed and not stranded. `updated_at` moves with every change. Order is that of the times, as far as one relay keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa

from pillarbox.errors import InvalidEvent
from pillarbox.layouts import omnibox_tables as tables
from pillarbox.layouts.clock import later, now
from pillarbox.layouts.layout import Counts, Feature, Grave, Layout, Lease, Update, Wait
from pillarbox.layouts.shared import JSON_PAYLOAD, check_object, from_topic, from_type, header_names, literal

MAX_ERROR: Final = 2000
MAX_ATTEMPTS: Final = 6
LEASE: Final = timedelta(seconds=300)
MAX_AHEAD: Final = timedelta(days=365)
MAX_PAYLOAD: Final = 1_000_000
MAX_HEADERS: Final = 100
MAX_NAME: Final = 64
MAX_VALUE: Final = 512

_COMMON: Final = {
    "id": "id",
    "type": "event_type",
    "payload": "payload",
    "headers": "headers",
    "dedup_key": "idempotency_key",
    "schema_version": "schema_version",
    "correlation_id": "correlation_id",
    "causation_id": "causation_id",
    "trace_id": "trace_id",
    "max_attempts": "max_attempts",
    "created_at": "created_at",
}
_OUTBOX: Final = {
    **_COMMON,
    "topic": "topic",
    "key": "partition_key",
    "aggregate_type": "aggregate_type",
    "aggregate_id": "aggregate_id",
}
_INBOX: Final = {**_COMMON, "source": "source"}

_PENDING: Final = literal("pending")
_COMPLETED: Final = literal("completed")
_FAILED: Final = literal("failed")


def _is_free(c: Any) -> Any:
    return (c.status == _PENDING) & c.locked_at.is_(None) & (c.attempts_made < c.max_attempts)


def _is_held(c: Any) -> Any:
    return (c.status == _PENDING) & c.locked_at.is_not(None)


def _cut(error: Any) -> Any:
    return sa.func.left(error, MAX_ERROR)


def _unlocked(**values: Any) -> dict[str, Any]:
    return {**values, "locked_at": None, "locked_by": None, "updated_at": now()}


def _fail(c: Any, given: Any) -> dict[str, Any]:
    # A pending row without an attempt left would be nobody's, and its check allows no more than it has.
    is_last = given.attempt >= c.max_attempts
    return _unlocked(
        status=sa.case((is_last, _FAILED), else_=_PENDING),
        attempts_made=sa.func.least(given.attempt, c.max_attempts),
        scheduled_at=later(given.delay),
        last_error=_cut(given.error),
    )


def _put(due: Any) -> dict[str, Any]:
    # The columns' own defaults are off by the session's distance from UTC.
    return {
        "status": "pending",
        # omni-box cannot read a row that is due long before it was put.
        "scheduled_at": now() if due is None else sa.func.greatest(due, now()),
        "created_at": now(),
        "updated_at": now(),
    }


def _check(name: str) -> Callable[[Any], None]:
    """What omni-box itself cannot read, it stops at."""

    def check(event: Any) -> None:
        check_object(event, layout=name, is_empty_allowed=False)
        if len(event.payload) > MAX_PAYLOAD:
            raise _refuse(event, name, f"a payload of at most {MAX_PAYLOAD} bytes", len(event.payload))
        due = event.due_at - datetime.now(UTC) if event.due_at is not None else event.delay
        if due is not None and due > MAX_AHEAD:
            raise _refuse(event, name, f"an event that is due at most {MAX_AHEAD.days} days ahead", due)
        _check_headers(event, name)

    return check


def _check_headers(event: Any, layout: str) -> None:
    if len(event.headers) > MAX_HEADERS:
        raise _refuse(event, layout, f"at most {MAX_HEADERS} headers", len(event.headers))
    seen: set[str] = set()
    for name, value in event.headers.items():
        if len(name) > MAX_NAME:
            raise _refuse(event, layout, f"headers with names of at most {MAX_NAME} characters", repr(name))
        if len(value) > MAX_VALUE:
            raise _refuse(event, layout, f"headers with values of at most {MAX_VALUE} characters", repr(value[:80]))
        if name.lower() in seen:
            raise _refuse(event, layout, "headers that differ not only in capitals", f"{name.lower()!r} twice")
        seen.add(name.lower())


def _refuse(event: Any, layout: str, expected: str, got: Any) -> InvalidEvent:
    return InvalidEvent(f"Event {event.type!r} ({event.id}): layout {layout!r} expects {expected}, got {got}")


def _layout(
    name: str,
    table: str,
    declare: Callable[[sa.MetaData, str, str | None], Mapping[str, sa.Table]],
    fields: Mapping[str, str],
    *,
    is_partitioned: bool,
    is_inbox: bool,
) -> Layout:
    fallbacks = {**JSON_PAYLOAD, **({"topic": from_type} if is_inbox else {"type": from_topic})}
    return Layout(
        name=name,
        table=table,
        databases=frozenset({"postgresql"}),
        declare=declare,
        rows=("id", "created_at") if is_partitioned else ("id",),
        fields=fields,
        # An inbox has no column for the topic: its source is whatever the consumer says that it is.
        carried=header_names(fields, **({"topic": "pillarbox-topic"} if is_inbox else {})),
        fallbacks=fallbacks,
        absent={"max_attempts": MAX_ATTEMPTS},
        check=_check(name),
        has_text_headers=True,
        put=None if is_inbox else _put,
        is_locked_at_put=is_partitioned,
        attempts="attempts_made",
        created="created_at",
        error="last_error",
        delivered_at="completed_at",
        ready=lambda c: _is_free(c) & (c.scheduled_at <= now()),
        order_by=("scheduled_at", "created_at", "id"),
        recipient="consumer_group" if is_inbox else None,
        waits=(
            Wait("scheduled_at", lambda c: _is_free(c) & (c.scheduled_at > now())),
            Wait("locked_at", _is_held, plus_lease=True),
        ),
        lease=Lease(
            fence="locked_by",
            at="locked_at",
            token="owner",
            length=LEASE,
            claim=lambda c, given: {"locked_at": now(), "locked_by": given.fence, "updated_at": now()},
            renew=lambda c, given: {"locked_at": now(), "updated_at": now()},
            lapsed=lambda c, seconds: _is_held(c) & (c.locked_at <= later(-seconds)),
            lapse=Update(_fail),
        ),
        delivered=Update(lambda c, given: _unlocked(status="completed", completed_at=now())),
        retry=Update(_fail),
        dead=Update(
            lambda c, given: _unlocked(status="failed", attempts_made=c.max_attempts, last_error=_cut(given.error))
        ),
        grave=Grave("outbox", "id", "updated_at", "last_error", "attempts_made", lambda c: c.status == _FAILED),
        release=Update(lambda c, given: _unlocked()),
        redrive=Update(
            lambda c, given: _unlocked(status="pending", attempts_made=0, last_error=None, scheduled_at=now())
        ),
        replay=Update(
            lambda c, given: _unlocked(status="pending", attempts_made=0, completed_at=None, scheduled_at=now())
        ),
        cancellable=lambda c: (c.status == _PENDING) & c.locked_at.is_(None),
        reschedule=Update(
            lambda c, given: {"scheduled_at": sa.func.greatest(given.due, c.created_at), "updated_at": now()}
        ),
        counts=Counts(
            new=lambda c: _is_free(c) & (c.attempts_made == 0) & (c.scheduled_at <= now()),
            retrying=lambda c: _is_free(c) & (c.attempts_made > 0),
            held=_is_held,
            scheduled=lambda c: _is_free(c) & (c.attempts_made == 0) & (c.scheduled_at > now()),
            delivered=lambda c: (c.status == _COMPLETED) & c.completed_at.is_not(None),
        ),
        features=frozenset(
            {Feature.HOLD, Feature.LEASE, Feature.DEDUP, Feature.SCHEDULE, Feature.DEAD, Feature.RETENTION}
        ),
    )


def omnibox_layout() -> Layout:
    declare = tables.declare_outbox
    return _layout("omnibox", tables.OUTBOX, declare, _OUTBOX, is_partitioned=False, is_inbox=False)


def omnibox_partitioned_layout() -> Layout:
    declare, table = tables.declare_outbox_partitioned, tables.OUTBOX_PARTITIONED
    return _layout("omnibox-partitioned", table, declare, _OUTBOX, is_partitioned=True, is_inbox=False)


def omnibox_inbox_layout() -> Layout:
    declare = tables.declare_inbox
    return _layout("omnibox-inbox", tables.INBOX, declare, _INBOX, is_partitioned=False, is_inbox=True)


def omnibox_inbox_partitioned_layout() -> Layout:
    declare, table = tables.declare_inbox_partitioned, tables.INBOX_PARTITIONED
    return _layout("omnibox-inbox-partitioned", table, declare, _INBOX, is_partitioned=True, is_inbox=True)
