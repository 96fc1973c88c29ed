"""Messages as rows of omni-box's inbox tables (PostgreSQL).

A message taken inside a handler's transaction is `completed` at once, one that is stored first is `pending`, one that
can never be handled is `failed`. The partitioned table has no index that could keep messages apart: whoever writes one
first locks its id and group, by the same numbers as omni-box itself, and then looks whether it is there.

omni-box strips every text and refuses blank ones, when it reads a row as well: there its workers stop. So rows are
written as it would write them, and a message id is the same with blanks around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Final, Literal

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from pillarbox.codec import JSON
from pillarbox.encoding import Encoder
from pillarbox.errors import InvalidEvent, TransactionError
from pillarbox.event import BYTES, LIMITS, Event, uuid7
from pillarbox.inbox.message import ID_HEADER, TIME_HEADER, Message, is_writable
from pillarbox.inbox.takes import Key, Takes
from pillarbox.layouts.clock import now
from pillarbox.layouts.layout import Layout
from pillarbox.layouts.omnibox import MAX_ATTEMPTS, MAX_ERROR
from pillarbox.stores.hot import Hot

Status = Literal["completed", "pending", "failed"]

EVENT_SOURCE: Final = "pillarbox-event-source"

_TEXTS: Final = ("event_type", "message_id", "consumer_group", "source")
_OPTIONAL: Final = ("trace_id", "correlation_id", "causation_id", "schema_version", "last_error")
_KINDS: Final[Mapping[str, str]] = {
    "id": "UUID",
    **dict.fromkeys((*_TEXTS, "payload", "headers", *_OPTIONAL), "TEXT"),
    "max_attempts": "INTEGER",
}


class OmniboxRows:
    """Turns messages into rows; refuses what omni-box could not read."""

    def __init__(self, layout: Layout, table: sa.Table) -> None:
        self._layout = layout
        # The layout itself takes no put: a row needs a message, not only an event.
        self._encoder = Encoder(replace(layout, put=lambda due: {"created_at": now()}), table, is_message=True)

    def check(self, message: Message) -> None:
        """Raise `InvalidEvent` for a message that the table, or omni-box, could not hold."""
        for name, text in (("id", message.id.strip()), ("group", message.group)):
            if not text or text != text.strip():
                raise InvalidEvent(
                    f"Message {message.id!r}, {name}: layout {self._layout.name!r} expects text that is not blank, and "
                    f"no blanks around a group; got {getattr(message, name)!r}"
                )
        event = self._event(message)
        self._encoder.check(event)
        # An event that came from a broker was not checked when it was made.
        for name in LIMITS:
            text = getattr(event, name)
            if text is not None and not is_writable(text):
                raise InvalidEvent(
                    f"Message {message.id!r}, {name}: expected text without zero and surrogate characters; got "
                    f"{text[:80]!r}"
                )

    def arrays(self, messages: Sequence[Message], errors: Sequence[str] | None = None) -> dict[str, list[Any]]:
        """The values of each column."""
        events = [self._event(message) for message in messages]
        return {
            "id": [str(uuid7()) for _ in messages],
            "event_type": [event.type for event in events],
            "message_id": [message.id.strip() for message in messages],
            "consumer_group": [message.group for message in messages],
            "source": [event.source for event in events],
            "payload": [event.payload.decode() for event in events],
            "headers": list(self._encoder.headers(events, {})),
            **{name: [getattr(event, name) for event in events] for name in _OPTIONAL if name != "last_error"},
            "last_error": [None] * len(messages) if errors is None else list(errors),
            "max_attempts": [event.max_attempts or MAX_ATTEMPTS for event in events],
        }

    def _event(self, message: Message) -> Event:
        """The event as the row tells it: its row has an id of its own, and omni-box's source."""
        event = message.event
        headers = self._headers(message)
        headers[ID_HEADER] = message.id.strip()
        source = message.source.strip() or (event.source or "").strip() or event.topic.strip()
        if event.source is not None and event.source.strip() not in ("", source):
            headers[EVENT_SOURCE] = event.source.strip()
        if event.created_at is not None:
            headers[TIME_HEADER] = event.created_at.isoformat()
        # Whoever sent JSON without saying so meant it.
        content_type = JSON if event.content_type == BYTES and _is_object(event.payload) else event.content_type
        texts = {name: getattr(event, name) for name in LIMITS if name not in ("content_type", "source", "dedup_key")}
        stripped = {name: text.strip() or None for name, text in texts.items() if text and text != text.strip()}
        # A key for deduplication is unique among its producer's events, not among the messages of several groups.
        return event.replace(
            **{**stripped, "headers": headers, "source": source},
            payload=event.payload,
            content_type=content_type,
            dedup_key=None,
        )

    def _headers(self, message: Message) -> dict[str, Any]:
        headers: dict[str, Any] = {}
        for given, value in message.event.headers.items():
            name = given.strip()
            if name in headers:
                raise InvalidEvent(
                    f"Message {message.id!r}, header {given!r}: layout {self._layout.name!r} expects names that differ "
                    "not only in blanks around them"
                )
            # omni-box has no headers without a value: it leaves out those of its broker, and refuses blank ones.
            if value is not None and value != "" and not (isinstance(value, str) and value.isspace()):
                headers[name] = value.strip() if isinstance(value, str) else value
        return headers


class OmniboxTakes(Takes):
    """Writes rows of one status."""

    def __init__(self, rows: OmniboxRows, table: sa.Table, *, status: Status, is_partitioned: bool) -> None:
        self._rows = rows
        self._lock = Hot(_build_lock()) if is_partitioned else None
        self._put = Hot(_build_put(table, status, is_partitioned=is_partitioned))

        self._errors: Mapping[Key, str] = {}

    def failing(self, errors: Mapping[Key, str]) -> OmniboxTakes:
        """The same statements for messages that failed for these reasons."""
        made = copy(self)
        made._errors = {(group, message_id.strip()): error for (group, message_id), error in errors.items()}
        return made

    def take(self, db: sa.Connection, messages: Sequence[Message]) -> list[bool]:
        return super().take(db, [_stripped(message) for message in messages])

    def _insert(self, db: sa.Connection, messages: Sequence[Message]) -> Sequence[Key] | None:
        keys = [(message.group, message.id) for message in messages]
        if self._lock is not None:
            groups, ids = [key[0] for key in keys], [key[1] for key in keys]
            for (isolation,) in self._lock.fetch(db, {"g_group": groups, "g_id": ids}):
                _check_isolation(isolation)
        errors = [self._errors[key] for key in keys] if self._errors else None
        arrays = self._rows.arrays(messages, errors)
        new = self._put.fetch(db, {f"g_{name}": values for name, values in arrays.items()})
        return None if len(new) == len(messages) else [(group, message_id) for group, message_id in new]


def _stripped(message: Message) -> Message:
    text = message.id.strip()
    return message if text == message.id else Message(text, message.group, source=message.source, event=message.event)


def _build_lock() -> Any:
    """Locks on messages until the transaction ends, in the order of their numbers."""
    arrays = [sa.bindparam(name, type_=postgresql.ARRAY(sa.Text())) for name in ("g_id", "g_group")]
    given = sa.func.unnest(*arrays).table_valued("id", "group").render_derived()
    first, second = sa.func.hashtext(given.c.id), sa.func.hashtext(given.c.group)
    numbers = sa.select(first.label("first"), second.label("second")).distinct().order_by("first", "second")
    listed = numbers.subquery("numbers").c
    locked = sa.select(sa.func.pg_advisory_xact_lock(listed.first, listed.second)).cte("locked")
    locked = locked.prefix_with("MATERIALIZED")
    count = sa.select(sa.func.count()).select_from(locked).scalar_subquery()
    return sa.select(sa.func.current_setting("transaction_isolation")).where(count > 0)


def _check_isolation(isolation: str) -> None:
    # What another transaction committed before it let go of the lock must be seen.
    if isolation != "read committed":
        raise TransactionError(
            f"This transaction is {isolation.upper()}: in a partitioned inbox a message can be taken once only under "
            "READ COMMITTED. Use that isolation level, or the table that is not partitioned."
        )


def _build_put(table: sa.Table, status: Status, *, is_partitioned: bool) -> Any:
    plain = sa.table(table.name, *(sa.column(c.name, c.type) for c in table.c), schema=table.schema)
    arrays = ", ".join(f"CAST(:g_{name} AS {kind}[])" for name, kind in _KINDS.items())
    listed = sa.text(f"SELECT * FROM unnest({arrays}) AS g({', '.join(_KINDS)})")
    given = listed.columns(*(sa.column(name) for name in _KINDS)).subquery("given").c
    columns: dict[str, Any] = {name: given[name] for name in _KINDS}
    columns |= {name: sa.cast(given[name], postgresql.JSONB) for name in ("payload", "headers")}
    # The columns' own defaults are off by the session's distance from UTC.
    columns |= {name: now() for name in ("scheduled_at", "created_at", "updated_at")}
    columns["status"] = sa.literal_column(f"'{status}'")
    columns["attempts_made"] = given.max_attempts if status == "failed" else sa.literal_column("0")
    if status == "completed":
        columns["completed_at"] = now()
    source = sa.select(*(value.label(name) for name, value in columns.items()))
    key = [plain.c.message_id, plain.c.consumer_group]
    if is_partitioned:
        other = plain.alias("other").c
        is_same = (other.message_id == given.message_id) & (other.consumer_group == given.consumer_group)
        source = source.where(~sa.exists(sa.select(sa.literal_column("1")).where(is_same)))
    insert = postgresql.insert(plain).from_select(list(columns), source)
    if not is_partitioned:
        insert = insert.on_conflict_do_nothing(index_elements=key)
    return insert.returning(plain.c.consumer_group, plain.c.message_id)


def is_error_whole(error: str) -> bool:
    """Whether an error fits into its column as it is."""
    return len(error) <= MAX_ERROR and is_writable(error)


def _is_object(payload: bytes) -> bool:
    try:
        return isinstance(orjson.loads(payload), dict)
    except ValueError:
        return False
