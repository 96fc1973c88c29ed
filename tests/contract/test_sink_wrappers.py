"""Sinks around sinks: whatever the relay asks reaches the sink inside, or the wrapper is refused; nothing is lost."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from pillarbox import (
    Claim,
    ConfigError,
    Delivered,
    Event,
    LimitedSink,
    Outcome,
    Relay,
    Sink,
    SinkUnavailable,
    SinkWrapper,
    TransformSink,
    Unsupported,
)
from pillarbox.group import RelayGroup, Waking, route_relays
from pillarbox.hooks import Hook, Passing
from pillarbox.notifications.log import LogSource
from pillarbox.routing import FanOut, Route, Routes
from pillarbox.sinks import SinkLike
from pillarbox.sources import Source
from pillarbox.stores import Counts, Settlement
from pillarbox.testing import MemorySink, MemoryStore
from tests.contract.stores import Database

BOTH = Routes([Route(["a", "b"])])


@pytest.fixture(params=["postgres", "mariadb", "mysql", "sqlite"])
def database(request, databases):
    made = databases(request.param)
    made.empty()
    return made


@pytest.fixture
def sqlite(databases):
    made = databases("sqlite")
    made.empty()
    return made


class Counting(SinkWrapper):
    """A wrapper as users write them."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self.count = 0

    async def pass_on(self, claims: Sequence[Claim], deliver: Any) -> Sequence[Outcome]:
        self.count += len(claims)
        return await super().pass_on(claims, deliver)


class Plain:
    """A wrapper that knows only what a sink needs to have."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.name, self.is_quick = sink.name, sink.is_quick
        self.open, self.check, self.close = sink.open, sink.check, sink.close

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        return await self.sink.deliver(claims)


WRAPPERS: dict[str, Callable[[Sink], SinkWrapper]] = {
    "limited": lambda sink: LimitedSink(sink, rate=1e6),
    "limited twice": lambda sink: LimitedSink(LimitedSink(sink, rate=1e6), rate=1e6),
    "own": Counting,
}


def unchanged(sink: Sink) -> Sink:
    return TransformSink(sink, lambda event: event)


def put(database: Database, count: int) -> None:
    with database.engine.begin() as db:
        database.outbox.put(db, *(Event(f"e{number}", {}, key=f"k{number % 7}") for number in range(count)))


def make_group(
    database: Database, sinks: dict[str, MemorySink], wrap: Callable[[Sink], SinkLike], routes: Routes = BOTH
) -> RelayGroup:
    return route_relays(
        lambda sink: database.outbox.store(database.url, sink=sink),
        sinks,
        routes,
        make_relay=lambda store, sink, hook: Relay(store, wrap(sink), hook=hook),
    )


def rows_of(database: Database) -> dict[str, int]:
    outbox = database.outbox.table
    with database.engine.connect() as db:
        query = sa.select(outbox.c.sink, sa.func.sum(outbox.c.attempts)).group_by(outbox.c.sink)
        return {row[0]: int(row[1]) for row in db.execute(query)}


# -- a fan-out inside --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
async def test_wrapped_fan_out_loses_no_event(database, wrap):
    put(database, 50)
    sinks = {"a": MemorySink("a"), "b": MemorySink("b")}
    async with make_group(database, sinks, wrap) as group:
        assert set((await group.drain()).values()) == {Counts()}
    wanted = sorted(f"e{number}" for number in range(50))
    assert [sorted(event.type for event in sink.events) for sink in sinks.values()] == [wanted, wanted]


async def test_transform_of_a_fan_out_is_refused(sqlite):
    """Its rows are copied inside the database, as they were put."""
    with pytest.raises(Unsupported, match=r"'fan-out' transform.*Transform them before the sinks that it feeds"):
        make_group(
            sqlite, {"a": MemorySink(), "b": MemorySink()}, lambda sink: TransformSink(sink, lambda event: event)
        )


async def test_wrapper_that_hides_a_fan_out_is_refused_when_the_relays_are_made(sqlite):
    sinks = {"a": MemorySink(), "b": MemorySink()}
    with pytest.raises(ConfigError, match=r"Sink 'fan-out': expected a relay to it, or to a SinkWrapper around it"):
        make_group(sqlite, sinks, lambda sink: Plain(sink) if isinstance(sink, FanOut) else sink)


async def test_wrapper_that_hides_a_sink_without_a_part_in_the_settlement_is_fine(sqlite):
    put(sqlite, 5)
    sinks = {"a": MemorySink(), "b": MemorySink()}
    async with make_group(sqlite, sinks, lambda sink: sink if isinstance(sink, FanOut) else Plain(sink)) as group:
        await group.drain()
    assert [len(sink.events) for sink in sinks.values()] == [5, 5]


async def test_hidden_fan_out_takes_nothing_and_says_why(database):
    put(database, 50)
    store = database.outbox.store(database.url)
    async with Relay(store, Plain(FanOut(store, BOTH)), batch_size=10) as relay:
        with pytest.raises(SinkUnavailable, match=r"Sink 'fan-out'.*Derive the sink that stands around it from"):
            await relay.drain()
        counts = await store.counts()
    assert (counts.new, counts.dead) == (50, 0)
    assert rows_of(database) == {"": 0}


async def test_dropped_events_are_counted_through_a_wrapper(sqlite):
    put(sqlite, 3)
    routes = Routes([Route(["a"], type=["e1"])], unmatched="drop")
    async with make_group(sqlite, {"a": MemorySink()}, Counting, routes) as group:
        await group.drain()
    assert group.dropped == 2


# -- every member of the ports -----------------------------------------------------------------------------------------


class Inner(Sink):
    """Answers every question of the relay in a way of its own, and notes that it was asked."""

    name = "inner"
    is_quick = True

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in MEMBERS:
            object.__getattribute__(self, "asked").append(name)
        return object.__getattribute__(self, name)

    async def open(self) -> None: ...

    async def check(self) -> None: ...

    async def close(self) -> None: ...

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        return [Delivered()] * len(claims)

    async def deliver_in(self, batch: Any, claims: Sequence[Claim]) -> Sequence[Outcome]:
        return [Delivered()] * len(claims)

    @property
    def most(self) -> int | None:
        return 17

    def check_store(self, store: Any) -> None: ...

    def effect(self, claims: Sequence[Claim], outcomes: Sequence[Outcome]) -> Any:
        return self.open

    @property
    def joins_settlement(self) -> bool:
        return False


MEMBERS = {name for name in {**vars(Sink), **Sink.__annotations__} if not name.startswith("_")}
ASK: dict[str, Callable[[Any], Any]] = {
    "open": lambda sink: sink.open(),
    "check": lambda sink: sink.check(),
    "close": lambda sink: sink.close(),
    "deliver": lambda sink: sink.deliver([]),
    "deliver_in": lambda sink: sink.deliver_in(None, []),
    "check_store": lambda sink: sink.check_store(None),
    "effect": lambda sink: sink.effect([], []),
}


def all_wrappers() -> list[type[SinkWrapper]]:
    found: list[type[SinkWrapper]] = [SinkWrapper]
    for kind in found:
        found += kind.__subclasses__()
    # Other tests have wrappers of their own.
    return [kind for kind in found if kind.__module__ == __name__ or kind.__module__.startswith("pillarbox.")]


MAKE: dict[str, Callable[[Sink], Sink]] = {
    "SinkWrapper": SinkWrapper,
    "Counting": Counting,
    "LimitedSink": lambda sink: LimitedSink(sink, rate=10),
    "TransformSink": unchanged,
}


@pytest.mark.parametrize("kind", all_wrappers(), ids=lambda kind: kind.__name__)
async def test_wrapper_passes_on_every_member_of_the_port(kind):
    inner = Inner()
    wrapper = MAKE[kind.__name__](inner)
    for name in sorted(MEMBERS - {"name", "is_quick", "deliver", "deliver_in", "innermost"}):
        inner.asked.clear()
        answer = ASK[name](wrapper) if name in ASK else getattr(wrapper, name)
        answer = await answer if inspect.isawaitable(answer) else answer
        assert name in inner.asked, f"{kind.__name__}.{name} does not reach the sink inside"
        expected = ASK[name](inner) if name in ASK else getattr(inner, name)
        assert answer == (await expected if inspect.isawaitable(expected) else expected)
    store = MemoryStore()
    store.put(Event("e", {}))
    batch = await store.claim(1, mode="lease", lease=timedelta(seconds=30))
    for name, arguments in (("deliver", ()), ("deliver_in", (batch,))):
        inner.asked.clear()
        assert await getattr(wrapper, name)(*arguments, batch.claims) == [Delivered()]
        assert name in inner.asked
    assert wrapper.innermost is inner
    assert wrapper.name == "inner"


def test_every_class_with_a_sink_inside_is_known_here():
    own = [kind for kind in all_wrappers() if kind.__module__.startswith("pillarbox.")]
    assert {kind.__name__ for kind in own} <= MAKE.keys()


def test_wrapper_cannot_override_half_of_a_delivery():
    with pytest.raises(TypeError, match=r"Half\.deliver: override pass_on instead"):

        class Half(SinkWrapper):
            async def deliver(self, claims):  # type: ignore[misc]
                return []


def test_class_that_only_looks_like_a_whole_sink_is_refused():
    class Writing(MemorySink):
        pass

    class Looks(Plain):
        def effect(self, claims, outcomes):
            return None

    assert Relay(MemoryStore(), Writing()).sink.effect([], []) is None
    for take in (lambda sink: Relay(MemoryStore(), sink), SinkWrapper, lambda sink: LimitedSink(sink, rate=1)):
        with pytest.raises(ConfigError, match=r"Looks has effect, but is not derived from pillarbox\.Sink"):
            take(Looks(MemorySink()))


@pytest.mark.parametrize("kind", [Passing, Waking])
def test_hook_around_a_hook_passes_on_every_report(kind):
    class Noting(Hook):
        def __init__(self) -> None:
            self.told: list[str] = []

        def __getattribute__(self, name: str) -> Any:
            if name in vars(Hook):
                object.__getattribute__(self, "told").append(name)
            return object.__getattribute__(self, name)

    inner = Noting()
    hook = Passing(inner) if kind is Passing else Waking(None, [], inner)
    settled: Any = (None, [], Settlement())
    arguments: dict[str, Any] = {"claimed": (None,), "settled": settled, "lost": ([],), "paused": ("", "")}
    for name in [name for name in vars(Hook) if not name.startswith("_")]:
        inner.told.clear()
        getattr(hook, name)(*arguments[name])
        assert inner.told == [name]


def test_source_around_a_store_has_every_member_of_the_port(sqlite):
    members = {name for name in {**vars(Source), **Source.__annotations__} if not name.startswith("_")}
    source = LogSource(sqlite.outbox.store(sqlite.url))
    # The last two are read by the relay as well.
    assert [name for name in sorted(members | {"is_notified", "retention"}) if not hasattr(source, name)] == []
