"""NATS JetStream for the Source suite: a stream filled and looked at over a plain socket."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from pillarbox.sinks import Sink, open_sink
from pillarbox.sources import Source
from pillarbox.sources.url import open_source
from tests.brokers import BrokerName
from tests.contract.kit_nats import ask, make_stream
from tests.contract.source_kit_nats_client import publish
from tests.contract.sources import FEATURES, GROUP, SourceKit


class NatsSourceKit(SourceKit):
    broker: ClassVar[BrokerName] = "nats"
    features: ClassVar[frozenset[str]] = FEATURES - {"has keys", "counts attempts", "carries any header"}

    def prepare(self) -> None:
        make_stream(self.url, self.place, subjects=[f"{self.place}.>"])
        self.options = {"stream": self.place, "lease": "2s"}

    def send(self, *bodies: bytes, key: str | None = None, headers: dict[str, str | bytes] | None = None) -> None:
        lines = {**(headers or {}), **({} if key is None else {"event-key": key})}
        publish(self.url, [(f"{self.place}.order", body, lines) for body in bodies])

    def make_sink(self, **options: Any) -> Sink:
        sink: Sink = self.keep(open_sink(self.url, subject=f"{self.place}.{{type}}", **options))
        return sink

    def remaining(self, group: str = GROUP) -> int:
        found = ask(self.url, f"CONSUMER.INFO.{self.place}.{group}")
        if "error" in found:
            messages: int = ask(self.url, f"STREAM.INFO.{self.place}")["state"]["messages"]
            return messages
        return int(found["num_pending"] + found["num_ack_pending"])

    def make_stranger(self) -> Source:
        url = self.url.replace(":pillarbox@", ":not-the-password@")
        source: Source = self.keep(open_source(url, group=GROUP, dead=self.letters, stream=self.place))
        return source

    def make_missing(self) -> Source:
        source: Source = self.make_source(stream=f"{self.place}-nowhere", name="nowhere")
        return source

    async def take_away(self, source: Any) -> None:
        # The whole process stands still for longer than JetStream waits for it.
        time.sleep(2.2)  # noqa: ASYNC251

    def dispose(self) -> None:
        # A server of the test's own may be down, and goes with everything it has.
        if self.server is None:
            ask(self.url, f"STREAM.DELETE.{self.place}")
