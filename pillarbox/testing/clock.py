"""A clock that stands still until a test moves it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class ManualClock:
    """Called, it returns its time: `MemoryStore(clock=ManualClock())`."""

    def __init__(self, now: datetime | None = None) -> None:
        self.now = datetime.now(UTC) if now is None else now

    def __call__(self) -> datetime:
        return self.now

    def advance(self, by: timedelta) -> None:
        """Let time pass."""
        self.now += by
