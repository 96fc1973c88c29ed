"""What the kits of destinations with a server of their own share.

A kit sends everything to one fresh place (a topic, a stream, a queue) and reads it back with a client that has nothing
in common with the sink's. Names of events are found in their payloads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from pillarbox.event import EVENT_FIELDS, Claim, Event, load_event
from pillarbox.sinks import Sink
from tests.brokers import BrokerName, PrivateBroker
from tests.servers import server_url

# What every broker's kit can do; a kit adds what its own can, or takes away what it cannot.
BROKER: frozenset[str] = frozenset(
    {
        "arrives",
        "refuses",
        "refuses late",
        "goes down",
        "is checked",
        "keeps bytes",
        "takes a megabyte",
        "carries headers",
        "asks for a login",
        "serves a relay",
    }
)


@dataclass(frozen=True)
class Surroundings:
    """What a kit gets: a folder, what its test needs, and servers of its own when it breaks them."""

    folder: Path
    needs: frozenset[str] = frozenset()
    private: Callable[[BrokerName], PrivateBroker] | None = None


@dataclass(frozen=True)
class Received:
    """A message as an independent client reads it; `content_type` is what the destination has as such."""

    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str | None = None
    key: str | None = None


class BrokerKit:
    """The base of a kit; `sink` is ready to use and closed by the fixture.

    A broker's kit names its `broker`: then `url` is the shared one's, or a private one's when the test breaks it.
    """

    broker: ClassVar[BrokerName | None] = None
    features: ClassVar[frozenset[str]] = BROKER
    ce_prefix: ClassVar[str] = "ce-"
    falls_silent: ClassVar[bool] = True
    """Whether its server can be made to answer nothing, so that a kill surely meets a batch under way."""
    many: ClassVar[int] = 10_000
    """How many events a test sends that looks for rare disorder; fewer where each costs a request."""
    sink: Sink

    def __init__(self, surroundings: Surroundings) -> None:
        self.server = self.broker and surroundings.private and surroundings.private(self.broker)
        if self.broker is not None:
            self.url = server_url(self.broker) if self.server is None else self.server.url
        self.place = make_place()
        self.prepare()
        self.sink = self.make_sink()

    def prepare(self) -> None:
        """Make the place that the sink sends to."""

    def make_sink(self, **options: Any) -> Sink:
        """Make one more sink to the same place, with these options."""
        raise NotImplementedError

    def make_stranger(self) -> Sink:
        """Make a sink that logs in with the password `not-the-password`."""
        raise NotImplementedError

    def received(self) -> list[Received]:
        """Everything that has arrived so far, in the order of arrival."""
        raise NotImplementedError

    def refused(self, name: str, key: str | None = None) -> Claim:
        """Make a claim that no destination can take: the sink sees it before it sends."""
        return unwritable(name, key)

    def refused_by_server(self, name: str, key: str | None = None) -> Claim:
        """Make a claim that only the server's answer shows to be bad."""
        raise NotImplementedError

    def fall_silent(self) -> None:
        """Let the server take what is sent and answer nothing more, until it goes down."""
        assert self.server is not None
        self.server.pause()

    def go_down(self) -> None:
        """Kill the server."""
        assert self.server is not None
        self.server.kill()

    def come_back(self) -> None:
        """Start it again with what it had stored; returns when it takes messages."""
        assert self.server is not None
        self.server.start()

    def arrived(self) -> list[str]:
        return [json.loads(message.body)["name"] for message in self.received()]

    def dispose(self) -> None:
        pass


def make_place() -> str:
    return f"contract-{uuid4().hex[:12]}"


def named_claim(name: str, key: str | None = None, *, type: str = "order.placed", **fields: Any) -> Claim:
    """A claim whose name is found in its payload."""
    event = Event(type, {"name": name}, key=key, **fields)
    return Claim(row=name, event=event, attempt=1)


def unwritable(name: str, key: str | None = None) -> Claim:
    """A claim with a header that has no JSON form, as only a row of another system can hold it."""
    event = named_claim(name, key, topic=name).event
    fields = {field: getattr(event, field) for field in EVENT_FIELDS}
    return Claim(row=name, event=load_event(*{**fields, "headers": {"x": object()}}.values()), attempt=1)
