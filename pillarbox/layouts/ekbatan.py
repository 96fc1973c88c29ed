"""Ekbatan's event log, and its notifications where in-process handlers are in use.

`ekbatan` delivers straight from `eventlog.events`: rows whose `delivered` is FALSE, never the sentinel rows of actions
without events. What the table cannot hold stands in a side table. Where the notifications exist, handlers flip
`delivered` for themselves, and a direct relay is refused: deliver from `ekbatan-notifications`, which has a row for
each event and recipient.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa

from pillarbox.layouts import ekbatan_tables as tables
from pillarbox.layouts.clock import utc_later, utc_now
from pillarbox.layouts.layout import Counts, Feature, Grave, Layout, Lease, Side, Update, Wait
from pillarbox.layouts.shared import JSON_PAYLOAD, check_object, from_type, literal
from pillarbox.layouts.sidelife import SIDE_LIFE

_DATABASES: Final = frozenset({"postgresql", "mysql", "mariadb"})
_FIELDS: Final = {
    "id": "id",
    "type": "event_type",
    "key": "model_id",
    "aggregate_type": "model_type",
    "payload": "payload",
    "source": "namespace",
    "correlation_id": "action_id",
    "created_at": "event_date",
}
_EXTRA: Final = (
    *("namespace", "action_id", "action_name", "action_params", "started_date", "completion_date"),
    *("model_type", "model_id", "event_date", "handler_name", "created_date"),
)
_FALLBACKS: Final = {"topic": from_type, "aggregate_id": lambda event, row: event.key, **JSON_PAYLOAD}


def _is_open(c: Any) -> Any:
    return (c.delivered == sa.false()) & c.event_type.is_not(None)


def _put(due: Any) -> dict[str, Any]:
    return {
        "action_name": "pillarbox.put",
        "action_params": sa.literal_column("'{}'"),
        "started_date": utc_now(),
        "completion_date": utc_now(),
        "event_date": utc_now(),
        "delivered": sa.false(),
    }


def _notifications(table: sa.Table) -> tuple[str, str | None]:
    return tables.notifications_name(table.name), table.schema


def ekbatan_layout() -> Layout:
    return make_log_layout(
        name="ekbatan",
        table=tables.TABLE,
        schema=tables.SCHEMA,
        databases=_DATABASES,
        declare=tables.declare_base,
        told={"modelId": "key", "modelName": "aggregate_type"},
    )


def make_log_layout(**place: Any) -> Layout:
    """An event log of these columns: what it is called, where its tables are, how they are declared, what it tells."""
    return Layout(
        **place,
        rows=("id",),
        fields=_FIELDS,
        fallbacks=_FALLBACKS,
        check=lambda event: check_object(event, layout=place["name"], is_empty_allowed=True),
        put=_put,
        created="event_date",
        ready=_is_open,
        order_by=("event_date", "id"),
        beside=_notifications,
        side=Side(),
        delivered=Update(lambda c, given: {"delivered": sa.true()}),
        counts=Counts(new=_is_open, **SIDE_LIFE.counts),
        features=frozenset({Feature.HOLD, Feature.LEASE, Feature.DEAD}),
        **SIDE_LIFE.options("id"),
    )


# -- notifications ----------------------------------------------------------------------------------------------------

_PENDING: Final = literal("PENDING")
_FAILED: Final = literal("FAILED")
_SUCCEEDED: Final = literal("SUCCEEDED")
_EXPIRED: Final = literal("EXPIRED")


def ekbatan_notifications_layout() -> Layout:
    return make_notifications_layout(
        name="ekbatan-notifications",
        table=tables.TABLE,
        schema=tables.SCHEMA,
        databases=_DATABASES,
        declare=tables.declare_notifications,
        variants=tables.NOTIFICATION_VARIANTS,
    )


def _ended(state: str, given: Any) -> dict[str, Any]:
    return {"state": state, "attempts": given.attempt, "next_retry_at": utc_now(), "updated_date": utc_now()}


def _failed(given: Any) -> dict[str, Any]:
    return {
        "state": "FAILED",
        "attempts": given.attempt,
        "next_retry_at": utc_later(given.delay),
        "updated_date": utc_now(),
    }


def _is_waiting(c: Any) -> Any:
    return c.state.in_([_PENDING, _FAILED])


def _is_claimed(c: Any) -> Any:
    # The other system leaves no row PENDING that it has tried, so this is a claim, under way or lapsed.
    return (c.state == _PENDING) & (c.attempts > 0)


def make_notifications_layout(**place: Any) -> Layout:
    """Notifications of these columns: what they are called, where their table is and how it is declared."""
    return Layout(
        **place,
        rows=("id",),
        # Its age is that of the notification: a handler that comes late has as much time for it as any other.
        fields={**_FIELDS, "id": "event_id", "created_at": "created_date"},
        extra=_EXTRA,
        fallbacks=_FALLBACKS,
        put=None,
        attempts="attempts",
        is_counted_at_claim=True,
        created="created_date",
        delivered_at="updated_date",
        recipient="handler_name",
        ready=lambda c: _is_waiting(c) & (c.next_retry_at <= utc_now()),
        order_by=("next_retry_at", "id"),
        waits=(Wait("next_retry_at", lambda c: _is_waiting(c) & (c.next_retry_at > utc_now())),),
        lease=Lease(
            fence="next_retry_at",
            at="next_retry_at",
            token="wrote",
            is_found_by_claim=True,
            claim=lambda c, given: {
                "state": "PENDING",
                "next_retry_at": utc_later(given.delay),
                "attempts": given.attempt,
                "updated_date": utc_now(),
            },
            renew=lambda c, given: {"next_retry_at": utc_later(given.delay), "updated_date": utc_now()},
            lapsed=lambda c, seconds: _is_claimed(c) & (c.next_retry_at <= utc_now()),
            lapse=Update(lambda c, given: _failed(given)),
        ),
        # The fence moves with every change: a late settlement must find nothing that it could match.
        delivered=Update(lambda c, given: _ended("SUCCEEDED", given)),
        retry=Update(lambda c, given: _failed(given)),
        dead=Update(lambda c, given: _ended("EXPIRED", given)),
        grave=Grave("outbox", "id", "updated_date", None, "attempts", lambda c: c.state == _EXPIRED),
        release=Update(
            lambda c, given: {
                "state": sa.case((given.attempt > 1, _FAILED), else_=_PENDING),
                "attempts": given.attempt - 1,
                "next_retry_at": utc_now(),
                "updated_date": utc_now(),
            }
        ),
        redrive=Update(
            lambda c, given: {"state": "PENDING", "attempts": 0, "next_retry_at": utc_now(), "updated_date": utc_now()}
        ),
        counts=Counts(
            new=lambda c: (c.state == _PENDING) & (c.attempts == 0),
            retrying=lambda c: c.state == _FAILED,
            held=_is_claimed,
            delivered=lambda c: c.state == _SUCCEEDED,
        ),
        features=frozenset({Feature.HOLD, Feature.LEASE, Feature.DEAD, Feature.RETENTION}),
    )
