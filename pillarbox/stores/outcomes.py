"""What the outcomes of a batch mean for its rows and keys."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from pillarbox.event import DELIVERED, Claim, Dead, Delivered, Outcome, Released, Retry
from pillarbox.stores.dialect import Given


def group_outcomes(
    claims: Sequence[Claim], outcomes: Sequence[Outcome], park: bool, *, longest: timedelta
) -> dict[str, list[Given]]:
    """The rows of a batch by what will be written into them; no delay is longer than the table takes."""
    delivered: list[Given] = []
    groups: dict[str, list[Given]] = {"delivered": delivered, "retry": [], "dead": [], "release": []}
    for claim, outcome in zip(claims, outcomes, strict=True):
        if outcome is DELIVERED:  # nearly always
            delivered.append(Given(claim.row, claim.fence, claim.attempt))
            continue
        match outcome:
            case Delivered():
                delivered.append(Given(claim.row, claim.fence, claim.attempt))
            case Retry(error=error, after=after):
                seconds = 0.0 if after is None else min(after, longest).total_seconds()
                groups["retry"].append(Given(claim.row, claim.fence, claim.attempt, seconds, error))
            case Dead(error=error):
                parks = park and claim.event.key is not None
                groups["dead"].append(Given(claim.row, claim.fence, claim.attempt, 0.0, error, parks))
            case Released():
                groups["release"].append(Given(claim.row, claim.fence, claim.attempt))
    return groups


def freed_keys(claims: Sequence[Claim], outcomes: Sequence[Outcome], park: bool) -> set[str]:
    """The keys behind which nothing of this batch leaves others waiting."""
    freed: set[str] = set()
    stuck: set[str] = set()
    for claim, outcome in zip(claims, outcomes, strict=True):
        if claim.event.key is not None:
            is_stuck = isinstance(outcome, Retry) or (park and isinstance(outcome, Dead))
            (stuck if is_stuck else freed).add(claim.event.key)
    return freed - stuck
