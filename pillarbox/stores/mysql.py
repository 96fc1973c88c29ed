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
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from pillarbox.errors import MissingExtra
from pillarbox.stores import Mode
from pillarbox.stores.server import HOLD_DEADLINE, AsyncSqlStore


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
        self._engine = create_async_engine(
            url.set(drivername="mysql+aiomysql").update_query_dict({"charset": "utf8mb4"}),
            isolation_level="READ COMMITTED",
            json_deserializer=orjson.loads,
            pool_size=10,
            pool_pre_ping=False,
        )

    async def open(self) -> None:
        await super().open()

    async def _begin_hold(self, connection: AsyncConnection) -> None:
        # Without statements for this long the server takes the host for lost, and frees its rows.
        seconds = int(HOLD_DEADLINE.total_seconds()) + 1
        await connection.exec_driver_sql(f"SET SESSION wait_timeout = {seconds}")

    async def wait(self, timeout: timedelta) -> bool:
        await asyncio.sleep(timeout.total_seconds())
        return False
