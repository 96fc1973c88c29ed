"""NATS JetStream, read over a plain socket: a stream's messages by their sequence, with data and headers as stored."""

from __future__ import annotations

import json
import socket
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pillarbox.event import Claim
from pillarbox.sinks import Sink, open_sink
from tests.brokers import BrokerName
from tests.contract.broker_kits import BROKER, BrokerKit, Received, named_claim

_PIPELINE = 500


class NatsKit(BrokerKit):
    broker: ClassVar[BrokerName] = "nats"
    features: ClassVar[frozenset[str]] = BROKER | {"takes once"}

    def prepare(self) -> None:
        make_stream(self.url, self.place, subjects=[f"{self.place}.order.>"])

    def make_sink(self, **options: Any) -> Sink:
        return open_sink(self.url, **{"subject": f"{self.place}.{{type}}", "name": "nats", **options})

    def make_stranger(self) -> Sink:
        return open_sink(self.url.replace(":pillarbox@", ":not-the-password@"))

    def refused_by_server(self, name: str, key: str | None = None) -> Claim:
        return named_claim(name, key, type="elsewhere")

    def received(self) -> list[Received]:
        return [
            Received(body, headers, headers.get("content-type"), headers.get("event-key"))
            for body, headers, _ in read_stream(self.url, self.place)
        ]

    def dispose(self) -> None:
        ask(self.url, f"STREAM.DELETE.{self.place}")


def make_stream(url: str, name: str, *, subjects: Sequence[str], **settings: Any) -> None:
    config = {"name": name, "subjects": list(subjects), "storage": "file", "retention": "limits", **settings}
    answer = ask(url, f"STREAM.CREATE.{name}", config)
    assert "error" not in answer, answer


def read_stream(url: str, name: str) -> list[tuple[bytes, dict[str, str], str]]:
    """Body, headers and subject of every message of a stream, in the order they were stored."""
    with connect(url) as client:
        state = client.ask(f"STREAM.INFO.{name}")["state"]
        numbers = range(state["first_seq"], state["last_seq"] + 1) if state["messages"] else range(0)
        answers = client.ask_many([(f"STREAM.MSG.GET.{name}", {"seq": number}) for number in numbers])
    return [_read(answer["message"]) for answer in answers]


def _read(message: dict[str, Any]) -> tuple[bytes, dict[str, str], str]:
    lines = b64decode(message.get("hdrs", "")).decode().split("\r\n")[1:]
    headers = dict(line.split(": ", 1) for line in lines if line)
    return b64decode(message.get("data", "")), headers, message["subject"]


def ask(url: str, subject: str, request: Any = None) -> Any:
    with connect(url) as client:
        return client.ask(subject, request)


@contextmanager
def connect(url: str) -> Iterator[RawClient]:
    parts = urlsplit(url)
    with socket.create_connection((str(parts.hostname), parts.port or 4222), timeout=30) as connection:
        yield RawClient(connection, {"user": parts.username, "pass": parts.password})


class RawClient:
    """As much of the protocol as requests to JetStream need."""

    def __init__(self, connection: socket.socket, login: dict[str, Any]) -> None:
        self._stream = connection.makefile("rwb")
        options = {"verbose": False, "headers": True, "no_responders": True, "protocol": 1, **login}
        self._write(f"CONNECT {json.dumps(options)}\r\nSUB _INBOX.kit.{id(self)}.* 1\r\nPING\r\n".encode())
        self._stream.flush()
        while (line := self._stream.readline()) != b"PONG\r\n":
            assert not line.startswith(b"-ERR"), line

    def ask(self, subject: str, request: Any = None) -> Any:
        return self.ask_many([(subject, request)])[0]

    def ask_many(self, requests: list[tuple[str, Any]]) -> list[Any]:
        answers: dict[int, Any] = {}
        for start in range(0, len(requests), _PIPELINE):
            chunk = requests[start : start + _PIPELINE]
            for number, (subject, request) in enumerate(chunk, start=start):
                body = b"" if request is None else json.dumps(request).encode()
                self._write(f"PUB $JS.API.{subject} _INBOX.kit.{id(self)}.{number} {len(body)}\r\n".encode())
                self._write(body + b"\r\n")
            self._stream.flush()
            while len(answers) < start + len(chunk):
                self._read_answer(answers)
        return [answers[number] for number in range(len(requests))]

    def _read_answer(self, answers: dict[int, Any]) -> None:
        line = self._stream.readline().decode()
        assert line, "the server closed the connection"
        assert not line.startswith("-ERR"), line
        words = line.split()
        if words == ["PING"]:
            self._write(b"PONG\r\n")
            self._stream.flush()
        if words[0] == "MSG":
            body = self._stream.read(int(words[-1]) + 2)[:-2]
            answers[int(words[1].rpartition(".")[2])] = json.loads(body)
        assert words[0] in ("MSG", "PING", "PONG", "INFO"), line

    def _write(self, data: bytes) -> None:
        self._stream.write(data)
