"""Events for MySQL and MariaDB that one statement cannot hold: no statement, and no value made by one, may be larger
than `max_allowed_packet`, and bytes are written as two digits each. So a large payload is put together in its row.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from pillarbox.errors import ConfigError
from pillarbox.event import Event, reload_event
from pillarbox.insertion import MAX_BYTES


class Pieces:
    """The parts in which events are written to a server with this limit."""

    def __init__(self, packet: int) -> None:
        self._packet = packet
        self._size = packet // 4

    @classmethod
    def measure(cls, db: sa.Connection) -> Pieces:
        """By what the server says of this connection."""
        return cls(int(db.exec_driver_sql("SELECT @@max_allowed_packet").scalar_one()))

    def check(self, event: Event, headers: str | None) -> None:
        """Refuse an event that cannot be written in pieces either."""
        sizes = {"payload": len(event.payload), "headers": len((headers or "").encode())}
        limits = {"payload": self._packet - self._packet // 16, "headers": self._packet // 8}
        for what, size in sizes.items():
            if size > limits[what]:
                raise ConfigError(
                    f"Dead message {event.id}, {what}: {size} bytes, at most {limits[what]} can be written while the "
                    f"database's max_allowed_packet is {self._packet}. Raise that setting of the server and start "
                    "again; the message is still at the broker."
                )

    def heads(self, events: Sequence[Event]) -> list[list[Event]]:
        """The events with the first piece of their payloads, in groups that one statement can hold."""
        cut = [self._cut(event) for event in events]
        return [cut] if self._packet >= 2 * MAX_BYTES else [[event] for event in cut]

    def rest(self, event: Event) -> list[str]:
        """The other pieces of an event's payload, in hexadecimal digits."""
        payload = event.payload
        return [payload[start : start + self._size].hex() for start in range(self._size, len(payload), self._size)]

    def _cut(self, event: Event) -> Event:
        if len(event.payload) <= self._size:
            return event
        return reload_event(event, payload=event.payload[: self._size])
