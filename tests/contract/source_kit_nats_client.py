"""Publishes to JetStream over a plain socket, with headers of any bytes."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

Message = tuple[str, bytes, Mapping[str, str | bytes]]
"""Subject, body and headers."""


def publish(url: str, messages: Sequence[Message]) -> None:
    """Publish them in order; returns when the stream has them all."""
    parts = urlsplit(url)
    login = {"user": parts.username, "pass": parts.password}
    with socket.create_connection((str(parts.hostname), parts.port or 4222), timeout=30) as connection:
        stream = connection.makefile("rwb")
        options = {"verbose": False, "headers": True, "no_responders": True, "protocol": 1, **login}
        stream.write(f"CONNECT {json.dumps(options)}\r\nSUB _INBOX.kit.{id(messages)} 1\r\n".encode())
        for subject, body, headers in messages:
            head = b"NATS/1.0\r\n" + b"".join(_line(name, value) for name, value in headers.items()) + b"\r\n"
            sizes = f"{len(head)} {len(head) + len(body)}"
            line = f"HPUB {subject} _INBOX.kit.{id(messages)} {sizes}\r\n".encode(errors="surrogateescape")
            stream.write(line + head + body + b"\r\n")
        stream.flush()
        for _ in messages:
            answer = _read_answer(stream)
            assert "error" not in answer, answer


def _line(name: str, value: str | bytes) -> bytes:
    return name.encode() + b": " + (value.encode() if isinstance(value, str) else value) + b"\r\n"


def _read_answer(stream: Any) -> dict[str, Any]:
    while True:
        words = stream.readline().decode().split()
        assert words, "the server closed the connection"
        assert words[0] in ("MSG", "PING", "INFO"), words
        if words[0] == "PING":
            stream.write(b"PONG\r\n")
            stream.flush()
        if words[0] == "MSG":
            found: dict[str, Any] = json.loads(stream.read(int(words[-1]) + 2)[:-2])
            return found
