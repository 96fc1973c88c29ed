"""A database by its URL: which driver, which of the query's names are the driver's, and TLS.

A server is reached through an asynchronous driver. A SQLite file is written in a thread of its own, since the standard
library's driver blocks; it takes the write lock first (`BEGIN IMMEDIATE`) and waits for it in small steps, so that a
delivery that is cancelled ends.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool, StaticPool

from pillarbox.errors import ConfigError, MissingExtra
from pillarbox.silence import Lines, cutting, let_go, wait_patiently
from pillarbox.sinks.threads import finish
from pillarbox.sinks.tls import TLS_OPTIONS, check_tls_files, make_tls_context
from pillarbox.sinks.url import SinkUrl
from pillarbox.urls import parse_database_url
from pillarbox.values import Read, one_of, read_switch, read_text

T = TypeVar("T")
Work = Callable[[sa.Connection], T]

GLANCE: Final = 0.05
_SSL_MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_TLS: Final[dict[str, Read]] = {"tls": read_switch, **TLS_OPTIONS}
DRIVER_OPTIONS: Final[dict[str, dict[str, Read]]] = {
    "postgresql": {
        **_TLS,
        "pooler": read_switch,
        "sslmode": one_of(*_SSL_MODES),
        "sslrootcert": read_text,
        "sslcert": read_text,
        "sslkey": read_text,
        "application_name": read_text,
    },
    "mysql": {**_TLS, "ssl_ca": read_text, "ssl_cert": read_text, "ssl_key": read_text, "unix_socket": read_text},
    "sqlite": {},
}
"""What the query of a URL may say of the connection, beside the sink's own options."""

# Our names for TLS files, and the drivers'.
_FILES: Final = {
    "tls_ca": "tls_ca",
    "tls_certificate": "tls_certificate",
    "tls_key": "tls_key",
    "sslrootcert": "tls_ca",
    "sslcert": "tls_certificate",
    "sslkey": "tls_key",
    "ssl_ca": "tls_ca",
    "ssl_cert": "tls_certificate",
    "ssl_key": "tls_key",
}


class Runner(Protocol):
    """Runs functions of a connection, each in a transaction of its own."""

    @property
    def dialect(self) -> sa.Dialect: ...

    async def run(self, work: Work[T]) -> T:
        """Run `work` and commit; what it raises, or a cancellation, rolls back."""

    async def close(self) -> None: ...


def backend_of(scheme: str) -> str:
    return {"mariadb": "mysql"}.get(scheme, scheme)


def open_runner(url: SinkUrl, options: dict[str, Any], *, timeout: timedelta, has_statements: bool) -> Runner:
    """Make the runner for a URL; nothing is connected yet."""
    expected = f"expected {url.scheme}://user:password@host:port/database"
    parsed = parse_database_url(url.text, what=f"Sink {url.name!r}", expected=expected).set(query={})
    backend = backend_of(url.scheme)
    if backend == "sqlite":
        if not parsed.database or parsed.database == ":memory:" or parsed.host:
            raise ConfigError(f"Sink {url.name!r}: expected the path of a SQLite file, e.g. sqlite:///shop.db")
        return SqliteFile(parsed.database, creates=bool(options.get("create")), timeout=timeout)
    if not parsed.database:
        raise ConfigError(f"Sink {url.name!r}: expected the name of a database after the server")
    tls = _Tls(options, url.name)
    if backend == "mysql":
        engine = _make_mysql(parsed, options, tls)
    elif has_statements or options.get("pooler"):
        engine = _make_psycopg(parsed, options, tls)
    else:
        engine = _make_asyncpg(parsed, options, tls)
    return ServerRunner(engine, timeout=timeout, owns_engine=True)


class _Tls:
    """What was said of TLS, in libpq's words: `mode` is None when nothing was."""

    def __init__(self, options: dict[str, Any], sink: str) -> None:
        self._sink = sink
        self.files: dict[str, str] = {}
        for given, name in _FILES.items():
            if given in options:
                if name in self.files:
                    raise ConfigError(f"Sink {sink!r} {given}: is given as {name} as well; give it once")
                self.files[name] = options[given]
        self.mode: str | None = options.get("sslmode")
        own = [name for name in ("tls", "tls_verify") if name in options]
        if self.mode is not None and own:
            raise ConfigError(f"Sink {sink!r} {own[0]}: sslmode says it already; give one of them")
        if self.mode is None and (own or self.files):
            is_off = options.get("tls") is False
            self.mode = "disable" if is_off else "require" if options.get("tls_verify") is False else "verify-full"
        if self.mode == "disable" and (self.files or "tls_verify" in options):
            raise ConfigError(f"Sink {sink!r}: TLS is off; leave out its other options")
        check_tls_files(self.files, sink=sink)

    def context(self) -> ssl.SSLContext | bool | None:
        if self.mode in (None, "prefer", "allow"):
            return None
        if self.mode == "disable":
            return False
        context = make_tls_context({**self.files, "tls_verify": self.mode != "require"}, sink=self._sink)
        if self.mode == "verify-ca":
            context.check_hostname = False
        return context

    def libpq(self) -> dict[str, str]:
        if self.mode is None:
            return {}
        names = {"tls_ca": "sslrootcert", "tls_certificate": "sslcert", "tls_key": "sslkey"}
        found = {"sslmode": self.mode, **{names[name]: value for name, value in self.files.items()}}
        if self.mode == "verify-full":
            found.setdefault("sslrootcert", "system")
        return found


def _make_asyncpg(url: sa.URL, options: dict[str, Any], tls: _Tls) -> AsyncEngine:
    try:
        import asyncpg  # noqa: F401
    except ImportError as error:
        raise MissingExtra("PostgreSQL", "postgres") from error
    context = tls.context()
    settings = {"application_name": options.get("application_name", "pillarbox"), "jit": "off"}
    return create_async_engine(
        url.set(drivername="postgresql+asyncpg"),
        isolation_level="READ COMMITTED",
        connect_args={"server_settings": settings, **({} if context is None else {"ssl": context})},
    )


def _make_psycopg(url: sa.URL, options: dict[str, Any], tls: _Tls) -> AsyncEngine:
    # Statements with a text for a time or a number are understood by psycopg alone: asyncpg refuses to send them.
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise MissingExtra("PostgreSQL", "postgres") from error
    is_pooled = bool(options.get("pooler"))
    pooling: dict[str, Any] = {"poolclass": NullPool} if is_pooled else {}
    more = {"prepare_threshold": None} if is_pooled else {}
    return create_async_engine(
        url.set(drivername="postgresql+psycopg"),
        isolation_level="READ COMMITTED",
        connect_args={"application_name": options.get("application_name", "pillarbox"), **tls.libpq(), **more},
        **pooling,
    )


def _make_mysql(url: sa.URL, options: dict[str, Any], tls: _Tls) -> AsyncEngine:
    try:
        import aiomysql  # noqa: F401
    except ImportError as error:
        raise MissingExtra("MySQL and MariaDB", "mysql") from error
    # A value that does not fit is an error, and instants are UTC, whatever the server is set to.
    session = "SET SESSION time_zone = '+00:00', sql_mode = CONCAT(@@sql_mode, ',STRICT_TRANS_TABLES')"
    arguments: dict[str, Any] = {"init_command": session, "charset": "utf8mb4"}
    if "unix_socket" in options:
        arguments["unix_socket"] = options["unix_socket"]
    context = tls.context()
    if context:
        arguments["ssl"] = context
    return create_async_engine(
        url.set(drivername="mysql+aiomysql"),
        isolation_level="READ COMMITTED",
        connect_args=arguments,
        pool_recycle=1800,
    )


def _escape_bytes(connection: Any, record: Any, proxy: Any) -> None:
    """Write bytes as hexadecimal: aiomysql calls a function for them that current releases of PyMySQL have not."""
    if _escape_bytes in record.info:
        return
    record.info[_escape_bytes] = True
    driver = connection.driver_connection
    escape = driver.escape
    driver.escape = lambda value: f"_binary X'{value.hex()}'" if isinstance(value, bytes) else escape(value)


class ServerRunner:
    """A database server; a transaction that takes longer than `timeout` raises `TimeoutError`.

    Its connection is given up then, also one that is silent, and with it those in the pool.
    """

    def __init__(self, engine: AsyncEngine, *, timeout: timedelta, owns_engine: bool) -> None:
        self._engine = engine
        self._timeout = timeout.total_seconds()
        pooled = engine.sync_engine
        # The connections of an engine that is not ours are cut only while we use them.
        self._lines = Lines(pooled) if owns_engine else None
        if pooled.driver == "aiomysql" and not sa.event.contains(pooled, "checkout", _escape_bytes):
            # At each checkout, as an engine of the user's may have connections already.
            sa.event.listen(pooled, "checkout", _escape_bytes)

    @property
    def dialect(self) -> sa.Dialect:
        return self._engine.dialect

    async def run(self, work: Work[T]) -> T:
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                connection = await self._engine.connect()
                return await wait_patiently(_transact(connection, work), cutting(connection))
        except TimeoutError:
            if not limit.expired():
                raise
            if self._lines is not None:
                self._lines.cut_idle()
            raise TimeoutError(f"no answer within {self._timeout:g} s") from None

    async def close(self) -> None:
        if self._lines is not None:
            await self._lines.dispose(self._engine)


async def _transact(connection: AsyncConnection, work: Work[T]) -> T:
    try:
        result = await connection.run_sync(work)
        await connection.commit()
        return result
    finally:
        await let_go(connection)


class Stopped(Exception):
    """The delivery was cancelled before its transaction committed."""


class SqliteFile:
    """One file, written by one thread; who waits longer than `timeout` for the write lock gets `TimeoutError`."""

    def __init__(self, path: str, *, creates: bool, timeout: timedelta) -> None:
        self._path = path
        self._creates = creates
        self._timeout = timeout.total_seconds()
        self._thread: ThreadPoolExecutor | None = None
        self._file: tuple[int, int] | None = None
        self._engine = sa.create_engine(
            sa.URL.create("sqlite+pysqlite", database=path),
            poolclass=StaticPool,
            connect_args={"check_same_thread": False, "timeout": GLANCE},
        )

        @sa.event.listens_for(self._engine, "connect")
        def prepare(connection: Any, record: Any) -> None:
            connection.isolation_level = None  # the driver begins nothing by itself
            connection.execute("PRAGMA foreign_keys = ON")

    @property
    def dialect(self) -> sa.Dialect:
        return self._engine.dialect

    async def run(self, work: Work[T]) -> T:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="pillarbox-sql-sink")
        stop = threading.Event()
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._run_here, work, stop)
        return await finish(running, stop.set)

    def _run_here(self, work: Work[T], stop: threading.Event) -> T:
        self._look_at_file()
        with self._engine.connect() as connection:
            self._patiently(connection, "BEGIN IMMEDIATE", stop)
            result = work(connection)
            # Readers of a file without WAL can hold up a commit.
            self._patiently(connection, "COMMIT", stop)
            return result

    def _look_at_file(self) -> None:
        """Let go of a file that is no longer the one at that path: what is written there would be lost."""
        try:
            found = os.stat(self._path)
            file = (found.st_dev, found.st_ino)
        except FileNotFoundError:
            self._engine.dispose()
            if not self._creates:
                raise FileNotFoundError(f"there is no file {self._path!r}") from None
            return
        if self._file not in (None, file):
            self._engine.dispose()
        self._file = file

    def _patiently(self, connection: sa.Connection, statement: str, stop: threading.Event) -> None:
        deadline = time.monotonic() + self._timeout
        while True:
            if stop.is_set():
                raise Stopped
            try:
                connection.exec_driver_sql(statement)
                return
            except sa.exc.OperationalError as error:
                is_busy = getattr(error.orig, "sqlite_errorname", "").startswith("SQLITE_BUSY")
                if not is_busy:
                    raise
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the file was locked by another for {self._timeout:g} s") from error

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.get_running_loop().run_in_executor(thread, self._engine.dispose)
            thread.shutdown()
