"""Consumers whose database or broker goes down for a while: nothing dies of it, and everything goes on afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from pillarbox import Context
from pillarbox.hooks import Hook
from tests.contract.consumers import BROKERS, MODES, QUICKEST, ConsumerDatabase, Service, consumers_on
from tests.contract.sources import SourceKit, load_kit, source_kit, until
from tests.private import private_server
from tests.servers import ServerName

__all__ = ["source_kit"]

STORED = MODES[1]


class Outages(Hook):
    """Notes why destinations were paused."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def paused(self, sink: str, reason: str) -> None:
        self.reasons.append(reason)


@pytest.fixture
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ConsumerDatabase]:
    made = ConsumerDatabase(request.param, tmp_path)
    yield made
    made.drop()


@pytest.fixture
def fragile(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Tables on a server that the test may kill, and the server."""
    name: ServerName = request.param
    server = private_server(name)
    server.start()
    monkeypatch.setenv(f"PILLARBOX_TEST_{name.upper()}", server.url)
    made = ConsumerDatabase(name, tmp_path)
    yield made, server
    server.start()
    made.drop()


def record_orders(service: Service) -> list[int]:
    """Record each order; returns the attempts, to be looked at later."""
    attempts: list[int] = []

    @service.handlers.on("order")
    def record(order: dict[str, Any], session: Session, context: Context) -> None:
        service.write(session, order)
        attempts.append(context.attempt)

    return attempts


@pytest.mark.parametrize("kit", [pytest.param((QUICKEST, frozenset()), id=QUICKEST)], indirect=True)
@pytest.mark.parametrize("fragile", ["postgres", "mariadb"], indirect=True)
@pytest.mark.parametrize("mode", MODES)
async def test_database_that_is_down_for_a_while_costs_nothing(kit: SourceKit, fragile: Any, mode: str) -> None:
    database, server = fragile
    service = Service(kit, database, is_stored=mode == STORED)
    attempts = record_orders(service)
    outages = Outages()
    async with service.consuming(hook=outages):
        await service.send("a")
        await service.done("a")
        await asyncio.to_thread(server.kill)
        database.engine.dispose()
        await service.send("b", "c", key="k")
        await service.send("d")
        await until(lambda: len(outages.reasons) >= 2)
        # Not in a thread: such a server dies with the thread that started it.
        server.start()
        await service.done("a", "b", "c", "d")
        assert await service.wait_for_dead(0) == []
    assert [name for name in database.effects() if name in "bc"] == ["b", "c"]
    # None of the failures was a message's own.
    assert attempts == [1, 1, 1, 1]


@pytest.mark.parametrize("kit", [pytest.param((QUICKEST, frozenset()), id=QUICKEST)], indirect=True)
@pytest.mark.parametrize("fragile", ["postgres"], indirect=True)
@pytest.mark.parametrize("mode", MODES)
async def test_database_that_is_down_when_a_consumer_starts_is_waited_for(
    kit: SourceKit, fragile: Any, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    database, server = fragile
    service = Service(kit, database, is_stored=mode == STORED)
    record_orders(service)
    await service.send("a")
    database.engine.dispose()
    await asyncio.to_thread(server.kill)
    async with service.consuming():
        await until(lambda: "The store is down" in caplog.text)
    # Stopped while it waits, it has ended; the next one waits until the database is back.
    caplog.clear()
    async with service.consuming():
        await until(lambda: "The store is down" in caplog.text)
        server.start()
        await service.done("a")


fragile_brokers = consumers_on(
    *((broker, "postgres") for broker in BROKERS if "goes down" in load_kit(broker).features),
    needs=frozenset({"goes down"}),
)


@fragile_brokers
@pytest.mark.timeout(180)
async def test_broker_that_restarts_loses_and_repeats_nothing(
    kit: SourceKit, database: ConsumerDatabase, mode: str
) -> None:
    service = Service(kit, database, is_stored=mode == STORED)
    record_orders(service)
    async with service.consuming():
        await service.send("a", "b", key="k")
        await service.done("a", "b")
        await asyncio.to_thread(kit.go_down)
        kit.come_back()
        await service.send("a", "c", "d", key="k")
        await service.done("a", "b", "c", "d", within=kit.patience + 60)
        assert await service.wait_for_dead(0) == []
    assert database.effects() == ["a", "b", "c", "d"]


@fragile_brokers
@pytest.mark.timeout(180)
async def test_broker_that_is_down_when_a_consumer_starts_is_waited_for(
    kit: SourceKit, database: ConsumerDatabase, mode: str
) -> None:
    service = Service(kit, database, is_stored=mode == STORED)
    record_orders(service)
    await service.send("a", "b", key="k")
    await asyncio.to_thread(kit.go_down)
    async with service.consuming():
        kit.come_back()
        await service.done("a", "b", within=kit.patience + 60)
    assert database.effects() == ["a", "b"]
