"""The messages a source has received and not acknowledged yet, and which of them may be claimed.

Kept in memory: the broker has them all until they are acknowledged, and gives them out again after a crash. Messages of
one key and topic stand in a lane; a lane is free while none of its messages is under way and its first one does not
wait. A claim looks at the first messages of free lanes only, however many others stand behind them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from heapq import heappop, heappush
from itertools import count
from typing import Any, Literal

from pillarbox.event import Claim
from pillarbox.sources.reading import Read

State = Literal["ready", "taken", "waiting", "done"]


@dataclass(slots=True)
class Lane:
    """The messages of one key in order; so many of them are `taken`."""

    entries: deque[Entry] = field(default_factory=deque)
    taken: int = 0


@dataclass(slots=True, eq=False)
class Entry:
    """One received message. `token` is what the broker's client needs to acknowledge it."""

    read: Read
    token: Any
    attempts: int = 0
    """How often it was tried before it was received, as far as the broker knows; then how often in all."""
    place: Any = None
    """Where it stands in its topic, if the broker says so: one that comes again goes before later ones at hand."""
    state: State = "ready"
    until: float = 0.0
    is_lost: bool = False
    """Whether it is somebody else's by now."""
    is_buried: bool = False
    turn: int = 0
    """How often it was claimed: a claim of an earlier turn changes nothing."""
    number: int = -1
    lane: Lane | None = None

    def claim(self) -> Claim:
        read = self.read
        return Claim(row=self, event=read.event, attempt=self.attempts, fence=self.turn, defect=read.defect)


class Pending:
    """Entries in the order of their arrival; those of one key are claimed in that order, whatever fails."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._numbers = count()
        self._entries: dict[int, Entry] = {}
        self._lanes: dict[tuple[str, str], Lane] = {}
        # Both keep entries that have changed since: whoever takes one out looks whether it still holds.
        self._free: list[tuple[int, Entry]] = []
        self._due: list[tuple[float, int, Entry]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def add(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            entry.number = next(self._numbers)
            self._entries[entry.number] = entry
            event = entry.read.event
            if event.key is not None:
                entry.lane = self._lanes.setdefault((event.topic, event.key), Lane())
                _insert(entry.lane.entries, entry)
            self._offer(entry)

    def claim(self, limit: int, max_bytes: int | None = None) -> tuple[list[Entry], bool]:
        """Take up to `limit` entries that are free, several of one key if they stand so; says whether more are.

        Their payloads weigh at most `max_bytes` together, or it is one alone.
        """
        self._wake()
        taken: list[Entry] = []
        left = math.inf if max_bytes is None else max_bytes
        following: dict[int, int] = {}
        while len(taken) < limit and self._free:
            number, entry = heappop(self._free)
            position = following.pop(number, 0)
            if not position and not self._is_free(entry):
                continue
            weight = len(entry.read.event.payload)
            if taken and weight > left:
                heappush(self._free, (number, entry))
                break
            left -= weight
            self._take(entry)
            taken.append(entry)
            successor = self._find(entry, position + 1)
            if successor is not None:
                following[successor.number] = position + 1
                heappush(self._free, (successor.number, successor))
        while self._free and not self._is_free(self._free[0][1]):
            heappop(self._free)
        return taken, bool(self._free)

    def give_back(self, entry: Entry) -> None:
        """The entry was not tried."""
        entry.attempts -= 1
        self._change(entry, "ready")

    def delay(self, entry: Entry, by: timedelta) -> None:
        """The entry was tried, and is to be tried again after that time."""
        entry.until = self._clock() + by.total_seconds()
        self._change(entry, "waiting")
        heappush(self._due, (entry.until, entry.number, entry))

    def finish(self, entry: Entry) -> None:
        self._change(entry, "done")
        self._remove(entry)

    def lose(self, entries: Iterable[Entry]) -> None:
        """Forget entries that somebody else gets now; what is under way of them changes nothing any more."""
        for entry in entries:
            if entry.number in self._entries:
                entry.is_lost = True
                self._change(entry, "done")
                self._remove(entry)

    def next_due(self) -> float | None:
        """In how many seconds the first waiting entry is due."""
        while self._due and not self._waits(*self._due[0]):
            heappop(self._due)
        return max(0.0, self._due[0][0] - self._clock()) if self._due else None

    def _take(self, entry: Entry) -> None:
        entry.state = "taken"
        entry.attempts += 1
        entry.turn += 1
        if entry.lane is not None:
            entry.lane.taken += 1

    def _change(self, entry: Entry, state: State) -> None:
        was_taken, entry.state = entry.state == "taken", state
        if entry.lane is not None:
            entry.lane.taken -= was_taken
        self._offer(entry if entry.lane is None else entry.lane.entries[0])

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.number]
        event, lane = entry.read.event, entry.lane
        if event.key is None or lane is None:
            return
        lane.entries.remove(entry)
        if lane.entries:
            self._offer(lane.entries[0])
        else:
            del self._lanes[event.topic, event.key]

    def _offer(self, entry: Entry) -> None:
        if self._is_free(entry):
            heappush(self._free, (entry.number, entry))

    def _is_free(self, entry: Entry) -> bool:
        if entry.state != "ready":
            return False
        lane = entry.lane
        return lane is None or (not lane.taken and lane.entries[0] is entry)

    def _find(self, entry: Entry, position: int) -> Entry | None:
        """The entry of the same lane at that position, if it may be claimed after those before it."""
        lane = entry.lane
        if lane is None or position >= len(lane.entries) or lane.entries[position].state != "ready":
            return None
        return lane.entries[position]

    def _wake(self) -> None:
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            until, number, entry = heappop(self._due)
            if self._waits(until, number, entry):
                self._change(entry, "ready")

    def _waits(self, until: float, number: int, entry: Entry) -> bool:
        return number in self._entries and entry.state == "waiting" and entry.until == until


def _insert(entries: deque[Entry], entry: Entry) -> None:
    position = len(entries)
    if entry.place is not None:
        while position and entries[position - 1].place is not None and entries[position - 1].place > entry.place:
            position -= 1
    entries.insert(position, entry)
