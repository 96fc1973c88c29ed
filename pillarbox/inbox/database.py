"""The inbox's database for what runs beside an application: transactions of our own, by a URL or through an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, cast

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from pillarbox.errors import SchemaError, StoreRefused, StoreUnavailable
from pillarbox.inbox.inbox import Inbox
from pillarbox.silence import STATEMENT_TIMEOUT, Patience, Silent, cut, cutting, let_go, wait_for
from pillarbox.sinks.sql.failures import Kind, describe, judge
from pillarbox.stores.rights import ASK_ACCOUNT, find_grant, is_account_needed
from pillarbox.stores.sql import MAX_CONFLICTS, T, Work, is_conflict
from pillarbox.stores.url import open_store
from pillarbox.targets import is_async
from pillarbox.urls import show_database

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

Where: TypeAlias = "str | sa.URL | sa.Engine | AsyncEngine"

_PAUSE: Final = 0.01


class Database(Protocol):
    """Runs functions of a connection, each in a transaction of its own.

    What the database refuses raises `StoreUnavailable` or another of our errors, caused by the driver's.
    """

    name: str

    async def run(self, work: Work[T]) -> T: ...

    async def close(self) -> None: ...


def open_database(inbox: Inbox, where: Where) -> Database:
    """The database of an inbox; an engine of the user's is not closed with it."""
    if isinstance(where, str | sa.URL):
        # Nothing takes long there, and a consumer waits for it.
        return open_store(
            where,
            layout=inbox.layout,
            table=inbox.table.name,
            schema=inbox.table.schema,
            operation_timeout=STATEMENT_TIMEOUT,
        )
    if isinstance(where, sa.Engine) or is_async(where, "AsyncEngine"):
        return _EngineDatabase(where, inbox.table)
    raise TypeError(f"Inbox {inbox.table.fullname!r}: expected the url of its database or an engine, got {where!r}")


class _Use:
    """What a transaction uses, so that it can be given up."""

    cut: Callable[[], None] | None = None
    is_given_up = False

    def give_up(self) -> None:
        self.is_given_up = True
        if self.cut is not None:
            self.cut()


class _EngineDatabase:
    def __init__(self, engine: sa.Engine | AsyncEngine, table: sa.Table) -> None:
        self.name = f"{show_database(engine.url)} ({table.fullname})"
        self._engine = engine
        self._table = table
        # SQLite knows no other than one writer after another.
        levels: dict[str, Any] = {} if engine.dialect.name == "sqlite" else {"isolation_level": "READ COMMITTED"}
        self._options = levels
        self._patience = Patience(STATEMENT_TIMEOUT)

    async def run(self, work: Work[T]) -> T:
        for conflict in range(MAX_CONFLICTS):
            try:
                return await self._transact(work)
            except (DBAPIError, PoolTimeout) as error:
                is_last = conflict == MAX_CONFLICTS - 1
                if is_last or not isinstance(error, DBAPIError) or not is_conflict(error):
                    raise await self._translate(error) from error
            except OSError as error:
                raise StoreUnavailable(f"Store {self.name}: {error}") from error
            await asyncio.sleep(_PAUSE * 2**conflict)
        raise AssertionError("unreachable")

    async def _transact(self, work: Work[T]) -> T:
        use = _Use()
        transact = self._transact_in_thread if isinstance(self._engine, sa.Engine) else self._transact_async
        if self._engine.dialect.name == "sqlite":
            return await transact(work, use)  # a file answers, or its lock has a timeout of its own
        began = time.monotonic()
        try:
            result = await wait_for(transact(work, use), use.give_up, self._patience.seconds)
        except Silent as error:
            self._patience.overran(began)
            raise StoreUnavailable(f"Store {self.name}: {error}") from error
        self._patience.answered(began)
        return result

    async def _transact_async(self, work: Work[T], use: _Use) -> T:
        connection = await cast("AsyncEngine", self._engine).connect()
        try:
            use.cut = cutting(connection)
            await connection.execution_options(**self._options)
            result = await connection.run_sync(work)
            await connection.commit()
            return result
        finally:
            await let_go(connection)

    async def _transact_in_thread(self, work: Work[T], use: _Use) -> T:
        return await asyncio.to_thread(self._transact_here, cast(sa.Engine, self._engine), work, use)

    def _transact_here(self, engine: sa.Engine, work: Work[T], use: _Use) -> T:
        with engine.connect() as connection:
            use.cut = partial(cut, connection.connection.driver_connection)
            try:
                connection.execution_options(**self._options)
                result = work(connection)
                # A thread cannot be cancelled: it may have waited for its connection until nobody waited for it.
                if use.is_given_up:
                    raise Silent("the transaction was given up before its end")
                connection.commit()
                return result
            finally:
                use.cut = None

    async def _translate(self, error: DBAPIError | PoolTimeout) -> Exception:
        text = describe(error)
        if isinstance(error, DBAPIError):
            grant = find_grant(error, await self._ask_user(error), self._table.metadata.tables.values())
            if grant is not None:
                return SchemaError(f"Store {self.name}: {text.removesuffix('.')}. Let the tables' owner run: {grant}")
        kind = {Kind.WRONG: SchemaError, Kind.BAD: StoreRefused}.get(judge(error) or Kind.DOWN, StoreUnavailable)
        return kind(f"Store {self.name}: {text}")

    async def _ask_user(self, error: DBAPIError) -> str | None:
        """Whose right is missing, by the server's word where it knows better than the url."""
        if not is_account_needed(error):
            return self._engine.url.username
        try:
            return await self._transact(lambda db: str(db.execute(ASK_ACCOUNT).scalar_one()))
        except (DBAPIError, PoolTimeout, OSError):
            return None

    async def close(self) -> None:
        """The engine is the user's."""
