"""A TCP proxy before a database server: it delays what passes, counts, and cuts connections at a word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Literal
from urllib.parse import urlsplit


class Proxy:
    """`cut_at` is a word from the client at which the connection ends: before the server gets it, or after it answers.

    The answer is waited for, as some servers give up what they were sent when the client hangs up.
    """

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._parts = parts
        self.url = ""
        self.delay = 0.0
        self.cut_at: bytes | None = None
        self.cut: Literal["before", "after"] = "before"
        self.cuts = 0
        self.round_trips = 0
        """How often the client spoke after it had an answer."""
        self._is_answered = True
        self._is_ending = False
        self._ways: set[asyncio.Task[None]] = set()
        self._serving: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        server_reader, server_writer = await asyncio.open_connection(self._parts.hostname, self._parts.port)
        ways = [
            asyncio.create_task(self._pass(reader, server_writer, watch=True)),
            asyncio.create_task(self._pass(server_reader, writer, watch=False)),
        ]
        self._ways.update(ways)
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for each in (writer, server_writer):
            each.close()
            with suppress(OSError):
                await each.wait_closed()

    async def end(self) -> None:
        for way in self._ways:
            way.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _count(self, *, is_client: bool) -> None:
        self.round_trips += is_client and self._is_answered
        self._is_answered = not is_client

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, watch: bool) -> None:
        with suppress(OSError):
            while chunk := await reader.read(65_536):
                self._count(is_client=watch)
                if self.delay:
                    await asyncio.sleep(self.delay)
                if self._is_ending and not watch:
                    self._is_ending = False
                    return
                if watch and self.cut_at is not None and self.cut_at in chunk:
                    self.cuts += 1
                    self.cut_at = None
                    if self.cut == "before":
                        return
                    self._is_ending = True
                writer.write(chunk)
                await writer.drain()


@asynccontextmanager
async def proxy_before(url: str) -> AsyncIterator[Proxy]:
    proxy = Proxy(url)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    parts = urlsplit(url)
    proxy.url = url.replace(f"{parts.hostname}:{parts.port}", f"127.0.0.1:{port}")
    try:
        yield proxy
    finally:
        server.close()
        await proxy.end()
        await server.wait_closed()
