"""Several relays in one process: one for each sink of each store, and the fan-outs that feed them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Self

from pillarbox.errors import ConfigError, SinkUnavailable
from pillarbox.event import Claim, Outcome
from pillarbox.hooks import Hook
from pillarbox.outbox import Outbox
from pillarbox.relay import Relay
from pillarbox.routing import FanOut, Routes
from pillarbox.sinks import Sink
from pillarbox.stores import Batch, Counts, Settlement
from pillarbox.stores.sql import SqlStore

log = logging.getLogger("pillarbox.relay")


class RelayGroup:
    """Runs relays together, by name. One that is down stops no other; one that fails for good stops them all.

    A relay named in `feeds` wakes those it feeds as soon as it has settled something for them.
    """

    def __init__(self, relays: Mapping[str, Relay], *, feeds: Mapping[str, Sequence[str]] | None = None) -> None:
        self.relays = dict(relays)
        self._feeds = dict(feeds or {})

    async def open(self) -> None:
        for relay in self.relays.values():
            await relay.open()

    async def close(self) -> None:
        async with AsyncExitStack() as stack:
            for relay in self.relays.values():
                stack.push_async_callback(relay.close)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def add(self, other: RelayGroup) -> None:
        """Take over the relays of another group."""
        self.relays |= other.relays
        self._feeds |= other._feeds

    def stop(self) -> None:
        """Let every relay end."""
        for relay in self.relays.values():
            relay.stop()

    async def run(self) -> None:
        """Deliver until `stop` is called, or until one of the relays fails for good."""
        tasks = [asyncio.create_task(relay.run(), name=f"pillarbox-{name}") for name, relay in self.relays.items()]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self.stop()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors[1:]:
            log.error("A relay failed as well: %s", error)
        if errors:
            raise errors[0]

    async def drain(self) -> dict[str, Counts]:
        """Deliver until nothing can be claimed now; returns what remains, by relay.

        A destination that is down keeps none of the others from being drained; then it is raised.
        """
        remains: dict[str, Counts] = {}
        outages: list[SinkUnavailable] = []
        # Those that feed others come first.
        for name in sorted(self.relays, key=lambda name: name not in self._feeds):
            try:
                remains[name] = await self.relays[name].drain()
            except SinkUnavailable as outage:
                outages.append(outage)
        if outages:
            raise outages[0]
        return remains


class Waking(Hook):
    """The hook of a fan-out: wakes the relays it feeds, and reports everything else to another hook.

    What was only routed on does not count as delivered there.
    """

    def __init__(self, relays: Sequence[Relay], hook: Hook | None = None) -> None:
        self._relays = relays
        self._hook = hook or Hook()

    def claimed(self, batch: Batch) -> None:
        self._hook.claimed(batch)

    def lost(self, claims: Sequence[Claim]) -> None:
        self._hook.lost(claims)

    def paused(self, sink: str, reason: str) -> None:
        self._hook.paused(sink, reason)

    def settled(self, batch: Batch, outcomes: Sequence[Outcome], settlement: Settlement) -> None:
        self._hook.settled(batch, outcomes, replace(settlement, delivered=0))
        if settlement.delivered:
            for relay in self._relays:
                relay.wake()


def route_relays(
    open_store: Callable[[str], SqlStore],
    sinks: Mapping[str, Sink],
    routes: Routes,
    *,
    make_relay: Callable[[SqlStore, Sink, Hook | None], Relay] = lambda store, sink, hook: Relay(
        store, sink, hook=hook
    ),
    into: Outbox | None = None,
    prefix: str = "",
    hook: Hook | None = None,
) -> RelayGroup:
    """The relays that deliver one outbox to several sinks: a fan-out, and one relay a sink.

    `open_store` makes the store for the rows of one sink; the fan-out's are those of "". `make_relay` makes a relay
    with the options of your choice. Where the outbox is a table of another system, `into` is one of ours in the same
    database, whose stores `open_store` then makes for the sinks. `prefix` goes before the relays' names.
    """
    missing = [name for name in routes.sinks if name not in sinks]
    if missing:
        raise ConfigError(f"Routes: there is no sink {missing[0]!r}; expected {', '.join(sinks) or 'a sink'}")
    relays = {prefix + name: make_relay(open_store(name), sinks[name], hook) for name in routes.sinks}
    source = open_store("")
    fan_out = make_relay(source, FanOut(source, routes, into=into), Waking(list(relays.values()), hook))
    fed = list(relays)
    return RelayGroup({f"{prefix}fan-out": fan_out, **relays}, feeds={f"{prefix}fan-out": fed})
