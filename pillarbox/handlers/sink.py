"""A handler as a sink: called once an event, in order per key, with its own concurrency, timeout and retries.

A handler that takes a session runs in the transaction that settles its event: both are committed, or neither. The event
is settled first, so a relay whose lease has lapsed finds out before the handler runs, and nobody else can claim the row
meanwhile. An error undoes both, and the event is then settled as failed.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.util import await_only

from pillarbox.durations import format_duration
from pillarbox.errors import Reject, RetryLater, Skip, Unsupported
from pillarbox.event import DELIVERED, RELEASED, Claim, Dead, Delivered, Outcome, Retry
from pillarbox.handlers.context import Context, Next
from pillarbox.handlers.payloads import Data
from pillarbox.handlers.registry import Handler, Handlers
from pillarbox.sinks.callable import CallableSink, judge_result
from pillarbox.sinks.order import group_by_key
from pillarbox.sinks.workers import send_groups
from pillarbox.stores import Batch
from pillarbox.stores.sql import is_conflict

# A batch should not take longer than this: what it has done is settled at its end.
_BUDGET: Final = 0.5
_SMOOTHING: Final = 0.1


class _Undone(Exception):
    """Ends the transaction of a handler that failed, or said that its event is not done."""

    def __init__(self, outcome: Outcome | None = None, error: BaseException | None = None) -> None:
        self.outcome = outcome
        self.error = error


class HandlerSink(CallableSink):
    """Calls one handler of a registry with each event."""

    def __init__(self, handlers: Handlers, handler: Handler | str) -> None:
        self.handler = handlers[handler] if isinstance(handler, str) else handler
        super().__init__(
            self._call_function,
            concurrency=self.handler.concurrency,
            timeout=self.handler.timeout,
            name=self.handler.name,
        )
        self._handlers = handlers
        self._is_async = self.handler.arguments.is_async
        self._seconds = 0.0

    @property
    def most(self) -> int:
        """How many events to claim at once: as many as its calls can be expected to finish soon."""
        if not self._seconds:
            return self._concurrency
        return max(self._concurrency, int(self._concurrency * _BUDGET / self._seconds))

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        if self.handler.arguments.joins:
            raise Unsupported(
                f"Handler {self.name!r}: takes a session, so only a relay can call it; wrap it in no sink"
            )
        return await self._send(claims, None)

    async def deliver_in(self, batch: Batch, claims: Sequence[Claim]) -> Sequence[Outcome]:
        return await self._send(claims, batch)

    async def _send(self, claims: Sequence[Claim], batch: Batch | None) -> Sequence[Outcome]:
        async def send(step: Sequence[Claim]) -> Sequence[Outcome]:
            started = time.monotonic()
            try:
                return [await self._judge(self._handle(step[0], batch))]
            finally:
                self._note(time.monotonic() - started)

        return await send_groups(claims, group_by_key(claims), send, slots=self._slots, width=self._concurrency)

    def _note(self, seconds: float) -> None:
        self._seconds += (seconds - self._seconds) * (_SMOOTHING if self._seconds else 1.0)

    # -- one call --------------------------------------------------------------------------------------------------

    async def _handle(self, claim: Claim, batch: Batch | None) -> object:
        context = Context(claim, self.name)
        slot = _Slot(self._slots)
        try:
            self._check_age(claim)
            call: Next = partial(self._call_handler, context, batch, slot)
            for middleware in reversed(self._handlers.middleware):
                call = partial(middleware, context, call)
            return await call()
        except Skip:
            return DELIVERED
        except RetryLater as verdict:
            return Retry(str(verdict), verdict.after, verdict)
        except Reject as verdict:
            return Dead(str(verdict))
        finally:
            slot.release()

    def _check_age(self, claim: Claim) -> None:
        put_at, most = claim.event.created_at, self.handler.max_age
        if put_at is not None and most is not None and datetime.now(UTC) - put_at > most:
            raise Reject(f"Handler {self.name!r}: the event is older than {format_duration(most)}")

    async def _call_handler(self, context: Context, batch: Batch | None, slot: _Slot) -> object:
        arguments = self.handler.arguments
        claim = context.claim
        given: dict[str, Any] = {}
        if arguments.provided:
            assert self._handlers.provide is not None
            given = self._handlers.provide(context, arguments.provided)
            given = dict(await given if inspect.isawaitable(given) else given)
        if arguments.context is not None:
            given[arguments.context] = context
        positional: tuple[Any, ...] = ()
        if arguments.payload is not None and arguments.load is not None:
            payload = arguments.load(claim, Data(claim.event, self._handlers.upcasters.find(claim.event)))
            if arguments.is_positional:
                positional = (payload,)
            else:
                given[arguments.payload] = payload
        call = partial(self.handler.function, *positional, **given)
        if not arguments.joins:
            slot.hand_over()
            return await self._apply(call)
        assert batch is not None
        return await self._join(call, claim, batch)

    @staticmethod
    def _call_function(call: Callable[[], Any]) -> Any:
        return call()

    # -- in the transaction that settles the event -------------------------------------------------------------------

    async def _join(self, call: Callable[..., Any], claim: Claim, batch: Batch) -> Outcome:
        effect = self._effect_async if self._is_async else self._effect_sync
        try:
            is_ours = await self._limit(batch.settle_one(claim, partial(effect, call)))
        except _Undone as undone:
            if undone.error is not None:
                raise undone.error from None
            assert undone.outcome is not None
            return undone.outcome
        return DELIVERED if is_ours else RELEASED

    def _effect_sync(self, call: Callable[..., Any], db: sa.Connection) -> None:
        make, name = self.handler.arguments.session_class, str(self.handler.arguments.session)
        try:
            with make(bind=db, join_transaction_mode="create_savepoint", expire_on_commit=False) as session:
                self._keep(call(**{name: session}))
                session.commit()
        except Exception as error:
            raise _judge_error(error) from error

    def _effect_async(self, call: Callable[..., Any], db: sa.Connection) -> None:
        if not db.dialect.is_async:
            raise _Undone(
                error=Unsupported(f"Handler {self.name!r}: on this database a handler with a session must not be async")
            )
        await_only(self._work(call, db))

    async def _work(self, call: Callable[..., Any], db: sa.Connection) -> None:
        make, name = self.handler.arguments.session_class, str(self.handler.arguments.session)
        connection = AsyncConnection(AsyncEngine(db.engine), db)
        try:
            async with make(
                bind=connection, join_transaction_mode="create_savepoint", expire_on_commit=False
            ) as session:
                self._keep(await call(**{name: session}))
                await session.commit()
        except Exception as error:
            raise _judge_error(error) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _Undone(error=error) from error

    def _keep(self, result: object) -> None:
        """Let a result that is no success undo what was written."""
        outcome = judge_result(result, self.name)
        if not isinstance(outcome, Delivered):
            raise _Undone(outcome)


class _Slot:
    """A place among the concurrent calls: given back by the call itself once it runs, else at the end."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots: asyncio.Semaphore | None = slots

    def hand_over(self) -> None:
        self._slots = None

    def release(self) -> None:
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.release()


def _judge_error(error: Exception) -> Exception:
    """A handler's own error ends its event; a lost connection or a conflict is the database's affair."""
    if isinstance(error, DBAPIError) and (error.connection_invalidated or is_conflict(error)):
        return error
    return error if isinstance(error, _Undone) else _Undone(error=error)
