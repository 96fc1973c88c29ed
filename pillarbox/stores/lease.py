"""A batch of claims by lease: settled together, or one by one with what others do in the same transaction."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from pillarbox.errors import StoreRefused, StoreUnavailable
from pillarbox.event import DELIVERED, RELEASED, Claim, Outcome
from pillarbox.stores import Effect, Joins, Mode, Settlement
from pillarbox.stores.refusals import UNWRITABLE, settle_apart
from pillarbox.stores.transitions import Taken
from pillarbox.wording import say_count

if TYPE_CHECKING:
    from pillarbox.stores.sql import SqlStore

log = logging.getLogger("pillarbox.store")


class _ClaimsLost(Exception):
    """Ends the transaction of an effect whose claims are somebody else's by now."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


class LeaseBatch:
    """Claims written into their rows; each step is a transaction of its own."""

    mode: Mode = "lease"

    def __init__(self, store: SqlStore, taken: Taken, *, is_full: bool) -> None:
        self._store = store
        self.claims: Sequence[Claim] = taken.claims
        self.is_full = is_full
        self.has_tried = False
        self.lanes = set(taken.lanes)
        self._own = {claim.row: claim for claim in taken.claims}
        self._early: dict[Any, Settlement] = {}
        """What became of the claims that were settled one by one, by their rows: a sink may be given copies."""
        store.busy_lanes.update(self.lanes)

    async def settle(
        self, outcomes: Sequence[Outcome], *, park: bool = True, effect: Effect | None = None
    ) -> Settlement:
        early = sum(self._early.values(), Settlement())
        left = [each for each in zip(self.claims, outcomes, strict=True) if each[0].row not in self._early]
        claims, outcomes = [claim for claim, _ in left], [outcome for _, outcome in left]

        def write(db: sa.Connection) -> Settlement:
            if effect is not None:
                effect(db)
            settlement = self._store.transitions.settle(db, claims, outcomes, mode="lease", park=park)
            if effect is not None and settlement.lost:
                raise _ClaimsLost(settlement.lost)
            return settlement

        try:
            settlement = await self._store.run_soon(write) if claims or effect is not None else Settlement()
        except (StoreRefused, *UNWRITABLE):
            # What an effect wrote is for all of the claims or for none: whoever asked for it decides.
            if effect is not None:
                raise
            settlement = await self._settle_apart(claims, outcomes, park)
        except _ClaimsLost as error:
            return early + await self._give_up(len(claims), error.count)
        self._leave_lanes()
        return early + settlement

    async def _settle_apart(self, claims: Sequence[Claim], outcomes: Sequence[Outcome], park: bool) -> Settlement:
        settle = partial(self._store.transitions.settle, mode="lease", park=park)
        return await self._store.run_soon(lambda db: settle_apart(db, settle, claims, outcomes))

    async def settle_one(self, claim: Claim, effect: Effect, *, session: Joins | None = None) -> bool:
        # Settled last: a row locked for as long as a handler runs could not be renewed, nor those with it.
        def write(db: sa.Connection) -> Settlement:
            effect(db)
            settlement = self._store.transitions.settle(db, [claim], [DELIVERED], mode="lease", park=False)
            if settlement.lost:
                raise _ClaimsLost(settlement.lost)
            return settlement

        if claim.row in self._early:
            return not self._early[claim.row].lost
        # Our own: a copy that a sink was given does not know the fence of a later renewal.
        claim = self._own[claim.row]
        try:
            self._early[claim.row] = await self._store.join(write, session=session)
        except _ClaimsLost as error:
            self._early[claim.row] = Settlement(lost=error.count)
            return False
        return True

    async def _give_up(self, count: int, lost: int) -> Settlement:
        await self.abandon()
        return Settlement(released=count - lost, lost=lost)

    def _leave_lanes(self) -> None:
        self._store.busy_lanes.subtract(self.lanes)
        self.lanes = set()

    async def renew(self, lease: timedelta) -> Sequence[Claim]:
        claims = [claim for claim in self.claims if claim.row not in self._early]
        if not claims:
            return []
        renewal = await self._store.run_soon(lambda db: self._store.transitions.renew(db, claims, lease))
        # Only when it is committed: a fence that the rows do not have would lose them all.
        for claim in claims:
            claim.fence = renewal.fence
        return renewal.lost

    async def abandon(self) -> None:
        try:
            if self.claims:
                await self.settle([RELEASED] * len(self.claims))
        except (StoreRefused, StoreUnavailable) as error:
            claims = say_count(len(self.claims), "claim")
            log.warning("Could not release %s, left to lapse: %s", claims, error)
        finally:
            self._leave_lanes()
