"""The relay from PostgreSQL to a webhook, over a bare loop on as many connections.

The connections are httpcore's, which httpx is made of and the sink keeps itself: httpx's own client is several times
slower with 16 requests at once, and would be too easy a measure.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import httpcore

from benchmarks import sinks
from benchmarks.common import PAYLOAD, Result
from pillarbox import open_sink

CONCURRENCY = 16
EVENTS = 3_000

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
    target = httpcore.URL(url)
    connections = [httpcore.AsyncHTTPConnection(target.origin) for _ in range(CONCURRENCY)]

    async def post(connection: httpcore.AsyncHTTPConnection, count: int) -> None:
        for _ in range(count):
            id = str(uuid4())
            headers: dict[bytes | str, bytes | str] = {
                "host": "127.0.0.1",
                "content-length": str(len(PAYLOAD)),
                "content-type": "application/octet-stream",
                "event-id": id,
                "event-type": "bench",
                "event-key": "key-1",
                "event-time": "2026-03-01T12:30:00.250000+00:00",
                "idempotency-key": id,
                "user-agent": "bench",
            }
            answer = await connection.handle_async_request(
                httpcore.Request("POST", target, headers=headers, content=PAYLOAD)
            )
            assert answer.status == 204
            await answer.aread()
            await answer.aclose()

    async def send(count: int) -> None:
        shares = [len(range(start, count, CONCURRENCY)) for start in range(CONCURRENCY)]
        await asyncio.gather(*map(post, connections, shares))

    yield sinks.Place(lambda: open_sink(url, concurrency=CONCURRENCY), send)
    for connection in connections:
        await connection.aclose()
    server.terminate()
    await server.wait()


async def sink_http() -> Result:
    """HTTP: one request an event, 16 at once."""
    return await sinks.measure("sink_http", http_place(), events=EVENTS)


BENCHMARKS = (sink_http,)
