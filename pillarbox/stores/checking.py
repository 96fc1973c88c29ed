"""What can be wrong in a table that keeps order per key, and its mend: `pillarbox events check`.

Every fault is found by one statement, so by one snapshot: relays may run meanwhile, and what they do is never a fault.
A mend changes only what is still as it was found: rows become ready that every claim judges anew, and a time that is
missing becomes the one at which the event is due, or the present one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.sql.elements import ColumnElement

from pillarbox.errors import Unsupported
from pillarbox.layouts.clock import now
from pillarbox.layouts.pillarbox import STATE_NAMES
from pillarbox.stores.places import raw
from pillarbox.stores.transitions import Transitions

MEANING: Final = {
    "blocked": "is blocked, and no event of its key is in its way",
    "timeless": "is leased, waiting or scheduled, and has no time at which that ends",
    "split": "has another lane than other events of its key, so their order is not kept",
    "twice": "is in flight at the same time as another event of its key, in another batch",
    "state": "has a state that is not known",
}
CAN_MEND: Final = frozenset({"blocked", "timeless"})


@dataclass(frozen=True, slots=True)
class Fault:
    """One row that is not as it should be."""

    kind: str
    """One of `MEANING`."""
    seq: int
    id: str
    key: Any
    """Text or None, or whatever else a column without a type holds."""

    @property
    def meaning(self) -> str:
        return MEANING[self.kind]


class Checking:
    """Finds and mends the faults among the rows of one store; each call is one transaction."""

    def __init__(self, transitions: Transitions) -> None:
        if transitions.layout.order is None:
            name = transitions.layout.name
            raise Unsupported(f"Layout {name!r}: its table keeps no order per key, so there is nothing to check")
        self._t = transitions
        self._layout = transitions.layout
        self._order = transitions.layout.keyed
        self._outbox = transitions.outbox

    def find(self, db: sa.Connection, limit: int) -> list[Fault]:
        """The faults of each kind, at most `limit` of one."""
        return [fault for kind in MEANING for fault in self._find(db, kind, limit)]

    def mend(self, db: sa.Connection, faults: Sequence[Fault]) -> list[Fault]:
        """Mend what can be mended; returns what was."""
        mended = [fault for fault in faults if fault.kind in CAN_MEND]
        # All blocked rows of a key at once: one that stays behind would be passed.
        self._t.unblock(db, {fault.key for fault in mended if fault.kind == "blocked"})
        c, at = self._outbox.c, self._layout.lease.at
        # No text is the key of these: nothing goes by it.
        keyless = [f for f in mended if f.kind == "blocked" and not isinstance(f.key, str)]
        self._write(db, keyless, self._is_blocked(), {"state": 0})
        timeless = [f for f in mended if f.kind == "timeless"]
        self._write(db, timeless, self._is_timeless(), {at: sa.func.coalesce(c[self._layout.fields["due_at"]], now())})
        return mended

    def _write(
        self, db: sa.Connection, faults: Sequence[Fault], still: ColumnElement[bool], values: dict[str, Any]
    ) -> None:
        if faults:
            mine = self._outbox.c[self._layout.row].in_([fault.seq for fault in faults])
            db.execute(sa.update(self._outbox).where(mine, still).values(values))

    def _find(self, db: sa.Connection, kind: str, limit: int) -> list[Fault]:
        c = self._outbox.c
        conditions: dict[str, Callable[[], ColumnElement[bool]]] = {
            "blocked": self._is_stuck,
            "timeless": self._is_timeless,
            "split": self._is_split,
            "twice": self._is_twice,
            "state": lambda: c.state.not_in(range(len(STATE_NAMES))),
        }
        row, key = c[self._layout.row], c[self._order.key]
        query = sa.select(row, raw(c[self._layout.fields["id"]]), key).where(
            self._t.is_mine(self._outbox), conditions[kind]()
        )
        found = db.execute(query.order_by(row).limit(limit))
        return [Fault(kind, seq, str(event_id), key) for seq, event_id, key in found]

    def _is_stuck(self) -> ColumnElement[bool]:
        fronts = [
            self._has_front("outbox", self._order.in_flight, earlier=False),
            self._has_front("outbox", self._order.blocking),
            self._has_front("dead", self._order.parking),
        ]
        return self._is_blocked() & sa.not_(sa.or_(*fronts))

    def _is_blocked(self) -> ColumnElement[bool]:
        # Without the condition on the key, which a row that is blocked ought to have.
        is_blocked: ColumnElement[bool] = self._outbox.c.state == STATE_NAMES.index("blocked")
        return is_blocked

    def _has_front(self, role: str, condition: Any, *, earlier: bool = True) -> ColumnElement[bool]:
        order, row, table = self._order, self._layout.row, self._t.tables[role].alias()
        same = [table.c[name] == self._outbox.c[name] for name in (order.sink, order.key)]
        is_earlier = [table.c[row] < self._outbox.c[row]] if earlier else []
        return sa.exists().where(*same, *is_earlier, condition(table.c)).correlate(self._outbox)

    def _is_timeless(self) -> ColumnElement[bool]:
        states = [STATE_NAMES.index(name) for name in ("leased", "waiting", "scheduled")]
        c = self._outbox.c
        return c.state.in_(states) & c[self._layout.lease.at].is_(None)

    def _is_split(self) -> ColumnElement[bool]:
        order, other = self._order, self._outbox.alias("other")
        key, lane, is_live = other.c[order.key], other.c[order.lane], other.c.state != STATE_NAMES.index("delivered")
        # By groups: no index has the ready rows of a key, and a look for each would be quadratic.
        mixed = sa.select(key).where(other.c[order.sink] == self._t.sink, key.is_not(None), is_live).group_by(key)
        found = mixed.having(sa.func.min(lane) != sa.func.max(lane))
        return self._outbox.c[order.key].in_(found) & (self._outbox.c.state != STATE_NAMES.index("delivered"))

    def _is_twice(self) -> ColumnElement[bool]:
        order, fence, mine, other = self._order, self._layout.lease.fence, self._outbox, self._outbox.alias("other")
        same = other.c[order.sink] == mine.c[order.sink], other.c[order.key] == mine.c[order.key]
        another = sa.exists().where(*same, other.c[fence] != mine.c[fence], order.in_flight(other.c)).correlate(mine)
        return order.in_flight(mine.c) & another
