"""Publishing a batch in one window of unacknowledged messages, in order, with one outcome each.

The messages are handed to the client one after the other without waiting, then their acknowledgements are awaited
together: a batch costs one round trip. A message that fails stops the later ones of its key that were not handed over
yet; those already on their way are counted as released, so that they come again after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pillarbox.errors import SinkUnavailable
from pillarbox.event import DELIVERED, RELEASED, Claim, Dead, Outcome
from pillarbox.sinks.order import release_successors

Start = Callable[[Claim], Awaitable["asyncio.Future[Any]"]]
"""Hands one message to the client and returns the future of its acknowledgement."""

Judge = Callable[[BaseException], Outcome]
"""What an error says: `Dead` or `Retry` for the message, or raises `SinkUnavailable` for the destination."""


class Refused(Exception):
    """This message is bad, whatever the destination: it is dead without having been sent."""


async def publish(claims: Sequence[Claim], start: Start, judge: Judge, *, name: str, timeout: float) -> list[Outcome]:
    """Publish the claims in order and return one outcome each.

    Raises `SinkUnavailable`, with the outcomes won so far, when an error says so or an acknowledgement is missing
    after `timeout` seconds. When cancelled, what is not acknowledged yet is forgotten.
    """
    outcomes: list[Outcome] = [RELEASED] * len(claims)
    acks: dict[int, asyncio.Future[Any]] = {}
    outages: list[SinkUnavailable] = []

    def judge_at(position: int, error: BaseException) -> None:
        try:
            outcomes[position] = Dead(str(error)) if isinstance(error, Refused) else judge(error)
        except SinkUnavailable as outage:
            outages.append(outage)

    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            await _start_all(claims, start, acks, judge_at, outages)
            if acks:
                await asyncio.wait(acks.values())
    except TimeoutError:
        if not limit.expired():
            raise
        outages.append(SinkUnavailable(f"Sink {name}: no acknowledgement within {timeout:g} s"))
    finally:
        for ack in acks.values():
            ack.cancel()
    for position, ack in acks.items():
        if ack.cancelled() or not ack.done():
            continue
        error = ack.exception()
        if error is None:
            outcomes[position] = DELIVERED
        else:
            judge_at(position, error)
    outcomes = release_successors(claims, outcomes)
    if outages:
        raise SinkUnavailable(str(outages[0]), after=outages[0].after, outcomes=outcomes) from outages[0]
    return outcomes


async def _start_all(
    claims: Sequence[Claim],
    start: Start,
    acks: dict[int, asyncio.Future[Any]],
    judge_at: Callable[[int, BaseException], None],
    outages: list[SinkUnavailable],
) -> None:
    stopped: set[str] = set()
    for position, claim in enumerate(claims):
        key = claim.event.key
        if key is not None and key in stopped:
            continue
        try:
            acks[position] = await start(claim)
        except Exception as error:
            judge_at(position, error)
            if outages:
                return
            if key is not None:
                stopped.add(key)
