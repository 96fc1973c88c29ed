"""Stored first: messages of a source become rows that a relay handles later, with retries, order and dead letters.

A batch is one transaction: messages that are new are taken and put into the queue, repeats are passed over. Only then
is the broker told. A crash in between brings the batch again, and all of it is a repeat.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import sqlalchemy as sa

from pillarbox.errors import (
    ConfigError,
    InvalidEvent,
    SchemaError,
    SinkUnavailable,
    StoreRefused,
    StoreUnavailable,
    Unsupported,
)
from pillarbox.event import DELIVERED, LIMITS, RELEASED, Claim, Dead, Event, Outcome, reload_event
from pillarbox.inbox.database import Database, Where, open_database
from pillarbox.inbox.inbox import Inbox, check_group
from pillarbox.inbox.message import GROUP_HEADER, ID_HEADER, SOURCE_HEADER, TIME_HEADER, Message, is_writable
from pillarbox.inbox.ownership import check_alone, check_queued, check_taken
from pillarbox.inbox.retention import Forgetting
from pillarbox.outbox import MAX_PAYLOAD, Outbox
from pillarbox.sinks import Sink
from pillarbox.sinks.order import release_successors
from pillarbox.sinks.sql.failures import Kind, describe, judge
from pillarbox.stores.dialect import is_mysql
from pillarbox.stores.sql import T, Work
from pillarbox.wakeup import channel_name

log = logging.getLogger("pillarbox.inbox")

_ROOM: Final = 65_536
_TEXTS: Final = tuple(name for name in LIMITS if name != "dedup_key")


class StoreSink(Sink):
    """Stores messages for one consumer group in the inbox and its queue.

    For a relay whose store is a source. `max_payload` is the largest payload in bytes; a message that cannot be stored
    is dead, the others are stored. With an engine of yours the connections are yours: the sink does not close them.
    """

    is_quick = False

    def __init__(self, inbox: Inbox, where: Where, *, group: str, max_payload: int = MAX_PAYLOAD) -> None:
        self._inbox = inbox
        self._queue = inbox.need_queue() if inbox.is_own else None
        self._where = where
        self._group = check_group(inbox, group)
        self._max_payload = max_payload
        self._database: Database | None = None
        self._forgetting = Forgetting(inbox.pruning, inbox.retention)
        self.name = f"inbox:{inbox.table.fullname}/{group}"

    async def open(self) -> None:
        await self.check()

    async def check(self) -> None:
        await self._run(self._look)

    async def close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            await database.close()

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        outcomes: list[Outcome] = [RELEASED] * len(claims)
        messages = self._read(claims, outcomes)
        stopped: set[str] = set()
        # Groups still to be stored, the first one last; one that the database refuses is replaced by its halves.
        groups = [list(messages)] if messages else []
        try:
            while groups:
                group = [position for position in groups.pop() if claims[position].event.key not in stopped]
                if not group:
                    continue
                refusal = await self._store([messages[position] for position in group])
                if refusal is None:
                    for position in group:
                        outcomes[position] = DELIVERED
                elif len(group) > 1:
                    half = len(group) // 2
                    groups += [group[half:], group[:half]]
                else:
                    outcomes[group[0]] = Dead(refusal)
                    _stop(stopped, claims[group[0]])
        except SinkUnavailable as error:
            error.outcomes = release_successors(claims, outcomes)
            raise
        await self._forgetting.run(self._run)
        return release_successors(claims, outcomes) if stopped else outcomes

    def _read(self, claims: Sequence[Claim], outcomes: list[Outcome]) -> dict[int, Message]:
        """The messages that can be stored, by position; the others are dead, or behind one that is."""
        messages: dict[int, Message] = {}
        stopped: set[str] = set()
        for position, claim in enumerate(claims):
            if claim.event.key is not None and claim.event.key in stopped:
                continue
            try:
                message = read_claim(claim, group=self._group)
                self._inbox.check(message)
                self._check(message)
                messages[position] = message
            except (InvalidEvent, Unsupported) as error:
                outcomes[position] = Dead(str(error))
                _stop(stopped, claim)
        return messages

    def _check(self, message: Message) -> None:
        if len(message.payload) > self._max_payload:
            raise InvalidEvent(
                f"Message {message.id!r}: its payload has {len(message.payload)} bytes, at most {self._max_payload} "
                "are allowed. Raise max_payload to store it."
            )
        if self._queue is not None:
            check_event(message)

    async def _store(self, messages: Sequence[Message]) -> str | None:
        """Store messages in one transaction; returns why the database refuses what is in them."""
        try:
            await self._run(lambda db: self._write(db, messages))
        except StoreRefused as error:
            return str(error) if error.__cause__ is None else describe(error.__cause__)
        except SinkUnavailable as error:
            cause = error.__cause__.__cause__ if error.__cause__ is not None else None
            if cause is not None and judge(cause) is Kind.BAD:
                return describe(cause)
            raise
        return None

    def _write(self, db: sa.Connection, messages: Sequence[Message]) -> None:
        status: Any = "completed" if self._queue is not None else "pending"
        is_new = self._inbox.write(db, messages, status=status)
        check_taken(self._inbox, db, self._group)
        new = [message for message, new in zip(messages, is_new, strict=True) if new]
        if not new:
            return
        if self._queue is not None:
            self._enqueue(db, self._queue, new)
        elif db.dialect.name == "postgresql":
            channel = channel_name(self._inbox.table, self._inbox.layout)
            db.execute(sa.select(sa.cast(sa.func.pg_notify(channel, ""), sa.Text)))

    def _enqueue(self, db: sa.Connection, queue: Outbox, messages: Sequence[Message]) -> None:
        by_event: dict[UUID, Message] = {}
        for message in messages:
            by_event.setdefault(message.event.id, message)
        receipt = queue.put(db, *(as_event(message) for message in by_event.values()))
        if not receipt.existing:
            return
        # Forgotten by the inbox while it waits in the queue, it came again: the queue has it, if it is the same.
        c = queue.table.c
        known = [event.id for event in receipt.existing]
        check_queued(self._inbox, db.execute(sa.select(c.headers).where(c.id.in_(known))), self._group)

    def _look(self, db: sa.Connection) -> None:
        self._inbox.look(db)
        check_alone(self._inbox, db, self._group)
        if is_mysql(db.dialect.name):
            # More than that the server answers by closing the connection; bytes are written as two digits each.
            packet = int(db.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one())
            self._max_payload = min(self._max_payload, (packet - _ROOM) // 2)

    async def _run(self, work: Work[T]) -> T:
        if self._database is None:
            self._database = open_database(self._inbox, self._where)
        try:
            return await self._database.run(work)
        except (ConfigError, StoreUnavailable, SchemaError) as error:
            raise SinkUnavailable(f"Sink {self.name}: {error}") from error


def read_claim(claim: Claim, *, group: str) -> Message:
    """The message of a claim: a source's by the id that the source read, another's by that of its event."""
    read = getattr(claim.row, "read", None)
    message_id = claim.event.id if read is None else read.id
    return Message(message_id, group, source=claim.event.topic, event=claim.event)


def as_event(message: Message) -> Event:
    """The event of a message as a queue takes it: what it has no column for goes into headers."""
    event = message.event
    more = {GROUP_HEADER: message.group}
    if message.source:
        more[SOURCE_HEADER] = message.source
    if message.id != str(event.id):
        more[ID_HEADER] = message.id
    if event.created_at is not None:
        more[TIME_HEADER] = event.created_at.isoformat()
    # A key for deduplication is unique among its producer's live events, not among messages.
    return reload_event(event, headers={**event.headers, **more}, dedup_key=None)


def check_event(message: Message) -> None:
    """Refuse an event that our own table cannot hold: one from a broker was not checked when it was made."""
    for name in _TEXTS:
        text = getattr(message.event, name)
        if text is None:
            continue
        if len(text) > LIMITS[name] or not is_writable(text):
            raise InvalidEvent(
                f"Message {message.id!r}, {name}: expected at most {LIMITS[name]} characters and no zero or surrogate "
                f"among them; got {len(text)}, {text[:80]!r}"
            )


def _stop(stopped: set[str], claim: Claim) -> None:
    if claim.event.key is not None:
        stopped.add(claim.event.key)
