"""The inbox's database for what runs beside an application: transactions of our own, by a URL or through an engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from pillarbox.errors import SchemaError, StoreUnavailable
from pillarbox.inbox.inbox import Inbox
from pillarbox.sinks.sql.failures import Kind, describe, judge
from pillarbox.stores.sql import MAX_CONFLICTS, T, Work, is_conflict
from pillarbox.stores.url import open_store
from pillarbox.targets import is_async

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
        return open_store(where, layout=inbox.layout, table=inbox.table.name, schema=inbox.table.schema)
    if isinstance(where, sa.Engine) or is_async(where, "AsyncEngine"):
        return _EngineDatabase(where, inbox.table.fullname)
    raise TypeError(f"Inbox {inbox.table.fullname!r}: expected the url of its database or an engine, got {where!r}")


class _EngineDatabase:
    def __init__(self, engine: sa.Engine | AsyncEngine, table: str) -> None:
        url = engine.url.set(query={}).render_as_string(hide_password=True)
        self.name = f"{url} ({table})"
        self._engine = engine
        # SQLite knows no other than one writer after another.
        levels: dict[str, Any] = {} if engine.dialect.name == "sqlite" else {"isolation_level": "READ COMMITTED"}
        self._options = levels

    async def run(self, work: Work[T]) -> T:
        for conflict in range(MAX_CONFLICTS):
            try:
                return await self._transact(work)
            except (DBAPIError, PoolTimeout) as error:
                is_last = conflict == MAX_CONFLICTS - 1
                if is_last or not isinstance(error, DBAPIError) or not is_conflict(error):
                    raise self._translate(error) from error
            except OSError as error:
                raise StoreUnavailable(f"Store {self.name}: {error}") from error
            await asyncio.sleep(_PAUSE * 2**conflict)
        raise AssertionError("unreachable")

    async def _transact(self, work: Work[T]) -> T:
        if isinstance(self._engine, sa.Engine):
            return await asyncio.to_thread(self._transact_here, self._engine, work)
        async with self._engine.connect() as connection:
            await connection.execution_options(**self._options)
            result = await connection.run_sync(work)
            await connection.commit()
            return result

    def _transact_here(self, engine: sa.Engine, work: Work[T]) -> T:
        with engine.connect() as connection:
            connection.execution_options(**self._options)
            result = work(connection)
            connection.commit()
            return result

    def _translate(self, error: DBAPIError | PoolTimeout) -> Exception:
        kind = SchemaError if judge(error) is Kind.WRONG else StoreUnavailable
        return kind(f"Store {self.name}: {describe(error)}")

    async def close(self) -> None:
        """The engine is the user's."""
