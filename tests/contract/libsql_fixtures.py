"""What the tests of the libSQL writer share: servers, writers to them, and the independent client."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import libsql_client
import pytest

from pillarbox.errors import SinkUnavailable
from pillarbox.sync.writers.libsql import LibsqlWriter
from tests.hrana_server import serve_hrana
from tests.servers import server_url


@pytest.fixture(name="server")
async def libsql_server(tmp_path):
    async with serve_hrana(tmp_path / "remote.db") as made:
        yield made


@pytest.fixture(name="url", params=["own server", "sqld"])
def libsql_url(request, server):
    """A database at our own server, and at the real one."""
    return server.url if request.param == "own server" else server_url("libsql")


@pytest.fixture(name="make_writer")
async def made_writers():
    """Makes writers, closes them, and sees that no task is left."""
    made: list[LibsqlWriter] = []

    def make(url: str, **options: Any) -> LibsqlWriter:
        made.append(LibsqlWriter(url, **options))
        return made[-1]

    yield make
    for writer in made:
        await writer.close()
    await asyncio.sleep(0)


@pytest.fixture(name="table")
async def libsql_table(url):
    """The name of a table with a unique name and an amount that is not 13."""
    name = f"notes_{uuid4().hex}"
    async with libsql_client.create_client(url) as client:
        await client.execute(
            f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, amount CHECK (amount <> 13))"
        )
        yield name
        await client.execute(f"DROP TABLE {name}")


@pytest.fixture(name="client")
async def libsql_client_(url):
    """The independent client, over HTTP."""
    async with libsql_client.create_client(url) as made:
        yield made


async def names_in(client: Any, table: str) -> list[Any]:
    found = await client.execute(f"SELECT name FROM {table} ORDER BY id")
    return [row[0] for row in found.rows]


def insert(table: str, name: Any, amount: Any = None) -> tuple[str, tuple[Any, ...]]:
    return f"INSERT INTO {table} (name, amount) VALUES (?, ?)", (name, amount)


async def outage_of(writer: LibsqlWriter, *statements: Any) -> SinkUnavailable:
    with pytest.raises(SinkUnavailable) as outage:
        await writer.write_batch(statements or [("SELECT 1", ())])
    return outage.value
