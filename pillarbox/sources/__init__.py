"""Where claims come from besides tables: the consumers of brokers, as sources of the same relay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from pillarbox.event import Claim
from pillarbox.sources.reading import Raw
from pillarbox.stores import Batch, Counts, Joins, Mode


class Source(Protocol):
    """Gives claims to a relay, and takes back what became of them.

    An implementer's obligations:
    - A message is acknowledged to its broker after its claim was settled as delivered or buried, never before.
    - Messages of one key are claimed in order, and none while an earlier one is under way, waits or failed.
    - `Retry` brings a message back after its delay, `Released` at once, neither past later ones of its key. A restart
      brings back everything that was not acknowledged.
    - `Dead` is written to the dead letters, with its bytes as they came; only then is it acknowledged.
    - What was taken away meanwhile, by a rebalancing or a lapsed claim, is counted as lost when it is settled.
    - `claim` returns at once with what is there; a broker that is down raises `StoreUnavailable`. The payloads of one
      claim weigh at most `max_bytes` together, or it is one message alone.
    """

    @property
    def name(self) -> str: ...

    @property
    def modes(self) -> frozenset[Mode]: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def joins(self) -> frozenset[Joins]: ...

    @property
    def lease(self) -> timedelta: ...

    @property
    def keeps_order(self) -> bool: ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def claim(
        self,
        limit: int,
        *,
        mode: Mode,
        lease: timedelta,
        max_attempts: int | None = None,
        park: bool = True,
        is_prefetch: bool = False,
        max_bytes: int | None = None,
    ) -> Batch: ...

    async def next_due(self) -> timedelta | None: ...

    async def wait(self, timeout: timedelta) -> bool: ...

    async def counts(self) -> Counts: ...


@dataclass(frozen=True, slots=True)
class Letter:
    """A message that can never be handled, and why; `raw` is the message as the broker handed it over."""

    claim: Claim
    error: str
    raw: Raw | None = None


class DeadLetters(Protocol):
    """Where a source writes the messages that are dead."""

    async def bury(self, letters: Sequence[Letter]) -> None:
        """Write them all, for good; raises `StoreUnavailable` when that is not possible now.

        A letter comes again when the process died before the broker heard of it: it is known by its event's id.
        """

    async def close(self) -> None:
        """Let go of what it is connected to; the source is closed. It may be used again."""
