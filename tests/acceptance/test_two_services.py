"""A shop and a bank with Kafka between them, all their processes killed again and again: each order is booked once."""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
import sqlalchemy as sa

from tests.acceptance import two_services
from tests.acceptance.launcher import Command, Launcher, Program
from tests.acceptance.processes import temporary_database, until
from tests.acceptance.two_services import GROUPS, Bank, Booking, Shop, make_engine
from tests.contract.kit_kafka import make_topic
from tests.servers import server_url

CHAOS = 60.0
FINISH = 75.0
AT_WORK = ("Selling: ", "Relaying: ", "Consuming: ")
SEED = "PILLARBOX_TEST_SEED"
"""The variable that repeats a run's lives."""


@dataclass(frozen=True)
class Starter:
    """What starts processes. The seed decides how long each of them lives, every time."""

    launcher: Launcher
    folder: Path
    seed: int


class Actor:
    """One process, which is started again whenever it was killed."""

    lives = (0.5, 6.0)
    """How many seconds it may live once it is at work, at least and at most."""

    def __init__(self, starter: Starter, name: str, *args: str, program: Program = "pillarbox") -> None:
        self.name = name
        self.deaths = 0
        self._log = starter.folder / f"{name}.log"
        self._launcher = starter.launcher
        self._chance = random.Random(f"{starter.seed} {name}")
        self._args = args
        self._program = program
        self._command: Command | None = None
        self._life = 0.0
        self._dies_at: float | None = None

    def start(self) -> None:
        """Start it for a life of random length; one of four is over before the process is at work."""
        self._life = self._chance.uniform(*self.lives)
        self._log.write_text("")
        self._dies_at = time.monotonic() + 0.5 if self._chance.random() < 0.25 else None
        self._command = self._launcher.start(
            *self._args, program=self._program, cwd=self._log.parent, out=self._log, err=self._log
        )

    def is_due(self) -> bool:
        """Whether it has lived long enough; it counts from when it is at work, however slow the machine is."""
        if self._dies_at is None and any(word in self._log.read_text() for word in AT_WORK):
            self._dies_at = time.monotonic() + self._life
        return self._dies_at is not None and time.monotonic() >= self._dies_at

    def kill(self) -> None:
        """SIGKILL; one that ended by itself fails the test."""
        assert self._command is not None
        code = self._command.poll()
        if code is not None:
            pytest.fail(f"{self.name} ended with {code} by itself:\n{self._log.read_text()[-4000:]}")
        self._command.kill()
        self._command.wait()
        self._command = None
        self.deaths += 1

    def end(self) -> None:
        if self._command is not None:
            self._command.kill()
            self._command.wait()


class Consumer(Actor):
    # A group waits for a member that was killed until its session is over: it must have time to work as well.
    lives = (6.0, 16.0)


class Town:
    """Both services, the relays between them, and a topic of their own."""

    def __init__(self, starter: Starter, shop_url: str, bank_url: str) -> None:
        self.shop = Shop(shop_url)
        self.shop.create()
        self.bank_engine = make_engine(bank_url)
        self.banks = [Bank(group) for group in GROUPS]
        for bank in self.banks:
            bank.create(self.bank_engine)
        kafka, topic = server_url("kafka"), f"orders.{uuid4().hex[:12]}"
        make_topic(kafka, topic, partitions=4)
        program = str(Path(two_services.__file__))
        self.shops = [Actor(starter, f"shop-{n}", program, shop_url, f"{n}", program="python") for n in range(2)]
        relay = ["relay", "--store", shop_url, "--sink", f"{kafka}?topic={topic}"]
        self.others = [Actor(starter, f"relay-{n}", *relay) for n in range(2)]
        # The shortest session that brokers allow: a killed member's partitions wait for so long.
        source = ["consume", "--store", bank_url, "--source", f"{kafka}?topics={topic}&session=6s"]
        for group in GROUPS:
            mode = "--at-once" if group == "at_once" else "--stored"
            handlers = f"tests.acceptance.two_services:{group}"
            more = ["--table", f"inbox_{group}", "--group", f"{topic}.{group}", mode, "--handlers", handlers]
            self.others += [Consumer(starter, f"{group}-{n}", *source, *more) for n in range(2)]

    @property
    def actors(self) -> list[Actor]:
        return [*self.shops, *self.others]

    def is_finished(self) -> bool:
        """Whether nothing is under way: what the shop took is what the bank booked, as far as numbers go."""
        taken = len(self.shop.ordered())
        booked = [len(bank.booked(self.bank_engine)) >= taken for bank in self.banks]
        return not self.shop.remaining() and all(booked) and not any(b.waiting(self.bank_engine) for b in self.banks)

    def describe(self) -> str:
        booked = {bank.group: len(bank.booked(self.bank_engine)) for bank in self.banks}
        deaths = {actor.name: actor.deaths for actor in self.actors}
        return f"orders {len(self.shop.ordered())}, outbox {self.shop.remaining()}, booked {booked}, killed {deaths}"


@pytest.fixture
def town(launcher: Launcher, tmp_path: Path) -> Iterator[Town]:
    with temporary_database("postgres", tmp_path) as shop, temporary_database("postgres", tmp_path) as bank:
        # Both come with an outbox, which a shop and a bank declare themselves.
        for each in (shop, bank):
            _empty(each.engine)
        seed = int(os.environ.get(SEED) or random.SystemRandom().randrange(2**32))
        print(f"{SEED}={seed}")
        made = Town(Starter(launcher, tmp_path, seed), shop.url, bank.url)
        yield made
        for actor in made.actors:
            actor.end()


def _empty(engine: sa.Engine) -> None:
    found = sa.MetaData()
    found.reflect(engine)
    found.drop_all(engine)


@pytest.mark.timeout(180)
def test_every_order_is_booked_once_whatever_is_killed(town: Town) -> None:
    kill_at_random(town)
    print(town.describe())
    booked_meanwhile = [len(bank.booked(town.bank_engine)) for bank in town.banks]
    for shop in town.shops:
        shop.kill()
    ordered = town.shop.ordered()
    assert all(actor.deaths for actor in town.actors), "a process was never killed"
    assert min(booked_meanwhile) > 0, "nothing was booked while processes were killed"
    try:
        until(town.is_finished, "every order to be booked", seconds=FINISH)
    finally:
        print(town.describe())
    assert town.shop.remaining() == town.shop.dead() == 0
    for bank in town.banks:
        booked = bank.booked(town.bank_engine)
        assert by_customer(booked) == by_customer(ordered), bank.group
        assert bank.balances(town.bank_engine) == sum_up(ordered), bank.group
        assert bank.dead(town.bank_engine) == 0, bank.group


def kill_at_random(town: Town) -> None:
    """For a minute kill each process when its life is over, and start it again."""
    for actor in town.actors:
        actor.start()
    over_at = time.monotonic() + CHAOS
    while time.monotonic() < over_at:
        for actor in town.actors:
            if actor.is_due():
                actor.kill()
                actor.start()
        time.sleep(0.02)


def by_customer(bookings: list[Booking]) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for customer, number, amount in bookings:
        found[customer].append((number, amount))
    return dict(found)


def sum_up(bookings: list[Booking]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for customer, _, amount in bookings:
        found[customer] += amount
    return dict(found)
