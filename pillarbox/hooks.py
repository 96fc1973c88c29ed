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
