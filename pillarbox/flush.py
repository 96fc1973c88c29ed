"""Events that go out with a SQLAlchemy session's next flush.

A put adds a marker object to the session. Before the flush the markers are taken out again, in the order of putting;
after it their events go to the database as one insert. So an event shares the fate of everything else in the session:
a rollback, a rolled-back savepoint, `close` or `expunge_all` forgets it. It is inserted after the flush's own
statements, because its sequence number must be drawn after the rows it tells of are locked.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event as sa_event
from sqlalchemy import inspect as sa_inspect
from sqlalchemy.orm import Session, registry

Send = Callable[[sa.Connection, list[Any]], None]

_WAITING = "pillarbox_waiting"
_TAKEN = "pillarbox_taken"
_numbers = count()


class Marker:
    """Stands in a session for events that wait for its flush."""

    def __init__(self, table: sa.Table, part: Any, send: Send) -> None:
        self.number = next(_numbers)
        self.table = table
        self.part = part
        self.send = send


_marker_table = sa.Table("pillarbox_marker", sa.MetaData(), sa.Column("id", sa.Integer, primary_key=True))
registry().map_imperatively(Marker, _marker_table, properties={"pillarbox_marker_id": _marker_table.c.id})


def add_marker(session: Session, marker: Marker) -> None:
    """Let a marker's events go out with the session's next flush."""
    session.info[_WAITING] = True
    session.add(marker)


@sa_event.listens_for(Session, "before_flush")
def _take_markers(session: Session, context: Any, instances: Any) -> None:
    if not session.info.pop(_WAITING, False):
        return
    markers = sorted((each for each in session.new if isinstance(each, Marker)), key=lambda marker: marker.number)
    for marker in markers:
        session.expunge(marker)
    if not markers:
        return
    if _has_work(session):
        session.info[_TAKEN] = markers
    else:
        # A flush without work of its own ends here and never comes to `after_flush`.
        _send(session, markers)


@sa_event.listens_for(Session, "after_flush")
def _send_markers(session: Session, context: Any) -> None:
    markers = session.info.pop(_TAKEN, None)
    if markers:
        _send(session, markers)


@sa_event.listens_for(Session, "after_soft_rollback")
def _forget_markers(session: Session, previous: Any) -> None:
    session.info.pop(_TAKEN, None)


def _has_work(session: Session) -> bool:
    if session.dirty or session.deleted:
        return True
    # A new object that lost its parent is dropped by the flush, which then may have nothing to do.
    return any(not getattr(sa_inspect(each), "_orphaned_outside_of_session", False) for each in session.new)


def _send(session: Session, markers: list[Marker]) -> None:
    groups: dict[int, list[Marker]] = {}
    for marker in markers:
        groups.setdefault(id(marker.table), []).append(marker)
    for group in groups.values():
        connection = session.connection(bind_arguments={"clause": group[0].table})
        group[0].send(connection, [marker.part for marker in group])
