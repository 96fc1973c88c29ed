"""Pillarbox's own layout.

    put ─► ready ─► (held or leased) ─► deleted, or delivered when rows are retained
             ▲            │
             │            ├─► waiting ──┐  a failed try, until its time; blocks the later events of its key
             ├────────────┼─────────────┘
             │            └─► the dead table; parks its key, or lets it pass
             ├── scheduled   put with a time; blocks nobody
             └── blocked     behind an event of its key that is leased, waiting or parked

Only ready rows are in the claim index, so that rows which wait for whatever reason cost a claim nothing.

The partitioned form, `pillarbox-partitioned` for PostgreSQL, retains every delivered row by moving it into a table of
its own, which is partitioned by the time of delivery. A month is then removed by dropping its partition. Three things
follow:

- An id is unique among the rows of the outbox: put again after its delivery it is a new event. In the plain form it is
  refused for as long as the delivered row is retained.
- A delivered row for whose month there is no partition stays in the outbox as in the plain form, where it is counted,
  listed, replayed and pruned as well; nothing is lost or delivered again. `pillarbox partitions ensure` takes it along.
- The outbox table is the same in both forms, so that either can take over from the other.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.sql import ColumnElement

from pillarbox.event import EVENT_FIELDS
from pillarbox.layouts.clock import later, now
from pillarbox.layouts.layout import (
    DATABASES,
    Counts,
    Delete,
    Feature,
    Front,
    Grave,
    History,
    Layout,
    Lease,
    Move,
    Order,
    Update,
    Wait,
)
from pillarbox.layouts.pillarbox_tables import (
    LANES,
    AuditMixin,
    DeadMixin,
    HistoryMixin,
    LanesMixin,
    OutboxMixin,
    declare_with,
)

__all__ = [
    "LANES",
    "AuditMixin",
    "DeadMixin",
    "HistoryMixin",
    "LanesMixin",
    "OutboxMixin",
    "pillarbox_layout",
    "pillarbox_partitioned_layout",
]

# Written into the statements as literals: a bound value would not match the predicate of a partial index.
READY: Final = sa.literal_column("0", sa.SmallInteger)
LEASED: Final = sa.literal_column("1", sa.SmallInteger)
WAITING: Final = sa.literal_column("2", sa.SmallInteger)
BLOCKED: Final = sa.literal_column("3", sa.SmallInteger)
SCHEDULED: Final = sa.literal_column("4", sa.SmallInteger)
DELIVERED: Final = sa.literal_column("5", sa.SmallInteger)

STATE_NAMES: Final = ("ready", "leased", "waiting", "blocked", "scheduled", "delivered")

_COLUMN_OF: Final = MappingProxyType({name: name for name in EVENT_FIELDS if name != "delay"})


# SQLite uses a partial index only where the query repeats its condition.
def _is_keyed(c: Any) -> ColumnElement[bool]:
    keyed: ColumnElement[bool] = c.key.is_not(None) & c.state.in_([LEASED, WAITING, BLOCKED])
    return keyed


def _is_timed(c: Any) -> ColumnElement[bool]:
    timed: ColumnElement[bool] = c.until_at.is_not(None)
    return timed


def _put(due: ColumnElement[Any] | None) -> dict[str, Any]:
    if due is None:
        return {"state": READY, "until_at": None, "due_at": None, "created_at": now()}
    is_later = due > now()
    return {
        "state": sa.case((is_later, SCHEDULED), else_=READY),
        "until_at": sa.case((is_later, due)),
        "due_at": due,
        "created_at": now(),
    }


def _free(**values: Any) -> dict[str, Any]:
    return {"token": None, "until_at": None, **values}


_TO_HISTORY: Final = Move("history", lambda c, given: {"delivered_at": now(), "attempts": given.attempt})
_HISTORY: Final = History(
    "history",
    "seq",
    "delivered_at",
    replay=Move("outbox", lambda c, given: {"state": READY, "attempts": 0, "delivered_at": None}),
)


def pillarbox_layout(lanes: int = LANES, *, is_partitioned: bool = False) -> Layout:
    """The layout for tables made with this number of lanes, with delivered rows in partitions or not."""
    return Layout(
        name="pillarbox-partitioned" if is_partitioned else "pillarbox",
        table="outbox",
        databases=frozenset({"postgresql"}) if is_partitioned else DATABASES,
        declare=declare_with(lanes, is_partitioned=is_partitioned),
        rows=("seq",),
        fields=_COLUMN_OF,
        put=_put,
        attempts="attempts",
        is_counted_at_claim=True,
        created="created_at",
        error="error",
        delivered_at="delivered_at",
        ready=lambda c: c.state == READY,
        order_by=("seq",),
        waits=(
            Wait("until_at", lambda c: (c.state == LEASED) & _is_timed(c)),
            Wait("until_at", lambda c: (c.state == WAITING) & _is_timed(c)),
            Wait("until_at", lambda c: (c.state == SCHEDULED) & _is_timed(c)),
        ),
        lease=Lease(
            fence="token",
            at="until_at",
            claim=lambda c, given: {
                "state": LEASED,
                "token": given.fence,
                "until_at": later(given.delay),
                "attempts": given.attempt,
            },
            renew=lambda c, given: {"until_at": later(given.delay)},
            lapsed=lambda c, seconds: (c.state == LEASED) & _is_timed(c) & (c.until_at <= now()),
            lapse=Update(
                lambda c, given: {
                    "state": WAITING,
                    "token": None,
                    "until_at": later(given.delay),
                    "error": given.error,
                }
            ),
        ),
        order=Order(
            key="key",
            sink="sink",
            lane="lane",
            lanes=lanes,
            due=(
                lambda c: (c.state == WAITING) & _is_timed(c) & (c.until_at <= now()),
                lambda c: (c.state == SCHEDULED) & _is_timed(c) & (c.until_at <= now()),
            ),
            promote=Update(lambda c, given: _free(state=READY)),
            in_flight=Front("state", LEASED, _is_keyed),
            blocking=Front("state", WAITING, _is_keyed),
            parking=Front("parks", sa.true(), lambda c: c.key.is_not(None)),
            blocked=lambda c: (c.state == BLOCKED) & _is_keyed(c),
            block=Update(lambda c, given: {"state": BLOCKED}),
            unblock=Update(lambda c, given: {"state": READY}),
        ),
        delivered=_TO_HISTORY if is_partitioned else Delete(),
        # The key for deduplication goes with the delivery: only live events have one.
        kept=Update(
            lambda c, given: _free(state=DELIVERED, delivered_at=now(), attempts=given.attempt, dedup_key=None)
        ),
        retry=Update(
            lambda c, given: {
                "state": WAITING,
                "token": None,
                "until_at": later(given.delay),
                "attempts": given.attempt,
                "error": given.error,
            }
        ),
        dead=Move(
            "dead",
            lambda c, given: {
                "died_at": now(),
                "parks": given.parks,
                "attempts": given.attempt,
                "error": given.error,
            },
        ),
        grave=Grave("dead", "seq", "died_at", "error", "attempts"),
        release=Update(lambda c, given: _free(state=READY, attempts=given.attempt - 1)),
        history=_HISTORY if is_partitioned else None,
        redrive=Move("outbox", lambda c, given: {"state": READY, "attempts": 0, "error": None}),
        replay=Update(lambda c, given: _free(state=READY, attempts=0, delivered_at=None)),
        cancellable=lambda c: c.state.in_([READY, WAITING, BLOCKED, SCHEDULED]),
        # A row that waits after a try goes on blocking its key.
        reschedule=Update(
            lambda c, given: {
                "state": sa.case((c.state == WAITING, WAITING), else_=SCHEDULED),
                "until_at": given.due,
                "due_at": given.due,
            }
        ),
        counts=Counts(
            new=lambda c: (c.state == READY) & (c.attempts == 0),
            retrying=lambda c: (c.state == WAITING) | ((c.state == READY) & (c.attempts > 0)),
            held=lambda c: c.state == LEASED,
            scheduled=lambda c: c.state == SCHEDULED,
            blocked=lambda c: c.state == BLOCKED,
            delivered=lambda c: c.state == DELIVERED,
        ),
        features=frozenset(Feature),
    )


def pillarbox_partitioned_layout() -> Layout:
    return pillarbox_layout(is_partitioned=True)
