"""Outbox: put events into the caller's transaction.

A put never commits and never opens a connection of its own: what the caller's transaction does, the events do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import InvalidRequestError
from sqlalchemy.orm import Session, scoped_session

from pillarbox import drivers
from pillarbox.durations import parse_duration
from pillarbox.errors import InvalidEvent, PayloadTooLarge, ReceiptPending, TransactionError
from pillarbox.event import Event
from pillarbox.flush import Marker, add_marker
from pillarbox.insertion import DIALECTS, Insertion, Prepared, as_ids
from pillarbox.layouts import Layout, declare_layout, get_layout
from pillarbox.layouts.clock import Timestamp
from pillarbox.stores.transitions import Transitions
from pillarbox.stores.url import open_store
from pillarbox.tracing import current_trace_headers

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

    from pillarbox.stores.sql import SqlStore

MAX_PAYLOAD = 1024 * 1024

_SYNC_TARGETS = "a SQLAlchemy Session, AsyncSession or Connection, or a psycopg, sqlite3 or PyMySQL connection"
_ASYNC_TARGETS = "a SQLAlchemy AsyncConnection or AsyncSession, or an asyncpg, psycopg async or aiosqlite connection"


class Receipt:
    """Which of the events of one put were new; an event whose id or dedup key was there already is not.

    A put into a session is known after the session's flush; reading the receipt earlier raises `ReceiptPending`.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = tuple(events)
        self._new: frozenset[UUID] | None = None

    def _fill(self, new: Iterable[UUID]) -> None:
        self._new = frozenset(new)

    @property
    def is_known(self) -> bool:
        return self._new is not None

    @property
    def new(self) -> tuple[Event, ...]:
        """The events that were written, in the order of putting."""
        return tuple(event for event in self.events if event.id in self._ids())

    @property
    def existing(self) -> tuple[Event, ...]:
        """The events that were there already and were left as they are."""
        return tuple(event for event in self.events if event.id not in self._ids())

    def _ids(self) -> frozenset[UUID]:
        if self._new is None:
            raise ReceiptPending(
                "Which events are new is known after the session's flush. Call session.flush() or commit first; after a "
                "rollback it is never known."
            )
        return self._new

    def __repr__(self) -> str:
        state = f"{len(self._new)} new" if self._new is not None else "not flushed"
        return f"<Receipt of {len(self.events)} events, {state}>"


class Outbox:
    """The application's side of an outbox table.

    Declares the tables on the user's `MetaData`; creates nothing. `layout` is a name or a `Layout`, `table` its name,
    `max_payload` the largest payload in bytes. `notify` wakes relays on PostgreSQL with one notification a
    transaction. `retention` is handed to the store of `outbox.store(...)`: how long delivered rows are kept.
    """

    def __init__(
        self,
        metadata: sa.MetaData,
        layout: str | Layout = "pillarbox",
        *,
        table: str | None = None,
        schema: str | None = None,
        max_payload: int = MAX_PAYLOAD,
        notify: bool = True,
        retention: timedelta | str | None = None,
        tables: Mapping[str, sa.Table] | None = None,
    ) -> None:
        self.layout = get_layout(layout)
        self.tables = tables or declare_layout(
            self.layout, metadata, table=table, schema=schema or metadata.schema
        )
        self.table = self.tables["outbox"]
        self.max_payload = max_payload
        self.retention = None if retention is None else parse_duration(retention)
        self._notify = notify
        self._insertions: dict[tuple[str, str], Insertion] = {}
        self._transitions: dict[str, Transitions] = {}

    @classmethod
    def from_models(cls, outbox: Any, *, dead: Any, lanes: Any, audit: Any, **options: Any) -> Outbox:
        """An outbox on mapped classes made from the layout's mixins."""
        models = {"outbox": outbox, "dead": dead, "lanes": lanes, "audit": audit}
        tables = {role: model.__table__ for role, model in models.items()}
        return cls(tables["outbox"].metadata, tables=tables, **options)

    def store(self, url: str | sa.URL, **options: Any) -> SqlStore:
        """The relay's store for this table."""
        options.setdefault("retention", self.retention)
        return open_store(url, layout=self.layout, table=self.table.name, schema=self.table.schema, **options)

    # -- putting ----------------------------------------------------------------------------------------------------

    def put(self, target: Any, *events: Event, lock_key: bool = False) -> Receipt:
        """Put events into the caller's transaction, in order.

        Into a session they go with its next flush, into a connection at once. `lock_key` first takes a lock on each
        event's key until the transaction ends: for writers that lock nothing else of what the key stands for.
        """
        self._check(events)
        receipt = Receipt(events)
        session = _session_of(target)
        if session is not None:
            self._put_session(session, events, receipt, lock_key)
        elif isinstance(target, sa.Connection):
            _check_connection(target)
            self._send(target, [(events, receipt, lock_key)])
        elif (known := drivers.driver_of(target)) is not None and not known[1]:
            if lock_key:
                raise TypeError(f"put: lock_key takes a SQLAlchemy session or connection; got {type(target).__name__}")
            receipt._fill(drivers.run(known[0], target, self._prepare(events, DIALECTS[known[0]]())))
        else:
            raise _wrong_target("put", target, _SYNC_TARGETS, "put_async", _ASYNC_TARGETS)
        return receipt

    async def put_async(self, target: Any, *events: Event, lock_key: bool = False) -> Receipt:
        """Put events at once through an asynchronous connection, in its open transaction."""
        self._check(events)
        receipt = Receipt(events)
        if _is_async(target, "AsyncSession"):
            self._put_session(target.sync_session, events, receipt, lock_key)
            await target.flush()
        elif _is_async(target, "AsyncConnection"):
            _check_connection(target.sync_connection)
            await target.run_sync(self._send, [(events, receipt, lock_key)])
        elif (known := drivers.driver_of(target)) is not None and known[1]:
            if lock_key:
                raise TypeError(f"put_async: lock_key takes a SQLAlchemy connection; got {type(target).__name__}")
            receipt._fill(await drivers.run_async(known[0], target, self._prepare(events, DIALECTS[known[0]]())))
        else:
            raise _wrong_target("put_async", target, _ASYNC_TARGETS, "put", _SYNC_TARGETS)
        return receipt

    def _check(self, events: Sequence[Event]) -> None:
        seen: set[UUID] = set()
        for event in events:
            if not isinstance(event, Event):
                raise TypeError(f"put: expected Event objects, got {event!r}")
            if len(event.payload) > self.max_payload:
                raise PayloadTooLarge(
                    f"Event {event.type!r} ({event.id}): its payload has {len(event.payload)} bytes, at most "
                    f"{self.max_payload} are allowed. Store it elsewhere and send a reference, or raise max_payload."
                )
            if event.id in seen:
                raise InvalidEvent(f"Event {event.type!r}: id {event.id} is twice in one put")
            seen.add(event.id)

    def _put_session(self, session: Session, events: Sequence[Event], receipt: Receipt, lock_key: bool) -> None:
        if not session.is_active:
            raise TransactionError("This session's transaction has failed; call session.rollback() before putting events.")
        if not events:
            receipt._fill(())
            return
        add_marker(session, Marker(self.table, (events, receipt, lock_key), self._send))

    def _send(self, connection: sa.Connection, parts: Sequence[tuple[Sequence[Event], Receipt, bool]]) -> None:
        events = [event for part, _, _ in parts for event in part]
        locked = [event.key for part, _, lock_key in parts if lock_key for event in part if event.key is not None]
        if locked:
            self._lock_keys(connection, locked)
        new: set[UUID] = set()
        for prepared in self._prepare(events, connection.dialect):
            result = connection.exec_driver_sql(prepared.sql, prepared.params)
            if prepared.lookup is not None:
                result = connection.exec_driver_sql(*prepared.lookup)
            new |= as_ids(result.all())
        for part, receipt, _ in parts:
            receipt._fill(event.id for event in part if event.id in new)

    def _prepare(self, events: Sequence[Event], dialect: Dialect) -> list[Prepared]:
        if not events:
            return []
        style = (dialect.name, dialect.driver)
        insertion = self._insertions.get(style)
        if insertion is None:
            insertion = Insertion(self.layout, self.table, dialect, notify=self._notify)
            self._insertions[style] = insertion
        trace = current_trace_headers()
        headers = [{**trace, **event.headers} if trace else event.headers for event in events]
        return list(insertion.prepare(events, headers))

    def _lock_keys(self, connection: sa.Connection, keys: Iterable[str]) -> None:
        self._transitions_for(connection).lock_keys(connection, sorted(set(keys)))

    # -- changing one's mind ----------------------------------------------------------------------------------------

    def cancel(self, target: Session | sa.Connection, *ids: UUID, dedup_key: str | None = None) -> int:
        """Delete events that nobody holds; returns how many were still there to cancel."""
        return self._change(target, "cancel", ids, dedup_key, None)

    def reschedule(
        self, target: Session | sa.Connection, *ids: UUID, due_at: datetime, dedup_key: str | None = None
    ) -> int:
        """Give events that nobody holds another time; returns how many it reached."""
        return self._change(target, "reschedule", ids, dedup_key, _aware(due_at))

    async def cancel_async(
        self, target: AsyncSession | AsyncConnection, *ids: UUID, dedup_key: str | None = None
    ) -> int:
        """`cancel` for asynchronous sessions and connections."""
        return await self._change_async(target, "cancel", ids, dedup_key, None)

    async def reschedule_async(
        self, target: AsyncSession | AsyncConnection, *ids: UUID, due_at: datetime, dedup_key: str | None = None
    ) -> int:
        """`reschedule` for asynchronous sessions and connections."""
        return await self._change_async(target, "reschedule", ids, dedup_key, _aware(due_at))

    def _change(
        self, target: Any, verb: str, ids: Sequence[UUID], dedup_key: str | None, due_at: datetime | None
    ) -> int:
        if not ids and dedup_key is None:
            raise TypeError(f"{verb}: expected event ids or a dedup_key")
        if isinstance(target, scoped_session):
            target = target()
        if isinstance(target, Session):
            target.flush()
            target = target.connection(bind_arguments={"clause": self.table})
        if not isinstance(target, sa.Connection):
            expected = "a SQLAlchemy Session or Connection"
            raise _wrong_target(verb, target, expected, f"{verb}_async", "an AsyncSession or AsyncConnection")
        _check_connection(target)
        due = None if due_at is None else sa.literal(due_at, Timestamp())
        return self._transitions_for(target).change(target, ids, dedup_key, SimpleNamespace(due=due))

    async def _change_async(
        self, target: Any, verb: str, ids: Sequence[UUID], dedup_key: str | None, due_at: datetime | None
    ) -> int:
        if not (_is_async(target, "AsyncSession") or _is_async(target, "AsyncConnection")):
            expected = "a SQLAlchemy AsyncSession or AsyncConnection"
            raise _wrong_target(f"{verb}_async", target, expected, verb, "a Session or Connection")
        count: int = await target.run_sync(self._change, verb, ids, dedup_key, due_at)
        return count

    def _transitions_for(self, connection: sa.Connection) -> Transitions:
        name = connection.dialect.name
        if name not in self._transitions:
            self._transitions[name] = Transitions(self.layout, self.tables, dialect=name)
        return self._transitions[name]


def _session_of(target: Any) -> Session | None:
    if isinstance(target, scoped_session):
        target = target()
    if isinstance(target, Session):
        return target
    if _is_async(target, "AsyncSession") or _is_async(target, "async_scoped_session"):
        session: Session = target.sync_session
        return session
    return None


def _is_async(target: object, name: str) -> bool:
    # By name: importing SQLAlchemy's asyncio package needs greenlet, which a synchronous application may not have.
    return any(
        base.__name__ == name and base.__module__.startswith("sqlalchemy.ext.asyncio") for base in type(target).__mro__
    )


def _check_connection(connection: sa.Connection | None) -> None:
    if connection is None or connection.closed:
        raise TransactionError("This connection is closed or was never opened; put events through an open one.")
    if connection.get_isolation_level() == "AUTOCOMMIT" if connection.in_transaction() else False:
        raise TransactionError("This connection commits every statement by itself; put events inside a transaction.")
    try:
        transaction = connection.get_nested_transaction() or connection.get_transaction()
    except InvalidRequestError:  # pragma: no cover - SQLAlchemy raises it for a broken nesting only
        transaction = None
    if transaction is not None and not transaction.is_active:
        raise TransactionError("This connection's transaction has ended or failed; begin a new one to put events.")


def _wrong_target(verb: str, target: object, expected: str, other: str, others: str) -> TypeError:
    kind = f"{type(target).__module__}.{type(target).__qualname__}"
    return TypeError(f"{verb}: expected {expected}; got {kind}. For {others} use {other}().")


def _aware(moment: datetime) -> datetime:
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise InvalidEvent(f"reschedule: expected an aware datetime, got {moment!r}")
    return moment.astimezone(UTC)
