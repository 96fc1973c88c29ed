"""PostgreSQL.

Direct connections use asyncpg. Behind a pooler in transaction mode, found out by itself, the store uses psycopg
without prepared statements, offers no hold, and polls: what a session sets or listens to does not stay with it there.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from pillarbox.errors import ConfigError, MissingExtra, StoreUnavailable
from pillarbox.stores import JOIN_DEADLINE, Joins, Mode
from pillarbox.stores.server import HOLD_DEADLINE, AsyncSqlStore
from pillarbox.stores.sql import T, Work, is_refused
from pillarbox.wakeup import PostgresListener, channel_name

log = logging.getLogger("pillarbox.store")

# In milliseconds; statement_timeout does not bound a hold, which is idle between its statements.
IDLE_TIMEOUT = str(int(HOLD_DEADLINE.total_seconds() * 1000) + 1000)
JOIN_TIMEOUT = str(int(JOIN_DEADLINE.total_seconds() * 1000))


class PostgresStore(AsyncSqlStore):
    """The relay's side of an outbox in PostgreSQL.

    `pooler` says whether a pooler stands between; by default the store finds out. `listen_url` is a direct connection
    for notifications when the store's own goes through a pooler.
    """

    dialect = "postgresql"
    modes: frozenset[Mode] = frozenset({"hold", "lease"})

    def __init__(
        self,
        url: sa.URL,
        *args: Any,
        pooler: bool | None = None,
        hold_behind_pooler: bool = False,
        notify: bool = True,
        listen_url: str | None = None,
        **options: Any,
    ) -> None:
        try:
            import asyncpg  # noqa: F401
        except ImportError as error:
            raise MissingExtra("PostgreSQL", "postgres") from error
        super().__init__(url, *args, **options)
        # One delivered, one loaded, one read; with keys a third would find most of its own taken by the others.
        self.in_flight = 2 if self.keeps_order else 3
        self.is_pooled = pooler
        self._hold_behind_pooler = hold_behind_pooler
        self._listen_url = sa.make_url(listen_url) if listen_url else None
        self._wants_notify = notify
        self._listener: PostgresListener | None = None
        self._connected: AsyncEngine | None = None
        self._connecting = asyncio.Lock()

    @property
    def _engine(self) -> AsyncEngine:  # type: ignore[override]
        if self._connected is None:
            raise StoreUnavailable(f"Store {self.name}: it is not open; call open() first")
        return self._connected

    async def open(self) -> None:
        await self._connect()
        await super().open()
        url = self._listen_url or (None if self.is_pooled else self.url)
        if self._wants_notify and url is not None and self._listener is None:
            self._listener = PostgresListener(
                _with_tls(url, "sslmode"), channel_name(self.tables["outbox"], self.layout)
            )
            await self._listener.start()

    async def _connect(self) -> None:
        # Several may ask at once, and the answer is waited for: one engine is enough.
        async with self._connecting:
            if self._connected is not None:
                return
            if self.is_pooled is None:
                self.is_pooled = await is_pooled(self.url, self.name)
            if self.is_pooled and not self._hold_behind_pooler:
                self.modes = frozenset({"lease"})
            self._connected = (pooled_engine if self.is_pooled else direct_engine)(self.url)

    async def _transact(self, work: Work[T], *, writes: bool) -> T:
        if self._connected is None:
            await self._connect()
        return await super()._transact(work, writes=writes)

    async def _join(self, work: Work[T], session: Joins | None) -> T:
        await self._connect()
        return await super()._join(work, session)

    def _open_joined(self) -> AsyncEngine:
        return pooled_engine(self.url) if self.is_pooled else direct_engine(self.url, JOIN_TIMEOUT, pool_size=0)

    def _open_plain(self) -> sa.Engine:
        check_psycopg("PostgreSQL with plain sessions")
        options = f"-c idle_in_transaction_session_timeout={JOIN_TIMEOUT}"
        return sa.create_engine(
            _with_tls(self.url, "sslmode").set(drivername="postgresql+psycopg"),
            isolation_level="READ COMMITTED",
            json_deserializer=orjson.loads,
            connect_args={"prepare_threshold": None} if self.is_pooled else {"options": options},
            **({"poolclass": NullPool} if self.is_pooled else {"pool_size": 0}),
        )

    async def _begin_hold(self, connection: AsyncConnection) -> None:
        if self.is_pooled:
            await connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = {IDLE_TIMEOUT}")

    async def wait(self, timeout: timedelta) -> bool:
        if self._listener is not None and self._listener.is_listening:
            return await self._listener.wait(timeout)
        await asyncio.sleep(timeout.total_seconds())
        return False

    @property
    def is_notified(self) -> bool:
        return self._listener is not None and self._listener.is_listening

    async def close(self) -> None:
        if self._listener is not None:
            listener, self._listener = self._listener, None
            await listener.stop()
        await self._close_joined()
        if self._connected is not None:
            await self._connected.dispose()
            self._connected = None


def direct_engine(url: sa.URL, idle_timeout: str = IDLE_TIMEOUT, *, pool_size: int = 10) -> AsyncEngine:
    """An engine of asyncpg; a pool of size 0 keeps as many connections as are used at once."""
    return create_async_engine(
        _with_tls(url, "ssl").set(drivername="postgresql+asyncpg"),
        isolation_level="READ COMMITTED",
        json_deserializer=orjson.loads,
        pool_size=pool_size,
        connect_args={
            "server_settings": {
                "application_name": "pillarbox",
                "idle_in_transaction_session_timeout": idle_timeout,
                "jit": "off",
            }
        },
    )


def pooled_engine(url: sa.URL) -> AsyncEngine:
    check_psycopg("PostgreSQL behind a pooler")
    # The pooler pools; a second pool here would keep its clients idle.
    return create_async_engine(
        _with_tls(url, "sslmode").set(drivername="postgresql+psycopg"),
        isolation_level="READ COMMITTED",
        json_deserializer=orjson.loads,
        poolclass=NullPool,
        connect_args={"prepare_threshold": None},
    )


def _with_tls(url: sa.URL, name: str) -> sa.URL:
    """The url with the option for TLS called as a driver calls it: asyncpg's is `ssl`, libpq's `sslmode`."""
    query = dict(url.query)
    given = [query.pop(each) for each in ("ssl", "sslmode") if each in query]
    return url.set(query={**query, name: given[0]}) if given else url


def check_psycopg(what: str) -> None:
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise MissingExtra(what, "postgres") from error


async def is_pooled(url: sa.URL, name: str) -> bool:
    """Whether a pooler answers at a URL: it gives its clients another process number than the server's."""
    import asyncpg

    dsn = _with_tls(url, "sslmode").set(drivername="postgresql").render_as_string(hide_password=False)
    try:
        connection = await asyncpg.connect(dsn, statement_cache_size=0, timeout=10)
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError) as error:
        kind = ConfigError if is_refused(getattr(error, "sqlstate", ""), None) else StoreUnavailable
        raise kind(f"Store {name}: {str(error) or type(error).__name__}") from error
    try:
        return bool(await connection.fetchval("SELECT pg_backend_pid()") != connection.get_server_pid())
    finally:
        await connection.close()
