"""Redis Streams, read over a plain socket: redis-cli has no form for bytes that are no text."""

from __future__ import annotations

import socket
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pillarbox.event import Claim
from pillarbox.sinks import Sink, open_sink
from tests.brokers import BrokerName
from tests.contract.broker_kits import BrokerKit, Received, named_claim


class RedisKit(BrokerKit):
    broker: ClassVar[BrokerName] = "redis"

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
        parts = urlsplit(self.url)
        with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
            stream = connection.makefile("rwb")
            for each in (["AUTH", str(parts.username), str(parts.password)], command):
                stream.write(f"*{len(each)}\r\n".encode())
                for word in each:
                    stream.write(f"${len(word.encode())}\r\n{word}\r\n".encode())
                stream.flush()
                answer = _read_answer(stream)
        return answer


def _read_answer(stream: Any) -> Any:
    kind, line = stream.read(1), stream.readline().rstrip(b"\r\n")
    if kind == b"*":
        return [_read_answer(stream) for _ in range(int(line))]
    if kind == b"$":
        return stream.read(int(line) + 2)[:-2] if int(line) >= 0 else None
    assert kind != b"-", line
    return line
