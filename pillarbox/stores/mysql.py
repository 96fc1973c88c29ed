"""MySQL and MariaDB.

Relay connections use READ COMMITTED: under the default, gap locks of one claim stop the next. Neither database has
UPDATE ... RETURNING, so rows are locked, read and then written by their number. There is no notification: relays poll.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pillarbox.errors import MissingExtra
from pillarbox.stores import JOIN_DEADLINE, Mode
from pillarbox.stores.server import HOLD_DEADLINE, AsyncSqlStore

_SECONDS = int(HOLD_DEADLINE.total_seconds())
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
        self._engine = _make_engine(url, _SECONDS)

    def _open_joined(self) -> AsyncEngine:
        return _make_engine(self.url, _JOIN_SECONDS, pool_size=0)

    def _open_plain(self) -> sa.Engine:
        return sa.create_engine(self.url.set(drivername="mysql+pymysql"), **_engine_options(_JOIN_SECONDS, pool_size=0))

    async def wait(self, timeout: timedelta) -> bool:
        await asyncio.sleep(timeout.total_seconds())
        return False


def _make_engine(url: sa.URL, seconds: int, *, pool_size: int = 10) -> AsyncEngine:
    return create_async_engine(url.set(drivername="mysql+aiomysql"), **_engine_options(seconds, pool_size=pool_size))


def _engine_options(seconds: int, *, pool_size: int) -> dict[str, Any]:
    return {
        "isolation_level": "READ COMMITTED",
        "json_deserializer": orjson.loads,
        "pool_size": pool_size,
        # A transaction idle for this long belongs to a lost host; a connection in the pool must not get that old.
        "connect_args": {"charset": "utf8mb4", "init_command": f"SET SESSION wait_timeout = {seconds + 1}"},
        "pool_recycle": seconds,
    }
