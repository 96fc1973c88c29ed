"""MySQL and MariaDB.

Relay connections use READ COMMITTED: under the default, gap locks of one claim stop the next. Neither database has
UPDATE ... RETURNING, so rows are locked, read and then written by their number. There is no notification: relays poll.
"""

from __future__ import annotations

import asyncio
import ssl
from datetime import timedelta
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pillarbox.errors import ConfigError, MissingExtra
from pillarbox.silence import CONNECT_TIMEOUT, Lines
from pillarbox.stores import JOIN_DEADLINE, Mode
from pillarbox.stores.server import HOLD_DEADLINE, AsyncSqlStore
from pillarbox.urls import check_options, show_database

_SECONDS = int(HOLD_DEADLINE.total_seconds())
# A row with the date 0000-00-00 must be moved to where the dead are, as it is.
_ZERO_DATES = "sql_mode = REPLACE(REPLACE(@@sql_mode, 'NO_ZERO_DATE', ''), 'NO_ZERO_IN_DATE', '')"
_TLS = ("ssl", "ssl_ca", "ssl_capath", "ssl_cert", "ssl_check_hostname", "ssl_cipher", "ssl_key")
_FILES = ("read_default_file", "read_default_group", "server_public_key", "unix_socket")
# Character set and connect_timeout are ours whatever the url says; an application's url often has them.
_OPTIONS = (*_TLS, *_FILES, "charset", "client_flag", "connect_timeout", "local_infile", "sql_mode", "use_unicode")
_JOIN_SECONDS = int(JOIN_DEADLINE.total_seconds())


class MySqlStore(AsyncSqlStore):
    """The relay's side of an outbox in MySQL or MariaDB."""

    dialect = "mysql"
    modes: frozenset[Mode] = frozenset({"hold", "lease"})

    def __init__(self, url: sa.URL, *args: Any, **options: Any) -> None:
        try:
            import aiomysql  # noqa: F401
        except ImportError as error:
            raise MissingExtra("MySQL and MariaDB", "mysql") from error
        super().__init__(url, *args, **options)
        check_options(url, _OPTIONS, driver="mysql+pymysql", what="Store")
        self._tls = _read_tls(url)
        self._engine = self._watch(_make_engine(url, _SECONDS, tls=self._tls))

    def _open_joined(self) -> AsyncEngine:
        return _make_engine(self.url, _JOIN_SECONDS, tls=self._tls, pool_size=0)

    def _open_plain(self) -> sa.Engine:
        engine = sa.create_engine(
            _without_tls(self.url).set(drivername="mysql+pymysql"),
            **_engine_options(_JOIN_SECONDS, tls=self._tls, pool_size=0),
        )
        Lines(engine)
        return engine

    async def wait(self, timeout: timedelta) -> bool:
        await asyncio.sleep(timeout.total_seconds())
        return False


def _read_tls(url: sa.URL) -> ssl.SSLContext | None:
    """What the url says of TLS, as the one thing that both drivers take."""
    given = {name: str(url.query[name]) for name in _TLS if name in url.query}
    if not given or given == {"ssl": "false"}:
        return None
    for name in given.keys() & {"ssl", "ssl_check_hostname"}:
        if given[name] not in ("true", "false"):
            raise ConfigError(f"Store {show_database(url)!r} {name}: expected true or false, got {given[name]!r}")
    try:
        context = ssl.create_default_context(cafile=given.get("ssl_ca"), capath=given.get("ssl_capath"))
        context.check_hostname = given.get("ssl_check_hostname") != "false"
        if "ssl_cert" in given:
            context.load_cert_chain(given["ssl_cert"], given.get("ssl_key"))
        if "ssl_cipher" in given:
            context.set_ciphers(given["ssl_cipher"])
    except (OSError, TypeError) as error:
        raise ConfigError(
            f"Store {show_database(url)!r}: cannot use its {', '.join(given)}: {type(error).__name__}: {error}"
        ) from None
    return context


def _without_tls(url: sa.URL) -> sa.URL:
    return url.set(query={name: value for name, value in url.query.items() if name not in _TLS})


def _make_engine(url: sa.URL, seconds: int, *, tls: ssl.SSLContext | None, pool_size: int = 10) -> AsyncEngine:
    return create_async_engine(
        _without_tls(url).set(drivername="mysql+aiomysql"), **_engine_options(seconds, tls=tls, pool_size=pool_size)
    )


def _engine_options(seconds: int, *, tls: ssl.SSLContext | None, pool_size: int) -> dict[str, Any]:
    return {
        "isolation_level": "READ COMMITTED",
        "json_deserializer": orjson.loads,
        "pool_size": pool_size,
        # A transaction idle for this long belongs to a lost host; a connection in the pool must not get that old.
        "connect_args": {
            "charset": "utf8mb4",
            "init_command": f"SET SESSION wait_timeout = {seconds + 1}, {_ZERO_DATES}",
            "connect_timeout": CONNECT_TIMEOUT.total_seconds(),
            "program_name": "pillarbox",
            **({"ssl": tls} if tls else {}),
        },
        "pool_recycle": seconds,
    }
