"""faststream-outbox's table, with and without its table of dead letters (PostgreSQL).

    put ─► free ─► (held, or acquired_token and acquired_at) ─► deleted
             ▲                 │
             └ next_attempt_at ┤ a failed try, attempts_count + 1
                               └─► the DLQ, or parked at the end of time where there is none

`queue` is the topic; the event's id, type, key and content type travel in the headers. Without a DLQ a dead row stays
where it is, due never: it is counted as dead, listed, redriven and pruned like any other dead event.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final
from uuid import UUID, uuid5

import sqlalchemy as sa

from pillarbox.layouts import faststream_tables as tables
from pillarbox.layouts.clock import later, now, row_now
from pillarbox.layouts.layout import Counts, Delete, Feature, Grave, Layout, Lease, Move, Scope, Update, Wait
from pillarbox.layouts.shared import RAW_PAYLOAD, from_topic, header_names

LEASE: Final = timedelta(seconds=60)
MAX_ERROR: Final = 8192
_IDS: Final = UUID("6f0a3f2e-5f0c-5d3c-9a35-0c6a4f8a1e77")

_FIELDS: Final = {
    "topic": "queue",
    "payload": "payload",
    "headers": "headers",
    "dedup_key": "timer_id",
    "created_at": "created_at",
}
_NEVER: Final = sa.literal_column("TIMESTAMPTZ '9999-12-31 00:00:00+00'", sa.DateTime(timezone=True))


_LAST: Final = sa.literal_column("TIMESTAMPTZ '9999-12-29 00:00:00+00'", sa.DateTime(timezone=True))


def _alive(due: Any) -> Any:
    # A row that is due at the end of time is a dead one.
    return sa.func.least(due, _LAST)


def _id_of_row(event: Any, row: Any) -> UUID:
    # The same for every delivery of the row, which is all that a consumer can tell repeats by.
    return uuid5(_IDS, f"{event.topic}/{row}")


def _is_free(c: Any) -> Any:
    return c.acquired_token.is_(None)


def _is_dead(c: Any) -> Any:
    return _is_free(c) & (c.next_attempt_at >= _NEVER)


def _is_live(c: Any) -> Any:
    return _is_free(c) & (c.next_attempt_at < _NEVER)


def _tried(c: Any, given: Any) -> dict[str, Any]:
    return {
        "attempts_count": given.attempt,
        "deliveries_count": sa.func.greatest(c.deliveries_count, given.attempt),
        "first_attempt_at": sa.func.coalesce(c.first_attempt_at, now()),
        "last_attempt_at": now(),
        "acquired_at": None,
        "acquired_token": None,
    }


def _put(due: Any) -> dict[str, Any]:
    return {
        "attempts_count": 0,
        "deliveries_count": 0,
        "created_at": now(),
        "next_attempt_at": row_now() if due is None else _alive(due),
    }


def _layout(name: str, declare: Any, **fate: Any) -> Layout:
    return Layout(
        name=name,
        table=tables.TABLE,
        databases=frozenset({"postgresql"}),
        declare=declare,
        variants=tables.variants_of(declare),
        rows=("id",),
        fields=_FIELDS,
        message="faststream",
        dedup_within="queue",
        carried=header_names(_FIELDS, id="pillarbox-id", correlation_id="correlation_id"),
        fallbacks={"id": _id_of_row, "type": from_topic, **RAW_PAYLOAD},
        # Its relay passes headers on to brokers as text.
        has_text_headers=True,
        put=_put,
        channel=lambda table: f"outbox_{table.name}",
        attempts="attempts_count",
        created="created_at",
        ready=lambda c: _is_free(c) & (c.next_attempt_at <= now()),
        order_by=("next_attempt_at", "id"),
        scope=Scope("queue", _is_free),
        waits=(
            Wait("next_attempt_at", lambda c: _is_free(c) & (c.next_attempt_at > now()) & (c.next_attempt_at < _NEVER)),
            Wait("acquired_at", lambda c: c.acquired_token.is_not(None), plus_lease=True),
        ),
        lease=Lease(
            fence="acquired_token",
            at="acquired_at",
            length=LEASE,
            claim=lambda c, given: {
                "acquired_token": given.fence,
                "acquired_at": now(),
                "deliveries_count": c.deliveries_count + 1,
            },
            renew=lambda c, given: {"acquired_at": now()},
            lapsed=lambda c, seconds: c.acquired_token.is_not(None) & (c.acquired_at <= later(-seconds)),
            lapse=Update(lambda c, given: {**_tried(c, given), "next_attempt_at": later(given.delay)}),
        ),
        delivered=Delete(),
        retry=Update(lambda c, given: {**_tried(c, given), "next_attempt_at": later(given.delay)}),
        release=Update(lambda c, given: {"acquired_at": None, "acquired_token": None}),
        cancellable=_is_live,
        reschedule=Update(lambda c, given: {"next_attempt_at": _alive(given.due)}),
        counts=Counts(
            new=lambda c: _is_free(c) & (c.attempts_count == 0) & (c.next_attempt_at <= now()),
            retrying=lambda c: _is_live(c) & (c.attempts_count > 0),
            held=lambda c: c.acquired_token.is_not(None),
            scheduled=lambda c: _is_free(c) & (c.attempts_count == 0) & (c.next_attempt_at > now()),
        ),
        features=frozenset({Feature.HOLD, Feature.LEASE, Feature.DEDUP, Feature.SCHEDULE, Feature.DEAD}),
        **fate,
    )


def faststream_layout() -> Layout:
    return _layout(
        "faststream",
        tables.declare_outbox,
        dead=Update(lambda c, given: {**_tried(c, given), "next_attempt_at": _NEVER}),
        grave=Grave("outbox", "id", "last_attempt_at", None, "attempts_count", _is_dead),
        # As a row that the other system never tried: it gives up by these, too.
        redrive=Update(
            lambda c, given: {
                "next_attempt_at": now(),
                "attempts_count": 0,
                "deliveries_count": 0,
                "first_attempt_at": None,
                "last_attempt_at": None,
            }
        ),
    )


def faststream_dlq_layout() -> Layout:
    return _layout(
        "faststream-dlq",
        tables.declare_with_dlq,
        dead=Move(
            "dead",
            lambda c, given: {
                "original_id": c.id,
                "deliveries_count": sa.func.greatest(c.deliveries_count, given.attempt),
                "failed_at": now(),
                "failure_reason": "retry_terminal",
                "last_exception": sa.func.left(given.error, MAX_ERROR),
            },
        ),
        grave=Grave("dead", "id", "failed_at", "last_exception", "deliveries_count", origin="original_id"),
        redrive=Move(
            "outbox",
            lambda c, given: {
                "id": c.original_id,
                "next_attempt_at": now(),
                "attempts_count": 0,
                "deliveries_count": 0,
            },
        ),
    )
