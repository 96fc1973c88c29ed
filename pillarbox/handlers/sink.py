"""A handler as a sink: called once an event, in order per key, with its own concurrency, timeout and retries.

A handler that takes a session runs in the transaction that settles its event: both are committed, or neither. A relay
whose lease has lapsed meanwhile finds that out at the end, and everything the handler wrote is undone. An error undoes
it as well, and the event is then settled as failed.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from pillarbox.durations import format_duration
from pillarbox.errors import Reject, RetryLater, Skip, Unsupported
from pillarbox.event import DELIVERED, Claim, Dead, Delivered, Outcome, Released, Retry
from pillarbox.handlers.context import Context, Next
from pillarbox.handlers.payloads import Data
from pillarbox.handlers.registry import Handler, Handlers
from pillarbox.joining import Joined, join
from pillarbox.sinks import refuse_alone
from pillarbox.sinks.callable import CallableSink
from pillarbox.sinks.order import group_by_key
from pillarbox.sinks.workers import send_groups
from pillarbox.sources import Source
from pillarbox.stores import JOIN_DEADLINE, Batch, Joins
from pillarbox.stores.sql import is_conflict

# A batch should not take longer than this: what it has done is settled at its end.
_BUDGET: Final = 0.5
_SMOOTHING: Final = 0.5
# What a handler's session is made with: its commit is no more than the end of a savepoint.
_SESSION: Final[dict[str, Any]] = {"join_transaction_mode": "create_savepoint", "expire_on_commit": False}


class HandlerSink(CallableSink):
    """Calls one handler of a registry with each event."""

    def __init__(self, handlers: Handlers, handler: Handler | str) -> None:
        self.handler = handlers[handler] if isinstance(handler, str) else handler
        super().__init__(
            _call, concurrency=self.handler.concurrency, timeout=self.handler.timeout, name=self.handler.name
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

    @property
    def joins_settlement(self) -> bool:
        return self.handler.arguments.joins

    def check_store(self, store: Source) -> None:
        if self.handler.arguments.joins:
            check_joins(self.handler, store.joins, store.name)

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        if self.handler.arguments.joins:
            raise refuse_alone(self)
        return await self._send(claims, self.call)

    async def deliver_in(self, batch: Batch, claims: Sequence[Claim]) -> Sequence[Outcome]:
        if not self.handler.arguments.joins:
            return await self._send(claims, self.call)
        session = self.handler.arguments.session_kind
        return await self._send(
            claims, lambda claim, slot: join(batch, claim, partial(self.call, claim, slot), session=session)
        )

    async def _send(self, claims: Sequence[Claim], handle: Callable[[Claim, Slot], Any]) -> Sequence[Outcome]:
        async def send(step: Sequence[Claim]) -> Sequence[Outcome]:
            slot = Slot(self._slots, is_held=True)
            try:
                return [await handle(step[0], slot)]
            finally:
                slot.release()

        started = time.monotonic()
        groups = group_by_key(claims)
        try:
            return await send_groups(claims, groups, send, slots=self._slots, width=self._concurrency)
        finally:
            self._note((time.monotonic() - started) * min(self._concurrency, len(groups)) / max(1, len(claims)))

    def _note(self, seconds: float) -> None:
        """Note how long a call took in the mean of a batch."""
        self._seconds += (seconds - self._seconds) * (_SMOOTHING if self._seconds else 1.0)

    # -- one call --------------------------------------------------------------------------------------------------

    def make_slot(self) -> Slot:
        """A place among its concurrent calls, still to be taken."""
        return Slot(self._slots)

    async def call(self, claim: Claim, slot: Slot, joined: Joined | None = None) -> Outcome:
        """Call the handler, in this transaction if it joins one, and say what came of it; the slot stays the caller's.

        Raises only what is no affair of the event's: a lost connection, a conflict between transactions.
        """
        troubles: list[DBAPIError] = []
        outcome = await self._judge(self._handle(claim, slot, joined, troubles))
        if troubles:
            raise troubles[0]
        return outcome

    async def _handle(self, claim: Claim, slot: Slot, joined: Joined | None, troubles: list[DBAPIError]) -> object:
        context = Context(claim, self.name)
        try:
            self._check_age(claim)
            call: Next = partial(self._call_handler, context, joined, slot, troubles)
            for middleware in reversed(self._handlers.middleware):
                call = partial(middleware, context, call)
            result = await call()
            if isinstance(result, Released):
                raise TypeError(f"Handler {self.name!r}: a call that was made is not Released(); return Retry(…)")
            return result
        except Skip:
            return DELIVERED
        except RetryLater as verdict:
            return Retry(str(verdict), verdict.after, verdict)
        except Reject as verdict:
            return Dead(str(verdict))

    def _check_age(self, claim: Claim) -> None:
        put_at, most = claim.event.created_at, self.handler.max_age
        if put_at is not None and most is not None and datetime.now(UTC) - put_at > most:
            raise Reject(f"Handler {self.name!r}: the event is older than {format_duration(most)}")

    async def _call_handler(
        self, context: Context, joined: Joined | None, slot: Slot, troubles: list[DBAPIError]
    ) -> object:
        call = await self._bind(context)
        # Again, if an earlier call for this event gave it back: after a conflict, or for middleware that repeats.
        await slot.take()
        joins = self.handler.arguments.joins
        if self._is_async and not joins:
            return await self._limit(call())
        if not self._is_async:
            # A thread may outlast its call, and gives the place back when it ends.
            slot.hand_over()
        if not joins:
            return await self._call_in_thread(call)
        assert joined is not None
        if self._is_async:
            return await self._limit(self._call_with_async_session(call, joined.db, troubles))
        return await self._call_with_session(call, joined, troubles)

    async def _bind(self, context: Context) -> Callable[..., Any]:
        arguments = self.handler.arguments
        claim = context.claim
        given: dict[str, Any] = {}
        if arguments.provided:
            assert self._handlers.provide is not None
            provided = self._handlers.provide(context, arguments.provided)
            given = _check_provided(
                await provided if inspect.isawaitable(provided) else provided, arguments.provided, self.name
            )
        if arguments.context is not None:
            given[arguments.context] = context
        positional: tuple[Any, ...] = ()
        if arguments.payload is not None and arguments.load is not None:
            payload = arguments.load(claim, Data(claim.event, self._handlers.upcasters.find(claim.event)))
            if arguments.is_positional:
                positional = (payload,)
            else:
                given[arguments.payload] = payload
        return partial(self.handler.function, *positional, **given)

    # -- with a session on the transaction that settles the event -----------------------------------------------------

    async def _call_with_async_session(
        self, call: Callable[..., Any], db: sa.Connection, troubles: list[DBAPIError]
    ) -> object:
        # Only who takes such a session needs to have what it needs.
        from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

        make, name = self.handler.arguments.session_class, str(self.handler.arguments.session)
        async with make(bind=AsyncConnection(AsyncEngine(db.engine), db), **_SESSION) as session:
            with _noting(troubles):
                result = await call(**{name: session})
                if _is_done(result):
                    await session.commit()
                return result

    async def _call_with_session(self, call: Callable[..., Any], joined: Joined, troubles: list[DBAPIError]) -> object:
        make, name = self.handler.arguments.session_class, str(self.handler.arguments.session)

        def work() -> object:
            with make(bind=joined.db, **_SESSION) as session, _noting(troubles):
                result = call(**{name: session})
                if _is_done(result):
                    session.commit()
                return result

        return await self._call_in_thread(work, joined.thread)


class Slot:
    """A place among the concurrent calls of a handler, for one event."""

    def __init__(self, slots: asyncio.Semaphore, *, is_held: bool = False) -> None:
        self._slots = slots
        self._is_held = is_held

    async def take(self) -> None:
        """Wait for a place, unless there is one already."""
        if not self._is_held:
            await self._slots.acquire()
            self._is_held = True

    def hand_over(self) -> None:
        """Leave it to a thread to give the place back."""
        self._is_held = False

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._slots.release()


def check_joins(handler: Handler, joins: frozenset[Joins], store: str) -> None:
    """Refuse a handler whose session could not be made there."""
    if handler.arguments.session_kind not in joins:
        reason = (
            "its transactions take plain sessions only; make the handler a plain function with a Session"
            if joins
            else "it has no transaction that a handler could join; leave the session out"
        )
        raise Unsupported(f"Handler {handler.name!r}: takes a session, which {store} cannot give: {reason}")
    if handler.timeout is not None and handler.timeout > JOIN_DEADLINE:
        raise Unsupported(
            f"Handler {handler.name!r} timeout: expected at most {format_duration(JOIN_DEADLINE)} for a handler with a "
            f"session, whose transaction is open meanwhile; got {format_duration(handler.timeout)}"
        )


def _check_provided(given: object, wanted: Mapping[str, Any], handler: str) -> dict[str, Any]:
    if not isinstance(given, Mapping) or set(given) != set(wanted):
        got = ", ".join(map(str, given)) or "none" if isinstance(given, Mapping) else repr(given)
        raise TypeError(f"Handler {handler!r}: expected provide to return {', '.join(wanted)} by name, got {got}")
    return dict(given)


def _call(call: Callable[[], Any]) -> Any:
    return call()


@contextmanager
def _noting(troubles: list[DBAPIError]) -> Iterator[None]:
    """Note what the database did to the transaction, before a savepoint that went with it hides that."""
    try:
        yield
    except DBAPIError as error:
        if error.connection_invalidated or is_conflict(error):
            troubles.append(error)
        raise


def _is_done(result: object) -> bool:
    return result is None or isinstance(result, Delivered)
