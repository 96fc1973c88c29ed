"""Redis Streams, read over a plain socket: redis-cli has no form for bytes that are no text."""

from __future__ import annotations

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
