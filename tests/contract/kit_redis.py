"""Redis Streams, read over a plain socket: redis-cli has no form for bytes that are no text."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pillarbox.event import Claim
from pillarbox.sinks import Sink, open_sink
from tests.brokers import BrokerName
from tests.contract.broker_kits import BROKER, BrokerKit, Received, named_claim
from tests.servers import server_url


class RedisKit(BrokerKit):
    broker: ClassVar[BrokerName | None] = "redis"

    def make_sink(self, **options: Any) -> Sink:
        return open_sink(self.url, **{"stream": f"{self.place}:{{type}}", "name": "redis", **options})

    def make_stranger(self) -> Sink:
        return open_sink(self.url.replace(":pillarbox@", ":not-the-password@"))

    def refused_by_server(self, name: str, key: str | None = None) -> Claim:
        self.call("SET", f"{self.place}:taken", "not a stream")
        return named_claim(name, key, type="taken")

    def received(self) -> list[Received]:
        return [self._read(fields) for _, fields in self.call("XRANGE", f"{self.place}:order.placed", "-", "+")]

    def _read(self, flat: list[bytes]) -> Received:
        fields = {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
        body = fields.pop("payload")
        headers = {name: value.decode() for name, value in fields.items()}
        return Received(body, headers, headers.get("content-type"), headers.get("event-key"))

    def call(self, *command: str) -> Any:
        with Wire(self.url) as wire:
            return wire.call(*command)


class RedisClusterKit(RedisKit):
    broker: ClassVar[BrokerName | None] = None
    features: ClassVar = BROKER - {"goes down"}

    def prepare(self) -> None:
        self.url = server_url("redis_cluster")

    def make_sink(self, **options: Any) -> Sink:
        return super().make_sink(**{"cluster": True, "name": "redis-cluster", **options})

    def make_stranger(self) -> Sink:
        return open_sink(self.url.replace(":pillarbox@", ":not-the-password@"), cluster=True)


class Wire:
    """One connection to a Redis server, logged in; it goes after a key to the node of a cluster that has it."""

    def __init__(self, url: str) -> None:
        self._url = url
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port), timeout=30)
        self._stream = self._socket.makefile("rwb")
        self.call("AUTH", str(parts.username), str(parts.password))

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._socket.close()

    def call(self, *command: str) -> Any:
        """Return the answer; an error is an assertion that failed."""
        self.write(*command)
        kind, line = self._stream.read(1), self._stream.readline().rstrip(b"\r\n")
        if kind == b"-" and line.startswith(b"MOVED "):
            address = line.split()[-1].decode()
            with Wire(urlsplit(self._url)._replace(netloc=f"pillarbox:pillarbox@{address}").geturl()) as other:
                return other.call(*command)
        return self._read(kind, line)

    def write(self, *command: str) -> None:
        self._stream.write(f"*{len(command)}\r\n".encode())
        for word in command:
            self._stream.write(f"${len(word.encode())}\r\n{word}\r\n".encode())
        self._stream.flush()

    def read(self) -> Any:
        return self._read(self._stream.read(1), self._stream.readline().rstrip(b"\r\n"))

    def _read(self, kind: bytes, line: bytes) -> Any:
        if kind == b"*":
            return [self.read() for _ in range(int(line))]
        if kind == b"$":
            return self._stream.read(int(line) + 2)[:-2] if int(line) >= 0 else None
        assert kind != b"-", line
        return line


class CuttingProxy:
    """Passes everything to the server; once armed, closes after so many lines of its answers."""

    def __init__(self) -> None:
        self.lines_left: int | None = None

    async def __aenter__(self) -> CuttingProxy:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        await self.server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parts = urlsplit(server_url("redis"))
        from_server, to_server = await asyncio.open_connection(parts.hostname, parts.port)
        forward = asyncio.create_task(self._copy(reader, to_server))
        while self.lines_left != 0 and (line := await from_server.readline()):
            writer.write(line)
            await writer.drain()
            if self.lines_left is not None:
                self.lines_left -= 1
        forward.cancel()
        self.lines_left = None
        for each in (writer, to_server):
            each.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()


class StallingServer:
    """Answers so many entries, reads up to so many, and then nothing more from a connection that stays open."""

    def __init__(self, *, answers: int, reads: int) -> None:
        self._answers = answers
        self._reads = reads
        self._is_over = asyncio.Event()

    async def __aenter__(self) -> StallingServer:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over.set()
        self.server.close()
        await self.server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        entries = 0
        while entries < self._reads:
            if (await self._read_command(reader))[0] != b"XADD":
                writer.write(b"+OK\r\n")
                continue
            entries += 1
            if entries <= self._answers:
                writer.write(b"$3\r\n1-%d\r\n" % entries)
        await self._is_over.wait()
        writer.close()

    async def _read_command(self, reader: asyncio.StreamReader) -> list[bytes]:
        words = []
        for _ in range(int((await reader.readline())[1:])):
            length = int((await reader.readline())[1:])
            words.append((await reader.readexactly(length + 2))[:-2])
        return words
