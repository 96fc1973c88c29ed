"""The block of an action: what happens when it begins, when it ends well, and when it fails.

The same object is entered with `with` on a `Session` and with `async with` on an `AsyncSession`; everything that reads
or writes is written once, for the session behind both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, UnboundExecutionError
from sqlalchemy.orm import Session

from pillarbox.actions import rows
from pillarbox.actions.action import Action, Call, current_action, enter
from pillarbox.actions.names import EventNames
from pillarbox.actions.spans import Span
from pillarbox.actions.subject import check_subject
from pillarbox.actions.undone import check_undone, is_undone
from pillarbox.actions.watch import innermost, mark_failed, note_recorded, unwatch, watch
from pillarbox.errors import ActionError, ActionRepeated, ConfigError, SchemaError, TransactionError
from pillarbox.stores.sql import is_missing
from pillarbox.targets import autocommit_error, check_connection, commits_alone, has_two_phases, is_async, session_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

KEY_TRIES: Final = 6
"""Of those who waited for a key until the first one failed, MySQL and MariaDB let one have it and undo the others."""


@dataclass(frozen=True, slots=True)
class Books:
    """What every action of a log needs of it."""

    events: sa.Table
    actions: sa.Table
    sessions: Callable[[], Any] | None
    clock: Callable[[], datetime]
    names: EventNames
    told: Mapping[str, str]
    """The columns that payloads repeat, by their names there."""


class ActionScope:
    """One run of an action; it can be entered once.

    Without a session of the caller's it opens one, commits it when the block has ended and the rows are written, and
    closes it. With one it does none of these: the rows are written into the caller's transaction.
    """

    def __init__(self, books: Books, call: Call, session: Any = None, *, span: Span | None = None) -> None:
        self._books = books
        self._call = call
        self._given = session
        self._action: Action[Any] | None = None
        self._outer: Action[Any] | None = None
        self._span = span
        self._owns_span = span is None
        self._has_begun = False

    # -- the two faces -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Action[Session]:
        action: Action[Session] = self._make(wants_async=False)
        try:
            self._begin(action._held)
        except BaseException as error:
            self._fail(error)
            self._close_sync()
            raise
        return action

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                session = self._running._held
                self._finish(session)
                if self._given is None:
                    session.commit()
                self._succeed()
            else:
                self._fail(error)
        except BaseException as broken:
            self._fail(broken)
            raise
        finally:
            self._close_sync()

    async def __aenter__(self) -> Action[AsyncSession]:
        action: Action[AsyncSession] = self._make(wants_async=True)
        try:
            await action._held.run_sync(self._begin)
        except BaseException as error:
            self._fail(error)
            await self._close_async()
            raise
        return action

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                session = self._running._held
                await session.run_sync(self._finish)
                if self._given is None:
                    await session.commit()
                self._succeed()
            else:
                self._fail(error)
        except BaseException as broken:
            self._fail(broken)
            raise
        finally:
            await self._close_async()

    def _close_sync(self) -> None:
        # Closing rolls back what was not committed.
        if self._given is None:
            self._running._held.close()

    async def _close_async(self) -> None:
        if self._given is None:
            # As `async with` does it: to the end, although the task is being cancelled.
            await self._running._held.__aexit__(None, None, None)

    # -- opening -----------------------------------------------------------------------------------------------------

    @property
    def _running(self) -> Action[Any]:
        assert self._action is not None
        return self._action

    def _make(self, *, wants_async: bool) -> Action[Any]:
        if self._action is not None:
            raise ActionError(
                f"Action {self._call.name!r}: its block can be entered once; call log.action(…) for each run"
            )
        self._outer = current_action()
        self._check_nesting(self._outer)
        session = self._choose_session(wants_async)
        started_at = self._books.clock()
        if self._span is None:
            self._span = Span(self._call)
        self._action = Action(self._call, session, started_at=started_at, names=self._books.names)
        enter(self._action)
        return self._action

    def _check_nesting(self, outer: Action[Any] | None) -> None:
        if outer is None or (self._given is not None and session_of(self._given) is outer._sync_session):
            return
        raise ActionError(
            f"Action {self._call.name!r}: it was begun inside action {outer.name!r} with a transaction of its own, so "
            "one could be kept without the other. Let it join: log.action(…, session=act.session)"
        )

    def _choose_session(self, wants_async: bool) -> Any:
        name = self._call.name
        if self._given is None and self._books.sessions is None:
            raise ConfigError(
                f"Action {name!r}: the log was made without engine= or sessions=, so it can only join a session: "
                "log.action(…, session=session)"
            )
        session = self._given if self._books.sessions is None or self._given is not None else self._books.sessions()
        plain = session_of(session)
        if plain is None:
            raise TypeError(f"Action {name!r}: expected a SQLAlchemy Session or AsyncSession, got {session!r}")
        if self._given is None and plain.in_transaction():
            raise ActionError(
                f"Action {name!r}: the session that the log was given for it is in a transaction already, so somebody "
                "uses it. Join it: log.action(…, session=session)"
            )
        if is_async(session) != wants_async:
            kind, other = type(session).__name__, "with" if wants_async else "async with"
            raise TypeError(f"Action {name!r}: its session is of {kind}; use `{other} log.action(…)`")
        is_scoped = not isinstance(session, Session) and not is_async(session, "AsyncSession")
        return session() if is_scoped else session

    # -- with the session behind both faces -------------------------------------------------------------------------

    def _begin(self, session: Session) -> None:
        action = self._running
        _check_session(session, self._books.events)
        _enter_transaction(session, action)
        if action.idempotency_key is not None:
            self._take_key(session, action)
        self._has_begun = True

    def _take_key(self, session: Session, action: Action[Any]) -> None:
        for tries_left in reversed(range(KEY_TRIES)):
            try:
                self._reserve_key(session, action)
            except DBAPIError as error:
                # In a session of our own nothing has happened yet, so it can be begun anew.
                if self._given is not None or not tries_left or not is_undone(error):
                    raise
            else:
                return
            unwatch(session, action)
            session.rollback()
            _enter_transaction(session, action)

    def _reserve_key(self, session: Session, action: Action[Any]) -> None:
        table = self._books.actions
        db = session.connection(bind_arguments={"clause": sa.insert(table)})
        _execute(db, rows.reserve_key(table, action, db.dialect.name))
        found = _execute(db, rows.find_key(table, action, db.dialect.name)).scalar_one_or_none()
        if found is None:
            raise TransactionError(
                f"Action {action.name!r}: the row of its idempotency key {action.idempotency_key!r} was removed by "
                "somebody at this moment. Run the action again."
            )
        if found != action.id:
            raise ActionRepeated(
                f"Action {action.name!r} of namespace {action.namespace!r} was done before with the idempotency key "
                f"{action.idempotency_key!r}, as action {found}; nothing was done again.",
                action_id=found,
                idempotency_key=str(action.idempotency_key),
            )

    def _finish(self, session: Session) -> None:
        action, books = self._running, self._books
        action._check_use("the end of its block")
        action._check_done(session)
        db = session.connection(bind_arguments={"clause": sa.insert(books.events)})
        check_undone(action.name, db)
        session.flush()
        check_connection(db)
        _check_subjects(session, action, books.events)
        completed_at = max(books.clock(), action.started_at)
        written, notify = rows.event_rows(action, completed_at, books.told), not has_two_phases(db)
        for statement in rows.insert_rows(books.events, written, db.dialect.name, notify=notify):
            _execute(db, statement)
        if action.idempotency_key is not None:
            completed = _execute(db, rows.complete_action(books.actions, action, completed_at))
            if completed.rowcount != 1:
                raise TransactionError(
                    f"Action {action.name!r}: the row of its idempotency key {action.idempotency_key!r} is gone, so "
                    "its transaction was undone, or somebody removed it. Run the action again."
                )
        elif action.actor is not None:
            _execute(db, rows.insert_action(books.actions, action, completed_at))
        action.completed_at = completed_at
        note_recorded(session, action, db)
        unwatch(session, action)

    def _succeed(self) -> None:
        self._leave()
        self._end_span(None)

    def _fail(self, error: BaseException) -> None:
        action = self._running
        session = action._sync_session
        # An action that was done before has changed nothing; one that failed in the middle of taking its key may have.
        is_refused = not self._has_begun and isinstance(error, ActionRepeated)
        if self._given is not None and action._transaction is not None and not is_refused and session.is_active:
            mark_failed(session, action)
        unwatch(session, action)
        self._leave()
        self._end_span(error)

    def _leave(self) -> None:
        self._running._is_open = False
        enter(self._outer)

    def _end_span(self, error: BaseException | None) -> None:
        if self._owns_span and self._span is not None:
            self._span.end(error)


def _check_session(session: Session, table: sa.Table) -> None:
    if not session.is_active:
        raise TransactionError("This session's transaction has failed; roll it back before you begin an action.")
    try:
        bind = session.get_bind(clause=sa.insert(table))
    except UnboundExecutionError as error:
        raise TransactionError(
            f"This session knows no database for table {table.fullname!r}; make it with bind=engine, the engine of "
            "your models."
        ) from error
    if commits_alone(bind):
        raise autocommit_error("session")


def _enter_transaction(session: Session, action: Action[Any]) -> None:
    if not session.in_transaction():
        session.begin()
    action._transaction = innermost(session)
    watch(session, action)


def _check_subjects(session: Session, action: Action[Any], table: sa.Table) -> None:
    own = session.get_bind(clause=sa.insert(table))
    for subject in (event._subject for event in action.events if event._subject is not None):
        state = check_subject(subject)
        target = state.mapper.local_table
        if state.session is not session or not isinstance(target, sa.Table):
            continue
        # With an update, for sessions that read elsewhere than they write.
        other = session.get_bind(mapper=state.mapper, clause=sa.update(target))
        if other.engine is not own.engine:
            raise TransactionError(
                f"Action {action.name!r}: its session keeps {type(subject).__name__} in another database than the "
                f"log's table {table.fullname!r}, so one could be committed without the other. Let the session have "
                "one engine for both."
            )


def _execute(db: sa.Connection, statement: Any) -> sa.CursorResult[Any]:
    try:
        return db.execute(statement)
    except DBAPIError as error:
        if is_missing(error):
            text = str(error.orig).strip().partition("\n")[0]
            raise SchemaError(
                f"Action log: {text}. Create the log's tables first, all those of log.tables: with your migration, or "
                "with metadata.create_all(engine)."
            ) from error
        raise
