"""A consumer whose inbox is on an engine of the user's, before a database that says nothing any more."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from pillarbox import Inbox, StoreUnavailable
from pillarbox.inbox import database as database_module
from pillarbox.inbox.database import open_database
from tests.freezing import HANG, freezing_before
from tests.servers import ServerName, server_url

DRIVERS: list[tuple[ServerName, str]] = [
    ("postgres", "asyncpg"),
    ("postgres", "psycopg"),
    ("mariadb", "aiomysql"),
    ("mariadb", "pymysql"),
]


def ask(db: sa.Connection) -> Any:
    return db.exec_driver_sql("SELECT 1").scalar_one()


@pytest.mark.parametrize(("server", "driver"), DRIVERS, ids=[driver for _, driver in DRIVERS])
async def test_a_silent_connection_is_given_up_and_the_next_one_works(
    server: ServerName, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "STATEMENT_TIMEOUT", timedelta(seconds=1))
    with freezing_before(server_url(server)) as proxy:
        url = sa.make_url(proxy.url)
        url = url.set(drivername=f"{url.drivername}+{driver}")
        engine = create_async_engine(url) if driver in ("asyncpg", "aiomysql") else sa.create_engine(url)
        database = open_database(Inbox(sa.MetaData()), engine)
        try:
            assert await database.run(ask) == 1
            assert proxy.freeze() == 1
            async with asyncio.timeout(HANG):
                with pytest.raises(StoreUnavailable, match="did not answer within 1 s; the connection is given up"):
                    await database.run(ask)
                assert await database.run(ask) == 1
        finally:
            if isinstance(engine, sa.Engine):
                engine.dispose()
            else:
                await engine.dispose()


async def test_what_was_given_up_before_it_had_a_connection_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "STATEMENT_TIMEOUT", timedelta(seconds=0.2))
    url = sa.make_url(server_url("postgres")).set(drivername="postgresql+psycopg")
    engine = sa.create_engine(url, pool_size=1, max_overflow=0)
    table = sa.Table(f"late_{uuid4().hex}", sa.MetaData(), sa.Column("id", sa.Integer))
    database = open_database(Inbox(sa.MetaData()), engine)
    ran = threading.Event()

    def write(db: sa.Connection) -> None:
        db.execute(table.insert().values(id=1))
        ran.set()

    try:
        table.create(engine)
        with engine.connect(), pytest.raises(StoreUnavailable, match="did not answer"):
            await database.run(write)
        # The connection is free now, and the thread that waited for it goes on.
        assert await asyncio.to_thread(ran.wait, 30)
        with engine.connect() as db:
            assert db.execute(table.select()).all() == []
    finally:
        table.drop(engine)
        engine.dispose()
