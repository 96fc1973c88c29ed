"""All handlers of an event's type, one after the other, in the one transaction that settles the event."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from pillarbox.errors import ConfigError
from pillarbox.event import DELIVERED, RELEASED, Claim, Dead, Delivered, Outcome, Retry
from pillarbox.handlers.registry import Handlers
from pillarbox.handlers.sink import HandlerSink, Slot, check_joins
from pillarbox.joining import Joined, Settling, join
from pillarbox.judging import decide
from pillarbox.sinks import Sink, refuse_alone
from pillarbox.sinks.order import group_by_key
from pillarbox.sinks.workers import send_groups
from pillarbox.sources import Source
from pillarbox.stores import Batch, Joins


class DispatchSink(Sink):
    """Runs the handlers of each event in the transaction that settles it: all of them are done, or none is.

    For tables with one row an event and for messages of brokers, where the handlers of a type have no progress of
    their own. `unmatched` says what becomes of an event without a handler: `dead`, or `skip` to be done with it.
    """

    is_quick = False

    def __init__(
        self, handlers: Handlers, *, concurrency: int = 16, unmatched: str = "dead", name: str | None = None
    ) -> None:
        if not len(handlers):
            raise ConfigError("Handlers: expected at least one handler, got none")
        if unmatched not in ("dead", "skip"):
            raise ConfigError(f"Handlers unmatched: expected dead or skip, got {unmatched!r}")
        if concurrency < 1:
            raise ConfigError(f"Handlers concurrency: expected a whole number of 1 or more, got {concurrency!r}")
        handlers.seal()
        self.name = name or "handlers"
        self._sinks = {handler.name: HandlerSink(handlers, handler) for handler in handlers}
        self._by_type = {
            type: [self._sinks[handler.name] for handler in found] for type, found in handlers.types.items()
        }
        self._sessions = {type: _session_of(type, sinks) for type, sinks in self._by_type.items()}
        self._skips_unmatched = unmatched == "skip"
        self._concurrency = concurrency
        self._slots = asyncio.Semaphore(concurrency)

    async def close(self) -> None:
        async with AsyncExitStack() as stack:
            for sink in self._sinks.values():
                stack.push_async_callback(sink.close)

    def check_store(self, store: Source) -> None:
        for sink in self._sinks.values():
            joins = store.joins
            if sink.handler.arguments.joins or not joins:
                check_joins(sink.handler, joins, store.name)

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        raise refuse_alone(self)

    async def deliver_in(self, batch: Batch, claims: Sequence[Claim]) -> Sequence[Outcome]:
        return await self._send(batch, claims, otherwise=RELEASED)

    async def _send(self, settling: Settling, claims: Sequence[Claim], *, otherwise: Outcome) -> Sequence[Outcome]:
        async def send(step: Sequence[Claim]) -> Sequence[Outcome]:
            claim = step[0]
            sinks = self._by_type.get(claim.event.type, ())
            slots = [sink.make_slot() for sink in sinks]
            try:
                if not sinks and not self._skips_unmatched:
                    return [Dead(f"No handler for events of type {claim.event.type!r}")]
                # Before the transaction begins, and always in the same order: who waits for a place holds no row.
                for slot in slots:
                    await slot.take()
                work, session = partial(self._work, claim, slots), self._sessions.get(claim.event.type)
                return [await join(settling, claim, work, session=session, otherwise=otherwise)]
            finally:
                for slot in slots:
                    slot.release()
                self._slots.release()

        return await send_groups(claims, group_by_key(claims), send, slots=self._slots, width=self._concurrency)

    async def _work(self, claim: Claim, slots: Sequence[Slot], joined: Joined) -> Outcome:
        for sink, slot in zip(self._by_type.get(claim.event.type, ()), slots, strict=True):
            outcome = await sink.call(claim, slot, joined)
            if isinstance(outcome, Retry) and sink.handler.retry is not None:
                # That of the relay has the last word.
                return decide(sink.handler.retry, claim, outcome)
            if not isinstance(outcome, Delivered):
                return outcome
        return DELIVERED


def _session_of(type: str, sinks: Sequence[HandlerSink]) -> Joins | None:
    """The kind of session that the handlers of a type take: one transaction has one."""
    takers = {sink.handler.arguments.session_kind: sink.name for sink in sinks if sink.handler.arguments.joins}
    if len(takers) > 1:
        raise ConfigError(
            f"Handlers of {type!r} run in one transaction, so all must take a Session or all an AsyncSession; "
            f"{takers['sync']!r} takes the one and {takers['async']!r} the other"
        )
    return next(iter(takers), None)
