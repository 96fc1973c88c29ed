"""Outbox: put events into the caller's transaction.

A put never commits and never opens a connection: the events share the fate of the caller's transaction.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError, InvalidRequestError, UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session

from pillarbox import drivers
from pillarbox.durations import parse_duration
from pillarbox.encoding import Encoder
from pillarbox.errors import InvalidEvent, PayloadTooLarge, TransactionError
from pillarbox.event import Event
from pillarbox.flush import Marker, add_part, make_marker
from pillarbox.insertion import Insertion, Prepared, dialect_of, insertion_for
from pillarbox.layouts import Layout, declare_layout, get_layout
from pillarbox.layouts.clock import Timestamp
from pillarbox.layouts.mixin import check_models
from pillarbox.receipt import Receipt
from pillarbox.stores.build import build_transitions
from pillarbox.stores.transitions import Transitions
from pillarbox.stores.url import open_store
from pillarbox.targets import (
    ASYNC_TARGETS,
    SYNC_TARGETS,
    autocommit_error,
    check_connection,
    commits_alone,
    has_two_phases,
    is_async,
    refuse_lock,
    session_of,
    wrong_target,
)
from pillarbox.tracing import current_trace_headers
from pillarbox.wakeup import channel_name

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    from pillarbox.stores.sql import SqlStore

    Target = Session | scoped_session[Any] | sa.Connection
    AsyncTarget = AsyncSession | async_scoped_session[Any] | AsyncConnection

MAX_PAYLOAD = 1024 * 1024

_Schemas = Mapping[str | None, str | None] | None
"""A connection's `schema_translate_map`."""


class _Part(NamedTuple):
    """One put."""

    events: Sequence[Event]
    headers: Sequence[str | None]
    receipt: Receipt
    lock_key: bool


class _Chosen(NamedTuple):
    """Which events to cancel or reschedule."""

    ids: Sequence[UUID]
    dedup_key: str | None
    topic: str | None


class Outbox:
    """The application's side of an outbox table.

    Declares the tables on the user's `MetaData`; creates nothing. `layout` is a name or a `Layout`, `table`
    its name, `max_payload` the largest payload in bytes. `notify` wakes relays on PostgreSQL with one
    notification a transaction. `retention` is handed to the store of `outbox.store(...)`: how long delivered
    rows are kept.
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
        if not isinstance(metadata, sa.MetaData):
            raise TypeError(
                f"Outbox: expected a sqlalchemy.MetaData, e.g. Base.metadata of your models; got {metadata!r}"
            )
        self.layout = get_layout(layout)
        self.tables = tables or declare_layout(self.layout, metadata, table=table, schema=schema)
        self.table = self.tables["outbox"]
        self.max_payload = max_payload
        self.retention = None if retention is None else parse_duration(retention)
        self._encoder = Encoder(self.layout, self.table)
        self._notify = notify
        self._marker: type[Marker] | None = None
        self._insert = sa.insert(self.table)
        self._insertions: dict[tuple[bool | str | None, ...], Insertion] = {}
        self._transitions: dict[tuple[str | None, ...], Transitions] = {}

    @classmethod
    def from_models(
        cls,
        outbox: Any,
        *,
        layout: str | Layout = "pillarbox",
        dead: Any = None,
        lanes: Any = None,
        audit: Any = None,
        state: Any = None,
        history: Any = None,
        **options: Any,
    ) -> Outbox:
        """An outbox on mapped classes made from the layout's mixins.

        Relays know the outbox table's name only, so the others are named after it: `…_dead`, `…_lanes`,
        `…_audit`, or as the layout names them.
        """
        named = {"outbox": outbox, "dead": dead, "lanes": lanes, "audit": audit, "state": state, "history": history}
        models = {role: model for role, model in named.items() if model is not None}
        layout = get_layout(layout)
        tables = check_models(layout, models)
        return cls(tables["outbox"].metadata, layout, tables=tables, **options)

    def store(self, url: str | sa.URL, **options: Any) -> SqlStore:
        """The relay's store for this table."""
        options.setdefault("retention", self.retention)
        return open_store(url, layout=self.layout, table=self.table.name, schema=self.table.schema, **options)

    # -- putting ---------------------------------------------------------------------------------------------

    def put(self, target: Any, *events: Event, lock_key: bool = False) -> Receipt:
        """Put events into the caller's transaction, in order.

        Into a session they go with its next flush, into a connection at once. `lock_key` first locks each
        event's key until the transaction ends: for writers that lock nothing else of what the key stands for.
        """
        session = session_of(target)
        if session is not None:
            part = self._make_part(events, lock_key)
            self._put_session(session, part)
        elif isinstance(target, sa.Connection):
            check_connection(target)
            part = self._make_part(events, lock_key)
            self._send(target, [part])
        elif (known := drivers.driver_of(target)) is not None and not known[1]:
            drivers.check(known[0], target)
            part = self._make_part(events, refuse_lock("put", target, lock_key))
            part.receipt._fill(drivers.run(known[0], target, self._prepare([part], dialect_of(known[0]))))
        else:
            raise wrong_target("put", target, SYNC_TARGETS, "put_async", ASYNC_TARGETS)
        return part.receipt

    async def put_async(self, target: Any, *events: Event, lock_key: bool = False) -> Receipt:
        """Put events at once through an asynchronous connection, in its open transaction."""
        session = session_of(target) if is_async(target) else None
        if session is not None:
            part = self._make_part(events, lock_key)
            self._put_session(session, part)
            await target.flush()
        elif is_async(target, "AsyncConnection"):
            check_connection(target.sync_connection)
            part = self._make_part(events, lock_key)
            await target.run_sync(self._send, [part])
        elif (known := drivers.driver_of(target)) is not None and known[1]:
            drivers.check(known[0], target)
            part = self._make_part(events, refuse_lock("put_async", target, lock_key))
            statements = self._prepare([part], dialect_of(known[0]))
            part.receipt._fill(await drivers.run_async(known[0], target, statements))
        else:
            raise wrong_target("put_async", target, ASYNC_TARGETS, "put", SYNC_TARGETS)
        return part.receipt

    def _make_part(self, events: Sequence[Any], lock_key: bool) -> _Part:
        for event in events:
            if not isinstance(event, Event):
                hint = ". Unpack it: put(…, *events)" if isinstance(event, Iterable) else ""
                raise TypeError(f"put: expected Event objects, got {event!r}{hint}")
            if len(event.payload) > self.max_payload:
                raise PayloadTooLarge(
                    f"Event {event.type!r} ({event.id}): its payload has {len(event.payload)} bytes, at most "
                    f"{self.max_payload} are allowed. Store it elsewhere and send a reference, or raise "
                    "max_payload."
                )
            self._encoder.check(event)
        ids = [event.id for event in events]
        if len(set(ids)) < len(ids):
            twice = next(event for event in events if ids.count(event.id) > 1)
            raise InvalidEvent(f"Event {twice.type!r}: id {twice.id} is twice in one put")
        # The trace of the put, not of the flush, which may come when the span is over.
        return _Part(events, self._encoder.headers(events, current_trace_headers()), Receipt(events), lock_key)

    def _put_session(self, session: Session, part: _Part) -> None:
        if not session.is_active:
            raise TransactionError(
                "This session's transaction has failed; call session.rollback() before putting events."
            )
        try:
            bind = session.get_bind(clause=self._insert)
        except UnboundExecutionError as error:
            raise TransactionError(
                f"This session knows no database for table {self.table.fullname!r}; make it with bind=engine "
                "or binds={outbox.table: engine}."
            ) from error
        if commits_alone(bind):
            raise autocommit_error("session")
        if not part.events:
            part.receipt._fill(())
            return
        if self._marker is None:
            self._marker = make_marker(self.table, self._send_session)
        try:
            add_part(session, self._marker, part)
        except InvalidRequestError as error:
            raise TransactionError(f"This session cannot take events: {error}") from error

    def _send_session(self, session: Session, parts: Sequence[_Part]) -> None:
        connection = session.connection(bind_arguments={"clause": self._insert})
        check_connection(connection)
        self._send(connection, parts)

    def _send(self, connection: sa.Connection, parts: Sequence[_Part]) -> None:
        existing: list[int] = []
        start = 0
        try:
            self._lock_keys(connection, parts)
            schemas = connection.get_execution_options().get("schema_translate_map")
            notify = self._notify and not has_two_phases(connection)
            for statement in self._prepare(parts, connection.dialect, schemas, notify=notify):
                if statement.lock is not None:
                    connection.exec_driver_sql(*statement.lock)
                known = connection.exec_driver_sql(*statement.before).all() if statement.before else None
                result = connection.exec_driver_sql(statement.sql, statement.params)
                if statement.lookup is not None:
                    result = connection.exec_driver_sql(*statement.lookup)
                rows = result.all() if known is None else known
                existing += (start + position for position in statement.existing(rows))
                start += len(statement.ids)
        except InvalidRequestError as error:
            raise TransactionError(f"This connection cannot take events: {error}") from error
        except DBAPIError as error:
            drivers.raise_failed_transaction(error.orig or error)
            raise
        start = 0
        for part in parts:
            end = start + len(part.events)
            own = existing[bisect_left(existing, start) : bisect_left(existing, end)]
            part.receipt._fill(position - start for position in own)
            start = end

    def _prepare(
        self,
        parts: Sequence[_Part],
        dialect: Dialect,
        schemas: _Schemas = None,
        *,
        notify: bool | None = None,
    ) -> Iterable[Prepared]:
        events = parts[0].events if len(parts) == 1 else [event for part in parts for event in part.events]
        if not events:
            return ()
        headers = parts[0].headers if len(parts) == 1 else [text for part in parts for text in part.headers]
        notify = self._notify if notify is None else notify
        style = (notify, *_style(dialect, self._schema_in(schemas)))
        insertion = self._insertions.get(style)
        if insertion is None:
            table = self._tables_in(schemas)["outbox"]
            insertion = insertion_for(self.layout, table, dialect, notify=notify)
            self._insertions[style] = insertion
        return insertion.prepare(events, headers)

    def _schema_in(self, schemas: _Schemas) -> str | None:
        schema = self.table.schema
        return schemas.get(schema, schema) if schemas else schema

    def _tables_in(self, schemas: _Schemas) -> Mapping[str, sa.Table]:
        schema = self._schema_in(schemas)
        if schema == self.table.schema:
            return self.tables
        metadata = sa.MetaData(schema=schema)
        return {
            role: table.to_metadata(metadata, schema=schema)  # type: ignore[arg-type]
            for role, table in self.tables.items()
        }

    def _lock_keys(self, connection: sa.Connection, parts: Sequence[_Part]) -> None:
        keys = {event.key for part in parts if part.lock_key for event in part.events if event.key is not None}
        if keys:
            self._transitions_for(connection).lock_keys(connection, sorted(keys))

    # -- changing one's mind ---------------------------------------------------------------------------------

    def cancel(self, target: Target, *ids: UUID, dedup_key: str | None = None, topic: str | None = None) -> int:
        """Delete events that nobody holds; returns how many were still there to cancel.

        `topic` goes with a `dedup_key` where keys are unique within a topic only.
        """
        return self._change(target, "cancel", _Chosen(ids, dedup_key, topic), None)

    def reschedule(
        self,
        target: Target,
        *ids: UUID,
        due_at: datetime,
        dedup_key: str | None = None,
        topic: str | None = None,
    ) -> int:
        """Give events that nobody holds another time; returns how many it reached."""
        return self._change(target, "reschedule", _Chosen(ids, dedup_key, topic), _aware(due_at))

    async def cancel_async(
        self, target: AsyncTarget, *ids: UUID, dedup_key: str | None = None, topic: str | None = None
    ) -> int:
        """`cancel` for asynchronous sessions and connections."""
        return await self._change_async(target, "cancel", _Chosen(ids, dedup_key, topic), None)

    async def reschedule_async(
        self,
        target: AsyncTarget,
        *ids: UUID,
        due_at: datetime,
        dedup_key: str | None = None,
        topic: str | None = None,
    ) -> int:
        """`reschedule` for asynchronous sessions and connections."""
        return await self._change_async(target, "reschedule", _Chosen(ids, dedup_key, topic), _aware(due_at))

    def _change(self, target: Any, verb: str, chosen: _Chosen, due_at: datetime | None) -> int:
        self._check_chosen(verb, chosen)
        session = None if is_async(target) else session_of(target)
        if session is not None:
            if not session.is_active:
                raise TransactionError(f"This session's transaction has failed; roll it back before you {verb}.")
            session.flush()
            target = session.connection(bind_arguments={"clause": self._insert})
        if not isinstance(target, sa.Connection):
            expected = "a SQLAlchemy Session or Connection"
            raise wrong_target(verb, target, expected, f"{verb}_async", "an AsyncSession or AsyncConnection")
        check_connection(target)
        due = None if due_at is None else sa.literal(due_at, Timestamp())
        try:
            transitions = self._transitions_for(target)
            given = SimpleNamespace(due=due, due_at=due_at)
            count = transitions.change(target, chosen.ids, chosen.dedup_key, given, topic=chosen.topic)
        except DBAPIError as error:
            drivers.raise_failed_transaction(error.orig or error)
            raise
        if count and self._notify and target.dialect.name == "postgresql" and not has_two_phases(target):
            channel = channel_name(transitions.outbox, self.layout)
            target.execute(sa.select(sa.func.pg_notify(channel, chosen.topic or "")))
        return count

    async def _change_async(self, target: Any, verb: str, chosen: _Chosen, due_at: datetime | None) -> int:
        if not is_async(target):
            expected = "a SQLAlchemy AsyncSession or AsyncConnection"
            raise wrong_target(f"{verb}_async", target, expected, verb, "a Session or Connection")
        if is_async(target, "AsyncConnection"):
            check_connection(target.sync_connection)
        elif is_async(target, "async_scoped_session"):
            target = target()
        count: int = await target.run_sync(self._change, verb, chosen, due_at)
        return count

    def _check_chosen(self, verb: str, chosen: _Chosen) -> None:
        if bool(chosen.ids) == (chosen.dedup_key is not None):
            raise TypeError(f"{verb}: expected event ids or a dedup_key, one of the two")
        for event_id in chosen.ids:
            if not isinstance(event_id, UUID):
                raise TypeError(f"{verb}: expected event ids as uuid.UUID, got {event_id!r}")
        is_needed = chosen.dedup_key is not None and self.layout.dedup_within is not None
        if is_needed and chosen.topic is None:
            raise TypeError(f"{verb}: keys of layout {self.layout.name!r} are unique within a topic; give topic= too")
        if chosen.topic is not None and not is_needed:
            raise TypeError(
                f"{verb}: layout {self.layout.name!r} takes no topic here; leave topic={chosen.topic!r} out"
            )

    def _transitions_for(self, connection: sa.Connection) -> Transitions:
        schemas = connection.get_execution_options().get("schema_translate_map")
        style = _style(connection.dialect, self._schema_in(schemas))
        if style not in self._transitions:
            tables = self._tables_in(schemas)
            self._transitions[style] = build_transitions(self.layout, tables, dialect=connection.dialect.name)
        return self._transitions[style]


def _style(dialect: Dialect, schema: str | None) -> tuple[str | None, ...]:
    """What the text of a statement depends on."""
    return dialect.name, dialect.driver, dialect.paramstyle, schema


def _aware(moment: Any) -> datetime:
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        raise InvalidEvent(f"reschedule: expected an aware datetime, got {moment!r}")
    return moment.astimezone(UTC)
