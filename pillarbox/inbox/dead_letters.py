"""Where a source's dead messages go: beside the inbox, where `pillarbox events` lists, shows and redrives them.

With our own table they are rows of the queue's dead table, as if they had died there, and taken: redriven, they are in
the queue.
A row of omni-box's table is `failed`; what that table cannot hold goes into the dead table of a queue beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

import sqlalchemy as sa

from pillarbox.encoding import Encoder
from pillarbox.errors import InvalidEvent, Unsupported
from pillarbox.event import LIMITS, Claim, Dead, Event, reload_event
from pillarbox.inbox.database import Database, Where, open_database
from pillarbox.inbox.inbox import Inbox, check_group
from pillarbox.inbox.message import GROUP_HEADER, ID_HEADER, SOURCE_HEADER, TIME_HEADER, Message
from pillarbox.inbox.omnibox import OmniboxTakes, is_error_whole
from pillarbox.inbox.ownership import check_taken
from pillarbox.inbox.pieces import Pieces
from pillarbox.inbox.storing import read_claim
from pillarbox.insertion import insertion_for
from pillarbox.sources import Letter
from pillarbox.stores.build import build_transitions
from pillarbox.stores.dialect import is_mysql
from pillarbox.stores.transitions import Transitions

# Rows on their way into the dead table are nobody's to claim, and two of one message wait for each other.
_ON_THE_WAY: Final = "#bury"
_WHOLE: Final = "pillarbox-whole-"


class InboxDeadLetters:
    """Buries dead messages of one consumer group; one that is buried already is left as it is."""

    def __init__(self, inbox: Inbox, where: Where, *, group: str) -> None:
        self._inbox = inbox
        self._where = where
        self._group = check_group(inbox, group)
        self._queue = inbox.need_queue()
        self._encoder = Encoder(self._queue.layout, self._queue.table)
        self._database: Database | None = None
        self._transitions: dict[str, Transitions] = {}

    async def bury(self, letters: Sequence[Letter]) -> None:
        """Write dead messages with their bytes, headers and errors, in one transaction.

        What no retry could mend is a `ConfigError`, which ends the consumer: the inbox is another group's by now, or a
        message is too large for the database.
        """
        if not letters:
            return
        if self._database is None:
            self._database = open_database(self._inbox, self._where)
        await self._database.run(lambda db: self._write(db, letters))

    async def close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            await database.close()

    def _write(self, db: sa.Connection, letters: Sequence[Letter]) -> None:
        rest = self._take(db, letters) if self._inbox.is_own else self._write_failed(db, letters)
        by_id: dict[UUID, Letter] = {}
        for letter in rest:
            by_id.setdefault(letter.claim.event.id, letter)
        if by_id:
            self._write_dead(db, by_id)

    def _take(self, db: sa.Connection, letters: Sequence[Letter]) -> list[Letter]:
        """Take the messages that can be read; returns the letters without those that had been taken before.

        From now on the letter stands for its message: should that come again, also after the letter was redriven and
        handled, it is a repeat. What cannot be read is new once it comes as it should.
        """
        messages = [self._readable(letter) for letter in letters]
        is_new = iter(self._inbox.write(db, [message for message in messages if message is not None]))
        check_taken(self._inbox, db, self._group)
        return [letter for letter, message in zip(letters, messages, strict=True) if message is None or next(is_new)]

    def _readable(self, letter: Letter) -> Message | None:
        read = getattr(letter.claim.row, "read", None)
        if read is not None and read.defect is not None:
            return None
        try:
            message = read_claim(letter.claim, group=self._group)
            self._inbox.check(message)
        except (InvalidEvent, Unsupported):
            return None
        return message

    # -- omni-box's table --------------------------------------------------------------------------------------------

    def _write_failed(self, db: sa.Connection, letters: Sequence[Letter]) -> list[Letter]:
        """Write those letters that omni-box could read; returns the others."""
        messages: list[Message] = []
        errors: dict[tuple[str, str], str] = {}
        rest: list[Letter] = []
        for letter in letters:
            message = self._fitting(letter)
            if message is None:
                rest.append(letter)
            else:
                messages.append(message)
                errors[(message.group, message.id)] = letter.error
        takes = self._inbox.takes(db, "failed")
        if messages and isinstance(takes, OmniboxTakes):
            takes.failing(errors).take(db, messages)
        return rest

    def _fitting(self, letter: Letter) -> Message | None:
        return self._readable(letter) if is_error_whole(letter.error) else None

    # -- the queue's dead table --------------------------------------------------------------------------------------

    def _write_dead(self, db: sa.Connection, letters: Mapping[UUID, Letter]) -> None:
        events = [self._as_event(letter) for letter in letters.values()]
        self._put(db, events)
        queue = self._queue.table.c
        ids = [event.id for event in events]
        found = sa.select(queue.seq, queue.id).where(queue.id.in_(ids), queue.sink == _ON_THE_WAY)
        rows = {row.id: row.seq for row in db.execute(found)}
        # Looked for now: whoever buried the same message at the same moment has committed.
        buried = self._find_buried(db, ids)
        again = [seq for event_id, seq in rows.items() if event_id in buried]
        if again:
            db.execute(sa.delete(self._queue.table).where(queue.seq.in_(again)))
        claims = [
            Claim(rows[event.id], event, max(1, letters[event.id].claim.attempt))
            for event in events
            if event.id not in buried
        ]
        if not claims:
            return
        outcomes = [Dead(_clean(letters[claim.event.id].error)) for claim in claims]
        self._transitions_for(db).settle(db, claims, outcomes, mode="hold", park=False)
        dead = self._queue.tables["dead"]
        db.execute(sa.update(dead).where(dead.c.seq.in_([claim.row for claim in claims])).values(sink=""))

    def _put(self, db: sa.Connection, events: Sequence[Event]) -> None:
        if not is_mysql(db.dialect.name):
            self._insert(db, events)
            return
        pieces = Pieces.measure(db)
        for event, headers in zip(events, self._encoder.headers(events, {}), strict=True):
            pieces.check(event, headers)
        for group in pieces.heads(events):
            self._insert(db, group)
        queue = self._queue.table
        for event in events:
            row = (queue.c.id == event.id) & (queue.c.sink == _ON_THE_WAY)
            for piece in pieces.rest(event):
                longer = sa.func.concat(queue.c.payload, sa.func.unhex(piece))
                db.execute(sa.update(queue).where(row).values(payload=longer))

    def _insert(self, db: sa.Connection, events: Sequence[Event]) -> None:
        queue = self._queue
        insertion = insertion_for(queue.layout, queue.table, db.dialect, sink=_ON_THE_WAY, notify=False)
        for statement in insertion.prepare(events, self._encoder.headers(events, {})):
            db.exec_driver_sql(statement.sql, statement.params).close()

    def _find_buried(self, db: sa.Connection, ids: Sequence[UUID]) -> set[UUID]:
        """The events that this group has buried; they may have been redriven since."""
        found: set[UUID] = set()
        for table in (self._queue.tables["dead"], self._queue.table):
            wanted = sa.select(table.c.id, table.c.headers).where(table.c.id.in_(ids), table.c.sink != _ON_THE_WAY)
            found |= {row.id for row in db.execute(wanted) if (row.headers or {}).get(GROUP_HEADER) == self._group}
        return found

    def _transitions_for(self, db: sa.Connection) -> Transitions:
        dialect = db.dialect.name
        if dialect not in self._transitions:
            self._transitions[dialect] = build_transitions(self._queue.layout, self._queue.tables, dialect=dialect)
        return self._transitions[dialect]

    def _as_event(self, letter: Letter) -> Event:
        """The event with all that was known of its message; what a column cannot hold is whole in a header."""
        event, raw = letter.claim.event, letter.raw
        values: dict[str, Any] = {"dedup_key": None, "due_at": None, "delay": None}
        headers: dict[str, Any] = {_clean(name): _clean(value) for name, value in event.headers.items()}
        for name, most in LIMITS.items():
            text = getattr(event, name)
            if text is not None and (len(text) > most or _clean(text) != text):
                headers[f"{_WHOLE}{name.replace('_', '-')}"] = _clean(text)
                values[name] = None if name in values else _clean(text)[:most]
        read = getattr(letter.claim.row, "read", None)
        message_id = str(event.id) if read is None else str(read.id)
        headers |= {GROUP_HEADER: self._group, SOURCE_HEADER: _clean(event.topic)}
        if message_id != str(event.id):
            headers[ID_HEADER] = _clean(message_id)
        if event.created_at is not None:
            headers[TIME_HEADER] = event.created_at.isoformat()
        if letter.claim.defect is not None and raw is not None:
            values["payload"] = raw.body
        return reload_event(event, **values, headers=headers)


def _clean(value: Any) -> Any:
    """A text without what no database can hold, which is written as Python writes it."""
    if not isinstance(value, str):
        return value
    return value.encode(errors="backslashreplace").decode().replace("\0", "\\x00")
