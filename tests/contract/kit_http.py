"""HTTP webhooks, one request an event and in batches, to a server on plain sockets."""

from __future__ import annotations

import http.client
import json
from typing import Any, ClassVar
from urllib.parse import unquote

from pillarbox.event import Claim
from pillarbox.sinks import Sink, open_sink
from tests.contract.broker_kits import BROKER, BrokerKit, Received, Surroundings, named_claim
from tests.contract.http_server import ServerProcess


class HttpKit(BrokerKit):
    # A login is first heard of with an event: there is nothing else that could be asked for.
    features: ClassVar = BROKER - {"asks for a login"} | {"goes down midway"}
    falls_silent = False
    many: ClassVar = 3_000
    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(self, surroundings: Surroundings) -> None:
        self.receiver = ServerProcess(surroundings.folder)
        super().__init__(surroundings)

    def make_sink(self, **options: Any) -> Sink:
        url = f"http://127.0.0.1:{self.receiver.port}/events"
        return open_sink(url, **{"name": "http", **self.defaults, **options})

    def refused_by_server(self, name: str, key: str | None = None) -> Claim:
        return named_claim(name, key, type="refused")

    def received(self) -> list[Received]:
        found = []
        for request in self.receiver.received():
            headers = {name: unquote(value) for name, value in request.headers.items()}
            found.append(Received(request.body, headers, headers["content-type"], headers.get("event-key")))
        return found

    def go_down(self) -> None:
        self.receiver.kill()

    def go_down_at(self, name: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.receiver.port)
        connection.request("PUT", f"/die-at/{name}")
        assert connection.getresponse().status == 204
        connection.close()

    def come_back(self) -> None:
        self.receiver.start()

    def dispose(self) -> None:
        self.receiver.kill()


class HttpBatchKit(HttpKit):
    features: ClassVar = frozenset({"arrives", "refuses", "refuses late", "goes down", "is checked"})
    defaults: ClassVar = {"batch": 7}

    def arrived(self) -> list[str]:
        return [each["data"]["name"] for message in self.received() for each in json.loads(message.body)]
