"""What the tests of the HTTP sink share: a server, and sinks to it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pillarbox.errors import SinkUnavailable
from pillarbox.event import Claim
from pillarbox.sinks import open_sink
from tests.contract.broker_kits import named_claim
from tests.contract.http_server import serve


@pytest.fixture(name="server")
async def running_server():
    async with serve() as made:
        yield made


@pytest.fixture(name="sinks")
async def made_sinks(server):
    """Makes sinks to the server and closes them."""
    made: list[Any] = []

    def make(path: str = "/hook", **options: Any) -> Any:
        made.append(open_sink(f"http://127.0.0.1:{server.port}{path}", **{"name": "hooks", **options}))
        return made[-1]

    yield make
    for sink in made:
        await sink.close()
    await asyncio.sleep(0)
    await server.end_talks()
    assert asyncio.all_tasks() == {asyncio.current_task()}


def answering(status: int, body: bytes = b"", **headers: str) -> Any:
    return lambda request: (status, {name.replace("_", "-"): value for name, value in headers.items()}, body)


async def outage_of(sink: Any, *claims: Claim) -> SinkUnavailable:
    with pytest.raises(SinkUnavailable) as outage:
        await sink.deliver(claims or [named_claim("a")])
    return outage.value
