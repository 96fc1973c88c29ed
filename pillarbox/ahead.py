"""Claiming ahead: in a backlog the next batch is claimed while the rows of the one before it are loaded.

Without it the database waits while Python makes events of rows, and Python while the database reads the next ones. A
claim ahead is a batch under way like any other: it is delivered next, or given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from pillarbox.errors import StoreRefused, StoreUnavailable
from pillarbox.stores import Batch, Settlement

log = logging.getLogger("pillarbox.relay")


def start_claim(claim: Coroutine[Any, Any, Batch]) -> asyncio.Task[Batch]:
    return asyncio.create_task(claim, name="pillarbox-claim")


class Ahead:
    """The one claim that is made ahead, if any."""

    def __init__(self) -> None:
        self._claiming: asyncio.Task[Batch] | None = None

    def __bool__(self) -> bool:
        return self._claiming is not None

    def start(self, claim: Coroutine[Any, Any, Batch]) -> None:
        self._claiming = start_claim(claim)

    def take(self) -> asyncio.Task[Batch] | None:
        claiming, self._claiming = self._claiming, None
        return claiming

    def give_back(self, tasks: set[asyncio.Task[Settlement]]) -> None:
        """Let go of it in a task of its own, added to those under way."""
        claiming = self.take()
        if claiming is not None:
            give_back(claiming, tasks)


def give_back(claiming: asyncio.Task[Batch], tasks: set[asyncio.Task[Settlement]]) -> None:
    """Let go of what is being claimed, in a task added to those under way."""
    tasks.add(asyncio.create_task(_give_back(claiming), name="pillarbox-release"))


async def _give_back(claiming: asyncio.Task[Batch]) -> Settlement:
    try:
        batch = await claiming
    except (StoreUnavailable, StoreRefused) as error:
        log.debug("A claim ahead of the others failed: %s", error)
        return Settlement()
    await batch.abandon()
    return Settlement(released=len(batch.claims))
