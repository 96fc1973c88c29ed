"""A small HTTP server on plain sockets, which shares nothing with the sink's client.

In a test's own event loop (`serve`) it answers as the test says and keeps the requests. As a program it takes events,
writes each to a file before it answers, and can be killed and started again on its port with what it had stored.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    lines: list[tuple[str, str]]
    body: bytes

    @property
    def headers(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.lines}


Answer = tuple[int, dict[str, str], bytes]
Respond = Callable[[Request], "Answer | Awaitable[Answer | None] | None"]
"""Status, headers and body; None closes the connection without an answer."""


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *rest = head.removesuffix("\r\n\r\n").split("\r\n")
    method, target, _ = first.split(" ")
    lines = [(name, value.strip()) for name, _, value in (line.partition(":") for line in rest)]
    length = next((int(value) for name, value in lines if name.lower() == "content-length"), 0)
    return Request(method, target, lines, await reader.readexactly(length))


async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, respond: Respond) -> None:
    """Answer the requests of one connection until it ends."""
    try:
        while (request := await _read_request(reader)) is not None:
            answer = respond(request)
            if isinstance(answer, Awaitable):
                answer = await answer
            if answer is None:
                return
            status, headers, body = answer
            lines = [f"{name}: {value}" for name, value in {"content-length": len(body), **headers}.items()]
            writer.write("\r\n".join([f"HTTP/1.1 {status} Answer", *lines, "", ""]).encode("latin-1") + body)
            await writer.drain()
            if headers.get("connection") == "close":
                return
    except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
        pass
    finally:
        writer.close()
        with suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


class Server:
    """A server in this event loop; `requests` is what it was sent and `connections` how often it was connected to."""

    def __init__(self, respond: Respond) -> None:
        self.respond = respond
        self.requests: list[Request] = []
        self.connections = 0
        self.port = 0
        self._talks: set[asyncio.Task[None]] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        with suppress(asyncio.CancelledError):
            await talk(reader, writer, self._note)

    def _note(self, request: Request) -> Any:
        self.requests.append(request)
        return self.respond(request)

    async def end_talks(self) -> None:
        for task in self._talks:
            task.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)


def take_all(request: Request) -> Answer:
    return 204, {}, b""


@asynccontextmanager
async def serve(
    respond: Respond = take_all, *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    """Serve on a free port of this machine."""
    made = Server(respond)
    listening = await asyncio.start_server(made.accept, host, port, ssl=tls, limit=2**21)
    made.port = listening.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        listening.close()
        await made.end_talks()
        await listening.wait_closed()


# -- as a program ----------------------------------------------------------------------------------------------------


class ServerProcess:
    """The program in a process of its own, and what it has stored."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "received.jsonl"
        self._file.touch()
        self.port = 0
        self._process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.contract.http_server", str(self.port), str(self._file)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self.wait()

    def wait(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        self._process.wait()
        self._process.stdout.close()

    def received(self) -> list[Request]:
        found = [json.loads(line) for line in self._file.read_text().splitlines()]
        return [
            Request(each["method"], each["target"], each["lines"], base64.b64decode(each["body"])) for each in found
        ]


def _list_types(request: Request) -> list[str]:
    if request.headers.get("content-type") == "application/cloudevents-batch+json":
        return [each["type"] for each in json.loads(request.body)]
    return [request.headers.get("event-type", "")]


async def _run(port: int, path: str) -> None:
    # What write(2) took outlives a SIGKILL of the process.
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    deadly = [b"never"]

    def respond(request: Request) -> Answer:
        if request.target.startswith("/die-at/"):
            deadly[0] = b'"name":"' + request.target.removeprefix("/die-at/").encode() + b'"'
            return 204, {}, b""
        if deadly[0] in request.body:
            os.kill(os.getpid(), signal.SIGKILL)
        if "refused" in _list_types(request):
            return 422, {}, b"type refused is not taken here"
        stored = {
            "method": request.method,
            "target": request.target,
            "lines": request.lines,
            "body": base64.b64encode(request.body).decode(),
        }
        os.write(file, json.dumps(stored).encode() + b"\n")
        return 200, {}, b""

    server = await asyncio.start_server(partial(talk, respond=respond), "127.0.0.1", port, limit=2**21)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_run(int(sys.argv[1]), sys.argv[2]))
