"""What happens to a session while actions are in it.

An action's rows must share the fate of the changes they tell of. So a commit inside the block is refused; an event that
was emitted in a savepoint goes when the savepoint is rolled back; an action whose transaction was rolled back cannot
end well; and a transaction in which a joined action failed cannot be committed before it is rolled back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy import event as sa_event
from sqlalchemy.orm import Session, SessionTransaction

from pillarbox.errors import ActionError
from pillarbox.targets import check_connection

if TYPE_CHECKING:
    from pillarbox.actions.action import Action

_WATCHED: Final = "pillarbox.actions"
_FAILED: Final = "pillarbox.failed_action"


def watch(session: Session, action: Action[Any]) -> None:
    session.info.setdefault(_WATCHED, []).append(action)


def unwatch(session: Session, action: Action[Any]) -> None:
    watched = session.info.get(_WATCHED, [])
    if action in watched:
        watched.remove(action)


def mark_failed(session: Session, action: Action[Any]) -> None:
    """Let nobody commit what a failed action has done so far in its caller's transaction."""
    if action._transaction is not None and is_within(innermost(session), action._transaction):
        session.info[_FAILED] = (action.name, action._transaction)


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
    ending = innermost(session)
    assert ending is not None
    for action in session.info.get(_WATCHED, ()):
        if is_within(action._transaction, ending):
            raise ActionError(
                f"Action {action.name!r}: its session was committed inside its block, which would leave its events "
                "behind. Leave the commit to the end of the block; for a part that may fail use session.begin_nested()."
            )
    name, transaction = session.info.get(_FAILED, (None, None))
    # One that was rolled back or closed is no longer active.
    if transaction is not None and transaction.is_active and is_within(transaction, ending):
        raise ActionError(
            f"Action {name!r} failed in this transaction, so what it changed has no events. Roll the transaction back; "
            "to go on after a failed action, run it inside session.begin_nested()."
        )


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
