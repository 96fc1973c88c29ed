"""Order per key inside a batch: what every sink, and the relay behind it, keeps to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from pillarbox.errors import SinkUnavailable
from pillarbox.event import RELEASED, Claim, Delivered, Outcome

Deliver = Callable[[Sequence[Claim]], Awaitable[Sequence[Outcome]]]


def group_by_key(claims: Sequence[Claim]) -> list[list[int]]:
    """Return the claims' positions, one list a key in batch order; a claim without a key stands alone."""
    groups: list[list[int]] = []
    by_key: dict[str, list[int]] = {}
    for position, claim in enumerate(claims):
        key = claim.event.key
        if key is not None and key in by_key:
            by_key[key].append(position)
            continue
        group = [position]
        groups.append(group)
        if key is not None:
            by_key[key] = group
    return groups


def release_successors(claims: Sequence[Claim], outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes with every claim that follows an undelivered one of its key released.

    That holds even for a successor which the destination did take: it comes again after its predecessor, so
    that the last thing the destination hears of a key is the newest.
    """
    if len(claims) != len(outcomes):
        raise ValueError(f"Expected one outcome for each of {len(claims)} claims, got {len(outcomes)}.")
    ordered: list[Outcome] = []
    stopped: set[str] = set()
    for claim, outcome in zip(claims, outcomes, strict=True):
        key = claim.event.key
        if key is not None:
            if key in stopped:
                outcome = RELEASED
            elif not isinstance(outcome, Delivered):
                stopped.add(key)
        ordered.append(outcome)
    return ordered


async def deliver_rest(deliver: Deliver, claims: Sequence[Claim], decided: Sequence[Outcome | None]) -> list[Outcome]:
    """Deliver the claims that are not decided yet and return the outcomes of all, in order.

    A `SinkUnavailable` passes with the outcomes of all as well.
    """
    rest = [claim for claim, outcome in zip(claims, decided, strict=True) if outcome is None]

    def merge(outcomes: Sequence[Outcome]) -> list[Outcome]:
        results = iter(outcomes)
        return [next(results) if outcome is None else outcome for outcome in decided]

    try:
        return merge(await deliver(rest) if rest else [])
    except SinkUnavailable as outage:
        outage.outcomes = merge([RELEASED] * len(rest) if outage.outcomes is None else outage.outcomes)
        raise
