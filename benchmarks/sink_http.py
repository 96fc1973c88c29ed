"""The relay from PostgreSQL to a webhook, over a bare loop of the same client with as many requests at once."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import httpx

from benchmarks import sinks
from benchmarks.common import PAYLOAD, Result
from pillarbox import open_sink

CONCURRENCY = 16
EVENTS = 4_000

# Reads whole requests and says yes, with as little work as that takes: the server is not what is measured.
_SERVER = """
import asyncio
async def talk(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            length = head.lower().partition(b"content-length:")[2].partition(b"\\r")[0]
            await reader.readexactly(int(length))
            writer.write(b"HTTP/1.1 204 No Content\\r\\n\\r\\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
async def main():
    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


@asynccontextmanager
async def http_place() -> AsyncIterator[sinks.Place]:
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", _SERVER, stdout=PIPE)
    assert server.stdout is not None
    url = f"http://127.0.0.1:{int(await server.stdout.readline())}/hook"
    limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
    client = httpx.AsyncClient(limits=limits, trust_env=False)

    async def post(count: int) -> None:
        for _ in range(count):
            id = str(uuid4())
            headers = {
                "event-id": id,
                "event-type": "bench",
                "event-key": "key-1",
                "content-type": "application/octet-stream",
                "idempotency-key": id,
            }
            answer = await client.post(url, content=PAYLOAD, headers=headers)
            answer.raise_for_status()

    async def send(count: int) -> None:
        shares = [len(range(start, count, CONCURRENCY)) for start in range(CONCURRENCY)]
        await asyncio.gather(*map(post, shares))

    yield sinks.Place(lambda: open_sink(url, concurrency=CONCURRENCY), send)
    await client.aclose()
    server.terminate()
    await server.wait()


async def sink_http() -> Result:
    """HTTP: one request an event, 16 at once."""
    return await sinks.measure("sink_http", http_place(), events=EVENTS)


BENCHMARKS = (sink_http,)
