"""Events that have no form a destination could take: each is dead without being sent, and its neighbours go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from pillarbox.event import Claim, Dead, Event, Outcome

T = TypeVar("T")


class Refused(Exception):
    """This message is bad, whatever the destination: it is dead without having been sent."""


def make_each(claims: Sequence[Claim], make: Callable[[Event], T], outcomes: list[Outcome]) -> Iterator[tuple[int, T]]:
    """Make something of each claim's event, with its position; a refused one is dead and stops those of its key."""
    stopped: set[str] = set()
    for position, claim in enumerate(claims):
        event = claim.event
        if event.key is not None and event.key in stopped:
            continue
        try:
            made = make(event)
        except Refused as error:
            outcomes[position] = Dead(str(error))
            if event.key is not None:
                stopped.add(event.key)
        else:
            yield position, made
