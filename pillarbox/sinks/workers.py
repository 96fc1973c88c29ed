"""Sending a batch in parallel with order kept: workers, each with one group of claims at a time.

A group is what must go one after the other: the claims of one key, or of several. No two groups share a key.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from pillarbox.errors import SinkUnavailable
from pillarbox.event import RELEASED, Claim, Delivered, Outcome

Send = Callable[[Sequence[Claim]], Awaitable[Sequence[Outcome]]]
"""Sends a few claims in order and returns their outcomes. It is called with a slot taken, and gives it back."""


async def send_groups(
    claims: Sequence[Claim],
    groups: Iterable[list[int]],
    send: Send,
    *,
    slots: asyncio.Semaphore,
    width: int,
    size: int = 1,
) -> list[Outcome]:
    """Send the groups, given as positions, by up to `width` workers and return one outcome a claim.

    A worker hands over up to `size` claims of its group at a time, none whose key has failed before. After a
    `SinkUnavailable` nothing more is started; what runs ends, and the exception goes on with the outcomes won so far.
    """
    outcomes: list[Outcome] = [RELEASED] * len(claims)
    waiting = deque(groups)
    outages: list[SinkUnavailable] = []

    def note(step: Sequence[int], found: Sequence[Outcome], failed: set[str]) -> None:
        for position, outcome in zip(step, found, strict=True):
            outcomes[position] = outcome
            key = claims[position].event.key
            if key is not None and not isinstance(outcome, Delivered):
                failed.add(key)

    async def work() -> None:
        while waiting:
            group, failed = deque(waiting.popleft()), set[str]()
            while step := _take(claims, group, failed, size):
                await slots.acquire()
                if outages:
                    slots.release()
                    return
                try:
                    note(step, await send([claims[position] for position in step]), failed)
                except SinkUnavailable as outage:
                    outages.append(outage)
                    if outage.outcomes is not None:
                        note(step, outage.outcomes, failed)
                    return

    # Not a TaskGroup: that swallows a second cancellation instead of passing it on.
    workers = [work() for _ in range(min(width, len(waiting)))]
    for error in await asyncio.gather(*workers, return_exceptions=True):
        if error is not None:
            raise error
    if outages:
        after = max((outage.after for outage in outages if outage.after is not None), default=None)
        raise SinkUnavailable(str(outages[0]), after=after, outcomes=outcomes) from outages[0]
    return outcomes


def _take(claims: Sequence[Claim], group: deque[int], failed: set[str], size: int) -> list[int]:
    step: list[int] = []
    while group and len(step) < size:
        position = group.popleft()
        if not failed or claims[position].event.key not in failed:
            step.append(position)
    return step
