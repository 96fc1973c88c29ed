"""ActionLog: record what was done, why and by whom, in the transaction that does it.

Each action leaves one row for every event that it emits, or one row without an event when it emits none. A failed
action leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from pillarbox.actions.action import Call
from pillarbox.actions.conflicts import DEFAULT, merge_policies
from pillarbox.actions.emitted import encode_object
from pillarbox.actions.names import EventNames
from pillarbox.actions.namespaces import check_namespace, check_text
from pillarbox.actions.runner import UNCHANGED, Decorator, Retry, _Unchanged, make_runner
from pillarbox.actions.scope import ActionScope, Books
from pillarbox.errors import ConfigError, InvalidAction, InvalidEvent
from pillarbox.layouts import declare_layout, get_layout
from pillarbox.layouts.action_side import declare_actions

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker

    Sessions = sessionmaker[Any] | async_sessionmaker[Any] | Callable[[], Session] | Callable[[], AsyncSession]
    Joined = Session | AsyncSession | scoped_session[Any] | async_scoped_session[Any]

C = TypeVar("C", bound=type)

_NO_PARAMS: Final[Mapping[str, Any]] = {}


def utc_now() -> datetime:
    return datetime.now(UTC)


class ActionLog:
    """The application's side of an action log.

    Declares the tables on the user's `MetaData`; creates nothing. `namespace` says which service writes. `layout` is
    `actions`, our own, or `ekbatan`, in which another system may write too; `handled` declares the notifications for
    handlers as well. Actions run in sessions from `sessions`, or in their own on `engine`; a log with neither can only
    join a session. `clock` gives every time that is written. `retry` changes what is tried again after a conflict.
    """

    def __init__(
        self,
        metadata: sa.MetaData,
        *,
        namespace: str,
        layout: str = "actions",
        table: str | None = None,
        schema: str | None = None,
        engine: sa.Engine | AsyncEngine | None = None,
        sessions: Sessions | None = None,
        clock: Callable[[], datetime] = utc_now,
        retry: Retry | _Unchanged = UNCHANGED,
        handled: bool = True,
    ) -> None:
        if not isinstance(metadata, sa.MetaData):
            raise TypeError(
                f"ActionLog: expected a sqlalchemy.MetaData, e.g. Base.metadata of your models; got {metadata!r}"
            )
        self.namespace = check_namespace(namespace)
        self.tables = _declare(metadata, layout, handled=handled, table=table, schema=schema)
        self.table = self.tables["events"]
        self._policies = DEFAULT if isinstance(retry, _Unchanged) else merge_policies(DEFAULT, retry)
        self._names = EventNames(self.namespace)
        self._books = Books(
            events=self.table,
            actions=self.tables["actions"],
            sessions=_choose_sessions(engine, sessions),
            clock=partial(_read_clock, clock),
            names=self._names,
            told=_told(layout),
        )

    def action(
        self,
        name: str,
        params: object = _NO_PARAMS,
        *,
        actor: str | None = None,
        idempotency_key: str | None = None,
        session: Joined | None = None,
    ) -> ActionScope:
        """The block of one action, for `with` or `async with`, whichever the session is for.

        `params` is what the action was asked to do, a JSON object: it is written into each of its rows. `actor` is who
        asked. An `idempotency_key` that an action of this name has had before raises `ActionRepeated` before the block
        runs; while that one is running, this one waits. With `session` the rows are written into the caller's
        transaction when the block ends; nothing is committed or closed. A block cannot be run again after a conflict:
        for that see `run_as`.
        """
        call = self._make_call(name, params, actor, idempotency_key)
        return ActionScope(self._books, call, session)

    def run_as(self, name: str, *, retry: Retry | _Unchanged = UNCHANGED) -> Decorator:
        """Make an action of a function `(act, params)`, which is then called with the parameters alone.

        The function is called again when its transaction lost a conflict; `retry` says otherwise for this action.
        """
        policies = self._policies if isinstance(retry, _Unchanged) else merge_policies(self._policies, retry)
        check_text("Action name", name)
        made: Decorator = partial(
            make_runner, name=name, books=self._books, make_call=self._make_call, policies=policies
        )
        return made

    @overload
    def event(self, kind: C, /) -> C: ...

    @overload
    def event(self, *, name: str) -> Callable[[C], C]: ...

    def event(self, kind: Any = None, *, name: str | None = None) -> Any:
        """Declare an event class, by its own name or another; raises `InvalidAction` when a class has it already.

        A class that was not declared is declared when the first of its events is emitted.
        """
        if kind is None:
            return partial(self._declare_event, name)
        return self._declare_event(name, kind)

    def _declare_event(self, name: str | None, kind: C) -> C:
        self._names.add(kind, name)
        return kind

    def _make_call(self, name: str, params: object, actor: str | None, idempotency_key: str | None) -> Call:
        check_text("Action name", name)
        for what, value in (("actor", actor), ("idempotency_key", idempotency_key)):
            if value is not None:
                check_text(f"Action {name!r}, {what}", value)
        try:
            document = encode_object(params, f"Action {name!r}, params")
        except InvalidEvent as error:
            raise InvalidAction(str(error)) from error
        return Call(self.namespace, name, document, actor, idempotency_key)


def _declare(
    metadata: sa.MetaData, layout: str, *, handled: bool, table: str | None, schema: str | None
) -> Mapping[str, sa.Table]:
    if layout not in ("actions", "ekbatan"):
        raise ConfigError(f"ActionLog layout: expected 'actions' or 'ekbatan', got {layout!r}")
    chosen = get_layout(f"{layout}-notifications" if handled else layout)
    declared = declare_layout(chosen, metadata, table=table, schema=schema)
    if not handled:
        return {"events": declared["outbox"], "actions": declare_actions(declared["outbox"])}
    events = declared["events"]
    return {"events": events, "notifications": declared["outbox"], "actions": declare_actions(events)}


def _told(layout: str) -> Mapping[str, str]:
    log = get_layout(layout)
    return {name: log.fields[field] for name, field in log.told.items()}


def _choose_sessions(engine: Any, sessions: Any) -> Callable[[], Any] | None:
    if engine is None:
        if sessions is not None and not callable(sessions):
            raise TypeError(f"ActionLog sessions: expected a sessionmaker or an async_sessionmaker, got {sessions!r}")
        found: Callable[[], Any] | None = sessions
        return found
    if sessions is not None:
        raise ConfigError("ActionLog: give engine= or sessions=, not both")
    # What a function returns would else be expired, and its session is closed.
    if isinstance(engine, sa.Engine):
        return sessionmaker(engine, expire_on_commit=False)
    from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

    if not isinstance(engine, AsyncEngine):
        raise TypeError(f"ActionLog engine: expected a SQLAlchemy Engine or AsyncEngine, got {engine!r}")
    return async_sessionmaker(engine, expire_on_commit=False)


def _read_clock(clock: Callable[[], datetime]) -> datetime:
    now = clock()
    if now.utcoffset() is None:
        raise ConfigError(f"ActionLog clock: expected aware datetimes, e.g. datetime.now(UTC); got {now!r}")
    return now.astimezone(UTC)
