"""A store that is down: said once when it goes and once when it is back."""

from __future__ import annotations

import logging
import random
import time

from pillarbox.errors import StoreRefused, StoreUnavailable

log = logging.getLogger("pillarbox.relay")


class Outage:
    """Remembers since when the store is down."""

    def __init__(self) -> None:
        self._since: float | None = None

    def note(self, error: StoreUnavailable | StoreRefused) -> float:
        """The store is down; returns the seconds to wait before the next try."""
        if self._since is None:
            self._since = time.monotonic()
            log.warning("The store is down, trying again until it is back: %s", error)
        # Not all at once: others that lost the same thing come back, too.
        return min(5.0, max(0.1, (time.monotonic() - self._since) / 2)) * (1 + random.random()) / 2

    def end(self) -> None:
        """The store answered."""
        if self._since is not None:
            log.info("The store is back after %.1f s.", time.monotonic() - self._since)
            self._since = None
