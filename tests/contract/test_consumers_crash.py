"""Consumers that are killed at each point of a message's way: the next one leaves one effect, or one dead letter."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.contract.consumer_process import IN_THE_HANDLER, make_handlers
from tests.contract.consumers import (
    MODES,
    QUICKEST,
    ConsumerDatabase,
    Service,
    consumers_on,
    every_broker,
    make_databases,
)
from tests.contract.sources import GROUP, SourceKit, source_kit
from tests.servers import ROOT

__all__ = ["source_kit"]

AT_ONCE, STORED = MODES


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ConsumerDatabase]]:
    with make_databases(tmp_path_factory) as get:
        yield get


@pytest.fixture
def database(request: pytest.FixtureRequest, databases: Callable[[str], ConsumerDatabase]) -> ConsumerDatabase:
    return databases(request.param)


@pytest.fixture
def service(kit: SourceKit, database: ConsumerDatabase, mode: str) -> Service:
    made = Service(kit, database, is_stored=mode == STORED)
    made.handlers = make_handlers(database.ledger, "none")
    return made


async def die_at(service: Service, point: str) -> None:
    """Run a consumer in a process of its own until it has killed itself."""
    database = service.database
    given = {
        "source": service.kit.url,
        "options": service.kit.options,
        "url": database.url.render_as_string(hide_password=False),
        "layout": "pillarbox" if database.is_own else database.name,
        "table": database.table,
        "ledger": database.ledger.name,
        "group": GROUP,
        "stored": service.is_stored,
        "point": point,
    }
    command = [sys.executable, "-m", "tests.contract.consumer_process", json.dumps(given)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    try:
        code = await asyncio.wait_for(process.wait(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert code == -signal.SIGKILL
    # What it held under lease is free after half a minute: now will do.
    database.lapse()


def on_quickest(mode: str, *databases: str) -> pytest.MarkDecorator:
    return consumers_on(*((QUICKEST, database) for database in databases), modes=(mode,))


async def recover(service: Service, *names: str) -> None:
    async with service.consuming():
        await service.done(*names, within=service.kit.patience + 40)
    assert [message for _, message in service.database.taken()] == sorted(names)


# -- before and after the commit -------------------------------------------------------------------------------------


@every_broker
@pytest.mark.timeout(180)
async def test_consumer_killed_in_a_handler_leaves_no_effect_and_the_next_has_it(service: Service) -> None:
    await service.send("a", key="k")
    await service.send("b", key="k")
    await die_at(service, IN_THE_HANDLER)
    assert service.database.effects() == []
    if not service.is_stored:
        assert service.database.taken() == []
    await recover(service, "a", "b")
    assert service.database.effects() == ["a", "b"]


@every_broker
@pytest.mark.timeout(180)
async def test_consumer_killed_before_the_broker_is_told_has_its_effect_once(service: Service) -> None:
    await service.send("a", key="k")
    await service.send("b", key="k")
    await die_at(service, "before the broker is told")
    taken = [message for _, message in service.database.taken()]
    assert taken
    if not service.is_stored:
        assert sorted(service.database.effects()) == taken
    await recover(service, "a", "b")
    assert service.database.effects() == ["a", "b"]


@on_quickest(AT_ONCE, "postgres", "mariadb", "mysql", "sqlite", "omnibox")
async def test_consumer_killed_after_the_commit_has_its_effect_once(service: Service) -> None:
    await service.send("a")
    await die_at(service, "after the handler's commit")
    assert service.database.effects() == ["a"]
    await recover(service, "a")


@on_quickest(STORED, "postgres", "omnibox")
@pytest.mark.parametrize(
    ("point", "is_taken"),
    [("before the stored message commits", False), ("after the stored message commits", True)],
    ids=["before", "after"],
)
async def test_consumer_killed_while_it_stores_stores_once(service: Service, point: str, is_taken: bool) -> None:
    await service.send("a")
    await die_at(service, point)
    assert service.database.taken() == ([(GROUP, "a")] if is_taken else [])
    await recover(service, "a")


@on_quickest(STORED, "mariadb", "mysql", "sqlite", "omnibox")
async def test_consumer_killed_in_a_handler_of_a_stored_message_has_its_effect_once(service: Service) -> None:
    await service.send("a")
    await die_at(service, IN_THE_HANDLER)
    assert service.database.effects() == []
    assert service.database.taken() == [(GROUP, "a")]
    await recover(service, "a")


# -- dead letters ----------------------------------------------------------------------------------------------------


@on_quickest(AT_ONCE, "postgres", "omnibox")
@pytest.mark.parametrize(
    ("point", "is_buried"),
    [("before the dead letter commits", False), ("after the dead letter commits", True)],
    ids=["before", "after"],
)
async def test_consumer_killed_while_it_buries_leaves_one_letter(service: Service, point: str, is_buried: bool) -> None:
    await service.send("x", type="wrong")
    await die_at(service, point)
    assert count_dead(service.database) == int(is_buried)
    await service.send("a")
    async with service.consuming():
        await service.done("a", within=service.kit.patience + 40)
    assert count_dead(service.database) == 1


def count_dead(database: ConsumerDatabase) -> int:
    count = int(database.run("SELECT count(*) AS n FROM {queue}_dead")[0]["n"])
    if not database.is_own:
        count += int(database.run("SELECT count(*) AS n FROM {inbox} WHERE status = 'failed'")[0]["n"])
    return count
