"""omni-box's tables: outbox and inbox, plain and partitioned (PostgreSQL).

    put ─► pending ─► (held, or locked_at and locked_by) ─► completed
              ▲                    │
              └── scheduled_at ────┤ a failed try, attempts_made + 1
                                   └─► failed, attempts_made = max_attempts

A row's own `max_attempts` rules. A lapsed lock counts an attempt, so that a row whose worker dies on the last one is
failed and not stranded. `updated_at` moves with every change. Order is that of the times, as far as one relay keeps it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

import orjson
import sqlalchemy as sa

from pillarbox.errors import InvalidEvent
from pillarbox.layouts import omnibox_tables as tables
from pillarbox.layouts.clock import later, now, row_now
from pillarbox.layouts.layout import Counts, Feature, Grave, Layout, Lease, Update, Wait
from pillarbox.layouts.shared import (
    JSON_PAYLOAD,
    check_object,
    from_topic,
    from_type,
    has_zero,
    header_names,
    literal,
)

MAX_ERROR: Final = 2000
MAX_ATTEMPTS: Final = 6
LEASE: Final = timedelta(seconds=300)
MAX_AHEAD: Final = timedelta(days=365)
MAX_PAYLOAD: Final = 1_000_000
MAX_DEPTH: Final = 254
MAX_SCALE: Final = 16_383
MAX_HEADERS: Final = 100
MAX_NAME: Final = 64
MAX_VALUE: Final = 512
# Where a number may be too large or too fine: the rest is not worth looking at twice.
_LARGE_NUMBER: Final = re.compile(rb"[0-9]{19}|[0-9][eE]")
_DIGITS: Final = 308
# PostgreSQL reads no larger one, not even of zero.
_MAX_EXPONENT: Final = 1_000_000_000

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
_TEXTS: Final = (
    *("type", "topic", "key", "aggregate_type", "dedup_key", "schema_version", "correlation_id", "causation_id"),
    *("trace_id", "source"),
)

# In hours: a year of days is an hour longer where the session's clocks are changed in between.
_FURTHEST: Final = sa.literal_column(f"INTERVAL '{MAX_AHEAD // timedelta(hours=1)} hours'", sa.Interval())
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
        scheduled_at=_readable(c, later(given.delay)),
        last_error=_cut(given.error),
    )


def _readable(c: Any, due: Any) -> Any:
    """A time that omni-box can read in this row."""
    return sa.func.least(due, c.created_at + _FURTHEST)


def _put(due: Any) -> dict[str, Any]:
    # The columns' own defaults are off by the session's distance from UTC.
    return {
        # Tables that omni-box's models made have no defaults for these.
        "status": "pending",
        "attempts_made": 0,
        # omni-box cannot read a row that is due long before it was put, or too long after.
        "scheduled_at": row_now() if due is None else sa.func.least(sa.func.greatest(due, now()), now() + _FURTHEST),
        "created_at": now(),
        "updated_at": now(),
    }


def _check(name: str, is_inbox: bool) -> Callable[[Any], None]:
    """What omni-box itself cannot read, it stops at."""
    texts = [field for field in (_INBOX if is_inbox else _OUTBOX) if field in _TEXTS]

    def check(event: Any) -> None:
        check_object(event, layout=name, is_empty_allowed=False)
        if _is_deep(event.payload):
            raise _refuse(event, name, f"a payload of at most {MAX_DEPTH} levels", "a deeper one")
        size = _measure(event, name)
        if size > MAX_PAYLOAD:
            raise _refuse(event, name, f"a payload of at most {MAX_PAYLOAD} bytes", size)
        if has_zero(event.payload):
            raise _refuse(event, name, "a payload without zero characters, which JSONB cannot hold", "one")
        due = event.due_at - datetime.now(UTC) if event.due_at is not None else event.delay
        if due is not None and due > MAX_AHEAD:
            raise _refuse(event, name, f"an event that is due at most {MAX_AHEAD.days} days ahead", due)
        for field in texts:
            text = getattr(event, field)
            if text is not None and (not text or text != text.strip()):
                raise _refuse(event, name, f"text without blanks at its ends for {field}", repr(text))

    return check


def _is_deep(payload: bytes) -> bool:
    # omni-box reads one level more than this; `orjson` writes just as many.
    if payload.count(b"{") + payload.count(b"[") <= MAX_DEPTH:
        return False
    try:
        orjson.dumps(orjson.loads(payload))
    except TypeError:
        return True
    return False


def _measure(event: Any, layout: str) -> int:
    """The size of a payload, or of what omni-box reads of it where that may be larger."""
    if _LARGE_NUMBER.search(event.payload) is None:
        return len(event.payload)
    try:
        read = orjson.dumps(json.loads(event.payload, parse_float=_as_stored))
    except (TypeError, ValueError, ArithmeticError):
        expected = f"whole numbers have at most 64 bits and others at most {MAX_SCALE} digits behind the point"
        raise _refuse(event, layout, f"a payload whose {expected}", "another number") from None
    return max(len(event.payload), len(read))


def _as_stored(text: str) -> float:
    """A number as JSONB returns it: without digits behind the point it is written as a whole one."""
    number = Decimal(text)
    exponent = number.as_tuple().exponent
    if not isinstance(exponent, int) or not -MAX_SCALE <= exponent <= _MAX_EXPONENT:
        raise ValueError(text)
    if not number:
        return 0
    if number.adjusted() >= _DIGITS:
        raise ValueError(text)
    return int(number) if exponent >= 0 else float(number)


def _refuse_headers(headers: Mapping[str, Any]) -> str | None:
    if len(headers) > MAX_HEADERS:
        ours = sum(name.startswith("pillarbox-") for name in headers)
        extra = f", {ours} of them for what has no column" if ours else ""
        return f"expects at most {MAX_HEADERS} headers, got {len(headers)}{extra}"
    seen: set[str] = set()
    for name, value in headers.items():
        wrong = _refuse_text("names", name, MAX_NAME) or _refuse_text("values", value, MAX_VALUE, f" for {name!r}")
        if wrong is not None:
            return wrong
        if name.lower() in seen:
            return f"expects headers that differ not only in capitals, got {name.lower()!r} twice"
        seen.add(name.lower())
    return None


def _refuse_text(what: str, text: str, most: int, where: str = "") -> str | None:
    allowed = "\t" if what == "values" else ""
    if not text or text != text.strip():
        expected = "that are not blank and have no blanks at their ends"
    elif len(text) > most:
        expected = f"of at most {most} characters"
    elif any((ord(each) < 32 or ord(each) == 127) and each not in allowed for each in text):
        expected = "without control characters"
    else:
        return None
    return f"expects headers with {what} {expected}, got {text[:80]!r}{where}"


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
        variants=tables.variants_of(declare),
        rows=("id", "created_at") if is_partitioned else ("id",),
        fields=fields,
        message="pillarbox" if is_inbox else "omnibox",
        # An inbox has no column for the topic: its source is whatever the consumer says that it is.
        carried=header_names(fields, **({"topic": "pillarbox-topic"} if is_inbox else {})),
        fallbacks=fallbacks,
        absent={"max_attempts": MAX_ATTEMPTS},
        check=_check(name, is_inbox),
        has_text_headers=True,
        refuse_headers=_refuse_headers,
        furthest=MAX_AHEAD,
        put=None if is_inbox else _put,
        is_locked_at_put=is_partitioned,
        attempts="attempts_made",
        created="created_at",
        longest_delay=timedelta(days=364),
        error="last_error",
        delivered_at="completed_at",
        ready=lambda c: _is_free(c) & (c.scheduled_at <= now()),
        order_by=("scheduled_at", "created_at", "id"),
        indexed=("scheduled_at",),
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
            lambda c, given: _unlocked(
                status="pending", attempts_made=0, last_error=None, scheduled_at=_readable(c, now())
            )
        ),
        replay=Update(
            lambda c, given: _unlocked(
                status="pending", attempts_made=0, completed_at=None, scheduled_at=_readable(c, now())
            )
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
