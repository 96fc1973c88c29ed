"""What a relay reports while it runs."""

from __future__ import annotations

from collections.abc import Sequence

from pillarbox.event import Claim, Outcome
from pillarbox.stores import Batch, Settlement


class Hook:
    """Called by the relay at each step; does nothing itself.

    A hook runs between statements of a batch: it must be quick and must not raise.
    """

    def claimed(self, batch: Batch) -> None:
        """A batch was claimed and goes to the sink."""

    def settled(self, batch: Batch, outcomes: Sequence[Outcome], settlement: Settlement) -> None:
        """A batch was settled."""

    def lost(self, claims: Sequence[Claim]) -> None:
        """Claims lapsed while their delivery was under way."""

    def paused(self, sink: str, reason: str) -> None:
        """A destination is down and is paused."""


class Passing(Hook):
    """Reports everything to another hook, if there is one; a subclass does something besides."""

    def __init__(self, hook: Hook | None = None) -> None:
        self._hook = hook or Hook()

    def claimed(self, batch: Batch) -> None:
        self._hook.claimed(batch)

    def settled(self, batch: Batch, outcomes: Sequence[Outcome], settlement: Settlement) -> None:
        self._hook.settled(batch, outcomes, settlement)

    def lost(self, claims: Sequence[Claim]) -> None:
        self._hook.lost(claims)

    def paused(self, sink: str, reason: str) -> None:
        self._hook.paused(sink, reason)
