"""What happens to a session while actions are in it.

An action's rows must share the fate of the changes they tell of. So a commit inside the block is refused; an event that
was emitted in a savepoint goes when the savepoint is rolled back; an action whose transaction was ended in its block
cannot end well; and a transaction in which a joined action failed cannot be committed before it is rolled back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy import event as sa_event
from sqlalchemy.orm import Session, SessionTransaction

from pillarbox.actions.undone import check_undone
from pillarbox.errors import ActionError
from pillarbox.targets import check_connection

if TYPE_CHECKING:
    from pillarbox.actions.action import Action

_WATCHED: Final = "pillarbox.actions"
_FAILED: Final = "pillarbox.failed_actions"
_RECORDED: Final = "pillarbox.recorded_actions"
_COMMITTING: Final = "pillarbox.committing"


def watch(session: Session, action: Action[Any]) -> None:
    session.info.setdefault(_WATCHED, []).append(action)


def unwatch(session: Session, action: Action[Any]) -> None:
    watched = session.info.get(_WATCHED, [])
    if action in watched:
        watched.remove(action)


def mark_failed(session: Session, action: Action[Any]) -> None:
    """Let nobody commit what a failed action has done so far in its caller's transaction."""
    own, found = action._transaction, session.get_transaction()
    # A body that ended its own transaction may have changed something in the one that is there now.
    if own is not None and is_within(innermost(session), own):
        found = own
    if found is not None:
        session.info[_FAILED] = [*_list_active(session, _FAILED), (found, action.name)]


def note_recorded(session: Session, action: Action[Any], db: sa.Connection) -> None:
    """Let nobody commit when the database has undone what a recorded action did in this transaction."""
    found = session.get_transaction()
    session.info[_RECORDED] = [*_list_active(session, _RECORDED), (found, action.name, db)]


def _list_active(session: Session, key: str) -> list[Any]:
    # Those that were rolled back or closed are no longer active.
    return [each for each in session.info.get(key, ()) if each[0].is_active]


def innermost(session: Session) -> SessionTransaction | None:
    """The savepoint or transaction that a statement of the session would run in."""
    return session.get_nested_transaction() or session.get_transaction()


def is_within(transaction: SessionTransaction | None, outer: SessionTransaction) -> bool:
    return any(each is outer for each in _enclosing(transaction))


def _enclosing(transaction: SessionTransaction | None) -> Iterator[SessionTransaction]:
    while transaction is not None:
        yield transaction
        transaction = transaction.parent


@sa_event.listens_for(Session, "before_commit")
def _refuse_commit(session: Session) -> None:
    if session.info.keys().isdisjoint((_WATCHED, _FAILED, _RECORDED)):
        return
    ending = _find_ending(session)
    for action in session.info.get(_WATCHED, ()):
        if is_within(action._transaction, ending):
            raise ActionError(
                f"Action {action.name!r}: its session was committed inside its block, which would leave its events "
                "behind. Leave the commit to the end of the block; for a part that may fail use session.begin_nested()."
            )
    for transaction, name in _list_active(session, _FAILED):
        if is_within(transaction, ending):
            raise ActionError(
                f"Action {name!r} failed in this transaction, so what it changed has no events. Roll the transaction "
                "back; to go on after a failed action, run it inside session.begin_nested()."
            )
    for transaction, name, db in _list_active(session, _RECORDED):
        if is_within(transaction, ending):
            check_undone(name, db)


def _find_ending(session: Session) -> SessionTransaction:
    # A commit past an open savepoint is told of before the savepoint's own: the second time it is the outer's turn.
    found = innermost(session)
    assert found is not None
    is_second = session.info.get(_COMMITTING) is found
    ending = found.parent if is_second and found.parent is not None else found
    session.info[_COMMITTING] = ending
    return ending


@sa_event.listens_for(Session, "after_soft_rollback")
def _forget_events(session: Session, previous: SessionTransaction) -> None:
    # A flush that failed has rolled back the savepoint or transaction around it.
    while not previous.nested and previous.parent is not None:
        previous = previous.parent
    for action in session.info.get(_WATCHED, ()):
        action._undo(previous)


@sa_event.listens_for(Session, "after_begin")
def _check_begun(session: Session, transaction: SessionTransaction, connection: sa.Connection) -> None:
    # A connection that commits by itself must be found before the first change, not after.
    if session.info.get(_WATCHED):
        check_connection(connection)
