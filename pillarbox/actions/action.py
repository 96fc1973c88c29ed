"""One running action: what its block can do, and what it has emitted so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar
from uuid import UUID

from sqlalchemy.orm import Session, SessionTransaction

from pillarbox.actions.emitted import Emitted, make_emitted
from pillarbox.actions.names import EventNames
from pillarbox.actions.owner import current_owner
from pillarbox.actions.watch import innermost, is_within
from pillarbox.errors import ActionError, InvalidEvent
from pillarbox.event import uuid7
from pillarbox.targets import session_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

S = TypeVar("S", "Session", "AsyncSession")


@dataclass(frozen=True, slots=True)
class Call:
    """What an action was called with, checked; the same for all its attempts."""

    namespace: str
    name: str
    params: dict[str, Any]
    actor: str | None
    idempotency_key: str | None


class Action(Generic[S]):
    """A running action, for the task or thread that began it, until its block ends."""

    def __init__(self, call: Call, session: S, *, started_at: datetime, names: EventNames) -> None:
        self.id: Final = uuid7()
        self.namespace: Final = call.namespace
        self.name: Final = call.name
        self.params: Final[Mapping[str, Any]] = MappingProxyType(call.params)
        self.actor: Final = call.actor
        self.idempotency_key: Final = call.idempotency_key
        self.started_at: Final = started_at
        self.completed_at: datetime | None = None
        """When the block had ended and its rows were written; None before."""
        self._owner: Final = current_owner()
        self._names = names
        self._held: S = session
        self._emitted: dict[UUID, tuple[Emitted, SessionTransaction | None]] = {}
        self._is_open = True
        self._is_undone = False
        self._transaction: SessionTransaction | None = None
        """The savepoint or transaction that it began in."""

    def __repr__(self) -> str:
        return f"<Action {self.name!r} {self.id}{'' if self._is_open else ', ended'}>"

    @property
    def session(self) -> S:
        """The session of the action's transaction."""
        self._check_use("session")
        return self._held

    @property
    def events(self) -> Sequence[Emitted]:
        """What was emitted so far, in order."""
        return tuple(emitted for emitted, _ in self._emitted.values())

    def emit(
        self,
        event: object,
        *,
        subject: object | None = None,
        model_type: str | None = None,
        model_id: object | None = None,
    ) -> UUID:
        """Let an event be written with the action, after those emitted before; returns its id.

        `event` is an `Event`, or an object whose class names its type and whose fields are the payload, which is read
        now. What it is about is the mapped object `subject`, or `model_type` and `model_id`, which override it.
        """
        self._check_use("emit")
        made = make_emitted(
            event, self._names, self.namespace, subject=subject, model_type=model_type, model_id=model_id
        )
        if made.id in self._emitted:
            raise InvalidEvent(f"Event {made.type!r}: id {made.id} was emitted twice by action {self.name!r}")
        self._emitted[made.id] = (made, innermost(self._sync_session))
        return made.id

    # -- for the scope that runs it ----------------------------------------------------------------------------------

    @property
    def _sync_session(self) -> Session:
        found = session_of(self._held)
        assert found is not None
        return found

    def _check_use(self, what: str) -> None:
        if not self._is_open:
            raise ActionError(f"Action {self.name!r} has ended: {what} can be used inside its block only")
        user = current_owner()
        if user != self._owner:
            raise ActionError(
                f"Action {self.name!r}: {what} was used by {user}, but the action belongs to {self._owner}. Wait for "
                "the results of other tasks and threads, and let the block itself use them."
            )

    def _undo(self, ended: SessionTransaction) -> None:
        if is_within(self._transaction, ended):
            self._is_undone = True
        self._emitted = {key: each for key, each in self._emitted.items() if not is_within(each[1], ended)}

    def _check_done(self, session: Session) -> None:
        assert self._transaction is not None
        # Nobody is told when a session is closed, but its transaction is then another one.
        if self._is_undone or not is_within(innermost(session), self._transaction):
            raise ActionError(
                f"Action {self.name!r}: its transaction was ended inside its block, so its events cannot share the "
                "fate of its changes. Raise an exception to end an action; for a part that may fail use "
                "session.begin_nested()."
            )


_current: ContextVar[Action[Any] | None] = ContextVar("pillarbox_action", default=None)


def current_action() -> Action[Any] | None:
    """The innermost running action of this task or thread."""
    action = _current.get()
    if action is None or not action._is_open or action._owner != current_owner():
        return None
    return action


def enter(action: Action[Any] | None) -> None:
    _current.set(action)
