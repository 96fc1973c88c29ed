"""What a put tells its caller."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from pillarbox.errors import ReceiptPending
from pillarbox.event import Event


class Receipt:
    """Which of the events of one put were new; one whose id or dedup key was there already is not.

    A put into a session is known after the session's flush; reading it earlier raises `ReceiptPending`.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = tuple(events)
        self._existing: frozenset[int] | None = None

    def _fill(self, existing: Iterable[int]) -> None:
        self._existing = frozenset(existing)

    @property
    def is_known(self) -> bool:
        return self._existing is not None

    @property
    def new(self) -> tuple[Event, ...]:
        """The events that were written, in the order of putting."""
        existing = self._positions()
        return tuple(event for position, event in enumerate(self.events) if position not in existing)

    @property
    def existing(self) -> tuple[Event, ...]:
        """The events that were there already and were left as they are."""
        return tuple(self.events[position] for position in sorted(self._positions()))

    def _positions(self) -> Collection[int]:
        if self._existing is None:
            raise ReceiptPending(
                "Which events are new is known after the session's flush. Call session.flush() or commit "
                "first; after a rollback it is never known."
            )
        return self._existing

    def __repr__(self) -> str:
        known = self._existing
        state = "not flushed" if known is None else f"{len(self.events) - len(known)} new"
        count = len(self.events)
        return f"<Receipt of {count} event{'' if count == 1 else 's'}, {state}>"
