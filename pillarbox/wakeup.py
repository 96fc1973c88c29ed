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
CONNECT_TIMEOUT = 10.0
# An idle connection does not notice that the other host is gone, or that somebody between keeps quiet: it is asked.
PROBE_EVERY = 10.0
PROBE_TIMEOUT = 5.0
CLOSE_TIMEOUT = 1.0
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
        except Exception as error:  # whatever asyncpg raises, also of itself: polling goes on without it
            log.warning(
                "Cannot listen for notifications, polling until it works: %s", str(error) or type(error).__name__
            )
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
            try:
                await connection.close(timeout=CLOSE_TIMEOUT)
            except Exception as error:
                log.debug("The connection for notifications was not closed gracefully: %s", error)
            finally:
                connection.terminate()

    async def _listen(self) -> None:
        import asyncpg

        settings = {"application_name": "pillarbox listener"}
        connection = await asyncpg.connect(self._dsn, timeout=CONNECT_TIMEOUT, server_settings=settings)
        try:
            connection.add_termination_listener(self._on_lost)
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await connection.add_listener(self._channel, self._on_notify)
        except BaseException:
            connection.terminate()
            raise
        self._lost.clear()
        self._connection = connection

    async def _keep(self) -> None:
        while True:
            try:
                async with asyncio.timeout(PROBE_EVERY):
                    await self._lost.wait()
            except TimeoutError:
                await self._probe()
                continue
            pause = RECONNECT_FIRST
            while self._connection is None:
                await asyncio.sleep(pause)
                pause = min(RECONNECT_CAP, pause * 2)
                try:
                    await self._listen()
                except Exception as error:  # it was told that we poll; asyncpg's own kinds have no common base
                    log.debug("Still cannot listen for notifications: %s", error)
            log.info("Listening for notifications again.")
            self._woken.set()

    async def _probe(self) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                await connection.execute("SELECT 1")
        except Exception as error:
            log.debug("The connection for notifications did not answer: %s", str(error) or type(error).__name__)
            connection.terminate()
            self._on_lost(connection)

    def _on_notify(self, *args: Any) -> None:
        self._woken.set()

    def _on_lost(self, connection: Any) -> None:
        if self._connection is connection:
            self._connection = None
            log.warning("Lost the connection for notifications; polling until it is back.")
            # Whoever waits must look for itself now.
            self._woken.set()
            self._lost.set()
