"""What the stores on database servers share: an asynchronous engine, and holding rows by locks."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from pillarbox.errors import StoreUnavailable, Unsupported
from pillarbox.event import Claim, Outcome
from pillarbox.stores import Effect, Joins, Mode, Settlement
from pillarbox.stores.sql import SqlStore, T, Work, translate
from pillarbox.stores.transitions import Taken

log = logging.getLogger("pillarbox.store")

HOLD_DEADLINE = timedelta(seconds=5)
MAX_THREADS = 1000


class HoldBatch:
    """Claims held by row locks in an open transaction; whoever dies lets go."""

    mode: Mode = "hold"

    def __init__(self, store: AsyncSqlStore, connection: AsyncConnection, taken: Taken) -> None:
        self._store = store
        self._connection: AsyncConnection | None = connection
        self.claims: Sequence[Claim] = taken.claims
        self.is_full = taken.is_full
        self.has_tried = taken.has_tried

    async def settle(
        self, outcomes: Sequence[Outcome], *, park: bool = True, effect: Effect | None = None
    ) -> Settlement:
        connection, self._connection = self._connection, None
        if connection is None:
            raise StoreUnavailable(f"Store {self._store.name}: this batch was settled or abandoned before")

        def write(db: sa.Connection) -> Settlement:
            if effect is not None:
                effect(db)
            return self._store.transitions.settle(db, self.claims, outcomes, mode="hold", park=park)

        try:
            settlement = await connection.run_sync(write)
            await connection.commit()
        except DBAPIError as error:
            raise translate(error, self._store) from error
        except OSError as error:
            raise StoreUnavailable(f"Store {self._store.name}: {error}") from error
        finally:
            await let_go(connection)
        return settlement

    async def settle_one(self, claim: Claim, effect: Effect, *, session: Joins | None = None) -> bool:
        raise Unsupported(f"Store {self._store.name}: held claims are settled together; claim by lease")

    async def renew(self, lease: timedelta) -> Sequence[Claim]:
        return []

    async def abandon(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await let_go(connection)


async def let_go(connection: AsyncConnection) -> None:
    """Roll back and return a connection, also when the caller is being cancelled or the server is gone."""
    closing = asyncio.ensure_future(connection.close())
    try:
        await asyncio.shield(closing)
    except (DBAPIError, OSError) as error:
        log.debug("A connection was lost while it was returned: %s", error)
        with suppress(InvalidRequestError):  # it is closed already
            await connection.invalidate()
    except asyncio.CancelledError:
        await asyncio.wait([closing])
        raise


class AsyncSqlStore(SqlStore):
    """A store on a database server, reached through an asynchronous driver."""

    joins: frozenset[Joins] = frozenset({"sync", "async"})
    _engine: AsyncEngine
    _joined: AsyncEngine | None = None
    _plain: sa.Engine | None = None
    _threads: ThreadPoolExecutor | None = None

    @abstractmethod
    def _open_joined(self) -> AsyncEngine:
        """An engine for work of others: its connections may be idle in a transaction for long."""

    @abstractmethod
    def _open_plain(self) -> sa.Engine:
        """The same with a plain driver."""

    # Begun here: a session on a connection without a transaction would begin, and commit, one of its own.

    async def _join(self, work: Work[T], session: Joins | None) -> T:
        if session == "sync":
            return await self._join_in_thread(work)
        if self._joined is None:
            self._joined = self._open_joined()
        async with self._joined.begin() as connection:
            return await connection.run_sync(work)

    async def _join_in_thread(self, work: Work[T]) -> T:
        if self._plain is None:
            self._plain = self._open_plain()
            self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="pillarbox-join")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._transact_here, self._plain, work)

    def _transact_here(self, engine: sa.Engine, work: Work[T]) -> T:
        with engine.connect() as connection:
            try:
                with connection.begin():
                    return work(connection)
            finally:
                if self._plain is not engine and not connection.invalidated:
                    # The store was closed meanwhile: a pool that nobody has any more would keep it open.
                    connection.detach()

    async def _transact(self, work: Work[T], *, writes: bool) -> T:
        async with self._engine.connect() as connection:
            result = await connection.run_sync(work)
            await connection.commit()
            return result

    async def _hold(self, limit: int) -> Any:
        try:
            connection = await self._engine.connect()
        except DBAPIError as error:
            raise translate(error, self) from error
        except OSError as error:
            raise StoreUnavailable(f"Store {self.name}: {error}") from error
        try:
            await self._begin_hold(connection)
            taken = await connection.run_sync(lambda db: self.transitions.claim(db, limit, "hold", HOLD_DEADLINE))
        except DBAPIError as error:
            await let_go(connection)
            raise translate(error, self) from error
        except BaseException:
            await let_go(connection)
            raise
        batch = HoldBatch(self, connection, taken)
        if not taken.claims:
            await batch.abandon()
        return batch, taken.blocked

    async def _begin_hold(self, connection: AsyncConnection) -> None:
        """Bound how long the database waits for a host that vanished."""

    async def close(self) -> None:
        await self._close_joined()
        await self._engine.dispose()

    async def _close_joined(self) -> None:
        joined, self._joined = self._joined, None
        if joined is not None:
            await joined.dispose()
        plain, threads = self._plain, self._threads
        self._plain = self._threads = None
        if plain is not None and threads is not None:
            # A function that still runs after its timeout ends on its own.
            threads.shutdown(wait=False)
            plain.dispose()
