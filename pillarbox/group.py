"""Several relays in one process: one for each sink of each store, and the fan-outs that feed them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from pillarbox.errors import ConfigError, SinkUnavailable, StoreRefused, StoreUnavailable
from pillarbox.event import Claim, Outcome
from pillarbox.hooks import Hook, Passing
from pillarbox.opening import Opening
from pillarbox.outbox import Outbox
from pillarbox.relay import Relay
from pillarbox.routing import FanOut, Routes
from pillarbox.sinks import Sink, SinkLike, adopt
from pillarbox.stores import Batch, Counts, Settlement
from pillarbox.stores.sql import SqlStore

log = logging.getLogger("pillarbox.relay")


class RelayGroup(Opening):
    """Runs relays together, by name. One that is down stops no other; one that fails for good stops them all.

    A relay named in `feeds` wakes those it feeds as soon as it has settled something for them.
    """

    def __init__(self, relays: Mapping[str, Relay], *, feeds: Mapping[str, Sequence[str]] | None = None) -> None:
        self.relays = dict(relays)
        self._feeds = dict(feeds or {})
        self._is_stopped = False

    async def open(self) -> None:
        for relay in self.relays.values():
            await relay.open()

    async def close(self) -> None:
        # All at once: what hangs must not let the others' time run out.
        results = await asyncio.gather(*(relay.close() for relay in self.relays.values()), return_exceptions=True)
        for error in (result for result in results if isinstance(result, BaseException)):
            raise error

    @property
    def dropped(self) -> int:
        """How many events had no route and were dropped."""
        within = [relay.sink.innermost for relay in self.relays.values()]
        return sum(sink.dropped for sink in within if isinstance(sink, FanOut))

    def add(self, other: RelayGroup) -> None:
        """Take over the relays of another group."""
        twice = sorted(self.relays.keys() & other.relays.keys())
        if twice:
            raise ConfigError(f"Relays: expected names that differ, got {twice[0]!r} twice. Name the handler otherwise")
        self.relays |= other.relays
        self._feeds |= other._feeds

    def stop(self) -> None:
        """Let every relay end."""
        self._is_stopped = True
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

        A store or destination that is down keeps none of the others from being drained; then it is raised.
        """
        remains: dict[str, Counts] = {}
        outages: dict[str, SinkUnavailable | StoreUnavailable | StoreRefused] = {}
        # Those that feed others come first, and again while what was delivered brought them more.
        order = sorted(self.relays, key=lambda name: name not in self._feeds)
        is_done = False
        while not is_done:
            before = [relay.total for relay in self.relays.values()]
            for name in (each for each in order if each not in outages):
                try:
                    remains[name] = await self.relays[name].drain()
                except (SinkUnavailable, StoreUnavailable, StoreRefused) as outage:
                    outages[name] = outage
            after = [relay.total for relay in self.relays.values()]
            is_done = not self._feeds or before == after or self._is_stopped
        if outages:
            raise next(iter(outages.values()))
        return remains


class Routing(Protocol):
    """A sink that writes rows for other relays, and counts what became of them."""

    def settled(self, claims: Sequence[Claim], outcomes: Sequence[Outcome]) -> None: ...


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None: what is not given here may be given by whoever makes the relays."""
    return {name: value for name, value in options.items() if value is not None}


class Waking(Passing):
    """The hook of a relay that feeds others: wakes them, and reports everything else to another hook.

    What was only routed on does not count as delivered there.
    """

    def __init__(self, fan_out: Routing | None, relays: Sequence[Relay], hook: Hook | None = None) -> None:
        super().__init__(hook)
        self._fan_out = fan_out
        self._relays = relays

    def settled(self, batch: Batch, outcomes: Sequence[Outcome], settlement: Settlement) -> None:
        self._hook.settled(batch, outcomes, replace(settlement, delivered=0))
        if settlement.delivered:
            if self._fan_out is not None:
                self._fan_out.settled(batch.claims, outcomes)
            for relay in self._relays:
                relay.wake()


def check_wrapped(relay: Relay, sink: Sink) -> Relay:
    """Refuse a relay whose sink hides one that joins the settlement: its events would be settled undelivered."""
    if sink.joins_settlement and relay.sink.innermost is not sink.innermost:
        raise ConfigError(
            f"Sink {sink.name!r}: expected a relay to it, or to a SinkWrapper around it, which passes on what it must "
            f"write with the settlement; got one to a {type(relay.sink.innermost).__name__}"
        )
    return relay


def route_relays(
    open_store: Callable[[str], SqlStore],
    sinks: Mapping[str, SinkLike],
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

    def make_for(store: SqlStore, sink: SinkLike, hook: Hook | None) -> Relay:
        whole = adopt(sink)
        return check_wrapped(make_relay(store, whole, hook), whole)

    missing = [name for name in routes.sinks if name not in sinks]
    if missing:
        raise ConfigError(f"Routes: there is no sink {missing[0]!r}; expected {', '.join(sinks) or 'a sink'}")
    relays = {prefix + name: make_for(open_store(name), sinks[name], hook) for name in routes.sinks}
    source = open_store("")
    fan_out = FanOut(source, routes, into=into)
    feeding = make_for(source, fan_out, Waking(fan_out, list(relays.values()), hook))
    return RelayGroup({f"{prefix}fan-out": feeding, **relays}, feeds={f"{prefix}fan-out": list(relays)})
