"""Order per key under everything at once: four relays that hold and lease, failures, foreign locks, and schedules.

An event that is put for later takes its place when it is due: until then the later ones of its key pass it. So order is
checked separately for the events that were due at once, and for those of a key that come due at the same moment.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from pillarbox.event import DELIVERED, RELEASED, Claim, Dead, Event, Outcome, Retry
from pillarbox.stores import Counts, Mode
from pillarbox.stores.sql import SqlStore
from tests.contract.stores import EVERYTHING, Database, SqlKit, make_database, until

KEYS = 100
LEASE = timedelta(seconds=60)

DATABASES = {"sqlite": 3000, "postgres": 4000, "mariadb": 3000, "mysql": 3000}


class Destination:
    """Takes events, but not always; remembers what it took in order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.taken: dict[str, list[int]] = defaultdict(list)
        self.early: list[str] = []
        self.retries = self.releases = self.deaths = 0

    async def deliver(self, claims: Sequence[Claim]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        stopped: set[str] = set()
        for claim in claims:
            key, due_at = str(claim.event.key), claim.event.due_at
            if due_at is not None and due_at > datetime.now(UTC):
                self.early.append(claim.event.type)
            outcome = RELEASED if key in stopped else self._answer()
            if outcome is DELIVERED:
                self.taken[key].append(int(claim.event.type))
            else:
                stopped.add(key)
            outcomes.append(outcome)
        await asyncio.sleep(self.random.uniform(0, 0.004))  # others claim and settle meanwhile
        return outcomes

    def _answer(self) -> Outcome:
        draw = self.random.random()
        if draw < 0.04:
            self.retries += 1
            return Retry("503", timedelta(milliseconds=self.random.uniform(0, 30)))
        if draw < 0.05:
            self.releases += 1
            return RELEASED
        if draw < 0.06:
            self.deaths += 1
            return Dead("400")
        return DELIVERED


class Disturber:
    """Locks rows of the table for moments, as a console or another system would."""

    def __init__(self, database: Database, seed: int) -> None:
        self.database = database
        self.random = random.Random(seed)
        self.locked = 0

    def run_once(self) -> None:
        table = self.database.outbox.table
        oldest = sa.select(table.c.seq).order_by(table.c.seq).limit(40)
        with self.database.engine.connect() as db:
            if self.database.backend == "sqlite":
                db.exec_driver_sql("BEGIN IMMEDIATE")
                time.sleep(0.002)
            else:
                found = list(db.execute(oldest).scalars())
                chosen = self.random.sample(found, min(3, len(found)))
                lock = sa.select(table.c.seq).where(table.c.seq.in_(chosen))
                self.locked += len(db.execute(lock.with_for_update(skip_locked=True)).all())
                time.sleep(self.random.uniform(0.001, 0.015))
            db.rollback()


async def relay(store: SqlStore, destination: Destination, seed: int, is_done: asyncio.Event) -> None:
    chance = random.Random(seed)
    modes: list[Mode] = sorted(store.modes)
    while not is_done.is_set():
        mode = chance.choice(modes)
        batch = await store.claim(chance.choice([5, 40, 200]), mode=mode, lease=LEASE)
        if not batch.claims:
            await store.next_due()
            await asyncio.sleep(0.002)
            continue
        outcomes = await destination.deliver(batch.claims)
        settlement = await batch.settle(outcomes)
        assert settlement.lost == 0


async def look_after(store: SqlStore, is_done: asyncio.Event) -> None:
    """Redrive what died, as operators do, and look for faults while everybody is at work."""
    while not is_done.is_set():
        assert await store.find_faults() == []
        await store.redrive(EVERYTHING, actor="ann")


def due_soon(chance: random.Random) -> datetime:
    """One of few moments, so that several events of a key come due together."""
    quarters = time.time() * 4 // 1 + chance.randint(1, 3)
    return datetime.fromtimestamp(quarters / 4, UTC)


async def is_empty(store: SqlStore) -> bool:
    return await store.counts() == Counts()


@pytest.mark.parametrize(("name", "count"), DATABASES.items(), ids=DATABASES)
async def test_four_relays_keep_the_order_of_every_key(name: str, count: int, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    database = make_database(name, tmp_path)
    if name == "sqlite":
        # Everybody wants the file, and whoever waits for it has no turn.
        database.engine.dispose()
        sa.event.listen(database.engine, "connect", lambda db, _: db.execute("PRAGMA busy_timeout = 100000"))
    kit = SqlKit(database)
    destination = Destination(seed)
    disturber = Disturber(database, seed)
    keys = random.Random(seed)
    expected: dict[tuple[str, datetime | None], list[int]] = defaultdict(list)

    def make(number: int) -> Event:
        due_at = due_soon(keys) if keys.random() < 0.2 else None
        return Event(str(number), {}, key=f"key-{keys.randrange(KEYS)}", due_at=due_at)

    def put(numbers: range) -> None:
        events = [make(number) for number in numbers]
        kit.put(*events)
        for event in events:
            expected[str(event.key), event.due_at].append(int(event.type))

    async def write() -> None:
        for start in range(count // 2, count, 50):
            await asyncio.to_thread(put, range(start, start + 50))

    async def disturb(is_done: asyncio.Event) -> None:
        while not is_done.is_set():
            await asyncio.to_thread(disturber.run_once)

    try:
        stores = [await kit.open(all_lanes=False) for _ in range(4)]
        put(range(count // 2))
        is_done = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number, store in enumerate(stores):
                group.create_task(relay(store, destination, seed + number, is_done))
            group.create_task(disturb(is_done))
            group.create_task(look_after(stores[0], is_done))
            await group.create_task(write())
            await until(lambda: is_empty(stores[0]), seconds=100)
            is_done.set()
        for (key, _), numbers in expected.items():
            mine = set(numbers)
            assert [number for number in destination.taken[key] if number in mine] == numbers
        assert sum(map(len, destination.taken.values())) == count
        assert destination.early == []
        assert await stores[0].find_faults() == []
        assert destination.retries > count // 50
        assert destination.releases > count // 200
        assert destination.deaths > count // 400
        await kit.close()
    finally:
        database.drop()
