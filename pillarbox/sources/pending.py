"""The messages a source has received and not acknowledged yet, and which of them may be claimed.

Kept in memory: the broker has them all until they are acknowledged, and gives them out again after a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from pillarbox.event import Claim
from pillarbox.sources.reading import Read

State = Literal["ready", "taken", "waiting", "done"]


@dataclass(slots=True, eq=False)
class Entry:
    """One received message. `token` is what the broker's client needs to acknowledge it."""

    read: Read
    token: Any
    attempts: int = 0
    """How often it was tried before it was received, as far as the broker knows; then how often in all."""
    state: State = "ready"
    until: float = 0.0
    is_lost: bool = False
    """Whether it is somebody else's by now."""

    def claim(self) -> Claim:
        return Claim(row=self, event=self.read.event, attempt=self.attempts, defect=self.read.defect)


class Pending:
    """Entries in the order of their arrival; those of one key are claimed in that order, whatever fails."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def add(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._entries[id(entry)] = entry

    def claim(self, limit: int) -> tuple[list[Entry], bool]:
        """Take up to `limit` entries that are free; says whether there were more."""
        now = self._clock()
        taken: list[Entry] = []
        stopped: set[str] = set()
        for entry in self._entries.values():
            if entry.state == "waiting" and entry.until <= now:
                entry.state = "ready"
            key = entry.read.event.key
            if key is not None and key in stopped:
                continue
            if entry.state != "ready":
                if key is not None:
                    stopped.add(key)
                continue
            if len(taken) == limit:
                return self._take(taken), True
            taken.append(entry)
        return self._take(taken), False

    def _take(self, entries: list[Entry]) -> list[Entry]:
        for entry in entries:
            entry.state = "taken"
            entry.attempts += 1
        return entries

    def give_back(self, entry: Entry) -> None:
        """The entry was not tried."""
        entry.state, entry.attempts = "ready", entry.attempts - 1

    def delay(self, entry: Entry, by: timedelta) -> None:
        entry.state, entry.until = "waiting", self._clock() + by.total_seconds()

    def finish(self, entry: Entry) -> None:
        entry.state = "done"
        self._remove(entry)

    def lose(self, entries: Iterable[Entry]) -> None:
        """Forget entries that somebody else gets now; what is under way of them changes nothing any more."""
        for entry in entries:
            entry.is_lost = True
            self._remove(entry)

    def next_due(self) -> float | None:
        """In how many seconds the first waiting entry is due."""
        due = [entry.until for entry in self._entries.values() if entry.state == "waiting"]
        return max(0.0, min(due) - self._clock()) if due else None

    def _remove(self, entry: Entry) -> None:
        self._entries.pop(id(entry), None)
