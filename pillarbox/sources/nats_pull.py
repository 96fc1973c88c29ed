"""Pulling messages from a JetStream consumer: one request at a time, for as many messages as there is room for."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from functools import partial
from typing import Any, Final

from nats.aio.client import Client
from nats.aio.msg import Msg

from pillarbox.sinks.nats_connection import Connection, Lost

# How long a request waits at the server for messages.
EXPIRES: Final = 1.0
# By then it is over, also when the server says nothing, as it does of a request that expires unnoticed.
_OVER: Final = EXPIRES + 0.3
_PAUSE: Final = 0.2
_NO_MESSAGES: Final = frozenset({"404", "408"})
_FINAL: Final = ("deleted", "push based")


class Pull:
    """The messages of one consumer, as they arrive on one connection.

    A request stays with the server until it is answered in full or expires. What arrives meanwhile is never more than
    was asked for, and is kept here until it is taken.
    """

    def __init__(self, connection: Connection, subject: str, *, timeout: float) -> None:
        self._connection = connection
        self._subject = subject
        self._timeout = timeout
        self._inbox = connection.client.new_inbox()
        self._subscription: Any = None
        self._number = 0
        self._open = 0
        self._asked_at = 0.0
        self._heard_at = time.monotonic()
        self._not_before = 0.0
        self._messages: list[Msg] = []
        self._news = asyncio.Event()
        self._failure: Lost | None = None

    async def start(self) -> None:
        client = self._connection.client
        # A subject may be any bytes; the client's own reader would end over one that is no text.
        client._build_message = partial(_build_message, client)  # type: ignore[method-assign]
        # Without limits of its own: the requests bound it, and what the client drops would come again much later.
        self._subscription = await client.subscribe(
            f"{self._inbox}.*", cb=self._take, pending_msgs_limit=0, pending_bytes_limit=0
        )

    async def next(self, most: int, timeout: float) -> list[Msg]:
        """Return what arrived, none when nothing came in time; raises `Lost`."""
        self._check()
        if not self._is_asking and most > 0 and time.monotonic() >= self._not_before:
            await self.ask(most)
        self._news.clear()
        if not self._messages:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._news.wait()
        self._check()
        return self.take_all()

    def take_all(self) -> list[Msg]:
        messages, self._messages = self._messages, []
        return messages

    async def stop(self) -> list[Msg]:
        """Ask for nothing more; returns what had been sent by then.

        There is no way to take a request back. JetStream 2.9 mistakes what is given back while a request without a
        listener waits: it comes again much later, and newer messages twice. So the last request must end first.
        """
        while self._is_asking and self._failure is None and self._connection.lost is None:
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE):
                    await self._news.wait()
        await self._subscription.drain()
        return self.take_all()

    @property
    def _is_asking(self) -> bool:
        return self._open > 0 and time.monotonic() - self._asked_at < _OVER

    async def ask(self, most: int) -> None:
        if not self._open:
            # From here on there is something to hear; what was not heard while nothing was asked says nothing.
            self._heard_at = time.monotonic()
        self._number += 1
        self._open = most
        self._asked_at = time.monotonic()
        request = {"batch": most, "expires": int(EXPIRES * 1e9)}
        await self._connection.client.publish(
            self._subject, json.dumps(request).encode(), reply=f"{self._inbox}.{self._number}"
        )

    async def _take(self, message: Msg) -> None:
        self._heard_at = time.monotonic()
        # A message has its own subject; what the server says of a request comes on the request's.
        if not message.subject.startswith(self._inbox):
            self._open -= 1
            self._messages.append(message)
        elif message.subject.endswith(f".{self._number}"):
            self._end_request(message.headers or {})
        self._news.set()

    def _end_request(self, said: dict[str, str]) -> None:
        self._open = 0
        status, text = said.get("Status", ""), said.get("Description", "")
        if status in _NO_MESSAGES:
            return
        if status == "409" and not any(word in text.lower() for word in _FINAL):
            self._not_before = time.monotonic() + _PAUSE
            return
        reason = "nobody serves the consumer now" if status == "503" else f"{text} (status {status})"
        self._failure = Lost(f"the consumer gives no messages: {reason}")

    def _check(self) -> None:
        if self._connection.lost is not None:
            raise self._connection.lost
        if self._failure is not None:
            raise self._failure
        if self._open and time.monotonic() - self._heard_at > EXPIRES + self._timeout:
            raise Lost(f"JetStream did not answer a request for messages within {EXPIRES + self._timeout:g} s")


def _build_message(client: Client, sid: int, subject: bytes, reply: bytes, data: bytes, headers: Any) -> Msg:
    text = subject.decode(errors="surrogateescape")
    return Msg(_client=client, subject=text, reply=reply.decode(), data=data, headers=headers, _sid=sid)
