"""A database that says nothing: how long it is waited for, and how a connection to it is given up.

A host that vanished leaves its connections open, and so may a proxy between: a statement would wait for ever, and so
would a graceful close. Work on a connection therefore has a bound. Over it the connection is *cut*, without a word to
the other side; the driver notices at once and says that it lost the connection.

A statement can also be slow. So a bound that was too short is doubled for the next time, and halved again by quick
answers: work that takes its time is done in the end, and a silent connection is noticed soon.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakSet

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, InvalidRequestError

if TYPE_CHECKING:
    # Needs greenlet, which only the servers' extras bring.
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

log = logging.getLogger("pillarbox.silence")

T = TypeVar("T")

CONNECT_TIMEOUT: Final = timedelta(seconds=10)
STATEMENT_TIMEOUT: Final = timedelta(seconds=8)
OPERATION_TIMEOUT: Final = timedelta(minutes=10)
LONGEST: Final = timedelta(minutes=10)
CLOSE_TIMEOUT: Final = 1.0
# The kernel's own probes end connections to a host that is gone, also those that wait for a slow statement.
KEEPALIVE_IDLE: Final = 10
KEEPALIVE_INTERVAL: Final = 5
KEEPALIVE_COUNT: Final = 3
USER_TIMEOUT: Final = 20_000
"""In milliseconds."""
_GRACE: Final = 0.5


class Silent(TimeoutError):
    """Nothing was heard from the database for longer than its bound."""


class Patience:
    """How long a store waits for its short statements: doubled when that was not enough, halved by quick answers."""

    def __init__(self, first: timedelta) -> None:
        self._first = self._seconds = first.total_seconds()
        self._doubled_at = 0.0

    @property
    def seconds(self) -> float:
        return self._seconds

    def overran(self, since: float) -> None:
        # Several may be silent for one reason: that counts once.
        if since >= self._doubled_at:
            self._doubled_at = time.monotonic()
            self._seconds = min(self._seconds * 2, max(self._first, LONGEST.total_seconds()))

    def answered(self, since: float) -> None:
        # Not at once: quick statements run beside the slow one that the bound was doubled for.
        now = time.monotonic()
        if self._seconds > self._first and (now - since) * 4 < self._seconds < (now - self._doubled_at) / 8:
            self._seconds = max(self._first, self._seconds / 2)


class Lines:
    """The open connections of an engine."""

    def __init__(self, engine: sa.Engine) -> None:
        # Weakly: a pool says that it closes a connection before it does, and that may be what hangs.
        self._open: WeakSet[Any] = WeakSet()
        self._used: WeakSet[Any] = WeakSet()
        self._records: WeakSet[Any] = WeakSet()
        sa.event.listen(engine, "connect", self._on_connect)
        sa.event.listen(engine, "checkout", self._on_checkout)
        sa.event.listen(engine, "checkin", self._on_checkin)

    def cut_idle(self) -> None:
        """Give up those that nobody uses: what happened to one connection has happened to its neighbours."""
        for record in list(self._records):
            driver_connection = record.driver_connection
            if driver_connection is not None and driver_connection not in self._used:
                record.invalidate(soft=True)
                cut(driver_connection)

    def cut_all(self) -> None:
        for driver_connection in list(self._open):
            cut(driver_connection)

    async def dispose(self, engine: AsyncEngine) -> None:
        """Close the engine's connections; those that do not part within a moment are cut."""
        closing = asyncio.ensure_future(engine.dispose())
        cutting = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT, self.cut_all)
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            self.cut_all()
            raise
        except (DBAPIError, OSError) as error:
            log.debug("A connection was lost while it was closed: %s", error)
        finally:
            cutting.cancel()

    def _on_connect(self, connection: Any, record: Any) -> None:
        self._records.add(record)
        self._open.add(record.driver_connection)
        keep_alive(record.driver_connection)

    def _on_checkout(self, connection: Any, record: Any, proxy: Any) -> None:
        self._used.add(record.driver_connection)

    def _on_checkin(self, connection: Any, record: Any) -> None:
        if record.driver_connection is not None:  # it was not lost meanwhile
            self._used.discard(record.driver_connection)


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


def cutting(connection: AsyncConnection) -> Callable[[], None]:
    """What cuts a connection unless it was returned meanwhile, and lets the pool replace it.

    A pool notices by itself only what fails in its hands: after a commit there is nothing left to roll back.
    """
    assert connection.sync_connection is not None
    pooled = connection.sync_connection.connection
    driver_connection = pooled.driver_connection

    def give_up() -> None:
        if not connection.closed:
            if pooled.is_valid:
                pooled.invalidate(soft=True)
            cut(driver_connection)

    return give_up


async def wait_for(work: Coroutine[Any, Any, T], give_up: Callable[[], None], seconds: float) -> T:
    """Await work on a connection; give the connection up when the work is over its bound, or when we are cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=seconds)
        is_late = not task.done()
    except asyncio.CancelledError:
        await _give_up_and_end(task, give_up)
        raise
    if is_late:
        await _give_up_and_end(task, give_up)
        raise Silent(f"the database did not answer within {seconds:g} s; the connection is given up")
    return task.result()


async def wait_patiently(
    work: Coroutine[Any, Any, T],
    give_up: Callable[[], None],
    interrupt: Callable[[], Awaitable[None]] | None = None,
) -> T:
    """Await work that somebody else bounds: cancelled, or interrupted in its own way, it may end for a moment."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_ignore_result)
        if interrupt is None:
            task.cancel()
        else:
            await interrupt()
        await asyncio.wait([task], timeout=_GRACE)
        if not task.done():
            await _give_up_and_end(task, give_up)
        raise


async def _give_up_and_end(task: asyncio.Task[Any], give_up: Callable[[], None]) -> None:
    task.add_done_callback(_ignore_result)
    give_up()
    # The driver says so at once. A task that is cancelled meanwhile could not put its connection away.
    await asyncio.wait([task], timeout=_GRACE)
    task.cancel()


def _ignore_result(task: asyncio.Task[Any]) -> None:
    # asyncio complains about an exception that nobody asked for.
    if not task.cancelled():
        task.exception()


def cut(driver_connection: Any) -> None:
    """End a connection without a word to the other side, from any thread where the driver is a plain one."""
    match type(driver_connection).__module__.partition(".")[0]:
        case "asyncpg":
            driver_connection.terminate()
            # That does nothing to one that is being closed, and waits for the other side to agree.
            if driver_connection._transport is not None:
                driver_connection._transport.abort()
        case "aiomysql":
            if driver_connection._writer is not None:
                driver_connection._writer.transport.abort()
        case _:
            number = _file_number(driver_connection)
            if number is not None:
                with suppress(OSError), socket.socket(fileno=os.dup(number)) as same:
                    same.shutdown(socket.SHUT_RDWR)


def keep_alive(driver_connection: Any) -> None:
    """Let the kernel find out that the other host is gone."""
    number = _file_number(driver_connection)
    if number is None:
        return
    # Not over a Unix socket, and not every system has all of these.
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", KEEPALIVE_IDLE),
            ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL),
            ("TCP_KEEPCNT", KEEPALIVE_COUNT),
            ("TCP_USER_TIMEOUT", USER_TIMEOUT),
        ):
            if (option := getattr(socket, name, None)) is not None:
                same.setsockopt(socket.IPPROTO_TCP, option, value)


def _file_number(driver_connection: Any) -> int | None:
    # No driver but psycopg has a public way to its socket.
    try:
        match type(driver_connection).__module__.partition(".")[0]:
            case "asyncpg":
                return int(driver_connection._transport.get_extra_info("socket").fileno())
            case "aiomysql":
                return int(driver_connection._writer.transport.get_extra_info("socket").fileno())
            case "pymysql":
                return int(driver_connection._sock.fileno())
            case _:
                return int(driver_connection.fileno())
    except Exception:  # closed meanwhile, or a release of the driver that keeps it elsewhere
        return None
