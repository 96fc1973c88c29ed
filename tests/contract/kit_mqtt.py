"""MQTT topics, read over a plain socket: mosquitto_sub has no exact form for properties and bytes together."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit
from uuid import uuid4

from pillarbox.event import Claim
from pillarbox.sinks import Sink, open_sink
from tests.brokers import BrokerName
from tests.contract.broker_kits import BrokerKit, Received, named_claim


@dataclass(frozen=True)
class Published:
    topic: str
    body: bytes
    qos: int
    is_retained: bool
    user: dict[str, str]
    content_type: str | None
    expiry: int | None


class Subscriber:
    """A session on the server that outlives its connection; a thread takes what comes while it is connected."""

    def __init__(self, url: str, topic: str, *, qos: int = 1) -> None:
        self._server = urlsplit(url)
        self._name = f"reader{uuid4().hex}"
        self._found: list[Published] = []
        self._marks = 0
        self._marked = threading.Semaphore(0)
        self.connect()
        for number, each in enumerate((topic, f"end/{self._name}"), 1):
            self._send(0x82, number.to_bytes(2, "big") + b"\0" + _text(each) + bytes([qos]))

    def connect(self) -> None:
        parts = self._server
        self._socket = socket.create_connection((parts.hostname, parts.port or 1883), timeout=30)
        # A session that is kept for ten minutes, with user and password.
        about = b"\0\4MQTT\5\xc0\0\0" + b"\5\x11" + (600).to_bytes(4, "big")
        self._send(0x10, about + _text(self._name) + _text(str(parts.username)) + _text(str(parts.password)))
        self._thread = threading.Thread(target=self._listen, args=(self._socket.makefile("rb"),))
        self._thread.start()

    def read(self) -> list[Published]:
        """Everything so far: a marker is published now, and what comes before it is all there is."""
        self._marks += 1
        marker = _text(f"end/{self._name}") + b"\0\7\0" + str(self._marks).encode()
        self._send(0x32, marker)
        assert self._marked.acquire(timeout=60), "the marker did not come"
        return list(self._found)

    def leave(self) -> None:
        """Disconnect; the server goes on collecting."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def end(self) -> None:
        """Let the server forget the session."""
        self._send(0xE0, b"\0\5\x11\0\0\0\0")
        self._thread.join()
        self._socket.close()

    def _send(self, first: int, body: bytes) -> None:
        assert len(body) < 128 * 128
        length = bytes([len(body)]) if len(body) < 128 else bytes([len(body) & 127 | 128, len(body) >> 7])
        self._socket.sendall(bytes([first]) + length + body)

    def _listen(self, stream: Any) -> None:
        with stream:
            try:
                while first := stream.read(1):
                    self._take(first[0], stream.read(_read_length(stream)))
            except (OSError, IndexError):
                pass  # the server is gone

    def _take(self, first: int, body: bytes) -> None:
        kind, qos = first >> 4, first >> 1 & 3
        if kind == 6:
            self._send(0x70, body[:2])
        if kind != 3:
            return
        topic, at = _read_text(body, 0)
        if qos:
            self._send(0x40 if qos == 1 else 0x50, body[at : at + 2])
            at += 2
        found, at = _read_properties(body, at)
        if topic == f"end/{self._name}":
            if int(body[at:]) == self._marks:
                self._marked.release()
            return
        self._found.append(
            Published(topic, body[at:], qos, bool(first & 1), found["user"], found.get("type"), found.get("expiry"))
        )


def _text(text: str) -> bytes:
    return len(text).to_bytes(2, "big") + text.encode()


def _read_length(stream: Any) -> int:
    length = shift = 0
    while True:
        byte: int = stream.read(1)[0]
        length |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return length


def _read_text(body: bytes, at: int) -> tuple[str, int]:
    end = at + 2 + int.from_bytes(body[at : at + 2], "big")
    return body[at + 2 : end].decode(), end


def _read_properties(body: bytes, at: int) -> tuple[dict[str, Any], int]:
    length = shift = 0
    while True:
        byte, at = body[at], at + 1
        length |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    found: dict[str, Any] = {"user": {}}
    end = at + length
    while at < end:
        number, at = body[at], at + 1
        if number == 0x26:
            name, at = _read_text(body, at)
            value, at = _read_text(body, at)
            assert name not in found["user"], f"the property {name!r} comes twice"
            found["user"][name] = value
        elif number == 0x03:
            found["type"], at = _read_text(body, at)
        else:
            assert number == 0x02, f"unexpected property {number}"
            found["expiry"], at = int.from_bytes(body[at : at + 4], "big"), at + 4
    return found, end


class MqttKit(BrokerKit):
    broker: ClassVar[BrokerName] = "mosquitto"
    ce_prefix: ClassVar[str] = ""

    def prepare(self) -> None:
        self.subscriber = Subscriber(self.url, f"+/{self.place}")
        self.subscriber.read()

    def make_sink(self, **options: Any) -> Sink:
        return open_sink(self.url, **{"topic": f"{{type}}/{self.place}", "name": "mqtt", **options})

    def make_stranger(self) -> Sink:
        return open_sink(self.url.replace(":pillarbox@", ":not-the-password@"))

    def refused_by_server(self, name: str, key: str | None = None) -> Claim:
        return named_claim(name, key, type="forbidden")

    def go_down(self) -> None:
        """End the server in order: it acknowledges before it saves, so a killed one forgets what it had taken."""
        assert self.server is not None
        self.subscriber.leave()
        self.server.stop()

    def come_back(self) -> None:
        super().come_back()
        self.subscriber.connect()

    def received(self) -> list[Received]:
        return [
            Received(each.body, each.user, each.content_type, each.user.get("event-key"))
            for each in self.subscriber.read()
        ]

    def dispose(self) -> None:
        self.subscriber.end()
