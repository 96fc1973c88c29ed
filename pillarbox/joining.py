"""Sinks that settle claims themselves, so that an effect and the settlement of its claim commit together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from pillarbox.event import Claim, Outcome
from pillarbox.stores import Batch


@runtime_checkable
class JoiningSink(Protocol):
    """A sink that may settle a claim in the transaction of what it does for it: `Batch.settle_one`.

    For such a claim it returns `Delivered`; the relay settles the others as their outcomes say.
    """

    async def deliver_in(self, batch: Batch, claims: Sequence[Claim]) -> Sequence[Outcome]:
        """Deliver claims of this batch."""
