"""Tables without any default: other systems' programs fill their columns themselves, and so must we.

Every layout lives its whole life on tables from which the server's defaults are taken.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from pillarbox.event import DELIVERED, Dead, Retry
from pillarbox.stores import Filter
from tests.contract.layouts import SPECS, LayoutDatabase, LayoutKit, claim, make_layout_database

OWN = ("pillarbox", "pillarbox-partitioned")
PUT = [f"{spec.layout}-postgresql" for spec in SPECS.values() if "put" in spec.features and spec.layout not in OWN]


@pytest.fixture(scope="module")
def bare(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LayoutDatabase]:
    database = make_layout_database(request.param, tmp_path_factory.mktemp("bare"))
    columns = "SELECT column_name, is_identity FROM information_schema.columns WHERE table_name = :table"
    with database.engine.begin() as db:
        for role, table in database.outbox.tables.items():
            # Numbers come from the database; the side table is ours.
            for column, is_identity in db.execute(sa.text(columns), {"table": table.name}).all():
                is_number = is_identity == "YES" or table.c[column].autoincrement is True
                is_number |= column == "id" and isinstance(table.c[column].type, sa.Integer)
                if role != "state" and not is_number:
                    db.exec_driver_sql(f'ALTER TABLE {table.fullname} ALTER COLUMN "{column}" DROP DEFAULT')
    yield database
    database.drop()


@pytest.mark.parametrize("bare", PUT, indirect=True)
async def test_whole_life_without_defaults(bare: LayoutDatabase) -> None:
    kit = LayoutKit(bare)
    try:
        kit.put(kit.event("one"))
        kit.put(kit.event("two"), kit.event("three"))
        store = await kit.open()
        batch = await claim(store)
        assert len(batch.claims) == 3
        await batch.settle([Retry("later", kit.spec.lease * 0), Dead("no"), DELIVERED])
        assert await store.redrive(Filter(), actor="test") == 1
        if "replay" in kit.spec.features:
            assert await store.replay(Filter(), actor="test") == 1
        await kit.look_again()
        again = await claim(store)
        assert {each.event.type for each in again.claims} >= {"one", "two"}
        await again.settle([DELIVERED] * len(again.claims))
    finally:
        await kit.close()
