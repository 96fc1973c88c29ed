"""A sink that forgets everything: for measuring a store, and for draining what nobody needs."""

from __future__ import annotations

from collections.abc import Sequence

from pillarbox.event import DELIVERED, Claim, Outcome
from pillarbox.sinks import Sink
from pillarbox.sinks.url import SinkUrl


class NullSink(Sink):
    """Acknowledges every event and keeps none. Url: `null:`."""

    is_quick: bool = True

    def __init__(self, name: str = "null:") -> None:
        self.name = name

    @classmethod
    def from_url(cls, url: SinkUrl) -> NullSink:
        url.refuse_location()
        url.refuse_options()
        return cls(url.name)

    async def open(self) -> None:
        pass

    async def check(self) -> None:
        pass

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        return [DELIVERED] * len(claims)

    async def close(self) -> None:
        pass
