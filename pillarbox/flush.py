"""Events that go out with a SQLAlchemy session's next flush.

A put adds a marker to the session: a pending object like any other, mapped to a selectable that has no table
to write to. So the flush always comes, finds the outbox's database and writes nothing for the marker; at its
end the marker's events go out as one insert. They share the fate of everything else in the session: a
rollback, a rolled-back savepoint, `close` or `expunge_all` forgets them. They are inserted after the flush's
own statements, because their sequence numbers must be drawn after the rows they tell of are locked.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import sqlalchemy as sa
from sqlalchemy import event as sa_event
from sqlalchemy.orm import Session, registry

Send = Callable[[Session, list[Any]], None]

_numbers = count(1)


class Marker:
    """Stands in a session for the puts into one outbox that wait for the flush, in order."""

    send: ClassVar[staticmethod[[Session, list[Any]], None]]

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.parts: list[Any] = []
        self.is_late = False

    def waits_in(self, session: Session) -> bool:
        return self.is_late or self in session


def make_marker(table: sa.Table, send: Send) -> type[Marker]:
    """A marker class for an outbox table; `send` gets the session and the parts after the flush."""
    marker = type("Marker", (Marker,), {"send": staticmethod(send), "__tablename__": table.name})
    selected = sa.select(sa.literal_column("0", sa.BigInteger).label("number")).select_from(table)
    mapped = selected.subquery("pillarbox_marker")
    registry().map_imperatively(marker, mapped, primary_key=[mapped.c.number])
    return marker


_waiting: WeakKeyDictionary[Session, dict[type[Marker], Marker]] = WeakKeyDictionary()


def add_part(session: Session, kind: type[Marker], part: Any) -> None:
    """Let one put's part go out with the session's next flush, or with the one that is running."""
    markers = _waiting.setdefault(session, {})
    marker = markers.get(kind)
    if marker is None or not marker.waits_in(session):
        marker = kind()
        # While a flush executes, in a mapper's event, a session takes no objects.
        marker.is_late = getattr(session, "_warn_on_events", False)
        if not marker.is_late:
            session.add(marker)
        markers[kind] = marker
    marker.parts.append(part)


@sa_event.listens_for(Session, "after_flush")
def _send_parts(session: Session, context: Any) -> None:
    for marker in _waiting.pop(session, {}).values():
        if marker.waits_in(session):
            marker.send(session, marker.parts)


@sa_event.listens_for(Session, "after_soft_rollback")
def _forget_parts(session: Session, previous: Any) -> None:
    _waiting.pop(session, None)
