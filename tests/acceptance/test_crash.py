"""What is left when a relay dies at each step of an event's way, and what an event that kills its relay can do.

Relays are forks of this process that end themselves with `os._exit`, as if killed, exactly where a test says.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import pytest

from pillarbox import CallableSink, Claim, Constant, Event, Outcome, Relay, open_store
from pillarbox.event import DELIVERED
from pillarbox.hooks import Hook
from pillarbox.sinks.file import FileSink
from pillarbox.stores import Batch, Mode, Settlement
from pillarbox.stores.sql import SqlStore
from tests.acceptance.processes import Database, read_lines, temporary_database, until

CRASHED = 9
LEASE = timedelta(seconds=1)
WAYS = [("sqlite", "lease"), ("postgres", "lease"), ("postgres", "hold")]


@pytest.fixture
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    with temporary_database(request.param, tmp_path) as made:
        yield made


on_each_way = pytest.mark.parametrize(
    ("database", "mode"), WAYS, ids=["-".join(way) for way in WAYS], indirect=["database"]
)


def crash() -> None:
    os._exit(CRASHED)


def fork(run: Callable[..., None], *args: object) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=run, args=args, daemon=True)
    process.start()
    return process


# -- dying at a given step ---------------------------------------------------------------------------------

BATCH = 4
"""A relay starts with one event, then two; its third batch is a full one, and the first that may be held."""


class CrashAtStep(Hook):
    """Ends the process at one step of the first full batch."""

    def __init__(self, step: str, store: SqlStore, sink: FileSink, mode: Mode) -> None:
        self._step = step
        self._mode = mode
        transitions = store.transitions
        if step == "before the claim commits":
            self._crash_after(transitions, "claim", lambda taken: taken.claims)
        if step == "before the settlement commits":
            self._crash_after(transitions, "settle", lambda settlement: [1] * settlement.delivered)
        if step == "after the delivery":
            self._deliver = sink.deliver
            sink.deliver = self._deliver_and_crash  # type: ignore[method-assign]

    def _crash_after(self, owner: Any, name: str, claims_of: Callable[[Any], Sequence[object]]) -> None:
        original = getattr(owner, name)

        def run(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            if len(claims_of(result)) == BATCH:
                crash()
            return result

        setattr(owner, name, run)

    async def _deliver_and_crash(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        outcomes = await self._deliver(claims)
        if len(claims) == BATCH:
            crash()
        return outcomes

    def claimed(self, batch: Batch) -> None:
        assert len(batch.claims) < BATCH or batch.mode == self._mode
        if self._step == "after the claim" and len(batch.claims) == BATCH:
            crash()

    def settled(self, batch: Batch, outcomes: Sequence[Outcome], settlement: Settlement) -> None:
        if self._step == "after the settlement" and len(batch.claims) == BATCH:
            crash()


def run_to_the_step(url: str, file: Path, mode: Mode, step: str) -> None:
    store, sink = open_store(url), FileSink(file)
    hook = CrashAtStep(step, store, sink, mode)
    relay = Relay(store, sink, batch_size=BATCH, in_flight=1, claim=mode, lease=LEASE, hook=hook)
    asyncio.run(relay.run())


def relay_the_rest(url: str, file: Path, mode: Mode) -> None:
    asyncio.run(Relay(open_store(url), FileSink(file), claim=mode, lease=LEASE).run())


@pytest.mark.parametrize(
    ("step", "delivered_before", "repeats", "is_counted"),
    [
        ("before the claim commits", 3, 0, False),
        ("after the claim", 3, 0, True),
        ("after the delivery", 7, 4, True),
        ("before the settlement commits", 7, 4, True),
        ("after the settlement", 7, 0, False),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
@on_each_way
def test_relay_that_dies_loses_nothing(
    database: Database,
    mode: Mode,
    step: str,
    delivered_before: int,
    repeats: int,
    is_counted: bool,
    tmp_path: Path,
) -> None:
    """Events 4 to 7 are the batch during which the relay dies."""
    file = tmp_path / "delivered.jsonl"
    database.put(*(Event(f"{number}", {}, key="abc"[number % 3]) for number in range(1, 13)))
    dying = fork(run_to_the_step, database.url, file, mode, step)
    dying.join(30)
    assert dying.exitcode == CRASHED
    assert len(read_lines(file)) == delivered_before
    assert database.faults() == []
    second = fork(relay_the_rest, database.url, file, mode)
    until(database.is_empty, "an empty outbox")
    second.kill()
    second.join()
    lines = [(int(line["type"]), line["attempt"]) for line in read_lines(file)]
    counts = Counter(number for number, _ in lines)
    assert sorted(counts) == list(range(1, 13))
    assert {number for number, count in counts.items() if count > 1} == ({4, 5, 6, 7} if repeats else set())
    first = list(dict.fromkeys(number for number, _ in lines))
    for rest in range(3):
        own = [number for number in first if number % 3 == rest]
        assert own == sorted(own)
    again = 2 if is_counted and mode == "lease" else 1
    assert dict(lines) == {number: again if 4 <= number <= 7 else 1 for number in range(1, 13)}
    assert database.dead() == []
    assert database.faults() == []


# -- an event that kills its relay -------------------------------------------------------------------------


class QuickSink(FileSink):
    """A file that some events must not reach: the process dies of them, as of a bug in a driver."""

    async def deliver(self, claims: Sequence[Claim]) -> Sequence[Outcome]:
        for claim in claims:
            if claim.event.type == "poison":
                crash()
            await super().deliver([claim])
        return [DELIVERED] * len(claims)


def run_with_poison(url: str, file: Path, mode: Mode, dead: Literal["park", "skip"]) -> None:
    async def handle(claim: Claim) -> None:
        await quick.deliver([claim])

    quick = QuickSink(file)
    sink = quick if mode == "hold" else CallableSink(handle, concurrency=1)
    policy = Constant(timedelta(seconds=1), max_attempts=3)
    relay = Relay(open_store(url), sink, batch_size=8, claim=mode, lease=LEASE, retry=policy, dead=dead)
    asyncio.run(relay.run())


@pytest.mark.parametrize(
    ("database", "mode", "dead", "waiting"),
    [
        pytest.param("sqlite", "lease", "park", ["39"], id="sqlite-lease-park"),
        pytest.param("postgres", "lease", "park", ["39"], id="postgres-lease-park"),
        pytest.param("postgres", "hold", "park", ["39"], id="postgres-hold-park"),
        pytest.param("postgres", "hold", "skip", [], id="postgres-hold-skip"),
    ],
    indirect=["database"],
)
def test_event_that_kills_its_relay_dies_alone(
    database: Database, mode: Mode, dead: str, waiting: list[str], tmp_path: Path
) -> None:
    """Event 39 is behind the poison in its key, 0 before it; every other key has two events."""
    file = tmp_path / "delivered.jsonl"
    names = [*(str(number) for number in range(20)), "poison", *(str(number) for number in range(20, 40))]
    database.put(*(Event(name, {}, key=f"key-{place % 20}") for place, name in enumerate(names)))
    deaths = 0
    relay = fork(run_with_poison, database.url, file, mode, dead)

    def is_over() -> bool:
        nonlocal relay, deaths
        if relay.exitcode is not None:
            assert relay.exitcode == CRASHED
            deaths += 1
            relay = fork(run_with_poison, database.url, file, mode, dead)
        return [name for (name,) in database.rows("type")] == waiting

    until(is_over, f"nothing but {waiting} in the outbox", seconds=40)
    relay.kill()
    relay.join()
    assert database.dead() == ["poison"]
    assert database.faults() == []
    # A relay that dies in a hold has counted nothing; the next one starts with leases, and comes closer.
    assert 3 <= deaths <= (3 if mode == "lease" else 5)
    first = list(dict.fromkeys(line["type"] for line in read_lines(file)))
    assert set(first) == {str(number) for number in range(40)} - set(waiting)
    for number in range(20, 39):
        assert first.index(str(number - 19)) < first.index(str(number))
