"""Redis Streams for the Source suite: filled and asked over a plain socket."""

from __future__ import annotations

from typing import Any, ClassVar

from pillarbox.sinks import open_sink
from pillarbox.sources.url import open_source
from tests.brokers import BrokerName
from tests.contract.kit_redis import Wire
from tests.contract.sources import GROUP, SourceKit


class RedisSourceKit(SourceKit):
    broker: ClassVar[BrokerName] = "redis"
    features: ClassVar = SourceKit.features - {"has keys"}

    def prepare(self) -> None:
        self.stream = f"{self.place}:orders"
        self.options = {"streams": [self.stream], "lease": "1s"}

    def send(self, *bodies: bytes, key: str | None = None, headers: dict[str, str | bytes] | None = None) -> None:
        fields: dict[str, str | bytes] = {**({} if key is None else {"event-key": key}), **(headers or {})}
        with BytesWire(self.url) as wire:
            for body in bodies:
                words: list[Any] = [word for each in {**fields, "payload": body}.items() for word in each]
                wire.call("XADD", self.stream, "*", *words)

    def make_sink(self, **options: Any) -> Any:
        return self.keep(open_sink(self.url, stream=self.stream, **options))

    def remaining(self, group: str = GROUP) -> int:
        with Wire(self.url) as wire:
            length = int(wire.call("XLEN", self.stream))
            groups = {each[1].decode(): each for each in wire.call("XINFO", "GROUPS", self.stream)}
            if group not in groups:
                return length
            details = dict(zip(groups[group][::2], groups[group][1::2], strict=True))
            return int(details[b"pending"]) + int(details[b"lag"] or 0)

    def make_stranger(self) -> Any:
        url = self.url.replace(":pillarbox@", ":not-the-password@")
        return self.keep(open_source(url, group=GROUP, dead=self.letters, **self.options))

    def make_missing(self) -> Any:
        return self.make_source(streams=[f"{self.place}:nowhere"], create=False)

    async def take_away(self, source: Any) -> None:
        # Somebody whose entries are idle already, so that the next one takes them over.
        for entry in source.pending:
            self.call("XCLAIM", self.stream, GROUP, "thief", "0", entry.token[1], "IDLE", "60000", "JUSTID")

    def call(self, *words: Any) -> Any:
        with BytesWire(self.url) as wire:
            return wire.call(*words)


class BytesWire(Wire):
    """The same, for words that are no text."""

    def write(self, *command: Any) -> None:
        self._stream.write(f"*{len(command)}\r\n".encode())
        for word in command:
            packed = word if isinstance(word, bytes) else word.encode()
            self._stream.write(f"${len(packed)}\r\n".encode() + packed + b"\r\n")
        self._stream.flush()

    def call(self, *command: Any) -> Any:
        self.write(*command)
        return self.read()
