"""One connection to NATS, and the windows of messages that wait on it for JetStream's acknowledgements.

A message carries a reply subject of its own under one inbox, which matches the answer to it. The client never
reconnects by itself: what it had not sent yet would go out after the claims were given back. A connection that is lost,
or that did not answer in time, is dropped with everything in its buffers, and the sink makes another.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any, Final, NamedTuple, TypeVar

from pillarbox.errors import MissingExtra
from pillarbox.retry import describe_error
from pillarbox.sinks.nats_message import NatsMessage

try:
    import nats.errors
    from nats.aio.client import Client
    from nats.js import JetStreamContext
except ImportError as error:
    raise MissingExtra("NATS", "nats") from error

T = TypeVar("T")

# So many messages are made before the server gets them.
_PUSH: Final = 50
_STORED: Final = b'{"stream":'
_UNHEARD: Final = b"NATS/1.0 503"
_FORBIDDEN: Final = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"', re.IGNORECASE)


class Lost(Exception):
    """The connection cannot be used any more, for this reason."""


class Window:
    """Messages of one batch on their way: which are stored, which got another answer, how many wait."""

    def __init__(self) -> None:
        self.stored: list[int] = []
        self.answers: dict[int, Answer | Forbidden] = {}
        self.waiting = 0
        self._settled: asyncio.Future[None] | None = None
        self._lost: Lost | None = None

    async def wait(self) -> None:
        """Return when every message has its answer; raises `Lost`."""
        if self._lost is not None:
            raise self._lost
        if self.waiting:
            self._settled = asyncio.get_running_loop().create_future()
            await self._settled

    def settle_one(self) -> None:
        self.waiting -= 1
        if not self.waiting and self._settled is not None and not self._settled.done():
            self._settled.set_result(None)

    def fail(self, reason: Lost) -> None:
        self._lost = reason
        if self._settled is not None and not self._settled.done():
            self._settled.set_exception(reason)


class Answer(NamedTuple):
    """What was answered instead of an acknowledgement; `is_unheard` when nobody listens to the subject."""

    data: bytes
    is_unheard: bool


class Forbidden(NamedTuple):
    """The server's word that this user may not publish to the subject."""

    subject: str


class _Client(Client):
    """The client with what its public methods lack.

    Its `publish` makes the header anew line by line: with our few headers that is most of a message's cost.
    """

    def __init__(self, on_answer: Callable[[bytes, bytes, bytes], None]) -> None:
        super().__init__()
        self.on_answer = on_answer
        self.answers_sid = 0
        self.error_line = ""

    async def listen(self, subject: str) -> None:
        """Give what arrives on the subject to `on_answer`."""
        subscription = await self.subscribe(subject)
        self.answers_sid = subscription._id

    def is_encrypted(self) -> bool:
        return bool(self._server_info.get("tls_required"))

    def put(self, command: bytes) -> None:
        """Put a command behind those to be sent; `push` sends them."""
        self._pending.append(command)
        self._pending_data_size += len(command)

    def push(self) -> None:
        """Send what was put at once, not when the client's own task comes round: the server can begin meanwhile."""
        if self._pending and self._transport is not None:
            self._transport.writelines(self._pending)
            self._pending = []
            self._pending_data_size = 0

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        # Answers need no message object, queue and task of their own: that is half of what receiving one costs.
        if sid == self.answers_sid:
            self.on_answer(subject, data, headers)
        else:
            await super()._process_msg(sid, subject, reply, data, headers)

    async def _process_err(self, err_msg: str) -> None:
        # It comes in small letters, in which two subjects may look alike; the parser's buffer still begins with it.
        self.error_line = self._ps.buf.partition(b"\r\n")[0].decode()
        await super()._process_err(err_msg)

    async def _process_op_err(self, e: Exception) -> None:
        # It would write its buffer to the lost connection, fail, and tell nobody.
        self.abort()
        await super()._process_op_err(e)

    def abort(self) -> None:
        """Break the connection without sending what waits in the buffers."""
        self._pending.clear()
        self._pending_data_size = 0
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        # There is nothing left to close; after a failed handshake the client would wait for that for ever.
        self._transport = None


class Connection:
    """A connected client and what waits on it. Made by `connect`; of no use any more once `lost` is set.

    `api` is the prefix of the subjects on which JetStream takes requests.
    """

    def __init__(self, *, api: str) -> None:
        self.client = _Client(self._on_answer)
        self.lost: Lost | None = None
        self._api = api
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting: dict[str, tuple[Window, int, str]] = {}
        self._numbers = count(1)
        self._inbox = ""
        self._last_error: BaseException | None = None

    async def connect(self, servers: list[str], options: Mapping[str, Any], *, is_secure: bool) -> None:
        """Connect and subscribe to the answers; raises what the client raises, and leaves nothing open then."""
        given = dict(options)
        if is_secure:
            # The client falls back to plain text when the server offers no TLS: no secret may be said then.
            for name in ("user", "password", "token"):
                if given.get(name) is not None:
                    given[name] = self._guard(given[name])
        try:
            await self.client.connect(
                servers,
                **{"name": "pillarbox", "max_reconnect_attempts": 1, **given},
                reconnect_time_wait=0,
                allow_reconnect=False,
                pending_size=0,
                error_cb=self._on_error,
                closed_cb=self._on_close,
            )
            if is_secure and not self.client.is_encrypted():
                raise nats.errors.SecureConnWantedError
            self._inbox = f"{self.client.new_inbox()}."
            await self.client.listen(f"{self._inbox}*")
        except nats.errors.NoServersError as error:
            await self.drop(Lost(describe_error(self._last_error or error)))
            raise Lost(describe_error(self._last_error or error)) from error
        except BaseException as error:
            await self.drop(Lost(describe_error(error)))
            raise

    async def ask(self, make_request: Callable[[JetStreamContext], Awaitable[T]], *, timeout: float) -> T:
        """Ask JetStream; raises `Lost` as soon as there is no connection any more to answer."""
        context = self.client.jetstream(prefix=self._api, timeout=timeout)
        request = asyncio.ensure_future(make_request(context))
        try:
            waits: set[asyncio.Future[Any]] = {request, self._gone}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                return await request
            raise self.lost or Lost("closed")
        finally:
            request.cancel()

    def put(self, window: Window, position: int, message: NatsMessage) -> None:
        """Put one message behind those to be sent; its answer goes to the window."""
        if self.lost is not None:
            raise self.lost
        subject, head, body = message
        number = str(next(self._numbers))
        self._waiting[number] = (window, position, subject)
        window.waiting += 1
        size = len(head)
        line = f"HPUB {subject} {self._inbox}{number} {size} {size + len(body)}\r\n"
        self.client.put(b"".join((line.encode(), head, body, b"\r\n")))
        if not window.waiting % _PUSH:
            self.client.push()

    async def wait(self, window: Window) -> None:
        """Send what was put, and return when every message of the window has its answer; raises `Lost`."""
        self.client.push()
        await window.wait()

    def forget(self, window: Window) -> bool:
        """Wait no more for the window's answers; returns whether any was missing."""
        for number in [number for number, entry in self._waiting.items() if entry[0] is window]:
            del self._waiting[number]
        return window.waiting > 0

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    async def drop(self, reason: Lost) -> None:
        """Break the connection; nothing that was not sent yet is sent. Whoever waits gets the reason."""
        self._lose(reason)
        self.client.abort()
        await self.close()

    async def close(self) -> None:
        self._lose(Lost("closed"))
        with suppress(OSError, nats.errors.Error):
            await self.client.close()
        # The client has cancelled its tasks: let them end.
        await asyncio.sleep(0)

    def _on_answer(self, subject: bytes, data: bytes, headers: bytes | None) -> None:
        found = self._waiting.pop(subject[len(self._inbox) :].decode(), None)
        if found is None:
            return
        window, position, _ = found
        if data.startswith(_STORED) and b'"error"' not in data:
            window.stored.append(position)
        else:
            window.answers[position] = Answer(data, is_unheard=not data and _UNHEARD in (headers or b""))
        window.settle_one()

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error
        match = _FORBIDDEN.search(str(error))
        if match is None:
            return
        action, subject = match.groups()
        if action == "subscription":
            await self.drop(Lost(f"{describe_error(error)}: acknowledgements cannot be heard; see option inbox_prefix"))
        elif subject.startswith(self._api.lower() + "."):
            # The answer to our request would never come.
            await self.drop(Lost(describe_error(error)))
        elif (told := _FORBIDDEN.search(self.client.error_line)) is not None:
            self._forbid(told[2])

    def _forbid(self, subject: str) -> None:
        for number in [number for number, entry in self._waiting.items() if entry[2] == subject]:
            window, position, _ = self._waiting.pop(number)
            window.answers[position] = Forbidden(subject)
            window.settle_one()

    async def _on_close(self) -> None:
        self._lose(Lost(describe_error(self.client.last_error or self._last_error or ConnectionError("closed"))))

    def _lose(self, reason: Lost) -> None:
        if self.lost is not None:
            return
        self.lost = reason
        self._gone.set_result(None)
        for window in {id(window): window for window, _, _ in self._waiting.values()}.values():
            window.fail(reason)
        self._waiting.clear()

    def _guard(self, secret: Any) -> Any:
        def tell() -> str:
            if not self.client.is_encrypted():
                raise nats.errors.SecureConnWantedError
            return str(secret() if callable(secret) else secret)

        return tell
