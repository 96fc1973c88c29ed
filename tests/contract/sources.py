"""Kits for the Source suite: a fresh place at a real broker, filled by clients that have nothing to do with the source.

A kit names its broker, makes the place, and says how its sources are opened. What its broker cannot do it leaves out of
its features. The kits of brokers stand in files of their own, which register them here by being imported in `KITS`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from typing import Any, ClassVar
from uuid import uuid4

import pytest

from pillarbox.errors import StoreUnavailable
from pillarbox.event import DELIVERED, Claim, Event, Outcome
from pillarbox.sinks import Sink
from pillarbox.sources import Letter, Source
from pillarbox.sources.url import open_source
from pillarbox.stores import Batch, Settlement
from tests.brokers import BrokerName, PrivateBroker
from tests.contract.broker_kits import make_place
from tests.servers import server_url

# A server ends with the thread that started it: this one lives as long as the tests do.
_STARTER = ThreadPoolExecutor(1)

_RUN = uuid4().hex[:8]
GROUP, OTHER = f"billing-{_RUN}", f"shipping-{_RUN}"
"""The consumer groups of a test. A kit whose broker keeps a copy a group makes both when it prepares the place.

Each process has its own: members of one group at one broker would wait for each other.
"""

FEATURES: frozenset[str] = frozenset(
    {
        "asks for a login",  # make_stranger
        "misses its place",  # make_missing
        "goes down",  # a private server that is killed
        "has keys",  # a stranger's message has a key that the broker knows of
        "counts attempts",  # the broker remembers how often a message was tried
        "carries any header",  # headers may hold bytes that are no text
    }
)


class Letters:
    """Remembers what was buried; `is_down` refuses, and `before` is called first of all."""

    def __init__(self) -> None:
        self.letters: list[Letter] = []
        self.is_down = False
        self.before: Callable[[], None] = lambda: None

    async def bury(self, letters: Sequence[Letter]) -> None:
        self.before()
        if self.is_down:
            raise StoreUnavailable("the dead letters cannot be written")
        self.letters.extend(letters)

    async def close(self) -> None: ...


class SourceKit:
    """The base of a kit. Its test's sources and sinks are closed by the fixture, in whatever state they are.

    `options` are what `open_source` needs besides url and group to read the place: the worker processes get them too,
    so they are JSON values.
    """

    broker: ClassVar[BrokerName]
    features: ClassVar[frozenset[str]] = FEATURES
    own_form: ClassVar[dict[str, Any]] = {}
    """Options of our own sink besides the place."""
    patience: ClassVar[float] = 20.0
    """How many seconds until what a killed consumer had is given to others, and some more."""
    keeps_one_offset: ClassVar[bool] = False
    """Whether what was done after an unfinished message comes again after a stop."""
    slow: ClassVar[float] = 3.0
    """Longer than the broker leaves a message with a consumer that it does not hear of, with `slow_options`."""
    slow_options: ClassVar[dict[str, Any]] = {}
    repeats: ClassVar[int] = 60
    """How many messages may be handled twice when one of two consumers is killed."""
    options: dict[str, Any]

    def __init__(self, private: Callable[[BrokerName], PrivateBroker] | None) -> None:
        self.server = None if private is None else private(self.broker)
        self.url = server_url(self.broker) if self.server is None else self.server.url
        self.place = make_place()
        self.made: list[Source | Sink] = []
        self.letters = Letters()
        self.options = {}
        self.prepare()

    # -- what a kit does ---------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the place, for both groups, and set `options`."""
        raise NotImplementedError

    def send(self, *bodies: bytes, key: str | None = None, headers: dict[str, str | bytes] | None = None) -> None:
        """Publish messages as a stranger does, in order; returns when the broker has them.

        A kit without the feature "has keys" takes the key into the header `event-key`.
        """
        raise NotImplementedError

    def make_sink(self, **options: Any) -> Any:
        """Make our own sink to the place (added to `made`)."""
        raise NotImplementedError

    def remaining(self, group: str = GROUP) -> int:
        """How many messages the group has not acknowledged, as the broker tells an independent client."""
        raise NotImplementedError

    def make_stranger(self) -> Any:
        """Make a source that logs in with the password `not-the-password`."""
        raise NotImplementedError

    def make_missing(self) -> Any:
        """Make a source of a place that does not exist, with the word `nowhere` in its name."""
        raise NotImplementedError

    def send_pairs(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Send names with their keys, in order."""
        for key, name in pairs:
            self.send_named(name, key=key)

    async def until_balanced(self, sources: Sequence[Any]) -> None:
        """Wait until a broker that hands out shares of the work has done so."""

    async def take_away(self, source: Any) -> None:
        """Let the broker give what the source has at hand to others, without the source's doing."""
        raise NotImplementedError

    def dispose(self) -> None:
        pass

    # -- what all have -----------------------------------------------------------------------------------------------

    def make_source(self, *, group: str = GROUP, **options: Any) -> Any:
        given = {"dead": self.letters, "name": self.broker, **self.options, **options}
        return self.keep(open_source(self.url, group=self.named(group), **given))

    def named(self, group: str) -> str:
        """What the broker knows a group as."""
        return group

    async def open_source(self, **options: Any) -> Any:
        source = self.make_source(**options)
        await source.open()
        return source

    def keep(self, made: Any) -> Any:
        self.made.append(made)
        return made

    def go_down(self) -> None:
        assert self.server is not None
        self.server.kill()

    def come_back(self) -> None:
        assert self.server is not None
        _STARTER.submit(self.server.start).result()

    def send_named(self, *names: str, key: str | None = None) -> None:
        self.send(*(json.dumps({"name": name}).encode() for name in names), key=key)


# -- what tests do with a source -------------------------------------------------------------------------------------


async def until(is_true: Callable[[], Any], *, within: float = 60.0) -> None:
    """Wait until a condition holds."""
    limit = time.monotonic() + within
    while not is_true():
        assert time.monotonic() < limit, "the condition did not come to hold in time"
        await asyncio.sleep(0.02)


async def until_told(ask: Callable[[], Any], expected: Any, *, within: float = 60.0) -> None:
    """Wait until the broker tells what is expected; it is asked in a thread."""
    limit = time.monotonic() + within
    while (found := await asyncio.to_thread(ask)) != expected:
        assert time.monotonic() < limit, f"expected {expected!r}, found {found!r}"
        await asyncio.sleep(0.05)


async def claim(source: Source, limit: int = 500) -> Batch:
    return await source.claim(limit, mode="lease", lease=timedelta(seconds=30), max_attempts=20)


async def take(source: Source, count: int, *, limit: int = 500, within: float = 20.0) -> list[Batch]:
    """Claim until there are so many claims in all; none of them is settled."""
    batches: list[Batch] = []
    deadline = time.monotonic() + within
    while (found := sum(len(batch.claims) for batch in batches)) < count:
        assert time.monotonic() < deadline, f"expected {count} claims, got {found}: {names_of(batches)}"
        batch = await claim(source, min(limit, count - found))
        if batch.claims:
            batches.append(batch)
        else:
            await source.wait(timedelta(milliseconds=200))
    return batches


async def settle(batches: Sequence[Batch], outcome: Outcome = DELIVERED) -> Settlement:
    total = Settlement()
    for batch in batches:
        total += await batch.settle([outcome] * len(batch.claims))
    return total


async def take_names(source: Source, count: int, *, within: float = 20.0) -> list[str]:
    """Claim so many messages and settle them as delivered."""
    names: list[str] = []
    while len(names) < count:
        batches = await take(source, 1, within=within)
        names += names_of(batches)
        await settle(batches)
    return names


async def is_silent(source: Source, *, for_seconds: float = 1.0) -> bool:
    """Whether nothing can be claimed for a while."""
    limit = time.monotonic() + for_seconds
    while time.monotonic() < limit:
        batch = await claim(source)
        if batch.claims:
            await batch.abandon()
            return False
        await source.wait(timedelta(milliseconds=100))
    return True


def name_of(event: Event) -> str:
    return str(json.loads(event.payload)["name"])


def claims_of(batches: Sequence[Batch]) -> list[Claim]:
    return [each for batch in batches for each in batch.claims]


def names_of(batches: Sequence[Batch]) -> list[str]:
    return [name_of(each.event) for each in claims_of(batches) if each.defect is None]


def number_names(count: int, *, start: int = 0) -> list[str]:
    return [f"{number}" for number in range(start, start + count)]


def assert_order(names: Sequence[str], *, keys: int) -> None:
    """Of each key the first time a number was handled is after the first time of the one before it."""
    by_key: dict[int, list[int]] = defaultdict(list)
    for name in dict.fromkeys(names):
        by_key[int(name) % keys].append(int(name))
    for found in by_key.values():
        assert found == sorted(found)


# -- the kits; below everything that they use ------------------------------------------------------------------------

KITS: dict[str, str] = {
    "kafka": "tests.contract.source_kit_kafka:KafkaSourceKit",
    "kafka-eager": "tests.contract.source_kit_kafka:KafkaEagerSourceKit",
    "redis": "tests.contract.source_kit_redis:RedisSourceKit",
    "nats": "tests.contract.source_kit_nats:NatsSourceKit",
    "rabbitmq": "tests.contract.source_kit_rabbitmq:RabbitmqSourceKit",
    "rabbitmq-quorum": "tests.contract.source_kit_rabbitmq:RabbitmqQuorumSourceKit",
}


def load_kit(name: str) -> type[SourceKit]:
    module, _, attribute = KITS[name].partition(":")
    found: type[SourceKit] = getattr(import_module(module), attribute)
    return found


def sources_that(*features: str) -> pytest.MarkDecorator:
    """Run a test on the sources whose brokers have these features."""
    needs = frozenset(features)
    assert needs <= FEATURES, needs - FEATURES
    chosen = [pytest.param((name, needs), id=name) for name in KITS if load_kit(name).features >= needs]
    return pytest.mark.parametrize("kit", chosen, indirect=True)


def every_source(test: Callable[..., Any]) -> Any:
    """Run a test on every source. The kits are loaded when it is used, because they import this module."""
    return sources_that()(test)


@pytest.fixture(name="kit")
async def source_kit(request):
    name, needs = request.param
    # Asked for only when a test breaks a server: that brings one up.
    private = request.getfixturevalue("private_broker") if "goes down" in needs else None
    made = load_kit(name)(private)
    yield made
    for each in reversed(made.made):
        await each.close()
    made.dispose()
    await asyncio.sleep(0)
    alive = asyncio.all_tasks() - {asyncio.current_task()}
    assert not alive, f"tasks still alive: {alive}"
