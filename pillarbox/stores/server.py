"""What the stores on database servers share: an asynchronous engine, and holding rows by locks."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from pillarbox.errors import StoreRefused, StoreUnavailable, Unsupported
from pillarbox.event import DELIVERED, Claim, Delivered, Outcome
from pillarbox.silence import (
    CONNECT_TIMEOUT,
    Lines,
    Patience,
    Silent,
    cut,
    cutting,
    let_go,
    wait_for,
    wait_patiently,
)
from pillarbox.stores import Effect, Joins, Mode, Settlement
from pillarbox.stores.refusals import Settle, settle_apart
from pillarbox.stores.sql import SqlStore, T, Work, driver_fault, translate
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

        settle = partial(self._store.transitions.settle, mode="hold", park=park)

        def write(db: sa.Connection) -> Settlement:
            if effect is not None:
                effect(db)
            elif any(type(outcome) is not Delivered for outcome in outcomes):
                # A refusal would end the transaction, and with it the hold on what was delivered.
                return settle_apart(db, settle, self.claims, outcomes)
            return settle(db, self.claims, outcomes)

        async def write_and_end() -> Settlement:
            try:
                settlement = await connection.run_sync(write)
                await connection.commit()
                return settlement
            finally:
                await let_go(connection)

        try:
            return await self._store.answer(connection, write_and_end())
        except StoreRefused:
            is_delivered = effect is None and all(type(outcome) is Delivered for outcome in outcomes)
            if not is_delivered or self._store.layout.side is not None:
                raise
        return await self._store.run_soon(lambda db: self._settle_free(db, settle))

    def _settle_free(self, db: sa.Connection, settle: Settle) -> Settlement:
        """Settle what was delivered and let go since: those that nobody has claimed meanwhile, the culprit apart."""
        free = self._store.transitions.lock_free(db, self.claims)
        claims = [claim for claim in self.claims if claim.row in free]
        settlement = settle_apart(db, settle, claims, [DELIVERED] * len(claims))
        return settlement + Settlement(lost=len(self.claims) - len(claims))

    async def settle_one(self, claim: Claim, effect: Effect, *, session: Joins | None = None) -> bool:
        raise Unsupported(f"Store {self._store.name}: held claims are settled together; claim by lease")

    async def renew(self, lease: timedelta) -> Sequence[Claim]:
        return []

    async def abandon(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                await self._store.answer(connection, let_go(connection))
            except StoreUnavailable as error:
                log.debug("A held batch could not be given back, the server ends it: %s", error)


class AsyncSqlStore(SqlStore):
    """A store on a database server, reached through an asynchronous driver."""

    joins: frozenset[Joins] = frozenset({"sync", "async"})
    _engine: AsyncEngine
    _joined: AsyncEngine | None = None
    _plain: sa.Engine | None = None
    _threads: ThreadPoolExecutor | None = None

    def __init__(self, url: sa.URL, *args: Any, **options: Any) -> None:
        super().__init__(url, *args, **options)
        self._patience = {False: Patience(self.statement_timeout), True: Patience(self.operation_timeout)}
        self._lines: dict[sa.Engine, Lines] = {}

    @abstractmethod
    def _open_joined(self) -> AsyncEngine:
        """An engine for work of others: its connections may be idle in a transaction for long."""

    @abstractmethod
    def _open_plain(self) -> sa.Engine:
        """The same with a plain driver."""

    def _watch(self, engine: AsyncEngine) -> AsyncEngine:
        """Know the connections of an engine, so that they can be cut."""
        self._lines[engine.sync_engine] = Lines(engine.sync_engine)
        return engine

    async def _connect_to(self, engine: AsyncEngine) -> AsyncConnection:
        """A connection of the engine, soon."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds()):
                return await engine.connect()
        except TimeoutError as error:
            seconds = CONNECT_TIMEOUT.total_seconds()
            raise StoreUnavailable(f"Store {self.name}: no connection within {seconds:g} s") from error

    async def answer(self, connection: AsyncConnection, work: Coroutine[Any, Any, T], *, is_long: bool = False) -> T:
        """Await work on a connection, as long as that is right for such work, with its errors in our words."""
        try:
            return await self._bound(connection, work, is_long=is_long)
        except DBAPIError as error:
            raise translate(error, self, account=await self._ask_account(error)) from error
        except Exception as error:
            fault = driver_fault(error, self)
            if fault is None:
                raise
            raise fault from error

    async def _bound(self, connection: AsyncConnection, work: Coroutine[Any, Any, T], *, is_long: bool) -> T:
        began, patience = time.monotonic(), self._patience[is_long]
        engine = connection.sync_engine
        try:
            result = await wait_for(work, cutting(connection), patience.seconds)
        except Silent as error:
            self._lines[engine].cut_idle()
            patience.overran(began)
            raise StoreUnavailable(f"Store {self.name}: {error}") from error
        patience.answered(began)
        return result

    # Begun here: a session on a connection without a transaction would begin, and commit, one of its own.

    async def _join(self, work: Work[T], session: Joins | None) -> T:
        if session == "sync":
            return await self._join_in_thread(work)
        if self._joined is None:
            self._joined = self._watch(self._open_joined())
        connection = await self._connect_to(self._joined)

        async def join() -> T:
            try:
                async with connection.begin():
                    return await connection.run_sync(work)
            finally:
                await let_go(connection)

        return await wait_patiently(join(), cutting(connection))

    async def _join_in_thread(self, work: Work[T]) -> T:
        if self._plain is None:
            self._plain = self._open_plain()
            self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="pillarbox-join")
        used: list[Any] = []
        running = asyncio.get_running_loop().run_in_executor(
            self._threads, self._transact_here, self._plain, work, used
        )
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            # Nobody waits any more: a thread that waits for the database must not do so for ever.
            for driver_connection in used:
                cut(driver_connection)
            raise

    def _transact_here(self, engine: sa.Engine, work: Work[T], used: list[Any]) -> T:
        with engine.connect() as connection:
            used.append(connection.connection.driver_connection)
            try:
                with connection.begin():
                    return work(connection)
            finally:
                used.clear()
                if self._plain is not engine and not connection.invalidated:
                    # The store was closed meanwhile: a pool that nobody has any more would keep it open.
                    connection.detach()

    async def _transact(self, work: Work[T], *, writes: bool, is_long: bool) -> T:
        connection = await self._connect_to(self._engine)

        async def transact() -> T:
            try:
                result = await connection.run_sync(work)
                await connection.commit()
                return result
            finally:
                await let_go(connection)

        return await self._bound(connection, transact(), is_long=is_long)

    async def _hold(self, limit: int) -> Any:
        connection = await self._run_again(lambda: self._connect_to(self._engine))

        async def claim() -> Taken:
            await self._begin_hold(connection)
            return await connection.run_sync(lambda db: self.transitions.claim(db, limit, "hold", HOLD_DEADLINE))

        try:
            taken = await self.answer(connection, claim())
        except BaseException:
            # Also when we are cancelled just as it is done: then nobody else has the connection.
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
        await self._dispose(self._engine)

    async def _dispose(self, engine: AsyncEngine) -> None:
        await self._lines[engine.sync_engine].dispose(engine)

    async def _close_joined(self) -> None:
        joined, self._joined = self._joined, None
        if joined is not None:
            await self._dispose(joined)
        plain, threads = self._plain, self._threads
        self._plain = self._threads = None
        if plain is not None and threads is not None:
            # A function that still runs after its timeout ends on its own.
            threads.shutdown(wait=False)
            plain.dispose()
