"""The stores under contract, by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import pytest

from pillarbox.stores import Mode, Store
from tests.contract.layouts import LayoutDatabase, LayoutKit, kit_names, make_layout_database, offered_by
from tests.contract.locking_specs import register_locking_specs
from tests.contract.specs import register_specs
from tests.contract.stores import FEATURES, KITS, Database, Kit, MemoryKit, SqlKit, make_database, make_kit

register_locking_specs()
register_specs()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*features): for stores on databases with these features")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a store does not offer: nothing there is missing that could be installed."""
    left_out = [item for item in items if not _is_offered(item)]
    config.hook.pytest_deselected(items=left_out)
    without = set(left_out)
    items[:] = [item for item in items if item not in without]


def _is_offered(item: pytest.Item) -> bool:
    params: Mapping[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    if "layout_kit" in params:
        offered = offered_by(params["layout_kit"])
    elif params.get("kit") in KITS:
        offered = frozenset(FEATURES[params["kit"]])
    else:
        return True
    needed = {feature for marker in item.iter_markers("needs") for feature in marker.args}
    if params.get("mode") == "hold" or "hold_store" in getattr(item, "fixturenames", ()):
        needed.add("hold")
    return needed <= offered


@pytest.fixture(scope="session")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Database]]:
    """The databases that tests asked for so far; each is made once."""
    made: dict[str, Database] = {}

    def get(name: str) -> Database:
        if name not in made:
            made[name] = make_database(name, tmp_path_factory.mktemp("stores"))
        return made[name]

    yield get
    for database in made.values():
        database.drop()


@pytest.fixture(params=KITS)
async def kit(
    request: pytest.FixtureRequest, databases: Callable[[str], Database]
) -> AsyncIterator[MemoryKit | SqlKit]:
    """One database with an empty outbox; a test that leaves a connection or a task behind fails."""
    made = make_kit(request.param, None if request.param == "memory" else databases(request.param))
    yield made
    await made.close()
    await asyncio.sleep(0)
    alive = asyncio.all_tasks() - {asyncio.current_task()}
    assert not alive, f"tasks still alive: {alive}"


@pytest.fixture(params=["hold", "lease"])
def mode(request: pytest.FixtureRequest) -> Mode:
    """Each way of claiming that the store offers."""
    chosen: Mode = request.param
    return chosen


@pytest.fixture
async def store(kit: Kit) -> Store:
    return await kit.open()


@pytest.fixture
async def hold_store(kit: Kit) -> Store:
    """A store, for the databases on which it can hold rows."""
    return await kit.open()


@pytest.fixture(scope="session")
def layout_databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], LayoutDatabase]]:
    """The tables of layouts that tests asked for so far; each is made once."""
    made: dict[str, LayoutDatabase] = {}

    def get(name: str) -> LayoutDatabase:
        if name not in made:
            made[name] = make_layout_database(name, tmp_path_factory.mktemp("layouts"))
        return made[name]

    yield get
    for database in made.values():
        database.drop()


@pytest.fixture(params=kit_names())
async def layout_kit(
    request: pytest.FixtureRequest, layout_databases: Callable[[str], LayoutDatabase]
) -> AsyncIterator[LayoutKit]:
    """One layout's empty table on one database; a test that leaves a connection or a task behind fails."""
    made = LayoutKit(layout_databases(request.param))
    yield made
    await made.close()
    await asyncio.sleep(0)
    alive = asyncio.all_tasks() - {asyncio.current_task()}
    assert not alive, f"tasks still alive: {alive}"


@pytest.fixture(params=["UTC", "New York"])
def zone(request: pytest.FixtureRequest, layout_kit: LayoutKit) -> Iterator[str]:
    """Where the sessions of writers and stores are, and this process."""
    with layout_kit.far_from_utc() if request.param == "New York" else nullcontext():
        yield request.param
