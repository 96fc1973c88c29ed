"""PostgreSQL.

Direct connections use asyncpg. Behind a pooler in transaction mode, found out by itself, the store uses psycopg
without prepared statements, offers no hold, and polls: what a session sets or listens to does not stay with it there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from pillarbox.errors import ConfigError, MissingExtra, StoreUnavailable
from pillarbox.silence import CONNECT_TIMEOUT, Lines
from pillarbox.stores import JOIN_DEADLINE, Joins, Mode
from pillarbox.stores.server import HOLD_DEADLINE, AsyncSqlStore
from pillarbox.stores.sql import T, Work, describe_fault, is_refused
from pillarbox.urls import parse_database_url
from pillarbox.wakeup import PostgresListener, channel_name

log = logging.getLogger("pillarbox.store")

# In milliseconds; statement_timeout does not bound a hold, which is idle between its statements.
IDLE_TIMEOUT = str(int(HOLD_DEADLINE.total_seconds() * 1000) + 1000)
JOIN_TIMEOUT = str(int(JOIN_DEADLINE.total_seconds() * 1000))
APPLICATION_NAME = "pillarbox"
# What a server, or a pooler, answers to an option of the url: unknown, with a wrong value, not to be set.
_BAD_OPTIONS = ("42704", "22023", "55P02", "08P01")

# A statement is planned once for each connection, perhaps while the table is nearly empty, and that plan stays in use
# when the table is full. The relay's statements all have an index to go by: nothing else is to be chosen.
BY_INDEX = {f"enable_{way}": "off" for way in ("seqscan", "bitmapscan", "hashjoin", "mergejoin")}
# The connections of handlers carry statements that are not ours. These are planned freely, but each time anew.
ANEW = {"plan_cache_mode": "force_custom_plan"}


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
        expected = "expected a url like postgresql://…"
        self._listen_url = (
            parse_database_url(listen_url, what="[store] listen_url", expected=expected) if listen_url else None
        )
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
            self._listener = PostgresListener(_for_asyncpg(url), channel_name(self.tables["outbox"], self.layout))
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
            self._connected = self._watch((pooled_engine if self.is_pooled else direct_engine)(self.url))

    async def _transact(self, work: Work[T], *, writes: bool, is_long: bool) -> T:
        if self._connected is None:
            await self._connect()
        return await super()._transact(work, writes=writes, is_long=is_long)

    async def _join(self, work: Work[T], session: Joins | None) -> T:
        await self._connect()
        return await super()._join(work, session)

    def _open_joined(self) -> AsyncEngine:
        if self.is_pooled:
            return pooled_engine(self.url)
        return direct_engine(self.url, JOIN_TIMEOUT, pool_size=0, settings=ANEW)

    def _open_plain(self) -> sa.Engine:
        check_psycopg("PostgreSQL with plain sessions")
        settings = {"idle_in_transaction_session_timeout": JOIN_TIMEOUT, **ANEW}
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        engine = sa.create_engine(
            _with_tls(self.url).set(drivername="postgresql+psycopg"),
            isolation_level="READ COMMITTED",
            json_deserializer=orjson.loads,
            connect_args=_psycopg_args(self.url)
            | ({"prepare_threshold": None} if self.is_pooled else {"options": options}),
            **({"poolclass": NullPool} if self.is_pooled else {"pool_size": 0}),
        )
        Lines(engine)
        return engine

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
        engine, self._connected = self._connected, None
        if engine is not None:
            await self._dispose(engine)


def direct_engine(
    url: sa.URL, idle_timeout: str = IDLE_TIMEOUT, *, pool_size: int = 10, settings: Mapping[str, str] = BY_INDEX
) -> AsyncEngine:
    """An engine of asyncpg; a pool of size 0 keeps as many connections as are used at once."""
    # asyncpg takes libpq's options, and settings of the server, from a url only.
    query = dict(_for_asyncpg(url).query)
    hosts: dict[str, Any] = {name: query.pop(name) for name in ("host", "port") if name in query}
    return create_async_engine(
        url.set(drivername="postgresql+asyncpg", query=hosts),
        isolation_level="READ COMMITTED",
        json_deserializer=orjson.loads,
        pool_size=pool_size,
        connect_args={
            "dsn": sa.URL.create("postgresql", query=query).render_as_string(),
            "timeout": CONNECT_TIMEOUT.total_seconds(),
            "server_settings": {
                **({} if "application_name" in query else {"application_name": APPLICATION_NAME}),
                "idle_in_transaction_session_timeout": idle_timeout,
                "jit": "off",
                **settings,
            },
        },
    )


def pooled_engine(url: sa.URL) -> AsyncEngine:
    check_psycopg("PostgreSQL behind a pooler")
    # The pooler pools; a second pool here would keep its clients idle.
    return create_async_engine(
        _with_tls(url).set(drivername="postgresql+psycopg"),
        isolation_level="READ COMMITTED",
        json_deserializer=orjson.loads,
        poolclass=NullPool,
        connect_args=_psycopg_args(url) | {"prepare_threshold": None},
    )


def _psycopg_args(url: sa.URL) -> dict[str, Any]:
    given = {"application_name": APPLICATION_NAME, "connect_timeout": int(CONNECT_TIMEOUT.total_seconds())}
    return {name: value for name, value in given.items() if name not in url.query}


def _for_asyncpg(url: sa.URL) -> sa.URL:
    """The url for asyncpg, which takes each option that it does not know for a setting of the server."""
    return _with_tls(url).difference_update_query(["connect_timeout"])


def _with_tls(url: sa.URL) -> sa.URL:
    """The url with the option for TLS called as libpq calls it; SQLAlchemy's users write `ssl` for asyncpg."""
    query = dict(url.query)
    given = [query.pop(each) for each in ("ssl", "sslmode") if each in query]
    return url.set(query={**query, "sslmode": given[0]}) if given else url


def check_psycopg(what: str) -> None:
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise MissingExtra(what, "postgres") from error


async def is_pooled(url: sa.URL, name: str) -> bool:
    """Whether a pooler answers at a URL: it gives its clients another process number than the server's."""
    import asyncpg

    dsn = _for_asyncpg(url).set(drivername="postgresql").render_as_string(hide_password=False)
    seconds = CONNECT_TIMEOUT.total_seconds()
    connection = None
    try:
        connection = await asyncpg.connect(dsn, statement_cache_size=0, timeout=seconds)
        async with asyncio.timeout(seconds):
            return bool(await connection.fetchval("SELECT pg_backend_pid()") != connection.get_server_pid())
    except Exception as error:  # whatever asyncpg raises, also of itself: nothing of ours runs here
        state = getattr(error, "sqlstate", "") or ""
        kind = ConfigError if is_refused(state, None) or state in _BAD_OPTIONS else StoreUnavailable
        raise kind(f"Store {name}: {describe_fault(error)}") from error
    finally:
        if connection is not None:
            connection.terminate()
