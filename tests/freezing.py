"""A TCP proxy before a server that freezes: established connections stay open and say nothing, as after a failover."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

HANG = 60.0
"""Seconds after which a test calls it a hang: more than a busy machine needs for what has a bound of its own."""


class _Passage:
    """One connection through the proxy; once frozen it passes nothing any more, either way, and is not closed."""

    def __init__(self) -> None:
        self.is_frozen = False
        self.is_open = True


class FreezingProxy:
    """Runs in a thread of its own, so that whoever hangs does not hang it."""

    def __init__(self, target: str) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 0)
        self._loop = asyncio.new_event_loop()
        self._passages: list[_Passage] = []
        self._freezes_new = False
        self._freeze_when: tuple[re.Pattern[bytes], bool] | None = None
        self.has_frozen = threading.Event()
        """Set when `freeze_at` has struck."""
        self.has_swallowed = threading.Event()
        """Set when a client has said something on a frozen connection."""
        self._listening = socket.create_server(("127.0.0.1", 0))
        port = self._listening.getsockname()[1]
        self.url = target.replace(f"{parts.hostname}:{parts.port}", f"127.0.0.1:{port}")
        self._thread = threading.Thread(target=self._serve, name="freezing-proxy", daemon=True)
        self._thread.start()

    def freeze(self, *, also_new: bool = False) -> int:
        """Freeze what is connected, and if asked what connects later; returns how many connections that were."""
        self._freezes_new = also_new
        self.has_swallowed.clear()
        frozen = [passage for passage in self._passages if passage.is_open and not passage.is_frozen]
        for passage in frozen:
            passage.is_frozen = True
        return len(frozen)

    def freeze_at(self, word: bytes, *, also_new: bool = False) -> None:
        """As `freeze`, as soon as a client says this word: the server does not hear it."""
        # Not COMMITTED for COMMIT.
        whole = re.compile(rb"\b" + word + rb"\b")
        self._freeze_when = (whole, also_new)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._listening.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._pass_both, sock=self._listening))
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _pass_both(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passage = _Passage()
        passage.is_frozen = self._freezes_new
        self._passages.append(passage)
        writers, ways = [writer], []
        # The proxy may be closed at any moment, also while a client hangs up.
        with suppress(asyncio.CancelledError):
            try:
                server_reader, server_writer = await asyncio.open_connection(*self._target)
                writers.append(server_writer)
                ways = [
                    asyncio.create_task(self._pass(reader, server_writer, passage, is_client=True)),
                    asyncio.create_task(self._pass(server_reader, writer, passage, is_client=False)),
                ]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                passage.is_open = False
                for each in writers:
                    each.transport.abort()
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passage: _Passage, *, is_client: bool
    ) -> None:
        with suppress(OSError):
            while chunk := await reader.read(65_536):
                if is_client and self._freeze_when is not None and self._freeze_when[0].search(chunk):
                    (_, also_new), self._freeze_when = self._freeze_when, None
                    self.freeze(also_new=also_new)
                    self.has_frozen.set()
                if passage.is_frozen:
                    if is_client:
                        self.has_swallowed.set()
                    continue
                writer.write(chunk)
                await writer.drain()
        if passage.is_frozen and not is_client:
            # The server ended it; a host that vanished does not tell.
            await asyncio.Event().wait()


@contextmanager
def freezing_before(url: str) -> Iterator[FreezingProxy]:
    proxy = FreezingProxy(url)
    try:
        yield proxy
    finally:
        proxy.close()
