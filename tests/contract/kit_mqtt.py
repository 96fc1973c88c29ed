"""MQTT topics, read over a plain socket or with mosquitto_sub, and a server that says what a test tells it to."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit
from uuid import uuid4

from pillarbox.event import Claim
from pillarbox.sinks import Sink, open_sink
from tests.brokers import BrokerName
from tests.contract.broker_kits import BrokerKit, Received, named_claim
from tests.servers import miss


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


class Program:
    """A session of mosquitto_sub: the server collects from the start on, `read` waits for so many messages and ends it.

    It can wait for a number of messages, not for a marker: a test that wants to know that nothing else came needs the
    `Subscriber`.
    """

    def __init__(self, url: str, topic: str) -> None:
        if shutil.which("mosquitto_sub") is None:
            miss("the program mosquitto_sub is not on this machine: tools/services start mosquitto")
        parts = urlsplit(url)
        self._command = ["mosquitto_sub", "-h", str(parts.hostname), "-p", str(parts.port), "-u", str(parts.username)]
        self._command += ["-P", str(parts.password), "-V", "mqttv5", "-q", "1", "-t", topic]
        self._command += ["-c", "-i", f"program{uuid4().hex}"]
        self._run("-x", "600", "-E")  # returns when it is subscribed

    def read(self, count: int) -> list[Published]:
        # The payload as hexadecimal digits: in the JSON it is a text.
        lines = self._run("-x", "0", "-C", str(count), "-W", "60", "-F", "%x %j").split("\n")
        return [self._parse(*line.split(" ", 1)) for line in lines if line]

    def _parse(self, body: str, about: str) -> Published:
        found = json.loads(about)
        properties = found["properties"]
        return Published(
            topic=found["topic"],
            body=bytes.fromhex(body),
            qos=found["qos"],
            is_retained=bool(found["retain"]),
            user=properties["user-properties"],
            content_type=properties["content-type"],
            expiry=properties.get("message-expiry-interval"),
        )

    def _run(self, *options: str) -> str:
        command = [*self._command, *options]
        return subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=90).stdout


def acknowledge(identifier: bytes, code: int = 0) -> bytes:
    return b"\x40\x03" + identifier + bytes([code])


def disconnect(code: int) -> bytes:
    return bytes([0xE0, 1, code])


@asynccontextmanager
async def scripted_server(
    answer: Callable[[str, bytes], bytes | None], *, greeting: bytes = b"\x20\x03\0\0\0"
) -> AsyncIterator[str]:
    """A server that says `answer(topic, identifier)` to each message of QoS 1; None or DISCONNECT ends the connection.

    A greeting other than the usual one ends it as well.
    """
    served: list[tuple[asyncio.Task[Any] | None, asyncio.StreamWriter]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append((asyncio.current_task(), writer))
        try:
            await _read_packet(reader)
            writer.write(greeting)
            goes_on = greeting[3] == 0
            while goes_on:
                first, body = await _read_packet(reader)
                if first == 0xE0:
                    break
                topic, at = _read_text(body, 0)
                said = answer(topic, body[at : at + 2])
                writer.write(said or b"")
                goes_on = said is not None and not said.startswith(b"\xe0")
            writer.write_eof()
            # What is still to come is read: a socket closed before would take back what was said.
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client is gone
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"mqtt://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for _, writer in served:
            writer.transport.abort()
        await asyncio.gather(*(task for task, _ in served if task is not None))
        await server.wait_closed()


async def _read_packet(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    (first,) = await reader.readexactly(1)
    length = shift = 0
    while True:
        (byte,) = await reader.readexactly(1)
        length |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return first, await reader.readexactly(length)


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
    falls_silent: ClassVar[bool] = False
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
