"""What a consumer's last holder left unacknowledged, and the order of what comes while it is awaited.

JetStream gives such messages out again when their time is up, and newer ones at once: whoever took those as they come
would handle a key's second message before its first. So after connecting everything is held back until all that was
left has come, or until its time is surely over, and then let go. `Pending` puts each key in the order of the stream.
"""

from __future__ import annotations

import time
from typing import Final

from pillarbox.sources.pending import Entry

# How much later than its time the server may give a message out again.
_GRACE: Final = 2.0


class Gathering:
    """Waits for `left` messages up to number `last` of the stream, each of which comes within `ack_wait` seconds."""

    def __init__(self, left: int, *, last: int, ack_wait: float, prefetch: int) -> None:
        self.left = left
        self.longest = ack_wait + _GRACE
        self._last = last
        self._due_at = time.monotonic() + ack_wait
        self._prefetch = prefetch
        self._entries: list[Entry] = []
        self._newer = 0

    @property
    def is_over(self) -> bool:
        return self.left <= 0 or time.monotonic() > self._due_at + _GRACE

    def most(self) -> int:
        """How many to ask for now: those left come first once they are due, before that newer ones fill the room."""
        has_room = self._newer < self._prefetch
        return self.left if has_room or time.monotonic() >= self._due_at else 0

    def add(self, entries: list[Entry]) -> None:
        for entry in entries:
            if entry.place <= self._last:
                self.left -= 1
            else:
                self._newer += 1
            self._entries.append(entry)

    def let_go(self) -> list[Entry]:
        entries, self._entries = self._entries, []
        return entries
