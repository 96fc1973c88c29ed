"""Work in the transaction that settles a claim: both are committed, or neither.

The work is a coroutine of the relay's loop. Where its transaction has an asynchronous driver it uses that directly.
Plain sessions need a plain driver and a thread: there the thread that has the transaction open waits for the coroutine,
and runs what the coroutine asks it to, so a function that blocks blocks nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, Protocol
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import await_only

from pillarbox.errors import ConfigError, SchemaError, SinkUnavailable, StoreUnavailable
from pillarbox.event import DELIVERED, RELEASED, Claim, Delivered, Outcome, Retry
from pillarbox.retry import describe_error
from pillarbox.stores import Effect, Joins

# How long to wait for the end of a transaction that was undone, before its connection is cut.
_PATIENCE: Final = 1.0
# How long the settlement and the commit may take once the work is done: nobody else bounds these.
_SETTLE_TIMEOUT: Final = 10.0
_SUSPICIOUS: Final = 3
_MAX_LOSSES: Final = 10_000


class Thread:
    """The thread that has a transaction open, and runs what it is asked to until the work is done."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Let the thread call a function, after what it was asked before."""
        future: Future[Any] = Future()
        self._calls.put((future, lambda: function(*arguments)))
        return future

    def serve(self, work: Future[None]) -> None:
        """Run what is submitted until the work is done; returns or raises what the work did."""
        work.add_done_callback(lambda _: self._calls.put(None))
        while (asked := self._calls.get()) is not None:
            future, call = asked
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        work.result()


@dataclass(frozen=True, slots=True)
class Joined:
    """An open transaction, and the thread that it belongs to if its driver is a plain one."""

    db: sa.Connection
    thread: Thread | None = None


Work = Callable[[Joined], Awaitable[Outcome]]
"""Awaited in the loop while its transaction is open, alone on its connection."""


class Settling(Protocol):
    """What has a transaction to join: a batch, or an inbox."""

    async def settle_one(self, claim: Claim, effect: Effect, *, session: Joins | None = None) -> bool: ...


class _Losses:
    """How often an event lost its connection while the database could be reached: it may be the event's own doing."""

    def __init__(self) -> None:
        self._counts: dict[UUID, int] = {}

    def add(self, event: UUID) -> bool:
        """Note a loss; false when these are too many to be an accident."""
        if len(self._counts) > _MAX_LOSSES:
            self._counts.clear()
        self._counts[event] = self._counts.get(event, 0) + 1
        return self._counts[event] < _SUSPICIOUS or not self.forget(event)

    def forget(self, event: UUID) -> bool:
        return self._counts.pop(event, None) is not None


_losses: Final = _Losses()


class _Undone(Exception):
    """Ends a transaction whose work said that the event is not done."""


async def join(
    settling: Settling, claim: Claim, work: Work, *, session: Joins | None = None, otherwise: Outcome = RELEASED
) -> Outcome:
    """Do work in the transaction that settles this claim, and undo both unless it ends as `Delivered`.

    `session` is the kind of session the work needs. `otherwise` is the outcome of a claim that was lost or had been
    taken before. What the database refuses at the commit is the event's own failure; a database that is down, or lets
    nobody in, is not: that raises `SinkUnavailable`. A connection that is lost is an accident twice, and no more.
    """
    return await _Joint(settling, claim, work, session).run(otherwise)


class _Joint:
    """One work and its transaction."""

    def __init__(self, settling: Settling, claim: Claim, work: Work, session: Joins | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = work
        self._event = claim.event.id
        self._undone: asyncio.Future[Outcome] = self._loop.create_future()
        self._worked = asyncio.Event()
        self._in_thread: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._settled = asyncio.ensure_future(settling.settle_one(claim, self._effect, session=session))

    async def run(self, otherwise: Outcome) -> Outcome:
        working = asyncio.ensure_future(self._worked.wait())
        try:
            await asyncio.wait([self._settled, working], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([self._settled], timeout=_PATIENCE if self._undone.done() else _SETTLE_TIMEOUT)
        except asyncio.CancelledError:
            self._cancel()
            await asyncio.wait([self._settled], timeout=_PATIENCE)
            raise
        finally:
            working.cancel()
            is_silent = not self._settled.done()
            if is_silent:
                self._settled.cancel()
            self._settled.add_done_callback(_ignore_result)
        if self._undone.done():
            return self._undone.result()
        if is_silent:
            raise SinkUnavailable(
                f"the database did not settle within {_SETTLE_TIMEOUT:g} s; its connection is given up"
            )
        try:
            is_ours = self._settled.result()
        except DBAPIError as error:
            if error.connection_invalidated and _losses.add(self._event):
                raise SinkUnavailable(f"the connection was lost: {describe_error(error)}") from error
            # At the commit, or again and again: what was written is at fault.
            return Retry(describe_error(error), cause=error)
        except (StoreUnavailable, SchemaError, ConfigError) as error:
            raise SinkUnavailable(str(error)) from error
        _losses.forget(self._event)
        return DELIVERED if is_ours else otherwise

    def _cancel(self) -> None:
        self._is_cancelled = True
        if self._in_thread is not None:
            self._in_thread.cancel()
        else:
            self._settled.cancel()

    def _effect(self, db: sa.Connection) -> None:
        if db.dialect.is_async:
            await_only(self._judge(Joined(db)))
            return
        thread, work = Thread(), Future[None]()
        self._loop.call_soon_threadsafe(self._start, Joined(db, thread), work)
        thread.serve(work)

    def _start(self, joined: Joined, work: Future[None]) -> None:
        if self._is_cancelled:
            work.set_exception(_Undone())
            return
        self._in_thread = self._loop.create_task(self._judge(joined))
        # At its very end: the thread serves it until then, also while it is being cancelled.
        self._in_thread.add_done_callback(lambda task: _pass_on(task, work))

    async def _judge(self, joined: Joined) -> None:
        try:
            outcome = await self._work(joined)
        finally:
            self._worked.set()
        if not isinstance(outcome, Delivered):
            self._undone.set_result(outcome)
            raise _Undone


def _pass_on(task: asyncio.Task[None], work: Future[None]) -> None:
    error = _Undone() if task.cancelled() else task.exception()
    if error is None:
        work.set_result(None)
    else:
        work.set_exception(error)


def _ignore_result(settled: asyncio.Future[bool]) -> None:
    # asyncio complains about an exception that nobody asked for.
    if not settled.cancelled():
        settled.exception()
