"""A sink around another one: passes on everything that a relay asks, so that a subclass cannot forget a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, final

from pillarbox.event import Claim, Outcome
from pillarbox.sinks import Effect, Sink, SinkLike, adopt
from pillarbox.sinks.order import Deliver


class SinkWrapper(Sink):
    """Delivers to another sink; a subclass says with `pass_on` what it does to the batches on their way.

    `deliver` and `deliver_in` both go through `pass_on`, so they are not for a subclass to override.
    """

    def __init__(self, sink: SinkLike) -> None:
        self._sink = adopt(sink)
        self.name, self.is_quick = sink.name, sink.is_quick

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in ("deliver", "deliver_in"):
            if name in cls.__dict__:
                raise TypeError(f"{cls.__name__}.{name}: override pass_on instead, through which all deliveries go")

    async def pass_on(self, claims: Sequence[Claim], deliver: Deliver) -> Sequence[Outcome]:
        """Deliver claims by calling `deliver` with them, or with parts of them, in order."""
        return await deliver(claims)

    @final
    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        return await self.pass_on(claims, self._sink.deliver)

    @final
    async def deliver_in(self, batch: Any, claims: Sequence[Claim]) -> Sequence[Outcome]:
        return await self.pass_on(claims, partial(self._sink.deliver_in, batch))

    async def open(self) -> None:
        await self._sink.open()

    async def check(self) -> None:
        await self._sink.check()

    async def close(self) -> None:
        await self._sink.close()

    @property
    def most(self) -> int | None:
        return self._sink.most

    @property
    def is_local(self) -> bool:
        return self._sink.is_local

    def check_store(self, store: Any) -> None:
        self._sink.check_store(store)

    def effect(self, claims: Sequence[Claim], outcomes: Sequence[Outcome]) -> Effect | None:
        return self._sink.effect(claims, outcomes)

    @property
    def joins_settlement(self) -> bool:
        return self._sink.joins_settlement

    @property
    def innermost(self) -> Sink:
        return self._sink.innermost
