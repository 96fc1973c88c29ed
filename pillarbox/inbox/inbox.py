"""Inbox: take each message once, in the caller's transaction.

A take never commits: the message shares the fate of the caller's transaction. Who takes a message that another
transaction is taking waits for that one: after its commit the message is a repeat, after its rollback it is new.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from sqlalchemy.engine import Dialect
from sqlalchemy.exc import DBAPIError, InvalidRequestError, UnboundExecutionError
from sqlalchemy.orm import Session

from pillarbox import drivers
from pillarbox.durations import parse_duration
from pillarbox.errors import ConfigError, InvalidEvent, LayoutError, SchemaError, TransactionError, Unsupported
from pillarbox.event import LIMITS
from pillarbox.inbox.message import MAX_LENGTH, Message, is_writable
from pillarbox.inbox.omnibox import OmniboxRows, OmniboxTakes, Status
from pillarbox.inbox.retention import Pruning
from pillarbox.inbox.takes import Takes, takes_for
from pillarbox.layouts import Layout, check_database, declare_layout, get_layout
from pillarbox.layouts.inbox_tables import QUEUE, declare_inbox
from pillarbox.outbox import Outbox
from pillarbox.stores.dialect import is_mysql
from pillarbox.stores.sql import is_missing
from pillarbox.stores.url import open_store
from pillarbox.targets import autocommit_error, check_connection, commits_alone, is_async, session_of, wrong_target

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
    from sqlalchemy.orm import scoped_session

    from pillarbox.stores.sql import SqlStore

    Target = Session | scoped_session[Any] | sa.Connection
    AsyncTarget = AsyncSession | async_scoped_session[Any] | AsyncConnection

RETENTION: Final = timedelta(days=7)

_SYNC: Final = "a SQLAlchemy Session or Connection"
_ASYNC: Final = "a SQLAlchemy AsyncSession or AsyncConnection"
_LAYOUTS: Final = {
    "pillarbox": "inbox",
    "inbox": "inbox",
    "omnibox": "omnibox-inbox",
    "omnibox-inbox": "omnibox-inbox",
    "omnibox-partitioned": "omnibox-inbox-partitioned",
    "omnibox-inbox-partitioned": "omnibox-inbox-partitioned",
}


class Inbox:
    """The application's side of an inbox table.

    Declares the tables on the user's `MetaData`; creates nothing. `layout` is `pillarbox`, `omnibox` or
    `omnibox-partitioned`. A message is known for `retention`, counted from when it was taken; `prune` forgets it then.
    `queue` is where messages are stored that are handled later, and where dead letters are: a table of the inbox's name
    with `_queue` behind it unless an `Outbox` of layout `pillarbox` is given, or false for none.
    """

    def __init__(
        self,
        metadata: sa.MetaData,
        layout: str = "pillarbox",
        *,
        table: str | None = None,
        schema: str | None = None,
        retention: timedelta | str = RETENTION,
        queue: Outbox | bool = True,
        model: sa.Table | None = None,
    ) -> None:
        if not isinstance(metadata, sa.MetaData):
            raise TypeError(
                f"Inbox: expected a sqlalchemy.MetaData, e.g. Base.metadata of your models; got {metadata!r}"
            )
        self.layout = _find_layout(layout)
        self.retention = parse_duration(retention, what="Inbox retention")
        self.is_own = self.layout.name == "inbox"
        self.table = model if model is not None else self._declare(metadata, table, schema)
        self.queue = self._declare_queue(metadata, queue)
        self.pruning = Pruning(self.table, is_own=self.is_own)
        self._rows = None if self.is_own else OmniboxRows(self.layout, self.table)
        self._takes: dict[tuple[str | None, ...], Takes] = {}
        self._insert = sa.insert(self.table)

    @classmethod
    def from_models(cls, inbox: Any, *, layout: str = "pillarbox", **options: Any) -> Inbox:
        """An inbox on a mapped class made from the layout's mixin."""
        table: sa.Table = inbox.__table__
        declared = cls(sa.MetaData(), layout, table=table.name, schema=table.schema, queue=False).table
        missing = set(declared.c.keys()) - set(table.c.keys())
        missing |= {str(index.name) for index in declared.indexes} - {str(index.name) for index in table.indexes}
        if missing or [c.name for c in declared.primary_key] != [c.name for c in table.primary_key]:
            lacks = ", ".join(sorted(missing)) or f"primary key {[c.name for c in declared.primary_key]}"
            raise LayoutError(
                f"Model {inbox.__name__!r}: its table lacks the layout's {lacks}. Name the mixin before the "
                "declarative base."
            )
        return cls(table.metadata, layout, model=table, **options)

    def _declare(self, metadata: sa.MetaData, table: str | None, schema: str | None) -> sa.Table:
        if not self.is_own:
            return declare_layout(self.layout, metadata, table=table, schema=schema)["outbox"]
        name = self.layout.table if table is None else table
        if schema is None and "." in name:
            schema, name = name.split(".", 1)
        if not name or len(name) > 40:
            raise LayoutError(f"Table name: expected 1 to 40 characters, got {name!r}")
        if name.endswith(QUEUE):
            raise LayoutError(f"Table name: {name!r} is that of a queue; name the inbox otherwise than …{QUEUE}")
        return declare_inbox(metadata, name, schema)

    def _declare_queue(self, metadata: sa.MetaData, queue: Outbox | bool) -> Outbox | None:
        if isinstance(queue, Outbox):
            if queue.layout.name != "pillarbox":
                raise LayoutError(
                    f"Inbox {self.table.fullname!r} queue: expected an outbox of layout 'pillarbox', got one of "
                    f"{queue.layout.name!r}"
                )
            return queue
        if not queue:
            return None
        # All of it, whatever its size: what a broker delivered must go somewhere.
        return Outbox(metadata, table=f"{self.table.name}{QUEUE}", schema=self.table.schema, max_payload=2**31)

    def store(self, url: str | sa.URL, *, group: str | None = None, **options: Any) -> SqlStore:
        """The relay's store for messages that were stored first.

        A queue of ours has the messages of one group. omni-box's table has those of all: say which.
        """
        if self.is_own:
            return self.need_queue().store(url, **options)
        if not group:
            raise ConfigError(
                f"Inbox {self.table.fullname!r}: expected group, the consumer group whose messages to handle"
            )
        names = {"table": self.table.name, "schema": self.table.schema}
        return open_store(url, layout=self.layout, sink=group, **names, **options)

    def need_queue(self) -> Outbox:
        """The queue, or `ConfigError` when the inbox was declared without."""
        if self.queue is None:
            raise ConfigError(f"Inbox {self.table.fullname!r}: it was declared with queue=False; this needs the queue")
        return self.queue

    def look(self, db: sa.Connection) -> None:
        """Read nothing from each of the tables: one that is missing is found out now."""
        db.execute(sa.select(self.table).limit(0))
        if self.queue is None:
            return
        for table in self.queue.tables.values():
            try:
                db.execute(sa.select(table).limit(0))
            except DBAPIError as error:
                if self.is_own or not is_missing(error):
                    raise
                raise SchemaError(
                    f"Inbox {self.table.fullname!r}: there is no table {table.fullname!r}, where dead letters go that "
                    f"omni-box could not read. Run `pillarbox schema create --layout pillarbox --table "
                    f"{self.queue.table.fullname}`, or declare the inbox with a queue that exists."
                ) from error

    # -- taking ------------------------------------------------------------------------------------------------------

    def take(self, target: Any, message: Message) -> bool:
        """Take a message in the caller's transaction: true the first time, false on a repeat."""
        return self.take_many(target, [message])[0]

    def take_many(self, target: Any, messages: Iterable[Message]) -> list[bool]:
        """Take messages with one statement: says of each whether it is new, of equal ones the first."""
        checked = self._check(messages)
        session = None if is_async(target) else session_of(target)
        if session is not None:
            target = self._connect(session)
        if not isinstance(target, sa.Connection):
            raise wrong_target("take", target, _SYNC, "take_async", "an AsyncSession or AsyncConnection")
        return self._take(target, checked)

    async def take_async(self, target: Any, message: Message) -> bool:
        """`take` for asynchronous sessions and connections."""
        return (await self.take_many_async(target, [message]))[0]

    async def take_many_async(self, target: Any, messages: Iterable[Message]) -> list[bool]:
        """`take_many` for asynchronous sessions and connections."""
        if not is_async(target):
            raise wrong_target("take_async", target, _ASYNC, "take", "a Session or Connection")
        if is_async(target, "AsyncConnection"):
            check_connection(target.sync_connection)
        elif is_async(target, "async_scoped_session"):
            target = target()
        found: list[bool] = await target.run_sync(self.take_many, messages)
        return found

    def write(self, db: sa.Connection, messages: Sequence[Message], *, status: Status = "completed") -> list[bool]:
        """Take messages that `check` has passed through a connection; `status` is what omni-box's rows become."""
        if not messages:
            return []
        return self.takes(db, status).take(db, messages)

    def check(self, message: Message) -> None:
        """Refuse what is no message, or one that the table cannot hold."""
        if not isinstance(message, Message):
            raise TypeError(f"take: expected Message objects, got {message!r}")
        type = message.event.type
        # An event that came from a broker was not checked when it was made.
        if len(type) > LIMITS["type"] or not (type.isprintable() or is_writable(type)):
            raise InvalidEvent(
                f"Message {message.id!r}, type: expected at most {LIMITS['type']} characters and no zero or surrogate "
                f"among them; got {type[:80]!r}"
            )
        if self._rows is not None:
            self._rows.check(message)

    def _check(self, messages: Iterable[Message]) -> Sequence[Message]:
        if not isinstance(messages, Iterable):
            raise TypeError(f"take_many: expected several Message objects, got {messages!r}; for one there is take")
        listed = list(messages)
        for message in listed:
            self.check(message)
        return listed

    def _connect(self, session: Session) -> sa.Connection:
        if not session.is_active:
            raise TransactionError("This session's transaction has failed; roll it back before you take messages.")
        try:
            bind = session.get_bind(clause=self._insert)
        except UnboundExecutionError as error:
            raise TransactionError(
                f"This session knows no database for table {self.table.fullname!r}; make it with bind=engine or "
                "binds={inbox.table: engine}."
            ) from error
        if commits_alone(bind):
            raise autocommit_error("session")
        try:
            return session.connection(bind_arguments={"clause": self._insert})
        except InvalidRequestError as error:
            raise TransactionError(f"This session cannot take messages: {error}") from error

    def _take(self, db: sa.Connection, messages: Sequence[Message]) -> list[bool]:
        check_connection(db)
        try:
            return self.write(db, messages)
        except InvalidRequestError as error:
            raise TransactionError(f"This connection cannot take messages: {error}") from error
        except DBAPIError as error:
            drivers.raise_failed_transaction(error.orig or error)
            raise

    def takes(self, db: sa.Connection, status: Status = "completed") -> Takes:
        """The statements for a connection."""
        schemas = db.get_execution_options().get("schema_translate_map")
        schema = schemas.get(self.table.schema, self.table.schema) if schemas else self.table.schema
        dialect = db.dialect
        style = (dialect.name, dialect.driver, dialect.paramstyle, schema, status)
        if style not in self._takes:
            self._takes[style] = self._build_takes(dialect, schema, status)
        return self._takes[style]

    def _build_takes(self, dialect: Dialect, schema: str | None, status: Status) -> Takes:
        check_database(self.layout, dialect.name)
        table = self.table
        if schema != table.schema:
            table = table.to_metadata(sa.MetaData(schema=schema), schema=schema)  # type: ignore[arg-type]
        if self._rows is None:
            return takes_for(table, dialect)
        is_partitioned = len(self.layout.rows) > 1
        return OmniboxTakes(self._rows, table, status=status, is_partitioned=is_partitioned)

    # -- forgetting --------------------------------------------------------------------------------------------------

    def prune(self, engine: sa.Engine, *, age: timedelta | str | None = None, batch: int = 1000) -> int:
        """Forget messages that were taken longer ago than `age`, the retention by default; returns how many.

        Each batch is a transaction of its own and waits for nobody.
        """
        limit, options = self._age(age), _prune_options(engine.dialect, batch)
        total = 0
        while True:
            with engine.connect().execution_options(**options) as db, db.begin():
                count = self.pruning.run(db, limit, batch)
            total += count
            if count < batch:
                return total

    async def prune_async(self, engine: AsyncEngine, *, age: timedelta | str | None = None, batch: int = 1000) -> int:
        """`prune` through an asynchronous engine."""
        limit, options = self._age(age), _prune_options(engine.dialect, batch)
        total = 0
        while True:
            async with engine.connect() as db:
                await db.execution_options(**options)
                async with db.begin():
                    count: int = await db.run_sync(self.pruning.run, limit, batch)
            total += count
            if count < batch:
                return total

    def _age(self, age: timedelta | str | None) -> timedelta:
        return self.retention if age is None else parse_duration(age, what="Inbox age")


def _find_layout(layout: str) -> Layout:
    if layout not in _LAYOUTS:
        expected = "pillarbox, omnibox or omnibox-partitioned"
        raise Unsupported(f"Inbox layout: expected {expected}; got {layout!r}")
    return get_layout(_LAYOUTS[layout])


def _prune_options(dialect: Dialect, batch: int) -> dict[str, Any]:
    if batch < 1:
        raise ConfigError(f"Inbox batch: expected a whole number of 1 or more, got {batch!r}")
    # Under REPEATABLE READ InnoDB also locks the gaps between the rows, where takes want to write.
    return {"isolation_level": "READ COMMITTED"} if is_mysql(dialect.name) else {}


def check_group(inbox: Inbox, group: object) -> str:
    """A consumer group's name."""
    is_text = isinstance(group, str) and 0 < len(group) <= MAX_LENGTH and is_writable(group)
    # omni-box reads a group without the blanks around it, so that it would be another one.
    if isinstance(group, str) and is_text and (inbox.is_own or group == group.strip()):
        return group
    raise ConfigError(
        f"Inbox {inbox.table.fullname!r}: expected group, the name of a consumer group of at most {MAX_LENGTH} "
        f"characters without zero and surrogates{'' if inbox.is_own else ', nor blanks around it'}; got {group!r}"
    )
