"""How an idle relay is woken: PostgreSQL's notifications, on a direct connection of their own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from datetime import timedelta
from typing import Any

import sqlalchemy as sa

from pillarbox.errors import ConfigError
from pillarbox.layouts.layout import Layout

log = logging.getLogger("pillarbox.wakeup")

RECONNECT_FIRST = 0.2
RECONNECT_CAP = 10.0
_MAX_CHANNEL = 63


def channel_name(table: sa.Table, layout: Layout | None = None) -> str:
    """The notification channel of an outbox table: that of the other system where it has one."""
    if layout is not None and layout.channel is not None:
        return layout.channel(table)
    return f"pillarbox.{table.fullname}"[:_MAX_CHANNEL]


class PostgresListener:
    """Listens on a channel, and listens again after the server went away; meanwhile its owner polls."""

    def __init__(self, url: sa.URL, channel: str) -> None:
        self._dsn = url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._channel = channel
        self._woken = asyncio.Event()
        self._lost = asyncio.Event()
        self._connection: Any = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_listening(self) -> bool:
        return self._connection is not None

    async def start(self) -> None:
        """Listen from now on; a server that is down is tried again until it is back, one that refuses raises."""
        import asyncpg

        try:
            await self._listen()
        except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
            raise ConfigError(f"Notifications: {error}") from error
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError) as error:
            log.warning("Cannot listen for notifications, polling until it works: %s", error)
            self._lost.set()
        self._task = asyncio.create_task(self._keep(), name="pillarbox-listener")

    async def wait(self, timeout: timedelta) -> bool:
        """Wait for a notification; one that came since the last wait counts."""
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                await self._woken.wait()
        except TimeoutError:
            return False
        self._woken.clear()
        return True

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()

    async def _listen(self) -> None:
        import asyncpg

        connection = await asyncpg.connect(self._dsn, timeout=10)
        try:
            connection.add_termination_listener(self._on_lost)
            await connection.add_listener(self._channel, self._on_notify)
        except BaseException:
            connection.terminate()
            raise
        self._lost.clear()
        self._connection = connection

    async def _keep(self) -> None:
        import asyncpg

        while True:
            await self._lost.wait()
            pause = RECONNECT_FIRST
            while self._connection is None:
                await asyncio.sleep(pause)
                pause = min(RECONNECT_CAP, pause * 2)
                with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError):
                    await self._listen()
            log.info("Listening for notifications again.")
            self._woken.set()

    def _on_notify(self, *args: Any) -> None:
        self._woken.set()

    def _on_lost(self, connection: Any) -> None:
        if self._connection is connection:
            self._connection = None
            log.warning("Lost the connection for notifications; polling until it is back.")
            # Whoever waits must look for itself now.
            self._woken.set()
            self._lost.set()
